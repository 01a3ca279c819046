"""Kernel timings, predicted against measured, by constants that did not see the value they are tested on.

The shipped constants were fitted to such files, so every series is fitted anew without each value of its shape in
turn (one n, one k, one head count, one batch, one message size): what is scored is always left out.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rlperf.calibrate import collective_rows
from rlperf.calibrate.kernel_fits import KernelFit
from rlperf.calibrate.kernel_tables import read_series
from rlperf.calibrate.kernels import MINIMUM_ROWS, fit_series
from rlperf.calibrate.module_fits import mixer_of
from rlperf.calibrate.tables import Refusal, Table
from rlperf.calibrate.validate import Outcome, PredictedFigure, each_row
from rlperf.errors import SpecError
from rlperf.specs.calibration import load_device_calibration
from rlperf.specs.profiles import load_device


def predict_rows(path: Path, table: Table) -> Outcome:
    """Left-out predictions of every timing; a row has one for each part of its shape that is left out in turn.

    Published bus bandwidths of collectives are no timings of one machine to fit to: shipped constants predict them.
    """
    if set(collective_rows.COLUMNS) <= set(table.columns):
        return each_row(table, lambda row: [collective_rows.figure(row)])
    predictions: list[PredictedFigure] = []
    refused: list[Refusal] = []
    series = read_series(path)
    for name in dict.fromkeys(one.device for one in series):
        mine = [one for one in series if one.device == name]
        try:
            device = load_device(name)
        except SpecError as error:
            refused += [Refusal(row, error.problems[0].message) for one in mine for row in one.row_ids]
            continue
        base = load_device_calibration(device.name, relative=device.relative or "h100_sxm")
        fits = fit_series(mine, device, base)
        for fit in fits:
            predictions += _predictions(fit)
        seen = {row for fit in fits for row in fit.series.row_ids}
        for one in mine:
            if len(one.measured_s) < MINIMUM_ROWS:
                reason = f"series of fewer than {MINIMUM_ROWS} timings"
            elif one.kind == "sparse" and not mixer_of(one)[0]:
                reason = "a module that reads all keys, or of a model that rlperf does not have: no fit is made to it"
            else:
                reason = "an older version of a kernel that the file also holds, or skewed routing"
            refused += [Refusal(row, reason) for row in one.row_ids if row not in seen]
    return Outcome(tuple(predictions), tuple(refused))


def _predictions(fit: KernelFit) -> list[PredictedFigure]:
    """Predictions of one series; the interval of a row is the spread of the residuals of all other values."""
    found: list[PredictedFigure] = []
    one = fit.series
    for key, predicted in fit.fitted.left_out.items():
        ratio = one.measured_s / predicted
        shape = one.shape.get(key)
        for index in np.flatnonzero(np.isfinite(predicted)):
            others = ratio if shape is None else ratio[shape != shape[index]]
            low, high = np.quantile(others[np.isfinite(others)], [0.05, 0.95])
            value = float(predicted[index]) * 1e6
            found.append(
                PredictedFigure(
                    row_id=one.row_ids[index],
                    group=f"{one.name} without one {key}",
                    metric="latency_us",
                    measured=float(one.measured_s[index]) * 1e6,
                    predicted=value,
                    low=value * float(low),
                    high=value * float(high),
                    calibration=f"fitted to the file, one {key} left out",
                    stratum=f"{one.kind} {one.dtype}".strip(),
                )
            )
    return found
