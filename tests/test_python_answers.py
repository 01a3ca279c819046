"""compare, simulate, replan, import and validate from Python: the command's answer, and no traceback for a mistake."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import rlperf
from rlperf.calibrate.leave_out import LeaveOutReport
from rlperf.calibrate.validate import Report
from rlperf.cli.main import app
from rlperf.comparing import ComparedJobs
from rlperf.files import ImportedJob
from rlperf.plan.answer.replanned import Replan
from rlperf.simulating import SimulatedJob
from rlperf.workload import load_model, sample_lengths

LAYOUT = {"tensor_parallel": 2, "context_parallel": 1, "ulysses": 1, "pipeline_parallel": 1}
ROLLOUT = {"role": "rollout", "layout": {"tensor_parallel": 2}, "settings": {"max_running": 64}}
JOB = rlperf.Job.model_validate(
    {
        **rlperf.short_job("Qwen3-4B", 8, max_response="2k", prompts=16, group=4).stated(),
        "horizon": {"rl_steps": 12, "switch": "60 s"},
        "pools": [ROLLOUT, {"role": "trainer", "layout": LAYOUT}],
    }
)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the job, its plan, the plan's configuration, and the log and lengths of a run."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "job.json").write_text(JOB.model_dump_json(exclude_none=True))
    plan = rlperf.plan_job(JOB)
    rlperf.export_plan(plan, folder / "config")
    due = plan.phases[0].predicted.stages_s
    stages = {"gen": 1.3 * due.rollout, "old_log_prob": due.scoring, "update_actor": due.training,
              "update_weights": due.weight_sync}  # fmt: skip
    timers = " - ".join(f"timing_s/{name}:{seconds:.2f}" for name, seconds in stages.items())
    with (folder / "lengths.csv").open("w", newline="") as file, (folder / "run.log").open("w") as log:
        rows = csv.writer(file)
        rows.writerow(["rl_step", "group", "prompt_tokens", "response_tokens", "max_response_tokens"])
        for step in range(1, 5):
            drawn = sample_lengths(load_model("math"), 16, 4, rl_step=step, max_response_tokens=2048, seed=step)
            for i, lengths in enumerate(zip(drawn.prompt_tokens, drawn.response_tokens, strict=True)):
                rows.writerow([step, i // 4, *lengths, 2048])
            mean = drawn.response_tokens.mean()
            log.write(f"(TaskRunner pid=1) step:{step} - response_length/mean:{mean:.1f} - {timers}"
                      f" - timing_s/step:{sum(stages.values()) + 1:.2f}\n")  # fmt: skip
    return folder


def said(*arguments: object) -> Any:
    """What a command prints with --json."""
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    return json.loads(done.stdout)


def same(
    answer: ComparedJobs | SimulatedJob | Replan | ImportedJob | Report | LeaveOutReport, *arguments: object
) -> None:
    """The command prints the answer's own data; it also prints in lines, and as a table of a notebook."""
    assert said(*arguments) == json.loads(json.dumps(answer.to_dict()))
    assert str(answer)
    assert "<" in answer._repr_html_()


def test_compare(work: Path) -> None:
    job, config = work / "job.json", work / "config" / "config.yaml"
    found = rlperf.compare_jobs(job, config, draws=3)
    same(found, "compare", job, config, "--draws", "3")
    assert found.names == ("job", "config")
    assert not found.found.step.apart
    assert any(note == "assumed in config: workload math, as its header says" for note in found.notes())
    assert found.to_frame()["rl_step_s"].to_list() == [side.evaluation.rl_step_s for side in found.sides]
    objects = rlperf.compare_jobs(JOB, JOB.stated(), draws=3)
    assert objects.names == ("first", "second") and objects.found.step.ratio == 1.0
    assert objects.verdict.startswith("first and second cannot be told apart")


def test_plans_that_are_called_alike_go_by_their_folders_in_json_too(work: Path, tmp_path: Path) -> None:
    """ "plan and plan cannot be told apart", said --json."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.json").write_text((work / "job.json").read_text())
    told = said("compare", tmp_path / "a" / "job.json", tmp_path / "b" / "job.json", "--draws", "3")
    assert told["verdict"].startswith("a/job and b/job cannot be told apart")


def test_simulate(work: Path, tmp_path: Path) -> None:
    found = rlperf.simulate_job(work / "job.json", tmp_path / "out", routing="static_group")
    same(found, "simulate", work / "job.json", "--out", tmp_path / "out", "--routing", "static_group")
    assert [file.name for file in found.files] == ["trace.json", "rollout.svg"]
    assert found.to_frame()["finish_s"].to_list() == found.rollout.replica_finish_s.tolist()
    alone = rlperf.simulate_job(JOB, routing="static_group")
    assert (alone.files, alone.rollout.makespan_s) == ((), found.rollout.makespan_s)
    wider = rlperf.simulate_job(JOB, routing="static_group", nodes=2)
    assert wider.rollout.makespan_s < alone.rollout.makespan_s


def test_a_simulation_is_of_the_replicas_that_were_judged() -> None:
    """Where some replicas read prompts for the others, eight equal ones were simulated."""
    pools = [{"role": "rollout", "layout": {"tensor_parallel": 1}, "settings": {"prefill_replicas": 2}},
             {"role": "trainer", "layout": {"tensor_parallel": 2, "context_parallel": 1}}]  # fmt: skip
    job = rlperf.Job.model_validate({**JOB.stated(), "framework": "slime", "engine": "sglang", "pools": pools})
    found = rlperf.simulate_job(job)
    assert (len(found.rollout.timelines), len(found.rollout.readers)) == (6, 2)
    assert rlperf.simulate_job(job, routing="static_group").rollout.makespan_s != found.rollout.makespan_s


def test_replan(work: Path) -> None:
    asked = [work / "run.log", work / "lengths.csv"]
    found = rlperf.replan_job(work / "job.json", *asked, 4)
    same(found, "replan", work / "job.json", "--log", asked[0], "--rollouts", asked[1], "--at-step", "4")
    assert found.to_frame()["measured_over_predicted"][0] > 1.1
    running = rlperf.replan_job(JOB, *asked, at_step=4, running=work / "config" / "config.yaml", switch="1 h")
    assert running.verdict == "stay"
    assert running.factors[0].value == pytest.approx(found.factors[0].value, rel=0.02)


def test_import(work: Path, tmp_path: Path) -> None:
    script, out = work / "config" / "config.sh", tmp_path / "job.yaml"
    found = rlperf.import_config(script, out)
    same(found, "import", script, "--out", tmp_path / "again.yaml")
    assert found.files == (out, tmp_path / "job.keys.yaml")
    assert out.read_text() == (tmp_path / "again.yaml").read_text()
    assert found.job.pool("rollout").layout.tensor_parallel == (2,)
    assert found.to_frame().columns == ["key", "where", "problem", "suggestion"]
    assert not rlperf.import_config(script).files
    changed = tmp_path / "config.yaml"
    changed.write_text(
        (work / "config" / "config.yaml").read_text().replace("tensor_model_parallel", "tensor_parallel")
    )
    unknown = rlperf.import_config(changed)
    assert any("unknown key" in note and "did you mean" in note for note in unknown.notes())


@pytest.mark.data
def test_validate(measured_data: Path) -> None:
    table = measured_data / "measured" / "weight_sync.csv"
    found = rlperf.validate_measurements(table, "weight_sync")
    same(found, "validate", table, "--kind", "weight_sync")
    assert found.to_frame().height == len(found.predictions)
    left = rlperf.validate_measurements(table, "weight_sync", leave_out="transport")
    same(left, "validate", table, "--kind", "weight_sync", "--leave-out", "transport")
    assert left.to_frame()["left_out_median"].to_list() == [line.left_out.median for line in left.lines]


CONFIG = "config/config.yaml"
MISTAKES: tuple[tuple[Callable[[], object], str], ...] = (
    (lambda: rlperf.simulate_job(JOB, routing="roundrobin"), "did you mean round_robin"),  # type: ignore[arg-type]
    (lambda: rlperf.simulate_job(JOB, routing=["static_group"]), "unknown routing"),  # type: ignore[arg-type]
    (lambda: rlperf.simulate_job(JOB, rl_step=99), "there is no rl_step 99: this job has 4 to simulate, 0 to 3"),
    (lambda: rlperf.simulate_job(JOB, rl_step=-1), "rl_step must be at least 0"),
    (lambda: rlperf.simulate_job(JOB, rl_step="1"), "rl_step: a whole number is due"),  # type: ignore[arg-type]
    (lambda: rlperf.simulate_job(JOB, phase=0), "phase must be at least 1"),
    (lambda: rlperf.simulate_job(JOB, out=3), "out: a path"),  # type: ignore[arg-type]
    (lambda: rlperf.simulate_job(JOB, nodez=3), "did you mean nodes"),
    (lambda: rlperf.simulate_job(CONFIG), "rlperf import config/config.yaml"),
    (lambda: rlperf.compare_jobs(JOB, JOB, draws=2), "draws must be at least 3"),
    (lambda: rlperf.compare_jobs(JOB, "jbo.json"), "jbo.json: no such file .did you mean job.json"),
    (lambda: rlperf.compare_jobs(JOB, 3), "job: a path, or an object of rlperf, is due"),  # type: ignore[arg-type]
    (lambda: rlperf.compare_jobs(JOB, JOB, cluster="dgx_h100"), "leave them out; a job states its own"),
    (lambda: rlperf.compare_jobs(JOB, CONFIG, cluster="dgx_h1000"), "did you mean dgx_h100"),
    (lambda: rlperf.compare_jobs(JOB, JOB, task="maths"), "did you mean math"),
    (lambda: rlperf.replan_job(JOB, "run.log", "lengths.csv", 40), "not inside the job's horizon of 12"),
    (lambda: rlperf.replan_job(JOB, "run.log", "lengths.csv", "4"), "at_step: a whole"),  # type: ignore[arg-type]
    (lambda: rlperf.replan_job(JOB, "run.log", "lengths.csv", 4, switch="soon"), "switch: 'soon' is not a quantity"),
    (lambda: rlperf.replan_job(JOB, [], "lengths.csv", 4), "no log is named"),
    (lambda: rlperf.replan_job(JOB, "rn.log", "lengths.csv", 4), "did you mean run.log"),
    (lambda: rlperf.replan_job(JOB, "run.log", "lengths.csv", 4, framework="vrl"), "did you mean verl"),
    (lambda: rlperf.import_config([]), "no configuration is named"),
    (lambda: rlperf.import_config(CONFIG, framework="vrl"), "did you mean verl"),
    (lambda: rlperf.import_config(CONFIG, cluster="dgx_h1000"), "did you mean dgx_h100"),
    (lambda: rlperf.import_config(CONFIG, workload="mathh"), "did you mean math"),
    (lambda: rlperf.import_config(CONFIG, architecture="Qwn3-8B"), "Qwn3-8B"),
    (lambda: rlperf.import_config("job.json"), "a job or plan of rlperf"),
    (lambda: rlperf.validate_measurements("lengths.csv", "trainings"), "did you mean training"),
    (lambda: rlperf.validate_measurements("lengths.csv", None), "unknown kind None"),  # type: ignore[arg-type]
    (lambda: rlperf.validate_measurements([], "training"), "takes one file"),
    (lambda: rlperf.validate_measurements("lengths.csv", "training", leave_out="devce"), "did you mean device"),
    (lambda: rlperf.validate_measurements([], "training", leave_out="device"), "takes one table"),
    (lambda: rlperf.size_job(JOB, "step<=1h", most_nodes="2"), "most_nodes: a whole"),  # type: ignore[arg-type]
    (lambda: rlperf.what_if(JOB, {}, draws="2"), "draws: a whole number is due"),  # type: ignore[arg-type]
    (lambda: rlperf.sweep_job({"job": JOB, "grid": {"nodes": [1]}}, workers="2"), "workers: a"),  # type: ignore[arg-type]
)


@pytest.mark.parametrize(("asked", "says"), MISTAKES)
def test_a_mistake_is_told_with_what_to_do(
    asked: Callable[[], object], says: str, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(work)
    with pytest.raises(rlperf.RlperfError, match=says):
        asked()
