"""Lengths that drift over the horizon: what a plan says of a group of rl_steps is said of these rl_steps."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import rlperf
from rlperf.api import ask
from rlperf.plan.answer.phases import mean_prediction
from rlperf.plan.compare import job_of_plan
from rlperf.workload import load_model, sample_lengths, save_model
from rlperf.workload.drift import Drift
from rlperf.workload.model import LengthModel
from rlperf.workload.sampling import sample_rl_steps
from rlperf.workload.tables import write_table

RECORDED = 40
GROWING = Drift(
    rl_steps=tuple(range(RECORDED)),
    location=tuple(0.03 * (k - 20) for k in range(RECORDED)),
    location_se=(0.05,) * RECORDED,
    slope=0.03,
    slope_se=0.001,
    centre=20.0,
    trend=True,
)


@pytest.fixture
def growing() -> LengthModel:
    return load_model("programming").model_copy(update={"drift": GROWING})


def job(workload: str, most: int = 12288, **more: object) -> rlperf.Job:
    task = {"name": "code", "workload": workload, "prompts_per_step": 16, "group_size": 8, "max_response_tokens": most}
    return rlperf.Job.model_validate(
        {"architecture": "Qwen3-8B", "cluster": "dgx_h100", "nodes": 1, "tasks": [task], **more}
    )


def test_the_maximum_that_cuts_few_is_one_for_the_rl_steps_that_are_warned_of(
    growing: LengthModel, tmp_path: Path
) -> None:
    save_model(growing, tmp_path / "growing.yaml")
    asked = job(str(tmp_path / "growing.yaml"), horizon={"rl_steps": 80, "group": 40})
    phase = rlperf.plan_job(asked).phases[0]
    assert phase.rl_steps == (0, 79)
    (said,) = phase.predicted.warnings
    enough = int(re.search(r"max_response_tokens ([\d,]+) would cut 5 %", said)[1].replace(",", ""))  # type: ignore[index]
    assert said.startswith("in rl_steps 40 to 79 ")
    assert enough > 12288
    drawn = sample_lengths(growing, 4096, 8, rl_step=59, max_response_tokens=1 << 20, seed=0)
    longer = [float(np.mean(drawn.response_tokens >= cap)) for cap in (enough, enough // 2)]
    assert longer[0] < 0.08 < longer[1]


@pytest.mark.slow
def test_a_horizon_past_the_recording_goes_along_its_trend(growing: LengthModel, tmp_path: Path) -> None:
    save_model(growing, tmp_path / "growing.yaml")
    whole, fine, once = (
        rlperf.plan_job(job(str(tmp_path / "growing.yaml"), 32768, horizon=horizon))
        for horizon in ({"rl_steps": 160}, {"rl_steps": 160, "group": 20}, {"rl_steps": 1})
    )
    assert whole.objective == pytest.approx(fine.objective, rel=0.03)
    assert whole.objective > 1.2 * 160 * once.objective
    assert [group.rl_steps for group in whole.phases[0].groups][:2] == [(0, 39), (40, 79)]


def test_predict_and_plan_count_the_same_rl_steps(growing: LengthModel, tmp_path: Path) -> None:
    save_model(growing, tmp_path / "growing.yaml")
    plan = rlperf.plan_job(job(str(tmp_path / "growing.yaml"), horizon={"rl_steps": 160}))
    assert rlperf.predict_job(job_of_plan(plan)).rl_step_s == pytest.approx(
        plan.phases[0].predicted.rl_step_s, rel=1e-9
    )


@pytest.mark.slow
def test_recorded_rl_steps_are_planned_as_they_were(growing: LengthModel, tmp_path: Path) -> None:
    drawn = sample_rl_steps(growing, range(RECORDED), 16, 8, max_response_tokens=12288)
    write_table(drawn, tmp_path / "own.csv")
    groups = [
        rlperf.plan_job(job(str(tmp_path / "own.csv"), horizon={"rl_steps": n})).job.horizon.group
        for n in (RECORDED, 4 * RECORDED)
    ]
    assert groups == [None, RECORDED]


def test_one_recorded_rl_step_does_not_stand_for_a_group_that_a_trend_goes_through(
    growing: LengthModel, tmp_path: Path
) -> None:
    """The last recorded rl_step, first of its group, stood for all of it: no longer than the group before."""
    drawn = sample_rl_steps(growing, range(RECORDED + 1), 16, 8, max_response_tokens=32768)
    write_table(drawn, tmp_path / "own.csv")
    groups = {"rl_steps": 2 * RECORDED, "group": RECORDED // 2}
    source = ask(job(str(tmp_path / "own.csv"), 32768, horizon=groups)).context.tasks[0]
    means = [
        float(
            np.mean([table.response_tokens.mean() for table in source.source.demand(source.batches[0], own, 0).tables])
        )
        for own in ((0, 19), (20, 39), (40, 59), (60, 79))
    ]
    assert means == sorted(means)
    assert means[2] / means[1] > 1.0 + 0.5 * (means[1] / means[0] - 1.0)


def test_memory_and_warnings_of_a_phase_are_of_its_worst_rl_steps() -> None:
    first = rlperf.predict_job(job("programming"))
    use = first.memory_bytes["rollout"]
    more = use.model_copy(update={"total": 2.0 * use.total})
    changes = {
        "memory_bytes": {**first.memory_bytes, "rollout": more},
        "warnings": ("cut",),
        "truncated_fraction": 0.9,
        "fits": False,
    }
    found = mean_prediction([first, first.model_copy(update=changes)], [3, 1])
    assert found.memory_bytes["rollout"].total == 2.0 * use.total
    assert found.warnings == ("cut",)
    assert first.fits and not found.fits


@pytest.mark.parametrize("fitted", [False, True])
def test_recorded_rl_steps_are_refused_where_nothing_is_recorded(
    growing: LengthModel, tmp_path: Path, fitted: bool
) -> None:
    save_model(growing, tmp_path / "growing.yaml")
    asked = job(str(tmp_path / "growing.yaml") if fitted else "programming")
    when = asked.model_copy(update={"tasks": (asked.tasks[0].model_copy(update={"rl_steps": (0, 49)}),)})
    with pytest.raises(rlperf.SpecError, match="rl_steps are those of a recording"):
        rlperf.plan_job(when)
