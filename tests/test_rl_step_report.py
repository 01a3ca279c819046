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
from rlperf.sim.rl_step.modes import Execution, ExecutionMode, StageTimes, step_seconds

SECONDS = st.floats(0.5, 100.0)


def line(mode: ExecutionMode):  # type: ignore[no-untyped-def]
    stages = StepStages.of(
        np.linspace(40.0, 60.0, 24), scoring_s=10.0, training_s=30.0, weight_sync_s=5.0,
        transitions=Transitions(onload_s=2.0, offload_s=2.0),
    )  # fmt: skip
    return compose_rl_step(Execution(mode, staleness=2), stages, rollout_devices=24, trainer_devices=24)


def test_lines_of_a_colocated_step_follow_each_other() -> None:
    lines = timeline_lines(line(ExecutionMode.SYNC_COLOCATED))
    assert [name for _, name, _, _ in lines] == ["rollout", "onload", "scoring", "training", "offload", "weight sync"]
    assert lines[0][3].startswith("#")
    assert lines[-1][3].endswith("#")


@pytest.mark.parametrize("mode", list(ExecutionMode))
def test_figure_of_every_mode(mode: ExecutionMode) -> None:
    svg = step_figure(line(mode), title="one").decode()
    assert svg.startswith("<?xml")
    assert "rollout" in svg
    assert step_figure(line(mode), title="one") == step_figure(line(mode), title="one")


@given(SECONDS, SECONDS, SECONDS, SECONDS, st.sampled_from(list(ExecutionMode)))
def test_gains_are_what_the_step_saves(r: float, s: float, t: float, y: float, mode: ExecutionMode) -> None:
    execution = Execution(mode, staleness=2)
    times = StageTimes(rollout_s=r, scoring_s=s, training_s=t, weight_sync_s=y, rollout_steady_s=0.6 * r)
    whole = float(step_seconds(execution, times))
    for one in bottlenecks(execution, times):
        assert one.gain_s == pytest.approx(whole - float(step_seconds(execution, scaled(times, one.stage, 0.0))))
        assert 0.0 < one.share <= 1.0


def test_next_bottleneck_by_hand() -> None:
    # in turn: rollout leads until it is as short as training
    times = StageTimes(rollout_s=60.0, training_s=20.0, weight_sync_s=1.0)
    found = next_bottleneck(Execution(ExecutionMode.SYNC_COLOCATED), times)
    assert found is not None
    assert (found.first, found.stage) == ("rollout", "training")
    assert found.speedup == pytest.approx(3.0, rel=0.02)
    assert next_bottleneck(Execution(ExecutionMode.SYNC_COLOCATED), StageTimes(rollout_s=5.0)) is None


def test_view_of_a_job_prints(tmp_path: Path) -> None:
    from rlperf.api import ask
    from rlperf.cli.output import default_job
    from rlperf.plan.predict import evaluate_job
    from rlperf.plan.timeline import step_view

    question = ask(default_job())
    evaluation, _ = evaluate_job(question.context, question.facts)
    view = step_view(evaluation)
    assert view.timeline.step_s == pytest.approx(float(evaluation.seconds.step_s[0]), rel=1e-6)
    assert all(0.0 <= share <= 1.0 for share in view.idle_share.values())
    screen = Console(file=StringIO(), width=120)
    print_step(view, screen)
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "devices idle" in text
    assert "would be shorter without: rollout" in text


def test_whole_run_of_a_judged_configuration() -> None:
    from rlperf.api import ask
    from rlperf.cli.output import default_job
    from rlperf.plan.predict import evaluate_job
    from rlperf.plan.run_cost import Surroundings, run_cost

    question = ask(default_job())
    evaluation, _ = evaluate_job(question.context, question.facts)
    plain = run_cost(question.context, evaluation, Surroundings(), rl_steps=100)
    framework = question.context.trainers[int(evaluation.trainer.backend[0])].framework
    assert plain.total_s == pytest.approx(100 * evaluation.step_s + framework.start_up.value + framework.capture.value)
    around = Surroundings(checkpoint_every=10, checkpoint_s=60.0, device_mtbf_s=16 * 86400.0, recovery_s=600.0)
    real = run_cost(question.context, evaluation, around, rl_steps=100)
    assert real.goodput < plain.goodput < 1.0
    assert real.device_hours == pytest.approx(real.total_s * evaluation.configuration.devices / 3600)
