"""Columns of tables of measurements, declared once: name, kind, and what stands in where a cell was not published.

A table's reader is a frozen class whose fields say, in the order in which they are found, where each comes from::

    @dataclass(frozen=True)
    class Timing(Reading):
        devices: int = column(count, 1, name="n_gpus")
        zero_stage: int = column(whole, lambda row: Guess(3 if row.devices > 1 else 0, "the framework's"))
        replica: int = derived(lambda row: min(row.devices, 8))

    timing = read(Timing, row)

A blank cell gives the default: a value (silent), a `Guess` (named in ``assumed``), or a function of what was found so
far that returns either. A column without a default is needed; `SpecError` says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Generic, TypeVar, cast, overload

from rlperf.calibrate.tables import Refusal, Row, Table
from rlperf.errors import Problem, SpecError, did_you_mean
from rlperf.units import LEAST, MOST, MOST_COUNT

T = TypeVar("T")
Read = TypeVar("Read", bound="Reading")

BLANK = frozenset({"", "n/a", "na", "nan", "-", "?"})
"""How tables write that a value is not published."""


@dataclass(frozen=True)
class Guess(Generic[T]):
    """A value that stands in for one that was not published, and why that one."""

    value: T
    why: str = ""


@dataclass(frozen=True)
class Assumed:
    """A `Guess` as it was made: for which column, and whether the table has that column at all."""

    column: str
    value: object
    why: str
    in_table: bool

    def __str__(self) -> str:
        shown = f"{self.value:g}" if isinstance(self.value, float) else str(self.value)
        why = [self.why, "" if self.in_table else "no such column"]
        return f"{self.column}={shown}" + (f" ({', '.join(filter(None, why))})" if any(why) else "")


@dataclass(frozen=True, eq=False)
class Reading:
    """A row as read: what it is, and the guesses behind it."""

    row: Row
    guesses: tuple[Assumed, ...]

    @property
    def row_id(self) -> str:
        """Name of the row."""
        return self.row.row_id

    @property
    def group(self) -> str:
        """Group of the row."""
        return self.row.group

    @property
    def assumed(self) -> tuple[str, ...]:
        """What was filled in, as text."""
        return (*filter(None, [self.row.shape_note()]), *map(str, self.guesses))

    @property
    def blanks(self) -> int:
        """Cells that the table has and the row leaves blank, and that were filled in."""
        return sum(guess.in_table for guess in self.guesses)


@dataclass(frozen=True)
class _Source:
    """Where a field comes from: a cell of a column, or what was found before it."""

    name: str
    parse: Callable[[str], object] | None
    default: object


@overload
def column(parse: Callable[[str], T], *, name: str = "") -> T: ...
@overload
def column(parse: Callable[[str], T], default: None, *, name: str = "") -> T | None: ...
@overload
def column(
    parse: Callable[[str], T], default: T | Guess[T] | Callable[[Any], T | Guess[T]], *, name: str = ""
) -> T: ...
def column(parse: Callable[[str], T], default: object = MISSING, *, name: str = "") -> object:
    """A field read from the column of its own name (or of ``name``); see the module for ``default``."""
    return field(metadata={"source": _Source(name, parse, default)})


def derived(find: Callable[[Any], T | Guess[T]], *, name: str = "") -> T:
    """A field worked out from the ones before it; a `Guess` is noted under ``name``, by default the field's."""
    return cast("T", field(metadata={"source": _Source(name, None, find)}))


def read(kind: type[Read], row: Row, **given: object) -> Read:
    """The row as an instance of ``kind``; ``given`` are fields that are no column.

    Raises
    ------
    SpecError : a cell that is not of its column's kind, a needed one that is blank, or what a function raises
    """
    found = object.__new__(kind)
    guesses: list[Assumed] = []
    object.__setattr__(found, "row", row)
    for entry in fields(kind):
        source = entry.metadata.get("source")
        if isinstance(source, _Source):
            name = source.name or entry.name
            value = _value(source, name, found)
            if isinstance(value, Guess):
                guesses.append(Assumed(name, value.value, value.why, source.parse is None or name in row.cells))
                value = value.value
            object.__setattr__(found, entry.name, value)
        elif entry.name not in ("row", "guesses"):
            object.__setattr__(found, entry.name, given[entry.name])
    object.__setattr__(found, "guesses", tuple(guesses))
    return found


def read_all(kind: type[Read], table: Table, **given: object) -> tuple[list[Read], list[Refusal]]:
    """Rows of a table that can be read, and the others with the reason."""
    rows: list[Read] = []
    refused: list[Refusal] = []
    for row in table:
        try:
            rows.append(read(kind, row, **given))
        except SpecError as error:
            refused.append(Refusal.of(row, error))
    return rows, refused


def _value(source: _Source, name: str, found: Reading) -> object:
    text = stated(found.row, name) if source.parse is not None else ""
    if text and source.parse is not None:
        return _parsed(found.row, name, text, source.parse)
    if source.default is MISSING:
        raise SpecError(Problem(f"{name} is not published", line=found.row.line or None))
    return source.default(found) if callable(source.default) else source.default


def cell(row: Row, name: str, parse: Callable[[str], T]) -> T | None:
    """The cell as ``parse`` reads it, None where it is blank: for functions that look at a column before its turn.

    Raises
    ------
    SpecError : the cell is not of that kind; names the column, the text and the line
    """
    text = stated(row, name)
    return _parsed(row, name, text, parse) if text else None


def _parsed(row: Row, name: str, text: str, parse: Callable[[str], T]) -> T:
    try:
        return parse(text)
    except SpecError:
        raise
    except ValueError as error:
        raise SpecError(Problem(f"{name} {text!r} is {error}", line=row.line or None)) from None


def stated(row: Row, name: str) -> str:
    """The cell, or nothing where it is blank in any of the ways that tables write it."""
    text = row.text(name)
    return "" if text.lower() in BLANK else text


# -- kinds of cells: they raise a ValueError that says what the text is not -------------------------------------------


def text(cell: str) -> str:
    """The text as it stands."""
    return cell


def number(cell: str) -> float:
    """A finite number, not negative: no column holds a quantity that could be below zero."""
    try:
        value = float(cell)
    except ValueError:
        raise ValueError("not a number") from None
    if not math.isfinite(value):
        raise ValueError("not a finite number")
    if abs(value) > MOST or 0 < value < LEAST:
        raise ValueError("beyond any quantity")
    if value < 0:
        raise ValueError("negative")
    return value


def positive(cell: str) -> float:
    """A number above zero."""
    value = number(cell)
    if value == 0:
        raise ValueError("not above zero")
    return value


def whole(cell: str) -> int:
    """A whole number, not negative (flags too)."""
    value = number(cell)
    if value != int(value) or value > MOST_COUNT:
        raise ValueError("not a whole number" if value <= MOST_COUNT else "beyond any count")
    return int(value)


def count(cell: str) -> int:
    """A positive whole number."""
    value = number(cell)
    if value < 1 or value != int(value) or value > MOST_COUNT:
        raise ValueError("not a positive whole number" if value <= MOST_COUNT else "beyond any count")
    return int(value)


Number = TypeVar("Number", int, float)


def _at_most(value: Number, most: int, whose: str, unit: str) -> Number:
    if value > most:
        raise ValueError(f"beyond any {whose}: at most {most:,} {unit}")
    return value


MOST_DEVICES = 1 << 17
"""Devices of one run: each replica of it is simulated, so that a slip of the pen must not ask for a million."""


def devices_of(cell: str) -> int:
    """A positive whole number of devices."""
    return _at_most(count(cell), MOST_DEVICES, "cluster", "devices")


MOST_TOKENS = 1 << 19
"""Tokens of one sequence of a rollout: an engine_step a token is simulated; the longest measured have 65,536."""


def tokens_of(cell: str) -> float:
    """A number of tokens above zero, of one sequence."""
    return _at_most(positive(cell), MOST_TOKENS, "rollout", "tokens")


def flag(cell: str) -> bool:
    """0 or 1."""
    if number(cell) not in (0.0, 1.0):
        raise ValueError("neither 0 nor 1")
    return float(cell) == 1.0


def one_of(names: Sequence[str]) -> Callable[[str], str]:
    """One of some names, whatever their case."""

    def parse(cell: str) -> str:
        name = cell.lower()
        if name not in names:
            hint = did_you_mean(name, names)
            raise ValueError(f"none of {', '.join(names)}" + (f": {hint}" if hint else ""))
        return name

    return parse
