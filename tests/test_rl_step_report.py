"""Bars, figure and bottlenecks of an rl_step."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rlperf.report.rl_step import print_step, step_figure, timeline_lines
from rlperf.sim.rl_step.bottleneck import bottlenecks, next_bottleneck, scaled
from rlperf.sim.rl_step.compose import StepStages, Transitions, compose_rl_step
from rlperf.sim.rl_step.modes import Execution, step_seconds
from rlperf.sim.rl_step.stages import StageSeconds
from rlperf.specs.modes import MODES

SECONDS = st.floats(0.5, 100.0)


def line(mode: str):  # type: ignore[no-untyped-def]
    stages = StepStages.of(
        np.linspace(40.0, 60.0, 24), scoring_s=10.0, training_s=30.0, weight_sync_s=5.0,
        transitions=Transitions(onload_s=2.0, offload_s=2.0),
    )  # fmt: skip
    return compose_rl_step(Execution(mode, staleness=2), stages, rollout_devices=24, trainer_devices=24)


def test_lines_of_a_colocated_step_follow_each_other() -> None:
    lines = timeline_lines(line("colocated"))
    assert [name for _, name, _, _ in lines] == ["rollout", "onload", "scoring", "training", "offload", "weight sync"]
    assert lines[0][3].startswith("#")
    assert lines[-1][3].endswith("#")


def test_bars_take_what_a_narrow_screen_leaves() -> None:
    """On 60 columns bars were cut at their right end: whatever came late in an rl_step had none."""
    for screen in (60, 80, 200):
        lines = timeline_lines(line("colocated"), screen)
        others = sum(max(len(str(row[k])) for row in lines) for k in range(3))
        assert {len(bar) for *_, bar in lines} == {min(36, screen - 13 - others)}
        assert all("#" in bar for *_, bar in lines) and lines[-1][3].endswith("#")


@pytest.mark.parametrize("mode", list(MODES))
def test_figure_of_every_mode(mode: str) -> None:
    svg = step_figure(line(mode), title="one").decode()
    assert svg.startswith("<?xml")
    assert "rollout" in svg
    assert step_figure(line(mode), title="one") == step_figure(line(mode), title="one")


@given(SECONDS, SECONDS, SECONDS, SECONDS, st.sampled_from(list(MODES)))
def test_gains_are_what_the_step_saves(r: float, s: float, t: float, y: float, mode: str) -> None:
    execution = Execution(mode, staleness=2)
    times = StageSeconds.of(rollout_s=r, scoring_s=s, training_s=t, weight_sync_s=y, rollout_steady_s=0.6 * r)
    whole = float(step_seconds(execution, times))
    for one in bottlenecks(execution, times):
        assert one.gain_s == pytest.approx(whole - float(step_seconds(execution, scaled(times, one.stage, 0.0))))
        assert 0.0 < one.share <= 1.0


def test_next_bottleneck_by_hand() -> None:
    # in turn: rollout leads until it is as short as training
    times = StageSeconds.of(rollout_s=60.0, training_s=20.0, weight_sync_s=1.0)
    found = next_bottleneck(Execution("colocated"), times)
    assert found is not None
    assert (found.first, found.stage) == ("rollout", "training")
    assert found.speedup == pytest.approx(3.0, rel=0.02)
    assert next_bottleneck(Execution("colocated"), StageSeconds.of(rollout_s=5.0)) is None


def test_view_of_a_job_prints(tmp_path: Path) -> None:
    from rlperf.api import ask
    from rlperf.cli.output import default_job
    from rlperf.plan.judge.timeline import step_view
    from rlperf.plan.predict import evaluate_job

    question = ask(default_job())
    evaluation, _ = evaluate_job(question.context, question.facts)
    view = step_view(evaluation)
    assert view.timeline.rl_step_s == pytest.approx(float(evaluation.seconds.rl_step_s[0]), rel=1e-6)
    assert all(0.0 <= share <= 1.0 for share in view.idle_share.values())
    screen = Console(file=StringIO(), width=120)
    print_step(view, screen)
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "devices idle" in text
    assert "would be shorter without: rollout" in text


@pytest.mark.slow
def test_the_whole_run_of_a_job() -> None:
    from rlperf.api import ask, plan_job, predict_job
    from rlperf.cli.output import default_job
    from rlperf.report.plan_summary import run_words, summary_lines
    from rlperf.specs.job import WholeRun

    job = ask(default_job()).job
    assert predict_job(job).run is None
    plain_job = job.model_copy(update={"run": WholeRun(rl_steps=100), "price": 2.0})
    predicted = predict_job(plain_job)
    plain = predicted.run
    assert plain is not None
    assert plain.total_s == pytest.approx(100 * predicted.rl_step_s + plain.start_up_s)
    assert plain.low_s < plain.total_s < plain.high_s
    assert plain.usd_per_rl_step == pytest.approx(plain.device_hours * 2.0 / 100)
    around = WholeRun.model_validate(
        {
            "rl_steps": 100, "checkpoint_every": 10, "checkpoint": "60 s", "validation_every": 20, "validation": "90 s",
            "device_mtbf": f"{16 * 86400} s", "recovery": "600 s",
        }
    )  # fmt: skip
    real = predict_job(job.model_copy(update={"run": around})).run
    assert real is not None and real.usd is None
    assert real.goodput < plain.goodput < 1.0
    assert (real.checkpoint_s, real.validation_s) == (600.0, 450.0) and real.failures > 0.0
    assert "would lose least" in run_words(real) and "failures" in run_words(real)
    plan = plan_job(job.model_copy(update={"run": around}))
    assert plan.run is not None and any("the run of 100 rl_steps" in line for line in summary_lines(plan))
