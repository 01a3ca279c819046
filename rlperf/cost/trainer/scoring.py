"""Scoring: log-probabilities of given sequences under the old or the reference policy, forward only."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlperf.cost.batching import Microbatches
from rlperf.cost.layers.vision import NO_IMAGES, TowerWork, tower_seconds
from rlperf.cost.trainer.microbatch import microbatch_seconds
from rlperf.cost.trainer.parallel import shard_traffic, stage_hop_s
from rlperf.cost.trainer.parameters import stage_parameters
from rlperf.cost.trainer.pipeline import launch_s, stage_times
from rlperf.cost.trainer.update import TrainingCost
from rlperf.cost.trainer_device import PLAIN, TrainerDevice, UpdateOptions, work_of
from rlperf.layout import Layout
from rlperf.specs.architecture import Architecture
from rlperf.specs.hardware import Hardware
from rlperf.specs.trainer_calibration import TrainerCalibration


def scoring_pass(
    arch: Architecture,
    hw: Hardware,
    trainer: TrainerCalibration,
    layout: Layout,
    microbatches: Microbatches,
    options: UpdateOptions = PLAIN,
    *,
    tower: TowerWork = NO_IMAGES,
) -> TrainingCost:
    r"""Seconds of one forward-only pass over a replica's ``microbatches.count`` microbatches.

    .. math:: t = m\,f_{stage}^{max} + (p - 1)\,\bar f_{stage}

    A forward-only pipeline has no backward to alternate with: interleaving does not shorten its fill. The logits are
    made and reduced in every mode (fused, chunked or whole); only their memory differs.

    Parameters
    ----------
    microbatches : count over the whole rl_step, not one optimizer update
    options : of which dtype, skew and adapters count; nothing is hidden behind another microbatch

    Returns
    -------
    TrainingCost with the backward, recompute and optimizer parts 0
    """
    work, stage = work_of(layout, microbatches), stage_parameters(arch, layout)
    on = options.switches_of(trainer).model_copy(update={"expert_overlap": False})
    whole = replace(options, switches=on)
    costs = microbatch_seconds(arch, TrainerDevice(hw, _in_scoring(trainer), layout, work, whole))
    compute, head, tensor, expert = costs.layer, costs.head.forward, costs.tensor.forward, costs.expert.forward
    context = np.maximum(costs.context.forward - compute.attention, 0.0)
    seen, _ = tower_seconds(arch, hw, trainer, layout, tower)
    m, p = microbatches.count, layout.pipeline_parallel.astype(np.float64)
    each, timing = arch.layers / p, trainer.timing
    hop = layout.virtual_pipeline * stage_hop_s(arch, hw, trainer, layout, work, overlap=on.pipeline_overlap)
    device, host = compute.forward + tensor + context + expert, launch_s(arch, trainer, layout, on, options.dtype)
    times = stage_times(arch, trainer, layout, device, host, seen, head, hop)
    traffic = shard_traffic(hw, trainer, layout, stage.layer_dense, stage.layer_routed, np.zeros(()))
    tables = shard_traffic(hw, trainer, layout, stage.embedding + stage.head, np.zeros(()), np.zeros(()))
    exposed = np.maximum(traffic.gather - timing.shard_overlap * compute.forward, 0.0) + traffic.unpack
    hidden = timing.contention * np.minimum(traffic.gather, compute.forward)
    gathers = np.where(layout.zero_stage == 2, 1.0, m)  # without a backward nothing is resharded there
    zero = np.zeros(np.broadcast_shapes(np.shape(times.longest), np.shape(m)))
    return TrainingCost(
        forward_s=m * (each * compute.forward + (head + seen) / p),
        backward_s=zero,
        recompute_s=zero,
        bubble_s=times.bubble_s(m, p - 1.0),
        host_s=m * times.host,
        exposed_tp_s=m * each * tensor,
        exposed_cp_s=m * each * context,
        exposed_ep_s=m * each * expert,
        exposed_pp_s=m * hop,
        exposed_dp_s=gathers * (each * (exposed + hidden) + traffic.gather + tables.gather + tables.unpack),
        optimizer_s=zero,
        offload_s=zero,
        low=zero + trainer.low,
        high=zero + trainer.high,
    )


def _in_scoring(trainer: TrainerCalibration) -> TrainerCalibration:
    """The trainer with the bytes that a log-probability pass moves per logit, of which a forward makes one half."""
    timing = trainer.timing
    if timing.scoring_bytes is None:
        return trainer
    scored = timing.model_copy(update={"cross_entropy_bytes": 2.0 * timing.scoring_bytes})
    return trainer.model_copy(update={"timing": scored})
