"""Figures of sweeps can be read: labels never touch, and times are times."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from rlperf.report.style import NARROW, WIDE
from rlperf.report.sweep_figures import heat_map, response, scaling


class Found:
    """Of a result what a heat map reads."""

    def __init__(self, frame: pl.DataFrame) -> None:
        self.frame = frame


def frame(xs: list[Any], ys: list[Any]) -> pl.DataFrame:
    rows = [(x, y, 40.0 * (1 + i) * (1 + j) ** 2.3) for i, x in enumerate(xs) for j, y in enumerate(ys)]
    found = pl.DataFrame(rows, schema=["x", "y", "rl_step_s"], orient="row")
    step = found["rl_step_s"]
    return found.with_columns(
        low_s=step * 0.8, high_s=step * 1.3, usd_per_step=pl.lit(None, dtype=pl.Float64), devices=found["x"],
        bottleneck=pl.lit("rollout"),
    )  # fmt: skip


def touching(figure: Any) -> list[tuple[str, str]]:
    """Pairs of labels on one axis, and of words in cells, that overlap when drawn."""
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    found = []
    for axes in figure.axes:
        for labels in (axes.get_xticklabels(which="both"), axes.get_yticklabels(which="both"), axes.texts):
            shown = [text for text in labels if text.get_visible() and text.get_text()]
            boxes = [text.get_window_extent(renderer) for text in shown]
            found += [
                (shown[a].get_text(), shown[b].get_text())
                for a in range(len(boxes)) for b in range(a)
                if boxes[a].width and boxes[b].width and boxes[a].overlaps(boxes[b])
            ]  # fmt: skip
    return found


DENSE = [1024, 1100, 1300, 2048, 2100, 4096, 8192, 16384, 16500, 32768, 65536, 131072]


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("size", [(3, 4), (8, 8), (12, 40), (40, 3)])
def test_a_heat_map_says_times_and_nothing_touches(width: float, size: tuple[int, int]) -> None:
    xs, ys = ([1000 * (k + 1) for k in range(n)] for n in size)
    made = frame(xs, ys)
    figure = heat_map(Found(made), made, "x", "y", width)  # type: ignore[arg-type]
    assert not touching(figure)
    words = [text.get_text() for text in figure.axes[0].texts]
    if size == (3, 4):
        assert "40 s" in words and any("min" in word for word in words) and not any("e+" in word for word in words)


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_labels_of_close_values_do_not_touch(width: float) -> None:
    made = frame(DENSE, ["a"])
    assert not touching(response(made, "x", None, width))
    steps = made.with_columns(devices=pl.Series([8 * (k + 1) for k in range(len(DENSE))]),
                              rl_step_s=pl.Series([4000.0 / (k + 1) ** 0.8 for k in range(len(DENSE))]))  # fmt: skip
    assert not touching(scaling(steps, None, width))
