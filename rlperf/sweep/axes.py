"""Axes of a sweep: a list of values, or a range in equal steps, equal factors, or a number of points."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from rlperf.errors import did_you_mean
from rlperf.specs.frozen import Frozen

MOST_POINTS = 1_000_000
"""A sweep has at most this many points; more is a typing error, or work for several sweeps."""


class AxisRange(Frozen):
    """A range of numbers with both ends: give one of ``step``, ``factor`` or ``count``.

    ``count`` points lie at equal distances, with ``scale: log`` at equal ratios. Ends that are whole numbers make whole
    numbers; what rounding makes equal stands once.
    """

    min: int | float
    max: int | float
    step: int | float | None = Field(None, gt=0)
    factor: float | None = Field(None, gt=1)
    count: int | None = Field(None, ge=1, le=MOST_POINTS)
    scale: Literal["linear", "log"] = "linear"

    @model_validator(mode="after")
    def _sound(self) -> AxisRange:
        if not (math.isfinite(self.min) and math.isfinite(self.max)):
            raise ValueError("the ends of a range must be finite")
        if self.max < self.min:
            raise ValueError(f"the range is empty: max ({self.max}) is below min ({self.min})")
        if sum(value is not None for value in (self.step, self.factor, self.count)) != 1:
            raise ValueError("a range needs one of step, factor or count")
        if self.min <= 0 and (self.factor is not None or self.scale == "log"):
            raise ValueError("a range by factors must start above 0")
        if self.scale == "log" and self.count is None:
            raise ValueError("scale log needs count; by ratios write factor")
        return self

    def length(self) -> int:
        """About how many values there are, without making them.

        >>> AxisRange(min=1, max=10**9, step=1).length(), AxisRange(min=8, max=64, factor=2).length()
        (1000000000, 4)
        """
        if self.count is not None:
            return self.count
        if self.step is not None:
            return int((self.max - self.min) // self.step) + 1
        assert self.factor is not None
        return int(math.log(self.max / self.min) / math.log(self.factor) + 1e-9) + 1

    def values(self) -> tuple[int | float, ...]:
        """Every value, ascending.

        >>> AxisRange(min=8, max=50, factor=2).values(), AxisRange(min=1, max=7, step=3).values()
        ((8, 16, 32, 50), (1, 4, 7))
        >>> AxisRange(min=1, max=100, count=3, scale="log").values(), AxisRange(min=0.5, max=0.9, count=3).values()
        ((1, 10, 100), (0.5, 0.7, 0.9))
        """
        found = [float(self.min)]
        number = self.length()
        if self.count is not None:
            number = max(self.count - 1, 1)
            if self.scale == "log":
                found = [self.min * (self.max / self.min) ** (k / number) for k in range(self.count)]
            else:
                found = [self.min + (self.max - self.min) * k / number for k in range(self.count)]
        elif self.step is not None:
            found = [self.min + k * self.step for k in range(number)]
        elif self.factor is not None:
            found = [self.min * self.factor**k for k in range(number)]
        if found[-1] < self.max and self.count != 1:
            found.append(self.max)
        whole = isinstance(self.min, int) and isinstance(self.max, int) and not isinstance(self.step, float)
        return tuple(dict.fromkeys(round(value) if whole else float(f"{value:.12g}") for value in found))


def axis_length(given: Any) -> int:
    """How many values an axis has; raises ValueError with what is wrong."""
    if isinstance(given, dict):
        return _range(given).length()
    if isinstance(given, list | tuple):
        if not given:
            raise ValueError("the axis is empty: list at least one value")
        return len(given)
    return 1


def axis_values(given: Any) -> tuple[Any, ...]:
    """The values of an axis: of a range, of a list, or the one scalar; each once.

    >>> axis_values([64, 128, 64]), axis_values({"min": 1, "max": 3, "step": 1}), axis_values("math")
    ((64, 128), (1, 2, 3), ('math',))
    """
    if isinstance(given, dict):
        return _range(given).values()
    if isinstance(given, list | tuple):
        found: list[Any] = []
        for value in given:
            if not any(type(value) is type(other) and value == other for other in found[-64:]):
                found.append(value)
        return tuple(found)
    return (given,)


def _range(given: dict[str, Any]) -> AxisRange:
    try:
        return AxisRange.model_validate(given)
    except ValidationError as error:
        words = []
        for item in error.errors(include_url=False):
            where = ".".join(str(part) for part in item["loc"] if part not in ("int", "float"))
            text = item["msg"].removeprefix("Value error, ")
            if item["type"] == "extra_forbidden":
                hint = did_you_mean(where, AxisRange.model_fields)
                text = "unknown field" + (f", {hint}" if hint else f" of a range ({', '.join(AxisRange.model_fields)})")
            words.append(f"{where}: {text}" if where else text)
        raise ValueError("; ".join(dict.fromkeys(words))) from error
