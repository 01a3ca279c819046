"""``rlperf report``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlperf.cli.output import console, progress
from rlperf.errors import Problem, RlperfError, SpecError

if TYPE_CHECKING:
    from rlperf.plan.answer.plan import Plan
    from rlperf.report.plan_html import Judged


def report(
    source: Annotated[Path, typer.Argument(metavar="PLAN|SWEEP", help="plan.yaml, or a folder of --out.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="HTML file; default report.html beside it.")] = None,
) -> None:
    """One self-contained HTML page of a plan or a sweep: plan, timeline, memory, why, errors, provenance.

    Example: rlperf report plan/plan.yaml --out report.html
    """
    from rlperf.specs.writer import write_atomic

    folder = source if source.is_dir() else source.parent
    plan_file = source / "plan.yaml" if source.is_dir() else source
    with progress("writing the report"):
        if source.is_dir() and not plan_file.is_file():
            page = _sweep(source)
        elif source.suffix in (".parquet", ".csv", ".json"):
            page = _sweep(source.parent)
        else:
            page = _plan(plan_file)
    target = write_atomic(out or folder / "report.html", page)
    console().print(f"wrote {target} ({len(page) / 1e6:.1f} MB)")


def _sweep(folder: Path) -> str:
    from rlperf.api import ask
    from rlperf.report.sweep_html import sweep_page
    from rlperf.specs.job import Job
    from rlperf.sweep import read_result

    if not folder.is_dir():
        raise SpecError(Problem("no such file or folder", str(folder)))
    found = read_result(folder)
    try:
        context = ask(Job.model_validate(found.checked.base), folder=folder).context
    except RlperfError:
        context = None  # a path of the job leads elsewhere from here: the page goes without its constants
    return sweep_page(found, context)


def _plan(path: Path) -> str:
    from rlperf.report.plan_files import read_plan
    from rlperf.report.plan_html import plan_page
    from rlperf.specs.own_files import folder_of

    plan = read_plan(path)
    try:
        return plan_page(plan, tuple(judged(plan, folder_of(path))))
    except RlperfError as error:
        why = f"Lengths, roofline and provenance are left out: {' '.join(str(error).split())}"
        return plan_page(plan, missing=why)


def judged(plan: Plan, folder: Path) -> list[Judged]:
    """The simulated rl_steps behind every phase of a plan, simulated again from its job."""
    from rlperf.api import ask
    from rlperf.plan.answer.phases import evaluate_phase

    context = ask(plan.job, folder=folder).context
    return [(context, *evaluate_phase(context, phase)) for phase in plan.phases]
