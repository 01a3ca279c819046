"""Blocks of a paged KV cache, counted in runs of blocks instead of one by one.

A trajectory's context is its group's shared prefix (full blocks of the first prompt, or of its beginning) followed by
blocks of its own. Blocks of running requests are held; with prefix caching, blocks of a turn that ended and will
continue, or of a preempted request, stay behind unheld and are evicted least recently used, from the end of each run,
when held blocks need the room. Mechanism: vLLM (Kwon et al. 2023, arXiv 2309.06180) and its automatic prefix caching;
blocks become visible to others as soon as they are scheduled. A trajectory that has ended for good leaves only its
group's prefix.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from rlperf.cost.engine_step import EngineLimits
from rlperf.sim.rollout.trajectories import Trajectories


class BlockCache:
    """Evictable blocks and holders of shared prefixes of one replica; the caller counts the blocks held."""

    def __init__(self, trajectories: Trajectories, limits: EngineLimits) -> None:
        self.block = limits.block_tokens
        finite = np.isfinite(limits.kv_tokens)
        self.total: float = int(limits.kv_tokens // limits.block_tokens) if finite else np.inf
        self.reserve: float = int(np.ceil(limits.watermark * self.total)) if finite else 0
        recorded = trajectories.cached_tokens
        self.recorded: list[int] | None = None if recorded is None else recorded.tolist()
        self.sharing = limits.prefix_caching and self.recorded is None
        names, group = np.unique(trajectories.group, return_inverse=True)
        shortest = np.full(len(names), np.iinfo(np.int64).max)
        np.minimum.at(shortest, group.reshape(-1), trajectories.beginnings)
        shared = shortest // self.block if self.sharing else np.zeros(len(names), dtype=np.int64)
        self.group: list[int] = group.reshape(-1).tolist()
        self.shared: list[int] = shared.tolist()
        """Full blocks of what each group shares of its first prompts."""
        self.holders = [0] * len(names)
        self.adjust = 0
        """Blocks held beyond those that requests count for themselves: shared prefixes are held once."""
        self.prefix_left = [0] * len(names)
        self.own_left = [0] * len(self.group)
        self.unheld: OrderedDict[int, None] = OrderedDict()
        """Runs of evictable blocks, oldest first: trajectory i as i, the prefix of group g as -1 - g."""
        self.unheld_blocks = 0
        self.evicted = False
        self.most = 0
        """Most blocks that were ever asked for, held and kept."""

    def add_group(self, shared_tokens: int) -> int:
        """A further group, whose trajectories share so many tokens of their first prompts; its number."""
        self.shared.append(shared_tokens // self.block if self.sharing else 0)
        self.holders.append(0)
        self.prefix_left.append(0)
        return len(self.shared) - 1

    def add(self, group: int) -> None:
        """A further trajectory of a group, numbered in turn."""
        self.group.append(group)
        self.own_left.append(0)

    def forget(self) -> None:
        """All that nobody holds is void."""
        for key in self.unheld:
            left, at = (self.own_left, key) if key >= 0 else (self.prefix_left, -1 - key)
            left[at] = 0
        self.unheld.clear()
        self.unheld_blocks = 0

    def lookup(self, i: int, turn: int, tokens: int) -> int:
        """Tokens of a context of ``tokens`` that need no computation now."""
        if self.recorded is not None:
            return min(self.recorded[turn], tokens - 1)
        if not self.sharing:
            return 0
        g = self.group[i]
        shared = self.shared[g]
        left = shared if self.holders[g] else self.prefix_left[g]
        if left == shared:
            left += min(self.own_left[i], (tokens - 1) // self.block - shared)
        return left * self.block

    def kept_of(self, computed: int) -> int:
        """Tokens of a context of ``computed`` that stay for its next turn unless they are evicted: whole blocks."""
        return computed - computed % self.block if self.sharing and self.recorded is None else 0

    def blocks_to_admit(self, i: int, tokens: int) -> int:
        """Blocks that admitting a context of ``tokens`` adds to the held ones."""
        g = self.group[i]
        new = -(-tokens // self.block)
        return new if not self.holders[g] else new - self.shared[g]

    def admit(self, i: int, tokens: int, held: int, reserve: float) -> int:
        """Blocks held once a context of ``tokens`` is admitted beside ``held`` ones; -1 where it does not fit.

        ``reserve`` : blocks that stay free. What is kept and does not fit beside ``held`` goes: its own may serve it.
        """
        then = held + self.blocks_to_admit(i, tokens)
        if then + reserve > self.total:
            return -1
        if self.asked(then) > self.total and held + self.unheld_blocks > self.total:
            self.evict(held)
        return then

    def hold(self, i: int) -> None:
        """Trajectory i is admitted: its group's prefix is held, its own leftovers are taken over."""
        g = self.group[i]
        if self.holders[g]:
            self.adjust -= self.shared[g]
        elif self.prefix_left[g]:
            self.unheld_blocks -= self.prefix_left[g]
            del self.unheld[-1 - g]
            self.prefix_left[g] = 0
        self.holders[g] += 1
        if self.own_left[i]:
            self.unheld_blocks -= self.own_left[i]
            del self.unheld[i]
            self.own_left[i] = 0

    def release(self, i: int, computed: int, resumes: bool) -> None:
        """Trajectory i stops running with ``computed`` tokens in the cache; ``resumes``: it will come back."""
        g = self.group[i]
        self.holders[g] -= 1
        if not self.sharing:
            return
        full, shared, others = computed // self.block, self.shared[g], self.holders[g]
        if others:
            self.adjust += shared
        own = full - shared
        if resumes and own > 0:
            self.own_left[i] = own
            self.unheld[i] = None
            self.unheld_blocks += own
        if not others and (kept := min(full, shared)) > 0:
            self.prefix_left[g] = kept
            self.unheld[-1 - g] = None
            self.unheld_blocks += kept

    def asked(self, held: int) -> int:
        """Blocks of ``held`` ones with those kept beside them; the most are remembered."""
        blocks = held + self.unheld_blocks
        if blocks > self.most:
            self.most = blocks
        return blocks

    @property
    def roomy_tokens(self) -> float:
        """A cache from which on nothing that happened would change; infinite where a larger one might [tokens]."""
        return np.inf if self.evicted else min(self.most + self.reserve, self.total) * self.block

    def evict(self, held: float) -> None:
        """Give up unheld blocks, oldest first, until they fit beside ``held`` ones."""
        excess = int(self.unheld_blocks + held - self.total)
        while excess > 0 and self.unheld:
            key = next(iter(self.unheld))
            left, at = (self.own_left, key) if key >= 0 else (self.prefix_left, -1 - key)
            self.evicted = True
            kept = left[at]
            if kept > excess:
                left[at] = kept - excess
                self.unheld_blocks -= excess
                return
            left[at] = 0
            self.unheld_blocks -= kept
            excess -= kept
            del self.unheld[key]
