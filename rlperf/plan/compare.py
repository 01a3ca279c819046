"""Compare two jobs or plans under common random numbers: which is faster, and can they be told apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlperf.layout import FloatArray
from rlperf.plan.answer.plan import Phase, Plan
from rlperf.plan.judge.evaluate import Evaluation, Judge
from rlperf.plan.judge.stage_means import calibration_ids, stage_means, stage_sigma_array
from rlperf.plan.predict import evaluate_job
from rlperf.plan.question.context import Context
from rlperf.sim.rl_step.uncertainty import OWN_SHARE, Comparison, compare_draws, log_sigma, unshared_error
from rlperf.specs.framework import FrameworkFacts
from rlperf.specs.job import Job
from rlperf.workload.bootstrap import bootstrap

_TOLD = ("name", "family", "source", "notes", "published_parameters", "published_source", "assumed")
"""What is said of an architecture, beside its shape."""
SAME_WORK = 0.02
"""Shares by which tokens trained on per rl_step may differ for rl_steps to be held against each other as they are."""


@dataclass(frozen=True, eq=False)
class Side:
    """One of the two: its judged configuration, what was filled in, and its rl_steps on the common draws [s]."""

    context: Context
    evaluation: Evaluation
    filled: tuple[str, ...]
    draws_s: FloatArray

    @property
    def stages_s(self) -> FloatArray:
        """Mean seconds of the stages ``[stages]``, the rest of the rl_step last [s]."""
        return stage_means(self.evaluation)


@dataclass(frozen=True, eq=False)
class JobComparison:
    """Both sides, the ratio of their rl_steps, and that of their device-seconds per trained token."""

    first: Side
    second: Side
    step: Comparison
    device_token: Comparison

    @property
    def models(self) -> tuple[str, ...]:
        """Both sides' models, where these differ by more than what they are called."""
        a, b = (side.context.tasks[0].architecture for side in (self.first, self.second))
        return () if b.model_copy(update={each: getattr(a, each) for each in _TOLD}) == a else (a.name, b.name)

    def verdict(self, first: str, second: str) -> str:
        """Which is faster, in a sentence that says first what makes the question odd: another model, other work."""
        models = f"not the same model ({', '.join(self.models)}): " if self.models else ""
        return models + self._faster(first, second)

    def _faster(self, first: str, second: str) -> str:
        """Which is faster; of rl_steps that do not train on the same, per token and device."""
        tokens = [side.evaluation.demand.trained_tokens for side in (self.first, self.second)]
        if abs(math.log(tokens[1] / tokens[0])) < SAME_WORK:
            return self.step.sentence(first, second)
        work = f"{tokens[0]:,.0f} tokens are trained on per rl_step, {tokens[1]:,.0f} of {second}"
        return f"not the same work: of {first} {work}; per token and device {self.device_token.sentence(first, second)}"


def compare_jobs(
    first: Context,
    second: Context,
    facts: tuple[FrameworkFacts | None, FrameworkFacts | None] = (None, None),
    *,
    draws: int = 12,
) -> JobComparison:
    """Compare the pinned configurations of two jobs; open values are those of their plans.

    Draw k takes the same groups for both wherever their recorded or sampled rl_steps have equally many, so that the
    noise of lengths cancels in the ratio.

    Raises
    ------
    InfeasibleError : one of them cannot be laid out
    """
    a, b = (side_of(context, fact, draws) for context, fact in zip((first, second), facts, strict=True))
    return compare_sides(a, b)


def compare_sides(a: Side, b: Side) -> JobComparison:
    """Compare two sides that were drawn alike, as `compare_jobs` does."""
    per_token = [side.evaluation.configuration.devices / side.evaluation.demand.trained_tokens for side in (a, b)]
    step = compare_weighted([(1.0, a)], [(1.0, b)])
    return JobComparison(a, b, step, step.times(per_token[1] / per_token[0]))


def compare_weighted(a: Sequence[tuple[float, Side]], b: Sequence[tuple[float, Side]]) -> Comparison:
    """Two plans of one or several phases: what all phases of each come to, a second of each phase weighing as given.

    Constants of one device, engine, trainer and framework err alike in all phases.
    """
    ids = [{calibration_ids(side.context, side.evaluation) for _, side in sides} for sides in (a, b)]
    stages = [np.sum([weight * side.stages_s for weight, side in sides], axis=0) for sides in (a, b)]
    drawn = [np.sum([weight * side.draws_s for weight, side in sides], axis=0) for sides in (a, b)]
    sigma = stage_sigma_array(a[0][1].context, a[0][1].evaluation)
    own = unshared_error(stages[0], stages[1], sigma, own_share=OWN_SHARE, shared=ids[0] == ids[1])
    # what draws are drawn again from has more rl_steps than they: it is the ratio, and the plans' own
    ratio = _weighted(b, _step_s) / _weighted(a, _step_s)
    return compare_draws(drawn[0], drawn[1], own=math.hypot(own, _alone(a, b)), ratio=ratio)


def _alone(a: Sequence[tuple[float, Side]], b: Sequence[tuple[float, Side]]) -> float:
    """Standard deviation of ln(ratio) from what one of two plans is unsure of and the other is not [1].

    What is unlike all that was measured, such as the acceptance of drafts, as `Contenders` has it; and the rate of the
    framework's controller, as far as one moves more.
    """
    whole = [_weighted(sides, _step_s) for sides in (a, b)]
    unlike = [_weighted(sides, lambda one: one.unlike * one.rl_step_s) for sides in (a, b)]
    moved = [_weighted(sides, lambda one: float(one.seconds.data_movement_s.mean())) for sides in (a, b)]
    rates = [sides[0][1].evaluation.framework.controller_rate.provenance for sides in (a, b)]
    sigma = [float(log_sigma(rate.low, rate.high)) * each for rate, each in zip(rates, moved, strict=True)]
    same = a[0][1].evaluation.framework.id == b[0][1].evaluation.framework.id
    moving = (abs(sigma[1] - sigma[0]) if same else math.hypot(*sigma)) / max(whole)
    return math.sqrt(abs((unlike[0] / whole[0]) ** 2 - (unlike[1] / whole[1]) ** 2) + moving**2)


def _weighted(sides: Sequence[tuple[float, Side]], value: Callable[[Evaluation], float]) -> float:
    return math.fsum(weight * value(side.evaluation) for weight, side in sides)


def _step_s(evaluation: Evaluation) -> float:
    return evaluation.rl_step_s


def side_of(
    context: Context, facts: FrameworkFacts | None, draws: int, *,
    rl_steps: tuple[int, int] | None = None,
) -> Side:  # fmt: skip
    """A job's pinned configuration on the common draws of its prompt groups; open values are filled in.

    ``rl_steps`` : first and last, where lengths change over the horizon; None: all that was recorded

    Raises
    ------
    InfeasibleError : it cannot be laid out
    """
    evaluation, filled = evaluate_job(context, facts)
    judge = Judge(context, context.tasks[0])
    if rl_steps is not None:
        demand = context.tasks[0].source.demand(evaluation.demand.batch, rl_steps, context.job.seed)
        evaluation = judge.evaluate(demand, evaluation.configuration)
    demand = evaluation.demand
    steps = []
    for k in range(draws):
        table = demand.tables[k % len(demand.tables)]
        drawn = replace(demand, tables=(bootstrap(table, np.random.default_rng([0, k])),))
        steps.append(judge.evaluate(drawn, evaluation.configuration).rl_step_s)
    return Side(context, evaluation, filled, np.array(steps))


def job_of_plan(plan: Plan, phase: Phase | None = None) -> Job:
    """The job of one phase of a plan (default: the first) with everything pinned that the plan decided."""
    chosen = phase or plan.phases[0]
    settings = chosen.settings.model_dump(exclude={"max_prompt_tokens"})
    pinned = {name: None if value is None else (value,) for name, value in settings.items()}
    tasks = tuple(task for task in plan.job.tasks if task.name in chosen.tasks)
    if len(tasks) > 1:  # those of a mixed batch leave nothing else open
        pinned = {"max_trajectories": pinned["max_trajectories"]}
    tasks = tuple(task.model_copy(update=pinned) for task in tasks)
    asked = {pool.role: plan.job.pool(pool.role) for pool in chosen.pools}
    pools = tuple(
        pool.pinned().model_copy(
            update={name: getattr(asked[pool.role], name) for name in ("cluster", "nodes", "price")}
        )
        for pool in chosen.pools
    )
    served = {each.name: each for each in chosen.scorers}
    changes: dict[str, object] = {
        "tasks": tasks,
        "modes": (chosen.mode,),
        "pools": pools,
        "scorers": tuple(served[each.name].pinned(each) if each.name in served else each for each in plan.job.scorers),
    }
    return plan.job.model_copy(update=changes)
