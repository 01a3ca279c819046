"""Batches that stream to their trainer: how long groups as they end hold it up."""

from __future__ import annotations

import numpy as np
import pytest

from rlperf import plan_job
from rlperf.sim.rl_step.modes import Execution, step_seconds
from rlperf.sim.rl_step.rollout_stage import group_ends
from rlperf.sim.rl_step.stage_seconds import _held_up_s
from rlperf.sim.rl_step.stages import StageSeconds

WAVES = np.concatenate([np.full(48, 70.0), np.full(16, 126.0)])
"""Equal lengths in two waves: three quarters of the groups end at once, then nothing does for long."""


@pytest.mark.parametrize("work", [8.0, 146.0, 400.0])
@pytest.mark.parametrize("chunks", [1, 4, 8, 12])
@pytest.mark.parametrize("finish", [WAVES, np.linspace(1.0, 126.0, 64)])
def test_the_batch_ends_as_chunks_that_wait_for_each_other_do(work: float, chunks: int, finish: np.ndarray) -> None:
    """Chunk by chunk: each begins when it is complete and the one before it has ended."""
    ends, at = group_ends(finish, np.arange(64)), 0.0
    for chunk in range(chunks):
        at = max(at, float(ends[int(np.ceil(64 * (chunk + 1) / chunks)) - 1])) + work / chunks
    held = _held_up_s(ends[None], np.array([float(chunks)]), np.array([work]))
    stages = StageSeconds.of(126.0, training_s=work, rollout_first_s=held)
    assert float(step_seconds(Execution("streaming", chunks=chunks), stages)[0]) == pytest.approx(at)


@pytest.mark.slow
def test_fewer_places_are_no_faster_than_the_planner_finds() -> None:
    """Two waves end at two moments; taken to end evenly between, the first chunk was there before anything could be."""
    task = {"name": "t", "workload": "math", "prompts_per_step": 512, "group_size": 4, "mini_batch": 64,
            "max_prompt_tokens": 1024, "max_response_tokens": 2048}  # fmt: skip
    job = {
        "architecture": "Qwen3-235B-A22B", "cluster": "mi300x_node", "framework": "rlinf", "nodes": 40,
        "modes": ["streaming"], "engine": "sglang", "tasks": [task], "limits": {"staleness": 1},
        "objective": {"bold": True},
    }  # fmt: skip
    pinned, free = (
        plan_job({**job, "pools": pools}).phases[0].predicted.rl_step_s
        for pools in ([{"role": "rollout", "settings": {"max_running": 64}}], [])
    )
    assert free <= pinned
