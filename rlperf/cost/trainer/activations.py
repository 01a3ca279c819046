"""Bytes of activations that one layer keeps from forward to backward, per token and device.

Counted tensor by tensor (table in ``docs/theory/memory.md``); for a GELU transformer with dropout and unfused
attention the count is equation 2 (equation 4 with sequence parallelism) of Korthikanti et al. 2022, arXiv 2205.05198.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlperf.cost.layers import stack_of
from rlperf.cost.trainer_device import Keeping
from rlperf.layout import FloatArray
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
    operators : what recompute by operator keeps of ``dense``: the layer's input and every second product [bytes/token]
    feed_forward : the part of ``dense`` that recomputing the module ``mlp`` drops: all of dense feed-forwards but the
        input of their norm, which is part of their first product [bytes/token]
    """

    dense: FloatArray
    routed: FloatArray
    core: FloatArray
    scores: FloatArray
    boundary: FloatArray
    expert_hidden: FloatArray
    operators: FloatArray
    feed_forward: FloatArray


def layer_activations(arch: Architecture, keeping: Keeping) -> LayerActivations:
    """Kept activations of the mean layer."""
    stack, width, narrow = stack_of(arch), keeping.width, keeping.narrow
    zero = 0.0 * keeping.tensor
    # every half-layer keeps the input and the output of its norm, and the mask of its residual dropout
    each = (width + (1.0 if keeping.dropout else 0.0)) * arch.hidden * keeping.spread
    inputs = narrow * arch.hidden * keeping.norm_outputs(stack.norms / arch.layers, stack.readers / arch.layers)
    # and of several residual streams all, for the mixture behind it
    beside = width * (arch.residual_streams - 1.0) * arch.hidden * keeping.spread
    dense, core, scores = inputs + stack.norms / arch.layers * (each + beside), zero, zero
    boundary = width * arch.hidden * keeping.spread + beside
    routed, hidden, operators, feed_forward = zero, zero, zero + boundary, zero
    for half in stack.halves:
        kept = half.layer.kept(keeping)
        dense = dense + half.share * (kept.dense + kept.core)
        core, scores = core + half.share * kept.core, scores + half.share * kept.scores
        operators = operators + half.share * kept.by_operator
        if half.layer.ends_in_product:
            norm = narrow * arch.hidden * keeping.norm_outputs(half.share, half.share * half.layer.readers)
            feed_forward = feed_forward + half.share * kept.feed_forward + norm
        if half.layer.routing:
            of_routed = half.share / stack.routed_share
            routed, hidden = routed + of_routed * kept.routed, hidden + of_routed * kept.expert_hidden
    return LayerActivations(
        dense=dense, routed=routed, core=core, scores=scores,
        boundary=boundary, expert_hidden=hidden, operators=operators, feed_forward=feed_forward,
    )  # fmt: skip
