"""``rlperf export``: a plan as files that a framework loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlperf.cli.output import AsJson, console, print_json
from rlperf.specs.framework_names import LISTED


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
        print_json({"schema_version": 1, "files": [str(path) for path in written]})
        return
    screen = console()
    for path in written:
        screen.print(str(path), soft_wrap=True)
    screen.print(f"What was decided, and what could not be expressed: {written[-1]}", soft_wrap=True)
