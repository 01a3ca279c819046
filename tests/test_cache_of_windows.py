"""Caches of requests that hold something whatever their length: as many run as there is room for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlperf.api import ask, plan_job, predict_job
from rlperf.cost.engine_memory import engine_memory, kv_bytes_per_request, kv_bytes_per_token
from rlperf.cost.replica import Replica
from rlperf.layout import Layout
from rlperf.sim.rl_step.engine import HALF_GROWN, replica_memory
from rlperf.specs.job import Job

WIDE: dict[str, Any] = {
    "model_type": "olmo3", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 100278, "sliding_window": 4096,
    "layer_types": ["full_attention" if each % 4 == 3 else "sliding_attention" for each in range(32)],
}  # fmt: skip
"""Three layers of four slide over 4,096 tokens, with a key for every head: 1.6 GB a request."""


def job(tmp_path: Path, running: int, framework: str = "verl", **settings: Any) -> Job:
    (tmp_path / "config.json").write_text(json.dumps(WIDE))
    rollout = {"role": "rollout", "layout": {"tensor_parallel": 1}, "settings": {"max_running": running, **settings}}
    task = {"name": "math", "workload": "math", "prompts_per_step": 128, "group_size": 8, "mini_batch": 64,
            "max_prompt_tokens": 1024, "max_response_tokens": 4096}  # fmt: skip
    document = {"name": "wide", "architecture": str(tmp_path / "config.json"), "cluster": "dgx_h100", "nodes": 1,
                "framework": framework, "tasks": [task], "pools": [rollout]}  # fmt: skip
    return Job.model_validate(document)


@pytest.mark.parametrize("asked", [8, 1024])
def test_no_more_requests_hold_a_window_than_the_cache_has_room_for(tmp_path: Path, asked: int) -> None:
    """Of 1,024 all held one, 1.6 TB, and no layout was left; engines let those wait that find no block."""
    context = ask(job(tmp_path, asked)).context
    one, settings = context.tasks[0], context.job.pool("rollout").settings.filled()
    demand, layout = one.source.demand(one.batches[0], None, 0), Layout.of()
    found = replica_memory(context.site, one.architecture, settings, layout, np.array([0.9]), np.array([asked]), demand)
    replica = Replica.of(one.architecture, context.hardware, context.engine, layout)
    whole = engine_memory(replica, memory_fraction=np.array([0.9]), cuda_graphs=settings.cuda_graphs).kv_cache_bytes
    each, token = float(kv_bytes_per_request(replica)), float(kv_bytes_per_token(replica))
    assert each == 24 * 4096 * 2 * 32 * 128 * 2
    grown = each + token * demand.moments.mean / HALF_GROWN
    held = min(asked, float(whole[0]) / grown)
    assert held == (8 if asked == 8 else pytest.approx(30, abs=4))
    assert float(found.kv_tokens[0]) == pytest.approx((float(whole[0]) - held * each) / token, rel=1e-9)


@pytest.mark.slow
def test_places_that_the_cache_has_no_room_for_change_nothing(tmp_path: Path) -> None:
    """Nothing fitted with 64, and TRL, whose engine takes the whole batch at once, had no plan for a model of 7B."""
    pinned = {"memory_fraction": 0.9}
    steps = [predict_job(job(tmp_path, each, **pinned)).rl_step_s for each in (16, 256, 1024)]
    assert steps[1] == steps[2] < steps[0]
    trl = job(tmp_path, 1024, "trl").model_dump(exclude_unset=True)
    plan = plan_job(Job.model_validate({**trl, "pools": []}))
    assert plan.phases[0].pool("rollout").settings.max_running == 1024
