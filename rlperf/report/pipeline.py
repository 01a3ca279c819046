"""A pipeline timeline as a figure and as a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from rlperf.report.style import new_figure, saved
from rlperf.sim.pipeline import B, F, PipelineTimeline, StageCosts, W, op_name
from rlperf.units import human_share

COLOURS = {F: "#56B4E9", B: "#009E73", W: "#E69F00"}
"""Okabe and Ito's palette, which colour-blind readers can tell apart."""
_NAMES = {F: "forward", B: "backward, input", W: "backward, weights"}


def pipeline_figure(timelines: dict[str, PipelineTimeline], form: str = "svg") -> bytes:
    """One panel per timeline on a common time axis: a row per device, F / B / W in colours.

    Parameters
    ----------
    timelines : titles and what to draw under them
    form : svg or png
    """
    from matplotlib.patches import Patch

    rows = sum(t.devices for t in timelines.values())
    figure = new_figure(11.0, 1.0 + 0.75 * len(timelines) + 0.28 * rows)
    heights = [t.devices + 1 for t in timelines.values()]
    panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False, height_ratios=heights)
    for axes, (title, timeline) in zip(panels[:, 0], timelines.items(), strict=True):
        for device, order in enumerate(timeline.orders):
            for kind in (F, B, W):
                at = [(op, float(timeline.start_s[op]), float(timeline.end_s[op])) for op in order if op[0] == kind]
                spans = [(start * 1e3, (end - start) * 1e3) for _, start, end in at if end > start]
                axes.broken_barh(spans, (device - 0.4, 0.8), facecolors=COLOURS[kind], edgecolor="white", linewidth=0.2)
        axes.set_yticks(range(timeline.devices))
        axes.set_ylim(timeline.devices - 0.5, -0.5)
        axes.set_ylabel("device")
        axes.set_title(
            f"{title}: {timeline.makespan_s * 1e3:.2f} ms, {human_share(timeline.bubble, 1)} idle", fontsize=9
        )
    panels[-1, 0].set_xlabel("time [ms]")
    figure.legend(
        handles=[Patch(color=COLOURS[k], label=_NAMES[k]) for k in (F, B, W)], loc="outside lower center", ncols=3
    )
    return saved(figure, form)


def pipeline_trace(timeline: PipelineTimeline, title: str = "pipeline", costs: StageCosts | None = None) -> str:
    """Trace-event JSON: one thread per device, one event per operation; with ``costs`` also the memory of each device.

    Reference: Trace Event Format, phases X (complete), C (counter) and M (metadata); times in microseconds.
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": title}},
    ]
    for device, order in enumerate(timeline.orders):
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": device, "args": {"name": f"device {device}"}})
        for op in order:
            start, end = float(timeline.start_s[op]), float(timeline.end_s[op])
            kind = "forward" if op[0] == F else "backward" if op[0] == B else "weights"
            events.append(
                {
                    "ph": "X",
                    "name": op_name(op, timeline.merged),
                    "cat": kind,
                    "pid": 0,
                    "tid": device,
                    "ts": round(start * 1e6, 3),
                    "dur": round((end - start) * 1e6, 3),
                    "args": {"stage": op[1], "microbatch": op[2]},
                }
            )
        if costs is not None:
            events += _memory(timeline, device, costs)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _memory(timeline: PipelineTimeline, device: int, costs: StageCosts) -> list[dict[str, Any]]:
    home = np.asarray(timeline.placement)
    level = float(costs.state_bytes[home == device].sum())
    events = [_counter(device, 0.0, level)]
    for kind, stage, m in timeline.orders[device]:
        held = float(costs.activation_bytes[stage, m])
        kept = 0.0 if timeline.merged else float(costs.weight_input_bytes[stage, m])
        when = timeline.start_s if kind == F else timeline.end_s
        level += held if kind == F else kept - held if kind == B else -kept
        events.append(_counter(device, float(when[kind, stage, m]), level))
    return events


def _counter(device: int, at_s: float, level: float) -> dict[str, Any]:
    name = f"memory of device {device}"
    return {"ph": "C", "name": name, "pid": 0, "ts": round(at_s * 1e6, 3), "args": {"bytes": level}}
