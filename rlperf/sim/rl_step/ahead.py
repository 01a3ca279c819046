r"""Agents whose rollout runs ahead of the trainer: how many are under way, and what an rl_step then takes the engines.

With a staleness of k no more than k + 1 batches are under way between the start of their rollout and the end of their
training. What the trainer has, and what waits until a batch of it is there, the engines have not (Little's law):

.. math:: x = k + 1 - \frac{Q + W + Y + \min(P / 2,\ R - R_g)}{P}

batches of groups are in the rollout where an rl_step lasts P seconds, so that x lies between k - 1/2 (the trainer is
never waited for) and k + 1 (it takes no time). ``docs/theory/rollout.md`` has the equations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.layout import FloatArray
from rlperf.sim.rl_step.flow import Flow
from rlperf.sim.rl_step.refilled import with_under_way

AT: FloatArray = np.array([-0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 0.95])
"""Batches of groups in the rollout beyond k for which its seconds are told: x - k [1]."""
PHASES, KNOWN = 16, 16
"""Times of an rl_step at which those under way are counted, and numbers under way for which engines are asked [1]."""


@dataclass(frozen=True, eq=False)
class Ahead:
    """What an rl_step takes the engines, and what of it reads contexts that were evicted [s] ``[AT]``."""

    seconds: FloatArray
    again_s: FloatArray


def ahead(cost: EngineStepCost, limits: EngineLimits, replicas: int, flow: Flow) -> Ahead:
    r"""What agents that run ahead take at every number of batches under way.

    A weight sync lets a batch start at once. Its trajectories end as their lengths say, so that a time t after a sync

    .. math::

        b(t) = \sum_{j \ge 0} G\Big(\frac{t + j P}{S}\Big), \quad
        \frac{1}{T} = \frac{1}{P} \int_0^P \frac{dt}{T(b(t))}

    batches are under way, G the share of trajectories that are longer than so many mean ones and S = P b the time of
    a mean one; T(b) is what engines take with b under way all the time (`with_under_way`). Of less than one batch those
    are left whose contexts are long: they are served no faster than all of it.
    """
    waits = flow.waits
    assert waits is not None
    each, most = flow.requests / replicas, flow.under_way(np.inf, replicas) * replicas / flow.requests
    if flow.allowed.most > flow.allowed.batches:
        mean = (flow.allowed.batches + AT) * waits.of_groups
        under = np.array([_in_turn(waits.lengths, batches) for batches in mean.tolist()])
    else:  # the program counts those that are under way
        under = np.full((AT.size, 1), flow.allowed.batches)
    under, one = np.minimum(under, most), min(1.0, most)
    known = np.unique(np.maximum([one, *np.quantile(under, np.linspace(0.0, 1.0, KNOWN))], 1.0 / each))
    states = [with_under_way(cost, limits, replicas, flow, batches * each) for batches in known.tolist()]
    response_s, again_s = known * [state.seconds for state in states], [state.again_s for state in states]
    # between numbers that are known S = T b is told, which hardly grows where tools take most of the time
    whole = one / np.interp(one, known, response_s)
    rates = under / np.interp(under, known, response_s)
    rates = np.where(under < one, np.minimum(rates, whole), rates)
    again = (rates * np.interp(under, known, again_s)).sum(axis=1) / rates.sum(axis=1)
    return Ahead(1.0 / rates.mean(axis=1), again)


def _in_turn(lengths: FloatArray, mean: float) -> FloatArray:
    """b(t) at `PHASES` times of an rl_step, of so many batches in the mean ``[PHASES]``."""
    age = (np.arange(PHASES) + 0.5) / PHASES + np.arange(np.ceil(lengths[-1] * mean) + 1.0)[:, None]
    longer = lengths.size - np.searchsorted(lengths, age.ravel() / max(mean, 1e-9), side="right")
    return np.asarray(longer.reshape(age.shape).sum(axis=0) / lengths.size)


def batches_beyond(period_s: FloatArray, rest_s: FloatArray, apart_s: FloatArray, grouped: FloatArray) -> FloatArray:
    """x - k where an rl_step lasts so long [1].

    Parameters
    ----------
    rest_s : Q + W + Y, from a batch's last response to its weights [s]
    apart_s : R - R_g, from a group's last response to its batch's [s]
    grouped : whether groups train in the order in which they end, and so wait half an rl_step at most
    """
    waits_s = np.where(grouped > 0, np.minimum(apart_s, period_s / 2.0), apart_s)
    return np.asarray(1.0 - (rest_s + waits_s) / np.maximum(period_s, 1e-300))


def settled_s(
    ahead_s: FloatArray, pause_s: FloatArray, rest_s: FloatArray, apart_s: FloatArray, grouped: FloatArray
) -> FloatArray:  # fmt: skip
    """What an rl_step takes the engines where that and what holds batches beside them agree [s] ``[rows]``.

    The shortest rl_step that lasts as long as it takes them; where the trainer takes longer, what they then take.

    Parameters
    ----------
    ahead_s : `Ahead.seconds` ``[rows][AT]``
    pause_s : what a weight sync takes from engines [s] ``[rows]``
    rest_s, apart_s, grouped : as in `batches_beyond`

    >>> settled_s(np.full((1, AT.size), 40.0), *(np.array([each]) for each in (1.0, 30.0, 5.0, 1.0))).tolist()
    [40.0]
    """
    left = 1.0 - AT
    lasts_s = (rest_s + apart_s)[:, None] / left
    with np.errstate(divide="ignore"):
        halved = np.where(left > 0.5, rest_s[:, None] / np.maximum(left - 0.5, 1e-12), np.inf)
    lasts_s = np.where(np.reshape(grouped, (-1, 1)) > 0, np.minimum(lasts_s, halved), lasts_s)
    over = ahead_s + pause_s[:, None] - lasts_s
    first = np.where((over <= 0).any(axis=1), (over <= 0).argmax(axis=1), AT.size - 1)
    before, rows = np.maximum(first - 1, 0), np.arange(first.size)
    high, low = over[rows, before], over[rows, first]
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.where((first > 0) & (low <= 0.0), high / (high - low), 1.0)
    between = ahead_s[rows, before] + share * (ahead_s[rows, first] - ahead_s[rows, before])
    return np.where(np.isfinite(ahead_s[rows, first]), between, np.inf)
