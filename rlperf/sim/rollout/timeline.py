"""What a simulated replica did: when every turn ran, and what the engine was busy with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from rlperf.layout import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class Segments:
    """Runs of engine_steps between two events, in time order; every field is a column ``[segments]``.

    Attributes
    ----------
    start_s, seconds : begin and duration [s]
    steps : engine_steps in the run
    running : requests that decode
    waiting : requests queued at its begin
    keys : cached tokens read by all its decodes [tokens]
    prefill_tokens, prefill_pairs, prefill_requests : of its prefill (0 in a decode-only run)
    stalled : requests that were ready to decode but waited for a prefill that went first
    recomputed : of prefill_tokens, those computed before and lost: to a preemption, or because the cache was full
        while a tool ran [tokens]
    held_tokens : capacity of the blocks that running requests hold at its begin [tokens]
    """

    start_s: FloatArray
    seconds: FloatArray
    steps: IntArray
    running: IntArray
    waiting: IntArray
    keys: FloatArray
    prefill_tokens: IntArray
    prefill_pairs: FloatArray
    prefill_requests: IntArray
    stalled: IntArray
    recomputed: IntArray
    held_tokens: FloatArray

    def __len__(self) -> int:
        return len(self.start_s)

    def first(self, count: int) -> Segments:
        """The first ``count`` runs."""
        return Segments(*(getattr(self, name)[:count] for name in self.__dataclass_fields__))

    @property
    def prefilling(self) -> FloatArray:
        """1 where the run is an engine_step with prefill."""
        return (self.prefill_tokens > 0).astype(np.float64)


@dataclass
class SegmentLog:
    """Rows of `Segments` while they are being written."""

    rows: list[tuple[float, ...]] = field(default_factory=list)
    parts: list[Segments] = field(default_factory=list)

    def add(self, part: Segments) -> None:
        """Many rows at once, as columns, after those written so far."""
        self._flush()
        self.parts.append(part)

    def close(self) -> Segments:
        """Everything written, as columns."""
        self._flush()
        names = list(Segments.__dataclass_fields__)
        if not self.parts:
            empty: list[Any] = [np.zeros(0, np.int64 if i in _COUNTS else np.float64) for i in range(len(names))]
            return Segments(*empty)
        if len(self.parts) == 1:
            return self.parts[0]
        columns = [[getattr(part, name) for part in self.parts] for name in names]
        return Segments(*(np.concatenate(column) for column in columns))

    def _flush(self) -> None:
        if self.rows:
            width = len(Segments.__dataclass_fields__)
            values = np.fromiter(chain.from_iterable(self.rows), np.float64, width * len(self.rows))
            table = values.reshape(-1, width).T
            columns: list[Any] = [c.astype(np.int64) if i in _COUNTS else c for i, c in enumerate(table)]
            self.parts.append(Segments(*columns))
            self.rows.clear()


_COUNTS = {2, 3, 4, 6, 8, 9, 10}
"""Columns of `Segments` that hold whole numbers."""


@dataclass(frozen=True, eq=False)
class Pauses:
    """When turns that had begun to write were preempted, and when they wrote on; columns ``[pauses]``."""

    turn: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    start_s: FloatArray = field(default_factory=lambda: np.zeros(0))
    end_s: FloatArray = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def of(cls, rows: Sequence[tuple[int, float, float]], turns: IntArray | None) -> Pauses:
        """Of all turns, or of ``turns`` (ascending), which are then counted anew.

        >>> Pauses.of([(7, 1.0, 2.0), (4, 3.0, 5.0)], np.array([2, 4])).turn.tolist()
        [1]
        """
        table = np.array(rows, dtype=np.float64).reshape(len(rows), 3)
        turn = table[:, 0].astype(np.int64)
        if turns is not None:
            kept = np.isin(turn, turns)
            table, turn = table[kept], np.searchsorted(turns, turn[kept])
        return cls(turn, table[:, 1], table[:, 2])


@dataclass(frozen=True, eq=False)
class ReplicaTimeline:
    """Outcome of one replica's rollout.

    Attributes
    ----------
    arrival_s, scheduled_s, first_token_s, finish_s : of every turn [s] ``[turns]``
    trajectory_finish_s : end of every trajectory's last turn [s] ``[trajectories]``
    segments : what the engine did, run by run
    preemptions : requests evicted for lack of cache blocks
    pauses : of those that had begun to write
    hit_tokens, prompt_tokens : prefix-cache hits, and tokens looked up (a resumed request counts again) [tokens]
    roomy_tokens : a cache from which on nothing changes; infinite where a larger one could change something [tokens]
    full_places : whether more places for running requests could have changed anything
    """

    arrival_s: FloatArray
    scheduled_s: FloatArray
    first_token_s: FloatArray
    finish_s: FloatArray
    trajectory_finish_s: FloatArray
    segments: Segments
    preemptions: int = 0
    pauses: Pauses = Pauses()
    hit_tokens: int = 0
    prompt_tokens: int = 0
    roomy_tokens: float = np.inf
    full_places: bool = False

    @property
    def makespan_s(self) -> float:
        """End of the last trajectory [s], from t = 0."""
        return float(self.trajectory_finish_s.max()) if len(self.trajectory_finish_s) else 0.0

    @property
    def busy_s(self) -> float:
        """Seconds in engine_steps."""
        return float(self.segments.seconds.sum())

    @property
    def tool_wait_s(self) -> float:
        """Seconds without any request to compute, before the last one ends: all wait for tools, or have not arrived."""
        idle = self.makespan_s - self.busy_s
        return idle if idle > 1e-9 * self.makespan_s else 0.0  # else rounding of sums

    @property
    def prefill_s(self) -> float:
        """Seconds of engine_steps that contain prefill."""
        return float((self.segments.seconds * self.segments.prefilling).sum())

    @property
    def engine_steps(self) -> int:
        """Engine_steps executed."""
        return int(self.segments.steps.sum())

    @property
    def latency_s(self) -> FloatArray:
        """End of each turn after its arrival [s] ``[turns]``."""
        return self.finish_s - self.arrival_s

    @property
    def ttft_s(self) -> FloatArray:
        """First token of each turn after its arrival [s] ``[turns]``."""
        return self.first_token_s - self.arrival_s

    @property
    def mean_running(self) -> float:
        """Decoding requests averaged over the makespan."""
        span = self.makespan_s
        return float((self.segments.running * self.segments.seconds).sum() / span) if span else 0.0
