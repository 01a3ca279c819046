"""A larger cache where simulated engines preempt: closed forms do not see it, and keep the smallest share."""

from __future__ import annotations

import numpy as np

from rlperf.plan.judge.evaluate import Evaluation, Judge
from rlperf.plan.search.configuration import Configuration
from rlperf.plan.search.rollout_columns import awake_limits, memory_fractions


def with_more_cache(judge: Judge, evaluation: Evaluation) -> Configuration | None:
    """The configuration with the largest share of memory for its engines that fits, or None where none preempts.

    Requests of one batch start together and are fully grown together, so that a cache for half-grown ones runs over.
    Two shares with equal closed forms are one to the screen, which keeps the smaller.
    """
    configuration, context = evaluation.configuration, judge.context
    if not any(result.preemptions for result in evaluation.rollouts):
        return None
    now, device = configuration.pool("rollout").settings.memory_fraction or 0.0, context.rollout_hardware.device
    most = 1.0
    if configuration.shares_memory:
        idle = float(evaluation.held.idle.ravel()[0])
        beside = float(evaluation.memory.asleep_bytes[0]) + idle
        most = (float(awake_limits(context, np.asarray(beside))) - idle) / device.usable_memory
    larger = [share for share in memory_fractions(context) if now < share <= most]
    return configuration.with_rollout(memory_fraction=max(larger)) if larger else None
