"""The layers of one architecture, and what all of them together are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from rlperf.cost.layers.layer import ContextValues, Layer, Matrix, Routing, fuse
from rlperf.layout import BoolArray, FloatArray, IntArray

Weights = Literal["projection", "dense"]


@dataclass(frozen=True)
class Half:
    """One kind of mixer or feed-forward, and how many layers have it: all of them, and as a share of the layers."""

    layer: Layer
    count: int
    share: float


@dataclass(frozen=True)
class Stack:
    """Layers of one architecture: the mixer (several where they run side by side) and feed-forward of each.

    Layers of one kind are equal, so that sums run over kinds with their number; equal matrices of different kinds
    (full and sliding attention) are one line of `matrices`.
    """

    layers: tuple[tuple[Layer, ...], ...]

    @cached_property
    def halves(self) -> tuple[Half, ...]:
        """Distinct halves, in the order of their first layer, mixers first."""
        counts = Counter(mixer for *mixers, _ in self.layers for mixer in mixers)
        counts += Counter(half for *_, half in self.layers)
        return tuple(Half(layer, count, count / len(self.layers)) for layer, count in counts.items())

    def total(self, value: Callable[[Layer], int]) -> int:
        """Sum over all layers of a count that each states."""
        return sum(half.count * value(half.layer) for half in self.halves)

    @cached_property
    def matrices(self) -> tuple[tuple[Matrix, Weights, int], ...]:
        """Distinct matrices, the weights they belong to, and how many layers have them."""
        return self._matrices(lambda layer: layer.matrices())

    @cached_property
    def products(self) -> tuple[tuple[Matrix, Weights, int], ...]:
        """The same as an engine runs them, see `fuse`."""
        return self._matrices(lambda layer: fuse(layer.matrices()))

    def divides(self, heads: IntArray, tensor: IntArray) -> BoolArray:
        """Whether every layer can be cut like this, see `Layer.divides`."""
        whole = np.ones(np.broadcast_shapes(np.shape(heads), np.shape(tensor)), dtype=bool)
        for half in self.halves:
            whole = whole & half.layer.divides(heads, tensor)
        return whole

    @cached_property
    def copied_cache(self) -> bool:
        """Whether tensor parallelism copies the cache of some layer."""
        return any(half.layer.copied_cache for half in self.halves)

    @cached_property
    def carries_state(self) -> bool:
        """Whether some layer reads what it made of all tokens before."""
        return any(half.layer.carries_state for half in self.halves)

    def _matrices(self, of: Callable[[Layer], Sequence[Matrix]]) -> tuple[tuple[Matrix, Weights, int], ...]:
        found: Counter[tuple[Matrix, Weights]] = Counter()
        for half in self.halves:
            for matrix in of(half.layer):
                found[matrix, half.layer.weights] += half.count
        return tuple((*key, count) for key, count in found.items())

    @cached_property
    def norms(self) -> int:
        """Norms in front of halves; the last one, before the head, apart."""
        return self.total(lambda layer: layer.norms)

    @cached_property
    def readers(self) -> int:
        """Inputs fetched from these norms, see `Layer.readers`."""
        return self.total(lambda layer: layer.readers)

    @cached_property
    def routed(self) -> tuple[tuple[Routing, int], ...]:
        """Routed experts, and how many layers have them."""
        return tuple((half.layer.routing, half.count) for half in self.halves if half.layer.routing)

    @cached_property
    def routes(self) -> FloatArray:
        """1 where a layer has routed experts, ``[layers]``."""
        return np.array([any(half.routing for half in halves) for halves in self.layers], dtype=np.float64)

    @cached_property
    def routed_share(self) -> float:
        """Share of the layers that have routed experts [1]."""
        return float(self.routes.sum()) / len(self.layers)

    @cached_property
    def context(self) -> tuple[tuple[ContextValues, int], ...]:
        """What context parallelism moves, and in how many layers."""
        found: Counter[ContextValues] = Counter()
        for half in self.halves:
            if half.layer.context:
                found[half.layer.context] += half.count
        return tuple(found.items())
