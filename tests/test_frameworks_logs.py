"""Step metrics and rollout dumps of the frameworks in neutral words; overheads recovered from a run's log."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import yaml
from typer.testing import CliRunner

from rlperf.calibrate.log_model import OVERHEADS
from rlperf.calibrate.logs import _scaled, _transport_first, calibration_text, fit_log
from rlperf.calibrate.rl_framework import constant, with_constants
from rlperf.cli.main import app
from rlperf.errors import SpecError
from rlperf.frameworks.dumps import read_dump
from rlperf.frameworks.logs import metric_table, read_log
from rlperf.frameworks.registry import FRAMEWORKS
from rlperf.plan.judge.evaluate import Judge
from rlperf.plan.predict import evaluate_job
from rlperf.plan.question.context import Context, resolve
from rlperf.specs.job import Job
from rlperf.specs.rl_calibration import load_framework_calibration
from rlperf.specs.step_log import COLUMNS, StepLog

from .framework_samples import SHIPPED

VERL_LINE = (
    "(TaskRunner pid=7) step:{step} - actor/entropy:0.31 - timing_s/gen:32.5 - timing_s/old_log_prob:3.5 "
    "- timing_s/ref:3.4 - timing_s/update_actor:np.float64(14.25) - timing_s/update_weights:2.1e+00 "
    "- timing_s/step:57.0 - response_length/mean:128.0 - response_length/max:256.0 - response_length/clip_ratio:0.0625 "
    "- actor/perf/max_memory_allocated_gb:2.0 - perf/throughput:5.9\n"
)


def test_verl_console(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("noise\n" + VERL_LINE.format(step=1) + "more\n" + VERL_LINE.format(step=2))
    log = read_log([tmp_path / "run.log"])
    assert (log.framework, log.rl_step.tolist()) == ("verl", [1, 2])
    assert log.stage_means() == {"rollout": 32.5, "scoring": 6.9, "training": 14.25, "weight_sync": 2.1}
    assert log.mean("device_memory_bytes") == 2 * 2**30
    assert log.mean("truncated_fraction") == 0.0625
    assert log.mean("prompt_tokens") is None


@pytest.mark.parametrize("form", ["jsonl", "wandb.jsonl", "csv", "merged.json", "tfevents"])
def test_every_carrier_says_the_same(tmp_path: Path, form: str) -> None:
    values = {"timing_s/gen": 32.5, "timing_s/update_actor": 14.25, "timing_s/step": 57.0}
    path = tmp_path / f"x.{form}"
    if form == "jsonl":
        path.write_text("".join(json.dumps({"step": s, "data": values}) + "\n" for s in (1, 2)))
    elif form == "wandb.jsonl":
        path.write_text("".join(json.dumps({"_step": s, **values}) + "\n" for s in (1, 2)))
    elif form == "csv":
        head = "Step," + ",".join(f"run-3 - {name}" for name in values)
        path.write_text("\n".join([head, *(f"{s}," + ",".join(map(str, values.values())) for s in (1, 2))]))
    elif form == "merged.json":
        path.write_text(json.dumps({name: {"1": value, "2": value} for name, value in values.items()}))
    else:
        path.write_bytes(b"".join(_record(_event(step, values)) for step in (1, 2)))
    log = read_log([path])
    assert (log.framework, log.rl_step.tolist(), log.mean("rl_step_s")) == ("verl", [1, 2], 57.0)
    assert log.stage_means() == {"rollout": 32.5, "training": 14.25}


def _record(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + b"\0" * 4 + data + b"\0" * 4


def _event(step: int, values: dict[str, float]) -> bytes:
    def field(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2, len(content)]) + content

    parts = [
        field(1, field(1, name.encode()) + bytes([2 << 3 | 5]) + struct.pack("<f", v)) for name, v in values.items()
    ]
    summary = b"".join(parts)
    size = len(summary)
    return bytes([2 << 3, step, 5 << 3 | 2, size & 0x7F | 0x80, size >> 7]) + summary


@pytest.mark.data
def test_samples_of_every_framework(measured_data: Path) -> None:
    logs = measured_data / "frameworks" / "logs"
    expected = {
        "verl_console.log": ("verl", 3, 58.0),
        "verl_file_logger.jsonl": ("verl", 3, 58.0),
        "nemo_rl_tb_merged.json": ("nemo_rl", 2, 216.2),
        "openrlhf_console.log": ("openrlhf", 1, 365.03),
        "slime_console.log": ("slime", 1, 302.3),
        "trl_trainer_state.json": ("trl", 1, 64.2),
    }
    for name, (framework, steps, seconds) in expected.items():
        log = read_log([logs / name])
        assert (log.framework, log.n) == (framework, steps), name
        assert log.mean("rl_step_s") == pytest.approx(seconds), name
        assert log.mean("response_tokens") is not None
    assert read_log([logs / "slime_console.log"]).mean("offload_s") == pytest.approx(7.3)
    table = read_dump([logs / "areal_rollout_dump.jsonl"])
    assert (table.prompt_tokens.tolist(), table.response_tokens.tolist()) == ([212], [1618])
    with pytest.raises(SpecError, match="tokenizer"):
        read_dump([logs / "verl_rollout_dump_1.jsonl"])


def test_nemo_and_areal_consoles(tmp_path: Path) -> None:
    (tmp_path / "nemo.log").write_text(
        "========== Step 1/10 ==========\n  • Total step time: 240.10s\n  • generation: 110.20s (45.9%)\n"
        "  • policy_training: 70.00s (29.2%)\n========== Step 2/10 ==========\n  • Total step time: 192.30s\n"
    )
    log = read_log([tmp_path / "nemo.log"])
    assert (log.framework, log.rl_step_s.tolist(), log.rollout_s[0]) == ("nemo_rl", [240.1, 192.3], 110.2)
    (tmp_path / "areal.log").write_text(
        "Epoch 1/10 Step 1/58 Train step 1/580 done.\n│ timeperf/rollout │ 5.0e+01 │ timeperf/train_step │ 2.5e+01 │\n"
    )
    log = read_log([tmp_path / "areal.log"])
    assert (log.framework, log.stage_means(), log.mean("rl_step_s")) == ("areal", {"rollout": 50, "training": 25}, 75.0)


def test_what_is_no_log_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("hello\n")
    (tmp_path / "b.jsonl").write_text('{"step": 1, "loss": 3}\n{"step": 2,\n')
    (tmp_path / "c.jsonl").write_text('{"step": 1, "loss": 3}\n')
    for name, message in (("a.log", "no step metrics"), ("b.jsonl", "b.jsonl:2"), ("c.jsonl", "no known framework")):
        with pytest.raises(SpecError, match=message):
            read_log([tmp_path / name])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_metric_tables_speak_of_columns_that_exist(framework: str) -> None:
    table = metric_table(framework)
    assert set(table.values()) <= set(COLUMNS)
    assert "rl_step_s" in table.values() or framework == "areal" or framework not in SHIPPED


def test_dumps_with_lengths(tmp_path: Path) -> None:
    (tmp_path / "train_data_step4.jsonl").write_text(
        json.dumps({"idx": [7, 7], "input_lengths": [5, 4], "token_loss_mask": [[0, 0, 1, 1, 1], [0, 0, 1, 1, 0]]})
        + "\n"
    )
    table = read_dump([tmp_path], max_response_tokens=3)
    assert table.prompt_tokens.tolist() == [2, 2]
    assert table.response_tokens.tolist() == [3, 2]
    assert (table.rl_step.tolist(), table.n_groups, int(table.truncated.sum())) == ([4, 4], 1, 1)
    (tmp_path / "bad.jsonl").write_text('{"foo": 1}\n')
    with pytest.raises(SpecError, match="no known dump"):
        read_dump([tmp_path / "bad.jsonl"])


def test_trl_completions_need_a_tokenizer(tmp_path: Path) -> None:
    pl.DataFrame({"prompt": ["a b"], "completion": ["c d e"]}).write_parquet(tmp_path / "completions_00003.parquet")
    with pytest.raises(SpecError, match="tokenizer"):
        read_dump([tmp_path / "completions_00003.parquet"])
    pl.DataFrame({"text": ["a"]}).write_parquet(tmp_path / "x.parquet")
    with pytest.raises(SpecError, match="no column completion, prompt"):
        read_dump([tmp_path / "x.parquet"])


# -- calibrate logs ---------------------------------------------------------------------------------------------------

TRUE = {
    "engine_host": 0.02,
    "training.scoring_pass": 30.0,
    "training.update": 45.0,
    "weight_sync.fixed": 12.0,
    "step": 25.0,
}
JOB = {
    "architecture": "Qwen2.5-7B", "cluster": "dgx_h100", "framework": "verl==0.9", "trainer_backends": "fsdp2",
    "reference": False, "nodes": 1,
    "tasks": [{"name": "math", "workload": "math", "prompts_per_step": 64, "group_size": 8, "mini_batch": 32,
               "max_response_tokens": 4096, "max_prompt_tokens": 1024}],
    "pools": [
        {"role": "rollout", "devices": 8, "layout": {"tensor_parallel": 1},
         "settings": {"max_running": 128, "memory_fraction": 0.6}},
        {"role": "trainer", "devices": 8, "layout": {"zero_stage": 3, "activation_recompute": "full"},
         "settings": {"token_budget": 8192, "parked": True, "backend": "fsdp2"}},
    ],
}  # fmt: skip


def _synthetic(context: Context, steps: int, noise: float, spread: float, seed: int) -> StepLog:
    """Step metrics as the simulator makes them, with known overheads, noise, and mean lengths that vary."""
    random = np.random.default_rng(seed)
    evaluation, _ = evaluate_job(context)
    demand = evaluation.demand
    front = _transport_first(context, 0, colocated=True)
    trainer = front.trainers[0]
    changed = replace(front, trainers=(replace(trainer, framework=with_constants(trainer.framework, TRUE)),))
    levels = np.linspace(1 - 2 * spread, 1 + 2 * spread, 5) if spread else np.ones(1)
    own = demand.tables[0].response_tokens.mean()
    tables = tuple(_scaled(demand.tables[0], own * level, demand.batch.max_response_tokens) for level in levels)
    seconds = (
        Judge(changed, changed.tasks[0]).evaluate(replace(demand, tables=tables), evaluation.configuration).seconds
    )
    chosen = random.integers(0, len(tables), steps)

    def shaken(values: np.ndarray) -> np.ndarray:
        return values[chosen] * (1 + noise * random.normal(size=steps))

    columns = {
        "rollout_s": shaken(seconds.rollout_s),
        "scoring_s": shaken(seconds.scoring_s),
        "training_s": shaken(seconds.training_s),
        "weight_sync_s": shaken(seconds.weight_sync_s),
    }
    rest = shaken(seconds.data_movement_s + seconds.offload_s + seconds.other_s + seconds.reward_s)
    lengths = np.array([table.response_tokens.mean() for table in tables])[chosen]
    columns["rl_step_s"] = sum(columns.values(), start=rest)
    return StepLog.of(np.arange(steps), framework="verl", source="run.log", response_tokens=lengths, **columns)


@pytest.fixture(scope="module")
def context() -> Context:
    return resolve(Job.model_validate(JOB))


def test_known_overheads_are_recovered_within_ten_percent(context: Context) -> None:
    fit = fit_log(context, _synthetic(context, 60, 0.05, 0.1, seed=4))
    assert {each.name for each in fit.overheads} == set(OVERHEADS)
    for each in fit.overheads:
        assert each.value == pytest.approx(TRUE[each.name], rel=0.1), each
        assert each.low <= TRUE[each.name] <= each.high
        assert each.identified
    assert all(noise == pytest.approx(0.05, rel=0.4) for noise in fit.noise.values())
    assert max(fit.after.values()) < 0.06
    assert fit.after["training"] < fit.before["training"]


def test_what_cannot_be_told_apart_is_widened(context: Context) -> None:
    """Overheads that drown in their stage: the interval covers the truth and the flag says no."""
    random = np.random.default_rng(0)
    log = _synthetic(context, 6, 0.25, 0.0, seed=int(random.integers(1000)))
    small = {name: values for name, values in vars(log).items() if name in COLUMNS}
    small["training_s"] = log.training_s - 2 * (TRUE["training.update"] - 1.0)
    fit = fit_log(context, StepLog.of(log.rl_step, framework="verl", source="x", **small))
    update = next(each for each in fit.overheads if each.name == "training.update")
    assert not update.identified
    assert update.reason
    assert update.low <= 1.0 <= update.high


def test_a_total_with_noise_of_its_own_does_not_fake_a_small_overhead(context: Context) -> None:
    """5 % of a long rl_step drown the seconds between its stages: wide, not wrong."""
    log = _synthetic(context, 25, 0.05, 0.1, seed=8)
    noisy = log.rl_step_s * (1 + 0.05 * np.random.default_rng(1).normal(size=log.n))
    columns = {name: values for name, values in vars(log).items() if name in COLUMNS} | {"rl_step_s": noisy}
    fit = fit_log(context, StepLog.of(log.rl_step, framework="verl", source="x", **columns))
    step = next(each for each in fit.overheads if each.name == "step")
    assert step.low <= TRUE["step"] <= step.high
    assert step.high - step.low > 4.0
    assert fit.noise["other"] > 2 * fit.noise["training"]


def test_a_rollout_that_no_overhead_explains_leaves_the_constant_alone(context: Context) -> None:
    log = _synthetic(context, 20, 0.02, 0.1, seed=5)
    columns = {name: values for name, values in vars(log).items() if name in COLUMNS}
    columns |= {"rollout_s": 8 * log.rollout_s, "rl_step_s": log.rl_step_s + 7 * log.rollout_s}
    fit = fit_log(context, StepLog.of(log.rl_step, framework="verl", source="x", **columns))
    host = next(each for each in fit.overheads if each.name == "engine_host")
    assert not host.identified
    assert "another reason" in host.reason
    assert constant(fit.calibration, "engine_host") == host.shipped
    assert "NOT identified" in calibration_text(fit)


def test_stages_that_the_log_lacks_are_named(context: Context) -> None:
    log = _synthetic(context, 20, 0.05, 0.1, seed=2)
    part = StepLog.of(
        log.rl_step, framework="verl", source="x", training_s=log.training_s, response_tokens=log.response_tokens
    )
    fit = fit_log(context, part)
    assert [each.name for each in fit.overheads] == ["training.update"]
    assert sum("is not identified" in note for note in fit.notes) == 4
    with pytest.raises(SpecError, match="too few"):
        fit_log(context, StepLog.of([1], training_s=[1.0]))
    with pytest.raises(SpecError, match="no stage"):
        fit_log(context, StepLog.of([1, 2, 3], rl_step_s=[1.0, 1.0, 1.0]))


def test_the_file_is_found_by_later_predictions(tmp_path: Path, context: Context) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    log = _synthetic(context, 30, 0.05, 0.1, seed=3)
    metrics = {
        "timing_s/gen": log.rollout_s,
        "timing_s/old_log_prob": log.scoring_s,
        "timing_s/update_actor": log.training_s,
        "timing_s/update_weights": log.weight_sync_s,
        "timing_s/step": log.rl_step_s,
        "response_length/mean": log.response_tokens,
    }
    rows = [{"step": k, "data": {name: float(values[k]) for name, values in metrics.items()}} for k in range(log.n)]
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["calibrate", "logs", str(tmp_path / "run.jsonl"), "--job", str(tmp_path / "job.yaml"), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert {each["name"] for each in report["overheads"]} == set(OVERHEADS)
    found = load_framework_calibration("verl==0.9", "fsdp2", tmp_path)
    assert found.id == "verl_fsdp_fitted"
    assert constant(found, "step") == pytest.approx(TRUE["step"], rel=0.1)
    shipped = resolve(Job.model_validate(JOB))
    fitted = resolve(Job.model_validate(JOB), folder=tmp_path)
    assert fitted.trainers[0].framework.step.value > shipped.trainers[0].framework.step.value
    assert "NOT identified" not in calibration_text(fit_log(context, log)).splitlines()[0]
