"""Lightning attention: linear attention with one fixed decay a head (MiniMax-01, arXiv 2501.08313, section 2.2)."""

from __future__ import annotations

from rlperf.cost.layers.linear import Linear
from rlperf.specs.hardware import Hardware


class Lightning(Linear):
    """Queries, keys, values and an output gate around a state that decays at a rate of its head's own."""

    table = ""
    unmeasured = "lightning attention has no kernel table"

    @property
    def projected(self) -> int:
        """Queries, keys, values, output gate; decays are constants."""
        return 2 * self.key_width + 2 * self.value_width

    def other_parameters(self) -> int:
        """Norm of the output."""
        return self.value_width

    def scan_values(self, hw: Hardware) -> float:
        """Gating and chunk states, no convolution: bandwidth form, extrapolated."""
        return 4.0 * self.key_width + 8.0 * self.value_width + self.chunk_state_bytes
