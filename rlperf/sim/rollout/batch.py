"""The decoding requests of a replica: contexts that all grow alike, their blocks, and who completes when."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np

from rlperf.layout import FloatArray, IntArray
from rlperf.sim.rollout.options import DecodeClock


class DecodingBatch:
    """Requests that decode together; request i has base_i + tau cached tokens at clock tau.

    With w tokens in flight per request (1, or with speculation drafts and one) an engine_step reads
    sum(base_i + tau + w) keys and needs ceil((base_i + tau + w) / block) blocks of each request. Written as
    ``(a_i + tau) // block`` with a_i = base_i + w + block - 1, the sum over requests is

        sum(a_i // block) + b (tau // block) + #{i: a_i mod block >= block - tau mod block}

    so a count of the b requests by a_i mod block gives the blocks at any clock without visiting requests.
    """

    def __init__(self, clock: DecodeClock, block: int, width: int) -> None:
        self.clock, self.block, self.width = clock, block, width
        self.plain = clock.plain
        self.steps = 0
        self.tau = 0
        self.size = 0
        self.base: dict[int, int] = {}
        self.need: dict[int, int] = {}
        """tau at which each request completes."""
        self._ends: list[tuple[int, int]] = []
        self._base_sum = 0
        self._whole = 0
        self._phases = [0] * block
        self._blocks = -1
        """Blocks at the present clock, once asked for; -1 where something has changed since."""

    def add(self, i: int, cached: int, left: int) -> None:
        """Request i starts to decode with ``cached`` tokens, ``left`` tokens before it completes."""
        base = cached - self.tau
        self.base[i] = base
        self.need[i] = self.tau + left
        heappush(self._ends, (self.tau + left, i))
        self._base_sum += base
        whole, phase = divmod(base + self.width + self.block - 1, self.block)
        self._whole += whole
        self._phases[phase] += 1
        self.size += 1
        self._blocks = -1

    def load(self, base: IntArray, need: IntArray) -> None:
        """Requests 0, 1, ... at once, into an empty batch."""
        self.base = dict(enumerate(base.tolist()))
        self.need = dict(enumerate(need.tolist()))
        self._ends = [(tau, i) for i, tau in self.need.items()]
        heapify(self._ends)
        self._base_sum = int(base.sum())
        whole, phase = np.divmod(base + self.width + self.block - 1, self.block)
        self._whole = int(whole.sum())
        self._phases = np.bincount(phase, minlength=self.block).tolist()
        self.size = len(base)
        self._blocks = -1

    def remove(self, i: int) -> int:
        """Request i stops; its cached tokens."""
        base = self.base.pop(i)
        need = self.need.pop(i)
        self._base_sum -= base
        whole, phase = divmod(base + self.width + self.block - 1, self.block)
        self._whole -= whole
        self._phases[phase] -= 1
        self.size -= 1
        self._blocks = -1
        return base + (need if need < self.tau else self.tau)

    def step(self, count: int) -> None:
        """``count`` decoding engine_steps pass."""
        self.steps += count
        self.tau = self.steps if self.plain else self.clock.tau(self.steps)
        self._blocks = -1

    @property
    def due(self) -> bool:
        """Whether the next end that is noted has come; it may be that of a request which was preempted since."""
        ends = self._ends
        return bool(ends) and ends[0][0] <= self.tau

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
        ends = self._ends
        while self.need.get(ends[0][1]) != ends[0][0]:
            heappop(ends)
        return (ends[0][0] if self.plain else self.clock.steps_for(ends[0][0])) - self.steps

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

    def blocks(self) -> int:
        """Blocks that the next engine_step needs, shared prefixes counted by every request."""
        if self._blocks < 0:
            whole, rest = divmod(self.tau, self.block)
            self._blocks = self._whole + self.size * whole + (sum(self._phases[self.block - rest :]) if rest else 0)
        return self._blocks

    def steps_that_fit(self, spare: float, most: int) -> int:
        """Engine_steps, from 1 to ``most``, that take no more than ``spare`` further blocks."""
        if self.size * (most * self.width // self.block + 1) <= spare:
            return most
        # within `block` tokens every request takes exactly one block, so whole periods can be skipped
        periods = max(int(spare // self.size), 0)
        tau, block, phases = self.tau + periods * self.block, self.block, self._phases
        if (self.steps + most if self.plain else self.clock.tau(self.steps + most)) <= tau:
            return most
        spare -= periods * self.size
        for _ in range(block):
            spare -= phases[(block - 1 - tau % block) % block]
            if spare < 0:
                break
            tau += 1
        return min(max(self.clock.last_step_within(tau) - self.steps + 1, 1), most)

    def columns(self) -> tuple[IntArray, IntArray, IntArray]:
        """Requests, their base and the tau at which they complete."""
        return np.array(list(self.base)), np.array(list(self.base.values())), np.array(list(self.need.values()))


def drain_steps(clock: DecodeClock, need: IntArray) -> IntArray:
    """Smallest number of engine_steps c with tau(c) >= need, of many requests."""
    if clock.plain:
        return need
    steps: FloatArray = np.ceil(need / clock.tokens_per_step - 1e-6)
    guess = np.maximum(steps.astype(np.int64), 0)
    guess += clock.tau_array(guess) < need
    return guess - (clock.tau_array(np.maximum(guess - 1, 0)) >= need)
