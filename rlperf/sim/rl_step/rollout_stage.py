"""The rollout of one rl_step: seconds of many pools by counting engine_steps, or of one pool event by event.

Both read the same engine cost, the same limits and the same lengths; they differ in who is asked: the closed form
counts which requests share an engine_step once per concurrency and prices a million pools with it, the events know who
waits for whom. ``docs/theory/rl_step.md`` has the road.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Self

import numpy as np

from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.layout import FloatArray, IntArray, Layout, taken
from rlperf.sim.remembered import Remembered
from rlperf.sim.rl_step.demand import Batch, Demand
from rlperf.sim.rl_step.engine import Tabulated, engine_limits
from rlperf.sim.rl_step.flow import Flow, interrupted_seconds, steady_running, steady_seconds
from rlperf.sim.rollout.apart import Apart, simulate_apart
from rlperf.sim.rollout.closed_form import UNIT, StepCensus, take_census
from rlperf.sim.rollout.lent import AT, joined_curve_s
from rlperf.sim.rollout.options import EngineOptions
from rlperf.sim.rollout.replica import PLAIN
from rlperf.sim.rollout.rollout import RolloutResult, simulate_rollout
from rlperf.sim.rollout.routing import route, telling_replicas
from rlperf.sim.rollout.tail import GroupSource, PartialRollouts, last_of_groups
from rlperf.sim.rollout.trajectories import Trajectories
from rlperf.specs.pool import Settings

SCREENED_RL_STEPS = 2
"""rl_steps of a demand that the closed form counts; the events simulate all of them."""
HEAVIEST = 1
"""Replicas with the most tokens whose engine_steps the closed form counts, beside that of the longest trajectory."""
POLICY_RL_STEPS, POLICY_WARM_UP = 5, 2
"""rl_steps simulated under partial rollouts, and how many of them fill the buffer first."""


@dataclass(frozen=True, eq=False)
class RolloutStage:
    """Seconds of rollouts, one per pool or one per simulated rl_step; every array has shape ``[rows]``.

    Attributes
    ----------
    layout : of the pool
    makespan_s : seconds until the last of an rl_step's responses [s]
    steady_s : seconds per rl_step when finished requests are replaced at once [s]
    group_s : from the start of a group to its last response, mean [s]
    recompute_s : prefill of a replica's running requests, where a weight sync interrupts them [s]
    writers : replicas that write responses; all of them but those that read prompts for the others [1]
    slots : requests that a replica may run at once [1]
    pace_s : seconds of a decoding engine_step: fixed, per running request, per cached token [s] ``[rows][3]``
    transition_s : the engine's weights and cache leaving and returning, once per rl_step [s]
    weight_dtype : precision in which weights reach the engine
    lent_s : makespan where engines on the trainer's devices join at shares of it (`lent.AT`) [s] ``[rows][AT]``; None:
        they never do
    """

    layout: Layout
    makespan_s: FloatArray
    steady_s: FloatArray
    group_s: FloatArray
    recompute_s: FloatArray
    writers: IntArray
    slots: IntArray
    pace_s: FloatArray
    transition_s: FloatArray
    weight_dtype: str
    lent_s: FloatArray | None = field(default=None, kw_only=True)

    def take(self, index: IntArray | slice) -> Self:
        """Some rows, by index."""
        return taken(self, index)


@dataclass(eq=False)
class Counted:
    """What device counts share in the closed form: flow, the busiest replicas' requests, engine_steps, cost tables.

    Attributes
    ----------
    batches : rl_steps whose requests are under way at once
    censuses : engine_steps by replicas, concurrency and pace: of those replicas of each table that may be last
    """

    demand: Demand
    batches: int = 1
    costs: Tabulated = field(default_factory=dict)
    censuses: dict[tuple[int, int, float], list[list[StepCensus]]] = field(default_factory=dict)
    _slowest: dict[tuple[int, float], list[list[Trajectories]]] = field(default_factory=dict)

    @cached_property
    def flow(self) -> Flow:
        """What the demand sends through the engines."""
        return Flow.of(self.demand, self.batches)

    @cached_property
    def tables(self) -> list[Trajectories]:
        """Trajectories of the rl_steps that are counted, those of every generation batch apart."""
        tables = self.demand.tables[:SCREENED_RL_STEPS]
        return [
            part for table in tables for part in generation_batches(Trajectories.from_table(table), self.demand.batch)
        ]

    def census(
        self, replicas: int, concurrency: int, limits: EngineLimits, cost: EngineStepCost
    ) -> list[list[StepCensus]]:
        """Engine_steps at a concurrency; a cache that binds counts as one.

        Who waits for an environment runs beside others the sooner engine_steps are: of several turns they are counted
        at the pace of ``cost``, to a half octave, and of one at any.
        """
        paced, options = UNIT, PLAIN
        if not all(table.single_turn for table in self.tables):
            s = float(cost.decode_s(float(concurrency), concurrency * self.flow.context))
            paced = replace(UNIT, host_s=float(2.0 ** (np.round(2.0 * np.log2(s)) / 2.0)))
            options = EngineOptions(trajectories=self.demand.batch.under_way(replicas))
        key = (replicas, concurrency, paced.host_s)
        if key not in self.censuses:
            bound = replace(limits, kv_tokens=np.inf, max_running=concurrency)
            last = (replicas, paced.host_s)
            if last not in self._slowest:
                self._slowest[last] = [_slowest_replicas(table, *last) for table in self.tables]
            count = partial(take_census, limits=bound, cost=paced, options=options)
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

    def apart_s(self, cost: EngineStepCost, limits: EngineLimits, replicas: int, apart: Apart) -> float:
        """Makespan where prompts are read apart, mean over the rl_steps that are counted [s]."""
        served = (simulate_apart(table, replicas, apart, cost=cost, limits=limits).makespan_s for table in self.tables)
        return float(np.mean(list(served)))

    def lent_s(self, cost: EngineStepCost, limits: EngineLimits, replicas: int, more: int) -> FloatArray:
        """Makespan where ``more`` replicas join, as a share of that alone, mean over the rl_steps counted ``[AT]``."""
        curves = []
        for table in self.tables:
            alone = simulate_rollout(table, replicas, cost=cost, limits=limits)
            curves.append(joined_curve_s(table, alone, more, cost=cost, limits=limits) / alone.makespan_s)
        return np.asarray(np.mean(curves, axis=0))


def counted_lent_s(
    settings: Settings, costs: tuple[EngineStepCost, ...], layout: Layout, e: IntArray,
    kv_tokens: FloatArray, running: IntArray, counted: Counted, lent: int,
) -> FloatArray:  # fmt: skip
    """Makespans of every pool where engines on ``lent`` devices join, as shares of that alone ``[pools][AT]``.

    Who runs beside whom then depends on when they join, so that every shape and concurrency is simulated
    (arguments: `counted_seconds`).
    """
    curves = np.ones((len(e), len(AT)))
    known: dict[tuple[int, EngineLimits], FloatArray] = {}
    for position, engine in enumerate(e.tolist()):
        replicas, more = int(layout.data_parallel[position]), lent // int(layout.replica_devices[position])
        limits = engine_limits(settings, float(kv_tokens[position]), int(running[position]))
        bound = counted.bound(limits, replicas)
        if more and (engine, bound) not in known:
            known[engine, bound] = counted.lent_s(costs[engine], bound, replicas, more)
        if more:
            curves[position] = known[engine, bound]
    return curves


def counted_seconds(
    settings: Settings, costs: tuple[EngineStepCost, ...], layout: Layout, e: IntArray,
    kv_tokens: FloatArray, running: IntArray, counted: Counted, aparts: tuple[Apart | None, ...],
) -> tuple[FloatArray, FloatArray, FloatArray]:  # fmt: skip
    """Closed form: makespan, steady seconds and an interruption's of every pool, means over some of the rl_steps [s].

    ``e``: index of each pool's cost in ``costs`` and of who reads its prompts in ``aparts``; ``kv_tokens``,
    ``running``: its cache and concurrency ``[pools]``.

    Which requests share an engine_step does not depend on what it costs, so the engine_steps of a workload are counted
    once per number of replicas and concurrency, and every engine shape costs a dot product (`StepCensus`). Where
    prompts are read apart it does: contexts arrive at given times, so that every shape and concurrency is simulated.
    """
    makespan, steady, again = (np.zeros(len(e)) for _ in range(3))
    demand, flow = counted.demand, counted.flow
    known: dict[tuple[int, int], float] = {}
    simulated: dict[tuple[int, EngineLimits], float] = {}
    flowing: dict[tuple[int, float], tuple[float, float]] = {}
    for position, engine in enumerate(e.tolist()):
        apart = aparts[engine]
        readers = apart.readers if apart else 0
        replicas = int(layout.data_parallel[position]) - readers
        most = demand.batch.under_way(replicas) or int(running[position])
        limits = engine_limits(settings, float(kv_tokens[position]), min(int(running[position]), most))
        same = (engine, steady_running(limits, replicas, flow))
        if same not in flowing:
            flowing[same] = (
                steady_seconds(costs[engine], limits, replicas, demand, flow, readers),
                interrupted_seconds(costs[engine], limits, replicas, flow, readers),
            )
        steady[position], again[position] = flowing[same]
        if apart is not None:
            bound = counted.bound(limits, min(readers, replicas))
            if (engine, bound) not in simulated:
                simulated[engine, bound] = counted.apart_s(costs[engine], bound, replicas + readers, apart)
            makespan[position] = demand.batch.rounds * simulated[engine, bound]
            continue
        points = _concurrency(limits, counted.tables, replicas, flow.context)
        for concurrency, _ in points:
            if (engine, concurrency) not in known:
                census = counted.census(replicas, concurrency, limits, costs[engine])
                each = [max(float(c.makespan_s(costs[engine])) for c in censuses) for censuses in census]
                known[engine, concurrency] = float(np.mean(each))
        makespan[position] = demand.batch.rounds * sum(
            weight * known[engine, concurrency] for concurrency, weight in points
        )
    return makespan, steady, again


def _concurrency(
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


def _slowest_replicas(table: Trajectories, replicas: int, pace_s: float) -> list[Trajectories]:
    """What the replicas that may be the slowest serve: those with the most work, and the longest trajectory.

    Work is tokens at ``pace_s`` each, and the time of environments between turns.
    """
    chosen = route(table, "round_robin", np.ones(replicas))
    alone = table.generated_tokens * pace_s + np.add.reduceat(table.tool_latency_s, table.offsets[:-1])
    work = np.bincount(chosen, alone, replicas)
    heavy = np.argsort(-work, kind="stable")[:HEAVIEST]
    slowest = {*heavy.tolist(), int(chosen[int(np.argmax(alone))])}
    return [table.take(np.flatnonzero(chosen == r)) for r in sorted(slowest) if work[r] > 0]


# -- event by event -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Replicas:
    """Equal replicas of one engine: what their engine_steps cost, their limits, how many, devices of each.

    ``lent``: further ones that may join, on the trainer's devices
    """

    cost: EngineStepCost
    limits: EngineLimits
    count: int
    devices: int
    options: EngineOptions
    apart: Apart | None = None
    lent: int = 0

    @property
    def readers(self) -> int:
        """Those that read prompts for the others."""
        return self.apart.readers if self.apart else 0

    @property
    def writers(self) -> int:
        """Those that write responses."""
        return self.count - self.readers

    def serve(self, trajectories: Trajectories, routing: IntArray | None = None) -> RolloutResult:
        """Simulate them, or those that ``routing`` names."""
        if self.apart is not None:
            return simulate_apart(
                trajectories, self.count, self.apart, cost=self.cost, limits=self.limits,
                devices_per_replica=self.devices, options=self.options,
            )  # fmt: skip
        return simulate_rollout(
            trajectories, self.count if routing is None else int(routing.max()) + 1, cost=self.cost,
            limits=self.limits, devices_per_replica=self.devices, options=self.options,
            routing="round_robin" if routing is None else routing,
        )  # fmt: skip

    @cached_property
    def key(self) -> tuple[object, ...]:
        """All that tells these replicas from others, by value."""
        return (self.cost.key, self.limits, self.count, self.devices, self.options, self.apart, self.lent)


_SERVED: Remembered[RolloutResult] = Remembered(most=64)
"""Rollouts simulated last, by all that they depend on, whoever asked: of a configuration that is tried with another
trainer, in another framework or beside its defaults most are the same."""


@dataclass(eq=False)
class RolloutEvents:
    """Rollouts simulated event by event; what is the same is simulated once."""

    seed: int = 0
    _lent: dict[tuple[object, ...], FloatArray] = field(default_factory=dict)
    _parts: dict[tuple[bytes, int, bool], tuple[Trajectories, IntArray | None]] = field(default_factory=dict)

    def results(self, demand: Demand, replicas: Replicas) -> tuple[RolloutResult, ...]:
        """The simulated rollout of every replicate of a demand."""
        batch, served = demand.batch, partial(self._served, demand, replicas)
        return tuple(
            _SERVED.get((table, batch.over_provision, replicas.key), partial(served, index))
            for index, table in enumerate(demand.keys)
        )

    def _served(self, demand: Demand, replicas: Replicas, index: int) -> RolloutResult:
        return replicas.serve(*self._part(demand, index, replicas))

    def served(self, demand: Demand, replicas: Replicas) -> tuple[Trajectories, ...]:
        """What is simulated of every replicate; a part of the rl_step where it is large."""
        return tuple(self._part(demand, index, replicas)[0] for index in range(len(demand.tables)))

    def makespans_s(self, demand: Demand, replicas: Replicas, results: Sequence[RolloutResult]) -> FloatArray:
        """Seconds of every rollout: the makespan, of generation batches their sum; with partial rollouts the mean once
        the buffer has filled [s].
        """
        if demand.batch.rounds > 1:
            return np.array([self._in_turn_s(demand, index, replicas) for index in range(len(results))])
        if demand.batch.over_provision <= 1.0:
            return np.array([result.makespan_s for result in results])
        return np.array([self._refilled_s(demand, index, replicas) for index in range(len(results))])

    def lent_s(
        self, demand: Demand, replicas: Replicas, served: Sequence[Trajectories], results: Sequence[RolloutResult]
    ) -> FloatArray:
        """Seconds of every rollout that the trainer's devices join at shares of it [s] ``[rollouts][AT]``."""
        key = (demand.keys, replicas.key)
        if key not in self._lent:
            cost, limits, options = replicas.cost, replicas.limits, replicas.options
            curves = [
                joined_curve_s(part, alone, replicas.lent, cost=cost, limits=limits, options=options)
                for part, alone in zip(served, results, strict=True)
            ]
            self._lent[key] = np.array(curves)
        return self._lent[key]

    def _in_turn_s(self, demand: Demand, index: int, replicas: Replicas) -> float:
        """Generation batches one after another: each starts when the longest response of the one before is there."""
        parts = generation_batches(Trajectories.from_table(demand.tables[index]), demand.batch)
        return sum(replicas.serve(part).makespan_s for part in parts)

    def _refilled_s(self, demand: Demand, index: int, replicas: Replicas) -> float:
        source = GroupSource(Trajectories.from_table(demand.tables[index]), seed=self.seed + index)
        run = PartialRollouts(demand.batch.over_provision)
        steps = run.run(source, replicas.serve, demand.batch.generated, POLICY_RL_STEPS).steps
        return float(np.mean([step.seconds for step in steps[POLICY_WARM_UP:]]))

    def _part(self, demand: Demand, index: int, engines: Replicas) -> tuple[Trajectories, IntArray | None]:
        """What is simulated of one rl_step, and the replica of each trajectory where it is not all of them."""
        # who is done first decides, who reads for whom, or who may join: then all have to run
        together = demand.batch.over_provision > 1.0 or engines.readers > 0 or engines.lent > 0
        replicas = engines.count
        key = (demand.keys[index], replicas, together)
        if key not in self._parts:
            whole = Trajectories.from_table(demand.tables[index])
            kept = np.arange(replicas) if together else telling_replicas(whole, replicas)
            if len(kept) == replicas:
                self._parts[key] = (whole, None)
            else:
                chosen = route(whole, "round_robin", np.ones(replicas))
                some = np.flatnonzero(np.isin(chosen, kept))
                self._parts[key] = (whole.take(some), np.searchsorted(kept, chosen[some]))
        return self._parts[key]


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


def group_seconds(finish_s: FloatArray, group: IntArray) -> float:
    """Mean time at which a group's last response is there, all started together [s].

    >>> group_seconds(np.array([1.0, 4.0, 2.0]), np.array([7, 7, 9]))
    3.0
    """
    return float(last_of_groups(group, finish_s)[0].mean())


def simulated_rollout(
    events: RolloutEvents, demand: Demand, replicas: Replicas, layout: Layout, transition_s: float, weight_dtype: str,
    batches: int = 1,
) -> tuple[RolloutStage, tuple[RolloutResult, ...]]:  # fmt: skip
    """Events: the stage of one pool in every replicate of a demand, and the simulated rollouts behind it.

    ``layout``: of the pool, one row; ``transition_s``, ``weight_dtype``: as in `RolloutStage`; ``batches``: as in
    `Counted`.
    """
    results, served = events.results(demand, replicas), events.served(demand, replicas)
    n, flow = len(results), Flow.of(demand, batches)
    groups = [part.group for part in served]
    engine = replicas.cost, replicas.limits, replicas.writers
    steady = steady_seconds(*engine, demand, flow, replicas.readers)
    stage = RolloutStage(
        layout=layout.take(np.zeros(n, dtype=np.int64)),
        makespan_s=events.makespans_s(demand, replicas, results),
        steady_s=np.full(n, steady),
        group_s=np.array([group_seconds(r.finish_s, g) for r, g in zip(results, groups, strict=True)]),
        recompute_s=np.full(n, interrupted_seconds(*engine, flow, replicas.readers)),
        writers=np.full(n, replicas.writers, dtype=np.int64),
        slots=np.full(n, replicas.limits.max_running, dtype=np.int64),
        pace_s=np.tile(replicas.cost.pace_s, (n, 1)),
        transition_s=np.full(n, transition_s),
        weight_dtype=weight_dtype,
        lent_s=events.lent_s(demand, replicas, served, results) if replicas.lent else None,
    )
    return stage, results
