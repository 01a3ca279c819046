"""Decisions: every slot of a job (a task in a group of rl_steps) screened, and its finalists judged by simulation.

Neighbouring groups of a task judge the same configurations, the best of each, so that staying with a layout is always
among the choices; tasks that take turns all judge those that they can share. Groups whose rl_steps are alike share one
demand and are judged once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import numpy as np

from rlperf.errors import InfeasibleError, Rejection
from rlperf.layout import FloatArray
from rlperf.plan.judge.evaluate import Evaluation, Judge
from rlperf.plan.judge.finalists import finalists_of
from rlperf.plan.judge.tuning import judge_all, tuned
from rlperf.plan.judge.value import valued
from rlperf.plan.question.context import Context, TaskContext
from rlperf.plan.search.common import Screening, common_layouts
from rlperf.plan.search.configuration import Configuration
from rlperf.plan.search.relax import fewer_nodes, relaxations
from rlperf.plan.search.rules import batch_names, uneven_parts
from rlperf.plan.search.screen import Screened, screen
from rlperf.plan.search.splits import splits, usage_of
from rlperf.processes import over_cores
from rlperf.sim.rl_step.demand import Demand
from rlperf.specs.framework import NODE_COUNTED, FrameworkFacts
from rlperf.specs.job import Job
from rlperf.specs.modes import MODES
from rlperf.told import Tell, quiet, within

JUDGED = 16
"""Finalists that the event simulator re-judges, per task; shared out over its groups of rl_steps."""

HALF = 0.5
"""Of a piece of work that is worth another process (`over_cores`): a task is screened, then judged."""


@dataclass(frozen=True, eq=False)
class Decision:
    """A slot with what stands behind its columns.

    Attributes
    ----------
    evaluations : judged configurations, one per column
    value : objective per rl_step of each ``[columns]``
    objective : the same with the price of leaving the beaten path, which is what the program minimises ``[columns]``
    first : column that the screen alone would have taken
    previous : index of the slot before it in time, or None
    weight : what it counts in the objective over the horizon: its rl_steps, or its share of the tokens
    """

    name: str
    task: TaskContext
    rl_steps: tuple[int, int]
    screened: Screened
    evaluations: tuple[Evaluation, ...]
    value: FloatArray
    objective: FloatArray
    first: int
    previous: int | None
    weight: float

    @property
    def count(self) -> int:
        """rl_steps of the slot."""
        return self.rl_steps[1] - self.rl_steps[0] + 1


def rl_step_groups(job: Job) -> list[tuple[int, int]]:
    """(first, last) of every group of rl_steps in the horizon.

    >>> from types import SimpleNamespace as N
    >>> rl_step_groups(N(horizon=N(rl_steps=25, group=10)))
    [(0, 9), (10, 19), (20, 24)]
    """
    size = job.horizon.group or job.horizon.rl_steps
    return [(start, min(start + size, job.horizon.rl_steps) - 1) for start in range(0, job.horizon.rl_steps, size)]


def decide(context: Context, facts: FrameworkFacts | None, tell: Tell) -> list[Decision]:
    """Every slot of the job, tasks one after the other, groups of rl_steps in order; many tasks over all cores.

    Raises
    ------
    InfeasibleError : a slot without candidates; with reasons, nearest misses and limits to relax
    """
    screen_one = partial(_screened_alone, context=context, facts=facts)
    tasks = {task.task.name: task for task in context.tasks}
    screened = over_cores(screen_one, tasks, within(tell, 0.0, 0.4), each=HALF)
    shared: list[tuple[Configuration, ...]] = []
    if context.takes_turns:
        firsts = [one.screenings[0] for one in screened]
        shared = common_layouts(context, facts, firsts, within(tell, 0.4, 0.1))
    pieces = {
        name: (one, index * len(one.groups), [own[index] for own in shared])
        for index, (name, one) in enumerate(zip(tasks, screened, strict=True))
    }
    judge_one = partial(_judged_alone, context=context, facts=facts)
    judged = over_cores(judge_one, pieces, within(tell, 0.5, 0.4), each=HALF)
    return [decision for found in judged for decision in found]


def _screened_alone(task: TaskContext, *, context: Context, facts: FrameworkFacts | None, report: Tell) -> _Screened:
    """A task of the job screened: a piece of work that may run in another process."""
    job = context.job
    return _screened_task(context, task, facts, rl_step_groups(job), report, timed=bool(job.horizon.group))


def _judged_alone(
    asked: tuple[_Screened, int, Sequence[Configuration]], *, context: Context, facts: FrameworkFacts | None,
    report: Tell,
) -> list[Decision]:  # fmt: skip
    """The same of its slots judged; ``asked``: the task screened, the number of its first slot, what tasks share."""
    screened, start, shared = asked
    return _judged_task(context, screened, facts, start, report, shared)


def decide_groups(
    context: Context, task: TaskContext, facts: FrameworkFacts | None, groups: list[tuple[int, int]]
) -> list[Decision]:
    """Slots of one task for stated groups of rl_steps, wherever in the run they stand."""
    return _judged_task(context, _screened_task(context, task, facts, groups, quiet, timed=True), facts, 0, quiet)


def decide_screened(
    context: Context, task: TaskContext, facts: FrameworkFacts | None, found: Screened, tell: Tell
) -> Decision:
    """The one slot of a task that has been screened over the job's whole horizon."""
    rl_steps = 0, context.job.horizon.rl_steps - 1
    one = Screening(task, found.demands, found)
    return _judged_task(context, _Screened(task, [rl_steps], [0], [one]), facts, 0, tell)[0]


@dataclass(frozen=True, eq=False)
class _Screened:
    """A task screened: its groups of rl_steps, which of the ``screenings`` each has, one per demand that differs."""

    task: TaskContext
    groups: list[tuple[int, int]]
    which: list[int]
    screenings: list[Screening]


def _screened_task(
    context: Context, task: TaskContext, facts: FrameworkFacts | None, groups: list[tuple[int, int]], tell: Tell,
    *, timed: bool,
) -> _Screened:  # fmt: skip
    """The candidates of every group of rl_steps of a task."""
    demands, which = _demands(context, task, groups, timed)
    each = 1.0 / len(demands)
    screenings = [
        Screening(task, group, _screened(context, task, facts, group, within(tell, each * number, each)))
        for number, group in enumerate(demands)
    ]
    return _Screened(task, groups, which, screenings)


def _judged_task(
    context: Context, screened: _Screened, facts: FrameworkFacts | None, start: int, tell: Tell,
    shared: Sequence[Configuration] = (),
) -> list[Decision]:  # fmt: skip
    """Slots of a task: the finalists of all its groups judged in each, and what other tasks can ``share``."""
    judge, screenings = Judge(context, screened.task), screened.screenings
    each = 1.0 / len(screenings)
    share = max(JUDGED // len(screenings), 3)
    own = (c for one in screenings for c in finalists_of(context, one.found, share))
    finalists = list(dict.fromkeys([*own, *shared]))
    judged = [
        judge_all(judge, one.demands, finalists, facts, within(tell, each * number, each))
        for number, one in enumerate(screenings)
    ]
    if len(screenings) == 1 and context.job.sharing != "devices":
        judged[0] = tuned(judge, screenings[0].demands, screenings[0].found, facts, judged[0])
    found = []
    for index, (rl_steps, group) in enumerate(zip(screened.groups, screened.which, strict=True)):
        first = screenings[group].found
        kept = _within_limits(context, first, judged[group])
        value, objective = valued(context, kept)
        found.append(
            Decision(
                name=f"{start + index}",
                task=screened.task,
                rl_steps=rl_steps,
                screened=first,
                evaluations=kept,
                value=value,
                objective=objective,
                first=[e.configuration for e in kept].index(first.configurations[0]),
                previous=start + index - 1 if index else None,
                weight=rl_steps[1] - rl_steps[0] + 1.0,
            )
        )
    return found


def with_more(context: Context, decision: Decision, more: Sequence[Evaluation]) -> Decision:
    """The decision with more judged columns behind its own."""
    judged = (*decision.evaluations, *more)
    value, objective = valued(context, judged)
    return replace(decision, evaluations=judged, value=value, objective=objective)


def _within_limits(
    context: Context, screened: Screened, judged: tuple[Evaluation, ...]
) -> tuple[Evaluation, ...]:  # fmt: skip
    """Without other groups' finalists whose rl_step takes longer or costs more here than the job allows."""
    own = set(screened.configurations)
    return tuple(one for one in judged if one.configuration in own or keeps_limits(context, one))


def keeps_limits(context: Context, one: Evaluation) -> bool:
    """Whether an rl_step takes and costs no more than the job allows."""
    limits = context.job.limits
    usd = one.rl_step_s * (usage_of(context, one.configuration).usd_per_s or 0.0)
    in_time = limits.step is None or one.rl_step_s <= limits.step
    return in_time and (limits.usd_per_step is None or usd <= limits.usd_per_step)


def _screened(
    context: Context, task: TaskContext, facts: FrameworkFacts | None, demands: tuple[Demand, ...], tell: Tell
) -> Screened:
    """The candidates of one group of rl_steps; there is one at least.

    What a rule refuses whatever else is chosen is not costed first: nothing of it would be left.
    """
    if broken := _pinned(context, task, facts):
        raise InfeasibleError(_nothing_fits(context, task), nearest_miss="; ".join(broken))
    found = screen(context, task, demands, facts, report=tell)
    if not found.configurations:
        raise infeasible(context, task, facts, demands, found)
    return found


def _demands(
    context: Context, task: TaskContext, groups: list[tuple[int, int]], timed: bool
) -> tuple[list[tuple[Demand, ...]], list[int]]:
    """Demands, one per open batch, of the groups whose rl_steps differ, and which of them each group has.

    ``timed``: the lengths of the group's own rl_steps; else those of the whole recording.
    """
    number: dict[tuple[tuple[bytes, ...], ...], int] = {}
    found: list[tuple[Demand, ...]] = []
    which: list[int] = []
    for rl_steps in groups:
        asked = rl_steps if timed else None
        made = tuple(task.source.demand(batch, asked, context.job.seed) for batch in task.batches)
        lengths = tuple(demand.keys for demand in made)
        if lengths not in number:
            number[lengths] = len(found)
            found.append(made)
        which.append(number[lengths])
    return found, which


def infeasible(
    context: Context, task: TaskContext, facts: FrameworkFacts | None, demands: tuple[Demand, ...], screened: Screened
) -> InfeasibleError:
    """What was rejected, the nearest misses, and the smallest set of limits whose relaxation helps, or fewer nodes."""
    rows = sorted(screened.rejected.items(), key=lambda item: -item[1])
    helps = relaxations(context, task, facts, demands)
    if not (helps or screened.lacks_memory):  # fewer nodes would have less of it
        helps = fewer_nodes(context, task, facts, demands)
    miss = "; ".join([*screened.misses, *helps]) or None
    rejections = [Rejection(reason, count) for reason, count in rows]
    return InfeasibleError(_nothing_fits(context, task), rejections, miss, lacks_memory=screened.lacks_memory)


def _nothing_fits(context: Context, task: TaskContext) -> str:
    where = f"{task.architecture.name} on {context.cluster.devices} x {context.cluster.device}"
    return f"task {task.task.name}: nothing fits {where}"


def _pinned(context: Context, task: TaskContext, facts: FrameworkFacts | None) -> list[str]:
    """Rules of the framework that values of the job break whatever else is chosen, in the rules' words."""
    if facts is None:
        return []
    stated: dict[str, dict[str, object]] = {
        pool.role: {name: given[0] for name, given in [*dict(pool.layout).items(), ("devices", pool.devices)]
                    if isinstance(given, tuple) and len(given) == 1}
        for pool in context.job.pools
    }  # fmt: skip
    if len(modes := context.job.modes) == 1:
        per_node = context.rollout_hardware.cluster.devices_per_node
        stated["run"] = {"mode": modes[0], "devices_per_node": per_node, "async_enabled": MODES[modes[0]].runs_ahead}
    readers = context.job.pool("rollout").settings.prefill_replicas or (0,)
    engine = {"backend": context.engine_profile.engine, "prefill_replicas": np.array(readers)}
    stated["rollout"] = stated.get("rollout", {}) | engine
    names = {role: SimpleNamespace(**values) for role, values in stated.items()}
    if len(task.batches) == 1:
        names["batch"] = batch_names(task.batches[0])
    words = [*facts.pinned(names, context.job.trainer_backends), *_uneven(context, facts)]
    return [f"{facts.name} refuses it: {each}" for each in words]


def _uneven(context: Context, facts: FrameworkFacts) -> list[str]:
    """What leaves part of a node in every split of the devices, where files count devices by node."""
    per_node = context.cluster.devices_per_node
    found = [uneven_parts(facts, split, per_node, context.job.scorers) for split in splits(context)]
    always = [part for part in facts.whole_nodes if found and all(part in uneven for uneven in found)]
    counts = {part: sorted({count for uneven in found for count in uneven[part]}) for part in always}
    return [
        f"{NODE_COUNTED[part]} {' or '.join(map(str, own))} devices, which fill no whole number of nodes of {per_node}"
        for part, own in counts.items()
    ]
