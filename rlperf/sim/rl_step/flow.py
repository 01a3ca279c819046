"""Flow: what a demand sends through the engines, and what of it may be under way at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

from rlperf.layout import FloatArray
from rlperf.sim.rl_step.between_turns import BetweenTurns
from rlperf.sim.rl_step.demand import Demand
from rlperf.sim.rollout.tail import last_of_groups
from rlperf.sim.rollout.trajectories import Trajectories
from rlperf.specs.modes import Mode
from rlperf.specs.rl_calibration import FrameworkCalibration
from rlperf.workload.lengths import LengthTable


@dataclass(frozen=True)
class Allowed:
    """What may be under way at once, in a mode as the framework's program runs it.

    Attributes
    ----------
    batches : rl_steps whose requests run at once where the trainer is never waited for [1]
    most : the same where it waits: one more, if staleness is all that bounds them [1]
    requests : of a replica that run at once; None: any number
    of_groups : share of the trajectories of groups under way that run: of a bound that counts whole groups [1]
    """

    batches: float = 1.0
    most: float = 1.0
    requests: int | None = None
    of_groups: float = 1.0

    @classmethod
    def of(cls, framework: FrameworkCalibration, mode: Mode, staleness: int, demand: Demand) -> Allowed:
        """Batches that staleness allows, or the groups that the program counts, each to its last response.

        Engines that drain for every weight sync have ended all that was started by then: one batch may follow.
        """
        as_run = framework.in_mode(mode)
        drains = not as_run.in_flight_updates and not as_run.partial_rollout
        ahead, groups = 1.0 if drains else float(max(staleness, 1)), framework.under_way.get(mode)
        if drains and groups is None:
            return ONE_BATCH
        if groups is None:
            share = demand.running_share if framework.bounds_groups else 1.0
            return cls(ahead, ahead + (1.0 if staleness > 0 else 0.0), of_groups=share)
        if groups == "batch":
            return cls(min(ahead, demand.running_share), min(ahead, demand.running_share))
        return cls(ahead, ahead, max(int(groups * demand.batch.group_size * demand.running_share), 1))


ONE_BATCH = Allowed()


def fewest(*limits: int | None) -> int | None:
    """The least of some limits; None: there is none.

    >>> fewest(8, None, 16), fewest(None)
    (8, None)
    """
    return min((each for each in limits if each is not None), default=None)


@dataclass(frozen=True)
class Read:
    """Tokens that engines read per rl_step, and pairs of them with what stands before: half the square of a prompt."""

    tokens: float = 0.0
    pairs: float = 0.0


NOTHING = Read()


@dataclass(frozen=True)
class Flow:
    """What a demand sends through the engines, means over its rl_steps.

    Attributes
    ----------
    requests, generated : trajectories and generated tokens per rl_step
    prompts : first prompts of all trajectories
    added, again : of later turns what tools have written, and all that stands before the turn
    context : mean cached tokens of a running request, weighted by the time it runs: E[L (p + L / 2)] / E[L], L of a
        turn and p what stands before it [tokens]
    group_length, group_work : of a group's longest trajectory, mean: its length over that of the rl_step's longest, and
        the share of all generated tokens that are there when it ends [1]
    allowed : what may be under way at once
    copies : trajectories of a group, which share their first prompt [1]
    at_once : trajectories under way at most, over all replicas, that their environment allows, or those of the groups
        that a program bounds (`Allowed.of_groups` of them run); None: any number
    waits : for tools between turns; None: there is one turn
    """

    requests: float
    generated: float
    prompts: Read
    context: float
    added: Read = NOTHING
    again: Read = NOTHING
    group_length: float = 1.0
    group_work: float = 1.0
    allowed: Allowed = ONE_BATCH
    copies: int = 1
    at_once: int | None = None
    waits: BetweenTurns | None = None

    @classmethod
    def of(cls, demand: Demand, allowed: Allowed = ONE_BATCH) -> Flow:
        """Sums over all replicates."""
        tables = demand.trajectories
        prompts = np.concatenate([table.prompt_tokens for table in tables]).astype(np.float64)
        responses = np.concatenate([table.response_tokens for table in tables]).astype(np.float64)
        n, generated = len(tables), float(responses.sum())
        first = Read(float(prompts.sum()) / n, float((prompts**2).sum()) / 2.0 / n)
        length, work = np.mean([_groups_within(table) for table in tables], axis=0).tolist()
        waits = None
        if any(table.multi_turn for table in demand.tables):
            rl_steps = [Trajectories.from_table(table) for table in demand.tables]
            context, added, again = of_turns(rl_steps)
            waits = None if all(each.single_turn for each in rl_steps) else BetweenTurns.of(rl_steps)
        else:
            context = float((responses * (prompts + responses / 2.0)).sum()) / max(generated, 1.0)
            added = again = NOTHING
        return cls(
            len(prompts) / n, generated / n, first, context, added, again, length, work, allowed,
            max(demand.batch.group_size, 1), demand.batch.max_trajectories, waits,
        )  # fmt: skip

    def read(self, *, caching: bool) -> Read:
        """What is read where a group's prompt is read once and turns find what stood before, if it is cached."""
        copies, later = (self.copies, self.added) if caching else (1, self.again)
        return Read(*(first / copies + more for first, more in zip(astuple(self.prompts), astuple(later), strict=True)))

    def under_way(self, batches: float, replicas: int) -> float:
        """Trajectories that a replica has under way: its share of so many batches, or fewer that are allowed [1]."""
        bounds = [max(batches * self.requests / replicas, 1.0)]
        if self.at_once is not None:
            bounds.append(self.allowed.of_groups * -(-self.at_once // replicas))
        if self.allowed.requests is not None:
            bounds.append(float(self.allowed.requests))
        return min(bounds)

    def group_seconds(self, makespan_s: FloatArray, steady_s: FloatArray) -> FloatArray:
        """Mean time of a group within a rollout [s]: by work as far as throughput rules, by length in the tail.

        It grows with both arguments (group_work >= group_length), so a dominated column stays dominated.
        """
        with np.errstate(invalid="ignore"):
            busy = np.minimum(steady_s, makespan_s)
            seconds = self.group_length * (makespan_s - busy) + self.group_work * busy
        return np.asarray(np.where(np.isfinite(makespan_s), seconds, np.inf))


def of_turns(rl_steps: Sequence[Trajectories]) -> tuple[float, Read, Read]:
    """`Flow.context`, `Flow.added` and `Flow.again` of trajectories of one turn or several."""
    reading, generated, added, again = 0.0, 0.0, np.zeros(2), np.zeros(2)
    for each in rl_steps:
        before, response = (a.astype(np.float64) for a in (each.prompt_tokens, each.response_tokens))
        reading += float((response * (before + response / 2.0)).sum())
        generated += float(response.sum())
        later = np.ones(before.size, dtype=np.bool_)
        later[each.offsets[:-1]] = False
        whole = before[later]
        new = np.maximum(whole - each.final_tokens[:-1][later[1:]], 0.0)
        added += (new.sum(), (new * (whole - new / 2.0)).sum())
        again += (whole.sum(), (whole**2).sum() / 2.0)
    context = reading / max(generated, 1.0)
    return context, Read(*(added / len(rl_steps)).tolist()), Read(*(again / len(rl_steps)).tolist())


def _groups_within(table: LengthTable) -> tuple[float, float]:
    """(length, work) of a group's longest trajectory, relative to the rl_step's, mean over groups [1]."""
    tokens = table.response_tokens.astype(np.float64)
    last, _ = last_of_groups(table.group, tokens)
    ordered = np.sort(tokens)
    below = np.searchsorted(ordered, last, side="right")
    done = np.concatenate([[0.0], np.cumsum(ordered)])[below] + last * (ordered.size - below)
    return float(last.mean() / ordered[-1]), float(done.mean() / ordered.sum())
