"""Logs of agents: a response is a trajectory, of which frameworks count what is generated, or tools' words with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlperf import audit_config, calibrate_logs, export_plan, plan_job
from rlperf.api import judge
from rlperf.specs.job import Job

JOB: dict[str, Any] = {
    "architecture": "Qwen2.5-7B", "cluster": "dgx_h100", "nodes": 1, "framework": "verl", "modes": ["async"],
    "limits": {"staleness": 2},
    "tasks": [
        {"name": "software", "workload": "software_engineering", "prompts_per_step": 16, "group_size": 8,
         "max_prompt_tokens": 4096, "max_response_tokens": 28_000}
    ],
    "pools": [
        {"role": "rollout", "devices": 4, "layout": {"tensor_parallel": 1},
         "settings": {"memory_fraction": 0.9, "max_running": 64}},
        {"role": "trainer", "devices": 4, "layout": {"tensor_parallel": 1, "zero_stage": 3}},
    ],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("tools", "factor", "alike"), [(False, 1.0, True), (True, 1.0, True), (True, 2.0, False)])
def test_a_log_of_agents_is_held_against_trajectories(tmp_path: Path, tools: bool, factor: float, alike: bool) -> None:
    """Its mean was held against that of a turn, 1/27 of it: turns were scaled to it, and training was predicted with 20
    times its seconds. The job of a configuration is fitted as its framework runs it (here without the old policy's
    pass), as it is audited."""
    plan = plan_job(Job.model_validate(JOB))
    export_plan(plan, tmp_path / "config")
    means = judge(plan)[1].demand.response_means()
    assert len(means) == 2 and 2 * means[0] < means[1]
    stages = plan.phases[0].predicted.stages_s
    values = {
        "timing_s/ref": stages.scoring / 2, "timing_s/old_log_prob": stages.scoring / 2,
        "timing_s/update_actor": stages.training, "timing_s/update_weights": stages.weight_sync,
        "timing_s/step": plan.phases[0].predicted.rl_step_s, "response_length/mean": factor * means[tools],
    }  # fmt: skip
    lines = (json.dumps({"step": step, "data": values}) + "\n" for step in range(1, 7))
    (tmp_path / "run.jsonl").write_text("".join(lines))
    audited = audit_config(
        tmp_path / "config" / "config.yaml", cluster="dgx_h100", workload="software_engineering", plan=False,
        log=tmp_path / "run.jsonl",
    )  # fmt: skip
    assert alike != audited.unlike
    assert alike or f"{means[0]:,.0f} ({means[1]:,.0f} with what tools write)" in audited.cautions[0]
    fit, _ = calibrate_logs(
        tmp_path / "run.jsonl", tmp_path / "config" / "config.yaml", cluster="dgx_h100",
        workload="software_engineering", out=tmp_path / "told.yaml",
    )  # fmt: skip
    assert max(fit.before[stage] for stage in ("scoring", "training")) < 0.02
    assert any("of several turns, which is not scaled" in note for note in fit.notes)
