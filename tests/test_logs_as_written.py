"""Logs as the frameworks write them: nested timers, validation and checkpoints, warm-up, restarts, every console."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rlperf
from rlperf.cli.main import app
from rlperf.errors import SpecError
from rlperf.frameworks.audit.beside_log import Compared, compared
from rlperf.frameworks.logs.read import read_log, same_framework
from rlperf.specs.step_log import StepLog
from rlperf.workload import read_recording

STAGES = {"gen": 32.0, "reward": 1.2, "old_log_prob": 3.5, "ref": 3.4, "adv": 0.2, "update_actor": 14.2}


def verl(steps: int, *, inside: bool, prefix: str = "\x1b[36m(TaskRunner pid=16292, ip=10.0.0.1)\x1b[0m ") -> str:
    """A console; validation after every fifth rl_step, within its step (0.5, 0.6) or after it (0.7 on); a checkpoint,
    within it, after every tenth."""
    lines = [f"{prefix}step:0 - val-core/openai/gsm8k/reward/mean@1:0.41"]
    for step in range(1, steps + 1):
        timers = dict(STAGES) | ({"reshard": 3.0} if inside else {"update_weights": 2.0})
        total = sum(timers.values()) - (3.0 if inside else 0.0) + 1.0
        timers |= ({"testing": 95.0} if step % 5 == 0 else {}) | ({"save_checkpoint": 60.0} if step % 10 == 0 else {})
        total += (95.0 if step % 5 == 0 and inside else 0.0) + (60.0 if step % 10 == 0 else 0.0)
        pairs = {**{f"timing_s/{name}": value for name, value in timers.items()}, "timing_s/step": total}
        lines.append(f"{prefix}step:{step} - " + " - ".join(f"{name}:{value!r}" for name, value in pairs.items()))
        lines.append(f"\rTraining Progress: {step}%|## | {step}/{steps} [0{step}:01<11:22, 57.1s/it]")
        lines.append("\x1b[36m(WorkerDict pid=4711)\x1b[0m INFO step:1 [repeated 7x across cluster]")
    return "\n".join(lines)


@pytest.mark.parametrize(("inside", "seconds"), [(True, 55.5), (False, 57.5)])
def test_validation_and_checkpoints_are_no_part_of_an_rl_step(tmp_path: Path, inside: bool, seconds: float) -> None:
    """They were half of the rl_step of verl 0.5 and 0.6, and "other" the largest cause."""
    (tmp_path / "run.log").write_text(verl(20, inside=inside))
    log = read_log([tmp_path / "run.log"])
    assert (log.framework, log.n) == ("verl", 20)
    assert log.rl_step_s.tolist() == pytest.approx([seconds] * 20)
    assert (log.pause_s[4], log.pause_s[9]) == (95.0, 155.0)
    found = rlperf.explain(tmp_path / "run.log").causes
    assert found.rl_step_s == pytest.approx(seconds) and not found.faults
    assert "validation and checkpoints after 4 of 19 rl_steps left out" in found.notes[1]


def test_a_timer_within_another_does_not_count_twice(tmp_path: Path) -> None:
    (tmp_path / "verl05.log").write_text(verl(4, inside=True))
    assert read_log([tmp_path / "verl05.log"]).stage_means() == pytest.approx(
        {"rollout": 29.0, "reward": 1.2, "scoring": 6.9, "training": 14.2, "weight_sync": 3.0, "other": 0.2}
    )
    both = "timing_s/gen:5.0 - timing_s/sync_rollout_weights:4.0"
    (tmp_path / "ahead.log").write_text(f"step:1 - {both} - timing_s/update_weights:3.9 - timing_s/step:30.0\n")
    (tmp_path / "older.log").write_text(f"step:1 - {both} - timing_s/step:30.0\n")
    for name in ("ahead.log", "older.log"):
        assert read_log([tmp_path / name]).mean("weight_sync_s") == pytest.approx(4.0)


def test_a_pause_beside_an_overlapping_rollout(tmp_path: Path) -> None:
    row = {"perf/rollout_time": 95.0, "perf/actor_train_time": 60.0, "perf/save_model_time": 30.0}
    (tmp_path / "run.log").write_text("".join(f"perf {k}: {row | {'perf/step_time': 130.0}}\n" for k in range(3)))
    assert read_log([tmp_path / "run.log"]).rl_step_s.tolist() == [100.0] * 3


def test_the_first_rl_step_is_no_part_of_what_is_judged() -> None:
    log = StepLog.of([1, 2, 3, 4], rl_step_s=[97.0, 57.0, 57.0, 57.0], rollout_s=[72.0, 32.0, 32.0, 32.0])
    assert [each.measured_s for each in compared(None, log)] == [32.0, 57.0]
    short = StepLog.of([1, 2], rl_step_s=[60.0, 56.0])
    assert [each.measured_s for each in compared(None, short)] == [58.0]


def test_a_restart_repeats_rl_steps_and_warms_up(tmp_path: Path) -> None:
    line = "(TaskRunner pid=7) step:{step} - timing_s/gen:{gen} - timing_s/step:{total}\n"
    once = [line.format(step=step, gen=32.0, total=57.0) for step in range(1, 8)]
    again = [line.format(step=step, gen=80.0 if step == 5 else 33.0, total=100.0) for step in range(5, 9)]
    (tmp_path / "run.log").write_text("".join([*once, "Traceback\n", *again]))
    (tmp_path / "1.log").write_text("".join(once))
    (tmp_path / "2.log").write_text("".join(again))
    log = read_log([tmp_path / "run.log"])
    assert (log.rl_step.tolist(), log.rollout_s[3:].tolist()) == (list(range(1, 9)), [32.0, 32.0, 33.0, 33.0, 33.0])
    assert log.digest == read_log([tmp_path / "1.log", tmp_path / "2.log"]).digest


def test_trl_console(tmp_path: Path) -> None:
    """Of either release of its trainer's printer: numbers, or numbers as text."""
    row = {"loss": 0.01, "completions/mean_length": 100.0, "completions/clipped_ratio": 0.1, "step_time": 9.9}
    end = {"train_runtime": 100.0, "train_loss": 0.1, "epoch": 1.0}
    for name, rows in (
        ("trl.log", [row | {"epoch": 0.01 * k} for k in range(1, 6)]),
        ("newer.log", [{key: f"{value:.4g}" for key, value in (row | {"epoch": 0.01}).items()} for _ in range(5)]),
    ):
        bar = "  1%|▏         | 5/500 [00:50<1:22:30, 10.0s/it]\r"
        (tmp_path / name).write_text("\n".join(f"{bar}{each}" for each in [*rows, end]))
        log = read_log([tmp_path / name])
        assert (log.framework, log.rl_step.tolist(), log.mean("rl_step_s")) == ("trl", [1, 2, 3, 4, 5], 9.9)
        assert log.mean("response_tokens") == 100.0


SKYRL = {"generate": 30.0, "fwd_logprobs_values_reward": 5.0, "train_critic_and_policy": 12.0, "sync_weights": 2.0}


def skyrl(steps: int, *, console: bool) -> str:
    """Timers as loguru prints them, and the dict of the console logger; a checkpoint within the second step."""
    lines = ["Finished: 'sync_weights', time cost: 9.00s"]
    for step in range(1, steps + 1):
        timers = SKYRL | ({"save_checkpoints": 50.0} if step == 2 else {})
        timers["step"] = sum(timers.values()) + 0.5
        lines.append("2026-08-20 12:00:00.123 | INFO     | skyrl.train.trainer:train:340 - Started: 'step'")
        lines += [f"trainer:train:359 - Finished: '{name}', time cost: {value:.2f}s" for name, value in timers.items()]
        if console:
            pairs = [f"'timing/{name}': '{value:.4f}'," for name, value in timers.items()]
            lines += [f"tracking:log:189 - Step {step + 40}: ", "{'generate/avg_num_tokens': '700.0000',", *pairs]
            lines += ["(worker pid=3) loading", "'trainer/epoch': 0}"]
    return "\n".join(f"\x1b[36m(skyrl_entrypoint pid=99)\x1b[0m {line}" for line in lines)


@pytest.mark.parametrize("console", [True, False])
def test_skyrl_console(tmp_path: Path, console: bool) -> None:
    (tmp_path / "run.log").write_text(skyrl(4, console=console))
    log = read_log([tmp_path / "run.log"])
    first = 41 if console else 1
    assert (log.framework, log.rl_step.tolist()) == ("skyrl", list(range(first, first + 4)))
    assert log.rl_step_s.tolist() == pytest.approx([49.5] * 4)
    assert log.stage_means() == {"rollout": 30.0, "scoring": 5.0, "training": 12.0, "weight_sync": 2.0}
    assert log.mean("response_tokens") == (700.0 if console else None)


def test_skyrl_ahead_of_its_trainer_waits_for_its_buffer(tmp_path: Path) -> None:
    row = {"timing/step": 40.0, "timing/wait_for_generation_buffer": 22.0, "timing/train_critic_and_policy": 12.0}
    (tmp_path / "run.jsonl").write_text(json.dumps({"_step": 1, **row}) + "\n")
    assert read_log([tmp_path / "run.jsonl"]).stage_means() == {"rollout": 22.0, "training": 12.0}


def test_rlinf_progress_bar(tmp_path: Path) -> None:
    shown = "step_time=57.1, prepare_data_time=0.01, sync_weights_time=2.1, actor/training_time=14.2, rollout_time=33"
    lengths = "actor/inference_time=5.1, response_length=1.2e+3, max_response_length=2048, grad_norm=0.1"
    bars = [f"Global Step: {k}%|█   | {k}/200 [01:02<3:27:00, 62.10s/it, {shown}, {lengths}]" for k in (1, 1, 2)]
    (tmp_path / "run.log").write_text("\r".join(bars))
    log = read_log([tmp_path / "run.log"])
    assert (log.framework, log.rl_step.tolist(), log.mean("rl_step_s")) == ("rlinf", [1, 2], 57.1)
    assert log.stage_means() == {"rollout": 33, "scoring": 5.1, "training": 14.2, "weight_sync": 2.1, "other": 0.01}
    assert (log.mean("response_tokens"), log.mean("response_tokens_max")) == (1200.0, 2048.0)


def test_nemo_rl_validates_and_saves_within_its_step(tmp_path: Path) -> None:
    stages = "  • generation: 110.20s (45.9%)\n  • policy_training: 70.00s (29.2%)\n"
    plain = "===== Step {k}/100 =====\n  • Total step time: {total:.2f}s\n" + stages
    paused = "===== Step 3/100 =====\n    • Total validation time: 55.00s\n  • Total step time: 278.00s\n" + stages
    paused += "  • checkpointing: 40.00s (14.4%)\n"
    (tmp_path / "run.log").write_text("".join([*(plain.format(k=k, total=183.0) for k in (1, 2)), paused]))
    assert read_log([tmp_path / "run.log"]).rl_step_s.tolist() == pytest.approx([183.0] * 3)


def test_areal_lengths_and_critic(tmp_path: Path) -> None:
    cells = {"ppo_actor/seq_len/avg": 1500.0, "ppo_actor/prompt_len/avg": 300.0, "timeperf/rollout": 50.0,
             "timeperf/train_step": 25.0, "timeperf/critic_train_step": 5.0, "timeperf/save": 90.0}  # fmt: skip
    table = "│ " + " │ ".join(f"{name} │ {value:.4e}" for name, value in cells.items()) + " │\n"
    (tmp_path / "run.log").write_text(f"Epoch 1/10 Step 1/58 Train step 1/580 done.\n{table}")
    log = read_log([tmp_path / "run.log"])
    assert (log.mean("response_tokens"), log.mean("prompt_tokens")) == (1200.0, 300.0)
    assert (log.stage_means(), log.mean("rl_step_s")) == ({"rollout": 50.0, "training": 30.0}, 80.0)


def test_wandb_counts_calls_where_frameworks_count_rl_steps(tmp_path: Path) -> None:
    """slime logs the rollout and the update of an rl_step in calls of their own, TRL every profiled function."""
    rows: list[dict[str, float]] = []
    for k in range(3):
        rows.append({"_step": 3 * k, "rollout/step": k, "perf/rollout_time": 200.0})
        rows.append({"_step": 3 * k + 1, "rollout/step": k, "perf/actor_train_time": 60.0, "perf/step_time": 290.0})
        rows.append({"_step": 3 * k + 2, "train/step": k, "train/loss": 0.1})
    (tmp_path / "slime.jsonl").write_text("\n".join(map(json.dumps, rows)))
    log = read_log([tmp_path / "slime.jsonl"])
    assert (log.rl_step.tolist(), log.rollout_s.tolist(), log.training_s.tolist()) == ([0, 1, 2], [200] * 3, [60] * 3)
    rows = []
    for k in range(1, 4):
        for seconds in (19.0, 21.0):
            rows.append({"_step": len(rows), "profiling/Time taken: GRPOTrainer.vLLM.generate": seconds})
        rows.append({"_step": len(rows), "train/global_step": 2 * k, "train/step_time": 30.0, "train/loss": 0.1})
    (tmp_path / "trl.jsonl").write_text("\n".join(map(json.dumps, rows)))
    log = read_log([tmp_path / "trl.jsonl"])
    assert (log.rl_step.tolist(), log.rollout_s.tolist(), log.rl_step_s.tolist()) == ([2, 4, 6], [20] * 3, [30] * 3)


def test_a_table_of_several_runs_is_refused(tmp_path: Path) -> None:
    head = "Step,a - timing_s/step,a - timing_s/step__MIN,b - timing_s/step,b - timing_s/step__MIN"
    (tmp_path / "two.csv").write_text(f"{head}\n1,57,57,80,80\n2,57,57,80,80\n")
    with pytest.raises(SpecError, match="holds 2 runs"):
        read_log([tmp_path / "two.csv"])


def test_a_line_that_a_run_is_writing_and_the_summary_of_one(tmp_path: Path) -> None:
    data = {"timing_s/step": 57.0, "timing_s/gen": 30.0, "timing_s/update_actor": 14.0}
    (tmp_path / "run.jsonl").write_text(json.dumps({"step": 1, "data": data}) + '\n{"step":2,"data":{"timing_s/st')
    (tmp_path / "wandb-summary.json").write_text(json.dumps({**data, "_step": 90, "_wandb": {"runtime": 9}}))
    for name, step in (("run.jsonl", 1), ("wandb-summary.json", 90)):
        log = read_log([tmp_path / name])
        assert (log.rl_step.tolist(), log.mean("rl_step_s")) == ([step], 57.0)


def test_trl_times_optimizer_updates(tmp_path: Path) -> None:
    """Four of them follow a generation here: a verdict called the run four times as fast as it was."""
    (tmp_path / "train.py").write_text(
        "from trl import GRPOConfig, GRPOTrainer\n"
        'args = GRPOConfig(output_dir="o", per_device_train_batch_size=4, gradient_accumulation_steps=2,\n'
        "    steps_per_generation=8, num_generations=8, max_completion_length=2048, use_vllm=True)\n"
        'trainer = GRPOTrainer(model="Qwen/Qwen3-4B", reward_funcs=[], args=args, train_dataset=[])\n'
    )
    every = [
        {"step": k, "step_time": 40.0 if k % 4 == 1 else 4.0, "completions/mean_length": 700.0} for k in range(1, 30)
    ]
    means = [{"step": 10 * k, "step_time": 13.0, "completions/mean_length": 700.0} for k in range(1, 9)]
    for rows in (every, means):
        (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
        found = rlperf.audit_config(
            tmp_path / "train.py", cluster="dgx_h100", log=tmp_path / "trainer_state.json", plan=False
        )
        assert [(each.stage, each.measured_s) for each in found.measured] == [("rl_step", 52.0)]


def test_rows_of_updates_stay_the_log_that_they_are_of() -> None:
    log = StepLog.of(
        [1, 2, 3, 4], rl_step_s=[30.0, 10.0, 30.0, 10.0], rollout_s=[20.0, float("nan")] * 2, of_updates=True
    )
    steps = log.by_rl_step(2)
    assert (steps.rl_step.tolist(), steps.rl_step_s.tolist(), steps.rollout_s.tolist()) == ([1, 2], [40, 40], [20, 20])
    assert steps.digest == log.digest != StepLog.of([1, 2], rl_step_s=[40.0, 40.0]).digest
    assert log.by_rl_step(1) is log and StepLog.of([1], rl_step_s=[9.0]).by_rl_step(4).rl_step_s.tolist() == [9.0]


SCRIPT = """python3 -m {main} algorithm.adv_estimator=grpo actor_rollout_ref.model.path=Qwen/Qwen3-8B \\
  data.train_batch_size=128 data.max_prompt_length=1024 data.max_response_length=4096 actor_rollout_ref.rollout.n=8 \\
  actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
  actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \\
  actor_rollout_ref.rollout.name=vllm trainer.n_gpus_per_node={gpus} trainer.nnodes=1 {more}
"""


def audited(folder: Path, main: str, timers: dict[str, float], gpus: int = 8, more: str = "") -> dict[str, Compared]:
    """A verl script beside a log of it, by stage."""
    (folder / "run.sh").write_text(SCRIPT.format(main=main, gpus=gpus, more=more))
    line = " - ".join(f"timing_s/{name}:{value}" for name, value in timers.items())
    (folder / "run.log").write_text("".join(f"step:{step} - {line}\n" for step in range(1, 4)))
    found = rlperf.audit_config(folder / "run.sh", cluster="dgx_h100", log=folder / "run.log", plan=False)
    return {each.stage: each for each in found.measured}


def test_a_rollout_that_the_trainer_waits_for_is_held_against_the_wait(tmp_path: Path) -> None:
    """verl's `gen` ahead of the trainer is a wait, which was 0.18 times the whole generation."""
    timers = {"gen": 60.0, "sync_rollout_weights": 3.0, "update_actor": 95.0, "step": 160.0}
    ahead = "verl.experimental.one_step_off_policy.main_ppo"
    apart = "rollout.nnodes=1 rollout.n_gpus_per_node=4 actor_rollout_ref.hybrid_engine=False"
    found = audited(tmp_path, ahead, timers, 4, apart)
    due = {stage: each.predicted_s or 0.0 for stage, each in found.items()}
    assert due["rollout"] < due["rl_step"] - due["training"] - due["weight_sync"]
    assert found["rollout"].words.startswith("rollout (what the trainer waited for it): measured 1 min 0 s")
    # one that is timed whole, beside the trainer, is held against the whole
    whole = audited(tmp_path, ahead, timers | {"gen": 155.0}, 4, apart)["rollout"]
    assert whole.of == "" and (whole.predicted_s or 0.0) > 2.0 * due["rollout"]


def test_a_rollout_that_holds_the_weight_sync_is_held_against_both(tmp_path: Path) -> None:
    """As `calibrate logs` takes it."""
    main, timers = "verl.trainer.main_ppo", {"gen": 150.0, "update_actor": 80.0, "step": 240.0}
    held = audited(tmp_path, main, timers)["rollout"]
    stated = audited(tmp_path, main, timers | {"update_weights": 3.0})
    assert held.of == "with the weight sync" and stated["rollout"].of == ""
    assert (held.predicted_s or 0.0) > (stated["rollout"].predicted_s or 0.0) + (
        stated["weight_sync"].predicted_s or 0.0
    )


def test_a_log_of_another_framework_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT.format(main="verl.trainer.main_ppo", gpus=8, more=""))
    (tmp_path / "run.log").write_text("= Step 1/9 =\n  • Total step time: 240.1s\n  • generation: 110.2s (45.9%)\n")
    with pytest.raises(SpecError, match="is a log of nemo_rl, and what ran is of verl"):
        rlperf.audit_config(tmp_path / "run.sh", cluster="dgx_h100", log=tmp_path / "run.log", plan=False)
    slime = StepLog.of([1], framework="slime", rl_step_s=[9.0])
    assert same_framework(slime, "miles==0.1") is slime


def test_what_a_framework_cannot_do_is_no_advice_for_its_log(tmp_path: Path) -> None:
    lines = (
        "step:{k} - response_length/mean:700.0 - response_length/max:4096 - timing_s/gen:40.0 - timing_s/step:60.0\n"
    )
    (tmp_path / "verl.log").write_text("".join(lines.format(k=k) for k in range(1, 4)))
    row = {"rollout/response_len/mean": 700.0, "rollout/response_len/max": 4096.0, "perf/rollout_time": 40.0}
    slime = "".join(f"perf {k}: {row | {'perf/step_time': 60.0}}\n" for k in range(3))
    (tmp_path / "slime.log").write_text(slime)
    for name, able in (("verl.log", False), ("slime.log", True)):
        causes = {cause.kind: cause for cause in rlperf.explain(tmp_path / name).causes.causes}
        knobs = {advice.knob for advice in causes["tail"].advice}
        assert ("partial_rollout" in knobs) is able and {"staleness", "max_response_tokens"} <= knobs


def test_what_trl_times_of_nothing_else_is_its_training(tmp_path: Path) -> None:
    """Its forwards and backwards were "other", for which advantages and logging were to be profiled."""
    rows: list[dict[str, float]] = []
    for k in range(1, 4):
        rows.append({"_step": len(rows), "profiling/Time taken: GRPOTrainer.vLLM.generate": 20.0})
        rows.append({"_step": len(rows), "train/global_step": k, "train/step_time": 50.0})
    (tmp_path / "trl.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = rlperf.explain(tmp_path / "trl.jsonl").causes
    assert dict(found.critical_s) == {"training": 30.0, "rollout": 20.0}
    assert any(note.startswith("trl times no training") for note in found.notes)
    (tmp_path / "state.json").write_text(json.dumps({"log_history": [{"step": 1, "step_time": 50.0}]}))
    with pytest.raises(SpecError, match=r"no rl_step states the seconds of a stage.*rlperf verdict"):
        rlperf.explain(tmp_path / "state.json")


def test_an_audit_tells_of_validation_that_takes_much(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT.format(main="verl.trainer.main_ppo", gpus=8, more=""))
    for steps, told in ((20, True), (4, False)):
        (tmp_path / "run.log").write_text(verl(steps, inside=False))
        found = rlperf.audit_config(tmp_path / "run.sh", cluster="dgx_h100", log=tmp_path / "run.log", plan=False)
        said = [each.message for each in found.findings if each.rule == "pauses"]
        assert said == (["they take 25 s of every rl_step in the mean, beside its own seconds"] if told else [])


def test_a_console_is_no_recording_of_lengths(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text(verl(4, inside=False))
    with pytest.raises(SpecError, match="holds no tool latency") as caught:
        read_recording([tmp_path / "run.log"])
    assert len(caught.value.problems) == 1


def test_tables_of_one_metric_each_are_one_run(tmp_path: Path) -> None:
    """As wandb exports them, one of a panel."""
    for name, seconds in {"gen": 150, "update_actor": 80, "update_weights": 2, "step": 240}.items():
        rows = "".join(f"{step},{seconds},{seconds},{seconds}\n" for step in range(1, 4))
        head = f"Step,run-3 - timing_s/{name},run-3 - timing_s/{name}__MIN,run-3 - timing_s/{name}__MAX\n"
        (tmp_path / f"{name}.csv").write_text(head + rows)
    tables = sorted(tmp_path.glob("*.csv"))
    assert dict(rlperf.explain(tables).causes.critical_s) == {
        "rollout": 150.0, "training": 80.0, "other": 8.0, "weight_sync": 2.0,
    }  # fmt: skip
    (tmp_path / "run.sh").write_text(SCRIPT.format(main="verl.trainer.main_ppo", gpus=8, more=""))
    options = ["--cluster", "dgx_h100", "--no-plan", *(part for path in tables for part in ("--log", str(path)))]
    said = CliRunner().invoke(app, ["audit", str(tmp_path / "run.sh"), *options]).output
    assert "training: measured 1 min 20 s" in said and "rl_step: measured 4 min" in said


def test_an_rl_step_that_had_not_ended_is_none(tmp_path: Path) -> None:
    """Its line was cut in the number of its rollout, 3 of 32 s."""
    whole = "(TaskRunner pid=7) step:{step} - actor/pg_loss:nan - timing_s/gen:32.0 - timing_s/step:57.0\n"
    cut = "(TaskRunner pid=7) step:9 - actor/pg_loss:0.1 - timing_s/gen:3"
    (tmp_path / "run.log").write_text("".join(whole.format(step=step) for step in range(1, 9)) + cut)
    log = read_log([tmp_path / "run.log"])
    assert (log.n, log.mean("rollout_s"), log.mean("rl_step_s")) == (8, 32.0, 57.0)
    (tmp_path / "part.log").write_text("step:1 - timing_s/gen:32.0\nstep:2 - timing_s/gen:34.0\n")
    assert read_log([tmp_path / "part.log"]).mean("rollout_s") == 33.0
