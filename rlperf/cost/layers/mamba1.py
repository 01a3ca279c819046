"""Mamba-1 mixer (arXiv 2312.00752, section 3; as in Jamba, arXiv 2403.19887)."""

from __future__ import annotations

from rlperf.cost.layers.layer import Matrix
from rlperf.cost.layers.recurrent import Recurrent, State
from rlperf.cost.trainer_device import Keeping, Kept
from rlperf.specs.hardware import Hardware


class Mamba1(Recurrent):
    """A state-space model with a decay for every channel and state; its step comes from a product of low rank.

    ``numbers``: ``width`` of the inner state, ``state`` values a channel, ``step_rank``, ``conv_kernel``, ``norms``
    (1: norms of step, input and output, as Jamba has them).
    """

    unmeasured = "Mamba-1 layers have no kernel table"

    def number(self, name: str) -> int:
        """One of its numbers in the architecture."""
        return int(self.arch.numbers_of("mamba1")[name])

    @property
    def state(self) -> State:
        """Every channel counts as a head of one value; scans run token by token, in one chunk of 128."""
        return State(self.number("width"), self.number("state"), 1, 128.0)

    @property
    def projected(self) -> int:
        """Values and gate."""
        return 2 * self.number("width")

    @property
    def convolved(self) -> int:
        return self.number("width")

    @property
    def taps(self) -> int:
        return self.number("conv_kernel")

    @property
    def value_width(self) -> int:
        return self.number("width")

    def matrices(self) -> tuple[Matrix, ...]:
        width, rank, state = self.number("width"), self.number("step_rank"), self.number("state")
        return (
            Matrix("qkv", self.arch.hidden, 2 * width),
            Matrix("step", width, rank + 2 * state, "inputs"),
            Matrix("step", rank, width),
            Matrix("output", width, self.arch.hidden, "inputs"),
        )

    def other_parameters(self) -> int:
        """Convolution with its bias; A, D and step bias of every channel; norms."""
        width, state = self.number("width"), self.number("state")
        norms = self.number("step_rank") + 2 * state if self.number("norms") else 0
        return width * (self.taps + 1) + width * (state + 2) + norms

    def tensors(self) -> int:
        return super().tensors() + 5

    def scan_values(self, hw: Hardware) -> float:
        """Convolution, gating and the scan's inputs: bandwidth form, extrapolated."""
        return 12.0 * self.value_width + self.chunk_state_bytes

    def kept(self, keeping: Keeping) -> Kept:
        """Projected and convolved inputs, step, states of chunks, gated output (extrapolated)."""
        values = 6 * self.value_width
        return Kept(dense=(keeping.width * values + self.chunk_state_bytes) / keeping.tensor)
