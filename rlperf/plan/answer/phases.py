"""Phases: the chosen column of a slot in a plan's words, with runner-up, ties, sensitivity and the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlperf.errors import SpecError
from rlperf.plan.answer.divisible import divisible_batch
from rlperf.plan.answer.explain import binding, differences
from rlperf.plan.answer.memory_uses import memory_uses
from rlperf.plan.answer.plan import (
    GroupTime,
    ParetoPoint,
    Phase,
    Plan,
    PredictedStages,
    Prediction,
    RunnerUp,
    Sensitivity,
)
from rlperf.plan.answer.prediction import prediction_of
from rlperf.plan.judge.decisions import Decision, rl_step_groups
from rlperf.plan.judge.evaluate import Evaluation, Judge
from rlperf.plan.judge.stage_means import contenders
from rlperf.plan.judge.stages import adaptive_note
from rlperf.plan.question.context import Context, TaskContext
from rlperf.plan.question.pool import ResponseTokens, TaskTokens
from rlperf.plan.question.words import layout_words
from rlperf.plan.search.configuration import Configuration
from rlperf.plan.search.pareto import pareto_mask
from rlperf.plan.search.splits import usage_of
from rlperf.sim.rl_step.demand import Demand
from rlperf.specs.framework import FrameworkFacts

NAMED_TIES = 4
BEST = 10
"""Choices that a plan lists: itself, the runner-up, and those after it."""


def phase_of(
    context: Context, decision: Decision, column: int, room: int, *, remarks: bool,
    facts: FrameworkFacts | None,
) -> Phase:  # fmt: skip
    """The plan's words for the chosen column of a slot; ``remarks`` and ``facts`` as in `rlperf.plan.planner.plan_job`.

    ``room``: devices that others leave it; what takes more is no other choice.
    """
    chosen = decision.evaluations[column]
    configuration = chosen.configuration
    fits = [index for index, one in enumerate(decision.evaluations) if one.configuration.devices <= room]
    order = sorted((index for index in fits if index != column), key=lambda index: decision.objective[index])
    apart = contenders(decision.evaluations).apart(column).tolist()
    rivals = [_runner_up(decision, column, index, apart=apart[index]) for index in _listed(decision, order)]
    tied = [decision.evaluations[index] for index in order if not apart[index]]
    helps: tuple[str, ...] = ()
    if remarks:
        pipeline = adaptive_note(context, decision.task.architecture, configuration, chosen.microbatches, chosen.demand)
        helps = (*divisible_batch(context, decision.task, chosen, facts), *([pipeline] if pipeline else []))
    return Phase(
        tasks=decision.task.names,
        rl_steps=decision.rl_steps,
        mode=configuration.mode,
        staleness=configuration.staleness,
        settings=configuration.settings,
        responses=_responses(chosen),
        pools=configuration.pools,
        scorers=configuration.scorers,
        predicted=prediction_of(context, decision.task, chosen),
        runner_up=rivals[0] if rivals else None,
        next_best=tuple(rivals[1:]),
        tied=len(tied),
        ties=tuple(tuple(differences(configuration, other.configuration)) for other in tied[:NAMED_TIES]),
        simplest=_simplest(chosen, tied),
        pareto=tuple(front(context, decision, column, fits)),
        off_path=any(configuration.layout_departures) and not context.job.objective.bold,
        binds=(*binding(context, decision.task, chosen), *helps),
    )


def _responses(chosen: Evaluation) -> ResponseTokens:
    """Mean and 95th percentile over whole trajectories of all rl_steps that stand for the phase."""
    tasks = tuple(
        TaskTokens(
            task=part.task,
            max_response_tokens=part.batch.max_response_tokens,
            truncated_fraction=part.truncated_fraction,
            **_tokens(part),
        )
        for part in chosen.demand.of_tasks
    )
    return ResponseTokens(**_tokens(chosen.demand), tasks=tasks)


def _tokens(demand: Demand) -> dict[str, float]:
    tokens = np.concatenate([table.trajectories().response_tokens for table in demand.tables])
    return {"mean": float(tokens.mean()), "p95": float(np.quantile(tokens, 0.95))}


def _simplest(chosen: Evaluation, tied: list[Evaluation]) -> tuple[str, ...]:
    """What the simplest of the tied candidates does otherwise; nothing where the chosen one is as simple.

    Of those that are no further off the beaten path.
    """

    def steps(evaluation: Evaluation) -> float:
        return sum(evaluation.configuration.doublings)

    near = [one for one in tied if one.configuration.off_path[0] <= chosen.configuration.off_path[0]]
    simple = min(near, key=steps, default=chosen)
    if steps(simple) >= steps(chosen):
        return ()
    return tuple(differences(chosen.configuration, simple.configuration))


def _runner_up(decision: Decision, column: int, index: int, *, apart: bool) -> RunnerUp:
    """Another column of a slot against the chosen one."""
    chosen, other = decision.evaluations[column], decision.evaluations[index]
    return RunnerUp(
        rl_step_s=other.rl_step_s,
        low_s=other.low_s,
        high_s=other.high_s,
        loss=float(decision.value[index] / decision.value[column]) - 1.0,
        priced=float(decision.objective[index] / decision.objective[column]) - 1.0,
        distinguishable=apart,
        differs=tuple(differences(chosen.configuration, other.configuration)),
        mode=other.configuration.mode,
        backend=other.configuration.pool("trainer").settings.backend or "",
        layouts=(
            layout_words(other.configuration.pool("rollout").layout),
            layout_words(other.configuration.pool("trainer").layout),
        ),
        off_path=any(other.configuration.departures),
    )


def _listed(decision: Decision, others: list[int]) -> list[int]:
    """Of columns in their order the best nine, and the best of every mode and trainer backend."""
    kinds: dict[tuple[str, str | None], int] = {}
    for index in others:
        one = decision.evaluations[index].configuration
        kinds.setdefault((one.mode, one.pool("trainer").settings.backend), index)
    return [*others[: BEST - 1], *(index for index in kinds.values() if index not in others[: BEST - 1])]


def front(context: Context, decision: Decision, column: int, fits: Sequence[int]) -> list[ParetoPoint]:
    """Judged candidates of ``fits`` that none beats in time, device-seconds and memory together, fastest first."""
    chosen, found = decision.evaluations[column], [decision.evaluations[index] for index in fits]
    prices = [usage_of(context, e.configuration).usd_per_s for e in found]
    shares = [max(use.total / use.limit for use in memory_uses(context, e).values()) for e in found]
    criteria = np.array(
        [(e.rl_step_s, e.rl_step_s * e.configuration.devices, share) for e, share in zip(found, shares, strict=True)]
    )
    kept = np.flatnonzero(pareto_mask(criteria))
    return [
        ParetoPoint(
            rl_step_s=float(criteria[i, 0]),
            device_s=float(criteria[i, 1]),
            usd_per_step=None if (price := prices[i]) is None else float(criteria[i, 0]) * price,
            memory_share=float(criteria[i, 2]),
            differs=() if fits[i] == column else tuple(differences(chosen.configuration, found[i].configuration)),
        )
        for i in kept[np.argsort(criteria[kept, 0], kind="stable")]
    ]


def merged(phases: list[Phase]) -> list[Phase]:
    """Neighbouring phases of one task that decide alike become one, with their mean prediction."""
    runs: list[list[Phase]] = []
    for phase in phases:
        last = runs[-1][-1] if runs else None
        alike = last is not None and (last.tasks, last.mode, last.settings, last.pools, last.scorers) == (
            phase.tasks, phase.mode, phase.settings, phase.pools, phase.scorers,
        )  # fmt: skip
        if last is not None and alike and last.rl_steps[1] + 1 == phase.rl_steps[0]:
            runs[-1].append(phase)
        else:
            runs.append([phase])
    return [_joined(run) for run in runs]


def _joined(run: list[Phase]) -> Phase:
    """One phase of several that follow each other."""
    if len(run) == 1:
        return run[0]
    counts = [phase.rl_steps[1] - phase.rl_steps[0] + 1 for phase in run]
    predicted = mean_prediction([phase.predicted for phase in run], counts)
    groups = [
        GroupTime(rl_steps=phase.rl_steps, rl_step_s=said.rl_step_s, low_s=said.low_s, high_s=said.high_s)
        for phase, said in ((phase, phase.predicted) for phase in run)
    ]
    changes = {
        "responses": _mean_tokens([phase.responses for phase in run if phase.responses], counts),
        "rl_steps": (run[0].rl_steps[0], run[-1].rl_steps[1]),
        "predicted": predicted,
        "groups": tuple(groups) if len({group.rl_step_s for group in groups}) > 1 else (),
        "sensitivity": tuple(
            _of_all_groups(rows, counts) for rows in zip(*(phase.sensitivity for phase in run), strict=True)
        ),
    }
    return run[0].model_copy(update=changes)


def _mean_tokens(groups: Sequence[ResponseTokens], counts: Sequence[int]) -> ResponseTokens:
    """Of groups of so many rl_steps: means over rl_steps, of every task by itself, too."""

    def mean(rows: Sequence[ResponseTokens | TaskTokens], *names: str) -> dict[str, float]:
        return {name: float(np.average([getattr(row, name) for row in rows], weights=counts)) for name in names}

    each = zip(*(group.tasks for group in groups), strict=True)
    tasks = [rows[0].model_copy(update=mean(rows, "mean", "p95", "truncated_fraction")) for rows in each]
    return ResponseTokens(**mean(groups, "mean", "p95"), tasks=tuple(tasks))


def _of_all_groups(rows: tuple[Sensitivity, ...], counts: Sequence[int]) -> Sensitivity:
    """One input's sensitivity over groups of so many rl_steps: the mean rl_step, and the first change of layout."""
    mean = float(np.average([row.rl_step_s for row in rows], weights=counts))
    return max(rows, key=lambda row: row.loss).model_copy(update={"rl_step_s": mean})


def mean_prediction(predicted: Sequence[Prediction], counts: Sequence[int]) -> Prediction:
    """Predictions of one configuration over groups of so many rl_steps: seconds and tokens are means over rl_steps.

    Memory is each role's most of any group, and warnings are those of the group of which most responses are cut.
    """
    if len(predicted) == 1:
        return predicted[0]
    weights = np.array(counts, dtype=np.float64)
    weights /= weights.sum()
    tokens = float(weights @ [p.trained_tokens for p in predicted])
    step = float(weights @ [p.rl_step_s for p in predicted])
    devices = predicted[0].trained_tokens / predicted[0].rl_step_s / predicted[0].tokens_per_s_per_device
    prices = [p.usd_per_step for p in predicted]
    stages = {
        name: float(weights @ [getattr(p.stages_s, name) for p in predicted])
        for name in type(predicted[0].stages_s).model_fields
    }
    return predicted[0].model_copy(
        update={
            "rl_step_s": step,
            "low_s": float(weights @ [p.low_s for p in predicted]),
            "high_s": float(weights @ [p.high_s for p in predicted]),
            "stages_s": PredictedStages(**stages),
            "trained_tokens": tokens,
            "tokens_per_s_per_device": tokens / step / devices,
            "usd_per_step": None if prices[0] is None else float(weights @ [p or 0.0 for p in prices]),
            "truncated_fraction": float(weights @ [p.truncated_fraction for p in predicted]),
            "memory_bytes": {
                role: max((p.memory_bytes[role] for p in predicted), key=lambda use: use.total)
                for role in predicted[0].memory_bytes
            },
            "fits": all(p.fits for p in predicted),
            "warnings": max(predicted, key=lambda p: p.truncated_fraction).warnings,
        }
    )


def phases_of(plan: Plan, task: str | None) -> tuple[Phase, ...]:
    """The phases of a plan that run a task; None: all.

    Raises
    ------
    SpecError : the plan's job has no such task
    """
    named = None if task is None else plan.job.of_task(task).tasks[0].name
    return tuple(each for each in plan.phases if named is None or named in each.tasks)


def phase_words(phase: Phase) -> str:
    """Which phase it is: its tasks and rl_steps."""
    return f"{', '.join(phase.tasks)}, rl_steps {phase.rl_steps[0]} to {phase.rl_steps[1]}"


def judge_phase(context: Context, phase: Phase) -> tuple[Evaluation, Prediction]:
    """A phase of a plan judged again: what the plan says of it, with the evaluation of its first rl_steps.

    Raises
    ------
    SpecError : a batch that the job does not allow
    """
    task, configuration = _planned(context, phase)
    return judge_configuration(context, task, configuration, phase.rl_steps)


def judge_configuration(
    context: Context, task: TaskContext, configuration: Configuration, rl_steps: tuple[int, int]
) -> tuple[Evaluation, Prediction]:
    """A configuration on the lengths of (first, last) rl_steps, by the job's groups; the evaluation is of the first."""
    first, last = rl_steps
    groups = [(a, b) for a, b in rl_step_groups(context.job) if first <= a and b <= last] or [rl_steps]
    judge, grouped = Judge(context, task), context.job.horizon.group is not None
    demands = [task.source.demand(configuration.batch, g if grouped else None, context.job.seed) for g in groups]
    evaluations = [judge.evaluate(demand, configuration) for demand in demands]
    predicted = [prediction_of(context, task, evaluation) for evaluation in evaluations]
    return evaluations[0], mean_prediction(predicted, [b - a + 1 for a, b in groups])


def evaluate_phase(context: Context, phase: Phase) -> tuple[TaskContext, Evaluation]:
    """A phase of a plan judged again over all of its rl_steps, and the task that it is of.

    Raises
    ------
    SpecError : a batch that the job does not allow
    """
    task, configuration = _planned(context, phase)
    rl_steps = None if context.job.horizon.group is None else phase.rl_steps
    demand = task.source.demand(configuration.batch, rl_steps, context.job.seed)
    return task, Judge(context, task).evaluate(demand, configuration)


def _planned(context: Context, phase: Phase) -> tuple[TaskContext, Configuration]:
    """What a phase runs, and the task (a batch of several is one) that it is of."""
    task = next((t for t in context.tasks if set(t.names) & set(phase.tasks)), context.tasks[0])
    made = (Configuration(phase.mode, phase.staleness, batch, phase.pools, phase.scorers) for batch in task.batches)
    configuration = next((c for c in made if c.settings == phase.settings), None)
    if configuration is None:
        raise SpecError(f"the plan's batch for task {task.task.name} is none that its job allows")
    return task, configuration
