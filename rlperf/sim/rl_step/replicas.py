"""Replicas of an asynchronous run, which are given samples one by one: a clock of tokens, or agents turn by turn."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rlperf.cost.engine_step import EngineLimits, EngineStepCost, recompute_s
from rlperf.layout import FloatArray
from rlperf.sim.rollout.trajectories import Trajectories, Turns
from rlperf.sim.rollout.turns import TurnEngine

_LOOKS = 400
"""How often a replica of agents is looked at in the time of a trajectory: what is started in between may begin at the
next look [1]."""


@dataclass(slots=True)
class RunGroup:
    """Samples of one prompt that are under way, or part of a batch; ``row``: of the run's groups."""

    version: int
    left: int
    samples: int
    row: int = 0


class RunReplica(Protocol):
    """What an asynchronous run asks of a replica; times never go back."""

    free: int

    def begin(self, now_s: float, group: RunGroup, sample: int) -> None:
        """Start a sample of a group."""

    def due_s(self, now_s: float) -> float | None:
        """When it has to be looked at next, unless something else happens to it; None: never [s]."""

    def ended(self, now_s: float) -> RunGroup | None:
        """The group of a sample that has ended by now, each once."""

    def take_weights(self, now_s: float, swap_s: float, *, interrupted: bool) -> None:
        """Stand still for new weights, and compute anew what they void."""


@dataclass(frozen=True)
class TokenPace:
    """One token of every request takes ``token_s + token_s_per_running * running``; an interrupted one computes its
    prompt and what it has written again, ``prefill_token_s`` each [s].
    """

    token_s: float
    token_s_per_running: float = 0.0
    prompt_tokens: float = 0.0
    prefill_token_s: float = 0.0


@dataclass(slots=True)
class TokenReplica:
    """Requests progress together: ``clock`` counts tokens, targets wait in a heap."""

    free: int
    pace: TokenPace
    response_tokens: FloatArray
    written: float
    clock: float = 0.0
    time_s: float = 0.0
    paused_until_s: float = 0.0
    serial: int = 0
    targets: list[tuple[float, int, RunGroup]] = field(default_factory=list)

    def begin(self, now_s: float, group: RunGroup, sample: int) -> None:
        self._advance(now_s)
        self.serial, self.free = self.serial + 1, self.free - 1
        tokens = float(self.response_tokens[group.row, sample])
        heapq.heappush(self.targets, (self.clock + tokens, self.serial, group))

    def due_s(self, now_s: float) -> float | None:
        if not self.targets:
            return None
        left = max(self.targets[0][0] - self.clock, 0.0)
        return max(now_s, self.paused_until_s) + left * self._seconds_per_token()

    def ended(self, now_s: float) -> RunGroup | None:
        self._advance(now_s)
        target, _, group = heapq.heappop(self.targets)
        self.clock = max(self.clock, target)
        self.free += 1
        return group

    def take_weights(self, now_s: float, swap_s: float, *, interrupted: bool) -> None:
        self._advance(now_s)
        cache = len(self.targets) * (self.pace.prompt_tokens + self.written)
        self.paused_until_s = now_s + swap_s + (self.pace.prefill_token_s * cache if interrupted else 0.0)

    def _advance(self, now_s: float) -> None:
        """Move the clock to now."""
        start = max(self.time_s, self.paused_until_s)
        if now_s > start and self.targets:
            self.clock += (now_s - start) / self._seconds_per_token()
        self.time_s = max(self.time_s, now_s)

    def _seconds_per_token(self) -> float:
        return self.pace.token_s + self.pace.token_s_per_running * len(self.targets)


@dataclass(frozen=True, eq=False)
class Agents:
    """Trajectories of several turns, as ``[groups][samples]``, and the engine that serves each replica's share."""

    turns: list[list[Turns]]
    cost: EngineStepCost
    limits: EngineLimits

    @classmethod
    def of(cls, drawn: Sequence[Trajectories], cost: EngineStepCost, limits: EngineLimits) -> Agents:
        """Groups of all of some rl_steps."""
        turns: list[list[Turns]] = []
        for each in drawn:
            for group in np.unique(each.group):
                own = each.take(np.flatnonzero(each.group == group))
                turns.append(own.turns_of_each(int(own.beginnings.min())))
        return cls(turns, cost, limits)

    @property
    def look_s(self) -> float:
        """Seconds between two looks at a replica: a share of what a trajectory takes alone [s]."""
        pace_s = float(self.cost.decode_s(1.0, 1.0))
        alone = [sum(turns.tool_s) + pace_s * sum(turns.response) for group in self.turns for turns in group]
        return float(np.mean(alone)) / _LOOKS


class TurnReplica:
    """Agents turn by turn on an engine of their own, which is ahead of the run by one look: that is settled."""

    def __init__(self, free: int, agents: Agents, look_s: float) -> None:
        self.free, self.agents, self.look_s = free, agents, look_s
        self.engine = TurnEngine.empty(agents.cost, agents.limits)
        self.groups: list[RunGroup] = []
        self.shared: tuple[RunGroup | None, int] = (None, -1)
        self.told = 0

    def begin(self, now_s: float, group: RunGroup, sample: int) -> None:
        self.free -= 1
        turns = self.agents.turns[group.row][sample]
        if self.shared[0] is not group:
            self.shared = group, self.engine.cache.add_group(turns.shared)
        self.engine.add(turns, self.shared[1], now_s)
        self.groups.append(group)

    def due_s(self, now_s: float) -> float | None:
        engine = self.engine
        if self.told < len(engine.ended):
            return max(engine.finish_s[engine.ended[self.told]], now_s)
        return None if self.told == len(self.groups) else max(engine.now_s, now_s)

    def ended(self, now_s: float) -> RunGroup | None:
        engine = self.engine
        if self.told == len(engine.ended):
            engine.run(now_s + self.look_s)
        if self.told == len(engine.ended) or engine.finish_s[i := engine.ended[self.told]] > now_s:
            return None
        self.told, self.free = self.told + 1, self.free + 1
        return self.groups[i]

    def take_weights(self, now_s: float, swap_s: float, *, interrupted: bool) -> None:
        engine, again_s = self.engine, 0.0
        if interrupted:
            running, context = engine.void()
            again_s = recompute_s(self.agents.cost, float(self.agents.limits.token_budget), running, context)
        engine.pause(now_s, swap_s + again_s)
