"""Policies for the tail that no framework's plan asks for: waiting for all, rounds of short and of long prompts, DAPO's
dynamic sampling. The protocol and partial rollouts, which plans do ask for, are in `rlperf.sim.rollout.tail`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rlperf.errors import SpecError
from rlperf.sim.rollout import GroupSource, PolicyRun, Trajectories
from rlperf.sim.rollout.tail import PolicyStep, Serve, first_groups, generated_at, joined


class TailPolicy(Protocol):
    """Decides what an rl_step waits for."""

    def run(self, source: GroupSource, serve: Serve, groups: int, rl_steps: int) -> PolicyRun:
        """Roll out ``rl_steps`` of ``groups`` prompt groups each."""
        ...


@dataclass(frozen=True)
class Synchronous:
    """Every rl_step waits for all its trajectories."""

    def run(self, source: GroupSource, serve: Serve, groups: int, rl_steps: int) -> PolicyRun:
        """Makespan of each batch."""
        steps = []
        for _ in range(rl_steps):
            result = serve(source.draw(groups))
            tokens = result.generated_tokens
            steps.append(PolicyStep(result.makespan_s, groups, tokens, tokens))
        return PolicyRun(tuple(steps))


@dataclass(frozen=True)
class TailBatching:
    """Rounds of prompts that turn out short; prompts with a long response wait and make a round of their own.

    Mechanism: RollPacker (arXiv 2509.21009, section 4): a short round starts more prompts than it needs and takes those
    that complete first; the rest are aborted (on-policy: nothing is kept) and queued. When the queue holds a whole
    batch, a long round rolls it out to the end.

    Attributes
    ----------
    over_prompts : prompts started over prompts needed in a short round
    """

    over_prompts: float = 1.25

    def run(self, source: GroupSource, serve: Serve, groups: int, rl_steps: int) -> PolicyRun:
        """Short rounds until the queue of aborted prompts fills a long one."""
        start = max(round(groups * self.over_prompts), groups)
        queue: Trajectories | None = None
        steps = []
        for _ in range(rl_steps):
            if queue is not None and len(np.unique(queue.group)) >= groups:
                names = np.unique(queue.group)[:groups]
                chosen = np.isin(queue.group, names)
                batch, queue = queue.take(chosen), queue.take(~chosen)
                tokens = int(batch.response_tokens.sum())
                steps.append(PolicyStep(serve(batch).makespan_s, groups, tokens, tokens))
                continue
            batch = source.draw(start)
            result = serve(batch)
            done, stop_s = first_groups(batch.group, result.finish_s, groups)
            at_stop = generated_at(result, batch, stop_s)
            trained = int(batch.generated_tokens[done].sum())
            steps.append(
                PolicyStep(
                    seconds=stop_s,
                    groups=groups,
                    trained_tokens=trained,
                    generated_tokens=trained + int(at_stop[~done].sum()),
                    discarded_tokens=int(at_stop[~done].sum()),
                )
            )
            queue = batch.take(~done) if queue is None else joined(queue, batch.take(~done))
        return PolicyRun(tuple(steps))


@dataclass(frozen=True)
class DynamicSampling:
    """Generate batch after batch until enough groups carry a signal; surplus groups are dropped.

    Mechanism: DAPO (arXiv 2503.14476, section 3.2): groups whose rewards are all equal have no advantage and are
    filtered out. The number of generation batches per rl_step is a random number, and so is its time.

    Attributes
    ----------
    keep_share : probability that a group survives the filter [1]
    generated_over_trained : groups per generation batch over groups per rl_step
    most_batches : generation batches after which the rl_step trains on what there is
    seed : of the filter's draws
    """

    keep_share: float
    generated_over_trained: float = 3.0
    most_batches: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.keep_share <= 1.0:
            raise SpecError(f"dynamic sampling: keep_share must be above 0 and at most 1, not {self.keep_share}")

    def run(self, source: GroupSource, serve: Serve, groups: int, rl_steps: int) -> PolicyRun:
        """Makespans of the generation batches of each rl_step, one after the other."""
        rng = np.random.default_rng(self.seed)
        size = max(round(groups * self.generated_over_trained), 1)
        steps = []
        for _ in range(rl_steps):
            seconds, kept, trained, generated = 0.0, 0, 0, 0
            for _ in range(self.most_batches):
                batch = source.draw(size)
                seconds += serve(batch).makespan_s
                names = np.unique(batch.group)
                good = names[rng.random(len(names)) < self.keep_share][: groups - kept]
                kept += len(good)
                trained += int(batch.generated_tokens[np.isin(batch.group, good)].sum())
                generated += int(batch.generated_tokens.sum())
                if kept == groups:
                    break
            steps.append(PolicyStep(seconds, kept, trained, generated, discarded_tokens=generated - trained))
        return PolicyRun(tuple(steps))
