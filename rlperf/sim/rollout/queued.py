"""More requests than places, all there from the start, cache never full: the queue as list scheduling.

Counted in decoding engine_steps, a place that is free at step c gives the next request its first token at c + 1 and
takes it until c + R, whatever the steps cost. So a heap of integers schedules the queue, and all seconds follow from
sorted arrays. Equal to the event loop where it applies; where an assumption fails on the way it gives up, and the
event loop takes over.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heapreplace

import numpy as np

from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.layout import FloatArray, IntArray
from rlperf.sim.rollout.options import EngineOptions
from rlperf.sim.rollout.static import PrefillPhase, prefill_phase, prefix_hits
from rlperf.sim.rollout.step_seconds import EngineStepSeconds, tabulated
from rlperf.sim.rollout.timeline import ReplicaTimeline, SegmentLog, Segments
from rlperf.sim.rollout.trajectories import Trajectories


def queue_applies(trajectories: Trajectories, limits: EngineLimits, options: EngineOptions) -> bool:
    """Whether `run_queued` is worth trying."""
    places = min(limits.max_running, limits.token_budget)
    if not limits.chunked_prefill or options.speculation is not None or not 1 < places < len(trajectories):
        return False
    if not trajectories.single_turn or trajectories.arrival_s.any() or (options.trajectories or places) < places:
        return False
    # a full batch of mean requests, halfway through: much above the cache, the queue is ruled by the cache
    return limits.kv_tokens == np.inf or places * _half_grown(trajectories) < limits.kv_tokens


def _half_grown(trajectories: Trajectories) -> float:
    """Context of a request halfway through, on average [tokens]."""
    return float((trajectories.prompt_tokens + 0.5 * trajectories.response_tokens).mean())


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of equal engine_steps, as counted by `count_queued`; the same columns as `Segments` has ``[runs]``."""

    running: IntArray
    steps: IntArray
    keys: FloatArray
    prefill_tokens: IntArray
    prefill_requests: IntArray
    prefill_pairs: FloatArray

    @classmethod
    def of(cls, grid: Grid, mixed: Mixed) -> Runs:
        """Those of a grid, some of which read prompts."""
        tokens, requests, pairs = (np.zeros(len(grid.steps)) for _ in range(3))
        tokens[mixed.at], requests[mixed.at], pairs[mixed.at] = mixed.tokens, mixed.requests, mixed.pairs
        return cls(grid.running, grid.steps, grid.keys, tokens.astype(np.int64), requests.astype(np.int64), pairs)


def count_queued(
    trajectories: Trajectories, cost: EngineStepCost, limits: EngineLimits, options: EngineOptions
) -> Runs | None:
    """What the engine runs while it serves a queue, without when: the columns of `run_queued`'s segments, in order."""
    queue = _Queue.of(trajectories, cost, limits, options)
    if queue is None:
        return None
    rest = Runs.of(queue.grid, queue.mixed)
    phase = np.array(queue.log.rows, dtype=np.float64).T
    _, _, steps, running, _, keys, tokens, pairs, requests, *_ = phase
    return Runs(
        np.concatenate([running.astype(np.int64), rest.running]),
        np.concatenate([steps.astype(np.int64), rest.steps]),
        np.concatenate([keys, rest.keys]),
        np.concatenate([tokens.astype(np.int64), rest.prefill_tokens]),
        np.concatenate([requests.astype(np.int64), rest.prefill_requests]),
        np.concatenate([pairs, rest.prefill_pairs]),
    )


def run_queued(
    trajectories: Trajectories, cost: EngineStepCost, limits: EngineLimits, options: EngineOptions
) -> ReplicaTimeline | None:
    """Simulate a queue (arguments: `simulate_replica`); None where the event loop is needed.

    That is: a response ends while the first prompts are still computed, prompts do not fit the token budget beside the
    decodes, the batch empties between two admissions, or the cache may fill.
    """
    queue = _Queue.of(trajectories, cost, limits, options)
    if queue is None:
        return None
    grid, mixed, phase, log = queue.grid, queue.mixed, queue.phase, queue.log
    n, places = len(trajectories), queue.places
    duration = grid.steps * queue.seconds.fixed[grid.running] + queue.seconds.per_key[grid.running] * grid.keys
    running = grid.running[mixed.at].astype(np.float64)
    duration[mixed.at] = cost.engine_step_s(running, grid.keys[mixed.at], mixed.tokens, mixed.pairs, mixed.requests)
    ends = phase.now + np.cumsum(duration)
    starts = ends - duration
    log.add(_segments(grid, mixed, starts, duration, n - places, queue.admitted))
    finish = ends[np.searchsorted(grid.points, queue.need) - 1]
    begun = np.searchsorted(grid.points, queue.admitted)
    return ReplicaTimeline(
        arrival_s=np.zeros(n),
        scheduled_s=np.concatenate([phase.begin_s, starts[begun]]),
        first_token_s=np.concatenate([phase.ready_s, ends[begun]]),
        finish_s=finish,
        trajectory_finish_s=finish,
        segments=log.close(),
        hit_tokens=int(queue.hits.sum()),
        prompt_tokens=int(trajectories.prompt_tokens.sum()),
        roomy_tokens=queue.roomy_tokens,
        full_places=True,
    )


@dataclass(frozen=True, eq=False)
class _Queue:
    """A queue scheduled: who is admitted and done at which step, and the runs of engine_steps between."""

    places: int
    seconds: EngineStepSeconds
    hits: IntArray
    log: SegmentLog
    phase: PrefillPhase
    admitted: IntArray
    need: IntArray
    grid: Grid
    mixed: Mixed
    roomy_tokens: float

    @classmethod
    def of(
        cls, trajectories: Trajectories, cost: EngineStepCost, limits: EngineLimits, options: EngineOptions
    ) -> _Queue | None:
        """None where an assumption fails, see `run_queued`."""
        n, places = len(trajectories), int(min(limits.max_running, limits.token_budget))
        seconds = tabulated(cost, places, options)
        hits = prefix_hits(trajectories, limits)
        log = SegmentLog()
        early = np.full(places, -1.0)
        head = trajectories.take(np.arange(places))
        phase = prefill_phase(head, hits[:places], seconds, limits, log, early, behind=n - places)
        if (early >= 0.0).any():
            return None
        response = trajectories.response_tokens
        first_need = phase.ready_clock + response[:places] - 1
        admitted, need = schedule(first_need, response[places:], int(options.async_scheduling))
        need = np.concatenate([first_need, need])
        ready = np.concatenate([phase.ready_clock, admitted + 1])
        grid = Grid.of(phase.clock, need, ready, admitted, trajectories.prompt_tokens)
        mixed = _mixed_steps(grid, trajectories, hits, admitted, places)
        if (grid.running[mixed.at] + mixed.tokens > limits.token_budget).any() or not grid.running[mixed.at].all():
            return None
        most = grid.most_tokens(mixed, limits, trajectories, hits)
        if most > limits.kv_tokens:
            return None
        roomy = limits.kv_tokens
        if roomy < np.inf:
            roomy = min(max(most, places * _half_grown(trajectories) + 1.0), roomy)
        return cls(places, seconds, hits, log, phase, admitted, need, grid, mixed, roomy)


def schedule(first_need: IntArray, response: IntArray, lag: int) -> tuple[IntArray, IntArray]:
    """First come first served on the places: step of admission and of completion of each queued request."""
    places: list[int] = first_need.tolist()
    heapify(places)
    # the place that is free first takes the next request; what comes back is when it was free
    free = [heapreplace(places, places[0] + tokens) for tokens in (response + lag).tolist()]
    admitted = np.array(free, dtype=np.int64) + lag
    return admitted, admitted + response


class Grid:
    """Runs of engine_steps with a constant batch, between consecutive ``points`` of the decode clock."""

    def __init__(self, points: IntArray, running: IntArray, base: IntArray) -> None:
        self.points = points
        self.steps = np.diff(points)
        self.running = running
        self.base = base
        start = points[:-1]
        clocks = self.steps * start + self.steps * (self.steps - 1) / 2.0
        self.keys: FloatArray = self.steps * (base + running).astype(np.float64) + running * clocks

    @classmethod
    def of(cls, clock: int, need: IntArray, ready: IntArray, admitted: IntArray, prompt: IntArray) -> Grid:
        """Points where the batch changes; request i decodes from ready_i until need_i with base_i + clock tokens."""
        points = np.sort(np.concatenate([[clock], need, admitted, admitted + 1]))
        points = points[np.concatenate([[True], points[1:] != points[:-1]])]
        base = prompt - ready
        order = np.argsort(need, kind="stable")
        entered = np.searchsorted(ready, points[:-1], side="right")
        left = np.searchsorted(need[order], points[:-1], side="right")
        sums = np.concatenate([[0], np.cumsum(base)])
        gone = np.concatenate([[0], np.cumsum(base[order])])
        return cls(points, entered - left, sums[entered] - gone[left])

    def most_tokens(self, mixed: Mixed, limits: EngineLimits, trajectories: Trajectories, hits: IntArray) -> float:
        """Bound on the cache that is ever held or kept: whole blocks, admitted prompts, every group's prefix."""
        if limits.kv_tokens == np.inf:
            return np.inf
        block = limits.block_tokens
        held = self.base + self.running * (self.points[1:] + block + 1)
        prompts = float(trajectories.prompt_tokens.max() + block) * float(mixed.requests.max(initial=0))
        prefixes = float(hits.max(initial=0)) * len(np.unique(trajectories.group))
        return float(held.max()) + prompts + prefixes + limits.watermark * limits.kv_tokens + 2 * block


class Mixed:
    """Engine_steps that admit: their runs in the grid, and what they prefill."""

    def __init__(self, at: IntArray, tokens: FloatArray, pairs: FloatArray, requests: FloatArray) -> None:
        self.at, self.tokens, self.pairs, self.requests = at, tokens, pairs, requests


def _mixed_steps(grid: Grid, trajectories: Trajectories, hits: IntArray, admitted: IntArray, places: int) -> Mixed:
    prompt, hit = trajectories.prompt_tokens[places:], hits[places:]
    starts = np.flatnonzero(np.concatenate([[True], admitted[1:] != admitted[:-1]]))
    pairs = (prompt * (prompt + 1) - hit * (hit + 1)) / 2.0
    return Mixed(
        at=np.searchsorted(grid.points, admitted[starts]),
        tokens=np.add.reduceat(prompt - hit, starts).astype(np.float64),
        pairs=np.add.reduceat(pairs, starts),
        requests=np.diff(np.append(starts, len(admitted))).astype(np.float64),
    )


def _segments(
    grid: Grid, mixed: Mixed, starts: FloatArray, duration: FloatArray, queued: int, admitted: IntArray
) -> Segments:
    count = len(starts)
    none = np.zeros(count, dtype=np.int64)
    tokens, requests, pairs = none.copy(), none.copy(), np.zeros(count)
    tokens[mixed.at], requests[mixed.at], pairs[mixed.at] = mixed.tokens, mixed.requests, mixed.pairs
    at = grid.points[:-1]
    waiting = queued - np.searchsorted(admitted, at, side="right")
    held = (grid.base + grid.running * (at + 1)).astype(np.float64)
    return Segments(
        starts, duration, grid.steps, grid.running, waiting, grid.keys, tokens, pairs, requests, none, none, held
    )
