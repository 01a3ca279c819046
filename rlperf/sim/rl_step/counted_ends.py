"""When the groups of a rollout end, in closed form, for many pools: what a trainer of streamed chunks waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.layout import FloatArray
from rlperf.sim.rl_step.modes import first_group_s
from rlperf.sim.rl_step.rollout_counted import Counted, concurrency_of
from rlperf.sim.rl_step.simulated_rollouts import Engines
from rlperf.sim.rollout.group_ends import ENDS, GroupEnds, count_group_ends, group_ends, in_turn
from rlperf.sim.rollout.routing import route, telling_replicas


def even_ends_s(makespan_s: FloatArray, group_s: FloatArray) -> FloatArray:
    """When each part of the groups is complete, were they to end evenly until the makespan [s] ``[pools][ENDS]``.

    ``group_s``: their mean end

    >>> even_ends_s(np.array([60.0]), np.array([40.0]))[0, [15, 63]].tolist()
    [30.0, 60.0]
    """
    begin = np.minimum(first_group_s(makespan_s, group_s), makespan_s)[:, None]
    return np.asarray(begin + (makespan_s[:, None] - begin) * np.arange(1, ENDS + 1) / ENDS)


def counted_ends_s(
    pools: Sequence[Engines], counted: Counted, makespan_s: FloatArray, group_s: FloatArray
) -> FloatArray:
    """When each part of the groups is complete, mean over the rl_steps that are counted [s] ``[pools][ENDS]``.

    Of requests that run in waves as these end (`count_group_ends`), generation batches one after another; of agents as
    they are served. Where prompts are read apart or rollouts go on in the next rl_step, as if groups ended evenly.
    """
    ends_s = even_ends_s(makespan_s, group_s)
    batch = counted.demand.batch
    if batch.over_provision > 1.0:
        return ends_s
    known: dict[tuple[EngineStepCost, int, int], FloatArray] = {}
    for position in np.flatnonzero([pool.apart is None for pool in pools]).tolist():
        pool, seconds = pools[position], np.zeros(ENDS)
        if not counted.single_turn:
            if (ended := counted.known_turns(pool)) is not None:
                ends_s[position] = _of_rl_steps([group_ends(each.finish_s, each.group) for each in ended], batch.rounds)
            continue
        for concurrency, weight in concurrency_of(pool.limits, counted.tables, pool.replicas, counted.flow.context):
            key = (pool.cost, pool.replicas, concurrency)
            if key not in known:
                found = [each.seconds(pool.cost) for each in _counts(counted, pool, concurrency)]
                known[key] = _of_rl_steps(found, batch.rounds)
            seconds += weight * known[key]
        ends_s[position] = seconds
    return ends_s


def _of_rl_steps(ends: Sequence[FloatArray], rounds: int) -> FloatArray:
    """Those of every generation batch as those of rl_steps of so many, their mean."""
    of_each = [in_turn(ends[first : first + rounds]) for first in range(0, len(ends), rounds)]
    return np.asarray(np.mean(of_each, axis=0))


def _counts(counted: Counted, pool: Engines, concurrency: int) -> list[GroupEnds]:
    """Every table scheduled on so many places, on as many replicas as the events simulate."""
    free: EngineLimits = replace(pool.limits, kv_tokens=np.inf, max_running=concurrency)
    key = (pool.replicas, free)
    if key not in counted.ends:
        counted.ends[key] = []
        for table in counted.tables:
            chosen = route(table, "round_robin", np.ones(pool.replicas))
            some = np.flatnonzero(np.isin(chosen, telling_replicas(table, pool.replicas)))
            replica = np.unique(chosen[some], return_inverse=True)[1].reshape(-1)
            counted.ends[key].append(count_group_ends(table.take(some), replica, free))
    return counted.ends[key]
