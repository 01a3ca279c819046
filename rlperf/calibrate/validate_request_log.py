"""Request logs of a serving engine, predicted against measured: latency, TTFT and TPOT of every request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rlperf.calibrate.requests.log import RequestLog, read_request_log
from rlperf.calibrate.requests.replay import replay, setup_of
from rlperf.calibrate.validate import Outcome, PredictedFigure, Report, report_of
from rlperf.errors import SpecError

METRICS = ("latency_s", "ttft_s", "tpot_s")


def report(paths: Sequence[Path], fit: Sequence[Path] = ()) -> Report:
    """Latency, TTFT and TPOT of every request of the folders, by the shipped calibrations alone."""
    if fit:
        raise SpecError("kind request_log is predicted from the shipped calibrations; --fit belongs to engine_trace")
    logs = [read_request_log(path) for path in paths]
    predictions = tuple(one for log in logs for one in predictions_of(log))
    rows = sum(len(log.names) for log in logs)
    return report_of("request_log", ", ".join(map(str, paths)), rows, Outcome(predictions))


def predictions_of(log: RequestLog) -> list[PredictedFigure]:
    """All metrics of all requests; the interval replays the log with every cost at either end of its spread.

    The lower end also takes the machine at its best, where the log leaves that open.
    """
    setup = setup_of(log)
    middle, high = (replay(log, setup, factor) for factor in (1.0, setup.spread.high))
    low = replay(log, setup, setup.spread.low, setup.quick)
    measured = log.measured
    group = log.folder.resolve().name
    rows = []
    for metric in METRICS:
        values = zip(
            log.names,
            *(getattr(times, metric).tolist() for times in (measured, middle, low, high)),
            strict=True,
        )
        for name, was, predicted, least, most in values:
            if math.isnan(was) or was <= 0.0:  # a response of one token has no time per further token
                continue
            bounds = min(least, predicted), max(most, predicted)
            rows.append(
                PredictedFigure(
                    f"{group}/{name}",
                    group,
                    metric,
                    was,
                    predicted,
                    *bounds,
                    calibration=setup.calibration,
                    assumed=setup.assumed,
                    extrapolated=setup.extrapolated,
                )
            )
    return rows
