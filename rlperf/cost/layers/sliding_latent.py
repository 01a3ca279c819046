"""Latent attention in a sliding window: the latents of a request stop growing at the window (dots 3)."""

from __future__ import annotations

import numpy as np

from rlperf.cost.layers.latent import Latent
from rlperf.cost.replica import Operator, Replica
from rlperf.layout import FloatArray
from rlperf.specs.engine_calibration import EngineCalibration
from rlperf.specs.hardware import Hardware


class SlidingLatent(Latent):
    """Every query sees the latents of the last ``window`` tokens; matrices are those of latent attention."""

    unmeasured = "latent attention in a window has no kernel table"

    @property
    def window(self) -> int:
        return self.arch.window

    def lacks(self, hw: Hardware, engine: EngineCalibration) -> str:
        return self.unmeasured

    def decode_operators(self, replica: Replica, count: float, requests: FloatArray, kv: FloatArray) -> list[Operator]:
        return super().decode_operators(replica, count, requests, np.minimum(kv, requests * float(self.window)))

    def cache_bytes_per_token(self, replica: Replica) -> float:
        return 0.0

    def cache_bytes_per_request(self, replica: Replica) -> FloatArray:
        """A whole window."""
        return np.asarray(super().cache_bytes_per_token(replica) * self.window)
