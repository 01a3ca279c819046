"""Peers: what counts as abnormal against them, and the tests that say so."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from rlperf.diagnose import graph as g
from rlperf.layout import BoolArray, FloatArray, IntArray


@dataclass(frozen=True)
class Thresholds:
    """When something counts as abnormal.

    Attributes
    ----------
    rate : a device's seconds per unit of work over its peers' median
    link : a link's seconds per byte over its peers' median
    load : a rank's work over its peers' median
    stage : a pipeline stage's seconds over the mean of the stages
    abnormal : seconds over the peers' median where no work is known (ScalAna's threshold)
    tool : tool seconds of a rank over its peers' median
    deviations : and at least that many robust standard deviations above the peers
    gap : statistic of the spacing test above which the longest values stand apart (`apart`)
    queue : share of the requests' time in queues above which the engine is saturated
    serial : share of the rl_step from which serial work of the controller is a fault
    """

    rate: float = 1.1
    link: float = 1.4
    load: float = 1.3
    stage: float = 1.1
    abnormal: float = 1.3
    tool: float = 2.0
    deviations: float = 6.0
    gap: float = 5.0
    queue: float = 0.5
    serial: float = 0.05


@dataclass(frozen=True, eq=False)
class Fault:
    """Something abnormal.

    Attributes
    ----------
    kind : slow_device, slow_link, long_trajectory, data_imbalance, slow_tool, controller, stage_imbalance, kv_cache,
        queueing, slow_reward, straggler, slow_step, slowdown, scaling
    where : the place in words
    evidence : how it differs from its peers, in words
    change : what the graph would be without it
    vertices : those it makes slow, for the path ``[vertices]``
    rank, part, unit : the place; -1 where it has none
    pool : index of the pool; -1 where it has none
    """

    kind: str
    where: str
    evidence: str
    change: g.Change
    vertices: BoolArray
    rank: int = -1
    part: int = -1
    unit: int = -1
    pool: int = -1


def by_rank(mask: BoolArray, rank: IntArray, values: FloatArray) -> FloatArray:
    """Sum of values by rank ``[highest rank + 1]``; NaN where a rank has no vertex."""
    size = int(rank.max(initial=-1)) + 1
    total = np.bincount(rank[mask], weights=values[mask], minlength=size)
    return np.where(np.bincount(rank[mask], minlength=size) > 0, total, np.nan)


def stands_out(values: FloatArray, factor: float, deviations: float) -> IntArray:
    """Peers above ``factor`` times the median and ``deviations`` robust standard deviations (1.4826 MAD) above it."""
    known = np.isfinite(values)
    if known.sum() < 3:
        return np.zeros(0, dtype=np.int64)
    median = float(np.median(values[known]))
    spread = 1.4826 * float(np.median(np.abs(values[known] - median)))
    return np.flatnonzero(known & (values > factor * median) & (values - median > deviations * spread) & (median > 0))


def shift(values: FloatArray, factor: float, deviations: float, least: int = 3) -> int | None:
    """Where values rise for good: the first of them that belongs to the higher level, or None.

    The split is the one around whose two medians the values scatter least; the levels differ by ``factor`` and by
    ``deviations`` robust standard deviations of their scatter, at once. So do the ``least`` values on either side,
    and no slow growth is taken for a step.

    >>> shift(np.r_[np.linspace(19, 21, 8), np.linspace(33, 35, 16)], 1.3, 6.0)
    8
    >>> shift(np.linspace(20, 60, 24), 1.3, 6.0) is None
    True
    """
    splits = range(least, values.size - least + 1) if np.isfinite(values).all() else ()
    if not splits:
        return None

    def scatter(split: int) -> float:
        parts = (values[:split], values[split:])
        return float(sum(np.abs(part - np.median(part)).sum() for part in parts))

    split = min(splits, key=scatter)
    before, after = np.median(values[:split]), np.median(values[split:])
    near, then = np.median(values[split - least : split]), np.median(values[split : split + least])
    spread = 1.4826 * np.median(np.abs(np.r_[values[:split] - before, values[split:] - after]))
    apart_enough = after > factor * before > 0 and then > factor * near
    return split if apart_enough and after - before > deviations * spread else None


def apart(values: FloatArray, limit: float, most: int = 8, reach: int = 60) -> int:
    r"""How many of the largest values stand apart from the rest; 0 where none does.

    Two tests must agree. For the descending order statistics of any law with an exponential-like tail in log x, the
    normalised spacings :math:`D_k = k (\ln x_{(k)} - \ln x_{(k+1)})` are independent with one mean (Renyi 1953), so the
    ratio of one to the mean of the ``reach`` behind it follows F(2, 2 reach): 5 is exceeded once in 120 gaps. And the
    outliers lie further out than one in a hundred samples of that size would from a log-normal law with the robust
    spread of the values (1.4826 MAD of ln x).

    >>> apart(np.r_[np.linspace(90, 110, 40), 900.0], 5.0)
    1
    >>> apart(np.linspace(90, 110, 40), 5.0)
    0
    """
    logs = np.log(np.sort(values[values > 0])[::-1])
    most = min(most, max(logs.size // 20, 1), logs.size - 4)
    if most < 1:
        return 0
    spacing = (logs[:-1] - logs[1:]) * np.arange(1, logs.size)
    median = float(np.median(logs))
    far = median + 1.4826 * float(np.median(np.abs(logs - median))) * NormalDist().inv_cdf(1.0 - 0.01 / logs.size)
    for k in range(most, 0, -1):
        behind = spacing[k : k + reach]
        wide = spacing[k - 1] > limit * max(float(behind.mean()), 1e-9) and logs[k - 1] - logs[k] > np.log(1.3)
        if wide and logs[k - 1] > far:
            return k
    return 0


def scaled(graph: g.PerformanceGraph, mask: BoolArray, factor: FloatArray | float) -> g.Change:
    scale = np.ones(graph.vertices)
    scale[mask] = factor if isinstance(factor, float) else factor[mask]
    return g.Change(scale)


def place(graph: g.PerformanceGraph, pool: int, rank: int, part: int = -1) -> str:
    text = f"{graph.pools[pool]} {rank}"
    return text + (f", pipeline stage {part}" if part >= 0 else "")
