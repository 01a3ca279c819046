"""Jobs that ship by name: models and clusters that people ask for most, with everything else left to the planner."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from rlperf.errors import Problem, SpecError, did_you_mean
from rlperf.specs.job import Job
from rlperf.specs.reader import read_document
from rlperf.specs.short_job import short_job

FILE = Path(__file__).resolve().parent / "jobs" / "presets.yaml"


@cache
def preset_rows() -> dict[str, dict[str, Any]]:
    """Arguments of `short_job` by the name of the job."""
    return {str(name): dict(row) for name, row in read_document(FILE).data.items()}


def preset(name: str, **values: Any) -> Job:
    """A shipped job; ``values`` go before its own arguments.

    Raises
    ------
    SpecError : no such name

    >>> preset("qwen3-32b-32xh100").nodes, preset("qwen3-32b-32xh100", framework="slime").framework
    (4, 'slime')
    """
    rows = preset_rows()
    if name not in rows:
        hint = did_you_mean(name, rows) or "`rlperf profiles list jobs` names them"
        raise SpecError(Problem(f"there is no job named {name!r}", suggestion=hint))
    return short_job(**{**rows[name], **values}).model_copy(update={"name": name})
