"""``rlperf replan``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlperf.cli.output import AsJson, console, print_json, print_table, progress

if TYPE_CHECKING:
    from rlperf.plan.answer.replanned import Replan


def replan(
    job: Annotated[Path, typer.Argument(help="Job file, or the plan.yaml that the run follows.")],
    log: Annotated[list[Path], typer.Option(help="Step metrics: console log, JSONL, CSV, trainer state, tfevents.")],
    rollouts: Annotated[list[Path], typer.Option(help="Rollout dump of the framework, or PolyTrace files.")],
    at_step: Annotated[int, typer.Option(min=1, help="First rl_step that may run otherwise.")],
    running: Annotated[
        Path | None, typer.Option(help="What runs: plan, job or framework configuration. Default: what JOB plans.")
    ] = None,
    switch: Annotated[str | None, typer.Option(help="Cost of changing the layout, such as '10 min'.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="tokenizer.json, for dumps that hold text only.")] = None,
    framework: Annotated[str | None, typer.Option(help="Framework of the log, where it is not recognised.")] = None,
    as_json: AsJson = False,
) -> None:
    """Whether a running job should change its layout for the rest of its rl_steps; only where it surely pays.

    Example: rlperf replan plan/plan.yaml --log run.log --rollouts rollouts/ --at-step 40
    """
    from rlperf.replanning import replan_job

    with progress("planning the remaining rl_steps"):
        found = replan_job(
            job, log, rollouts, at_step, running=running, switch=switch, tokenizer=tokenizer, framework=framework
        )
    if as_json:
        print_json(found.to_dict())
    else:
        _print(found)


def _print(found: Replan) -> None:
    from rlperf.plan.answer.replanned import HEAD

    screen = console()
    screen.print(found.sentence(), style="bold", markup=False)
    for text in (found.step_words, *(f"  {text}" for text in found.differs)):
        screen.print(text, markup=False)
    print_table(HEAD, found.cells())
    for text in found.told():
        screen.print(text, markup=False)
