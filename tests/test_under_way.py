"""Groups under way at once, whatever staleness allows: a batch's in miles, sixteen a replica in verl."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlperf.plan.judge.evaluate import Evaluation, Judge
from rlperf.plan.judge.timeline import steady_state
from rlperf.plan.question.context import resolve
from rlperf.plan.search.screen import screen
from rlperf.sim.rl_step.asynchronous import AsyncRun, simulate
from rlperf.sim.rl_step.flow import Allowed
from rlperf.sim.rl_step.replicas import TokenPace
from rlperf.specs.job import Job

JOB: dict[str, Any] = {
    "architecture": "Qwen3-4B", "cluster": "dgx_h100", "nodes": 1, "modes": ["async"], "trainer_backends": ["megatron"],
    "tasks": [{"name": "math", "workload": "math", "prompts_per_step": 32, "group_size": 4, "mini_batch": 32,
               "max_response_tokens": 8192}],
    "pools": [
        {"role": "rollout", "devices": 2, "layout": {"tensor_parallel": 1}, "settings": {"memory_fraction": 0.9}},
        {"role": "trainer", "devices": 6, "layout": {"tensor_parallel": 1, "pipeline_parallel": 1}},
    ],
}  # fmt: skip


def judged(framework: str, staleness: int = 2, **changes: object) -> Evaluation:
    job = Job.model_validate({**JOB, "framework": framework, "limits": {"staleness": staleness}, **changes})
    context = resolve(job)
    task = context.tasks[0]
    demand = task.source.demand(task.batches[0], None, 0)
    return Judge(context, task).evaluate(demand, screen(context, task, (demand,), keep=1).configurations[0])


def test_engines_of_one_batch_run_no_faster_with_more_staleness() -> None:
    seconds = {
        name: [float(judged(name, staleness).rollout.steady_s.mean()) for staleness in (1, 4)]
        for name in ("miles", "slime")
    }
    assert seconds["miles"][1] == pytest.approx(seconds["miles"][0])
    assert seconds["slime"][1] < 0.9 * seconds["slime"][0] < 0.9 * seconds["miles"][0]


def test_the_closed_form_is_the_events_where_one_batch_is_under_way() -> None:
    """Told as two batches it was 0.87 of them."""
    evaluation = judged("miles")
    events = steady_state(evaluation)
    assert events is not None and events.trainer_busy < 0.9
    assert evaluation.rl_step_s == pytest.approx(events.period_s, rel=0.08)


def test_groups_hold_their_places_until_their_longest_response() -> None:
    """K groups under way, each max L tokens long, are the throughput of K n E[L] / E[max L] requests."""
    lengths = np.random.default_rng(0).lognormal(6.0, 0.8, (4096, 4)).round()
    run = AsyncRun(lengths, 64, 0.1, TokenPace(0.01), slots=1024, max_staleness=8, groups=16)
    assert simulate(run, rl_steps=400).period_s == pytest.approx(0.01 * lengths.max(axis=1).mean(), rel=0.03)


def test_sixteen_prompts_of_a_replica_are_under_way_in_the_releases_that_count_them() -> None:
    math = {"tasks": [{**JOB["tasks"][0], "prompts_per_step": 256, "mini_batch": 256}]}
    old, new = (judged(f"verl=={version}", **math) for version in ("0.8.0", "0.9.1"))
    framework, demand = old.stack.framework, old.demand
    most = Allowed.of(framework, "async", 2, demand).requests
    assert most is not None and 0.5 * 16 * 4 < most < 16 * 4
    assert old.replicas.limits.max_running == most < new.replicas.limits.max_running
    assert Allowed.of(framework, "one_step_off", 1, demand).requests is None
