"""A sweep as tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlperf.sweep import SweepResult
from rlperf.units import human_seconds

if TYPE_CHECKING:
    from rich.console import Console

BEST = 10
"""Rows of the table."""


def cell(name: str, value: Any) -> str:
    """A value of a results column for people."""
    if value is None:
        return "-"
    if name.endswith("_s"):
        return human_seconds(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def best_rows(found: SweepResult, most: int = BEST) -> tuple[list[str], list[list[str]]]:
    """Names and cells of the best points."""
    names = [*found.checked.varied, "step_s", "low_s", "high_s", "bottleneck", "devices"]
    if found.frame["usd_per_step"].null_count() < found.frame.height:
        names.insert(-2, "usd_per_step")
    ranked = found.frame.filter(found.frame["status"] == "ok").sort("objective_value", maintain_order=True).head(most)
    return names, [[cell(name, row[name]) for name in names] for row in ranked.to_dicts()]


def reason_rows(found: SweepResult, most: int = BEST) -> list[tuple[str, str, int]]:
    """(status, reason, points) of what has no result, most frequent first."""
    rest = found.frame.filter(found.frame["status"] != "ok")
    counted = rest.group_by("status", "reason", maintain_order=True).len().sort("len", descending=True).head(most)
    return [(status, reason, count) for status, reason, count in counted.iter_rows()]


def print_sweep(found: SweepResult, out: Console) -> None:
    """How many points have results, the best of them, and why others have none."""
    from rich.table import Table

    counts = ", ".join(f"{count:,} {status}" for status, count in found.counts.items())
    out.print(f"[bold]{found.checked.sweep.name}[/bold]: {found.frame.height:,} points, {counts}")
    names, rows = best_rows(found)
    if rows:
        table = Table(title="best points, by the job's objective", title_justify="left")
        for name in names:
            table.add_column(name.rpartition(".")[2])
        for row in rows:
            table.add_row(*row)
        out.print(table)
    for status, reason, count in reason_rows(found):
        out.print(f"{count:>9,} {status}: {reason}")
