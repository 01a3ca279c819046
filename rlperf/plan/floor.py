"""The floor: what no number of devices of a kind beats, because one response has to be decoded.

With a device for every part of the work, an rl_step still waits for its longest response, alone on the fastest engine,
for its reward and for what the framework adds to every rl_step. A mode that runs ahead divides that wait by the batches
under way (`rlperf.sim.rl_step.modes.step_seconds`, whose other stages are zero here).
"""

from __future__ import annotations

from dataclasses import replace

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
from rlperf.specs.modes import MODES


def floor_s(context: Context) -> float:
    """Seconds that no rl_step falls below on any number of the job's devices, mean over tasks and groups [s].

    The least over modes, trainers, engine layouts, open precisions and open batches.

    Raises
    ------
    InfeasibleError : no number of devices holds an engine in a layout that the job leaves open
    """
    groups = rl_step_groups(context.job)
    asked = groups if context.job.horizon.group else [None] * len(groups)
    counts = [last - first + 1 for first, last in groups]
    each = [
        min(_floor_of(context, task, task.source.demand(batch, group, context.job.seed)) for batch in task.batches)
        for task in context.tasks
        for group in asked
    ]
    return float(np.average(each, weights=counts * len(context.tasks)))


def _floor_of(context: Context, task: TaskContext, demand: Demand) -> float:
    """The same for one batch in one group of rl_steps [s]."""
    job, site = context.job, context.site
    alone = 0.0 if demand.batch.over_provision > 1.0 else _longest_alone_s(context, task, demand)
    found = []
    for mode in job.modes:
        for each in site.trainers:
            framework, rest = each.framework, each.framework.factors.rest
            stages = StageSeconds.of(
                alone,
                reward_s=demand.reward_s * (1.0 - framework.reward_hidden),
                offload_s=rest * (framework.sleep.value + framework.wake.value),
                other_s=rest * framework.step.value,
                rollout_steady_s=0.0,
                rollout_group_s=0.0,
            )
            execution = Execution(
                mode,
                max(MODES[mode].staleness(job.limits.staleness), 1),
                in_flight_updates=framework.in_flight_updates,
                interrupt=framework.partial_rollout,
                by_group=framework.counts_groups,
                chunks=framework.chunks(demand.batch.prompts, demand.batch.updates),
            )
            found.append(float(step_seconds(execution, stages)))
    return min(found)


def _longest_alone_s(context: Context, task: TaskContext, demand: Demand) -> float:
    """The response with the most tokens alone on the fastest engine, mean over the demand's rl_steps [s]."""
    limits = engine_limits(context.job.pool("rollout").settings.filled(), np.inf, 1)
    costs = _engines(context, task, demand)
    each = []
    for table in demand.tables:
        served = Trajectories.from_table(table)
        census = take_census(served.take(np.array([np.argmax(served.generated_tokens)])), limits)
        each.append(min(float(census.makespan_s(cost)) for cost in costs))
    return float(np.mean(each))


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
