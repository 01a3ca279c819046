"""A batch that does not divide over the devices is told so, with the nearest one that does and what it saves."""

from __future__ import annotations

from typing import Any

import pytest

import rlperf
from rlperf import alternatives
from rlperf.api import ask
from rlperf.plan.answer.divisible import WORTH
from rlperf.plan.question.context import Context
from rlperf.plan.size import _idle, _in_full
from rlperf.specs.framework import FrameworkFacts


def remarks(plan: rlperf.Plan) -> list[str]:
    return [words for words in plan.phases[0].binds if words.startswith("batch:")]


def planned(prompts: int, gpus: int, **more: Any) -> rlperf.Plan:
    asked: dict[str, Any] = {"model": "Qwen3-8B", "gpu": "h100", "framework": "verl", "max_response": "8k", **more}
    return rlperf.plan_job(gpus=gpus, prompts=prompts, **asked)


def test_five_nodes_are_told_the_batch_that_uses_them_all() -> None:
    """8 x 64 samples are 12.8 a device of 40; 8 x 65 are 13, which 32 devices take a quarter longer for."""
    plan, other = planned(64, 40), planned(65, 40)
    (words,) = remarks(plan)
    assert "512 samples an update do not divide over 40 devices; with prompts_per_step 65 " in words
    assert plan.phases[0].pool("trainer").devices == 32 and other.phases[0].pool("trainer").devices == 40
    saved = float(words.rsplit(",", 1)[1].split("%")[0])
    assert 100 * WORTH <= saved <= 20.0  # a rollout's tail is as long on more devices
    assert saved == pytest.approx(100 * (1.0 - other.phases[0].predicted.rl_step_s / on_fewer(65, 32)), abs=3.0)
    assert not remarks(other)
    # the row of a sizing says why more nodes take as long
    assert _idle(plan) == "devices: 8 of 40 stay idle: 512 samples an update do not divide over all"
    assert _idle(plan) in plan.phases[0].binds and not _idle(other)


def on_fewer(prompts: int, gpus: int) -> float:
    """Seconds of a batch on fewer devices, whether it divides over them or not: between those that do."""
    below, above = (planned(count, gpus).phases[0].predicted.rl_step_s for count in (prompts - 1, prompts + 3))
    return below + 0.25 * (above - below)


def test_what_a_larger_batch_saves_by_itself_is_not_told() -> None:
    """1,024 samples divide over the few replicas of a large trainer, whatever 96 devices make of them."""
    asked: dict[str, Any] = {"model": "Qwen3-235B-A22B", "gpu": "h200", "framework": "slime", "max_response": "16k"}
    plan = rlperf.plan_job(gpus=96, **asked)
    assert 1024 % 96 and not remarks(plan)


def test_updates_keep_their_number_and_a_far_batch_is_not_named() -> None:
    job = rlperf.short_job("Qwen3-8B", 40, "h100", framework="verl", max_response="8k", prompts=128, mini_batch=64)

    def again(job: rlperf.Job) -> tuple[Context, FrameworkFacts]:
        return ask(job, to_plan=True).pair

    plan = _in_full(alternatives.planned(job), again)  # a sizing plans without remarks, and adds them to its answer
    assert plan is not None and "with prompts_per_step 130 and mini_batch 65 " in remarks(plan)[0]
    assert not remarks(planned(16, 24 * 8))  # 1.5 of the batch is another batch
