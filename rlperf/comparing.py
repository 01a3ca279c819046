"""Which of two is faster, and is it certain? Jobs, plans or frameworks' configurations on the same drawn rl_steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlperf.api import Jobs, Question, ask
from rlperf.errors import Problem, SpecError
from rlperf.frameworks.imports import (
    import_config,
    job_of,
    own_document,
    planned_cluster,
    planned_workload,
    usual_cluster,
    usual_workload,
)
from rlperf.plan import compare
from rlperf.plan.answer import notebook
from rlperf.plan.answer.plan import Plan
from rlperf.plan.compare import JobComparison, Side
from rlperf.sim.rl_step.uncertainty import CALIBRATED
from rlperf.specs.given import as_count, as_path
from rlperf.specs.job import Job
from rlperf.units import human_seconds

if TYPE_CHECKING:
    import polars as pl

STAGES = (*(name.removesuffix("_s") for name in CALIBRATED), "rest")


@dataclass(frozen=True, eq=False)
class ComparedJobs:
    """Two sides under their names.

    Attributes
    ----------
    found : both sides, the ratio of their rl_steps (second over first) with its 5th and 95th percentile, and that of
        device-seconds per trained token
    names : of both sides: their files' as far as these tell them apart, else their jobs'
    files : of both sides; empty where an object was given
    """

    found: JobComparison
    names: tuple[str, str]
    files: tuple[str, str]

    @property
    def sides(self) -> tuple[Side, Side]:
        """Both, as judged; what was taken for them stands in ``filled``."""
        return self.found.first, self.found.second

    @property
    def verdict(self) -> str:
        """Which is faster, in a sentence, or that they cannot be told apart."""
        return self.found.verdict(*self.names)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `rlperf compare --json` prints it."""
        step, token = self.found.step, self.found.device_token
        return {
            "schema_version": 1,
            "verdict": self.verdict,
            "step": {**asdict(step), "apart": step.apart},
            "device_seconds_per_token": {**asdict(token), "apart": token.apart},
            "sides": [_side_dict(file, side) for file, side in zip(self.files, self.sides, strict=True)],
        }

    def to_frame(self) -> pl.DataFrame:
        """One row per side: name, mode, devices, rl_step and its stages [s]."""
        rows = [
            {"name": name, "mode": side.evaluation.configuration.mode, "devices": side.evaluation.configuration.devices,
             "rl_step_s": side.evaluation.rl_step_s, **{f"{stage}_s": seconds for stage, seconds in _stages(side)}}
            for name, side in zip(self.names, self.sides, strict=True)
        ]  # fmt: skip
        return notebook.frame(rows)

    @property
    def head(self) -> tuple[str, ...]:
        """Heads of `cells`."""
        return ("", *self.names, "second / first")

    def cells(self) -> list[tuple[str, ...]]:
        """Every stage, the rl_step and the devices of both."""
        each = [(stage, a, b) for (stage, a), (_, b) in zip(*map(_stages, self.sides), strict=True)]
        rows = [
            (stage.replace("_", " "), human_seconds(a), human_seconds(b), f"{b / a:.2f}" if a > 0 else "")
            for stage, a, b in each
        ]
        a, b = (side.evaluation for side in self.sides)
        ratio = f"{self.found.step.ratio:.2f}"
        devices = (str(a.configuration.devices), str(b.configuration.devices))
        return [*rows, ("rl_step", human_seconds(a.rl_step_s), human_seconds(b.rl_step_s), ratio),
                ("devices", *devices, "")]  # fmt: skip

    def notes(self) -> list[str]:
        """Device-seconds per token, and what was assumed for each side."""
        token = self.found.device_token
        spent = f"device-seconds per trained token: {token.ratio:.2f} ({token.low:.2f} .. {token.high:.2f})"
        named = zip(self.names, self.sides, strict=True)
        return [spent, *(f"assumed in {name}: {text}" for name, side in named for text in side.filled)]

    def __str__(self) -> str:
        return "\n".join([self.verdict, *("  ".join(filter(None, cells)) for cells in self.cells()), *self.notes()])

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes())
        return f"<p><b>{escape(self.verdict)}</b></p>{notebook.table(self.head, self.cells())}{notes}"


def compare_jobs(
    first: Jobs,
    second: Jobs,
    *,
    cluster: str | None = None,
    workload: str | None = None,
    task: str | None = None,
    draws: int = 12,
) -> ComparedJobs:
    """Two jobs, plans or frameworks' configurations on the same drawn rl_steps: which is faster, and is it certain?

    Parameters
    ----------
    first, second : a job or plan (object, dict or file), or the file of a framework's configuration; what one of them
        leaves open is filled in, and of a plan it is what it decided
    cluster, workload : of a framework's configuration; default: what its header says, or the other side's
    task : which one of jobs that have several
    draws : common draws of the prompt groups, at least 3

    Raises
    ------
    SpecError : wrong fields or names, files that nobody can read
    InfeasibleError : one of them cannot be laid out
    """
    draws = as_count(draws, "draws", 3)
    jobs = [_job(each, task) for each in (first, second)]
    if all(jobs) and (cluster or workload):
        words = "cluster and workload are told of a framework's configuration, and both sides are jobs"
        raise SpecError(Problem(words, suggestion="leave them out; a job states its own"))
    a, b = (
        own or _configuration(as_path(given, "job"), other, cluster, workload)
        for given, own, other in zip((first, second), jobs, reversed(jobs), strict=True)
    )
    found = compare.compare_jobs(
        a.question.context, b.question.context, (a.question.facts, b.question.facts), draws=draws
    )
    sides = [
        replace(side, filled=(*own.taken, *side.filled))
        for side, own in ((found.first, a), (found.second, b))
    ]  # fmt: skip
    files = [Path(each) if isinstance(each, str | Path) else None for each in (first, second)]
    names = _names(files[0] or a.question.job.name, files[1] or b.question.job.name)
    named = tuple("" if file is None else str(file) for file in files)
    return ComparedJobs(replace(found, first=sides[0], second=sides[1]), names, (named[0], named[1]))


@dataclass(frozen=True)
class _Asked:
    """A side, and what was taken for it that its file does not say."""

    question: Question
    taken: tuple[str, ...] = ()


def _job(given: Jobs, task: str | None) -> _Asked | None:
    """A job or a plan; None: the file of a framework's configuration."""
    own = isinstance(given, Job | Plan | Mapping) or own_document(as_path(given, "job"))
    return _Asked(ask(given, task=task)) if own else None


def _configuration(path: Path, other: _Asked | None, cluster: str | None, workload: str | None) -> _Asked:
    """A framework's configuration as a resolved job, where none are given on its header's or the other side's cluster,
    and the other's lengths.

    The file of a plan for A100 was compared on the H100 that an import assumes: 88 % faster than its plan.
    """
    job = other.question.context.job if other else None
    lengths = job.tasks[0].workload if job and len(job.tasks) == 1 else None
    beside = {"cluster": job.cluster if job else None, "workload": lengths if isinstance(lengths, str) else None}
    named = {name: value for name, value in beside.items() if value and not Path(value).suffix and "/" not in value}
    imported = import_config([path])
    several = ", ".join(each.name for each in job.tasks) if job and lengths is None else ""
    whose = {"workload": f", where the other's are of {several}"} if several else {}  # no header says their shares
    whose |= dict.fromkeys(named, ", as of the other")
    for name, planned in (("cluster", planned_cluster(imported)), ("workload", planned_workload(imported))):
        if planned:
            named[name], whose[name] = planned, ", as its header says"
    given = {"cluster": cluster, "workload": workload}
    usual = {"cluster": usual_cluster(imported)[0], "workload": usual_workload(imported)[0]}
    values = {name: given[name] or named.get(name) or usual[name] for name in usual}
    taken = tuple(f"{name} {values[name]}{whose.get(name, '')}" for name in usual if given[name] is None)
    return _Asked(ask(job_of(imported, **values, name=path.stem)), taken)


def _stages(side: Side) -> list[tuple[str, float]]:
    """Every stage, the rest last [s]."""
    return list(zip(STAGES, side.stages_s.tolist(), strict=True))


def _side_dict(file: str, side: Side) -> dict[str, Any]:
    configuration = side.evaluation.configuration
    return {
        "file": file,
        "architecture": side.context.tasks[0].architecture.name,
        "mode": configuration.mode,
        "devices": configuration.devices,
        "rl_step_s": side.evaluation.rl_step_s,
        "draws_s": side.draws_s.tolist(),
        "stages_s": dict(_stages(side)),
        "assumed": list(side.filled),
    }


def _names(left: Path | str, right: Path | str) -> tuple[str, str]:
    """Names of both sides; of files their stems, by as many folders more as tell them apart: plans are plan.yaml."""
    if isinstance(left, Path) and isinstance(right, Path):
        for parts in range(1, 1 + min(len(left.parts), len(right.parts))):
            short = [str(Path(*path.with_suffix("").parts[-parts:])) for path in (left, right)]
            if short[0] != short[1]:
                return short[0], short[1]
        return str(left), str(right)
    one, other = (each.stem if isinstance(each, Path) else each for each in (left, right))
    return (one, other) if one != other else ("first", "second")
