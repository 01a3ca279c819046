"""Predicted against measured: reads any CSV of measurements, predicts every row, sums up the errors.

Each kind has a module ``rlperf.calibrate.validate_<kind>``, imported when that kind is asked for. It has
``predict_rows(path, table) -> Outcome`` for tables, or ``report(paths, fit) -> Report`` for recordings in other forms.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from html import escape
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rlperf.calibrate.splits import HELD_OUT, NEW, SAME_SERIES, is_new
from rlperf.calibrate.statistics import Summary, summarise
from rlperf.calibrate.tables import Refusal, Row, Table, read_table
from rlperf.errors import Problem, RlperfError, SpecError, did_you_mean
from rlperf.plan.answer import notebook
from rlperf.specs.calibration import Spread
from rlperf.specs.hardware import Hardware

if TYPE_CHECKING:
    import polars as pl

SCHEMA_VERSION = 1
RECORDINGS = ("request_log", "engine_trace")
"""Kinds that are not tables: folders of request logs, and PolyTrace files with engine latencies."""
KINDS = ("kernels", "inference", "training", "memory", "rl_step", "weight_sync", "speculation", *RECORDINGS)
"""Kinds of measurements that rlperf predicts."""
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


@dataclass(frozen=True)
class PredictedFigure:
    """One measured figure with what rlperf says of it.

    Attributes
    ----------
    metric : name with its unit, such as ``tpot_ms``; one metric is the row's primary one
    measured, predicted, low, high : in that unit; low and high are the 5th and 95th percentile
    calibration : ids of the constants used
    assumed : what was filled in
    extrapolated : no measurement stands behind part of it
    used_in_calibration : a calibration saw this row; it is left out of the summary
    new : nobody had the row in view when constants and forms were settled; see `rlperf.calibrate.splits`
    series_in_fit : a calibration saw rows of the row's series, and which ones nobody can tell
    stratum : a further group to sum up by (``concurrency > 128``); empty without
    """

    row_id: str
    group: str
    metric: str
    measured: float
    predicted: float
    low: float
    high: float
    calibration: str = ""
    assumed: tuple[str, ...] = ()
    extrapolated: bool = False
    used_in_calibration: bool = False
    new: bool = False
    series_in_fit: bool = False
    stratum: str = ""

    @classmethod
    def of_kernel(
        cls, row: Row, hw: Hardware, seconds: float, spread: Spread, *, group: str, stratum: str,
        assumed: tuple[str, ...] = (), extrapolated: bool = False,
    ) -> PredictedFigure:  # fmt: skip
        """Microseconds of a row that times a kernel on a device, which may borrow its constants."""
        lender = hw.calibration.extrapolated_from
        return cls(
            row_id=row.row_id,
            group=group,
            metric="latency_us",
            measured=row.measured("latency_us"),
            predicted=seconds * 1e6,
            low=seconds * spread.low * 1e6,
            high=seconds * spread.high * 1e6,
            calibration=hw.calibration.id,
            assumed=(*((f"constants of {lender}",) if lender else ()), *assumed),
            extrapolated=extrapolated or bool(lender),
            stratum=stratum,
        )


@dataclass(frozen=True)
class Outcome:
    """What a kind's module makes of a table."""

    predictions: tuple[PredictedFigure, ...]
    refused: tuple[Refusal, ...] = ()


def each_row(table: Table, predict: Callable[[Row], Sequence[PredictedFigure]]) -> Outcome:
    """Predict row by row; a row for which ``predict`` raises is refused for the first problem that it names."""
    predictions: list[PredictedFigure] = []
    refused: list[Refusal] = []
    for row in table:
        try:
            predictions += predict(row)
        except RlperfError as error:
            refused.append(Refusal.of(row, error))
    return Outcome(tuple(predictions), tuple(refused))


@dataclass(frozen=True)
class Report:
    """Errors of a whole file."""

    kind: str
    file: str
    rows: int
    predicted: int
    used_in_calibration: int
    refused: Mapping[str, int]
    metrics: tuple[Summary, ...]
    predictions: tuple[PredictedFigure, ...] = field(repr=False, default=())
    refused_lines: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def to_dict(self, *, predictions: bool = True) -> dict[str, Any]:
        """Plain data for JSON, as the stable interface has it."""
        data = {
            "schema_version": SCHEMA_VERSION,
            "kind": self.kind,
            "file": self.file,
            "rows": self.rows,
            "predicted": self.predicted,
            "used_in_calibration": self.used_in_calibration,
            "refused": dict(self.refused),
            "refused_lines": {reason: list(lines) for reason, lines in self.refused_lines.items()},
            "metrics": [asdict(one) for one in self.metrics],
        }
        if predictions:
            data["predictions"] = [{**asdict(one), "assumed": list(one.assumed)} for one in self.predictions]
        return data

    def to_frame(self) -> pl.DataFrame:
        """One row per figure that was predicted: measured, predicted, 5th and 95th percentile, in the metric's unit."""
        rows = [{**asdict(one), "assumed": "; ".join(one.assumed)} for one in self.predictions]
        return notebook.frame(rows, [each.name for each in fields(PredictedFigure)])

    def __str__(self) -> str:
        return text_of(self)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


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


def _row(one: Summary) -> str:
    """One group of a metric, within the width of a terminal."""
    group = one.group if len(one.group) <= GROUP_WIDTH else one.group[: GROUP_WIDTH - 3] + "..."
    rank = "" if one.pairwise_ranking is None else f"{one.pairwise_ranking:.2f}"
    inside = "" if one.interval_coverage is None else f"{100 * one.interval_coverage:.0f}%"
    errors = " ".join(f"{size:5.1f}%" for size in (one.median_ape, one.mape, one.p90_ape, one.wape))
    return f"  {group:{GROUP_WIDTH}s} {one.rows:5d} {errors} {one.median_bias:+5.1f}% {rank:>4s} {inside:>4s}"


def nothing_predicted(report: Report) -> list[Problem]:
    """Every reason with the first line that it refused: a table without one prediction is wrong input."""
    head = Problem(f"not one of {report.rows} rows of kind {report.kind} could be predicted", report.file)
    found = [
        Problem(f"{reason}" + (f", in {count} rows" if count > 1 else ""), report.file, min(lines, default=None))
        for reason, count in report.refused.items()
        for lines in [report.refused_lines.get(reason, ())]
    ]
    return [head, *sorted(found, key=lambda problem: problem.line or 0)]


def predictor(kind: str) -> Callable[[Path, Table], Outcome]:
    """``predict_rows`` of a kind's module."""
    if kind not in KINDS:
        raise SpecError(
            Problem(f"unknown kind {kind!r}; known: {', '.join(KINDS)}", suggestion=did_you_mean(str(kind), KINDS))
        )
    found: Callable[[Path, Table], Outcome] = _module(kind).predict_rows
    return found


def _module(kind: str) -> ModuleType:
    name = f"rlperf.calibrate.validate_{kind}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise SpecError(f"measurements of kind {kind!r} cannot be validated by this version") from error


def validate_paths(paths: Sequence[Path | str], kind: str, fit: Sequence[Path | str] = ()) -> Report:
    """Predict files or folders of any kind; ``fit`` names the recordings that constants may be fitted to.

    Raises
    ------
    SpecError : unknown kind, unreadable files, several tables at once, ``fit`` where nothing is fitted
    """
    if kind in RECORDINGS:
        report: Report = _module(kind).report([Path(path) for path in paths], [Path(path) for path in fit])
        return report
    if fit or len(paths) != 1:
        raise SpecError(f"kind {kind!r} takes one file" + (" and no --fit" if fit else ""))
    return validate_file(paths[0], kind)


def validate_file(path: Path | str, kind: str) -> Report:
    """Predict every row of a file and sum up the errors per metric and group.

    Raises
    ------
    SpecError : unknown kind, unreadable file, missing columns
    """
    predict = predictor(kind)
    table = read_table(path)
    outcome = predict(Path(path), table)
    new = {row.row_id for row in table if is_new(kind, row)}
    marked = tuple(replace(one, new=one.row_id in new) for one in outcome.predictions)
    return report_of(kind, table.file, len(table), replace(outcome, predictions=marked))


def split_of(one: PredictedFigure) -> str:
    """Which rows a figure is summed up with; see `rlperf.calibrate.splits`."""
    return NEW if one.new else SAME_SERIES if one.series_in_fit else HELD_OUT


def report_of(kind: str, file: str, rows: int, outcome: Outcome) -> Report:
    """Summary of an outcome: rows that a calibration saw are counted and left out, new ones are summed up apart."""
    refused: dict[str, int] = {}
    lines: dict[str, tuple[int, ...]] = {}
    for refusal in outcome.refused:
        refused[refusal.reason] = refused.get(refusal.reason, 0) + 1
        if refusal.line:
            lines[refusal.reason] = (*lines.get(refusal.reason, ()), refusal.line)
    scored = [one for one in outcome.predictions if not one.used_in_calibration]
    groups: dict[tuple[str, str, str], list[PredictedFigure]] = {}
    for one in scored:
        covered = "extrapolated" if one.extrapolated else "covered"
        names = ["all", one.group, covered, *([one.stratum] if one.stratum else [])]
        for name in dict.fromkeys(names):
            groups.setdefault((one.metric, name, split_of(one)), []).append(one)
    metrics = tuple(
        summarise(
            metric,
            group,
            split,
            [one.predicted for one in members],
            [one.measured for one in members],
            [one.low for one in members],
            [one.high for one in members],
        )
        for (metric, group, split), members in groups.items()
    )
    return Report(
        kind=kind,
        file=file,
        rows=rows,
        predicted=len({one.row_id for one in outcome.predictions}),
        used_in_calibration=len({one.row_id for one in outcome.predictions if one.used_in_calibration}),
        refused=refused,
        metrics=metrics,
        predictions=outcome.predictions,
        refused_lines=lines,
    )
