"""Writes what training loses where whole groups are left out: python docs/website/training_left_out.py [DATA]

The tables of docs/guide/accuracy-training.md and README's. DATA is found as in ``accuracy.py``. One fit of all
backends serves all four groupings; every fit without a group takes ten seconds of a core, 47 in all. ``--only BY ...``
writes the tables and the rows of these groupings alone.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import accuracy

from rlperf.calibrate.columns import read_all
from rlperf.calibrate.leave_out import ALL, GROUPS, ErrorSummary, LeaveOutLine, LeaveOutReport, report_of
from rlperf.calibrate.leave_out_training import groups_of
from rlperf.calibrate.tables import read_table
from rlperf.calibrate.trainers.rows import TrainingRow
from rlperf.calibrate.trainers.timing_fits import fit_rows

PAGE = accuracy.ROOT / "docs" / "guide" / "accuracy-training.md"
BY = {
    "framework": "framework",
    "version": "release of a framework",
    "device": "device",
    "family": "model family",
}
README_HEAD = "| training steps, left out: each |"
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


def readme_row(by: str, report: LeaveOutReport) -> str:
    """README's line of a grouping: all rows."""
    one = next(line for line in report.lines if line.metric == "step_s" and line.group == ALL)
    return accuracy.left_out_row(BY[by], one)


def borrowed(report: LeaveOutReport) -> str:
    """Whose constants stood in, group by group; empty where each had its own."""
    lent = [f"{line.group} ({line.borrowed})" for line in report.lines if line.borrowed and line.metric == "step_s"]
    return f"Borrowed: {'; '.join(lent)}." if lent else ""


def write(reports: Mapping[str, LeaveOutReport]) -> None:
    """Every table, behind the line that names its grouping, and below it what was borrowed."""
    text = PAGE.read_text()
    for by, report in reports.items():
        before, title, rest = text.partition(f"**{TITLES[by]}.**")
        rest = accuracy.with_rows(rest, HEAD, rows_of(report))
        start = rest.index(HEAD)
        table, after = rest[start:].split("\n\n", 1)
        after = after.partition("\n\n")[2] if after.startswith("Borrowed:") else after
        below = [note] if (note := borrowed(report)) else []
        text = before + title + rest[:start] + "\n\n".join([table, *below, after])
    PAGE.write_text(text)
    accuracy.README.write_text(readme_with(accuracy.README.read_text(), reports))


def readme_with(text: str, reports: Mapping[str, LeaveOutReport]) -> str:
    """README with the rows of these groupings."""
    table = text[text.index(README_HEAD) :].partition("\n\n")[0].split("\n")
    kept = dict(zip(BY, table[2:], strict=True))
    rows = [readme_row(by, reports[by]) if by in reports else kept[by] for by in BY]
    return accuracy.with_rows(text, README_HEAD, rows)


TITLES = {"framework": "Framework", "version": "Release", "device": "Device", "family": "Model family"}


def main(only: Sequence[str]) -> None:
    """Fit once, leave every group out in turn and write the tables."""
    table = read_table(accuracy.data_folder() / "measured" / "training.csv")
    found, _ = read_all(TrainingRow, table)
    fit = fit_rows(found)
    for by in only or BY:
        write({by: report_of("training", table.file, by, groups_of(fit, by))})


if __name__ == "__main__":
    at = sys.argv.index("--only") if "--only" in sys.argv else len(sys.argv)
    sys.argv, groupings = sys.argv[:at], sys.argv[at + 1 :]
    main(groupings)
