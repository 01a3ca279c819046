"""Sensitivity: what a tenth more or less of one input does to the choice, over all tasks and groups of rl_steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlperf.layout import FloatArray
from rlperf.plan.answer.explain import differences
from rlperf.plan.answer.plan import Sensitivity
from rlperf.plan.judge.decisions import Decision
from rlperf.plan.judge.evaluate import Evaluation, scaled_seconds
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
    for name, factors in INPUTS.items():
        changed = [_changed(context, decision, *factors) for decision in _distinct(decisions)]
        which = _numbers(decisions)
        steps, values = ([changed[number][part] for number in which] for part in (0, 1))
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
        anyway = slot.cost - decision.objective * decision.count
        slots.append(replace(slot, cost=value * decision.count + anyway))
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


def _changed(context: Context, decision: Decision, rollout: float, trainer: float) -> tuple[FloatArray, FloatArray]:
    """Seconds and objective of an rl_step of every candidate with its rollout and its training scaled ``[columns]``."""
    steps = np.array([_perturbed_s(context, decision, e, rollout, trainer) for e in decision.evaluations])
    values = [
        float(objective_of(context, e.demand, usage_of(context, e.configuration), np.array([s]))[0])
        for e, s in zip(decision.evaluations, steps, strict=True)
    ]
    return steps, np.array(values)


def _perturbed_s(context: Context, decision: Decision, evaluation: Evaluation, rollout: float, trainer: float) -> float:
    """The rl_step of a candidate with its rollout and its training scaled [s]."""
    factor = {"rollout": rollout, "scoring": trainer, "training": trainer}
    seconds = scaled_seconds(context.site, decision.task.architecture, evaluation, factor)
    return float(seconds.rl_step_s.mean())
