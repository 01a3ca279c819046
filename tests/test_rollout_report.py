"""Figure and trace of a rollout, and ``rlperf simulate``."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from rlperf.cli.main import app
from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.errors import SpecError
from rlperf.report.rollout import perfetto_trace, rollout_figure, sampled
from rlperf.sim.rollout import RolloutResult, Trajectories, simulate_rollout

COST = EngineStepCost(np.array([0.0, 1.0]), np.zeros(2), host_s=1.0)

JOB = """
schema_version: 1
name: small
architecture: Qwen2.5-7B
cluster: dgx_h100
nodes: 1
tasks:
  - {name: math, workload: math, prompts_per_step: 16, group_size: 4, max_response_tokens: 2048}
pools:
  - {role: rollout, devices: 8, layout: {tensor_parallel: 2}, settings: {max_running: 64}}
"""


def rollout() -> tuple[RolloutResult, Trajectories]:
    trajectories = Trajectories(
        prompt_tokens=np.array([8, 20, 8, 8]), response_tokens=np.array([3, 2, 9, 4]),
        tool_latency_s=np.array([5.0, 0, 0, 0]), offsets=np.array([0, 2, 3, 4]), group=np.array([4, 4, 9]),
        arrival_s=np.zeros(3),
    )  # fmt: skip
    limits = EngineLimits(np.inf, max_running=1)
    return simulate_rollout(trajectories, 2, cost=COST, limits=limits, routing=np.array([0, 1, 1])), trajectories


def test_sampled_is_zero_while_nothing_runs() -> None:
    result, _ = rollout()
    # replica 0: a turn until 3 s, its tool until 8 s, the next turn until 10 s
    assert sampled(result.timelines[0], np.array([1.5, 5.0, 9.5, 11.0]), "running").tolist() == [1.0, 0.0, 1.0, 0.0]


def test_trace_has_every_turn_and_stays_within_the_rollout() -> None:
    result, trajectories = rollout()
    events = json.loads(perfetto_trace(result, trajectories))["traceEvents"]
    turns = [e for e in events if e["ph"] == "X" and e["name"].startswith("group")]
    assert sorted(e["name"] for e in turns) == ["group 4 turn 0", "group 4 turn 0", "group 4 turn 1", "group 9 turn 0"]
    assert sum(e["args"]["response_tokens"] for e in turns) == 18
    assert max(e["ts"] + e["dur"] for e in events if e["ph"] == "X") == pytest.approx(1e6 * result.makespan_s)
    # one at a time on replica 1: the second trajectory is queued while the first one decodes
    queued = [e for e in events if e["name"] == "queued" and e["pid"] == 1]
    assert [e["dur"] for e in queued] == [9e6]
    # stages lie within their turn, to the nanosecond
    for turn in turns:
        begin, end = round(1e3 * turn["ts"]), round(1e3 * (turn["ts"] + turn["dur"]))
        inner = [
            e
            for e in events
            if e["ph"] == "X"
            and e["name"] in ("queued", "prefill", "decode")
            and (e["pid"], e["tid"]) == (turn["pid"], turn["tid"])
            and begin <= round(1e3 * e["ts"]) < end
        ]
        assert inner
        assert all(round(1e3 * (e["ts"] + e["dur"])) <= end for e in inner)
    # slices of one lane do not overlap, so a viewer can draw them
    for pid, tid in {(e["pid"], e["tid"]) for e in turns}:
        lane = sorted((e["ts"], e["ts"] + e["dur"]) for e in turns if (e["pid"], e["tid"]) == (pid, tid))
        assert all(a[1] <= b[0] for a, b in pairwise(lane))


def test_figure_names_axes_with_units() -> None:
    result, _ = rollout()
    assert rollout_figure(result, "png")[:4] == b"\x89PNG"
    drawn = rollout_figure(result, "svg")
    for label in (b"time since the rollout began [s]", b"per replica [tokens]", b"waiting for tools 19.2 %"):
        assert label in drawn


def test_figure_of_many_replicas() -> None:
    result = simulate_rollout(Trajectories.of(4, np.arange(1, 41)), 10, cost=COST, limits=EngineLimits(np.inf, 8))
    assert len(rollout_figure(result)) > 10_000


def test_simulate_writes_trace_and_figure(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    done = CliRunner().invoke(
        app, ["simulate", str(tmp_path / "job.yaml"), "--out", str(tmp_path / "out"), "--json"], catch_exceptions=False
    )
    assert done.exit_code == 0
    summary = json.loads(done.stdout)
    assert summary["trajectories"] == 64
    assert len(summary["replica_finish_s"]) == 4
    assert summary["makespan_s"] == pytest.approx(max(summary["replica_finish_s"]))
    assert json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    assert (tmp_path / "out" / "rollout.svg").read_text().startswith("<?xml")
    shown = CliRunner().invoke(app, ["simulate", str(tmp_path / "job.yaml"), "--out", str(tmp_path / "out")])
    assert "waiting for other replicas" in shown.stdout


def test_simulate_shows_the_steady_state_of_asynchronous_modes(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        JOB.replace("devices: 8", "devices: 4") + "modes: [async]\nlimits: {staleness: 2}\n"
    )
    asked = ["simulate", str(tmp_path / "job.yaml"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*asked, "--json"], catch_exceptions=False)
    steady = json.loads(done.stdout)["steady"]
    assert steady["period_s"] > 0.0 and sum(steady["staleness"]) == pytest.approx(1.0)
    assert 0.0 <= steady["staleness_mean"] <= 3.0
    assert "steady state over 50 rl_steps" in CliRunner().invoke(app, asked).stdout


def test_simulate_refuses_before_it_writes(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    for extra, message in ((["--routing", "roundrobin"], "did you mean round_robin"), (["--rl-step", "99"], "0 to")):
        with pytest.raises(SpecError, match=message):
            CliRunner().invoke(
                app, ["simulate", str(tmp_path / "job.yaml"), "--out", str(tmp_path / "out"), *extra],
                catch_exceptions=False,
            )  # fmt: skip
    assert not (tmp_path / "out").exists()
