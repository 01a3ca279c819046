"""Which replica serves which trajectory."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from rlperf.errors import Problem, SpecError, did_you_mean
from rlperf.layout import FloatArray, IntArray
from rlperf.sim.rollout.trajectories import Trajectories

Routing = Literal["round_robin", "static_group", "least_loaded", "prefix_aware"]
"""round_robin: trajectory i to replica i mod R.
static_group: whole groups in equal contiguous shares (verl's and NeMo-RL's split over data-parallel ranks).
least_loaded: trajectories wait centrally; the replica with the fewest outstanding ones and a free place takes the next.
prefix_aware: whole groups, each to the replica with the least prompt and mean response tokens per unit of speed."""

SIMULATED_WHOLE, SIMULATED, FEWEST = 32_768, 8_192, 3
"""Trajectories of an rl_step up to which every replica is simulated, about how many of a larger one are, and the least
number of replicas."""
MANY_REPLICAS = 512
"""Replicas of an rl_step that are simulated at most, however few trajectories each has."""


def route(trajectories: Trajectories, routing: Routing, speed: FloatArray) -> IntArray:
    """Replica of each trajectory ``[trajectories]``, for the routings that decide beforehand.

    ``speed`` : relative speed of each replica ``[replicas]``; only prefix_aware weighs by it.

    >>> t = Trajectories.of(10, [1, 2, 3, 4], group=[0, 0, 1, 1])
    >>> route(t, "round_robin", np.ones(2)).tolist(), route(t, "static_group", np.ones(2)).tolist()
    ([0, 1, 0, 1], [0, 0, 1, 1])
    """
    n, replicas = len(trajectories), len(speed)
    if routing == "round_robin":
        return np.arange(n, dtype=np.int64) % replicas
    names, first, group = np.unique(trajectories.group, return_index=True, return_inverse=True)
    rank = np.empty(len(names), dtype=np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(names))
    group = rank[group.reshape(-1)]
    if routing == "static_group":
        return group * replicas // len(names)
    if routing == "prefix_aware":
        mean = float(trajectories.generated_tokens.mean())
        prompt = trajectories.prompt_tokens[trajectories.offsets[:-1]]
        weight = np.bincount(group, prompt + mean, len(names))
        load, chosen = np.zeros(replicas), np.empty(len(names), dtype=np.int64)
        for g in range(len(names)):
            at = int(np.argmin((load + weight[g]) / speed))
            chosen[g] = at
            load[at] += weight[g]
        return chosen[group]
    raise unknown_routing(routing)


def unknown_routing(given: object) -> SpecError:
    """That nothing is routed so, and what was probably meant."""
    words, known = f"unknown routing {given!r}", get_args(Routing)
    return SpecError(Problem(words, suggestion=did_you_mean(str(given), known) or f"one of {', '.join(known)}"))


def telling_replicas(trajectories: Trajectories, replicas: int) -> IntArray:
    """Replicas that are simulated, in order: all, or of a large rl_step those that tell how long it takes.

    Many requests per replica make replicas alike; the makespan is that of the fullest or of the longest response. Half
    of those kept are the fullest, and the one with the longest response; the others stand evenly between fullest and
    emptiest, so that idle time is not that of the fullest alone.

    >>> telling_replicas(Trajectories.of(1, [5, 1, 2, 3]), 2).tolist()
    [0, 1]
    """
    n = len(trajectories)
    by_tokens = replicas if n <= SIMULATED_WHOLE else max(SIMULATED * replicas // n, FEWEST)
    count = min(by_tokens, MANY_REPLICAS)
    if count >= replicas:
        return np.arange(replicas)
    chosen, tokens = route(trajectories, "round_robin", np.ones(replicas)), trajectories.generated_tokens
    fullest = np.argsort(-np.bincount(chosen, tokens, replicas), kind="stable")
    longest = chosen[int(np.argmax(tokens))]
    evenly = fullest[np.linspace(0, replicas - 1, count - count // 2 + 1).round().astype(np.int64)]
    wanted = [*fullest[: count // 2].tolist(), int(longest), *evenly[1:].tolist()]
    return np.array(sorted(set(wanted)), dtype=np.int64)


def may_be_last(chosen: IntArray, alone: npt.ArrayLike, busy: npt.ArrayLike, count: int) -> IntArray:
    """Replicas that may be the last, in order: the ``count`` that are busy longest, and that of the longest request.

    Parameters
    ----------
    chosen, alone : replica of every request, and how long it takes by itself ``[requests]``
    busy : how long each replica has work ``[replicas]``

    >>> may_be_last(np.array([0, 0, 1, 2]), np.array([3.0, 3.0, 5.0, 1.0]), np.array([6.0, 5.0, 1.0]), 1).tolist()
    [0, 1]
    """
    busiest = np.argsort(-np.asarray(busy), kind="stable")[:count]
    return np.unique([*busiest.tolist(), int(chosen[int(np.argmax(alone))])])
