"""From a group of points to its rows of results, by closed forms, by events, or by the whole planner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError

from rlperf.errors import InfeasibleError, RlperfError, SpecError
from rlperf.plan.answer.plan import PredictedStages, Prediction
from rlperf.plan.answer.prediction import prediction_of
from rlperf.plan.answer.whole import WholeStep
from rlperf.plan.judge.evaluate import Judge
from rlperf.plan.planner import plan_job
from rlperf.plan.question.context import Context, TaskContext
from rlperf.plan.question.objective import objective_of
from rlperf.plan.question.pool import PoolPlan
from rlperf.plan.search.columns import Columns, ColumnStore
from rlperf.plan.search.splits import usage_of
from rlperf.sim.remembered import Remembered
from rlperf.specs.framework import FrameworkFacts
from rlperf.specs.job import Job
from rlperf.specs.objectives import OBJECTIVES
from rlperf.specs.reader import Document, problems_of
from rlperf.sweep.columns import DECIDED, RESULTS, Column
from rlperf.sweep.lengths import KEPT, LengthCache
from rlperf.sweep.pairs import Best, best_pairs, reason_words
from rlperf.sweep.paths import with_values
from rlperf.sweep.screened import screened_frame
from rlperf.sweep.space import Group
from rlperf.sweep.spec import Ask, Method
from rlperf.sweep.store import frame_of

if TYPE_CHECKING:
    import polars as pl

Row = dict[str, Any]


@dataclass(eq=False)
class GroupEvaluator:
    """Evaluates groups of one sweep; keeps what they share."""

    base: dict[str, Any]
    folder: Path | None
    method: Method
    ask: Ask
    _lengths: LengthCache = field(default_factory=LengthCache)
    _store: ColumnStore = field(default_factory=lambda: ColumnStore(KEPT, Remembered(KEPT)))

    def frame(self, group: Group, columns: tuple[Column, ...]) -> pl.DataFrame:
        """A row per point of a group, in its order; whatever goes wrong is a row with its reason.

        ``columns``: the point's number, what the sweep sets, and `rlperf.sweep.columns.RESULTS`
        """
        count = len(group.ids)
        try:
            found = self._found(group)
        except InfeasibleError as error:
            why = f"{error.message}: {error.nearest_miss or 'no near miss'}"
            found = _without("infeasible", why, count)
        except (SpecError, ValidationError) as error:
            found = _without("wrong", _words(error), count)
        except RlperfError as error:
            found = _without("failed", str(error), count)
        except Exception as error:  # one point must not end a sweep of a hundred thousand: its row says what happened
            found = _without("failed", f"{type(error).__name__}: {error}", count)
        settings = columns[: len(columns) - len(RESULTS)]
        set_to = {column.name: coded.values() for column in settings if (coded := group.column(column.name))}
        return frame_of({"point": group.ids.tolist(), **set_to}, settings, count).hstack(found)

    def _found(self, group: Group) -> pl.DataFrame:
        data = with_values(self.base, group.settings)
        try:
            job = Job.model_validate(data)
        except ValidationError as error:
            raise SpecError(problems_of(error, Document(data, {}, ""), Job)) from error
        context, facts = self.ask(job, self.folder)
        if self.method == "plan":
            return _rows_frame([_planned(context, facts)])
        if open_now := context.job.pool("rollout").settings.listed():
            words = f"pools.rollout.settings.{open_now[0]} is open"
            raise SpecError(f"{words}: make it an axis, or sweep by method plan")
        task, demands = self._lengths.demands(context, self.folder)
        best, of_point = best_pairs(Columns(context, task, facts, store=self._store), group, demands)
        if self.method == "screen":
            return screened_frame(best)[of_point]
        judge = Judge(context, task)
        rows = [
            _judged(context, task, judge, best, number)
            if source >= 0
            else {"status": "infeasible", "reason": reason_words(int(reason))}
            for number, (source, reason) in enumerate(zip(best.source, best.reason, strict=True))
        ]
        return _rows_frame(rows)[of_point]


def _rows_frame(rows: Sequence[Row]) -> pl.DataFrame:
    return frame_of({each.name: [row.get(each.name) for row in rows] for each in RESULTS}, RESULTS, len(rows))


def _without(status: str, reason: str, count: int) -> pl.DataFrame:
    return _rows_frame([{"status": status, "reason": " ".join(reason.split())}] * count)


def _words(error: SpecError | ValidationError) -> str:
    return "; ".join(map(str, error.problems)) if isinstance(error, SpecError) else str(error)


def _judged(context: Context, task: TaskContext, judge: Judge, best: Best, number: int) -> Row:
    """The event simulator's row of one combination's best pair."""
    source = best.sources[best.source[number]]
    configuration = source.configuration(int(best.r[number]), int(best.t[number]))
    evaluation = judge.evaluate(source.demand, configuration)
    predicted = prediction_of(context, task, evaluation, operators=False)
    seconds = np.array([predicted.rl_step_s])
    return {
        **_predicted_row(predicted, configuration.mode, configuration.devices),
        "objective_value": float(objective_of(context, source.demand, usage_of(context, configuration), seconds)[0]),
        **_decided(configuration.pools),
    }


def _planned(context: Context, facts: FrameworkFacts | None) -> Row:
    """The planner's row: an rl_step of all tasks, mean over all phases; mode and layouts are those of the first."""
    plan = plan_job(context, facts=facts, remarks=False)
    whole, first = WholeStep.of(plan), plan.phases[0]
    cut = float(np.average([phase.predicted.truncated_fraction for phase in plan.phases],
                           weights=[phase.rl_steps[1] - phase.rl_steps[0] + 1 for phase in plan.phases]))  # fmt: skip
    predicted = first.predicted.model_copy(
        update={
            "rl_step_s": whole.rl_step_s, "low_s": whole.low_s, "high_s": whole.high_s,
            "stages_s": PredictedStages(**whole.stages_s), "memory_bytes": whole.memory_bytes,
            "tokens_per_s_per_device": whole.tokens_per_s_per_device, "usd_per_step": whole.usd,
            "trained_tokens": whole.trained_tokens, "truncated_fraction": cut,
        }
    )  # fmt: skip
    row = _predicted_row(predicted, first.mode, whole.devices)
    counted = 1 if OBJECTIVES[context.job.objective.minimize].per_token else context.job.horizon.rl_steps
    return {**row, "objective_value": plan.objective / counted, **_decided(first.pools)}


def _predicted_row(predicted: Prediction, mode: str, devices: int) -> Row:
    stages = {f"{name}_s": seconds for name, seconds in predicted.stages_s.model_dump().items()}
    memory = {
        f"{role}_memory{part}_bytes": value
        for role, use in predicted.memory_bytes.items()
        for part, value in (("", use.total), ("_limit", use.allowed))
    }
    return {
        "status": "ok",
        "reason": "",
        "rl_step_s": predicted.rl_step_s,
        "low_s": predicted.low_s,
        "high_s": predicted.high_s,
        **stages,
        "usd_per_step": predicted.usd_per_step,
        "device_s": predicted.rl_step_s * devices,
        "tokens_per_s_per_device": predicted.tokens_per_s_per_device,
        "trained_tokens": predicted.trained_tokens,
        "truncated_fraction": predicted.truncated_fraction,
        "bottleneck": max(stages, key=lambda name: stages[name]).removesuffix("_s"),
        "mode": mode,
        "devices": devices,
        **memory,
    }


def _decided(pools: Iterable[PoolPlan]) -> Row:
    by_role = {pool.role: pool for pool in pools}
    row: Row = {}
    for column in DECIDED:
        value = getattr(getattr(by_role[column.role], column.attribute.part), column.attribute.name)
        row[column.name] = int(value) if isinstance(value, bool) else value
    return row
