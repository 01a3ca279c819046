"""The timeline of a judged configuration: replicas with their own finish, the trainer's stages, what waits for what."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rlperf.plan.judge.evaluate import Evaluation
from rlperf.sim.rl_step.asynchronous import AsyncResult, simulate
from rlperf.sim.rl_step.bottleneck import Bottleneck, NextBottleneck, bottlenecks, next_bottleneck
from rlperf.sim.rl_step.compose import StepStages, Transitions, compose_rl_step
from rlperf.sim.rl_step.flow import Allowed, Flow
from rlperf.sim.rl_step.modes import Execution
from rlperf.sim.rl_step.refilled import refilled
from rlperf.sim.rl_step.steady import execution_of, steady_run
from rlperf.sim.rl_step.timeline import Timeline
from rlperf.sim.rollout.trajectories import Trajectories
from rlperf.specs.modes import MODES


@dataclass(frozen=True, eq=False)
class StepView:
    """One rl_step as people look at it.

    Attributes
    ----------
    timeline : spans and edges
    idle_share : device-seconds of each pool without work, over those of the rl_step, by pool name [1]
    bottlenecks : stages by what the rl_step would save without them, largest first
    following : what holds it back once the first has become fast enough; None where nothing else ever does
    """

    timeline: Timeline
    idle_share: dict[str, float]
    bottlenecks: tuple[Bottleneck, ...]
    following: NextBottleneck | None


def step_view(evaluation: Evaluation) -> StepView:
    """Timeline, idle time and bottlenecks of the first of the judged rl_steps."""
    configuration = evaluation.configuration
    execution, stages = execution_in(evaluation), stages_of(evaluation, 0)
    pools = [configuration.pool(role).devices for role in ("rollout", "trainer")]
    timeline = compose_rl_step(execution, stages, rollout_devices=pools[0], trainer_devices=pools[1])
    whole = timeline.rl_step_s * timeline.pool_devices
    idle = timeline.idle_device_s() / np.maximum(whole, 1e-12)
    times = stages.times()
    return StepView(
        timeline=timeline,
        idle_share=dict(zip(timeline.pools, idle.tolist(), strict=True)),
        bottlenecks=tuple(bottlenecks(execution, times)),
        following=next_bottleneck(execution, times),
    )


def steady_state(evaluation: Evaluation, rl_steps: int = 50) -> AsyncResult | None:
    """The asynchronous steady state event by event: its period, staleness and queue; None in synchronous modes.

    None with replicas that read prompts for the others, too: their queue and link are no part of these events.
    Lengths are those of the judged rl_steps, drawn group by group with replacement.
    """
    configuration = evaluation.configuration
    if not MODES[configuration.mode].runs_ahead or evaluation.replicas.apart is not None:
        return None
    framework, demand, mode = evaluation.framework, evaluation.demand, configuration.mode
    engine = evaluation.cost, evaluation.replicas.limits, evaluation.replicas.writers
    drawn = [Trajectories.from_table(table) for table in demand.tables]
    run = steady_run(
        framework.in_mode(mode), *engine, evaluation.seconds, drawn, refilled(*engine, flow_in(evaluation)),
        max_staleness=max(configuration.staleness, 1),
    )  # fmt: skip
    samples = None if framework.bounds_groups else demand.batch.max_trajectories
    run = replace(run, groups=_groups_at_once(evaluation), samples=samples)
    return simulate(run, rl_steps=rl_steps)


def _groups_at_once(evaluation: Evaluation) -> int | None:
    """Groups that the framework's program has under way at once, over all replicas; None: any number."""
    batch, groups = evaluation.demand.batch, evaluation.framework.under_way.get(evaluation.configuration.mode)
    if evaluation.framework.bounds_groups and batch.max_trajectories:
        return -(-batch.max_trajectories // batch.group_size)
    return batch.prompts if groups == "batch" else groups and groups * evaluation.replicas.writers


def flow_in(evaluation: Evaluation) -> Flow:
    """What a judged configuration sends through its engines, and what of it may be under way."""
    demand, configuration = evaluation.demand, evaluation.configuration
    allowed = Allowed.of(evaluation.framework, configuration.mode, configuration.staleness, demand)
    return Flow.of(demand, allowed)


def execution_in(evaluation: Evaluation) -> Execution:
    """The mode of a judged configuration, as its framework runs it."""
    configuration = evaluation.configuration
    batch = configuration.batch
    chunks = evaluation.framework.chunks(batch.prompts, batch.updates)
    return execution_of(evaluation.framework, configuration.mode, configuration.staleness, chunks)


def stages_of(evaluation: Evaluation, replicate: int = 0) -> StepStages:
    """Stages of one judged rl_step, replicas with their own ends."""
    seconds, rollout = evaluation.seconds, evaluation.rollouts[replicate]
    trainer, visits = evaluation.trainer, evaluation.beside

    def one(name: str) -> float:
        return float(getattr(seconds, name)[replicate])

    offload, joined = one("offload_s"), evaluation.rollout.lent_s is not None
    rollout_s = evaluation.seconds.rollout_s if joined else evaluation.rollout.makespan_s
    return StepStages(
        # generation batches in turn, rollouts that are continued or joined take other than one rollout of all
        rollout_s=rollout.replica_finish_s * float(rollout_s[replicate] / rollout.makespan_s),
        scoring_s=np.array([trainer.scoring_s[replicate] + (visits.shared_s[replicate] if visits else 0.0)]),
        training_s=trainer.training_s[replicate : replicate + 1],
        values_s=float(trainer.values_s[replicate]),
        critic_s=float(trainer.critic_s[replicate]),
        reward_s=np.array([one("reward_s")]),
        rollout_steady_s=one("rollout_steady_s"),
        weight_sync_s=one("weight_sync_s"),
        data_movement_s=one("data_movement_s"),
        other_s=one("other_s"),
        rollout_group_s=float(evaluation.rollout.group_s[replicate]),
        rollout_first_s=None if seconds.rollout_first_s is None else one("rollout_first_s"),
        recompute_s=float(evaluation.rollout.recompute_s[replicate]),
        reward_apart=any(stage.own for stage in evaluation.scorers),
        scorer_s=float(np.broadcast_to(seconds.scorer_s, seconds.rl_step_s.shape)[replicate]),
        swap_s=one("swap_s"),
        # the judge knows the sum of sleep, wake, offload and onload; half of it lies on either side of training
        transitions=Transitions(onload_s=offload / 2.0, offload_s=offload / 2.0),
    )
