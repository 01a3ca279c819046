"""Parameters of an architecture: the sum of what its layers state, and the tables at both ends."""

from __future__ import annotations

import numpy as np

from rlperf.cost.layers import stack_of
from rlperf.cost.streams import stream_parameters
from rlperf.layout import FloatArray
from rlperf.specs.architecture import Architecture


def embedding_parameters(arch: Architecture) -> int:
    """Input embedding and other tables of tokens, and the output head where it is not tied."""
    table = arch.vocab * arch.hidden
    head = arch.head_outputs * (arch.head_bias + (0 if arch.head_is_table else arch.hidden))
    beside = arch.learned_positions * arch.hidden + arch.lookup_parameters
    return table + beside + head


def norm_parameters(arch: Architecture) -> int:
    """Norms around the halves of all layers, the last one before the head apart, and the mixing of their streams."""
    each = arch.norm_weights * arch.hidden * (2 if arch.post_norms else 1)
    return stack_of(arch).norms * (each + stream_parameters(arch))


def layers_parameters(arch: Architecture) -> int:
    """All layers without their routed experts, norms included."""
    return stack_of(arch).total(lambda layer: layer.parameters) + norm_parameters(arch)


def routed_parameters(arch: Architecture, *, active: bool = False) -> int:
    """Parameters in routed experts, all layers: what expert parallelism divides; ``active``: in those of one token."""
    routed = stack_of(arch).routed
    return sum(count * (route.active if active else route.count) * route.parameters for route, count in routed)


def language_parameters(arch: Architecture) -> int:
    """Parameters without a vision tower."""
    ends = embedding_parameters(arch) + arch.norm_weights * arch.hidden
    return ends + layers_parameters(arch) + routed_parameters(arch)


def parameters(arch: Architecture) -> int:
    """All parameters, towers included, multi-token prediction layers not.

    >>> from rlperf.specs.profiles import load_architecture
    >>> parameters(load_architecture("Qwen2.5-7B"))
    7615616512
    """
    return language_parameters(arch) + tower_parameters(arch)


def tower_parameters(arch: Architecture) -> int:
    """Parameters in front of the language model: what sees and what hears."""
    return (arch.vision.parameters if arch.vision else 0) + arch.audio_parameters


def active_parameters(arch: Architecture) -> int:
    """Parameters that one token passes through (top-k experts), vision tower left out.

    Nor are tables beside the embedding among them, of which a token reads a row or a few. The matrices that bring their
    values in go with them, since a shape states both in one number: 90M, of Gemma 3n E4B, beside 4.4B.
    """
    passed = language_parameters(arch) - arch.lookup_parameters
    return passed - routed_parameters(arch) + routed_parameters(arch, active=True)


def pair_flop(arch: Architecture) -> float:
    """FLOP of attention per (query, visible key) pair, all layers together."""
    return sum(half.count * half.layer.pair_flop for half in stack_of(arch).halves)


def attention_flop(arch: Architecture, tokens: FloatArray) -> FloatArray:
    """FLOP of attention in the forward of sequences of ``tokens``, all layers together ``[like tokens]``."""
    seen = np.asarray(tokens, dtype=float)
    return sum((half.count * half.layer.attention_flop(seen) for half in stack_of(arch).halves), np.zeros_like(seen))
