"""``rlperf validate``: predicted against measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlperf.calibrate.leave_out import BY
from rlperf.calibrate.validate import KINDS
from rlperf.cli.output import AsJson, print_json, progress
from rlperf.errors import SpecError
from rlperf.files import validate_measurements
from rlperf.frameworks.audit import memory_verdicts

VERDICT = "verdict"
"""Kind of a file of configurations that ran out of memory or fitted: read by the frameworks' importers."""


def validate(
    files: Annotated[list[Path], typer.Argument(help="CSV of measurements, folder of a request log, or recordings")],
    kind: Annotated[str, typer.Option(help=f"what it holds: {', '.join((*KINDS, VERDICT))}")],
    fit: Annotated[
        list[Path] | None, typer.Option(help="recordings to fit an engine's constants to (engine_trace)")
    ] = None,
    leave: Annotated[
        str | None,
        typer.Option("--leave-out", help=f"fit again without each {', '.join(BY)} in turn, and predict it so"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict every row of a file of measurements and sum up the errors per metric and group.

    Example: rlperf validate measured.csv --kind training
    """
    if kind == VERDICT:
        if fit or leave is not None or len(files) != 1:
            raise SpecError(
                "--kind verdict takes one file of JSON lines, no --fit and no --leave-out: nothing is fitted"
            )
        judged = memory_verdicts.report(files[0])
        print_json(judged.to_dict()) if as_json else typer.echo(memory_verdicts.text(judged))
        return
    if leave is not None:
        with progress("fitted without") as bar:
            left = validate_measurements(files, kind, fit or (), leave_out=leave, report=bar)
        print_json(left.to_dict()) if as_json else typer.echo(str(left))
        return
    report = validate_measurements(files, kind, fit or ())
    print_json(report.to_dict()) if as_json else typer.echo(str(report))
