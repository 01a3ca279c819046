"""How many environments at once are enough before the engines wait for them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.plan.answer.gains import ENOUGH, environments
from rlperf.plan.answer.prediction import prediction_of
from rlperf.plan.judge.evaluate import Evaluation, Judge
from rlperf.plan.question.context import Context, resolve
from rlperf.plan.search.screen import screen
from rlperf.sim.rl_step.rollout_counted import SCREENED_RL_STEPS, Counted
from rlperf.sim.rl_step.simulated_rollouts import Engines
from rlperf.sim.rollout.rollout import simulate_rollout
from rlperf.sim.rollout.trajectories import Trajectories
from rlperf.specs.job import Job

JOB: dict[str, Any] = {
    "architecture": "Qwen3-4B",
    "cluster": "dgx_h100",
    "nodes": 1,
    "tasks": [
        {"name": "search", "workload": "searching", "prompts_per_step": 16, "group_size": 8,
         "max_prompt_tokens": 4096, "max_response_tokens": 8192}
    ],
    "pools": [{"role": "rollout", "layout": {"tensor_parallel": 2}}],
}  # fmt: skip


def judged(most: int | None, **changes: Any) -> tuple[Context, Evaluation]:
    asked = {**JOB, **changes}
    asked["tasks"] = [{**asked["tasks"][0], "max_trajectories": most}]
    context = resolve(Job.model_validate(asked))
    task = context.tasks[0]
    demand = task.source.demand(task.batches[0], None, 0)
    found = screen(context, task, (demand,), keep=1)
    return context, Judge(context, task).evaluate(demand, found.configurations[0])


def test_more_environments_are_never_slower() -> None:
    seconds = [float(judged(most)[1].rollout.makespan_s.mean()) for most in (8, 32, None)]
    assert seconds[0] > seconds[1] >= 0.999 * seconds[2]


def test_the_number_that_is_enough_is_enough() -> None:
    context, evaluation = judged(8)
    (line,) = environments(context, context.tasks[0], evaluation)
    enough = int(re.search(r"; ([\d,]+) are enough", line)[1].replace(",", ""))  # type: ignore[index]
    free = float(judged(None)[1].rollout.makespan_s.mean())
    assert enough > 8
    assert float(judged(enough)[1].rollout.makespan_s.mean()) == pytest.approx(free, rel=2 * (ENOUGH - 1.0))
    assert environments(context, context.tasks[0], judged(None)[1]) == ()


def test_environments_of_agents_that_run_ahead_are_told_by_the_rl_step() -> None:
    """Three batches may be under way, and 128 were enough for one, as doublings beyond what caches hold were."""
    ahead = {
        "framework": "areal", "modes": ["async"], "limits": {"staleness": 3}, "architecture": "Qwen2.5-7B",
        "pools": [
            {"role": "rollout", "devices": 4, "layout": {"tensor_parallel": 1},
             "settings": {"memory_fraction": 0.6, "max_running": 64}},
            {"role": "trainer", "devices": 4, "layout": {"tensor_parallel": 1}},
        ],
    }  # fmt: skip
    tasks = {each: {**JOB["tasks"][0], "workload": each} for each in ("software_engineering", "tool_use")}
    tasks["software_engineering"]["max_response_tokens"] = 28_000

    def told(most: int, workload: str) -> tuple[float, tuple[str, ...]]:
        context, evaluation = judged(most, **ahead, tasks=[tasks[workload]])
        return evaluation.rl_step_s, prediction_of(context, context.tasks[0], evaluation).gains

    few, (line,) = told(96, "software_engineering")
    assert "; 192 serve best (" in line and few > told(192, "software_engineering")[0]
    (line,) = told(384, "software_engineering")[1]
    assert " trajectories at once (max_trajectories) instead of 384: rl_step " in line
    (line,) = told(32, "tool_use")[1]  # whose trainer takes longer than engines with all that may be under way
    assert "; 256 are enough (" in line


@pytest.mark.parametrize("most", [8, 32])
def test_the_closed_form_is_the_events_where_trajectories_wait_for_environments(most: int) -> None:
    """Paces half an octave apart, and the replica with the most work taken for the last one, were up to 6 % off."""
    evaluation = judged(most)[1]
    engine = evaluation.replicas
    closed = Counted(evaluation.demand).turns_s(Engines(engine.cost, engine.limits, engine.count, None))
    assert closed == pytest.approx(float(evaluation.rollout.makespan_s[:SCREENED_RL_STEPS].mean()), rel=0.015)


def test_the_screen_serves_agents_at_their_own_pace_where_environments_take_long() -> None:
    """Most trajectories wait for their environment: at the pace of a full batch the makespan would be 29 % short."""
    context = resolve(Job.model_validate(JOB))
    drawn = context.tasks[0].source.demand(context.tasks[0].batches[0], None, 0)
    short = drawn.tables[0]
    assert short.tool_latency_s is not None
    long = replace(short, tool_latency_s=40.0 * short.tool_latency_s)
    cost = EngineStepCost(np.array([0.0, 1.0]), np.zeros(2), host_s=0.003, host_per_request_s=0.002)
    limits = EngineLimits(kv_tokens=np.inf, max_running=64)
    closed = Counted(replace(drawn, tables=(long,))).turns_s(Engines(cost, limits, 2, None))
    events = simulate_rollout(Trajectories.from_table(long), 2, cost=cost, limits=limits).makespan_s
    assert closed == pytest.approx(events, rel=0.002)
