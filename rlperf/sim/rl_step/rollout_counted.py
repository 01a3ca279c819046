"""The rollout of many pools in closed form: engine_steps counted once per concurrency, priced by a dot product.

Which requests share an engine_step does not depend on what it costs, so that the engine_steps of a workload are counted
once and every engine shape costs a product (`StepCensus`). Agents, of whom it does, are served on every engine.
``docs/theory/rl_step.md`` has the road.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.layout import BoolArray, FloatArray, IntArray, Layout
from rlperf.sim.rl_step.ahead import AT as AHEAD
from rlperf.sim.rl_step.ahead import ahead
from rlperf.sim.rl_step.demand import Batch, Demand
from rlperf.sim.rl_step.engine import Tabulated, engine_limits
from rlperf.sim.rl_step.flow import ONE_BATCH, Allowed, Flow, fewest
from rlperf.sim.rl_step.refilled import interrupted_seconds, refilled, steady_running
from rlperf.sim.rl_step.simulated_rollouts import Ended, Engines, SimulatedRollouts, Within, holding
from rlperf.sim.rollout.apart import Apart, simulate_apart
from rlperf.sim.rollout.closed_form import StepCensus, take_census
from rlperf.sim.rollout.group_ends import GroupEnds
from rlperf.sim.rollout.lent import AT, joined_curve_s
from rlperf.sim.rollout.options import EngineOptions
from rlperf.sim.rollout.rollout import simulate_rollout
from rlperf.sim.rollout.routing import may_be_last, route, telling_replicas
from rlperf.sim.rollout.trajectories import Trajectories
from rlperf.sim.rollout.turns import serve_turns
from rlperf.specs.pool import Settings

SCREENED_RL_STEPS = 2
"""rl_steps of a demand that the closed form counts; the events simulate all of them."""
HEAVIEST, FULLEST = 1, 2
"""Replicas that the closed form counts beside that of the longest trajectory: those that are busy longest, and of
agents those whose contexts are longest together, which evict most."""
LEAST_JOINED = 0.8
"""What of a guess is taken to be no more than what simulating finds, measured and not proven: of 1,051 rollouts that
others join none took less than 0.81 of the line between a closed form on all replicas and the makespan alone
(docs/theory/planner.md)."""


@dataclass(eq=False)
class Priced:
    """Seconds of engines on one demand, whatever is under way: by engine, replicas and what of each runs at once.

    Attributes
    ----------
    makespans : of single turns, means over the rl_steps that are counted [s]
    steady : seconds per rl_step where finished requests are replaced at once, and of an interruption [s]
    """

    makespans: dict[tuple[EngineStepCost, int, int], float] = field(default_factory=dict)
    steady: dict[tuple[object, ...], tuple[float, float]] = field(default_factory=dict)


@dataclass(eq=False)
class Counted:
    """What device counts share in the closed form: flow, the busiest replicas' requests, engine_steps, cost tables.

    Attributes
    ----------
    allowed : what may be under way at once
    simulated : what no count of engine_steps serves
    ends : when groups end in engine_steps, by replicas, and limits with places; of each table
    censuses : engine_steps by replicas and limits with places: of those replicas of each table that may be last
    served : ends of trajectories of several turns by engine, replicas and slots, of each table
    priced : seconds of engines, which those share that differ in ``allowed``
    refuses : which layouts of engines nobody runs, so that they need no count; None: none
    """

    demand: Demand
    allowed: Allowed = ONE_BATCH
    costs: Tabulated = field(default_factory=dict)
    simulated: SimulatedRollouts = field(default_factory=lambda: SimulatedRollouts())
    ends: dict[tuple[int, EngineLimits], list[GroupEnds]] = field(default_factory=dict)
    censuses: dict[tuple[int, EngineLimits], list[list[StepCensus]]] = field(default_factory=dict)
    served: dict[tuple[object, ...], list[Within[list[Ended]]]] = field(default_factory=dict)
    priced: Priced = field(default_factory=Priced)
    refuses: Callable[[Layout], BoolArray] | None = None
    _slowest: dict[int, list[list[Trajectories]]] = field(default_factory=dict)

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

    @cached_property
    def single_turn(self) -> bool:
        """Whether every trajectory has one turn: who shares an engine_step then hangs on no seconds."""
        return all(table.single_turn for table in self.tables)

    def seconds(self, replicas: int, concurrency: int, limits: EngineLimits, cost: EngineStepCost) -> float:
        """Makespan of single turns at a concurrency, a cache's perhaps; mean over the rl_steps that are counted [s]."""
        free = replace(limits, kv_tokens=np.inf, max_running=concurrency)
        if (key := (replicas, free)) not in self.censuses:
            if replicas not in self._slowest:
                self._slowest[replicas] = [_slowest_replicas(table, replicas) for table in self.tables]
            count = partial(take_census, limits=free)
            self.censuses[key] = [[count(each) for each in part] for part in self._slowest[replicas]]
        of_table = [max(float(each.makespan_s(cost)) for each in part) for part in self.censuses[key]]
        return float(np.mean(of_table))

    def turns_s(self, pool: Engines) -> float:
        """Makespan of trajectories of several turns, mean over the rl_steps that are counted [s]."""
        return float(np.mean([ended.finish_s.max() for ended in self.turns(pool)]))

    def turns(self, pool: Engines) -> list[Ended]:
        """When trajectories of several turns end in every table, on the replicas that may be the last."""
        if (known := self.known_turns(pool)) is not None:
            return known
        options = EngineOptions(trajectories=self.under_way(pool.replicas))
        bound, ended, every = self._turns_bound(pool), [], []
        for table in self.tables:
            chosen = route(table, "round_robin", np.ones(pool.replicas))
            finish_s = np.full(len(table), -1.0)
            for replica in _telling_turns(table, chosen, pool, options.trajectories).tolist():
                own = np.flatnonzero(chosen == replica)
                every.append(serve_turns(table.take(own), pool.cost, bound, options))
                finish_s[own] = every[-1].finish_s
            counted = finish_s >= 0.0
            ended.append(Ended(finish_s[counted], table.group[counted]))
        tried = self.served.setdefault(self._turns_key(pool), [])
        tried.append(Within.of(bound, ended, every))
        return ended

    def known_turns(self, pool: Engines) -> list[Ended] | None:
        """The same where they have been served."""
        return holding(self.served.get(self._turns_key(pool), ()), self._turns_bound(pool))

    def _turns_key(self, pool: Engines) -> tuple[object, ...]:
        return pool.key, pool.replicas, self.under_way(pool.replicas)

    def _turns_bound(self, pool: Engines) -> EngineLimits:
        return replace(pool.limits, max_running=min(pool.limits.max_running, self._share(pool.replicas)))

    def _share(self, replicas: int) -> int:
        """Most trajectories of a replica."""
        return -(-max(len(table) for table in self.tables) // replicas)

    def bound(self, limits: EngineLimits, replicas: int) -> EngineLimits:
        """What binds where rollouts are simulated: a cache that holds all that a replica may keep is like any other.

        ``replicas``: of those that read, or that write, the fewer
        """
        most = self._share(replicas)
        longest = max(int(table.final_tokens.max()) for table in self.tables)
        kv_tokens = limits.kv_tokens if limits.kv_tokens < 2.0 * most * longest else np.inf
        return replace(limits, kv_tokens=kv_tokens, max_running=min(limits.max_running, most))

    def simulates(self, pool: Engines) -> bool:
        """Whether who runs beside whom depends on seconds: no count of engine_steps then serves several costs."""
        return pool.apart is not None or not self.single_turn

    def places(self, pool: Engines) -> float:
        """Requests at once of a replica; infinite where nobody waits for a place."""
        running = pool.limits.max_running
        return running if running < self._share(pool.replicas) else np.inf

    def simulated_s(self, pool: Engines) -> float:
        """Makespan of a pool that has to be simulated, mean over the rl_steps that are counted [s]."""
        return self.turns_s(pool) if pool.apart is None else self.apart_s(pool, pool.apart)

    def known_s(self, pool: Engines) -> float | None:
        """The same where it has been simulated."""
        if pool.apart is not None:
            return self.known_apart_s(pool, pool.apart)
        return None if self.known_turns(pool) is None else self.turns_s(pool)

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

    def counted_s(self, pool: Engines) -> float:
        """Makespan of single turns whose replicas read their own prompts, mean over rl_steps that are counted [s]."""
        seconds, known = 0.0, self.priced.makespans
        for concurrency, weight in concurrency_of(pool.limits, self.tables, pool.replicas, self.flow.context):
            key = (pool.cost, pool.replicas, concurrency)
            if key not in known:
                known[key] = self.seconds(pool.replicas, concurrency, pool.limits, pool.cost)
            seconds += weight * known[key]
        return seconds


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
    prompts are read apart or turns wait for tools it does: what arrives does so at given times, and is simulated.
    """
    makespan, steady, again = (np.zeros(len(pools)) for _ in range(3))
    guessed, demand, flow = np.zeros(len(pools), dtype=np.bool_), counted.demand, counted.flow
    flowing = counted.priced.steady
    if least:
        _simulate_roomiest(pools, counted)
    for position, pool in enumerate(pools):
        # of agents the cache counts by itself, too: it holds contexts that wait
        within = (pool.limits, flow.allowed) if flow.waits else steady_running(pool.limits, pool.writers, flow)
        same = (pool.cost, pool.replicas, pool.writers, within)
        if same not in flowing:
            of, readers = (pool.cost, pool.limits, pool.writers, flow), pool.replicas - pool.writers
            found = refilled(*of, readers)
            flowing[same] = found.seconds, interrupted_seconds(*of, found, readers)
        steady[position], again[position] = flowing[same]
        if not counted.simulates(pool):
            seconds = counted.counted_s(pool)
        elif not least:
            seconds = counted.simulated_s(pool)
            if pool.apart is None:  # those with as many replicas and less cache, or fewer, take no less
                counted.simulated.tell(pool, counted.places(pool), seconds)
        else:
            seconds, guessed[position] = _least_s(pool, counted)
        makespan[position] = demand.batch.rounds * seconds
    return makespan, steady, again, guessed


def counted_ahead_s(
    pools: Sequence[Engines], counted: Counted, rows: IntArray, count: int
) -> FloatArray | None:  # fmt: skip
    """Seconds of agents that run ahead by how many batches are under way, infinite but in the ``rows`` of the pools
    ``[count][AHEAD]``; None: nobody does.
    """
    flow, made = counted.flow, dict[tuple[object, ...], FloatArray]()
    if flow.waits is None or flow.allowed == ONE_BATCH:
        return None
    found = np.full((count, AHEAD.size), np.inf)
    for row, pool in zip(rows.tolist(), pools, strict=True):
        same = pool.cost, pool.writers, pool.limits
        if same not in made:
            made[same] = ahead(pool.cost, pool.limits, pool.writers, flow).seconds
        found[row] = made[same]
    return found


def pools_of(
    settings: Settings, costs: tuple[EngineStepCost, ...], layout: Layout, e: IntArray,
    kv_tokens: FloatArray, running: IntArray, counted: Counted, aparts: tuple[Apart | None, ...],
    streams: bool,
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
        found.append(Engines(costs[engine], limits, replicas, apart, streams))
    return found


def _simulate_roomiest(pools: Sequence[Engines], counted: Counted) -> None:
    """Of every engine that has to be simulated the pools with the largest cache, unless others tell their least.

    Of agents that with the most places, which take some of the cache: fewer places beside more of it tell of no others.
    """
    of_engine: dict[tuple[object, ...], list[Engines]] = {}
    for pool in pools:
        if counted.simulates(pool):
            of_engine.setdefault((pool.key, pool.replicas), []).append(pool)
    for own in of_engine.values():
        room = max(pool.limits.kv_tokens for pool in own)
        most = max(own, key=lambda pool: (counted.places(pool), pool.limits.kv_tokens))
        roomiest = replace(most, limits=replace(most.limits, kv_tokens=room))
        if counted.simulated.least_s(roomiest) is not None:
            continue
        tried, places = [most], counted.places(most)
        if most.apart:
            tried, places = [pool for pool in own if pool.limits.kv_tokens == room], np.inf
        counted.simulated.tell(roomiest, places, min(counted.simulated_s(pool) for pool in tried))


def least_seconds(pools: Sequence[Engines], counted: Counted) -> tuple[FloatArray, BoolArray]:
    """Makespans that simulating has found, or no more than it will find [s], and which are that ``[pools]``."""
    found = [_least_s(pool, counted) for pool in pools]
    seconds = counted.demand.batch.rounds * np.array([each for each, _ in found], dtype=np.float64)
    return seconds, np.array([guessed for _, guessed in found], dtype=np.bool_)


def _least_s(pool: Engines, counted: Counted) -> tuple[float, bool]:
    """What simulating has found, or no more than it will find, and whether it is that [s]."""
    known, least = counted.known_s(pool), counted.simulated.least_s(pool)
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


def _slowest_replicas(table: Trajectories, replicas: int) -> list[Trajectories]:
    """What the replicas that may be the slowest serve: those with most tokens, and the longest trajectory."""
    chosen, tokens = route(table, "round_robin", np.ones(replicas)), table.generated_tokens
    work = np.bincount(chosen, tokens, replicas)
    slowest = may_be_last(chosen, tokens, work, HEAVIEST).tolist()
    return [table.take(np.flatnonzero(chosen == r)) for r in slowest if work[r] > 0]


def _telling_turns(table: Trajectories, chosen: IntArray, pool: Engines, slots: int | None) -> IntArray:
    """Replicas that may be the last of several turns: with the longest, the most and the fullest trajectories.

    ``chosen``: replica of every trajectory. Where a replica has fewer ``slots`` than trajectories they follow one
    another, and that with the most work need not be the last.
    """
    replicas, last = pool.replicas, table.offsets[1:] - 1
    if pool.streams:
        return telling_replicas(table, replicas)
    if replicas <= 1 + HEAVIEST + FULLEST:
        return np.unique(chosen)
    contexts = np.bincount(chosen, table.final_tokens[last], replicas)
    running = min(pool.limits.max_running, len(table) / replicas)
    pace_s = float(pool.cost.decode_s(running, running * float(table.final_tokens.mean())))
    alone = table.generated_tokens * pace_s + np.add.reduceat(table.tool_latency_s, table.offsets[:-1])
    work = np.bincount(chosen, alone, replicas)
    if slots is not None:
        work = np.array([_listed_s(alone[chosen == r], slots) for r in range(replicas)])
    busy = may_be_last(chosen, alone, work, HEAVIEST)
    return np.unique([*busy.tolist(), *np.argsort(-contexts, kind="stable")[:FULLEST].tolist()])


def _listed_s(seconds: FloatArray, slots: int) -> float:
    """When the last of some pieces of work ends that take the next free slot in turn [s].

    >>> _listed_s(np.array([3.0, 1.0, 1.0, 3.0]), 2)
    5.0
    """
    free = [0.0] * slots
    for each in seconds.tolist():
        heapq.heapreplace(free, free[0] + each)
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
