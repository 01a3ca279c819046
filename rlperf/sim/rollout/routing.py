"""Which replica serves which trajectory."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from rlperf.errors import SpecError, did_you_mean
from rlperf.layout import FloatArray, IntArray
from rlperf.sim.rollout.trajectories import Trajectories

Routing = Literal["round_robin", "static_group", "least_loaded", "prefix_aware"]
"""round_robin: trajectory i to replica i mod R.
static_group: whole groups in equal contiguous shares (verl's and NeMo-RL's split over data-parallel ranks).
least_loaded: trajectories wait centrally; the replica with the fewest outstanding ones and a free place takes the next.
prefix_aware: whole groups, each to the replica with the least prompt and mean response tokens per unit of speed."""


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
    raise SpecError(f"unknown routing {routing!r}" + (f", {hint}" if (hint := suggestion(routing)) else ""))


def suggestion(routing: str) -> str | None:
    """The routing that was probably meant."""
    return did_you_mean(routing, get_args(Routing))
