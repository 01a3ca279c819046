"""Partial rollouts: opened by the user, decided, what they gain said, keys written and read back or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlperf.api import ask, plan_job
from rlperf.errors import SpecError
from rlperf.frameworks.export import plan_texts
from rlperf.frameworks.expressible import frameworks_with
from rlperf.frameworks.imports import import_config, job_of
from rlperf.frameworks.registry import FRAMEWORKS
from rlperf.specs.job import Job

from .test_plan_decisions import TASK, drifting, job

ABLE = ("miles", "slime")


def asked(framework: str, over_provision: float | list[float], **changes: Any) -> Job:
    """A job in which little else is left open."""
    one = {"tensor_parallel": 1}
    pools = [{"role": "rollout", "layout": one}, {"role": "trainer", "layout": {**one, "context_parallel": 1}}]
    task = {**TASK, "over_provision": over_provision}
    return job(**{"framework": framework, "limits": {"staleness": 1}, "tasks": [task], "pools": pools, **changes})


def test_they_are_opened_by_the_user_and_take_the_tail_away(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"state limits\.staleness"):
        plan_job(asked("slime", [1, 1.5], limits={}))
    task = {**TASK, "workload": str(drifting(tmp_path / "tail", 150, 150))}
    plain, forced, opened = (
        plan_job(asked("slime", 1, tasks=[{**task, "over_provision": given}])) for given in (1, 1.5, [1, 1.5])
    )
    assert forced.phases[0].settings.over_provision == 1.5
    assert forced.phases[0].predicted.stages_s.rollout < 0.9 * plain.phases[0].predicted.stages_s.rollout
    assert opened.objective <= min(plain.objective, forced.objective) * (1 + 1e-3)
    assert any("partial rollouts (1.5 times" in line for line in forced.phases[0].predicted.gains)
    assert not any("partial rollouts" in line for line in plain.phases[0].predicted.gains)
    with pytest.raises(ValueError, match="ratio of at least 1"):
        job(tasks=[{**TASK, "over_provision": 0.5}])


@pytest.mark.parametrize("framework", ABLE)
def test_keys_are_written_and_read_back(framework: str, tmp_path: Path) -> None:
    """Groups in flight are whole; without the flag what the others have would be thrown away."""
    plan = plan_job(asked(framework, 1.3))
    texts = plan_texts(plan)
    name, text = next((name, text) for name, text in texts.items() if name.endswith(".sh") and "partial" in text)
    flight = round(1.3 * TASK["prompts_per_step"])  # type: ignore[operator]
    assert "--partial-rollout" in text and f"--over-sampling-batch-size {flight}" in text
    assert "over_provision" not in texts["EXPORT.md"].partition("cannot")[2]
    (tmp_path / name).write_text(text)
    imported = import_config([tmp_path / name], framework)
    back = imported.run.batch
    assert ask(job_of(imported)).job.limits.staleness == 1, "the job of such a file was refused: it stated no staleness"
    assert back.over_provision * TASK["prompts_per_step"] == pytest.approx(flight)  # type: ignore[operator]
    (tmp_path / name).write_text(text.replace("--partial-rollout", ""))
    assert import_config([tmp_path / name], framework).run.batch.over_provision == 1.0


@pytest.mark.slow
def test_a_file_that_holds_no_such_number_says_so() -> None:
    """Beside a filter the same flag counts what the filter may drop."""
    text = plan_texts(plan_job(asked("slime", 1.5, algorithm="dapo")))["EXPORT.md"]
    assert "beside dynamic sampling" in text


@pytest.mark.parametrize("framework", [name for name in FRAMEWORKS if name not in ABLE])
def test_frameworks_without_a_key_refuse_them_by_name_and_plan_without_where_left_open(framework: str) -> None:
    modes = {"modes": ["async"]} if framework == "areal" else {}
    with pytest.raises(SpecError, match=rf"{framework} \S+ has no key for partial rollouts \(over_provision 1\.5\)"):
        ask(asked(framework, 1.5, **modes), to_plan=True)
    question = ask(asked(framework, [1.0, 1.5], **modes), to_plan=True)
    assert question.context.job.tasks[0].over_provision == (1.0,)
    assert frameworks_with("batch.over_provision") == ABLE
