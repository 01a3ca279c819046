"""Leave one stack out: groups of rows, errors side by side, intervals from what the other groups missed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlperf.calibrate.leave_out import (
    ALL,
    GROUPS,
    LeftOutGroup,
    conformal,
    group_of,
    leave_out,
    missed,
    report_of,
    spread_of_others,
)
from rlperf.calibrate.tables import Row
from rlperf.calibrate.validate import PredictedFigure
from rlperf.errors import SpecError


def figures(name: str, ratios: list[float], width: float = 1.5) -> tuple[PredictedFigure, ...]:
    """Rows measured at 1 s whose predictions are off by a factor each."""
    return tuple(
        PredictedFigure(f"{name}{i}", name, "step_s", 1.0, ratio, ratio / width, ratio * width)
        for i, ratio in enumerate(ratios)
    )


def test_both_sides_are_summed_up_over_the_same_rows() -> None:
    groups = [
        LeftOutGroup("a", 2, figures("a", [1.1, 1.1, 1.1]), figures("a", [1.4, 1.4, 1.8])),
        LeftOutGroup("b", 0, figures("b", [0.9]), figures("b", [0.5]), borrowed="megatron"),
    ]
    found = {line.group: line for line in report_of("training", "x.csv", "device", groups).lines}
    assert (found["a"].seen.median, found["a"].left_out.median) == pytest.approx((10.0, 40.0))
    assert found["a"].left_out.inside == pytest.approx(2.0 / 3.0)
    assert found["a"].left_out.width == pytest.approx(100.0 * (1.5 - 1.0 / 1.5))
    assert found["b"].borrowed == "megatron"
    assert found[ALL].rows == 4
    assert found[ALL].left_out.mean == pytest.approx((40.0 + 40.0 + 80.0 + 50.0) / 4.0)
    assert found[GROUPS].left_out.mean == pytest.approx(((40.0 + 40.0 + 80.0) / 3.0 + 50.0) / 2.0)


def test_a_group_says_nothing_about_its_own_pooled_interval() -> None:
    groups = [LeftOutGroup(name, 1, (), figures(name, ratios)) for name, ratios in (("a", [2.0] * 9), ("b", [0.5]))]
    assert spread_of_others(groups, 0).low == pytest.approx(2.0)
    assert spread_of_others(groups, 1).high == pytest.approx(0.5)
    both = [*groups, LeftOutGroup("c", 1, (), figures("c", [1.0]))]
    spread = spread_of_others(both, 2)
    assert (spread.low, spread.high) == pytest.approx((0.5, 2.0))
    assert spread_of_others(groups[:1], 0).high == 1.0


def test_a_group_left_out_is_as_uncertain_as_leaving_the_others_out_has_cost() -> None:
    groups = [
        LeftOutGroup("a", 1, (), figures("a", [1.2] * 19 + [2.0], width=1.1)),
        LeftOutGroup("b", 1, (), figures("b", [1.1, 0.8], width=1.5)),
        LeftOutGroup("c", 1, (), (replace(figures("c", [1.0])[0], metric="train_s"),)),
    ]
    a, b, c = conformal(groups)
    # b is within its own intervals, however far that is: a stays; a's 90th percentile is 1.2 where it said 1.1
    assert a == groups[0]
    q = np.log(1.2) / np.log(1.1)
    assert [one.high / one.predicted for one in b.left_out] == pytest.approx([1.5**q] * 2)
    assert [one.low / one.predicted for one in b.left_out] == pytest.approx([1.5**-q] * 2)
    assert c == groups[2]  # no other group has its metric
    assert missed([figures("x", [1.0] * 99 + [9.0]), figures("y", [1.5], width=1.25)]) == pytest.approx(
        np.log(1.5) / np.log(1.25)
    )
    assert missed([()]) == 0.0


def test_groups_are_named_by_the_cells_of_a_row() -> None:
    cells = {"framework": "NeMo", "framework_version": "24.07", "gpu": "h100_sxm", "architecture": "Qwen3-30B-A3B"}
    row = Row("r", "g", 1, cells)
    names = [group_of(row, by) for by in ("framework", "version", "device", "family")]
    assert names == ["NeMo", "NeMo 24.07", "h100_sxm", "Qwen"]
    assert not group_of(Row("r", "g", 1, {**cells, "framework_version": ""}), "version")


@pytest.mark.parametrize(("kind", "by", "says"), [
    ("training", "devices", "device"), ("speculation", "device", "no fit"), ("kernel", "device", "unknown kind"),
    ("kernels.x", "device", "unknown kind"),
])  # fmt: skip
def test_what_cannot_be_left_out_is_refused(kind: str, by: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        leave_out(Path("x.csv"), kind, by)


def test_the_table_is_markdown_with_a_line_a_group() -> None:
    group = LeftOutGroup("a", 2, figures("a", [1.1]), figures("a", [1.4]), borrowed="nemo")
    lines = str(report_of("training", "x.csv", "device", [group])).splitlines()
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    assert any("| a | 1 | 2 | 10.0 %" in line and line.endswith("nemo |") for line in lines)
