"""The floor: what no number of devices of a kind beats, because one response has to be decoded.

With a device for every part of the work, an rl_step still waits for its longest response, alone on the fastest engine,
for its reward and for what the framework adds to every rl_step. A mode that runs ahead divides that wait by the batches
under way, and one whose bound on staleness counts groups waits for a group, not for the longest of all
(`rlperf.sim.rl_step.modes.step_seconds`, whose other stages are zero here).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from rlperf.cost.engine_step import EngineStepCost
from rlperf.cost.reject import Reject
from rlperf.errors import InfeasibleError
from rlperf.plan.judge.decisions import rl_step_groups
from rlperf.plan.question.context import Context, TaskContext
from rlperf.plan.search.candidates import Shape, rollout_layouts
from rlperf.plan.search.columns import Columns
from rlperf.sim.rl_step.demand import Demand
from rlperf.sim.rl_step.engine import engine_limits, tabulate
from rlperf.sim.rl_step.modes import Execution, step_seconds
from rlperf.sim.rl_step.stages import StageSeconds
from rlperf.sim.rollout.closed_form import take_census
from rlperf.sim.rollout.trajectories import Trajectories
from rlperf.specs.modes import MODES, Form


@dataclass(frozen=True)
class LeastStep:
    """Seconds that no rl_step falls below [s], and what it waits for in them, in words."""

    rl_step_s: float
    waits_for: str


def floor_of(context: Context) -> LeastStep:
    """What no rl_step of all tasks falls below on any number of the job's devices, mean over groups of rl_steps.

    The least over modes, trainers, engine layouts, open precisions and open batches. Tasks that take turns add up,
    those that run beside each other wait for the slowest.

    Raises
    ------
    InfeasibleError : no number of devices holds an engine in a layout that the job leaves open
    """
    groups = rl_step_groups(context.job)
    asked = groups if context.job.horizon.group else [None] * len(groups)
    each = [
        [_least(_floor_of(context, task, task.source.demand(batch, group, context.job.seed)) for batch in task.batches)
         for task in context.tasks]
        for group in asked
    ]  # fmt: skip
    together = max if context.job.sharing == "devices" else math.fsum
    seconds = [together(floor.rl_step_s for floor in tasks) for tasks in each]
    mean = np.average(seconds, weights=[last - first + 1 for first, last in groups])
    longest = max((floor for tasks in each for floor in tasks), key=lambda floor: floor.rl_step_s)
    return LeastStep(float(mean), longest.waits_for)


def _least(floors: Iterable[LeastStep]) -> LeastStep:
    return min(floors, key=lambda floor: floor.rl_step_s)


def _floor_of(context: Context, task: TaskContext, demand: Demand) -> LeastStep:
    """The same for one batch in one group of rl_steps."""
    job, site = context.job, context.site
    alone_s, group_s = (0.0, 0.0) if demand.batch.over_provision > 1.0 else _alone_s(context, task, demand)
    found = []
    for mode in job.modes:
        for each in site.trainers:
            framework, rest = each.framework, each.framework.factors.rest
            execution = Execution(
                mode,
                max(MODES[mode].staleness(job.limits.staleness), 1),
                in_flight_updates=framework.in_flight_updates,
                interrupt=framework.partial_rollout,
                by_group=framework.counts_groups,
                chunks=framework.chunks(demand.batch.prompts, demand.batch.updates),
            )
            by_group = execution.form == Form.REFILLED and bool(execution.grouped)
            stages = StageSeconds.of(
                alone_s,
                reward_s=demand.reward_s * (1.0 - framework.reward_hidden),
                offload_s=rest * (framework.sleep.value + framework.wake.value),
                other_s=rest * framework.step.value,
                rollout_steady_s=0.0,
                rollout_group_s=group_s if by_group else 0.0,
            )
            words = _waits_for(execution, by_group) if alone_s else ADDED
            found.append(LeastStep(float(step_seconds(execution, stages)), words))
    return _least(found)


ADDED = "what the framework adds to every rl_step"


def _waits_for(execution: Execution, by_group: bool) -> str:
    """What an rl_step waits for on any number of devices, in words."""
    one = "a group's longest response" if by_group else "its longest response"
    if execution.form != Form.REFILLED:
        return f"{one} alone, and {ADDED}"
    return f"{one} alone, shared by the {int(execution.lag) + 1} batches under way, and {ADDED}"


def _alone_s(context: Context, task: TaskContext, demand: Demand) -> tuple[float, float]:
    """The response with the most tokens, and one as long as the longest of a group, alone on the fastest engine [s].

    Means over the demand's rl_steps; of groups in their mean length, whose seconds are no more than their mean seconds:
    every token reads a longer cache.
    """
    limits = engine_limits(context.job.pool("rollout").settings.filled(), np.inf, 1)
    costs = _engines(context, task, demand)

    def seconds(served: Trajectories, row: int) -> float:
        census = take_census(served.take(np.array([row])), limits)
        return min(float(census.makespan_s(cost)) for cost in costs)

    each = []
    for table in demand.tables:
        served = Trajectories.from_table(table)
        tokens = served.generated_tokens
        _, group = np.unique(served.group, return_inverse=True)
        longest = np.zeros(group.max() + 1, dtype=np.int64)
        np.maximum.at(longest, group, tokens)
        typical = np.flatnonzero(tokens <= longest.mean())
        of_group = typical[np.argmax(tokens[typical])]
        each.append((seconds(served, int(np.argmax(tokens))), seconds(served, int(of_group))))
    alone_s, group_s = np.mean(each, axis=0)
    return float(alone_s), float(group_s)


def _engines(context: Context, task: TaskContext, demand: Demand) -> list[EngineStepCost]:
    """What the engine_steps of every layout and precision cost that the job leaves open."""
    cluster, arch = context.rollout_hardware.cluster, task.architecture
    shape = Shape(
        arch, 1, cluster.scale_up_domain, demand.batch.longest_tokens, context.rollout_hardware.device.usable_memory
    )
    shape = replace(shape, devices=4 * shape.engine_reach)
    found: list[EngineStepCost] = []
    for columns in Columns(context, task).variants():
        pool = columns.context.job.pool("rollout")
        layout, flags = rollout_layouts(shape, pool)
        kept = layout.take(np.flatnonzero((flags & ~int(Reject.DEVICES | Reject.NODE)) == 0))
        found += tabulate(context.site, arch, pool.settings.filled(), kept, images=demand.images)
    if not found:
        raise InfeasibleError(f"task {task.task.name}: no layout of the rollout pool divides {arch.name}")
    return found
