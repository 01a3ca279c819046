"""What is asked of the files that frameworks read and write: a configuration audited, a plan exported, a log fitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rlperf.api import ask
from rlperf.calibrate.logs.fit import LogFit, calibration_text, fit_log, logs_of
from rlperf.errors import SpecError
from rlperf.frameworks.adapter import framework_facts
from rlperf.frameworks.audit.audit import Audit, audit
from rlperf.frameworks.export import write_file, write_plan
from rlperf.frameworks.imports import import_config, read_job_or_config, with_architecture
from rlperf.frameworks.logs.dumps import read_rollouts
from rlperf.frameworks.logs.read import out_of_memory, read_log, same_framework
from rlperf.plan.answer.plan import Plan
from rlperf.plan.question.context import before_any_log
from rlperf.specs.own_files import folder_of
from rlperf.specs.reader import as_path
from rlperf.specs.step_log import StepLog
from rlperf.specs.writer import write_atomic
from rlperf.told import Tell
from rlperf.workload.tables import write_table

Files = Path | str | Sequence[Path | str]


def listed(files: Files) -> list[Path]:
    several = files if isinstance(files, Sequence) and not isinstance(files, str) else [files]
    return [as_path(file, "file") for file in several]


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
    imported = with_architecture(import_config(listed(config), framework), architecture)
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
    named = [name for name in (cluster, architecture, workload) if name is not None]
    if wrong := [problem for problem in found.unresolved if any(name in str(problem) for name in named)]:
        raise SpecError(wrong)
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
    if isinstance(plan, Plan):
        return write_plan(plan, framework, out)
    return write_file(as_path(plan, "plan", "plan_job makes one of a job"), framework, out)


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
