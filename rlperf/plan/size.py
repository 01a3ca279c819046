"""Size: the smallest or cheapest cluster on which a job meets a target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

from rlperf.errors import InfeasibleError, SpecError
from rlperf.plan.answer.divisible import uneven_samples
from rlperf.plan.answer.explain import IDLE
from rlperf.plan.answer.plan import Plan
from rlperf.plan.answer.whole import WholeStep
from rlperf.plan.floor import LeastStep, floor_of
from rlperf.plan.planner import plan_job
from rlperf.plan.question.context import Context
from rlperf.plan.question.words import layout_words
from rlperf.plan.size_offers import Resolve, offered_jobs, unpriced_of
from rlperf.plan.size_target import SizeTarget
from rlperf.plan.sizing import HELPS, Floor, SizeRow, Sizing
from rlperf.processes import over_cores
from rlperf.specs.given import as_count
from rlperf.specs.job import Job
from rlperf.told import Tell, quiet, within
from rlperf.units import human_seconds

if TYPE_CHECKING:
    pass


EACH = 8
"""Nodes up to which every number between two doublings is tried: five may do where six, whose layouts nobody runs, do
not."""


def size_job(
    job: Job, target: SizeTarget, ask: Resolve, *, clusters: Sequence[str] = (), most_nodes: int = 64,
    report: Tell | None = None,
) -> Sizing:  # fmt: skip
    """The cluster with the fewest devices that meets ``target``; the cheapest where every cluster has a price.

    Parameters
    ----------
    ask : resolves a job to its context and its framework's rules
    clusters : names of clusters to try, each with its price or without (`Offer`); default: the job's. The job's own
        price is that of the job's own cluster.
    most_nodes : largest node count, tried itself where no doubling comes to it; counts are doubled until the target is
        met and a doubling no longer helps
    report : called with the share done and a text

    Step time falls with nodes until the tail rules, so the first doubling that meets the target is bisected, or tried
    node by node where it is of at most `EACH`; a USD target tries every power of two on which the floor can be paid
    for, since the price per rl_step has a minimum. Nodes whose best layout leaves the
    beaten path (a number that only seven stages divide) are taken where no others meet the target: a plan is held
    against layouts of its own number of devices, and there all may lie off it.
    Of a rollout pool on a cluster of its own, without devices or nodes stated, every row has as many nodes (a power of
    two, at most ``most_nodes``) as meet the target there, or as still help.
    """
    most_nodes = as_count(most_nodes, "most_nodes")
    stated = None if job.run is None else job.run.rl_steps
    if target.measure == "run" and stated is None and job.horizon.rl_steps == 1:
        raise SpecError("a target for the run needs its number of rl_steps: state run.rl_steps or horizon.rl_steps")
    offered = offered_jobs(job, clusters)
    unpriced = unpriced_of(offered, target, ask)
    jobs = {asked.cluster: asked for asked in offered}
    search = partial(_searched, target=target, ask=ask, most_nodes=most_nodes)
    found = over_cores(search, jobs, report or quiet, each=int(most_nodes).bit_length())
    rows = tuple(row for tried in found for row in tried.rows)
    floors = tuple(tried.floor for tried in found if tried.floor is not None)
    meeting = [(row, tried.plans[row.nodes]) for tried in found for row in tried.rows if row.meets]
    meeting = [(row, plan) for row, plan in meeting if not row.off_path] or meeting
    if not meeting:
        return Sizing(target, rows, None, None, floors, unpriced=unpriced)
    priced = all(row.usd_per_step is not None for row in rows if row.rl_step_s is not None)
    unlike = len(offered) > 1 or job.pool("rollout").cluster is not None
    by: Literal["usd", "devices"] = "usd" if priced and (target.measure == "usd/step" or unlike) else "devices"
    best, plan = min(
        meeting, key=lambda item: (item[0].usd_per_step if by == "usd" else 0.0, item[0].devices, item[0].value)
    )
    return Sizing(target, rows, best, _in_full(plan, ask), floors, by, unpriced)


@dataclass(frozen=True)
class _Searched:
    """What was tried of a cluster, and the plans that meet the target, by nodes."""

    rows: tuple[SizeRow, ...]
    plans: dict[int, Plan | None]
    floor: Floor | None


def _searched(job: Job, *, target: SizeTarget, ask: Resolve, most_nodes: int, report: Tell) -> _Searched:
    """One cluster: a piece of work that may run in another process."""
    tried = _Tried(job, target, ask, most_nodes, report).search()
    least = tried.least
    floor = None if least is None else Floor(job.cluster, least.rl_step_s, tried.enough, least.waits_for)
    return _Searched(tuple(tried.rows), {row.nodes: tried.plans[row.nodes] for row in tried.rows if row.meets}, floor)


def _in_full(plan: Plan | None, ask: Resolve) -> Plan | None:
    """The plan of the best cluster with all that `rlperf plan` says of it: of the others only numbers are wanted."""
    if plan is None:
        return None
    context, facts = ask(plan.job)
    remarked = any(
        phase.pool("trainer").layout.pipeline_parallel > 1
        or uneven_samples(phase.mode, phase.settings, context.cluster.devices)
        for phase in plan.phases
    )
    return plan_job(context, facts=facts) if remarked else plan


@dataclass(eq=False)
class _Tried:
    """Node counts of one cluster that were planned."""

    job: Job
    target: SizeTarget
    ask: Resolve
    most: int
    tell: Tell
    plans: dict[int, Plan | None] = field(default_factory=dict)
    made: dict[int, SizeRow] = field(default_factory=dict)
    least: LeastStep | None = None

    @property
    def rows(self) -> list[SizeRow]:
        """What was tried, from the smallest on."""
        return [self.made[nodes] for nodes in sorted(self.made)]

    @property
    def enough(self) -> int | None:
        """`Floor.enough_nodes`; None, too, where rows differ in the rollout's nodes."""
        seconds = {row.nodes: row.rl_step_s for row in self.rows if row.rl_step_s is not None}
        if not seconds or self._two:
            return None
        last, best = max(seconds), min(seconds.values())
        fewest = min(nodes for nodes, each in seconds.items() if each <= best / (1.0 - HELPS))
        return fewest if 2 * fewest <= last else None

    def search(self) -> _Tried:
        """1, 2, 4 ... and the most nodes, until some meet the target and more help no further; then those between.

        Nothing is planned where the floor misses the target: no number of nodes meets it.
        """
        context, _ = self.ask(self._on(1, 1))
        self.least = _least(context)
        if self.target.measure == "step" and self.least is not None and self.least.rl_step_s > self.target.limit:
            devices = self.most * context.cluster.devices
            devices += context.rollout_hardware.cluster.devices if context.own_rollout else 0
            why = f"no number of nodes: the floor is {human_seconds(self.least.rl_step_s)}"
            self.made[self.most] = SizeRow(self.job.cluster, self.most, devices, None, None, None, False, why)
            return self
        nodes = 0
        while nodes < self.most:
            nodes = min(2 * nodes or 1, self.most)
            if self.made and self._too_dear(context, nodes):
                break
            self._try(nodes)
            if self.target.measure != "usd/step" and self._meeting and self._at_end(nodes):
                break
        if self._meeting and self.target.measure != "usd/step":
            self._between(min(self._meeting))
        return self

    def _too_dear(self, one: Context, nodes: int) -> bool:
        """Whether the floor alone costs more than the limit on so many nodes, and so on more; ``one``: on one node."""
        apart = one.rollout_hardware.cluster.devices if one.own_rollout else 0
        usd_per_s = one.usd_per_s(apart, nodes * one.cluster.devices) or 0.0
        least_s = 0.0 if self.least is None else self.least.rl_step_s
        return self.target.measure == "usd/step" and usd_per_s * least_s > self.target.limit

    @property
    def _two(self) -> bool:
        """Whether the nodes of the rollout's own cluster are sized, too."""
        pool = self.job.pool("rollout")
        return pool.cluster is not None and pool.nodes is None and pool.devices is None

    def _on(self, nodes: int, apart: int) -> Job:
        """The job on so many nodes, and ``apart`` of the rollout's own cluster where those are sized, too."""
        pools = (
            each.model_copy(update={"nodes": apart}) if self._two and each.role == "rollout" else each
            for each in self.job.pools
        )
        return self.job.model_copy(update={"nodes": nodes, "pools": tuple(pools)})

    def _at_end(self, nodes: int) -> bool:
        """Whether more nodes than these, which do, help no further; of two clusters: cost no less than half of them."""
        if not self._two:
            return self.enough is not None
        half, last = self.made.get(nodes // 2), self.made[nodes]
        if half is None or not half.meets:
            return False
        return (last.usd_per_step or last.devices) >= (half.usd_per_step or half.devices)

    def _between(self, high: int) -> None:
        """Fewer nodes than the first doubling that meets the target, as long as they do, too."""
        anyhow, low = self.made[high].off_path, max((nodes for nodes in self.made if nodes < high), default=0)
        while high - low > 1:
            middle = low + 1 if high <= EACH else (low + high) // 2
            row = self._try(middle)
            low, high = (low, middle) if row.meets and (anyhow or not row.off_path) else (middle, high)

    @property
    def _meeting(self) -> list[int]:
        """Nodes tried that meet the target: those on the beaten path, else all."""
        met = [row for row in self.made.values() if row.meets]
        return [row.nodes for row in met if not row.off_path] or [row.nodes for row in met]

    def _try(self, nodes: int) -> SizeRow:
        if nodes not in self.made:
            self.made[nodes], self.plans[nodes] = self._row(nodes)
        return self.made[nodes]

    def _row(self, nodes: int) -> tuple[SizeRow, Plan | None]:
        """The row of so many nodes: of a rollout that is sized, too, the cheapest where USD are asked for, else the
        fewest that meet the target or come within `HELPS` of the best."""
        found = [self._planned(nodes, 1)]
        while self._two and 2 ** len(found) <= self.most and self._may_help(*(row for row, _ in found[-2:])):
            found.append(self._planned(nodes, 2 ** len(found)))
        if found[-1][0].meets and self.target.measure != "usd/step":
            return found[-1]
        values = [math.inf if row.value is None else row.value for row, _ in found]
        enough = min(values) / (1.0 if self.target.measure == "usd/step" else 1.0 - HELPS)
        return next(each for each, value in zip(found, values, strict=True) if value <= enough)

    def _may_help(self, *last: SizeRow) -> bool:
        """Whether more nodes of the rollout may do better than the last two numbers of them."""
        before, now = (row.rl_step_s for row in (last[0], last[-1]))
        if last[-1].meets and self.target.measure != "usd/step":
            return False
        return len(last) == 1 or before is None or now is None or now <= (1.0 - HELPS) * before

    def _planned(self, nodes: int, apart: int) -> tuple[SizeRow, Plan | None]:
        context, facts = self.ask(self._on(nodes, apart))
        own = apart if self._two else None
        cluster, devices = self.job.cluster, context.cluster.devices
        one = 1.0 / math.log2(4 * max(self.most, 2))  # of the doublings
        told = within(self.tell, one * math.log2(2 * nodes), one, f"{nodes} node{'s' if nodes > 1 else ''}: ")
        try:
            plan = plan_job(context, facts=facts, remarks=False, report=told)
        except InfeasibleError as error:
            why = error.nearest_miss or error.message
            return SizeRow(cluster, nodes, devices, None, None, None, False, why, rollout_nodes=own), None
        step_s = WholeStep.of(plan).rl_step_s
        apart = context.rollout_hardware.cluster.devices if context.own_rollout else 0
        usd_per_s = context.usd_per_s(apart, devices)
        usd = None if usd_per_s is None else usd_per_s * step_s
        value = usd if self.target.measure == "usd/step" else self.target.value(plan)
        assert value is not None  # `unpriced_of` has refused USD without a price
        meets, off = value <= self.target.limit, _off_path(plan)
        note, devices = off or _idle(plan), devices + apart
        return SizeRow(cluster, nodes, devices, value, step_s, usd, meets, note, bool(off), own), plan


def _off_path(plan: Plan) -> str:
    """Layouts of the first phase that lies off the beaten path, in words; empty where none does."""
    phase = next((phase for phase in plan.phases if phase.off_path), None)
    if phase is None:
        return ""
    trainer, rollout = (layout_words(phase.pool(role).layout) for role in ("trainer", "rollout"))
    return f"off the beaten path: trainer {trainer}; rollout {rollout}"


def _idle(plan: Plan) -> str:
    """That devices of the first phase stay idle, and why, in words; empty where none do."""
    return next((words for words in plan.phases[0].binds if words.startswith(IDLE)), "")


def _least(context: Context) -> LeastStep | None:
    """The floor [s]; None where no number of devices holds the job's engines, which the row of a plan explains."""
    try:
        return floor_of(context)
    except InfeasibleError:
        return None
