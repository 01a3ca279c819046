"""The neutral length table as plain CSV or Parquet."""

from __future__ import annotations

import codecs
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlperf.errors import Problem, SpecError, did_you_mean
from rlperf.specs.reader import reading
from rlperf.specs.writer import write_atomic
from rlperf.units import MOST_COUNT
from rlperf.workload.lengths import COLUMNS, OPTIONAL_FLOAT, Int, LengthTable

if TYPE_CHECKING:
    import polars as pl

NEEDED = ("prompt_tokens", "response_tokens")
"""Columns without which a row says nothing; the others have a default."""
_CAP = "max_response_tokens"
PLAIN = (*COLUMNS, _CAP, "step")
"""All columns that are read: one beside them may be another by a wrong name."""


def write_table(table: LengthTable, path: Path | str) -> Path:
    """Write `.csv` or `.parquet`: one row per entry, the cap as a column of its own."""
    import polars as pl

    target = Path(path)
    columns = {name: np.asarray(v) for name in COLUMNS if (v := getattr(table, name)) is not None}
    frame = pl.DataFrame(columns).with_columns(pl.lit(table.max_response_tokens, dtype=pl.Int64).alias(_CAP))
    buffer = io.BytesIO()
    if target.suffix == ".parquet":
        frame.write_parquet(buffer)
    elif target.suffix == ".csv":
        frame.write_csv(buffer)
    else:
        raise SpecError(f"{target}: tables are written as .csv or .parquet, not {target.suffix or 'without a suffix'}")
    return write_atomic(target, buffer.getvalue())


def read_table(path: Path | str) -> LengthTable:
    """Read a `.csv` or `.parquet` that `write_table` wrote, or any with at least prompt_tokens and response_tokens."""
    frame = read_frame(path)
    return table_of(frame, str(path))


def read_frame(path: Path | str) -> pl.DataFrame:
    """The columns of a `.csv` or `.parquet` as they are."""
    import polars as pl

    source = Path(path)
    with reading(source), source.open("rb") as stream:
        if stream.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise SpecError(Problem("is UTF-16 text", str(source), suggestion="save it as UTF-8"))
        if source.suffix == ".parquet":
            return pl.read_parquet(source, glob=False)
        return pl.read_csv(source, glob=False, separator="\t" if source.suffix == ".tsv" else ",")


def _as_recorded(frame: pl.DataFrame) -> pl.DataFrame:
    """Columns as dumps of runs have them: `step` for rl_step, prompts told apart by text (verl's uid), and whole
    numbers as floats (a column of pandas that once had a gap)."""
    import polars as pl

    floats = [name for name in (*COLUMNS, _CAP) if name in frame.columns and frame[name].dtype.is_float()]
    whole = [name for name in floats if name not in OPTIONAL_FLOAT and not _not_whole(frame[name]).any()]
    frame = frame.with_columns(pl.col(whole).cast(pl.Int64, strict=False))

    if "rl_step" not in frame.columns and "step" in frame.columns and frame["step"].dtype.is_integer():
        frame = frame.rename({"step": "rl_step"})
    if "group" in frame.columns and frame["group"].dtype == pl.String and not frame["group"].null_count():
        frame = frame.with_columns(pl.col("group").rank("dense").cast(pl.Int64) - 1)
    return frame


def _not_whole(column: pl.Series) -> pl.Series:
    """Where a column holds something that is no whole number of this size; empty cells are told apart."""
    import polars as pl

    number = column.cast(pl.Float64, strict=False)
    return column.is_not_null() & ~((number % 1 == 0) & (number.abs() < 2.0**53)).fill_null(False)


def table_of(frame: pl.DataFrame, source: str, lines: Int | None = None) -> LengthTable:
    """The length table of a frame with at least `NEEDED`; ``lines`` ``[rows]`` are those of ``source``, for messages.

    None: those below a header.

    Raises
    ------
    SpecError : every column that is missing or holds something else
    """
    import polars as pl

    frame = _as_recorded(frame)
    lines = np.arange(2, frame.height + 2) if lines is None else lines
    if not frame.height:
        raise SpecError(Problem("holds no rows", source))
    if frame.width == 1 and (mark := next((each for each in ";\t|" if each in frame.columns[0]), None)):
        raise SpecError(Problem(f"its columns stand apart by {mark!r}", source, 1, "write commas, or JSON lines"))
    problems = []
    for name in NEEDED:
        if name not in frame.columns:
            found = ", ".join(frame.columns[:12])
            hint = did_you_mean(name, frame.columns)
            problems.append(Problem(f"column {name} is missing; found {found}", source, None, hint))
    for name in sorted(set(frame.columns) & {*COLUMNS, _CAP}):
        column = frame[name]
        if not (column.dtype.is_integer() or (name in OPTIONAL_FLOAT and column.dtype.is_numeric())) and name != _CAP:
            due = "numbers" if name in OPTIONAL_FLOAT else "whole numbers"
            wrong = column.cast(pl.Float64, strict=False).is_null() if name in OPTIONAL_FLOAT else _not_whole(column)
            at = wrong.arg_max() or 0
            told = f"column {name} must hold {due} (given: {column[at]!r})"
            problems.append(Problem(told, source, int(lines[at]) if wrong.any() else None))
        elif name != _CAP and column.null_count():
            line = int(lines[column.is_null().arg_max() or 0])
            problems.append(Problem(f"column {name} has an empty cell", source, line))
        elif name != _CAP and (wrong := ~column.is_between(name in NEEDED, MOST_COUNT)).any():
            line = int(lines[wrong.arg_max() or 0])
            least = "at least 1 token" if name in NEEDED else "at least 0"
            problems.append(Problem(f"column {name} must be {least} and at most {MOST_COUNT:,}", source, line))
    if _CAP in frame.columns and frame[_CAP].drop_nulls().n_unique() > 1:
        several = ", ".join(map(str, frame[_CAP].drop_nulls().unique().sort()[:5]))
        problems.append(Problem(f"column {_CAP} holds several values ({several}): a recording has one", source))
    if _CAP in frame.columns and not frame[_CAP].drop_nulls().is_between(1, MOST_COUNT).all():
        problems.append(Problem(f"column {_CAP} must be at least 1 and at most {MOST_COUNT:,}", source))
    if "turn" in frame.columns and "trajectory" not in frame.columns and (frame["turn"] != frame["turn"][0]).any():
        problems.append(Problem("column turn says nothing without a column trajectory, whose turns they are", source))
    if problems:
        raise SpecError(problems)
    zeros = np.zeros(frame.height, np.int64)
    rows = np.arange(frame.height)
    fallback = {"group": rows, "rl_step": zeros, "turn": zeros}
    columns: dict[str, Any] = {n: frame[n].to_numpy() if n in frame.columns else fallback.get(n) for n in COLUMNS}
    cap = frame[_CAP].drop_nulls().unique() if _CAP in frame.columns else pl.Series([], dtype=pl.Int64)
    return LengthTable(**columns, max_response_tokens=int(cap[0]) if cap.len() == 1 else None)
