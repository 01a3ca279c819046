"""Parameters by pipeline stage and what shards them, LoRA adapters, and microbatches in flight."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from rlperf.cost.batching import Microbatches
from rlperf.cost.layers import stack_of
from rlperf.cost.parameters import layers_parameters, routed_parameters, tower_parameters
from rlperf.cost.stage_ends import uneven_ends
from rlperf.cost.streams import stream_parameters
from rlperf.cost.trainer_device import EVEN, Ends
from rlperf.layout import FloatArray, Layout
from rlperf.specs.architecture import Architecture

OFFLOADS_OPTIMIZER = (1, 3)
"""Codes of `rlperf.layout.OFFLOAD` that keep the optimizer in host memory."""
OFFLOADS_ACTIVATIONS = (2, 3)
"""Codes that keep activations there."""


@dataclass(frozen=True)
class StageParameters:
    """Parameters that one device of the fullest stage holds before ZeRO, by what shards them [parameters].

    ``layers`` transformer layers stand on it, ``routed_first``, ``routed_between`` and ``routed_last`` of them with
    routed experts when it is the first, one in between and the last stage. ``layer_dense`` and ``layer_routed`` are one
    mean layer's parameters, without and of routed experts; ``layer_experts`` those of one layer that has experts.
    ``embedding`` stands on the first stage, in it a tower (``frozen``, where nobody trains it), ``head`` on the last (0
    on a single stage with tied weights).
    """

    layers: FloatArray
    routed_first: FloatArray
    routed_between: FloatArray
    routed_last: FloatArray
    layer_experts: FloatArray
    layer_dense: FloatArray
    layer_routed: FloatArray
    embedding: FloatArray
    head: FloatArray
    frozen: FloatArray


def stage_layers(arch: Architecture, layout: Layout, ends: Ends = EVEN) -> FloatArray:
    """Layers of the fullest pipeline stage: v chunks of ceil(L / (p v)), or L / p where that divides.

    Where ends are stated, the largest of them and of the stages between, which hold equally many.

    >>> from rlperf.specs.profiles import load_architecture
    >>> arch, four = load_architecture("Qwen2.5-7B"), Layout.of(pipeline_parallel=4)
    >>> [float(stage_layers(arch, four, ends)) for ends in ((None, None), (8, 4), (20, 2), (None, 1))]
    [7.0, 8.0, 20.0, 9.0]
    """
    stages = layout.pipeline_parallel.astype(np.float64)
    chunks = layout.virtual_pipeline.astype(np.float64)
    if stated := [each for each in ends if each is not None]:
        between = np.ceil((arch.layers - sum(stated)) / np.maximum(stages - len(stated), 1.0))
        return np.where(stages > 1.0, np.maximum(between, max(stated)), float(arch.layers))
    even = arch.layers / stages
    uneven = np.ceil(arch.layers / (stages * chunks)) * chunks
    return np.where(np.mod(arch.layers, stages) == 0, even, uneven)


@lru_cache(maxsize=256)
def _routed(arch: Architecture) -> tuple[FloatArray, FloatArray]:
    """Layers with routed experts among the first n, and at most among any n that follow on each other."""
    before = np.concatenate([[0.0], np.cumsum(stack_of(arch).routes)])
    return before, np.array([np.max(before[n:] - before[: arch.layers + 1 - n]) for n in range(arch.layers + 1)])


def routed_layers(arch: Architecture, layout: Layout, ends: Ends = EVEN) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Layers with routed experts on the first stage, on the one between with most of them, and on the last [1].

    Dense layers usually come first: then it is a stage between that holds experts in all of its layers.
    """
    before, most = _routed(arch)
    first, between, last = (np.ceil(found).astype(np.int64) for found in _stages(arch, layout, ends))
    return before[first], most[between], before[-1] - before[arch.layers - last]


def _stages(arch: Architecture, layout: Layout, ends: Ends) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Layers of the first stage, of one between and of the last: 61 on 12 stages are 6, ten times 5, and 5."""
    stages, chunks = layout.pipeline_parallel.astype(np.int64), layout.virtual_pipeline.astype(np.int64)
    even = stage_layers(arch, layout)
    if ends == EVEN:
        first, last = uneven_ends(arch.layers, stages, chunks)
        uneven = (np.mod(arch.layers, stages * chunks) > 0) & (last > 0)
        between = np.where(uneven, (arch.layers - first - last) / np.maximum(stages - 2, 1), even)
        return np.where(uneven, first, even), between, np.where(uneven, last, even)
    stated = [each for each in ends if each is not None]
    rest = np.ceil((arch.layers - sum(stated)) / np.maximum(stages - len(stated), 1))
    several = stages > 1
    one, other = (np.where(several, rest if each is None else each, even) for each in ends)
    return one, np.where(several, rest, even), other


def layer_parameters(arch: Architecture, layout: Layout) -> tuple[FloatArray, FloatArray]:
    """Parameters of the mean layer on one device: (all but routed experts, routed experts) [1].

    Tensor parallelism divides the matrices; norms, and what a kind of layer calls replicated (routers, down
    projections of MLA), are copied.
    """
    stack, layers = stack_of(arch), float(arch.layers)
    mixing = stream_parameters(arch)
    replicated = stack.norms * (arch.norm_weights * arch.hidden + mixing) + stack.total(lambda layer: layer.replicated)
    divided = max(layers_parameters(arch) - replicated, 0)
    dense = (replicated + divided / layout.tensor_parallel.astype(np.float64)) / layers
    routed = routed_parameters(arch) / layers
    return dense, routed / (layout.expert_parallel * layout.expert_tensor_parallel).astype(np.float64)


def stage_parameters(
    arch: Architecture, layout: Layout, ends: Ends = EVEN, *, frozen_tower: bool = False
) -> StageParameters:
    """Parameters of the fullest stage (see the class). A vision tower stands on the first stage, split by TP."""
    tp = layout.tensor_parallel.astype(np.float64)
    dense, routed = layer_parameters(arch, layout)
    table = float(arch.vocab) * arch.hidden
    first = table + arch.learned_positions * arch.hidden + arch.lookup_parameters + tower_parameters(arch)
    single_tied = (layout.pipeline_parallel == 1) & arch.head_is_table
    head = np.where(single_tied, 0.0, head_columns(arch, tp) * arch.hidden)
    routed_first, routed_between, routed_last = routed_layers(arch, layout, ends)
    share = stack_of(arch).routed_share
    return StageParameters(
        layers=stage_layers(arch, layout, ends),
        routed_first=routed_first,
        routed_between=routed_between,
        routed_last=routed_last,
        layer_experts=routed / share if share else 0.0 * routed,
        layer_dense=dense,
        layer_routed=routed,
        embedding=first / tp,
        head=head,
        frozen=(arch.vision.parameters if arch.vision and frozen_tower else 0) / tp,
    )


def head_columns(arch: Architecture, tensor: FloatArray) -> FloatArray:
    """Outputs of the head on one device: tensor parallelism splits the vocabulary, and copies a head of one score."""
    return np.maximum(arch.head_outputs / tensor, 1.0)


def lora_parameters(arch: Architecture, rank: int) -> tuple[float, float]:
    """Adapter parameters of the mean layer when every linear layer is adapted: (dense, routed experts).

    rank x (inputs + outputs) per matrix (Hu et al. 2021, arXiv 2106.09685, section 4.1).
    """
    stack, layers = stack_of(arch), float(arch.layers)
    dense = sum(count * matrix.adapter_values for matrix, _, count in stack.matrices)
    routed = sum(count * route.count * route.matrices * (route.width + route.hidden) for route, count in stack.routed)
    return rank * dense / layers, rank * routed / layers


def in_flight(layout: Layout, microbatches: Microbatches) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Microbatches whose activations the first, the second and the last stage keep, in units of a whole stage [1].

    1F1B keeps p on the first and 1 on the last stage; interleaving v chunks p + (p - 1) / v and 1 + p (v - 1) / v
    (Narayanan et al. 2021, arXiv 2104.04473, section 2.2; Korthikanti et al. 2022, section 4.2.3). Each stage starts
    its backward one microbatch, or two chunks, before the one in front of it. Never above m.
    """
    p, v = layout.pipeline_parallel.astype(np.float64), layout.virtual_pipeline.astype(np.float64)
    chunked = (p > 1) & (v > 1)
    first = np.where(chunked, p + (p - 1.0) / v, p)
    second = np.maximum(first - np.where(chunked, 2.0 / v, 1.0), 0.0)
    last = np.where(chunked, 1.0 + p * (v - 1.0) / v, 1.0)
    count = microbatches.count
    return np.minimum(first, count), np.minimum(second, count), np.minimum(last, count)
