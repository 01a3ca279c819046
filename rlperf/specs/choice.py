"""A value that the user pins, opens or leaves to the planner: a scalar, a list or range, or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, model_validator

from rlperf.errors import did_you_mean
from rlperf.specs.frozen import Frozen
from rlperf.units import MOST_COUNT, PositiveInt, token_count

MOST_VALUES = 10_000
"""An open value has at most this many alternatives; more is a typing error, not a search."""


class Range(Frozen):
    """``{min: 8, max: 64, factor: 2}`` or ``{min: 512, max: 4096, step: 512}``; both ends belong to it."""

    min: PositiveInt
    max: PositiveInt
    factor: float | None = None
    step: PositiveInt | None = None

    @model_validator(mode="after")
    def _sound(self) -> Range:
        if self.max < self.min:
            raise ValueError(f"max ({self.max}) is below min ({self.min})")
        if (self.factor is None) == (self.step is None):
            raise ValueError("give either factor or step")
        if self.factor is not None and self.factor <= 1:
            raise ValueError("factor must be above 1")
        return self

    def values(self) -> tuple[int, ...]:
        """Every value of the range, ascending.

        >>> Range(min=8, max=50, factor=2).values(), Range(min=1, max=7, step=3).values()
        ((8, 16, 32, 50), (1, 4, 7))
        """
        if self.step is not None:
            if (self.max - self.min) // self.step > MOST_VALUES:
                raise ValueError(f"the range has more than {MOST_VALUES} values")
            found = list(range(self.min, self.max + 1, self.step))
        else:
            found, value = [], float(self.min)
            while round(value) <= self.max and len(found) <= MOST_VALUES:
                found.append(round(value))
                value = max(value * (self.factor or 2.0), value + 1)
        if found[-1] != self.max:
            found.append(self.max)
        return tuple(dict.fromkeys(found))


def plain(given: Any) -> Any:
    """What a notebook has as a file states it: numbers and arrays of NumPy, columns and spans as Python's own.

    >>> plain({"nodes": range(1, 3), "price": 2.5})
    {'nodes': [1, 2], 'price': 2.5}
    """
    if isinstance(given, dict):
        return {name: plain(each) for name, each in given.items()}
    if isinstance(given, list | tuple | range):
        return [plain(each) for each in given]
    listed = getattr(given, "tolist", None) or getattr(given, "to_list", None)  # NumPy and pandas; polars
    return listed() if callable(listed) else given


def _values(given: Any) -> Any:
    """What stands in the file as a tuple of alternatives."""
    given = plain(given)
    if isinstance(given, dict):
        return Range.model_validate(given).values()
    if isinstance(given, Range):
        return given.values()
    if isinstance(given, list | tuple):
        if not given:
            raise ValueError("the list is empty: leave the field out to let the planner choose")
        if len(given) > MOST_VALUES:
            raise ValueError(f"the list has more than {MOST_VALUES} values")
        return _kept(tuple(given))
    return _kept((given,))


def _kept(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The alternatives, none of which may be a list or mapping of its own."""
    for value in values:
        if not isinstance(value, bool | int | float | str):
            raise ValueError(f"{value!r:.60} is no single value")
    return tuple(dict.fromkeys(values))


def _plain(values: tuple[Any, ...]) -> Any:
    return values[0] if len(values) == 1 else list(values)


def _positive(values: tuple[Any, ...]) -> tuple[int, ...]:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{value!r} is not a positive whole number")
    return _bounded(values)


def _natural(values: tuple[Any, ...]) -> tuple[int, ...]:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{value!r} is not a whole number of at least 0")
    return _bounded(values)


def _bounded(values: tuple[int, ...]) -> tuple[int, ...]:
    if max(values) > MOST_COUNT:
        raise ValueError(f"{max(values)!r:.30} is beyond any count: at most {MOST_COUNT:,}")
    return values


def _fraction(values: tuple[Any, ...]) -> tuple[float, ...]:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise ValueError(f"{value!r} is not a fraction above 0 and at most 1")
    return tuple(map(float, values))


def _ratio(values: tuple[Any, ...]) -> tuple[float, ...]:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= 16:
            raise ValueError(f"{value!r} is not a ratio of at least 1 and at most 16")
    return tuple(map(float, values))


def _open(check: Any, written: Any) -> tuple[BeforeValidator, PlainSerializer]:
    """``written`` : what may stand in a file, for its schema."""
    # Runs before pydantic's own tuple check, so that a message speaks of the value that the user wrote.
    return BeforeValidator(lambda given: check(_values(given)), json_schema_input_type=written), PlainSerializer(_plain)


def counted(given: Any) -> Any:
    """Tokens written as ``16k``, alone, in a list or as the ends of a range, as numbers; anything else as it is.

    >>> counted("16k"), counted(["4k", 8192]), counted({"min": "4k", "max": 16384, "factor": 2})
    (16384, [4096, 8192], {'min': 4096, 'max': 16384, 'factor': 2})
    """
    if isinstance(given, str):
        if (count := token_count(given)) is None:
            raise ValueError(f"{given!r} is not a number of tokens: write it as 16384 or 16k")
        return count
    if isinstance(given, list | tuple):
        return [counted(each) for each in given]
    if isinstance(given, Mapping):
        return {name: counted(each) for name, each in given.items()}
    return given


TOKENS = int | str | list[int | str] | Range
"""How numbers of tokens are written."""
Counts = Annotated[tuple[int, ...], *_open(_positive, int | list[int] | Range)]
"""One or several positive whole numbers."""
TokenCounts = Annotated[
    tuple[int, ...],
    BeforeValidator(lambda given: _positive(_values(counted(given))), json_schema_input_type=TOKENS),
    PlainSerializer(_plain),
]
"""The same of tokens, which may be written as ``16k``."""
TokenCount = Annotated[PositiveInt, BeforeValidator(lambda given: counted(given), json_schema_input_type=int | str)]
Naturals = Annotated[tuple[int, ...], *_open(_natural, int | list[int] | Range)]
"""One or several whole numbers of at least 0."""
Fractions = Annotated[tuple[float, ...], *_open(_fraction, float | list[float])]
"""One or several fractions in (0, 1]."""
Ratios = Annotated[tuple[float, ...], *_open(_ratio, float | list[float])]
"""One or several numbers of at least 1."""
Flags = Annotated[tuple[bool, ...], *_open(lambda values: values, bool | list[bool])]
"""One or both truth values."""
Words = Annotated[tuple[str, ...], *_open(lambda values: values, str | list[str])]
"""One or several names."""


def name_in(
    table: Mapping[str, object], what: str, several: str, meant: Mapping[str, str] | None = None
) -> tuple[Any, ...]:
    """What makes ``Annotated[str, ...]`` the name of a row of ``table``, which may grow: looked up at every reading.

    ``meant``: rows that other words stand for, to be suggested.
    """

    def known(name: str) -> str:
        if name not in table:
            other = (meant or {}).get(name)
            hint = f"did you mean {other}?" if other else did_you_mean(name, table)
            words = f"{several} are {', '.join(table)}"
            raise ValueError(f"there is no {what} {name!r}: {f'{hint} ' if hint else ''}{words}")
        return name

    def listed(schema: dict[str, Any]) -> None:
        schema["enum"] = list(table)

    return AfterValidator(known), Field(json_schema_extra=listed)
