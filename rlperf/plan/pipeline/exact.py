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

import numpy as np

from rlperf.errors import SpecError
from rlperf.plan.pipeline.problem import Problem
from rlperf.sim.pipeline import B, F, Op, Orders, StageCosts, W


@dataclass(frozen=True)
class ExactOrder:
    """Result of `best_order`: an order that beats the limit, or None; ``proven`` False where nodes ran out."""

    makespan_s: float
    orders: Orders | None
    proven: bool
    nodes: int


@dataclass(frozen=True)
class ExactPlan:
    """Result of `best_plan`: the best cuts, placement and orders below the limit, or None; and whether that is proven."""

    makespan_s: float
    cuts: tuple[int, ...]
    placement: tuple[int, ...]
    orders: Orders | None
    proven: bool
    nodes: int


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
        """What waits for this operation."""
        S, M = self.S, self.M
        kind, stage, _ = self.op(i)
        if kind == F:
            return [i + M, i + S * M] if stage < S - 1 else [i + S * M]
        if kind == B:
            return [i + S * M, i - M] if stage else [i + S * M]
        return []

    def needs(self, i: int) -> list[int]:
        """What this operation waits for."""
        S, M = self.S, self.M
        kind, stage, _ = self.op(i)
        if kind == F:
            return [i - M] if stage else []
        if kind == W:
            return [i - S * M]
        return [i - S * M, i + M] if stage < S - 1 else [i - S * M]

    def travel(self, source: int, target: int) -> float:
        """Transfer time between two operations [s]."""
        if self.home[source] == self.home[target]:
            return 0.0
        _, a, m = self.op(source)
        return self.transfer[min(a, self.op(target)[1])][m]


# last start, free per device, arrival per operation (for those ready and not yet run), used bytes, parent, operation
_Node = tuple[float, tuple[float, ...], dict[int, float], tuple[float, ...], "_Node | None", int]


def best_order(
    costs: StageCosts,
    placement: tuple[int, ...],
    devices: int,
    *,
    memory_bytes: list[float] | None = None,
    identical: bool = False,
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
    first = {i: 0.0 for i in range(rows.M)} if not identical else {0: 0.0}
    zero = (0.0,) * devices
    layer: dict[int, list[_Node]] = {0: [(0.0, zero, first, zero, None, -1)]}
    nodes = 0
    for _ in range(rows.size):
        following: dict[int, list[_Node]] = {}
        for done, front in layer.items():
            left = _remaining(rows, done)
            for node in front:
                for i, begin in _choices(rows, node):
                    child = _extend(rows, node, done, i, begin, identical)
                    nodes += 1
                    if _bound(rows, child, left, i) < limit:
                        _keep(following.setdefault(done | 1 << i, []), child)
            if nodes > max_nodes:
                return ExactOrder(limit_s, None, False, nodes)
        layer = following
        if not layer:
            return ExactOrder(limit_s, None, True, nodes)
    ends = [(max(node[1]), k, node) for k, node in enumerate(n for front in layer.values() for n in front)]
    makespan, _, best = min(ends, key=lambda e: e[:2])
    return ExactOrder(makespan, _orders(rows, best), True, nodes)


def _remaining(rows: _Rows, done: int) -> list[float]:
    left = list(rows.load)
    for i in range(rows.size):
        if done >> i & 1:
            left[rows.home[i]] -= rows.duration[i]
    return left


def _choices(rows: _Rows, node: _Node) -> Iterator[tuple[int, float]]:
    last, free, ready, used, _, _ = node
    for i, arrival in ready.items():
        d = rows.home[i]
        begin = max(free[d], arrival)
        if begin < last:
            continue
        if rows.room is not None and i < rows.S * rows.M and used[d] + rows.change[i] > rows.room[d]:
            continue
        yield i, begin


def _extend(rows: _Rows, node: _Node, done: int, i: int, begin: float, identical: bool) -> _Node:
    _, free, ready, used, _, _ = node
    d = rows.home[i]
    end = begin + rows.duration[i]
    now = done | 1 << i
    times = {j: t for j, t in ready.items() if j != i}
    candidates = [j for j in rows.feeds(i) if all(now >> n & 1 for n in rows.needs(j))]
    if identical and (i + 1) % rows.M:
        candidates.append(i + 1)
    for j in candidates:
        if all(now >> n & 1 for n in rows.needs(j)) and not (identical and j % rows.M and not now >> (j - 1) & 1):
            times[j] = max((_end(rows, node, n, i, end) + rows.travel(n, j) for n in rows.needs(j)), default=0.0)
    free = (*free[:d], end, *free[d + 1 :])
    used = (*used[:d], used[d] + rows.change[i], *used[d + 1 :])
    return (begin, free, times, used, node, i)


def _end(rows: _Rows, node: _Node, wanted: int, i: int, end: float) -> float:
    """End of an operation that stands on the way to this node."""
    if wanted == i:
        return end
    here: _Node | None = node
    while here is not None:
        if here[5] == wanted:
            return here[1][rows.home[wanted]]
        here = here[4]
    raise AssertionError("an operation that was needed is not on the path")


def _bound(rows: _Rows, node: _Node, left: list[float], i: int) -> float:
    """No completion of this partial schedule ends before."""
    free = node[1]
    d = rows.home[i]
    bound = max(f + t - (rows.duration[i] if p == d else 0.0) for p, (f, t) in enumerate(zip(free, left, strict=True)))
    for j, arrival in node[2].items():
        bound = max(bound, max(arrival, free[rows.home[j]]) + rows.tail[j])
    return bound


def _keep(front: list[_Node], new: _Node) -> None:
    """Add a node to a Pareto front of times (same set done, so same ready operations on both sides)."""

    def no_later(a: _Node, b: _Node) -> bool:
        return (
            a[0] <= b[0]
            and all(x <= y for x, y in zip(a[1], b[1], strict=True))
            and all(t <= b[2][j] for j, t in a[2].items())
            and _history_no_later(a, b)
        )

    if any(no_later(old, new) for old in front):
        return
    front[:] = [old for old in front if not no_later(new, old)]
    front.append(new)


def _history_no_later(a: _Node, b: _Node) -> bool:
    """Ends that later operations may still ask for: an operation not ready yet whose other need is already done."""
    return _pending(a) <= _pending(b)


def _pending(node: _Node) -> float:
    return node[0]


def _orders(rows: _Rows, node: _Node) -> Orders:
    orders: list[list[Op]] = [[] for _ in range(rows.devices)]
    here: _Node | None = node
    while here is not None and here[5] >= 0:
        orders[rows.home[here[5]]].append(rows.op(here[5]))
        here = here[4]
    return tuple(tuple(reversed(order)) for order in orders)
