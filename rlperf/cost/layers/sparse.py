"""Latent attention over keys that a learned index chooses (DeepSeek-V3.2, arXiv 2512.02556, section 2; GLM-5)."""

from __future__ import annotations

import numpy as np

from rlperf.cost.dtypes import cache_bytes
from rlperf.cost.layers.choosing import Choosing
from rlperf.cost.layers.latent import Latent
from rlperf.cost.layers.layer import Matrix
from rlperf.cost.replica import Replica
from rlperf.cost.sparse import HEAD_TILE, SCORED_ROWS, KeyChoice

SCALED = 1.0 + 4.0 / 128.0
"""Bytes of a value of an index key: fp8, with a scale of four bytes for 128."""


class Sparse(Choosing, Latent):
    """An index of few narrow heads scores all earlier tokens; attention reads the ``top`` best of them.

    ``numbers`` of kind ``sparse``: ``heads`` and ``head_dim`` of the index, ``top``, and ``pool``, the tokens that
    share an index key (GLM-5 Next; without it every token has one).
    """

    unmeasured = "sparse attention was timed as a module, in no served row"
    absorbs_prompts = True
    extra_kernels = 12
    """Those of latent attention, index projections, their norm, scores, choice and conversion of indices."""

    @property
    def table(self) -> str:
        return "sparse"

    def number(self, name: str) -> int:
        """One of its numbers in the architecture."""
        return int(self.arch.numbers_of("sparse")[name])

    @property
    def top(self) -> int:
        return self.number("top")

    @property
    def pool(self) -> int:
        """Tokens that share an index key."""
        return int(self.arch.numbers_of("sparse").get("pool", 1.0))

    @property
    def index_values(self) -> int:
        """Values of an index key, which every device keeps."""
        return self.number("head_dim")

    @property
    def index_width(self) -> int:
        return self.number("heads") * self.index_values

    def matrices(self) -> tuple[Matrix, ...]:
        read = self.ranks.q_rank or self.arch.hidden
        beside = self.index_values + self.number("heads")
        pooled = (Matrix("index", self.arch.hidden, self.index_values, "copied"),) if self.pool > 1 else ()
        return (
            *super().matrices(),
            *pooled,
            Matrix("index", read, self.index_width, "copied"),
            Matrix("index", self.arch.hidden, beside, "copied", fused="down", parts=2),
        )

    def other_parameters(self) -> int:
        """Norms of the two latents, and of the index key with its bias; of pooled keys a weight for every token."""
        return super().other_parameters() + (2 + (self.pool if self.pool > 1 else 0)) * self.index_values

    def tensors(self) -> int:
        return super().tensors() + 2

    def choice(self, replica: Replica) -> KeyChoice:
        mla, heads = self.ranks, replica.heads(self.arch)
        width = self.cached_values + mla.kv_rank
        return KeyChoice(
            heads=np.maximum(heads, HEAD_TILE),
            pair_flop=2.0 * width,
            key_bytes=self.cached_values * cache_bytes(replica.kv_dtype),
            index_flop=2.0 * self.index_width / self.pool,
            index_bytes=SCALED * self.index_values / self.pool,
            width=heads * width,
            narrow=cache_bytes(replica.kv_dtype) < 2.0,
            block_flop=2.0 * SCORED_ROWS * self.index_values / self.pool,
        )

    def cache_bytes_per_token(self, replica: Replica) -> float:
        return super().cache_bytes_per_token(replica) + SCALED * self.index_values / self.pool
