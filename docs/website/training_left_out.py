"""Writes what training loses where whole groups are left out: python docs/website/training_left_out.py [DATA]

The tables of docs/guide/accuracy-training.md. DATA is found as in ``accuracy.py``. One fit of all backends serves all
four groupings; a quarter of an hour of one core.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import accuracy

from rlperf.calibrate.columns import read_all
from rlperf.calibrate.leave_out import ALL, GROUPS, ErrorSummary, LeaveOutLine, LeaveOutReport, report_of
from rlperf.calibrate.leave_out_training import groups_of
from rlperf.calibrate.tables import read_table
from rlperf.calibrate.timing_fits import fit_rows
from rlperf.calibrate.trainer_rows import TrainingRow

PAGE = accuracy.ROOT / "docs" / "guide" / "accuracy-training.md"
BY = ("framework", "version", "device", "family")
HEAD = "| left out | rows | fitted | seen: median |"


def rows_of(report: LeaveOutReport) -> list[str]:
    """One line per group, then all rows and the mean over groups."""
    return [_row(line) for line in report.lines if line.metric == "step_s"]


def _row(line: LeaveOutLine) -> str:
    name = f"**{line.group}**" if line.group in (ALL, GROUPS) else line.group
    pooled = f"{100.0 * line.pooled.inside:.0f} % | {line.pooled.width:.0f} %"
    return f"| {name} | {line.rows} | {line.in_fit} | {_errors(line.seen)} | {_errors(line.left_out)} | {pooled} |"


def _errors(one: ErrorSummary) -> str:
    held = f"{100.0 * one.inside:.0f} % | {one.width:.0f} %"
    return f"{one.median:.1f} % | {one.mean:.1f} % | {one.p90:.1f} % | {held}"


def borrowed(report: LeaveOutReport) -> str:
    """Whose constants stood in, group by group; empty where each had its own."""
    lent = [f"{line.group} ({line.borrowed})" for line in report.lines if line.borrowed and line.metric == "step_s"]
    return f"Borrowed: {'; '.join(lent)}." if lent else ""


def write(reports: Mapping[str, LeaveOutReport]) -> None:
    """Every table, behind the line that names its grouping."""
    lines = PAGE.read_text().split("\n")
    for by, report in reports.items():
        title = next(number for number, line in enumerate(lines) if line.startswith(f"**{TITLES[by]}.**"))
        first = next(number for number in range(title, len(lines)) if lines[number].startswith(HEAD)) + 2
        last = next(number for number in range(first, len(lines)) if not lines[number].startswith("|"))
        said = next((number for number in range(last, last + 2) if lines[number].startswith("Borrowed:")), None)
        end = last if said is None else said + 1
        note = borrowed(report)
        lines[first:end] = [*rows_of(report), *(["", note] if note else [])]
    PAGE.write_text("\n".join(lines))


TITLES = {"framework": "Framework", "version": "Release", "device": "Device", "family": "Model family"}


def main() -> None:
    """Fit once, leave every group out in turn and write the tables."""
    given = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("RLPERF_DATA", accuracy.ROOT.parent / "shared/data")
    table = read_table(Path(given) / "measured" / "training.csv")
    found, _ = read_all(TrainingRow, table)
    fit = fit_rows(found)
    write({by: report_of("training", table.file, by, groups_of(fit, by)) for by in BY})


if __name__ == "__main__":
    main()
