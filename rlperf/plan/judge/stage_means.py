"""The stages of a judged rl_step as arrays: mean seconds, their errors, and which calibrations they come from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlperf.layout import FloatArray
from rlperf.plan.judge.evaluate import Evaluation
from rlperf.plan.question.context import Context
from rlperf.sim.rl_step.uncertainty import Contenders, stage_matrix, stage_sigmas


def stage_means(evaluation: Evaluation) -> FloatArray:
    """Mean seconds of the stages of `CALIBRATED`, the rest of the rl_step last [s]."""
    return np.asarray(stage_matrix(evaluation.seconds).mean(axis=0))


def stage_sigma_array(context: Context, evaluation: Evaluation) -> FloatArray:
    """Error of the constants behind each entry of `stage_means` [1]."""
    return stage_sigmas(context.site, evaluation.trainer, evaluation.configuration.mode).of_stages


def contenders(evaluations: Sequence[Evaluation]) -> Contenders:
    """What tells judged candidates of one question apart."""
    drawn = [each.seconds.rl_step_s for each in evaluations]
    if len({len(each) for each in drawn}) > 1:
        drawn = [np.array([each.mean()]) for each in drawn]
    ids = [each.stack.calibration.id for each in evaluations]
    return Contenders(
        stages=np.array([stage_means(each) for each in evaluations]),
        sigma=np.array([each.sigmas.of_stages for each in evaluations]),
        origin=np.array([ids.index(one) for one in ids]),
        unlike=np.array([each.unlike for each in evaluations]),
        draws=np.array(drawn),
    )


def calibration_ids(context: Context, evaluation: Evaluation) -> tuple[str, ...]:
    """Device, engine, trainer backend and framework that an evaluation's seconds come from."""
    trainer = context.trainers[int(evaluation.trainer.backend[0])]
    return (context.hardware.calibration.id, context.engine.id, trainer.calibration.id, trainer.framework.id)
