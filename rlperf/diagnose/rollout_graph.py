"""A simulated rollout as vertices of a performance graph: the turns of every trajectory, and samples of the engines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlperf.diagnose import graph as g
from rlperf.layout import FloatArray, IntArray
from rlperf.sim.rollout import ReplicaTimeline, RolloutResult, Trajectories


def add_rollout(
    build: g.GraphBuilder,
    result: RolloutResult,
    trajectories: Trajectories,
    start_s: float,
    after: IntArray | None,
    *,
    rl_step: int = 0,
) -> IntArray:
    """Add the turns of every trajectory (queue, prefill, decode, tool) and a barrier per replica; the barriers."""
    ends = []
    for replica, (members, timeline) in enumerate(zip(result.members, result.timelines, strict=True)):
        if not members.size:
            continue
        own = trajectories.take(members)
        last = _add_turns(build, own, members, timeline, start_s, after, g.Place(rank=replica, rl_step=rl_step))
        ends.append(build.barrier(last, start_s + timeline.makespan_s, rl_step=rl_step))
    return np.concatenate(ends) if ends else np.zeros(0, dtype=np.int64)


def _add_turns(
    build: g.GraphBuilder,
    own: Trajectories,
    members: IntArray,
    timeline: ReplicaTimeline,
    start_s: float,
    after: IntArray | None,
    at: g.Place,
) -> IntArray:
    """Vertices of one replica; the last vertex of each trajectory."""
    unit = members[own.turn_owner]
    arrival, scheduled, first, finish = (
        start_s + t for t in (timeline.arrival_s, timeline.scheduled_s, timeline.first_token_s, timeline.finish_s)
    )
    evicted = np.minimum(_evicted_share(timeline, own.response_tokens), 0.999) * (finish - first)

    def add(activity: int, start: FloatArray, end: FloatArray, work: FloatArray, source: IntArray | None) -> IntArray:
        return build.add(activity, start, end, work=work, after=source, at=replace(at, unit=unit))

    none = np.full(unit.size, np.nan)
    queue = add(g.QUEUE, arrival, scheduled, none, None)
    prefill = add(g.PREFILL, scheduled, first, own.prompt_tokens.astype(np.float64), queue)
    preempted = add(g.PREEMPTED, first, first + evicted, none, prefill)
    decode = add(g.DECODE, first + evicted, finish, own.response_tokens.astype(np.float64), preempted)
    starts, ends = own.offsets[:-1], own.offsets[1:] - 1
    if after is not None:
        build.edge(after, queue[starts])
    before = np.setdiff1d(np.arange(own.n_turns), ends)
    if before.size:
        unit = unit[before]
        tool = add(g.TOOL, finish[before], arrival[before + 1], none[before], decode[before])
        build.edge(tool, queue[before + 1])
    return decode[ends]


def _evicted_share(timeline: ReplicaTimeline, tokens: IntArray) -> FloatArray:
    """Share of a turn's decode interval in which the engine decoded without it: it had been preempted ``[turns]``."""
    seg = timeline.segments
    decoding = (seg.running > 0) & (seg.prefill_tokens == 0)
    if not timeline.preemptions or not decoding.any():
        return np.zeros(tokens.size)
    ends = seg.start_s + seg.seconds
    steps = np.concatenate([[0.0], np.cumsum(np.where(decoding, seg.steps, 0))])
    at = np.concatenate([[seg.start_s[0]], ends])
    passed = np.interp(timeline.finish_s, at, steps) - np.interp(timeline.first_token_s, at, steps)
    share = 1.0 - tokens / np.maximum(passed, 1.0)
    return np.where(share > 0.02, share, 0.0)


def samples_of(timelines: tuple[ReplicaTimeline, ...], max_running: list[int]) -> g.EngineSamples:
    """Statistics of decode-only segments of simulated replicas."""
    columns: list[tuple[FloatArray, ...]] = []
    for replica, (timeline, slots) in enumerate(zip(timelines, max_running, strict=True)):
        seg = timeline.segments
        kept = (seg.prefill_tokens == 0) & (seg.running > 0)
        steps = np.maximum(seg.steps[kept], 1).astype(np.float64)
        blocked = (seg.waiting[kept] > 0) & (seg.running[kept] < slots)
        running = seg.running[kept].astype(np.float64)
        columns.append(
            (np.full(steps.size, float(replica)), seg.seconds[kept], steps, running, seg.keys[kept] / steps,
             blocked.astype(np.float64))
        )  # fmt: skip
    replica_, seconds, steps_, running_, keys, blocked_ = (np.concatenate(c) for c in zip(*columns, strict=True))
    return g.EngineSamples(replica_.astype(np.int64), seconds, steps_, running_, keys, blocked_ > 0)
