"""Measured rl_steps: the same question, with the planner's own prediction of every measured configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from training import Outcome

from rlperf.api import ask
from rlperf.calibrate import columns
from rlperf.calibrate.rl_step.configuration import configuration_digest
from rlperf.calibrate.rl_step.job import job_of, lengths_of
from rlperf.calibrate.rl_step.predict import DEFAULT_LAW
from rlperf.calibrate.rl_step.rows import StepRow
from rlperf.calibrate.splits import is_new
from rlperf.calibrate.tables import read_table
from rlperf.errors import InfeasibleError, SpecError
from rlperf.plan.judge.evaluate import Evaluation
from rlperf.plan.judge.stage_means import contenders
from rlperf.plan.planner import plan_job
from rlperf.plan.predict import evaluate_job
from rlperf.plan.question.context import Context
from rlperf.plan.question.demand import LengthSource
from rlperf.specs.framework import FrameworkFacts
from rlperf.specs.job import Job
from rlperf.specs.rl_calibration import load_framework_calibration
from rlperf.workload import LengthTable, Recording
from rlperf.workload.fitting import fit_model

SEEDS = 2
"""rl_steps drawn per row: the publications state a mean length, the law around it is assumed."""
SET = ("group", "framework_version", "architecture", "gpu", "n_gpus", "prompts_per_step", "group_size", "mini_batch",
       "seq_limit", "compute_dtype")  # fmt: skip
"""Columns in which the rows of a set are equal."""
LENGTHS = 1.15
"""Largest over smallest mean response of a set: lengths are the policies' own and differ a little."""


@dataclass(frozen=True, eq=False)
class Measured:
    """One row as the planner's question, pinned and open."""

    row: StepRow
    cells: dict[str, str]
    table: LengthTable
    new: bool

    @property
    def seen(self) -> bool:
        """Whether the framework's fit saw this configuration."""
        framework = load_framework_calibration(self.row.framework)
        return configuration_digest(self.row.configuration) in framework.calibrated_on

    def pinned(self) -> Evaluation:
        """The measured configuration, judged as a finalist is."""
        return evaluate_job(*self.context(pinned=True))[0]

    def planned_s(self) -> float:
        """Predicted seconds of the planner's own plan for the same devices, batch and lengths."""
        context, facts = self.context(pinned=False)
        return plan_job(context, facts=facts).phases[0].predicted.rl_step_s

    def context(self, *, pinned: bool) -> tuple[Context, FrameworkFacts]:
        """The row's job, resolved, with the row's lengths."""
        asked = ask(_job(self.row, self.cells, pinned))
        task = asked.context.tasks[0]
        recording = Recording(self.table)
        source = LengthSource(task.task, recording, lambda: fit_model(recording))
        return replace(asked.context, tasks=(replace(task, source=source),)), asked.facts


OPEN = {
    "rollout": {"memory_fraction", "max_running", "cuda_graphs"},
    "trainer": {"backend", "packing", "token_budget", "scoring_token_budget", "scoring_microbatch", "parked"},
}
"""Settings that the planner chooses; the others are what the publication ran, on both sides."""


def _job(row: StepRow, cells: dict[str, str], pinned: bool) -> Job:
    """The job of a row as validation asks it; or with split, layout and modes open, its own among them."""
    ran = job_of(row, workload="math").model_copy(update={"cluster": f"generic:{cells['gpu']}"})
    if pinned:
        return ran
    pools = [
        {
            "role": pool.role,
            "settings": {name: v for name, v in pool.settings.stated().items() if name not in OPEN[pool.role]},
        }
        for pool in ran.pools
    ]
    asked = {name: value for name, value in ran.stated().items() if name != "trainer_backends"}
    opened = {
        "pools": pools,
        "modes": list(dict.fromkeys(["colocated", "disaggregated", "one_step_off", *ran.modes])),
        "limits": {"staleness": max(row.staleness, 1)},
        "objective": {"bold": True},
    }
    return Job.model_validate(asked | opened)


def read(path: Path) -> list[Measured]:
    """Rows with a measured rl_step and a mean length."""
    found = []
    for line in read_table(path):
        cells = dict(line.cells)
        if not (cells["osl_mean"] and cells["measured_step_s"]):
            continue
        try:
            row = columns.read(StepRow, line)
        except SpecError:
            continue
        found.append(Measured(row, cells, _lengths(row), is_new("rl_step", line)))
    return found


def _lengths(row: StepRow) -> LengthTable:
    """A few rl_steps with the row's mean lengths under the law that validation assumes."""
    drawn = [lengths_of(row, DEFAULT_LAW, seed) for seed in range(SEEDS)]
    names = ("prompt_tokens", "response_tokens", "group", "turn")
    joined = {name: np.concatenate([getattr(each, name) for each in drawn]) for name in names}
    return replace(drawn[0], **joined, rl_step=np.repeat(np.arange(SEEDS), len(drawn[0].group)))


def sets_of(rows: list[Measured]) -> Iterator[list[Measured]]:
    """Rows of one publication that differ in mode, backend or layout alone."""
    found: dict[tuple[str, ...], list[Measured]] = {}
    for each in rows:
        found.setdefault(tuple(each.cells[name] for name in SET), []).append(each)
    for members in found.values():
        means = [each.row.response_tokens for each in members]
        if len({each.row.configuration for each in members}) > 1 and max(means) <= LENGTHS * min(means):
            yield members


def outcomes(rows: list[Measured], planned_s: dict[str, float]) -> list[Outcome]:
    """Every set of at least two configurations; ``planned_s``: the planner's own rl_step by row, see `own_plans`."""
    found = []
    for members in sets_of(rows):
        judged = [each.pinned() for each in members]
        predicted = np.array([each.rl_step_s for each in judged])
        measured = np.array([each.row.measured["step_s"] for each in members])
        fastest, best = int(np.argmin(predicted)), int(np.argmin(measured))
        tied = (~contenders(judged).apart(fastest)).tolist()
        cells = members[0].cells
        own = [planned_s[each.row.row_id] / seconds for each, seconds in zip(members, predicted, strict=True)]
        found.append(
            Outcome(
                kind="rl_step",
                name=f"{cells['architecture']}, {cells['n_gpus']} {cells['gpu']}, {cells['framework_version']}",
                layouts=len(members),
                unseen=not any(each.seen for each in members),
                new=any(each.new for each in members),
                tied=sum(tied),
                best_is_tied=tied[best],
                regret=float(measured[fastest] / measured[best] - 1.0),
                own=max(own),
            )
        )
    return found


@dataclass(frozen=True)
class Own:
    """The planner's own plan beside one measured configuration, both predicted.

    ``refused``: why the measured configuration cannot be predicted or nothing can be planned; empty where both can.
    """

    row_id: str
    predicted_s: float
    planned_s: float
    refused: str = ""

    @property
    def ratio(self) -> float:
        """The plan's rl_step over that of the measured configuration."""
        return self.planned_s / self.predicted_s


def own_plans(rows: list[Measured]) -> list[Own]:
    """For every measured configuration: what the planner would do with its devices, batch and lengths."""
    found = []
    for each in rows:
        try:
            found.append(Own(each.row.row_id, each.pinned().rl_step_s, each.planned_s()))
        except InfeasibleError as error:
            found.append(Own(each.row.row_id, np.nan, np.nan, error.message))
    return found
