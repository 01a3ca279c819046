"""Every switch of a pool says what it gains: a line with the rl_step of the same job without it."""

from __future__ import annotations

from typing import Any

import pytest

import rlperf
from rlperf.plan.answer.gains import SWITCHES
from rlperf.specs.job import Job
from rlperf.specs.pool import Role
from rlperf.units import human_seconds

CASES: tuple[tuple[Role, dict[str, Any], str], ...] = (
    ("rollout", {"draft_training": True, "speculation": "eagle3:3"}, "the head that drafts trained with its policy"),
    ("rollout", {"expert_dispatch": "deepep"}, "deepep between the experts of engines"),
    ("trainer", {"expert_dispatch": "deepep"}, "deepep between the experts of the trainer"),
    ("trainer", {"compute_dtype": "fp8"}, "training in fp8"),
    ("trainer", {"shared_prefix": True}, "prompts of a group computed once"),
    ("trainer", {"turn_samples": True}, "a sample for every turn"),
    ("trainer", {"lora_rank": 32}, "adapters of rank 32"),
    ("trainer", {"router_replay": "R3"}, "experts repeated as recorded"),
    ("trainer", {"optimizer": "muon"}, "muon"),
)


def predicted(role: Role, settings: dict[str, Any], model: str, workload: str) -> rlperf.Prediction:
    wide = 8 if model != "Qwen3-4B" else 1
    rollout = {"tensor_parallel": wide, "expert_parallel": wide, "attention_data_parallel": wide}
    pools = {
        "rollout": {"layout": rollout, "settings": {"max_running": 64 * wide, "memory_fraction": 0.6}},
        "trainer": {"layout": {"expert_parallel": wide, "tensor_parallel": 1, "activation_recompute": "full"},
                    "settings": {"backend": "megatron", "token_budget": 16_384}},
    }  # fmt: skip
    pools[role]["settings"] |= settings
    task = {"name": "t", "workload": workload, "prompts_per_step": 32, "group_size": 8, "max_prompt_tokens": 4096,
            "max_response_tokens": 8192}  # fmt: skip
    asked = {"architecture": model, "cluster": "dgx_h100", "nodes": 2, "tasks": [task],
             "pools": [{"role": role, **own} for role, own in pools.items()]}  # fmt: skip
    return rlperf.predict_job(Job.model_validate(asked))


def test_every_switch_is_a_case() -> None:
    assert [(role, next(iter(settings))) for role, settings, _ in CASES] == [*SWITCHES]


@pytest.mark.parametrize(("role", "settings", "words"), CASES)
def test_a_switch_that_is_on_says_what_the_same_job_takes_without_it(
    role: Role, settings: dict[str, Any], words: str
) -> None:
    """Training in fp8, adapters, DeepEP, turns as samples and a trained head said nothing."""
    experts = {"expert_dispatch", "router_replay"} & settings.keys()
    model, workload = "Qwen3-30B-A3B" if experts else "Qwen3-4B", "searching" if "turn_samples" in settings else "math"
    beside = dict([*settings.items()][1:])
    one, off = (predicted(role, own, model, workload) for own in (settings, beside))
    (line,) = (each for each in one.gains if each.startswith(f"{words}: "))
    assert line.startswith(
        f"{words}: rl_step {human_seconds(one.rl_step_s)} instead of {human_seconds(off.rl_step_s)} ("
    )
    assert one.rl_step_s != off.rl_step_s
    assert not any(each.startswith(f"{words}: ") for each in off.gains)


def test_types_as_wide_as_bf16_gain_nothing_to_speak_of() -> None:
    assert predicted("trainer", {"compute_dtype": "fp16"}, "Qwen3-4B", "math").gains == ()
