"""Parameters by pipeline stage and what shards them, LoRA adapters, and microbatches in flight."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlperf.cost.batching import Microbatches
from rlperf.layout import FloatArray, Layout
from rlperf.specs.architecture import Architecture

OFFLOADS_OPTIMIZER = (1, 3)
"""Codes of `rlperf.layout.OFFLOAD` that keep the optimizer in host memory."""
OFFLOADS_ACTIVATIONS = (2, 3)
"""Codes that keep activations there."""


@dataclass(frozen=True)
class StageParameters:
    """Parameters that one device of the fullest stage holds before ZeRO, by what shards them [parameters].

    ``layers`` transformer layers stand on it, ``routed_first`` and ``routed_last`` of them with routed experts when it
    is the first and the last stage. ``layer_dense`` and ``layer_routed`` are one mean layer's parameters, without and
    of routed experts; ``layer_experts`` those of one layer that has experts. ``embedding`` stands on the first stage,
    ``head`` on the last (0 on a single stage with tied weights).
    """

    layers: FloatArray
    routed_first: FloatArray
    routed_last: FloatArray
    layer_experts: FloatArray
    layer_dense: FloatArray
    layer_routed: FloatArray
    embedding: FloatArray
    head: FloatArray


def stage_layers(arch: Architecture, layout: Layout) -> FloatArray:
    """Layers of the fullest pipeline stage: v chunks of ceil(L / (p v)), or L / p where that divides."""
    stages = layout.pipeline_parallel.astype(np.float64)
    chunks = layout.virtual_pipeline.astype(np.float64)
    even = arch.layers / stages
    uneven = np.ceil(arch.layers / (stages * chunks)) * chunks
    return np.where(np.mod(arch.layers, stages) == 0, even, uneven)


def routed_layers(arch: Architecture, layout: Layout) -> tuple[FloatArray, FloatArray]:
    """Layers with routed experts on the first and on the last stage (dense layers usually come first)."""
    flags = np.array([half == "moe" for half in arch.layer_feed_forwards], dtype=np.float64)
    before = np.concatenate([[0.0], np.cumsum(flags)])
    size = np.minimum(np.ceil(stage_layers(arch, layout)), arch.layers).astype(np.int64)
    return before[size], before[-1] - before[arch.layers - size]


def layer_parameters(arch: Architecture, layout: Layout) -> tuple[FloatArray, FloatArray]:
    """Parameters of the mean layer on one device: (all but routed experts, routed experts).

    Tensor parallelism divides the matrices; norms, routers and MLA's down projections are replicated.
    """
    tp = layout.tensor_parallel.astype(np.float64)
    layers = float(arch.layers)
    norms = ((arch.layers - arch.mixer_layers("none")) + (arch.layers - arch.feed_forward_layers("none"))) / layers
    replicated = norms * arch.norm_weights * arch.hidden
    if arch.latent:
        down = arch.hidden * (arch.latent.q_rank + arch.latent.kv_rank + arch.latent.rope_head_dim)
        replicated += down * arch.attention_layers / layers
    moe = arch.feed_forward_layers("moe") / layers
    if arch.experts:
        replicated += arch.hidden * arch.experts.count * moe
    everything = (arch.language_parameters - arch.embedding_parameters - arch.norm_weights * arch.hidden) / layers
    routed = arch.routed_parameters / layers
    dense = replicated + np.maximum(everything - routed - replicated, 0.0) / tp
    return dense, routed / (layout.expert_parallel * layout.expert_tensor_parallel).astype(np.float64)


def stage_parameters(arch: Architecture, layout: Layout) -> StageParameters:
    """Parameters of the fullest stage (see the class). A vision tower stands on the first stage, split by TP."""
    tp = layout.tensor_parallel.astype(np.float64)
    dense, routed = layer_parameters(arch, layout)
    table = float(arch.vocab) * arch.hidden
    first = table + arch.learned_positions * arch.hidden + (arch.vision.parameters if arch.vision else 0)
    single_tied = (layout.pipeline_parallel == 1) & arch.tied_embeddings
    head = np.where(single_tied, 0.0, table / tp)
    routed_first, routed_last = routed_layers(arch, layout)
    moe = arch.feed_forward_layers("moe")
    return StageParameters(
        layers=stage_layers(arch, layout),
        routed_first=routed_first,
        routed_last=routed_last,
        layer_experts=routed * (arch.layers / moe if moe else 0.0),
        layer_dense=dense,
        layer_routed=routed,
        embedding=first / tp,
        head=head,
    )


def lora_parameters(arch: Architecture, rank: int) -> tuple[float, float]:
    """Adapter parameters of the mean layer when every linear layer is adapted: (dense, routed experts).

    rank x (inputs + outputs) per matrix (Hu et al. 2021, arXiv 2106.09685, section 4.1).
    """
    h, layers = arch.hidden, float(arch.layers)
    if arch.latent:
        mla = arch.latent
        attention = 2 * h + mla.q_rank * 2 + arch.query_width + 2 * mla.kv_rank + mla.rope_head_dim
        attention += arch.heads * (mla.nope_head_dim + mla.value_head_dim) + arch.value_width + h
    else:
        attention = 4 * h + 2 * arch.query_width + 2 * arch.kv_heads * arch.head_dim
    matrices = 3 if arch.ffn_gated else 2
    dense = arch.attention_layers * attention
    dense += arch.feed_forward_layers("dense") * matrices * (h + arch.ffn_hidden)
    routed = 0.0
    if arch.experts:
        moe = arch.feed_forward_layers("moe") * (3 if arch.experts.gated else 2)
        dense += moe * (h + arch.experts.shared_hidden) * (arch.experts.shared_hidden > 0)
        routed = float(moe * arch.experts.count * (h + arch.experts.hidden))
    return rank * dense / layers, rank * routed / layers


def in_flight(layout: Layout, microbatches: Microbatches) -> tuple[FloatArray, FloatArray]:
    """Microbatches whose activations the first and the last stage keep, in units of a whole stage.

    1F1B keeps p on the first and 1 on the last stage; interleaving v chunks p + (p - 1) / v and 1 + p (v - 1) / v
    (Narayanan et al. 2021, arXiv 2104.04473, section 2.2; Korthikanti et al. 2022, section 4.2.3). Never above m.
    """
    p, v = layout.pipeline_parallel.astype(np.float64), layout.virtual_pipeline.astype(np.float64)
    several = p > 1
    first = np.where(several & (v > 1), p + (p - 1.0) / v, p)
    last = np.where(several & (v > 1), 1.0 + p * (v - 1.0) / v, 1.0)
    return np.minimum(first, microbatches.count), np.minimum(last, microbatches.count)
