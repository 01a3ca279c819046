"""What if? One job and some changes of it, each planned or predicted beside it on the same drawn rl_steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlperf.api import Jobs, ask, job_of, load_job
from rlperf.errors import InfeasibleError, Problem, SpecError
from rlperf.plan.answer import notebook
from rlperf.plan.answer.plan import Plan
from rlperf.plan.answer.whole import WholeStep
from rlperf.plan.compare import Side, compare_weighted, job_of_plan, side_of
from rlperf.plan.judge.value import judged_objective
from rlperf.plan.planner import plan_job
from rlperf.specs.given import as_count
from rlperf.specs.job import Job
from rlperf.specs.objectives import OBJECTIVES
from rlperf.specs.own_files import folder_of
from rlperf.specs.reader import Document, validate
from rlperf.sweep.paths import with_values
from rlperf.told import Tell
from rlperf.units import human_seconds

if TYPE_CHECKING:
    import polars as pl

BASE = "as it is"


@dataclass(frozen=True)
class WhatIfRow:
    """One change: its rl_step [s], and that over the unchanged one with its 5th and 95th percentile [1].

    ``apart``: the two can be told apart. ``why_not``: why there are no numbers; empty where there are.
    """

    name: str
    rl_step_s: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    apart: bool = False
    devices: int = 0
    why_not: str = ""


@dataclass(frozen=True)
class WhatIfTable:
    """The unchanged job first, then every change in the order given."""

    rows: tuple[WhatIfRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"schema_version": 1, "rows": [asdict(row) for row in self.rows]}

    def to_frame(self) -> pl.DataFrame:
        """One row per change."""
        return notebook.frame([asdict(row) for row in self.rows])

    def cells(self) -> list[tuple[str, ...]]:
        """(change, devices, rl_step, against the unchanged one, verdict) of every row, in words."""
        return [_cells(row) for row in self.rows]

    def __str__(self) -> str:
        return "\n".join("  ".join(cell for cell in cells if cell) for cells in self.cells())

    def _repr_html_(self) -> str:
        return notebook.table(HEAD, self.cells())


HEAD = ("change", "devices", "rl_step", "against unchanged", "")


def _cells(row: WhatIfRow) -> tuple[str, ...]:
    if row.rl_step_s is None or row.ratio is None or row.low is None or row.high is None:
        return (row.name, "-", "-", "-", row.why_not)
    step, change = human_seconds(row.rl_step_s), 100.0 * (row.ratio - 1.0)
    if row.name == BASE:
        return (row.name, str(row.devices), step, "", "")
    between = f"{change:+z.1f} % ({100 * (row.low - 1):+z.0f} .. {100 * (row.high - 1):+z.0f} %)"
    verdict = "cannot be told apart" if not row.apart else "slower" if row.ratio > 1.0 else "faster"
    return (row.name, str(row.devices), step, between, verdict)


def what_if(
    job: Jobs | None = None,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    plan: bool = True,
    draws: int = 6,
    folder: Path | None = None,
    **values: Any,
) -> WhatIfTable:
    """A job and changes of it side by side.

    Parameters
    ----------
    changes : a name for each, and the fields that it changes by their dotted paths, as in a sweep:
        ``{"half the cap": {"tasks.*.max_response_tokens": 8192}, "TP4": {"pools.rollout.layout.tensor_parallel": 4}}``
    plan : plan each anew; else what a job leaves open is filled in
    draws : common draws of the prompt groups
    folder : of a job object, as in `rlperf.api.ask`; that of a file is its own
    values : a job without a file, see `rlperf.api.job_of`

    Raises
    ------
    SpecError : changes that name no field of a job, or values that it refuses
    """
    stated = changes.values() if isinstance(changes, Mapping) else () if changes is None else (changes,)
    if not all(isinstance(fields, Mapping) for fields in stated):
        due = '{"half the cap": {"tasks.*.max_response_tokens": 8192}}'
        raise SpecError(Problem(f"what_if: changes by their names are due, {due} (given: {changes!r})"[:200]))
    draws = as_count(draws, "draws")
    base, folder = job_and_folder(job_of(job, values), folder)
    changed = {name: changed_job(base, fields, name) for name, fields in (changes or {}).items()}
    judged = partial(judged_job, draws=draws, plan=plan, folder=folder)
    first = judged(base)
    return WhatIfTable(
        (
            _row(BASE, first, lambda: first),
            *(_row(name, first, partial(judged, each)) for name, each in changed.items()),
        )
    )


@dataclass(frozen=True, eq=False)
class Judged:
    """A job's plan, or what it pins, on common draws.

    Attributes
    ----------
    rl_step_s : of all its tasks [s]
    sides : its phases, and what a second of each is worth in the plan's objective
    """

    rl_step_s: float
    sides: tuple[tuple[float, Side], ...]

    @property
    def longest(self) -> Side:
        """The phase that takes most."""
        return max(self.sides, key=lambda one: one[0] * one[1].evaluation.rl_step_s)[1]

    @property
    def devices(self) -> int:
        """Devices of the phase that takes most of them."""
        return max(side.evaluation.configuration.devices for _, side in self.sides)


def job_and_folder(job: Job | Path, folder: Path | None) -> tuple[Job, Path | None]:
    """A job, and where its names start: the folder of its file, or the one that is given with an object."""
    return load_job(job), folder if isinstance(job, Job) else folder_of(job)


def changed_job(job: Job, fields: Mapping[str, Any], name: str) -> Job:
    """A job with fields replaced by their dotted paths; ``name`` says in messages whose they are.

    Raises
    ------
    SpecError : a path that leads nowhere, or a value that the job refuses
    """
    try:
        moved = with_values(job.stated(), tuple(fields.items()))
    except ValueError as error:
        raise SpecError(f"{name}: {error}") from error
    return validate(Document(moved, {}, name), Job)


def planned(job: Job, *, folder: Path | None = None, report: Tell | None = None) -> Plan:
    """A job's plan, not held against what its framework runs by default."""
    asked = ask(job, folder=folder, to_plan=True)
    return plan_job(asked.context, facts=asked.facts, report=report, remarks=False)


def judged_job(job: Job, draws: int, *, plan: bool = True, folder: Path | None = None) -> Judged:
    """A job's plan (or, without one, what it pins with the rest filled in) on common draws."""
    if plan:
        return judged_plan(planned(job, folder=folder), draws, folder=folder)
    side = side_of(*ask(job, folder=folder).pair, draws)
    return Judged(side.evaluation.rl_step_s, ((1.0, side),))


def judged_plan(plan: Plan, draws: int, *, folder: Path | None = None) -> Judged:
    """The phases of a plan on common draws; what changing between them costs is spread over them."""
    grouped, found = plan.job.horizon.group is not None, []
    for phase in plan.phases:
        context, facts = ask(job_of_plan(plan, phase), folder=folder).pair
        found.append(side_of(context, facts, draws, rl_steps=phase.rl_steps if grouped else None))
    weights = OBJECTIVES[plan.job.objective.minimize].weights(
        [phase.rl_steps[1] - phase.rl_steps[0] + 1 for phase in plan.phases],
        [side.evaluation.demand.useful_tokens for side in found],
    )
    worth = [
        weight * judged_objective(side.context, side.evaluation) / side.evaluation.rl_step_s
        for weight, side in zip(weights, found, strict=True)
    ]
    seconds = [phase.predicted.rl_step_s for phase in plan.phases]
    whole = sum(each * taken for each, taken in zip(worth, seconds, strict=True))
    sides = tuple((each * plan.objective / whole, side) for each, side in zip(worth, found, strict=True))
    return Judged(WholeStep.of(plan).rl_step_s, sides)


def _row(name: str, first: Judged, judged: Callable[[], Judged]) -> WhatIfRow:
    try:
        one = judged()
    except InfeasibleError as error:
        nearest = (error.nearest_miss or "").partition("; ")[0]
        return WhatIfRow(name, why_not=f"{error.message} ({nearest})" if nearest else error.message)
    ratio = compare_weighted(first.sides, one.sides)
    return WhatIfRow(name, one.rl_step_s, ratio.ratio, ratio.low, ratio.high, ratio.apart, one.devices)
