"""Should a running job go on as it runs? Its log and its rollouts against a plan of the rl_steps that are left."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlperf.api import Jobs, ask, given, job_of, plan_job
from rlperf.errors import SpecError
from rlperf.files import Files, listed
from rlperf.frameworks.imports import own_document, read_job_or_config
from rlperf.frameworks.logs.dumps import read_rollouts
from rlperf.frameworks.logs.read import read_log, same_framework
from rlperf.plan import replan
from rlperf.plan.answer.plan import Plan
from rlperf.plan.answer.reading import plan_in
from rlperf.plan.answer.replanned import Replan
from rlperf.plan.compare import job_of_plan
from rlperf.plan.predict import evaluate_job
from rlperf.plan.question.context import with_trainers
from rlperf.specs.given import as_count, as_path
from rlperf.specs.job import Job
from rlperf.specs.own_files import folder_of
from rlperf.units import parse_quantity


def replan_job(
    job: Jobs,
    log: Files,
    rollouts: Files,
    at_step: int,
    *,
    running: Jobs | None = None,
    switch: str | None = None,
    tokenizer: str | None = None,
    framework: str | None = None,
) -> Replan:
    """Whether a running job should change its layout for the rest of its rl_steps; only where it surely pays.

    Parameters
    ----------
    job : the job (object, dict or file), or the plan that the run follows
    log : step metrics of the run: console, JSONL, CSV, trainer state, tfevents; several files are one run
    rollouts : rollout dump of the framework, or PolyTrace files
    at_step : first rl_step that may run otherwise; what was recorded from it on is not looked at
    running : what runs: plan, job, or the file of a framework's configuration; default: what ``job`` plans
    switch : cost of changing the layout, such as ``"10 min"`` [s]; default: the job's ``horizon.switch``
    tokenizer : tokenizer.json, for dumps that hold text only
    framework : of the log, where it is not recognised

    Raises
    ------
    SpecError : no switching cost, nothing left to plan, several tasks, no rl_step in both log and rollouts, or a log
        of another framework than runs
    InfeasibleError : what runs cannot be laid out
    """
    at_step, folder = as_count(at_step, "at_step"), _folder(job)
    plan, asked = _read(job)
    if running is None:
        plan = plan or plan_job(asked, folder=folder)
        phase = next((p for p in plan.phases if p.rl_steps[0] <= at_step - 1 <= p.rl_steps[1]), plan.phases[0])
        runs, its_folder = job_of_plan(plan, phase), folder
    else:
        followed, runs = _read(running, asked)
        runs, its_folder = job_of_plan(followed) if followed else runs, _folder(running)
    steps = same_framework(read_log(listed(log), framework), runs.framework)
    question, at_work = ask(_to_plan(asked, runs, switch), folder=folder), ask(runs, folder=its_folder)
    current = evaluate_job(*at_work.pair)[0].configuration
    cap, updates = max(asked.tasks[0].max_response_tokens), at_work.context.site.updates(current.batch)
    table = read_rollouts(listed(rollouts), tokenizer=tokenizer, max_response_tokens=cap, updates=updates)
    return replan.replan_job(question.context, current, steps, table, at_step, facts=question.facts)


def _to_plan(asked: Job, runs: Job, switch: str | None) -> Job:
    """The job whose rest is planned: with the trainer that runs among its own, and the cost of a switch as given."""
    backends = tuple(dict.fromkeys(name for job in (asked, runs) for name in with_trainers(job).trainer_backends))
    horizon = asked.horizon
    if switch is not None:
        try:
            horizon = horizon.model_copy(update={"switch": parse_quantity(switch, "s")})
        except ValueError as error:
            raise SpecError(f"switch: {error}") from error
    return asked.model_copy(update={"trainer_backends": backends, "horizon": horizon})


def _folder(source: Jobs) -> Path | None:
    """Where names of a file start; of an object where Python runs."""
    return folder_of(source) if isinstance(source, Path | str) else None


def _read(source: Jobs, beside: Job | None = None) -> tuple[Plan | None, Job]:
    """A plan, where it is one, and its job; of a framework's configuration the job on the cluster and the lengths of
    the one ``beside`` it.
    """
    source = given(source)
    if isinstance(source, Mapping):
        source = job_of(source, {})
    if isinstance(source, Job):
        return None, source
    if not isinstance(source, Plan):
        path = as_path(source, "job")
        document = own_document(path)
        plan = plan_in(document) if document else None
        if plan is None:
            cluster, workload = (beside.cluster, beside.tasks[0].workload) if beside else (None, None)
            return None, read_job_or_config(path, cluster=cluster, workload=workload)
        source = plan
    return source, source.job
