"""From a rollout column and a trainer column to the seconds of a whole rl_step: sync, transitions, fixed overheads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlperf.cost.weight_sync import SyncShape, sync_payload, weight_sync_s
from rlperf.layout import FloatArray, IntArray
from rlperf.plan.context import Context, Trainer
from rlperf.plan.demand import Demand
from rlperf.plan.rollout_columns import RolloutColumns
from rlperf.plan.trainer_columns import TrainerColumns
from rlperf.sim.rl_step.modes import Execution, ExecutionMode, StageTimes, step_seconds
from rlperf.specs.architecture import Architecture
from rlperf.specs.job import Mode
from rlperf.specs.rl_calibration import FrameworkCalibration, Transport, WeightSyncFit

MODES: dict[Mode, ExecutionMode] = {
    "colocated": ExecutionMode.SYNC_COLOCATED,
    "disaggregated": ExecutionMode.SYNC_DISAGGREGATED,
    "one_step_off": ExecutionMode.ONE_STEP_OFF,
    "async": ExecutionMode.FULLY_ASYNC,
}
DTYPE_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp32": 4.0}


@dataclass(frozen=True, eq=False)
class PairSeconds:
    """Seconds of pairs of columns, by stage; every array has shape ``[pairs]``."""

    step_s: FloatArray
    rollout_s: FloatArray
    reward_s: FloatArray
    scoring_s: FloatArray
    training_s: FloatArray
    weight_sync_s: FloatArray
    data_movement_s: FloatArray
    offload_s: FloatArray
    other_s: FloatArray


def sync_fit(framework: FrameworkCalibration, colocated: bool) -> WeightSyncFit:
    """The transport that a framework uses between pools that share devices, or that do not."""
    wanted: tuple[Transport, ...] = (
        ("colocated", "reshard") if colocated else ("nccl", "rdma", "checkpoint_engine", "disk")
    )
    offered = {fit.transport: fit for fit in framework.weight_sync}
    return next((offered[name] for name in wanted if name in offered), framework.weight_sync[0])


def sequence_bytes(demand: Demand) -> float:
    """Bytes of one rl_step's batch through the controller: token ids, masks, positions, three log-probabilities.

    About 8 tensors of 8 or 4 bytes per token; 40 bytes per token of prompt and response (judged).
    """
    return 40.0 * demand.trained_tokens


def pair_seconds(
    context: Context, architecture: Architecture, demand: Demand, mode: Mode, staleness: int,
    rollout: RolloutColumns, trainer: TrainerColumns, r: IntArray, t: IntArray,
) -> PairSeconds:  # fmt: skip
    """Stages and rl_step of the pairs ``(r, t)`` of columns [s] ``[pairs]``."""
    stages: dict[str, FloatArray] = {
        name: np.zeros(len(r)) for name in ("weight_sync", "data_movement", "offload", "other", "reward")
    }
    for index, each in enumerate(context.trainers):
        here = trainer.backend[t] == index
        if here.any():
            own = _framework_seconds(context, each, architecture, demand, mode, rollout, trainer, r[here], t[here])
            for name, values in own.items():
                stages[name][here] = values
    makespan = rollout.makespan_s[r]
    steady = rollout.steady_s[r]
    times = StageTimes(
        rollout_s=makespan,
        scoring_s=trainer.scoring_s[t],
        training_s=trainer.training_s[t],
        weight_sync_s=stages["weight_sync"],
        rollout_steady_s=steady,
        reward_s=stages["reward"],
        data_movement_s=stages["data_movement"],
        transition_s=stages["offload"],
        fixed_s=stages["other"],
    )
    return PairSeconds(
        step_s=step_seconds(Execution(MODES[mode], staleness=max(staleness, 1)), times),
        rollout_s=makespan if mode in ("colocated", "disaggregated", "one_step_off") else steady,
        reward_s=stages["reward"],
        scoring_s=trainer.scoring_s[t],
        training_s=trainer.training_s[t],
        weight_sync_s=stages["weight_sync"],
        data_movement_s=stages["data_movement"],
        offload_s=stages["offload"] if mode == "colocated" else np.zeros(len(r)),
        other_s=stages["other"],
    )


def _framework_seconds(
    context: Context, each: Trainer, architecture: Architecture, demand: Demand, mode: Mode,
    rollout: RolloutColumns, trainer: TrainerColumns, r: IntArray, t: IntArray,
) -> dict[str, FloatArray]:  # fmt: skip
    """What one framework backend spends around the stages, for pairs of its columns."""
    framework, colocated = each.framework, mode == "colocated"
    layout_t, layout_r = trainer.layout.take(t), rollout.layout.take(r)
    fit = sync_fit(framework, colocated)
    payload = sync_payload(architecture, DTYPE_BYTES.get(rollout.weight_dtype, 2.0))
    shape = SyncShape(
        trainer_devices=layout_t.devices,
        rollout_devices=layout_r.devices,
        trainer_shards=np.where(layout_t.zero_stage >= 3, layout_t.shards, 1)
        * layout_t.tensor_parallel
        * layout_t.pipeline_parallel,
        rollout_shards=layout_r.replica_devices,
        devices_per_node=context.cluster.devices_per_node,
        nested=(layout_t.tensor_parallel % layout_r.tensor_parallel == 0).astype(np.int64),
        offloaded=trainer.parked[t],
    )
    shape_of = np.zeros(len(r))
    reward = demand.reward_s * (1.0 - framework.reward_hidden)
    sequences = demand.batch.generated * demand.batch.group_size
    moved = sequence_bytes(demand) / framework.controller_rate.value
    transition = framework.sleep.value + framework.wake.value + trainer.transition_s[t] + rollout.transition_s[r]
    return {
        "weight_sync": shape_of + weight_sync_s(context.hardware, fit, payload, shape),
        "data_movement": shape_of + moved,
        "offload": shape_of + (transition if colocated else 0.0),
        "other": shape_of + framework.step.value + framework.per_sample.value * sequences,
        "reward": shape_of + reward,
    }
