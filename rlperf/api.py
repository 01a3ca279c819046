"""The public functions: a job in, a plan or a prediction out, with the framework's rules in force."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlperf.errors import InfeasibleError, Problem, SpecError, did_you_mean
from rlperf.frameworks.adapter import framework_facts
from rlperf.frameworks.defaults import defaults_of
from rlperf.frameworks.expressible import as_framework_runs, displaced, native_backends, unsayable
from rlperf.frameworks.registry import adapter_of, split_name
from rlperf.plan import planner, predict
from rlperf.plan.answer.baseline import DefaultsOf
from rlperf.plan.answer.phases import judge_phase, phase_words, phases_of
from rlperf.plan.answer.plan import Plan, Prediction
from rlperf.plan.answer.reading import plan_in
from rlperf.plan.answer.run_cost import Stretch, run_totals
from rlperf.plan.compare import job_of_plan
from rlperf.plan.judge.evaluate import Evaluation
from rlperf.plan.question.context import Context, anchored, engine_named, resolve
from rlperf.plan.would_fit import with_what_fits
from rlperf.specs.framework import FrameworkFacts
from rlperf.specs.given import as_count, as_path
from rlperf.specs.job import Job
from rlperf.specs.job_document import read_job_document
from rlperf.specs.own_files import folder_of
from rlperf.specs.reader import Document, validate
from rlperf.specs.releases import read_as
from rlperf.specs.short_job import SHORT, short_job
from rlperf.told import Tell

if TYPE_CHECKING:  # a plan asks neither
    from rlperf.plan.sizing import Sizing
    from rlperf.sweep import Sweep, SweepResult
    from rlperf.sweep.run import Backend


@dataclass(frozen=True, eq=False)
class Question:
    """A job with everything that its names stand for, and the rules of its framework."""

    context: Context
    facts: FrameworkFacts

    @property
    def job(self) -> Job:
        """The job that was asked."""
        return self.context.job

    @property
    def defaults(self) -> DefaultsOf:
        """What its framework runs by default."""
        return defaults_of(self.context)

    @property
    def pair(self) -> tuple[Context, FrameworkFacts]:
        """Context and rules."""
        return self.context, self.facts


Jobs = Job | Plan | Mapping[str, Any] | Path | str
"""What stands for a job: an object, a plan of it, the fields of one, or the path of its file (or of a plan.yaml)."""


def job_of(job: Jobs | None, values: Mapping[str, Any]) -> Job | Path:
    """A job as an object, or the path of its file, from what a caller gave.

    ``values`` are the arguments of `rlperf.specs.short_job.short_job` (``model``, ``gpus``, ``max_response`` ...) with
    the fields of a job that none of them stands for (``price``, ``pools`` ...), or fields of a job alone
    (``architecture``, ``cluster``, ``tasks`` ...), and so are those of a dict; beside a job its fields are replaced.

    >>> job_of(None, {"model": "Qwen3-8B", "gpus": 16}).cluster
    'dgx_h100'
    >>> job_of({"model": "Qwen3-8B", "gpus": 16}, {"framework": "slime"}).framework
    'slime'
    """
    job = None if job is None else given(job)
    if isinstance(job, Plan):
        job = job.question
    if isinstance(job, Mapping):
        values, job = {**job, **values}, None
    if job is None and not values:
        raise SpecError("no job: name a file, give an object or a dict, or model=... and gpus=...")
    if job is None:
        return _from_words(values) if "model" in values else _from_fields(values)
    if not values:
        return job if isinstance(job, Job) else as_path(job, "job")
    return _from_fields({**load_job(job).model_dump(exclude_unset=True), **values})


def given(job: Jobs) -> Jobs:
    """A plan where its dict is given (`Plan.to_dict`), a job checked; all else as it is."""
    if isinstance(job, Job):
        return _checked(job)
    return (plan_in(Document(dict(job), {}, "plan")) or job) if isinstance(job, Mapping) else job


def _checked(job: Job) -> Job:
    """A job of which fields may have been changed by pydantic's `model_copy`, which looks at none of them."""
    if unknown := sorted(vars(job).keys() - Job.model_fields.keys()):
        raise SpecError(Problem(f"job: {name}: unknown field", suggestion=did_you_mean(name, Job.model_fields))
                        for name in unknown)  # fmt: skip
    return _from_fields(job.model_dump(exclude_unset=True, warnings=False))


def _from_fields(fields: Mapping[str, Any]) -> Job:
    return validate(Document(dict(fields), {}, "job"), Job)


WORDED = ("architecture", "cluster", "nodes", "devices_per_node", "modes", "tasks")
"""Fields of a job that words stand for."""


def _from_words(values: Mapping[str, Any]) -> Job:
    """A job of words, and of the fields beside them that no word stands for."""
    beside = {name: value for name, value in values.items() if name not in SHORT}
    fields, alone = Job.model_fields.keys() - set(WORDED), "leave it out, or give all of the job as fields"
    problems = [Problem(f"{name} is said by model, gpus, gpu, mode, max_response ...", suggestion=alone)
                if name in WORDED
                else Problem(f"unknown argument {name}", suggestion=did_you_mean(name, {*SHORT, *fields}))
                for name in beside if name not in fields]  # fmt: skip
    if problems:
        raise SpecError(problems)
    job = short_job(**{name: value for name, value in values.items() if name in SHORT})
    if not beside:
        return job
    stated = job.model_dump(exclude_unset=True)
    if isinstance(beside.get("limits"), Mapping):
        beside["limits"] = {**stated["limits"], **beside["limits"]}
    return _from_fields({**stated, **beside})


def load_job(job: Job | Path | str) -> Job:
    """A job from its file, with absolute paths, or the job that a plan.yaml answers; an object passes as it is."""
    if isinstance(job, Job):
        return job
    document = read_job_document(job)
    plan = plan_in(document)
    return plan.question if plan else anchored(validate(document, Job), folder_of(job))


def ask(job: Jobs, *, folder: Path | None = None, task: str | None = None, to_plan: bool = False) -> Question:
    """Resolve a job (an object, a dict, or the path of its file); every wrong name is reported at once, with its line.

    A plan, or its plan.yaml, asks for what it decided: the job with the pools of its first phase pinned.
    ``folder``: where relative paths of a job object start (default: here); ``task``: of several tasks the one that is
    meant, of a plan with the pools of its first phase. ``to_plan``: what no file of the framework could say is refused.

    Raises
    ------
    SpecError : wrong fields, names that cannot be found, contradictions
    """
    document: Document | None = None
    job = given(job)
    if isinstance(job, Mapping):
        job = job_of(job, {})
    if not isinstance(job, Plan | Job):
        document, folder = read_job_document(as_path(job, "job")), folder_of(job)
        job = plan_in(document) or validate(document, Job)
    if isinstance(job, Plan):
        named = job.job.of_task(task).tasks[0].name
        return ask(job_of_plan(job, phases_of(job, named)[0]), folder=folder, to_plan=to_plan)
    folder = folder or Path.cwd()
    job = anchored(job, folder)
    job = stated = job if task is None else job.of_task(task)
    problems: list[Problem] = []
    facts, context = None, None
    try:
        facts = facts_of(job)
        job = as_framework_runs(job, facts, folder)
        refused = facts.objections(
            job.modes, native_backends(job.trainer_backends, facts, folder), engine_named(job)[0], job.algorithm,
            critic_apart=job.pool("critic").apart,
        )  # fmt: skip
        refused += unsayable(job, facts, folder) if to_plan else []
    except SpecError as error:
        refused = list(error.problems)
    problems += [document.problem(("framework",), p.message, p.suggestion) if document else p for p in refused]
    try:
        context = resolve(job, folder=folder, document=document)
    except SpecError as error:
        # a framework without rules has no calibration either: said once
        known = facts is not None
        problems += [p for p in error.problems if known or "framework calibration" not in p.message]
    if to_plan and context is not None and facts is not None:
        displaced_here = displaced(job, facts, turns=any(task.source.turns > 1 for task in context.tasks))
        problems += [document.problem(("scorers",), p.message, p.suggestion) if document else p for p in displaced_here]
    if problems:
        raise SpecError(dict.fromkeys(problems))
    assert context is not None and facts is not None
    restate = partial(as_framework_runs, facts=facts, folder=folder)
    newer = read_as(facts.name, split_name(job.framework)[1], facts.versions)
    warned = (*([newer] if newer else []), *_foreign(facts, context))
    keyless = facts.keyless("rollout") | facts.keyless("trainer")
    return Question(replace(context, asked=stated, restate=restate, keyless=keyless, warned=warned), facts)


def _foreign(facts: FrameworkFacts, context: Context) -> tuple[str, ...]:
    """That the framework has no code for the job's devices: what it would take there is predicted all the same."""
    vendors = facts.vendors
    devices = {each.device.name: each.device.vendor for each in (context.hardware, context.rollout_hardware)}
    lacking = [f"{name} ({vendor})" for name, vendor in devices.items() if vendors and vendor not in vendors]
    known = f"{', '.join(vendors[:-1])} and {vendors[-1]}" if vendors[1:] else "".join(vendors)
    words = f"{facts.name} has code for devices of {known}, none for"
    return tuple(f"{words} {each}: figures are those of a port" for each in lacking)


def facts_of(job: Job) -> FrameworkFacts:
    """Rules of the job's framework and version."""
    name, version = split_name(job.framework)
    return framework_facts(adapter_of(name).name, version)


def question_of(job: Job | Path, folder: Path | None = None) -> Question:
    """A job to plan; of a plan.yaml the one that it answers, which is planned again."""
    again = None if isinstance(job, Job) else plan_in(read_job_document(job))
    folder = folder_of(job) if isinstance(job, Path) else folder
    return ask(again.question if again else job, folder=folder, to_plan=True)


def plan_job(job: Jobs | None = None, *, report: Tell | None = None, folder: Path | None = None, **values: Any) -> Plan:
    """The best plan for a job (an object, a dict, or the path of its file; of a plan.yaml, its job is planned again).

    ``folder`` : of a job object, as in `ask`
    ``values`` : see `job_of`; ``plan_job(model="Qwen3-32B", gpus=32, gpu="h100", max_response="16k")`` needs no file.

    Raises
    ------
    SpecError, InfeasibleError, SolverError : see `rlperf.errors`
    """
    asked = job_of(job, values)
    folder = folder_of(asked) if isinstance(asked, Path) else folder
    return plan_question(question_of(asked, folder), folder=folder, report=report)


def plan_question(question: Question, *, folder: Path | None, report: Tell | None = None) -> Plan:
    """The best plan for a job that is resolved; a refusal for want of memory says what would fit, each screened."""
    context = question.context
    try:
        return planner.plan_job(context, facts=question.facts, report=report, defaults=question.defaults)
    except InfeasibleError as error:
        asked = question.job if context.asked is None else context.asked

        def again(job: Job) -> tuple[Context, FrameworkFacts]:
            return ask(job, folder=folder, to_plan=True).pair

        raise with_what_fits(error, asked, again, report) from error


def predict_job(job: Jobs | None = None, **values: Any) -> Prediction:
    """What a job's pinned configuration does; open values are filled in and named in ``assumed``.

    A plan (an object, or the path of its plan.yaml) is predicted as it stands: its first phase.
    ``values`` : see `job_of`.
    """
    return judge(pinned_of(job, values))[2]


def pinned_of(job: Jobs | None, values: Mapping[str, Any]) -> Job | Plan | Path:
    """What `judge` takes for a job and values beside it: a plan as it stands, where none replaces anything of it."""
    job = None if job is None else given(job)
    return job if isinstance(job, Plan) and not values else job_of(job, values)


def judge(
    asked: Job | Plan | Path | str, *, phase: int = 1, task: str | None = None, report: Tell | None = None
) -> tuple[Job, Evaluation, Prediction]:
    """The job, its judged configuration and its prediction; of a plan, its ``phase`` (from 1) as it stands.

    ``task`` : which one of a job that has several; of a plan, its phases are then counted alone

    Raises
    ------
    SpecError : wrong fields or names, or a phase that the plan does not have
    InfeasibleError : the pinned degrees cannot be laid out at all
    """
    phase = as_count(phase, "phase")
    folder = None if isinstance(asked, Job | Plan) else folder_of(asked)
    if isinstance(asked, Plan | Job):
        plan = asked if isinstance(asked, Plan) else None
    else:
        plan = plan_in(read_job_document(asked))
    if plan is None:
        assert not isinstance(asked, Plan)
        if phase != 1:
            raise SpecError(
                f"there is no phase {phase}: a job has none, its plan.yaml has (rlperf plan JOB --out plan/)"
            )
        question = ask(asked, task=task)
        return (question.job, *predict.predicted(question.context, facts=question.facts, report=report))
    phases = phases_of(plan, task)
    if phase > len(phases):
        raise SpecError(f"there is no phase {phase}{f' of {task}' if task else ''}: the plan has {len(phases)}")
    context, chosen = ask(plan.job, folder=folder).context, phases[phase - 1]
    evaluation, found = judge_phase(context, chosen)
    if len(plan.phases) == 1 and not chosen.groups:  # of several it is what they take one after another
        alone = replace(Stretch.of(chosen), predicted=found)
        found = found.model_copy(update={"run": run_totals(context, [alone])})
    if len(plan.phases) > 1:
        meant = f"phase {1 + plan.phases.index(chosen)} of {len(plan.phases)} is meant, {phase_words(chosen)}"
        found = found.model_copy(update={"assumed": (f"{meant} (phase or task name another)", *found.assumed)})
    return plan.job, evaluation, found


def size_job(
    job: Jobs | None = None, target: str = "", *, clusters: str | Sequence[str] = (),
    prices: Mapping[str, float | str] | None = None, most_nodes: int = 64, report: Tell | None = None, **values: Any,
) -> Sizing:  # fmt: skip
    """The smallest or cheapest cluster on which a job meets ``step<=300s``, ``usd/step<=5`` or ``run<=3d``.

    ``values`` : see `job_of`; the number of devices may be left out, as it is what is asked for
    ``clusters`` : to try (``["h100", "dgx_a100"]``); default: the job's
    ``prices`` : USD per device and hour, ``{"h100": 2.5, "a100": 1.3}``; what is priced is tried too, and every device
        of the nodes is billed
    """
    from rlperf.plan.size import size_job as sized
    from rlperf.plan.size_offers import offers_named
    from rlperf.plan.size_target import parse_target

    offers = offers_named(clusters, prices)
    job = job_of(job, values)
    folder = None if isinstance(job, Job) else folder_of(job)
    return sized(
        load_job(job), parse_target(target), lambda j: ask(j, folder=folder, to_plan=True).pair,
        clusters=offers, most_nodes=most_nodes, report=report,
    )  # fmt: skip


def _sweep_of(fields: Mapping[str, Any]) -> Sweep:
    """A sweep from a dict, whose job is anything that stands for one."""
    from rlperf.sweep import Sweep

    job = fields.get("job")
    if isinstance(job, Job | Mapping):
        found = job_of(job, {})
        assert isinstance(found, Job)
        fields = {**fields, "job": found.stated()}
    return validate(Document(dict(fields), {}, "sweep"), Sweep)


def asked(job: Job, folder: Path | None) -> tuple[Context, FrameworkFacts]:
    """Context and rules of a job: what a worker of a sweep asks."""
    return ask(job, folder=folder).pair


def sweep_job(
    sweep: Sweep | Mapping[str, Any] | Path | str, out: Path | str | None = None, *, workers: int | None = None,
    backend: Backend = "processes", address: str | None = None, report: Tell | None = None,
    folder: Path | None = None,
) -> SweepResult:  # fmt: skip
    """Every point of a sweep (an object, a dict, or the path of its file); with ``out``, resumable and kept there.

    ``folder`` : where names and relative paths of a sweep object or dict start; default: where Python runs

    Raises
    ------
    SpecError : fields, values or names that are wrong, before any point is evaluated
    """
    from rlperf.sweep import Sweep, check_sweep, read_sweep
    from rlperf.sweep.run import run_sweep

    if isinstance(sweep, Mapping):
        sweep = _sweep_of(sweep)
    if isinstance(sweep, Sweep):
        checked = check_sweep(sweep, folder=Path() if folder is None else as_path(folder, "folder"))
    else:
        checked = read_sweep(as_path(sweep, "sweep"))
    kept = None if out is None else as_path(out, "out")
    return run_sweep(checked, asked, kept, workers=workers, backend=backend, address=address, report=report)
