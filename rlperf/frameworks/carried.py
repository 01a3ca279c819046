"""An imported configuration beside its job: what ``rlperf export`` takes along of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rlperf.errors import Problem, SpecError
from rlperf.frameworks.adapter import Source
from rlperf.frameworks.hub import architecture_at
from rlperf.frameworks.run import Run, ref
from rlperf.specs.reader import read_document

_BEYOND_A_JOB = (ref("run.recipe"), ref("run.model_script"))
"""What an imported configuration says that its job does not; it stays as it was."""


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


def as_imported(run: Run, before: Run, carried: Carried) -> Run:
    """The run of a job with what its configuration said of it (``before``) and a job cannot, where both are of one.

    Prompts behind the last whole update are, to a job, groups that are rolled out and not trained on.
    """
    run = run.having({at: before.value(at) for at in _BEYOND_A_JOB if run.value(at) is None})
    ours, theirs = run.batch, before.batch
    generated = theirs.generated_prompts or theirs.prompts
    if theirs.left_over and (ours.prompts, ours.generated_prompts) == (theirs.trained, generated):
        whole = replace(ours, prompts_per_step=theirs.prompts, generated_prompts=theirs.generated_prompts)
        run = replace(run, batch=replace(whole, left_over=theirs.left_over))
    if architecture_at(run.architecture) in (carried.architecture, architecture_at(before.architecture)):
        return replace(run, architecture=before.architecture)
    return replace(run, model_script=None)
