"""What engines lose where they compute again what was evicted, and agents fewer of whom at once spare them that."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from rlperf.plan.judge.evaluate import Evaluation, Judge
from rlperf.plan.judge.timeline import execution_in, flow_in
from rlperf.sim.rl_step.ahead import AT, batches_beyond
from rlperf.sim.rl_step.flow import Flow
from rlperf.sim.rl_step.refilled import refilled
from rlperf.sim.rl_step.stage_seconds import beside_engines_s
from rlperf.specs.modes import MODES, Form

WORTH_A_WORD = 0.01
"""Share of a rollout from which computing again what was evicted is advised against [1]."""
FEWER, TOO_FEW = 0.98, 1.2
"""Fewer trajectories at once are worth it where an rl_step takes no more than this of its time; none are tried below a
number with which it takes this much longer."""
FLATTERED = 0.76
"""rl_steps of closed forms over those of events with half of a staleness, over the same with all of it: the least of 84
pairs, of engines at the edge of evicting (docs/decisions/rl-step.md). No smaller staleness is taken for less."""


def refills(evaluation: Evaluation) -> bool:
    """Whether requests that end are replaced at once, so that a rollout alone tells nothing of contexts that wait."""
    return int(execution_in(evaluation).form) == Form.REFILLED


def lost_share(evaluation: Evaluation, cause: str) -> float:
    """Share of the rollout's device-seconds that a cause takes [1]."""
    spent = sum(result.makespan_s * result.all_devices for result in evaluation.rollouts)
    return float(sum(getattr(r.lost, cause) for r in evaluation.rollouts)) / spent


def evicted_share(evaluation: Evaluation) -> float:
    """Share of the rollout that computes again what was evicted [1]; of agents that run ahead, as it goes on."""
    rollout, seconds = evaluation.rollout, evaluation.seconds
    if not refills(evaluation) or rollout.ahead_s is None or rollout.again_s is None:
        return lost_share(evaluation, "preemption")
    _, rest, apart = beside_engines_s(rollout, execution := execution_in(evaluation), seconds)
    at = batches_beyond(seconds.rl_step_s, rest, apart, execution.grouped)
    share = [
        np.interp(x, AT, again / took) for x, again, took in zip(at, rollout.again_s, rollout.ahead_s, strict=True)
    ]
    return float(np.mean(share))


def preemptions(evaluation: Evaluation) -> float:
    """Of an rl_step, mean over the replicates; 0 of agents that run ahead, whose steady state counts no requests."""
    if refills(evaluation) and evaluation.rollout.ahead_s is not None:
        return 0.0
    of_replica = [result.preemptions / len(result.timelines) for result in evaluation.rollouts]
    return sum(of_replica) / len(of_replica) * evaluation.replicas.writers


def under_way(evaluation: Evaluation, flow: Flow | None = None) -> int:
    """Trajectories of all replicas that may be under way, however many environments there are."""
    flow, writers = flow or flow_in(evaluation), evaluation.replicas.writers
    batches = flow.allowed.most if refills(evaluation) else 1.0
    return round(writers * replace(flow, at_once=None).under_way(batches, writers))


def with_fewer_at_once(judge: Judge, evaluation: Evaluation) -> list[Evaluation]:
    """The same with fewer trajectories at once, where contexts are evicted while their tools run: halves are judged.

    In the steady state closed forms tell which number serves fastest, and it is judged with the next below.
    """
    if evicted_share(evaluation) < WORTH_A_WORD or not _are_agents(evaluation):
        return []
    flow, demand, writers = flow_in(evaluation), evaluation.demand, evaluation.replicas.writers
    most = most_at_once(evaluation, flow)
    found: list[Evaluation] = []
    whole = demand.batch.group_size if evaluation.framework.bounds_groups else 1
    for at in _fastest(evaluation, flow, most) if refills(evaluation) else _halves(most, writers):
        batch = replace(demand.batch, max_trajectories=-(-at // whole) * whole)
        found.append(judge.evaluate(replace(demand, batch=batch), replace(evaluation.configuration, batch=batch)))
        if found[-1].rl_step_s > TOO_FEW * evaluation.rl_step_s:
            break
    return found


def with_fewer_running(judge: Judge, evaluation: Evaluation) -> list[Evaluation]:
    """The same with fewer requests at once in every engine, where they preempt and a job states how many: halves."""
    configuration, writers = evaluation.configuration, evaluation.replicas.writers
    stated = configuration.pool("rollout").settings.max_running
    if stated is None or preemptions(evaluation) < 1.0 or evicted_share(evaluation) < WORTH_A_WORD:
        return []
    found: list[Evaluation] = []
    for at in _halves(min(stated, -(-most_at_once(evaluation) // writers)), 1):
        found.append(judge.evaluate(evaluation.demand, configuration.with_rollout(max_running=at)))
        if found[-1].rl_step_s > TOO_FEW * evaluation.rl_step_s:
            break
    return found


def with_less_staleness(judge: Judge, evaluation: Evaluation) -> list[Evaluation]:
    """The same with fewer rl_steps under way than the job's limit allows, where contexts are evicted: halves of it.

    Those alone that spare more than closed forms flatter small limits by (`FLATTERED`).
    """
    configuration, found = evaluation.configuration, list[Evaluation]()
    if evicted_share(evaluation) < WORTH_A_WORD or not (_are_agents(evaluation) and refills(evaluation)):
        return []
    staleness, least = configuration.staleness // 2, max(MODES[configuration.mode].least_staleness, 1)
    while staleness >= least:
        found.append(judge.evaluate(evaluation.demand, replace(configuration, staleness=staleness)))
        staleness //= 2
    return [each for each in found if each.rl_step_s <= FLATTERED * evaluation.rl_step_s]


def most_at_once(evaluation: Evaluation, flow: Flow | None = None) -> int:
    """Trajectories of all replicas that are under way at most."""
    flow = flow or flow_in(evaluation)
    return min(under_way(evaluation, flow), flow.at_once or sys.maxsize)


def _are_agents(evaluation: Evaluation) -> bool:
    return not all(table.single_turn for table in evaluation.served)


def _halves(most: int, least: int) -> Iterator[int]:
    at = most // 2
    while at >= least:
        yield at
        at //= 2


def _fastest(evaluation: Evaluation, flow: Flow, most: int) -> list[int]:
    """Of halves and thirds the number at once that engines serve fastest whose finished requests are replaced, and the
    next below, which evicts less and is no slower where the trainer sets the pace."""
    engine = evaluation.cost, evaluation.replicas.limits, evaluation.replicas.writers
    tried = sorted({*_halves(most, engine[2]), *_halves(most * 4 // 3, engine[2])})
    if not tried:
        return []
    served = [refilled(*engine, replace(flow, at_once=at)).seconds for at in tried]
    best = int(np.argmin(served))
    return tried[max(best - 1, 0) : best + 1][::-1]
