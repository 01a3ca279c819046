"""An objective is one row of a table: a toy added there is asked for, ranked by, judged by, swept and reported."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlperf.api import plan_job, sweep_job
from rlperf.report.plan_summary import summary_lines
from rlperf.specs.job import Job
from rlperf.specs.objectives import OBJECTIVES, ObjectiveTraits
from rlperf.sweep import Sweep

from .recipes import recipe

JOB: dict[str, Any] = {
    "name": "small", "architecture": "Qwen3-0.6B", "cluster": "dgx_h100", "nodes": 2, "modes": ["colocated"],
    "trainer_backends": ["fsdp2"], "limits": {"truncated_fraction": 1.0},
    "tasks": [{"name": "math", "workload": "math", "prompts_per_step": 16, "group_size": 4, "mini_batch": 8,
               "max_prompt_tokens": 512, "max_response_tokens": 1024}],
}  # fmt: skip


@pytest.fixture
def crowding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe of the documentation: seconds times the square of the devices, as a crowded cluster may want."""
    toy = eval(recipe("rlperf/specs/objectives.py"), {"ObjectiveTraits": ObjectiveTraits})
    monkeypatch.setitem(OBJECTIVES, "crowding", toy)


@pytest.mark.usefixtures("crowding")
def test_a_toy_objective_is_planned_and_reported() -> None:
    plan = plan_job(Job.model_validate({**JOB, "objective": "crowding"}))
    fastest = plan_job(Job.model_validate(JOB))
    phase = plan.phases[0]
    devices = phase.pool("trainer").devices
    assert (devices, fastest.phases[0].pool("trainer").devices) == (8, 16)  # half the devices count a quarter
    assert plan.objective == pytest.approx(plan.job.horizon.rl_steps * phase.predicted.rl_step_s * devices**2)
    assert "device2-s" in summary_lines(plan)[0]
    bound = plan.model_copy(update={"objective": 5.0, "bound": 4.0})
    assert "take 4 device2-s, which is 20.0 % less" in summary_lines(bound)[0]
    for regret, said in ((0.0004, "is as good"), (0.007, "would have lost 0.7 %")):
        assert summary_lines(plan.model_copy(update={"screen_regret": regret}))[1].endswith(f"own choice {said}")


@pytest.mark.usefixtures("crowding")
@pytest.mark.parametrize("method", ["screen", "events"])
def test_a_toy_objective_is_swept(method: str) -> None:
    asked = Sweep(job=JOB, grid={"nodes": [1, 2], "objective": ["crowding"]}, method=method)
    rows = sweep_job(asked, workers=1).frame.to_dicts()
    assert [row["devices"] for row in rows] == [8, 8]
    for row in rows:
        assert row["objective_value"] == pytest.approx(row["rl_step_s"] * row["devices"] ** 2, rel=1e-12)


def test_an_objective_that_is_no_row_is_refused() -> None:
    with pytest.raises(ValidationError, match="there is no objective 'crowding': objectives are step_time"):
        Job.model_validate({**JOB, "objective": "crowding"})
    schema = Job.model_json_schema()["$defs"]["Objective"]["properties"]["minimize"]
    assert schema["enum"] == list(OBJECTIVES)


def test_device_seconds_of_tokens_are_said_of_a_million() -> None:
    """Plans said "5,664 device-s", and the reference that it is of one token."""
    plan = plan_job(
        Job.model_validate(
            {**JOB, "objective": "token_time", "tasks": [{**JOB["tasks"][0], "max_response_tokens": 32768}]}
        )
    )
    predicted = plan.phases[0].predicted
    taken = plan.phases[0].pool("trainer").devices * predicted.rl_step_s
    useful = predicted.trained_tokens * (1.0 - predicted.truncated_fraction)
    assert plan.objective == pytest.approx(taken / useful * 1e6, rel=0.3)  # those that are cut are the longest
    assert "device-s a million tokens" in summary_lines(plan)[0]


@pytest.mark.parametrize("number", [1, 2])
def test_a_value_per_token_over_a_horizon_is_a_mean_over_its_tokens(number: int) -> None:
    """It was a sum over rl_steps and tasks: five of them took five times as many device-seconds a million tokens."""
    tasks = [JOB["tasks"][0], {**JOB["tasks"][0], "name": "code", "workload": "programming", "prompts_per_step": 8}]
    job = {**JOB, "objective": "token_time", "tasks": tasks[:number]}
    one = plan_job(Job.model_validate(job))
    five = plan_job(Job.model_validate({**job, "horizon": {"rl_steps": 5}}))
    assert five.objective == pytest.approx(one.objective, rel=1e-9)
    assert five.bound == pytest.approx(one.bound, rel=1e-9)
    assert five.defaults is None or one.defaults is None or five.defaults.objective == one.defaults.objective
    if number > 1:  # tasks count by their tokens: between the one's and the other's, nearer to the longer's
        alone = [plan_job(Job.model_validate({**job, "tasks": [task]})).objective for task in tasks]
        assert min(alone) < one.objective < max(alone)
        assert "The objective is the mean over the tokens of the tasks" in " ".join(summary_lines(five))


def test_what_an_rl_step_of_each_group_counts() -> None:
    """Over the horizon: device-seconds of all groups over the useful tokens of all groups, each as often as it runs."""
    tokens, device_s, counts = [2e6, 5e6, 3e6], [80.0, 150.0, 96.0], [3, 1, 6]
    weights = OBJECTIVES["token_time"].weights(counts, tokens)
    values = [1e6 * spent / useful for spent, useful in zip(device_s, tokens, strict=True)]
    whole = sum(c * d for c, d in zip(counts, device_s, strict=True)) / sum(
        c * t for c, t in zip(counts, tokens, strict=True)
    )
    assert sum(w * v for w, v in zip(weights, values, strict=True)) == pytest.approx(1e6 * whole)
    assert OBJECTIVES["usd_per_step"].weights(counts, tokens) == counts
