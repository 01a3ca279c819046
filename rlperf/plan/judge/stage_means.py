"""The stages of a judged rl_step as arrays: mean seconds, their errors, and which calibrations they come from."""

from __future__ import annotations

import numpy as np

from rlperf.layout import FloatArray
from rlperf.plan.judge.evaluate import Evaluation
from rlperf.plan.question.context import Context
from rlperf.sim.rl_step.uncertainty import CALIBRATED, stage_sigmas


def stage_means(evaluation: Evaluation) -> FloatArray:
    """Mean seconds of the stages of `CALIBRATED`, the rest of the rl_step last [s]."""
    seconds = evaluation.seconds
    known = np.array([float(getattr(seconds, name).mean()) for name in CALIBRATED])
    rest = sum(float(getattr(seconds, name).mean()) for name in ("reward_s", "data_movement_s", "offload_s", "other_s"))
    return np.append(known, rest)


def stage_sigma_array(context: Context, evaluation: Evaluation) -> FloatArray:
    """Error of the constants behind each entry of `stage_means` [1]."""
    sigmas = stage_sigmas(context.site, evaluation.trainer, evaluation.configuration.mode)
    return np.array([*(getattr(sigmas, name) for name in CALIBRATED), sigmas.rest])


def calibration_ids(context: Context, evaluation: Evaluation) -> tuple[str, ...]:
    """Device, engine, trainer backend and framework that an evaluation's seconds come from."""
    trainer = context.trainers[int(evaluation.trainer.backend[0])]
    return (context.hardware.calibration.id, context.engine.id, trainer.calibration.id, trainer.framework.id)
