"""Finalists judged, and then what is left to try beside those that judge best: other engines, budgets and places."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from rlperf.plan.judge.at_once import FEWER, with_fewer_at_once, with_less_staleness
from rlperf.plan.judge.budgets import WORTH, next_budgets, scored_apart, without_chunks, without_recompute
from rlperf.plan.judge.engine_cache import tuned_engines, with_less_cache, with_more_cache, with_parked_trainer
from rlperf.plan.judge.evaluate import Evaluation, Judge
from rlperf.plan.judge.finalists import NEAR, RIVAL
from rlperf.plan.judge.value import judged_objective, valued
from rlperf.plan.question.context import Context
from rlperf.plan.question.pool import PoolPlan
from rlperf.plan.search.configuration import Configuration
from rlperf.plan.search.screen import Screened
from rlperf.plan.search.split_columns import truncates
from rlperf.sim.rl_step.demand import Demand
from rlperf.specs.framework import FrameworkFacts
from rlperf.specs.modes import MODES
from rlperf.specs.pool import LayoutValues, Role
from rlperf.told import Tell, quiet

UNHEARD = 4
"""Engines that are judged one by one, as closed forms have them below all that was judged."""
BESIDE = 8
"""Candidates that are judged after the finalists, with the engines or the trainer that judged best."""
NEAR_STREAMED = 1.15
"""How far engines may be above the best whose groups stream, of which other numbers of requests at once are judged."""
TUNED = 2
"""Candidates that judge best, and trainers that do, of which other token budgets are judged last."""


def tuned(
    judge: Judge, demands: tuple[Demand, ...], screened: Screened, facts: FrameworkFacts | None,
    judged: tuple[Evaluation, ...],
) -> tuple[Evaluation, ...]:  # fmt: skip
    """The judged finalists, and behind them what beside the best of them may be better."""
    context = judge.context
    for _ in range(UNHEARD):
        if (rival := _unheard(context, screened, judged)) is None:
            break
        judged = judge_all(judge, demands, [rival], facts, quiet, judged)
    judged = judge_all(judge, demands, _beside_the_judged(context, screened, judged), facts, quiet, judged)
    best = dict.fromkeys([*_best(context, judged, TUNED), *_best_trainers(context, judged)])
    tried = next_budgets, without_recompute, without_chunks
    budgets = [c for one in best for others in tried for c in others(judge, one)]
    engines = tuned_engines(judge, _best_of_each_engine(context, judged))
    judged = judge_all(judge, demands, [*budgets, *engines], facts, quiet, judged)
    judged = judge_all(judge, demands, _with_the_best_trainer(context, screened, judged), facts, quiet, judged)
    smaller = [c for one in _best_engines(context, judged) for c in with_less_cache(judge, one)]
    judged = judge_all(judge, demands, smaller, facts, quiet, judged)
    bounds = facts.states_trajectories if facts else ""
    crowded = [few for one in _best_engines(context, judged) for few in _fewer_at_once(judge, one, screened, bounds)]
    return judged + tuple(crowded)


def _fewer_at_once(judge: Judge, best: Evaluation, screened: Screened, bounds: str) -> list[Evaluation]:
    """Fewer trajectories at once with the ``best``; the best number of them with other engines, and with these others.

    What spares it evictions need not be what it was chosen for: engines that evict least, or a trainer parked in host
    memory, to leave them more. ``bounds``: how files state how many (`states_trajectories`), which else go with the
    staleness alone.
    """
    stated = bounds == "each" or (bounds and MODES[best.configuration.mode].runs_ahead)
    open_ = stated and best.demand.batch.max_trajectories is None
    fewer = [*(with_fewer_at_once(judge, best) if open_ else []), *with_less_staleness(judge, best)]
    least = min(fewer, key=_seconds, default=best)
    if least.rl_step_s > FEWER * best.rl_step_s:
        return []
    one, demand, staleness = best.configuration, least.demand, least.configuration.staleness
    now = one.pool("rollout").layout
    engines: dict[LayoutValues, list[Configuration]] = {}
    for each in screened.configurations:
        if (each.mode, each.variant) == (one.mode, one.variant):
            engines.setdefault(each.pool("rollout").layout, []).append(each)

    def judged(configurations: Iterable[Configuration]) -> list[Evaluation]:
        changed = [replace(each, batch=demand.batch, staleness=staleness) for each in configurations]
        return [judge.evaluate(demand, each) for each in changed]

    others = judged(own[0] for layout, own in engines.items() if layout != now)
    first = min([least, *others], key=_seconds).configuration.pool("rollout").layout
    beside = engines[first] if first == now else engines[first][1:]  # of others the first has been judged
    return [*fewer, *others, *judged(each for each in beside[:BESIDE] if each != one)]


def _seconds(evaluation: Evaluation) -> float:
    return evaluation.rl_step_s


def judge_all(
    judge: Judge, demands: tuple[Demand, ...], finalists: list[Configuration], facts: FrameworkFacts | None,
    tell: Tell, before: tuple[Evaluation, ...] = (),
) -> tuple[Evaluation, ...]:  # fmt: skip
    """The finalists judged on one group of rl_steps, but for other groups' whose maximum length cuts too much here.

    Behind them larger caches where engines compute again what they evicted; uneven pipeline stages and scoring budgets
    of their own, where a framework states them. What these make of two finalists may be one configuration, or one
    judged ``before``: each stands there once, so that no plan is its own runner-up.
    """
    of_batch = {demand.batch: demand for demand in demands if not truncates(judge.context, demand)}
    found = {evaluation.configuration: evaluation for evaluation in before}

    def judged(configurations: Iterable[Configuration | None]) -> None:
        for one in configurations:
            if one is not None and one not in found:
                found[one] = judge.evaluate(of_batch[one.batch], one)

    for number, configuration in enumerate(c for c in finalists if c.batch in of_batch):
        tell(number / len(finalists), "judging")
        judged([configuration])
    judged(with_parked_trainer(judge, evaluation) for evaluation in [*found.values()][len(before) :])
    judged(one for evaluation in [*found.values()][len(before) :] for one in with_more_cache(judge, evaluation))
    if facts is not None and facts.states_stages:
        judged(judge.staged(evaluation) for evaluation in [*found.values()][len(before) :])
    if facts is not None and facts.states_scoring:
        least = min((judged_objective(judge.context, each) for each in found.values()), default=0.0)
        near = [each for each in [*found.values()][len(before) :] if _may_win(judge.context, each, least)]
        judged(scored_apart(judge, each) for each in near)
    return tuple(found.values())


def _may_win(context: Context, evaluation: Evaluation, least: float) -> bool:
    """Whether an evaluation would be near the ``least`` objective if it scored in no time."""
    scoring_s = np.maximum(evaluation.trainer.scoring_s, evaluation.trainer.values_s).mean()
    without = 1.0 - float(scoring_s) / evaluation.rl_step_s
    return without * judged_objective(context, evaluation) <= RIVAL * least


def _ranked(context: Context, evaluations: tuple[Evaluation, ...]) -> list[tuple[Evaluation, float]]:
    """Evaluations with their objective, the price of leaving the beaten path in it; the best first."""
    _, priced = valued(context, evaluations)
    return [(evaluations[index], float(priced[index])) for index in np.argsort(priced, kind="stable")]


def _best(context: Context, evaluations: tuple[Evaluation, ...], count: int) -> list[Evaluation]:
    """The ``count`` that judge best of every alternative, beaten path and all: as if what is open were stated."""
    kept: dict[tuple[object, ...], list[Evaluation]] = {}
    for one, _ in _ranked(context, evaluations):
        kept.setdefault(one.configuration.alternative, []).append(one)
    return [one for own in kept.values() for one in own[:count]]


def _best_trainers(context: Context, evaluations: tuple[Evaluation, ...]) -> list[Evaluation]:
    """The best with each of the few best trainers of every alternative, whatever engines: these may all be level."""
    kept: dict[tuple[object, ...], dict[PoolPlan, Evaluation]] = {}
    for one, _ in _ranked(context, evaluations):
        kept.setdefault(one.configuration.alternative, {}).setdefault(one.configuration.pool("trainer"), one)
    return [one for own in kept.values() for one in [*own.values()][:TUNED]]


def _best_engines(context: Context, evaluations: tuple[Evaluation, ...]) -> list[Evaluation]:
    """The best of every mode and variant, whatever trains: what is then changed are its engines alone."""
    kept: dict[tuple[object, ...], Evaluation] = {}
    for one, _ in _ranked(context, evaluations):
        kept.setdefault((one.configuration.mode, *one.configuration.variant), one)
    return [*kept.values()]


def _best_of_each_engine(context: Context, evaluations: tuple[Evaluation, ...]) -> list[Evaluation]:
    """The best with each layout and memory of engines that is near the best of its mode, backend and variant."""
    least: dict[tuple[object, ...], float] = {}
    kept: dict[tuple[object, ...], Evaluation] = {}
    for one, priced in _ranked(context, evaluations):
        alike = one.configuration.alternative
        near = NEAR_STREAMED if MODES[one.configuration.mode].streams else NEAR
        if priced <= near * least.setdefault(alike, priced):
            engine = one.configuration.pool("rollout")
            kept.setdefault((*alike, engine.layout, engine.settings.memory_fraction), one)
    return [*kept.values()]


def _rivals(context: Context, evaluations: tuple[Evaluation, ...]) -> list[Configuration]:
    """The best of every alternative that judges near the best of all."""
    ranked = _ranked(context, evaluations)
    kept: dict[tuple[object, ...], Configuration] = {}
    for one in (evaluation.configuration for evaluation, priced in ranked if priced <= RIVAL * ranked[0][1]):
        kept.setdefault(one.alternative, one)
    return [*kept.values()]


def _with_the_best_trainer(
    context: Context, screened: Screened, judged: tuple[Evaluation, ...]
) -> list[Configuration]:  # fmt: skip
    """Engines near the best, as many requests at once as serve best, with its trainer, where neither shares memory.

    Of every rival, as if it were stated.
    """
    near = [each.configuration for each in _best_of_each_engine(context, judged)]
    near = [each for each in near if not each.shares_memory]  # those fit beside the trainer that they stand with
    found = []
    for best in (each for each in _rivals(context, judged) if not each.shares_memory):
        trainer = best.pool("trainer")
        for engine in (one.pool("rollout") for one in near if one != best and one.alternative == best.alternative):
            same = best.mode, best.batch, engine.layout, trainer.layout
            pairs = (c for c in screened.configurations
                     if (c.mode, c.batch, c.pool("rollout").layout, c.pool("trainer").layout) == same)  # fmt: skip
            if (pair := next(pairs, None)) is not None:
                found.append(pair.with_trainer(**dict(trainer.settings)).with_rollout(**dict(engine.settings)))
    return found


def _unheard(context: Context, screened: Screened, evaluations: tuple[Evaluation, ...]) -> Configuration | None:
    """The best candidate of engines that nobody has judged, where it may beat all that was; None where none may.

    Closed forms see nobody preempted and are near the least that events take. Where these find more, of engines whose
    cache runs over, all finalists may have such engines, and others that closed forms rank far behind are faster.
    """

    def engines(configuration: Configuration) -> tuple[object, ...]:
        return configuration.mode, configuration.batch, configuration.pool("rollout").layout

    heard = {engines(each.configuration) for each in evaluations}
    least = (1.0 - WORTH) * _ranked(context, evaluations)[0][1]
    ranked = zip(screened.configurations, screened.priced, strict=True)
    return next((one for one, priced in ranked if priced < least and engines(one) not in heard), None)


def _beside_the_judged(
    context: Context, screened: Screened, evaluations: tuple[Evaluation, ...]
) -> list[Configuration]:
    """Near candidates with the engines or the trainer that judged best, of every rival as if it were stated.

    Of what closed forms hold level, engines or trainers, the first is judged with others; events may prefer another.
    """
    seen = {e.configuration for e in evaluations}
    roles: tuple[Role, ...] = ("rollout", "trainer")
    found = []
    for best in _rivals(context, evaluations):
        own = [(c, priced) for c, priced in zip(screened.configurations, screened.priced, strict=True)
               if c.alternative == best.alternative]  # fmt: skip
        least = min((priced for _, priced in own), default=0.0)
        near = [c for c, priced in own if priced <= NEAR * least and c not in seen]
        beside = [c for role in roles for c in near if c.pool(role).layout == best.pool(role).layout]
        found += list(dict.fromkeys(beside))[:BESIDE]
    return found
