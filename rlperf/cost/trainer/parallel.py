"""Seconds of traffic of one trainer layout: tensor, context, expert, pipeline and data parallel; optimizer; offload.

Ranks are laid out tensor, context, (expert,) data, pipeline parallel from the innermost, as Megatron does, so the
share of a group that sits in one scale-up domain follows from the product of the inner degrees.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlperf.cost.collectives import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    host_copy_s,
    point_to_point_s,
    reached,
    reduce_scatter_s,
)
from rlperf.cost.layers import stack_of
from rlperf.cost.roofline import stream_s
from rlperf.cost.trainer.parameters import OFFLOADS_OPTIMIZER, StageParameters, lora_parameters
from rlperf.cost.trainer_device import Work
from rlperf.layout import BoolArray, FloatArray, Layout
from rlperf.specs.architecture import Architecture
from rlperf.specs.hardware import Hardware
from rlperf.specs.trainer_calibration import TrainerCalibration
from rlperf.specs.trainer_switches import Switches


@dataclass(frozen=True)
class Passes:
    """Seconds of one kind of traffic per microbatch and mean layer, in the forward and in the backward.

    ``last`` : of the forward's, what follows a layer's last product
    """

    forward: FloatArray
    backward: FloatArray
    last: FloatArray | float = 0.0


@dataclass(frozen=True)
class ShardTraffic:
    """ZeRO-3 traffic of one mean layer (or the tables) [s].

    Attributes
    ----------
    gather : in each of forward and backward
    scatter : of its gradients
    unpack, pack : copies out of the gathered buffer and into the scattered one, which hold up the compute stream
    """

    gather: FloatArray
    scatter: FloatArray
    unpack: FloatArray
    pack: FloatArray


def within(hw: Hardware, group: FloatArray, inner: FloatArray) -> FloatArray:
    """Members of a group that share a scale-up domain when ``inner`` ranks stand between two of them [1]."""
    return np.clip(np.floor(hw.cluster.scale_up_domain / np.maximum(inner, 1.0)), 1.0, group)


def tensor_traffic(
    arch: Architecture,
    hw: Hardware,
    trainer: TrainerCalibration,
    layout: Layout,
    work: Work,
    switches: Switches,
    gathered_bytes: float,
) -> Passes:
    """Activations of the halves of a layer: all-reduce forward and backward, or with sequence parallelism all-gather
    and reduce-scatter each way, plus the gather that the backward repeats (Korthikanti et al. 2022, section 4.2.2).

    Where nothing is gathered behind a norm, each matrix that reads it fetches its own input, which is kept for the
    backward; without sequence parallelism each sums up its own gradient of it. Collectives were counted on a dense
    layer with grouped queries and a gate; of other layers `Layer.readers` counts matrices, by the same rule.
    What is gathered has ``gathered_bytes`` a value, what is summed up two.
    """
    tp = layout.tensor_parallel.astype(np.float64)
    buffer = 2.0 * work.tokens * arch.hidden
    inside = within(hw, tp, np.ones(()))
    sequence = layout.sequence_parallel > 0
    whole, spread = np.where(sequence, 0.0, buffer), np.where(sequence, buffer, 0.0)
    reduce = all_reduce_s(hw, whole, tp, inside)
    gather = all_gather_s(hw, spread * gathered_bytes / 2.0, tp, inside)
    scatter = reduce_scatter_s(hw, spread, tp, inside)
    stack, timing = stack_of(arch), trainer.timing
    factor = timing.collective * (1.0 - timing.tensor_overlap * switches.tensor_overlap)
    halves, readers = stack.norms / arch.layers, stack.readers / arch.layers
    inputs, again = (halves, halves) if switches.gathers_once else (readers, 0.0)
    return Passes(
        forward=factor * np.where(sequence, inputs * gather + halves * scatter, halves * reduce),
        backward=factor * np.where(sequence, (halves + again) * gather + halves * scatter, inputs * reduce),
        last=factor * halves / 2.0 * np.where(sequence, scatter, reduce),
    )


def context_traffic(
    arch: Architecture, hw: Hardware, trainer: TrainerCalibration, layout: Layout, work: Work
) -> Passes:
    """Ring: keys and values (backward: gradients too) travel cp - 1 hops. Ulysses: all-to-all of q, k, v and output."""
    tp = layout.tensor_parallel.astype(np.float64)
    ring, split = layout.context_parallel.astype(np.float64), layout.ulysses.astype(np.float64)
    near, inside = within(hw, ring, tp * split) >= ring, within(hw, split, tp)
    forward: FloatArray = np.zeros(())
    backward: FloatArray = np.zeros(())
    for moved, count in stack_of(arch).context:
        chunk = 2.0 * (work.attention_tokens / split) * moved.ring / np.minimum(tp, moved.heads)
        hop = (ring - 1.0) * point_to_point_s(hw, chunk, near)
        swap = all_to_all_s(hw, 2.0 * work.tokens * moved.exchanged / tp, split, inside)
        factor = trainer.timing.collective * count / arch.layers
        forward, backward = forward + factor * (hop + swap), backward + factor * (2.0 * hop + swap)
    return Passes(forward, backward)


def expert_traffic(
    arch: Architecture,
    hw: Hardware,
    trainer: TrainerCalibration,
    layout: Layout,
    work: Work,
    skew: FloatArray | float,
    switches: Switches,
) -> Passes:
    """Dispatch and combine of every token to its experts, forward and backward.

    DeepEP and its kin send a token once to each node that it reaches, and inside a node once to each device; a plain
    all-to-all sends a copy per expert. Of n nodes or devices k experts reach n (1 - (1 - 1/n)^k) in the mean.
    """
    ep, etp = layout.expert_parallel.astype(np.float64), layout.expert_tensor_parallel.astype(np.float64)
    inside = within(hw, ep, etp)
    nodes = ep / inside
    seconds: FloatArray = np.zeros(())
    for route, count in stack_of(arch).routed:
        copies = np.asarray(float(route.active))
        if switches.dispatcher != "alltoall":
            places = np.where(nodes > 1.0, nodes, ep)
            copies = np.minimum(copies, np.maximum(reached(copies, places), 1.0))
        token_bytes = 2.0 * work.tokens / layout.tensor_parallel * route.width * skew
        swap = 2.0 * all_to_all_s(hw, token_bytes * copies, ep, inside)
        gathered = token_bytes * etp * route.active
        shards = all_gather_s(hw, gathered, etp, etp) + reduce_scatter_s(hw, gathered, etp, etp)
        seconds = seconds + count / arch.layers * (swap + shards)
    seconds = seconds * trainer.timing.collective * (1.0 - trainer.timing.expert_overlap * switches.expert_overlap)
    return Passes(seconds, seconds)


def stage_hop_s(
    arch: Architecture, hw: Hardware, trainer: TrainerCalibration, layout: Layout, work: Work, *, overlap: bool
) -> FloatArray:
    """Exposed seconds to hand one microbatch's activations to the next stage; tensor ranks send a part each."""
    inner = (layout.devices // layout.pipeline_parallel).astype(np.float64)
    near = inner * layout.pipeline_parallel <= hw.cluster.scale_up_domain
    message = 2.0 * work.tokens * arch.hidden / layout.tensor_parallel
    timing = trainer.timing
    hop = point_to_point_s(hw, message, near) * timing.collective * (1.0 - timing.pipeline_overlap * overlap)
    return np.where(layout.pipeline_parallel > 1, hop, 0.0)


def trained_share(
    arch: Architecture, layout: Layout, stage: StageParameters, lora_rank: int | None
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Trained parameters of one device: (mean layer, dense; mean layer, routed experts; embedding and head) [1]."""
    if not lora_rank:
        first = stage.embedding - stage.frozen
        tables = np.where(layout.pipeline_parallel == 1, first + stage.head, np.maximum(first, stage.head))
        return stage.layer_dense, stage.layer_routed, tables
    dense, routed = lora_parameters(arch, lora_rank)
    experts = layout.expert_parallel * layout.expert_tensor_parallel
    return dense / layout.tensor_parallel, routed / experts, np.zeros(())


def in_shards(trainer: TrainerCalibration, layout: Layout) -> BoolArray:
    """Whether weights lie in shards between microbatches: at ZeRO 3, and at ZeRO 2 of FSDP.

    There shards are wider than what computes. FSDP that does not reshard after forward (ZeRO 2 here) still does after
    backward: every microbatch gathers once.

    >>> from rlperf.specs.trainer_calibration import load_trainer
    >>> stages = Layout.of(data_parallel=8, zero_stage=[1, 2, 3])
    >>> [in_shards(load_trainer(name), stages).tolist() for name in ("deepspeed", "fsdp2")]
    [[False, False, True], [False, True, True]]
    """
    store, zero = trainer.storage, layout.zero_stage
    return np.asarray((zero >= 3) | ((zero == 2) & (store.weight > store.compute_weight)))


def data_traffic(
    hw: Hardware, trainer: TrainerCalibration, layout: Layout, dense: FloatArray, routed: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """(reduction of gradients, gathering of updated weights) of a device's parameters, once per update [s].

    ZeRO 0: all-reduce of gradients and no gathering. ZeRO 1, 2: reduce-scatter and all-gather. Weights `in_shards`
    with a shard size below the group (HSDP): all-reduce of shards over replicas. Experts reduce over their own group.
    """
    inner = layout.tensor_parallel.astype(np.float64)
    group = (layout.data_parallel * layout.context_parallel * layout.ulysses).astype(np.float64)
    shards = layout.shards.astype(np.float64)
    experts = layout.expert_data_parallel.astype(np.float64)
    store = trainer.storage
    reduce: FloatArray = np.zeros(())
    gather: FloatArray = np.zeros(())
    plain = layout.zero_stage == 0
    split = ~plain & ~in_shards(trainer, layout)
    for parameters, members, between in (
        (dense, group, inner),
        (routed, experts, (layout.expert_parallel * layout.expert_tensor_parallel).astype(np.float64)),
    ):
        inside = within(hw, members, between)
        size = parameters * store.reduce
        replicas = np.maximum(members / np.minimum(shards, members), 1.0)
        far = within(hw, replicas, between * shards)
        # what a stage does not send is 0 bytes, so that a collective nobody runs is not costed
        reduce = reduce + all_reduce_s(hw, np.where(plain, size, 0.0), members, inside)
        reduce = reduce + reduce_scatter_s(hw, np.where(split, size, 0.0), members, inside)
        hybrid = np.where(plain | split, 0.0, size / np.minimum(shards, members))
        reduce = reduce + all_reduce_s(hw, hybrid, replicas, far)
        gather = gather + all_gather_s(hw, np.where(split, parameters * store.gather, 0.0), members, inside)
    return reduce * trainer.timing.collective, gather * trainer.timing.collective


def shard_traffic(
    hw: Hardware,
    trainer: TrainerCalibration,
    layout: Layout,
    dense: FloatArray,
    routed: FloatArray,
    trained: FloatArray,
) -> ShardTraffic:
    """Gather and scatter of parameters that a device computes with ([parameters]); 0 unless they lie `in_shards`.

    ``trained`` is the share of them whose gradients are scattered [1]. The copies are those of `fully_shard`, whose
    gathered parameters and gradients do not lie in the order of the flat buffers (PyTorch RFC 114299).
    """
    store, timing, shards = trainer.storage, trainer.timing, layout.shards.astype(np.float64)
    experts = np.minimum(layout.expert_data_parallel.astype(np.float64), shards)
    inside = within(hw, shards, layout.tensor_parallel.astype(np.float64))
    expert_inside = within(hw, experts, (layout.expert_parallel * layout.expert_tensor_parallel).astype(np.float64))
    sharded = in_shards(trainer, layout) & (shards > 1)
    dense, routed = np.where(sharded, dense, 0.0), np.where(sharded, routed, 0.0)
    held, messages = dense + routed, float(timing.shard_messages)
    each, each_routed = dense / messages, routed / messages
    gather = all_gather_s(hw, each * store.gather, shards, inside)
    gather = gather + all_gather_s(hw, each_routed * store.gather, experts, expert_inside)
    scatter = reduce_scatter_s(hw, each * trained * store.reduce, shards, inside)
    scatter = scatter + reduce_scatter_s(hw, each_routed * trained * store.reduce, experts, expert_inside)
    parts = (
        timing.collective * messages * gather,
        timing.collective * messages * scatter,
        stream_s(hw, held * timing.unpack_bytes),
        stream_s(hw, held * trained * timing.pack_bytes),
    )
    return ShardTraffic(*(np.where(sharded, part, 0.0) for part in parts))


def owned_parameters(layout: Layout, dense: FloatArray, routed: FloatArray) -> FloatArray:
    """Of a device's trained parameters, those that it updates: all, or its shard [parameters]."""
    limit = np.where(layout.zero_stage >= 1, layout.shards, 1).astype(np.float64)
    routed_limit = np.where(layout.zero_stage >= 1, np.minimum(layout.expert_data_parallel, layout.shards), 1)
    return np.asarray(dense / limit + routed / routed_limit)


def optimizer_s(
    hw: Hardware, trainer: TrainerCalibration, layout: Layout, dense: FloatArray, routed: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """(device, host) seconds of the optimizer over a device's parameters.

    Device: the update moves bytes per owned parameter, clearing and scaling gradients bytes per held one. Host
    (offloaded): gradients down and weights up over the host link, and the update at the rate of the host's cores.
    """
    owned = owned_parameters(layout, dense, routed)
    store, timing = trainer.storage, trainer.timing
    on_host = np.isin(layout.offload, OFFLOADS_OPTIMIZER)
    held = np.where(layout.zero_stage >= 2, owned, dense + routed)
    device = stream_s(hw, owned * timing.optimizer_bytes + held * timing.gradient_bytes)
    copies = host_copy_s(hw, owned * (store.gradient + store.compute_weight))
    host = copies + owned * (store.optimizer + store.gradient) / timing.host_adam
    return np.where(on_host, 0.0, device), np.where(on_host, host, 0.0)
