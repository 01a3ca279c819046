"""What one slot was judged with, judged in the slots that it would best share a layout with.

Finalists are the same in all slots between which a change of layout costs something; what the judge makes of them (a
larger cache, a scoring budget of its own, uneven stages) it makes of each slot by itself. Unless the others hear of it,
a layout that is better for all together is no choice: Qwen3-4B on eight A100, math and search in turns, took 3.6 % more
with the share of memory open than with it stated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rlperf.layout import BoolArray, FloatArray, IntArray
from rlperf.plan.judge.decisions import Decision, keeps_limits, with_more
from rlperf.plan.judge.evaluate import Evaluation, Judge
from rlperf.plan.judge.tuning import judge_all
from rlperf.plan.question.context import Context
from rlperf.plan.search.columns import ColumnStore
from rlperf.plan.search.common import pinned_to
from rlperf.plan.search.configuration import Configuration
from rlperf.plan.search.screen import screen
from rlperf.sim.rl_step.demand import Demand
from rlperf.specs.framework import FrameworkFacts
from rlperf.specs.pool import Role
from rlperf.told import quiet

IN_VAIN = 8
"""Layouts in a row that are judged in the slots which lack them, and take no less than one of all slots does."""
ASKED = 64
"""Layouts that they are asked for at most; many are refused by one, such as budgets below its longest sequence."""
ROLES: tuple[Role, ...] = ("rollout", "trainer")


def shared_by_all(context: Context, facts: FrameworkFacts | None, decisions: list[Decision]) -> list[Decision]:
    """The decisions, those that would share a layout with every one judged that may be the best for all together.

    None may whose least (what it was judged to take where it was, and elsewhere what the best there takes) is no less
    than what a layout of all slots takes. Of the others the one that is expected to take least is tried first, and what
    the judge then makes of it in one slot is a choice of the others in turn.
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


@dataclass(eq=False)
class _Arrangements:
    """All that some slot has judged, numbered as it comes.

    Attributes
    ----------
    likes : a configuration of each, of several the nearest to the beaten path
    parts : numbers of its engines and of its trainer, the same for equal layouts
    """

    likes: list[Configuration] = field(default_factory=list)
    parts: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    _number: dict[object, int] = field(default_factory=dict)
    _part: dict[object, int] = field(default_factory=dict)

    def number(self, one: Configuration) -> int:
        """The number of a configuration's arrangement."""
        number = self._number.setdefault(one.arrangement, len(self.likes))
        if number == len(self.likes):
            self.likes.append(one)
            for role, parts in zip(ROLES, self.parts, strict=True):
                parts.append(self._part.setdefault((role, one.mode, one.pool(role).layout), len(self._part)))
        self.likes[number] = min(self.likes[number], one, key=lambda each: each.off_path)
        return number


@dataclass(eq=False)
class _Slot:
    """Groups of rl_steps that were judged as one, as more is judged in it.

    Attributes
    ----------
    weight : what the groups count in the objective over the horizon
    numbers : of what was judged
    refused : numbers of what does not run in it
    """

    decision: Decision
    judge: Judge
    weight: float
    numbers: list[int]
    refused: list[int] = field(default_factory=list)
    store: ColumnStore = field(default_factory=ColumnStore)

    def row(self, count: int) -> tuple[FloatArray, BoolArray]:
        """What arrangements take, the price of leaving the beaten path in it, infinite where they do not run or were
        not tried; and whether they were tried ``[arrangements]``."""
        priced, tried = np.full(count, np.inf), np.zeros(count, dtype=np.bool_)
        np.minimum.at(priced, self.numbers, self.weight * self.decision.objective)
        tried[[*self.numbers, *self.refused]] = True
        return priced, tried

    def under(self, facts: FrameworkFacts | None, like: Configuration, pinned: Context) -> Configuration | None:
        """The configuration of another slot as it runs in this one; None where the job or the framework refuse it."""
        found = screen(pinned, self.decision.task, self.demands, facts, keep=1, store=self.store).configurations
        return replace(like, batch=found[0].batch) if found else None

    def hears(self, facts: FrameworkFacts | None, here: Configuration, every: _Arrangements) -> None:
        """Judges what runs in this slot as it was judged with its own finalists, and what the judge makes of it."""
        context, before = self.judge.context, self.decision.evaluations
        judged = judge_all(self.judge, self.demands, [here], facts, quiet, before)[len(before) :]
        kept = [one for one in judged if keeps_limits(context, one)]
        self.decision = with_more(context, self.decision, kept)
        self.numbers += [every.number(one.configuration) for one in kept]

    @property
    def demands(self) -> tuple[Demand, ...]:
        """One per batch that was judged."""
        return tuple({one.demand.batch: one.demand for one in self.decision.evaluations}.values())


def _shared(context: Context, facts: FrameworkFacts | None, decisions: Sequence[Decision]) -> list[Decision]:
    alike: dict[tuple[Evaluation, ...], list[Decision]] = {}
    for decision in decisions:
        alike.setdefault(decision.evaluations, []).append(decision)
    every = _Arrangements()
    slots = {key: _slot(context, own, every) for key, own in alike.items()}
    least, vain = math.inf, 0
    for _ in range(ASKED):
        shared, number = _likeliest(every, [*slots.values()])
        if shared < least:
            least, vain = shared, 0
        if number is None or vain == IN_VAIN:
            break
        vain += _judged_in_all(context, facts, every, number, [*slots.values()])
    return [
        with_more(context, decision, slots[decision.evaluations].decision.evaluations[len(decision.evaluations) :])
        for decision in decisions
    ]


def _slot(context: Context, decisions: Sequence[Decision], every: _Arrangements) -> _Slot:
    first, weight = decisions[0], math.fsum(each.weight for each in decisions)
    numbers = [every.number(one.configuration) for one in first.evaluations]
    return _Slot(first, Judge(context, first.task), weight, numbers)


def _likeliest(every: _Arrangements, slots: Sequence[_Slot]) -> tuple[float, int | None]:
    """The least that an arrangement of all slots takes, and the number of the one that may take less, not yet tried in
    all of them, that is expected to take least; None: there is none.

    Expected is no less than the best of the slot that has its engines, or its trainer.
    """
    rows = [slot.row(len(every.likes)) for slot in slots]
    priced, tried = np.array([row for row, _ in rows]), np.array([row for _, row in rows])
    best = priced.min(axis=1, keepdims=True)
    least, shared = _total(np.where(tried, priced, best)), float(_total(priced).min())
    rivals = np.flatnonzero((least < shared) & ~tried.all(axis=0))
    if not len(rivals):
        return shared, None
    engines, trainer = (_least_with(priced, np.array(part)) for part in every.parts)
    expected = _total(np.where(tried, priced, np.maximum(best, np.maximum(engines, trainer))))
    level = rivals[expected[rivals] == expected[rivals].min()].tolist()
    return shared, min(level, key=lambda number: str(every.likes[number].arrangement))


def _least_with(priced: FloatArray, part: IntArray) -> FloatArray:
    """The least of the arrangements with the same part; 0 where none was judged ``[slots, arrangements]``."""
    least = np.full((len(priced), part.max() + 1), np.inf)
    np.minimum.at(least.T, part, priced.T)
    return np.where(np.isfinite(least), least, 0.0)[:, part]


def _total(values: FloatArray) -> FloatArray:
    """Sums over slots, to the last bit the same in any order of them ``[arrangements]``."""
    return np.asarray(np.sort(values, axis=0).sum(axis=0))


def _judged_in_all(
    context: Context, facts: FrameworkFacts | None, every: _Arrangements, number: int, slots: Sequence[_Slot]
) -> bool:
    """Judges an arrangement in the slots that lack it; False: one refuses it, and none is asked."""
    like, lacking = every.likes[number], [slot for slot in slots if number not in slot.numbers]
    pinned, found = pinned_to(context, like), []
    for slot in lacking:
        if (here := slot.under(facts, like, pinned)) is None:
            slot.refused.append(number)
            return False
        found.append(here)
    for slot, here in zip(lacking, found, strict=True):
        slot.hears(facts, here, every)
        if number not in slot.numbers:
            slot.refused.append(number)
    return True
