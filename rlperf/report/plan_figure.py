"""Figure of a plan: the stages of each phase's rl_step along time, and memory against the device's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlperf.plan.answer.plan import Phase, Plan
from rlperf.report.style import MANY, STAGE_COLOURS, STAGE_HATCHES, new_figure, saved
from rlperf.specs.modes import MODES

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def timeline_figure(plan: Plan, form: str = "svg") -> bytes:
    """Bars of every phase: stages along time, and memory by part per role.

    Parameters
    ----------
    form : svg or png
    """
    phases = plan.phases
    figure = new_figure(9.0, 2.2 + 1.0 * len(phases) + 1.2)
    time_axes, memory_axes = figure.subplots(2, 1, height_ratios=(max(len(phases), 1), 1.2))
    _draw_times(time_axes, phases)
    _draw_memory(memory_axes, phases[0])
    figure.suptitle(plan.job.name)
    return saved(figure, form)


def _draw_times(axes: Axes, phases: tuple[Phase, ...]) -> None:
    """One row per phase where stages follow each other, one row per pool where they overlap."""
    shown: set[str] = set()
    labels: list[str] = []
    alike = len({phase.rl_steps for phase in phases}) == 1
    for phase in phases:
        stages = {name: s for name, s in phase.predicted.stages_s.model_dump().items() if s > 0}
        own = {"rollout", "reward"}
        rows = [stages]
        if not MODES[phase.mode].shares_devices:
            rows = [{n: s for n, s in stages.items() if n in own}, {n: s for n, s in stages.items() if n not in own}]
        for index, row in enumerate(rows):
            at = 0.0
            if index and not MODES[phase.mode].overlaps:
                at = sum(rows[0].values())
            for name, seconds in row.items():
                axes.barh(
                    len(labels), seconds, left=at, height=0.6,
                    color=STAGE_COLOURS[name], hatch=STAGE_HATCHES[name], edgecolor="white",
                    label=None if name in shown else name.replace("_", " "),
                )  # fmt: skip
                shown.add(name)
                at += seconds
            who = "" if MODES[phase.mode].shares_devices else (" rollout" if index == 0 else " trainer")
            when = "" if alike else f" {phase.rl_steps[0]}-{phase.rl_steps[1]}"
            labels.append(f"{', '.join(phase.tasks)}{when}{who}")
        predicted = phase.predicted
        spread = [[predicted.rl_step_s - predicted.low_s], [predicted.high_s - predicted.rl_step_s]]
        axes.errorbar(predicted.rl_step_s, len(labels) - 1, xerr=spread, color="black", capsize=4, fmt="|")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("seconds in one rl_step (bar: 5th to 95th percentile)")
    axes.legend(ncols=4, fontsize="small", frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    axes.spines[["top", "right"]].set_visible(False)


def _draw_memory(axes: Axes, phase: Phase) -> None:
    uses = phase.predicted.memory_bytes
    parts = list(dict.fromkeys(name for use in uses.values() for name, size in use.parts.items() if size > 0))
    labelled: set[str] = set()
    for row, use in enumerate(uses.values()):
        at = 0.0
        for index, name in enumerate(parts):
            size = use.parts.get(name, 0.0) / 1e9
            if size <= 0:
                continue
            axes.barh(
                row, size, left=at, height=0.6, color=MANY[index % len(MANY)], edgecolor="white",
                label=None if name in labelled else name.replace("_", " "),
            )  # fmt: skip
            labelled.add(name)
            at += size
        axes.plot([use.limit / 1e9] * 2, [row - 0.4, row + 0.4], color="black", linewidth=2)
    axes.set_yticks(range(len(uses)), list(uses))
    axes.invert_yaxis()
    axes.set_xlabel("GB per device at the peak (line: limit)")
    axes.legend(ncols=5, fontsize="x-small", frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    axes.spines[["top", "right"]].set_visible(False)
