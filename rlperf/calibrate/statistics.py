"""Summary statistics of predicted against measured, and of residuals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlperf.errors import Problem, SpecError
from rlperf.layout import FloatArray
from rlperf.specs.calibration import Spread


def absolute_percentage_errors(predicted: FloatArray, measured: FloatArray) -> FloatArray:
    """100 |predicted / measured - 1| [%], elementwise.

    >>> absolute_percentage_errors(np.array([11.0, 9.0]), np.array([10.0, 10.0])).round(6).tolist()
    [10.0, 10.0]
    """
    return np.asarray(100.0 * np.abs(predicted / measured - 1.0))


def weighted_quantile(values: FloatArray, weight: FloatArray, share: float) -> float:
    """The least value that, with all below it, holds ``share`` of the weight.

    >>> weighted_quantile(np.array([3.0, 1.0, 2.0]), np.array([1.0, 8.0, 1.0]), 0.9)
    2.0
    """
    order = np.argsort(values)
    held = np.cumsum(weight[order]) / weight.sum()
    return float(values[order[min(int(np.searchsorted(held, share)), len(order) - 1)]])


MOST_RANKED = 400
"""Rows that are ranked: of more, evenly spaced ones."""


def pairwise_ranking(predicted: FloatArray, measured: FloatArray) -> float | None:
    """Share of pairs that the prediction orders as the measurement does; pairs within 2 % of each other are left out.

    None without a pair.

    >>> pairwise_ranking(np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0]))
    0.6666666666666666
    """
    if len(measured) > MOST_RANKED:
        chosen = np.linspace(0, len(measured) - 1, MOST_RANKED).astype(int)
        predicted, measured = predicted[chosen], measured[chosen]
    first, second = np.triu_indices(len(measured), 1)
    apart = np.abs(np.log(measured[first] / measured[second])) > 0.02
    if not apart.any():
        return None
    same = np.sign(predicted[first] - predicted[second]) == np.sign(measured[first] - measured[second])
    return float(same[apart].mean())


@dataclass(frozen=True)
class Summary:
    """Errors of one metric in one group [%], ranking and coverage as shares.

    ``wape`` weighs every row by its size: sum of absolute errors over sum of measured. ``split`` says whether the rows
    were *held out* of a fit or are *new*; see `rlperf.calibrate.splits`. ``median_width`` is the median of the
    intervals' widths over the prediction: coverage alone is had by any interval that is wide enough.
    """

    metric: str
    group: str
    split: str
    rows: int
    median_ape: float
    mape: float
    p90_ape: float
    wape: float
    median_bias: float
    pairwise_ranking: float | None
    interval_coverage: float | None
    median_width: float | None


def summarise(
    metric: str,
    group: str,
    split: str,
    predicted: Sequence[float],
    measured: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
) -> Summary:
    """Statistics of one metric in one group; ``median_bias`` is the median of predicted / measured - 1 [%]."""
    p, m, lo, hi = (np.asarray(values, dtype=np.float64) for values in (predicted, measured, low, high))
    errors = absolute_percentage_errors(p, m)
    known = np.isfinite(lo) & np.isfinite(hi)
    return Summary(
        metric=metric,
        group=group,
        split=split,
        rows=len(m),
        median_ape=float(np.median(errors)),
        mape=float(errors.mean()),
        p90_ape=float(np.quantile(errors, 0.9)),
        wape=float(100.0 * np.abs(p - m).sum() / m.sum()),
        median_bias=float(100.0 * np.median(p / m - 1.0)),
        pairwise_ranking=pairwise_ranking(p, m),
        interval_coverage=float(((lo <= m) & (m <= hi))[known].mean()) if known.any() else None,
        median_width=float(np.median(((hi - lo) / p)[known])) if known.any() else None,
    )


def spread_of(predicted: FloatArray, measured: FloatArray) -> Spread:
    """5th and 95th percentile of measured over predicted."""
    ratio = np.asarray(measured) / np.asarray(predicted)
    low, high = (round(float(each), 3) for each in np.quantile(ratio, [0.05, 0.95]))
    if low <= 0.0:
        said = f"the shortest of {len(ratio)} measured times are below a thousandth of what the fit gives them"
        raise SpecError(Problem(said, suggestion="look at their shapes and units"))
    return Spread(low=low, high=high)
