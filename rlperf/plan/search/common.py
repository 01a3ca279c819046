"""Layouts that tasks which take turns on the same devices can share, so that no turn between them changes anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, product, zip_longest
from typing import TypeVar

from rlperf.plan.question.context import Context, TaskContext
from rlperf.plan.question.pool import PoolPlan
from rlperf.plan.search.columns import ColumnStore
from rlperf.plan.search.configuration import Configuration, by_arrangement
from rlperf.plan.search.screen import Screened, screen
from rlperf.plan.search.splits import longest_of_all
from rlperf.processes import over_cores
from rlperf.sim.rl_step.demand import Demand
from rlperf.specs.framework import FrameworkFacts
from rlperf.told import Tell, within

Found = TypeVar("Found")

ASKED = 16
"""Layouts of all tasks together that the others are asked for."""
CROSSED = 4
"""Engines of some tasks, and trainers of others, that are asked for together."""
TURNS = 3
"""Times that all tasks are asked, the later ones beside the best that was found so far."""
BESIDE, FOUND = 2, 4
"""Slowest tasks that are asked what they would have beside a trainer and beside engines, and how much each names."""
COMMON = 8
"""Layouts that all tasks have, of which every task's judge hears."""
PART = 0.5
"""Of a piece of work that is worth another process (`over_cores`): a task is asked for all those layouts."""


@dataclass(frozen=True, eq=False)
class Screening:
    """What was screened for one task; ``demands``: of the rl_steps that it was screened for, one per batch."""

    task: TaskContext
    demands: tuple[Demand, ...]
    found: Screened

    @cached_property
    def known(self) -> dict[tuple[object, ...], tuple[Configuration, float]]:
        """The best of the candidates with every arrangement, and what it takes, priced."""
        best: dict[tuple[object, ...], tuple[Configuration, float]] = {}
        for configuration, priced in zip(self.found.configurations, self.found.priced.tolist(), strict=True):
            best.setdefault(configuration.arrangement, (configuration, priced))
        return best

    def under(
        self, pinned: Context, facts: FrameworkFacts | None, like: Configuration, store: ColumnStore
    ) -> tuple[Configuration, float] | None:
        """The task under the arrangement of another one's configuration, and what it takes; None: it does not run.

        ``pinned`` : the job with that configuration's values stated (`pinned_to`)
        """
        if like.arrangement in self.known:
            return self.known[like.arrangement]
        found = screen(pinned, self.task, self.demands, facts, keep=1, store=store)
        if not found.configurations:
            return None
        return replace(like, batch=found.configurations[0].batch), float(found.priced[0])


def common_layouts(
    context: Context, facts: FrameworkFacts | None, screenings: Sequence[Screening], tell: Tell
) -> list[tuple[Configuration, ...]]:
    """Configurations of one task each that share an arrangement, the fastest for all tasks together first.

    Asked for is what all tasks have among their candidates, the best of each, and engines of one with the trainer of
    another: 192 x 8 samples and 64 x 8 on 24 devices want engines for many requests and a trainer of eight ranks. Then
    what the slowest tasks would have beside the trainer of the best that was found, and beside its engines. Closed
    forms see nobody preempted, so that too few engines may come first: the best of every split is heard, too.
    """
    each = max(ASKED // len(screenings), 1)
    slowest = sorted(screenings, key=lambda one: -float(one.found.priced[0]))[:ASKED]
    first, *others = screenings
    shared = [key for key in first.known if all(key in one.known for one in others)]
    best_of_each = (c for one in slowest for c in one.found.configurations[:each])
    of_each_split = (
        c for one in slowest for c in _first((c for c in one.found.configurations if _runs_all(context, c)), _split)
    )
    of_all = (one.known[key][0] for key in shared for one in screenings)
    asked = by_arrangement(chain(best_of_each, of_all, _crossed(slowest), of_each_split))
    pieces = {one.task.task.name: one for one in screenings}
    made: dict[tuple[object, ...], tuple[float, tuple[Configuration, ...]]] = {}
    ranked: list[tuple[float, tuple[Configuration, ...]]] = []
    heard: set[tuple[object, ...]] = set()
    for turn in range(TURNS):
        heard |= asked.keys()
        likes = [(like, pinned_to(context, like)) for like in asked.values()]
        ask = partial(_under_each, facts=facts, likes=likes)
        told = within(tell, turn / TURNS, 1.0 / TURNS)
        for key, found in zip(asked, zip(*over_cores(ask, pieces, told, each=PART), strict=True), strict=True):
            kept = [each for each in found if each is not None]
            if len(kept) == len(screenings):
                made[key] = math.fsum(priced for _, priced in kept), tuple(c for c, _ in kept)
        # of what is level the same comes first, whatever the order of the tasks
        best, ranked = ranked[:1], [made[key] for key in sorted(made, key=lambda key: (made[key][0], str(key)))]
        if ranked[:1] == best or turn == TURNS - 1:
            break
        nearest = min(ranked[0][1], key=lambda one: one.off_path)
        beside = _beside(context, facts, nearest, slowest[:BESIDE])
        asked = by_arrangement(each for each in beside if each.arrangement not in heard)
    every = [configurations for _, configurations in ranked]
    return list(dict.fromkeys([*every[:COMMON], *_first(every, lambda each: _split(each[0]))]))


def pinned_to(context: Context, like: Configuration, pools: Sequence[PoolPlan] | None = None) -> Context:
    """The job with every value of a configuration stated, as its files say it in the configuration's mode.

    ``pools`` : of it that are stated, the others as the job has them; None: all
    """
    stated = tuple(pool.pinned() for pool in (like.pools if pools is None else pools))
    others = () if pools is None else (pool for pool in context.job.pools if all(pool.role != s.role for s in stated))
    changes = {"pools": (*stated, *others), "modes": (like.mode,)}
    pinned = replace(context, job=context.job.model_copy(update=changes))
    return replace(pinned.of(like.mode), restate=None)


def _under_each(
    screening: Screening, *, facts: FrameworkFacts | None, likes: Sequence[tuple[Configuration, Context]], report: Tell
) -> list[tuple[Configuration, float] | None]:
    """One task under every arrangement in turn: a piece of work that may run in another process."""
    store = ColumnStore()  # many arrangements have the same engines, or the same trainer
    found = []
    for index, (like, pinned) in enumerate(likes):
        report(index / len(likes), "layouts of all tasks")
        found.append(screening.under(pinned, facts, like, store))
    return found


def _crossed(screenings: Sequence[Screening]) -> Iterator[Configuration]:
    """The first engines of the tasks with the first trainers, of one mode and as many devices as either had."""
    in_turn = [each for rank in zip_longest(*(one.found.configurations for one in screenings)) for each in rank if each]
    engines, trainers = (_first(in_turn, apart, CROSSED) for apart in (_engines, _trainers))
    for one, other in product(engines, trainers):
        alike = (one.mode, one.staleness, one.scorers) == (other.mode, other.staleness, other.scorers)
        if alike and one.pool("rollout").devices == other.pool("rollout").devices:
            beside = (pool for pool in other.pools if pool.role != "rollout")
            departures = one.layout_departures[0], other.layout_departures[1]
            yield replace(other, pools=(one.pool("rollout"), *beside), layout_departures=departures)


def _beside(
    context: Context, facts: FrameworkFacts | None, best: Configuration, screenings: Sequence[Screening]
) -> Iterator[Configuration]:
    """The best of each task with the trainer of a configuration, whatever the engines, and with its engines."""
    for one, role in product(screenings, ("trainer", "rollout")):
        kept = [pool for pool in best.pools if (pool.role == "rollout") == (role == "rollout")]
        pinned = pinned_to(context, best, kept)
        for each in screen(pinned, one.task, one.demands, facts, keep=FOUND).configurations:
            # what a job states departs from nothing: the pool that is pinned here has left the path as far as it had
            of_best, of_each = best.layout_departures, each.layout_departures
            left = (of_best[0], of_each[1]) if role == "rollout" else (of_each[0], of_best[1])
            yield replace(each, layout_departures=left, usual_fraction=best.usual_fraction)


def _runs_all(context: Context, one: Configuration) -> bool:
    """Whether its microbatches take the longest sequence of all tasks."""
    budget = one.pool("trainer").settings.token_budget
    return budget is None or budget >= longest_of_all(context)


def _first(found: Iterable[Found], apart: Callable[[Found], object], most: int | None = None) -> list[Found]:
    """The first ones, at ``most`` so many, that differ in a part of them."""
    kept: dict[object, Found] = {}
    for each in found:
        kept.setdefault(apart(each), each)
        if len(kept) == most:
            break
    return [*kept.values()]


def _split(configuration: Configuration) -> object:
    return configuration.mode, configuration.pool("rollout").devices


def _engines(configuration: Configuration) -> object:
    return configuration.mode, configuration.pool("rollout")


def _trainers(configuration: Configuration) -> object:
    return configuration.mode, configuration.pool("trainer")
