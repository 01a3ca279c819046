"""Kinds of layers, one file each; the table below names them as architectures do.

A new kind is one file here with a subclass of `Layer`, and a line in `KINDS`. Engine, trainer, memory, parameters and
weight sync ask the layers of an architecture (`stack_of`) and know no kind by name.
"""

from __future__ import annotations

from functools import lru_cache

from rlperf.cost.layers.block_sparse import BlockSparse
from rlperf.cost.layers.compressed import Compressed
from rlperf.cost.layers.dense import Dense
from rlperf.cost.layers.full import Full
from rlperf.cost.layers.kda import Kda
from rlperf.cost.layers.latent import Latent
from rlperf.cost.layers.layer import Layer, Matrix, Nothing
from rlperf.cost.layers.lightning import Lightning
from rlperf.cost.layers.linear import Linear
from rlperf.cost.layers.mamba import Mamba
from rlperf.cost.layers.mamba1 import Mamba1
from rlperf.cost.layers.moe import Moe
from rlperf.cost.layers.short_conv import ShortConv
from rlperf.cost.layers.sliding import Sliding
from rlperf.cost.layers.sliding_latent import SlidingLatent
from rlperf.cost.layers.sparse import Sparse
from rlperf.cost.layers.sparse_reusing import SparseReusing
from rlperf.cost.layers.square import Square
from rlperf.cost.layers.stack import Stack
from rlperf.errors import Problem, SpecError, did_you_mean
from rlperf.specs.architecture import Architecture

__all__ = ["KINDS", "Layer", "Matrix", "Stack", "stack_of"]

KINDS: dict[str, type[Layer]] = {
    "full": Full,
    "sliding": Sliding,
    "latent": Latent,
    "sliding_latent": SlidingLatent,
    "linear": Linear,
    "mamba": Mamba,
    "mamba1": Mamba1,
    "kda": Kda,
    "lightning": Lightning,
    "short_conv": ShortConv,
    "sparse": Sparse,
    "sparse_reusing": SparseReusing,
    "block_sparse": BlockSparse,
    "compressed": Compressed,
    "square": Square,
    "dense": Dense,
    "moe": Moe,
    "none": Nothing,
}
"""Kinds by the name that `Architecture.mixers` and `Architecture.feed_forwards` give them."""


@lru_cache(maxsize=512)
def stack_of(arch: Architecture) -> Stack:
    """The layers of an architecture.

    Raises
    ------
    SpecError : the architecture names a kind that `KINDS` does not have

    >>> from rlperf.specs.profiles import load_architecture
    >>> [(type(half.layer).__name__, half.count) for half in stack_of(load_architecture("Qwen3.5-35B-A3B")).halves]
    [('Linear', 30), ('Full', 10), ('Moe', 40)]
    """
    names = dict.fromkeys((*arch.layer_mixers, *arch.layer_feed_forwards))
    parts = {part: arch.part(part) for name in names for part in name.split("+")}
    unknown = [kind for kind, _ in parts.values() if kind not in KINDS]
    if unknown:
        raise SpecError(
            Problem(
                f"{arch.name}: rlperf does not know layers of kind {name!r}",
                suggestion=did_you_mean(name, KINDS) or f"it knows {', '.join(KINDS)}",
            )
            for name in unknown
        )
    made = {part: KINDS[kind](one) for part, (kind, one) in parts.items()}
    pairs = zip(arch.layer_mixers, arch.layer_feed_forwards, strict=True)
    return Stack(tuple(tuple(made[part] for name in pair for part in name.split("+")) for pair in pairs))
