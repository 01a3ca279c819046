"""Writes what serving loses where whole groups are left out: python docs/website/serving_left_out.py [DATA]

The tables of docs/guide/accuracy-inference.md and README's. DATA is found as in ``accuracy.py``. Minutes of work.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import accuracy

from rlperf.calibrate.leave_out import ALL, GROUPS, ErrorSummary, LeaveOutLine, errors_of, report_of
from rlperf.calibrate.leave_out_inference import Refits, predict_groups, report_apart
from rlperf.calibrate.tables import read_table
from rlperf.calibrate.validate import PredictedFigure
from rlperf.calibrate.validate_inference import LOOP
from rlperf.specs.engine_calibration import release_of
from rlperf.specs.profiles import load_architecture

PAGE = accuracy.ROOT / "docs" / "guide" / "accuracy-inference.md"
BY = {
    "device": "device (on a relative's kernel constants)",
    "family": "model family",
    "version": "engine release",
    "engine": "engine",
}
TIME, RATE = "tpot_ms", "tokens_per_s_per_gpu"
LISTED = 15
"""Rows of an architecture in one release from which it has a line of its own."""


def apart_rows(figures: Sequence[PredictedFigure], names: Mapping[str, Sequence[str]]) -> list[str]:
    """Errors of rows whose configuration no fit saw: all, by kernels, by device, by engine and device."""
    groups: dict[str, list[PredictedFigure]] = {"all": list(figures)}
    for one in figures:
        device, engine, *_ = names[one.row_id]
        kind = "extrapolated" if one.extrapolated else "covered"
        drafted = ["drafted"] * any(text.startswith("speculation=") for text in one.assumed)
        for group in (kind, *drafted, device, f"{engine} {device}"):
            groups.setdefault(group, []).append(one)
    first = [name for name in ("all", "covered", "extrapolated", "drafted") if name in groups]
    names_in_order = (*first, *sorted(set(groups) - set(first), key=lambda name: (" " in name, name)))
    return [_apart_row(name, len(groups[name]), errors_of(groups[name])) for name in names_in_order]


def first_token_rows(figures: Sequence[PredictedFigure], names: Mapping[str, Sequence[str]]) -> list[str]:
    """Errors of first tokens of closed loops: all, by engine, and of vLLM dense models and mixtures apart."""
    groups: dict[str, list[PredictedFigure]] = {"all": list(figures)}
    for one in figures:
        _, engine, _, architecture, _ = names[one.row_id]
        groups.setdefault(engine, []).append(one)
        if engine == "vllm":
            kind = "dense" if load_architecture(architecture).experts is None else "mixtures of experts"
            groups.setdefault(f"vllm, {kind}", []).append(one)
    in_order = ("all", *sorted(set(groups) - {"all"}))
    return [_apart_row(name, len(groups[name]), errors_of(groups[name])) for name in in_order]


def release_rows(figures: Sequence[PredictedFigure], names: Mapping[str, Sequence[str]]) -> list[str]:
    """The same by engine, release, architecture, device and dtype, of groups with `LISTED` rows."""
    groups: dict[str, list[PredictedFigure]] = {}
    for one in figures:
        device, engine, release, architecture, dtype = names[one.row_id]
        group = " ".join(filter(None, (engine, release, architecture, device, dtype or "precision not stated")))
        groups.setdefault(group, []).append(one)
    return [_apart_row(name, len(own), errors_of(own)) for name, own in sorted(groups.items()) if len(own) >= LISTED]


def _apart_row(name: str, rows: int, one: ErrorSummary) -> str:
    return (
        f"| {name} | {rows} | {one.median:.1f} % | {one.mean:.1f} % | {one.p90:.1f} % | {one.bias:+.1f} % | "
        f"{one.inside:.2f} | {one.width / 100.0:.2f} |"
    )


def _errors(one: ErrorSummary) -> str:
    return f"{one.median:.1f} / {one.mean:.1f} / {one.p90:.1f} %"


def _held(one: ErrorSummary) -> str:
    return f"{one.inside:.2f} at {one.width / 100.0:.2f}"


Lines = Sequence[tuple[str, LeaveOutLine]]
"""Lines of reports, each with the way of grouping."""


def whole_rows(lines: Lines) -> list[str]:
    """One line per way of grouping and metric."""
    return [
        f"| each {by} | {one.metric} | {one.rows} | {_errors(one.seen)} | {_held(one.seen)} | "
        f"{_errors(one.left_out)} | {_held(one.left_out)} | {_held(one.pooled) if one.pooled.width > 0.0 else '-'} |"
        for by, one in lines
        if one.group == ALL and one.metric in (TIME, RATE)
    ]


def group_rows(lines: Lines) -> list[str]:
    """One line per group, time per token."""
    return [
        f"| {by} {one.group} | {one.rows} | {one.in_fit} | {_errors(one.seen)} | {_held(one.seen)} | "
        f"{_errors(one.left_out)} | {_held(one.left_out)} | {one.borrowed} |"
        for by, one in lines
        if one.metric == TIME and one.group not in (ALL, GROUPS)
    ]


def readme_rows(lines: Lines) -> list[str]:
    """One line per way of grouping, for README."""
    return [accuracy.left_out_row(BY[by], one) for by, one in lines if one.metric == TIME and one.group == ALL]


def write(found: Sequence[PredictedFigure], names: Mapping[str, Sequence[str]], lines: Lines) -> None:
    """All tables into their pages."""
    apart, rates = ([one for one in found if one.metric == metric] for metric in (TIME, RATE))
    text = accuracy.with_rows(PAGE.read_text(), "| rows | n | median", apart_rows(apart, names))
    text = accuracy.with_rows(text, "| rows of one release | n |", release_rows(apart, names))
    throughput = [_apart_row("tokens/s, all", len(rates), errors_of(rates))]
    text = accuracy.with_rows(text, "| throughput | n |", throughput)
    first = first_token_rows([one for one in found if one.metric == LOOP], names)
    text = accuracy.with_rows(text, "| first tokens of closed loops |", first)
    text = accuracy.with_rows(text, "| left out in turn |", whole_rows(lines))
    PAGE.write_text(accuracy.with_rows(text, "| left out | rows | configurations |", group_rows(lines)))
    text = accuracy.with_rows(accuracy.README.read_text(), "| left out: each |", readme_rows(lines))
    accuracy.README.write_text(text)


def main() -> None:
    """Fit without each group in turn and write the tables."""
    file = accuracy.data_folder() / "measured" / "inference.csv"
    table = read_table(file)
    fits = Refits(table)
    found = [one for one in report_apart(file, fits).predictions if not one.used_in_calibration]
    names = {
        row.row_id: (
            row.text("gpu"), row.text("engine"), release_of(row.text("engine_version")), row.text("architecture"),
            row.text("gemm_dtype"),
        )
        for row in table
    }  # fmt: skip
    groups = {by: predict_groups(file, table, by, refits=fits) for by in BY}
    lines = [(by, one) for by in BY for one in report_of("inference", table.file, by, groups[by]).lines]
    write(found, names, lines)


if __name__ == "__main__":
    main()
