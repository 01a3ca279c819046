"""Shipped jobs: every one of them is planned, by its name."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from rlperf.api import ask, plan_job
from rlperf.cli.asked import AskedJob
from rlperf.cli.profiles import app
from rlperf.errors import SpecError
from rlperf.specs.presets import preset, preset_rows

from .quick import slow_but

SMALL: dict[str, Any] = {"prompts": 16, "group": 4, "max_prompt": 512, "max_response": 1024, "mini_batch": None}
"""A small batch, so that a plan takes little time; the model, the cluster and the framework are the shipped job's."""


def test_twenty_jobs_are_listed() -> None:
    listed = CliRunner().invoke(app, ["list", "jobs", "--json"])
    assert listed.exit_code == 0
    assert all(name in listed.output for name in preset_rows())
    assert len(preset_rows()) == 20
    frameworks = {row["framework"] for row in preset_rows().values()}
    assert frameworks == {"verl", "slime", "nemo_rl", "openrlhf"}


def test_a_name_stands_where_a_file_is_due() -> None:
    from pathlib import Path

    asked = AskedJob(file=Path("glm-4.5-air-64xh100"), framework="verl")
    job = asked.job()
    assert not isinstance(job, Path)
    assert (job.name, job.architecture, job.framework) == ("glm-4.5-air-64xh100", "GLM-4.5-Air", "verl")
    assert asked.folder == Path.cwd()
    with pytest.raises(SpecError, match=r"no job named 'glm-4.5-air-64xh10' \(did you mean glm-4.5-air-64xh100"):
        preset("glm-4.5-air-64xh10")


@pytest.mark.parametrize("name", preset_rows())
def test_every_name_in_it_is_known(name: str) -> None:
    context = ask(preset(name)).context
    row = preset_rows()[name]
    assert context.cluster.devices == row["gpus"]


@pytest.mark.parametrize("name", slow_but(preset_rows(), "glm-4.5-air-64xh100"))
def test_a_plan_is_found(name: str) -> None:
    plan = plan_job(preset(name, **SMALL))
    assert plan.phases[0].predicted.rl_step_s > 0
