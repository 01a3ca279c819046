"""A batch that does not divide over the devices is told so, with the nearest one that does and what it saves."""

from __future__ import annotations

from typing import Any

import pytest

import rlperf
from rlperf.plan.answer.divisible import WORTH
from rlperf.plan.size import _idle


def remarks(plan: rlperf.Plan) -> list[str]:
    return [words for words in plan.phases[0].binds if words.startswith("batch:")]


def planned(prompts: int, gpus: int, **more: Any) -> rlperf.Plan:
    asked: dict[str, Any] = {"model": "Qwen3-8B", "gpu": "h100", "framework": "verl", "max_response": "8k", **more}
    return rlperf.plan_job(gpus=gpus, prompts=prompts, **asked)


def test_five_nodes_are_told_the_batch_that_uses_them_all() -> None:
    """8 x 64 samples are 12.8 a device of 40; 8 x 65 are 13."""
    plan, other = planned(64, 40), planned(65, 40)
    (words,) = remarks(plan)
    assert "512 samples an update do not divide over 40 devices; with prompts_per_step 65 " in words
    assert sum(pool.devices for pool in plan.phases[0].pools if pool.role == "trainer") < 40
    saved = 1.0 - (other.phases[0].predicted.rl_step_s / 65) / (plan.phases[0].predicted.rl_step_s / 64)
    assert saved > WORTH
    assert float(words.rsplit(",", 1)[1].split("%")[0]) == pytest.approx(100 * saved, abs=1.5)
    assert not remarks(other)
    # the row of a sizing says why more nodes take as long
    assert _idle(plan) == "devices: 8 of 40 stay idle: 512 samples an update do not divide over all"
    assert _idle(plan) in plan.phases[0].binds and not _idle(other)


def test_updates_keep_their_number_and_a_far_batch_is_not_named() -> None:
    (words,) = remarks(planned(128, 40, mini_batch=64))
    assert "with prompts_per_step 130 and mini_batch 65 " in words
    assert not remarks(planned(16, 24 * 8))  # 1.5 of the batch is another batch
