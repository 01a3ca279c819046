"""An imported configuration beside its job: what ``rlperf export`` takes along of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlperf.errors import Problem, SpecError
from rlperf.frameworks.adapter import Source
from rlperf.specs.reader import read_document


@dataclass(frozen=True)
class Carried:
    """An imported configuration beside its job: framework, version, every key, and the job's name of its checkpoint."""

    framework: str
    version: str
    source: Source
    architecture: str = ""


def carried_keys(path: Path | str) -> Carried | None:
    """What ``rlperf import`` found beside what a job can say: ``<job>.keys.yaml``, where it exists."""
    beside = keys_file(path)
    if not beside.is_file():
        return None
    data = read_document(beside).data
    if not isinstance(data, dict):
        raise SpecError(Problem("holds no keys", str(beside)))
    source = Source(
        dict(data.get("keys") or {}),
        entry=str(data.get("entry") or ""),
        bases=tuple(data.get("bases") or ()),
        additions=frozenset(data.get("additions") or ()),
        launcher=dict(data.get("launcher") or {}),
    )
    return Carried(str(data.get("framework", "")), str(data.get("version", "")), source, data.get("architecture") or "")


def keys_file(path: Path | str) -> Path:
    """Where the imported keys of a job file stand.

    >>> keys_file("run/job.yaml").name
    'job.keys.yaml'
    """
    return Path(path).with_suffix(".keys.yaml")
