"""The timeline of a judged configuration: replicas with their own finish, the trainer's stages, what waits for what."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlperf.plan.evaluate import Evaluation
from rlperf.plan.stage_seconds import MODES
from rlperf.sim.rl_step.bottleneck import Bottleneck, NextBottleneck, bottlenecks, next_bottleneck
from rlperf.sim.rl_step.compose import StepStages, Transitions, compose_rl_step
from rlperf.sim.rl_step.modes import Execution
from rlperf.sim.rl_step.timeline import Timeline


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


def step_view(evaluation: Evaluation, replicate: int = 0) -> StepView:
    """Timeline, idle time and bottlenecks of one of the judged rl_steps (default: the first)."""
    configuration, seconds = evaluation.configuration, evaluation.seconds
    execution = Execution(MODES[configuration.mode], max(configuration.staleness, 1))
    rollout = evaluation.rollouts[replicate]

    def one(name: str) -> float:
        return float(getattr(seconds, name)[replicate])

    offload = one("offload_s")
    stages = StepStages(
        rollout_s=rollout.replica_finish_s,
        scoring_s=np.array([one("scoring_s")]),
        training_s=np.array([one("training_s")]),
        reward_s=np.array([one("reward_s")]),
        group_finish_s=np.sort(rollout.finish_s),
        rollout_steady_s=float(evaluation.rollout.steady_s[replicate]),
        weight_sync_s=one("weight_sync_s"),
        data_movement_s=one("data_movement_s"),
        fixed_s=one("other_s"),
        # the judge knows the sum of sleep, wake, offload and onload; half of it lies on either side of training
        transitions=Transitions(onload_s=offload / 2.0, offload_s=offload / 2.0),
    )
    pools = [configuration.pool(role).devices for role in ("rollout", "trainer")]
    timeline = compose_rl_step(execution, stages, rollout_devices=pools[0], trainer_devices=pools[1])
    whole = timeline.step_s * timeline.pool_devices
    idle = timeline.idle_device_s() / np.maximum(whole, 1e-12)
    times = stages.times()
    return StepView(
        timeline=timeline,
        idle_share=dict(zip(timeline.pools, idle.tolist(), strict=True)),
        bottlenecks=tuple(bottlenecks(execution, times)),
        following=next_bottleneck(execution, times),
    )
