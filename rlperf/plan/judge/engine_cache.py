"""A larger cache where simulated engines compute again what they evicted: closed forms do not see it."""

from __future__ import annotations

import numpy as np

from rlperf.cost.reject import Reject
from rlperf.layout import Layout
from rlperf.plan.judge.evaluate import Evaluation, Judge
from rlperf.plan.search.configuration import Configuration
from rlperf.plan.search.rollout_columns import awake_limits, memory_fractions
from rlperf.plan.search.trainer_columns import memory_flags


def with_more_cache(judge: Judge, evaluation: Evaluation) -> Configuration | None:
    """The configuration with the largest share of memory for its engines that fits, or None where none computes again.

    Requests of one batch start together and are fully grown together, so that a cache for half-grown ones runs over;
    contexts whose tools run are evicted for those that decode. Two shares with equal closed forms are one to the
    screen, which keeps the smaller.
    """
    configuration, context = evaluation.configuration, judge.context
    if not _short(evaluation):
        return None
    now, device = configuration.pool("rollout").settings.memory_fraction or 0.0, context.rollout_hardware.device
    most = 1.0
    if configuration.shares_memory:
        idle = float(evaluation.held.idle.ravel()[0])
        beside = float(evaluation.memory.asleep_bytes[0]) + idle
        most = (float(awake_limits(context, np.asarray(beside))) - idle) / device.usable_memory
    larger = [share for share in memory_fractions(context) if now < share <= most]
    return configuration.with_rollout(memory_fraction=max(larger)) if larger else None


def with_parked_trainer(judge: Judge, evaluation: Evaluation) -> Configuration | None:
    """The configuration with the trainer's states in host memory meanwhile, which leaves engines more.

    None where none computes again, where the job states it, and where hosts do not hold them. To closed forms, for
    which the smallest share is enough, it only costs the way there and back.
    """
    trainer, stated = evaluation.configuration.pool("trainer"), judge.context.job.pool("trainer").settings.parked
    if stated is not None or trainer.settings.parked is not False or not _short(evaluation):
        return None
    parked = evaluation.configuration.with_trainer(parked=True)
    held = judge.holds(evaluation.demand, parked).held
    backend, layout = np.zeros(1, dtype=np.int64), Layout.of_values(trainer.layout)
    flags = memory_flags(judge.context, backend, layout, held.peak.ravel()[:1], held.host.ravel()[:1])
    return None if int(flags[0]) & int(Reject.HOST_MEMORY) else parked


def _short(evaluation: Evaluation) -> bool:
    return any(result.short_of_cache for result in evaluation.rollouts)
