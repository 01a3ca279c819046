"""Seconds of one microbatch in one mean layer of one device: products, attention, experts, memory-bound passes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rlperf.cost.attention import packed_attention_s
from rlperf.cost.batching import Microbatches
from rlperf.cost.moe import grouped_gemm_s
from rlperf.cost.roofline import gemm_s, sheet_flop_per_s, small_op_s, stream_s
from rlperf.cost.vision import vision_prefill_s
from rlperf.layout import FloatArray, Layout
from rlperf.specs.architecture import Architecture
from rlperf.specs.hardware import Hardware
from rlperf.specs.trainer_calibration import Generation, TrainerCalibration


@dataclass(frozen=True)
class Linear:
    """One matrix of the mean layer on one device: ``share`` of the layers have it, ``outputs`` x ``inputs`` values."""

    share: float
    outputs: FloatArray
    inputs: FloatArray


@dataclass(frozen=True)
class Work:
    """What one device computes in one microbatch [tokens], after context parallelism.

    ``tokens`` pass through the matrices; ``attention_tokens`` and ``pairs`` (sum of squares) through attention, where
    Ulysses gathers tokens and splits heads instead; ``stream_tokens`` through norms and residuals, where sequence
    parallelism splits once more.
    """

    tokens: FloatArray
    attention_tokens: FloatArray
    pairs: FloatArray
    max_len: FloatArray
    stream_tokens: FloatArray


@dataclass(frozen=True)
class LayerSeconds:
    """Device seconds of one microbatch in the mean layer (or head); every field broadcasts.

    ``attention`` is the forward of attention alone: what selective recompute repeats. ``last`` is that of the dense
    MLP's down projection: what a recompute that stops early leaves out. ``again`` is what a chunked loss adds to a
    head: the projection once more, and the bytes that it moves beyond a plain one's.
    """

    forward: FloatArray
    backward: FloatArray
    attention: FloatArray
    last: FloatArray = field(default_factory=lambda: np.zeros(()))
    again: FloatArray = field(default_factory=lambda: np.zeros(()))


def work_of(layout: Layout, microbatches: Microbatches) -> Work:
    """Share of one device in one microbatch; ring context parallelism balances the causal triangle."""
    ring = layout.context_parallel.astype(np.float64)
    split = ring * layout.ulysses
    tokens = microbatches.tokens / split
    spread = np.where(layout.sequence_parallel > 0, layout.tensor_parallel, 1).astype(np.float64)
    return Work(
        tokens=tokens,
        attention_tokens=microbatches.tokens / ring,
        pairs=microbatches.sum_squares / ring,
        max_len=microbatches.max_len,
        stream_tokens=tokens / spread,
    )


def linears(arch: Architecture, layout: Layout) -> tuple[Linear, ...]:
    """Every dense matrix of the mean layer, tensor parallelism applied; routed experts are not among them."""
    tp = layout.tensor_parallel.astype(np.float64)
    h, layers = np.asarray(float(arch.hidden)), float(arch.layers)
    softmax = arch.attention_layers / layers
    found = [*_attention_linears(arch, tp, h, softmax)] if softmax else []
    up = 2.0 if arch.ffn_gated else 1.0
    dense = arch.feed_forward_layers("dense") / layers
    if dense:
        found += [Linear(dense, up * arch.ffn_hidden / tp, h), Linear(dense, h, arch.ffn_hidden / tp)]
    if arch.experts and arch.experts.shared_hidden:
        shared, moe = arch.experts.shared_hidden / tp, arch.feed_forward_layers("moe") / layers
        found += [Linear(moe, (2.0 if arch.experts.gated else 1.0) * shared, h), Linear(moe, h, shared)]
    if arch.experts and arch.experts.latent_hidden:
        moe, latent = arch.feed_forward_layers("moe") / layers, np.asarray(float(arch.experts.latent_hidden))
        found += [Linear(moe, latent, h), Linear(moe, h, latent)]
    if arch.state_space:
        ssm, share = arch.state_space, arch.mixer_layers("mamba") / layers
        inner = ssm.heads * ssm.head_dim
        found += [
            Linear(share, (2.0 * inner + 2 * ssm.groups * ssm.state + ssm.heads) / tp, h),
            Linear(share, h, inner / tp),
        ]
    if arch.linear_attention:
        lin, share = arch.linear_attention, arch.mixer_layers("linear") / layers
        key, value = lin.key_heads * lin.key_head_dim, lin.value_heads * lin.value_head_dim
        found += [Linear(share, (2.0 * key + 2 * value + 2 * lin.value_heads) / tp, h), Linear(share, h, value / tp)]
    return tuple(found)


def _attention_linears(arch: Architecture, tp: FloatArray, h: FloatArray, share: float) -> list[Linear]:
    if arch.latent:
        mla = arch.latent
        heads = arch.heads / tp
        q_rank, kv_rank = np.asarray(float(mla.q_rank)), np.asarray(float(mla.kv_rank))
        query = heads * (mla.nope_head_dim + mla.rope_head_dim)
        down = [Linear(share, q_rank, h)] if mla.q_rank else []
        return [
            *down,
            Linear(share, query, q_rank if mla.q_rank else h),
            Linear(share, kv_rank + mla.rope_head_dim, h),
            Linear(share, heads * (mla.nope_head_dim + mla.value_head_dim), kv_rank),
            Linear(share, h, arch.value_width / tp),
        ]
    kv = 2.0 * arch.kv_heads * arch.head_dim / np.minimum(tp, arch.kv_heads)
    query = arch.query_width * (2.0 if arch.attention_gate else 1.0) / tp
    return [Linear(share, query + kv, h), Linear(share, h, arch.query_width / tp)]


def expert_width(arch: Architecture) -> float:
    """Width that tokens have on their way to and from the routed experts: latent where the model projects first."""
    return float(arch.experts.latent_hidden or arch.hidden) if arch.experts else 0.0


def matrix_s(
    hw: Hardware, rows: FloatArray, linear: Linear, dtype: str, *, frozen: bool = False
) -> tuple[FloatArray, FloatArray]:
    """(forward, backward) seconds of one matrix: y = x W; backward dx = dy W' and, unless frozen, dW = x' dy."""
    forward = gemm_s(hw, rows, linear.outputs, linear.inputs, dtype)
    backward = gemm_s(hw, rows, linear.inputs, linear.outputs, dtype)
    if not frozen:
        backward = backward + gemm_s(hw, linear.inputs, linear.outputs, rows, dtype)
    return linear.share * forward, linear.share * backward


def sustained(generation: Generation, dtype: str) -> float:
    """Sustained over short-burst rate of matrix products for a dtype [1]."""
    if dtype in ("nvfp4", "mxfp4"):
        return generation.sustained_fp4
    return generation.sustained if dtype in ("bf16", "fp16", "fp32", "tf32") else generation.sustained_fp8


def layer_seconds(
    arch: Architecture, hw: Hardware, trainer: TrainerCalibration, layout: Layout, work: Work,
    *, dtype: str, lora_rank: int | None, skew: FloatArray | float, attention_kernel: str = "flash",
) -> LayerSeconds:  # fmt: skip
    """Mean layer: matrices, attention, state-space or linear mixers, experts, and memory-bound passes."""
    generation = trainer.generation(hw.device)
    rate = sustained(generation, dtype)
    forward: FloatArray = np.zeros(())
    backward: FloatArray = np.zeros(())
    for linear in linears(arch, layout):
        ahead, back = matrix_s(hw, work.tokens, linear, dtype, frozen=lora_rank is not None)
        forward, backward = forward + ahead / rate, backward + back / rate
    attention, attention_back = _attention_s(arch, hw, trainer, generation, layout, work, attention_kernel)
    passes = _elementwise_s(arch, hw, trainer, layout, work)
    mixers = _mixer_s(arch, hw, layout, work)
    # a build that runs the older attention on a device has no grouped products for it either, and loops over experts
    loops = generation.moe_layer if attention_kernel == "flash2" else 0.0
    experts, experts_back = _expert_s(arch, hw, trainer, layout, work, dtype, rate, skew, lora_rank is not None, loops)
    forward = forward + attention + passes + mixers + experts
    backward = backward + attention_back + 2.0 * passes + 2.0 * mixers + experts_back
    if lora_rank:
        adapters = _adapter_s(arch, hw, trainer, layout, work)
        forward, backward = forward + adapters, backward + 2.0 * adapters
    dense = arch.feed_forward_layers("dense") / arch.layers
    width = arch.ffn_hidden / layout.tensor_parallel.astype(np.float64)
    last = dense * gemm_s(hw, work.tokens, np.asarray(float(arch.hidden)), width, dtype) / rate
    return LayerSeconds(forward, backward, attention, last=last)


def head_seconds(
    arch: Architecture, hw: Hardware, trainer: TrainerCalibration, layout: Layout, work: Work, *, frozen: bool = False
) -> LayerSeconds:
    """Output projection and cross-entropy, always in 16 bits; tensor parallelism splits the vocabulary."""
    generation = trainer.generation(hw.device)
    columns = arch.vocab / layout.tensor_parallel.astype(np.float64)
    table = Linear(1.0, columns, np.asarray(float(arch.hidden)))
    forward, backward = matrix_s(hw, work.tokens, table, "bf16", frozen=frozen)
    timing, logits = trainer.timing, work.tokens * columns
    loss = stream_s(hw, logits * timing.cross_entropy_bytes)
    embedding = small_op_s(hw, work.stream_tokens * arch.hidden * 8.0)
    rate = generation.sustained
    return LayerSeconds(
        forward / rate + 0.5 * loss + embedding,
        backward / rate + 0.5 * loss + embedding,
        np.zeros(()),
        again=forward / rate + stream_s(hw, logits * (timing.chunked_bytes - timing.cross_entropy_bytes)),
    )


def tower_seconds(
    arch: Architecture, hw: Hardware, trainer: TrainerCalibration, layout: Layout,
    images: npt.ArrayLike, patches: npt.ArrayLike, *, frozen: bool,
) -> tuple[FloatArray, FloatArray]:  # fmt: skip
    """(forward, backward) of the vision tower over a microbatch's images; backward twice the forward (extrapolated)."""
    if arch.vision is None:
        return np.zeros(()), np.zeros(())
    rate = trainer.generation(hw.device).sustained
    number, each = np.asarray(images, dtype=np.float64), np.asarray(patches, dtype=np.float64)
    some = (number > 0) & (each > 0)
    seconds = vision_prefill_s(
        hw, arch.vision, np.where(some, number, 1.0), np.where(some, each, 1.0), layout.tensor_parallel
    )
    forward = np.where(some, seconds / rate, 0.0)
    return forward, (0.0 if frozen else 2.0) * forward


def _attention_s(
    arch: Architecture,
    hw: Hardware,
    trainer: TrainerCalibration,
    generation: Generation,
    layout: Layout,
    work: Work,
    kernel: str,
) -> tuple[FloatArray, FloatArray]:
    """(forward, backward) of softmax attention in the mean layer; full and sliding layers weighted by their number."""
    if not arch.attention_layers:
        return np.zeros(()), np.zeros(())
    split = (layout.tensor_parallel * layout.ulysses).astype(np.float64)
    heads, kv_heads = arch.heads / split, np.maximum(arch.kv_heads / split, 1.0)
    if trainer.timing.kernel_attention == "unfused":
        return _unfused_attention_s(arch, hw, trainer, generation, heads, work)
    forward: FloatArray = np.zeros(())
    backward: FloatArray = np.zeros(())
    width = arch.latent.nope_head_dim + arch.latent.rope_head_dim if arch.latent else arch.head_dim
    value = arch.latent.value_head_dim if arch.latent else arch.head_dim
    for kind, window in (("full", None), ("sliding", arch.window or None)):
        share = arch.mixer_layers(kind) / arch.layers  # type: ignore[arg-type]
        if share:
            ahead, back = (
                packed_attention_s(
                    hw, work.attention_tokens, work.pairs, work.max_len, heads, heads if arch.latent else kv_heads,
                    width, window=window, value_dim=value, backward=direction,
                )
                for direction in (False, True)
            )  # fmt: skip
            forward, backward = forward + share * ahead, backward + share * back
    factor = generation.flash2 if kernel == "flash2" else generation.attention
    return forward * factor, backward * factor


def _unfused_attention_s(
    arch: Architecture, hw: Hardware, trainer: TrainerCalibration, generation: Generation, heads: FloatArray, work: Work
) -> tuple[FloatArray, FloatArray]:
    """Attention before flash kernels: two batched products over all pairs, softmax and dropout through memory.

    Forward 4 d a s^2 FLOP and 11 bytes per score (`_SCORE_BYTES`); backward twice both. The causal half is not skipped.
    """
    scores = heads * work.pairs
    flop = 4.0 * arch.head_dim * scores
    products = flop / (sheet_flop_per_s(hw, "fp16") * trainer.timing.batched_share)
    passes = stream_s(hw, scores * _SCORE_BYTES)
    forward = (products + passes) * generation.attention
    return forward, 2.0 * forward


_SCORE_BYTES = 11.0
"""Bytes moved per score: product written 2, scale-mask-softmax 2 + 2, dropout 2 + 2 + 1 (values of 2 bytes, mask 1)."""


def _elementwise_s(
    arch: Architecture, hw: Hardware, trainer: TrainerCalibration, layout: Layout, work: Work
) -> FloatArray:
    """Norms, residual sums, rotary embedding and activation of the mean layer, forward, at 2 bytes a value.

    Bytes: norm 2 reads or writes of h, residual 3 of h, each in both halves; rotary 2 of q and k; activation reads
    gate and up and writes one.
    """
    tp = layout.tensor_parallel.astype(np.float64)
    layers = float(arch.layers)
    halves = 2.0 - (arch.mixer_layers("none") + arch.feed_forward_layers("none")) / layers
    stream = halves * 5.0 * 2.0 * arch.hidden * work.stream_tokens
    rotary = 4.0 * (arch.query_width + arch.kv_heads * arch.head_dim) / tp * arch.attention_layers / layers
    dense = arch.feed_forward_layers("dense") / layers * arch.ffn_hidden
    shared = arch.feed_forward_layers("moe") / layers * (arch.experts.shared_hidden if arch.experts else 0.0)
    activation = (6.0 if arch.ffn_gated else 4.0) * (dense + shared) / tp
    return small_op_s(hw, (stream + (rotary + activation) * work.tokens) * trainer.timing.elementwise)


def _mixer_s(arch: Architecture, hw: Hardware, layout: Layout, work: Work) -> FloatArray:
    """Mamba-2 and gated delta-rule mixers, forward, without their projections: bandwidth form, extrapolated.

    Convolution, gating and chunk states move about 12 values of the inner width and the states of every chunk.
    """
    tp, layers = layout.tensor_parallel.astype(np.float64), float(arch.layers)
    values = np.zeros(())
    if arch.state_space:
        ssm = arch.state_space
        inner = float(ssm.heads * ssm.head_dim)
        states = inner * ssm.state / ssm.chunk * 4.0
        values = values + arch.mixer_layers("mamba") / layers * (12.0 * inner + 6.0 * ssm.groups * ssm.state + states)
    if arch.linear_attention:
        lin = arch.linear_attention
        key, value = lin.key_heads * lin.key_head_dim, lin.value_heads * lin.value_head_dim
        states = lin.value_heads * lin.key_head_dim * lin.value_head_dim / 64.0 * 4.0
        values = values + arch.mixer_layers("linear") / layers * (8.0 * key + 12.0 * value + states)
    return small_op_s(hw, 2.0 * values * work.tokens / tp) if np.any(values > 0) else np.zeros(())


def _expert_s(
    arch: Architecture, hw: Hardware, trainer: TrainerCalibration, layout: Layout, work: Work,
    dtype: str, rate: float, skew: FloatArray | float, frozen: bool, loops: float,
) -> tuple[FloatArray, FloatArray]:  # fmt: skip
    """(forward, backward) of the routed experts and their permutation in the mean layer; ``loops`` seconds more."""
    if arch.experts is None:
        return np.zeros(()), np.zeros(())
    moe, share = arch.experts, arch.feed_forward_layers("moe") / arch.layers
    ep, etp = layout.expert_parallel.astype(np.float64), layout.expert_tensor_parallel.astype(np.float64)
    own = work.tokens / layout.tensor_parallel
    products = grouped_gemm_s(
        hw,
        own * ep * etp,
        expert_width(arch),
        moe.hidden,
        moe.count,
        moe.active,
        ep,
        etp,
        dtype=dtype,
        gated=moe.gated,
        skew=skew,
        dispatched=True,
    )
    products = products * trainer.timing.moe_pass / rate
    pairs = own * etp * moe.active * skew
    moved = small_op_s(hw, pairs * expert_width(arch) * 2.0 * 4.0 * trainer.timing.permute)
    router = gemm_s(hw, own, np.asarray(float(moe.count)), np.asarray(float(arch.hidden)), "bf16") / rate
    fixed = (trainer.timing.moe_layer + loops) / 3.0
    forward = share * (products + moved + router + fixed)
    return forward, share * ((1.0 if frozen else 2.0) * products + moved + 2.0 * router + 2.0 * fixed)


def _adapter_s(arch: Architecture, hw: Hardware, trainer: TrainerCalibration, layout: Layout, work: Work) -> FloatArray:
    """LoRA beside every matrix, forward: two thin products and a sum, bound by memory and by launches."""
    values: FloatArray = np.zeros(())
    number = 0.0
    for linear in linears(arch, layout):
        values = values + linear.share * (linear.outputs + linear.inputs)
        number += linear.share
    if arch.experts:
        share = arch.feed_forward_layers("moe") / arch.layers
        values = (
            values + share * 3.0 * (arch.hidden + arch.experts.hidden) * arch.experts.active / layout.tensor_parallel
        )
        number += 3.0 * share
    return stream_s(hw, values * work.tokens * trainer.timing.lora_bytes) + number * trainer.timing.lora_linear
