"""The end of a rollout, when requests only leave: all completions at once, as arithmetic series over sorted lengths."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlperf.layout import FloatArray, IntArray
from rlperf.sim.rollout.batch import DecodingBatch, drain_steps
from rlperf.sim.rollout.cache import BlockCache
from rlperf.sim.rollout.step_seconds import EngineStepSeconds
from rlperf.sim.rollout.timeline import Segments


def drain(
    now: float, batch: DecodingBatch, base: IntArray, need: IntArray, seconds: EngineStepSeconds
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
    duration = count * seconds.fixed[left_before] + seconds.per_key[left_before] * keys
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


def safe_completions(batch: DecodingBatch, base: IntArray, need: IntArray, shared: IntArray, spare: float) -> int:
    """How many of the requests complete, one after the other, before the cache can be full.

    Until request j of those sorted by need completes, they hold at most (base + w + block - 1 + need_j) / block blocks
    each; when one leaves, the prefix that it shares is held (or kept, unheld) in full beside what the others count.

    Parameters
    ----------
    base, need : as in `drain` ``[requests]``
    shared : blocks of the prefix that each request shares with its group ``[requests]``
    spare : blocks of the cache beyond those held by shared prefixes alone, or kept unheld
    """
    if spare == np.inf:
        return len(need)
    order = np.argsort(need, kind="stable")
    held = np.cumsum((base[order] + batch.width + batch.block - 1)[::-1])[::-1]
    kept = np.cumsum(shared[order]) - shared[order]
    most = held + np.arange(len(order), 0, -1) * need[order] + kept * batch.block
    full = np.flatnonzero(most > spare * batch.block)
    if not len(full):
        return len(need)
    steps = drain_steps(batch.clock, need[order])
    return int(np.searchsorted(steps, steps[full[0]]))  # those of one engine_step leave together


def held_blocks(batch: DecodingBatch, base: IntArray, need: IntArray, tau: IntArray) -> IntArray:
    """Blocks that those of the requests hold that have not completed, at some clocks; prefixes counted by each.

    Parameters
    ----------
    base, need : as in `drain` ``[requests]``
    tau : clocks at the begin of an engine_step ``[times]``
    """
    order = np.argsort(need, kind="stable")
    first = np.searchsorted(need[order], tau, side="right")  # the first that is still there
    whole, phase = np.divmod((base + batch.width + batch.block - 1)[order], batch.block)
    # a request counts one more from tau mod block >= block - phase on: how many do, by first request and phase
    later = np.zeros((batch.block + 1, len(order) + 1), dtype=np.int64)
    later[phase, np.arange(len(order))] = 1
    later = later[::-1, ::-1].cumsum(axis=0).cumsum(axis=1)[::-1, ::-1]
    sums = np.concatenate([np.cumsum(whole[::-1])[::-1], [0]])
    periods, rest = np.divmod(tau, batch.block)
    counted: IntArray = sums[first] + (len(order) - first) * periods + later[batch.block - rest, first]
    return counted


def _tau_sums(batch: DecodingBatch, starts: IntArray, count: IntArray) -> FloatArray:
    """Sum of tau over each run of engine_steps, as floats."""
    if batch.clock.plain:
        return np.asarray(count * starts + count * (count - 1) / 2.0, dtype=np.float64)
    sums = np.concatenate([[0], np.cumsum(batch.clock.tau_array(np.arange(int((starts + count).max()) + 1)))])
    return np.asarray(sums[starts + count] - sums[starts], dtype=np.float64)


def with_held_blocks(
    tail: Segments, ends: FloatArray, order: IntArray, members: IntArray, base: IntArray, need: IntArray,
    batch: DecodingBatch, cache: BlockCache, adjust: int,
) -> Segments:  # fmt: skip
    """The segments of a drain with the blocks held at the begin of each, shared prefixes held once."""
    starts = batch.steps + np.cumsum(tail.steps) - tail.steps
    blocks = held_blocks(batch, base, need, batch.clock.tau_array(starts))
    group = np.array(cache.group)[members[order]]
    last = np.zeros(len(order), dtype=np.bool_)
    last[len(order) - 1 - np.unique(group[::-1], return_index=True)[1]] = True
    regained = np.cumsum(np.where(last, 0, np.array(cache.shared)[group]))
    left = np.searchsorted(ends[order], tail.start_s + 0.5 * tail.seconds)
    beside = adjust + np.concatenate([[0], regained])[left]
    return replace(tail, held_tokens=(blocks + beside) * float(batch.block))


def most_blocks(tail: Segments, members: IntArray, batch: DecodingBatch, cache: BlockCache) -> int:
    """Bound on the blocks of a drain of ``members``, with the prefixes that their groups leave behind."""
    grown = tail.running * (tail.steps * batch.width // batch.block + 1)
    left = {cache.group[i] for i in members.tolist()}
    return int((tail.held_tokens // batch.block + grown).max() + sum(cache.shared[group] for group in left))
