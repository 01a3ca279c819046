"""What a user names beside what is due: a folder, a job, a launch script that names accelerate's config."""

from __future__ import annotations

from pathlib import Path

import pytest

import rlperf
from rlperf.frameworks.imports import describe, import_config

JOB = rlperf.short_job("Qwen3-8B", 16, "h100", framework="trl", max_response="2k", prompts=32, group=4)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trl")
    rlperf.export_plan(rlperf.plan_job(JOB), folder)
    return folder


def test_a_launch_script_is_read_with_the_accelerate_config_that_it_names(exported: Path) -> None:
    script, both = (
        import_config([exported / "config.sh"]),
        import_config([exported / "config.yaml", exported / "config_accelerate.yaml"]),
    )
    assert script.run.devices == both.run.devices == 16
    assert script.run.trainer.zero_stage == both.run.trainer.zero_stage
    assert "assumed" not in describe(script)


def test_devices_that_no_file_states_are_called_assumed(exported: Path) -> None:
    assert "8 GPUs (assumed: name the launch script or accelerate's config too)" in describe(
        import_config([exported / "config.yaml"])
    )


def test_a_folder_is_told_by_its_files(exported: Path) -> None:
    with pytest.raises(rlperf.SpecError, match=r"is a folder \(name what runs: config.sh, config.yaml"):
        rlperf.audit_config(exported)


def test_a_job_or_plan_is_no_configuration(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("architecture: Qwen3-8B\ncluster: dgx_h100\ntasks: [{name: a, workload: math}]\n")
    with pytest.raises(rlperf.SpecError, match=r"a job or plan of rlperf, not a framework's .*rlperf export"):
        rlperf.audit_config(job)


@pytest.mark.parametrize(("running", "said"), [(512, True), (16, False)])
def test_preemption_is_advised_against_where_it_takes_time(running: int, said: bool) -> None:
    job = rlperf.short_job("Qwen2.5-32B", 8, "h200", max_response="8k", prompts=128, group=8).model_dump(
        mode="json", exclude_none=True
    )
    settings = {"max_running": running, "memory_fraction": 0.6}
    job["pools"] = [{"role": "rollout", "layout": {"tensor_parallel": 4}, "settings": settings}]
    predicted = rlperf.predict_job(job)
    words = [line for line in predicted.advice if "preemptions per rl_step take" in line]
    assert bool(words) == said == (predicted.idle_fraction["preemption"] >= 0.01)
