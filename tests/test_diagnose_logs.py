"""Graphs of real runs: framework logs, per-rank timings, recorded workloads; the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import rlperf
from rlperf.cli.explain import explain
from rlperf.diagnose import graph as g
from rlperf.diagnose.explain import explain_graph
from rlperf.diagnose.logs import (
    LoggedStep,
    RankTiming,
    graph_of_ranks,
    graph_of_steps,
    logged_steps,
    read_rank_timings,
)
from rlperf.diagnose.recorded import graph_of_recording, graph_of_traces, unloaded_token_s
from rlperf.errors import SpecError
from rlperf.frameworks.logs.read import read_log
from rlperf.sim.rollout import Trajectories
from rlperf.specs.step_log import StepLog
from rlperf.workload import LengthTable, Recording
from rlperf.workload.records import RewardTiming

app = typer.Typer()
app.command()(explain)


def invoke(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


VERL = (
    "(TaskRunner pid=1) step:{n} - actor/lr:1e-06 - response_length/mean:100.0 - response_length/max:400.0 - "
    "timing_s/gen:40.0 - timing_s/reward:5.0 - timing_s/old_log_prob:6.0 - timing_s/ref:4.0 - timing_s/adv:1.0 - "
    "timing_s/update_actor:20.0 - timing_s/update_weights:3.0 - timing_s/step:80.0\n"
)


def test_a_verl_console_log(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text("some line\n" + VERL.format(n=1) + VERL.format(n=2))
    steps = logged_steps(read_log([log]))
    assert [s.rl_step for s in steps] == [1, 2]
    assert steps[0].seconds[g.SCORING] == 10.0
    assert steps[0].tail_share == 0.75
    graph = graph_of_steps(steps)
    assert graph.rl_step_s() == 80.0
    found = explain_graph(graph)
    losses = {c.kind: c.loss_s for c in found.causes}
    assert losses == {"tail": 30.0, "reward": 5.0, "weight_sync": 3.0, "other": 2.0}
    assert dict(found.critical_s)["other"] == 2.0  # advantages, and 1 s that no timer covers


@pytest.mark.parametrize(
    ("name", "text", "rl_step_s", "rollout_s"),
    [
        (
            "a.jsonl",
            '{"step": 4, "data": {"timing_s/gen": 7.5, "timing_s/update_actor": 2, "timing_s/step": 10.0}}',
            10.0,
            7.5,
        ),
        (
            "b.json",
            '{"timing/train/generation": {"1": 9.0}, "timing/train/total_step_time": {"1": 12}, "x": {"1": 3}}',
            12.0,
            9.0,
        ),
        (
            "c.log",
            "x ppo_trainer.py] Global step 1: {'kl': 0.1, 'timing/generation': 5.0, 'timing/step_total': 6.5}",
            6.5,
            5.0,
        ),
        (
            "d.log",
            "[t] r.py:268 - perf 0: {'perf/rollout_time': 8.0}\n[t] m.py - perf 0: {'perf/step_time': 11.0}",
            11.0,
            8.0,
        ),
    ],
)
def test_logs_of_other_frameworks(tmp_path: Path, name: str, text: str, rl_step_s: float, rollout_s: float) -> None:
    log = tmp_path / name
    log.write_text(text)
    steps = logged_steps(read_log([log]))
    assert steps[0].seconds[g.ROLLOUT] == rollout_s
    assert graph_of_steps(steps).rl_step_s() == pytest.approx(rl_step_s)


def test_stages_that_add_up_to_more_than_the_rl_step_overlap() -> None:
    step = LoggedStep(0, 50.0, {g.ROLLOUT: 45.0, g.TRAINING: 30.0, g.SCORING: 10.0})
    graph = graph_of_steps([step, LoggedStep(1, 50.0, dict(step.seconds))])
    assert graph.rl_step_s() == pytest.approx(50.0)
    no_rollout = g.Change(np.where(graph.activity == g.ROLLOUT, 0.0, 1.0))
    assert graph.what_if_s(no_rollout) == pytest.approx(45.0)  # training and scoring remain, and the 5 s of nobody


def test_an_rl_step_unlike_the_others_is_named() -> None:
    steps = [LoggedStep(n, 0.0, {g.ROLLOUT: 10.0 + 0.1 * np.sin(n), g.TRAINING: 5.0}) for n in range(8)]
    assert not explain_graph(graph_of_steps(steps)).faults
    steps[6].seconds[g.TRAINING] = 25.0
    found = explain_graph(graph_of_steps(steps))
    assert [(c.kind, c.where) for c in found.faults] == [("slow_step", "training of rl_step 6")]
    assert found.faults[0].loss_s == pytest.approx(20.0 / 8)


def test_a_log_without_stages_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "empty.log"
    log.write_text("nothing here\n{broken\n")
    with pytest.raises(SpecError, match="no step metrics"):
        logged_steps(read_log([log]))
    with pytest.raises(SpecError, match="no rl_step"):
        graph_of_steps([])
    with pytest.raises(SpecError, match="states the seconds"):
        logged_steps(StepLog.of([1], rl_step_s=[3.0]))


def rank_lines(slow: int | None = None, ranks: int = 8, scale: float = 1.0) -> list[dict[str, object]]:
    lines: list[dict[str, object]] = []
    for step in range(2):
        lines.append({"rl_step": step, "stage": "controller", "rank": 0, "seconds": 0.05 * scale})
        for rank in range(ranks):
            late = 1.6 if rank == slow else 1.0
            wiggle = 1.0 + 0.01 * np.sin(rank)
            lines.append({"rl_step": step, "stage": "rollout", "rank": rank, "seconds": 10.0 * wiggle, "tokens": 5000})
            for unit in range(3):
                lines.append({"rl_step": step, "stage": "training", "rank": rank, "seconds": 2.0 * late * wiggle,
                              "tokens": 2000, "unit": unit})  # fmt: skip
            lines.append({"step": step, "stage": "weight_sync", "rank": rank, "seconds": 0.5})
    return lines


def write_lines(path: Path, lines: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_rank_timings_name_the_late_rank(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "ranks.jsonl", rank_lines(slow=5))
    graph = graph_of_ranks(read_rank_timings(path))
    wiggle = 1.0 + 0.01 * np.sin(np.arange(8))
    training = 6.0 * np.max(wiggle * np.where(np.arange(8) == 5, 1.6, 1.0))
    assert graph.rl_step_s() == pytest.approx(0.05 + 10.0 * wiggle.max() + training + 0.5)
    found = explain_graph(graph)
    assert [(c.kind, c.rank) for c in found.faults] == [("slow_device", 5)]
    assert found.faults[0].loss_s == pytest.approx(training - 6.0 * np.delete(wiggle, 5).max(), abs=0.05)
    assert not explain_graph(graph_of_ranks(read_rank_timings(write_lines(path, rank_lines())))).faults


def test_a_rank_with_more_tokens_is_no_slow_device() -> None:
    timings = []
    for rank in range(8):
        tokens = 9000.0 if rank == 2 else 4000.0 + 20.0 * rank
        timings.append(RankTiming(0, "training", rank, tokens * 1e-3 * (1 + 0.01 * np.cos(rank)), tokens))
    found = explain_graph(graph_of_ranks(timings))
    assert [(c.kind, c.rank) for c in found.faults] == [("data_imbalance", 2)]


def test_every_wrong_line_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(
        '{"stage": "training", "rank": 0, "seconds": 1}\nnonsense\n{"stage": "trainig", "rank": 0, "seconds": 1}\n'
        '{"stage": "training", "rank": 0, "seconds": -1}\n{"rank": 0}\n'
    )
    with pytest.raises(SpecError) as error:
        read_rank_timings(path)
    assert [p.line for p in error.value.problems] == [2, 3, 4, 5]


class Trace:
    """One replica's turns with engine latencies."""

    def __init__(self, replica: int, latency_s: np.ndarray, trajectories: Trajectories, missing: int = 0) -> None:
        self.rl_step, self.replica, self.missing = 0, replica, missing
        self.latency_s, self.trajectories = latency_s, trajectories


def test_queueing_is_what_the_fastest_turns_do_not_need() -> None:
    """200 turns of 100 tokens; the last few run alone at 10 ms a token, the rest wait for each other."""
    latency = np.concatenate([np.full(190, 8.0), np.full(10, 1.0)])
    served = Trajectories.of(50, np.full(200, 100))
    assert unloaded_token_s(latency, served.response_tokens) == pytest.approx(0.01)
    graph, notes = graph_of_traces([Trace(0, latency, served), Trace(1, latency[:5], served.take(np.arange(5)), 7)])
    assert any("1 incomplete" in note for note in notes)
    assert graph.rl_step_s() == pytest.approx(8.0)
    found = explain_graph(graph)
    assert found.causes[0].kind == "queueing"
    assert found.causes[0].loss_s == pytest.approx(7.0)


def test_a_recording_of_lengths_and_rewards() -> None:
    groups = [[100, 120, 110, 130]] * 10
    groups[3] = [100, 5000, 110, 120]
    table = LengthTable.from_groups(np.full(10, 20), groups)
    rewards = tuple(RewardTiming(0, rank, seconds) for rank, seconds in enumerate((4.0, 6.0)))
    graph, notes = graph_of_recording(Recording(table, rewards=rewards), token_s=0.01)
    assert graph.rl_step_s() == pytest.approx(50.0 + 6.0)
    found = explain_graph(graph, notes=notes)
    assert found.causes[0].kind == "long_trajectory"
    assert found.causes[0].where.startswith("runaway trajectory 13 on rank 0")
    assert found.causes[0].loss_s == pytest.approx(50.0 - 1.3)
    kinds = {c.kind: c.loss_s for c in found.causes}
    assert kinds["reward"] == pytest.approx(6.0)
    assert kinds["reward_imbalance"] == pytest.approx(1.0)
    assert "as stated: 10 ms" in notes[0]


# -- the command ------------------------------------------------------------------------------------------------------


def test_explain_writes_json_and_a_figure(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "ranks.jsonl", rank_lines(slow=5))
    code, out = invoke(path, "--json", "--figure", tmp_path / "why.svg")
    assert code == 0
    found = json.loads(out)
    cause = found["causes"][0]
    assert {"kind", "where", "loss_s", "path", "advice"} <= cause.keys()
    assert (cause["kind"], cause["where"]) == ("slow_device", "rank 5")
    assert (tmp_path / "why.svg").read_text().startswith("<?xml")
    code, out = invoke(path)
    assert code == 0
    assert "slow device" in out
    assert "root: slow device at rank 5" in out


def test_explain_compares_logs_of_several_scales(tmp_path: Path) -> None:
    paths = [write_lines(tmp_path / f"{n}.jsonl", rank_lines(ranks=n // 8, scale=n / 8.0)) for n in (64, 128, 256)]
    code, out = invoke(*paths, "--scale", "64,128,256", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["causes"][0]["kind"] == "controller"
    assert found["scaling"]["devices"] == [64, 128, 256]
    assert invoke(*paths, "--scale", "64,128,256", "--figure", tmp_path / "s.png")[0] == 0
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


def test_explain_tells_a_recording_from_a_log(tmp_path: Path) -> None:
    lines = [{"step": 0, "rank": 0, "input": 20, "output": [100, 110, 105, 120], "n_sampling": 4} for _ in range(8)]
    write_lines(tmp_path / "packed_lengths_step_0.jsonl", lines)
    for source in (tmp_path, tmp_path / "packed_lengths_step_0.jsonl"):
        code, out = invoke(source, "--json", "--token-s", "0.02")
        assert code == 0
        assert json.loads(out)["rl_step_s"] == pytest.approx(2.4)
    log = tmp_path / "run.log"
    log.write_text(VERL.format(n=1))
    code, out = invoke(log, "--json")
    assert code == 0
    assert json.loads(out)["critical_s"]["training"] == 20.0


@pytest.mark.parametrize(
    ("whole", "said"),
    [
        ("80.0", ""),
        ("45.0", "the rollout is taken to run beside the others"),
        ("38.5", "the log contradicts itself, even with the rollout beside the others"),
    ],
)
def test_stages_that_exceed_the_whole_are_said(tmp_path: Path, whole: str, said: str) -> None:
    """40 s of rollout and 39 s of the rest: after each other, beside each other, or neither."""
    log = tmp_path / "run.log"
    log.write_text("".join(VERL.format(n=n).replace("step:80.0", f"step:{whole}") for n in (1, 2, 3)))
    notes = [note for note in rlperf.explain(log).causes.notes if "add up to more" in note]
    assert len(notes) == bool(said)
    for note in notes:
        assert f"rollout 40 s and others 39 s, in all {float(whole):g} s): {said}" in note


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.log"], "no such file"),
        (["a.jsonl", "--scale", "64,x"], "whole numbers"),
        (["a.jsonl", "a.jsonl"], "2 logs need scale, with as many numbers of devices"),
        (["a.jsonl", "--figure", "why.gif"], "svg or .png"),
    ],
)
def test_wrong_commands_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "a.jsonl", rank_lines())
    with pytest.raises(SpecError, match=message):
        invoke(*arguments)


# -- measured data ----------------------------------------------------------------------------------------------------


@pytest.mark.data
def test_the_recorded_search_run_waits_for_its_engines(measured_data: Path) -> None:
    code, out = invoke(measured_data / "polytrace" / "search_r1_7b", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["causes"][0]["kind"] == "queueing"
    assert found["causes"][0]["loss_s"] > 0.5 * found["rl_step_s"]
    assert all(c["kind"] not in ("tool", "slow_tool") for c in found["causes"])
    share = next(note for note in found["notes"] if " tools " in note).split(" tools ")[1].split("%")[0]
    assert float(share) < 0.5


@pytest.mark.data
def test_the_recorded_coding_run_pays_reward_and_length_imbalance(measured_data: Path) -> None:
    code, out = invoke(measured_data / "polytrace" / "deepcoder_14b", "--json")
    assert code == 0
    found = json.loads(out)
    assert [c["kind"] for c in found["causes"]][:3] == ["tail", "reward", "reward_imbalance"]
    assert any("length imbalance" in note for note in found["notes"])
    assert any("reward time per rank" in note for note in found["notes"])


@pytest.mark.data
def test_the_recorded_video_run_has_runaways(measured_data: Path) -> None:
    code, out = invoke(measured_data / "polytrace" / "video_7b", "--json")
    assert code == 0
    first = json.loads(out)["causes"][0]
    assert first["kind"] == "long_trajectory"
    assert "runaway" in first["where"]
    assert "16,000 tokens" in first["evidence"]


@pytest.mark.data
@pytest.mark.parametrize(
    "name", ["verl_console.log", "verl_file_logger.jsonl", "nemo_rl_tb_merged.json", "openrlhf_console.log",
             "slime_console.log"],
)  # fmt: skip
def test_format_samples_are_read(measured_data: Path, name: str) -> None:
    steps = logged_steps(read_log([measured_data / "frameworks" / "logs" / name]))
    assert all(step.seconds.get(g.ROLLOUT, 0.0) > 0 and step.rl_step_s > 0 for step in steps)
    assert graph_of_steps(steps).rl_step_s() == pytest.approx(np.mean([s.rl_step_s for s in steps]), rel=0.01)


def test_a_lasting_slowdown_is_one_finding() -> None:
    def steps(slow: set[int]) -> list[LoggedStep]:
        return [LoggedStep(k, 0.0, {g.ROLLOUT: 40.0, g.TRAINING: 40.0 if k in slow else 20.0}) for k in range(1, 21)]

    lasting = explain_graph(graph_of_steps(steps({17, 18, 19, 20}))).faults
    assert [c.where.split(" of ")[1] for c in lasting] == ["all rl_steps from 17 on"]
    # most of the run may be slow: the rl_steps before are what is usual
    most = explain_graph(graph_of_steps(steps(set(range(9, 21))))).faults
    assert [(c.where.split(" of ")[1], c.evidence) for c in most] == [
        ("all rl_steps from 9 on", "2.00 times the median of the rl_steps before")
    ]
    grows = [LoggedStep(k, 0.0, {g.ROLLOUT: 40.0 + 3.0 * k, g.TRAINING: 20.0}) for k in range(1, 21)]
    assert explain_graph(graph_of_steps(grows)).faults == ()
    parts = explain_graph(graph_of_steps(steps({4, 9, 10, 11}))).faults
    assert sorted(c.where.split(" of ")[1] for c in parts) == ["rl_step 4", "rl_steps 9 to 11"]


def test_stages_slow_in_the_same_rl_steps_are_one_finding_with_what_all_of_them_lose() -> None:
    def steps(training: set[int], rollout: set[int]) -> list[LoggedStep]:
        return [
            LoggedStep(k, 0.0, {g.ROLLOUT: 56.0 if k in rollout else 40.0, g.TRAINING: 40.0 if k in training else 20.0})
            for k in range(1, 21)
        ]

    late = set(range(11, 21))
    (fault,) = explain_graph(graph_of_steps(steps(late, late))).faults
    assert (fault.kind, fault.where) == ("slowdown", "training, rollout of all rl_steps from 11 on")
    assert fault.evidence == "2.00, 1.40 times the median of the rl_steps before"
    assert fault.loss_s == pytest.approx((20.0 + 16.0) / 2)
    apart = explain_graph(graph_of_steps(steps(late, late - {11, 12}))).faults
    assert len(apart) == 2  # from other rl_steps on: not one cause
    (once,) = explain_graph(graph_of_steps(steps({6}, {6}))).faults
    assert once.where == "training, rollout of rl_step 6"


def test_a_run_that_ended_out_of_memory_says_so(tmp_path: Path) -> None:
    died = "(TaskRunner pid=3) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.27 GiB.\n"
    step = "step:{k} - timing_s/gen:40.0 - timing_s/update_actor:20.0 - timing_s/step:61.0\n"
    (tmp_path / "early.log").write_text("starting\n" + died)
    with pytest.raises(SpecError, match=r"early.log:2: the run ended out of device memory: .*9.27 GiB.*rlperf audit"):
        rlperf.explain(tmp_path / "early.log")
    (tmp_path / "late.log").write_text("".join(step.format(k=k) for k in range(1, 4)) + died)
    found = rlperf.explain(tmp_path / "late.log")
    assert found.ended.startswith(f"{tmp_path / 'late.log'}:4: the run ended out of device memory")
    assert found.causes.rl_step_s > 0
    (tmp_path / "whole.log").write_text("".join(step.format(k=k) for k in range(1, 4)))
    assert rlperf.explain(tmp_path / "whole.log").ended == ""


def test_a_rollout_slow_from_some_rl_step_on_is_one_finding_with_its_tail(tmp_path: Path) -> None:
    line = (
        "(TaskRunner pid=1) step:{n} - response_length/mean:2000.0 - response_length/max:16384.0 - "
        "timing_s/gen:{gen} - timing_s/update_actor:60.0 - timing_s/step:{step}\n"
    )
    log = tmp_path / "run.log"
    seconds = [(180.0 + n % 3) * (1.0 if n < 12 else 1.6) for n in range(1, 21)]
    log.write_text("".join(line.format(n=n, gen=gen, step=gen + 61.0) for n, gen in enumerate(seconds, 1)))
    (fault,) = rlperf.explain(log).causes.faults
    assert (fault.kind, fault.where) == ("slowdown", "rollout of all rl_steps from 12 on")
    assert fault.loss_s == pytest.approx(0.6 * 181.0 * 9 / 19, rel=0.02)  # the first rl_step is left out
    assert "what changed" in fault.advice[0].action


def test_a_log_whose_metrics_are_no_numbers_holds_none(tmp_path: Path) -> None:
    """It was said that "its metrics ( ...) belong to no known framework"."""
    log = tmp_path / "run.log"
    log.write_text("step:1 - timing_s/step:abc\n")
    with pytest.raises(SpecError, match="holds no step metrics"):
        read_log([log])
