"""A batch that is there from the start and fits: prefill engine_step by engine_step, then all completions at once.

The fast path of `simulate_replica`; equal to the event loop where it applies (one turn each, all at t = 0, not more
than max_running, cache never full, one token per engine_step).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.layout import FloatArray, IntArray
from rlperf.sim.rollout.batch import DecodingBatch
from rlperf.sim.rollout.drain import drain
from rlperf.sim.rollout.options import DecodeClock, EngineOptions
from rlperf.sim.rollout.step_seconds import EngineStepSeconds, tabulated
from rlperf.sim.rollout.timeline import ReplicaTimeline, SegmentLog
from rlperf.sim.rollout.trajectories import Trajectories


def static_applies(trajectories: Trajectories, limits: EngineLimits, options: EngineOptions) -> bool:
    """Whether `run_static` gives what the event loop would give."""
    n = len(trajectories)
    bound = min(limits.max_running, limits.token_budget) if limits.chunked_prefill else limits.max_running
    if n > min(bound, options.trajectories or n) or not trajectories.single_turn or options.speculation is not None:
        return False
    if trajectories.arrival_s.any():
        return False
    return roomy_tokens(trajectories, limits) <= limits.kv_tokens


def roomy_tokens(trajectories: Trajectories, limits: EngineLimits) -> float:
    """Bound on the cache that trajectories of one turn take which all run at once [tokens]."""
    if limits.kv_tokens == np.inf:
        return np.inf
    rounding = (limits.block_tokens + 1) * len(trajectories) + limits.block_tokens
    return float(trajectories.final_tokens.sum()) + rounding + limits.watermark * limits.kv_tokens


def prefix_hits(trajectories: Trajectories, limits: EngineLimits) -> IntArray:
    """Prompt tokens in the cache when nothing is evicted: full blocks, but for a group's first [tokens] ``[n]``."""
    if trajectories.cached_tokens is not None:
        return np.minimum(trajectories.cached_tokens, trajectories.prompt_tokens - 1)
    if not limits.prefix_caching:
        return np.zeros(len(trajectories), dtype=np.int64)
    beginning, group = trajectories.beginnings, trajectories.group
    if len(group) > 1 and (group[1:] >= group[:-1]).all():  # sorted already: runs instead of np.unique
        new = np.concatenate([[True], group[1:] != group[:-1]])
        first = np.flatnonzero(new)
        index = np.cumsum(new) - 1
    else:
        _, first, index = np.unique(group, return_index=True, return_inverse=True)
        index = index.reshape(-1)
    shortest = beginning[first].copy()
    if not (beginning == shortest[index]).all():
        np.minimum.at(shortest, index, beginning)
    hits = (shortest // limits.block_tokens * limits.block_tokens)[index]
    hits[first] = 0
    return np.asarray(hits, dtype=np.int64)


@dataclass
class PrefillPhase:
    """Outcome of the prefill phase: when and at which decode clock every prompt is complete."""

    now: float
    clock: int
    ready_s: FloatArray
    ready_clock: IntArray
    begin_s: FloatArray


def run_static(
    trajectories: Trajectories, cost: EngineStepCost, limits: EngineLimits, options: EngineOptions
) -> ReplicaTimeline:
    """Simulate a static batch (where it applies: `static_applies`; arguments: `simulate_replica`)."""
    seconds = tabulated(cost, len(trajectories), options)
    hits = prefix_hits(trajectories, limits)
    log = SegmentLog()
    finish = np.full(len(trajectories), -1.0)
    done = prefill_phase(trajectories, hits, seconds, limits, log, finish)
    base = trajectories.prompt_tokens - done.ready_clock
    need = done.ready_clock + trajectories.response_tokens - 1
    open_ = np.flatnonzero(finish < 0.0)
    if len(open_):
        batch = DecodingBatch(DecodeClock(), limits.block_tokens, 1)
        batch.step(done.clock)
        finish[open_], tail = drain(done.now, batch, base[open_], need[open_], seconds)
        log.add(tail)
    return ReplicaTimeline(
        arrival_s=np.zeros(len(trajectories)),
        scheduled_s=done.begin_s,
        first_token_s=done.ready_s,
        finish_s=finish,
        trajectory_finish_s=finish,
        segments=log.close(),
        hit_tokens=int(hits.sum()),
        prompt_tokens=int(trajectories.prompt_tokens.sum()),
        roomy_tokens=roomy_tokens(trajectories, limits),
    )


@dataclass(frozen=True)
class _Prompts:
    """Prompts one behind the other: tokens and pairs of attention computed up to each end; ``hits``: cached of each."""

    ends: list[int]
    pairs: list[int]
    hits: list[int]

    @classmethod
    def of(cls, prompt: IntArray, hits: IntArray) -> _Prompts:
        pairs = np.cumsum(prompt * (prompt + 1) // 2 - hits * (hits + 1) // 2)
        return cls(np.cumsum(prompt - hits).tolist(), pairs.tolist(), hits.tolist())

    def up_to(self, token: int, first: int, *, whole: bool) -> tuple[int, int, int, float]:
        """Where an engine_step ends that computes up to ``token``; ``first`` is the first prompt that is not complete.

        ``whole`` : of whole prompts alone, at least one. Returns the token, prompts complete and prompts touched by
        then, and pairs up to there.
        """
        complete = bisect_right(self.ends, token, first)
        if whole:
            complete = max(complete, first + 1)
            token = self.ends[complete - 1]
        token = min(token, self.ends[-1])
        before, pairs = (self.ends[complete - 1], float(self.pairs[complete - 1])) if complete else (0, 0.0)
        if complete == len(self.ends) or token <= before:
            return token, complete, complete, pairs
        hit = self.hits[complete]
        at = hit + token - before
        return token, complete, complete + 1, pairs + (at * (at + 1) // 2 - hit * (hit + 1) // 2)


def prefill_phase(
    trajectories: Trajectories,
    hits: IntArray,
    seconds: EngineStepSeconds,
    limits: EngineLimits,
    log: SegmentLog,
    finish: FloatArray,
    behind: int = 0,
) -> PrefillPhase:
    """Engine_steps until every prompt is complete; responses that end meanwhile are written to ``finish``.

    ``behind`` : requests that queue for a place all the while.
    """
    n = len(trajectories)
    prompt, response = trajectories.prompt_tokens, trajectories.response_tokens
    prompts = _Prompts.of(prompt, hits)
    ready_s, begin_s = np.empty(n), np.empty(n)
    ready_clock = np.empty(n, dtype=np.int64)
    now, position, index, clock, running, pairs_done = 0.0, 0, 0, 0, 0, 0.0
    base_sum = 0
    leaving: dict[int, list[int]] = {}
    # every engine_step computes at least budget - (n - 1) prompt tokens, so longer responses outlive the phase
    horizon = 2 + prompts.ends[-1] // max(limits.token_budget - n + 1, 1) if limits.chunked_prefill else 1
    may_leave = bool(response.min() <= horizon)
    while index < n:
        decoding = running if limits.chunked_prefill else 0
        target, nxt, touched, pairs = prompts.up_to(
            position + limits.token_budget - decoding, index, whole=not limits.chunked_prefill
        )
        began = index + (position > (prompts.ends[index - 1] if index else 0))
        keys = float(base_sum + running * (clock + 1)) if decoding else 0.0
        took = seconds.mixed_s(decoding, keys, target - position, pairs - pairs_done, touched - index)
        log.rows.append(
            (now, took, 1, decoding, behind + n - touched, keys, target - position, pairs - pairs_done, touched - index,
             running - decoding, 0, float(target))
        )  # fmt: skip
        begin_s[began:touched] = now
        now += took
        clock += 1 if decoding else 0
        for i in leaving.pop(clock, ()) if decoding else ():
            finish[i] = now
            base_sum -= int(prompt[i] - ready_clock[i])
            running -= 1
        ready_s[index:nxt] = now
        ready_clock[index:nxt] = clock
        running += nxt - index
        base_sum += int(prompt[index:nxt].sum()) - (nxt - index) * clock
        if may_leave:
            for i in (index + np.flatnonzero(response[index:nxt] <= horizon)).tolist():
                left = int(response[i]) - 1
                if left:
                    leaving.setdefault(clock + left, []).append(i)
                else:
                    finish[i] = now
                    running -= 1
                    base_sum -= int(prompt[i]) - clock
        position, index, pairs_done = target, nxt, pairs
    return PrefillPhase(now, clock, ready_s, ready_clock, begin_s)
