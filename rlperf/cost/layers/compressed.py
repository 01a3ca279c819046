"""Attention over compressed tokens (DeepSeek-V4): one key for every ``ratio`` tokens, and a window of plain ones."""

from __future__ import annotations

import numpy as np

from rlperf.cost.dtypes import cache_bytes
from rlperf.cost.layers.choosing import Choosing
from rlperf.cost.layers.layer import Matrix
from rlperf.cost.layers.sparse import SCALED
from rlperf.cost.replica import Replica
from rlperf.cost.sparse import HEAD_TILE, KeyChoice
from rlperf.layout import FloatArray


class Compressed(Choosing):
    """All heads share one key, which is the value too; keys of ``ratio`` tokens are gathered into one.

    ``numbers`` of kind ``compressed``: ``q_rank``, ``rope_head_dim``, ``output_rank`` and ``output_groups`` of the
    output's two products, ``ratio`` (0: window alone), ``overlap`` (1: neighbouring keys share tokens), ``top``
    compressed keys that an index of ``index_heads`` and ``index_head_dim`` chooses (0: all), ``borrows`` (1: keys are
    those of an earlier layer). Heads, their width and the window are the architecture's.
    """

    unmeasured = "compressed attention was timed as a module, in no served row"
    copied_cache = True
    extra_kernels = 14
    """Counted by hand: low-rank queries and outputs with norms, compression, index, choice, both attentions."""

    def number(self, name: str) -> int:
        """One of its numbers in the architecture."""
        return int(self.arch.numbers_of("compressed")[name])

    @property
    def table(self) -> str:
        """Layers with an index, and those that read every compressed key, were timed apart."""
        return "compressed_sparse" if self.number("top") else "compressed"

    @property
    def ratio(self) -> int:
        return self.number("ratio")

    @property
    def top(self) -> int | None:
        return self.number("top") * self.ratio or None

    @property
    def near(self) -> int:
        return self.arch.window

    @property
    def index_width(self) -> int:
        return self.number("index_heads") * self.number("index_head_dim") if self.number("top") else 0

    @property
    def key_heads(self) -> int:
        return 1

    @property
    def gathers(self) -> int:
        """Keys and gates of a token that compression reads, in widths of a head."""
        return 2 * (1 + self.number("overlap")) * (self.ratio > 0) * (1 - self.number("borrows"))

    def matrices(self) -> tuple[Matrix, ...]:
        h, width = self.arch.hidden, self.arch.head_dim
        rank, low = self.number("q_rank"), self.number("output_rank") * self.number("output_groups")
        own = (1 - self.number("borrows")) * width
        found = [
            Matrix("qkv", h, rank + own, "copied", fused="down", parts=2),
            Matrix("qkv", rank, self.query_width),
            Matrix("output", self.query_width // self.number("output_groups"), low, "outputs"),
            Matrix("output", low, h, "inputs"),
        ]
        if self.gathers:
            found.append(Matrix("compression", h, self.gathers * width, "copied", parts=2))
        if self.index_width:
            index = self.number("index_head_dim")
            found.append(Matrix("index", rank, self.index_width, "copied"))
            found.append(Matrix("index", h, self.gathers * index + self.number("index_heads"), "copied", parts=3))
        return tuple(found)

    def other_parameters(self) -> int:
        """Norms of queries and keys, positions inside a compressed key, one sink a head."""
        own = 0 if self.number("borrows") else self.arch.head_dim
        places = self.ratio * self.gathers // 2 + (self.gathers > 0)
        index = self.number("index_head_dim") if self.index_width else 0
        return self.number("q_rank") + own + places * (self.arch.head_dim + index) + self.arch.heads

    def choice(self, replica: Replica) -> KeyChoice:
        heads, width = replica.heads(self.arch), self.arch.head_dim
        return KeyChoice(
            heads=np.maximum(heads, HEAD_TILE),
            pair_flop=4.0 * width,
            key_bytes=self._key_bytes(replica),
            index_flop=2.0 * self.index_width,
            index_bytes=SCALED * self.number("index_head_dim"),
            width=2.0 * heads * width,
            narrow=cache_bytes(replica.kv_dtype) < 2.0,
        )

    def _key_bytes(self, replica: Replica) -> float:
        """Of one key: its rotary part stays in 16 bits."""
        rope = self.number("rope_head_dim")
        return (self.arch.head_dim - rope) * cache_bytes(replica.kv_dtype) + 2.0 * rope

    def cache_bytes_per_token(self, replica: Replica) -> float:
        if not self.ratio or self.number("borrows"):
            return 0.0
        index = SCALED * self.number("index_head_dim") if self.index_width else 0.0
        return (self._key_bytes(replica) + index) / self.ratio

    def cache_bytes_per_request(self, replica: Replica) -> float:
        """The window, and what is not yet compressed, in 32 bits."""
        if self.number("borrows"):
            return 0.0
        waiting = 4.0 * self.ratio * self.gathers * self.arch.head_dim
        return self.near * self._key_bytes(replica) + waiting

    def kept_values(self, tensor: FloatArray) -> FloatArray:
        """Queries and output, both low-rank inputs, keys and what compression reads of a token."""
        low = self.number("output_rank") * self.number("output_groups")
        copied = 2.0 * self.number("q_rank") + (2.0 + self.gathers) * self.arch.head_dim
        return copied + (2.0 * self.query_width + low) / tensor
