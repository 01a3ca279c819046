"""The planner's best on the hardware of an audited configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlperf.errors import InfeasibleError, RlperfError
from rlperf.frameworks.expressible import as_framework_runs
from rlperf.plan.answer.plan import Plan
from rlperf.plan.planner import plan_job
from rlperf.plan.question.context import resolve
from rlperf.specs.framework import FrameworkFacts
from rlperf.specs.job import Job
from rlperf.specs.pool import ATTRIBUTES, PoolSpec
from rlperf.specs.short_job import planned_anew
from rlperf.told import Tell


def best_of(
    job: Job, facts: FrameworkFacts | None, now_s: float, files: Sequence[str], folder: Path | None, report: Tell
) -> tuple[Plan | None, str]:
    """The planner's best for the same tasks on the same devices, every layout open; a word where it gains nothing."""
    decided = [each.name for each in ATTRIBUTES if each.part == "settings" and each.decided in ("searched", "derived")]
    anew = dict.fromkeys(decided)
    open_pools = tuple(
        PoolSpec(role=pool.role, placement=pool.placement, settings=pool.settings.model_copy(update=anew))
        for pool in job.pools
    )
    free = job.model_copy(update={"pools": open_pools})
    if facts is not None:  # what no file of the framework could say is no better plan
        free = as_framework_runs(free, facts, folder)
    try:
        best = plan_job(resolve(free, folder=folder), facts=facts, report=report)
    except InfeasibleError as error:
        return _elsewhere(free, facts, error, files, folder, report)
    except RlperfError as error:
        return None, f"no plan: {error}"
    slower = best.phases[0].predicted.rl_step_s >= now_s
    nothing = "the planner, who keeps a risk of running out of memory, finds nothing faster"
    return best, nothing if slower else ""


def _elsewhere(
    job: Job, facts: FrameworkFacts | None, why: RlperfError, files: Sequence[str], folder: Path | None, report: Tell
) -> tuple[Plan | None, str]:
    """The best plan with any trainer of the framework, where none fits with the configuration's own."""
    any_trainer = job.model_copy(update={"trainer_backends": ()})
    if facts is not None:
        any_trainer = as_framework_runs(any_trainer, facts)
    try:
        best = plan_job(resolve(any_trainer, folder=folder), facts=facts, report=report)
    except RlperfError:
        return None, f"no plan: {why}"
    then = f"; its configuration: {asked}" if (asked := planned_anew(job, files)) else ""
    return best, f"nothing fits with {', '.join(job.trainer_backends)}: the planner took another trainer{then}"
