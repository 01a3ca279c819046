"""Rollouts that no count of engine_steps serves: what was simulated, under which limits it is the same, and guesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import numpy as np

from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.layout import FloatArray, IntArray
from rlperf.sim.rollout.apart import Apart

LEAST_APART, LEAST_TURNS = 0.9, 0.98
"""What of a rollout with the largest cache is taken to be no more than what simulating others finds, measured and not
proven: of 1,237 rollouts with readers none took less than 0.91 of one with as many or more replicas and caches; of
12,599 of agents none less than 0.998 of that with the most places and the largest cache beside them
(docs/theory/planner.md)."""

Found = TypeVar("Found")


class Bounded(Protocol):
    """What was simulated, as `Within` has it."""

    @property
    def roomy_tokens(self) -> float: ...

    @property
    def full_places(self) -> bool: ...


@dataclass(frozen=True, eq=False)
class Within(Generic[Found]):
    """What was found under some limits, from which cache on it is the same, and whether more places could change it."""

    limits: EngineLimits
    found: Found
    roomy_tokens: float
    full_places: bool

    @classmethod
    def of(cls, limits: EngineLimits, found: Found, served: Sequence[Bounded]) -> Within[Found]:
        """What the rollouts that were ``served`` under some limits come to."""
        return cls(limits, found, max(s.roomy_tokens for s in served), any(s.full_places for s in served))

    def holds(self, limits: EngineLimits) -> bool:
        """Whether it is the same under other limits: where one of them was no limit, under any that is none either."""
        own = self.limits
        cache = limits.kv_tokens == own.kv_tokens or limits.kv_tokens >= self.roomy_tokens
        places = limits.max_running == own.max_running or (
            not self.full_places and limits.max_running > own.max_running
        )
        alike = replace(own, kv_tokens=limits.kv_tokens, max_running=limits.max_running) == limits
        return alike and cache and places


@dataclass(frozen=True, eq=False)
class Engines:
    """Equal replicas of a pool, some of which may read prompts for the others.

    ``streams``: groups are trained on as they end, so that all replicas tell, not only those that may be the last
    """

    cost: EngineStepCost
    limits: EngineLimits
    replicas: int
    apart: Apart | None
    streams: bool = False

    @property
    def writers(self) -> int:
        """Replicas that write responses."""
        return self.replicas - (self.apart.readers if self.apart else 0)

    @cached_property
    def key(self) -> tuple[object, ...]:
        """What tells them from others but for their number, cache and places, by value."""
        return self.cost.key, self.apart, self.streams, replace(self.limits, kv_tokens=np.inf, max_running=1)


@dataclass(frozen=True, eq=False)
class Ended:
    """When trajectories of the replicas that are counted end [s], and their groups ``[trajectories]``."""

    finish_s: FloatArray
    group: IntArray


@dataclass(eq=False)
class SimulatedRollouts:
    """Rollouts that no closed form counts, by their engine.

    Attributes
    ----------
    apart : makespans where prompts are read apart, by replicas, too [s]
    joined : makespans where others join, as shares of that alone, by both numbers of replicas, too ``[AT]``
    roomiest : (replicas, cache, places, the least makespan with no more places) of those that are guessed
    """

    apart: dict[tuple[object, ...], list[Within[float]]] = field(default_factory=dict)
    joined: dict[tuple[object, ...], list[Within[FloatArray]]] = field(default_factory=dict)
    roomiest: dict[tuple[object, ...], list[tuple[int, float, float, float]]] = field(default_factory=dict)

    def tell(self, pool: Engines, places: float, seconds: float) -> None:
        """Note the makespan of a pool, which tells of those with no more ``places``: few say nothing of many."""
        told = self.roomiest.setdefault(pool.key, [])
        if all(each[:3] != (pool.replicas, pool.limits.kv_tokens, places) for each in told):
            told.append((pool.replicas, pool.limits.kv_tokens, places, seconds))

    def least_s(self, pool: Engines) -> float | None:
        """No more than a makespan, from those of no fewer replicas, caches and places; None: there is none [s]."""
        own, told = pool.limits, self.roomiest.get(pool.key, ())
        found = [
            seconds
            for count, room, places, seconds in told
            if count >= pool.replicas and room >= own.kv_tokens and places >= own.max_running
        ]
        return (LEAST_APART if pool.apart else LEAST_TURNS) * max(found) if found else None


def holding(tried: Sequence[Within[Found]], limits: EngineLimits) -> Found | None:
    """What was found under limits that are as good as these."""
    return next((each.found for each in tried if each.holds(limits)), None)
