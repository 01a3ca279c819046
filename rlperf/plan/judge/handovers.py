"""Handovers: what tasks pay that share a cluster one after the other, where their layouts or policies differ.

A task has the devices for `Horizon.handover_every` rl_steps, then hands them over to the next one, and so on in a
circle. Between two that run the same arrangement of the same policy nothing happens. Otherwise processes are stopped,
states are loaded and cut anew, and engines start with an empty cache: what `Horizon.switch` states, or a start of the
framework.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from rlperf.layout import FloatArray
from rlperf.plan.judge.decisions import Decision
from rlperf.plan.question.context import Context
from rlperf.plan.search.formulation import Handover
from rlperf.specs.objectives import OBJECTIVES


@dataclass(frozen=True, eq=False)
class Handovers:
    """What couples tasks that take turns, in the objective's unit.

    Attributes
    ----------
    paid_if_apart : pairs of slots that pay where their layouts differ
    paid_anyway : of every slot, for handovers from a task that trains another policy ``[slots]``
    """

    paid_if_apart: tuple[Handover, ...]
    paid_anyway: FloatArray


def change_s(context: Context) -> float:
    """Seconds of a change of layout or policy between tasks: stated, or a start and a checkpoint of the framework."""
    stated = context.job.horizon.switch
    if stated is not None:
        return stated
    run = context.job.run
    starts = [each.framework.start_up.value + each.framework.capture.value for each in context.trainers]
    return max(starts) + (run.checkpoint if run else 0.0)


def sequence(context: Context, decisions: Sequence[Decision]) -> list[tuple[int, int, float]]:
    """(slot, the slot after it, how often) of every handover, the circle closed; empty without any.

    Where a change between groups has a stated cost, the last handover of a group leads to the first of the next.
    """
    if not context.takes_turns:
        return []
    tasks, groups = len(context.tasks), len(decisions) // len(context.tasks)
    found = []
    for group in range(groups):
        here = [task * groups + group for task in range(tasks)]
        times = decisions[group].count / context.job.horizon.handover_every
        leads_on = context.job.horizon.switch is not None and group + 1 < groups
        found += [(a, b, times) for a, b in pairwise(here)]
        found.append((here[-1], here[0], max(times - 1.0, 0.0) if leads_on else times))
        if leads_on:
            found.append((here[-1], here[0] + 1, 1.0))
    return found


def handovers_of(context: Context, decisions: Sequence[Decision]) -> Handovers:
    """What the handovers of a job couple."""
    changes, anyway = [], np.zeros(len(decisions))
    for first, second, times in sequence(context, decisions):
        cost = times * change_s(context) * per_second(decisions[second])
        if decisions[first].task.architecture == decisions[second].task.architecture:
            changes.append(Handover(first, second, cost))
        else:
            anyway[second] += cost
    return Handovers(tuple(changes), anyway)


def per_second(decision: Decision) -> float:
    """Objective over the horizon per second that an rl_step of a slot's best candidate takes longer."""
    best = int(np.argmin(decision.objective))
    return float(decision.value[best]) / decision.evaluations[best].rl_step_s * decision.weight / decision.count


def over_horizon(context: Context, decisions: Sequence[Decision]) -> list[Decision]:
    """The decisions with what each counts in the objective: all of its rl_steps, or its share of the useful tokens.

    Tokens are those of a slot's best candidate, so that the program stays linear where batches are open, too.
    """
    tokens = [one.evaluations[int(np.argmin(one.objective))].demand.useful_tokens for one in decisions]
    weights = OBJECTIVES[context.job.objective.minimize].weights([one.count for one in decisions], tokens)
    return [replace(one, weight=weight) for one, weight in zip(decisions, weights, strict=True)]


def changes_of(context: Context, decisions: Sequence[Decision], chosen: Sequence[int]) -> float:
    """How often in the horizon a handover between the chosen columns changes layout or policy."""
    total = 0.0
    for first, second, times in sequence(context, decisions):
        pair = [(decisions[i], decisions[i].evaluations[chosen[i]].configuration) for i in (first, second)]
        (one, mine), (other, theirs) = pair
        same = one.task.architecture == other.task.architecture and mine.arrangement == theirs.arrangement
        total += 0.0 if same else times
    return total
