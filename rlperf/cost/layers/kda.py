"""Kimi Delta Attention: a delta rule whose state decays by channel (Kimi Linear, arXiv 2510.26692, section 3)."""

from __future__ import annotations

from rlperf.cost.layers.layer import Matrix
from rlperf.cost.layers.linear import Linear


class Kda(Linear):
    """As a gated delta rule, with a decay for every channel of a key and gates of low rank."""

    table = "kda"
    unmeasured = "Kimi Delta Attention has no kernel table for gates and norms"

    @property
    def rank(self) -> int:
        """Rank of the two gates: the width of a head; 0: they are whole matrices."""
        return 0 if self.numbers.full_gates else self.numbers.value_head_dim

    @property
    def projected(self) -> int:
        """Queries, keys, values; step of every head."""
        return 2 * self.key_width + self.value_width + self.numbers.value_heads

    def matrices(self) -> tuple[Matrix, ...]:
        h = self.arch.hidden
        if not self.rank:
            whole = Matrix("qkv", h, self.projected + self.key_width + self.value_width, parts=6)
            return whole, Matrix("output", self.value_width, h, "inputs")
        return (
            Matrix("qkv", h, self.projected, parts=4),
            Matrix("gates", h, 2 * self.rank, "copied", parts=2),
            Matrix("gates", self.rank, self.key_width),
            Matrix("gates", self.rank, self.value_width),
            Matrix("output", self.value_width, h, "inputs"),
        )

    def other_parameters(self) -> int:
        """Convolutions of queries, keys and values; decay of every head and bias of every channel; norm."""
        lin = self.numbers
        return self.convolved * self.taps + lin.value_heads + self.key_width + lin.value_head_dim

    def tensors(self) -> int:
        return super().tensors() + 2
