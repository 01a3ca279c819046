"""``rlperf export``: a plan as files that a framework loads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlperf.cli.output import AsJson, console, print_json
from rlperf.specs.framework_names import LISTED

if TYPE_CHECKING:
    from rlperf.plan.answer.plan import Phase, Plan, Prediction


def export(
    plan: Annotated[Path, typer.Argument(help="plan.yaml of `rlperf plan`, or a job file whose pools are pinned.")],
    framework: Annotated[
        str | None,
        typer.Option(help=f"{LISTED}; with ==version if it matters."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the files.")] = Path("export"),
    as_json: AsJson = False,
) -> None:
    """Write a plan as a framework's configuration and launch command, one per phase, each key with its reason.

    Every key and rule of the named version is checked before the first file is written.

    Example: rlperf export plan.yaml --framework verl==0.9 --out run1
    """
    from rlperf.frameworks.export import write_file

    written = write_file(plan, framework, out)
    if as_json:
        print_json({"files": [str(path) for path in written]})
        return
    screen = console()
    for path in written:
        screen.print(str(path), soft_wrap=True)
    screen.print(f"What was decided, and what could not be expressed: {written[-1]}", soft_wrap=True)
    for line in _remarks(plan, framework, written):
        screen.print(line, markup=False)


def _remarks(file: Path, framework: str | None, written: Sequence[Path]) -> Iterator[str]:
    """For which release a newer one is taken, and what a plan's files do under a framework that it was not made for.

    Memory and seconds are others there: a plan for verl was written for NeMo-RL without a word, where it runs out of
    memory with 81 %.
    """
    from rlperf.cli.output import progress
    from rlperf.frameworks.keytable import key_table
    from rlperf.frameworks.registry import adapter_of, split_name
    from rlperf.plan.answer.reading import plan_in
    from rlperf.specs.own_files import folder_of
    from rlperf.specs.reader import read_document
    from rlperf.specs.releases import read_as
    from rlperf.units import human_seconds

    plan = plan_in(read_document(file))
    name, asked = split_name(framework or (plan.job.framework if plan else ""))
    if name and (newer := read_as(name, asked, key_table(adapter_of(name).name).versions)):
        yield newer
    if plan is None or framework is None or split_name(framework)[0] == split_name(plan.job.framework)[0]:
        return
    scripts = [path for path in written if path.suffix == ".sh" and path.stem != "run_all"]
    for script, phase in zip(scripts, plan.phases, strict=True):
        with progress("predicting"):
            found = _predicted(script, plan, phase, folder_of(file))
        seconds, planned = human_seconds(found.rl_step_s), human_seconds(phase.predicted.rl_step_s)
        yield f"{script.name}: {seconds} per rl_step under {framework}, {planned} under {plan.job.framework}"
        if not found.fits:
            risk = ", ".join(f"{role} {100 * use.risk:.0f} %" for role, use in found.memory_bytes.items())
            yield f"warning: more likely to run out of device memory there than the job allows: {risk}"
            yield f"`rlperf audit {script}` says what frees it, `rlperf plan JOB --framework {framework}` plans anew"


def _predicted(script: Path, plan: Plan, phase: Phase, folder: Path) -> Prediction:
    """The files as they are read back, with the lengths and batches of the plan."""
    from rlperf.api import ask
    from rlperf.frameworks.imports import import_config, job_of
    from rlperf.plan.compare import job_of_plan
    from rlperf.plan.predict import predict_job

    pinned = job_of_plan(plan, phase)
    read = job_of(import_config([script]), cluster=pinned.cluster)
    question = ask(read.model_copy(update={"tasks": pinned.tasks, "sharing": pinned.sharing}), folder=folder)
    return predict_job(question.context, facts=question.facts)
