"""The rollout of many pools in closed form: engine_steps counted once per concurrency, priced by a dot product.

Which requests share an engine_step does not depend on what it costs, so that the engine_steps of a workload are counted
once and every engine shape costs a product (`StepCensus`). ``docs/theory/rl_step.md`` has the road.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Generic, TypeVar

import numpy as np

from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.layout import BoolArray, FloatArray, IntArray, Layout
from rlperf.sim.rl_step.demand import Batch, Demand
from rlperf.sim.rl_step.engine import Tabulated, engine_limits
from rlperf.sim.rl_step.flow import (
    ONE_BATCH,
    Allowed,
    Flow,
    fewest,
    interrupted_seconds,
    steady_running,
    steady_seconds,
)
from rlperf.sim.rollout.apart import Apart, simulate_apart
from rlperf.sim.rollout.closed_form import StepCensus, paced, take_census
from rlperf.sim.rollout.group_ends import GroupEnds
from rlperf.sim.rollout.lent import AT, joined_curve_s
from rlperf.sim.rollout.options import EngineOptions
from rlperf.sim.rollout.replica import PLAIN
from rlperf.sim.rollout.rollout import RolloutResult, simulate_rollout
from rlperf.sim.rollout.routing import may_be_last, route
from rlperf.sim.rollout.trajectories import Trajectories
from rlperf.specs.pool import Settings

SCREENED_RL_STEPS = 2
"""rl_steps of a demand that the closed form counts; the events simulate all of them."""
HEAVIEST = 1
"""Replicas that are busy longest whose engine_steps the closed form counts, beside that of the longest trajectory."""
LEAST_APART, LEAST_JOINED = 0.9, 0.8
"""What of a guess is taken to be no more than what simulating finds, measured and not proven: of 1,237 rollouts with
readers none took less than 0.91 of one with as many or more replicas and caches; of 1,051 that others join none less
than 0.81 of the line between a closed form on all replicas and the makespan alone (docs/theory/planner.md)."""


Found = TypeVar("Found")


@dataclass(frozen=True, eq=False)
class Within(Generic[Found]):
    """What was found under some limits, from which cache on it is the same, and whether more places could change it."""

    limits: EngineLimits
    found: Found
    roomy_tokens: float
    full_places: bool

    @classmethod
    def of(cls, limits: EngineLimits, found: Found, served: Sequence[RolloutResult]) -> Within[Found]:
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
    """Equal replicas of a pool, some of which may read prompts for the others."""

    cost: EngineStepCost
    limits: EngineLimits
    replicas: int
    apart: Apart | None

    @property
    def writers(self) -> int:
        """Replicas that write responses."""
        return self.replicas - (self.apart.readers if self.apart else 0)

    @cached_property
    def key(self) -> tuple[object, ...]:
        """What tells them from others but for their number, cache and places, by value."""
        return self.cost.key, self.apart, replace(self.limits, kv_tokens=np.inf, max_running=1)


@dataclass(eq=False)
class SimulatedRollouts:
    """Rollouts that no closed form counts, by their engine.

    Attributes
    ----------
    apart : makespans where prompts are read apart, by replicas, too [s]
    joined : those where others join, as shares of that alone, by both numbers of replicas, too ``[AT]``
    roomiest : (replicas, cache, the least makespan with any number of places) where prompts are read apart
    """

    apart: dict[tuple[object, ...], list[Within[float]]] = field(default_factory=dict)
    joined: dict[tuple[object, ...], list[Within[FloatArray]]] = field(default_factory=dict)
    roomiest: dict[tuple[object, ...], list[tuple[int, float, float]]] = field(default_factory=dict)

    def least_apart_s(self, pool: Engines) -> float | None:
        """No more than a makespan, from those of as many or more replicas and caches; None: there is none [s]."""
        replicas, held = pool.replicas, pool.limits.kv_tokens
        found = [s for count, room, s in self.roomiest.get(pool.key, ()) if count >= replicas and room >= held]
        return LEAST_APART * max(found) if found else None


@dataclass(eq=False)
class Counted:
    """What device counts share in the closed form: flow, the busiest replicas' requests, engine_steps, cost tables.

    Attributes
    ----------
    allowed : what may be under way at once
    simulated : what no closed form counts
    ends : when groups end in engine_steps, by replicas, and limits with places; of each table
    censuses : engine_steps by replicas, places, limits and pace: of those replicas of each table that may be last
    """

    demand: Demand
    allowed: Allowed = ONE_BATCH
    costs: Tabulated = field(default_factory=dict)
    simulated: SimulatedRollouts = field(default_factory=lambda: SimulatedRollouts())
    ends: dict[tuple[int, EngineLimits], list[GroupEnds]] = field(default_factory=dict)
    censuses: dict[tuple[int, int | None, EngineLimits, float], list[list[StepCensus]]] = field(default_factory=dict)
    _slowest: dict[tuple[int, int | None, float], list[list[Trajectories]]] = field(default_factory=dict)

    @cached_property
    def flow(self) -> Flow:
        """What the demand sends through the engines."""
        return Flow.of(self.demand, self.allowed)

    def under_way(self, replicas: int) -> int | None:
        """Trajectories that a replica has under way at most: its environment's, or its program's."""
        return fewest(self.demand.batch.under_way(replicas), self.allowed.requests)

    @cached_property
    def tables(self) -> list[Trajectories]:
        """Trajectories of the rl_steps that are counted, those of every generation batch apart."""
        tables = self.demand.tables[:SCREENED_RL_STEPS]
        return [
            part for table in tables for part in generation_batches(Trajectories.from_table(table), self.demand.batch)
        ]

    def seconds(self, replicas: int, concurrency: int, limits: EngineLimits, cost: EngineStepCost) -> float:
        """Makespan at a concurrency, a cache that binds counting as one; mean over the rl_steps that are counted [s].

        Who waits for an environment runs beside others the sooner engine_steps are. Of several turns engine_steps are
        counted at paces half an octave apart: the two between which they come out as they were counted. There, by the
        logarithm, lies the makespan.
        """
        if all(table.single_turn for table in self.tables):
            return _makespan_s(self._census(replicas, concurrency, limits, 1.0, PLAIN), cost)[0]
        options = EngineOptions(trajectories=self.under_way(replicas))

        @cache
        def at(half_octave: int) -> tuple[float, float]:
            """(makespan, how much slower engine_steps come out than they were counted, as a logarithm)."""
            pace_s = 2.0 ** (half_octave / 2.0)
            makespan, s = _makespan_s(self._census(replicas, concurrency, limits, pace_s, options), cost)
            return makespan, float(np.log(s / pace_s))

        full = float(cost.decode_s(float(concurrency), concurrency * self.flow.context))
        low = int(np.floor(2.0 * np.log2(full)))
        while at(low)[1] < 0.0:
            low -= 1
        while at(low + 1)[1] > 0.0:
            low += 1
        (below, slower), (above, faster) = at(low), at(low + 1)
        return below + (above - below) * slower / max(slower - faster, 1e-12)

    def _census(
        self, replicas: int, concurrency: int, limits: EngineLimits, pace_s: float, options: EngineOptions
    ) -> list[list[StepCensus]]:
        """Engine_steps of the replicas that may be last, where each takes ``pace_s``."""
        free = replace(limits, kv_tokens=np.inf, max_running=concurrency)
        slots = options.trajectories
        key, last = (replicas, slots, free, pace_s), (replicas, slots, pace_s)
        if key not in self.censuses:
            if last not in self._slowest:
                self._slowest[last] = [_slowest_replicas(table, replicas, pace_s, slots) for table in self.tables]
            count = partial(take_census, limits=free, cost=paced(pace_s), options=options)
            self.censuses[key] = [[count(each) for each in part] for part in self._slowest[last]]
        return self.censuses[key]

    def bound(self, limits: EngineLimits, replicas: int) -> EngineLimits:
        """What binds where rollouts are simulated: a cache that holds all that a replica may keep is like any other.

        ``replicas``: of those that read, or that write, the fewer
        """
        most = -(-max(len(table) for table in self.tables) // replicas)
        longest = max(int(table.final_tokens.max()) for table in self.tables)
        kv_tokens = limits.kv_tokens if limits.kv_tokens < 2.0 * most * longest else np.inf
        return replace(limits, kv_tokens=kv_tokens, max_running=min(limits.max_running, most))

    def apart_s(self, pool: Engines, apart: Apart) -> float:
        """Makespan where prompts are read apart, mean over the rl_steps that are counted [s].

        Of several turns, whose simulations take seconds, before readers and writers agree.
        """
        if (known := self.known_apart_s(pool, apart)) is not None:
            return known
        bound, writers = self.bound(pool.limits, min(apart.readers, pool.writers)), pool.writers
        served = [
            simulate_apart(table, pool.replicas, apart, cost=pool.cost, limits=bound, rounds=1) for table in self.tables
        ]
        seconds = float(np.mean([each.makespan_s for each in served]))
        within = Within.of(bound, seconds, served)
        # the first guess of what writing takes is at so many requests, which places bound
        guessed = bound.max_running < -(-max(map(len, self.tables)) // writers)
        tried = self.simulated.apart.setdefault((pool.key, pool.replicas), [])
        tried.append(replace(within, full_places=within.full_places or guessed))
        return seconds

    def known_apart_s(self, pool: Engines, apart: Apart) -> float | None:
        """The same where it has been simulated."""
        tried = self.simulated.apart.get((pool.key, pool.replicas), ())
        return holding(tried, self.bound(pool.limits, min(apart.readers, pool.writers)))

    def lent_s(self, cost: EngineStepCost, limits: EngineLimits, replicas: int, more: int) -> FloatArray:
        """Makespan where ``more`` replicas join, as a share of that alone, mean over the rl_steps counted ``[AT]``.

        Whoever joins leaves each with no more than it has alone: what is no limit then is none with them.
        """
        bound, tried = self.bound(limits, replicas), self.simulated.joined.setdefault((cost.key, replicas, more), [])
        if (known := holding(tried, bound)) is not None:
            return known
        curves, served = [], [simulate_rollout(table, replicas, cost=cost, limits=bound) for table in self.tables]
        for table, alone in zip(self.tables, served, strict=True):
            curve = joined_curve_s(table, alone, more, cost=cost, limits=bound, heaviest=HEAVIEST)
            curves.append(curve / alone.makespan_s)
        tried.append(Within.of(bound, np.asarray(np.mean(curves, axis=0)), served))
        return tried[-1].found

    def least_lent_s(self, cost: EngineStepCost, limits: EngineLimits, replicas: int, more: int) -> FloatArray:
        """No more than `lent_s`, unsimulated: from a rollout on all replicas, when they join at once, to one alone."""
        alone, together = (self.counted_s(Engines(cost, limits, each, None)) for each in (replicas, replicas + more))
        at_once = min(LEAST_JOINED * together / alone, 1.0)
        return at_once + AT * (1.0 - at_once)

    def counted_s(self, pool: Engines, known: dict[tuple[EngineStepCost, int, int], float] | None = None) -> float:
        """Makespan of a batch whose replicas read their own prompts, mean over the rl_steps that are counted [s].

        ``known``: by engine, replicas and concurrency what was counted before; more is added
        """
        known = {} if known is None else known
        seconds = 0.0
        for concurrency, weight in concurrency_of(pool.limits, self.tables, pool.replicas, self.flow.context):
            key = (pool.cost, pool.replicas, concurrency)
            if key not in known:
                known[key] = self.seconds(pool.replicas, concurrency, pool.limits, pool.cost)
            seconds += weight * known[key]
        return seconds


def holding(tried: Sequence[Within[Found]], limits: EngineLimits) -> Found | None:
    """What was found under limits that are as good as these."""
    return next((each.found for each in tried if each.holds(limits)), None)


def counted_lent_s(
    settings: Settings, costs: tuple[EngineStepCost, ...], layout: Layout, e: IntArray,
    kv_tokens: FloatArray, running: IntArray, counted: Counted, lent: int, *, least: bool = False,
) -> FloatArray:  # fmt: skip
    """Makespans of every pool where engines on ``lent`` devices join, as shares of that alone ``[pools][AT]``.

    Who runs beside whom then depends on when they join, so that every shape and concurrency is simulated
    (arguments: `pools_of`). ``least``: no more than that, unsimulated.
    """
    curves = np.ones((len(e), len(AT)))
    share = counted.least_lent_s if least else counted.lent_s
    for position, engine in enumerate(e.tolist()):
        replicas, more = int(layout.data_parallel[position]), lent // int(layout.replica_devices[position])
        if more:
            limits = engine_limits(settings, float(kv_tokens[position]), int(running[position]))
            curves[position] = share(costs[engine], limits, replicas, more)
    return curves


def counted_seconds(
    pools: Sequence[Engines], counted: Counted, *, least: bool = False
) -> tuple[FloatArray, FloatArray, FloatArray, BoolArray]:
    """Closed form: makespan, steady seconds and an interruption's of every pool, means over some of the rl_steps [s].

    ``least``: where prompts are read apart only what others are held to is simulated; the last array says which
    makespans are no more than the least that it leaves ``[pools]``.

    Which requests share an engine_step does not depend on what it costs, so the engine_steps of a workload are counted
    once per number of replicas and concurrency, and every engine shape costs a dot product (`StepCensus`). Where
    prompts are read apart it does: contexts arrive at given times, so that every shape and concurrency is simulated.
    """
    makespan, steady, again = (np.zeros(len(pools)) for _ in range(3))
    guessed, demand, flow = np.zeros(len(pools), dtype=np.bool_), counted.demand, counted.flow
    flowing: dict[tuple[EngineStepCost, int, int, float], tuple[float, float]] = {}
    known: dict[tuple[EngineStepCost, int, int], float] = {}
    if least:
        _simulate_roomiest(pools, counted)
    for position, pool in enumerate(pools):
        same = (pool.cost, pool.replicas, pool.writers, steady_running(pool.limits, pool.writers, flow))
        if same not in flowing:
            of, readers = (pool.cost, pool.limits, pool.writers), pool.replicas - pool.writers
            flowing[same] = (
                steady_seconds(*of, demand, flow, readers), interrupted_seconds(*of, flow, readers)
            )  # fmt: skip
        steady[position], again[position] = flowing[same]
        if pool.apart is None:
            seconds = counted.counted_s(pool, known)
        elif not least:
            seconds = counted.apart_s(pool, pool.apart)
        else:
            seconds, guessed[position] = _least_apart_s(pool, pool.apart, counted)
        makespan[position] = demand.batch.rounds * seconds
    return makespan, steady, again, guessed


def pools_of(
    settings: Settings, costs: tuple[EngineStepCost, ...], layout: Layout, e: IntArray,
    kv_tokens: FloatArray, running: IntArray, counted: Counted, aparts: tuple[Apart | None, ...],
) -> list[Engines]:  # fmt: skip
    """The engines of every pool, with no more places than its environments fill.

    ``e``: index of each one's cost in ``costs`` and of who reads its prompts in ``aparts``; ``kv_tokens``, ``running``:
    its cache and concurrency ``[pools]``
    """
    found = []
    for position, engine in enumerate(e.tolist()):
        apart, replicas = aparts[engine], int(layout.data_parallel[position])
        most = counted.under_way(replicas - (apart.readers if apart else 0)) or int(running[position])
        limits = engine_limits(settings, float(kv_tokens[position]), min(int(running[position]), most))
        found.append(Engines(costs[engine], limits, replicas, apart))
    return found


def _simulate_roomiest(pools: Sequence[Engines], counted: Counted) -> None:
    """Of every engine that reads prompts apart the pools with the largest cache, unless others tell their least."""
    of_engine: dict[tuple[object, ...], list[Engines]] = {}
    for pool in pools:
        of_engine.setdefault((pool.key, pool.replicas), []).append(pool)
    for own in of_engine.values():
        room = max(pool.limits.kv_tokens for pool in own)
        first = next(pool for pool in own if pool.limits.kv_tokens == room)
        if first.apart is None or counted.simulated.least_apart_s(first) is not None:
            continue
        least = min(counted.apart_s(pool, first.apart) for pool in own if pool.limits.kv_tokens == room)
        counted.simulated.roomiest.setdefault(first.key, []).append((first.replicas, room, least))


def _least_apart_s(pool: Engines, apart: Apart, counted: Counted) -> tuple[float, bool]:
    """What simulating has found, or no more than it will find, and whether it is that [s]."""
    known, least = counted.known_apart_s(pool, apart), counted.simulated.least_apart_s(pool)
    if known is not None:
        return known, False
    assert least is not None
    return least, True


def concurrency_of(
    limits: EngineLimits, tables: list[Trajectories], replicas: int, held: float
) -> tuple[tuple[int, float], ...]:
    """Requests of a replica that run at once, as points that are counted with their weights.

    That is its share of the batch, max_running, or what the cache holds. A cache that binds counts as a bound on
    concurrency between two powers of two, interpolated in the logarithm; preemptions are left to the judge.
    """
    share = max(-(-len(table) // replicas) for table in tables)
    running = min(limits.max_running, share)
    fit = max(limits.kv_tokens * (1.0 - limits.watermark) / held, 1.0)
    if fit >= running:
        return ((running, 1.0),)
    low = 1 << int(np.log2(fit))
    high = min(2 * low, running)
    if high <= low:
        return ((low, 1.0),)
    upper = float(np.log(fit / low) / np.log(high / low))
    return ((low, 1.0 - upper), (high, upper))


def _makespan_s(counted: list[list[StepCensus]], cost: EngineStepCost) -> tuple[float, float]:
    """Makespan of the slowest replica and seconds of its mean engine_step, means over the rl_steps [s]."""
    found = []
    for replicas in counted:
        seconds = [float(each.makespan_s(cost)) for each in replicas]
        last = int(np.argmax(seconds))
        found.append((seconds[last], (seconds[last] - replicas[last].wait_s) / replicas[last].steps))
    makespan, pace = np.mean(found, axis=0)
    return float(makespan), float(pace)


def _slowest_replicas(table: Trajectories, replicas: int, pace_s: float, slots: int | None) -> list[Trajectories]:
    """What the replicas that may be the slowest serve: those that are busy longest, and the longest trajectory.

    Work is tokens at ``pace_s`` each, and the time of environments between turns; where a replica has fewer ``slots``
    than trajectories they follow one another, and that with the most work need not be the last.
    """
    chosen = route(table, "round_robin", np.ones(replicas))
    alone = table.generated_tokens * pace_s + np.add.reduceat(table.tool_latency_s, table.offsets[:-1])
    work = np.bincount(chosen, alone, replicas)
    busy = work if slots is None else np.array([_listed_s(alone[chosen == r], slots) for r in range(replicas)])
    slowest = may_be_last(chosen, alone, busy, HEAVIEST).tolist()
    return [table.take(np.flatnonzero(chosen == r)) for r in slowest if work[r] > 0]


def _listed_s(seconds: FloatArray, slots: int) -> float:
    """When the last of some pieces of work ends that take the next free slot in turn [s].

    >>> _listed_s(np.array([3.0, 1.0, 1.0, 3.0]), 2)
    5.0
    """
    free = [0.0] * slots
    for each in seconds.tolist():
        heapq.heappush(free, heapq.heappop(free) + each)
    return max(free)


def generation_batches(whole: Trajectories, batch: Batch) -> list[Trajectories]:
    """What is rolled out at once: all, or the groups of every generation batch.

    >>> batch = Batch(2, 1, 2, 9, 9, 4, generation_batch=2)
    >>> [len(part) for part in generation_batches(Trajectories.of(1, [5, 1, 2, 3]), batch)]
    [2, 2]
    """
    if batch.rounds == 1:
        return [whole]
    assert batch.generation_batch is not None
    turn = np.unique(whole.group, return_inverse=True)[1] // batch.generation_batch
    return [whole.take(turn == k) for k in range(int(turn.max()) + 1)]
