"""When the groups of a rollout end: of a simulated one, and in closed form over waves of requests.

Counted in engine_steps it does not depend on what these cost when a response ends, so a queue is scheduled once for all
engines, as in `queued`, here on all replicas at once: one behind the other, on one clock. What an engine's steps cost
turns their counts into seconds (docs/theory/rollout.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.layout import FloatArray, IntArray
from rlperf.sim.rollout.queued import Grid, schedule
from rlperf.sim.rollout.static import prefix_hits
from rlperf.sim.rollout.tail import last_of_groups
from rlperf.sim.rollout.trajectories import Trajectories

ENDS = 64
"""Parts of a batch of which a rollout says when they are complete."""


def group_ends(finish: FloatArray, group: IntArray) -> FloatArray:
    """When each of `ENDS` equal parts of the groups is complete, its last response included [s].

    >>> group_ends(np.array([1.0, 4.0, 2.0]), np.array([7, 7, 9]))[[0, 31, 32, 63]].tolist()
    [2.0, 2.0, 4.0, 4.0]
    """
    return _parts(last_of_groups(group, finish)[0])


def in_turn(ends: Sequence[FloatArray]) -> FloatArray:
    """The same of batches of as many groups that follow one another, from that of each [s].

    >>> in_turn([np.linspace(1.0, 64.0, 64), np.full(64, 10.0)])[[0, 31, 32, 63]].tolist()
    [2.0, 64.0, 74.0, 74.0]
    """
    begin = np.cumsum([0.0, *(each[-1] for each in ends[:-1])])
    return _parts(np.concatenate([start + each for start, each in zip(begin, ends, strict=True)]))


def _parts(ends: FloatArray) -> FloatArray:
    return np.asarray(np.sort(ends)[np.ceil(np.arange(1, ENDS + 1) / ENDS * ends.size).astype(np.int64) - 1])


@dataclass(frozen=True, eq=False)
class GroupEnds:
    """The engine_steps of replicas, one behind the other, and which of them end a group.

    Attributes
    ----------
    grid : runs of engine_steps that share a batch ``[runs]``
    at, tokens, pairs, prompts : runs of one engine_step that read prompts, and what they read ``[reads]``
    begin, end : first run of each one's replica, and the one behind its own last, by group ``[requests]``
    first : of each group the first of its requests ``[groups]``
    """

    grid: Grid
    at: IntArray
    tokens: FloatArray
    pairs: FloatArray
    prompts: FloatArray
    begin: IntArray
    end: IntArray
    first: IntArray

    def seconds(self, cost: EngineStepCost) -> FloatArray:
        """When each part of the groups is complete [s] ``[ENDS]``."""
        grid, at, batch = self.grid, self.at, np.arange(self.grid.running.max() + 1, dtype=np.float64)
        running = batch[grid.running[at]]
        seconds = grid.steps * cost.decode_fixed(batch)[grid.running]
        seconds += grid.keys * cost.decode_per_key(batch)[grid.running]
        seconds[at] = cost.engine_step_s(running, grid.keys[at], self.tokens, self.pairs, self.prompts)
        clock = np.concatenate([[0.0], np.cumsum(seconds)])
        return _parts(np.maximum.reduceat(clock[self.end] - clock[self.begin], self.first))


def count_group_ends(trajectories: Trajectories, replica: IntArray, limits: EngineLimits) -> GroupEnds:
    """Trajectories of one turn on equal replicas (each one's: ``replica``), which have a cache for all that run.

    >>> limits = EngineLimits(kv_tokens=np.inf, max_running=8)
    >>> ends = count_group_ends(Trajectories.of(4, [1, 3]), np.zeros(2, dtype=np.int64), limits)
    >>> ends.seconds(EngineStepCost(np.array([0.0]), np.ones(1)))[[0, 63]].tolist()
    [1.0, 3.0]
    """
    own = trajectories.take(order := np.argsort(replica, kind="stable"))
    waves = _Waves.of(own, replica[order], limits)
    grid, by_group = waves.grid(own), np.argsort(own.group, kind="stable")
    group, (at, tokens, pairs, prompts) = own.group[by_group], waves.read
    return GroupEnds(
        grid,
        np.searchsorted(grid.points, at),
        tokens,
        pairs,
        prompts,
        begin=np.searchsorted(grid.points, waves.start[by_group]),
        end=np.searchsorted(grid.points, (waves.start + waves.need)[by_group]),
        first=np.flatnonzero(np.diff(group, prepend=group[0] - 1)),
    )


@dataclass(frozen=True, eq=False)
class _Waves:
    """Requests of all replicas, scheduled; one replica stands behind the other.

    Attributes
    ----------
    start : begin of each one's replica [engine_steps] ``[requests]``
    ready, need : engine_steps from there until it has its first token, and its last ``[requests]``
    read : (engine_step, prompt tokens, pairs, prompts) of all that read prompts, in order ``[4, engine_steps]``
    """

    start: IntArray
    ready: IntArray
    need: IntArray
    read: FloatArray

    @classmethod
    def of(cls, own: Trajectories, replica: IntArray, limits: EngineLimits) -> _Waves:
        """First come first served on every replica; those of the first wave have their prompts read evenly."""
        places, count = min(limits.max_running, limits.token_budget), np.bincount(replica)
        first = np.cumsum(count) - count
        row = np.arange(len(own)) - first[replica]
        # what a replica has read for one of a group it holds for the others
        hits = prefix_hits(replace(own, group=own.group * len(count) + replica), limits)
        new, response = own.prompt_tokens - hits, own.response_tokens
        reading = np.maximum(-(-new // limits.token_budget), 1)
        ready = _read_at(np.where(row < places, new, 0), row, limits.token_budget)
        need = ready + response - 1
        for begin, requests in zip(first[count > places].tolist(), count[count > places].tolist(), strict=True):
            queued = slice(begin + places, begin + requests)
            taken = response[queued] + reading[queued] - 1
            admitted, need[queued] = schedule(need[begin : begin + places], taken, 0)
            ready[queued] = admitted + reading[queued]
        apart = int(need.max()) + 2
        pairs = (own.prompt_tokens * (own.prompt_tokens + 1) - hits * (hits + 1)) / 2.0
        amount, waits = np.stack([new, pairs, np.ones(len(own))]), row >= places
        at, until = replica * apart, ready[first + np.minimum(count, places) - 1]
        together = np.stack([np.bincount(replica, np.where(waits, 0.0, each)) for each in amount])
        read = _reads(
            np.concatenate([at[first], (at + ready - reading)[waits]]),
            np.concatenate([until, reading[waits]]),
            np.concatenate([together, amount[:, waits]], axis=1),
        )
        return cls(at, ready, need, read)

    def grid(self, own: Trajectories) -> Grid:
        """Runs of engine_steps with a constant batch, those that read prompts one by one."""
        order = np.argsort(self.start + self.ready, kind="stable")
        start, ready, need = (each[order] for each in (self.start, self.ready, self.need))
        at = np.concatenate([self.start, self.read[0].astype(np.int64)])
        return Grid.of(0, start + need, start + ready, at, own.prompt_tokens[order])


def _read_at(new: IntArray, row: IntArray, budget: int) -> IntArray:
    """Engine_step with which the prompts of all that start together are read, one after another ``[requests]``.

    ``new``: tokens that are to be read; ``row``: place of each in its replica's queue
    """
    begins = np.flatnonzero(row == 0)
    replica = np.cumsum(row == 0) - 1

    def summed(values: IntArray) -> IntArray:
        total = np.cumsum(values)
        return np.asarray(total - (total - values)[begins][replica], dtype=np.int64)

    tokens = summed(new)
    ready = np.maximum(-(-tokens // budget), 1)
    # those that are ready write a token in each of the engine_steps in which others are read
    written = (row + 1) * ready - summed(ready)
    return np.asarray(np.maximum(-(-(tokens + written) // budget), 1), dtype=np.int64)


def _reads(at: IntArray, spread: IntArray, amount: FloatArray) -> FloatArray:
    """(engine_step, amounts) of what is read from engine_steps ``at`` on, evenly over ``spread`` of them, in order."""
    steps = np.repeat(at, spread) + np.arange(spread.sum()) - np.repeat(np.cumsum(spread) - spread, spread)
    found, index = np.unique(steps, return_inverse=True)
    each = np.repeat(amount / spread, spread, axis=1)
    return np.stack([found, *(np.bincount(index.reshape(-1), values) for values in each)])
