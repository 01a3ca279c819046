"""Rules about engines count before columns are held against each other, and are told where nothing is left."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from rlperf.api import ask, plan_job
from rlperf.cost.reject import Reject
from rlperf.errors import InfeasibleError
from rlperf.frameworks.adapter import framework_facts
from rlperf.plan.search.columns import Columns
from rlperf.plan.search.screen import screen
from rlperf.plan.search.splits import splits
from rlperf.specs.job import Job


def _job(degrees: list[int]) -> Job:
    task = {"name": "t", "workload": "math", "prompts_per_step": 16, "group_size": 4, "max_response_tokens": 1024}
    pinned = {"tensor_parallel": 1, "context_parallel": 1, "pipeline_parallel": 16, "expert_parallel": 8}
    pools = [{"role": "rollout", "layout": {"tensor_parallel": degrees}}, {"role": "trainer", "layout": pinned}]
    words = {"architecture": "DeepSeek-V3", "cluster": "dgx_h100", "nodes": 32, "framework": "verl==0.9.1"}
    return Job.model_validate({**words, "trainer_backends": ["megatron"], "tasks": [task], "pools": pools})


def test_engines_that_a_framework_does_not_start_stand_for_none_that_it_does() -> None:
    """They took part in the pruning: of DeepSeek-V3 on 256 H100 42 of 48 columns that were left had stages."""
    question = ask(_job([16, 32]))
    task = question.context.tasks[0]
    demand = task.source.demand(task.batches[0], None, 0)
    own = Columns(question.context, task, question.facts)
    for source in (own.of(demand, split) for split in splits(question.context)):
        staged = source.rollout.layout.pipeline_parallel > 1
        assert (staged & (source.rollout.flags == 0)).any()
        assert np.isinf(source.rollout.makespan_s[staged]).all(), "what is refused whatever else is chosen was counted"
        assert not (staged & (source.rollout_flags == 0)).any()
        assert np.all(source.rollout_flags[staged] & int(Reject.FRAMEWORK) > 0)
        assert not staged[source.rollout_left()].any() and len(source.rollout_left())


def test_the_rule_that_engines_break_is_told_where_none_is_left() -> None:
    """It was "engine and trainer fit the device each alone, but the framework refuses them together"."""
    question = ask(_job([16]))
    task = question.context.tasks[0]
    demand = task.source.demand(task.batches[0], None, 0)
    found = screen(question.context, task, (demand,), question.facts)
    assert not found.configurations
    assert found.misses == ("engines that fit are none of verl's: pipeline parallel rollout is not implemented",)


def test_a_rule_that_engines_of_several_splits_break_is_told_once() -> None:
    """It was told for 16, 24, 32 and 40 devices, one after the other."""
    job = Job.model_validate({
        "architecture": "Qwen2.5-7B", "cluster": "dgx_h200", "nodes": 6, "framework": "trl", "modes": ["disaggregated"],
        "tasks": [{"name": "t", "workload": "math", "prompts_per_step": 32, "group_size": 8,
                   "max_prompt_tokens": 1024, "max_response_tokens": 1024}],
    })  # fmt: skip
    with pytest.raises(InfeasibleError) as refused:
        plan_job(job)
    said = refused.value.nearest_miss or ""
    assert said.count("the vLLM server starts all of its engines on one node") == 1
    # 256 responses divide by 32 trainers, not by 40: the most nodes that can be used are named
    assert said.endswith("on 5 of the 6 nodes it is feasible (nodes: 5)")
    plan_job(job.model_copy(update={"nodes": 5}))


def test_of_all_splits_the_trainer_that_misses_memory_by_least_is_told() -> None:
    """Seven were told, one for every number of devices that an engine left."""
    job = Job.model_validate({
        "architecture": "Llama-3.1-70B", "cluster": "dgx_a100", "framework": "verl", "modes": ["one_step_off"],
        "tasks": [{"name": "t", "workload": "math", "prompts_per_step": 64, "group_size": 8,
                   "max_response_tokens": 16384}],
        "limits": {"staleness": 1},
    })  # fmt: skip
    with pytest.raises(InfeasibleError) as refused:
        plan_job(job)
    said = refused.value.nearest_miss or ""
    assert (said.count("the leanest trainer"), said.count("the roomiest engine")) == (1, 1)


@pytest.mark.parametrize(("stages", "attention", "broken"), [(1, 2, False), (2, 2, True), (2, 1, False)])
def test_stages_and_wide_experts_exclude_each_other_in_nemo_rl(stages: int, attention: int, broken: bool) -> None:
    """The first need its async engine, the second that it is off: such a plan was made, and could not be written."""
    engine = {"tensor_parallel": 16, "expert_parallel": 16, "data_parallel": 8, "backend": "vllm"}
    rollout = SimpleNamespace(**engine, pipeline_parallel=stages, attention_data_parallel=attention)
    names = {"rollout": rollout, "run": SimpleNamespace(async_enabled=False)}
    assert ("generation_attention_dp_async" in framework_facts("nemo_rl").refused(names)) == broken
