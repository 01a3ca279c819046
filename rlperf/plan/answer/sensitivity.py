"""Sensitivity: what a tenth more or less of one input does to the choice, over all tasks and groups of rl_steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlperf.layout import FloatArray
from rlperf.plan.answer.explain import differences
from rlperf.plan.answer.plan import Sensitivity
from rlperf.plan.judge.decisions import Decision
from rlperf.plan.judge.evaluate import Evaluation
from rlperf.plan.judge.scaled import scaled_seconds
from rlperf.plan.question.context import Context
from rlperf.plan.question.objective import objective_of
from rlperf.plan.search.formulation import Program, value_of
from rlperf.plan.search.solve import solve
from rlperf.plan.search.splits import usage_of

CHANGE = 0.1
"""Relative change of an input in the sensitivity."""
INPUTS: dict[str, tuple[float, float]] = {
    "rollout slower": (1.0 + CHANGE, 1.0),
    "rollout faster": (1.0 - CHANGE, 1.0),
    "training and scoring slower": (1.0, 1.0 + CHANGE),
    "training and scoring faster": (1.0, 1.0 - CHANGE),
}
"""Input -> factors on the seconds of (rollout, training and scoring)."""


def sensitivities(
    context: Context, program: Program, decisions: Sequence[Decision], chosen: Sequence[int]
) -> list[tuple[Sensitivity, ...]]:
    """What every slot would do otherwise if an input were off in all of them, and what staying would lose the plan.

    The program is solved again with the changed values, so that what couples tasks and groups still does: changes of
    layout cost what they cost, and devices are shared.
    """
    found: list[list[Sensitivity]] = [[] for _ in decisions]
    which, perturbed = _numbers(decisions), [_perturbed_s(context, decision) for decision in _distinct(decisions)]
    for number, name in enumerate(INPUTS):
        steps = [perturbed[own][number] for own in which]
        values = [_values(context, decision, each) for decision, each in zip(decisions, steps, strict=True)]
        then = with_values(
            program, decisions, [v * d.objective / d.value for v, d in zip(values, decisions, strict=True)]
        )
        best = solve(then).chosen
        plain = with_values(program, decisions, values)
        loss = value_of(plain, chosen) / value_of(plain, best) - 1.0
        for rows, decision, seconds, now, other in zip(found, decisions, steps, chosen, best, strict=True):
            moved = other != now and loss > 1e-6
            pair = [decision.evaluations[column].configuration for column in (now, other)]
            rows.append(
                Sensitivity(
                    input=name,
                    change=CHANGE if "slower" in name else -CHANGE,
                    rl_step_s=float(seconds[now]),
                    loss=loss if moved else 0.0,
                    switches_to=tuple(differences(*pair)) if moved else (),
                )
            )
    return [tuple(rows) for rows in found]


def with_values(program: Program, decisions: Sequence[Decision], values: Sequence[FloatArray]) -> Program:
    """The program with other values per rl_step for the columns of its slots; what they pay anyway stays."""
    slots = []
    for slot, decision, value in zip(program.slots, decisions, values, strict=True):
        anyway = slot.cost - decision.objective * decision.weight
        slots.append(replace(slot, cost=value * decision.weight + anyway))
    return replace(program, slots=tuple(slots))


def _distinct(decisions: Sequence[Decision]) -> list[Decision]:
    """Decisions with evaluations of their own: groups that are alike share them."""
    found: list[Decision] = []
    for decision in decisions:
        if not any(decision.evaluations is other.evaluations for other in found):
            found.append(decision)
    return found


def _numbers(decisions: Sequence[Decision]) -> list[int]:
    """Place in `_distinct` of every decision."""
    distinct = _distinct(decisions)
    return [next(n for n, one in enumerate(distinct) if one.evaluations is each.evaluations) for each in decisions]


def _values(context: Context, decision: Decision, steps: FloatArray) -> FloatArray:
    """Objective of an rl_step of every candidate that takes so long ``[columns]``."""
    values = [
        float(objective_of(context, e.demand, usage_of(context, e.configuration), np.array([s]))[0])
        for e, s in zip(decision.evaluations, steps, strict=True)
    ]
    return np.array(values)


def _perturbed_s(context: Context, decision: Decision) -> FloatArray:
    """The rl_step of every candidate with its rollout and its training scaled, by input [s] ``[inputs][columns]``."""
    return np.array([_inputs_s(context, decision, evaluation) for evaluation in decision.evaluations]).T


def _inputs_s(context: Context, decision: Decision, evaluation: Evaluation) -> list[float]:
    """The same of one candidate, all inputs at once [s] ``[inputs]``."""
    count = len(evaluation.seconds.rl_step_s)
    rollout, trainer = np.repeat(np.array([*INPUTS.values()]), count, axis=0).T
    factor = {"rollout": rollout, "scoring": trainer, "training": trainer}
    rows = np.tile(np.arange(count), len(INPUTS))
    seconds = scaled_seconds(
        context.of(evaluation.configuration.mode).site, decision.task.architecture, evaluation, factor, rows
    )
    return [float(each.mean()) for each in seconds.rl_step_s.reshape(len(INPUTS), count)]
