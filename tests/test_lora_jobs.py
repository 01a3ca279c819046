"""Several LoRA jobs on one base: one is today's, slots and reads of adapters, updates of their own, gains, keys."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import rlperf
from rlperf.cost.weight_sync import adapter_payload
from rlperf.errors import SpecError
from rlperf.frameworks.registry import FRAMEWORKS
from rlperf.layout import Layout
from rlperf.plan.answer.gains import gains
from rlperf.plan.judge.evaluate import Evaluation, Judge
from rlperf.plan.question.context import Context, resolve
from rlperf.plan.search.rollout_columns import rollout_columns
from rlperf.plan.search.screen import FORGIVEN, screen
from rlperf.sim.rl_step.engine import replica_memory
from rlperf.sim.rl_step.rollout_counted import SCREENED_RL_STEPS
from rlperf.specs.job import Job


def job_of(jobs: int | None, rank: int | None = 32, **task: Any) -> Job:
    settings = {"lora_rank": rank, "lora_jobs": jobs, "token_budget": 16_384}
    stated = {name: value for name, value in settings.items() if value is not None}
    return Job.model_validate(
        {
            "architecture": "Qwen3-8B", "cluster": "dgx_h100", "nodes": 1, "trainer_backends": ["fsdp2"],
            "tasks": [{"name": "m", "workload": "math", "prompts_per_step": 64, "group_size": 8,
                       "max_response_tokens": 4096, **task}],
            "pools": [{"role": "rollout", "layout": {"tensor_parallel": 1},
                       "settings": {"memory_fraction": 0.7, "max_running": 256}},
                      {"role": "trainer", "settings": stated,
                       "layout": {"tensor_parallel": 1, "ulysses": 1, "zero_stage": 3, "offload": "none",
                                  "shard_size": 0, "activation_recompute": "full"}}],
        }
    )  # fmt: skip


def judged(jobs: int | None, **task: Any) -> tuple[Context, Evaluation]:
    context = resolve(job_of(jobs, **task))
    one = context.tasks[0]
    demand = one.source.demand(one.batches[0], None, 0)
    found = screen(context, one, (demand,), keep=1, forgiven=FORGIVEN)
    return context, Judge(context, one).evaluate(demand, found.configurations[0])


def test_one_job_is_what_it_was() -> None:
    one, none = judged(1)[1], judged(None)[1]
    assert (one.seconds.rl_step_s == none.seconds.rl_step_s).all()
    assert one.held.peak == none.held.peak and one.memory.kv_tokens == none.memory.kv_tokens


def test_more_jobs_on_the_same_prompts_are_never_faster() -> None:
    """Every one brings an adapter to read and updates of its own; the prompts are the same."""
    steps = [judged(jobs)[1] for jobs in (1, 2, 4, 16)]
    seconds = [each.rl_step_s for each in steps]
    assert seconds == sorted(seconds) and seconds[-1] > seconds[0]
    assert [each.demand.batch.updates for each in steps] == [1, 2, 4, 16]
    assert [each.demand.batch.updates_of_a_job for each in steps] == [1, 1, 1, 1]


def test_every_further_adapter_takes_its_bytes_and_is_read_once_by_those_it_serves() -> None:
    few, many = judged(1)[1], judged(8)[1]
    context, _ = judged(8)
    adapter = adapter_payload(context.tasks[0].architecture, 32).dense_bytes
    per_token = few.memory.cache_bytes / few.memory.kv_tokens
    assert (few.memory.cache_bytes - many.memory.cache_bytes).item() == pytest.approx(7 * adapter, rel=1e-9)
    assert (many.memory.cache_bytes / many.memory.kv_tokens).item() == pytest.approx(per_token.item(), rel=1e-9)
    hw = context.rollout_hardware
    read_s = adapter / (hw.device.memory_bandwidth * hw.calibration.stream.stream_memory)
    slower = [float(many.cost.linear(x) - few.cost.linear(x)) for x in (1.0, 2.0, 64.0, 256.0)]
    factor = slower[2] / (7 * read_s)
    assert factor == pytest.approx(1.0, rel=1e-6)
    assert slower[0] == pytest.approx(0.0, abs=1e-9) and slower[3] == pytest.approx(slower[2])
    assert 0.0 < slower[1] <= 7 * read_s


def test_a_stage_of_an_engine_holds_its_layers_adapters() -> None:
    context, evaluation = judged(8)
    architecture, settings = context.tasks[0].architecture, context.job.pool("rollout").settings.filled()

    def weights(stages: int, jobs: int) -> float:
        layout = Layout.of(pipeline_parallel=stages)
        site = replace(context.site, adapter_jobs=jobs)
        memory = replica_memory(
            site, architecture, settings, layout, np.full(1, 0.7), np.full(1, 64), evaluation.demand
        )
        return float(memory.weight_bytes[0])

    whole, half = (weights(stages, 8) - weights(stages, 1) for stages in (1, 2))
    assert half == pytest.approx(whole / 2, rel=1e-6)


def test_a_trainer_holds_all_adapters_and_their_moments_and_one_set_of_gradients() -> None:
    one, two, three = (each.held.parts for each in (judged(1)[1], judged(2)[1], judged(4)[1]))
    assert float(two.gradients.item()) == float(one.gradients.item())
    step = two.optimizer.item() - one.optimizer.item()
    assert step == pytest.approx(one.optimizer.item(), rel=1e-6)
    assert three.optimizer.item() == pytest.approx(4 * one.optimizer.item(), rel=1e-6)
    assert three.weights.item() > two.weights.item() > one.weights.item()


def test_adapters_cost_the_closed_form_what_they_cost_the_events() -> None:
    """Their own share, so that what the two forms differ by without adapters (2 % here) hides nothing."""

    def seconds(jobs: int) -> tuple[float, float]:
        context, evaluation = judged(jobs)
        columns = rollout_columns(context, context.tasks[0].architecture, evaluation.demand, 8)
        (closed,) = columns.makespan_s[columns.flags == 0]
        return float(closed), float(evaluation.rollout.makespan_s[:SCREENED_RL_STEPS].mean())

    (closed, events), (closed_of_four, events_of_four) = seconds(1), seconds(4)
    assert closed == pytest.approx(events, rel=0.03)
    assert events_of_four > events
    assert closed_of_four / closed == pytest.approx(events_of_four / events, rel=0.01)


def test_a_plan_says_what_they_gain_over_one_after_the_other() -> None:
    context, evaluation = judged(4)
    line = next(each for each in gains(context, context.tasks[0], evaluation) if "LoRA jobs" in each)
    ratio = float(re.search(r"\(([\d.]+) times as fast\)", line)[1])  # type: ignore[index]
    alone = judged(1, prompts_per_step=16)[1].rl_step_s
    assert ratio == pytest.approx(4 * alone / evaluation.rl_step_s, abs=0.006)
    assert 1.0 < ratio < 4.0


@pytest.mark.parametrize(
    ("jobs", "rank", "task", "said"),
    [
        (2, None, {}, "several lora_jobs train adapters"),
        (5, 32, {}, "give 5 LoRA jobs no whole updates"),
        (4, 32, {"mini_batch": 32}, "give 4 LoRA jobs no whole updates"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(jobs: int, rank: int | None, task: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        resolve(job_of(jobs, rank, **task))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_no_framework_has_a_key(framework: str) -> None:
    job = job_of(2).model_copy(update={"framework": framework, "trainer_backends": ()})
    with pytest.raises(SpecError, match=r"no key for trainer\.lora_jobs|merges adapters") as raised:
        rlperf.plan_job(job)
    said = [str(each) for each in raised.value.problems if "no key for trainer.lora_jobs" in str(each)]
    assert all("no framework has a key" in each and "another framework" not in each for each in said)


def test_a_mini_batch_of_one_job_makes_several_updates() -> None:
    _, evaluation = judged(4, mini_batch=8)
    assert (evaluation.demand.batch.updates, evaluation.demand.batch.updates_of_a_job) == (8, 2)
    assert np.isfinite(evaluation.rl_step_s)
