"""What token mixers with a recurrent state share; the kinds are in `linear` and `mamba`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from rlperf.cost.layers.layer import Layer, Matrix
from rlperf.cost.replica import Operator, Replica, memory_operator
from rlperf.cost.roofline import gemm_fit, sheet_flop_per_s, small_op_s
from rlperf.cost.scan import convolved_with, scan_fit, scan_with, step_with
from rlperf.cost.trainer_device import Seconds, TrainerDevice
from rlperf.layout import BoolArray, FloatArray, IntArray
from rlperf.specs.calibration import ScanFit
from rlperf.specs.cluster import Device
from rlperf.specs.hardware import Hardware

TRAINED = "sglang"
"""Engine whose scan is the library's (flash-linear-attention, Triton) that trainers call too. Mamba-2's is one
library's in all (mamba_ssm)."""
BACKWARD = 3.24
"""Seconds of a scan's backward over its forward: the library's kernels for 8,192 tokens in one to eight sequences and
64 or 96 heads on an RTX 5090, 3.20 to 3.33 (kernels/linear_attention_train.csv, KDA, n = 6, read 2026-11-23). No table
has Mamba-2's; it is taken to be the same."""


@dataclass(frozen=True)
class State:
    """Recurrent state of one layer: heads of [keys x values], and the chunk that its scan works in [tokens]."""

    heads: int
    keys: int
    values: int
    chunk: float


class Recurrent(Layer, ABC):
    """A mixer with a state of fixed size in place of a cache.

    A kind states its state, the width of its projection and of its output, and what it keeps. Kernel tables hold the
    scan and the recurrence of delta rules (`table`); nothing measured stands behind the rest.
    """

    unmeasured = "recurrent layers have no kernel table"
    unmeasured_training = True
    carries_state = True
    table = ""
    """Kind of mixer whose scan and recurrence kernel tables hold (`rlperf.cost.scan`); empty: none."""
    projections = 1
    """Matrices of the checkpoint that make the projection."""

    @property
    @abstractmethod
    def state(self) -> State:
        """Its recurrent state."""

    @property
    @abstractmethod
    def projected(self) -> int:
        """Outputs of the projection: gate, keys, queries, values, decays [1]."""

    @property
    @abstractmethod
    def value_width(self) -> int:
        """Width of the output before its projection."""

    def divides(self, heads: IntArray, tensor: IntArray) -> BoolArray:
        return np.asarray(self.state.heads % heads == 0)

    def matrices(self) -> tuple[Matrix, ...]:
        h = self.arch.hidden
        return (
            Matrix("qkv", h, self.projected, parts=self.projections),
            Matrix("output", self.value_width, h, "inputs"),
        )

    @property
    def state_bytes(self) -> float:
        """State of one request, kept in fp32 [bytes]."""
        return 4.0 * self.state.heads * self.state.keys * self.state.values

    def token_operators(self, replica: Replica, count: float, whole: FloatArray, local: FloatArray) -> list[Operator]:
        if self._convolution_fit(replica, "context") is None:
            moved = local * self.projected / replica.attention_tensor * 4.0
            return [memory_operator(replica, "convolution", 2.0 * count, moved)]
        return [
            memory_operator(replica, "gated norm", count, local * self.value_width / replica.attention_tensor * 6.0)
        ]

    def _convolution_fit(self, replica: Replica, phase: str) -> ScanFit | None:
        return scan_fit(replica.hw, f"{self.table} convolution", phase, replica.engine.engine)

    def _convolution(
        self, replica: Replica, phase: str, count: float, sequences: FloatArray, query: FloatArray
    ) -> list[Operator]:
        """In front of the recurrence, as its kernel was timed; else among what depends on tokens alone."""
        fit, channels = self._convolution_fit(replica, phase), self.convolved / replica.attention_tensor
        if fit is None:
            return []
        seconds = convolved_with(replica.hw.device, fit, sequences, query, channels, self.taps)
        sheet = 4.0 * sequences * query * channels / replica.hw.device.memory_bandwidth
        return [Operator("convolution", count * seconds, np.zeros(()), count * sheet, np.zeros(()))]

    def decode_operators(self, replica: Replica, count: float, requests: FloatArray, kv: FloatArray) -> list[Operator]:
        """The state is read and written."""
        state, hw = self.state_bytes / replica.attention_tensor, replica.hw
        fit = scan_fit(hw, self.table, "generation", replica.engine.engine)
        found = self._convolution(replica, "generation", count, requests, np.ones(()))
        if fit is None:
            return [*found, memory_operator(replica, "state", count, 2.0 * requests * state)]
        seconds = step_with(hw.device, fit, requests, state)
        sheet = 2.0 * requests * state / hw.device.memory_bandwidth
        return [*found, Operator("state", count * seconds, np.zeros(()), count * sheet, np.zeros(()))]

    def recorded_bytes(self, replica: Replica) -> FloatArray:
        """The state behind the token, as vLLM's blocks of a state hold it (1 + k a request); SGLang keeps one more."""
        return self.state_bytes / replica.attention_tensor

    def recording_s(self, replica: Replica) -> FloatArray:
        """The state behind it is written, and what the convolution sees; the state before is read once for all."""
        device, state, one = replica.hw.device, self.recorded_bytes(replica), np.ones(())
        fit = scan_fit(replica.hw, self.table, "generation", replica.engine.engine)
        if fit is None:
            written = state / (device.memory_bandwidth * replica.hw.calibration.stream.small_memory)
        else:
            written = step_with(device, fit, one, state, drafts=1.0) - step_with(device, fit, one, state)
        front = self._convolution_fit(replica, "generation")
        if front is None:
            return written
        channels = self.convolved / replica.attention_tensor
        more, once = (convolved_with(device, front, one, tokens, channels, self.taps) for tokens in (2.0, 1.0))
        return written + more - once

    def prefill_operators(
        self, replica: Replica, count: float, sequences: FloatArray, query: FloatArray, kv: FloatArray
    ) -> list[Operator]:
        """Chunked scan: products inside a chunk, and of every token with the state."""
        state, hw = self.state, replica.hw
        tokens = sequences * query * state.heads / replica.attention_tensor
        inside, whole = state.chunk * (state.keys + state.values), 2.0 * state.keys * state.values
        flop = 2.0 * tokens * (inside + whole)
        moved = tokens * (2.0 * state.keys + 2.0 * state.values) * 2.0
        fit, _ = gemm_fit(hw, "bf16")
        compute_s = flop / sheet_flop_per_s(hw, "bf16")
        memory_s = count * moved / hw.device.memory_bandwidth
        timed = scan_fit(hw, self.table, "context", replica.engine.engine)
        if timed is None:
            seconds = compute_s / (hw.calibration.stream.scan_compute * fit.compute) + small_op_s(hw, moved)
        else:
            seconds = self.scan_s(hw.device, timed, sequences, query, state.heads / replica.attention_tensor)
        found = self._convolution(replica, "context", count, sequences, query)
        return [*found, Operator("scan", count * seconds, count * compute_s, memory_s, np.zeros(()))]

    def scan_s(
        self, device: Device, fit: ScanFit, sequences: FloatArray, query: FloatArray, heads: FloatArray
    ) -> FloatArray:
        """Seconds of the scan over prompts with the constants of a kernel that was timed."""
        return scan_with(device, fit, sequences, query, heads, self.state.keys, self.state.values)

    def training_s(self, device: TrainerDevice) -> Seconds | None:
        """The chunked scan, as the kernel tables have its forward, over sequences of the mean length of a token's own.

        No clock of long runs: 2 to 4 % of the peak leave the power limit far away.
        """
        fit = scan_fit(device.hw, self.table, "context", TRAINED)
        if fit is None:
            return None
        work = device.work
        length = work.pairs / np.maximum(work.attention_tokens, 1.0)
        sequences = work.tokens / np.maximum(length, 1.0)
        forward = self.scan_s(device.hw.device, fit, sequences, length, self.state.heads / device.tensor)
        return Seconds(forward, BACKWARD * forward, np.zeros(()))

    @property
    def convolved(self) -> int:
        """Channels that a convolution over a few tokens sees [1]."""
        return 0

    @property
    def taps(self) -> int:
        """Tokens that the convolution sees [1]; 1: there is none."""
        return 1

    def cache_bytes_per_request(self, replica: Replica) -> FloatArray:
        """The state, and in 16 bits the tokens that the convolution reads again."""
        return (self.state_bytes + 2.0 * self.convolved * (self.taps - 1)) / replica.attention_tensor

    @property
    def chunk_state_bytes(self) -> float:
        """States of every chunk in fp32, per token [bytes]."""
        return self.state.heads * self.state.keys * self.state.values / self.state.chunk * 4.0

    def untimed_state_bytes(self, hw: Hardware) -> float:
        """The same where no table holds the scan: bandwidth form, extrapolated [bytes]."""
        return self.chunk_state_bytes if scan_fit(hw, self.table, "context", TRAINED) is None else 0.0
