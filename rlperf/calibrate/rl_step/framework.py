"""Fits of what an RL framework adds around its stages: weight-sync paths and fixed overheads, from few measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlperf.cost.weight_sync import SyncPayload, SyncShape, weight_sync_s
from rlperf.specs.hardware import Hardware
from rlperf.specs.overhead import Overhead
from rlperf.specs.rl_calibration import FrameworkCalibration, WeightSyncFit


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


CONSTANTS = (
    "engine_host",
    "engine_host_per_request",
    "step",
    "training.update",
    "training.scoring_pass",
    "training.moe_layer",
    "training.host_layer",
    "weight_sync.fixed",
    "weight_sync.rate",
    "weight_sync.per_tensor",
)
"""Constants that measured rl_steps can tell something about; weight_sync is that of a framework's first transport."""


def constant(framework: FrameworkCalibration, name: str) -> float:
    """Value of one of `CONSTANTS` (seconds; rate in bytes/s), 0 of one that a framework does not have."""
    owner, _, field = name.rpartition(".")
    if owner == "weight_sync":
        return float(getattr(framework.weight_sync[0], field))
    holder = framework.training if owner == "training" else framework
    value = getattr(holder, field)
    if value is None:
        return 0.0
    return float(value.value if isinstance(value, Overhead) else value)


def overhead(framework: FrameworkCalibration, name: str) -> Overhead:
    """One of `CONSTANTS` that every framework has, with where it is from."""
    owner, _, field = name.rpartition(".")
    found = getattr(framework.training if owner == "training" else framework, field)
    assert isinstance(found, Overhead)
    return found


def with_constants(framework: FrameworkCalibration, values: Mapping[str, float]) -> FrameworkCalibration:
    """The calibration with other values of some of `CONSTANTS`; where they are from stays as it is."""
    top: dict[str, object] = {}
    training: dict[str, object] = {}
    sync: dict[str, object] = {}
    for name, value in values.items():
        owner, _, field = name.rpartition(".")
        if owner == "weight_sync":
            sync[field] = value
        else:
            holder, target = (framework.training, training) if owner == "training" else (framework, top)
            held = getattr(holder, field)
            if held is not None:
                target[field] = held.model_copy(update={"value": value}) if isinstance(held, Overhead) else value
    if training:
        top["training"] = framework.training.model_copy(update=training)
    if sync:
        first = framework.weight_sync[0].model_copy(update=sync)
        top["weight_sync"] = (first, *framework.weight_sync[1:])
    return framework.model_copy(update=top)


def fit_framework(
    framework: FrameworkCalibration,
    residuals: Callable[[FrameworkCalibration], Sequence[float]],
    free: Sequence[str],
    *,
    pull: float = 0.05,
) -> FrameworkCalibration:
    """Least squares over the ``free`` constants.

    Parameters
    ----------
    residuals : ln(predicted / measured) of every stage of the calibration rows under a candidate calibration
    pull : weight of staying at the start, per factor of ten: constants that the rows do not identify stay there
    """
    from scipy.optimize import least_squares

    first = np.log([max(constant(framework, name), 1e-9) for name in free])

    def at(logs: np.ndarray) -> FrameworkCalibration:
        return with_constants(framework, {n: float(np.exp(v)) for n, v in zip(free, logs, strict=True)})

    def errors(logs: np.ndarray) -> np.ndarray:
        return np.concatenate([residuals(at(logs)), pull * (logs - first) / np.log(10.0)])

    return at(least_squares(errors, first, diff_step=np.array([1e-3]), xtol=1e-4, ftol=1e-4, max_nfev=30).x)
