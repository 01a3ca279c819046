"""Weight sync: trained weights from the trainer to the rollout engines, by every path that frameworks use."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from rlperf.cost.collectives import all_gather_s, scale_up_bytes_per_s
from rlperf.cost.layers import stack_of
from rlperf.cost.network import network_bytes_per_s
from rlperf.cost.parameters import parameters, routed_parameters
from rlperf.layout import FloatArray
from rlperf.specs.architecture import Architecture
from rlperf.specs.hardware import Hardware
from rlperf.specs.rl_calibration import Transport, WeightSyncFit

HARDWARE_PATHS: tuple[Transport, ...] = ("reshard", "rdma", "shard_to_shard", "packed_broadcast")
"""Transports whose seconds are those of links, of seconds per tensor and of a fixed part: no rate of software."""


@dataclass(frozen=True)
class SyncShape:
    """Who sends and who receives; every field is a number or an array over candidates.

    Attributes
    ----------
    trainer_devices, rollout_devices : devices of the two pools (equal where they share them) [1]
    trainer_tensor_parallel, trainer_pipeline_parallel : t and p of the trainer; ZeRO-3 shards as ``trainer_shards``
    trainer_shards : devices over which one replica of the trained weights is split: t p, or the FSDP group [1]
    rollout_shards : t_g p_g, devices of one rollout replica (for experts: with its expert parallel) [1]
    nested : 1 where every rollout shard lies inside the trainer shards of its own device [flag]
    offloaded : 1 where the trainer's weights wait in host memory [flag]
    pipeline_parallel, expert_parallel : of the trainer: stages that follow each other, and devices that share the
        experts of a stage [1]
    """

    trainer_devices: npt.ArrayLike
    rollout_devices: npt.ArrayLike
    trainer_shards: npt.ArrayLike
    rollout_shards: npt.ArrayLike
    devices_per_node: npt.ArrayLike = 8
    nested: npt.ArrayLike = 1
    offloaded: npt.ArrayLike = 0
    pipeline_parallel: npt.ArrayLike = 1
    expert_parallel: npt.ArrayLike = 1


@dataclass(frozen=True)
class SyncPayload:
    """What is sent: bytes of the policy in its transfer dtype, routed experts apart, tensors of the checkpoint.

    ``quantise_s`` is the time to convert the weights before they are sent (`quantise_s`). ``feed_forward_bytes``: of
    the dense bytes those of feed-forward matrices (shared experts, layers without experts), which go from shard
    to shard where routed experts do.
    """

    dense_bytes: float
    expert_bytes: float
    tensors: float
    quantise_s: float = 0.0
    feed_forward_bytes: float = 0.0

    @property
    def bytes(self) -> float:
        """All of the policy [bytes]."""
        return self.dense_bytes + self.expert_bytes

    def __add__(self, other: SyncPayload) -> SyncPayload:
        """Both together."""
        return SyncPayload(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


def checkpoint_tensors(architecture: Architecture) -> int:
    """Tensors of the Hugging Face checkpoint, experts unfused: what per-tensor software loops over.

    Those of every layer (q, k, v, o; gate, up, down of every expert; router) with its norms, and embedding, last norm
    and head.

    >>> from rlperf.specs.profiles import load_architecture
    >>> checkpoint_tensors(load_architecture("Llama-3.1-8B"))
    291
    """
    stack = stack_of(architecture)
    return 3 - architecture.tied_embeddings + stack.norms + stack.total(lambda layer: layer.tensors())


def sync_payload(architecture: Architecture, bytes_per_parameter: float = 2.0) -> SyncPayload:
    """Payload of an architecture: ``bytes_per_parameter`` of the transfer dtype (bf16 2, fp8 1) [bytes]."""
    routed = float(routed_parameters(architecture))
    return SyncPayload(
        dense_bytes=(parameters(architecture) - routed) * bytes_per_parameter,
        expert_bytes=routed * bytes_per_parameter,
        tensors=float(checkpoint_tensors(architecture)),
        feed_forward_bytes=sum(halves[-1].parameters for halves in stack_of(architecture).layers) * bytes_per_parameter,
    )


def adapter_payload(architecture: Architecture, rank: int, jobs: int = 1) -> SyncPayload:
    """Payload of the adapters of LoRA jobs, two matrices in 16 bits to every adapted one; the frozen was sent once."""
    stack = stack_of(architecture)
    values = sum(count * matrix.adapter_values for matrix, _, count in stack.matrices)
    pairs = sum(count * matrix.parts for matrix, _, count in stack.matrices)
    return SyncPayload(jobs * rank * values * 2.0, 0.0, jobs * 2.0 * pairs)


def quantise_s(hw: Hardware, parameters: npt.ArrayLike, devices: npt.ArrayLike, to_bytes: float = 1.0) -> FloatArray:
    """Seconds to convert bf16 weights before they are sent: each device reads and writes its own share once.

    t = parameters (2 + to_bytes) / (devices x W x stream share) [s]; W memory bandwidth [bytes/s].
    """
    stream = hw.calibration.stream.stream_memory
    share = np.asarray(parameters, np.float64) / np.asarray(devices, np.float64)
    return np.asarray(share * (2.0 + to_bytes) / (hw.device.memory_bandwidth * stream), np.float64)


def reshard_bytes(payload_bytes: npt.ArrayLike, shape: SyncShape) -> FloatArray:
    r"""Bytes that one device receives when its trainer shard becomes its rollout shard (colocated).

    .. math:: M \left(\frac{1}{t_g p_g} - \frac{1}{t p}\right) \text{ nested}, \qquad
              M \left(1 - \frac{1}{t p}\right) \text{ otherwise (full all-gather)}

    M bytes of the policy, t p trainer shards, t_g p_g rollout shards [1]. HybridFlow (arXiv 2409.19256), table 2: the
    nested form is its zero-redundancy engine; the other is the full gather of earlier systems.

    >>> shape = SyncShape(16, 16, trainer_shards=16, rollout_shards=[4, 4], nested=[1, 0])
    >>> reshard_bytes(160e9, shape).tolist()
    [30000000000.0, 150000000000.0]
    """
    m = np.asarray(payload_bytes, np.float64)
    trainer = 1.0 / np.maximum(np.asarray(shape.trainer_shards, np.float64), 1.0)
    rollout = 1.0 / np.maximum(np.asarray(shape.rollout_shards, np.float64), 1.0)
    needed = np.maximum(rollout - trainer, 0.0)
    return np.asarray(m * np.where(np.asarray(shape.nested) > 0, needed, 1.0 - trainer), np.float64)


def wire_bytes_per_s(hw: Hardware, devices: FloatArray, per_node: FloatArray) -> FloatArray:
    """Fast links inside a node, the device's share of the network across nodes [bytes/s]."""
    return np.where(devices > per_node, network_bytes_per_s(hw), scale_up_bytes_per_s(hw))


def wire_s(hw: Hardware, fit: WeightSyncFit, payload: SyncPayload, shape: SyncShape) -> FloatArray:
    """Seconds that the links alone take: the floor under every software path [s].

    reshard: `reshard_bytes` at the link of the trainer group. rdma: `_exchanged_bytes` over a device's share of the
    network. shard_to_shard: the same for feed-forward matrices and experts, and a packed broadcast of the rest.
    packed_broadcast: the whole policy leaves one device. colocated: the whole policy once into every node over which
    one copy of the trained weights lies (`_spanned`). All others: once into every receiving node (broadcast, pipelined
    over its devices' links).
    """
    f = np.float64
    trainer, rollout = np.asarray(shape.trainer_devices, f), np.asarray(shape.rollout_devices, f)
    per_node = np.asarray(shape.devices_per_node, f)
    m = payload.bytes * fit.changed
    port = network_bytes_per_s(hw) * fit.hardware
    if fit.transport == "reshard":
        link = wire_bytes_per_s(hw, np.asarray(shape.trainer_shards, f), per_node)
        return np.asarray(reshard_bytes(m, shape) / (link * fit.hardware), f)
    if fit.transport == "rdma":
        return np.asarray(_exchanged_bytes(m, shape) / port, f)
    if fit.transport == "shard_to_shard":
        direct = payload.expert_bytes + payload.feed_forward_bytes
        rest = (payload.bytes - direct) / port
        return np.asarray(rest + _exchanged_bytes(direct, shape) / network_bytes_per_s(hw), f)
    if fit.transport == "packed_broadcast":
        return np.asarray(payload.bytes / port, f)
    together = _spanned(shape) if fit.transport == "colocated" else np.maximum(trainer, rollout)
    link = wire_bytes_per_s(hw, together, per_node) * np.minimum(together, per_node)
    return np.asarray(m / (link * fit.hardware), f)


def _spanned(shape: SyncShape) -> FloatArray:
    """Devices over which one copy of the trained weights lies: its shards, the devices that share experts, or, since
    stages are outermost among the ranks, all of the trainer's."""
    f = np.float64
    shared = np.maximum(np.asarray(shape.trainer_shards, f), np.asarray(shape.expert_parallel, f))
    return np.where(np.asarray(shape.pipeline_parallel) > 1, np.asarray(shape.trainer_devices, f), shared)


def _exchanged_bytes(sent: float, shape: SyncShape) -> FloatArray:
    """Shard to shard: the larger of what a receiver takes, and what a sender gives to all replicas."""
    f = np.float64
    shards = np.maximum(np.asarray(shape.rollout_shards, f), 1.0)
    replicas = np.maximum(np.asarray(shape.rollout_devices, f) / shards, 1.0)
    given = sent * replicas / np.maximum(np.asarray(shape.trainer_devices, f), 1.0)
    return np.asarray(np.maximum(sent / shards, given), f)


def export_s(hw: Hardware, fit: WeightSyncFit, payload: SyncPayload, shape: SyncShape) -> FloatArray:
    r"""Seconds until whole tensors lie where they are sent from: over expert parallel and, for one sender, all stages.

    .. math:: t = \frac{t_{gather}(E; e)}{s} + (1 - 1/k)\, \frac{D / n + E / e}{W_{net}}

    E, D bytes of routed experts and of the rest; e expert parallel (`all_gather_s`); n shards of a stage; s stages that
    export side by side (``fit.senders`` = stages: each sends its own, and nothing crosses stages; else s = 1). Whoever
    sends all has the other stages' tensors first: every device of a stage hands its own shard on, at its share of the
    network W_net, before they are joined (Megatron-Bridge: broadcast over stages, then gathers); k is the number of
    scale-up domains over which the stages, outermost among the ranks, lie.
    """
    f = np.float64
    stages, experts = np.asarray(shape.pipeline_parallel, f), np.maximum(np.asarray(shape.expert_parallel, f), 1.0)
    domain = float(hw.cluster.scale_up_domain)
    gathered = all_gather_s(hw, payload.expert_bytes, experts, np.minimum(experts, domain))
    if fit.senders == "stages":
        return np.asarray(gathered / np.maximum(stages, 1.0), f)
    spans = np.minimum(stages, np.ceil(np.asarray(shape.trainer_devices, f) / domain))
    handed = (payload.dense_bytes / _stage_shards(shape) + payload.expert_bytes / experts) / network_bytes_per_s(hw)
    return np.asarray(gathered + (1.0 - 1.0 / np.maximum(spans, 1.0)) * handed, f)


def _stage_shards(shape: SyncShape) -> FloatArray:
    """Devices over which one stage of the trained weights is split: by tensor parallelism, or by FSDP [1]."""
    stages = np.maximum(np.asarray(shape.pipeline_parallel, np.float64), 1.0)
    return np.maximum(np.asarray(shape.trainer_shards, np.float64) / stages, 1.0)


def _with_export_s(
    hw: Hardware, fit: WeightSyncFit, payload: SyncPayload, shape: SyncShape, wire: FloatArray
) -> FloatArray:
    """Making and sending what is sent, one beside the other or in turn [s]."""
    side_by_side = np.asarray(shape.pipeline_parallel, np.float64) if fit.senders == "stages" else 1.0
    made = np.asarray(payload.tensors * fit.per_tensor / side_by_side + payload.quantise_s, np.float64)
    if fit.transport == "packed_broadcast":
        made = made + export_s(hw, fit, payload, shape) + (gather_s(hw, payload, shape) if fit.gathers else 0.0)
    return np.maximum(made, wire) if fit.overlapped else made + wire


def gather_s(hw: Hardware, payload: SyncPayload, shape: SyncShape) -> FloatArray:
    r"""Seconds in which every trainer device gathers a stage's shards from other nodes, tensor by tensor [s].

    .. math:: t = M (1 - 1/k) / W_{net}

    k scale-up domains that one stage of the trained weights spans, W_net a device's share of the network [bytes/s];
    what lies in the own domain comes over the fast links meanwhile.
    """
    domains = np.ceil(_stage_shards(shape) / float(hw.cluster.scale_up_domain))
    return np.asarray(payload.bytes * (1.0 - 1.0 / domains) / network_bytes_per_s(hw), np.float64)


def weight_sync_s(hw: Hardware, fit: WeightSyncFit, payload: SyncPayload, shape: SyncShape) -> FloatArray:
    r"""Seconds of one weight sync.

    .. math::

        t = t_0 + n\,t_n + q + \max\left(\left(\frac{\delta D}{r} + \frac{\delta E}{r_e d}\right)
            (1 + \gamma \log_2 N) + \frac{o M}{n_T r_o},\; t_{wire}\right) + g

    t_0 fixed, t_n per tensor [s], n tensors, q conversion [s]; D, E bytes of dense weights and routed experts,
    M = D + E; delta share of the bytes sent; r, r_e rates of the software path [bytes/s]; d trainer devices where
    each handles its own experts, else 1; N nodes that receive (or that the trainer's shards span), gamma growth per
    doubling; o 1 where the trainer's weights wait in host memory, r_o the rate at which each of the n_T trainer
    devices fetches its share; t_wire `wire_s`; g `gather_s` and `export_s` where whole tensors are gathered first.
    `HARDWARE_PATHS` have :math:`t_0 + x + t_{wire}`, or :math:`t_0 + \max(x, t_{wire})` where the next bucket is made
    while one is sent; x = n t_n / s + q, and `export_s` (and `gather_s`) before a packed broadcast; s pipeline stages
    that work side by side.

    What goes tensor by tensor is bound by software at 2 to 90 GB/s of the policy's bytes, far below the links; packed
    broadcasts leave one device's port, and shard-to-shard paths use those of all devices. The constants hold per
    transport (``calibrations/frameworks``, ``calibrations/transports``).

    Returns
    -------
    Seconds, shape of the broadcast fields of ``shape``.
    """
    wire = wire_s(hw, fit, payload, shape)
    if fit.transport in HARDWARE_PATHS:
        return np.asarray(fit.fixed + _with_export_s(hw, fit, payload, shape, wire), np.float64)
    f = np.float64
    spread = shape.trainer_shards if fit.spread_over == "shards" else shape.rollout_devices
    nodes = np.maximum(np.ceil(np.asarray(spread, f) / np.asarray(shape.devices_per_node, f)), 1.0)
    handlers = np.maximum(np.asarray(shape.trainer_devices, f), 1.0) if fit.sharded else np.ones(())
    dense = payload.dense_bytes * fit.changed / fit.rate
    experts = payload.expert_bytes * fit.changed / ((fit.expert_rate or fit.rate) * handlers)
    moved = (dense + experts) * (1.0 + fit.per_node_doubling * np.log2(nodes))
    if fit.offload_rate:
        own = payload.bytes / np.maximum(np.asarray(shape.trainer_devices, f), 1.0)
        moved = moved + np.asarray(shape.offloaded, f) * own / fit.offload_rate
    software = np.maximum(moved, wire)
    if fit.gathers:
        software = software + gather_s(hw, payload, shape) + export_s(hw, fit, payload, shape)
    return np.asarray(fit.fixed + payload.tensors * fit.per_tensor + payload.quantise_s + software, np.float64)
