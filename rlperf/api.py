"""The public functions: a job in, a plan or a prediction out, with the framework's rules in force."""

from __future__ import annotations

from pathlib import Path

from rlperf.frameworks.adapter import framework_facts
from rlperf.frameworks.registry import split_name
from rlperf.plan import planner, predict
from rlperf.plan.context import read_job
from rlperf.plan.plan import Plan, Prediction
from rlperf.plan.planner import Report
from rlperf.specs.framework import FrameworkFacts
from rlperf.specs.job import Job


def load_job(job: Job | Path | str) -> tuple[Job, Path | None]:
    """A job and the folder from which its relative paths start."""
    if isinstance(job, Job):
        return job, None
    path = Path(job)
    return read_job(path), path.resolve().parent


def facts_of(job: Job) -> FrameworkFacts | None:
    """Rules of the job's framework and version."""
    name, version = split_name(job.framework)
    return framework_facts(name, version)


def plan_job(job: Job | Path | str, *, report: Report | None = None) -> Plan:
    """The best plan for a job (an object, or the path of its file).

    Raises
    ------
    SpecError, InfeasibleError, SolverError : see `rlperf.errors`
    """
    found, folder = load_job(job)
    return planner.plan_job(found, folder=folder, facts=facts_of(found), report=report)


def predict_job(job: Job | Path | str) -> Prediction:
    """What a job's pinned configuration does; open values are filled in and named in ``assumed``."""
    found, folder = load_job(job)
    return predict.predict_job(found, folder=folder, facts=facts_of(found))


__all__ = ["facts_of", "load_job", "plan_job", "predict_job"]
