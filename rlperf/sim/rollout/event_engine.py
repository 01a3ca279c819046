"""The state of one replica between two events; the scheduler's rules stand in `rlperf.sim.rollout.events`."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

import numpy as np

from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.sim.rollout.batch import DecodingBatch
from rlperf.sim.rollout.cache import BlockCache
from rlperf.sim.rollout.drain import drain, most_blocks, safe_completions, with_held_blocks
from rlperf.sim.rollout.options import DecodeClock, EngineOptions
from rlperf.sim.rollout.step_seconds import tabulated
from rlperf.sim.rollout.timeline import SegmentLog
from rlperf.sim.rollout.trajectories import Trajectories

FEW = 16
"""Completions that are not worth the sorting that takes them all at once."""


class EventEngine:
    """State of one replica between two events. Trajectories are numbers; columns are plain lists, for speed.

    With ``queued`` every trajectory arrives at its own time; without, only what `submit` hands over is served.
    """

    def __init__(
        self,
        trajectories: Trajectories,
        cost: EngineStepCost,
        limits: EngineLimits,
        options: EngineOptions,
        *,
        queued: bool = True,
    ) -> None:
        n = len(trajectories)
        self.n = n
        width = options.tokens_in_flight
        bound = limits.token_budget // width if limits.chunked_prefill else n
        self.max_running = int(min(limits.max_running, bound, n))
        self.chunked, self.budget = limits.chunked_prefill, limits.token_budget
        self.width = width
        self.seconds = tabulated(cost, self.max_running, options)
        spec = options.speculation
        self.cache = BlockCache(trajectories, limits)
        self.finite = self.cache.total != np.inf
        self.batch = DecodingBatch(DecodeClock(spec.tokens_per_step if spec else 1.0), limits.block_tokens, width)
        self.look_ahead = options.async_scheduling
        self.tools = [0.0] * options.tool_concurrency if options.tool_concurrency else None
        self._nothing_served(trajectories, queued)
        self.arrivals.sort()
        self.later = deque(self.arrivals[options.trajectories or n :])  # these start as others end
        del self.arrivals[options.trajectories or n :]

    def _nothing_served(self, trajectories: Trajectories, queued: bool) -> None:
        """The state before the first event."""
        n = self.n
        self.prompt: list[int] = trajectories.prompt_tokens.tolist()
        self.response: list[int] = trajectories.response_tokens.tolist()
        self.tool_s: list[float] = trajectories.tool_latency_s.tolist()
        self.turn: list[int] = trajectories.offsets[:-1].tolist()
        self.last_turn: list[int] = (trajectories.offsets[1:] - 1).tolist()
        self.arrivals: list[tuple[float, int]] = (
            [(t, i) for i, t in enumerate(trajectories.arrival_s.tolist())] if queued else []
        )
        self.outstanding = len(self.arrivals)
        """Trajectories submitted and not complete."""
        self.more_to_come = not queued
        """Whether `submit` may be called later: completions then must not be skipped over."""
        self.waiting: deque[int] = deque()
        self.known: list[int] = [0] * n
        """Tokens to compute before the next one is sampled: prompt, and what was generated before a preemption."""
        self.lost: list[int] = [0] * n
        """Tokens that had been computed when a preemption took them."""
        self.running: dict[int, None] = {}
        """All admitted, in that order."""
        self.partial: tuple[int, int] | None = None
        """The admitted trajectory whose prompt is cut, and its tokens computed or hit so far."""
        self.partial_blocks = 0
        self.seen_s = -np.inf
        """Begin of the last engine_step: with look-ahead, later arrivals are not known to the next one."""
        self.leaving = 0
        """With look-ahead, places of requests that completed in the last engine_step: not free for the next one."""
        self.blocked = False
        """Whether the queue's first was evicted just now and lacks the blocks to return."""
        self.full_cache = self.full_places = False
        """Whether a larger cache, or more places, could have changed anything so far."""
        self.now = 0.0
        self.open_turns = trajectories.n_turns - n
        """Turns that follow another one and have not arrived yet."""
        turns = trajectories.n_turns
        self.arrival: list[float] = [0.0] * turns
        self.scheduled: list[float] = [-1.0] * turns
        self.first_token: list[float] = [-1.0] * turns
        self.finish: list[float] = [0.0] * turns
        self.preempted_s: dict[int, float] = {}
        """When the turns were preempted that have begun to write and are not back."""
        self.pauses: list[tuple[int, float, float]] = []
        """Turn, when it was preempted, and when it was back and wrote on."""
        self.log = SegmentLog()
        self.rows = self.log.rows
        self.preemptions = self.hit_tokens = self.looked_up = 0
        self.drain_try = n + 1
        self.trajectories = trajectories

    # -- from outside -------------------------------------------------------------------------------------------------

    @property
    def action_s(self) -> float:
        """When the next event begins; infinite without work."""
        if self.running or self.waiting:
            return self.now
        return max(self.now, self.arrivals[0][0]) if self.arrivals else np.inf

    def submit(self, i: int, at_s: float) -> None:
        """Hand over trajectory i."""
        heappush(self.arrivals, (at_s, i))
        self.outstanding += 1

    # -- one event ---------------------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Until the next event; False when all is done."""
        running, waiting, arrivals, cache = self.running, self.waiting, self.arrivals, self.cache
        if self.look_ahead and not running:
            self.leaving = 0
        if arrivals:
            known_s = self.seen_s if self.look_ahead and running else self.now
            if arrivals[0][0] <= known_s:
                self._take_arrivals(known_s)
        if not running and not waiting:
            if not arrivals:
                return False
            self.now = max(self.now, arrivals[0][0])
            self._take_arrivals(self.now)
        held, total = self._held(), cache.total
        if held + cache.unheld_blocks > cache.most:
            cache.most = held + cache.unheld_blocks
        preempted = self.blocked = False
        if waiting and len(running) >= self.max_running:
            self.full_places = True
        if self.chunked and held > total:
            held, preempted = self._preempt(held)
        queue = waiting and not self.blocked and len(running) < self.max_running
        if not preempted and (queue or self.partial is not None):
            chunks, held_then = self._admit(held)
            if chunks:
                self._prefill_step(chunks, held_then if self.finite else self._held())
                return True
        if not self.chunked and held > total:
            held, preempted = self._preempt(held)
        if not waiting and self.batch.size <= self.drain_try and self._only_decodes() and self._drain():
            return bool(running)
        self._decode_run(held, preempted)
        return True

    def _take_arrivals(self, known_s: float) -> None:
        while self.arrivals and self.arrivals[0][0] <= known_s:
            t, i = heappop(self.arrivals)
            turn = self.turn[i]
            self.arrival[turn] = t
            self.known[i] = self.prompt[turn]
            self.waiting.append(i)

    # -- memory ------------------------------------------------------------------------------------------------------

    def _held(self) -> int:
        """Blocks held when the next engine_step decodes; without a limit only of interest to readers."""
        if self.finite:
            return self.batch.blocks() + self.partial_blocks + self.cache.adjust
        return self.batch.keys() // self.cache.block + self.partial_blocks

    def _preempt(self, held: int) -> tuple[int, bool]:
        """Make the decodes of the next engine_step fit; blocks then held, and whether a victim may return after it."""
        cache, running, total = self.cache, self.running, self.cache.total
        preempted = False
        self.full_cache = True
        while held > total and len(running) > 1:
            i, _ = running.popitem()
            shared = cache.adjust
            if self.partial is not None and self.partial[0] == i:
                computed = self.partial[1]
                held -= self.partial_blocks
                self.partial, self.partial_blocks = None, 0
            else:
                computed = self.batch.remove(i)
                held += -(computed + self.width) // cache.block  # its blocks, rounded up
                self.known[i] = computed + 1
            if computed > self.lost[i]:
                self.lost[i] = computed
            cache.release(i, computed, resumes=True)
            held += cache.adjust - shared
            self.waiting.appendleft(i)
            self.preemptions += 1
            turn = self.turn[i]
            if self.first_token[turn] >= 0.0 and turn not in self.preempted_s:
                self.preempted_s[turn] = self.now
            preempted = True
        if preempted:  # while what was evicted last cannot return, nothing else changes until the next completion
            i = self.waiting[0]
            preempted = held + cache.blocks_to_admit(i, self.known[i]) + cache.reserve <= total
            self.blocked = not preempted
        return held, preempted

    # -- prefill -----------------------------------------------------------------------------------------------------

    def _admit(self, held: int) -> tuple[list[tuple[int, int, int]], int]:
        """Prompts of this engine_step as (trajectory, first position, tokens), and blocks held with them."""
        chunks: list[tuple[int, int, int]] = []
        budget = self.budget
        if self.chunked:
            budget -= self.batch.size * self.width
            if self.partial is not None:
                i, done = self.partial
                size = min(budget, self.known[i] - done)
                chunks.append((i, done, size))
                budget -= size
        if not self.waiting:
            return chunks, held
        cache, waiting, running, finite = self.cache, self.waiting, self.running, self.finite
        places = self.max_running - self.leaving
        while waiting and budget > 0 and len(running) < places:
            i = waiting[0]
            tokens, turn = self.known[i], self.turn[i]
            if finite:
                if (then := cache.admit(i, tokens, held, cache.reserve if running else 0)) < 0:
                    self.full_cache = True
                    break
                held = then
            hit = cache.lookup(i, turn, tokens)
            size = tokens - hit
            if size > budget:
                if not self.chunked and chunks:
                    break
                size = min(size, budget) if self.chunked else size
            waiting.popleft()
            cache.hold(i)
            running[i] = None
            self.partial_blocks += -(-tokens // cache.block)
            budget -= size
            chunks.append((i, hit, size))
            self.hit_tokens += hit
            self.looked_up += tokens
            if self.scheduled[turn] < 0.0:
                self.scheduled[turn] = self.now
        if waiting and len(running) >= places:
            self.full_places = True
        return chunks, held

    def _prefill_step(self, chunks: list[tuple[int, int, int]], held: int) -> None:
        """One engine_step with prefill, of so many blocks: beside the decodes, or while they stall."""
        batch, known, lost = self.batch, self.known, self.lost
        decoding = batch.size if self.chunked else 0
        tokens = pairs = recomputed = 0
        for i, start, size in chunks:
            tokens += size
            pairs += size * start + size * (size + 1) // 2
            if lost[i] > start:
                recomputed += min(lost[i], start + size) - start
        keys = batch.keys() if decoding else 0
        seconds = self.seconds.mixed_s(decoding, keys, tokens, pairs, len(chunks))
        stalled = batch.size - decoding
        self.rows.append(
            (self.now, seconds, 1, decoding, len(self.waiting), keys, tokens, pairs, len(chunks), stalled, recomputed,
             held * batch.block)
        )  # fmt: skip
        if self.cache.unheld_blocks + held > self.cache.total:
            self.cache.evict(held)
        self.seen_s = self.now
        self.leaving = 0
        self.now += seconds
        done = batch.completed() if decoding and batch.step(1) else []
        self.partial = None
        for i, start, size in chunks:
            if start + size < known[i]:
                self.partial = (i, start + size)
                continue
            self.partial_blocks -= -(-known[i] // batch.block)
            turn = self.turn[i]
            if self.first_token[turn] < 0.0:
                self.first_token[turn] = self.now
            elif turn in self.preempted_s:
                self.pauses.append((turn, self.preempted_s.pop(turn), self.now))
            left = self.prompt[turn] + self.response[turn] - known[i] - 1
            if left > 0:
                batch.add(i, known[i], left)
            else:
                done.append(i)
        if done:
            self._finish(done)

    # -- decode ------------------------------------------------------------------------------------------------------

    def _decode_run(self, held: int, once: bool) -> None:
        """Decode-only engine_steps, event after event, until somebody may enter.

        An event is a completion, a full cache, or an arrival that fits.
        """
        batch, cache, waiting, running, arrivals = self.batch, self.cache, self.waiting, self.running, self.arrivals
        total, finite, block, width = cache.total, self.finite, batch.block, self.width
        fixed_s, per_key_s = self.seconds.fixed_s, self.seconds.per_key_s
        look_ahead, write = self.look_ahead, self.rows.append
        while True:
            now, size = self.now, batch.size
            count = 1 if once or (self.leaving and waiting) else batch.steps_to_completion()
            if count > 1 and finite:
                count = batch.steps_that_fit(total - held, count)
            fixed, per_key = fixed_s[size], per_key_s[size]
            if arrivals and not waiting:
                if size < self.max_running:
                    count = self._steps_to_arrival(arrivals[0][0] - now, count, fixed, per_key)
                else:
                    self.full_places = True
            keys, last = batch.reads(count)
            seconds = count * fixed + per_key * keys
            if look_ahead:
                self.seen_s = now + seconds - (fixed + per_key * last)
                self.leaving = 0
            write((now, seconds, count, size, len(waiting), keys, 0, 0, 0, 0, 0, held * block))
            self.now = now + seconds
            asked = held + size * (count * width // block + 1) + cache.unheld_blocks
            if asked > cache.most:
                cache.most = asked
            if asked > total and cache.unheld_blocks:
                if count > 1:
                    batch.step(count - 1)
                    held, count = self._held(), 1
                cache.evict(held)
            if batch.step(count):
                self._finish(batch.completed())
            if arrivals or self.leaving or self.more_to_come or self.partial is not None or not running:
                return
            once = False
            held = batch.blocks() + cache.adjust if finite else self._held()
            if held > total:
                if not self.chunked:
                    return
                held, once = self._preempt(held)
            elif waiting:
                if self._may_enter(held):
                    return
            elif batch.size <= self.drain_try:
                return

    def _may_enter(self, held: int) -> bool:
        """Whether there is a place and room for the queue's first."""
        if not self.waiting or len(self.running) >= self.max_running:
            return False
        i = self.waiting[0]
        return held + self.cache.blocks_to_admit(i, self.known[i]) + self.cache.reserve <= self.cache.total

    def _steps_to_arrival(self, delay_s: float, most: int, fixed: float, per_key: float) -> int:
        """Smallest number of engine_steps, at most ``most``, after which the arrival is known."""
        if delay_s <= 0.0:
            return 1
        keys_of = self.batch.keys_of
        high = min(most, int(delay_s / (fixed + per_key * self.batch.keys())) + 1) if fixed > 0 else most
        low, stride = high - 1, 1  # contexts grow little: it is most often the first guess
        while low > 0 and low * fixed + per_key * keys_of(low) >= delay_s:
            high, stride = low, 2 * stride
            low = max(high - stride, 0)
        while high - low > 1:
            middle = (low + high) // 2
            if middle * fixed + per_key * keys_of(middle) < delay_s:
                low = middle
            else:
                high = middle
        return min(high + self.look_ahead, most)

    def _finish(self, done: list[int]) -> None:
        """Turns are complete: blocks go, the tool is called, the next turn will arrive."""
        now = self.now
        self.leaving = len(done) if self.look_ahead else 0
        for i in sorted(done) if len(done) > 1 else done:
            turn = self.turn[i]
            self.finish[turn] = now
            del self.running[i]
            resumes = turn < self.last_turn[i]
            computed = self.prompt[turn] + self.response[turn] - 1
            self.cache.release(i, computed, resumes)
            self.lost[i] = self.cache.kept_of(computed)
            if resumes:
                self.turn[i] = turn + 1
                self.open_turns -= 1
                heappush(self.arrivals, (self._tool_done(self.tool_s[turn]), i))
            else:
                self.outstanding -= 1
                if self.later:
                    arrival, follower = self.later.popleft()
                    heappush(self.arrivals, (max(arrival, now), follower))

    def _tool_done(self, latency_s: float) -> float:
        """When a tool call that is made now has its answer; a call waits for a free place."""
        if self.tools is None:
            return self.now + latency_s
        end = max(heappop(self.tools), self.now) + latency_s
        heappush(self.tools, end)
        return end

    # -- the tail, all at once -----------------------------------------------------------------------------------------

    def _only_decodes(self) -> bool:
        """Whether only decoding is left, unless the cache runs full."""
        if self.more_to_come or self.later or self.waiting or self.arrivals or self.partial is not None:
            return False
        return not self.open_turns or all(self.turn[i] == self.last_turn[i] for i in self.running)

    def _drain(self) -> bool:
        """Let all complete, or all that surely do so before the cache is full; False where those are few."""
        batch, cache = self.batch, self.cache
        spare, self.drain_try = cache.total - cache.adjust - cache.unheld_blocks, batch.size * 7 // 8
        if batch.outgrows(spare):
            return False
        members, base, need = batch.columns()
        shared = np.array(cache.shared)[np.array(cache.group)[members]]
        count = safe_completions(batch, base, need, shared, spare)
        if count < min(FEW, batch.size):
            return False
        ends, tail = drain(self.now, batch, base, need, self.seconds)
        order = np.lexsort((members, ends))
        if self.finite:
            tail = with_held_blocks(tail, ends, order, members, base, need, batch, cache, self.cache.adjust)
            cache.asked(most_blocks(tail, members, batch, cache))
        gone = members[order[:count]].tolist()
        for i, end in zip(gone, ends[order[:count]].tolist(), strict=True):
            self.finish[self.turn[i]] = end
        self.now = float(ends[order[count - 1]])
        self.outstanding -= count
        if count == batch.size:
            self.log.add(tail)
            self.running.clear()
            return True
        tail = tail.first(int(np.searchsorted(tail.start_s + 0.5 * tail.seconds, self.now)))
        self.log.add(tail)
        batch.step(int(tail.steps.sum()))
        for i in gone:
            turn = self.turn[i]
            del self.running[i]
            batch.remove(i)
            self.cache.release(i, self.prompt[turn] + self.response[turn] - 1, resumes=False)
        self.leaving = int((ends[order[:count]] == self.now).sum()) if self.look_ahead else 0
        self.drain_try = batch.size * 7 // 8
        return True
