"""Faults of ranks, links and pipeline stages: slow devices and links, unequal work, abnormal vertices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import and_
from typing import NamedTuple

import numpy as np

from rlperf.diagnose import graph as g
from rlperf.diagnose.engine_fit import EngineStepFit
from rlperf.diagnose.peers import Fault, Thresholds, by_rank, place, scaled, shift, stands_out
from rlperf.layout import BoolArray, FloatArray, IntArray
from rlperf.units import human_share

_PLACED = (*g.COMPUTE, g.ROLLOUT, g.REWARD, g.COMMUNICATION, g.WEIGHT_SYNC, g.DATA_MOVEMENT, g.OFFLOAD)


def slow_devices(graph: g.PerformanceGraph, fit: EngineStepFit, limits: Thresholds) -> list[Fault]:
    """Ranks whose compute takes longer per token than their peers': engine_steps at equal batch and context, and
    training and scoring."""
    found: list[Fault] = []
    for pool in range(len(graph.pools)):
        here = (graph.pool == pool) & (graph.rank >= 0)
        scale = np.ones(graph.vertices)
        worst: dict[int, tuple[float, set[int]]] = {}

        def note(rank: int, part: int, ratio: float, mask: BoolArray, scale: FloatArray = scale,
                 worst: dict[int, tuple[float, set[int]]] = worst) -> None:  # fmt: skip
            scale[mask] /= ratio
            before, parts = worst.get(rank, (1.0, set()))
            worst[rank] = (max(before, ratio), parts | {part})

        for rank in stands_out(fit.slowness, limits.rate, limits.deviations) if pool == fit.pool else ():
            mask = here & graph.is_any(g.ENGINE) & (graph.rank == rank)
            note(int(rank), -1, float(fit.slowness[rank]), mask)
        for mask, part in _peer_groups(graph, here):
            rates = _rates(graph, mask)
            for rank in stands_out(rates, limits.rate, limits.deviations):
                ratio = float(rates[rank] / np.nanmedian(rates))
                note(int(rank), part, ratio, mask & (graph.rank == rank))
        for rank, (ratio, parts) in worst.items():
            own = here & (graph.rank == rank) & (scale < 1.0)
            inner = {p for p in parts if p >= 0}
            part = inner.pop() if len(inner) == 1 else -1
            one = np.where(own, scale, 1.0)
            found.append(
                Fault("slow_device", place(graph, pool, rank, part),
                      f"{ratio:.2f} times the seconds per token of its peers", g.Change(one), own, rank, part, -1, pool)
            )  # fmt: skip
    return found


def _peer_groups(graph: g.PerformanceGraph, here: BoolArray) -> list[tuple[BoolArray, int]]:
    """Vertices that do the same on every rank: by activity and pipeline stage, all rl_steps together."""
    groups = []
    for activity in g.COMPUTE:
        mask = here & (graph.activity == activity)
        groups += [(mask & (graph.part == part), int(part)) for part in np.unique(graph.part[mask])]
    return groups


def _rates(graph: g.PerformanceGraph, mask: BoolArray) -> FloatArray:
    """Seconds per unit of work of each rank; seconds where the work is unknown."""
    seconds = by_rank(mask, graph.rank, graph.duration_s)
    work = by_rank(mask, graph.rank, graph.work)
    return seconds / np.where(work > 0, work, np.nan) if np.isfinite(work).any() else seconds


def slow_links(graph: g.PerformanceGraph, limits: Thresholds) -> list[Fault]:
    """Links whose transfers take longer per byte than their peers': between pipeline stages, of a gradient group, to a
    replica."""
    found: list[Fault] = []
    moves = graph.is_any((g.COMMUNICATION, g.WEIGHT_SYNC)) & (graph.rank >= 0) & (graph.duration_s > 0)
    for pool in range(len(graph.pools)):
        here = moves & (graph.pool == pool)
        links = here & (graph.activity == g.COMMUNICATION) & (graph.unit >= 0)
        groups = here & (graph.activity == g.COMMUNICATION) & (graph.unit < 0) & (graph.part >= 0)
        plain = here & (graph.activity == g.COMMUNICATION) & (graph.unit < 0) & (graph.part < 0)
        span = int(graph.part.max(initial=0)) + 1
        for mask, keys in (
            (links, graph.rank * span + graph.part),
            (groups, graph.part),
            (plain, graph.rank),
            (here & (graph.activity == g.WEIGHT_SYNC), graph.rank),
        ):
            if not mask.any():
                continue
            rates = _link_rates(graph, mask, keys)
            for key in stands_out(rates, limits.link, limits.deviations):
                ratio = float(rates[key] / np.nanmedian(rates))
                own = mask & (keys == key)
                rank = -1 if mask is groups else int(graph.rank[own][0])
                part = int(graph.part[own][0])
                where = f"gradient group of pipeline stage {part}" if rank < 0 else place(graph, pool, rank, part)
                found.append(
                    Fault("slow_link", where, f"{ratio:.2f} times the seconds per byte of its peers",
                          scaled(graph, own, 1.0 / ratio), own, rank, part, -1, pool)
                )  # fmt: skip
    return found


def _link_rates(graph: g.PerformanceGraph, mask: BoolArray, keys: IntArray) -> FloatArray:
    seconds, work = by_rank(mask, keys, graph.duration_s), by_rank(mask, keys, graph.work)
    return seconds / np.where(work > 0, work, np.nan) if np.isfinite(work).any() else seconds


def imbalance(graph: g.PerformanceGraph, fit: EngineStepFit, long: list[Fault], limits: Thresholds) -> list[Fault]:
    """Ranks that got more work than their peers: trajectories of a replica, tokens of a data-parallel rank."""
    found: list[Fault] = []
    even = np.ones(graph.vertices)
    for fault in long:
        even *= fault.change.scale
    work = graph.work * even
    crowded = _crowded(graph, limits)
    for pool in range(len(graph.pools)):
        here = (graph.pool == pool) & (graph.rank >= 0)
        changes: dict[int, tuple[float, FloatArray]] = {}
        rollout = here & graph.is_any((g.DECODE, g.ROLLOUT)) & (graph.work > 0)
        trained = here & graph.is_any((g.FORWARD, g.TRAINING)) & (graph.part <= 0) & (graph.work > 0)
        for mask, slower in ((rollout, g.IN_ROLLOUT), (trained, (*g.COMPUTE, g.COMMUNICATION))):
            load = by_rank(mask, graph.rank, work)
            median = float(np.nanmedian(load)) if np.isfinite(load).any() else 0.0
            heavy = np.flatnonzero(np.nan_to_num(load) > limits.load * median)
            for rank in np.union1d(stands_out(load, limits.load, limits.deviations), np.intersect1d(heavy, crowded)):
                ratio = float(load[rank]) / median
                own = here & graph.is_any(slower) & (graph.rank == rank) & ~(graph.is_any((g.TOOL, g.OPTIMIZER)))
                own &= ~((graph.activity == g.COMMUNICATION) & (graph.unit < 0))
                before, scale = changes.get(int(rank), (1.0, np.ones(graph.vertices)))
                # A replica with less to do decodes smaller batches: its engine_steps get shorter, not its responses.
                factor = fit.relative_step_s(int(rank), 1.0 / ratio) if mask is rollout else 1.0 / ratio
                scale = scale * np.where(own, factor, 1.0)
                if mask is rollout:
                    scale[here & (graph.rank == rank) & graph.is_any((g.QUEUE, g.PREEMPTED))] = 0.0
                changes[int(rank)] = (max(before, ratio), scale)
        for rank_, (ratio, scale) in changes.items():
            found.append(
                Fault("data_imbalance", place(graph, pool, rank_), f"{ratio:.2f} times the tokens of its peers",
                      g.Change(scale), scale < 1.0, rank_, -1, -1, pool)
            )  # fmt: skip
    return found


def _crowded(graph: g.PerformanceGraph, limits: Thresholds) -> IntArray:
    """Ranks with more trajectories than their peers: numbers are dealt, so they tell a skewed split from long drawn
    lengths where the tokens of a few dozen trajectories cannot."""
    decode = (graph.activity == g.DECODE) & (graph.unit >= 0) & (graph.rank >= 0)
    if not decode.any():
        return np.zeros(0, dtype=np.int64)
    rows = np.unique(np.stack([graph.rank[decode], graph.rl_step[decode], graph.unit[decode]]), axis=1)
    count = np.bincount(rows[0]).astype(np.float64)
    return stands_out(np.where(count > 0, count, np.nan), limits.load, limits.deviations)


def stages(graph: g.PerformanceGraph, limits: Thresholds) -> list[Fault]:
    """A pipeline stage with more work than the mean of the stages, on all ranks alike."""
    piped = graph.is_any((g.FORWARD, g.RECOMPUTE, g.BACKWARD)) & (graph.part >= 0)
    parts = np.unique(graph.part[piped])
    if parts.size < 2:
        return []
    typical = np.zeros(parts.size)
    for i, part in enumerate(parts):
        typical[i] = np.nanmedian(by_rank(piped & (graph.part == part), graph.rank, graph.duration_s))
    mean = float(typical.mean())
    worst = int(np.argmax(typical))
    if typical[worst] < limits.stage * mean:
        return []
    scale = np.ones(graph.vertices)
    for i, part in enumerate(parts):
        scale[piped & (graph.part == part)] = mean / typical[i]
    own = piped & (graph.part == parts[worst])
    pool = int(graph.pool[own][0])
    return [
        Fault("stage_imbalance", f"pipeline stage {int(parts[worst])} of {graph.pools[pool]}",
              f"{typical[worst] / mean:.2f} times the mean of the {parts.size} stages", g.Change(scale), own, -1,
              int(parts[worst]), -1, pool)
    ]  # fmt: skip


def slow_rewards(graph: g.PerformanceGraph, limits: Thresholds) -> list[Fault]:
    """A rank whose reward takes longer than its peers'."""
    mask = (graph.activity == g.REWARD) & (graph.rank >= 0)
    if not mask.any():
        return []
    seconds = by_rank(mask, graph.rank, graph.duration_s)
    pool = int(graph.pool[mask][0])
    found = []
    for rank in stands_out(seconds, limits.abnormal, limits.deviations):
        ratio = float(seconds[rank] / np.nanmedian(seconds))
        own = mask & (graph.rank == rank)
        found.append(
            Fault("slow_reward", f"reward of {place(graph, pool, int(rank))}", f"{ratio:.2f} times its peers' seconds",
                  scaled(graph, own, 1.0 / ratio), own, int(rank), -1, -1, pool)
        )  # fmt: skip
    return found


def controller(graph: g.PerformanceGraph, limits: Thresholds) -> list[Fault]:
    """Serial work of the controller that takes a large share of the rl_step."""
    own = graph.activity == g.CONTROLLER
    step = graph.rl_step_s()
    seconds = float(graph.duration_s[own].sum()) / max(np.unique(graph.rl_step).size, 1)
    if step <= 0 or seconds < limits.serial * step:
        return []
    change = scaled(graph, own, 0.0)
    return [
        Fault(
            "controller", "controller", f"{human_share(seconds / step)} of the rl_step, all ranks waiting", change, own
        )
    ]


def slow_steps(graph: g.PerformanceGraph, limits: Thresholds) -> list[Fault]:
    """Where no rank is known: stages of rl_steps above 1.3 times their median over at least five rl_steps.

    What is slow from some rl_step on is one finding, against the rl_steps before it, and so are several stages that are
    slow in the same rl_steps: one look at them serves all. A rollout and its tail are one stage here: a log knows the
    rollout only, and the tail is a share of it.
    """
    slow_in: dict[tuple[str, str], list[_SlowStage]] = {}
    whole = (graph.rank < 0) & (graph.unit < 0) & (graph.duration_s > 0)
    steps, index = np.unique(graph.rl_step, return_inverse=True)
    stage = np.where(graph.is_any(g.IN_ROLLOUT), g.ROLLOUT, graph.activity)
    for activity in np.unique(stage[whole]) if steps.size >= 5 else ():
        mask = whole & (stage == activity)
        seconds = by_rank(mask, index.reshape(-1).astype(np.int64), graph.duration_s)
        lasting = shift(seconds, limits.abnormal, limits.deviations)
        usual = seconds[:lasting]
        slow = stands_out(usual, limits.abnormal, limits.deviations)
        # what goes on over rl_steps in a row is one finding, not one for each
        runs = np.split(slow, np.flatnonzero(np.diff(slow) > 1) + 1) if slow.size else []
        for run in [*runs, *([np.arange(lasting, steps.size)] if lasting is not None else [])]:
            own = mask & np.isin(index.reshape(-1), run)
            ratio = float(np.mean(seconds[run]) / np.nanmedian(usual))
            kind = "slowdown" if run[0] == lasting else "slow_step"
            stages = slow_in.setdefault((kind, _rl_steps(steps, run)), [])
            stages.append(_SlowStage(g.ACTIVITIES[activity].replace("_", " "), ratio, own))
    # Several places of one kind: the rank column tells them apart, so it carries a number below -1.
    return [
        _slow_together(graph, kind, when, stages, -2 - number)
        for number, ((kind, when), stages) in enumerate(slow_in.items())
    ]


class _SlowStage(NamedTuple):
    """A stage in rl_steps where it takes ``ratio`` times as long as usual, and its vertices."""

    name: str
    ratio: float
    own: BoolArray


def _slow_together(graph: g.PerformanceGraph, kind: str, when: str, stages: Sequence[_SlowStage], place_: int) -> Fault:
    """Stages that are slow in the same rl_steps, what loses most first, as one fault."""
    lost = [float(graph.duration_s[each.own].sum()) * (1.0 - 1.0 / each.ratio) for each in stages]
    ranked = [stages[k] for k in np.argsort(lost, stable=True)[::-1]]
    change = reduce(and_, (scaled(graph, each.own, 1.0 / each.ratio) for each in ranked))
    names = ", ".join(each.name for each in ranked)
    ratios = ", ".join(f"{each.ratio:.2f}" for each in ranked)
    evidence = f"{ratios} times the median of the rl_steps" + (" before" if kind == "slowdown" else "")
    own = np.logical_or.reduce([each.own for each in ranked])
    return Fault(kind, f"{names} of {when}", evidence, change, own, place_)


def _rl_steps(steps: IntArray, run: IntArray) -> str:
    """``rl_step 6``, ``rl_steps 6 to 8``, ``all rl_steps from 9 on``."""
    first, last = int(steps[run[0]]), int(steps[run[-1]])
    if run.size == 1:
        return f"rl_step {first}"
    return f"all rl_steps from {first} on" if run[-1] == steps.size - 1 else f"rl_steps {first} to {last}"


MOST_STRAGGLERS = 20
"""Ranks that are named, those that lose most."""


def stragglers(graph: g.PerformanceGraph, known: list[Fault], limits: Thresholds) -> list[Fault]:
    """Single vertices above 1.3 times the median of what their peers on other ranks do at the same place (ScalAna's
    abnormal vertices), by rank; those that another fault explains left out."""
    mask = graph.is_any(_PLACED) & (graph.rank >= 0) & (graph.duration_s > 0)
    for fault in known:
        mask &= ~(fault.vertices & (fault.change.scale < 1.0))
    at = np.flatnonzero(mask)
    if not at.size:
        return []
    keys = np.stack([c[at] for c in (graph.rl_step, graph.pool, graph.activity, graph.part, graph.unit)])
    groups = np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1)
    groups = _places(groups, graph.rank[at], graph.start_s[at])
    work = graph.work[at]
    value = graph.duration_s[at] / np.where(work > 0, work, 1.0)
    median, count = _medians(value, groups)
    spread = 1.4826 * _medians(np.abs(value - median), groups)[0]
    slow = (count >= 3) & (value > limits.abnormal * median) & (value - median > limits.deviations * spread)
    lost = np.where(slow, graph.duration_s[at] * (1.0 - median / value), 0.0)
    size = int(graph.rank.max()) + 1
    owner = graph.pool[at] * size + graph.rank[at]
    total = np.bincount(owner, lost)
    found = []
    for key in np.argsort(-total, kind="stable")[:MOST_STRAGGLERS]:
        own = slow & (owner == key)
        if not own.any():
            break
        worst = int(np.argmax(np.where(own, lost, 0.0)))
        scale = np.ones(graph.vertices)
        scale[at[own]] = (median / value)[own]
        more = f" and {int(own.sum()) - 1} more" if own.sum() > 1 else ""
        evidence = f"{value[worst] / median[worst]:.2f} times the median of {int(count[worst])} peers"
        rank, pool = int(key % size), int(key // size)
        vertices = scale < 1.0
        found.append(
            Fault(
                "straggler", graph.name(int(at[worst])) + more, evidence, g.Change(scale), vertices, rank, -1, -1, pool
            )
        )
    return found


def _places(groups: IntArray, rank: IntArray, start_s: FloatArray) -> IntArray:
    """Groups divided by occurrence: the n-th vertex of every rank is compared with the n-th of the others."""
    order = np.lexsort((start_s, rank, groups))
    first = np.concatenate([[True], (np.diff(groups[order]) != 0) | (np.diff(rank[order]) != 0)])
    starts = np.flatnonzero(first)
    number = np.empty(groups.size, dtype=np.int64)
    number[order] = np.arange(groups.size) - np.repeat(starts, np.diff(np.append(starts, groups.size)))
    return groups * (int(number.max(initial=0)) + 1) + number


def _medians(values: FloatArray, groups: IntArray) -> tuple[FloatArray, IntArray]:
    """Median of each value's group, and the group's size."""
    _, index, counts = np.unique(groups, return_inverse=True, return_counts=True)
    ordered = values[np.lexsort((values, index))]
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    medians = 0.5 * (ordered[starts + (counts - 1) // 2] + ordered[starts + counts // 2])
    return medians[index.reshape(-1)], counts[index.reshape(-1)]
