"""``rlperf validate``: predicted against measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlperf.calibrate.leave_out import BY, ErrorSummary, LeaveOutReport, leave_out
from rlperf.calibrate.splits import HELD_OUT, NEW, SAME_SERIES
from rlperf.calibrate.statistics import Summary
from rlperf.calibrate.validate import KINDS, Report, validate_paths
from rlperf.cli.output import AsJson, print_json, progress
from rlperf.errors import Problem, SpecError
from rlperf.frameworks.audit import memory_verdicts

VERDICT = "verdict"
"""Kind of a file of configurations that ran out of memory or fitted: read by the frameworks' importers."""
NAMES = ("median", "mean", "p90", "WAPE", "bias")
GROUP_WIDTH = 26
OF_SPLIT = {
    HELD_OUT: "",
    NEW: ", groups that no calibration had in view",
    SAME_SERIES: ", series that the constants were told of: no validation, but of shapes that they did not see",
}
LINES_SHOWN = 6
"""Of the rows that one reason refused."""
HEADER = f"  {'':{GROUP_WIDTH}s} {'n':>5s} " + " ".join(f"{name:>6s}" for name in NAMES) + " rank   in"
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
    report = validate_paths(files, kind, fit or ())
    if not report.predicted and report.refused:
        raise SpecError(_nothing_predicted(report))
    if as_json:
        print_json(report.to_dict())
    else:
        typer.echo(text_of(report))


def text_of(report: Report) -> str:
    """The report as a table for people; ``in`` is the share of measurements inside low and high, WAPE sum over sum."""
    lines = [f"{report.file}: {report.rows} rows of kind {report.kind}, {report.predicted} predicted"]
    if report.used_in_calibration:
        lines.append(f"  {report.used_in_calibration:5d} of them were seen by a calibration and are left out below")
    by_count = sorted(report.refused.items(), key=lambda item: -item[1])
    lines += [f"  refused {count:5d}: {reason}{_lines(report, reason)}" for reason, count in by_count]
    lines += ["", HEADER]
    for metric, split in dict.fromkeys((one.metric, one.split) for one in report.metrics):
        lines += [
            metric + OF_SPLIT[split],
            *(_row(one) for one in report.metrics if (one.metric, one.split) == (metric, split)),
        ]
    return "\n".join(lines)


def _lines(report: Report, reason: str) -> str:
    """The first lines of the rows that one reason refused."""
    lines = sorted(report.refused_lines.get(reason, ()))
    if not lines:
        return ""
    more = f" and {len(lines) - LINES_SHOWN} more" if len(lines) > LINES_SHOWN else ""
    return f" (line{'s' if lines[1:] else ''} {', '.join(map(str, lines[:LINES_SHOWN]))}{more})"


def _nothing_predicted(report: Report) -> list[Problem]:
    """Every reason with the first line that it refused: a table without one prediction is wrong input."""
    head = Problem(f"not one of {report.rows} rows of kind {report.kind} could be predicted", report.file)
    found = [
        Problem(f"{reason}" + (f", in {count} rows" if count > 1 else ""), report.file, min(lines, default=None))
        for reason, count in report.refused.items()
        for lines in [report.refused_lines.get(reason, ())]
    ]
    return [head, *sorted(found, key=lambda problem: problem.line or 0)]


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


def _row(one: Summary) -> str:
    """One group of a metric, within the width of a terminal."""
    group = one.group if len(one.group) <= GROUP_WIDTH else one.group[: GROUP_WIDTH - 3] + "..."
    rank = "" if one.pairwise_ranking is None else f"{one.pairwise_ranking:.2f}"
    inside = "" if one.interval_coverage is None else f"{100 * one.interval_coverage:.0f}%"
    errors = " ".join(f"{size:5.1f}%" for size in (one.median_ape, one.mape, one.p90_ape, one.wape))
    return f"  {group:{GROUP_WIDTH}s} {one.rows:5d} {errors} {one.median_bias:+5.1f}% {rank:>4s} {inside:>4s}"
