"""Weights that are sent and those of the engine on one device: what a weight sync of shared devices finds room for."""

from __future__ import annotations

from typing import Any

import pytest

import rlperf
from rlperf.errors import InfeasibleError


def pinned(framework: str, gpu: str = "h100") -> rlperf.Job:
    """32B on engines of one device (65.5 GB) and Megatron over four (16.4 GB of weights), the rest open."""
    job = rlperf.short_job("Qwen2.5-32B", 64, gpu, framework=framework, max_response="2k", max_prompt="512", prompts=64)
    layout = {"tensor_parallel": 4, "pipeline_parallel": 1, "zero_stage": 1}
    asked: dict[str, Any] = {
        **job.model_dump(exclude_defaults=True),
        "modes": ["colocated"],
        "pools": [
            {"role": "trainer", "layout": layout, "settings": {"backend": "megatron", "parked": True}},
            {"role": "rollout", "layout": {"tensor_parallel": 1}},
        ],
    }
    return rlperf.Job.model_validate(asked)


@pytest.mark.parametrize("framework", ["nemo_rl", "verl"])
def test_weights_that_are_sent_find_room_beside_those_of_the_engine(framework: str) -> None:
    """65.5 + 16.4 GB, contexts and graphs are more than is sure on 85 GB; training and rollout alone have room."""
    asked = pinned(framework)
    use = rlperf.predict_job(asked).memory_bytes["rollout"]
    assert use.total > use.allowed and set(use.parts) == {"weights", "graphs and context", "trainer, sending"}
    with pytest.raises(InfeasibleError):
        rlperf.plan_job(asked)
    assert rlperf.predict_job(pinned(framework, "h200")).fits


def test_weights_sent_out_of_host_memory_are_never_all_on_the_device() -> None:
    """slime sends its pinned copies a bucket at a time (hf_weight_iterator_direct.py)."""
    assert rlperf.predict_job(pinned("slime")).fits
