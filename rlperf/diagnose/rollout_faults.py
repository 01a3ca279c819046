"""Faults of the rollout: long trajectories, slow tools, a cache that is too small, saturated engines."""

from __future__ import annotations

import numpy as np

from rlperf.diagnose import graph as g
from rlperf.diagnose.engine_fit import EngineStepFit
from rlperf.diagnose.peers import Fault, Thresholds, apart, by_rank, place, scaled, stands_out
from rlperf.units import human_seconds, human_share


def long_trajectories(graph: g.PerformanceGraph, limits: Thresholds) -> list[Fault]:
    """Trajectories that stand apart from all others of their rl_step in generated tokens, runaways among them."""
    decode = (graph.activity == g.DECODE) & (graph.unit >= 0) & (graph.work > 0)
    scale = np.ones(graph.vertices)
    worst, names, evidence, rl_steps, total = (0.0, -1), "", "", 0, 0
    for step in np.unique(graph.rl_step[decode]):
        ids, unit = np.unique(graph.unit, return_inverse=True)
        mask = decode & (graph.rl_step == step)
        tokens = np.bincount(unit[mask], graph.work[mask], ids.size).astype(np.float64)
        count = apart(tokens, limits.gap)
        if not count:
            continue
        order = np.argsort(-tokens, kind="stable")
        units, peer = order[:count], float(tokens[order[count]])
        factor = np.ones(ids.size)
        factor[units] = peer / tokens[units]
        scale[mask] = factor[unit[mask]]
        rl_steps, total = rl_steps + 1, total + count
        longest = float(tokens[units[0]])
        if longest > worst[0]:
            median = float(np.median(tokens[tokens > 0]))
            worst = (longest, int(np.flatnonzero(mask & (unit == units[0]))[0]))
            names = ("runaway " if longest > 10.0 * median else "") + f"trajectory {ids[units[0]]}"
            evidence = f"{longest:,.0f} tokens; the longest of the others {peer:,.0f}, the median {median:,.0f}"
    if not total:
        return []
    at = worst[1]
    pool, rank = int(graph.pool[at]), int(graph.rank[at])
    more = f" and {total - 1} more" + (f" in {rl_steps} rl_steps" if rl_steps > 1 else "") if total > 1 else ""
    where = f"{names} on {place(graph, pool, rank)}" + more
    unit_id = int(graph.unit[at])
    return [Fault("long_trajectory", where, evidence, g.Change(scale), scale < 1.0, rank, -1, unit_id, pool)]


def slow_tools(graph: g.PerformanceGraph, limits: Thresholds) -> list[Fault]:
    """Tool calls that take longer than the others': all of one replica, or single calls that hang."""
    tool = (graph.activity == g.TOOL) & (graph.rank >= 0) & (graph.duration_s > 0)
    if tool.sum() < 8:
        return []
    found: list[Fault] = []
    size = int(graph.rank.max()) + 1
    medians = np.full(size, np.nan)
    for rank in np.unique(graph.rank[tool]):
        medians[rank] = np.median(graph.duration_s[tool & (graph.rank == rank)])
    pool = int(graph.pool[tool][0])
    slow = stands_out(medians, limits.tool, limits.deviations)
    for rank in slow:
        own = tool & (graph.rank == rank)
        ratio = float(medians[rank] / np.nanmedian(medians))
        found.append(
            Fault("slow_tool", f"tools of {place(graph, pool, int(rank))}", f"{ratio:.1f} times its peers' latency",
                  scaled(graph, own, 1.0 / ratio), own, int(rank), -1, -1, pool)
        )  # fmt: skip
    rest = np.flatnonzero(tool & ~np.isin(graph.rank, slow))
    seconds = graph.duration_s[rest]
    count = apart(seconds, limits.gap)
    if count:
        order = np.argsort(-seconds, kind="stable")
        hung, peer = rest[order[:count]], float(seconds[order[count]])
        own = np.zeros(graph.vertices, dtype=np.bool_)
        own[hung] = True
        worst = int(hung[0])
        scale = np.where(own, peer / np.maximum(graph.duration_s, 1e-12), 1.0)
        found.append(
            Fault("slow_tool", graph.name(worst),
                  f"{human_seconds(float(graph.duration_s[worst]))}; the slowest of the others {human_seconds(peer)}, "
                  f"the median {human_seconds(float(np.median(seconds)))}",
                  g.Change(scale), own, int(graph.rank[worst]), -1, int(graph.unit[worst]), pool)
        )  # fmt: skip
    return found


def kv_cache(graph: g.PerformanceGraph, fit: EngineStepFit) -> list[Fault]:
    """Requests that wait, or are evicted, although slots are free: the cache has no room for them."""
    if graph.samples is None or not graph.samples.blocked.any():
        return []
    ranks = np.unique(graph.samples.replica[graph.samples.blocked])
    waits = graph.is_any((g.QUEUE, g.PREEMPTED)) & np.isin(graph.rank, ranks) & (graph.pool == fit.pool)
    served = graph.is_any((g.PREFILL, g.DECODE)) & np.isin(graph.rank, ranks) & (graph.pool == fit.pool)
    waited, busy = (by_rank(mask, graph.rank, graph.duration_s) for mask in (waits, served))
    scale = np.where(waits, 0.0, 1.0)
    for rank in ranks:
        # Little's law: those who waited run instead, so the batch grows by the share of time they waited.
        more = 1.0 + float(waited[rank] / busy[rank]) if busy[rank] > 0 else 1.0
        scale[served & (graph.rank == rank)] = fit.relative_step_s(int(rank), more)
    blocked, samples = graph.samples.blocked, graph.samples
    share = float(samples.seconds[blocked].sum() / samples.seconds.sum())
    where = "all replicas" if ranks.size > 1 else f"{graph.pools[fit.pool]} {int(ranks[0])}"
    return [
        Fault("kv_cache", f"{graph.pools[fit.pool]}: {where}" if ranks.size > 1 else where,
              f"requests wait with free slots during {human_share(share)} of the decode time, "
              f"{human_seconds(float(np.nansum(waited)))} of waiting in all",
              g.Change(scale), waits, int(ranks[0]) if ranks.size == 1 else -1, -1, -1, fit.pool)
    ]  # fmt: skip


def queueing(graph: g.PerformanceGraph, limits: Thresholds) -> list[Fault]:
    """Requests that wait for the engine longer than it serves them, the cache not being the reason."""
    waits = graph.activity == g.QUEUE
    served = graph.is_any((g.QUEUE, g.PREFILL, g.DECODE, g.PREEMPTED))
    share = float(graph.duration_s[waits].sum()) / max(float(graph.duration_s[served].sum()), 1e-12)
    if share < limits.queue:
        return []
    where = f"engines of {graph.pools[int(graph.pool[waits][0])]}"
    evidence = f"{human_share(share)} of the requests' engine time is waiting for others"
    return [Fault("queueing", where, evidence, scaled(graph, waits, 0.0), waits, pool=int(graph.pool[waits][0]))]
