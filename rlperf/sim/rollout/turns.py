"""Turns and their tools on an engine whose engine_steps all take the same: counted in engine_steps, turn by turn.

With a cache for all of them, a turn that is read in step x has its tokens at the ends of x, x + 1, ...: when it ends
and when its tool has answered is known as soon as it is admitted, so that nothing happens between two admissions.
Equal to the event loop where it applies, at a tenth of its cost.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil

import numpy as np

from rlperf.cost.engine_step import EngineLimits
from rlperf.layout import IntArray
from rlperf.sim.rollout.options import EngineOptions
from rlperf.sim.rollout.queued import Grid, Mixed, Runs
from rlperf.sim.rollout.static import prefix_hits
from rlperf.sim.rollout.trajectories import Trajectories

ROUNDING = 1e-6
"""Of an engine_step: an answer that comes so little after its begin is there."""


def turns_apply(trajectories: Trajectories, limits: EngineLimits, options: EngineOptions) -> bool:
    """Whether `count_turns` counts what the event loop would count at a constant pace."""
    plain = options.speculation is None and options.tool_concurrency is None and not options.async_scheduling
    roomy = limits.chunked_prefill and limits.kv_tokens == np.inf
    return plain and roomy and not trajectories.single_turn and not trajectories.arrival_s.any()


def count_turns(
    trajectories: Trajectories, limits: EngineLimits, options: EngineOptions, pace_s: float
) -> tuple[Runs, float]:
    """What one replica runs at ``pace_s`` per engine_step, in order, and its seconds without any request [s]."""
    hits = _hits(trajectories, limits).tolist()
    prompt, response = trajectories.prompt_tokens.tolist(), trajectories.response_tokens.tolist()
    turn, last = trajectories.offsets[:-1].tolist(), (trajectories.offsets[1:] - 1).tolist()
    tool_s = trajectories.tool_latency_s.tolist()
    n = len(turn)
    slots = options.trajectories or n
    queue, later = [(0.0, i) for i in range(min(slots, n))], deque(range(slots, n))
    at = _Clock(pace_s, min(limits.max_running, limits.token_budget, n), limits.token_budget)
    admitted, ends, busy, chunks, places = list[int](), list[int](), at.busy, at.chunks, at.places
    while queue:
        arrival_s, i = heappop(queue)
        if i == n:  # a trajectory has ended: the next one starts
            if not later:
                continue
            i = later.popleft()
        now = turn[i]
        known = ceil((arrival_s - at.begin_s) / pace_s - ROUNDING)
        if known > at.step or at.left <= 0 or len(busy) >= places:
            at.admit(arrival_s, known)
        start = hits[now]
        size = prompt[now] - start
        if size <= at.left:
            chunks.append((at.step, start, size))
            at.left -= size
            end = at.step + response[now]
        else:
            end = at.read(start, prompt[now]) + response[now]
        heappush(busy, end)
        if end > at.last:
            at.last = end
        admitted.append(now)
        ends.append(end)
        if now < last[i]:
            turn[i] = now + 1
            heappush(queue, (at.begin_s + end * pace_s + tool_s[now], i))
        else:
            heappush(queue, (at.begin_s + end * pace_s, n))
    return _runs(trajectories, np.array(admitted), np.array(ends), at), at.wait_s


@dataclass(eq=False)
class _Clock:
    """The engine_step that takes prompts, and who is busy in it.

    Attributes
    ----------
    busy : step at whose begin each admitted request has left, a heap
    last : when the last of all that were admitted has left
    step, left : that engine_step, and what is left of its budget
    begin_s : where step 0 would begin, had the engine never been idle [s]
    chunks : (engine_step, first position, tokens) of all that was read
    """

    pace_s: float
    places: int
    budget: int
    busy: list[int] = field(default_factory=list)
    last: int = 0
    chunks: list[tuple[int, int, int]] = field(default_factory=list)
    wait_s: float = 0.0
    step: int = 0
    left: int = 0
    begin_s: float = 0.0

    def __post_init__(self) -> None:
        self.left = self.budget

    def admit(self, arrival_s: float, known: int) -> None:
        """Go on to the engine_step that has a place for the queue's first, which is known of in step ``known``."""
        if known > self.last:  # the engine is idle until then
            idle_s = arrival_s - (self.begin_s + self.last * self.pace_s)
            self.wait_s += idle_s
            self.begin_s += idle_s
            known = self.last
        if known > self.step or self.left <= 0:
            self._go(max(known, self.step + 1))
        while len(self.busy) >= self.places:
            self._go(self.busy[0])

    def read(self, start: int, tokens: int) -> int:
        """Read a context from ``start`` on, cut at the budgets of engine_steps; the last of these."""
        while True:
            size = min(self.left, tokens - start)
            self.chunks.append((self.step, start, size))
            self.left -= size
            start += size
            if start >= tokens:
                return self.step
            self._go(self.step + 1)

    def _go(self, step: int) -> None:
        busy = self.busy
        while busy and busy[0] <= step:
            heappop(busy)
        self.step, self.left = step, self.budget - len(busy)


def _hits(trajectories: Trajectories, limits: EngineLimits) -> IntArray:
    """Tokens of every turn's context that need no computation where nothing is evicted [tokens] ``[turns]``."""
    prompt, first = trajectories.prompt_tokens, trajectories.offsets[:-1]
    if trajectories.cached_tokens is not None:
        return np.minimum(trajectories.cached_tokens, prompt - 1)
    if not limits.prefix_caching:
        return np.zeros(len(prompt), dtype=np.int64)
    block = limits.block_tokens
    before = np.concatenate([[0], trajectories.final_tokens[:-1] - 1])
    hits: IntArray = np.minimum(before, prompt - 1) // block * block
    hits[first] = prefix_hits(
        Trajectories(
            prompt_tokens=prompt[first], response_tokens=trajectories.response_tokens[first],
            tool_latency_s=np.zeros(len(first)), offsets=np.arange(len(first) + 1), group=trajectories.group,
            arrival_s=trajectories.arrival_s, shared_tokens=trajectories.shared_tokens,
        ),
        limits,
    )  # fmt: skip
    return hits


def _runs(trajectories: Trajectories, admitted: IntArray, ends: IntArray, at: _Clock) -> Runs:
    """Runs of equal engine_steps between those that read, begin or end a turn."""
    known = trajectories.prompt_tokens[admitted]
    ready = ends - trajectories.response_tokens[admitted] + 1
    step, start, size = np.array(at.chunks, dtype=np.int64).T
    grid = Grid.of(0, ends, ready, step, known)
    first = np.flatnonzero(np.concatenate([[True], step[1:] != step[:-1]]))
    mixed = Mixed(
        at=np.searchsorted(grid.points, step[first]),
        tokens=np.add.reduceat(size, first).astype(np.float64),
        pairs=np.add.reduceat(size * start + size * (size + 1) / 2.0, first),
        requests=np.diff(np.append(first, len(step))).astype(np.float64),
    )
    return Runs.of(grid, mixed)
