"""``rlperf schema``: JSON schemas of the stable interfaces, for editors and programs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rlperf.cli.output import print_json
from rlperf.errors import SpecError, did_you_mean

NAMES = ("job", "plan", "predict", "cluster", "device", "architecture")


def schema_of(name: str) -> dict[str, Any]:
    """JSON schema of one interface: what the user writes (job, cluster ...) or what rlperf answers (plan, predict)."""
    from pydantic import BaseModel

    from rlperf.plan.plan import Plan, Prediction
    from rlperf.specs.architecture import Architecture
    from rlperf.specs.cluster import Cluster, Device
    from rlperf.specs.job import Job

    kinds: dict[str, type[BaseModel]] = {
        "job": Job, "plan": Plan, "predict": Prediction, "cluster": Cluster, "device": Device,
        "architecture": Architecture,
    }  # fmt: skip
    if name not in kinds:
        raise SpecError(f"there is no schema named {name!r} ({did_you_mean(name, NAMES) or ', '.join(NAMES)})")
    mode = "serialization" if name in ("plan", "predict") else "validation"
    found = kinds[name].model_json_schema(mode=mode)  # type: ignore[arg-type]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"rlperf {name}", **found}


def schema(name: Annotated[str, typer.Argument(help=", ".join(NAMES))]) -> None:
    """JSON schema of a file that rlperf reads or writes.

    Example: rlperf schema job > job.schema.json
    """
    print_json(schema_of(name))
