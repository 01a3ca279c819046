"""Bytes of activations that one layer keeps from forward to backward, per token and device.

Counted tensor by tensor (table in ``docs/theory/memory.md``); for a GELU transformer with dropout and unfused
attention the count is equation 2 (equation 4 with sequence parallelism) of Korthikanti et al. 2022, arXiv 2205.05198.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlperf.layout import FloatArray, Layout
from rlperf.specs.architecture import Architecture


@dataclass(frozen=True)
class LayerActivations:
    """Kept bytes per token and device.

    Attributes
    ----------
    dense : all but the routed experts, nothing recomputed, mean over all layers [bytes/token]
    routed : routed experts of one layer that has them: router, permuted inputs, hidden, outputs [bytes/token]
    core : the part of ``dense`` inside softmax attention that selective recompute drops, per token [bytes/token]
    scores : the same, per (token, key) pair, non-zero for unfused attention only [bytes/pair]
    boundary : what full recompute keeps: the input of the layer [bytes/token]
    expert_hidden : the part of ``routed`` that recomputing the expert activation drops [bytes/token]
    """

    dense: FloatArray
    routed: FloatArray
    core: FloatArray
    scores: FloatArray
    boundary: FloatArray
    expert_hidden: FloatArray


def layer_activations(
    arch: Architecture,
    layout: Layout,
    *,
    dropout: bool = False,
    unfused: bool = False,
    width: float = 2.0,
    linear_input: float | None = None,
) -> LayerActivations:
    """Kept activations of the mean layer.

    Parameters
    ----------
    layout : its tensor, sequence and expert parallel degrees divide; context parallelism divides tokens, not here
    dropout : residual and attention dropout keep one byte per value
    unfused : scores are materialised: 2 a s bytes of softmax (and 3 a s with dropout) per token
    width : bytes of an activation value
    linear_input : bytes of a value kept only as the input of a matrix (8-bit training keeps those narrow)
    """
    narrow = width if linear_input is None else linear_input
    tp = layout.tensor_parallel.astype(np.float64)
    spread = np.where(layout.sequence_parallel > 0, 1.0 / tp, 1.0)
    h = float(arch.hidden)
    layers = float(arch.layers)
    softmax, ssm, linear = (
        arch.attention_layers / layers,
        arch.mixer_layers("mamba") / layers,
        arch.mixer_layers("linear") / layers,
    )
    ffn, moe = arch.feed_forward_layers("dense") / layers, arch.feed_forward_layers("moe") / layers
    halves = (arch.layers - arch.mixer_layers("none")) / layers + (
        arch.layers - arch.feed_forward_layers("none")
    ) / layers
    # every half-layer keeps the input and the output of its norm, and the mask of its residual dropout
    stream = halves * (width + narrow + (1.0 if dropout else 0.0)) * h * spread
    attention = softmax * _attention_bytes(arch, tp, width)
    core = softmax * 4.0 * arch.heads / tp
    scores = np.asarray(softmax * arch.heads / tp * ((2 * width + 1.0) if dropout else width) if unfused else 0.0 * tp)
    if unfused:
        core = 0.0 * tp
    mixers = ssm * _state_space_bytes(arch, width) / tp + linear * _linear_bytes(arch, width) / tp
    feed = ffn * ((2.0 if arch.ffn_gated else 1.0) * width + narrow) * arch.ffn_hidden / tp
    routed, hidden = _routed_bytes(arch, layout, width, narrow)
    shared = 3.0 * width * arch.experts.shared_hidden / tp if arch.experts else 0.0 * tp
    dense = stream + attention + core + mixers + feed + moe * shared
    boundary = width * h * spread
    return LayerActivations(
        dense=dense, routed=routed, core=core, scores=scores, boundary=boundary, expert_hidden=hidden
    )


def _attention_bytes(arch: Architecture, tp: FloatArray, width: float) -> FloatArray:
    """Queries, keys, values and the attention output (the input of the output projection)."""
    if arch.latent:
        mla = arch.latent
        ranks = 2.0 * width * (mla.q_rank + mla.kv_rank) + width * mla.rope_head_dim
        keys = arch.heads * (mla.nope_head_dim + mla.rope_head_dim)
        values = arch.heads * mla.value_head_dim
        return ranks + width * (2.0 * keys + 2.0 * values + arch.heads * mla.nope_head_dim) / tp
    kv = 2.0 * arch.kv_heads * arch.head_dim / np.minimum(tp, arch.kv_heads)
    gate = arch.query_width if arch.attention_gate else 0.0
    return width * ((2.0 * arch.query_width + gate) / tp + kv)


def _state_space_bytes(arch: Architecture, width: float) -> float:
    """Mamba-2: projected inputs, convolved inputs, chunk states, gated output (extrapolated, no measured table)."""
    if arch.state_space is None:
        return 0.0
    ssm = arch.state_space
    inner = ssm.heads * ssm.head_dim
    convolved = inner + 2 * ssm.groups * ssm.state
    states = inner * ssm.state / ssm.chunk * 4.0
    return width * (inner + 2 * convolved + ssm.heads + 2 * inner) + states


def _linear_bytes(arch: Architecture, width: float) -> float:
    """Gated delta rule: projections, convolved q, k, v, chunk states, gated output (extrapolated)."""
    if arch.linear_attention is None:
        return 0.0
    lin = arch.linear_attention
    key, value = lin.key_heads * lin.key_head_dim, lin.value_heads * lin.value_head_dim
    states = lin.value_heads * lin.key_head_dim * lin.value_head_dim / 64.0 * 4.0
    return width * (2 * (2 * key + value) + 3 * value) + states


def _routed_bytes(arch: Architecture, layout: Layout, width: float, narrow: float) -> tuple[FloatArray, FloatArray]:
    """Routed experts per token of this device, balanced: all of it, and the part inside the activation function."""
    if arch.experts is None:
        zero = np.zeros(())
        return zero, zero
    moe = arch.experts
    etp = layout.expert_tensor_parallel.astype(np.float64)
    tp = layout.tensor_parallel.astype(np.float64)
    spread = np.where(layout.sequence_parallel > 0, 1.0 / tp, 1.0)
    hidden = ((2.0 if moe.gated else 1.0) * width + narrow) * moe.hidden / etp
    # permuted inputs, expert hidden, expert outputs; a token of this device makes `active` pairs somewhere
    pairs = moe.active * ((width + narrow) * (moe.latent_hidden or arch.hidden) + hidden) * spread * etp
    router = 8.0 * moe.count * spread
    return pairs + router, moe.active * width * moe.hidden * spread
