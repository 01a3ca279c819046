"""One pass of list scheduling: an order for every device, given partition, placement and priorities.

Devices take what is ready in order of priority; W fills what would be idle. Two things make it better than plain
greedy: a device may wait for a more urgent operation that is known to arrive soon (``patience``), and under a memory
limit a forward starts only where the oldest micro-batch that still has forwards to run keeps the room it needs, so
that no choice of priorities can lock the pipeline up.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from rlperf.sim.pipeline import B, F, Op, Orders, StageCosts, W
from rlperf.sim.pipeline.types import FloatArray

_LAST = 1e30
_WAIT, _NOTHING = -2, -1


@dataclass(frozen=True)
class Policy:
    """How a device chooses.

    urgency : weight of the age of a micro-batch against the position of the operation on its path, in units of the
        period; large: the oldest micro-batch first (depth first, little memory), small: forwards first (breadth first)
    patience : an operation waits where a more urgent one arrives within this share of its duration [-]
    merged : B and W run as one
    """

    urgency: float = 1.0
    patience: float = 0.3
    merged: bool = False


@dataclass(frozen=True)
class Scheduled:
    """What one pass found: makespan [s], ids (kind * S + stage) * M + microbatch in order of start per device."""

    makespan_s: float
    ids: tuple[list[int], ...]
    start_s: tuple[list[float], ...]

    def orders(self, stages: int, microbatches: int) -> Orders:
        """The ids as operations."""

        def op(i: int) -> Op:
            row, m = divmod(i, microbatches)
            return (row // stages, row % stages, m)

        return tuple(tuple(op(i) for i in ids) for ids in self.ids)


def priorities(costs: StageCosts, policy: Policy, rank: FloatArray, devices: int) -> FloatArray:
    """Lower runs first: age of the micro-batch times the period plus the position on its path, shape (2, S, M).

    position of F(s, m) = sum of forwards before stage s; of B(s, m) = all forwards + backwards of the stages behind s.
    period = total work / (P M): the time from one micro-batch to the next in a pipeline without bubbles [s].

    rank : place of each micro-batch in the order of injection, shape (M,)
    """
    forward, backward = costs.forward_s, costs.backward_input_s
    if policy.merged:
        backward = backward + costs.backward_weight_s
    before = np.cumsum(forward, axis=0) - forward
    behind = np.cumsum(backward[::-1], axis=0)[::-1] - backward
    period = float(costs.work_s.sum()) / (devices * costs.microbatches)
    age = policy.urgency * period * rank
    return np.stack([before + age, forward.sum(axis=0) + behind + age])


class ListScheduler:
    """Costs and placement unpacked into plain lists once; `run` is then one pass."""

    def __init__(
        self,
        costs: StageCosts,
        placement: tuple[int, ...],
        devices: int,
        memory_bytes: FloatArray | None = None,
        merged: bool = False,
        overlap: bool = True,
    ) -> None:
        self.overlap = overlap
        self.stages, self.count, self.devices = costs.stages, costs.microbatches, devices
        self.merged = merged
        backward = costs.backward_input_s + costs.backward_weight_s if merged else costs.backward_input_s
        self.duration: list[float] = np.stack([costs.forward_s, backward, costs.backward_weight_s]).ravel().tolist()
        self.home = list(placement)
        work = costs.work_s.tolist()
        self.load = [0.0] * devices
        for stage, d in enumerate(placement):
            self.load[d] += work[stage]
        crossing = np.array([a != b for a, b in itertools.pairwise(placement)], dtype=bool)
        self.transfer: list[float] | None = None
        if crossing.any() and bool((costs.transfer_s[crossing] > 0.0).any()):
            self.transfer = (costs.transfer_s * crossing[:, None]).ravel().tolist()
        size = self.stages * self.count
        # what an operation lets run next, and the edge that its result crosses: forwards down the stages, backwards up
        down = [(i + self.count, i) for i in range(size - self.count)]
        turn = [(i + size, i) for i in range(size - self.count, size)]
        up = [(i - self.count, i - self.count - size) for i in range(size + self.count, 2 * size)]
        ends = [(-1, -1)]
        edges = [*down, *turn, *ends * self.count, *up, *ends * size]
        homes = [stage for stage in placement for _ in range(self.count)] * 2
        self.followed = [(after, homes[after], edge) for after, edge in edges]
        self.room: list[float] | None = None
        if memory_bytes is not None:
            kept = np.zeros_like(costs.weight_input_bytes) if merged else costs.weight_input_bytes
            self._limit(costs, kept, placement, memory_bytes)

    def _limit(self, costs: StageCosts, kept: FloatArray, placement: tuple[int, ...], memory: FloatArray) -> None:
        home = np.asarray(placement)
        state = np.array([costs.state_bytes[home == d].sum() for d in range(self.devices)])
        whole = np.array([costs.activation_bytes[home == d].sum(axis=0) for d in range(self.devices)]).max(axis=1)
        slack = 1e-9 * memory + 1e-9
        room = memory - state + slack
        self.held: list[float] = costs.activation_bytes.ravel().tolist()
        self.kept: list[float] = kept.ravel().tolist()
        self.whole: list[float] = whole.tolist()
        self.room = room.tolist()
        self.fits = bool(np.all(whole <= room))

    def run(self, keys: FloatArray, patience: float, sequence: list[int], limit_s: float = _LAST) -> Scheduled | None:
        """One pass; None where it can no longer end before ``limit_s`` or one micro-batch alone breaks the memory."""
        if self.room is not None and not self.fits:
            return None
        spare = [limit_s - load for load in self.load]  # idle time each device can still afford
        if min(spare) <= 0.0:
            return None
        queues = _Queues(self, keys.ravel().tolist(), patience, sequence)
        duration, take, followed, transfer = self.duration, queues.take, self.followed, self.transfer
        free = [0.0] * self.devices
        ids: tuple[list[int], ...] = tuple([] for _ in range(self.devices))
        starts: tuple[list[float], ...] = tuple([] for _ in range(self.devices))
        left = self.stages * self.count * (2 if self.merged else 3)
        events, link = [(0.0, self.home[0])], dict[tuple[int, int], float]()
        makespan = 0.0
        while events:
            now, d = heappop(events)
            if now < free[d]:
                continue
            op = take(now, d)
            if op < 0:
                if op == _WAIT:
                    heappush(events, (queues.future[d][0][0], d))
                continue
            if now > free[d]:
                spare[d] -= now - free[d]
                if spare[d] <= 0.0:
                    return None
            end = now + duration[op]
            free[d] = end
            ids[d].append(op)
            starts[d].append(now)
            left -= 1
            if end > makespan:
                makespan = end
            after, target, edge = followed[op]
            if after >= 0:
                arrival = end
                if transfer is not None and target != d:
                    arrival = max(end, link.get((d, target), 0.0)) + transfer[edge]
                    link[d, target] = arrival
                    if not self.overlap:
                        end = free[d] = arrival
                heappush(queues.future[target], (arrival, after))
                if target != d:
                    heappush(events, (arrival if arrival > free[target] else free[target], target))
            heappush(events, (end, d))
        return Scheduled(makespan, ids, starts) if left == 0 else None


class _Queues:
    """What waits on each device in one pass: forwards and backwards by priority, others on their way, and W.

    ready : (priority, operation) of what may start, heap of each device
    future : (arrival [s], operation) of what is on its way, likewise
    weights : W in the order in which their backwards ran, of which ``taken`` have run
    """

    def __init__(self, scheduler: ListScheduler, key: list[float], patience: float, sequence: list[int]) -> None:
        self.key, self.patience, self.duration = key, patience, scheduler.duration
        self.merged, self.size = scheduler.merged, scheduler.stages * scheduler.count
        self.memory = None if scheduler.room is None else _Memory(scheduler, sequence)
        self.ready: list[list[tuple[float, int]]] = [[] for _ in range(scheduler.devices)]
        self.future: list[list[tuple[float, int]]] = [[] for _ in range(scheduler.devices)]
        self.weights: list[list[int]] = [[] for _ in range(scheduler.devices)]
        self.taken = [0] * scheduler.devices
        self.future[scheduler.home[0]] = [(0.0, m) for m in range(scheduler.count)]

    def take(self, now: float, d: int) -> int:
        """The operation that device ``d`` starts at ``now`` [s]; `_WAIT` for the next arrival, `_NOTHING` to do."""
        key, memory, coming, heap = self.key, self.memory, self.future[d], self.ready[d]
        while coming and coming[0][0] <= now:
            op = heappop(coming)[1]
            heappush(heap, (key[op], op))
        op = -1
        if heap:
            urgent, op = heap[0] if memory is None else memory.choose(d, heap)
            if op >= 0 and coming:
                arrival, other = coming[0]
                if key[other] < urgent and arrival - now < self.patience * self.duration[op]:
                    return _WAIT
        if op >= 0:
            if memory is None:
                heappop(heap)
            else:
                heap.remove((urgent, op))
                heapify(heap)
        else:
            queue = self.weights[d]
            if self.taken[d] == len(queue):
                return _WAIT if coming else _NOTHING
            op = queue[self.taken[d]]
            if coming and coming[0][0] - now < self.patience * self.duration[op]:
                return _WAIT
            self.taken[d] += 1
        if not self.merged and self.size <= op < 2 * self.size:
            self.weights[d].append(op + self.size)
        if memory is not None:
            memory.record(d, op)
        return op


class _Memory:
    """Who may start a forward: used bytes of each device, and of which the younger micro-batches hold how much."""

    def __init__(self, scheduler: ListScheduler, sequence: list[int]) -> None:
        assert scheduler.room is not None
        self.s = scheduler
        self.room = scheduler.room
        self.used = [0.0] * scheduler.devices
        self.by = [[0.0] * scheduler.count for _ in range(scheduler.devices)]
        self.forwards = [0] * scheduler.devices
        for d in scheduler.home:
            self.forwards[d] += 1
        self.remaining = [[n] * scheduler.count for n in self.forwards]
        self.sequence = sequence
        self.rank = [0] * scheduler.count
        for place, m in enumerate(sequence):
            self.rank[m] = place
        self.oldest = [0] * scheduler.devices  # place of the oldest micro-batch with forwards to run

    def choose(self, d: int, heap: list[tuple[float, int]]) -> tuple[float, int]:
        """The most urgent operation that the memory allows; (0, -1) if none."""
        size = self.s.stages * self.s.count
        first = heap[0]
        if first[1] >= size or self.allows(d, first[1]):
            return first
        for entry in sorted(heap)[1:]:
            if entry[1] >= size or self.allows(d, entry[1]):
                return entry
        return (0.0, -1)

    def allows(self, d: int, op: int) -> bool:
        """Room for this forward, and for all of the oldest unfinished micro-batch beside everything younger."""
        act = self.s.held[op]
        if self.used[d] + act > self.room[d]:
            return False
        place, rank = self.oldest[d], self.rank
        if rank[op % self.s.count] <= place:
            return True
        younger = sum(held for m, held in enumerate(self.by[d]) if rank[m] > place)
        return younger + act + self.s.whole[d] <= self.room[d]

    def record(self, d: int, op: int) -> None:
        """Take or give back what the operation holds; a device runs one at a time, so its end precedes the next."""
        size, count = self.s.stages * self.s.count, self.s.count
        kind, index = divmod(op, size)
        if kind == F:
            change = self.s.held[index]
        elif kind == B:
            change = self.s.kept[index] - self.s.held[index]
        else:
            assert kind == W
            change = -self.s.kept[index]
        m = index % count
        self.used[d] += change
        self.by[d][m] += change
        if kind == F:
            self.remaining[d][m] -= 1
            while self.oldest[d] < count - 1 and self.remaining[d][self.sequence[self.oldest[d]]] == 0:
                self.oldest[d] += 1
