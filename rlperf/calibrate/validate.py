"""Predicted against measured: reads any CSV of measurements, predicts every row, sums up the errors.

Each kind has a module ``rlperf.calibrate.validate_<kind>``, imported when that kind is asked for. It has
``predict_rows(path, table) -> Outcome`` for tables, or ``report(paths, fit) -> Report`` for recordings in other forms.
"""

from __future__ import annotations

import csv
import hashlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from rlperf.calibrate.statistics import Summary, summarise
from rlperf.errors import Problem, SpecError, did_you_mean
from rlperf.specs.reader import read_text

SCHEMA_VERSION = 1
KINDS = ("kernels", "inference", "training", "memory", "rl_step", "weight_sync", "request_log", "engine_trace")
"""Kinds of measurements that rlperf predicts."""


@dataclass(frozen=True)
class Row:
    """One line of a table of measurements; a blank cell means *not published*."""

    row_id: str
    group: str
    line: int
    cells: Mapping[str, str]

    def text(self, column: str, default: str = "") -> str:
        """The cell, or ``default`` where it is blank or absent."""
        return (self.cells.get(column) or "").strip() or default

    def number(self, column: str) -> float | None:
        """The cell as a number, None where it is blank; `SpecError` where it is none."""
        text = self.text(column)
        if not text:
            return None
        try:
            return float(text)
        except ValueError as error:
            raise SpecError(Problem(f"{column}: {text!r} is not a number", line=self.line)) from error

    def count(self, column: str, default: int = 1) -> int:
        """The cell as a positive whole number, ``default`` where it is blank."""
        value = self.number(column)
        if value is None:
            return default
        if value < 1 or value != int(value):
            raise SpecError(Problem(f"{column}: {value:g} is not a positive whole number", line=self.line))
        return int(value)


@dataclass(frozen=True)
class Table:
    """A CSV file as text, with a ``row_id`` and a ``group`` for every row."""

    file: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def need(self, *columns: str) -> None:
        """Raise a `SpecError` that names every column that is missing."""
        missing = [
            Problem(f"column {name!r} is missing", self.file, 1, did_you_mean(name, self.columns))
            for name in columns
            if name not in self.columns
        ]
        if missing:
            raise SpecError(missing)


@dataclass(frozen=True)
class Prediction:
    """One measured figure with what rlperf says of it.

    Attributes
    ----------
    metric : name with its unit, such as ``tpot_ms``; one metric is the row's primary one
    measured, predicted, low, high : in that unit; low and high are the 5th and 95th percentile
    calibration : ids of the constants used
    assumed : what was filled in
    extrapolated : no measurement stands behind part of it
    used_in_calibration : a calibration saw this row; it is left out of the summary
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
    stratum: str = ""


@dataclass(frozen=True)
class Refusal:
    """A row that cannot sensibly be predicted, and why."""

    row_id: str
    reason: str


@dataclass(frozen=True)
class Outcome:
    """What a kind's module makes of a table."""

    predictions: tuple[Prediction, ...]
    refused: tuple[Refusal, ...] = ()


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
    predictions: tuple[Prediction, ...] = field(repr=False, default=())

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
            "metrics": [asdict(one) for one in self.metrics],
        }
        if predictions:
            data["predictions"] = [{**asdict(one), "assumed": list(one.assumed)} for one in self.predictions]
        return data


def read_table(path: Path | str) -> Table:
    """Read a CSV of measurements; rows without a ``row_id`` get a hash of their cells, groups the file's name.

    Comment lines that begin with ``#`` are skipped.
    """
    file = Path(path)
    lines = [(number, text) for number, text in enumerate(read_text(file).splitlines(), start=1) if text.strip()]
    lines = [(number, text) for number, text in lines if not text.startswith("#")]
    if len(lines) < 2:
        raise SpecError(Problem("holds no rows", str(file)))
    reader = csv.reader([text for _, text in lines])
    header = tuple(name.strip() for name in next(reader))
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise SpecError(Problem(f"column {', '.join(twice)} stands twice", str(file), lines[0][0]))
    rows: list[Row] = []
    problems: list[Problem] = []
    for (number, _), values in zip(lines[1:], reader, strict=False):
        if len(values) != len(header):
            problems.append(Problem(f"has {len(values)} cells for {len(header)} columns", str(file), number))
            continue
        cells = dict(zip(header, values, strict=True))
        rows.append(
            Row(cells.get("row_id") or row_hash(file.stem, values), cells.get("group") or file.stem, number, cells)
        )
    if problems:
        raise SpecError(problems)
    return Table(str(file), header, tuple(rows))


def row_hash(stem: str, values: Sequence[str]) -> str:
    """A row's name from its cells, stable over reordering of the file.

    >>> row_hash("nccl", ["a100_sxm", "8"]) == row_hash("nccl", ["a100_sxm", "8"])
    True
    """
    return f"{stem}_{hashlib.blake2s(chr(31).join(values).encode(), digest_size=6).hexdigest()}"


def split_rank(text: str) -> int:
    """A number from a configuration's text by which splits order configurations: a blake2s hash, no seed.

    >>> split_rank("vllm|Llama-3.1-8B") == split_rank("vllm|Llama-3.1-8B")
    True
    """
    return int.from_bytes(hashlib.blake2s(text.encode(), digest_size=8).digest(), "big")


def predictor(kind: str) -> Callable[[Path, Table], Outcome]:
    """``predict_rows`` of a kind's module."""
    if kind not in KINDS:
        raise SpecError(
            Problem(f"unknown kind {kind!r}; known: {', '.join(KINDS)}", suggestion=did_you_mean(kind, KINDS))
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


RECORDINGS = ("request_log", "engine_trace")
"""Kinds that are not tables: folders of request logs, and PolyTrace files with engine latencies."""


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
    return report_of(kind, table.file, len(table), predict(Path(path), table))


def report_of(kind: str, file: str, rows: int, outcome: Outcome) -> Report:
    """Summary of an outcome: rows that a calibration saw are counted and left out."""
    refused: dict[str, int] = {}
    for refusal in outcome.refused:
        refused[refusal.reason] = refused.get(refusal.reason, 0) + 1
    scored = [one for one in outcome.predictions if not one.used_in_calibration]
    groups: dict[tuple[str, str], list[Prediction]] = {}
    for one in scored:
        covered = "extrapolated" if one.extrapolated else "covered"
        names = ["all", one.group, covered, *([one.stratum] if one.stratum else [])]
        for name in dict.fromkeys(names):
            groups.setdefault((one.metric, name), []).append(one)
    metrics = tuple(
        summarise(
            metric,
            group,
            [one.predicted for one in members],
            [one.measured for one in members],
            [one.low for one in members],
            [one.high for one in members],
        )
        for (metric, group), members in groups.items()
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
    )
