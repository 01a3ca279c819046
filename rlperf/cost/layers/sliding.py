"""Softmax attention in a sliding window (or in chunks): the cache of a request stops growing at the window."""

from __future__ import annotations

import numpy as np

from rlperf.cost.attention import decode_fit
from rlperf.cost.layers.full import Full
from rlperf.cost.replica import Operator, Replica
from rlperf.layout import FloatArray
from rlperf.specs.engine_calibration import EngineCalibration
from rlperf.specs.hardware import Hardware


class Sliding(Full):
    """Every query sees the last ``window`` tokens; matrices and parameters are those of full attention."""

    unmeasured = "decodes of sliding-window attention have no fit of their own"

    @property
    def window(self) -> int:
        return self.arch.window

    def lacks(self, hw: Hardware, engine: EngineCalibration) -> str:
        """Nothing where the engine's decode kernel was timed in windows."""
        return "" if decode_fit(hw, kernel=engine.decode_kernel)[0].windows_timed else self.unmeasured

    def decode_operators(self, replica: Replica, count: float, requests: FloatArray, kv: FloatArray) -> list[Operator]:
        seen = np.minimum(kv, requests * float(self.window))
        return [self._decode(replica, "sliding attention", count, requests, seen)]

    def prefill_operators(
        self, replica: Replica, count: float, sequences: FloatArray, query: FloatArray, kv: FloatArray
    ) -> list[Operator]:
        return [self._prefill(replica, "sliding attention", count, sequences, query, kv)]

    def cache_bytes_per_token(self, replica: Replica) -> FloatArray:
        """Nothing, but where the engine keeps what lies behind the window."""
        return np.zeros(()) if replica.engine.frees_windows else super().cache_bytes_per_token(replica)

    def cache_bytes_per_request(self, replica: Replica) -> FloatArray:
        """A whole window."""
        each = super().cache_bytes_per_token(replica)
        return each * self.window if replica.engine.frees_windows else np.zeros_like(each)

    def cache_bytes(self, replica: Replica, tokens: FloatArray) -> FloatArray:
        """Of a request shorter than the window no more than its tokens."""
        kept = np.minimum(tokens, self.window) if replica.engine.frees_windows else tokens
        return np.asarray(kept * super().cache_bytes_per_token(replica))
