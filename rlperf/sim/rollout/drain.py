"""The end of a rollout, when requests only leave: all completions at once, as arithmetic series over sorted lengths."""

from __future__ import annotations

import numpy as np

from rlperf.layout import FloatArray, IntArray
from rlperf.sim.rollout.batch import DecodingBatch, drain_steps
from rlperf.sim.rollout.step_seconds import StepSeconds
from rlperf.sim.rollout.timeline import Segments


def drain(
    now: float, batch: DecodingBatch, base: IntArray, need: IntArray, seconds: StepSeconds
) -> tuple[FloatArray, Segments]:
    r"""Completion times [s] of requests that decode without admission, arrival or preemption.

    Between completions j - 1 and j, b_j requests take k_j engine_steps:

    .. math:: t_j = k_j A(b_j) + d_k \Big[ k_j \sum_i (base_i + w) + b_j \sum_{c} \tau(c) \Big]

    Parameters
    ----------
    now : time at which the drain begins [s]
    batch : the clock and block size; not changed
    base, need : per request, cached tokens at tau = 0 and the tau at which it completes [tokens] ``[requests]``
    seconds : seconds per engine_step; A(b) = ``seconds.fixed[b]``
    """
    steps = drain_steps(batch.clock, need)
    order = np.argsort(steps, kind="stable")
    ordered = steps[order]
    is_last = np.empty(len(order), dtype=np.bool_)
    is_last[-1] = True
    np.not_equal(ordered[1:], ordered[:-1], out=is_last[:-1])
    ends = ordered[is_last]
    gone = np.flatnonzero(is_last) + 1
    left_before = len(order) - np.concatenate([[0], gone[:-1]])
    base_gone = np.cumsum(base[order])
    base_before = base_gone[-1] - np.concatenate([[0], base_gone[gone[:-1] - 1]])
    starts = np.concatenate([[batch.steps], ends[:-1]])
    count = ends - starts
    keys = count * (base_before + left_before * float(batch.width)) + left_before * _tau_sums(batch, starts, count)
    duration = count * seconds.fixed[left_before] + seconds.per_key_s * keys
    finish = now + np.cumsum(duration)
    out = np.empty(len(order))
    out[order] = np.repeat(finish, np.diff(gone, prepend=0))
    none, zeros = np.zeros(len(ends), dtype=np.int64), np.zeros(len(ends))
    at = batch.clock.tau_array(starts)
    held = base_before + left_before * (at + batch.width)
    tail = Segments(
        finish - duration, duration, count, left_before, none, keys, none, zeros, none, none, none,
        held.astype(np.float64),
    )  # fmt: skip
    return out, tail


def _tau_sums(batch: DecodingBatch, starts: IntArray, count: IntArray) -> FloatArray:
    """Sum of tau over each run of engine_steps, as floats."""
    if batch.clock.plain:
        return np.asarray(count * starts + count * (count - 1) / 2.0, dtype=np.float64)
    sums = np.concatenate([[0], np.cumsum(batch.clock.tau_array(np.arange(int((starts + count).max()) + 1)))])
    return np.asarray(sums[starts + count] - sums[starts], dtype=np.float64)
