"""``rlperf predict``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlperf.cli.asked import AskedJob, asks_job
from rlperf.cli.output import AsJson, PhaseNumber, TaskName, console, print_json, progress
from rlperf.errors import SpecError


@asks_job
def predict(
    asked: AskedJob,
    phase: PhaseNumber = 1,
    task: TaskName = None,
    figure: Annotated[Path | None, typer.Option(help="Write the timeline as a figure (.svg or .png).")] = None,
    as_json: AsJson = False,
) -> None:
    """Step time, memory and cost of a given configuration, operator by operator.

    What the job leaves open is filled in and listed. Example: rlperf predict job.yaml --figure step.svg
    """
    from rlperf.api import judge
    from rlperf.plan.answer.plan import PredictReport
    from rlperf.plan.judge.timeline import step_view

    form = figure.suffix.lstrip(".") if figure else ""
    if figure is not None and form not in ("svg", "png"):
        raise SpecError(f"the figure {figure.name} must end in .svg or .png")
    with progress("predicting") as bar:
        named, evaluation, found = judge(asked.job(), phase=phase, task=task, report=bar)
    view = step_view(evaluation)
    if figure is not None:
        from rlperf.report.rl_step import step_figure
        from rlperf.specs.writer import write_atomic

        write_atomic(figure, step_figure(view.timeline, title=named.name, form=form))
    if as_json:
        print_json(PredictReport.of(named.name, found).model_dump(mode="json"))
        return
    from rlperf.report.plan_text import print_operators, print_prediction, print_remarks, print_warnings
    from rlperf.report.rl_step import print_step

    screen = console()
    screen.print(f"job [bold]{named.name}[/bold] ({asked.label}): {named.architecture} on {named.cluster}")
    if asked.displaces_plan:
        screen.print(f"not the plan of {asked.label}: its job, filled in as {named.framework} runs it", markup=False)
    print_warnings(found, screen)
    print_prediction(found, screen)
    print_step(view, screen)
    print_operators(found, screen)
    print_remarks(found, screen)
