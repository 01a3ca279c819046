"""Figures of a sweep: response to one field with intervals, scaling with its bottleneck, Pareto fronts, heat maps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlperf.report.style import (
    LINES,
    MARKERS,
    PALETTE,
    STAGE_COLOURS,
    WIDE,
    Drawing,
    new_figure,
    short,
    tidy,
)
from rlperf.specs.writer import write_atomic
from rlperf.sweep import SweepResult
from rlperf.units import human_seconds

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

MOST_SERIES = 6
MOST_CELLS = 40
MOST_DRAWN = 4_000
"""Points of a scatter that are drawn; the front is always complete."""


DRAWN = ("status", "rl_step_s", "low_s", "high_s", "usd_per_step", "device_s", "devices", "bottleneck")
"""Columns of results that figures show."""
CHOICES = ("pools.", "modes", "trainer_backends", "engine", "framework")
"""Fields that a planner would choose: figures show the best over them."""
RESOURCES = ("nodes", "cluster", "price", "pools.")
"""Fields that change what is paid for: a Pareto front runs over them too."""


def held(found: SweepResult, fine: pl.DataFrame, free: tuple[str, ...]) -> tuple[pl.DataFrame, str]:
    """Points with equal questions: fields that nobody would minimise over (batch, lengths, task, cluster) are held.

    Of numbers the largest value with a result is held, of names the first; ``free`` fields vary. Also says so in words.
    """
    words = []
    for path in found.checked.varied:
        if path in free or path.startswith(CHOICES) or fine[path].n_unique() < 2:
            continue
        value = fine[path].max() if fine[path].dtype.is_numeric() else fine[path].drop_nulls()[0]
        fine = fine.filter(fine[path] == value)
        words.append(f"{short(path)} {_label(value)}")
    return fine, ", ".join(words)


def sweep_drawings(found: SweepResult) -> list[Drawing]:
    """Every figure that the sweep's axes allow."""
    found = found.having([*found.checked.varied, *DRAWN])
    fine = found.frame.filter(found.frame["status"] == "ok")
    if not fine.height:
        return []
    made: list[Drawing] = []

    def add(name: str, caption: str, words: str, draw: Callable[[float], Figure]) -> None:
        made.append(Drawing(name, f"{caption} Held: {words}." if words else caption, draw))

    for path in [path for path in found.checked.varied if _numeric(fine, path)][:5]:
        other = _series(found, fine, path)
        part, words = held(found, fine, (path, *([other] if other else [])))
        by = f", one line per {short(other)}" if other else ""
        caption = f"Best rl_step at each {short(path)}{by}; bands are the 5th to 95th percentile."
        add(f"response_{_file(path)}", caption, words, lambda w, f=part, p=path, o=other: response(f, p, o, w))  # type: ignore[misc]
    batch = next((p for p in found.checked.varied if p.endswith("prompts_per_step") and _numeric(fine, p)), None)
    part, words = held(found, fine, ("nodes", *([batch] if batch else [])))
    if part["devices"].n_unique() > 1:
        caption = ("Best rl_step at each number of devices against ideal scaling from the first; the mark says which "
                   "stage takes longest there.")  # fmt: skip
        add("scaling", caption, words, lambda w, f=part: scaling(f, batch, w))  # type: ignore[misc]
    offered, said = held(found, fine, tuple(p for p in found.checked.varied if p.startswith(RESOURCES)))
    if offered.height > 2:
        caption = "Every point that can be run; the line joins those that no other beats in both."
        add("pareto", caption, said, lambda w: pareto(offered, w))
    for x, y in _planes(found):
        part, words = held(found, fine, (x, y))
        caption = f"Best rl_step over {short(x)} and {short(y)}; crossed out: no setting of the other fields fits."
        add(f"heat_{_file(x)}_{_file(y)}", caption, words,
            lambda w, f=part, a=x, b=y: heat_map(found, f, a, b, w))  # type: ignore[misc]  # fmt: skip
    return made


def write_sweep_figures(found: SweepResult, out: Path) -> list[Path]:
    """The figures of a sweep as SVG and PNG in the folder ``out``."""
    return [
        write_atomic(out / f"{drawing.name}.{form}", content)
        for drawing in sweep_drawings(found)
        for form, content in (("svg", drawing.svg), ("png", drawing.png))
    ]


def _file(path: str) -> str:
    return short(path).replace(" ", "_")


def _numeric(frame: pl.DataFrame, path: str) -> bool:
    return frame[path].dtype.is_numeric() and 2 <= frame[path].n_unique() <= 200


def _series(found: SweepResult, fine: pl.DataFrame, x: str) -> str | None:
    """The field whose values make the lines: few values, and the largest effect on the rl_step."""
    best, widest = None, 1.02
    for path in found.checked.varied:
        if path == x or not 2 <= fine[path].n_unique() <= MOST_SERIES:
            continue
        lows = fine.group_by(path).agg(fine_min()).get_column("rl_step_s")
        spread = float(lows.max() / lows.min())  # type: ignore[operator,arg-type]
        if spread > widest:
            best, widest = path, spread
    return best


def fine_min() -> pl.Expr:
    """The smallest rl_step of a group."""
    import polars as pl

    return pl.col("rl_step_s").min()


def _best_rows(frame: pl.DataFrame, by: str) -> pl.DataFrame:
    """The fastest row at each value of ``by``, ascending."""
    return frame.sort("rl_step_s", maintain_order=True).unique(by, keep="first", maintain_order=True).sort(by)


def _ratio_scale(values: np.ndarray) -> bool:
    return bool(values.min() > 0 and values.max() / values.min() >= 8)


def response(fine: pl.DataFrame, x: str, series: str | None, width: float) -> Figure:
    """Best rl_step (and USD where stated) over one field, with intervals."""
    priced = fine["usd_per_step"].null_count() == 0
    figure = new_figure(width, 3.2 * (2 if priced and width < WIDE else 1) + 0.6)
    shape = (1, 2) if priced and width >= WIDE else (2, 1) if priced else (1, 1)
    panels = figure.subplots(*shape, squeeze=False).ravel()
    groups = [None] if series is None else fine[series].unique(maintain_order=True).to_list()
    for index, value in enumerate(groups):
        part = _best_rows(fine if series is None else fine.filter(fine[series] == value), x)
        at, step = part[x].to_numpy(), part["rl_step_s"].to_numpy()
        style: dict[str, Any] = {
            "color": PALETTE[index], "marker": MARKERS[index], "linestyle": LINES[index % len(LINES)], "markersize": 5,
            "label": None if series is None else _label(value),
        }  # fmt: skip
        for axes, factor in zip(panels, [1.0, (part["usd_per_step"] / part["rl_step_s"]).to_numpy() if priced else 1.0],
                                strict=False):  # fmt: skip
            axes.plot(at, step * factor, **style)
            low, high = part["low_s"].to_numpy() * factor, part["high_s"].to_numpy() * factor
            axes.fill_between(at, low, high, color=PALETTE[index], alpha=0.15, linewidth=0)
    for axes, label in zip(panels, ("rl_step [s]", "USD per rl_step"), strict=False):
        _axis(axes, fine[x].unique().to_numpy(), short(x))
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0.0)
        tidy(axes)
    if series is not None:
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, title=short(series), fontsize="small", frameon=False, loc="outside upper center",
                      ncols=len(groups) if width >= WIDE else 3)  # fmt: skip
    return _thinned(figure)


def _axis(axes: Axes, values: np.ndarray, label: str) -> None:
    """A field along the horizontal axis: on a ratio scale its own values."""
    values = np.sort(values)
    if _ratio_scale(values):
        axes.set_xscale("log", base=2)
        axes.set_xticks(values, [f"{v:,.0f}" if v >= 10 else f"{v:g}" for v in values], fontsize="small")
        axes.minorticks_off()
    axes.set_xlabel(label)


def _thinned(figure: Figure) -> Figure:
    """The figure without labels of axes that would touch the one before them, as it is laid out."""
    figure.draw_without_rendering()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            last: Bbox | None = None
            for label in sorted(axis.get_ticklabels(), key=lambda text: text.get_position()):
                box = label.get_window_extent().padded(1.5)
                if not label.get_text() or not label.get_visible():
                    continue
                if last is not None and last.overlaps(box):
                    label.set_visible(False)
                else:
                    last = box
    return figure


def scaling(fine: pl.DataFrame, batch: str | None, width: float) -> Figure:
    """Strong scaling (the batch stays) and, where the batch varies with the devices, weak scaling."""
    weak = None if batch is None else _weak(fine, batch)
    count = 1 if weak is None else 2
    figure = new_figure(width, 3.4 * (count if width < WIDE else 1) + 0.6)
    panels = figure.subplots(*((1, count) if width >= WIDE else (count, 1)), squeeze=False).ravel()
    strong = fine if batch is None else fine.filter(fine[batch] == fine[batch].max())
    _scaling_line(panels[0], _best_rows(strong, "devices"), -1.0)
    kept = "" if batch is None else f", {_label(fine[batch].max())} prompts"
    panels[0].set_title(f"strong scaling{kept}", fontsize="medium")
    if weak is not None:
        _scaling_line(panels[1], weak, 0.0)
        per = weak[str(batch)][0] / weak["devices"][0]
        panels[1].set_title(f"weak scaling, {per:g} prompts per device", fontsize="medium")
    return _thinned(figure)


def _weak(fine: pl.DataFrame, batch: str) -> pl.DataFrame | None:
    """The longest line of points with as many prompts per device; None where no two share it."""
    ratio = (fine[batch] / fine["devices"]).alias("ratio")
    frame = fine.with_columns(ratio)
    best = None
    for value in frame["ratio"].unique().sort().to_list():
        rows = _best_rows(frame.filter(frame["ratio"] == value), "devices")
        if rows.height > (1 if best is None else best.height):
            best = rows
    return best


def _scaling_line(axes: Axes, rows: pl.DataFrame, slope: float) -> None:
    devices, values = rows["devices"].to_numpy().astype(float), rows["rl_step_s"].to_numpy()
    ideal = values[0] * (devices / devices[0]) ** slope
    axes.plot(devices, ideal, color="black", linestyle="--", linewidth=1.0, label="ideal")
    axes.plot(devices, values, color=PALETTE[6], linewidth=1.2, zorder=1)
    axes.fill_between(devices, rows["low_s"].to_numpy(), rows["high_s"].to_numpy(), color=PALETTE[6], alpha=0.15)
    stages = rows["bottleneck"].to_list()
    for index, stage in enumerate(dict.fromkeys(stages)):
        mask = np.array([other == stage for other in stages])
        axes.scatter(devices[mask], values[mask], color=STAGE_COLOURS[stage], marker=MARKERS[index], s=46, zorder=3,
                     label=f"most in {stage.replace('_', ' ')}")  # fmt: skip
    if slope:
        axes.set_yscale("log", base=2)
        axes.set_yticks(values, [human_seconds(value) for value in values], fontsize="small")
        axes.minorticks_off()
    else:
        axes.set_ylim(bottom=0.0)
    _axis(axes, devices, "devices")
    axes.set_ylabel("rl_step" if slope else "rl_step [s]")
    axes.legend(fontsize="small", frameon=False)
    tidy(axes)


def front(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Points that no other one beats in both, by the first ascending.

    >>> front(np.array([1.0, 2.0, 3.0, 2.5]), np.array([9.0, 5.0, 5.0, 4.0])).tolist()
    [0, 1, 3]
    """
    order = np.lexsort((second, first))
    best = np.minimum.accumulate(second[order])
    kept = np.ones(len(order), dtype=np.bool_)
    kept[1:] = second[order][1:] < best[:-1]
    return np.asarray(order[kept])


def pareto(fine: pl.DataFrame, width: float) -> Figure:
    """rl_step against its price (device-seconds where no price is stated), with the front."""
    priced = fine["usd_per_step"].null_count() == 0
    column, label = ("usd_per_step", "USD per rl_step") if priced else ("device_s", "device-seconds per rl_step")
    step, price = fine["rl_step_s"].to_numpy(), fine[column].to_numpy()
    figure = new_figure(width, 4.0)
    axes = figure.subplots()
    drawn = np.unique(np.linspace(0, len(step) - 1, min(len(step), MOST_DRAWN)).astype(int))
    counts = fine["devices"].to_numpy()
    many = len(np.unique(counts)) > MOST_SERIES
    for index, count in enumerate([None] if many else np.unique(counts)):
        mask = drawn if count is None else drawn[counts[drawn] == count]
        axes.scatter(step[mask], price[mask], s=14, alpha=0.5, linewidth=0, color=PALETTE[index],
                     marker=MARKERS[index], label="all" if count is None else f"{count} devices")  # fmt: skip
    best = front(step, price)
    # rings, behind the points: their colours and shapes say how many devices
    axes.plot(step[best], price[best], color="black", marker="o", markersize=8, markerfacecolor="none",
              linewidth=1.0, zorder=0.9, label="front")  # fmt: skip
    axes.set_xlabel("rl_step [s]")
    axes.set_ylabel(label)
    if step.max() / step.min() > 20:
        axes.set_xscale("log")
        axes.set_yscale("log")
    axes.legend(fontsize="small", frameon=False)
    tidy(axes)
    return figure


def _planes(found: SweepResult) -> list[tuple[str, str]]:
    """Pairs of fields for heat maps: layouts of one role first, at most three."""
    able = [p for p in found.checked.varied if 2 <= found.frame[p].drop_nulls().n_unique() <= MOST_CELLS]
    layouts = [p for p in able if ".layout." in p]
    pairs = [(a, b) for i, a in enumerate(layouts) for b in layouts[i + 1 :] if a.split(".")[1] == b.split(".")[1]]
    if not pairs and len(able) >= 2:
        pairs = [(able[0], able[1])]
    return pairs[:3]


def heat_map(found: SweepResult, fine: pl.DataFrame, x: str, y: str, width: float) -> Figure:
    """Best rl_step over two fields, the time in each cell where it has room."""
    columns, rows = (found.frame[path].drop_nulls().unique().sort().to_list() for path in (x, y))
    values = np.full((len(rows), len(columns)), np.nan)
    cells = fine.group_by(x, y).agg(fine_min())
    for a, b, value in zip(cells[x], cells[y], cells["rl_step_s"], strict=True):
        if a is not None and b is not None:
            values[rows.index(b), columns.index(a)] = value
    from matplotlib.ticker import FixedLocator, FuncFormatter

    figure = new_figure(width, 1.4 + min(0.42 * len(rows), 7.0) + 0.4)
    axes = figure.subplots()
    image = axes.imshow(values, aspect="auto", cmap="cividis_r", origin="lower")
    for row, column in np.argwhere(np.isnan(values)):
        axes.plot(column, row, marker="x", color="#888888", markersize=7)
    for axis, labels in ((axes.xaxis, columns), (axes.yaxis, rows)):
        axis.set_ticks(range(len(labels)), [_label(value) for value in labels], fontsize="small")
    axes.set_xlabel(short(x))
    axes.set_ylabel(short(y))
    bar = figure.colorbar(image, ax=axes, label="best rl_step", shrink=0.9)
    bar.locator = FixedLocator(_round_times(float(np.nanmin(values)), float(np.nanmax(values))))
    bar.formatter = FuncFormatter(lambda value, _: human_seconds(value))
    bar.update_ticks()
    _write_cells(figure, axes, values)
    return _thinned(figure)


_ROUND_S = np.array([n * unit for unit, parts in ((1.0, (1, 2, 5, 10, 20, 30)), (60.0, (1, 2, 5, 10, 20, 30)),
                     (3600.0, (1, 2, 5, 10, 20, 50, 100, 200, 500))) for n in parts])  # fmt: skip


def _round_times(low: float, high: float) -> list[float]:
    """Whole seconds, minutes or hours [s] from ``low`` to ``high``, about five; the ends where that is too little.

    >>> _round_times(146.0, 1378.0), _round_times(3.02, 3.04)
    ([300.0, 600.0, 900.0, 1200.0], [3.02, 3.04])
    """
    step = float(_ROUND_S[min(int(np.searchsorted(_ROUND_S, (high - low) / 5)), _ROUND_S.size - 1)])
    found = [step * k for k in range(int(np.ceil(low / step)), int(high // step) + 1)]
    return found if len(found) > 1 else sorted({low, high})


def _write_cells(figure: Figure, axes: Axes, values: np.ndarray) -> None:
    """The time in each cell, in two lines where one does not fit, and nothing where neither does."""
    middle, found = np.nanmean(values), np.argwhere(~np.isnan(values))
    if len(found) > MOST_WRITTEN:
        return
    texts = [
        axes.text(column, row, human_seconds(float(values[row, column])), ha="center", va="center", fontsize="small",
                  linespacing=0.95, color="white" if values[row, column] > middle else "black")
        for row, column in found
    ]  # fmt: skip
    for words in (str, _in_two):
        for text in texts:
            text.set_text(words(text.get_text()))
        figure.draw_without_rendering()
        cell = axes.transData.transform([(0, 0), (1, 1)])
        wide, high = abs(cell[1] - cell[0])
        boxes = [text.get_window_extent() for text in texts]
        if all(box.width < wide and box.height < high for box in boxes):
            return
    for text in texts:
        text.remove()


MOST_WRITTEN = 400
"""Cells beyond which none is written in."""


def _in_two(words: str) -> str:
    """A time in two lines where it has two units.

    >>> _in_two("2 h 6 min").splitlines(), _in_two("41.2 s")
    (['2 h', '6 min'], '41.2 s')
    """
    parts = words.split(" ")
    return f"{' '.join(parts[:2])}\n{' '.join(parts[2:])}" if len(parts) > 2 else words


def _label(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)
