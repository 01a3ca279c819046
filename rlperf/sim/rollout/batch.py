"""The decoding requests of a replica: contexts that all grow alike, their blocks, and who completes when."""

from __future__ import annotations

from bisect import bisect_right
from heapq import heapify, heappop, heappush
from itertools import accumulate

import numpy as np

from rlperf.layout import FloatArray, IntArray
from rlperf.sim.rollout.options import DecodeClock


class DecodingBatch:
    """Requests that decode together; request i has base_i + tau cached tokens at clock tau.

    With w tokens in flight per request (1, or with speculation drafts and one) an engine_step reads
    sum(base_i + tau + w) keys and needs ceil((base_i + tau + w) / block) blocks of each request. Written as
    ``(a_i + tau) // block`` with a_i = base_i + w + block - 1, request i takes one more block as the clock passes from
    tau to tau + 1 where tau = -1 - a_i (mod block), so that a count of the requests by that remainder gives the blocks
    at any clock without visiting requests.
    """

    def __init__(self, clock: DecodeClock, block: int, width: int) -> None:
        self.clock, self.block, self.width = clock, block, width
        self.plain = clock.plain
        self.steps = 0
        self.tau = 0
        self.size = 0
        self.need: dict[int, int] = {}
        """tau at which each request completes."""
        self._base: dict[int, int] = {}
        """Of these requests, and of some that have left."""
        self._ends: list[tuple[int, int]] = []
        self._base_sum = 0
        self._over = width + block - 1
        self._takers = [0] * block
        """Requests that take a block as the clock leaves tau, by tau mod block."""
        self._blocks = 0
        self._counted = 0
        """The clock at which ``_blocks`` are held."""

    def add(self, i: int, cached: int, left: int) -> None:
        """Request i starts to decode with ``cached`` tokens, ``left`` tokens before it completes."""
        tau = self.tau
        self._base[i] = base = cached - tau
        self.need[i] = need = tau + left
        heappush(self._ends, (need, i))
        self._base_sum += base
        self.size += 1
        whole = base + self._over
        self._takers[~whole % self.block] += 1
        self._blocks += (whole + self._counted) // self.block

    def load(self, base: IntArray, need: IntArray) -> None:
        """Requests 0, 1, ... at once, into an empty batch."""
        self._base = dict(enumerate(base.tolist()))
        self.need = dict(enumerate(need.tolist()))
        self._ends = [(tau, i) for i, tau in self.need.items()]
        heapify(self._ends)
        self._base_sum = int(base.sum())
        self.size = len(base)
        whole = base + self._over
        self._takers = np.bincount(~whole % self.block, minlength=self.block).tolist()
        self._blocks, self._counted = int(((whole + self.tau) // self.block).sum()), self.tau

    def remove(self, i: int) -> int:
        """Request i stops; its cached tokens."""
        need = self.need.pop(i)
        base = self._base[i]
        self._base_sum -= base
        self.size -= 1
        whole = base + self._over
        self._takers[~whole % self.block] -= 1
        self._blocks -= (whole + self._counted) // self.block
        return base + (need if need < self.tau else self.tau)

    def step(self, count: int) -> bool:
        """``count`` decoding engine_steps pass; whether an end has come that is noted.

        It may be that of a request which was preempted since.
        """
        self.steps = steps = self.steps + count
        self.tau = tau = steps if self.plain else self.clock.tau(steps)
        ends = self._ends
        return bool(ends) and ends[0][0] <= tau

    def completed(self) -> list[int]:
        """Requests complete at the present clock, removed."""
        done: list[int] = []
        ends, tau = self._ends, self.tau
        while ends and ends[0][0] <= tau:
            need, i = heappop(ends)
            if self.need.get(i) == need:  # else a request that was preempted since
                self.remove(i)
                done.append(i)
        return done

    def steps_to_completion(self) -> int:
        """Engine_steps until the next request completes."""
        ends, needs = self._ends, self.need
        need, i = ends[0]
        while needs.get(i) != need:
            heappop(ends)
            need, i = ends[0]
        return (need if self.plain else self.clock.steps_for(need)) - self.steps

    def keys(self) -> int:
        """Cached tokens that the next engine_step reads."""
        return self._base_sum + self.size * (self.tau + self.width)

    def keys_of(self, count: int) -> int:
        """Cached tokens that the next ``count`` engine_steps read together."""
        if self.plain:
            taus = count * self.steps + count * (count - 1) // 2
        else:
            taus = self.clock.tau_sum(self.steps, count)
        return count * (self._base_sum + self.size * self.width) + self.size * taus

    def reads(self, count: int) -> tuple[int, int]:
        """Cached tokens that the next ``count`` engine_steps read together, and the last of them."""
        if self.plain:
            first = self._base_sum + self.size * (self.steps + self.width)
            return count * first + self.size * (count * (count - 1) // 2), first + self.size * (count - 1)
        keys = self.keys_of(count)
        return keys, keys - self.keys_of(count - 1)

    def blocks(self) -> int:
        """Blocks that the next engine_step needs, shared prefixes counted by every request."""
        passed = self.tau - self._counted
        if passed == 1:
            self._blocks += self._takers[self._counted % self.block]
            self._counted = self.tau
        elif passed:
            block, takers = self.block, self._takers
            periods, rest = divmod(passed, block)
            start = self._counted % block
            end = start + rest
            self._blocks += periods * self.size + sum(takers[start:end])
            if end > block:
                self._blocks += sum(takers[: end - block])
            self._counted = self.tau
        return self._blocks

    def steps_that_fit(self, spare: float, most: int) -> int:
        """Engine_steps, from 1 to ``most``, that take no more than ``spare`` further blocks."""
        size, block = self.size, self.block
        if size * (most * self.width // block + 1) <= spare:
            return most
        # within `block` tokens every request takes exactly one block, so whole periods can be skipped
        periods = int(spare // size) if spare > size else 0
        tau = self.tau + periods * block
        if (self.steps + most if self.plain else self.clock.tau(self.steps + most)) <= tau:
            return most
        now = tau % block
        taken = accumulate(self._takers[now:] + self._takers[:now])
        tau += bisect_right(list(taken), spare - periods * size)
        steps = (tau if self.plain else self.clock.last_step_within(tau)) - self.steps + 1
        return min(steps, most) if steps > 1 else 1

    def outgrows(self, spare: float) -> bool:
        """Whether the requests may take more than ``spare`` blocks before the first of them completes.

        Then `rlperf.sim.rollout.drain.safe_completions` are none.
        """
        self.steps_to_completion()  # forgets who has left
        return self._base_sum + self.size * (self._over + self._ends[0][0]) > spare * self.block

    def columns(self) -> tuple[IntArray, IntArray, IntArray]:
        """Requests, their base and the tau at which they complete."""
        members = list(self.need)
        return np.array(members), np.array([self._base[i] for i in members]), np.array(list(self.need.values()))


def drain_steps(clock: DecodeClock, need: IntArray) -> IntArray:
    """Smallest number of engine_steps c with tau(c) >= need, of many requests."""
    if clock.plain:
        return need
    steps: FloatArray = np.ceil(need / clock.tokens_per_step - 1e-6)
    guess = np.maximum(steps.astype(np.int64), 0)
    guess += clock.tau_array(guess) < need
    return guess - (clock.tau_array(np.maximum(guess - 1, 0)) >= need)
