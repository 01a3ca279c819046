"""What fits nowhere is predicted as its nearest miss, and no knob is advised that the planner has turned itself."""

from __future__ import annotations

from typing import Any

import pytest

import rlperf
from rlperf.alternatives import planned
from rlperf.errors import InfeasibleError

SMALL: dict[str, Any] = {"max_response": "2k", "max_prompt": "512", "prompts": 8}


def test_what_fits_nowhere_is_predicted_as_its_nearest_miss() -> None:
    """Kimi-K2 on 64 H100 was predicted without recompute, 4 TB over its memory: what would be fastest if it fitted."""
    asked = {**SMALL, "model": "Kimi-K2", "gpus": 64, "gpu": "h100", "framework": "verl"}
    found = rlperf.predict_job(**asked)
    with pytest.raises(InfeasibleError) as refused:
        planned(rlperf.short_job(**asked))
    needs = float(str(refused.value).split(" GB more per device")[0].rsplit(" ", 1)[1])
    use = found.memory_bytes["trainer"]
    assert not found.fits
    assert (use.total - use.allowed) / 1e9 == pytest.approx(needs, abs=2.0)  # an engine sleeps beside it
    # all that decides its memory was tried: nothing of it is advised
    assert any("over what the risk allows: more devices" in line for line in found.advice)


def test_a_knob_that_a_job_pins_is_still_advised() -> None:
    job = rlperf.short_job("Qwen3-8B", 1, "h100", framework="verl", **SMALL)
    layout = {"activation_recompute": "none", "zero_stage": 1, "tensor_parallel": 1, "offload": "none"}
    pools = [{"role": "trainer", "layout": layout, "settings": {"backend": "megatron", "token_budget": 40960}}]
    pinned = rlperf.Job.model_validate({**job.model_dump(exclude_defaults=True), "pools": pools})
    (line,) = [line for line in rlperf.predict_job(pinned).advice if line.startswith("trainer is")]
    assert "more devices" not in line
