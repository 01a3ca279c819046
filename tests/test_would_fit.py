"""A refusal for want of memory names the least change of each kind under which the job fits, and each one does."""

from __future__ import annotations

from typing import Any

import pytest

import rlperf
from rlperf.errors import InfeasibleError
from rlperf.specs.job import Job

WORDS: dict[str, Any] = {
    "model": "Qwen2.5-7B", "gpus": 1, "gpu": "rtx_4090", "prompts": 16, "group": 4, "max_response": "4k",
}  # fmt: skip
LORA: dict[str, Any] = {"role": "trainer", "settings": {"lora_rank": 32}}


def refused(job: Job) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as error:
        rlperf.plan_job(job)
    return error.value


def test_a_model_that_one_device_does_not_hold_fits_on_more_with_adapters_or_smaller() -> None:
    """7B on one RTX 4090: the refusal said how many bytes are missing, and nothing that one could do."""
    job = rlperf.short_job(**WORDS)
    error = refused(job)
    assert error.fits == (
        "on 4 devices", "with LoRA on 2 devices (the trainer's settings.lora_rank: 32)", "with Qwen2.5-1.5B",
    )  # fmt: skip
    lora = "with LoRA on 2 devices (the trainer's settings.lora_rank: 32)"
    assert str(error).endswith(f"\n  it fits on 4 devices, or {lora}, or with Qwen2.5-1.5B")
    assert all(
        rlperf.plan_job(each)
        for each in (
            rlperf.short_job(**{**WORDS, "gpus": 4}),
            rlperf.short_job(**{**WORDS, "model": "Qwen2.5-1.5B"}),
            Job.model_validate({**job.stated(), "pools": [LORA], "devices_per_node": 2}),
        )
    )
    for less in ({"gpus": 2}, {"model": "Qwen2.5-3B"}):  # the least of its kind
        assert refused(rlperf.short_job(**{**WORDS, **less})).lacks_memory


def test_adapters_on_more_devices_are_named_where_those_are_fewer_than_all_weights_need() -> None:
    """14B on one RTX 4090: 8 devices were named, and that LoRA takes 4 of them was not."""
    job = rlperf.short_job(**{**WORDS, "model": "Qwen3-14B", "max_response": "2k"}).stated()
    error = refused(Job.model_validate(job))
    assert error.fits[:2] == ("on 8 devices", "with LoRA on 4 devices (the trainer's settings.lora_rank: 32)")
    assert rlperf.plan_job(Job.model_validate({**job, "pools": [LORA], "devices_per_node": 4}))
    assert refused(Job.model_validate({**job, "pools": [LORA]})).fits[0] == "on 4 devices"


def test_logits_of_long_sequences_fit_in_chunks() -> None:
    """33,280 tokens of a vocabulary of 152,064 on one device: two were named, and not the key that keeps them small."""
    task = {"name": "long", "workload": "math", "prompts_per_step": 8, "group_size": 8, "max_response_tokens": "32k"}
    job: dict[str, Any] = {
        "architecture": "Qwen2.5-7B", "cluster": "generic:rtx_a6000", "devices_per_node": 1, "framework": "nemo_rl",
        "tasks": [{**task, "max_prompt_tokens": 512}], "pools": [LORA],
    }  # fmt: skip
    assert refused(Job.model_validate(job)).fits[0] == "with the trainer's settings.chunked_loss: true"
    chunked = {**LORA, "settings": {**LORA["settings"], "chunked_loss": True}}
    assert rlperf.plan_job(Job.model_validate({**job, "pools": [chunked]}))
    no_key = refused(Job.model_validate({**job, "framework": "openrlhf"}))
    assert not any("chunked_loss" in each for each in no_key.fits)


def test_states_that_are_pinned_to_the_device_fit_on_the_host() -> None:
    job = rlperf.short_job(**{**WORDS, "gpu": "h100"}).stated()
    pinned = {"role": "trainer", "layout": {"offload": "none"}}
    assert (
        refused(Job.model_validate({**job, "pools": [pinned]})).fits[0]
        == "with the trainer's layout.offload: optimizer"
    )
    assert rlperf.plan_job(
        Job.model_validate({**job, "pools": [{"role": "trainer", "layout": {"offload": "optimizer"}}]})
    )


def test_what_is_refused_for_another_reason_is_left_as_it_is() -> None:
    job = rlperf.short_job("Qwen3-0.6B", 2, "h100", prompts=16, group=4, max_response="2k").stated()
    error = refused(Job.model_validate({**job, "limits": {"step": "1 ms"}}))
    assert not error.lacks_memory and not error.fits and "it fits" not in str(error)
