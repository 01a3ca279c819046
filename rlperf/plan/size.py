"""Size: the smallest or cheapest cluster on which a job meets a target."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from rlperf.errors import InfeasibleError, SpecError
from rlperf.plan.answer import notebook
from rlperf.plan.answer.plan import Plan
from rlperf.plan.planner import plan_job
from rlperf.plan.question.context import Context
from rlperf.specs.framework import FrameworkFacts
from rlperf.specs.job import Job
from rlperf.units import parse_quantity

if TYPE_CHECKING:
    import polars as pl

Measure = Literal["step", "usd/step", "run"]
Asked = Callable[[Job], tuple[Context, FrameworkFacts | None]]
_TARGET = re.compile(r"^\s*(step|usd/step|run)\s*<=\s*(.+?)\s*$")


@dataclass(frozen=True)
class SizeTarget:
    """What the cluster has to reach: seconds per rl_step, USD per rl_step, or seconds of the whole run.

    >>> parse_target("step <= 300 s")
    SizeTarget(measure='step', limit=300.0)
    >>> parse_target("usd/step<=5"), parse_target("run <= 3 d").limit
    (SizeTarget(measure='usd/step', limit=5.0), 259200.0)
    """

    measure: Measure
    limit: float

    def value(self, plan: Plan) -> float:
        """The measure of a plan, mean over its phases; of a run what the job states of it, else its horizon's sum."""
        if self.measure == "run" and plan.run is not None:
            return plan.run.total_s
        spans = [phase.rl_steps[1] - phase.rl_steps[0] + 1 for phase in plan.phases]
        if self.measure == "usd/step":
            prices = [phase.predicted.usd_per_step for phase in plan.phases]
            if any(price is None for price in prices):
                raise SpecError("a USD target needs a price per device and hour in the job or cluster")
            return sum((price or 0.0) * n for price, n in zip(prices, spans, strict=True)) / sum(spans)
        seconds = sum(phase.predicted.rl_step_s * n for phase, n in zip(plan.phases, spans, strict=True))
        return seconds if self.measure == "run" else seconds / sum(spans)


def parse_target(text: str) -> SizeTarget:
    """``step<=300s``, ``usd/step<=5`` or ``run<=3d``."""
    match = _TARGET.match(text)
    if match is None:
        raise SpecError(f"target {text!r} is not understood: write 'step<=300s', 'usd/step<=5' or 'run<=3d'")
    measure, amount = match.groups()
    try:
        if measure == "usd/step":
            limit = parse_quantity(amount.removesuffix("USD").removeprefix("$").strip() + " USD", "usd")
        else:
            limit = parse_quantity(amount, "s")
    except ValueError as error:
        raise SpecError(f"target {text!r}: {error}") from error
    if limit <= 0:
        raise SpecError(f"target {text!r}: the limit must be above 0")
    return SizeTarget(measure, limit)  # type: ignore[arg-type]


@dataclass(frozen=True)
class SizeRow:
    """One cluster that was tried: what it reaches (means over the phases), or why it cannot run the job."""

    cluster: str
    nodes: int
    devices: int
    value: float | None
    rl_step_s: float | None
    usd_per_step: float | None
    meets: bool
    note: str = ""


@dataclass(frozen=True)
class Sizing:
    """Every cluster tried, and the best that meets the target (None where none does)."""

    target: SizeTarget
    rows: tuple[SizeRow, ...]
    best: SizeRow | None
    plan: Plan | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `rlperf size --json` prints it."""
        return {
            "schema_version": 1,
            "target": asdict(self.target),
            "rows": [asdict(row) for row in self.rows],
            "best": None if self.best is None else asdict(self.best),
            "plan": None if self.plan is None else self.plan.to_dict(),
        }

    def to_frame(self) -> pl.DataFrame:
        """One row per cluster that was tried."""
        return notebook.frame([asdict(row) for row in self.rows])

    def _repr_html_(self) -> str:
        found = "none" if self.best is None else f"{self.best.nodes} nodes of {self.best.cluster}"
        head = ("cluster", "nodes", "devices", "rl_step", "USD per rl_step", "meets", "note")
        rows = [
            (r.cluster, r.nodes, r.devices, "-" if r.rl_step_s is None else f"{r.rl_step_s:.4g} s",
             "-" if r.usd_per_step is None else f"{r.usd_per_step:.3g}", "yes" if r.meets else "no", r.note)
            for r in self.rows
        ]  # fmt: skip
        wanted = f"{self.target.measure} at most {self.target.limit:g}"
        return f"<p>{wanted}: <b>{found}</b></p>" + notebook.table(head, rows)


def size_job(job: Job, target: SizeTarget, ask: Asked, *, clusters: Sequence[str] = (), most_nodes: int = 64) -> Sizing:
    """The cluster with the fewest devices that meets ``target``; the cheapest where every row has a price.

    Parameters
    ----------
    ask : resolves a job to its context and its framework's rules
    clusters : names of clusters to try; default: the job's
    most_nodes : largest node count; counts are doubled until the target is met, then halved back

    Step time falls with nodes until the tail rules, so the first doubling that meets the target is bisected; a USD
    target tries every power of two, since the price per rl_step has a minimum.
    """
    if target.measure == "run" and job.run is None and job.horizon.rl_steps == 1:
        raise SpecError("a target for the run needs its number of rl_steps: state run.rl_steps or horizon.rl_steps")
    rows: list[tuple[SizeRow, Plan | None]] = []
    for name in clusters or (job.cluster,):
        rows += _doubled(job, target, ask, name, most_nodes)
    meeting = [(row, plan) for row, plan in rows if row.meets]
    if not meeting:
        return Sizing(target, tuple(row for row, _ in rows), None, None)
    priced = all(row.usd_per_step is not None for row, _ in meeting)
    by_price = target.measure == "usd/step" or (priced and len(clusters) > 1)
    best, plan = min(
        meeting, key=lambda item: (item[0].usd_per_step if by_price else 0.0, item[0].devices, item[0].value)
    )
    return Sizing(target, tuple(row for row, _ in rows), best, plan)


def _doubled(job: Job, target: SizeTarget, ask: Asked, cluster: str, most: int) -> list[tuple[SizeRow, Plan | None]]:
    """Node counts 1, 2, 4 ... until one meets the target, then between the last two."""
    tried: dict[int, tuple[SizeRow, Plan | None]] = {}

    def attempt(nodes: int) -> bool:
        if nodes not in tried:
            tried[nodes] = _row(job, target, ask, cluster, nodes)
        return tried[nodes][0].meets

    nodes = 1
    while nodes <= most:
        if attempt(nodes) and target.measure != "usd/step":
            break
        nodes *= 2
    if nodes <= most and target.measure != "usd/step":
        low, high = nodes // 2, nodes
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if attempt(middle) else (middle, high)
    return [tried[n] for n in sorted(tried)]


def _row(job: Job, target: SizeTarget, ask: Asked, cluster: str, nodes: int) -> tuple[SizeRow, Plan | None]:
    asked = job.model_copy(update={"cluster": cluster, "nodes": nodes})
    context, facts = ask(asked)
    devices = context.cluster.devices
    try:
        plan = plan_job(context, facts=facts)
    except InfeasibleError as error:
        return SizeRow(cluster, nodes, devices, None, None, None, False, error.nearest_miss or error.message), None
    value = target.value(plan)
    step_s = SizeTarget("step", math.inf).value(plan)
    priced = all(phase.predicted.usd_per_step is not None for phase in plan.phases)
    usd = SizeTarget("usd/step", math.inf).value(plan) if priced else None
    row = SizeRow(cluster, nodes, devices, value, step_s, usd, value <= target.limit)
    return row, plan
