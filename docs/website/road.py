"""Draws docs/images/road.svg and walks.svg from the tables of docs/theory/road.md: python docs/website/road.py"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rlperf.report.style import PALETTE, new_figure, saved

DOCS = Path(__file__).resolve().parent.parent
PAGE = DOCS / "theory" / "road.md"
BLUE, ORANGE, GREEN, GREY = PALETTE[0], PALETTE[1], PALETTE[2], PALETTE[6]
SMALL, PLAIN = 7.5, 8.5


class Hop(NamedTuple):
    """One change of form: forms on both sides, and the function between."""

    source: str
    by: str
    target: str


def walks(page: str) -> list[tuple[str, list[Hop]]]:
    """Every walk of the page with its hops; a branch (hops that do not start at 1) begins as the walk before it."""
    found: list[tuple[str, list[Hop]]] = []
    title = ""
    for line in page.partition("## Three walks")[2].splitlines():
        if line.startswith("### "):
            title = line.removeprefix("### ").partition(",")[0]
        row = re.match(r"\| (\d) \| (.+?) \| `(.+?)` \| (.+?) \|$", line)
        if row:
            hop = Hop(row[2], row[3], row[4])
            if row[1] == "1":
                found.append((title, [hop]))
            elif len(found[-1][1]) >= int(row[1]):
                found.append((title, [*found[-1][1][: int(row[1]) - 1], hop]))
            else:
                found[-1][1].append(hop)
    return found


def _short(form: str) -> str:
    return form.strip("`").rpartition(".")[2] if form.startswith("`") else form


def _box(axes: Axes, x: float, y: float, text: str, colour: str, width: float, size: float = PLAIN) -> None:
    patch = {"boxstyle": "round,pad=0.35", "facecolor": colour, "alpha": 0.16, "edgecolor": colour}
    axes.text(x, y, " " * int(width), ha="center", va="center", fontsize=size, bbox=patch, family="monospace")
    axes.text(x, y, text, ha="center", va="center", fontsize=size)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = GREY) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": colour, "shrinkA": 0, "shrinkB": 0})


ENDS = ("of a trainer, to the exported file", "in rollout, to the seconds", "in training, to the seconds",
        "of device memory, to the seconds", "of the network, to the seconds")  # fmt: skip


def draw_walks(page: str) -> Figure:
    """A column per walk, downwards: forms in boxes, between them function and file."""
    found = walks(page)
    figure = new_figure(2.6 * len(found), 7.6)
    axes = figure.subplots()
    axes.set(xlim=(-0.5, len(found) - 0.5), ylim=(-6.4, 0.8))
    axes.axis("off")
    colours = {"A layout": ORANGE, "A length": BLUE, "A bandwidth": GREEN}
    for x, (title, hops) in enumerate(found):
        axes.text(x, 0.62, title, ha="center", fontsize=11, weight="bold", color=colours[title])
        axes.text(x, 0.38, ENDS[x], ha="center", fontsize=SMALL, color=colours[title])
        for y, form in enumerate([_short(hops[0].source), *(_short(hop.target) for hop in hops)]):
            _box(axes, x, -y, form, colours[title], 20)
        for y, hop in enumerate(hops):
            _arrow(axes, (x - 0.3, -y - 0.2), (x - 0.3, -y - 0.8), colours[title])
            module, _, name = hop.by.rpartition(".")
            if module.rpartition(".")[2][0].isupper():
                module, _, owner = module.rpartition(".")
                name = f"{owner}.{name}"
            file = module.removeprefix("rlperf.").replace(".", "/") + ".py"
            axes.text(x - 0.24, -y - 0.43, name, fontsize=SMALL, va="center", weight="bold")
            axes.text(x - 0.24, -y - 0.62, file, fontsize=6.5, va="center", color=GREY)
    return figure


CALLERS = ("plan", "predict", "size", "sweep", "compare", "replan", "explain", "simulate", "validate", "calibrate logs")


def draw_road(_page: str) -> Figure:
    """Who asks on the left; closed form above, events below; both meet in stage_seconds."""
    figure = new_figure(9.0, 3.9)
    axes = figure.subplots()
    axes.set(xlim=(0, 9), ylim=(0, 4))
    axes.axis("off")
    for index, name in enumerate(CALLERS):
        _box(axes, 0.7, 3.8 - 0.4 * index, name, GREY, 13, SMALL)
    _arrow(axes, (1.35, 2.0), (1.85, 2.0))
    rows = (
        (3.1, "screen", BLUE, ("counted_seconds", "closed_training"), "closed form: moments, a million candidates"),
        (0.9, "judge", ORANGE, ("simulated_rollout", "simulated_training"), "events: every length, one candidate"),
    )
    for y, who, colour, functions, words in rows:
        _arrow(axes, (1.9, 2.0), (2.15, y))
        _box(axes, 2.6, y, who, colour, 9)
        for dy, function in zip((0.3, -0.3), functions, strict=True):
            _arrow(axes, (3.1, y), (3.65, y + dy), colour)
            _box(axes, 4.5, y + dy, function, colour, 19)
            _arrow(axes, (5.4, y + dy), (6.1, 2.0), colour)
        axes.text(4.5, y + 0.68, words, ha="center", fontsize=SMALL, color=colour)
    _arrow(axes, (2.6, 2.8), (2.6, 1.2))
    axes.text(2.66, 2.0, "finalists", fontsize=SMALL, va="center", color=GREY)
    _box(axes, 6.8, 2.0, "stage_seconds", GREEN, 15)
    _arrow(axes, (7.5, 2.0), (7.8, 2.0), GREEN)
    _box(axes, 8.4, 2.0, "StageSeconds", GREEN, 13)
    axes.text(6.8, 1.62, "sync, movement, offload,", ha="center", fontsize=SMALL, color=GREY)
    axes.text(6.8, 1.42, "overheads; order by mode", ha="center", fontsize=SMALL, color=GREY)
    return figure


def figures(page: str) -> dict[str, bytes]:
    """Every figure of the page, by file name."""
    return {"road.svg": saved(draw_road(page)), "walks.svg": saved(draw_walks(page))}


if __name__ == "__main__":
    for name, drawn in figures(PAGE.read_text(encoding="utf-8")).items():
        (DOCS / "images" / name).write_bytes(drawn)
