"""Replan: a running job's remaining rl_steps, planned anew with what its log and its rollouts have shown.

Lengths are fitted to the recorded rollouts and forecast; the log calibrates the stages
(`rlperf.plan.judge.stage_factors`); the rest of the run is planned as a shortest path from the running layout. A switch
is recommended only where staying is worse in at least 95 % of common draws of lengths, drift and stage errors,
switching cost included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlperf.errors import Problem, SpecError
from rlperf.layout import FloatArray, IntArray
from rlperf.plan.answer.explain import differences
from rlperf.plan.answer.replanned import LengthForecast, PlannedStretch, Replan
from rlperf.plan.judge.decisions import decide_groups
from rlperf.plan.judge.evaluate import Evaluation, Judge
from rlperf.plan.judge.shared import shared_by_all
from rlperf.plan.judge.stage_factors import Errors, StageFactor, scaled_steps, stage_factors
from rlperf.plan.question.context import Context, TaskContext
from rlperf.plan.question.demand import LengthSource, as_batch
from rlperf.plan.question.objective import objective_of
from rlperf.plan.search.configuration import Configuration
from rlperf.plan.search.formulation import Program, Slot
from rlperf.plan.search.solve import solve
from rlperf.plan.search.splits import usage_of
from rlperf.sim.rl_step.demand import Batch, Demand
from rlperf.specs.framework import FrameworkFacts
from rlperf.specs.objectives import OBJECTIVES
from rlperf.specs.step_log import COLUMNS, StepLog
from rlperf.workload import LengthModel, LengthTable
from rlperf.workload.fitting import fit_model
from rlperf.workload.sampling import forecast_lengths, sample_lengths

CALIBRATED = 12
"""rl_steps of the log that are judged to calibrate the stages: evenly spread over those recorded."""
FUTURES, PROMPTS = (8, 32), 2048
"""Futures of the lengths that stay and switch are compared on: as many as hold so many prompts, within these bounds.

Prompts of one length law scatter (a few hundred of them by 5 % of their mean), and what is told of the rest with them.
"""
DRAWS = 2000
"""Draws of the stage errors, spread over the futures."""
CONFIDENCE = 0.95


def replan_job(
    context: Context,
    running: Configuration,
    log: StepLog,
    rollouts: LengthTable,
    at_step: int,
    *,
    facts: FrameworkFacts | None = None,
) -> Replan:
    """Whether a running job should change its layout for the rl_steps from ``at_step`` on, and to what.

    Parameters
    ----------
    context : the job, with its horizon and its switching cost; open pools and knobs may change
    running : what has run so far
    log, rollouts : step metrics and response lengths of the rl_steps before ``at_step``; later ones are not looked at

    Raises
    ------
    SpecError : no switching cost, nothing left to plan, several tasks, or no rl_step in both log and rollouts
    """
    _check(context, at_step)
    task, notes = context.tasks[0], list[str]()
    log = log.by_rl_step(context.site.updates(running.batch))
    recorded = rollouts.where(np.flatnonzero(rollouts.rl_step < at_step))
    factors = _factors(context, task, running, log, recorded, at_step, notes)
    model = fit_model(recorded, task=task.task.name)
    forecast = replace(task, source=LengthSource(task.task, None, lambda: model))
    return _decide(context, forecast, running, factors, at_step, facts, notes)


def _check(context: Context, at_step: int) -> None:
    horizon = context.job.horizon
    if len(context.tasks) > 1:
        wrong = f"replan takes a job of one task, or of one batch of all: this one has {len(context.tasks)} tasks"
        hint = "replan each by itself, with its own log, or plan them in one batch (sharing: mixed)"
        raise SpecError(Problem(wrong, suggestion=hint))
    if horizon.switch is None:
        hint = "switch: 10 min, beside at_step or as horizon.switch in the job"
        raise SpecError(Problem("what a switch costs is not stated", suggestion=hint))
    if not 0 < at_step < horizon.rl_steps:
        said = f"rl_step {at_step} is not inside the job's horizon of {horizon.rl_steps} rl_steps"
        raise SpecError(Problem(said, suggestion="horizon: {rl_steps: ...} of the job says how many the run has"))


def _factors(
    context: Context, task: TaskContext, running: Configuration, log: StepLog, recorded: LengthTable, at_step: int,
    notes: list[str],
) -> tuple[StageFactor, ...]:  # fmt: skip
    """Stages of the running layout, measured over predicted on the recorded lengths."""
    both = np.flatnonzero((log.rl_step < at_step) & np.isin(log.rl_step, recorded.steps()))
    if both.size > 3:
        both = both[1:]  # the first rl_step compiles and captures
    if not both.size:
        held = ", ".join(
            f"{name} {_span(steps)}" for name, steps in (("log", log.rl_step), ("rollouts", recorded.steps()))
        )
        raise SpecError(f"no rl_step before {at_step} stands in both the log and the rollouts ({held})")
    keep = both[np.unique(np.linspace(0, both.size - 1, min(both.size, CALIBRATED)).round().astype(int))]
    few = StepLog.of(log.rl_step[keep], **{name: getattr(log, name)[keep] for name in COLUMNS})
    steps = [recorded.step(int(step)) for step in few.rl_step]
    tables = tuple(as_batch(task.task.name, steps, running.batch, context.job.seed, notes))
    demand = _demand(task, running.batch, tables, (0, at_step - 1))
    found = stage_factors(context, task, Judge(context, task).evaluate(demand, running), few)
    if (logged := few.mean("response_tokens")) is not None and demand.unlike(logged):
        rolled = demand.response_means()[0]
        notes.append(
            f"responses of the log have {logged:,.0f} tokens in the mean, those of the rollouts {rolled:,.0f} in the "
            "same rl_steps: of one run they would be alike"
        )
    notes += [f"the log says nothing of {factor.stage}" for factor in found if factor.rl_steps == 0]
    left = [each.stage for each in found if each.by_total]
    if left:
        notes.append(f"the log does not time {', '.join(left)}: told by its rl_steps, with what it says of the others")
    notes += [
        f"{each.stage} is {abs(each.surprise):.1f} standard deviations {'slower' if each.surprise > 0 else 'faster'} "
        "than predicted, which is no error of predictions: other layouts are taken to be so, too. Look for another "
        "reason (settings, lengths, a bad node): `rlperf verdict` helps"
        for each in found
        if each.shared == 1.0
    ]
    return found


def _span(rl_steps: IntArray) -> str:
    return f"{rl_steps.min()} to {rl_steps.max()}" if rl_steps.size else "none"


def _demand(task: TaskContext, batch: Batch, tables: tuple[LengthTable, ...], rl_steps: tuple[int, int]) -> Demand:
    reward, _ = task.source.reward_s(0)
    cut = float(
        np.mean([np.mean(table.trajectories().response_tokens >= batch.max_response_tokens) for table in tables])
    )
    return Demand(task.task.name, rl_steps, batch, tables, cut, reward, ())


def _decide(
    context: Context, task: TaskContext, running: Configuration, factors: tuple[StageFactor, ...], at_step: int,
    facts: FrameworkFacts | None, notes: list[str],
) -> Replan:  # fmt: skip
    """Plan the remaining rl_steps from the running layout on, and ask how sure the gain is."""
    horizon = context.job.horizon
    size = horizon.group or horizon.rl_steps - at_step
    groups = [(k, min(k + size, horizon.rl_steps) - 1) for k in range(at_step, horizon.rl_steps, size)]
    choices = _choices(context, task, running, groups, facts)
    best = _path(context, task, choices, Errors.expected(factors))
    plan = [chosen[column].configuration for chosen, column in zip(choices, best, strict=True)]
    lengths = tuple(_forecast(task, running.batch, step) for step in (at_step - 1, horizon.rl_steps - 1))
    first = next((k for k, each in enumerate(plan) if not _same(each, running)), None)
    futures = _futures(context, task, groups, running, plan)
    errors = Errors.draw(factors, DRAWS, np.random.default_rng([context.job.seed, 2]))
    stay, planned = _totals(context, task, futures, errors, groups)
    ratio = stay.value / planned.value
    low, gain, high = (float(v) for v in np.quantile(ratio, [1.0 - CONFIDENCE, 0.5, CONFIDENCE]))
    sure = first is not None and float(np.mean(ratio > 1.0)) >= CONFIDENCE
    differs = () if first is None else tuple(differences(running, plan[first]))
    return Replan(
        verdict="switch" if sure else "stay",
        at_step=at_step if first is None else groups[first][0],
        gain=gain,
        low=low,
        high=high,
        saved=float((stay.value - planned.value).mean()),
        stay_s=stay.rl_step_s,
        planned_s=planned.rl_step_s,
        differs=differs,
        stretches=tuple(PlannedStretch(group, each) for group, each in zip(groups, plan, strict=True)),
        factors=factors,
        lengths=lengths,
        notes=tuple(notes),
    )


def _same(one: Configuration, other: Configuration) -> bool:
    """Nothing has to be moved or restarted between the two."""
    return one.arrangement == other.arrangement


def _choices(
    context: Context, task: TaskContext, running: Configuration, groups: list[tuple[int, int]],
    facts: FrameworkFacts | None,
) -> list[tuple[Evaluation, ...]]:  # fmt: skip
    """Per group of rl_steps: the running layout first, then the judged finalists that read its checkpoint."""
    judge = Judge(context, task)
    found = []

    def other(each: Configuration) -> bool:
        reads = facts is None or each.checkpoint(facts) == running.checkpoint(facts)
        return reads and not _same(each, running)

    for decision in shared_by_all(context, facts, decide_groups(context, task, facts, groups)):
        demand = task.source.demand(running.batch, decision.rl_steps, context.job.seed)
        others = [each for each in decision.evaluations if other(each.configuration)]
        found.append((judge.evaluate(demand, running), *others))
    return found


def _path(
    context: Context, task: TaskContext, choices: list[tuple[Evaluation, ...]], errors: Errors
) -> tuple[int, ...]:
    """Column of every group on the cheapest path that starts at the running layout."""
    serial: dict[tuple[object, ...], int] = {}

    def number(c: Configuration) -> int:
        return serial.setdefault(c.arrangement, len(serial))

    slots = [Slot("now", np.zeros(1), np.array([number(choices[0][0].configuration)]))]
    weights = _weights(context, [group[0].demand for group in choices])
    for position, (group, (weight, each_step)) in enumerate(zip(choices, weights, strict=True)):
        cost = [weight * _expected_value(context, task, each, group[0], errors) for each in group]
        same = np.array([number(each.configuration) for each in group], dtype=np.int64)
        switch = each_step * float(_value(context, group[0], np.array([context.job.horizon.switch or 0.0]))[0])
        slots.append(Slot(f"{position}", np.array(cost), same, previous=position, switch=switch))
    return solve(Program(tuple(slots))).chosen[1:]


def _weights(context: Context, demands: Sequence[Demand]) -> list[tuple[float, float]]:
    """What every group of rl_steps counts in the objective of all of them, and what one rl_step of it does."""
    counts = [last - first + 1 for first, last in (each.rl_steps for each in demands)]
    weights = OBJECTIVES[context.job.objective.minimize].weights(counts, [each.useful_tokens for each in demands])
    return [(weight, weight / count) for weight, count in zip(weights, counts, strict=True)]


def _expected_value(
    context: Context, task: TaskContext, evaluation: Evaluation, running: Evaluation, errors: Errors
) -> float:
    rows = np.arange(len(evaluation.demand.tables))
    factor = {stage: np.repeat(value, len(rows)) for stage, value in errors.of(evaluation, running).items()}
    return float(_value(context, evaluation, scaled_steps(context, task, evaluation, factor, rows)).mean())


def _value(context: Context, evaluation: Evaluation, seconds: FloatArray) -> FloatArray:
    usage = usage_of(context, evaluation.configuration)
    return objective_of(context, evaluation.demand, usage, seconds)


def _forecast(task: TaskContext, batch: Batch, rl_step: int) -> LengthForecast:
    found = forecast_lengths(task.source.model, rl_step, batch.max_response_tokens, prompts=batch.prompts)
    return LengthForecast(
        rl_step, found.mean_tokens, found.mean_tokens_low, found.mean_tokens_high, found.known
    )  # fmt: skip


# -- how sure ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Total:
    """Objective of the remaining rl_steps ``[draws]``, and the mean rl_step [s]."""

    value: FloatArray
    rl_step_s: float


def _futures(
    context: Context, task: TaskContext, groups: list[tuple[int, int]], running: Configuration,
    plan: list[Configuration],
) -> list[tuple[Evaluation, Evaluation]]:  # fmt: skip
    """Staying and the plan, judged on the same futures of every group; future k has the same law in all groups."""
    count = int(np.clip(PROMPTS // running.batch.generated, *FUTURES))
    models = _models(task.source.model, context.job.seed, count)
    judge = Judge(context, task)
    found = []
    for index, (group, chosen) in enumerate(zip(groups, plan, strict=True)):
        middle = (group[0] + group[1]) // 2
        demands: dict[Batch, Demand] = {}
        for batch in dict.fromkeys((running.batch, chosen.batch)):
            tables = tuple(
                sample_lengths(model,
                    batch.generated, batch.group_size, rl_step=middle, max_prompt_tokens=batch.max_prompt_tokens,
                    max_response_tokens=batch.max_response_tokens, seed=1000 * (index + 1) + k,
                )
                for k, model in enumerate(models)
            )  # fmt: skip
            demands[batch] = _demand(task, batch, tables, group)
        stay = judge.evaluate(demands[running.batch], running)
        other = stay if _same(chosen, running) else judge.evaluate(demands[chosen.batch], chosen)
        found.append((stay, other))
    return found


def _models(model: LengthModel, seed: int, count: int) -> list[LengthModel]:
    """Length models with law and trend drawn from their errors."""
    found = []
    for k in range(count):
        random = np.random.default_rng([seed, 1, k])
        drift = model.drift
        if drift.trend:
            drift = replace(drift, slope=drift.slope + drift.slope_se * float(random.standard_normal()))
        found.append(model.draw(random).model_copy(update={"drift": drift}))
    return found


def _totals(
    context: Context, task: TaskContext, futures: list[tuple[Evaluation, Evaluation]], errors: Errors,
    groups: list[tuple[int, int]],
) -> tuple[_Total, _Total]:  # fmt: skip
    """Objective of staying and of the plan over all groups, the same draws for both."""
    rows = np.arange(DRAWS) % len(futures[0][0].demand.tables)
    totals, seconds = [np.zeros(DRAWS), np.zeros(DRAWS)], [0.0, 0.0]
    counts = np.array([last - first + 1 for first, last in groups], dtype=np.float64)
    before: Configuration = futures[0][0].configuration
    weights = _weights(context, [stay.demand for stay, _ in futures])
    for (stay, planned), count, (weight, each_step) in zip(futures, counts, weights, strict=True):
        for side, each in enumerate((stay, planned)):
            steps = scaled_steps(context, task, each, errors.of(each, stay), rows)
            totals[side] = totals[side] + weight * _value(context, each, steps)
            seconds[side] += count * float(steps.mean()) / float(counts.sum())
        if not _same(planned.configuration, before):
            totals[1] = totals[1] + each_step * _value(context, stay, np.array([context.job.horizon.switch or 0.0]))
        before = planned.configuration
    return _Total(totals[0], seconds[0]), _Total(totals[1], seconds[1])
