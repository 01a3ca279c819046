"""What softmax attention over chosen keys shares; the kinds are in `sparse`, `block_sparse` and `compressed`."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from rlperf.cost.attention import visible_pairs
from rlperf.cost.layers.softmax import Softmax, attention_operator
from rlperf.cost.replica import Operator, Replica
from rlperf.cost.roofline import sheet_flop_per_s
from rlperf.cost.sparse import KeyChoice, chosen_with, sparse_fit
from rlperf.cost.trainer_device import Seconds, TrainerDevice
from rlperf.layout import FloatArray
from rlperf.specs.calibration import SparseFit
from rlperf.specs.engine_calibration import EngineCalibration
from rlperf.specs.hardware import Hardware

LONG = 65536
"""Tokens to which a mixer without a choice sees keys in training: it reads one in many, so that this matters little."""


@dataclass(frozen=True)
class Queried:
    """What an engine_step asks of such an attention.

    Attributes
    ----------
    queries : tokens that ask [tokens]
    pairs, seen, near : pairs of query and token: all, those that a choice of `Choosing.top` leaves, those of the last
    keys : tokens behind the queries [tokens]
    choices : queries that choose, since more tokens lie behind them than they may read [tokens]
    longest : tokens behind the longest block of queries, whose scores the others wait for [tokens]
    """

    queries: FloatArray
    pairs: FloatArray
    seen: FloatArray
    near: FloatArray
    keys: FloatArray
    choices: FloatArray
    longest: FloatArray


class Choosing(Softmax):
    """Queries read some of the tokens behind them: the ``top`` that an index scores best, and the ``near`` last.

    A kind states its choice (`choice`), and may keep one key for ``ratio`` tokens. Seconds in an engine are those of
    `rlperf.cost.sparse` with the constants of the kind ``table``; in training the form of flash attention over as many
    keys, and the products of the index (extrapolated).
    """

    unmeasured_training = True

    @property
    @abstractmethod
    def table(self) -> str:
        """Mixer by whose name calibrations hold constants (`rlperf.specs.calibration.SparseFit`)."""

    @property
    def top(self) -> int | None:
        """Tokens that the index lets a query read; None: all."""
        return None

    @property
    def near(self) -> int:
        """Last tokens that a query reads beside them."""
        return 0

    @property
    def ratio(self) -> int:
        """Tokens that share a key, the near ones apart; 0: near ones are all there is."""
        return 1

    @property
    def index_width(self) -> int:
        """Values of all heads of the index together; 0 without one."""
        return 0

    @property
    def pool(self) -> int:
        """Tokens that share an index key."""
        return 1

    @abstractmethod
    def choice(self, replica: Replica) -> KeyChoice:
        """What it computes for a query on one device."""

    def lacks(self, hw: Hardware, engine: EngineCalibration) -> str:
        return self.unmeasured

    def untimed_on(self, hw: Hardware) -> bool:
        return not any(fit.mixer == self.table for fit in hw.calibration.sparse)

    @property
    def window(self) -> int:
        """Keys that a query reads at most."""
        return (self.top or LONG) // self.ratio + self.near if self.ratio else self.near

    def decode_operators(self, replica: Replica, count: float, requests: FloatArray, kv: FloatArray) -> list[Operator]:
        seen = np.minimum(kv, requests * float(self.top)) if self.top else kv
        near = np.minimum(kv, requests * float(self.near))
        choices = requests * (kv > requests * float(self.top)) if self.top else 0.0 * requests
        asked = Queried(requests, kv, seen, near, kv, choices, 0.0 * kv)
        return [self._operator(replica, "generation", count, asked)]

    def prefill_operators(
        self, replica: Replica, count: float, sequences: FloatArray, query: FloatArray, kv: FloatArray
    ) -> list[Operator]:
        return [self._operator(replica, "context", count, self.queried(sequences, query, kv))]

    def queried(self, sequences: FloatArray, query: FloatArray, kv: FloatArray) -> Queried:
        """What ``sequences`` ask with ``query`` tokens each, the last of ``kv``."""
        pairs = sequences * visible_pairs(query, kv)
        seen = sequences * visible_pairs(query, kv, window=self.top)
        near = sequences * visible_pairs(query, kv, window=self.near) if self.near else 0.0 * pairs
        beyond = np.minimum(query, np.maximum(kv - self.top, 0.0)) if self.top else 0.0 * query
        return Queried(sequences * query, pairs, seen, near, sequences * kv, sequences * beyond, kv)

    def _operator(self, replica: Replica, phase: str, count: float, asked: Queried) -> Operator:
        work = self.choice(replica)
        fit = sparse_fit(replica.hw, self.table, phase, replica.engine.engine, narrow=work.narrow)
        each = 1.0 / self.ratio if self.ratio else 0.0
        scored, index_keys = asked.pairs * each * (self.index_width > 0), asked.keys * each
        read = self.computed_pairs(fit, asked)
        seconds = chosen_with(
            replica.hw.device, fit, work, asked.queries, scored, read, index_keys, asked.choices, asked.longest * each
        )
        narrow = sheet_flop_per_s(replica.hw, "fp8") / sheet_flop_per_s(replica.hw, "bf16")  # keys are scored in fp8
        flop = read * work.heads * work.pair_flop + scored * work.index_flop / narrow
        moved = index_keys * work.index_bytes + (read if phase == "generation" else index_keys) * work.key_bytes
        return attention_operator(replica, f"{self.table.replace('_', ' ')} attention", count, seconds, flop, moved)

    def computed_pairs(self, fit: SparseFit, asked: Queried) -> FloatArray:
        """Pairs of query and key that attention computes.

        Some kernels go through the list of every query to its end, places that are not filled included.
        """
        each = 1.0 / self.ratio if self.ratio else 0.0
        listed = asked.queries * self.top * each if self.top else 0.0
        return asked.seen * each + asked.near + fit.padded * np.maximum(listed - asked.seen * each, 0.0)

    def training_s(self, device: TrainerDevice) -> Seconds:
        chosen = super().training_s(device)
        if not self.index_width or not self.ratio:
            return chosen
        pairs = (device.work.pairs + device.work.attention_tokens) / 2.0 / self.ratio
        reached = sheet_flop_per_s(device.hw, "bf16") * device.hw.calibration.prefill[0].compute
        index = 2.0 * self.index_width * pairs / self.pool / reached
        return Seconds(chosen.forward + index, chosen.backward + 2.0 * index, chosen.attention + index)
