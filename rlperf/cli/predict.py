"""``rlperf predict``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlperf.cli.output import AsJson, console, default_job, print_json, progress


def predict(
    job: Annotated[Path | None, typer.Argument(help="Job file with pinned pools, or a plan.yaml.")] = None,
    as_json: AsJson = False,
) -> None:
    """Step time, memory and cost of a given configuration, operator by operator.

    What the job leaves open is filled in and listed. Example: rlperf predict job.yaml
    """
    from rlperf.api import ask
    from rlperf.plan.predict import predict_job

    source = job or default_job()
    question = ask(source)
    with progress("predicting"):
        found = predict_job(question.context, facts=question.facts)
    if as_json:
        print_json(found.model_dump(mode="json"))
        return
    from rlperf.report.plan_text import print_operators, print_prediction, print_remarks

    named, screen = question.job, console()
    screen.print(f"job [bold]{named.name}[/bold] ({source.name}): {named.architecture} on {named.cluster}")
    print_prediction(found, screen)
    print_operators(found, screen)
    print_remarks(found, screen)
