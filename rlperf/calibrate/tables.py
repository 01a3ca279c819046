"""Tables of measurements: any CSV as text, with a name and a group for every row."""

from __future__ import annotations

import difflib
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from rlperf.errors import Problem, RlperfError, SpecError, did_you_mean
from rlperf.specs.architecture import Architecture
from rlperf.specs.hardware import Hardware, load_hardware
from rlperf.specs.profiles import architecture_reading, load_architecture
from rlperf.specs.reader import csv_rows, is_file, read_text
from rlperf.units import MOST, MOST_COUNT


@dataclass(frozen=True)
class Row:
    """One line of a table of measurements; a blank cell means *not published*."""

    row_id: str
    group: str
    line: int
    cells: Mapping[str, str]
    beside: Path | None = None

    def architecture(self, column: str = "architecture") -> Architecture:
        """The architecture that a cell names: a file of that name beside the table goes before the shipped ones.

        ``beside`` is the folder ``architectures`` next to the table's own. Shapes that exist only as rows of a
        measurement (layers cut off, sizes of papers) stand there and not in the catalogue.
        """
        return load_architecture(self._architecture_at(column))

    def shape_note(self) -> str:
        """Which shape stands for the architecture that the row names, where it is not the shape's own."""
        return architecture_reading(self._architecture_at("architecture")).note if self.text("architecture") else ""

    def _architecture_at(self, column: str) -> Path | str:
        name = self.text(column)
        file = self.beside / f"{name}.json" if self.beside else None
        return file if file and is_file(file) else name

    def hardware(self, cluster: str | None = None) -> Hardware:
        """The hardware of the device that the row names, in a cluster or else in the generic node."""
        return _hardware(self.text("gpu"), cluster)

    def text(self, column: str) -> str:
        """The cell, empty where it is blank or absent."""
        return (self.cells.get(column) or "").strip()

    def number(self, column: str) -> float | None:
        """The cell as a number, None where it is blank; `SpecError` where it is none, not finite or negative."""
        text = self.text(column)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            raise SpecError(Problem(f"{column} {text!r} is not a number", line=self.line)) from None
        if not 0 <= value <= MOST:
            what = "negative" if value < 0 else "beyond any quantity" if value < math.inf else "not a finite number"
            raise SpecError(Problem(f"{column} {text!r} is {what}", line=self.line))
        return value

    def measured(self, column: str) -> float:
        """The cell as a measurement; `SpecError` where it is blank or 0, too."""
        value = self.number(column)
        if not value:
            raise SpecError(Problem(f"{column} states no measurement", line=self.line))
        return value

    def count(self, column: str, default: int = 1, most: float = MOST_COUNT) -> int:
        """The cell as a positive whole number of at most ``most``, ``default`` where it is blank."""
        value = self.number(column)
        if value is None:
            return default
        if not 1 <= value <= most or value != int(value):
            raise SpecError(Problem(f"{column} {value:g} is not a positive whole number", line=self.line))
        return int(value)


_hardware = lru_cache(maxsize=64)(load_hardware)


@dataclass(frozen=True)
class Refusal:
    """A row that cannot sensibly be predicted, why, and the line it stands on where it is a line of a table."""

    row_id: str
    reason: str
    line: int | None = None

    @classmethod
    def of(cls, row: Row, error: RlperfError | str) -> Refusal:
        """The first problem and its suggestion; its place stays apart, so that equal reasons are counted together."""
        reason = str(error).split("\n")[0]
        if isinstance(error, SpecError):
            reason = str(replace(error.problems[0], file=None, line=None))
        return cls(row.row_id, reason, row.line or None)


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

    def need_one(self, *columns: str) -> None:
        """Raise a `SpecError` with the nearest column that the table has, unless it has one of these."""
        if any(name in self.columns for name in columns):
            return
        others = [name for name in self.columns if name not in ("row_id", "group")]
        near = [
            f"{close[0]} looks like {name}: call it so"
            for name in columns
            for word in (name, name.removeprefix("measured_"))
            if (close := difflib.get_close_matches(word, others, n=1))
        ]
        what = (
            f"none of the columns {', '.join(columns)} is there" if columns[1:] else f"column {columns[0]!r} is missing"
        )
        raise SpecError(Problem(what, self.file, 1, next(iter(near), None)))


def read_table(path: Path | str) -> Table:
    """Read a CSV of measurements; rows without a ``row_id`` get a hash of their cells, groups the file's name.

    Comment lines that begin with ``#`` are skipped.
    """
    file = Path(path)
    beside = file.absolute().parent.parent / "architectures"
    lines = list(csv_rows(read_text(file), file))
    if len(lines) < 2:
        raise SpecError(Problem("holds no rows", str(file)))
    header = tuple(name.strip() for name in lines[0][1])
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise SpecError(Problem(f"column {', '.join(twice)} stands twice", str(file), lines[0][0]))
    rows: list[Row] = []
    problems: list[Problem] = []
    for number, values in lines[1:]:
        if len(values) != len(header):
            problems.append(Problem(f"has {len(values)} cells for {len(header)} columns", str(file), number))
            continue
        cells = dict(zip(header, values, strict=True))
        name, group = cells.get("row_id") or row_hash(file.stem, values), cells.get("group") or file.stem
        rows.append(Row(name, group, number, cells, beside))
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
