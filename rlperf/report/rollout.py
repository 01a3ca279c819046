"""A simulated rollout for people: a figure, and a trace that Perfetto (ui.perfetto.dev) and chrome://tracing load."""

from __future__ import annotations

import json
from dataclasses import fields
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

import numpy as np

from rlperf.layout import FloatArray
from rlperf.report.style import PALETTE, new_figure, saved, tidy
from rlperf.sim.rollout import LostSeconds, ReplicaTimeline, RolloutResult, Trajectories
from rlperf.units import human_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HATCHES = ("", "//", "..", "xx", "--")
CAUSES = {
    "tail": "emptying batch",
    "imbalance": "waiting for other replicas",
    "tool_wait": "waiting for tools",
    "prefill_stall": "decodes behind prefill",
    "preemption": "computing again",
}
"""Names of `LostSeconds` for readers."""
MOST_LINES = 8
POINTS = 600


def sampled(timeline: ReplicaTimeline, times: FloatArray, column: str) -> FloatArray:
    """A column of the segments at given times, 0 while no engine_step runs ``[times]``."""
    seg = timeline.segments
    if not len(seg):
        return np.zeros(len(times))
    at = np.searchsorted(seg.start_s, times, side="right") - 1
    inside = (at >= 0) & (times < seg.start_s[at] + seg.seconds[at])
    return np.where(inside, np.asarray(getattr(seg, column), dtype=np.float64)[at], 0.0)


def rollout_figure(result: RolloutResult, form: str = "svg", title: str = "") -> bytes:
    """Decoding requests and cache held along time, and the device-seconds lost by cause.

    Parameters
    ----------
    form : svg or png
    title : above the figure
    """
    figure = new_figure(9.0, 6.8)
    running, held, lost = figure.subplots(3, 1, height_ratios=(2.0, 2.0, 0.9))
    _draw_along_time(running, result, "running", "decoding requests\nper replica")
    _draw_along_time(held, result, "held_tokens", "cache held\nper replica [tokens]")
    held.yaxis.set_major_formatter("{x:,.0f}")
    held.set_xlabel("time since the rollout began [s]")
    _legend(running, 4)
    _draw_lost(lost, result.lost, result.all_devices * result.makespan_s)
    figure.suptitle(title or f"rollout of {len(result.finish_s)} trajectories: {human_seconds(result.makespan_s)}")
    return saved(figure, form)


def _draw_along_time(axes: Axes, result: RolloutResult, column: str, label: str) -> None:
    """One line per replica; of many replicas, the mean and the range."""
    times = np.linspace(0.0, result.makespan_s, POINTS)
    values = np.array([sampled(timeline, times, column) for timeline in result.timelines])
    if len(values) <= MOST_LINES:
        for r, line in enumerate(values):
            axes.plot(times, line, color=PALETTE[r % len(PALETTE)], linewidth=1.2, label=f"replica {r}")
    else:
        axes.fill_between(times, values.min(axis=0), values.max(axis=0), color=PALETTE[0], alpha=0.25, label="range")
        axes.plot(times, values.mean(axis=0), color=PALETTE[0], linewidth=1.5, label=f"mean of {len(values)} replicas")
    axes.set_ylabel(label)
    axes.set_xlim(0.0, result.makespan_s)
    axes.set_ylim(bottom=0.0)
    tidy(axes)


def _draw_lost(axes: Axes, lost: LostSeconds, device_seconds: float) -> None:
    """One bar in parts: share of all device-seconds lost to each cause."""
    left = 0.0
    for k, part in enumerate(fields(lost)):
        share = 100.0 * getattr(lost, part.name) / device_seconds
        label = f"{CAUSES[part.name]} {share:.1f} %"
        axes.barh(0, share, left=left, color=PALETTE[k], hatch=HATCHES[k], edgecolor="white", label=label)
        left += share
    axes.set_xlim(0.0, 100.0)
    axes.set_yticks([])
    axes.set_xlabel("device-seconds of the rollout not spent in full batches [%]")
    tidy(axes, grid=False)
    _legend(axes, 3)


def _legend(axes: Axes, columns: int) -> None:
    """Above the axes, where it covers nothing."""
    axes.legend(ncols=columns, fontsize="small", frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def perfetto_trace(result: RolloutResult, trajectories: Trajectories) -> str:
    """Chrome trace events as JSON: a process per replica with its engine, its requests in lanes, and counters.

    A request's turn shows as queued, prefill and decode, its prompt group and lengths as arguments.
    """
    events: list[dict[str, Any]] = []
    for r, (members, timeline) in enumerate(zip(result.members, result.timelines, strict=True)):
        events.append(_meta("process_name", r, 0, f"replica {r} ({int(result.devices[r])} devices)"))
        events.append(_meta("thread_name", r, 0, "engine"))
        events += _engine_events(r, timeline)
        events += _request_events(r, timeline, trajectories.take(members))
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def _meta(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _slice(process: int, thread: int, name: str, start_s: float, end_s: float, **args: object) -> dict[str, Any]:
    """A complete event; whole nanoseconds keep the stages of a turn within it, the format counts in microseconds."""
    start, end = round(1e9 * start_s), round(1e9 * end_s)
    return {
        "ph": "X", "name": name, "pid": process, "tid": thread, "ts": start / 1e3, "dur": (end - start) / 1e3,
        "args": args,
    }  # fmt: skip


def _engine_events(process: int, timeline: ReplicaTimeline) -> list[dict[str, Any]]:
    """What the engine did, and counters of requests and cache; runs of equal kind and batch are one slice."""
    seg = timeline.segments
    events: list[dict[str, Any]] = []
    for k in range(len(seg)):
        start, end = float(seg.start_s[k]), float(seg.start_s[k] + seg.seconds[k])
        prefill = int(seg.prefill_tokens[k])
        name = "decode" if not prefill else "prefill + decode" if seg.running[k] else "prefill"
        events.append(
            _slice(process, 0, name, start, end, engine_steps=int(seg.steps[k]), running=int(seg.running[k]),
                   prefill_tokens=prefill)
        )  # fmt: skip
        counters = {"running": int(seg.running[k]), "waiting": int(seg.waiting[k])}
        at = round(1e6 * start, 3)
        events.append({"ph": "C", "name": "requests", "pid": process, "ts": at, "args": counters})
        held = {"held": float(seg.held_tokens[k])}
        events.append({"ph": "C", "name": "cache [tokens]", "pid": process, "ts": at, "args": held})
    end = round(1e6 * timeline.makespan_s, 3)
    events.append({"ph": "C", "name": "requests", "pid": process, "ts": end, "args": {"running": 0, "waiting": 0}})
    return events


def _request_events(process: int, timeline: ReplicaTimeline, part: Trajectories) -> list[dict[str, Any]]:
    """Turns in lanes: each takes the lowest lane that is free when it arrives."""
    events: list[dict[str, Any]] = []
    owner = part.turn_owner
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    lanes = 0
    for k in np.argsort(timeline.arrival_s, kind="stable").tolist():
        arrival, finish = float(timeline.arrival_s[k]), float(timeline.finish_s[k])
        while busy and busy[0][0] <= arrival:
            heappush(free, heappop(busy)[1])
        if not free:
            lanes += 1
            heappush(free, lanes)
            events.append(_meta("thread_name", process, lanes, f"requests {lanes}"))
        lane = heappop(free)
        heappush(busy, (finish, lane))
        i = int(owner[k])
        name = f"group {int(part.group[i])} turn {k - int(part.offsets[i])}"
        args = {
            "trajectory": i,
            "prompt_tokens": int(part.prompt_tokens[k]),
            "response_tokens": int(part.response_tokens[k]),
        }
        start, first = float(timeline.scheduled_s[k]), float(timeline.first_token_s[k])
        events.append(_slice(process, lane, name, arrival, finish, **args))
        for stage, begin, end in (("queued", arrival, start), ("prefill", start, first), ("decode", first, finish)):
            if end > begin:
                events.append(_slice(process, lane, stage, begin, end))
    return events
