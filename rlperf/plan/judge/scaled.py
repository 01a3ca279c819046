"""An evaluated configuration with stages that take longer or shorter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from rlperf.layout import FloatArray, IntArray
from rlperf.plan.judge.evaluate import Evaluation
from rlperf.sim.rl_step.pairs import Pairs
from rlperf.sim.rl_step.site import Site
from rlperf.sim.rl_step.stage_seconds import stage_seconds
from rlperf.sim.rl_step.stages import StageSeconds
from rlperf.specs.architecture import Architecture


def scaled_seconds(
    site: Site,
    architecture: Architecture,
    evaluation: Evaluation,
    factor: Mapping[str, float | FloatArray],
    rows: IntArray | None = None,
) -> StageSeconds:
    """The rl_steps of an evaluation with its rollout, scoring and training scaled [s].

    ``rows``: replicates, all by default; ``factor``: numbers, or arrays ``[rows]``
    """
    rows = np.arange(len(evaluation.seconds.rl_step_s)) if rows is None else rows
    engine, train = evaluation.rollout.take(rows), evaluation.trainer.take(rows)
    engine = replace(
        engine, makespan_s=factor["rollout"] * engine.makespan_s, steady_s=factor["rollout"] * engine.steady_s,
        group_s=factor["rollout"] * engine.group_s, recompute_s=factor["rollout"] * engine.recompute_s,
    )  # fmt: skip
    if engine.ahead_s is not None:
        engine = replace(engine, ahead_s=np.reshape(factor["rollout"], (-1, 1)) * engine.ahead_s)
    if engine.lent_s is not None:
        engine = replace(engine, lent_s=np.reshape(factor["rollout"], (-1, 1)) * engine.lent_s)
    train = replace(
        train, training_s=factor["training"] * train.training_s, scoring_s=factor["scoring"] * train.scoring_s,
        critic_s=factor["training"] * train.critic_s, values_s=factor["scoring"] * train.values_s,
    )  # fmt: skip
    every, configuration = np.arange(len(rows)), evaluation.configuration
    return stage_seconds(
        site,
        architecture,
        evaluation.demand,
        configuration.mode,
        configuration.staleness,
        Pairs(engine, train, every, every),
        evaluation.beside and evaluation.beside.take(rows),
    )
