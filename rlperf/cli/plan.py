"""``rlperf plan``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlperf.cli.asked import AskedJob, asks_job
from rlperf.cli.output import AsJson, console, print_json, progress
from rlperf.errors import Problem, SpecError

if TYPE_CHECKING:
    from rlperf.plan.question.context import Context


@asks_job
def plan(
    asked: AskedJob,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for plan.yaml, report.md, figure, config.")
    ] = None,
    risk: Annotated[
        float | None, typer.Option(min=0, max=1, help="0: the mean counts (default); 1: the 95th percentile counts.")
    ] = None,
    simple: Annotated[
        bool,
        typer.Option(
            "--simple", help="Among near-ties prefer fewer degrees: 2 % of the objective a doubling, not 0.5 %."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Best layouts, batches and lengths for a job, with the runner-up and what binds.

    Example: rlperf plan job.yaml --out plan/

    Example: rlperf plan --model Qwen3-32B --gpus 32 --gpu h100 --framework verl --max-response 16k
    """
    from rlperf.frameworks.export import losses, plan_texts
    from rlperf.plan.planner import plan_job

    if out is not None and out.exists() and not out.is_dir():
        raise SpecError(Problem("is a file, a folder is due", str(out)))
    question = asked.question()
    context, facts = question.pair
    if risk is not None:
        context = with_objective(context, risk=risk)
    if simple:
        context = with_objective(context, simplicity=0.02)
    with progress("planning") as bar:
        found = plan_job(context, facts=facts, report=bar, defaults=question.defaults)
    written: list[Path] = []
    if out is not None:
        from rlperf.report.plan_files import write_plan_files

        written = write_plan_files(found, out, plan_texts(found, folder=asked.folder))
    if as_json:
        print_json(found.model_dump(mode="json"))
        return
    from rlperf.report.plan_text import print_plan

    screen = console()
    screen.print(f"job [bold]{found.job.name}[/bold] ({asked.label}): {found.job.architecture} on {found.job.cluster}")
    for note in context.shape_notes:
        screen.print(f"assumed: {note}", markup=False)
    print_plan(found, screen)
    for lost in losses(found, None, folder=asked.folder):
        screen.print(f"not in the files of {found.job.framework}: {lost}", markup=False)
    for path in written:
        screen.print(f"wrote {path}")


def with_objective(context: Context, **changes: float) -> Context:
    """The context with parts of its objective replaced."""
    objective = context.job.objective.model_copy(update=changes)
    return replace(context, job=context.job.model_copy(update={"objective": objective}))
