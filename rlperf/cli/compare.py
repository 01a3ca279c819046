"""``rlperf compare``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlperf.cli.output import AsJson, TaskName, console, print_json, print_table, progress

if TYPE_CHECKING:
    from rlperf.comparing import ComparedJobs


def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="Job, plan.yaml or framework configuration.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="The other one.")],
    cluster: Annotated[
        str | None, typer.Option(help="Cluster of a framework configuration; default: the other's.")
    ] = None,
    workload: Annotated[
        str | None, typer.Option(help="Lengths of a configuration: preset, model or trace; default: the other's.")
    ] = None,
    task: TaskName = None,
    draws: Annotated[int, typer.Option(min=3, help="Common draws of the groups.")] = 12,
    as_json: AsJson = False,
) -> None:
    """Two jobs, plans or framework configurations on the same drawn rl_steps: which is faster, and is it certain?

    Example: rlperf compare plan/plan.yaml run_grpo.yaml --cluster dgx_h100 --workload math
    """
    from rlperf.comparing import compare_jobs

    with progress("comparing"):
        found = compare_jobs(first, second, cluster=cluster, workload=workload, task=task, draws=draws)
    if as_json:
        print_json(found.to_dict())
    else:
        _print(found)


def _print(found: ComparedJobs) -> None:
    screen = console()
    screen.print(found.verdict, style="bold", markup=False)
    print_table(found.head, found.cells())
    for note in found.notes():
        screen.print(note, markup=False)
