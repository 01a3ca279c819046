"""What would let a candidate through where none is left: the smallest set of limits to relax, or fewer nodes."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from rlperf.plan.question.context import Context, TaskContext
from rlperf.plan.search.screen import screen
from rlperf.sim.rl_step.demand import Demand
from rlperf.specs.framework import FrameworkFacts
from rlperf.specs.job import Limits

LARGEST = 2
"""Sets of at most this many limits are tried."""
NEAR = 4
"""So many nodes fewer are tried one by one, then halves."""


def relaxations(
    context: Context, task: TaskContext, facts: FrameworkFacts | None, demands: tuple[Demand, ...]
) -> list[str]:
    """The smallest sets of stated limits without which the task is feasible, in words; empty where no set helps."""
    stated = _stated(context.job.limits)
    for size in range(1, min(LARGEST, len(stated)) + 1):
        found = [
            f"without the limit{'s' if size > 1 else ''} on {' and '.join(names)} it is feasible"
            for names in combinations(stated, size)
            if screen(_without(context, names), task, demands, facts, keep=1).configurations
        ]
        if found:
            return found
    return []


def fewer_nodes(
    context: Context, task: TaskContext, facts: FrameworkFacts | None, demands: tuple[Demand, ...]
) -> list[str]:
    """The most of fewer nodes that the task can be planned on, in words: a batch need not divide by all of them."""
    nodes = context.cluster.nodes
    if any(pool.devices for pool in context.job.pools):
        return []
    halves = [nodes >> k for k in range(1, nodes.bit_length())]
    for fewer in sorted({*range(max(nodes - NEAR, 1), nodes), *halves}, reverse=True):
        if screen(_on(context, fewer), task, demands, facts, keep=1).configurations:
            return [f"on {fewer} of the {nodes} nodes it is feasible (nodes: {fewer})"]
    return []


def _on(context: Context, nodes: int) -> Context:
    hardware = replace(context.hardware, cluster=context.cluster.model_copy(update={"nodes": nodes}))
    return replace(
        context,
        job=context.job.model_copy(update={"nodes": nodes}),
        hardware=hardware,
        rollout_hardware=context.rollout_hardware if context.own_rollout else hardware,
    )


def _stated(limits: Limits) -> list[str]:
    names = ["step", "usd_per_step", "truncated_fraction", "host_memory"]
    return [*(name for name in names if getattr(limits, name) is not None), "out_of_memory_risk"]


def _without(context: Context, names: tuple[str, ...]) -> Context:
    """The context with some limits lifted (a peak may then be as large as the device)."""
    lifted = {name: 1.0 if name == "out_of_memory_risk" else None for name in names}
    limits = context.job.limits.model_copy(update=lifted)
    return replace(context, job=context.job.model_copy(update={"limits": limits}))
