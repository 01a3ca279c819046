"""Robust fits in the logarithm, and errors on left-out values of a shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from rlperf.calibrate.statistics import absolute_percentage_errors, spread_of
from rlperf.errors import SpecError
from rlperf.layout import BoolArray, FloatArray
from rlperf.specs.calibration import Quality, Spread

Predict = Callable[[FloatArray, BoolArray], FloatArray]
"""Seconds from parameters, for the rows of a mask."""


@dataclass(frozen=True)
class Bounds:
    """Start, lower and upper limit of every parameter (all positive).

    ``pull`` is added to the misfit for a factor of e between a parameter and ``center``.
    """

    start: FloatArray
    low: FloatArray
    high: FloatArray
    center: FloatArray
    pull: float = 0.0

    @classmethod
    def of(cls, *triples: tuple[float, float, float], pull: float = 0.0) -> Bounds:
        """From (low, start, high) of each parameter."""
        table = np.asarray(triples, dtype=np.float64)
        return cls(table[:, 1], table[:, 0], table[:, 2], table[:, 1], pull)

    def held(self, place: int, value: float) -> Bounds:
        """The same with one parameter known, to a thousandth."""
        at = np.arange(len(self.start)) == place
        start = np.where(at, value, self.start)
        low, high = np.where(at, value / 1.001, self.low), np.where(at, value * 1.001, self.high)
        return Bounds(start, low, high, start, self.pull)


@dataclass(frozen=True)
class Fitted:
    """Parameters of a fit with its errors; ``left_out``: every row predicted by a fit that did not see it."""

    parameters: FloatArray
    predicted: FloatArray
    left_out: dict[str, FloatArray]
    measured: FloatArray

    def quality(self, rows: str) -> Quality:
        """Errors and spread for a calibration file."""
        pooled = np.concatenate(list(self.left_out.values())) if self.left_out else self.predicted
        truth = np.concatenate([self.measured] * max(len(self.left_out), 1))
        known = np.isfinite(pooled)
        return Quality(
            n=len(self.measured),
            in_sample_mape=round(float(absolute_percentage_errors(self.predicted, self.measured).mean()), 2),
            left_out_mape=round(float(absolute_percentage_errors(pooled[known], truth[known]).mean()), 2),
            left_out_rule="one value left out in turn: " + ", ".join(self.left_out),
            rows=rows,
            spread=spread_of(pooled[known], truth[known]) if known.any() else Spread(),
        )


def fit_log(predict: Predict, bounds: Bounds, measured: FloatArray, rows: BoolArray, *, outliers: bool) -> FloatArray:
    """Parameters that minimise the soft absolute difference of log seconds over ``rows``.

    Soft L1 (scipy ``least_squares``) with a scale of 0.1: residuals beyond 10 % count linearly, so that single odd
    kernels do not bend the fit. Parameters are fitted in the logarithm, hence positive. Where ``outliers`` are several
    times off, and many, the fit goes on from there and from its start by Cauchy's loss, to which they hardly count.
    """
    from scipy.optimize import least_squares

    truth, center = np.log(measured[rows]), np.log(bounds.center)

    def residuals(z: FloatArray) -> FloatArray:
        misfit = np.asarray(np.log(predict(np.exp(z), rows)) - truth, dtype=np.float64)
        return np.concatenate([misfit, bounds.pull * (z - center)]) if bounds.pull else misfit

    start = np.log(bounds.start)
    with np.errstate(all="ignore"):
        defined = bool(np.isfinite(residuals(start)).all())
    if not defined:
        raise SpecError("timings that no kernel of such shapes can have: nothing can be fitted to them")

    def least(z: FloatArray, loss: Literal["soft_l1", "cauchy"]) -> Any:
        limits = np.log(bounds.low), np.log(bounds.high)
        return least_squares(residuals, z, bounds=limits, loss=loss, f_scale=0.1, max_nfev=150)

    result = least(start, "soft_l1")
    if outliers:
        inside = np.clip(result.x, np.log(bounds.low) + 1e-6, np.log(bounds.high) - 1e-6)
        result = min((least(z, "cauchy") for z in (inside, start)), key=lambda found: float(found.cost))
    return np.asarray(np.exp(result.x), dtype=np.float64)


def fit_with_left_out(
    predict: Predict,
    bounds: Bounds,
    measured: FloatArray,
    keys: dict[str, FloatArray],
    *,
    left_out: bool = True,
    outliers: bool = False,
) -> Fitted:
    """Fit all rows, and once more without each value of each key in turn (never random folds).

    Parameters
    ----------
    keys : name -> value of that part of the shape ``[rows]``; each distinct value is left out once
    outliers : see `fit_log`
    """
    everything = np.ones(len(measured), dtype=bool)
    parameters = fit_log(predict, bounds, measured, everything, outliers=outliers)
    without: dict[str, FloatArray] = {}
    warm = replace(bounds, start=np.clip(parameters, bounds.low * 1.0001, bounds.high * 0.9999))
    for name, values in keys.items() if left_out else ():
        distinct = np.unique(values)
        if len(distinct) < 2:
            continue
        prediction = np.full(len(measured), np.nan)
        for value in distinct:
            held = values == value
            prediction[held] = predict(fit_log(predict, warm, measured, ~held, outliers=outliers), held)
        without[name] = prediction
    return Fitted(parameters, predict(parameters, everything), without, measured)
