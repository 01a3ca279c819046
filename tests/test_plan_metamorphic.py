"""What must hold of any plan: more never hurts, names mean nothing, equal rates scale the time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from rlperf.api import ask
from rlperf.plan.answer.plan import Plan
from rlperf.plan.planner import plan_job
from rlperf.plan.question.context import Context
from rlperf.plan.size import parse_target, size_job
from rlperf.specs.job import Job

TASK = {
    "name": "math", "workload": "math", "prompts_per_step": 32, "group_size": 4, "mini_batch": 16,
    "max_prompt_tokens": 512, "max_response_tokens": 2048,
}  # fmt: skip


def job(**changes: object) -> Job:
    base: dict[str, object] = {"architecture": "Qwen3-4B", "cluster": "dgx_h100", "tasks": [TASK]}
    return Job.model_validate({**base, **changes})


def planned(found: Job, change: object = None) -> Plan:
    question = ask(found)
    context: Context = question.context
    if callable(change):
        context = replace(context, hardware=change(context.hardware))
    return plan_job(context, facts=question.facts)


def rl_step_s(plan: Plan) -> float:
    return plan.phases[0].predicted.rl_step_s


def faster_memory(hw):  # type: ignore[no-untyped-def]
    return replace(hw, device=hw.device.model_copy(update={"memory_bandwidth": 1.5 * hw.device.memory_bandwidth}))


def more_memory(hw):  # type: ignore[no-untyped-def]
    return replace(hw, device=hw.device.model_copy(update={"memory": 2.0 * hw.device.memory}))


def faster_network(hw):  # type: ignore[no-untyped-def]
    return replace(hw, network=hw.network.model_copy(update={"bandwidth": 4.0 * hw.network.bandwidth}))


@pytest.mark.parametrize("change", [faster_memory, more_memory, faster_network])
def test_a_better_device_is_never_slower(change: object) -> None:
    base = job(nodes=2)
    assert rl_step_s(planned(base, change)) <= rl_step_s(planned(base)) * (1 + 1e-3)


def test_more_nodes_are_never_slower() -> None:
    times = [rl_step_s(planned(job(nodes=n))) for n in (1, 2, 3, 4)]
    assert all(later <= earlier * (1 + 1e-3) for earlier, later in pairwise(times))


def test_names_of_tasks_change_nothing() -> None:
    other = {**TASK, "name": "zeta", "max_response_tokens": 1024}
    first = planned(job(tasks=[TASK, other]))
    second = planned(job(tasks=[{**TASK, "name": "b"}, {**other, "name": "a"}]))
    assert first.objective == pytest.approx(second.objective, rel=1e-12)
    assert [p.pools for p in first.phases] == [p.pools for p in second.phases]


def test_a_second_task_adds_its_own_time() -> None:
    other = {**TASK, "name": "short", "max_response_tokens": 256}
    both, one, two = (planned(job(tasks=tasks)) for tasks in ([TASK, other], [TASK], [other]))
    assert both.objective == pytest.approx(one.objective + two.objective, rel=1e-9)


def test_a_longer_horizon_of_equal_groups_multiplies_the_objective() -> None:
    assert planned(job(horizon={"rl_steps": 10})).objective == pytest.approx(10 * planned(job()).objective, rel=0.1)


def test_sizing_finds_the_smallest_cluster_that_meets_the_target() -> None:
    times = {n: rl_step_s(planned(job(nodes=n))) for n in (1, 2)}
    limit = (times[1] + times[2]) / 2
    found = size_job(job(), parse_target(f"step<={limit} s"), lambda j: ask(j).pair, most_nodes=4)
    assert found.best is not None
    assert found.best.nodes == 2
    assert found.plan is not None
    assert rl_step_s(found.plan) <= limit
    none = size_job(job(), parse_target("step<=1 ms"), lambda j: ask(j).pair, most_nodes=2)
    assert none.best is None
    assert [row.nodes for row in none.rows] == [1, 2]


def test_usd_targets_need_a_price_and_take_the_cheapest() -> None:
    found = size_job(job(price="3 USD/h"), parse_target("usd/step<=100"), lambda j: ask(j).pair, most_nodes=2)
    assert found.best is not None
    assert found.best.usd_per_step == min(row.usd_per_step for row in found.rows if row.usd_per_step is not None)


@pytest.mark.parametrize("text", ["step<300s", "speed<=3", "step<=fast", "usd/step<=-1", "step <= 3 GB"])
def test_targets_that_make_no_sense(text: str) -> None:
    with pytest.raises(ValueError, match="target"):
        parse_target(text)
