"""Joint local search over partition, placement and schedule: simulated annealing whose every step is one list pass.

A candidate is a list of cuts between layers, a device per stage and a policy. Most candidates cost microseconds: a
threshold is drawn first (Metropolis), and a candidate falls as soon as its load, or the idle time of one device during
the pass, shows that it will end behind the threshold.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from rlperf.plan.pipeline.list_schedule import ListScheduler, Policy, Scheduled, priorities
from rlperf.plan.pipeline.problem import PipelineProblem
from rlperf.sim.pipeline import StageCosts
from rlperf.sim.pipeline.types import FloatArray


@dataclass(frozen=True)
class Candidate:
    """What the search decides.

    cuts : first layers of stages 1..S-1; placement : device of each stage; policy : how devices choose
    sequence : micro-batches in order of injection
    keys : priorities [s], shape (2, L, M) for F and B of each layer; None: those of the policy. The search hands the
        start times of one schedule down as the keys of the next, so that a small change of the partition keeps the
        order that was learned so far.
    """

    cuts: tuple[int, ...]
    placement: tuple[int, ...]
    policy: Policy
    sequence: tuple[int, ...]
    keys: FloatArray | None = field(default=None, compare=False, repr=False)

    def partition(self, layers: int) -> tuple[int, ...]:
        """Layers of each stage."""
        edges = (0, *self.cuts, layers)
        return tuple(b - a for a, b in itertools.pairwise(edges))


@dataclass(frozen=True)
class Freedom:
    """What the search may change; what it may not stays as the start has it."""

    partition: bool = True
    placement: bool = True
    schedule: bool = True


@dataclass
class Budget:
    """Passes and seconds that are left."""

    passes: int
    deadline: float
    progress: Callable[[float], None] | None = None
    used: int = field(default=0)

    def spend(self) -> bool:
        """Count one pass; False when nothing is left."""
        self.used += 1
        if self.progress is not None and self.used % 128 == 0:
            self.progress(self.used / self.passes)
        return self.used <= self.passes and time.monotonic() < self.deadline


class Evaluator:
    """Turns candidates into schedules for one problem."""

    def __init__(self, problem: PipelineProblem) -> None:
        self.problem = problem
        self.count = problem.microbatches.count
        work = problem.profile.work_s
        q = problem.profile.quadratic_share
        linear, quadratic = float(problem.microbatches.linear.sum()), float(problem.microbatches.quadratic.sum())
        self.layer_load = (work * ((1.0 - q) * linear + q * quadratic)).tolist()
        self.cumulative = [0.0, *np.cumsum(self.layer_load).tolist()]
        self.floor = problem.first_forward_s

    def loads(self, candidate: Candidate) -> list[float]:
        """Work of each device [s]."""
        load = [0.0] * self.problem.devices
        begin = 0.0
        for cut, d in zip((*candidate.cuts, -1), candidate.placement, strict=True):
            end = self.cumulative[cut]
            load[d] += end - begin
            begin = end
        return load

    def quick_bound(self, candidate: Candidate) -> float:
        """No schedule of this partition and placement ends before this [s]: load of a device plus its first arrival."""
        load = self.loads(candidate)
        head = [-1.0] * self.problem.devices
        edges = (0, *candidate.cuts)
        for cut, d in zip(edges, candidate.placement, strict=True):
            if head[d] < 0.0:
                head[d] = self.floor[cut]
        return max(a + max(b, 0.0) for a, b in zip(load, head, strict=True))

    def excess_bytes(self, candidate: Candidate) -> float:
        """How much the devices lack to hold their state and one micro-batch each [bytes]; 0: list passes can run."""
        limit = self.problem.memory_bytes
        if limit is None:
            return 0.0
        need = self.problem.least_bytes(candidate.cuts, candidate.placement)
        return float(np.maximum(need - limit, 0.0).sum())

    def costs(self, candidate: Candidate) -> StageCosts:
        """Stage costs of a candidate."""
        return self.problem.costs(candidate.cuts)

    def evaluate(self, candidate: Candidate, limit_s: float = 1e30) -> Scheduled | None:
        """One list pass; None where it ends behind ``limit_s`` or does not fit the memory."""
        if self.quick_bound(candidate) >= limit_s:
            return None
        costs = self.costs(candidate)
        policy, edges = candidate.policy, (*candidate.cuts, self.problem.profile.layers)
        if candidate.keys is None:
            rank = np.empty(self.count)
            rank[list(candidate.sequence)] = np.arange(self.count)
            keys = priorities(costs, policy, rank, self.problem.devices)
        else:
            keys = np.stack([candidate.keys[0, [0, *edges[:-1]]], candidate.keys[1, np.array(edges) - 1]])
        scheduler = ListScheduler(
            costs,
            candidate.placement,
            self.problem.devices,
            self.problem.memory_bytes,
            policy.merged,
            self.problem.overlap,
        )
        return scheduler.run(keys, policy.patience, list(candidate.sequence), limit_s)

    def inherit(self, candidate: Candidate, found: Scheduled) -> FloatArray:
        """Start times of a schedule, for every layer of a stage those of the stage: keys for what comes next."""
        size = (len(candidate.cuts) + 1) * self.count
        starts = np.zeros(3 * size)
        for ids, times in zip(found.ids, found.start_s, strict=True):
            starts[ids] = times
        edges = (0, *candidate.cuts, self.problem.profile.layers)
        return np.repeat(starts[: 2 * size].reshape(2, -1, self.count), np.diff(edges), axis=1)


class Annealer:
    """Simulated annealing from one start."""

    def __init__(self, evaluator: Evaluator, freedom: Freedom, budget: Budget, rng: random.Random) -> None:
        self.evaluator, self.freedom, self.budget, self.rng = evaluator, freedom, budget, rng
        self.problem = evaluator.problem

    def run(self, start: Candidate, passes: int, hot: float = 8e-3, cold: float = 1e-4) -> tuple[Candidate, float]:
        """Anneal for ``passes`` passes; temperatures as shares of the makespan. Returns the best and its makespan."""
        first = self.evaluator.evaluate(start)
        if first is None:
            return start, math.inf
        here, cost = start, first.makespan_s
        best, best_cost = here, first.makespan_s
        goal = self.problem.work_bound_s
        done = 0
        tries = 0
        while done < passes and tries < 30 * passes:
            tries += 1
            share = done / passes
            temperature = best_cost * hot * (cold / hot) ** share
            threshold = cost - temperature * math.log(1.0 - self.rng.random())
            move = self.neighbour(here)
            if move is not None and self.rng.random() < 0.5:
                move = self.rebalance(move, 20)
            if move is not None and self.freedom.schedule and self.rng.random() < 0.2:
                move = self._nudge(move)
            if move is None or self.evaluator.quick_bound(move) >= threshold:
                continue
            done += 1
            if not self.budget.spend():
                break
            found = self.evaluator.evaluate(move, threshold)
            if found is None:
                continue
            here, cost = move, found.makespan_s
            if self.freedom.schedule:
                here = replace(move, keys=self.evaluator.inherit(move, found))
            if cost < best_cost * (1.0 - 1e-12):
                best, best_cost = move, cost
                if best_cost <= goal * (1.0 + 1e-9):
                    break
        return best, best_cost

    def rebalance(self, start: Candidate, steps: int) -> Candidate:
        """Small changes of partition and placement that lower the quick bound, without any pass."""
        moves = [self._shift, self._shift, self._shift_two] if self.freedom.partition and start.cuts else []
        moves += [self._swap, self._swap] if self.freedom.placement else []
        if not moves:
            return start
        here, bound = start, self.evaluator.quick_bound(start)
        for _ in range(steps):
            move = self.rng.choice(moves)(here)
            if move is not None:
                value = self.evaluator.quick_bound(move)
                if value <= bound:
                    here, bound = move, value
        return here

    def make_room(self, start: Candidate, steps: int) -> Candidate:
        """Small changes of partition and placement until state and one micro-batch fit every device."""
        moves = [self._shift, self._shift, self._shift_two] if self.freedom.partition and start.cuts else []
        moves += [self._swap, self._reassign] if self.freedom.placement else []
        here, lack = start, self.evaluator.excess_bytes(start)
        for _ in range(steps if moves else 0):
            if lack <= 0.0:
                break
            move = self.rng.choice(moves)(here)
            if move is not None:
                value = self.evaluator.excess_bytes(move)
                if value <= lack:
                    here, lack = move, value
        return here

    def neighbour(self, here: Candidate) -> Candidate | None:
        """A random small change."""
        rng, free = self.rng, self.freedom
        moves = []
        if free.partition and here.cuts:
            moves += [self._shift, self._shift, self._shift_two]
        if free.placement:
            moves += [self._swap, self._reassign]
        if free.partition and free.placement:
            moves += [self._split, self._merge]
        if free.schedule:
            moves += [self._policy, self._nudge]
        if not self.problem.microbatches.identical:
            moves += [self._resequence]
        return rng.choice(moves)(here) if moves else None

    def _shift(self, here: Candidate) -> Candidate | None:
        cuts = list(here.cuts)
        i = self.rng.randrange(len(cuts))
        cuts[i] += self.rng.choice((-2, -1, -1, 1, 1, 2))
        return self._with_cuts(here, cuts)

    def _shift_two(self, here: Candidate) -> Candidate | None:
        cuts = list(here.cuts)
        for i in (self.rng.randrange(len(cuts)), self.rng.randrange(len(cuts))):
            cuts[i] += self.rng.choice((-1, 1))
        return self._with_cuts(here, cuts)

    def _with_cuts(self, here: Candidate, cuts: list[int]) -> Candidate | None:
        edges = (0, *cuts, self.problem.profile.layers)
        if any(a >= b for a, b in itertools.pairwise(edges)):
            return None
        return replace(here, cuts=tuple(cuts))

    def _swap(self, here: Candidate) -> Candidate | None:
        placement = list(here.placement)
        i, j = self.rng.randrange(len(placement)), self.rng.randrange(len(placement))
        if placement[i] == placement[j]:
            return None
        placement[i], placement[j] = placement[j], placement[i]
        return replace(here, placement=tuple(placement))

    def _reassign(self, here: Candidate) -> Candidate | None:
        placement = list(here.placement)
        i, d = self.rng.randrange(len(placement)), self.rng.randrange(self.problem.devices)
        if placement[i] == d or placement.count(d) >= self.problem.stages_per_device:
            return None
        placement[i] = d
        return replace(here, placement=tuple(placement))

    def _split(self, here: Candidate) -> Candidate | None:
        edges = (0, *here.cuts, self.problem.profile.layers)
        i, d = self.rng.randrange(len(edges) - 1), self.rng.randrange(self.problem.devices)
        if edges[i + 1] - edges[i] < 2 or here.placement.count(d) >= self.problem.stages_per_device:
            return None
        cut = self.rng.randrange(edges[i] + 1, edges[i + 1])
        pair = [here.placement[i], d] if self.rng.random() < 0.5 else [d, here.placement[i]]
        placement = (*here.placement[:i], *pair, *here.placement[i + 1 :])
        return replace(here, cuts=tuple(sorted((*here.cuts, cut))), placement=placement)

    def _merge(self, here: Candidate) -> Candidate | None:
        if len(here.cuts) < 1:
            return None
        i = self.rng.randrange(len(here.cuts))
        gone = i + self.rng.randrange(2)
        placement = (*here.placement[:gone], *here.placement[gone + 1 :])
        if len(placement) < self.problem.devices:
            return None
        return replace(here, cuts=(*here.cuts[:i], *here.cuts[i + 1 :]), placement=placement)

    def _policy(self, here: Candidate) -> Candidate | None:
        policy = here.policy
        if here.keys is None and self.rng.random() < 0.5:
            return replace(here, policy=replace(policy, urgency=policy.urgency * math.exp(self.rng.gauss(0.0, 0.3))))
        patience = min(1.0, abs(policy.patience + self.rng.gauss(0.0, 0.15)))
        return replace(here, policy=replace(policy, patience=patience))

    def _nudge(self, here: Candidate) -> Candidate | None:
        """Shift the keys of one operation, of one micro-batch, or of one stage."""
        if here.keys is None:
            return self._policy(here)
        keys = here.keys.copy()
        shift = self.rng.gauss(0.0, 0.5) * self.problem.period_s
        edges = (0, *here.cuts, self.problem.profile.layers)
        kind, m, stage = self.rng.randrange(2), self.rng.randrange(keys.shape[2]), self.rng.randrange(len(edges) - 1)
        layers = slice(edges[stage], edges[stage + 1])
        what = self.rng.randrange(3)
        if what == 0:
            keys[kind, layers, m] += shift
        elif what == 1:
            keys[kind, :, m] += shift
        else:
            keys[kind, layers] += shift
        return replace(here, keys=keys)

    def _resequence(self, here: Candidate) -> Candidate | None:
        """Two micro-batches change places."""
        sequence = list(here.sequence)
        i, j = self.rng.randrange(len(sequence)), self.rng.randrange(len(sequence))
        if i == j:
            return None
        keys = here.keys
        if keys is not None:
            keys = keys.copy()
            keys[:, :, [sequence[i], sequence[j]]] = keys[:, :, [sequence[j], sequence[i]]]
        sequence[i], sequence[j] = sequence[j], sequence[i]
        return replace(here, sequence=tuple(sequence), keys=keys)
