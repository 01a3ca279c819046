"""The reference: one replica engine_step by engine_step, token by token, block by block. Slow, and plain to read.

It shares the rules of `rlperf.sim.rollout.events` but none of its code: every block is an object of its own, every
request keeps its own token count, seconds come from `EngineStepCost.engine_step_s`. The test suite holds
the two together.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.sim.rollout.options import EngineOptions
from rlperf.sim.rollout.trajectories import Trajectories

Block = tuple[str, int, int]
"""("group", group, index) or ("own", trajectory, index): a block whose content has a name."""


@dataclass(eq=False)
class _Request:
    """One trajectory at its present turn."""

    name: int
    group: int
    turn: int
    known: int = 0
    generated: int = 0
    cached: int = 0
    hit: int = 0
    decoding: bool = False
    blocks: list[Block] = field(default_factory=list)


@dataclass(frozen=True)
class TokenLoopResult:
    """First token and end of every turn [s], and the preemptions."""

    first_token_s: np.ndarray[tuple[int], np.dtype[np.float64]]
    finish_s: np.ndarray[tuple[int], np.dtype[np.float64]]
    preemptions: int
    hit_tokens: int


class _Blocks:
    """Every block by name; used ones with a count of users, cached ones oldest first, the rest are blank."""

    def __init__(self, total: float) -> None:
        self.total = total
        self.users: dict[Block, int] = {}
        self.cached: list[Block] = []

    def take(self, block: Block) -> None:
        """Use a block: one more user, out of the cached list."""
        self.users[block] = self.users.get(block, 0) + 1
        if block in self.cached:
            self.cached.remove(block)

    def give(self, block: Block, keep: bool) -> None:
        """One user less; the last one leaves it cached if its content may serve again."""
        self.users[block] -= 1
        if not self.users[block]:
            del self.users[block]
            if keep:
                self.cached.append(block)

    def evict(self) -> None:
        """Cached blocks go, oldest first, until all fit."""
        while self.cached and len(self.users) + len(self.cached) > self.total:
            self.cached.pop(0)


class TokenLoop:
    """The engine of `rlperf.sim.rollout.events`, naively."""

    def __init__(
        self, trajectories: Trajectories, cost: EngineStepCost, limits: EngineLimits, options: EngineOptions
    ) -> None:
        self.t, self.cost, self.limits, self.options = trajectories, cost, limits, options
        self.width = options.tokens_in_flight
        self.gain = options.speculation.tokens_per_step if options.speculation else 1.0
        total = limits.kv_tokens // limits.block_tokens if np.isfinite(limits.kv_tokens) else np.inf
        self.blocks = _Blocks(total)
        self.reserve = np.ceil(limits.watermark * total) if np.isfinite(total) else 0.0
        self.sharing = limits.prefix_caching and trajectories.cached_tokens is None
        self.requests = [
            _Request(i, int(trajectories.group[i]), int(trajectories.offsets[i])) for i in range(len(trajectories))
        ]
        self.arrivals = [(float(trajectories.arrival_s[i]), i) for i in range(len(trajectories))]
        self.waiting: list[_Request] = []
        self.running: list[_Request] = []
        self.now, self.decode_steps, self.preemptions, self.hit_tokens = 0.0, 0, 0, 0
        self.last_start, self.leaving = -np.inf, 0
        self.tools = [0.0] * (options.tool_concurrency or 0)
        self.first_token = np.full(trajectories.n_turns, -1.0)
        self.finish = np.zeros(trajectories.n_turns)
        bound = limits.token_budget // self.width if limits.chunked_prefill else len(trajectories)
        self.max_running = min(limits.max_running, bound)

    def shared_blocks(self, group: int) -> int:
        """Full blocks of the shortest first prompt of the group, less its last token."""
        if not self.sharing:
            return 0
        members = np.flatnonzero(self.t.group == group)
        firsts = self.t.prompt_tokens[self.t.offsets[members]]
        shared = max(int(firsts.min()) - 1, 0)
        if self.t.shared_tokens is not None:
            shared = min(shared, int(self.t.shared_tokens[members].min()))
        return shared // self.limits.block_tokens

    def names(self, request: _Request, tokens: int) -> list[Block]:
        """Blocks that hold ``tokens`` of the request's context."""
        shared = self.shared_blocks(request.group)
        count = -(-tokens // self.limits.block_tokens)
        return [
            ("group", request.group, k) if k < shared else ("own", request.name, k) for k in range(count)
        ]  # fmt: skip

    def run(self) -> TokenLoopResult:
        """All engine_steps."""
        while self.arrivals or self.waiting or self.running:
            self.arrive()
            chunked = self.limits.chunked_prefill
            preempted = self.preempt() if chunked else False
            chunks = [] if preempted else self.admit()
            if not chunked and not chunks:
                self.preempt()
            decoding = [r for r in self.running if r.decoding] if chunked or not chunks else []
            self.engine_step(decoding, chunks)
        return TokenLoopResult(self.first_token, self.finish, self.preemptions, self.hit_tokens)

    def arrive(self) -> None:
        """Queue the turns whose time has come; if there is nothing to do, wait for one."""
        self.arrivals.sort()
        if not self.running and not self.waiting:
            self.now = max(self.now, self.arrivals[0][0])
        known_s = self.now
        if self.options.async_scheduling and self.running:  # this step was scheduled when the last one began
            known_s = self.last_start
        if not self.running:
            self.leaving = 0
        while self.arrivals and self.arrivals[0][0] <= known_s:
            _, i = self.arrivals.pop(0)
            request = self.requests[i]
            request.known, request.generated = int(self.t.prompt_tokens[request.turn]), 0
            self.waiting.append(request)

    def demand(self) -> int:
        """Distinct blocks that running requests need for the next decoding engine_step."""
        needed: set[Block] = set()
        for r in self.running:
            needed.update(self.names(r, r.cached + self.width if r.decoding else r.known))
        return len(needed)

    def preempt(self) -> bool:
        """Evict the last admitted until the rest fits."""
        gone = False
        while self.demand() > self.blocks.total and len(self.running) > 1:
            victim = self.running.pop()
            victim.known = int(self.t.prompt_tokens[victim.turn]) + victim.generated
            self.leave(victim, resumes=True)
            self.waiting.insert(0, victim)
            self.preemptions += 1
            gone = True
        for r in self.running:
            self.grow(r, r.cached + self.width if r.decoding else r.known)
        return gone

    def grow(self, request: _Request, tokens: int) -> None:
        """Give the request the blocks for ``tokens`` of context."""
        for block in self.names(request, tokens)[len(request.blocks) :]:
            self.blocks.take(block)
            request.blocks.append(block)

    def leave(self, request: _Request, resumes: bool) -> None:
        """Give back all blocks; complete ones stay cached, the last ones to be evicted first."""
        full = request.cached // self.limits.block_tokens
        for k in reversed(range(len(request.blocks))):
            block = request.blocks[k]
            keep = self.sharing and k < full and (resumes or block[0] == "group")
            self.blocks.give(block, keep)
        request.blocks, request.decoding, request.cached = [], False, 0

    def hits(self, request: _Request) -> int:
        """Tokens of the request's context that cached blocks hold."""
        if self.t.cached_tokens is not None:
            return min(int(self.t.cached_tokens[request.turn]), request.known - 1)
        size = self.limits.block_tokens
        count = 0
        if self.sharing:
            for block in self.names(request, request.known)[: (request.known - 1) // size]:
                if block not in self.blocks.users and block not in self.blocks.cached:
                    break
                count += 1
        return count * size

    def admit(self) -> list[tuple[_Request, int]]:
        """Prompts of this engine_step as (request, tokens)."""
        chunked = self.limits.chunked_prefill
        budget = self.limits.token_budget
        chunks: list[tuple[_Request, int]] = []
        if chunked:
            budget -= self.width * sum(r.decoding for r in self.running)
        for r in self.running:
            if not r.decoding:
                chunks.append((r, min(budget, r.known - r.cached)))
                budget -= chunks[-1][1]
        while self.waiting and budget > 0 and len(self.running) + self.leaving < self.max_running:
            request = self.waiting[0]
            new = [b for b in self.names(request, request.known) if b not in self.blocks.users]
            reserve = self.reserve if self.running else 0
            ahead = self.demand()
            if ahead + len(new) + reserve > self.blocks.total:
                break
            for r in self.running:  # what decodes next has its blocks before anybody is admitted
                self.grow(r, r.cached + self.width if r.decoding else r.known)
            self.blocks.evict()
            hit = self.hits(request)
            size = request.known - hit
            if size > budget and not chunked and chunks:
                break
            self.waiting.pop(0)
            request.cached = request.hit = hit
            self.hit_tokens += hit
            self.running.append(request)
            self.forget_stale(request)
            self.grow(request, request.known)
            size = min(size, budget) if chunked else size
            chunks.append((request, size))
            budget -= size
        self.blocks.evict()
        return chunks

    def forget_stale(self, request: _Request) -> None:
        """Cached blocks of the request's own that lie beyond its context are of no use any more."""
        self.blocks.cached = [b for b in self.blocks.cached if b[:2] != ("own", request.name) or b[2] * self.limits.block_tokens < request.hit]  # fmt: skip # noqa: E501

    def engine_step(self, decoding: list[_Request], chunks: list[tuple[_Request, int]]) -> None:
        """One engine_step: seconds, tokens, completions."""
        self.blocks.evict()
        keys = sum(r.cached + self.width for r in decoding)
        tokens = sum(size for _, size in chunks)
        pairs = sum(sum(r.cached + k + 1 for k in range(size)) for r, size in chunks)
        self.last_start = self.now
        self.now += self.step_seconds(len(decoding), keys, tokens, pairs, len(chunks))
        if decoding:
            gained = self.tokens_at(self.decode_steps + 1) - self.tokens_at(self.decode_steps)
            self.decode_steps += 1
            for r in decoding:
                left = int(self.t.response_tokens[r.turn]) - r.generated
                r.generated += min(gained, left)
                r.cached += min(gained, left)
        for r, size in chunks:
            r.cached += size
            if r.cached == r.known:
                r.decoding = True
                r.generated += 1
                if self.first_token[r.turn] < 0:
                    self.first_token[r.turn] = self.now
        ended = [r for r in self.running if r.decoding and r.generated == self.t.response_tokens[r.turn]]
        self.leaving = len(ended) if self.options.async_scheduling else 0
        for r in sorted(ended, key=lambda r: r.name):
            self.end_turn(r)

    def tokens_at(self, steps: int) -> int:
        """Tokens gained after ``steps`` decoding engine_steps."""
        return int(steps * self.gain + 1e-9)

    def step_seconds(self, running: int, keys: int, tokens: int, pairs: int, requests: int) -> float:
        """Seconds by the cost's own formula; with speculation w tokens per request pass the linear layers."""
        seconds = float(self.cost.engine_step_s(running, keys, tokens, pairs, requests))
        spec = self.options.speculation
        if spec is None or not running:
            return seconds
        plain = float(running + tokens) if tokens else float(self.cost.padded(running))
        wide = running * self.width + tokens if tokens else plain * self.width
        seconds += float(self.cost.linear(wide, mixed=tokens > 0) - self.cost.linear(plain, mixed=tokens > 0))
        return seconds + spec.draft_s + spec.draft_per_request_s * running

    def end_turn(self, request: _Request) -> None:
        """A turn is complete: the next one arrives when the tool has answered."""
        turn = request.turn
        self.finish[turn] = self.now
        self.running.remove(request)
        last = turn == self.t.offsets[request.name + 1] - 1
        self.leave(request, resumes=not last)
        if last:
            return
        latency = float(self.t.tool_latency_s[turn])
        start = self.now
        if self.tools:
            self.tools.sort()
            start = max(self.tools[0], self.now)
            self.tools[0] = start + latency
        request.turn += 1
        self.arrivals.append((start + latency, request.name))


def run_token_loop(
    trajectories: Trajectories,
    cost: EngineStepCost,
    limits: EngineLimits,
    options: EngineOptions,
) -> TokenLoopResult:
    """Simulate one replica engine_step by engine_step (reference for tests; arguments: `simulate_replica`)."""
    return TokenLoop(trajectories, cost, limits, options).run()
