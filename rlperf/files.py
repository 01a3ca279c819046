"""What is asked of files: a configuration audited or imported, a plan exported, a log fitted, rows of measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, overload

from rlperf.api import ask
from rlperf.calibrate.leave_out import LeaveOutReport
from rlperf.calibrate.leave_out import leave_out as left_out
from rlperf.calibrate.logs.fit import LogFit, calibration_text, fit_log, logs_of
from rlperf.calibrate.validate import Report, nothing_predicted, validate_paths
from rlperf.errors import Problem, SpecError
from rlperf.frameworks import imports
from rlperf.frameworks.adapter import framework_facts
from rlperf.frameworks.audit.answer import Audit
from rlperf.frameworks.audit.audit import audit
from rlperf.frameworks.carried import keys_file
from rlperf.frameworks.export import write_file, write_plan
from rlperf.frameworks.imports import (
    Imported,
    UnknownKey,
    describe,
    job_text,
    keys_text,
    planned_cluster,
    planned_reward,
    planned_rollout,
    planned_workload,
    read_job_or_config,
    usual_cluster,
    usual_workload,
    with_architecture,
)
from rlperf.frameworks.logs.dumps import read_rollouts
from rlperf.frameworks.logs.read import out_of_memory, read_log, same_framework
from rlperf.plan.answer import notebook
from rlperf.plan.answer.plan import Plan
from rlperf.plan.question.context import before_any_log
from rlperf.specs.given import as_path
from rlperf.specs.job import Job
from rlperf.specs.own_files import folder_of
from rlperf.specs.profiles import architecture_reading
from rlperf.specs.step_log import StepLog
from rlperf.specs.writer import write_atomic
from rlperf.told import Tell, quiet
from rlperf.units import human_seconds
from rlperf.workload.tables import write_table

if TYPE_CHECKING:
    import polars as pl

Files = Path | str | Sequence[Path | str]


def listed(files: Files) -> list[Path]:
    several = files if isinstance(files, Sequence) and not isinstance(files, str) else [files]
    return [as_path(file, "file") for file in several]


@dataclass(frozen=True)
class ImportedJob:
    """A framework's configuration as a job.

    Attributes
    ----------
    job : with pinned pools
    imported : what was read of the files: keys, and which of them nobody understood
    assumed : what the files do not say, and what stands in for it
    files : the job, and beside it the keys that no job states, where a file was named
    """

    job: Job
    imported: Imported
    assumed: tuple[str, ...]
    files: tuple[Path, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `rlperf import --json` prints it."""
        imported = self.imported
        return {
            "schema_version": 1,
            "framework": imported.adapter.name,
            "version": imported.target.version,
            "job": self.job.model_dump(mode="json", exclude_none=True),
            "unknown": [{"key": i.key, "where": i.where, "suggestion": i.suggestion} for i in imported.unknown],
            "not_accepted": [{"key": i.key, "where": i.where, "why": i.suggestion} for i in imported.illegal],
            "defaults": imported.filled(),
            "carried": imported.carried,
            "assumed": list(self.assumed),
        }

    def to_frame(self) -> pl.DataFrame:
        """One row per key that its version does not have, or whose value it refuses."""
        columns = ("key", "where", "problem", "suggestion")
        rows = [dict(zip(columns, (item.key, item.where, what, item.suggestion or ""), strict=True))
                for item, what in self._problems]  # fmt: skip
        return notebook.frame(rows, columns)

    @property
    def _problems(self) -> list[tuple[UnknownKey, str]]:
        unknown = [(item, "unknown key") for item in self.imported.unknown]
        return [*unknown, *((item, "not accepted") for item in self.imported.illegal)]

    def notes(self) -> list[str]:
        """Keys that are no keys or have no value of theirs, how many are defaults, and what was assumed."""
        found = [
            f"{item.where}: {what} {item.key}" + (f" ({item.suggestion})" if item.suggestion else "")
            for item, what in self._problems
        ]
        left = len(self.imported.filled())
        found += [f"{left} performance keys left to the defaults of {self.imported.framework}"] if left else []
        return found + [f"assumed: {text}" for text in self.assumed]

    def __str__(self) -> str:
        return "\n".join((describe(self.imported), *self.notes()))

    def _repr_html_(self) -> str:
        return notebook.table((describe(self.imported),), [(note,) for note in self.notes()])


def import_config(
    config: Files,
    out: Path | str | None = None,
    *,
    framework: str | None = None,
    cluster: str | None = None,
    architecture: str | None = None,
    workload: str | None = None,
) -> ImportedJob:
    """A framework's configuration or launch script as a job with pinned pools. Nothing of it is executed.

    What the files leave out is filled with that version's own defaults.

    Parameters
    ----------
    config : YAML, launch script, overrides or flags; several are one configuration
    out : the job's file to write; keys that a job cannot state go beside it, where `rlperf.export_plan` finds them
    framework : name (==version); default: recognised
    cluster, architecture, workload : what the files do not say; default: as their header says, else as is usual

    Raises
    ------
    SpecError : files that cannot be read, or that no framework writes; what no job can state
    """
    paths, target = listed(config), None if out is None else as_path(out, "out")
    imported = with_architecture(imports.import_config(paths, framework), architecture)
    job = imports.job_of(imported, cluster=cluster, workload=workload, name=paths[0].stem)
    if cluster or architecture or workload:  # a job would be written that is refused only when it is planned
        try:
            ask(job, folder=folder_of(target) if target else None)
        except SpecError as error:
            _refuse_named(error.problems, (cluster, architecture, workload))
    files: tuple[Path, ...] = ()
    if target is not None:
        files = (write_atomic(target, job_text(job)), write_atomic(keys_file(target), keys_text(imported)))
    assumed = assumed_of(imported, cluster, workload)
    assumed += filter(None, [_shape_note(job.architecture)])
    assumed += [f"{base}, which is not here, states nothing beside the defaults" for base in imported.absent_bases]
    return ImportedJob(job, imported, tuple(assumed), files)


def _refuse_named(problems: Sequence[Problem], names: Sequence[str | None]) -> None:
    """A `SpecError` of the problems that names given have."""
    if wrong := [problem for problem in problems if any(name and name in str(problem) for name in names)]:
        raise SpecError(wrong)


def _shape_note(name: str) -> str:
    """Which shape stands for the name; empty where it is the shape's own, or not known on this machine."""
    try:
        return architecture_reading(name).note
    except SpecError:
        return ""


def assumed_of(imported: Imported, cluster: str | None, lengths: str | Path | None) -> list[str]:
    """What stands for names that were not given; ``lengths``: a workload, or rollouts of the run."""

    def named(planned: str | None, otherwise: str, theirs: str) -> str:
        if planned:
            return f"{planned}, as the file's header says"
        return f"{otherwise}, where the file's header has {theirs}" if theirs else otherwise

    device, workload, header = planned_cluster(imported), planned_workload(imported), imported.source.planned
    known, lengths_known = (", ".join(filter(None, each(imported))) for each in (usual_cluster, usual_workload))
    rollout = planned_rollout(imported, cluster)
    device = f"{device} and rollout on {rollout}" if device and rollout else device
    defaults = ((f"cluster {named(device, known, header.cluster)}", cluster),
                (f"workload {named(workload, lengths_known, header.lengths)}", lengths))  # fmt: skip
    found = [text for text, given in defaults if given is None]
    reward = planned_reward(imported, lengths if isinstance(lengths, str) else None)
    return found if reward is None else [*found, f"rewards of {human_seconds(reward)}, as its header says"]


def audit_config(
    config: Files,
    *,
    framework: str | None = None,
    cluster: str | None = None,
    architecture: str | None = None,
    workload: str | None = None,
    log: Files | None = None,
    rollouts: Path | str | None = None,
    tokenizer: str | None = None,
    plan: bool = True,
    report: Tell | None = None,
) -> Audit:
    """What is wrong with a framework's configuration, and what to change first.

    Long because each argument is an option of the command line.

    Parameters
    ----------
    config : YAML, launch script, overrides or flags; several are one configuration
    framework : name (==version); default: recognised
    cluster, architecture, workload : what the files do not say; assumed where not given
    log : step metrics of the run, against which the prediction is held; several are one run (tables of wandb)
    rollouts, tokenizer : rollout dump of the run, for its lengths, and what counts its text
    plan : also ask the planner for the best on the same hardware
    report : called with the share done and a text

    Raises
    ------
    SpecError : files that cannot be read, or that no framework writes; a name given that nobody knows
    """
    imported = with_architecture(imports.import_config(listed(config), framework), architecture)
    facts = framework_facts(imported.adapter.name, imported.target.version)
    steps, ended = _load_log(log)
    steps = steps and same_framework(steps, imported.adapter.name).by_rl_step(imported.run.updates)
    with TemporaryDirectory(prefix="rlperf-") as scratch:
        if rollouts is not None:
            cap = imported.run.batch.max_response_tokens or 1 << 40
            updates = imported.run.updates
            table = read_rollouts([rollouts], tokenizer=tokenizer, max_response_tokens=cap, updates=updates)
            workload = str(write_table(table, Path(scratch) / "lengths.parquet"))  # states the cap, and turns
        folder = folder_of(listed(config)[0])
        found = audit(
            imported, cluster=cluster, workload=workload, log=steps, facts=facts, plan=plan, folder=folder,
            report=report,
        )  # fmt: skip
    _refuse_named(found.unresolved, (cluster, architecture, workload))
    return replace(found, ended=ended)


def _load_log(files: Files | None) -> tuple[StepLog | None, str]:
    """Step metrics of files, where any is named, and in words that their run ended out of device memory, if it did.

    A run that died in its first rl_step has no metrics: how it ended is all that its log says.
    """
    paths = listed(files) if files else []
    if not paths:
        return None, ""
    died = next((problem for path in reversed(paths) if (problem := out_of_memory(path))), None)
    ended = "" if died is None else str(replace(died, suggestion=None))
    try:
        return read_log(paths), ended
    except SpecError:
        if died is None:
            raise
        return None, f"{ended}; no rl_step before it"


def export_plan(plan: Plan | Path | str, out: Path | str, *, framework: str | None = None) -> tuple[Path, ...]:
    """Write a plan as a framework's configuration and launch scripts (default: the job's framework); the files.

    ``plan`` : an object, a plan.yaml, or the file of a job whose pools are pinned

    Raises
    ------
    ExportError : the framework or version cannot run the plan; all reasons are listed
    SpecError : a job that leaves something open
    """
    if not isinstance(framework, str | None):
        raise SpecError(f"framework must be text (given: {framework!r})"[:200])
    folder = as_path(out, "out")
    if isinstance(plan, Plan):
        return write_plan(plan, framework, folder)
    return write_file(as_path(plan, "plan", "plan_job makes one of a job"), framework, folder)


def calibrate_logs(
    log: Files,
    job: Path | str,
    *,
    framework: str | None = None,
    cluster: str | None = None,
    workload: str | None = None,
    architecture: str | None = None,
    rollouts: Path | str | None = None,
    tokenizer: str | None = None,
    warm_up: int = 1,
    out: Path | str | None = None,
) -> tuple[LogFit, Path | None]:
    """Fit a framework's overheads to a run and write the calibration file that jobs beside it find; the fit, the file.

    A log that tells nothing writes none (None). Long because each argument is an option of the command line, and a word
    of a notebook.

    Parameters
    ----------
    log : step metrics of the run: console, JSONL, CSV, tfevents
    job : the job (or the framework's configuration) that ran
    architecture : its model, where a framework's configuration names none that is known
    warm_up : rl_steps left out at the start
    out : file to write; default: where predictions of the job look
    """
    path = as_path(job, "job")
    asked = read_job_or_config(path, cluster=cluster, workload=workload, architecture=architecture)
    steps = same_framework(read_log(listed(log), framework), asked.framework)
    context = ask(asked, folder=folder_of(path)).context
    again = [each.backend for each in context.trainers if logs_of(each.framework) == (steps.digest,)]
    context = before_any_log(context, folder_of(path), again)  # asked again: no step counts twice
    cap = max(asked.tasks[0].max_response_tokens)
    updates, lengths = context.site.updates(context.tasks[0].batches[0]), None
    if rollouts is not None:
        lengths = read_rollouts([rollouts], tokenizer=tokenizer, max_response_tokens=cap, updates=updates)
    fit = fit_log(context, steps, lengths, warm_up=warm_up)
    if not fit.tells:
        return fit, None
    shipped = fit.calibration.id.removesuffix("_fitted")
    target = folder_of(path) / "calibrations" / "frameworks" / f"{shipped}.yaml" if out is None else Path(out)
    return fit, write_atomic(target, calibration_text(fit))


@overload
def validate_measurements(files: Files, kind: str, fit: Files = (), *, leave_out: None = None) -> Report: ...


@overload
def validate_measurements(
    files: Files, kind: str, fit: Files = (), *, leave_out: str, report: Tell | None = None
) -> LeaveOutReport: ...


def validate_measurements(
    files: Files, kind: str, fit: Files = (), *, leave_out: str | None = None, report: Tell | None = None
) -> Report | LeaveOutReport:
    """Predict every row of a file of measurements and sum up the errors per metric and group.

    Parameters
    ----------
    files : CSV of measurements, folder of a request log, or recordings
    kind : what it holds, one of `rlperf.calibrate.validate.KINDS`
    fit : recordings to fit an engine's constants to, of kinds that are recordings
    leave_out : fit again without each device, family, version ... in turn, of one table, and predict it so
    report : called with the share done of that and a text

    Raises
    ------
    SpecError : unknown kind, files that cannot be read, missing columns, or not one row that could be predicted
    """
    paths, recordings = listed(files), listed(fit)
    if leave_out is not None:
        if recordings or len(paths) != 1:
            raise SpecError("--leave-out takes one table and no --fit")
        return left_out(paths[0], kind, leave_out, report or quiet)
    found = validate_paths(paths, kind, recordings)
    if not found.predicted and found.refused:
        raise SpecError(nothing_predicted(found))
    return found
