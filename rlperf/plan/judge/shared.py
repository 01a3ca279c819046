"""What one slot was judged with, judged in the slots that it would best share a layout with.

Finalists are the same in all slots between which a change of layout costs something; what the judge makes of them (a
larger cache, a scoring budget of its own, uneven stages) it makes of each slot by itself. Unless the others hear of it,
a layout that is better for all together is no choice: Qwen3-4B on eight A100, math and search in turns, took 3.6 % more
with the share of memory open than with it stated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlperf.plan.judge.decisions import Decision, keeps_limits, with_more
from rlperf.plan.judge.evaluate import Evaluation, Judge
from rlperf.plan.question.context import Context
from rlperf.plan.search.columns import ColumnStore
from rlperf.plan.search.common import pinned_to
from rlperf.plan.search.configuration import Configuration
from rlperf.plan.search.screen import screen
from rlperf.specs.framework import FrameworkFacts

TRIED = 8
"""Layouts that the slots which lack them are asked about, at most."""


def shared_by_all(context: Context, facts: FrameworkFacts | None, decisions: list[Decision]) -> list[Decision]:
    """The decisions, those that would share a layout with every one judged that may be the best for all together.

    Each is tried in the order of the least that it can take: what it was judged to take where it was, and elsewhere
    what the best there takes. The first whose least is no less than what a layout of all slots takes ends it.
    """
    found = list(decisions)
    for slots in _coupled(context, decisions):
        for index, judged in zip(slots, _shared(context, facts, [decisions[i] for i in slots]), strict=True):
            found[index] = judged
    return found


def _coupled(context: Context, decisions: Sequence[Decision]) -> list[list[int]]:
    """Slots that pay for a change of layout between them, of which some were judged apart."""
    together: dict[object, list[int]] = {}
    for index, decision in enumerate(decisions):
        turns = context.takes_turns
        together.setdefault(decision.task.architecture if turns else decision.task.task.name, []).append(index)
    return [slots for slots in together.values() if len({decisions[i].evaluations for i in slots}) > 1]


@dataclass
class _Slot:
    """Groups of rl_steps that were judged as one, as more is judged in it.

    Attributes
    ----------
    weight : what the groups count in the objective over the horizon
    priced : what the judged arrangements take in all of them, the price of leaving the beaten path in it
    """

    decision: Decision
    judge: Judge
    weight: float
    store: ColumnStore
    priced: dict[tuple[object, ...], float]

    def hears(self, facts: FrameworkFacts | None, like: Configuration, pinned: Context) -> None:
        """Judges a configuration of another slot, where the job and the framework's rules let it run here."""
        if like.arrangement in self.priced:
            return
        self.priced[like.arrangement] = math.inf
        demands = {one.demand.batch: one.demand for one in self.decision.evaluations}
        found = screen(pinned, self.decision.task, tuple(demands.values()), facts, keep=1, store=self.store)
        if not found.configurations:
            return
        here = replace(like, batch=found.configurations[0].batch)
        judged = self.judge.evaluate(demands[here.batch], here)
        if keeps_limits(self.judge.context, judged):
            self.decision = with_more(self.judge.context, self.decision, [judged])
            self.priced = _priced(self.decision, self.weight) | {
                key: each for key, each in self.priced.items() if math.isinf(each)
            }

    def least(self, arrangement: tuple[object, ...]) -> float:
        """What an arrangement takes here, or the best where nobody judged it."""
        return self.priced.get(arrangement, min(self.priced.values()))


def _priced(decision: Decision, weight: float) -> dict[tuple[object, ...], float]:
    """The best of every arrangement that was judged."""
    best: dict[tuple[object, ...], float] = {}
    for one, objective in zip(decision.evaluations, decision.objective.tolist(), strict=True):
        key = one.configuration.arrangement
        best[key] = min(best.get(key, math.inf), weight * objective)
    return best


def _shared(context: Context, facts: FrameworkFacts | None, decisions: Sequence[Decision]) -> list[Decision]:
    alike: dict[tuple[Evaluation, ...], list[Decision]] = {}
    for decision in decisions:
        alike.setdefault(decision.evaluations, []).append(decision)
    slots = {key: _slot(context, own) for key, own in alike.items()}
    every = [*slots.values()]
    likes: dict[tuple[object, ...], Configuration] = {}
    for decision in decisions:
        for one in decision.evaluations:
            likes.setdefault(one.configuration.arrangement, one.configuration)
    for _ in range(TRIED):
        least = {key: math.fsum(slot.least(key) for slot in every) for key in likes}
        common = min(least[key] for key in likes if all(key in slot.priced for slot in every))
        untried = [key for key in likes if least[key] < common and any(key not in slot.priced for slot in every)]
        if not untried:
            break
        like = likes[min(untried, key=least.__getitem__)]
        pinned = pinned_to(context, like)
        for slot in every:
            slot.hears(facts, like, pinned)
    return [
        with_more(context, decision, slots[decision.evaluations].decision.evaluations[len(decision.evaluations) :])
        for decision in decisions
    ]


def _slot(context: Context, decisions: Sequence[Decision]) -> _Slot:
    first, weight = decisions[0], math.fsum(each.weight for each in decisions)
    return _Slot(first, Judge(context, first.task), weight, ColumnStore(), _priced(first, weight))
