"""Scoring budgets of their own: where memory holds them and they save enough, in the framework's own key."""

from __future__ import annotations

from typing import Any

import pytest

from rlperf.api import ask, facts_of, plan_job
from rlperf.frameworks.adapter import framework_facts
from rlperf.frameworks.expressible import unsayable
from rlperf.frameworks.registry import FRAMEWORKS
from rlperf.plan.answer.explain import differences
from rlperf.plan.answer.plan import Plan
from rlperf.plan.judge import budgets
from rlperf.plan.judge.decisions import Decision, decide
from rlperf.plan.search.trainer_columns import peak_limit
from rlperf.specs.job import Job
from rlperf.specs.pool import SettingsValues
from studies.round_trip.run import plan_trip

from .quick import slow_but

TASK = {
    "name": "math", "workload": "math", "prompts_per_step": 128, "group_size": 8, "max_prompt_tokens": 1024,
    "max_response_tokens": 4096,
}  # fmt: skip


def job(framework: str = "openrlhf", **changes: Any) -> Job:
    base: dict[str, Any] = {"architecture": "Qwen2.5-7B", "cluster": "dgx_a100", "nodes": 1, "tasks": [TASK]}
    return Job.model_validate({**base, "framework": framework, **changes})


def trainer(plan: Plan) -> SettingsValues:
    return plan.phases[0].pool("trainer").settings


def decision(asked: Job) -> Decision:
    question = ask(asked)
    return decide(question.context, question.facts, lambda _done, _text: None)[0]


def test_scoring_takes_larger_microbatches_where_that_is_worth_it() -> None:
    plan = plan_job(job())
    settings = trainer(plan)
    assert settings.token_budget is not None
    assert settings.scoring_token_budget in [times * settings.token_budget for times in budgets.TIMES]
    alike = [{"role": "trainer", "settings": {"scoring_token_budget": settings.token_budget}}]
    kept = plan_job(job(pools=alike))
    assert trainer(kept).scoring_token_budget == settings.token_budget
    saved = kept.objective / plan.objective - 1.0
    assert budgets.WORTH * 0.9 < saved < 0.05
    assert plan.phases[0].predicted.stages_s.scoring < kept.phases[0].predicted.stages_s.scoring


def test_what_the_job_states_stays() -> None:
    stated = [{"role": "trainer", "settings": {"scoring_token_budget": 6000}}]
    assert trainer(plan_job(job(pools=stated))).scoring_token_budget == 6000


@pytest.mark.slow
def test_memory_bounds_the_scoring_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every judged candidate keeps its risk; with budgets without end some would not."""
    monkeypatch.setattr(budgets, "WORTH", 1e-6)
    times = tuple(2**power for power in range(1, 13))  # one grid of many context ranks has room for 128
    monkeypatch.setattr(budgets, "TIMES", times)
    asked = job("verl", architecture="Qwen3-8B", cluster="dgx_h100")
    context, found = ask(asked).context, decision(asked)
    tried = []
    for each in found.evaluations:
        settings = each.configuration.pool("trainer").settings
        assert settings.token_budget is not None and settings.scoring_token_budget is not None
        tried.append(settings.scoring_token_budget // settings.token_budget)
        beside = float(each.memory.asleep_bytes[0])
        assert float(each.held.peak.max()) + beside <= peak_limit(context, each.stack) * (1 + 1e-9)
    assert 1 < max(tried) < times[-1]


def test_a_budget_of_its_own_is_named_and_one_that_follows_is_not() -> None:
    evaluations = decision(job()).evaluations
    own = next(e.configuration for e in evaluations if _times(e.configuration.pool("trainer").settings) > 1)
    budget = own.pool("trainer").settings.token_budget
    assert budget is not None
    same = own.with_trainer(scoring_token_budget=budget)
    assert differences(own, same) == [f"trainer scoring_token_budget {budget} instead of {2 * budget}"]
    larger = same.with_trainer(token_budget=2 * budget, scoring_token_budget=2 * budget)
    assert differences(same, larger) == [f"trainer token_budget {2 * budget} instead of {budget}"]
    without = same.with_trainer(scoring_token_budget=None)
    assert differences(same, without) == [f"trainer scoring_token_budget unset instead of {budget}"]


def _times(settings: SettingsValues) -> int:
    """Budgets of training in one of scoring; 1 where sequences are counted, and none apart for scoring."""
    if settings.token_budget is None and settings.scoring_microbatch is None:
        return 1
    assert settings.token_budget and settings.scoring_token_budget
    return settings.scoring_token_budget // settings.token_budget


@pytest.mark.parametrize("framework", slow_but(FRAMEWORKS, "verl", "areal"))
def test_files_say_a_scoring_budget_of_its_own(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the framework has a key; elsewhere scoring takes the budget of training."""
    monkeypatch.setattr(budgets, "WORTH", 1e-6)
    few = [{**TASK, "prompts_per_step": 32}]
    asked = job(
        framework, cluster="dgx_h100", tasks=few, engine="sglang" if framework in ("slime", "miles") else "vllm"
    )
    apart = _times(trainer(plan_job(asked))) > 1
    assert apart == framework_facts(framework).states_scoring
    found = plan_trip(asked)
    assert found.same, (found.refused, found.excess, found.lost, found.findings)


@pytest.mark.parametrize(("scored", "refused"), [(12288, False), (24576, True)])
def test_a_scoring_budget_that_is_trainings_needs_no_key(scored: int, refused: bool) -> None:
    """AReaL scores by training's budget: its own plan.yaml, which states both, was refused."""
    settings = {"backend": "fsdp2", "token_budget": 12288, "scoring_token_budget": scored}
    task = {"name": "math", "workload": "math", "prompts_per_step": 128, "max_response_tokens": 8192}
    job = Job.model_validate(
        {"architecture": "Qwen3-8B", "cluster": "dgx_h100", "nodes": 1, "framework": "areal", "tasks": [task],
         "pools": [{"role": "trainer", "settings": settings}]}
    )  # fmt: skip
    said = [one.message for one in unsayable(job, facts_of(job))]
    assert [f"trainer.scoring_token_budget ({scored})" in one for one in said] == [True] * refused
