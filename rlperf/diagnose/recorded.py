"""Performance graphs of recorded workloads: engine and tool latencies of turns, lengths, reward times per rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from rlperf.diagnose import graph as g
from rlperf.layout import FloatArray, IntArray
from rlperf.sim.rollout import Trajectories
from rlperf.units import human_seconds, human_share
from rlperf.workload.records import Recording

ASSUMED_TOKEN_S = 0.03
"""Seconds per generated token where a recording holds lengths only. An assumption, not a fit: it is named in the notes
of every explanation that uses it, and the caller can state another."""


class TurnLatencies(Protocol):
    """One replica's rl_step of a recording with engine latencies (`EngineTrace` of `calibrate`)."""

    @property
    def rl_step(self) -> int:
        """Which rl_step."""
        ...

    @property
    def replica(self) -> int:
        """Which replica."""
        ...

    @property
    def trajectories(self) -> Trajectories:
        """What it served."""
        ...

    @property
    def missing(self) -> int:
        """Trajectories that the recording lacks: who competed with those that it holds is unknown then."""
        ...

    @property
    def latency_s(self) -> FloatArray:
        """Engine latency of every turn [s] ``[turns]``."""
        ...


LEAST_TOKENS = 32
"""Of a turn that tells the pace of an engine [tokens]."""


def unloaded_token_s(latency_s: FloatArray, tokens: IntArray) -> float:
    """Seconds per token of the fastest turns: the 1st percentile of latency / tokens over turns of some length.

    Turns that run almost alone, at the end of an rl_step, show what the engine needs without competition; the value is
    an upper bound of it, so the queueing found with it is a lower bound.
    """
    some = tokens >= LEAST_TOKENS
    rate = latency_s[some] / tokens[some] if some.any() else latency_s / np.maximum(tokens, 1)
    return float(np.percentile(rate, 1.0))


def graph_of_traces(traces: Sequence[TurnLatencies]) -> tuple[g.PerformanceGraph, tuple[str, ...]]:
    """Turns of every trajectory, one after another: queueing (engine latency beyond the unloaded one), decode, tool.

    Returns
    -------
    graph, notes
    """
    whole = [t for t in traces if not t.missing]
    left_out = len(traces) - len(whole) if whole else 0
    traces = whole or traces
    latency = np.concatenate([t.latency_s for t in traces])
    tokens = np.concatenate([t.trajectories.response_tokens for t in traces])
    token_s = unloaded_token_s(latency, tokens)
    build = g.GraphBuilder(("rollout",))
    now, last = 0.0, None
    for step in sorted({t.rl_step for t in traces}):
        ends, end_s, count = [], now, 0
        for trace in (t for t in traces if t.rl_step == step):
            index, times = _add_trace(build, trace, token_s, now, last, count)
            count += len(trace.trajectories)
            end_s = max(end_s, float(times.max()))
            ends.append(build.barrier(index, float(times.max()), rl_step=step))
        last, now = build.barrier(np.concatenate(ends), end_s, rl_step=step), end_s
    served = float(np.minimum(token_s * tokens, latency).sum())
    busy, tool = float(latency.sum()), sum(_tool_s(t.trajectories).sum() for t in traces)
    gaps = (f"{left_out} incomplete replica recordings are left out",) if left_out else ()
    notes = (
        *gaps,
        f"engine {human_share(busy / (busy + tool), 2)} and tools {human_share(tool / (busy + tool), 2)} of the "
        "trajectories' time",
        f"without competition a token takes {token_s * 1e3:.1f} ms (1st percentile of the recorded turns); what is "
        f"beyond, {human_share(1.0 - served / busy)} of the engine's time, is queueing",
    )
    return build.freeze(), notes


def _tool_s(trajectories: Trajectories) -> FloatArray:
    """Tool seconds between turns; what follows the last turn delays nothing ``[turns]``."""
    seconds = np.nan_to_num(trajectories.tool_latency_s.copy())
    seconds[trajectories.offsets[1:] - 1] = 0.0
    return np.asarray(seconds, dtype=np.float64)


def _add_trace(
    build: g.GraphBuilder, trace: TurnLatencies, token_s: float, now: float, after: IntArray | None, first: int
) -> tuple[IntArray, FloatArray]:
    """Turns of one replica; ``first`` numbers its trajectories. Their last vertices, and when they end."""
    served = trace.trajectories
    tokens = served.response_tokens.astype(np.float64)
    decode_s = np.minimum(token_s * tokens, trace.latency_s)
    tool_s = _tool_s(served)
    total = np.cumsum(trace.latency_s + tool_s)
    starts = total - trace.latency_s - tool_s
    starts = now + starts - np.repeat(starts[served.offsets[:-1]], served.turns_per_trajectory)
    queued = starts + trace.latency_s - decode_s
    ends = queued + decode_s
    unit = first + served.turn_owner

    def add(activity: int, start: FloatArray, end: FloatArray, source: IntArray | None, work: FloatArray) -> IntArray:
        return build.add(
            activity,
            start,
            end,
            work=work,
            after=source,
            at=g.Place(rank=trace.replica, unit=unit, rl_step=trace.rl_step),
        )

    none = np.full(tokens.size, np.nan)
    queue = add(g.QUEUE, starts, queued, None, none)
    decode = add(g.DECODE, queued, ends, queue, tokens)
    tool = add(g.TOOL, ends, ends + tool_s, decode, none)
    lasts = served.offsets[1:] - 1
    inner = np.setdiff1d(np.arange(tokens.size), lasts)
    if inner.size:
        build.edge(tool[inner], queue[inner + 1])
    if after is not None:
        build.edge(after, queue[served.offsets[:-1]])
    return decode[lasts], ends[lasts]


def graph_of_recording(recording: Recording, *, token_s: float | None) -> tuple[g.PerformanceGraph, tuple[str, ...]]:
    """Lengths at ``token_s`` per generated token, tool latencies and reward times per rank.

    Groups are dealt to the ranks of the reward times in equal contiguous shares.

    Parameters
    ----------
    token_s : seconds per generated token; default `ASSUMED_TOKEN_S`

    Returns
    -------
    graph, notes
    """
    used = ASSUMED_TOKEN_S if token_s is None else token_s
    ranks = sorted({r.rank for r in recording.rewards})
    count = max(len(ranks), 1)
    build = g.GraphBuilder(("rank",))
    table = recording.lengths
    now, last = 0.0, None
    steps = sorted({*table.steps().tolist(), *(r.rl_step for r in recording.rewards)})
    for step in steps:
        here = table.step(step)
        if here.n:
            last, now = _add_lengths(build, Trajectories.from_table(here), used, count, step, now, last)
        rewards = sorted((r for r in recording.rewards if r.rl_step == step), key=lambda r: r.rank)
        if rewards:
            seconds = np.array([r.reward_time_s for r in rewards])
            rank = np.array([ranks.index(r.rank) for r in rewards])
            index = build.add(g.REWARD, now, now + seconds, after=last, at=g.Place(rank=rank, rl_step=step))
            now += float(seconds.max())
            last = build.barrier(index, now, rl_step=step)
    notes = [f"{'assumed' if token_s is None else 'as stated'}: {used * 1e3:.0f} ms per generated token; times of the "
             "rollout scale with it"]  # fmt: skip
    return build.freeze(), (*notes, *length_notes(recording))


def _add_lengths(
    build: g.GraphBuilder, served: Trajectories, token_s: float, replicas: int, step: int, now: float,
    after: IntArray | None,
) -> tuple[IntArray, float]:  # fmt: skip
    names, group = np.unique(served.group, return_inverse=True)
    rank = group.reshape(-1) * replicas // names.size
    tokens = served.generated_tokens.astype(np.float64)
    tool_s = np.add.reduceat(_tool_s(served), served.offsets[:-1])
    unit = np.arange(tokens.size)
    end = now + token_s * tokens
    index = build.add(g.DECODE, now, end, work=tokens, after=after, at=g.Place(rank=rank, unit=unit, rl_step=step))
    if (tool_s > 0).any():
        index = build.add(g.TOOL, end, end + tool_s, after=index, at=g.Place(rank=rank, unit=unit, rl_step=step))
        end = end + tool_s
    ends = [build.barrier(index[rank == r], float(end[rank == r].max()), rl_step=step) for r in np.unique(rank)]
    return build.barrier(np.concatenate(ends), float(end.max()), rl_step=step), float(end.max())


def length_notes(recording: Recording) -> tuple[str, ...]:
    """Lengths and reward loads of the ranks in words: how far the longest is beyond the mean."""
    table = recording.lengths.trajectories()
    found = []
    if table.n:
        tokens = table.response_tokens
        cap = table.max_response_tokens
        at_cap = f", {human_share(float(np.mean(tokens >= cap)), 1)} at the cap" if cap else ""
        found.append(
            f"length imbalance: longest / mean response {tokens.max() / tokens.mean():.1f} "
            f"({tokens.max():,} / {tokens.mean():,.0f} tokens{at_cap})"
        )
    if recording.rewards:
        worst = []
        for step in sorted({r.rl_step for r in recording.rewards}):
            seconds = np.array([r.reward_time_s for r in recording.rewards if r.rl_step == step])
            worst.append((float(seconds.min()), float(seconds.max())))
        low, high = min(w[0] for w in worst), max(w[1] for w in worst)
        times = f"{human_seconds(low)} to {human_seconds(high)}"
        found.append(f"reward time per rank {times}; every rl_step waits for its slowest rank")
    return tuple(found)
