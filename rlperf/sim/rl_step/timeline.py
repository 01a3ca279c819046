"""Timeline: when every stage of one or several rl_steps runs, and on which rank.

A struct of arrays. Spans say who did what from when to when; the step time, idle devices and bars are read from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rlperf.layout import FloatArray, IntArray

STAGES = (
    "rollout",
    "reward",
    "scoring",
    "training",
    "weight_sync",
    "data_movement",
    "offload",
    "onload",
    "wake",
    "sleep",
    "other",
)
"""Names of the stage codes."""
ROLLOUT, REWARD, SCORING, TRAINING, WEIGHT_SYNC, DATA_MOVEMENT, OFFLOAD, ONLOAD, WAKE, SLEEP, OTHER = range(11)


@dataclass(frozen=True, eq=False)
class Timeline:
    """Spans of pools and ranks.

    Attributes
    ----------
    stage : index into STAGES, int64 ``[spans]``
    pool : index into ``pools``, int64 ``[spans]``
    rank : replica or data-parallel rank inside the pool, int64 ``[spans]``
    start_s, end_s : from the start of the timeline [s] ``[spans]``
    rl_step : the rl_step that the span belongs to (asynchronous rollout: the one that trains on it), int64 ``[spans]``
    pools : names of the pools
    pool_devices : devices of each pool, int64 ``[pools]``
    warmup : first rl_steps left out of the means (the filling of an asynchronous pipeline)
    """

    stage: IntArray
    pool: IntArray
    rank: IntArray
    start_s: FloatArray
    end_s: FloatArray
    rl_step: IntArray
    pools: tuple[str, ...]
    pool_devices: IntArray
    warmup: int = 0

    @property
    def spans(self) -> int:
        """Number of spans."""
        return int(self.stage.size)

    @property
    def duration_s(self) -> FloatArray:
        """Length of every span [s] ``[spans]``."""
        return self.end_s - self.start_s

    @property
    def rl_steps(self) -> IntArray:
        """The rl_steps in the timeline after the warm-up, ascending."""
        return np.unique(self.rl_step)[self.warmup :]

    @property
    def step_ends_s(self) -> FloatArray:
        """End of every rl_step, warm-up included: when the last of its spans ends [s]."""
        steps = np.unique(self.rl_step)
        ends = np.full(steps.size, -np.inf)
        np.maximum.at(ends, np.searchsorted(steps, self.rl_step), self.end_s)
        return np.maximum.accumulate(ends)

    @property
    def rl_step_s(self) -> float:
        """Mean seconds from the end of one rl_step to the end of the next; of a single one, its makespan [s]."""
        if not self.spans:
            return 0.0
        ends = self.step_ends_s
        first = ends[self.warmup - 1] if self.warmup else float(self.start_s.min())
        return float((ends[-1] - first) / max(ends.size - self.warmup, 1))

    def idle_device_s(self) -> FloatArray:
        """Device-seconds per rl_step in which the devices of each pool do nothing [s] ``[pools]``.

        A rank that has no span at some time idles. In each stage, its ranks stand for
        equal parts of the pool's devices (replicas in rollout, data-parallel ranks in training).
        """
        idle = np.zeros(len(self.pools))
        if not self.spans:
            return idle
        kept = np.isin(self.rl_step, self.rl_steps)
        count = max(self.rl_steps.size, 1)
        for pool in range(len(self.pools)):
            busy = 0.0
            for stage in np.unique(self.stage[self.pool == pool]):
                whole = (self.pool == pool) & (self.stage == stage)
                ranks = int(np.unique(self.rank[whole]).size)
                busy += float(self.duration_s[whole & kept].sum()) / count / ranks
            idle[pool] = max(self.rl_step_s - busy, 0.0) * float(self.pool_devices[pool])
        return idle


@dataclass
class TimelineBuilder:
    """Collects spans, then freezes them into a `Timeline`.

    >>> build = TimelineBuilder(("all",), (8,))
    >>> build.span(ROLLOUT, 0, 0, 0.0, 2.0)
    >>> build.span(TRAINING, 0, 0, 2.0, 5.0)
    >>> build.freeze().rl_step_s
    5.0
    """

    pools: tuple[str, ...]
    pool_devices: tuple[int, ...]
    _spans: list[tuple[int, int, int, float, float, int]] = field(default_factory=list)

    def span(self, stage: int, pool: int, rank: int, start_s: float, end_s: float, *, rl_step: int = 0) -> None:
        """Add a span."""
        self._spans.append((stage, pool, rank, float(start_s), float(end_s), rl_step))

    def freeze(self, warmup: int = 0) -> Timeline:
        """The finished timeline."""
        spans = np.array(self._spans, dtype=np.float64).reshape(-1, 6)
        stage, pool, rank, step = (spans[:, column].astype(np.int64) for column in (0, 1, 2, 5))
        return Timeline(
            stage=stage,
            pool=pool,
            rank=rank,
            start_s=spans[:, 3],
            end_s=spans[:, 4],
            rl_step=step,
            pools=self.pools,
            pool_devices=np.array(self.pool_devices, dtype=np.int64),
            warmup=warmup,
        )
