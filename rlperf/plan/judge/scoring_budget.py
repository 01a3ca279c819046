"""Scoring in larger microbatches than training: a forward pass keeps no activations, so memory may hold more tokens."""

from __future__ import annotations

import numpy as np

from rlperf.plan.judge.evaluate import Evaluation, Judge
from rlperf.plan.search.configuration import Configuration
from rlperf.sim.rl_step.cuts import cut_by_budget

TIMES = (2, 4)
"""Scoring budgets that are tried, over the training budget."""
WORTH = 0.005
"""Share of the rl_step that a larger scoring budget must save: as much as a doubling elsewhere."""


def scored_apart(judge: Judge, evaluation: Evaluation) -> Configuration | None:
    """The configuration with a scoring budget of its own, or None where no larger one fits and is worth it."""
    configuration, context, stack = evaluation.configuration, judge.context, evaluation.stack
    settings, least = configuration.pool("trainer").settings, WORTH * evaluation.rl_step_s
    asked = context.job.pool("trainer").settings
    stated = asked.scoring_token_budget is not None or asked.scoring_microbatch is not None
    if stated or settings.token_budget is None or not cut_by_budget(settings.filled().packing, stack.framework):
        return None
    now = float(np.maximum(evaluation.trainer.scoring_s, evaluation.trainer.values_s).mean())
    if now < least or float(np.max(evaluation.scored.batches.count)) <= 1.0:
        return None
    room, found = judge.room(evaluation), None
    for times in TIMES:
        larger = configuration.with_trainer(scoring_token_budget=times * settings.token_budget)
        if judge.peak(evaluation, larger) > room:
            break
        if now - (seconds := judge.scoring_s(evaluation, larger)) >= least:
            now, found = seconds, larger
    return found
