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
from rlperf.workload.lengths import COLUMNS, OPTIONAL_FLOAT, Int, LengthTable, Mask

if TYPE_CHECKING:
    import polars as pl

NEEDED = ("prompt_tokens", "response_tokens")
"""Columns without which a row says nothing; the others have a default."""
_BEGINS = {"prompt_tokens": ("prompt", "input"), "response_tokens": ("response", "output", "completion", "generat")}
"""What the names begin with that a needed column has elsewhere."""
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
        frame = pl.read_csv(source, glob=False, separator="\t" if source.suffix == ".tsv" else ",")
    bare = {name: name.strip() for name in frame.columns}
    return frame.rename(bare) if len({*bare.values()}) == frame.width else frame


def _as_recorded(frame: pl.DataFrame) -> pl.DataFrame:
    """Columns as dumps of runs have them: `step` for rl_step, prompts (verl's uid) and trajectories by text."""
    import polars as pl

    if "rl_step" not in frame.columns and "step" in frame.columns and frame["step"].dtype.is_integer():
        frame = frame.rename({"step": "rl_step"})
    if _CAP in frame.columns and frame[_CAP].dtype == pl.String:
        cap = frame[_CAP].str.strip_chars().cast(pl.Int64, strict=False)
        frame = frame if cap.null_count() > frame[_CAP].null_count() else frame.with_columns(cap)
    told = [name for name in ("group", "trajectory") if name in frame.columns and frame[name].dtype == pl.String]
    return frame.with_columns(
        pl.col([name for name in told if not frame[name].null_count()]).rank("dense").cast(pl.Int64) - 1
    )


def table_of(frame: pl.DataFrame, source: str) -> LengthTable:
    """The length table of a frame with at least `NEEDED`; see `sound_rows`, of which every damaged row is refused.

    Raises
    ------
    SpecError : every column that is missing or holds something else, and every damaged row
    """
    table, damaged = sound_rows(frame, source)
    if damaged:
        raise SpecError(damaged)
    return table


def sound_rows(frame: pl.DataFrame, source: str, lines: Int | None = None) -> tuple[LengthTable, list[Problem]]:
    """The table of the rows that can be used, and what is wrong with the others.

    With a damaged row goes its prompt's whole group (or trajectory): part of one is not what was rolled out.
    ``lines`` ``[rows]`` are those of ``source``, for messages; None: those below a header.

    Raises
    ------
    SpecError : every column that is missing, or of which no row can be used
    """
    import polars as pl

    frame = _as_recorded(frame)
    lines = np.arange(2, frame.height + 2) if lines is None else lines
    _check_columns(frame, source)
    wrong, problems, numbers = np.zeros(frame.height, bool), list[Problem](), list[pl.Series]()
    for name in sorted(set(frame.columns) & {*COLUMNS}):
        column, damaged, told = _numbers(frame[name])
        numbers.append(column)
        if damaged.all():
            hint = None if name in NEEDED else f"leave {name} out, which may be missing"
            raise SpecError(Problem(told[0], source, int(lines[0]), hint))
        problems += (Problem(words, source, int(line)) for words, line in zip(told, lines[damaged], strict=True))
        wrong |= damaged
    frame = frame.with_columns(numbers)
    whole = next((name for name in ("group", "trajectory") if name in frame.columns), None)
    if problems and whole:
        of = [name for name in ("rl_step", whole) if name in frame.columns]
        marked = frame.select(*of, pl.Series("damaged", wrong))
        wrong = marked.select(pl.col("damaged").any().over(of)).to_series().to_numpy()
    frame = frame.filter(~wrong)
    zeros, rows = np.zeros(frame.height, np.int64), np.arange(frame.height)
    apart = frame["trajectory"].to_numpy() if "trajectory" in frame.columns else rows
    fallback = {"group": apart, "rl_step": zeros, "turn": zeros}
    columns: dict[str, Any] = {n: frame[n].to_numpy() if n in frame.columns else fallback.get(n) for n in COLUMNS}
    if columns["trajectory"] is not None:
        columns |= _of_turns(columns, source)
    cap = frame[_CAP].drop_nulls().unique() if _CAP in frame.columns else pl.Series([], dtype=pl.Int64)
    return LengthTable(**columns, max_response_tokens=int(cap[0]) if cap.len() == 1 else None), problems


def _of_turns(columns: dict[str, Any], source: str) -> dict[str, Int]:
    """Trajectories that are counted within their prompt told apart, and what tools appended where no column says it:
    what the context of the next turn has beyond this turn's and its response."""
    keys = [columns[name] for name in ("trajectory", "group", "rl_step")]
    for several in (keys[:1], keys):
        trajectory = np.unique(np.stack(several), axis=1, return_inverse=True)[1].reshape(-1)
        order = np.lexsort((columns["turn"], trajectory))
        goes_on = np.diff(trajectory[order]) == 0
        if not (twice := goes_on & (np.diff(columns["turn"][order]) == 0)).any():
            break
    else:
        row = int(order[:-1][twice][0])
        told = f"turn {columns['turn'][row]} of trajectory {keys[0][row]} stands twice"
        raise SpecError(Problem(told, source, suggestion="a column turn counts the turns of each, from 0"))
    found = {"trajectory": trajectory}
    if columns["append_tokens"] is None and goes_on.any():
        beyond = np.diff(columns["prompt_tokens"][order]) - columns["response_tokens"][order][:-1]
        if (beyond[goes_on] >= 0).mean() > 0.5:  # else every turn begins anew, and what tools said is not told
            found["append_tokens"] = np.zeros(order.size, np.int64)
            found["append_tokens"][order[:-1][goes_on]] = np.maximum(beyond[goes_on], 0)
    return found


def _check_columns(frame: pl.DataFrame, source: str) -> None:
    """That the columns are there, and those that hold one value hold one."""
    if not frame.height:
        raise SpecError(Problem("holds no rows", source))
    if frame.width == 1 and (mark := next((each for each in ";\t|" if each in frame.columns[0]), None)):
        raise SpecError(Problem(f"its columns stand apart by {mark!r}", source, 1, "write commas, or JSON lines"))
    problems = []
    for name in NEEDED:
        if name not in frame.columns:
            others = [each for each in frame.columns if each not in PLAIN]
            alike = next((each for each in others if each.strip().lower().startswith(_BEGINS[name])), None)
            hint = f"rename {alike}" if alike else did_you_mean(name, others)
            found = ", ".join(frame.columns[:12])
            problems.append(Problem(f"column {name} is missing; found {found}", source, None, hint))
    caps = frame[_CAP].drop_nulls() if _CAP in frame.columns else None
    if caps is not None and caps.n_unique() > 1:
        several = ", ".join(map(str, caps.unique().sort()[:5]))
        problems.append(Problem(f"column {_CAP} holds several values ({several}): a recording has one", source))
    if caps is not None and caps.len() and not (caps.dtype.is_numeric() and caps.is_between(1, MOST_COUNT).all()):
        problems.append(Problem(f"column {_CAP} must be at least 1 and at most {MOST_COUNT:,}", source))
    if "turn" in frame.columns and "trajectory" not in frame.columns and (frame["turn"] != frame["turn"][0]).any():
        problems.append(Problem("column turn says nothing without a column trajectory, whose turns they are", source))
    if problems:
        raise SpecError(problems)


def _numbers(column: pl.Series) -> tuple[pl.Series, Mask, list[str]]:
    """A column as numbers, also where it holds them as text or floats (pandas'); where it is damaged, and how."""
    import polars as pl

    name, due = column.name, "numbers" if column.name in OPTIONAL_FLOAT else "whole numbers"
    if not (column.dtype.is_numeric() or column.dtype in (pl.String, pl.Null)):
        return column, np.ones(column.len(), bool), [f"column {name} must hold {due} (given: {column[0]!r})"]
    bare = column.str.strip_chars() if column.dtype == pl.String else column
    found = bare.cast(pl.Float64, strict=False)
    whole = found.is_not_nan() if due == "numbers" else (found % 1 == 0) & (found.abs() < 2.0**53)
    fits = found.is_between(name in NEEDED, MOST_COUNT)
    empty, number = column.is_null().to_numpy(), whole.fill_null(False).to_numpy()
    damaged = empty | ~number | ~fits.fill_null(False).to_numpy()
    least = "at least 1 token" if name in NEEDED else "at least 0"
    told = [
        f"column {name} has an empty cell" if empty[row]
        else f"column {name} must be {least} and at most {MOST_COUNT:,}" if number[row]
        else f"column {name} must hold {due} (given: {column[int(row)]!r})"
        for row in np.flatnonzero(damaged)
    ]  # fmt: skip
    kept = found if due == "numbers" else pl.Series(name, np.where(damaged, -1, found.fill_null(-1)).astype(np.int64))
    return kept, damaged, told
