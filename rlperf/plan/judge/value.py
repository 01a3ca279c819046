"""Objective of judged candidates, and what leaving the beaten path adds to it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlperf.layout import FloatArray
from rlperf.plan.judge.evaluate import Evaluation
from rlperf.plan.question.context import Context
from rlperf.plan.question.objective import objective_of
from rlperf.plan.search.beaten_path import ROLLOUT_OWN, TRAINER_OWN, OffPath, price
from rlperf.plan.search.splits import usage_of


def judged_objective(context: Context, evaluation: Evaluation) -> float:
    """Objective of one rl_step by the judge: its mean, moved towards the 95th percentile by the job's risk."""
    seconds, risk = evaluation.rl_step_s, context.job.objective.risk
    if risk:
        seconds += risk * (evaluation.high_s - seconds)
    usage = usage_of(context, evaluation.configuration)
    return float(objective_of(context, evaluation.demand, usage, np.array([seconds]))[0])


def valued(context: Context, evaluations: Sequence[Evaluation]) -> tuple[FloatArray, FloatArray]:
    """Objective of judged candidates, and the same with the price of leaving the beaten path."""
    value = np.array([judged_objective(context, each) for each in evaluations])
    return value, value + _price(context, evaluations, value)


def _price(context: Context, evaluations: Sequence[Evaluation], value: FloatArray) -> FloatArray:
    """What leaving the beaten path adds to the objective of judged candidates."""

    def pool(index: int, seconds: list[float], sigma: list[float], own: float) -> OffPath:
        off = np.array([each.configuration.departures[index] for each in evaluations])
        doubled = np.array([each.configuration.doublings[index] for each in evaluations])
        return OffPath(np.array(seconds), np.array(sigma), own, off, doubled)

    rollout = [float(each.rollout.makespan_s.mean()) for each in evaluations]
    trainer = [float(each.trainer.busy_s.mean()) for each in evaluations]
    engines = pool(0, rollout, [each.sigmas.rollout_s for each in evaluations], ROLLOUT_OWN)
    own = pool(1, trainer, [each.sigmas.training_s for each in evaluations], TRAINER_OWN)
    seconds = np.array([each.rl_step_s for each in evaluations])
    return price(value, seconds, (engines, own), bold=context.job.objective.bold)
