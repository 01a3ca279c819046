"""A sweep as tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlperf.report.style import short
from rlperf.specs.objectives import OBJECTIVES
from rlperf.sweep import SweepResult
from rlperf.units import human_seconds

if TYPE_CHECKING:
    from rich.console import Console

BEST = 3
"""Points in the table."""


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
    """Heads and cells of the best points."""
    names = [*found.checked.varied, "rl_step_s", "bottleneck", "devices"]
    frame = found.having([*names, "usd_per_step", "status", "objective_value", "low_s", "high_s"]).frame
    if frame["usd_per_step"].null_count() < frame.height:
        names.insert(-2, "usd_per_step")
    ranked = frame.filter(frame["status"] == "ok").sort("objective_value", maintain_order=True).head(most)
    rows = []
    for row in ranked.to_dicts():
        cells = [cell(name, row[name]) for name in names]
        cells[names.index("rl_step_s")] += f" ({cell('_s', row['low_s'])} .. {cell('_s', row['high_s'])})"
        rows.append(cells)
    heads = ["rl_step" if n == "rl_step_s" else "USD" if n == "usd_per_step" else short(n) for n in names]
    return heads, rows


QUESTIONS = ("prompts_per_step", "group_size", "max_response_tokens", "max_prompt_tokens", "workload", "architecture")


def unlike(found: SweepResult) -> str | None:
    """A warning where the points do not all do the same work, so that the fastest is only the smallest."""
    asking = [path for path in found.checked.varied if path.rpartition(".")[2] in QUESTIONS]
    frame = found.having(asking).frame
    varied = [short(path) for path in asking if frame[path].n_unique() > 1]
    asked = found.checked.base.get("objective", {}).get("minimize")
    if not varied or "ok" not in found.counts or (asked in OBJECTIVES and OBJECTIVES[asked].per_token):
        return None
    named = ", ".join(varied)
    return f"points differ in {named}: they do not do the same work (objective token_time compares per token)"


def reason_rows(found: SweepResult, most: int = 10) -> list[tuple[str, str, int]]:
    """(status, reason, points) of what has no result, most frequent first."""
    frame = found.having(["status", "reason"]).frame
    rest = frame.filter(frame["status"] != "ok")
    counted = rest.group_by("status", "reason", maintain_order=True).len().sort("len", descending=True).head(most)
    return [(status, reason, count) for status, reason, count in counted.iter_rows()]


def print_sweep(found: SweepResult, out: Console) -> None:
    """How many points have results, the best of them, and why others have none."""
    from rich.table import Table

    counts = ", ".join(f"{count:,} {status}" for status, count in found.counts.items())
    out.print(f"[bold]{found.checked.sweep.name}[/bold]: {found.checked.points:,} points, {counts}")
    names, rows = best_rows(found)
    if rows:
        table = Table(title="best points, by the job's objective", title_justify="left", show_header=False)
        for name, *cells in zip(names, *rows, strict=True):
            table.add_row(name, *cells)
        out.print(table)
    warning = unlike(found)
    if warning:
        out.print(warning)
    for status, reason, count in reason_rows(found):
        out.print(f"{count:>9,} {status}: {reason}")
