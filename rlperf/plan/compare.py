"""Compare two jobs or plans under common random numbers: which is faster, and can they be told apart."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rlperf.layout import FloatArray
from rlperf.plan.answer.plan import Phase, Plan
from rlperf.plan.judge.evaluate import Evaluation, Judge
from rlperf.plan.judge.stage_means import calibration_ids, stage_means, stage_sigma_array
from rlperf.plan.predict import evaluate_job
from rlperf.plan.question.context import Context
from rlperf.sim.rl_step.uncertainty import OWN_SHARE, Comparison, compare_draws, unshared_error
from rlperf.specs.framework import FrameworkFacts
from rlperf.specs.job import Job
from rlperf.workload.bootstrap import bootstrap


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

    @property
    def device_s(self) -> float:
        """Device-seconds per rl_step, mean over the draws [s]."""
        return float(self.draws_s.mean()) * self.evaluation.configuration.devices


@dataclass(frozen=True, eq=False)
class JobComparison:
    """Both sides, the ratio of their rl_steps, and that of their device-seconds per trained token."""

    first: Side
    second: Side
    step: Comparison
    device_token: Comparison


def compare_jobs(
    first: Context,
    second: Context,
    facts: tuple[FrameworkFacts | None, FrameworkFacts | None] = (None, None),
    *,
    draws: int = 12,
    seed: int = 0,
) -> JobComparison:
    """Compare the pinned configurations of two jobs; open values are filled in by the screen.

    Draw k takes the same groups for both wherever their recorded or sampled rl_steps have equally many, so that the
    noise of lengths cancels in the ratio.

    Raises
    ------
    InfeasibleError : one of them cannot be laid out
    """
    a, b = (side_of(context, fact, draws, seed) for context, fact in zip((first, second), facts, strict=True))
    return compare_sides(a, b)


def compare_sides(a: Side, b: Side) -> JobComparison:
    """Compare two sides that were drawn alike, as `compare_jobs` does."""
    sides = (a, b)
    shared = calibration_ids(a.context, a.evaluation) == calibration_ids(b.context, b.evaluation)
    sigma = stage_sigma_array(a.context, a.evaluation)
    own = unshared_error(a.stages_s, b.stages_s, sigma, own_share=OWN_SHARE, shared=shared)
    per_token = [
        side.draws_s * side.evaluation.configuration.devices / side.evaluation.demand.trained_tokens for side in sides
    ]
    return JobComparison(a, b, compare_draws(a.draws_s, b.draws_s, own=own), compare_draws(*per_token, own=own))


def side_of(context: Context, facts: FrameworkFacts | None, draws: int, seed: int = 0) -> Side:
    """A job's pinned configuration on the common draws of its prompt groups; open values are filled in.

    Raises
    ------
    InfeasibleError : it cannot be laid out
    """
    evaluation, filled = evaluate_job(context, facts)
    judge = Judge(context, context.tasks[0])
    demand = evaluation.demand
    steps = []
    for k in range(draws):
        table = demand.tables[k % len(demand.tables)]
        drawn = replace(demand, tables=(bootstrap(table, np.random.default_rng([seed, k])),))
        steps.append(judge.evaluate(drawn, evaluation.configuration).rl_step_s)
    return Side(context, evaluation, filled, np.array(steps))


def job_of_plan(plan: Plan, phase: Phase | None = None) -> Job:
    """The job of one phase of a plan (default: the first) with everything pinned that the plan decided."""
    chosen = phase or plan.phases[0]
    pinned = {name: (value,) for name, value in chosen.settings.model_dump().items() if name != "max_prompt_tokens"}
    tasks = tuple(task for task in plan.job.tasks if task.name in chosen.tasks)
    if len(tasks) == 1:  # a mixed batch leaves nothing open
        tasks = (tasks[0].model_copy(update=pinned),)
    asked = {pool.role: plan.job.pool(pool.role) for pool in chosen.pools}
    pools = tuple(
        pool.pinned().model_copy(update={"cluster": asked[pool.role].cluster, "nodes": asked[pool.role].nodes})
        for pool in chosen.pools
    )
    changes: dict[str, object] = {
        "tasks": tasks,
        "modes": (chosen.mode,),
        "pools": pools,
    }
    return plan.job.model_copy(update=changes)
