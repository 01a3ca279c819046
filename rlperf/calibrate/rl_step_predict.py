"""Predict a measured rl_step: its row's pools, batch and lengths through the stages to a timeline and an interval."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from rlperf.calibrate.assumed_lengths import AssumedLengths
from rlperf.calibrate.rl_step_rows import StepRow
from rlperf.cost.dtypes import dtype_of
from rlperf.cost.engine_memory import engine_limits
from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.cost.inference import engine_step_cost
from rlperf.cost.weight_sync import SyncShape, sync_payload
from rlperf.sim.rl_step.compose import StepStages, compose_rl_step
from rlperf.sim.rl_step.modes import Execution, step_seconds
from rlperf.sim.rl_step.overheads import trainer_in_framework
from rlperf.sim.rl_step.stages import RolloutSetup, SyncSetup, TrainerSetup, execution_of, roll_out, step_stages
from rlperf.sim.rl_step.timeline import Timeline
from rlperf.sim.rl_step.uncertainty import bootstrap_groups, interval
from rlperf.sim.rollout.trajectories import Trajectories
from rlperf.specs.calibration import load_engine_calibration
from rlperf.specs.modes import MODES, Mode
from rlperf.specs.rl_calibration import FrameworkCalibration, Transport, load_framework_calibration
from rlperf.specs.trainer_calibration import load_trainer

DEFAULT_LAW = AssumedLengths("gamma", 0.6, 0.01)
"""Assumed where only a mean is published: a compact body, and 1 % that run away to the cap. An earlier
prototype did best with it on whole steps; docs/guide/accuracy-rl-step.md has the effect of the others."""

OTHER_LAWS = (AssumedLengths("lognormal", 1.2), AssumedLengths("gamma", 1.0), AssumedLengths("lognormal", 0.8))
"""Other plausible laws: how far the step moves between them is part of the interval."""


@dataclass(frozen=True, eq=False)
class StepPrediction:
    """A predicted rl_step: stages, seconds, and what stands behind them."""

    row: StepRow
    law: AssumedLengths
    framework: FrameworkCalibration
    execution: Execution
    rollout: RolloutSetup
    trainer: TrainerSetup
    trajectories: Trajectories
    stages: StepStages

    @property
    def rl_step_s(self) -> float:
        """Seconds from one rl_step to the next."""
        return float(step_seconds(self.execution, self.stages.times()))

    @cached_property
    def timeline(self) -> Timeline:
        """The rl_step as spans."""
        row = self.row
        return compose_rl_step(
            self.execution, self.stages, rollout_devices=row.rollout_devices, trainer_devices=row.trainer_devices
        )

    def stage_s(self, metric: str) -> float:
        """Seconds under a column's name: rl_step_s, rollout_s, scoring_s, train_s, weight_sync_s."""
        if metric == "step_s":
            return self.rl_step_s
        times = self.stages.times()
        return float(np.asarray(getattr(times, "training_s" if metric == "train_s" else metric)))

    @cached_property
    def law_spread(self) -> float:
        """Standard deviation of ln(step) over plausible laws of the lengths [1]."""
        steps = [self.rl_step_s, *(predict_step(self.row, law, self.framework).rl_step_s for law in OTHER_LAWS)]
        return float(np.log(steps).std(ddof=1))

    def draws_s(self, draws: int = 4, seed: int = 1) -> np.ndarray:
        """Steps of bootstrapped groups [s]: only the rollout changes, the other stages see nearly equal sums."""
        random = np.random.default_rng(seed)
        times = self.stages.times()
        found = []
        for _ in range(draws):
            result = roll_out(self.rollout, self.framework, bootstrap_groups(self.trajectories, random))
            again = StepStages.of(result)
            changed = {"rollout_s": result.makespan_s, "rollout_steady_s": again.steady_s()}
            found.append(float(step_seconds(self.execution, replace(times, **changed))))
        return np.array(found)


@lru_cache(maxsize=256)
def _engine(row: StepRow) -> tuple[EngineStepCost, EngineLimits]:
    """Cost and limits of one rollout replica of the row."""
    profile = load_engine_calibration(row.engine)
    if not row.cuda_graphs:
        profile = profile.model_copy(update={"cuda_graphs": False})
    context = max(row.prompt_tokens + row.response_tokens / 2.0, 512.0)
    cost = engine_step_cost(
        row.architecture, row.hardware, profile, row.rollout, gemm_dtype=row.rollout_dtype, typical_context=context
    )
    limits = engine_limits(
        row.architecture,
        row.hardware,
        profile,
        row.rollout,
        gemm_dtype=row.rollout_dtype,
        memory_fraction=row.memory_fraction,
    )
    # a published run fitted: where the model leaves less cache than two sequences, those two are granted
    least = 2.0 * (row.prompt_tokens + row.cap_tokens) + 2.0 * limits.block_tokens
    return cost, replace(limits, kv_tokens=max(limits.kv_tokens, least))


def _transport(framework: FrameworkCalibration, mode: Mode) -> Transport:
    """The path of this framework and mode: the first of its list that suits."""
    colocated = MODES[mode].shares_devices
    for fit in framework.weight_sync:
        if (fit.transport == "colocated") == colocated and fit.transport != "reshard":
            return fit.transport
    return framework.weight_sync[0].transport


def setups(row: StepRow, framework: FrameworkCalibration) -> tuple[RolloutSetup, TrainerSetup, SyncSetup]:
    """The row's pools and path."""
    cost, limits = _engine(row)
    per_replica = int(row.rollout.replica_devices)
    rollout = RolloutSetup(cost, limits, row.rollout_devices // per_replica, per_replica)
    layout = row.trainer_layout
    trainer = TrainerSetup(
        architecture=row.architecture,
        hardware=row.hardware,
        trainer=trainer_in_framework(load_trainer(row.trainer), framework),
        layout=layout,
        mini_batch=row.mini_batch,
        token_budget=row.token_budget,
        scoring_token_budget=row.scoring_token_budget,
        scoring_microbatch=row.scoring_microbatch,
        packing=row.packing,
        scoring_passes=row.scoring_passes,
        dtype=row.compute_dtype,
    )
    sharded = int(layout.zero_stage) == 3
    shape = SyncShape(
        trainer_devices=row.trainer_devices,
        rollout_devices=row.rollout_devices,
        # context-parallel ranks hold the same weights
        trainer_shards=row.trainer_devices if sharded else int(layout.tensor_parallel * layout.pipeline_parallel),
        rollout_shards=per_replica,
        devices_per_node=row.hardware.cluster.devices_per_node,
        nested=0,
    )
    width = dtype_of(row.rollout_dtype).weight_bytes
    return rollout, trainer, SyncSetup(_transport(framework, row.mode), sync_payload(row.architecture, width), shape)


def predict_step(
    row: StepRow, law: AssumedLengths = DEFAULT_LAW, framework: FrameworkCalibration | None = None, seed: int = 0
) -> StepPrediction:
    """Predict one rl_step under a law of lengths; ``framework`` replaces the shipped calibration (fits use it)."""
    facts = framework or load_framework_calibration(row.framework)
    rollout, trainer, sync = setups(row, facts)
    trajectories = row.trajectories(law, seed)
    colocated = MODES[row.mode].shares_devices
    nodes = max(row.devices // row.hardware.cluster.devices_per_node, 1)
    stages, _ = step_stages(facts, rollout, trainer, sync, trajectories, nodes=nodes, colocated=colocated)
    if row.critic:
        # a second network is updated beside the policy and asked for its values once
        values = stages.scoring_s / row.scoring_passes if row.scoring_passes else 0.0
        stages = replace(stages, training_s=2.0 * stages.training_s, scoring_s=stages.scoring_s + values)
    execution = execution_of(facts, row.mode, row.staleness)
    return StepPrediction(row, law, facts, execution, rollout, trainer, trajectories, stages)


def step_interval(prediction: StepPrediction) -> tuple[float, float]:
    """5th and 95th percentile of the rl_step [s]: groups, law of lengths, recompute if not stated, calibration."""
    extra = prediction.law_spread**2
    if not prediction.row.recompute_stated:
        # full recompute would repeat the forward, a third of the training: half of that is one standard deviation
        extra += float(np.log1p(prediction.stage_s("train_s") / 6.0 / prediction.rl_step_s)) ** 2
    unlike = prediction.framework.unmeasured_spread**2
    extra += unlike * (prediction.row.architecture.latent is not None)
    extra += unlike / 4.0 * prediction.row.hardware.calibration.extrapolated
    return interval(prediction.rl_step_s, prediction.draws_s(), prediction.framework, extra=float(np.sqrt(extra)))
