"""Structural costs: what even a healthy rl_step pays (tail, bubble, weight sync ...), each as the change that makes it
ideal. They are no faults; what they cost says what a better plan could win at most."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rlperf.diagnose import graph as g
from rlperf.diagnose.peers import by_rank
from rlperf.layout import BoolArray, FloatArray


def structural_changes(graph: g.PerformanceGraph) -> dict[str, g.Change]:
    """The changes of all structural costs that the graph has, by name.

    tail : no trajectory longer than the mean of its rl_step
    rollout_imbalance : replicas take equal time (where trajectories are not known)
    reward_imbalance : reward takes equal time on all ranks
    queueing, tool, reward, weight_sync, data_movement, offload, controller, recompute, other : take no time
    dp_imbalance : every data-parallel rank has the mean of the ranks' tokens (or seconds, where tokens are unknown)
    straggling_rank : every data-parallel rank computes at the median rate
    exposed_communication : transfers between stages and gradient sync take no time
    pipeline_bubble : stages do not wait for each other
    """
    found: dict[str, g.Change] = {}
    for name, make in _CHANGES.items():
        change = make(graph)
        if change is not None:
            found[name] = change
    return found


def _nothing(*activities: int) -> Callable[[g.PerformanceGraph], g.Change | None]:
    def make(graph: g.PerformanceGraph) -> g.Change | None:
        mask = graph.is_any(activities)
        return g.Change(np.where(mask, 0.0, 1.0)) if (graph.duration_s[mask] > 0).any() else None

    return make


def _tail(graph: g.PerformanceGraph) -> g.Change | None:
    mask = (graph.activity == g.DECODE) & (graph.unit >= 0) & (graph.work > 0)
    bound = graph.activity == g.TAIL
    if not mask.any() and not bound.any():
        return None
    scale = np.where(bound, 0.0, 1.0)
    for step in np.unique(graph.rl_step[mask]):
        own = mask & (graph.rl_step == step)
        tokens = by_rank(own, graph.unit, graph.work)
        factor = np.minimum(np.nanmean(tokens) / tokens, 1.0)
        scale[own] = factor[graph.unit[own]]
    return g.Change(scale)


def _rollout_imbalance(graph: g.PerformanceGraph) -> g.Change | None:
    return _evened(graph, (graph.activity == g.ROLLOUT) & (graph.rank >= 0), graph.duration_s)


def _reward_imbalance(graph: g.PerformanceGraph) -> g.Change | None:
    return _evened(graph, (graph.activity == g.REWARD) & (graph.rank >= 0), graph.duration_s)


def _dp_imbalance(graph: g.PerformanceGraph) -> g.Change | None:
    mask = graph.is_any((g.SCORING, g.TRAINING, g.FORWARD, g.RECOMPUTE, g.BACKWARD)) & (graph.rank >= 0)
    work = np.where(np.isfinite(graph.work), graph.work, np.nan)
    return _evened(graph, mask & np.isfinite(work), work)


def _straggling_rank(graph: g.PerformanceGraph) -> g.Change | None:
    mask = graph.is_any(g.COMPUTE) & (graph.rank >= 0)
    if not mask.any():
        return None
    scale = np.ones(graph.vertices)
    for group in _groups(graph, mask):
        seconds, work = by_rank(group, graph.rank, graph.duration_s), by_rank(group, graph.rank, graph.work)
        rate = seconds / np.where(work > 0, work, np.nan) if np.isfinite(work).any() else seconds
        if np.isfinite(rate).sum() < 2 or not np.nanmedian(rate) > 0:
            continue
        with np.errstate(divide="ignore", over="ignore"):
            even = np.minimum(np.nanmedian(rate) / rate, 1.0)
        scale[group] = np.where(np.isfinite(even), even, 1.0)[graph.rank[group]]  # a rank that states no work stays
    return g.Change(scale) if (scale < 1.0).any() else None


def _evened(graph: g.PerformanceGraph, mask: BoolArray, load: FloatArray) -> g.Change | None:
    """Durations such that every rank has the mean load; None where all ranks have the same."""
    scale = np.ones(graph.vertices)
    for group in _groups(graph, mask):
        total = by_rank(group, graph.rank, load)
        if np.isfinite(total).sum() < 2:
            continue
        factor = np.nanmean(total) / np.where(total > 0, total, np.nan)
        scale[group] = np.nan_to_num(factor[graph.rank[group]], nan=1.0)
    return g.Change(scale) if np.any(np.abs(scale - 1.0) > 1e-12) else None


def _groups(graph: g.PerformanceGraph, mask: BoolArray) -> list[BoolArray]:
    """Vertices that do the same on every rank of an rl_step."""
    keys = np.stack([graph.rl_step, graph.activity, graph.part, graph.pool])[:, mask]
    unique, index = np.unique(keys, axis=1, return_inverse=True)
    at = np.flatnonzero(mask)
    groups = []
    for k in range(unique.shape[1]):
        own = np.zeros(graph.vertices, dtype=np.bool_)
        own[at[index.reshape(-1) == k]] = True
        groups.append(own)
    return groups


def _bubble(graph: g.PerformanceGraph) -> g.Change | None:
    piped = graph.is_any((g.FORWARD, g.RECOMPUTE, g.BACKWARD)) & (graph.part >= 0)
    piped |= (graph.activity == g.COMMUNICATION) & (graph.unit >= 0)
    idle = graph.activity == g.BUBBLE
    if np.unique(graph.part[piped]).size < 2:
        return g.Change(np.where(idle, 0.0, 1.0)) if (graph.duration_s[idle] > 0).any() else None
    source, target = graph.edge_source, graph.edge_target
    transfer = (graph.activity == g.COMMUNICATION) & (graph.unit >= 0)
    between = piped[source] & piped[target] & (transfer[source] | transfer[target])
    between |= piped[source] & piped[target] & (graph.part[source] != graph.part[target])
    return g.Change(np.where(transfer, 0.0, 1.0), ~between)


_CHANGES: dict[str, Callable[[g.PerformanceGraph], g.Change | None]] = {
    "tail": _tail,
    "rollout_imbalance": _rollout_imbalance,
    "queueing": _nothing(g.QUEUE, g.PREEMPTED),
    "tool": _nothing(g.TOOL),
    "reward": _nothing(g.REWARD),
    "reward_imbalance": _reward_imbalance,
    "dp_imbalance": _dp_imbalance,
    "straggling_rank": _straggling_rank,
    "exposed_communication": _nothing(g.COMMUNICATION),
    "pipeline_bubble": _bubble,
    "recompute": _nothing(g.RECOMPUTE),
    "weight_sync": _nothing(g.WEIGHT_SYNC),
    "data_movement": _nothing(g.DATA_MOVEMENT),
    "offload": _nothing(g.OFFLOAD),
    "controller": _nothing(g.CONTROLLER),
    "other": _nothing(g.OTHER),
}
"""Each structural cost by name."""
