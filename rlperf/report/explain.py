"""Figure of an explanation: the critical path by activity, what each cause costs, and scaling where there is any."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlperf.diagnose.explain import Explanation
from rlperf.diagnose.scaling import ScalingExplanation
from rlperf.report.style import new_figure, saved
from rlperf.units import human_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#999999", "#F0E442")
MOST_CAUSES = 12
SHOWN = 0.005
"""Share of the rl_step above which an activity is named in the legend."""


def explain_figure(found: Explanation, scaling: ScalingExplanation | None = None, form: str = "svg") -> bytes:
    """Bars of the critical path and of the causes; with ``scaling`` also rl_step seconds over devices.

    Parameters
    ----------
    form : svg or png
    """
    shown = found.causes[:MOST_CAUSES]
    rows = [1.2, 0.6 + 0.35 * max(len(shown), 1), *([2.6] if scaling else [])]
    figure = new_figure(9.0, 1.6 + sum(rows))
    axes = figure.subplots(len(rows), 1, height_ratios=rows)
    _draw_path(axes[0], found)
    _draw_causes(axes[1], found)
    if scaling:
        _draw_scaling(axes[2], scaling)
    return saved(figure, form)


def _draw_path(axes: Axes, found: Explanation) -> None:
    at = 0.0
    for index, (name, seconds) in enumerate(found.critical_s):
        label = name.replace("_", " ") if seconds > SHOWN * found.rl_step_s else None
        axes.barh(0, seconds, left=at, height=0.6, color=PALETTE[index % len(PALETTE)], edgecolor="white", label=label,
                  hatch=("", "//", "..")[index // len(PALETTE) % 3])  # fmt: skip
        at += seconds
    axes.set_yticks([])
    axes.set_xlabel("seconds of the critical path in one rl_step")
    axes.legend(ncols=6, fontsize="small", frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_causes(axes: Axes, found: Explanation) -> None:
    shown = found.causes[:MOST_CAUSES]
    for row, cause in enumerate(shown):
        fault = cause.nature == "fault"
        seconds = max(cause.loss_s, cause.joint_s)
        axes.barh(row, seconds, height=0.6, color=PALETTE[1] if fault else PALETTE[0], hatch="" if fault else "//",
                  edgecolor="white")  # fmt: skip
        axes.text(seconds, row, f" {human_share(cause.share)}  {cause.where}", va="center", fontsize="small")
    if not shown:
        axes.text(0.5, 0.5, "nothing above the floor", transform=axes.transAxes, ha="center", va="center")
    axes.set_yticks(range(len(shown)), [c.kind.replace("_", " ") for c in shown])
    axes.invert_yaxis()
    axes.axvline(found.floor_s, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlim(0.0, 1.6 * max((max(c.loss_s, c.joint_s) for c in shown), default=1.0))
    axes.set_xlabel("seconds per rl_step that go if the cause goes (plain: fault, hatched: by design; dotted: floor)")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_scaling(axes: Axes, scaling: ScalingExplanation) -> None:
    first, slope = scaling.devices[0], scaling.ideal
    ideal = [scaling.rl_step_s[0] * (n / first) ** slope for n in scaling.devices]
    axes.plot(scaling.devices, scaling.rl_step_s, marker="o", color=PALETTE[1], label="rl_step")
    axes.plot(scaling.devices, ideal, linestyle="--", color="black", label="ideal scaling")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(scaling.devices, [str(n) for n in scaling.devices])
    axes.minorticks_off()
    axes.set_xlabel("devices")
    axes.set_ylabel("seconds")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
