"""A plan with a technique, exported and imported again, takes the same seconds: no file drops anything of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import rlperf
from rlperf.errors import SpecError
from rlperf.frameworks.audit.audit import audit
from rlperf.frameworks.export import write_plan
from rlperf.frameworks.imports import import_config, job_of
from rlperf.plan.answer.plan import Plan
from rlperf.plan.compare import job_of_plan
from rlperf.specs.job import Job
from rlperf.specs.short_job import short_job

Fields = Mapping[str, Any]


def _job(framework: str, model: str, task: Fields, fields: Fields) -> Job:
    """A job of 16 H100 with some fields of its one task and of its own."""
    asked = short_job(model, 16, framework=framework, max_response="8k").stated()
    changed = {**asked, "tasks": [{**asked["tasks"][0], **task}], **fields}
    return Job.model_validate(changed)


def _held(plan: Plan, folder: Path) -> None:
    """Export, import and audit: the step of the plan to 1e-9, every key known, and no error."""
    write_plan(plan, None, folder)
    file = next(path for name in ("config.yaml", "config.sh") if (path := folder / name).is_file())
    found = audit(import_config([file]), plan=False, gains=False)
    assert (found.imported.unknown, found.imported.illegal) == ((), ())
    assert [str(each) for each in found.findings if each.severity == "error"] == []
    assert found.predicted is not None
    assert found.predicted.rl_step_s == pytest.approx(plan.phases[0].predicted.rl_step_s, rel=1e-9)


@pytest.mark.parametrize("framework", ["verl", "nemo_rl", "openrlhf", "slime", "skyrl"])
def test_groups_that_filtering_drops(framework: str, tmp_path: Path) -> None:
    """384 prompts for 128: in keys where there are any, else in the header; SkyRL draws whole batches of 128."""
    job = _job(framework, "Qwen3-8B", {"generated_prompts": 384}, {"algorithm": "dapo"})
    _held(rlperf.plan_job(job), tmp_path / "out")


def test_trl_drops_no_groups(tmp_path: Path) -> None:
    """Its loss_type dapo is a normalisation: a plan with twice the prompts rolled out is of no run of its files."""
    with pytest.raises(SpecError, match=r"trl drops no groups.*not 384 .*leave generated_prompts out"):
        rlperf.plan_job(_job("trl", "Qwen3-4B", {"generated_prompts": 384}, {"algorithm": "dapo"}))
    plan = rlperf.plan_job(_job("trl", "Qwen3-4B", {}, {"algorithm": "dapo"}))
    _held(plan, tmp_path / "out")
    assert "generated" not in (tmp_path / "out/EXPORT.md").read_text()
    assert "rolled out" not in (tmp_path / "out/config.yaml").read_text()


def _drafts(word: str) -> Fields:
    return {"pools": [{"role": "rollout", "settings": {"speculation": [word], "draft_acceptance": 0.7}}]}


@pytest.mark.parametrize(
    ("framework", "model", "fields"),
    [
        ("verl", "Qwen3-8B", {**_drafts("eagle3:3"), "modes": ["one_step_off"], "limits": {"staleness": 1}}),
        ("verl", "MiMo-7B-RL", _drafts("mtp:1")),
        ("nemo_rl", "Qwen3-8B", _drafts("eagle3:3")),
        ("slime", "Qwen3-8B", _drafts("eagle3:3")),
        ("miles", "Qwen3-8B", _drafts("eagle3:3")),
        ("skyrl", "MiMo-7B-RL", _drafts("mtp:1")),
    ],
)
def test_accepted_drafts_stand_in_the_header(framework: str, model: str, fields: Fields, tmp_path: Path) -> None:
    """No engine has a key for what it accepts: a stated share went back to that of measured models."""
    _held(rlperf.plan_job(_job(framework, model, {}, fields)), tmp_path / "out")


@pytest.mark.parametrize("framework", ["nemo_rl", "areal", "skyrl"])
def test_a_replay_that_no_key_says_is_refused(framework: str) -> None:
    """One switch replays the rollout's experts (R3); those of the old policy's pass were planned and written as off."""
    job = _job(framework, "Qwen3-30B-A3B", {}, {"pools": [{"role": "trainer", "settings": {"router_replay": "R2"}}]})
    with pytest.raises(SpecError, match=r"no key for trainer\.router_replay \(R2\).*miles, slime, verl"):
        rlperf.plan_job(job)


@pytest.mark.parametrize("framework", ["nemo_rl", "slime", "areal"])
def test_log_probabilities_of_a_teacher_that_no_key_says(framework: str) -> None:
    teacher = {"name": "teacher", "kind": "teacher", "architecture": "Qwen3-32B", "top_k": 64}
    with pytest.raises(SpecError, match=r"no key for top_k \(64\) \(leave it out, or framework: verl\)"):
        rlperf.plan_job(_job(framework, "Qwen3-8B", {}, {"scorers": [teacher]}))


def test_what_a_judge_reads_and_writes_is_named_as_lost(tmp_path: Path) -> None:
    judge = {"name": "judge", "kind": "judge", "architecture": "Qwen3-8B", "prompt_tokens": 500, "response_tokens": 512}
    plan = rlperf.plan_job(_job("verl", "Qwen3-8B", {}, {"scorers": [judge]}))
    write_plan(plan, None, tmp_path / "out")
    said = (tmp_path / "out/EXPORT.md").read_text()
    assert "500 tokens that judge reads beside a sequence, 512 that it writes" in said


def test_a_mixed_batch_takes_the_best_of_several_numbers_at_once(tmp_path: Path) -> None:
    """All of its tasks list the same; the header says which was taken, and a file reads back with it."""
    tasks = [
        {"name": each, "workload": each, "prompts_per_step": 64, "max_response_tokens": 8192, "max_trajectories": most}
        for each, most in (("tool_use", [128, 512]), ("math", [128, 512]))
    ]
    job = Job.model_validate(
        {"architecture": "Qwen3-8B", "cluster": "dgx_h100", "nodes": 2, "sharing": "mixed", "tasks": tasks}
    )
    plan = rlperf.plan_job(job)
    assert plan.phases[0].settings.max_trajectories == 512
    assert job_of_plan(plan).tasks[1].max_trajectories == (512,)
    write_plan(plan, None, tmp_path / "out")
    file = tmp_path / "out/config.yaml"
    assert "; lengths of tool_use (64 prompts), math (64 prompts), 512 trajectories at once.\n" in file.read_text()
    assert [task.max_trajectories for task in job_of(import_config([file])).tasks] == [(512,), (512,)]
    other = job.model_copy(update={"tasks": (job.tasks[0], job.tasks[1].model_copy(update={"max_trajectories": (9,)}))})
    with pytest.raises(SpecError, match="one max_trajectories: tool_use 128 or 512, math 9"):
        rlperf.plan_job(other)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.2", "0.3"])
@pytest.mark.parametrize("mode", ["colocated", "async"])
def test_releases_that_count_microbatches_are_planned_so(version: str, mode: str, tmp_path: Path) -> None:
    """SkyRL up to 0.2 fills no microbatch by tokens, and its fully_async scores the old policy."""
    fields = {"modes": [mode], "limits": {"staleness": 4}}
    plan = rlperf.plan_job(_job(f"skyrl=={version}", "Qwen3-8B", {"workload": "tool_use"}, fields))
    trainer = next(pool for pool in plan.phases[0].pools if pool.role == "trainer")
    assert (trainer.settings.token_budget is None) == (version == "0.2")
    _held(plan, tmp_path / "out")


@pytest.mark.parametrize("in_flight", [None, True, False])
def test_weights_in_flight_are_stated_as_planned(in_flight: bool | None, tmp_path: Path) -> None:
    """NeMo-RL drains its engines before a sync unless told otherwise: files left it at that, and plans did not."""
    fields = {"modes": ["async"], "limits": {"staleness": 2}, "in_flight_updates": in_flight}
    plan = rlperf.plan_job(_job("nemo_rl", "Qwen3-8B", {}, fields))
    _held(plan, tmp_path / "out")
    read = import_config([tmp_path / "out/config.yaml"])
    assert read.source.keys["grpo.async_grpo.in_flight_weight_updates"] is (in_flight is not False)
    drained = job_of(read).model_copy(update={"in_flight_updates": False})
    slower = rlperf.predict_job(drained).rl_step_s / plan.phases[0].predicted.rl_step_s
    assert slower == pytest.approx(1.0) if in_flight is False else slower > 1.1


@pytest.mark.parametrize(
    ("framework", "asked", "refused"),
    [("verl", True, True), ("verl", False, False), ("areal", False, True), ("areal", True, False)],
)
def test_weights_in_flight_that_no_file_says_are_refused(framework: str, asked: bool, refused: bool) -> None:
    job = _job(framework, "Qwen3-8B", {}, {"modes": ["async"], "limits": {"staleness": 2}, "in_flight_updates": asked})
    if refused:
        with pytest.raises(SpecError, match=rf"writes no in_flight_updates \({str(asked).lower()}\) for {framework}"):
            rlperf.plan_job(job)
    else:
        assert rlperf.plan_job(job).phases


def test_a_weight_sync_without_a_word_of_miles_is_named_as_lost(tmp_path: Path) -> None:
    fields = {"modes": ["one_step_off"], "limits": {"staleness": 1}, "weight_sync": "disk"}
    write_plan(rlperf.plan_job(_job("miles", "Qwen3-8B", {}, fields)), None, tmp_path / "out")
    assert "| run.weight_sync disk | its usual weight sync |" in (tmp_path / "out/EXPORT.md").read_text()
