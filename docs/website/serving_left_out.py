"""Writes what serving loses where whole groups are left out: python docs/website/serving_left_out.py [DATA]

The tables of docs/guide/accuracy-inference.md and README's. DATA is found as in ``accuracy.py``. Ten minutes of work.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import accuracy
import numpy as np

from rlperf.calibrate.leave_out import ALL, GROUPS, ErrorSummary, LeaveOutReport, leave_out
from rlperf.calibrate.leave_out_inference import report_apart
from rlperf.calibrate.statistics import absolute_percentage_errors
from rlperf.calibrate.tables import read_table
from rlperf.calibrate.validate import PredictedFigure

PAGE = accuracy.ROOT / "docs" / "guide" / "accuracy-inference.md"
README = accuracy.ROOT / "README.md"
BY = {
    "device": "device (on a relative's kernel constants)",
    "family": "model family",
    "version": "engine release",
    "engine": "engine",
}
TIME, RATE = "tpot_ms", "tokens_per_s_per_gpu"


def apart_rows(figures: Sequence[PredictedFigure], names: Mapping[str, Sequence[str]]) -> list[str]:
    """Errors of rows whose configuration no fit saw: all, by kernels, by device, by engine and device."""
    groups: dict[str, list[PredictedFigure]] = {"all": list(figures)}
    for one in figures:
        device, engine = names[one.row_id]
        kind = "extrapolated" if one.extrapolated else "covered"
        for group in (kind, device, f"{engine} {device}"):
            groups.setdefault(group, []).append(one)
    first = [name for name in ("all", "covered", "extrapolated") if name in groups]
    lines = []
    for name in (*first, *sorted(set(groups) - set(first), key=lambda name: (" " in name, name))):
        rows = groups[name]
        predicted, measured = (np.array([getattr(one, field) for one in rows]) for field in ("predicted", "measured"))
        errors = absolute_percentage_errors(predicted, measured)
        bias = 100.0 * float(np.median(predicted / measured - 1.0))
        inside = np.mean([one.low <= one.measured <= one.high for one in rows])
        width = np.median([(one.high - one.low) / one.predicted for one in rows])
        lines.append(
            f"| {name} | {len(rows)} | {np.median(errors):.1f} % | {errors.mean():.1f} % | "
            f"{np.percentile(errors, 90):.1f} % | {bias:+.1f} % | {inside:.2f} | {width:.2f} |"
        )
    return lines


def _errors(one: ErrorSummary) -> str:
    return f"{one.median:.1f} / {one.mean:.1f} / {one.p90:.1f} %"


def _held(one: ErrorSummary) -> str:
    return f"{one.inside:.2f} at {one.width / 100.0:.2f}"


def whole_rows(reports: Mapping[str, LeaveOutReport]) -> list[str]:
    """One line per way of grouping and metric."""
    return [
        f"| each {by} | {one.metric} | {one.rows} | {_errors(one.seen)} | {_held(one.seen)} | "
        f"{_errors(one.left_out)} | {_held(one.left_out)} | {_held(one.pooled) if one.pooled.width > 0.0 else '-'} |"
        for by, report in reports.items()
        for metric in (TIME, RATE)
        for one in report.lines
        if one.metric == metric and one.group == ALL
    ]


def group_rows(reports: Mapping[str, LeaveOutReport]) -> list[str]:
    """One line per group, time per token."""
    return [
        f"| {by} {one.group} | {one.rows} | {one.in_fit} | {_errors(one.seen)} | {_held(one.seen)} | "
        f"{_errors(one.left_out)} | {_held(one.left_out)} | {one.borrowed} |"
        for by, report in reports.items()
        for one in report.lines
        if one.metric == TIME and one.group not in (ALL, GROUPS)
    ]


def readme_rows(reports: Mapping[str, LeaveOutReport]) -> list[str]:
    """One line per way of grouping, for README."""
    return [
        f"| {BY[by]} | {one.rows} | {one.seen.median:.1f} / {one.seen.mean:.1f} % | {100 * one.seen.inside:.0f} % | "
        f"{one.left_out.median:.1f} / {one.left_out.mean:.1f} % | {100 * one.left_out.inside:.0f} % |"
        for by, report in reports.items()
        for one in report.lines
        if one.metric == TIME and one.group == ALL
    ]


def replaced(text: str, head: str, rows: Sequence[str]) -> str:
    """The page with the table that begins with ``head`` written anew."""
    lines = text.split("\n")
    first = next(number for number, line in enumerate(lines) if line.startswith(head)) + 2
    last = next(number for number in range(first, len(lines)) if not lines[number].startswith("|"))
    return "\n".join([*lines[:first], *rows, *lines[last:]])


def write(apart: Sequence[PredictedFigure], names: Mapping[str, Sequence[str]],
          reports: Mapping[str, LeaveOutReport]) -> None:  # fmt: skip
    """All tables into their pages."""
    text = replaced(PAGE.read_text(), "| rows | n | median", apart_rows(apart, names))
    text = replaced(text, "| left out in turn |", whole_rows(reports))
    PAGE.write_text(replaced(text, "| left out | rows | configurations |", group_rows(reports)))
    README.write_text(replaced(README.read_text(), "| left out: each |", readme_rows(reports)))


def main() -> None:
    """Fit without each group in turn and write the tables."""
    given = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("RLPERF_DATA", accuracy.ROOT.parent / "shared/data")
    file = Path(given) / "measured" / "inference.csv"
    apart = [one for one in report_apart(file).predictions if one.metric == TIME and not one.used_in_calibration]
    names = {row.row_id: (row.text("gpu"), row.text("engine")) for row in read_table(file)}
    write(apart, names, {by: leave_out(file, "inference", by) for by in BY})


if __name__ == "__main__":
    main()
