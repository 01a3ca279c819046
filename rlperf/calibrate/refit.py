"""A quick fit from nothing: constants start in the middle of their bounds, so no row speaks through the start.

`rlperf.calibrate.trainers.descend` moves shipped constants, which the rows have shaped already. A fit that has to
forget rows starts where no row stands: at the geometric mean of each knob's bounds. Seconds are followed along their
tangent in the logarithms of the constants, which is the same for every subset of rows and is made once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlperf.calibrate.trainer_rows import TrainingRow
from rlperf.calibrate.trainers import Knob, predict_seconds
from rlperf.layout import BoolArray, FloatArray
from rlperf.specs.trainer_calibration import TrainerCalibration

STEP = 0.05
"""Step of the difference quotients, in the logarithm of a constant."""


@dataclass(frozen=True)
class Tangent:
    """ln seconds ``[rows]`` at one set of constants, and slopes over the logarithms of knobs ``[rows, knobs]``."""

    trainer: TrainerCalibration
    value: FloatArray
    slope: FloatArray

    def of(self, part: BoolArray) -> Tangent:
        """The same for some of the rows."""
        return Tangent(self.trainer, self.value[part], self.slope[part])


def middle(trainer: TrainerCalibration, knobs: Sequence[Knob]) -> TrainerCalibration:
    """A backend with every knob at the geometric mean of its bounds: what is believed of it without a row."""
    for knob in knobs:
        trainer = knob.write(trainer, float(np.sqrt(knob.low * knob.high)))
    return trainer


def log_seconds(trainer: TrainerCalibration, rows: Sequence[TrainingRow]) -> FloatArray:
    """ln of the seconds of rows under one set of constants ``[rows]``."""
    return np.asarray(np.log(predict_seconds(rows, {row.backend: trainer for row in rows})))


def tangent(trainer: TrainerCalibration, rows: Sequence[TrainingRow], knobs: Sequence[Knob]) -> Tangent:
    """Slopes by difference quotients; a device's constants are asked of that device's rows alone."""
    value = log_seconds(trainer, rows)
    entries = np.array([trainer.generation(row.hardware.device).generation for row in rows])
    slope = np.zeros((len(rows), len(knobs)))
    for column, knob in enumerate(knobs):
        head, name, *_ = knob.path.split(".")
        touched = np.flatnonzero(entries == name) if head == "generations" else np.arange(len(rows))
        if len(touched):
            moved = knob.write(trainer, knob.read(trainer) * float(np.exp(STEP)))
            slope[touched, column] = (log_seconds(moved, [rows[int(i)] for i in touched]) - value[touched]) / STEP
    return Tangent(trainer, value, slope)


@dataclass(frozen=True)
class Refit:
    """Constants fitted from nothing, ln(measured / predicted) on the rows seen, and which knobs a row speaks of."""

    trainer: TrainerCalibration
    residual: FloatArray
    determined: BoolArray


def refit(
    start: Tangent,
    rows: Sequence[TrainingRow],
    knobs: Sequence[Knob],
    *,
    ridge: float,
    rounds: int = 6,
) -> Refit:
    """Least mean |ln(predicted / measured)| of configurations, with a weak pull to the middle of the bounds.

    The misfit of `rlperf.calibrate.trainers.descend`; the pull is ``ridge`` / n x (ln of the change over half the ln
    of the bounds' ratio)^2, since the start is no judgement but the middle. Up to ``rounds`` tangents are followed,
    each halved until the misfit falls; the first one is at ``start``, whose rows are ``rows``.
    """
    logs = np.log(np.array([row.update_s for row in rows], dtype=np.float64))
    names, index = np.unique([row.configuration for row in rows], return_inverse=True)
    weight = 1.0 / np.bincount(index)[index] / len(names)
    half = np.array([0.5 * np.log(knob.high / knob.low) for knob in knobs])
    pull = ridge / len(names) / half**2
    found, move = start, np.zeros(len(knobs))
    determined = np.asarray((np.abs(start.slope) > 1e-6).any(axis=0))
    best = float((weight * np.abs(found.value - logs)).sum())
    for turn in range(rounds):
        if turn:
            found = tangent(found.trainer, rows, knobs)
        wanted = _follow(found, logs, weight, pull, half, move)
        for share in (1.0, 0.5, 0.25):
            candidate = move + share * (wanted - move)
            trainer = _moved(start.trainer, knobs, candidate)
            value = log_seconds(trainer, rows)
            loss = float((weight * np.abs(value - logs)).sum() + (pull * candidate**2).sum())
            if loss < best:
                break
        else:
            break
        gain, best, move = best - loss, loss, candidate
        found = Tangent(trainer, value, found.slope)
        if gain < 1e-3:
            break
    return Refit(found.trainer, logs - found.value, determined)


def _moved(trainer: TrainerCalibration, knobs: Sequence[Knob], move: FloatArray) -> TrainerCalibration:
    for knob, by in zip(knobs, move, strict=True):
        trainer = knob.write(trainer, float(np.sqrt(knob.low * knob.high) * np.exp(by)))
    return trainer


def _follow(
    at: Tangent, logs: FloatArray, weight: FloatArray, pull: FloatArray, half: FloatArray, move: FloatArray
) -> FloatArray:
    """The move that is best along a tangent: reweighted least squares, one knob after the other inside its bounds.

    |r| is r^2 / |r|, with |r| of the turn before; a bound is met by clipping, which is exact for one knob at a time.
    """
    now = move.copy()
    residual = at.value - logs
    for _ in range(80):
        scale = weight / np.maximum(np.abs(residual), 1e-3) / 2.0
        for k in range(len(now)):
            slope = at.slope[:, k]
            stiff = float((scale * slope**2).sum() + pull[k])
            step = -(float((scale * slope * residual).sum()) + pull[k] * now[k]) / stiff
            new = float(np.clip(now[k] + step, -half[k], half[k]))
            residual = residual + slope * (new - now[k])
            now[k] = new
    return now
