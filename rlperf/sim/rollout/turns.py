"""Turns and their tools on one replica for the screen: the events of `event_engine` without its bookkeeping.

Who runs beside whom hangs on seconds, and with a tight cache on who was evicted meanwhile, so that agents are served in
the order of time at what their own engine takes. Left out is who is preempted: agents hold long contexts and write
little in a turn, so that those who run hardly outgrow the cache that admitted them, and nothing is kept of a turn but
its end. Blocks of those who run are counted together, each last one half filled (docs/theory/rollout.md).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil, inf

import numpy as np

from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.layout import FloatArray
from rlperf.sim.rollout.cache import BlockCache
from rlperf.sim.rollout.options import EngineOptions
from rlperf.sim.rollout.replica import PLAIN, simulate_replica
from rlperf.sim.rollout.step_seconds import tabulated
from rlperf.sim.rollout.trajectories import Trajectories, Turns


@dataclass(frozen=True, eq=False)
class TurnsServed:
    """When trajectories end, and what of the limits could have changed it.

    Attributes
    ----------
    finish_s : end of each trajectory [s] ``[trajectories]``
    roomy_tokens : a cache from which on nothing changes; infinite where a larger one could change it [tokens]
    full_places : whether more places could have changed anything
    """

    finish_s: FloatArray
    roomy_tokens: float
    full_places: bool


def serve_turns(
    trajectories: Trajectories, cost: EngineStepCost, limits: EngineLimits, options: EngineOptions = PLAIN
) -> TurnsServed:
    """Serve the trajectories of one replica, all there from the start.

    Parameters
    ----------
    options : how many trajectories are under way at once; all else is plain

    >>> turns = np.array([4, 8]), np.array([3, 2]), np.array([5.0, 0.0])
    >>> agents = Trajectories(*turns, offsets=np.array([0, 2]), group=np.zeros(1, np.int64), arrival_s=np.zeros(1))
    >>> cost, limits = EngineStepCost(np.array([0.0]), np.zeros(1), host_s=1.0), EngineLimits(1024.0, 8)
    >>> serve_turns(agents, cost, limits).finish_s.tolist()
    [10.0]
    """
    if not limits.chunked_prefill:
        found = simulate_replica(trajectories, cost, limits, options=options)
        return TurnsServed(found.trajectory_finish_s, found.roomy_tokens, found.full_places)
    engine = TurnEngine(trajectories, cost, limits, options, len(trajectories))
    engine.run()
    roomy = np.inf if engine.full_cache else engine.cache.roomy_tokens
    return TurnsServed(np.array(engine.finish_s), roomy, engine.full_places)


class TurnEngine:
    """One replica. Trajectories are numbers; columns are plain lists and what changes most is passed on, for speed.

    ``cut``, ``read`` : the admitted trajectory whose prompt is cut, and what of it is read; -1: none
    ``ready`` : those whose prompt is complete in the engine_step at hand
    ``ends`` : (engine_step at whose begin it has left, trajectory) of each that writes, a heap
    ``at`` : the time, the engine_step, how many write and how many tokens they have in the cache
    ``ended`` : trajectories in the order in which they have ended, at ``finish_s``
    """

    def __init__(
        self, trajectories: Trajectories, cost: EngineStepCost, limits: EngineLimits, options: EngineOptions, most: int
    ) -> None:
        n = len(trajectories)
        slots = options.trajectories or n
        self.places, self.budget = int(min(limits.max_running, limits.token_budget, most)), limits.token_budget
        self.seconds = tabulated(cost, self.places, PLAIN)
        self.cache = BlockCache(trajectories, limits)
        self.prompt: list[int] = trajectories.prompt_tokens.tolist()
        self.response: list[int] = trajectories.response_tokens.tolist()
        self.tool_s: list[float] = trajectories.tool_latency_s.tolist()
        self.turn: list[int] = trajectories.offsets[:-1].tolist()
        self.last_turn: list[int] = (trajectories.offsets[1:] - 1).tolist()
        self.finish_s = [0.0] * n
        self.arrivals = [(0.0, i) for i in range(min(slots, n))]
        self.later = deque(range(slots, n))
        self.waiting: deque[int] = deque()
        self.ends: list[tuple[int, int]] = []
        self.cut, self.read = -1, 0
        self.ready: list[int] = []
        self.full_cache = self.full_places = False
        self.at, self.ended = (0.0, 0, 0, 0), list[int]()

    @classmethod
    def empty(cls, cost: EngineStepCost, limits: EngineLimits) -> TurnEngine:
        """A replica that waits for trajectories, which `add` brings one by one."""
        none = Trajectories.of(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
        return cls(none, cost, limits, PLAIN, limits.max_running)

    @property
    def now_s(self) -> float:
        """Until when all is settled [s]."""
        return self.at[0]

    def add(self, turns: Turns, group: int, at_s: float) -> None:
        """A further trajectory arrives, of one of the cache's groups."""
        i = len(self.turn)
        self.turn.append(len(self.prompt))
        self.prompt.extend(turns.prompt)
        self.response.extend(turns.response)
        self.tool_s.extend(turns.tool_s)
        self.last_turn.append(len(self.prompt) - 1)
        self.finish_s.append(0.0)
        self.cache.add(group)
        heappush(self.arrivals, (at_s, i))

    def void(self) -> tuple[float, float]:
        """Forget all contexts that wait for a tool; how many run, and their mean context [tokens]."""
        _, _, running, keys = self.at
        self.cache.forget()
        return float(running), keys / max(running, 1)

    def pause(self, now_s: float, seconds: float) -> None:
        """Stand still for so long from now on."""
        now, step, running, keys = self.at
        self.at = max(now, now_s) + seconds, step, running, keys

    def run(self, until_s: float = inf) -> None:
        """From event to event: turns end, arrive, are read beside those who write, or write alone.

        ``until_s``: what lasts beyond is settled all the same.
        """
        ends, arrivals, waiting, places = self.ends, self.arrivals, self.waiting, self.places
        fixed_s, per_key_s = self.seconds.fixed_s, self.seconds.per_key_s
        now, step, running, keys = self.at
        while now < until_s and (arrivals or running or waiting or self.cut >= 0):
            if running and ends[0][0] <= step:
                left, computed = self._leave(now, step, running, keys)
                running, keys = running - left, keys - computed
            while arrivals and arrivals[0][0] <= now:
                waiting.append(heappop(arrivals)[1])
            if waiting or self.cut >= 0:
                if running >= places:
                    self.full_places = True
                elif seconds := self._read(step, running, keys):
                    now, step = now + seconds, step + 1
                    keys += running + sum([self.prompt[self.turn[i]] for i in self.ready])
                    running += len(self.ready)
                    continue
            if running:  # engine_steps that read nothing, until a turn ends or the next one has come
                count, held = ends[0][0] - step, keys + running
                fixed, per_key = fixed_s[running], per_key_s[running]
                due = arrivals[0][0] if arrivals and arrivals[0][0] < until_s else until_s
                if due < inf and not waiting:
                    if running >= places:
                        self.full_places = True
                    elif count * (pace := fixed + per_key * held) > (delay := due - now):
                        count = ceil(delay / pace)
                now += count * fixed + per_key * (count * held + running * (count * (count - 1) // 2))
                step, keys = step + count, keys + running * count
            elif arrivals:
                now = min(arrivals[0][0], until_s)
        self.at = now, step, running, keys

    def _leave(self, now: float, step: int, running: int, keys: int) -> tuple[int, int]:
        """Turns are complete, and their tools are called, or another trajectory starts: how many, and their tokens."""
        ends, cache = self.ends, self.cache
        cache.asked(self._held(running, keys))
        left = tokens = 0
        while ends and ends[0][0] <= step:
            i = heappop(ends)[1]
            turn = self.turn[i]
            computed = self.prompt[turn] + self.response[turn] - 1
            left, tokens = left + 1, tokens + computed
            if turn < self.last_turn[i]:
                cache.release(i, computed, resumes=True)
                self.turn[i] = turn + 1
                heappush(self.arrivals, (now + self.tool_s[turn], i))
                continue
            cache.release(i, computed, resumes=False)
            self.finish_s[i] = now
            self.ended.append(i)
            if self.later:
                heappush(self.arrivals, (now, self.later.popleft()))
        return left, tokens

    def _held(self, running: int, keys: int) -> int:
        """Blocks of all that run, and of the prompt that is cut."""
        cache = self.cache
        held = (keys + running * (1 + cache.block // 2)) // cache.block + cache.adjust
        return held if self.cut < 0 else held - (-self.prompt[self.turn[self.cut]] // cache.block)

    def _read(self, step: int, running: int, keys: int) -> float:
        """Seconds of an engine_step that reads prompts beside those who write; 0 where the cache admits none."""
        cache, waiting, prompt = self.cache, self.waiting, self.prompt
        held, left, taken = self._held(running, keys), self.budget - running, running
        tokens = pairs = prompts = 0
        self.ready = []
        if (i := self.cut) >= 0:
            start = self.read
            tokens = min(left, prompt[self.turn[i]] - start)
            pairs, left, taken, prompts = tokens * start + tokens * (tokens + 1) // 2, left - tokens, taken + 1, 1
            self._go_on(i, start + tokens)
        while waiting and left > 0:
            if taken >= self.places:
                self.full_places = True
                break
            i = waiting[0]
            known = prompt[turn := self.turn[i]]
            if (then := cache.admit(i, known, held, cache.reserve if taken else 0)) < 0:
                self.full_cache = True
                break
            held = then
            start = cache.lookup(i, turn, known)
            waiting.popleft()
            cache.hold(i)
            size = known - start if known - start < left else left
            tokens, pairs, left = tokens + size, pairs + size * start + size * (size + 1) // 2, left - size
            taken, prompts = taken + 1, prompts + 1
            self._go_on(i, start + size)
        if not prompts:
            return 0.0
        if held + cache.unheld_blocks > cache.total:
            cache.evict(held)
        for i in self.ready:
            heappush(self.ends, (step + self.response[self.turn[i]], i))
        return self.seconds.mixed_s(running, keys + running, tokens, pairs, prompts)

    def _go_on(self, i: int, read: int) -> None:
        """The prompt of i is read up to there: it is cut, or complete."""
        if read < self.prompt[self.turn[i]]:
            self.cut, self.read = i, read
        else:
            self.cut = -1
            self.ready.append(i)
