"""Operators of one engine_step on one device of a replica: what runs, how often, how long, and its speed of light."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rlperf.cost.attention import (
    BEST_BANDWIDTH,
    decode_attention_s,
    decode_fit,
    latent_decode_attention_s,
    latent_prefill_attention_s,
    prefill_attention_s,
    visible_pairs,
)
from rlperf.cost.collectives import (
    all_gather_s,
    all_reduce_s,
    dispatch_combine_s,
    point_to_point_s,
    reduce_scatter_s,
    scale_up_bytes_per_s,
)
from rlperf.cost.dtypes import cache_bytes, dtype_of
from rlperf.cost.moe import grouped_with, moe_fit, touched_experts
from rlperf.cost.network import network_bytes_per_s
from rlperf.cost.roofline import Array, as_float, gemm_fit, gemm_with, sheet_flop_per_s, small_op_s
from rlperf.layout import FloatArray, Layout
from rlperf.specs.architecture import Architecture
from rlperf.specs.calibration import EngineCalibration
from rlperf.specs.hardware import Hardware


@dataclass(frozen=True)
class Operator:
    """One operator of an engine_step, all layers together.

    Attributes
    ----------
    seconds : predicted [s]
    compute_s, memory_s, network_s : at the rates of the data sheet [s]; the largest is the speed of light
    """

    name: str
    seconds: FloatArray
    compute_s: FloatArray
    memory_s: FloatArray
    network_s: FloatArray


@dataclass(frozen=True)
class Roles:
    """Dtype of each kind of weights: checkpoints quantise some and leave others."""

    projection: str
    dense: str
    expert: str
    head: str = "bf16"


BLOCK_SCALED = frozenset({"qwen3_5_moe", "qwen3_next"})
"""Families whose publisher's fp8 checkpoints have block scales (128 x 128), besides those trained in fp8."""


def roles_of(arch: Architecture, hw: Hardware, gemm_dtype: str) -> Roles:
    """Which weights a checkpoint of ``gemm_dtype`` quantises.

    fp8 and weight-only int8 quantise every product but the head. Four-bit checkpoints of mixtures of experts quantise
    the experts alone (attention and dense layers stay bf16); those of dense models every product but the head. mxfp4
    runs on native four-bit units where the device has them, else its weights are widened to bf16 on the fly.
    """
    expert = gemm_dtype
    if gemm_dtype == "fp8" and (arch.checkpoint_dtype == "fp8" or arch.family in BLOCK_SCALED):
        expert = gemm_dtype = "fp8_block"
    if gemm_dtype == "mxfp4" and hw.device.peaks.fp4 is not None:
        expert = "nvfp4"
    narrow = gemm_dtype in ("nvfp4", "mxfp4", "int4_wo")
    rest = "bf16" if narrow and arch.experts is not None else gemm_dtype
    return Roles(projection=rest, dense=rest, expert=expert)


@dataclass(frozen=True)
class Replica:
    """One replica of an engine: everything that stays while batches change. Degrees are float64 arrays.

    ``tensor_parallel`` are the devices of a stage; ``attention_data_parallel`` of them hold copies of the attention
    layers, so that attention is split over tensor_parallel / attention_data_parallel devices.
    """

    arch: Architecture
    hw: Hardware
    engine: EngineCalibration
    roles: Roles
    kv_dtype: str
    tensor: FloatArray
    pipeline: FloatArray
    expert: FloatArray
    attention_data: FloatArray

    @classmethod
    def of(
        cls,
        arch: Architecture,
        hw: Hardware,
        engine: EngineCalibration,
        layout: Layout,
        gemm_dtype: str = "bf16",
        kv_dtype: str = "bf16",
    ) -> Replica:
        """From a layout of any shape."""
        tensor = as_float(layout.tensor_parallel)
        expert = np.minimum(as_float(layout.expert_parallel), tensor) if arch.experts else np.ones_like(tensor)
        return cls(
            arch=arch,
            hw=hw,
            engine=engine,
            roles=roles_of(arch, hw, gemm_dtype),
            kv_dtype="bf16" if kv_dtype == "fp16" else kv_dtype,
            tensor=tensor,
            pipeline=as_float(layout.pipeline_parallel),
            expert=expert,
            attention_data=np.minimum(as_float(layout.attention_data_parallel), tensor),
        )

    @property
    def attention_tensor(self) -> FloatArray:
        """Devices that share one copy of the attention layers."""
        return np.maximum(self.tensor / self.attention_data, 1.0)

    @property
    def kv_heads(self) -> FloatArray:
        """Key/value heads on one device; they are copied where there are fewer than devices."""
        return np.maximum(np.ceil(self.arch.kv_heads / self.attention_tensor), 1.0)

    @property
    def heads(self) -> FloatArray:
        """Query heads on one device."""
        return np.maximum(self.arch.heads / self.attention_tensor, 1.0)

    def within(self, group: FloatArray) -> FloatArray:
        """Devices of a group that share a scale-up domain."""
        return np.minimum(group, float(self.hw.cluster.scale_up_domain))


def total(operators: Iterable[Operator]) -> FloatArray:
    """Seconds of all operators together [s]."""
    return np.asarray(sum((one.seconds for one in operators), start=np.zeros(())), dtype=np.float64)


def gemm_operator(replica: Replica, name: str, count: float, m: Array, n: Array, k: Array, dtype: str) -> Operator:
    """``count`` matrix products in a row."""
    hw, kind = replica.hw, dtype_of(dtype)
    fit, _ = gemm_fit(hw, dtype)
    if replica.engine.fused_quantise and fit.quantise_memory:
        fit = fit.model_copy(update={"quantise_fixed": fit.quantise_fixed * (1.0 - replica.engine.fused_quantise)})
    rows, columns, inner = as_float(m), as_float(n), as_float(k)
    moved = rows * inner * kind.activation_bytes + columns * inner * kind.weight_bytes + rows * columns * 2.0
    return Operator(
        name,
        count * gemm_with(hw.device, fit, rows, columns, inner, dtype),
        count * 2.0 * rows * columns * inner / sheet_flop_per_s(hw, dtype),
        count * moved / hw.device.memory_bandwidth,
        np.zeros(()),
    )


def _memory_operator(replica: Replica, name: str, count: float, n_bytes: Array) -> Operator:
    moved = as_float(n_bytes)
    zero = np.zeros(())
    sheet = count * moved / replica.hw.device.memory_bandwidth
    return Operator(name, count * small_op_s(replica.hw, moved), zero, sheet, zero)


def _network_operator(replica: Replica, name: str, count: float, seconds: FloatArray, n_bytes: Array) -> Operator:
    rate = max(scale_up_bytes_per_s(replica.hw), network_bytes_per_s(replica.hw))
    zero = np.zeros(())
    return Operator(name, count * seconds, zero, zero, count * as_float(n_bytes) / rate)


def token_operators(replica: Replica, tokens: Array, sampled: Array) -> list[Operator]:
    """Operators whose time depends on the number of tokens alone: products, experts, norms, collectives, head.

    Parameters
    ----------
    tokens : tokens of the replica in this engine_step [tokens]; a pipeline works on tokens / pipeline_parallel
    sampled : rows that go through the head [tokens]
    """
    arch, at, roles = replica.arch, replica.attention_tensor, replica.roles
    whole = as_float(tokens) / replica.pipeline
    local = whole / replica.attention_data
    layers = float(arch.layers)
    found = [_memory_operator(replica, "norm", 2.0 * layers, local * arch.hidden * 8.0)]
    softmax = float(arch.attention_layers)
    if softmax:
        found += _attention_products(replica, softmax, local)
        rotated = local * (replica.heads + replica.kv_heads) * arch.head_dim * 4.0
        found.append(_memory_operator(replica, "rope", softmax * (2.0 if arch.qk_norm else 1.0), rotated))
    for kind in ("linear", "mamba"):
        count = float(arch.mixer_layers("linear" if kind == "linear" else "mamba"))
        if count:
            found += _state_products(replica, kind, count, local)
    dense, moe = float(arch.feed_forward_layers("dense")), float(arch.feed_forward_layers("moe"))
    if dense:
        found += _feed_forward(replica, "ffn", dense, local, arch.ffn_hidden / at, arch.ffn_gated, roles.dense)
    if moe:
        found += _experts(replica, moe, whole, local)
    found += _exchange(replica, layers, moe, whole, local)
    found += head_operators(replica, sampled)
    hop = point_to_point_s(replica.hw, local * arch.hidden * 2.0, replica.within(replica.tensor * replica.pipeline))
    found.append(_network_operator(replica, "pipeline", 1.0, hop * (replica.pipeline - 1.0), local * arch.hidden * 2.0))
    return found


def head_operators(replica: Replica, sampled: Array) -> list[Operator]:
    """Output head and sampling of ``sampled`` rows."""
    rows = as_float(sampled) / replica.pipeline
    width = replica.arch.vocab / replica.tensor
    return [
        gemm_operator(replica, "head", 1.0, rows, width, replica.arch.hidden, replica.roles.head),
        _memory_operator(replica, "sampling", 1.0, rows * replica.arch.vocab * 10.0),
    ]


def _attention_products(replica: Replica, count: float, tokens: FloatArray) -> list[Operator]:
    arch, dtype, h = replica.arch, replica.roles.projection, float(replica.arch.hidden)
    if arch.latent is None:
        query = replica.heads * arch.head_dim * (2.0 if arch.attention_gate else 1.0)
        width = query + 2.0 * replica.kv_heads * arch.head_dim
        return [
            gemm_operator(replica, "qkv", count, tokens, width, h, dtype),
            gemm_operator(replica, "output", count, tokens, h, replica.heads * arch.head_dim, dtype),
        ]
    mla, heads = arch.latent, replica.heads
    down = (mla.q_rank or 0) + mla.kv_rank + mla.rope_head_dim
    query = heads * (mla.nope_head_dim + mla.rope_head_dim)
    absorbed = heads * (mla.nope_head_dim + mla.value_head_dim)
    return [
        gemm_operator(replica, "qkv", count, tokens, down, h, dtype),
        gemm_operator(replica, "qkv", count, tokens, query, mla.q_rank or h, dtype),
        # the two per-head products with the latent, run as one batched product in bf16
        gemm_operator(replica, "latent", 2.0 * count, tokens, absorbed / 2.0, mla.kv_rank, "bf16"),
        gemm_operator(replica, "output", count, tokens, h, heads * mla.value_head_dim, dtype),
    ]


def _state_products(replica: Replica, kind: str, count: float, tokens: FloatArray) -> list[Operator]:
    arch, at, dtype, h = replica.arch, replica.attention_tensor, replica.roles.projection, float(replica.arch.hidden)
    if kind == "linear" and arch.linear_attention is not None:
        lin = arch.linear_attention
        value = lin.value_heads * lin.value_head_dim
        width = 2.0 * lin.key_heads * lin.key_head_dim + 2.0 * value + 2.0 * lin.value_heads
    elif arch.state_space is not None:
        ssm = arch.state_space
        value = ssm.heads * ssm.head_dim
        width = 2.0 * value + 2.0 * ssm.groups * ssm.state + ssm.heads
    else:
        return []
    return [
        gemm_operator(replica, "qkv", count, tokens, width / at, h, dtype),
        gemm_operator(replica, "output", count, tokens, h, value / at, dtype),
        _memory_operator(replica, "convolution", 2.0 * count, tokens * width / at * 4.0),
    ]


def _feed_forward(
    replica: Replica, name: str, count: float, tokens: FloatArray, width: Array, gated: bool, dtype: str
) -> list[Operator]:
    h, up = float(replica.arch.hidden), 2.0 if gated else 1.0
    return [
        gemm_operator(replica, name, count, tokens, up * as_float(width), h, dtype),
        _memory_operator(replica, "activation", count, tokens * as_float(width) * 2.0 * (up + 1.0)),
        gemm_operator(replica, name, count, tokens, h, width, dtype),
    ]


def _experts(replica: Replica, count: float, whole: FloatArray, local: FloatArray) -> list[Operator]:
    arch, hw, roles = replica.arch, replica.hw, replica.roles
    moe = arch.experts
    if moe is None:
        return []
    fit, _ = moe_fit(hw, roles.expert, replica.engine.moe_kernels)
    split = np.maximum(replica.tensor / replica.expert, 1.0)
    seconds = grouped_with(
        hw.device, fit, whole, arch.hidden, moe.hidden, moe.count, moe.active, replica.expert, split,
        dtype=roles.expert, gated=moe.gated, dispatched=replica.engine.expert_dispatch == "deepep",
    )  # fmt: skip
    kind, matrices = dtype_of(roles.expert), 3.0 if moe.gated else 2.0
    each = matrices * arch.hidden * moe.hidden / split
    weights = touched_experts(whole * moe.active, moe.count) / replica.expert * each * kind.weight_bytes
    flop = 2.0 * whole * moe.active / replica.expert * each
    found = [
        gemm_operator(replica, "router", count, local, moe.count, arch.hidden, "bf16"),
        _memory_operator(replica, "router", replica.engine.router_passes * count, local * moe.count * 4.0),
        Operator(
            "experts",
            count * seconds,
            count * flop / sheet_flop_per_s(hw, roles.expert),
            count * weights / hw.device.memory_bandwidth,
            np.zeros(()),
        ),
    ]
    if moe.shared_hidden:
        width = moe.shared_hidden / replica.attention_tensor
        found += _feed_forward(replica, "shared experts", count, local, width, moe.gated, roles.dense)
    return found


def _exchange(replica: Replica, layers: float, moe: float, whole: FloatArray, local: FloatArray) -> list[Operator]:
    """Collectives: two all-reduces a layer over tensor parallel; with attention data parallel the experts gather."""
    arch, hw, at = replica.arch, replica.hw, replica.attention_tensor
    size = local * arch.hidden * 2.0
    reduced = all_reduce_s(hw, size, at, replica.within(at), implementation=replica.engine.all_reduce)
    shared = np.where(replica.attention_data > 1.0, 2.0 * layers - moe, 2.0 * layers)
    found = [_network_operator(replica, "all-reduce", 1.0, reduced * shared, shared * size * 2.0 * (at - 1.0) / at)]
    if arch.qk_norm_whole:
        # sums of squares of queries and keys in fp32: one value each per token
        squares = local * 8.0
        summed = all_reduce_s(hw, squares, at, replica.within(at), implementation=replica.engine.all_reduce)
        found.append(_network_operator(replica, "all-reduce", layers, summed, squares * 2.0 * (at - 1.0) / at))
    if moe:
        everyone = whole * arch.hidden * 2.0
        group, near = replica.tensor, replica.within(replica.tensor)
        if replica.engine.expert_dispatch == "deepep" and arch.experts is not None:
            gathered = dispatch_combine_s(hw, local, arch.hidden, arch.experts.active, group, near)
        else:
            gathered = all_gather_s(hw, everyone / 2.0, group, near) + reduce_scatter_s(hw, everyone, group, near)
        gathered = np.where(replica.attention_data > 1.0, gathered, 0.0)
        moved = np.where(replica.attention_data > 1.0, 1.5 * everyone, 0.0)
        found.append(_network_operator(replica, "expert exchange", moe, gathered, moved))
    return found


def decode_operators(replica: Replica, running: Array, kv_tokens: Array) -> list[Operator]:
    """Attention of a decode: ``running`` requests that read ``kv_tokens`` cached tokens altogether."""
    arch = replica.arch
    share = replica.pipeline * replica.attention_data
    r, kv = as_float(running) / share, as_float(kv_tokens) / share
    found: list[Operator] = []
    for kind in ("full", "sliding"):
        count = float(arch.mixer_layers("full" if kind == "full" else "sliding"))
        if not count:
            continue
        seen = kv if kind == "full" else np.minimum(kv, r * float(arch.window))
        found.append(_decode_layer(replica, kind, count, r, seen))
    state = state_bytes(arch) / replica.attention_tensor
    recurrent = float(arch.mixer_layers("linear", "mamba"))
    if recurrent:
        found.append(_memory_operator(replica, "state", recurrent, 2.0 * r * state))
    return found


def _decode_layer(replica: Replica, kind: str, count: float, r: FloatArray, kv: FloatArray) -> Operator:
    arch, hw = replica.arch, replica.hw
    if arch.latent is not None:
        mla = arch.latent
        width = mla.kv_rank + mla.rope_head_dim
        seconds = latent_decode_attention_s(
            hw, r, kv, replica.heads, mla.kv_rank, mla.rope_head_dim,
            kv_dtype=replica.kv_dtype, kernel=replica.engine.decode_kernel,
        )  # fmt: skip
        flop, values = 2.0 * kv * replica.heads * (width + mla.kv_rank), kv * width
    else:
        seconds = decode_attention_s(
            hw, r, kv, replica.heads, replica.kv_heads, arch.head_dim,
            kv_dtype=replica.kv_dtype, kernel=replica.engine.decode_kernel,
        )  # fmt: skip
        flop = 4.0 * kv * replica.heads * arch.head_dim
        values = 2.0 * kv * replica.kv_heads * arch.head_dim
        if kind == "full":
            seconds = seconds + values * _beyond_bandwidth_s(replica)
    return Operator(
        f"{kind} attention",
        count * seconds,
        count * flop / sheet_flop_per_s(hw, "bf16"),
        count * values * cache_bytes(replica.kv_dtype) / hw.device.memory_bandwidth,
        np.zeros(()),
    )


def _beyond_bandwidth_s(replica: Replica) -> float:
    """Seconds per cached value that an engine's factor on kernels may not take off reading it.

    The factor stands for gaps and for kernels other than the timed ones. It shortens the fixed parts of attention, but
    what reads the cache at more than `BEST_BANDWIDTH` after it is held there.
    """
    hw, engine = replica.hw, replica.engine
    fit, _ = decode_fit(hw, replica.kv_dtype, engine.decode_kernel)
    missing = max(1.0 / (BEST_BANDWIDTH * engine.overhead.kernel_scale) - 1.0 / fit.memory, 0.0)
    return missing * cache_bytes(replica.kv_dtype) / hw.device.memory_bandwidth


def cached_token_held_s(replica: Replica) -> float:
    """Seconds per cached token, summed over a replica, by which reading it stays behind the engine's factor."""
    arch = replica.arch
    if arch.latent is not None:
        return 0.0
    values = 2.0 * float(arch.mixer_layers("full")) * float(np.max(replica.kv_heads)) * arch.head_dim
    share = float(np.max(replica.pipeline * replica.attention_data))
    return replica.engine.overhead.kernel_scale * values * _beyond_bandwidth_s(replica) / share


def state_bytes(arch: Architecture) -> float:
    """Recurrent state of one request in one linear-attention or Mamba layer, kept in fp32 [bytes]."""
    if arch.linear_attention is not None:
        lin = arch.linear_attention
        return 4.0 * lin.value_heads * lin.key_head_dim * lin.value_head_dim
    if arch.state_space is not None:
        ssm = arch.state_space
        return 4.0 * ssm.heads * ssm.head_dim * ssm.state
    return 0.0


def prefill_operators(replica: Replica, requests: Array, query_tokens: Array, kv_tokens: Array) -> list[Operator]:
    """Attention over prompts: ``requests`` with ``query_tokens`` new of ``kv_tokens`` visible tokens each."""
    arch, hw = replica.arch, replica.hw
    share = replica.pipeline * replica.attention_data
    s, q, k = as_float(requests) / share, as_float(query_tokens), as_float(kv_tokens)
    found: list[Operator] = []
    for kind in ("full", "sliding"):
        count = float(arch.mixer_layers("full" if kind == "full" else "sliding"))
        if not count:
            continue
        window = arch.window if kind == "sliding" else None
        pairs = s * visible_pairs(q, k, window=window)
        if arch.latent is not None:
            mla = arch.latent
            width = mla.nope_head_dim + mla.rope_head_dim + mla.value_head_dim
            seconds = latent_prefill_attention_s(
                hw, s, q, k, replica.heads, mla.nope_head_dim, mla.rope_head_dim, mla.value_head_dim,
                kernel=replica.engine.prefill_kernel, cache_values=mla.kv_rank + mla.rope_head_dim,
            )  # fmt: skip
        else:
            width = 2 * arch.head_dim
            seconds = prefill_attention_s(
                hw, s, q, k, replica.heads, replica.kv_heads, arch.head_dim, window=window,
                dtype=replica.kv_dtype, kernel=replica.engine.prefill_kernel, cache_write=True,
            )  # fmt: skip
        flop = 2.0 * pairs * replica.heads * width
        moved = s * (q * replica.heads + k * replica.kv_heads) * width * 2.0
        found.append(
            Operator(
                f"{kind} attention",
                count * seconds,
                count * flop / sheet_flop_per_s(hw, "bf16"),
                count * moved / hw.device.memory_bandwidth,
                np.zeros(()),
            )
        )
    found += _scan(replica, s * q)
    return found


def _scan(replica: Replica, tokens: FloatArray) -> list[Operator]:
    """Chunked scan of linear attention (arXiv 2412.06464, section 3.3) or Mamba-2 (arXiv 2405.21060, section 6)."""
    arch, hw = replica.arch, replica.hw
    count = float(arch.mixer_layers("linear", "mamba"))
    if not count:
        return []
    if arch.linear_attention is not None:
        lin = arch.linear_attention
        heads, inner, outer, chunk = lin.value_heads, lin.key_head_dim, lin.value_head_dim, 64.0
    elif arch.state_space is not None:
        ssm = arch.state_space
        heads, inner, outer, chunk = ssm.heads, ssm.state, ssm.head_dim, float(ssm.chunk)
    else:
        return []
    flop = 2.0 * tokens * heads / replica.attention_tensor * (chunk * (inner + outer) + 2.0 * inner * outer)
    moved = tokens * heads / replica.attention_tensor * (2.0 * inner + 2.0 * outer) * 2.0
    fit, _ = gemm_fit(hw, "bf16")
    compute_s = flop / sheet_flop_per_s(hw, "bf16")
    seconds = compute_s / (hw.calibration.stream.scan_compute * fit.compute) + small_op_s(hw, moved)
    return [
        Operator("scan", count * seconds, count * compute_s, count * moved / hw.device.memory_bandwidth, np.zeros(()))
    ]
