"""What a sweep found: frozen, with its columns' meaning, as a frame, as plain data, and in a notebook."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlperf.errors import Problem, SpecError, did_you_mean
from rlperf.specs.given import as_path
from rlperf.specs.reader import read_spec, reading
from rlperf.sweep.columns import RESULTS, Column, columns_of
from rlperf.sweep.spec import Checked, Sweep, check_sweep

if TYPE_CHECKING:
    import polars as pl

MORE_IS_BETTER = frozenset({"tokens_per_s_per_device"})
"""Columns of results of which the largest is best."""
SHOWN = 20
"""Rows that a notebook shows."""
QUANTITIES = tuple(each.name for each in RESULTS if each.kind == "float" and each.name != "objective_value")
"""Columns of what is never negative: an objective may be."""


def _impossible(values: pl.Series) -> bool:
    """Whether a quantity holds what none can be; nothing is no such value.

    >>> import polars as pl
    >>> [_impossible(pl.Series([value, None, 1.0])) for value in (0.0, -1.0, float("inf"))]
    [False, True, True]
    """
    return values.dtype.is_float() and bool(((values < 0.0) | ~values.is_finite()).any())


@dataclass(frozen=True, eq=False)
class SweepResult:
    """Every point of a sweep.

    Attributes
    ----------
    checked : the sweep with its axes
    rows : one row per point, in order (`columns` says what is in it); left in their file until they are asked for
    folder : where the files are; None where the sweep kept none
    """

    checked: Checked
    rows: pl.LazyFrame
    folder: Path | None = None

    @cached_property
    def frame(self) -> pl.DataFrame:
        """Every row, in memory: a million points are half a gigabyte."""
        return self._collected(self.rows)

    def having(self, names: Iterable[str]) -> SweepResult:
        """The same points with some columns alone, in memory."""
        return replace(self, rows=self._collected(self.rows.select(list(dict.fromkeys(names)))).lazy())

    def _collected(self, rows: pl.LazyFrame) -> pl.DataFrame:
        if self.folder is None:
            return rows.collect()
        with reading(self.folder / "results.parquet"):
            found = rows.collect()
        if broken := [name for name in QUANTITIES if name in found.columns and _impossible(found[name])]:
            hint = "the file is damaged: run the sweep again into the same folder"
            message = f"{', '.join(broken)}: negative, or no finite number"
            raise SpecError(Problem(message, str(self.folder / "results.parquet"), suggestion=hint))
        return found

    @property
    def columns(self) -> tuple[Column, ...]:
        """Name, type, unit and meaning of every column."""
        return columns_of(self.checked)

    @property
    def counts(self) -> dict[str, int]:
        """Points by status, most frequent first."""
        found = self.having(["status"]).frame["status"].value_counts(sort=True)
        return dict(zip(found["status"].to_list(), found["count"].to_list(), strict=True))

    def to_frame(self) -> pl.DataFrame:
        """One row per point."""
        return self.frame

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the sweep, its columns and its rows."""
        return {
            "schema_version": 1,
            "name": self.checked.sweep.name,
            "method": self.checked.sweep.method,
            "points": self.checked.points,
            "counts": self.counts,
            "columns": [column._asdict() for column in self.columns],
            "rows": self.frame.to_dicts(),
        }

    def best(self, by: str = "objective_value") -> dict[str, Any] | None:
        """The row with the smallest ``by`` (of `MORE_IS_BETTER` the largest); None where no point has one."""
        types = self.rows.collect_schema()
        if by not in types:
            raise SpecError(Problem(f"the sweep has no column {by!r}", suggestion=did_you_mean(by, types)))
        if not types[by].is_numeric():
            raise SpecError(f"column {by!r} holds text, of which none is best")
        few = self.having(["point", "status", by]).frame
        fine = few.filter(few["status"] == "ok").drop_nulls(by)
        ranked = fine.sort(by, descending=by in MORE_IS_BETTER, maintain_order=True)
        return self._collected(self.rows.slice(ranked["point"][0], 1)).row(0, named=True) if ranked.height else None

    def __str__(self) -> str:
        counts = ", ".join(f"{count:,} {status}" for status, count in self.counts.items())
        return f"{self.checked.sweep.name}: {self.checked.points:,} points ({counts})"

    def _repr_html_(self) -> str:
        shown = [*self.checked.varied, "status", "rl_step_s", "low_s", "high_s", "usd_per_step", "bottleneck", "reason"]
        inner = self._collected(self.rows.select(shown).head(SHOWN))._repr_html_()
        return f"<p>{escape(str(self))}</p>{inner}"


def read_result(folder: Path | str) -> SweepResult:
    """A finished sweep from its folder."""
    import polars as pl

    folder = as_path(folder, "folder")
    if not (folder / "results.parquet").is_file():
        hint = "run the sweep to its end first" if (folder / "parts").is_dir() else None
        raise SpecError(Problem("holds no finished sweep", str(folder), suggestion=hint))
    checked = check_sweep(read_spec(folder / "sweep.json", Sweep))
    with reading(folder / "results.parquet"):
        rows = pl.scan_parquet(folder / "results.parquet", glob=False)
        there = rows.collect_schema().names()
    lost = [column.name for column in columns_of(checked) if column.name not in there]
    if lost:
        hint = "run the sweep again into the same folder"
        raise SpecError(Problem(f"lacks the columns {', '.join(lost)}", str(folder / "results.parquet"), None, hint))
    return SweepResult(checked, rows, folder)
