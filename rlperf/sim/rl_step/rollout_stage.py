"""The rollout of one rl_step: stages of many pools, and the engines of one pool event by event.

Closed form (`rollout_counted`) and events read the same engine cost, the same limits and the same lengths; they differ
in who is asked: the closed form counts which requests share an engine_step once per concurrency and prices a million
pools with it, the events know who waits for whom. ``docs/theory/rl_step.md`` has the road.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import numpy as np

from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.layout import FloatArray, IntArray, Layout, taken
from rlperf.sim.remembered import Key
from rlperf.sim.rl_step.ahead import ahead
from rlperf.sim.rl_step.demand import Demand
from rlperf.sim.rl_step.flow import ONE_BATCH, Allowed, Flow
from rlperf.sim.rl_step.refilled import interrupted_seconds, refilled
from rlperf.sim.rl_step.rollout_counted import generation_batches
from rlperf.sim.rl_step.simulated_rollouts import Within, holding
from rlperf.sim.rollout.apart import Apart, simulate_apart
from rlperf.sim.rollout.group_ends import group_ends, in_turn
from rlperf.sim.rollout.lent import joined_curve_s
from rlperf.sim.rollout.options import EngineOptions
from rlperf.sim.rollout.rollout import RolloutResult, simulate_rollout
from rlperf.sim.rollout.routing import Routing, route, telling_replicas
from rlperf.sim.rollout.tail import GroupSource, PartialRollouts, last_of_groups
from rlperf.sim.rollout.trajectories import Trajectories


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
    ends_s : when each 64th of the groups is complete [s] ``[rows][ENDS]``; None: not asked for
    ahead_s : of agents that run ahead, the seconds per rl_step by how many batches are under way (`ahead.AT`) [s]
        ``[rows][AT]``; None: nobody does
    again_s : what of these reads contexts again that were evicted between turns [s] ``[rows][AT]``; None: not asked for
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
    ends_s: FloatArray | None = field(default=None, kw_only=True)
    ahead_s: FloatArray | None = field(default=None, kw_only=True)
    again_s: FloatArray | None = field(default=None, kw_only=True)

    def take(self, index: IntArray | slice) -> Self:
        """Some rows, by index."""
        return taken(self, index)


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

    def serve(self, trajectories: Trajectories, routing: Routing | IntArray | None = None) -> RolloutResult:
        """Simulate them (``routing``: how they are dealt to), or of equal ones those that it names one by one."""
        dealt = "round_robin" if routing is None else routing
        if self.apart is not None and isinstance(dealt, str):
            return simulate_apart(
                trajectories, self.count, self.apart, cost=self.cost, limits=self.limits,
                devices_per_replica=self.devices, routing=dealt, options=self.options,
            )  # fmt: skip
        return simulate_rollout(
            trajectories, self.count if isinstance(dealt, str) else int(dealt.max()) + 1, cost=self.cost,
            limits=self.limits, devices_per_replica=self.devices, routing=dealt, options=self.options,
        )  # fmt: skip

    @cached_property
    def key(self) -> tuple[object, ...]:
        """All that tells these replicas from others, by value."""
        return self.limits, *self.unlimited

    @cached_property
    def unlimited(self) -> tuple[object, ...]:
        """The same but for their limits."""
        return self.cost.key, self.count, self.devices, self.options, self.apart, self.lent


@dataclass(eq=False)
class HeldRollouts:
    """Rollouts simulated last, by all that they depend on but their limits, whoever asked.

    Of a configuration that is tried with another trainer, in another framework or beside its defaults most are the
    same; under limits that bind nobody they are under any others. ``most`` runs of engine_steps are kept.
    """

    most: int = 2_000_000
    _held: dict[Key, list[Within[RolloutResult]]] = field(default_factory=dict)
    _runs: dict[Key, int] = field(default_factory=dict)

    def get(self, key: Key, limits: EngineLimits, make: Callable[[], RolloutResult]) -> RolloutResult:
        """The rollout of ``key`` under some limits, made when none that is as good is there; several threads may ask.

        >>> limits, roomy = EngineLimits(kv_tokens=4096, max_running=8), EngineLimits(kv_tokens=8192, max_running=16)
        >>> cost, served = EngineStepCost(np.array([0.0]), np.zeros(1), host_s=1.0), HeldRollouts()
        >>> made = lambda: simulate_rollout(Trajectories.of(4, [3, 9]), 1, cost=cost, limits=limits)
        >>> one = served.get(("a",), limits, made)
        >>> served.get(("a",), roomy, made) is one, served.get(("b",), limits, made) is one
        (True, False)
        """
        tried = self._held.pop(key, [])
        self._held[key] = tried  # the last that was asked for stands last
        if (known := holding(tried, limits)) is not None:
            return known
        found = make()
        tried.append(Within.of(limits, found, (found,)))
        own = sum(len(timeline.segments) for timeline in found.timelines)
        self._runs[key] = self._runs.get(key, 0) + own
        excess = sum([*self._runs.values()]) - self.most
        for oldest in [*self._held]:
            if excess <= 0 or oldest == key:
                break
            self._held.pop(oldest, None)
            excess -= self._runs.pop(oldest, 0)
        return found


_SERVED = HeldRollouts()


@dataclass(eq=False)
class RolloutEvents:
    """Rollouts simulated event by event; what is the same is simulated once."""

    seed: int = 0
    _within: dict[tuple[object, ...], list[Within[RolloutResult]]] = field(default_factory=dict)
    _lent: dict[tuple[object, ...], FloatArray] = field(default_factory=dict)
    _makespans: dict[tuple[object, ...], FloatArray] = field(default_factory=dict)
    _batches: dict[tuple[object, ...], list[FloatArray]] = field(default_factory=dict)
    _parts: dict[tuple[bytes, int, bool], tuple[Trajectories, IntArray | None]] = field(default_factory=dict)

    def results(self, demand: Demand, replicas: Replicas) -> tuple[RolloutResult, ...]:
        """The simulated rollout of every replicate of a demand."""
        return tuple(self._served(demand, replicas, index) for index in range(len(demand.keys)))

    def _served(self, demand: Demand, replicas: Replicas, index: int) -> RolloutResult:
        key = (demand.keys[index], demand.batch.over_provision, *replicas.unlimited)
        limits, tried = self._binding(demand, index, replicas), self._within.setdefault(key, [])
        if (known := holding(tried, limits)) is not None:
            return known
        found = _SERVED.get(key, limits, lambda: replicas.serve(*self._part(demand, index, replicas)))
        tried.append(Within.of(limits, found, (found,)))
        return found

    def _binding(self, demand: Demand, index: int, replicas: Replicas) -> EngineLimits:
        """Limits with no more places than a replica has requests, where it serves its own from begin to end."""
        if replicas.apart is not None or replicas.lent:
            return replicas.limits
        table, routing = self._part(demand, index, replicas)
        most = -(-len(table) // replicas.count) if routing is None else int(np.bincount(routing).max())
        return replace(replicas.limits, max_running=min(replicas.limits.max_running, most))

    def served(self, demand: Demand, replicas: Replicas) -> tuple[Trajectories, ...]:
        """What is simulated of every replicate; a part of the rl_step where it is large."""
        return tuple(self._part(demand, index, replicas)[0] for index in range(len(demand.tables)))

    def makespans_s(self, demand: Demand, replicas: Replicas, results: Sequence[RolloutResult]) -> FloatArray:
        """Seconds of every rollout: the makespan, of generation batches their sum; with partial rollouts the mean once
        the buffer has filled [s].
        """
        if demand.batch.rounds == 1 and demand.batch.over_provision <= 1.0:
            return np.array([result.makespan_s for result in results])
        key = (demand.keys, demand.batch, replicas.key)
        if key not in self._makespans:
            each = self._in_turn_s if demand.batch.rounds > 1 else self._refilled_s
            self._makespans[key] = np.array([each(demand, index, replicas) for index in range(len(results))])
        return self._makespans[key]

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

    def ends_s(
        self, demand: Demand, replicas: Replicas, served: Sequence[Trajectories], results: Sequence[RolloutResult]
    ) -> FloatArray:
        """When parts of the groups of every rollout are complete [s] ``[rollouts][ENDS]``."""
        if demand.batch.rounds > 1:
            return np.array([in_turn(self._ends_in_turn(demand, index, replicas)) for index in range(len(results))])
        return np.array([group_ends(r.finish_s, part.group) for r, part in zip(results, served, strict=True)])

    def _in_turn_s(self, demand: Demand, index: int, replicas: Replicas) -> float:
        """Generation batches one after another: each starts when the longest response of the one before is there."""
        return float(sum(ends[-1] for ends in self._ends_in_turn(demand, index, replicas)))

    def _ends_in_turn(self, demand: Demand, index: int, replicas: Replicas) -> list[FloatArray]:
        """When parts of the groups of every generation batch are complete, from its begin [s] ``[ENDS]``."""
        key = (demand.keys[index], demand.batch, replicas.key)
        if key not in self._batches:
            parts = generation_batches(Trajectories.from_table(demand.tables[index]), demand.batch)
            self._batches[key] = [group_ends(replicas.serve(part).finish_s, part.group) for part in parts]
        return self._batches[key]

    def _refilled_s(self, demand: Demand, index: int, replicas: Replicas) -> float:
        source = GroupSource(Trajectories.from_table(demand.tables[index]), seed=self.seed + index)
        partial = PartialRollouts(demand.batch.over_provision)
        return partial.steady_s(source, replicas.serve, demand.batch.generated)

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


def group_seconds(finish_s: FloatArray, group: IntArray) -> float:
    """Mean time at which a group's last response is there, all started together [s].

    >>> group_seconds(np.array([1.0, 4.0, 2.0]), np.array([7, 7, 9]))
    3.0
    """
    return float(last_of_groups(group, finish_s)[0].mean())


def simulated_rollout(
    events: RolloutEvents, demand: Demand, replicas: Replicas, layout: Layout, transition_s: float, weight_dtype: str,
    allowed: Allowed,
) -> tuple[RolloutStage, tuple[RolloutResult, ...]]:  # fmt: skip
    """Events: the stage of one pool in every replicate of a demand, and the simulated rollouts behind it.

    ``layout``: of the pool, one row; ``transition_s``, ``weight_dtype``: as in `RolloutStage`; ``allowed``: as in
    `Counted`.
    """
    results, served = events.results(demand, replicas), events.served(demand, replicas)
    n, flow = len(results), Flow.of(demand, allowed)
    groups = [part.group for part in served]
    engine = replicas.cost, replicas.limits, replicas.writers, flow
    steady, runs = refilled(*engine, replicas.readers), None
    if flow.waits is not None and flow.allowed != ONE_BATCH and not replicas.readers:
        runs = ahead(*engine)
    stage = RolloutStage(
        layout=layout.take(np.zeros(n, dtype=np.int64)),
        makespan_s=events.makespans_s(demand, replicas, results),
        steady_s=np.full(n, steady.seconds),
        group_s=np.array([group_seconds(r.finish_s, g) for r, g in zip(results, groups, strict=True)]),
        recompute_s=np.full(n, interrupted_seconds(*engine, steady, replicas.readers)),
        writers=np.full(n, replicas.writers, dtype=np.int64),
        slots=np.full(n, replicas.limits.max_running, dtype=np.int64),
        pace_s=np.tile(replicas.cost.pace_s, (n, 1)),
        transition_s=np.full(n, transition_s),
        weight_dtype=weight_dtype,
        lent_s=events.lent_s(demand, replicas, served, results) if replicas.lent else None,
        ends_s=events.ends_s(demand, replicas, served, results),
        ahead_s=None if runs is None else np.tile(runs.seconds, (n, 1)),
        again_s=None if runs is None else np.tile(runs.again_s, (n, 1)),
    )
    return stage, results
