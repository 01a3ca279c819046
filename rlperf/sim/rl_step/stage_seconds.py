"""From rollouts and trainers to the seconds of whole rl_steps: sync, transitions, fixed overheads; one or a million."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from rlperf.cost.dtypes import dtype_of
from rlperf.cost.parameters import parameters
from rlperf.cost.speculation import draft_head
from rlperf.cost.trainer.parallel import in_shards
from rlperf.cost.weight_sync import SyncShape, adapter_payload, quantise_s, sync_payload, weight_sync_s
from rlperf.layout import FloatArray, IntArray
from rlperf.sim.rl_step.ahead import settled_s
from rlperf.sim.rl_step.data_movement import BatchShape, data_movement_s, patch_bytes, route_bytes
from rlperf.sim.rl_step.demand import Demand
from rlperf.sim.rl_step.modes import Execution, drained_s, step_seconds, sync_pauses, trainer_work_s
from rlperf.sim.rl_step.pairs import Pairs
from rlperf.sim.rl_step.rollout_stage import RolloutStage
from rlperf.sim.rl_step.scorers import Beside
from rlperf.sim.rl_step.site import Site, TrainerStack
from rlperf.sim.rl_step.stages import StageSeconds
from rlperf.sim.rl_step.trainer_stage import TrainerStage
from rlperf.sim.rollout.lent import read_off_s
from rlperf.specs.architecture import Architecture
from rlperf.specs.modes import MODES, Form, Mode
from rlperf.specs.rl_calibration import FrameworkCalibration, Transport, WeightSyncFit

EVERY = slice(None)
APART: tuple[Transport, ...] = (
    "nccl",
    "packed_broadcast",
    "rdma",
    "checkpoint_engine",
    "disk",
    "shard_to_shard",
    "checkpoint_engine_p2p",
    "delta",
)
"""Transports between pools on devices of their own, in the order in which frameworks take them unasked."""


def usual_sync_fit(framework: FrameworkCalibration, colocated: bool) -> WeightSyncFit:
    """The transport that a framework uses between pools that share devices, or that do not."""
    offered = {fit.transport: fit for fit in framework.weight_sync}
    return next((offered[name] for name in _usual(colocated) if name in offered), framework.weight_sync[0])


def _usual(colocated: bool) -> tuple[Transport, ...]:
    """Transports that frameworks take unasked, the most usual first."""
    return ("colocated", "reshard") if colocated else APART


def sync_seconds(
    site: Site, stack: TrainerStack, architecture: Architecture, mode: Mode, pairs: Pairs[RolloutStage, TrainerStage],
    transport: Transport | None = None,
) -> FloatArray:  # fmt: skip
    """Seconds of a weight sync of pairs, in the framework's usual way or by ``transport`` [s] ``[pairs]``."""
    framework = stack.framework.by_transport(transport)
    fit = usual_sync_fit(framework, MODES[mode].shares_devices)
    trainer, rollout, t, r = pairs.trainer, pairs.rollout, pairs.t, pairs.r
    layout_t, layout_r = trainer.layout.take(t), rollout.layout.take(r)
    width = dtype_of(rollout.weight_dtype).weight_bytes
    kept = 4.0 if stack.calibration.id in fit.wide else 2.0
    payload = sync_payload(architecture, max(width, kept) if framework.quantises == "engine" else width)
    alone = framework.adapters is not None and not framework.adapters.with_base
    if alone and site.adapter_rank:
        payload = adapter_payload(architecture, site.adapter_rank, jobs=site.adapter_jobs)
    if site.trained_draft and (head := draft_head(architecture, site.trained_draft)):
        payload = payload + sync_payload(head.trained)
    shape = SyncShape(
        trainer_devices=layout_t.devices,
        rollout_devices=layout_r.devices,
        trainer_shards=np.where(in_shards(stack.calibration, layout_t), layout_t.shards, 1)
        * layout_t.tensor_parallel
        * layout_t.pipeline_parallel,
        rollout_shards=layout_r.replica_devices,
        devices_per_node=site.cluster.devices_per_node,
        nested=(layout_t.tensor_parallel % layout_r.tensor_parallel == 0).astype(np.int64),
        offloaded=trainer.parked[t],
        pipeline_parallel=layout_t.pipeline_parallel,
        expert_parallel=layout_t.expert_parallel,
    )
    if width < 2.0 and not (alone and site.adapter_rank):
        # the sender's devices convert what each holds; engines that quantise as they load convert what a replica holds
        holders = shape.rollout_shards if framework.quantises == "engine" else shape.trainer_shards
        converted = quantise_s(site.hardware, parameters(architecture), holders, width)
    else:
        converted = np.zeros(())
    seconds = weight_sync_s(site.hardware, fit, payload, shape) + converted
    return np.zeros(len(r)) + framework.factors.weight_sync * seconds


def batch_shape(demand: Demand, architecture: Architecture, passes: int, fields: float) -> BatchShape:
    """What one rl_step's batch moves: lengths, ``passes`` scoring passes, and pixels where a tower sees images.

    ``fields``: numbers per response token that scorers return.
    """
    sequences = demand.batch.sequences
    prompt = demand.prompt_tokens / sequences
    tower = architecture.vision
    images = demand.images_per_token * demand.trained_tokens / sequences
    return BatchShape(
        sequences=sequences,
        prompt_tokens=prompt,
        response_tokens=demand.trained_tokens / sequences - prompt,
        scoring_passes=passes,
        value_fields=3 + fields,
        image_patches=images * demand.patches(architecture),
        patch_bytes=patch_bytes(tower) if tower else 0.0,
    )


@dataclass(frozen=True, eq=False)
class _Around:
    """What a framework spends around the stages of pairs, and how it runs them ``[pairs]``.

    Attributes
    ----------
    weight_sync_s, data_movement_s, offload_s, other_s, reward_s, swap_s : as in `StageSeconds` [s]
    lend_s, return_s : until engines on a waiting trainer's devices run, and until they have let go of them [s]
    in_flight, interrupt, by_group, chunks : as in `Execution` [1]
    """

    weight_sync_s: FloatArray
    data_movement_s: FloatArray
    offload_s: FloatArray
    other_s: FloatArray
    reward_s: FloatArray
    swap_s: FloatArray
    lend_s: FloatArray
    return_s: FloatArray
    in_flight: FloatArray
    interrupt: FloatArray
    by_group: FloatArray
    chunks: FloatArray


def stage_seconds(
    site: Site, architecture: Architecture, demand: Demand, mode: Mode, staleness: int,
    pairs: Pairs[RolloutStage, TrainerStage], beside: Beside | None,
) -> StageSeconds:  # fmt: skip
    """Stages and rl_step of pairs of rollouts and trainers [s] ``[pairs]``; ``beside``: what scorers add."""
    rollout, trainer, r, t = pairs.rollout, pairs.trainer, pairs.r, pairs.t
    around = _around(site, architecture, demand, mode, pairs, beside.fields if beside else 0.0)
    makespan, steady = rollout.makespan_s[r], rollout.steady_s[r]
    times = StageSeconds(
        rollout_s=makespan,
        scoring_s=trainer.scoring_s[t],
        training_s=trainer.trained_s[t],
        weight_sync_s=around.weight_sync_s,
        reward_s=around.reward_s,
        data_movement_s=around.data_movement_s,
        offload_s=around.offload_s,
        other_s=around.other_s,
        rollout_steady_s=steady,
        rollout_group_s=rollout.group_s[r],
        recompute_s=rollout.recompute_s[r],
        swap_s=around.swap_s,
    )
    if beside is not None:
        times = replace(
            times, reward_s=np.maximum(times.reward_s, beside.waits_s),
            scoring_s=times.scoring_s + beside.shared_s, scorer_s=beside.busy_s,
        )  # fmt: skip
    times = replace(times, scoring_s=np.maximum(times.scoring_s, trainer.values_s[t]))
    if rollout.ends_s is not None and MODES[mode].streams:
        times = replace(times, rollout_first_s=_held_up_s(rollout.ends_s[r], around.chunks, trainer_work_s(times)))
    execution = Execution(
        mode, max(staleness, 1), in_flight_updates=around.in_flight, interrupt=around.interrupt,
        by_group=around.by_group, chunks=around.chunks,
    )  # fmt: skip
    # where finished requests are replaced at once, a batch takes its steady seconds, and its tail where engines drain
    flowing = execution.form == Form.REFILLED
    if flowing.any():
        steady = refilled_s(rollout, execution, times, r)
        times = replace(times, rollout_steady_s=steady)
    if rollout.lent_s is not None:
        idle_from = np.where(execution.form == Form.BARRIER, trainer_work_s(times), 0.0)
        lent = read_off_s(rollout.lent_s[r], idle_from + around.lend_s) + around.return_s
        times = replace(times, rollout_s=np.where(flowing, makespan, np.minimum(lent, makespan)))
    alone = np.where(flowing, steady + drained_s(execution, times), times.rollout_s)
    return replace(times, rollout_s=alone, rl_step_s=step_seconds(execution, times))


def refilled_s(
    rollout: RolloutStage, execution: Execution, times: StageSeconds, rows: IntArray | slice = EVERY
) -> FloatArray:  # fmt: skip
    """What batches take engines that are refilled at once [s] ``[rows]``.

    Agents that run ahead: beside such a trainer, since engines have not what it holds.
    """
    if rollout.ahead_s is None:
        return rollout.steady_s[rows]
    pause, rest, apart = beside_engines_s(rollout, execution, times, rows)
    return settled_s(rollout.ahead_s[rows], pause, rest, apart, execution.grouped)


def beside_engines_s(
    rollout: RolloutStage, execution: Execution, times: StageSeconds, rows: IntArray | slice = EVERY
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """A weight sync's pause of engines, the rest of a batch, and by how much its groups end apart [s] ``[rows]``."""
    sync, pause, _ = sync_pauses(execution, times)
    apart = rollout.makespan_s[rows] - rollout.group_s[rows]
    return pause, times.reward_s + trainer_work_s(times) + sync, np.maximum(apart, 0.0)


def _nodes(site: Site, colocated: bool, pairs: Pairs[RolloutStage, TrainerStage]) -> FloatArray:
    """Nodes that the pools take, whatever the cluster has besides ``[pairs]``."""
    trainer, rollout = (
        np.broadcast_to(stage.layout.devices, stage.layout.shape)[rows]  # few layouts stand in many pairs
        for stage, rows in ((pairs.trainer, pairs.t), (pairs.rollout, pairs.r))
    )
    trainer = trainer + pairs.trainer.critic[pairs.t]
    per_node = site.cluster.devices_per_node
    if site.rollout_hardware is site.hardware:
        return np.ceil((trainer + (0 if colocated else rollout)) / per_node)
    return np.ceil(trainer / per_node) + np.ceil(rollout / site.rollout_hardware.cluster.devices_per_node)


def _held_up_s(ends_s: FloatArray, chunks: FloatArray, work_s: FloatArray) -> FloatArray:
    """How long a trainer of streamed chunks is held up by the chunk that it waits for longest [s] ``[pairs]``.

    A chunk that is complete at e and has k others of c in front lets the batch end at e + W (1 - k / c) at the
    earliest, W all work; ``ends_s``: when each part of the batch is complete ``[pairs][parts]``.
    """
    c, parts = np.maximum(chunks, 1.0)[:, None], ends_s.shape[1]
    before = np.arange(float(c.max()))
    part = np.minimum(np.ceil(parts * (before + 1.0) / c), parts).astype(np.int64) - 1
    waits = np.take_along_axis(ends_s, part, axis=1) - before / c * work_s[:, None]
    return np.asarray(np.where(before < c, waits, -np.inf).max(axis=1))


def _around(
    site: Site, architecture: Architecture, demand: Demand, mode: Mode, pairs: Pairs[RolloutStage, TrainerStage],
    returned: float,
) -> _Around:  # fmt: skip
    """What every pair's own framework backend spends and does; ``returned``: ``fields`` of `batch_shape`."""
    backend = pairs.trainer.backend[pairs.t]
    columns = {entry.name: np.zeros(len(pairs.r)) for entry in fields(_Around)}
    for index, each in enumerate(site.trainers):
        here = backend == index
        if here.all():
            return _around_one(site, each, architecture, demand, mode, pairs, returned)
        if here.any():
            own = _around_one(site, each, architecture, demand, mode, pairs.take(here), returned)
            for name, column in columns.items():
                column[here] = getattr(own, name)
    return _Around(**columns)


def _around_one(
    site: Site, each: TrainerStack, architecture: Architecture, demand: Demand, mode: Mode,
    pairs: Pairs[RolloutStage, TrainerStage], returned: float,
) -> _Around:  # fmt: skip
    """The same of pairs of one framework backend."""
    rollout, trainer, r, t = pairs.rollout, pairs.trainer, pairs.r, pairs.t
    framework, colocated = each.framework, MODES[mode].shares_devices
    shape_of = np.zeros(len(r))
    reward = demand.reward_s * (1.0 - framework.reward_hidden)
    passes = each.scoring_passes(site, demand.batch.updates_of_a_job)
    passes += site.critic_apart  # its values come back as those of a critic on the trainer's devices
    shape = batch_shape(site.trained(demand), architecture, passes, returned)
    if site.router_replay != "none":
        # R2's record is made by a pass and goes back and to the trainer; R3's comes with the batch, and goes to all
        trips = 1.0 if site.router_replay == "R3" else 2.0 / (2.0 + passes)
        shape = replace(shape, route_bytes=trips * route_bytes(architecture))
    moved = data_movement_s(framework, shape, _nodes(site, colocated, pairs))
    factors = framework.factors
    transition = framework.sleep.value + framework.wake.value + trainer.transition_s[t] + rollout.transition_s[r]
    lent = rollout.lent_s is not None
    # engines on the trainer's devices wake with its weights, as colocated ones do, and let go of all that they hold
    weights = sync_seconds(site, each, architecture, "colocated", pairs) if lent else 0.0
    return _Around(
        weight_sync_s=sync_seconds(site, each, architecture, mode, pairs),
        data_movement_s=shape_of + factors.rest * moved,
        offload_s=shape_of + (factors.rest * transition if colocated else 0.0),
        other_s=shape_of + factors.rest * framework.step.value,
        reward_s=shape_of + reward,
        swap_s=shape_of + factors.weight_sync * usual_sync_fit(framework, colocated).fixed,
        lend_s=shape_of + factors.rest * framework.wake.value + weights,
        return_s=shape_of + factors.rest * framework.sleep.value,
        in_flight=shape_of + framework.in_flight_updates,
        interrupt=shape_of + framework.partial_rollout,
        by_group=shape_of + framework.counts_groups,
        chunks=shape_of + framework.chunks(demand.batch.prompts, demand.batch.updates),
    )
