"""What to do about the tail: policies that decide which trajectories an rl_step waits for.

A policy runs over many rl_steps, because what it does not wait for comes back later. It sees the rollout through one
function (`Serve`: trajectories -> `RolloutResult`), so it works with any replicas and routing; a new policy is a class
with one method `run`. The past of a simulated rollout does not depend on its future, so stopping early is reading the
completions in order, and costs no further simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlperf.errors import SpecError
from rlperf.layout import BoolArray, FloatArray, IntArray
from rlperf.sim.rollout.rollout import RolloutResult
from rlperf.sim.rollout.trajectories import Trajectories

FILLING, COUNTED = 2, 3
"""rl_steps that fill the buffer of partial rollouts, and how many behind them at least are counted."""
Serve = Callable[[Trajectories], RolloutResult]
"""How a batch of trajectories is rolled out; `functools.partial(simulate_rollout, replicas=..., ...)`."""


@dataclass(frozen=True)
class PolicyStep:
    """One rl_step under a policy.

    Attributes
    ----------
    seconds : rollout time [s]
    groups : prompt groups that can be trained on
    trained_tokens : their generated tokens [tokens]
    generated_tokens : tokens generated in this rl_step, used or not [tokens]
    stale_tokens : trained tokens that an earlier policy version generated [tokens]
    discarded_tokens : tokens generated in this rl_step that nobody will train on [tokens]
    """

    seconds: float
    groups: int
    trained_tokens: int
    generated_tokens: int
    stale_tokens: int = 0
    discarded_tokens: int = 0


@dataclass(frozen=True)
class PolicyRun:
    """All rl_steps of a run."""

    steps: tuple[PolicyStep, ...]

    @property
    def seconds_per_group(self) -> float:
        """Rollout seconds per trained group, over all rl_steps [s]."""
        return sum(s.seconds for s in self.steps) / sum(s.groups for s in self.steps)

    @property
    def seconds_per_token(self) -> float:
        """Rollout seconds per trained token, over all rl_steps [s]; fair where a policy prefers short responses."""
        return sum(s.seconds for s in self.steps) / sum(s.trained_tokens for s in self.steps)

    @property
    def stale_share(self) -> float:
        """Trained tokens that an earlier policy version generated [1]."""
        return sum(s.stale_tokens for s in self.steps) / sum(s.trained_tokens for s in self.steps)

    @property
    def discarded_share(self) -> float:
        """Generated tokens that nobody trains on [1]."""
        return sum(s.discarded_tokens for s in self.steps) / sum(s.generated_tokens for s in self.steps)


class GroupSource:
    """An endless supply of prompt groups, drawn from recorded or sampled ones in shuffled epochs."""

    def __init__(self, trajectories: Trajectories, seed: int = 0) -> None:
        self.trajectories = trajectories
        names, index = np.unique(trajectories.group, return_inverse=True)
        self._members = [np.flatnonzero(index.reshape(-1) == g) for g in range(len(names))]
        self._rng = np.random.default_rng(seed)
        self._order: list[int] = []
        self._next_name = 0

    def draw(self, groups: int) -> Trajectories:
        """The next groups; every draw gets a group number of its own."""
        while len(self._order) < groups:
            self._order += self._rng.permutation(len(self._members)).tolist()
        chosen, self._order = self._order[:groups], self._order[groups:]
        rows = np.concatenate([self._members[g] for g in chosen])
        names = np.repeat(np.arange(groups) + self._next_name, [len(self._members[g]) for g in chosen])
        self._next_name += groups
        return replace(self.trajectories.take(rows), group=names)


@dataclass(frozen=True)
class PartialRollouts:
    """Start more than needed, stop when enough groups are complete, continue the rest in the next rl_step.

    Mechanism: APRIL, active partial rollouts (arXiv 2509.18521, section 3): over-provisioned requests, early stop,
    unfinished responses kept in a buffer and resumed by prefilling prompt and prefix, since new weights void the cache.
    They go first in the next rl_step, topped up with fresh groups. Single-turn trajectories.

    Attributes
    ----------
    over_provision : groups in flight at the start of an rl_step over groups that it waits for, at least 1
    """

    over_provision: float = 1.5

    def steady_s(self, source: GroupSource, serve: Serve, groups: int) -> float:
        """Mean seconds of an rl_step once the buffer has filled [s].

        Responses that are cut end together: an rl_step that waits for them leaves complete what it started beside
        its own, and those behind it wait for nothing. So they repeat every floor(over_provision): whole turns count.
        """
        turn = int(self.over_provision)
        steps = self.run(source, serve, groups, FILLING + turn * -(-COUNTED // turn)).steps
        return float(np.mean([step.seconds for step in steps[FILLING:]]))

    def run(self, source: GroupSource, serve: Serve, groups: int, rl_steps: int) -> PolicyRun:
        """Groups complete in order of their last trajectory; the rl_step ends with the one that makes it enough."""
        flight = max(round(groups * self.over_provision), groups)
        steps = []
        pending = source.draw(flight)
        _single_turn(pending, "partial rollouts")
        had = np.zeros(len(pending), dtype=np.int64)  # tokens of earlier policy versions
        for _ in range(rl_steps):
            open_ = pending.response_tokens > had
            result = serve(continued(pending.take(open_), had[open_]))
            finish = np.zeros(len(pending))
            finish[open_] = result.finish_s
            done, stop_s = first_groups(pending.group, finish, groups)
            now = pending.response_tokens.copy()
            now[open_] = had[open_] + generated_at(result, continued(pending.take(open_), had[open_]), stop_s)
            steps.append(
                PolicyStep(
                    seconds=stop_s,
                    groups=groups,
                    trained_tokens=int(pending.response_tokens[done].sum()),
                    generated_tokens=int((now - had).sum()),
                    stale_tokens=int(had[done].sum()),
                )
            )
            fresh = source.draw(groups)
            pending, had = joined(pending.take(~done), fresh), np.concatenate([now[~done], np.zeros(len(fresh))])
            had = had.astype(np.int64)
        return PolicyRun(tuple(steps))


def last_of_groups(group: IntArray, value: FloatArray) -> tuple[FloatArray, IntArray]:
    """(Largest value of each group ``[groups]``, which of them each trajectory belongs to ``[trajectories]``).

    >>> [found.tolist() for found in last_of_groups(np.array([7, 7, 9]), np.array([1.0, 4.0, 2.0]))]
    [[4.0, 2.0], [0, 0, 1]]
    """
    names, index = np.unique(group, return_inverse=True)
    index = index.reshape(-1)
    last = np.zeros(len(names))
    np.maximum.at(last, index, value)
    return last, index


def running_share(tokens: Sequence[tuple[IntArray, IntArray]]) -> float:
    """Share of the samples of groups under way that run: E[L] / E[max L], L of one and max L of its group [1].

    ``tokens``: of some rl_steps, group and tokens of every sample

    >>> running_share([(np.array([0, 0, 1, 1]), np.array([1, 3, 2, 2]))])
    0.8
    """
    longest = np.mean([last_of_groups(group, own.astype(np.float64))[0].mean() for group, own in tokens])
    return float(np.mean([own.mean() for _, own in tokens]) / longest)


def first_groups(group: IntArray, finish_s: FloatArray, count: int) -> tuple[BoolArray, float]:
    """Trajectories of the ``count`` groups that complete first ``[trajectories]``, and when the last one does [s]."""
    complete, index = last_of_groups(group, finish_s)
    chosen = np.argsort(complete, kind="stable")[:count]
    taken = np.zeros(len(complete), dtype=np.bool_)
    taken[chosen] = True
    return taken[index], float(complete[chosen].max())


def generated_at(result: RolloutResult, trajectories: Trajectories, at_s: float) -> IntArray:
    """Tokens that each trajectory has generated at a time [tokens] ``[trajectories]``.

    Of single-turn trajectories: its first token and one per decoding engine_step since, but for those that it spent
    preempted, of which the last, that reads it again, yields one. Of several turns: the turns complete by then, and the
    share of time of the one that runs.
    """
    tokens = np.zeros(len(trajectories))
    for members, timeline in zip(result.members, result.timelines, strict=True):
        part = trajectories.take(members)
        seg = timeline.segments
        decoded = np.cumsum(seg.steps * (seg.running > 0))
        clock_s = np.concatenate([[0.0], seg.start_s + seg.seconds])
        steps = np.concatenate([[0], decoded])
        since = np.interp(at_s, clock_s, steps) - np.interp(timeline.first_token_s, clock_s, steps)
        pauses = timeline.pauses
        start, end = (np.interp(np.minimum(at_s, side), clock_s, steps) for side in (pauses.start_s, pauses.end_s))
        np.subtract.at(since, pauses.turn, end - start - (pauses.end_s <= at_s))
        running = np.minimum(1.0 + np.floor(np.maximum(since, 0.0)), part.response_tokens - 1.0)
        if not part.single_turn:
            span = np.maximum(timeline.finish_s - timeline.first_token_s, 1e-12)
            running = part.response_tokens * np.clip((at_s - timeline.first_token_s) / span, 0.0, 1.0)
        per_turn = np.where(timeline.first_token_s <= at_s, running, 0.0)
        per_turn = np.where(timeline.finish_s <= at_s, part.response_tokens, per_turn)
        tokens[members] = np.add.reduceat(per_turn, part.offsets[:-1]) if len(part) else 0.0
    return tokens.astype(np.int64)


def continued(trajectories: Trajectories, had: IntArray) -> Trajectories:
    """The rest of single-turn trajectories that have ``had`` tokens: prefilled with their prompts."""
    return replace(
        trajectories,
        prompt_tokens=trajectories.prompt_tokens + had,
        response_tokens=trajectories.response_tokens - had,
    )


def joined(first: Trajectories, second: Trajectories) -> Trajectories:
    """Both one after the other; recorded prefix hits are dropped."""
    return Trajectories(
        prompt_tokens=np.concatenate([first.prompt_tokens, second.prompt_tokens]),
        response_tokens=np.concatenate([first.response_tokens, second.response_tokens]),
        tool_latency_s=np.concatenate([first.tool_latency_s, second.tool_latency_s]),
        offsets=np.concatenate([first.offsets, second.offsets[1:] + first.offsets[-1]]),
        group=np.concatenate([first.group, second.group]),
        arrival_s=np.concatenate([first.arrival_s, second.arrival_s]),
        shared_tokens=_shared(first, second),
    )


def _shared(first: Trajectories, second: Trajectories) -> IntArray | None:
    """What groups share of their prompts, of both; a prompt that is shared whole is all that may be found."""
    if first.shared_tokens is None and second.shared_tokens is None:
        return None
    return np.concatenate([first.beginnings, second.beginnings])


def _single_turn(trajectories: Trajectories, what: str) -> None:
    if not trajectories.single_turn:
        raise SpecError(f"{what}: only single-turn trajectories can be stopped and continued")
