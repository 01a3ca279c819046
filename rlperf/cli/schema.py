"""``rlperf schema``: JSON schemas of the stable interfaces, for editors and programs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rlperf.cli.output import write_json
from rlperf.errors import SpecError, did_you_mean

NAMES = ("job", "sweep", "plan", "predict", "validate", "cluster", "device", "architecture")


def schema_of(name: str) -> dict[str, Any]:
    """JSON schema of one interface: what the user writes (job, sweep) or rlperf answers (plan, predict, validate)."""
    from pydantic import BaseModel

    from rlperf.plan.answer.plan import Plan, PredictReport
    from rlperf.specs.architecture import Architecture
    from rlperf.specs.cluster import Cluster, Device
    from rlperf.specs.job import Job
    from rlperf.sweep.spec import Sweep

    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"rlperf {name}"}
    if name == "validate":
        return {**_validation_schema(), **head}
    kinds: dict[str, type[BaseModel]] = {
        "job": Job, "plan": Plan, "predict": PredictReport, "cluster": Cluster, "device": Device,
        "architecture": Architecture, "sweep": Sweep,
    }  # fmt: skip
    if name not in kinds:
        raise SpecError(f"there is no schema named {name!r} ({did_you_mean(name, NAMES) or ', '.join(NAMES)})")
    mode = "serialization" if name in ("plan", "predict") else "validation"
    found = kinds[name].model_json_schema(mode=mode)  # type: ignore[arg-type]
    return {**found, **head}


def _validation_schema() -> dict[str, Any]:
    from pydantic import TypeAdapter

    from rlperf.calibrate.validate import SCHEMA_VERSION, Report

    found = TypeAdapter(Report).json_schema(mode="serialization")
    found["properties"] = {"schema_version": {"const": SCHEMA_VERSION}, **found["properties"]}
    return {**found, "required": ["schema_version", *found["required"]]}


def schema(name: Annotated[str, typer.Argument(help=", ".join(NAMES))]) -> None:
    """JSON schema of a file that rlperf reads or writes.

    Example: rlperf schema job > job.schema.json
    """
    write_json(schema_of(name))
