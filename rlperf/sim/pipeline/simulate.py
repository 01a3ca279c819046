"""Exact evaluation of any order: the longest path through the graph of operations.

Operations of one device run one after another in the stated order. F(s, m) needs F(s-1, m); B(s, m) needs F(s, m) and
B(s+1, m); W(s, m) needs B(s, m). Between devices a result travels for ``transfer_s``; transfers from one device to
another pass one at a time, in the order in which they were produced. start(op) = max(end of the operation before it
on the device, arrival of what it needs), so all times follow in one topological pass; an order that contradicts
itself leaves operations unreached, and their cycle is named.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlperf.errors import Problem, SpecError
from rlperf.sim.pipeline.types import B, F, FloatArray, Op, Orders, PipelineTimeline, StageCosts, W, op_name


def simulate(
    costs: StageCosts,
    placement: Sequence[int],
    orders: Sequence[Sequence[Op]],
    *,
    merged: bool = False,
    overlap: bool = True,
) -> PipelineTimeline:
    """Times, busy seconds and peak memory of one explicit order.

    Parameters
    ----------
    costs : of the S stages for the M micro-batches
    placement : device of each stage, length S
    orders : operations (kind, stage, microbatch) of each device, in order
    merged : B contains W (one backward, as in plain 1F1B); then no W stands in the orders
    overlap : transfers run beside computation; otherwise the sending device waits until its transfer is through

    Raises
    ------
    SpecError : operations missing, twice or on the wrong device; or an order that waits for itself (cycle named)

    >>> from rlperf.sim.pipeline import one_f_one_b
    >>> costs = StageCosts.uniform(4, 8, 1.0, 1.0, 1.0)
    >>> simulate(costs, range(4), one_f_one_b(4, 8), merged=True).makespan_s  # (M + P - 1)(F + B + W)
    33.0
    """
    devices = tuple(int(d) for d in placement)
    fixed: Orders = tuple(tuple((int(k), int(s), int(m)) for k, s, m in order) for order in orders)
    check_orders(costs.stages, costs.microbatches, devices, fixed, merged=merged)
    start, end = _times(costs, devices, fixed, merged, overlap)
    shape = (3, costs.stages, costs.microbatches)
    starts, ends = np.array(start).reshape(shape), np.array(end).reshape(shape)
    if merged:
        starts[W] = ends[W] = ends[B]
    stage_busy = costs.work_s
    busy = np.array([float(sum(stage_busy[s] for s, d in enumerate(devices) if d == p)) for p in range(len(fixed))])
    return PipelineTimeline(
        makespan_s=float(ends.max()),
        busy_s=busy,
        peak_memory_bytes=peak_memory_bytes(costs, devices, fixed, merged=merged),
        start_s=starts,
        end_s=ends,
        placement=devices,
        orders=fixed,
        merged=merged,
    )


def durations_s(costs: StageCosts, merged: bool) -> list[float]:
    """Duration of each operation [s], at index (kind * S + stage) * M + microbatch."""
    if merged:
        backward = costs.backward_input_s + costs.backward_weight_s
        parts = (costs.forward_s, backward, np.zeros_like(backward))
    else:
        parts = (costs.forward_s, costs.backward_input_s, costs.backward_weight_s)
    flat: list[float] = np.stack(parts).ravel().tolist()
    return flat


def needs(op: Op, stages: int) -> tuple[Op, ...]:
    """What an operation waits for, its own device's order aside."""
    kind, stage, m = op
    if kind == F:
        return ((F, stage - 1, m),) if stage else ()
    if kind == W:
        return ((B, stage, m),)
    return ((F, stage, m), (B, stage + 1, m)) if stage + 1 < stages else ((F, stage, m),)


def _times(
    costs: StageCosts, placement: tuple[int, ...], orders: Orders, merged: bool, overlap: bool
) -> tuple[list[float], list[float]]:
    """Start and end of every operation; devices advance until they meet something not yet there."""
    stages, count = costs.stages, costs.microbatches
    duration = durations_s(costs, merged)
    transfer = costs.transfer_s.tolist()
    total = 3 * stages * count
    start, end = [0.0] * total, [-1.0] * total
    arrival = [0.0] * total
    free = [0.0] * len(orders)
    position = [0] * len(orders)
    link_free: dict[tuple[int, int], float] = {}
    waiting: dict[int, list[int]] = {}
    ready = list(range(len(orders)))
    done = 0
    while ready:
        device = ready.pop()
        order, at, now = orders[device], position[device], free[device]
        while at < len(order):
            op = order[at]
            kind, stage, m = op
            begin = now
            for need in needs(op, stages):
                index = (need[0] * stages + need[1]) * count + m
                if end[index] < 0.0:
                    waiting.setdefault(index, []).append(device)
                    break
                begin = max(begin, arrival[index] if placement[need[1]] != device else end[index])
            else:
                index = (kind * stages + stage) * count + m
                start[index] = begin
                now = end[index] = begin + duration[index]
                target = stage + 1 if kind == F else stage - 1
                if kind != W and 0 <= target < stages and placement[target] != device:
                    link = (device, placement[target])
                    arrival[index] = max(now, link_free.get(link, 0.0)) + transfer[min(stage, target)][m]
                    link_free[link] = arrival[index]
                    if not overlap:
                        now = arrival[index]
                ready.extend(waiting.pop(index, ()))
                at += 1
                done += 1
                continue
            break
        position[device], free[device] = at, now
    if done < sum(map(len, orders)):
        raise SpecError(_cycle(stages, orders, position, end, count, merged))
    return start, end


def _cycle(stages: int, orders: Orders, position: list[int], end: list[float], count: int, merged: bool) -> Problem:
    """The circle of operations that wait for each other, as text."""
    home = {op: device for device, order in enumerate(orders) for op in order}

    def missing(op: Op) -> Op:
        return next(n for n in needs(op, stages) if end[(n[0] * stages + n[1]) * count + n[2]] < 0.0)

    device = next(d for d, order in enumerate(orders) if position[d] < len(order))
    seen: list[int] = []
    while device not in seen:
        seen.append(device)
        device = home[missing(orders[device][position[device]])]
    steps = []
    for d in seen[seen.index(device) :]:
        head = orders[d][position[d]]
        wanted = missing(head)
        blocker = orders[home[wanted]][position[home[wanted]]]
        behind = "" if blocker == wanted else f", which stands behind {op_name(blocker, merged)}"
        steps.append(f"{op_name(head, merged)} on device {d} waits for {op_name(wanted, merged)}{behind}")
    return Problem("the order waits for itself: " + "; ".join(steps))


def check_orders(
    stages: int, microbatches: int, placement: Sequence[int], orders: Sequence[Sequence[Op]], *, merged: bool
) -> None:
    """Every operation once, on the device of its stage; otherwise a `SpecError` that lists what is wrong."""
    if len(placement) != stages:
        raise SpecError(f"placement names {len(placement)} devices for {stages} stages")
    if any(not 0 <= d < len(orders) for d in placement):
        raise SpecError(f"placement {list(placement)} names a device outside 0..{len(orders) - 1}")
    kinds = (F, B) if merged else (F, B, W)
    problems: list[Problem] = []
    seen: set[Op] = set()
    for device, order in enumerate(orders):
        for op in order:
            kind, stage, m = op
            if kind not in kinds or not 0 <= stage < stages or not 0 <= m < microbatches:
                problems.append(Problem(f"device {device} runs {tuple(op)}, which does not exist"))
                continue
            if placement[stage] != device:
                problems.append(Problem(f"{op_name(op)} stands on device {device}, its stage on {placement[stage]}"))
            if op in seen:
                problems.append(Problem(f"{op_name(op)} stands twice"))
            seen.add(op)
    if len(seen) < len(kinds) * stages * microbatches:
        every = ((k, s, m) for k in kinds for s in range(stages) for m in range(microbatches))
        problems += [Problem(f"{op_name(op, merged)} is missing") for op in every if op not in seen]
    if problems:
        shown = problems[:20]
        if len(problems) > len(shown):
            shown.append(Problem(f"and {len(problems) - len(shown)} more"))
        raise SpecError(shown)


def peak_memory_bytes(
    costs: StageCosts, placement: Sequence[int], orders: Sequence[Sequence[Op]], *, merged: bool = False
) -> FloatArray:
    """State plus activations of each device at its worst moment [bytes], shape (P,).

    F(s, m) takes activation_bytes when it starts; B gives them back when it ends, but for weight_input_bytes, which W
    gives back when it ends (merged: B gives everything back). One device runs one operation at a time, so the level
    is a running sum over its order and needs no times. What is in transfer is not counted.
    """
    peaks = np.zeros(len(orders))
    activation, kept = (
        costs.activation_bytes,
        np.zeros_like(costs.weight_input_bytes) if merged else costs.weight_input_bytes,
    )
    for device, order in enumerate(orders):
        state = sum(costs.state_bytes[s] for s, d in enumerate(placement) if d == device)
        level = np.zeros(1)
        if order:
            kind, stage, m = np.array(order, dtype=np.int64).T
            held, rest = activation[stage, m], kept[stage, m]
            level = np.cumsum(np.where(kind == F, held, np.where(kind == B, rest - held, -rest)))
        peaks[device] = state + max(0.0, float(level.max()))
    return peaks
