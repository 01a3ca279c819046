"""What the judge tries of a trainer: other token budgets and larger ones for scoring, kept activations, whole stages.

A forward pass keeps no activations, so that memory may hold more tokens of it.
"""

from __future__ import annotations

import numpy as np

from rlperf.cost.stage_ends import stage_ends
from rlperf.plan.judge.evaluate import Evaluation, Judge
from rlperf.plan.search.candidates import token_budgets
from rlperf.plan.search.configuration import Configuration
from rlperf.sim.rl_step.cuts import cut_by_budget

TIMES = (2, 4)
"""Scoring budgets that are tried, over the training budget."""
WORTH = 0.005
"""Share of the rl_step that a larger scoring budget must save: as much as a doubling elsewhere; none in a bold plan."""


def scored_apart(judge: Judge, evaluation: Evaluation) -> Configuration | None:
    """The configuration with a scoring budget of its own, or None where no larger one fits and is worth it."""
    configuration, context, stack = evaluation.configuration, judge.context, evaluation.stack
    settings = configuration.pool("trainer").settings
    least = 0.0 if context.job.objective.bold else WORTH * evaluation.rl_step_s
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
        if now - (seconds := judge.scoring_s(evaluation, larger)) > least:
            now, found = seconds, larger
    return found


def next_budgets(judge: Judge, evaluation: Evaluation) -> list[Configuration]:
    """The configuration with the next smaller and the next larger budget of the trainer, those that fit.

    Closed forms hold budgets level that events tell apart: how many sequences meet in a microbatch is a mean to them.
    """
    configuration, asked = evaluation.configuration, judge.context.job.pool("trainer")
    settings, longest = configuration.pool("trainer").settings, configuration.batch.longest_tokens
    every = token_budgets(asked.settings.token_budget, longest, asked.layout.microbatch)
    budgets = sorted(each for each in every if each >= longest)
    if settings.token_budget not in budgets:
        return []
    follows = asked.settings.scoring_token_budget is None and settings.scoring_token_budget is not None
    names = ("token_budget", "scoring_token_budget") if follows else ("token_budget",)  # one of its own is tried anew
    at, room = budgets.index(settings.token_budget), judge.room(evaluation)
    beside = budgets[max(at - 1, 0) : at] + budgets[at + 1 : at + 2]
    others = [configuration.with_trainer(**dict.fromkeys(names, each)) for each in beside]
    return [each for each in others if judge.peak(evaluation, each) <= room]


def without_recompute(judge: Judge, evaluation: Evaluation) -> list[Configuration]:
    """The configuration that keeps its activations, where they fit.

    To closed forms it is level with a larger microbatch, which stages judged apart may tell from it.
    """
    configuration, stated = evaluation.configuration, judge.context.job.pool("trainer").layout.activation_recompute
    searched = evaluation.stack.calibration.capability.activation_recompute.searched
    recomputes = configuration.pool("trainer").layout.activation_recompute != "none"
    if not recomputes or "none" not in (stated or searched):
        return []
    kept = configuration.keeping_activations()
    return [kept] if judge.peak(evaluation, kept) <= judge.room(evaluation) else []


def without_chunks(judge: Judge, evaluation: Evaluation) -> list[Configuration]:
    """The configuration whose stages run in one piece each, where that fits.

    Closed forms have stages alike. Where the first and the last get fewer layers, for what embedding and head take,
    less waits for them, and cutting stages into chunks saves less than it sends.
    """
    configuration, asked = evaluation.configuration, judge.context.job.pool("trainer")
    chunks, stated = configuration.pool("trainer").layout.virtual_pipeline, asked.layout.virtual_pipeline
    if chunks == 1 or 1 not in (stated or (1,)):
        return []
    whole = configuration.with_whole_stages()
    layers, stages = judge.task.architecture.layers, whole.pool("trainer").layout.pipeline_parallel
    # those of the chunks are not these stages'
    first, last = stage_ends(layers, stages, asked.settings.first_stage_layers, asked.settings.last_stage_layers)
    whole = whole.with_trainer(first_stage_layers=first, last_stage_layers=last)
    return [whole] if judge.peak(evaluation, whole) <= judge.room(evaluation) else []
