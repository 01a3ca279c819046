"""Mamba-2 mixer (arXiv 2405.21060; chunked form: section 6)."""

from __future__ import annotations

from rlperf.cost.layers.recurrent import Recurrent, State
from rlperf.cost.scan import chunked_with
from rlperf.cost.trainer_device import Keeping, Kept
from rlperf.layout import FloatArray
from rlperf.specs.architecture import StateSpace
from rlperf.specs.calibration import ScanFit
from rlperf.specs.cluster import Device
from rlperf.specs.hardware import Hardware


class Mamba(Recurrent):
    """A state-space model with one decay a head."""

    table = "mamba"

    @property
    def numbers(self) -> StateSpace:
        """Its numbers in the architecture."""
        assert self.arch.state_space is not None
        return self.arch.state_space

    @property
    def state(self) -> State:
        ssm = self.numbers
        return State(ssm.heads, ssm.state, ssm.head_dim, float(ssm.chunk))

    @property
    def value_width(self) -> int:
        return self.numbers.heads * self.numbers.head_dim

    @property
    def convolved(self) -> int:
        """Width of what the convolution sees: values, and keys and queries of every group."""
        return self.value_width + 2 * self.numbers.groups * self.numbers.state

    @property
    def taps(self) -> int:
        return self.numbers.conv_kernel

    @property
    def projected(self) -> int:
        """Gate, convolved part, step of every head."""
        return self.value_width + self.convolved + self.numbers.heads

    def other_parameters(self) -> int:
        """Convolution with its bias; A, D and step bias of every head; norm."""
        return self.convolved * (self.taps + 1) + 3 * self.numbers.heads + self.value_width

    def scan_s(
        self, device: Device, fit: ScanFit, sequences: FloatArray, query: FloatArray, heads: FloatArray
    ) -> FloatArray:
        state = self.state
        return chunked_with(device, fit, sequences, query, heads, state.keys, state.values, state.chunk)

    def tensors(self) -> int:
        return super().tensors() + 6

    def scan_values(self, hw: Hardware) -> float:
        """Convolution and gating; chunk states where no table holds the scan: bandwidth form, extrapolated."""
        return 12.0 * self.value_width + 6.0 * self.numbers.groups * self.numbers.state + self.untimed_state_bytes(hw)

    def kept(self, keeping: Keeping) -> Kept:
        """Projected inputs, convolved inputs, chunk states, gated output (extrapolated, no measured table)."""
        values = self.value_width + 2 * self.convolved + self.numbers.heads + 2 * self.value_width
        return Kept(dense=(keeping.width * values + self.chunk_state_bytes) / keeping.tensor)
