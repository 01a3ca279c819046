"""Faults: what is abnormal against its peers (ranks, links, pipeline stages, trajectories), and the change that removes
it. Each detector reads the graph only; none knows what a healthy run looks like beyond what the peers show.
"""

from __future__ import annotations

from rlperf.diagnose import graph as g
from rlperf.diagnose.engine_fit import fit_engines
from rlperf.diagnose.peers import Fault, Thresholds
from rlperf.diagnose.rank_faults import (
    controller,
    imbalance,
    slow_devices,
    slow_links,
    slow_rewards,
    slow_steps,
    stages,
    stragglers,
)
from rlperf.diagnose.rollout_faults import kv_cache, long_trajectories, queueing, slow_tools

__all__ = ["Fault", "Thresholds", "find_faults"]


def find_faults(graph: g.PerformanceGraph, limits: Thresholds | None) -> list[Fault]:
    """All abnormal things of a graph, whether they cost time or not."""
    known = limits or Thresholds()
    fit = fit_engines(graph)
    long = long_trajectories(graph, known)
    found = [*slow_devices(graph, fit, known), *slow_links(graph, known), *long]
    found += [*imbalance(graph, fit, long, known), *slow_tools(graph, known), *stages(graph, known)]
    cache = kv_cache(graph, fit)
    found += [
        *(cache or queueing(graph, known)),
        *slow_rewards(graph, known),
        *controller(graph, known),
        *slow_steps(graph, known),
    ]
    return [*found, *stragglers(graph, found, known)]
