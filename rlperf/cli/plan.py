"""``rlperf plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlperf.cli.output import AsJson, console, default_job, print_json, progress


def plan(
    job: Annotated[Path | None, typer.Argument(help="Job file (YAML); without one, the shipped default job.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for plan.yaml, report.md, figure, config.")
    ] = None,
    framework: Annotated[
        str | None, typer.Option(help="Write the config for this framework, such as verl==0.9.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Best layouts, batches and lengths for a job, with the runner-up and what binds.

    Example: rlperf plan job.yaml --out plan/
    """
    from rlperf.api import plan_job

    source = job or default_job()
    with progress("planning") as bar:
        found = plan_job(source, report=bar)
    written: list[Path] = []
    if out is not None:
        from rlperf.frameworks.export import write_plan
        from rlperf.report.plan_files import write_plan_files

        configs = write_plan(found, framework, out / "config", folder=source.resolve().parent)
        written = [*write_plan_files(found, out), *configs]
    if as_json:
        print_json(found.model_dump(mode="json"))
        return
    from rlperf.report.plan_text import print_plan

    screen = console()
    screen.print(f"job [bold]{found.job.name}[/bold] ({source.name}): {found.job.architecture} on {found.job.cluster}")
    print_plan(found, screen)
    for path in written:
        screen.print(f"wrote {path}")
