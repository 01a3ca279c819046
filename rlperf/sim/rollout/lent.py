r"""Replicas that join a rollout under way: engines on the trainer's devices while it waits for the last responses.

At time a all requests that have not ended are dealt anew over the n replicas and the E that join. Each of the n keeps a
share n / (n + E) of its own, evenly and the first in any case, with their cache; the others are stopped and read again
where they go, prompt and all that they have written:

.. math:: R'(a) = a + \text{makespan of the rest over } n + E

The rest is simulated like any rollout. R' grows with a from a rollout on all devices to one on its own n, so it is
tabulated at a few shares of the makespan alone (`AT`) and read off between them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.layout import BoolArray, FloatArray
from rlperf.sim.rollout.options import EngineOptions
from rlperf.sim.rollout.replica import PLAIN
from rlperf.sim.rollout.rollout import RolloutResult, simulate_rollout
from rlperf.sim.rollout.routing import may_be_last
from rlperf.sim.rollout.static import prefix_hits
from rlperf.sim.rollout.tail import continued, generated_at
from rlperf.sim.rollout.trajectories import Trajectories

AT: FloatArray = np.array([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0])
"""Shares of the makespan alone at which others may join [1]."""


def joined_s(
    trajectories: Trajectories, alone: RolloutResult, more: int, at_s: float, *, cost: EngineStepCost,
    limits: EngineLimits, options: EngineOptions = PLAIN, heaviest: int | None = None,
) -> float:  # fmt: skip
    """R'(a): makespan of single-turn trajectories where ``more`` equal replicas join at ``at_s`` [s].

    ``alone``: the rollout that they join, simulated to its end. ``heaviest``: of what is dealt anew only so many
    replicas are simulated that have most left to write, and that of the longest rest; None: all.

    >>> cost = EngineStepCost(np.array([0.0, 1.0]), np.zeros(2), decode_per_request_s=1.0)
    >>> limits, work = EngineLimits(kv_tokens=np.inf, max_running=8), Trajectories.of(1, [20, 20])
    >>> alone = simulate_rollout(work, 1, cost=cost, limits=limits)
    >>> alone.makespan_s, joined_s(work, alone, 1, 20.0, cost=cost, limits=limits)
    (38.0, 28.0)
    """
    own = len(alone.members)
    had = generated_at(alone, trajectories, at_s)
    hits, place, moved = (np.zeros(len(trajectories), dtype=np.int64) for _ in range(3))
    left = had < trajectories.response_tokens
    for replica, members in enumerate(alone.members):
        hits[members] = prefix_hits(trajectories.take(members), limits)
        rest = members[left[members]]
        place[rest] = replica
        moved[rest] = ~_kept(len(rest), own / (own + more))
    if not left.any():
        return alone.makespan_s
    goes = np.flatnonzero(moved)
    place[goes] = own + np.arange(len(goes)) % more
    context = trajectories.prompt_tokens + had
    cached = np.where(moved > 0, 0, np.where(had > 0, context - 1, hits))
    served = replace(continued(trajectories, had), cached_tokens=cached, shared_tokens=None).take(left)
    dealt, replicas = place[left], own + more
    if heaviest is not None and heaviest + 1 < replicas:
        rest = (trajectories.response_tokens - had)[left].astype(np.float64)
        last = may_be_last(dealt, rest, np.bincount(dealt, rest, replicas), heaviest)
        some = np.isin(dealt, last)
        served, dealt, replicas = served.take(some), np.searchsorted(last, dealt[some]), len(last)
    result = simulate_rollout(served, replicas, cost=cost, limits=limits, routing=dealt, options=options)
    return at_s + result.makespan_s


def _kept(count: int, share: float) -> BoolArray:
    """Which of ``count`` requests stay: about ``share`` of them, evenly, the first always.

    >>> _kept(4, 0.5).tolist()
    [True, False, True, False]
    """
    before = np.ceil(np.round(np.arange(count + 1) * share, 9))
    return np.asarray(np.diff(before) > 0)


def joined_curve_s(
    trajectories: Trajectories, alone: RolloutResult, more: int, *, cost: EngineStepCost, limits: EngineLimits,
    options: EngineOptions = PLAIN, heaviest: int | None = None,
) -> FloatArray:  # fmt: skip
    """R' where ``more`` replicas, one at least, join at each of `AT` of the makespan alone [s] ``[AT]``.

    Arguments: `joined_s`.
    """
    ends = [
        joined_s(trajectories, alone, more, at, cost=cost, limits=limits, options=options, heaviest=heaviest)
        for at in (AT[:-1] * alone.makespan_s).tolist()
    ]
    return np.array([*ends, alone.makespan_s])


def read_off_s(curve_s: FloatArray, at_s: npt.ArrayLike) -> FloatArray:
    """R' of rows of curves where others join at ``at_s``; never above the makespan alone [s] ``[rows]``.

    Parameters
    ----------
    curve_s : of `joined_curve_s` ``[rows, AT]``

    >>> read_off_s((5.0 + 5.0 * AT)[None], [5.0]).round(2).tolist()
    [7.5]
    """
    alone = curve_s[:, -1]
    share = np.clip(np.asarray(at_s, np.float64) / alone, 0.0, 1.0)
    upper = np.clip(np.searchsorted(AT, share, side="left"), 1, len(AT) - 1)
    row, weight = np.arange(len(alone)), (share - AT[upper - 1]) / (AT[upper] - AT[upper - 1])
    low, high = curve_s[row, upper - 1], curve_s[row, upper]
    return np.minimum(low + weight * (high - low), alone)
