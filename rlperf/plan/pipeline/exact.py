"""Exact answers for small instances: every partition and placement, dynamic programming over the orders.

Operations are scheduled in the order of their start times. What has been scheduled so far (a set) fixes what is left,
and the memory in use; only times differ. So of two ways to the same set the one whose times are all no later is
enough, and a dynamic program over sets with a Pareto front of times in each is exact. A partial schedule falls when its
bound reaches the best makespan known. Equal micro-batches are run in their order in every row of operations: an
exchange argument shows that nothing is lost (docs/theory/pipeline.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np

from rlperf.errors import SpecError
from rlperf.plan.pipeline.problem import PipelineProblem
from rlperf.sim.pipeline import B, F, Op, Orders, StageCosts, W

COMPARED = 8
"""So many schedules of the same set that a new one is compared with take as long as a node."""


@dataclass(frozen=True)
class ExactOrder:
    """Result of `best_order`: an order that beats the limit, or None; ``proven`` False where nodes ran out."""

    makespan_s: float
    orders: Orders | None
    proven: bool
    nodes: int


@dataclass(frozen=True)
class ExactPlan:
    """Result of `best_plan`: the best cuts, placement and orders below the limit, or None; whether that is proven."""

    makespan_s: float
    cuts: tuple[int, ...]
    placement: tuple[int, ...]
    orders: Orders | None
    proven: bool


class _Rows:
    """Operations as ids (kind * S + stage) * M + microbatch, with what a node of the search needs to know of each."""

    def __init__(self, costs: StageCosts, placement: tuple[int, ...], devices: int, memory: list[float] | None) -> None:
        S, M = costs.stages, costs.microbatches
        self.S, self.M, self.size = S, M, 3 * S * M
        self.devices = devices
        parts = [costs.forward_s, costs.backward_input_s, costs.backward_weight_s]
        self.duration: list[float] = np.stack(parts).ravel().tolist()
        self.home = [placement[(i // M) % S] for i in range(self.size)]
        self.transfer: list[list[float]] = costs.transfer_s.tolist()
        act, kept = costs.activation_bytes, costs.weight_input_bytes
        self.change: list[float] = np.stack([act, kept - act, -kept]).ravel().tolist()
        state = [float(sum(costs.state_bytes[s] for s in range(S) if placement[s] == d)) for d in range(devices)]
        self.room = None if memory is None else [m * (1 + 1e-9) - s for m, s in zip(memory, state, strict=True)]
        # The least time from the start of an operation to the end of everything that hangs on it.
        self.tail = [0.0] * self.size
        for i in sorted(range(self.size), key=self._depth, reverse=True):
            self.tail[i] = self.duration[i] + max((self.tail[j] for j in self.feeds(i)), default=0.0)
        self.load = [sum(t for t, d in zip(self.duration, self.home, strict=True) if d == p) for p in range(devices)]

    def op(self, i: int) -> Op:
        row, m = divmod(i, self.M)
        return (row // self.S, row % self.S, m)

    def _depth(self, i: int) -> int:
        kind, stage, _ = self.op(i)
        return stage if kind == F else 2 * self.S - stage + (kind == W)

    def feeds(self, i: int) -> list[int]:
        """What may start once this one is through: B(s) comes after B(s + 1), so F(s) need not be asked again."""
        S, M = self.S, self.M
        kind, stage, _ = self.op(i)
        if kind == F:
            return [i + M] if stage < S - 1 else [i + S * M]
        if kind == B:
            return [i + S * M, i - M] if stage else [i + S * M]
        return []

    def travel(self, source: int, target: int) -> float:
        """Transfer time between two operations [s]."""
        if self.home[source] == self.home[target]:
            return 0.0
        _, a, m = self.op(source)
        return self.transfer[min(a, self.op(target)[1])][m]


@dataclass(frozen=True, slots=True)
class _Node:
    """A partial schedule: latest start, end of each device, arrival of what is ready, bytes in use, where from."""

    last: float
    free: tuple[float, ...]
    ready: dict[int, float]
    used: tuple[float, ...]
    parent: _Node | None
    op: int


def best_order(
    costs: StageCosts,
    placement: tuple[int, ...],
    devices: int,
    *,
    memory_bytes: list[float] | None = None,
    identical: bool,
    limit_s: float = float("inf"),
    max_nodes: int = 200_000,
) -> ExactOrder:
    """The order with the least makespan for fixed stages and devices, if it is below ``limit_s``.

    Transfers are taken to overlap and not to queue for their link; with equal transfers shorter than every operation
    they never do.
    """
    rows = _Rows(costs, placement, devices, memory_bytes)
    limit = limit_s * (1.0 - 1e-9) if np.isfinite(limit_s) else limit_s
    if max(rows.load) >= limit:
        return ExactOrder(limit_s, None, True, 0)
    zero = (0.0,) * devices
    layer = {0: [_Node(0.0, zero, dict.fromkeys(range(rows.M), 0.0), zero, None, -1)]}
    nodes = 0
    for _ in range(rows.size):
        following: dict[int, list[_Node]] = {}
        for done, front in layer.items():
            left = _remaining(rows, done)
            for node in front:
                for i, begin in _choices(rows, node, done, identical):
                    child = _extend(rows, node, i, begin)
                    nodes += 1
                    if _bound(rows, child, left, i) < limit:
                        beside = following.setdefault(done | 1 << i, [])
                        nodes += len(beside) // COMPARED
                        _keep(beside, child)
                if nodes > max_nodes:
                    return ExactOrder(limit_s, None, False, nodes)
        layer = following
        if not layer:
            return ExactOrder(limit_s, None, True, nodes)
    ends = [(max(node.free), k, node) for k, node in enumerate(n for front in layer.values() for n in front)]
    makespan, _, best = min(ends, key=lambda e: e[:2])
    return ExactOrder(makespan, _orders(rows, best), True, nodes)


def _remaining(rows: _Rows, done: int) -> list[float]:
    left = list(rows.load)
    for i in range(rows.size):
        if done >> i & 1:
            left[rows.home[i]] -= rows.duration[i]
    return left


def _choices(rows: _Rows, node: _Node, done: int, identical: bool) -> Iterator[tuple[int, float]]:
    """What may start next, no earlier than what started last."""
    for i, arrival in node.ready.items():
        if identical and i % rows.M and not done >> (i - 1) & 1:
            continue
        d = rows.home[i]
        begin = max(node.free[d], arrival)
        full = rows.room is not None and node.used[d] + rows.change[i] > rows.room[d]
        if begin >= node.last and not (full and i < rows.S * rows.M):
            yield i, begin


def _extend(rows: _Rows, node: _Node, i: int, begin: float) -> _Node:
    d = rows.home[i]
    end = begin + rows.duration[i]
    ready = {j: t for j, t in node.ready.items() if j != i}
    for j in rows.feeds(i):
        ready[j] = end + rows.travel(i, j)
    free = (*node.free[:d], end, *node.free[d + 1 :])
    used = (*node.used[:d], node.used[d] + rows.change[i], *node.used[d + 1 :])
    return _Node(begin, free, ready, used, node, i)


def _bound(rows: _Rows, node: _Node, left: list[float], i: int) -> float:
    """No completion of this partial schedule ends before."""
    free, d = node.free, rows.home[i]
    bound = max(f + t - (rows.duration[i] if p == d else 0.0) for p, (f, t) in enumerate(zip(free, left, strict=True)))
    for j, arrival in node.ready.items():
        bound = max(bound, max(arrival, free[rows.home[j]]) + rows.tail[j])
    return bound


def _keep(front: list[_Node], new: _Node) -> None:
    """Add a node to a Pareto front of times; the same set is done, so the same operations are ready."""

    def no_later(a: _Node, b: _Node) -> bool:
        return (
            a.last <= b.last
            and all(x <= y for x, y in zip(a.free, b.free, strict=True))
            and all(t <= b.ready[j] for j, t in a.ready.items())
        )

    if any(no_later(old, new) for old in front):
        return
    front[:] = [old for old in front if not no_later(new, old)]
    front.append(new)


def _orders(rows: _Rows, node: _Node) -> Orders:
    orders: list[list[Op]] = [[] for _ in range(rows.devices)]
    here: _Node | None = node
    while here is not None and here.op >= 0:
        orders[rows.home[here.op]].append(rows.op(here.op))
        here = here.parent
    return tuple(tuple(reversed(order)) for order in orders)


def structures(problem: PipelineProblem, stages: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cuts and placements with this many stages, devices named in the order of their first stage where all are alike.

    Neighbouring stages of one device stay apart: their operations may then interleave.
    """
    alike = problem.memory_bytes is None or bool(np.all(problem.memory_bytes == problem.memory_bytes[0]))
    for cuts in combinations(range(1, problem.profile.layers), stages - 1):
        for placement in _placements(stages, problem.devices, problem.stages_per_device, alike):
            yield cuts, placement


def _placements(stages: int, devices: int, most: int, alike: bool) -> Iterator[tuple[int, ...]]:
    def grow(head: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(head) == stages:
            yield head
            return
        names = min(devices, max(head, default=-1) + 2) if alike else devices
        for d in range(names):
            if head.count(d) < most:
                yield from grow((*head, d))

    return grow(())


def _stage_numbers(problem: PipelineProblem) -> range:
    layers = problem.profile.layers
    if problem.stages_per_device >= layers:
        return range(layers, layers + 1)
    return range(1, min(layers, problem.devices * problem.stages_per_device) + 1)


def structure_count(problem: PipelineProblem) -> float:
    """At most how many cuts and placements `best_plan` looks at, before devices are named."""
    layers = problem.profile.layers
    return float(sum(comb(layers - 1, s - 1) * problem.devices**s for s in _stage_numbers(problem)))


def best_plan(problem: PipelineProblem, limit_s: float, *, max_nodes: int = 400_000) -> ExactPlan:
    """The optimum over all partitions, placements and orders, if it is below ``limit_s``.

    One stage per layer is enough where a device may hold that many: a plan with longer stages is one with shorter ones
    in which neighbours on one device run back to back. Otherwise every number of stages is looked at.

    Raises
    ------
    SpecError : transfers that hold up the sender are not covered
    """
    travels = problem.latency_s > 0.0 or problem.bandwidth_bytes_per_s != float("inf")
    if travels and not problem.overlap:
        raise SpecError("the exact search covers overlapping transfers only")
    heads = problem.first_forward_s
    memory = None if problem.memory_bytes is None else [float(m) for m in problem.memory_bytes]
    cumulative = np.concatenate([[0.0], np.cumsum(problem.layer_load_s)])
    ranked = []
    everything = (pair for stages in _stage_numbers(problem) for pair in structures(problem, stages))
    for cuts, placement in everything:
        edges = (0, *cuts, problem.profile.layers)
        load, head = [0.0] * problem.devices, [-1.0] * problem.devices
        for a, b, d in zip(edges, edges[1:], placement, strict=False):
            load[d] += float(cumulative[b] - cumulative[a])
            head[d] = heads[a] if head[d] < 0.0 else head[d]
        ranked.append((max(x + max(h, 0.0) for x, h in zip(load, head, strict=True)), cuts, placement))
    ranked.sort()
    best = ExactPlan(limit_s, (), (), None, True)
    nodes = 0
    for bound, cuts, placement in ranked:
        if bound >= best.makespan_s * (1.0 - 1e-9):
            break
        found = best_order(
            problem.costs(cuts),
            placement,
            problem.devices,
            memory_bytes=memory,
            identical=problem.microbatches.identical,
            limit_s=best.makespan_s,
            max_nodes=max_nodes - nodes,
        )
        nodes += found.nodes
        if not found.proven:
            return ExactPlan(best.makespan_s, best.cuts, best.placement, best.orders, False)
        if found.orders is not None:
            best = ExactPlan(found.makespan_s, cuts, placement, found.orders, True)
    return best
