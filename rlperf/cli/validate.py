"""``rlperf validate``: predicted against measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlperf.calibrate.leave_out import BY, ErrorSummary, LeaveOutReport, leave_out
from rlperf.calibrate.validate import KINDS
from rlperf.cli.output import AsJson, print_json, progress
from rlperf.errors import SpecError
from rlperf.files import validate_measurements
from rlperf.frameworks.audit import memory_verdicts

VERDICT = "verdict"
"""Kind of a file of configurations that ran out of memory or fitted: read by the frameworks' importers."""
LEAVE_OUT_HEADER = (
    "| group | rows | configurations in the fit | seen: median | mean | p90 | inside | width "
    "| left out: median | mean | p90 | inside | width | pooled interval: inside | width | borrowed |\n|---|"
    + "---|"
    * 15
)


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
        if fit or len(files) != 1:
            raise SpecError("--leave-out takes one table and no --fit")
        with progress("fitted without") as bar:
            left = leave_out(files[0], kind, leave, bar)
        print_json(left.to_dict()) if as_json else typer.echo(text_of_left_out(left))
        return
    report = validate_measurements(files, kind, fit or ())
    print_json(report.to_dict()) if as_json else typer.echo(str(report))


def text_of_left_out(report: LeaveOutReport) -> str:
    """A table of Markdown a metric, as the docs hold it: the same rows with their group in the fit and without."""
    lines = []
    for metric in dict.fromkeys(one.metric for one in report.lines):
        lines += ["", f"{metric}, one {report.by} left out at a time", "", LEAVE_OUT_HEADER]
        lines += [
            f"| {one.group} | {one.rows} | {one.in_fit} | {_errors(one.seen)} | {_errors(one.left_out)} "
            f"| {_interval(one.pooled)} | {one.borrowed} |"
            for one in report.lines
            if one.metric == metric
        ]
    return "\n".join(lines)


def _errors(one: ErrorSummary) -> str:
    return f"{one.median:.1f} % | {one.mean:.1f} % | {one.p90:.1f} % | {_interval(one)}"


def _interval(one: ErrorSummary) -> str:
    return f"{100.0 * one.inside:.0f} % | {one.width:.0f} %"
