"""Seconds of one optimizer update: layers, pipeline schedule, exposed traffic, optimizer, offload.

Derivation: ``docs/theory/training.md``. Everything broadcasts over a `Layout`; on open axes each operator is evaluated
on the few degrees it depends on, and only the last sums run over all candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from rlperf.cost.batching import Microbatches
from rlperf.cost.collectives import host_copy_s
from rlperf.cost.layers import stack_of
from rlperf.cost.layers.vision import NO_IMAGES, TowerWork, tower_seconds
from rlperf.cost.roofline import stream_s
from rlperf.cost.trainer.activations import layer_activations
from rlperf.cost.trainer.layers import LayerSeconds, head_seconds, layer_seconds
from rlperf.cost.trainer.microbatch import MicrobatchSeconds, microbatch_seconds
from rlperf.cost.trainer.parallel import (
    data_traffic,
    optimizer_s,
    owned_parameters,
    shard_traffic,
    stage_hop_s,
    trained_share,
)
from rlperf.cost.trainer.parameters import OFFLOADS_ACTIVATIONS, StageParameters, stage_parameters
from rlperf.cost.trainer.pipeline import launch_s, stage_times, warm_up
from rlperf.cost.trainer_device import PLAIN, Keeping, TrainerDevice, UpdateOptions, work_of
from rlperf.layout import RECOMPUTE, BoolArray, FloatArray, Layout
from rlperf.specs.architecture import Architecture
from rlperf.specs.hardware import Hardware
from rlperf.specs.trainer_calibration import TrainerCalibration


@dataclass(frozen=True)
class TrainingCost:
    """Seconds of one optimizer update by what they are spent on; every field [s], broadcast together.

    Attributes
    ----------
    forward_s, backward_s, recompute_s : compute of the mean stage, all microbatches
    bubble_s : pipeline fill and drain, and waiting for the fullest stage
    host_s : waiting for the host to launch, where the device outruns it, and fixed costs per microbatch and update
    exposed_tp_s, exposed_cp_s, exposed_ep_s, exposed_pp_s, exposed_dp_s : traffic that compute does not hide
    optimizer_s : the update of the weights
    offload_s : traffic with host memory and host-side work that is not hidden
    low, high : 5th and 95th percentile of the total over the total; where no update like it was timed, twice as wide
        in the logarithm [1]
    """

    forward_s: FloatArray
    backward_s: FloatArray
    recompute_s: FloatArray
    bubble_s: FloatArray
    host_s: FloatArray
    exposed_tp_s: FloatArray
    exposed_cp_s: FloatArray
    exposed_ep_s: FloatArray
    exposed_pp_s: FloatArray
    exposed_dp_s: FloatArray
    optimizer_s: FloatArray
    offload_s: FloatArray
    low: FloatArray
    high: FloatArray

    @property
    def total_s(self) -> FloatArray:
        """One optimizer update [s]."""
        return sum((getattr(self, name) for name in PARTS), np.zeros(()))


PARTS = tuple(field.name for field in fields(TrainingCost) if field.name.endswith("_s"))


@dataclass(frozen=True)
class _Pass:
    """Seconds of one microbatch in the mean layer: compute and exposed traffic, forward, backward, repeated forward."""

    forward: FloatArray
    backward: FloatArray
    recompute: FloatArray
    tensor: FloatArray
    context: FloatArray
    expert: FloatArray
    host: FloatArray | float

    @property
    def device(self) -> FloatArray:
        """All that the device does in the layer, the host apart [s]."""
        return self.forward + self.backward + self.recompute + self.tensor + self.context + self.expert


def training_update(
    arch: Architecture,
    hw: Hardware,
    trainer: TrainerCalibration,
    layout: Layout,
    microbatches: Microbatches,
    options: UpdateOptions = PLAIN,
    *,
    tower: TowerWork = NO_IMAGES,
) -> TrainingCost:
    r"""Seconds of one optimizer update.

    .. math::

        t = m\,t_{stage}^{max} + \frac{p-1 + (v-1) \max(p-m, 0)}{v}\,\bar t_{stage} + m\,x_{fsdp} + t_{dp} + t_{opt}

    with m microbatches, p stages, v chunks per stage (1F1B: Narayanan et al. 2021, arXiv 2104.04473, section 2.2:
    bubble (p - 1) / (v m)); :math:`x_{fsdp}` the part of ZeRO-3 traffic that a layer's compute does not cover.

    Parameters
    ----------
    layout, microbatches : broadcast together
    options, tower : how it computes; images, if there are any

    Returns
    -------
    TrainingCost, arrays of the broadcast shape
    """
    work, stage = work_of(layout, microbatches), stage_parameters(arch, layout, frozen_tower=options.frozen_tower)
    device = TrainerDevice(hw, trainer, layout, work, options)
    costs = microbatch_seconds(arch, device)
    one, head = _layer_pass(arch, device, costs), costs.head
    head_s = head.forward + head.backward + (head.again if options.chunked_loss else 0.0)
    tower_s, tower_back = tower_seconds(arch, hw, trainer, layout, tower, frozen=options.frozen_tower)
    m, p = microbatches.count, layout.pipeline_parallel.astype(np.float64)
    v, each, fixed = layout.virtual_pipeline.astype(np.float64), arch.layers / p, trainer.timing
    dense, routed, tables = trained_share(arch, layout, stage, options.lora_rank)
    updated, updated_routed = each * dense + tables, each * routed
    added = stream_s(hw, (updated + updated_routed) * fixed.accumulate_bytes)
    hop = 2.0 * v * stage_hop_s(arch, hw, trainer, layout, work, overlap=device.switches.pipeline_overlap)
    times = stage_times(arch, trainer, layout, one.device, one.host, tower_s + tower_back, head_s, hop, added)
    sharded = _sharded_s(device, stage, one, each, m)
    on_device, on_host = optimizer_s(hw, trainer, layout, updated, updated_routed)
    widened, shape = 2.0 - experts_timed(arch, trainer, layout), np.broadcast_shapes(times.longest.shape, m.shape)
    return TrainingCost(
        forward_s=m * (each * one.forward + (head.forward + tower_s) / p),
        backward_s=m * (each * one.backward + (head.backward + tower_back) / p + added),
        recompute_s=m * (each * one.recompute + np.maximum(head_s - head.forward - head.backward, 0.0) / p),
        bubble_s=times.bubble_s(m, warm_up(m, p, v)),
        host_s=m * times.host + fixed.update + (fixed.lora_update if options.lora_rank else 0.0),
        exposed_tp_s=m * each * one.tensor,
        exposed_cp_s=m * each * one.context,
        exposed_ep_s=m * each * one.expert,
        exposed_pp_s=m * hop,
        exposed_dp_s=sharded + _update_traffic_s(device, updated, updated_routed, one, each),
        optimizer_s=on_device,
        offload_s=on_host + m * each * _parked_s(arch, device, one),
        low=np.broadcast_to(trainer.low**widened, shape),
        high=np.broadcast_to(trainer.high**widened, shape),
    )


def experts_timed(arch: Architecture, trainer: TrainerCalibration, layout: Layout) -> BoolArray:
    """Whether updates of an architecture's experts were timed with a layout's degree, on as many devices.

    >>> from rlperf.specs.profiles import load_architecture
    >>> from rlperf.specs.trainer_calibration import load_trainer
    >>> layout = Layout.of(expert_parallel=[1, 8], data_parallel=16)
    >>> experts_timed(load_architecture("Qwen3-30B-A3B"), load_trainer("megatron"), layout).tolist()
    [False, True]
    """
    if arch.experts is None:
        return np.ones(layout.shape, dtype=np.bool_)
    timed, degree = trainer.timed_experts, layout.expert_parallel
    if timed is None:
        return np.zeros(layout.shape, dtype=np.bool_)
    least, most = timed.expert_parallel
    return np.asarray((degree >= least) & (degree <= most) & (layout.devices <= timed.devices))


def optimizer_bytes(
    arch: Architecture, trainer: TrainerCalibration, layout: Layout, options: UpdateOptions
) -> FloatArray:
    """Bytes of the optimizer states that a device owns."""
    each = arch.layers / layout.pipeline_parallel.astype(np.float64)
    stage = stage_parameters(arch, layout, frozen_tower=options.frozen_tower)
    dense, routed, tables = trained_share(arch, layout, stage, options.lora_rank)
    owned = owned_parameters(layout, each * dense + tables, each * routed)
    return np.asarray(owned * trainer.storage.optimizer)


def _layer_pass(arch: Architecture, device: TrainerDevice, costs: MicrobatchSeconds) -> _Pass:
    """One microbatch in the mean layer; full recompute repeats forward and traffic, selective what it names.

    Non-reentrant checkpoints of PyTorch stop when all saved values are there again (torch.utils.checkpoint,
    ``set_checkpoint_early_stop``, the default): neither the down projection with its tensor traffic nor the way back
    from the experts is repeated.
    """
    compute, tensor, context, expert = costs.layer, costs.tensor, costs.context, costs.expert
    layout, timing, modules = device.layout, device.trainer.timing, device.options.recompute_modules
    full = (layout.activation_recompute == RECOMPUTE.index("full")).astype(np.float64)
    selective = (layout.activation_recompute == RECOMPUTE.index("selective")).astype(np.float64)
    stack = stack_of(arch)
    launches = launch_s(arch, device.trainer, layout, device.switches, device.dtype)
    early = full * timing.recompute_stops_early
    # latent attention's up projections cost about what its core does
    repeated = compute.attention * bool({"core_attn", "mla_up_proj"} & set(modules))
    moe, mlp = selective * ("moe" in modules), selective * ("mlp" in modules)
    dense = sum(half.share for half in stack.halves if half.layer.ends_in_product)
    # a dense feed-forward fetches its input and sums up its output once more
    of_dense = dense * arch.layers / stack.norms
    # the ring travels under attention, as much of it as attention lasts
    covered = compute.attention
    ring = np.maximum(context.forward - covered, 0.0), np.maximum(context.backward - 2.0 * covered, 0.0)
    named = selective * repeated + moe * compute.experts + mlp * compute.feed_forward
    return _Pass(
        forward=compute.forward,
        backward=compute.backward,
        recompute=full * compute.forward - early * compute.last + named,
        tensor=tensor.forward * (1.0 + full + mlp * of_dense) - early * dense * tensor.last + tensor.backward,
        context=ring[0] * (1.0 + full) + ring[1],
        expert=expert.forward * (1.0 + full - 0.5 * early + moe) + expert.backward,
        host=launches * (3.0 + full),
    )


def _sharded_s(
    device: TrainerDevice, stage: StageParameters, one: _Pass, layers: FloatArray, count: FloatArray
) -> FloatArray:
    """Shards' traffic of all microbatches that compute does not hide; the last may reduce gradients for all of them."""
    scatters = device.trainer.timing.reduce_every_microbatch
    each = _sharded_exposed_s(device, stage, one, layers, scatters)
    if not (device.options.whole_gradients and scatters):
        return count * each
    return each + np.maximum(count - 1.0, 0.0) * _sharded_exposed_s(device, stage, one, layers, False)


def _sharded_exposed_s(
    device: TrainerDevice, stage: StageParameters, one: _Pass, layers: FloatArray, scatters: bool
) -> FloatArray:
    """Shards' traffic of one microbatch that compute does not hide: each layer, each pass, plus both ends.

    ZeRO 2 keeps what the forward gathered for the backward.

    The tables are gathered once, before the first layer, and their gradients scattered last; nothing covers either.
    Of a microbatch that ``scatters`` none, the pass that packs gradients adds them up instead.
    """
    where, timing = (device.hw, device.trainer, device.layout), device.trainer.timing
    trained = np.asarray(0.0 if device.options.lora_rank else 1.0)
    traffic = shard_traffic(*where, stage.layer_dense, stage.layer_routed, trained)
    tables = shard_traffic(*where, stage.embedding + stage.head, np.zeros(()), trained)
    scatter = traffic.scatter if scatters else 0.0 * traffic.scatter
    ahead = one.forward
    back = one.backward + one.recompute
    again = (device.layout.zero_stage >= 3).astype(np.float64)
    behind = again * traffic.gather + scatter
    exposed = np.maximum(traffic.gather - timing.shard_overlap * ahead, 0.0)
    exposed = exposed + np.maximum(behind - timing.shard_overlap * back, 0.0)
    hidden = np.minimum(traffic.gather, ahead) + np.minimum(behind, back)
    copies = (1.0 + again) * traffic.unpack + traffic.pack
    ends = traffic.gather + scatter + tables.gather + tables.unpack + tables.pack
    ends = ends + (tables.scatter if scatters else 0.0)
    return layers * (exposed + copies + timing.contention * hidden) + ends


def _update_traffic_s(
    device: TrainerDevice, dense: FloatArray, routed: FloatArray, one: _Pass, layers: FloatArray
) -> FloatArray:
    """Traffic once per update: gradients hide under the last backward, gathered weights under the first forward."""
    where, timing = (device.hw, device.trainer, device.layout), device.trainer.timing
    reduce, gather = data_traffic(*where, dense, routed)
    share = timing.data_overlap * device.switches.data_overlap
    once = shard_traffic(*where, dense, routed, np.ones(())).scatter
    reduce = reduce + (0.0 if timing.reduce_every_microbatch else once)
    under = layers * (one.backward + one.recompute + one.tensor / 2.0)
    tail = 1.0 / np.maximum(layers, 1.0)
    exposed = np.maximum(reduce - share * under, reduce * np.where(share > 0, tail, 1.0))
    return exposed + np.maximum(gather - share * layers * one.forward, gather * np.where(share > 0, tail, 1.0))


def _parked_s(arch: Architecture, device: TrainerDevice, one: _Pass) -> FloatArray:
    """Copies of one layer's kept activations to host memory and back that compute does not hide."""
    layout = device.layout
    parked = np.isin(layout.offload, OFFLOADS_ACTIVATIONS)
    if not np.any(parked):
        return np.zeros(())
    kept = layer_activations(arch, Keeping(layout, gathers_once=device.switches.gathers_once))
    full = layout.activation_recompute == RECOMPUTE.index("full")
    copy = host_copy_s(device.hw, np.where(full, kept.boundary, kept.dense + kept.routed) * device.work.tokens)
    exposed = np.maximum(copy - one.forward, 0.0) + np.maximum(copy - one.backward - one.recompute, 0.0)
    return np.where(parked, exposed, 0.0)


def layer_table(
    arch: Architecture, hw: Hardware, trainer: TrainerCalibration, layout: Layout, microbatches: Microbatches,
    options: UpdateOptions = PLAIN,
) -> tuple[LayerSeconds, LayerSeconds]:  # fmt: skip
    """(mean layer, head) seconds of one microbatch on one device: the operators behind a prediction."""
    device = TrainerDevice(hw, trainer, layout, work_of(layout, microbatches), options)
    return layer_seconds(arch, device), head_seconds(arch, device)
