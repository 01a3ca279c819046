"""What engines lose where they compute again what was evicted, and how many agents at once would spare them that."""

from __future__ import annotations

from dataclasses import replace

from rlperf.plan.judge.evaluate import Evaluation, Judge
from rlperf.plan.judge.timeline import execution_in
from rlperf.plan.question.context import Context, TaskContext
from rlperf.sim.rl_step.flow import Allowed, fewest
from rlperf.specs.modes import Form
from rlperf.units import human_seconds

WORTH_A_WORD = 0.01
"""Share of a rollout from which computing again what was evicted is advised against [1]."""
FEWER, TOO_FEW = 0.98, 1.2
"""Fewer trajectories at once are told where an rl_step takes no more than this of its time; none are tried below a
number with which it takes this much longer."""


def refills(evaluation: Evaluation) -> bool:
    """Whether requests that end are replaced at once, so that a rollout alone tells nothing of its engines."""
    return int(execution_in(evaluation).form) == Form.REFILLED


def lost_share(evaluation: Evaluation, cause: str) -> float:
    """Share of the rollout's device-seconds that a cause takes [1]."""
    spent = sum(result.makespan_s * result.all_devices for result in evaluation.rollouts)
    return float(sum(getattr(r.lost, cause) for r in evaluation.rollouts)) / spent


def evicted_share(evaluation: Evaluation) -> float:
    """Share of the rollout that computes again what was evicted [1]."""
    rollout = evaluation.rollout
    if refills(evaluation) and rollout.evicted_s is not None and rollout.evicted_s.any():
        return float(rollout.evicted_s.mean() / rollout.steady_s.mean())
    return lost_share(evaluation, "preemption")


def fewer_at_once(context: Context, task: TaskContext, evaluation: Evaluation) -> tuple[str, ...]:
    """How many trajectories at once serve best, where contexts are evicted while their tools run: judged at halves."""
    demand = evaluation.demand
    if evicted_share(evaluation) < WORTH_A_WORD or all(table.single_turn for table in evaluation.served):
        return ()
    configuration, judge = evaluation.configuration, Judge(context, task)
    allowed = Allowed.of(evaluation.framework, configuration.mode, configuration.staleness, demand)
    whole = round((allowed.most if refills(evaluation) else 1.0) * demand.batch.generated * demand.batch.group_size)
    most = fewest(whole, demand.batch.max_trajectories) or whole
    found, at = [(evaluation.rl_step_s, most)], most // 2
    while at >= evaluation.replicas.writers and found[-1][0] <= TOO_FEW * evaluation.rl_step_s:
        fewer = replace(demand, batch=replace(demand.batch, max_trajectories=at))
        found.append((judge.evaluate(fewer, configuration).rl_step_s, at))
        at //= 2
    best, enough = min(found)
    if best > FEWER * evaluation.rl_step_s:
        return ()
    words = f"{enough:,} trajectories at once (max_trajectories) instead of {most:,}: rl_step {human_seconds(best)}"
    instead = f"instead of {human_seconds(evaluation.rl_step_s)}"
    return (f"{words} {instead}, since fewer contexts are evicted while their tools run",)
