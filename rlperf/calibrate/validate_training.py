"""Training steps, predicted against measured: rows of ``measured/training.csv`` and files in that form."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from rlperf.calibrate.columns import read_all
from rlperf.calibrate.tables import Refusal, Table
from rlperf.calibrate.trainers.costs import predict_seconds
from rlperf.calibrate.trainers.rows import TrainingRow, digest
from rlperf.calibrate.validate import Outcome, PredictedFigure
from rlperf.cost.layers import stack_of
from rlperf.specs.calibration import Spread
from rlperf.specs.trainer_calibration import TrainerCalibration

NEEDED = ("framework", "architecture", "gpu", "n_gpus", "global_batch", "seq_len")
T95 = 2.1318467863
"""95th percentile of Student's t of four degrees of freedom. Only the noise of rows, a small part of what is summed,
has that law. A normal deviate's 1.64 would be a fifth narrower, and left-out releases hold less than nine of ten."""
BLANK_WIDENS = 1.1
"""Width of the interval, in the logarithm, for every degree that was filled in."""
UNKNOWN = 2.0
"""Width, in the logarithm, of the interval of what has but a relative's constants, over its relative's."""


def predict_rows(path: Path, table: Table) -> Outcome:
    """Predict the seconds of one optimizer update of every row; step time and tokens/s of a row are one measurement."""
    table.need(*NEEDED)
    table.need_one("measured_step_s", "measured_tokens_per_s_per_gpu")
    rows, refused = read_all(TrainingRow, table)
    timed = [row for row in rows if row.update_s]
    seconds = predict_seconds(timed)
    predictions = [figure_of(row, row.trainer, float(value)) for row, value in zip(timed, seconds, strict=True)]
    without = [Refusal.of(row.row, "no step time and no tokens/s in the row") for row in rows if not row.update_s]
    return Outcome(tuple(predictions), (*without, *refused))


def spread_of_row(row: TrainingRow, trainer: TrainerCalibration) -> Spread:
    """Interval of a row: what fits leave open of its backend, device and layers (`Doubt`), of its framework too if new.

    A backend that states no doubt has its interval of all configurations, twice as wide on devices not measured.
    """
    doubt = trainer.generation(row.hardware.device).doubt
    wider = (UNKNOWN if row.related else 1.0) * BLANK_WIDENS ** min(row.blanks, 4)
    if doubt is None:
        strange = row.hardware.calibration.extrapolated or not _measured(row, trainer)
        return Spread(low=trainer.low, high=trainer.high).widened(wider * (UNKNOWN if strange else 1.0))
    known = row.row.text("framework") in trainer.frameworks
    sigma = doubt.of(experts=row.architecture.experts is not None, known=known)
    reach = math.exp(T95 * sigma * wider)
    return Spread(low=1.0 / reach, high=reach)


def _measured(row: TrainingRow, trainer: TrainerCalibration) -> bool:
    return trainer.generation(row.hardware.device).measured


def figure_of(row: TrainingRow, trainer: TrainerCalibration, seconds: float) -> PredictedFigure:
    """A row's seconds as predicted with one set of constants, whose fit saw the configurations that it lists."""
    spread = spread_of_row(row, trainer)
    dense = row.architecture.experts is None and row.dtype in ("bf16", "fp16") and not row.lora_rank
    return PredictedFigure(
        row_id=row.row_id,
        group=row.group,
        metric="step_s",
        measured=float(row.update_s or np.nan),
        predicted=seconds,
        low=seconds * spread.low,
        high=seconds * spread.high,
        calibration=f"{row.hardware.calibration.id}, {trainer.id}",
        assumed=row.assumed,
        extrapolated=not _measured(row, trainer) or extrapolated_architecture(row) or row.related,
        used_in_calibration=digest(row.configuration) in trainer.configurations,
        stratum="dense, 16 bit" if dense else "",
    )


def extrapolated_architecture(row: TrainingRow) -> bool:
    """State-space and linear mixers rest on bandwidth forms that no kernel table backs."""
    return any(half.layer.unmeasured_training for half in stack_of(row.architecture).halves)
