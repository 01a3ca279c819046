"""Grouped attention over blocks of keys that a learned index chooses (MiniMax-M3)."""

from __future__ import annotations

from rlperf.cost.dtypes import cache_bytes
from rlperf.cost.layers.choosing import Choosing
from rlperf.cost.layers.full import Full
from rlperf.cost.layers.layer import Matrix
from rlperf.cost.replica import Replica
from rlperf.cost.sparse import KeyChoice
from rlperf.layout import FloatArray

INDEX_BYTES = 2.0
"""Bytes of a cached value of an index key: 16 bits."""


class BlockSparse(Choosing, Full):
    """An index with a few heads scores all earlier tokens; attention reads the blocks of the best.

    ``numbers`` of kind ``block_sparse``: ``heads`` and ``head_dim`` of the index, ``block`` tokens, ``top`` blocks, and
    ``pool``, the tokens whose mean is one index key (Qwen4; without it every token has one).
    """

    unmeasured = "block-sparse attention was timed as a module, in no served row"
    extra_kernels = 8
    """Index projections with their norms, scores, maximum of blocks, choice."""

    @property
    def table(self) -> str:
        return "block_sparse"

    def number(self, name: str) -> int:
        """One of its numbers in the architecture."""
        return int(self.arch.numbers_of("block_sparse")[name])

    @property
    def pool(self) -> int:
        """Tokens that share an index key."""
        return int(self.arch.numbers_of("block_sparse").get("pool", 1.0))

    @property
    def top(self) -> int:
        return self.number("block") * self.number("top")

    @property
    def index_width(self) -> int:
        return self.number("heads") * self.number("head_dim")

    def matrices(self) -> tuple[Matrix, ...]:
        index = Matrix("index", self.arch.hidden, self.index_width + self.number("head_dim"), "copied", parts=2)
        return (*super().matrices(), index)

    def other_parameters(self) -> int:
        """With norms of the index' queries and keys."""
        return super().other_parameters() + 2 * self.number("head_dim")

    def choice(self, replica: Replica) -> KeyChoice:
        heads, width = replica.heads(self.arch), self.key_dim + self.value_dim
        return KeyChoice(
            heads=heads,
            pair_flop=2.0 * width,
            key_bytes=replica.kv_heads(self.arch) * width * cache_bytes(replica.kv_dtype),
            index_flop=2.0 * self.index_width / self.pool,
            index_bytes=INDEX_BYTES * self.number("head_dim") / self.pool,
            width=heads * width,
            narrow=cache_bytes(replica.kv_dtype) < 2.0,
        )

    def cache_bytes_per_token(self, replica: Replica) -> FloatArray:
        return super().cache_bytes_per_token(replica) + INDEX_BYTES * self.number("head_dim") / self.pool
