"""A plan with a technique, exported and imported again, takes the same seconds: no file drops anything of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import rlperf
from rlperf.frameworks.audit.audit import audit
from rlperf.frameworks.export import write_plan
from rlperf.frameworks.imports import import_config
from rlperf.plan.answer.plan import Plan
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
