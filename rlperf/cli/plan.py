"""``rlperf plan``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlperf.cli.asked import AskedJob, asks_job
from rlperf.cli.output import AsJson, console, print_json, print_table, progress
from rlperf.errors import InfeasibleError, SpecError
from rlperf.specs.writer import check_folder
from rlperf.units import human_seconds

if TYPE_CHECKING:
    from rlperf.specs.job import Job


@asks_job
def plan(
    asked: AskedJob,
    framework: Annotated[str | None, typer.Option(help="Another (verl==0.9); verl,slime or all: ranked.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Folder for plan, report, figure, config; one in it for each ranked framework."
        ),
    ] = None,
    risk: Annotated[float | None, typer.Option(min=0, max=1, help="0: mean (default); 1: the 95th.")] = None,
    bold: Annotated[bool, typer.Option("--bold", help="Leave what is known to work for any gain.")] = False,
    what_if: Annotated[str | None, typer.Option(help="all, or names or words (fp8,async): their gains.")] = None,
    as_json: AsJson = False,
) -> None:
    """Best layouts, batches and lengths for a job, and the runner-up.

    Example: rlperf plan job.yaml --out plan/ (or --what-if all)

    Example: rlperf plan --model Qwen3-32B --gpus 32 --gpu h100 --framework verl --max-response 16k
    """
    from rlperf.api import load_job

    if out is not None:
        check_folder(out)  # before the planning, not after it
    several = framework is not None and ("," in framework or framework.strip().lower() == "all")
    asked = replace(asked, framework=None if several else framework)
    changes = {**({} if risk is None else {"risk": risk}), **({"bold": True} if bold else {})}
    if several and what_if is not None:
        raise SpecError("--what-if asks one framework: name one")
    if out is not None and what_if is not None:
        raise SpecError("--what-if prints a table and writes no files: leave out --out, or --what-if")
    if what_if is not None:
        _print_gains(with_objective(load_job(asked.job()), changes), asked.folder, what_if, as_json)
    elif several:
        _rank(asked, str(framework), with_objective(load_job(asked.job()), changes), out, as_json)
    else:
        _plan(asked, changes, out, as_json)


def _plan(asked: AskedJob, changes: Mapping[str, float], out: Path | None, as_json: bool) -> None:
    """One plan; ``changes``: of the job's objective."""
    from rlperf.api import load_job, plan_question
    from rlperf.frameworks.export import losses, plan_texts
    from rlperf.frameworks.expressible import modes_words, precision_words
    from rlperf.report.plan_files import INPUTS, write_plan_files
    from rlperf.report.plan_text import print_plan
    from rlperf.specs.own_files import own_calibrations

    question = asked.question()
    context = question.context
    asked_job = context.asked and with_objective(context.asked, changes)
    context = replace(context, job=with_objective(context.job, changes), asked=asked_job)
    with progress("planning") as bar:
        found = plan_question(replace(question, context=context), folder=asked.folder, report=bar)
    screen = console()

    def write() -> list[Path]:  # behind the answer, which stays if no file can state it
        return write_plan_files(found, out, plan_texts(found, folder=asked.folder), folder=asked.folder) if out else []

    if as_json:
        print_json(found.model_dump(mode="json"))
        write()
        return
    screen.print(f"job [bold]{found.job.name}[/bold] ({asked.label}): {found.job.architecture} on {found.job.cluster}")
    for note in context.read_as:
        screen.print(f"assumed: {note}", markup=False)
    for words in modes_words(load_job(asked.job()), found.job):
        screen.print(f"modes: {words}", markup=False)
    for words in precision_words(load_job(asked.job()), found.job):
        screen.print(words, markup=False)
    print_plan(found, screen)
    used = {name for phase in found.phases for name in phase.predicted.calibration.ids}
    for path in (path for name, path in own_calibrations(asked.folder).items() if name in used):
        screen.print(f"calibrated by {path}, which is yours", markup=False)
    written = write()
    for lost in losses(found, None, folder=asked.folder):
        screen.print(f"not in the files of {found.job.framework}: {lost}", markup=False)
    inputs = [path for path in written if out and path.is_relative_to(out / INPUTS)]
    for path in written:
        if path not in inputs:
            screen.print(f"wrote {path}")
    if inputs and out:
        screen.print(f"wrote {out / INPUTS}: {len(inputs)} of your files, with which plan.yaml stands alone")


def with_objective(job: Job, changes: Mapping[str, float]) -> Job:
    """The job with parts of its objective replaced."""
    return job.model_copy(update={"objective": job.objective.model_copy(update=changes)}) if changes else job


def _rank(asked: AskedJob, frameworks: str, job: Job, out: Path | None, as_json: bool) -> None:
    """One job under several frameworks: the table, and every plan's files in a folder of its framework's name."""
    from rlperf.frameworks.export import plan_texts
    from rlperf.ranking import HEAD, plan_frameworks
    from rlperf.report.plan_files import write_plan_files

    with progress("planning") as bar:
        found = plan_frameworks(job, frameworks, report=bar, folder=asked.folder)
    plans = [each.plan for each in found.rows if each.plan and out]
    folders = {(out or Path()) / each.job.framework.replace("==", "-"): each for each in plans}
    for path, each in folders.items():
        write_plan_files(each, path, plan_texts(each, folder=asked.folder), folder=asked.folder)
    if as_json:
        print_json(found.to_dict())
    else:
        screen = console()
        screen.print(f"job [bold]{job.name}[/bold] ({asked.label}): {job.architecture} on {job.cluster}")
        if found.best:
            print_table(HEAD, found.cells())
        for line in (*found.notes(), *(f"wrote {path}" for path in folders)):
            screen.print(line, markup=False)
    if found.best is None:
        hint = "each says why; where devices are too few, `rlperf size` finds how many do"
        raise InfeasibleError(f"no framework has a plan for this job ({hint})")


def _print_gains(job: Job, folder: Path, what_if: str, as_json: bool) -> None:
    """The table of techniques; ``what_if``: ``all``, or names (or words of them) with commas between."""
    from rlperf.techniques import HEAD, gains

    names = () if what_if == "all" else tuple(name.strip() for name in what_if.split(","))
    with progress("planning") as bar:
        found = gains(job, names, folder=folder, report=bar)
    if as_json:
        print_json(found.to_dict())
        return
    screen = console()
    if cells := found.cells():
        print_table(HEAD, cells, title=f"rl_step {human_seconds(found.rl_step_s)} as it is")
        screen.print("Every row is planned anew, so its layouts and their memory per device may differ.")
    for line in ("Who has a key for it; what was chosen, or is in its way:", *(f"- {each}" for each in found.notes())):
        screen.print(line, markup=False)
