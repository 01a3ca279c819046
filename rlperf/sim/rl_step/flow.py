"""Flow: what a demand sends through the engines, and the seconds that follow without simulating who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

from rlperf.cost.engine_step import EngineLimits, EngineStepCost, recompute_s
from rlperf.layout import FloatArray
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
    batches : rl_steps whose requests run at once [1]
    requests : of a replica that run at once; None: any number
    """

    batches: float = 1.0
    requests: int | None = None

    @classmethod
    def of(cls, framework: FrameworkCalibration, mode: Mode, staleness: int, demand: Demand) -> Allowed:
        """Batches that staleness allows, or the groups that the program counts, each to its last response.

        K groups under way give E[L] / E[max L] of their samples a place on average, L of one and max L of its group.
        """
        ahead, groups = float(max(staleness, 1)), framework.under_way.get(mode)
        if groups is None:
            return cls(ahead)
        tokens = [(each.group, each.response_tokens.astype(np.float64)) for each in demand.trajectories]
        longest = np.mean([last_of_groups(*each)[0].mean() for each in tokens])
        running = float(np.mean([of_each.mean() for _, of_each in tokens]) / longest)
        if groups == "batch":
            return cls(min(ahead, running))
        return cls(ahead, max(int(groups * demand.batch.group_size * running), 1))


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
    batches : rl_steps whose requests are under way at once [1]
    """

    requests: float
    generated: float
    prompts: Read
    context: float
    added: Read = Read()
    again: Read = Read()
    group_length: float = 1.0
    group_work: float = 1.0
    batches: float = 1.0

    @classmethod
    def of(cls, demand: Demand, allowed: Allowed = ONE_BATCH) -> Flow:
        """Sums over all replicates."""
        tables = demand.trajectories
        prompts = np.concatenate([table.prompt_tokens for table in tables]).astype(np.float64)
        responses = np.concatenate([table.response_tokens for table in tables]).astype(np.float64)
        n, generated = len(tables), float(responses.sum())
        first = Read(float(prompts.sum()) / n, float((prompts**2).sum()) / 2.0 / n)
        length, work = np.mean([_groups_within(table) for table in tables], axis=0).tolist()
        if any(table.multi_turn for table in demand.tables):
            context, added, again = of_turns([Trajectories.from_table(table) for table in demand.tables])
        else:
            context = float((responses * (prompts + responses / 2.0)).sum()) / max(generated, 1.0)
            added = again = Read()
        return cls(len(prompts) / n, generated / n, first, context, added, again, length, work, allowed.batches)

    def read(self, copies: int, *, caching: bool) -> Read:
        """What is read where so many samples share a prompt, and turns find what stood before, if it is cached."""
        later = self.added if caching else self.again
        return Read(*(first / copies + more for first, more in zip(astuple(self.prompts), astuple(later), strict=True)))

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


def steady_running(limits: EngineLimits, replicas: int, flow: Flow) -> float:
    """Requests of a replica that run at once when finished ones are replaced: max_running, the cache, or its share.

    Its share is of all batches under way: a staleness bound of k lets rollout run k batches ahead, so that many are
    rolled out at once where the trainer is the one that waits.
    """
    share = max(flow.batches * flow.requests / replicas, 1.0)
    return max(min(float(limits.max_running), limits.kv_tokens / flow.context, share), 1.0)


def steady_seconds(
    cost: EngineStepCost, limits: EngineLimits, replicas: int, demand: Demand, flow: Flow | None = None,
    readers: int = 0,
) -> float:  # fmt: skip
    r"""Seconds per rl_step of replicas that always find the next request: throughput, without a tail.

    .. math:: t = \frac{1}{R} \Big( \frac{G}{C}\, t_{step}(C, C \bar k) + t_{prefill} \Big)

    G generated tokens per rl_step, R replicas, C requests running at once (max_running, or what the cache holds at the
    mean context), k mean context in flight (`Flow.context`) [tokens]. Where ``readers`` others read the prompts, the
    slower of both stations binds: max(G t_step / (C R), t_prefill / readers).
    """
    flow = flow or Flow.of(demand)
    running = steady_running(limits, replicas, flow)
    step = float(cost.decode_s(running, running * flow.context))
    copies = max(demand.batch.group_size, 1) if limits.prefix_caching else 1
    budget, read = float(limits.token_budget), flow.read(copies, caching=limits.prefix_caching)
    full = float(cost.engine_step_s(0.0, 0.0, budget, 0.0, 1.0))
    prefill = read.tokens / budget * full + cost.prefill_per_pair_s * read.pairs
    decode = flow.generated / running * step
    if readers:
        return max(decode / replicas, float(prefill) / readers)
    return (decode + float(prefill)) / replicas


def interrupted_seconds(
    cost: EngineStepCost, limits: EngineLimits, replicas: int, flow: Flow, readers: int = 0
) -> float:
    """Prefill of what a replica has under way in the steady state [s]; by ``readers`` for all, where there are some."""
    again = recompute_s(cost, float(limits.token_budget), steady_running(limits, replicas, flow), flow.context)
    return again * replicas / readers if readers else again
