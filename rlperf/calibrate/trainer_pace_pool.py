r"""How much longer training and scoring take under RL frameworks than backends' own rows say, pooled over frameworks.

A backend's seconds are fitted to pretraining: recipes tuned for it, full sequences, warm processes. What is counted of
an RL framework's own way (loss, gradients, packing, overlap) is costed; what is left of its stages is

.. math::

    \ln(y_i / \hat y_i) = \mu + u_{g(i)} + e_i,\quad
    \mu \sim N(0, \sigma^2),\ u_g \sim N(0, \tau^2),\ e_i \sim N(0, \epsilon^2)

with y_i measured and \hat y_i predicted seconds of row i, g(i) its framework. Every row is predicted with the overheads
of a framework that nobody fitted, rows far off count linearly, and rows of one configuration share one weight. The
deviations are stated, not estimated: four frameworks, three of one row, tell none. :math:`e^{\mu}` is the pace of a
framework that is none of these; one whose stages were fitted has none, for its own constants say it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlperf.calibrate.engine_host_pool import framework_of, pooled, stack_of_row
from rlperf.calibrate.leave_out_rl_step import stranger
from rlperf.calibrate.rl_step.predict import predict_step
from rlperf.calibrate.rl_step.rows import StepRow
from rlperf.layout import FloatArray
from rlperf.specs.overhead import Provenance
from rlperf.specs.rl_calibration import FrameworkCalibration, load_framework_calibration
from rlperf.specs.trainer_pace import Pace, TrainerPace

STAGES = {"training": "train_s", "scoring": "scoring_s"}
UNSURE = 0.2
"""Standard deviation of mu before a row is seen [1]."""
BETWEEN = {"training": 0.15, "scoring": 0.25}
"""Of u, between frameworks [1]."""
NOISE = 0.25
"""Of e: reruns, lengths and settings that publications leave open [1]."""


@dataclass(frozen=True)
class Residual:
    """ln(measured / predicted) of one stage of one row, by whose calibration and in which framework."""

    row_id: str
    configuration: str
    calibration: str
    framework: str
    error: float


def residuals(rows: Sequence[StepRow], trainer: str, stage: str) -> list[Residual]:
    """Of all rows of a backend that state a stage; LoRA apart, whose constants these rows were fitted to."""
    metric = STAGES[stage]
    told = [row for row in rows if row.trainer == trainer and not row.lora_rank and row.measured.get(metric, 0.0) > 0.0]
    return [
        Residual(
            row.row_id, str(row.configuration), framework_of(row), stack_of_row(row),
            float(np.log(row.measured[metric] / predict_step(row, framework=unfitted(row)).stage_s(metric))),
        )
        for row in told
    ]  # fmt: skip


def unfitted(row: StepRow) -> FrameworkCalibration:
    """The row's framework with overheads of one that nobody fitted, and no pace."""
    own = load_framework_calibration(row.framework)
    none = Pace(value=1.0, provenance=Provenance(source="none", date=""))
    pace = TrainerPace(trainer=row.trainer, training=none, scoring=none)
    return (stranger(own) if own.calibrated_on else own).model_copy(update={"pace": pace})


def fit_pace(told: Sequence[Residual], stage: str, date: str, without: str = "") -> Pace:
    """The pace of a framework that is none of the rows'; those that ``without``'s calibrations predict left out."""
    from scipy.optimize import least_squares

    kept = [one for one in told if one.calibration != without]
    names, group = np.unique([one.framework for one in kept], return_inverse=True)
    keys = [one.configuration for one in kept]
    weight = np.array([keys.count(key) ** -0.5 for key in keys]) / NOISE
    errors = np.array([one.error for one in kept])

    def off(flat: FloatArray) -> FloatArray:
        mean = flat[0] * UNSURE + flat[1:][group] * BETWEEN[stage]
        return np.concatenate([(mean - errors) * weight, flat])

    # soft L1: beyond two standard deviations a row counts linearly
    found = least_squares(off, np.zeros(len(names) + 1), loss="soft_l1", f_scale=2.0)
    slopes = np.asarray(found.jac)
    spread = np.hypot(np.sqrt(np.linalg.inv(slopes.T @ slopes)[0, 0]) * UNSURE, BETWEEN[stage])
    said = "stages of several frameworks", "rlperf.calibrate.trainer_pace_pool"
    where = pooled(said, float(spread), [one.row_id for one in kept], without, date)
    return Pace(value=round(float(np.exp(found.x[0] * UNSURE)), 3), provenance=where)


def fit_paces(rows: Sequence[StepRow], trainer: str, date: str) -> list[TrainerPace]:
    """The pool of all rows, and without each framework that has some."""
    told = {stage: residuals(rows, trainer, stage) for stage in STAGES}
    names = ("", *sorted({one.calibration for each in told.values() for one in each}))
    return [
        TrainerPace(
            trainer=trainer, without=name, **{stage: fit_pace(told[stage], stage, date, name) for stage in STAGES}
        )
        for name in names
    ]  # fmt: skip
