"""An rl_step as bars: in the terminal, and as a figure of pools and ranks along time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rlperf.report.style import new_figure, saved
from rlperf.sim.rl_step import timeline as tl
from rlperf.sim.rl_step.timeline import Timeline
from rlperf.units import human_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from rlperf.plan.judge.timeline import StepView

WIDTH = 36
_RULES = 13
"""Letters that a table of four columns spends on rules and padding."""
COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#D55E00", "#E69F00", "#CC79A7", "#999999", "#999999", "#BBBBBB",
           "#BBBBBB", "#666666")  # fmt: skip
"""Okabe and Ito's palette by stage code, as in the figure of a plan."""


def shown(timeline: Timeline) -> Timeline:
    """One rl_step from the middle of the steady state, and what else runs meanwhile, moved to begin at 0."""
    ends = timeline.step_ends_s
    index = max(min((timeline.warmup + ends.size) // 2, ends.size - 2), 0)
    last = float(ends[index])
    first = float(ends[index - 1]) if index else float(timeline.start_s.min())
    kept = (timeline.end_s > first) & (timeline.start_s < last)
    return Timeline(
        stage=timeline.stage[kept],
        pool=timeline.pool[kept],
        rank=timeline.rank[kept],
        start_s=np.maximum(timeline.start_s[kept] - first, 0.0),
        end_s=np.minimum(timeline.end_s[kept], last) - first,
        rl_step=timeline.rl_step[kept],
        pools=timeline.pools,
        pool_devices=timeline.pool_devices,
    )


def bar(start_s: float, end_s: float, whole_s: float, width: int = WIDTH) -> str:
    """A bar on a line of ``width`` characters; what lasts at all is at least one character.

    >>> bar(0.0, 5.0, 10.0, 10), bar(9.99, 10.0, 10.0, 10)
    ('#####     ', '         #')
    """
    first = min(int(start_s / whole_s * width), width - 1) if whole_s > 0 else 0
    last = max(int(np.ceil(end_s / whole_s * width)), first + 1) if whole_s > 0 else 0
    return (" " * first + "#" * (last - first)).ljust(width)[:width]


def timeline_lines(timeline: Timeline, screen: int | None = None) -> list[tuple[str, str, str, str]]:
    """(pool, stage, seconds, bar) of one rl_step, in the order of begin; ranks of a stage share a line.

    ``screen`` : letters of a line of the table; None: bars have `WIDTH`
    """
    one = shown(timeline)
    if not one.spans:
        return []
    whole = float(one.end_s.max())
    keys = sorted({(int(p), int(s), int(k)) for p, s, k in zip(one.pool, one.stage, one.rl_step, strict=True)})
    lines = []
    for pool, stage, step in keys:
        mask = (one.pool == pool) & (one.stage == stage) & (one.rl_step == step)
        start, end = float(one.start_s[mask].min()), float(one.end_s[mask].max())
        name = tl.STAGES[stage].replace("_", " ")
        lines.append((start, one.pools[pool], name, human_seconds(end - start), end))
    rest = sum(max(len(str(line[k])) for line in lines) for k in (1, 2, 3)) + _RULES
    width = WIDTH if screen is None else max(min(screen - rest, WIDTH), 1)
    return [(pool, stage, took, bar(start, end, whole, width)) for start, pool, stage, took, end in sorted(lines)]


def print_step(view: StepView, screen: Console) -> None:
    """Bars of the rl_step, idle devices by pool, and what holds it back now and next."""
    from rich.table import Table

    table = Table("pool", "stage", "time", f"one rl_step, {human_seconds(view.timeline.rl_step_s)}")
    for line in timeline_lines(view.timeline, screen.width):
        table.add_row(*line)
    screen.print(table)
    idle = ", ".join(f"{name} {100 * share:.0f} %" for name, share in view.idle_share.items())
    screen.print(f"devices idle: {idle}")
    if view.bottlenecks:
        gains = ", ".join(f"{one.stage.replace('_', ' ')} {100 * one.share:.0f} %" for one in view.bottlenecks[:3])
        screen.print(f"the rl_step would be shorter without: {gains}")
    if view.following:
        nxt = view.following
        screen.print(
            f"with {nxt.first.replace('_', ' ')} {nxt.speedup:.1f} times as fast ({human_seconds(nxt.rl_step_s)}), "
            f"{nxt.stage.replace('_', ' ')} is next"
        )


MOST_RANKS = 16
"""Lines per pool; of more ranks, those that end last, evenly thinned."""


def step_figure(timeline: Timeline, *, title: str = "", form: str = "svg") -> bytes:
    """Pools and ranks along time, a colour a stage.

    Parameters
    ----------
    form : svg or png
    """
    from matplotlib.patches import Patch

    one = shown(timeline)
    rows = _rows(one, MOST_RANKS)
    figure = new_figure(9.0, 1.4 + 0.26 * max(len(rows), 1))
    axes = figure.subplots()
    for place, (pool, rank) in enumerate(rows):
        mask = (one.pool == pool) & (one.rank == rank)
        for stage, start, end in zip(one.stage[mask], one.start_s[mask], one.end_s[mask], strict=True):
            axes.broken_barh([(start, end - start)], (place - 0.4, 0.8), color=COLOURS[int(stage)], linewidth=0)
    axes.set_yticks(range(len(rows)), [f"{one.pools[pool]} {rank}" for pool, rank in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    stages = sorted(set(one.stage.tolist()))
    handles = [Patch(color=COLOURS[s], label=tl.STAGES[s].replace("_", " ")) for s in stages]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 6), fontsize=7, frameon=False)
    axes.set_title(title)
    return saved(figure, form)


def _rows(one: Timeline, most: int) -> list[tuple[int, int]]:
    """(pool, rank) lines: all ranks of a small pool, of a large one an even selection by when they end."""
    rows = []
    for pool in range(len(one.pools)):
        ranks = np.unique(one.rank[one.pool == pool])
        if ranks.size > most:
            ends = np.array([one.end_s[(one.pool == pool) & (one.rank == rank)].max() for rank in ranks])
            order = ranks[np.argsort(-ends, kind="stable")]
            ranks = np.sort(order[np.linspace(0, order.size - 1, most).astype(int)])
        rows += [(pool, int(rank)) for rank in ranks]
    return rows
