"""Gated delta-rule linear attention (Qwen3-Next, Qwen3.5; chunked form: arXiv 2412.06464, section 3.3)."""

from __future__ import annotations

from rlperf.cost.layers.recurrent import Recurrent, State
from rlperf.cost.trainer_device import Keeping, Kept
from rlperf.specs.architecture import LinearAttention
from rlperf.specs.hardware import Hardware


class Linear(Recurrent):
    """A matrix of keys and values per head takes the place of the cache."""

    projections = 2
    table = "gated_delta"
    unmeasured = "recurrent layers have no kernel table for gates and norms"

    @property
    def numbers(self) -> LinearAttention:
        """Its numbers in the architecture."""
        assert self.arch.linear_attention is not None
        return self.arch.linear_attention

    @property
    def state(self) -> State:
        lin = self.numbers
        return State(lin.value_heads, lin.key_head_dim, lin.value_head_dim, 64.0)

    @property
    def key_width(self) -> int:
        """Width of all keys together; queries have the same."""
        return self.numbers.key_heads * self.numbers.key_head_dim

    @property
    def value_width(self) -> int:
        return self.numbers.value_heads * self.numbers.value_head_dim

    @property
    def convolved(self) -> int:
        """Queries, keys and values."""
        return 2 * self.key_width + self.value_width

    @property
    def taps(self) -> int:
        return self.numbers.conv_kernel

    @property
    def projected(self) -> int:
        """Queries, keys, values, gate; decay and step of every head."""
        return 2 * self.key_width + 2 * self.value_width + 2 * self.numbers.value_heads

    def other_parameters(self) -> int:
        """Convolution of queries, keys and values; decay and step bias of every head; norm."""
        lin = self.numbers
        return self.convolved * self.taps + 2 * lin.value_heads + lin.value_head_dim

    def tensors(self) -> int:
        return super().tensors() + 4

    def scan_values(self, hw: Hardware) -> float:
        """Convolution and gating; chunk states where no table holds the scan: bandwidth form, extrapolated."""
        return 8.0 * self.key_width + 12.0 * self.value_width + self.untimed_state_bytes(hw)

    def kept(self, keeping: Keeping) -> Kept:
        """Projections, convolved q, k, v, chunk states, gated output (extrapolated)."""
        values = 2 * self.convolved + 3 * self.value_width
        return Kept(dense=(keeping.width * values + self.chunk_state_bytes) / keeping.tensor)
