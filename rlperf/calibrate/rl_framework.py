"""Fits of what an RL framework adds around its stages: weight-sync paths and fixed overheads, from few measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlperf.cost.weight_sync import SyncPayload, SyncShape, weight_sync_s
from rlperf.specs.hardware import Hardware
from rlperf.specs.rl_calibration import WeightSyncFit


@dataclass(frozen=True)
class SyncObservation:
    """One measured weight sync."""

    row_id: str
    hardware: Hardware
    payload: SyncPayload
    shape: SyncShape
    measured_s: float


def fit_weight_sync(
    start: WeightSyncFit, observations: Sequence[SyncObservation], free: Sequence[str] = ("fixed", "rate")
) -> WeightSyncFit:
    """Least squares in ln(seconds) over the ``free`` constants of a transport, all others kept.

    The constants move in the logarithm, so none becomes negative. A small pull towards the start (standard deviation
    ln 10) keeps what few rows cannot identify where it was.

    Raises
    ------
    ValueError : fewer observations than free constants
    """
    from scipy.optimize import least_squares

    if len(observations) < len(free):
        raise ValueError(f"{len(free)} constants cannot be fitted to {len(observations)} measurements")
    first = np.log([float(getattr(start, name)) for name in free])

    def at(logs: np.ndarray) -> WeightSyncFit:
        return start.model_copy(update={name: float(np.exp(value)) for name, value in zip(free, logs, strict=True)})

    def residuals(logs: np.ndarray) -> np.ndarray:
        fit = at(logs)
        errors = [
            np.log(float(weight_sync_s(o.hardware, fit, o.payload, o.shape)) / o.measured_s) for o in observations
        ]
        return np.concatenate([errors, 0.01 * (logs - first) / np.log(10.0)])

    return at(least_squares(residuals, first).x)
