"""The linear model behind `rlperf.calibrate.logs`: overheads and errors of the physics, with normal priors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

OVERHEADS: Mapping[str, str] = {
    "engine_host": "rollout",
    "training.scoring_pass": "scoring",
    "training.update": "training",
    "weight_sync.fixed": "weight_sync",
    "step": "other",
}
"""Constant of `FrameworkCalibration` -> the stage that it stands in."""
PHYSICS_ERROR: Mapping[str, float] = {
    "rollout": 0.06,
    "scoring": 0.06,
    "training": 0.06,
    "weight_sync": 0.15,
    "other": 0.0,
}
"""Standard deviation of g_s - 1: what left-out rows of the calibrations show of the stage predictions."""
IDENTIFIED = 0.25
"""An overhead counts as identified where half its 90 % interval is below this share of its value."""


@dataclass(frozen=True)
class FittedOverhead:
    """One constant: what was shipped, what the log says, with the 5th and 95th percentile [s]."""

    name: str
    stage: str
    shipped: float
    value: float
    low: float
    high: float
    identified: bool
    reason: str = ""


@dataclass(frozen=True, eq=False)
class Stage:
    """Measurements and physics of one stage over the rl_steps, and how often each overhead occurs."""

    name: str
    measured: FloatArray
    physics: FloatArray
    occurs: Mapping[str, FloatArray]


def posterior(
    stages: Sequence[Stage], names: Sequence[str], start: Mapping[str, float]
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Mean and covariance of (overheads, g of every stage), and the noise of every stage over its value.

    The physics is taken at its word (g = 1) unless letting it move explains the log better by more than chance (a
    likelihood ratio beyond its 99th percentile). The covariance carries the error of the physics in either case.
    """
    exact, _, misfit, noise = _solved(stages, names, start, 0.0)
    moved, covariance, better, quieter = _solved(stages, names, start, 1.0)
    mean, noise = (moved, quieter) if misfit - better > CHANCE * len(stages) else (exact, noise)
    return mean, covariance, noise


CHANCE = 6.63
"""99th percentile of chi-squared with one degree of freedom, per stage."""


def _solved(
    stages: Sequence[Stage], names: Sequence[str], start: Mapping[str, float], freedom: float
) -> tuple[FloatArray, FloatArray, float, FloatArray]:
    """Mean, covariance, -2 log likelihood and noise by stage, with ``freedom`` times `PHYSICS_ERROR` of slack in g."""
    noise, expected = np.full(len(stages), 0.05), None
    prior, weight = _prior(stages, names, start, freedom)
    for _ in range(4):
        blocks = [_weighted(stage, k, len(stages), names, noise[k], expected) for k, stage in enumerate(stages)]
        system = np.vstack([*(design for design, _ in blocks), np.diag(weight)])
        right = np.concatenate([*(target for _, target in blocks), weight * prior])
        mean = expected = _nonnegative(system, right)
        misfits = [target - design @ mean for design, target in blocks]
        # Residuals are in units of the noise that was assumed: their size corrects it, stage by stage.
        sizes = [np.sqrt((misfit**2).sum() / max(misfit.size - 1, 1)) for misfit in misfits]
        noise = np.clip(noise * np.array(sizes), 1e-3, 20.0)
    covariance = np.linalg.inv(system.T @ system)
    steps = np.array([misfit.size for misfit in misfits])
    return mean, covariance, float((2.0 * steps * np.log(noise)).sum()), noise


def _weighted(
    stage: Stage, index: int, count: int, names: Sequence[str], noise: float, expected: FloatArray | None
) -> tuple[FloatArray, FloatArray]:
    """Rows of one stage over sigma m; m as expected once there is a first solution, because measured values that happen
    to be low would weigh too much."""
    known = ~np.isnan(stage.measured)
    block = np.zeros((int(known.sum()), len(names) + count))
    for name, occurs in stage.occurs.items():
        block[:, names.index(name)] = occurs[known]
    block[:, len(names) + index] = stage.physics[known]
    size = stage.measured[known] if expected is None else block @ expected
    typical = max(float(np.abs(np.mean(size))), 1e-3)
    scale = 1.0 / (noise * np.maximum(np.abs(size), 0.2 * typical))
    return block * scale[:, None], stage.measured[known] * scale


def _prior(
    stages: Sequence[Stage], names: Sequence[str], start: Mapping[str, float], freedom: float
) -> tuple[FloatArray, FloatArray]:
    """Prior mean and 1 / standard deviation: overheads anywhere up to the whole stage, g near 1."""
    mean = [start[name] for name in names] + [1.0] * len(stages)
    whole = {name: _most(stages, name) for name in names}
    weight = [1.0 / max(3.0 * whole[name], 1e-9) for name in names]
    weight += [1.0 / max(freedom * PHYSICS_ERROR[stage.name], 1e-6) for stage in stages]
    return np.array(mean), np.array(weight)


def _most(stages: Sequence[Stage], name: str) -> float:
    """The overhead if it were the whole of its stage."""
    for stage in stages:
        if name in stage.occurs:
            size = abs(float(np.nanmean(stage.measured))) + float(np.nanstd(stage.measured))
            return size / max(float(stage.occurs[name].mean()), 1e-9)
    return 1.0


def _nonnegative(system: FloatArray, right: FloatArray) -> FloatArray:
    """Least squares with every unknown at least 0."""
    from scipy.optimize import lsq_linear

    scale = np.maximum(np.abs(system).max(axis=0), 1e-12)
    found = lsq_linear(system / scale, right, bounds=(0.0, np.inf)).x
    return np.asarray(found / scale, np.float64)


def fitted_overhead(
    name: str, k: int, shipped: float, mean: FloatArray, covariance: FloatArray, steps: int, most: float
) -> FittedOverhead:
    """One constant with its 90 % interval (Student's t over the rl_steps); ``most``: what is plausible [s]."""
    from scipy.stats import t

    half = float(t.ppf(0.95, max(steps - 1, 1))) * float(np.sqrt(covariance[k, k]))
    value = float(mean[k])
    if value > most:
        reason = f"above {most:g} s: its stage is slower than the physics for another reason (lengths, settings)"
    elif value <= 0 or half >= IDENTIFIED * value:
        reason = "too small beside the noise and the physics of its stage to be told apart"
    else:
        reason = ""
    return FittedOverhead(
        name, OVERHEADS[name], shipped, value, max(value - half, 0.0), value + half, not reason, reason
    )


def stage_errors(stages: Sequence[Stage], values: Mapping[str, float]) -> dict[str, float]:
    """Median absolute error of every stage under given overheads [1]."""
    found = {}
    for stage in stages:
        predicted = stage.physics + sum(occurs * values[name] for name, occurs in stage.occurs.items())
        known = ~np.isnan(stage.measured) & (np.abs(stage.measured) > 1e-9)
        if known.any():
            error = np.abs(predicted[known] - stage.measured[known]) / np.abs(stage.measured[known])
            found[stage.name] = float(np.median(error))
    return found
