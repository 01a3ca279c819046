"""Techniques as the planner decides them: its closed form is the events, and what it finds open is the best pinned."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from rlperf.api import ask
from rlperf.plan.judge.evaluate import Judge
from rlperf.plan.planner import plan_job
from rlperf.plan.question.context import resolve, with_trainers
from rlperf.plan.search.rollout_columns import rollout_columns
from rlperf.plan.search.screen import screen
from rlperf.sim.rl_step.rollout_counted import SCREENED_RL_STEPS
from rlperf.specs.job import Job

from .quick import slow_but

TRAINER = {"role": "trainer", "layout": {"tensor_parallel": 2, "context_parallel": 1, "pipeline_parallel": 1}}


def job_of(settings: dict[str, Any], layout: dict[str, Any] | None = None, **changes: Any) -> Job:
    """A job on one node with little open beside ``settings`` and ``layout`` of its rollout."""
    task = {"name": "t", "workload": "math", "prompts_per_step": 32, "group_size": 8, "max_prompt_tokens": 4096,
            "max_response_tokens": 4096, **changes.pop("task", {})}  # fmt: skip
    pool = {"role": "rollout", "layout": layout or {"tensor_parallel": 1},
            "settings": {"max_running": 64, "memory_fraction": 0.8, **settings}}  # fmt: skip
    base = {"architecture": "Qwen3-8B", "cluster": "dgx_h100", "nodes": 1, "framework": "verl", "modes": ["colocated"],
            "tasks": [task], "pools": [pool, TRAINER]}  # fmt: skip
    return Job.model_validate({**base, **changes})


SEARCHING = {"workload": "searching"}
AGENTS = {"workload": "software_engineering", "max_trajectories": 64, "max_prompt_tokens": 16384,
          "max_response_tokens": 16384}  # fmt: skip
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {  # what, of the task, how far the two may differ
    "fp8": ({"rollout_dtype": "fp8", "kv_dtype": "fp8"}, {}, 0.01),
    "drafts": ({"speculation": "eagle3:3"}, {}, 0.01),
    "environments of one turn": ({}, {"max_trajectories": 128}, 0.01),
    "turns": ({}, SEARCHING, 0.03),
    "few environments": ({}, {**SEARCHING, "max_trajectories": 32}, 0.03),
    "environments": ({}, {**SEARCHING, "max_trajectories": 64}, 0.03),
    "more environments": ({}, {**SEARCHING, "max_trajectories": 64, "prompts_per_step": 64}, 0.03),
    "turns without a prefix cache": ({"prefix_caching": False}, SEARCHING, 0.03),
    "drafts of fp8 in few environments": (
        {"rollout_dtype": "fp8", "speculation": "eagle3:3"},
        {**SEARCHING, "max_trajectories": 32},
        0.015,
    ),
    "agents": ({}, AGENTS, 0.025),
}


@pytest.mark.parametrize("name", slow_but(FORMS, "fp8", "few environments"))
def test_closed_form_is_the_events(name: str) -> None:
    settings, task, tolerance = FORMS[name]
    context = resolve(job_of(settings, task=task))
    asked = context.tasks[0]
    demand = asked.source.demand(asked.batches[0], None, 0)
    found = screen(context, asked, (demand,), keep=1)
    judged = Judge(context, asked).evaluate(demand, found.configurations[0])
    columns = rollout_columns(context, asked.architecture, demand, 8)
    (closed,) = columns.makespan_s[columns.flags == 0]
    events = judged.rollout.makespan_s[:SCREENED_RL_STEPS]
    assert float(closed) == pytest.approx(float(events.mean()), rel=tolerance)


OPEN: dict[str, tuple[dict[str, Any], dict[str, list[Any]], dict[str, list[Any]]]] = {  # job, settings, layout
    "cache and drafts": ({}, {"kv_dtype": ["bf16", "fp8"], "speculation": ["none", "eagle3:3"]}, {}),
    "weights and cache": ({}, {"rollout_dtype": ["bf16", "fp8"], "kv_dtype": ["bf16", "fp8"]}, {}),
    "prefix cache": ({"task": SEARCHING}, {"prefix_caching": [True, False]}, {}),
    "attention apart": (
        {"architecture": "Qwen3-30B-A3B", "framework": "slime", "engine": "sglang",
         "objective": {"bold": True}},  # copies of the attention lie off the path
        {}, {"attention_data_parallel": [1, 2, 4], "expert_parallel": [1, 4]},
    ),
    "environments and width": ({"task": {**SEARCHING, "max_trajectories": 64}}, {}, {"tensor_parallel": [1, 2, 4]}),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_but(OPEN))
def test_the_program_chooses_as_brute_force_does(name: str) -> None:
    """Every combination pinned in turn: the best of them is what is found where all are open."""
    changes, settings, layout = OPEN[name]
    fixed = {"tensor_parallel": 4} if name == "attention apart" else {}

    def takes(own: dict[str, Any], laid: dict[str, Any]) -> float:
        return plan_job(resolve(job_of(own, {"tensor_parallel": 1, **fixed, **laid}, **changes))).objective

    names = [*settings, *layout]
    pinned = []
    for values in product(*settings.values(), *layout.values()):
        chosen = dict(zip(names, values, strict=True))
        pinned.append(takes({k: chosen[k] for k in settings}, {k: chosen[k] for k in layout}))
    assert takes(settings, layout) == pytest.approx(min(pinned), rel=1e-6)


def test_a_head_that_drafts_in_no_rollout_is_not_trained_either() -> None:
    """Left open beside `draft_training`, a plan without drafts paid for the head: pinning none was better."""
    trained = {"draft_training": True, "draft_acceptance": 0.1}
    contexts = [resolve(job_of({**trained, "speculation": words})) for words in (["none", "eagle3:3"], ["none"])]
    asked = contexts[1].tasks[0]
    demand = asked.source.demand(asked.batches[0], None, 0)
    none = screen(contexts[1], asked, (demand,), keep=1).configurations[0]
    drafting = none.with_rollout(speculation="eagle3:3")
    judge, alone = Judge(contexts[0], asked), Judge(contexts[1], asked).evaluate(demand, none)
    without, with_ = (judge.evaluate(demand, one) for one in (none, drafting))
    assert without.rl_step_s == pytest.approx(alone.rl_step_s, rel=1e-9)
    assert without.held.peak == alone.held.peak < with_.held.peak
    assert with_.seconds.training_s.mean() > 1.03 * without.seconds.training_s.mean()


@pytest.mark.slow
def test_an_engine_whose_ranks_admit_apart_is_asked_for_as_many_requests_of_each() -> None:
    """Open, a replica of four ranks was tried with 1,024 requests at most, and took 1.8 % longer than with 4,096."""
    task = {"prompts_per_step": 512, "group_size": 16, "max_prompt_tokens": 1024}
    changes = {"architecture": "Moonlight-16B-A3B", "framework": "slime", "engine": "sglang", "nodes": 2, "task": task}
    layout = {"tensor_parallel": [2, 4, 8]}
    left, pinned = (plan_job(resolve(job_of({"max_running": m}, layout, **changes))) for m in (None, 4096))
    assert left.objective <= 1.002 * pinned.objective


def test_a_degree_that_a_job_pins_is_a_choice_among_backends_that_open_it() -> None:
    """Else context_parallel: 2 had a plan on FSDP2, which takes it when stated, that no open degree could have."""
    data = {
        "architecture": "Qwen2.5-32B", "cluster": "dgx_h200", "nodes": 3, "framework": "nemo_rl",
        "tasks": [{"name": "t", "workload": "math", "prompts_per_step": 32, "group_size": 8,
                   "max_response_tokens": 2048}],
    }  # fmt: skip

    def backends(framework: str = "nemo_rl", backend: str | None = None, **layout: int) -> tuple[str, ...]:
        pools = [{"role": "trainer", "layout": layout, "settings": {"backend": backend}}]
        job = Job.model_validate({**data, "framework": framework, "pools": pools})
        return with_trainers(job).trainer_backends

    assert set(backends()) == {"megatron", "fsdp2"} == set(backends(context_parallel=1))
    assert backends(context_parallel=2) == ("megatron",)
    assert backends(context_parallel=2, backend="fsdp2") == ("fsdp2",)
    assert backends("openrlhf", tensor_parallel=2) == backends("openrlhf")


def test_a_list_of_budgets_holds_what_each_of_them_would() -> None:
    """miles runs a sequence above the budget by itself: a stated 8,192 had a plan that 8,192 among others had not."""
    data: dict[str, Any] = {
        "architecture": "Llama-3.1-8B", "cluster": "dgx_h200", "nodes": 1, "framework": "miles", "engine": "sglang",
        "modes": ["colocated"], "tasks": [{"name": "t", "workload": "math", "prompts_per_step": 32, "group_size": 8,
                                           "max_prompt_tokens": 1024, "max_response_tokens": 8192}],
    }  # fmt: skip

    def budgets(*stated: int) -> set[int | None]:
        pools = [{"role": "trainer", "settings": {"token_budget": list(stated)}}]
        question = ask(Job.model_validate({**data, "pools": pools}), to_plan=True)
        task = question.context.tasks[0]
        demand = task.source.demand(task.batches[0], None, 0)
        found = screen(question.context, task, (demand,), question.facts).configurations
        return {each.pool("trainer").settings.token_budget for each in found}

    assert budgets(8192) == {8192}
    assert 8192 in budgets(8192, 65536)
