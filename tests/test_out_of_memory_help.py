"""My script runs out of memory, what now: keys and values that fit, also where the run left no metrics behind."""

from __future__ import annotations

from pathlib import Path

import pytest

import rlperf
from rlperf.frameworks.audit.answer import report
from rlperf.frameworks.audit.beside_log import Compared
from rlperf.frameworks.audit.verdict import lines_of, verdict_of
from rlperf.frameworks.logs.read import out_of_memory
from rlperf.units import human_bytes, human_seconds

SCRIPT = """python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_batch_size=64 \\
    data.max_prompt_length=1024 \\
    data.max_response_length=8192 \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \\
    actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 \\
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.85 \\
    actor_rollout_ref.rollout.n=8 \\
    trainer.n_gpus_per_node=8 \\
    trainer.nnodes=1
"""
DIED = """(TaskRunner pid=1) Training Progress:   0%|          | 0/435 [00:00<?, ?it/s]
ray.exceptions.RayTaskError(OutOfMemoryError): ray::WorkerDict.actor_rollout_update_actor() (pid=5151)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 18.55 GiB. GPU 0 has a total capacity of 79.11 GiB.
"""
STEP = (
    "(TaskRunner pid=1) step:1 - response_length/mean:1812.0 - timing_s/gen:182.3 - timing_s/update_actor:148.4 - "
    "timing_s/step:423.1\n"
)


def test_both_phases_out_of_memory_get_keys_that_fit_together(script: Path) -> None:
    found = rlperf.audit_config(script, cluster="dgx_h100", plan=False)
    out = {finding.role: finding for finding in found.findings if finding.rule == "out_of_memory"}
    assert set(out) == {"trainer", "rollout"}
    assert all(finding.settings for finding in out.values())
    assert out["trainer"].settings["actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"] < 32
    assert any(note.startswith("with the settings above it fits") for note in found.notes)
    keys = {key: value for finding in out.values() for key, value in finding.settings.items()}
    changed = script.with_name("changed.sh")
    changed.write_text(SCRIPT.rstrip() + "".join(f" \\\n    {key}={value}" for key, value in keys.items()) + "\n")
    assert not rlperf.audit_config(changed, cluster="dgx_h100", plan=False).broken


PROGRAM = """args = GRPOConfig(per_device_train_batch_size=8, gradient_accumulation_steps=4, num_generations=8,
    max_prompt_length=512, max_completion_length=2048, use_vllm=True, vllm_mode="colocate", bf16=True,
    vllm_gpu_memory_utilization=0.5, gradient_checkpointing=False)
trainer = GRPOTrainer(model="Qwen/Qwen2.5-3B-Instruct", args=args, peft_config=LoraConfig(r=16))
"""


def test_of_keys_that_fit_the_quickest_are_named_with_what_an_rl_step_then_takes(tmp_path: Path) -> None:
    """Microbatches of one: eight times as many gathers of the weights, 2 min 8 s where recompute takes 1 min 19 s."""
    (program := tmp_path / "train.py").write_text(PROGRAM)
    found = rlperf.audit_config(program, cluster="generic:rtx_4090", plan=False)
    [finding] = [each for each in found.findings if each.rule == "out_of_memory"]
    assert finding.settings == {"gradient_checkpointing": True, "use_liger_kernel": True}
    keys = "gradient_checkpointing=True, use_liger_kernel=True"
    program.write_text(PROGRAM.replace("gradient_checkpointing=False", keys))
    changed = rlperf.audit_config(program, cluster="generic:rtx_4090", plan=False)
    assert changed.predicted is not None and changed.predicted.fits
    took = f"with the settings above it fits: {human_seconds(changed.predicted.rl_step_s)} per rl_step predicted"
    assert took in found.notes
    program.write_text(PROGRAM.replace("_batch_size=8", "_batch_size=1").replace("_steps=4", "_steps=32"))
    smaller = rlperf.audit_config(program, cluster="generic:rtx_4090", plan=False).predicted
    assert smaller is not None and smaller.fits and smaller.rl_step_s > 1.3 * changed.predicted.rl_step_s


@pytest.mark.slow
def test_a_plan_has_what_made_the_configuration_fit(tmp_path: Path) -> None:
    """``nothing fits with ddp`` was said beside keys under which it fits: a chunked loss is no choice of a plan."""
    (tmp_path / "train.py").write_text(PROGRAM)
    (script := tmp_path / "run.sh").write_text("torchrun --nproc_per_node 2 train.py\n")
    found = rlperf.audit_config(script, cluster="generic:rtx_4090")
    notes = "\n".join(found.notes)
    assert "with the settings above it fits" in notes and "nothing fits" not in notes and found.best is not None
    trainer = next(pool for pool in found.best.phases[0].pools if pool.role == "trainer")
    assert trainer.settings.backend == "ddp" and trainer.settings.chunked_loss


def test_certainty_is_not_written_as_a_power_of_ten(script: Path) -> None:
    text = "\n".join(report(rlperf.audit_config(script, cluster="dgx_h100", plan=False)))
    assert "e+0" not in text and "runs out of memory with a probability above 99 %" in text


def test_a_run_that_died_in_its_first_rl_step_is_audited(script: Path) -> None:
    log = script.with_name("died.log")
    log.write_text(DIED)
    found = rlperf.audit_config(script, cluster="dgx_h100", log=log, plan=False)
    assert found.ended.startswith(f"{log}:3: the run ended out of device memory") and "18.55 GiB" in found.ended
    assert found.ended.endswith("79.11 GiB; in actor_rollout_update_actor of WorkerDict; no rl_step before it")
    assert not found.measured and report(found)[0] == found.ended


def test_a_worker_that_ray_does_not_name_is_told_by_its_traceback(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    long = " ".join(f"Process {n} has 1.00 GiB memory in use." for n in range(12))
    log.write_text(f'  File "/opt/verl/dp_actor.py", line 512, in update_policy\n{DIED.splitlines()[-1]} {long}\n')
    told = out_of_memory(log)
    assert told is not None and told.message.endswith("memory in use; in update_policy")  # whole sentences


def test_a_verdict_does_not_praise_what_runs_out_of_memory(script: Path) -> None:
    log = script.with_name("late.log")
    log.write_text(STEP + DIED)
    verdict = verdict_of(rlperf.audit_config(script, cluster="dgx_h100", log=log, plan=False))
    assert verdict is not None
    memory, lengths = verdict.cautions
    assert not verdict.normal and "ended out of device memory" in verdict.fails and "above 99 %" in memory
    assert "1,812 tokens in the mean" in lengths and "--rollouts" in lengths
    assert lines_of(verdict)[:4] == [f"fails: {verdict.fails}", f"speed until then: {verdict.speed}", memory, lengths]
    told = verdict_of(rlperf.audit_config(script, cluster="dgx_h100", plan=False))
    assert told is not None and not told.normal and lines_of(told)[0].startswith("fails: runs out of device memory")
    assert Compared("rollout", 20.0, 30.0).words == "rollout: measured 20 s, predicted 30 s (it took 0.67 times that)"


@pytest.mark.slow
def test_a_plan_is_sought_with_another_trainer_where_none_fits(tmp_path: Path) -> None:
    large = tmp_path / "run.sh"
    large.write_text(SCRIPT.replace("Qwen2.5-7B", "Qwen2.5-32B").replace("parallel_size=2", "parallel_size=4"))
    found = rlperf.audit_config(large, cluster="dgx_h100")
    assert found.best is not None and "nothing fits with fsdp2" in "\n".join(found.notes)
    trainer = next(pool for pool in found.best.phases[0].pools if pool.role == "trainer")
    assert trainer.settings.backend == "megatron"
    advice = next(f.advice for f in found.findings if f.role == "trainer")
    assert "no key that was tried makes it fit; nearest: set actor_rollout_ref.actor." in advice
    command = next(note for note in found.notes if "nothing fits with fsdp2" in note).partition("rlperf plan ")[2]
    assert "--model Qwen/Qwen2.5-32B-Instruct --gpus 8 " in command and command.endswith("--out plan/")


@pytest.mark.slow
def test_a_script_without_kl_is_imported_where_no_option_says_so(tmp_path: Path) -> None:
    large = tmp_path / "run.sh"
    text = SCRIPT.replace("Qwen2.5-7B", "Qwen2.5-32B").replace("parallel_size=2", "parallel_size=4").rstrip()
    large.write_text(text + " \\\n    actor_rollout_ref.actor.use_kl_loss=False\n")
    note = next(n for n in rlperf.audit_config(large, cluster="dgx_h100").notes if "nothing fits with fsdp2" in n)
    assert f"rlperf import {large} --cluster dgx_h100 --workload " in note and "--out job.yaml" in note


@pytest.mark.slow
def test_the_nearest_of_what_does_not_fit_is_what_its_keys_come_to(tmp_path: Path) -> None:
    large = tmp_path / "run.sh"
    large.write_text(SCRIPT.replace("Qwen2.5-7B", "Qwen2.5-32B"))
    found = rlperf.audit_config(large, cluster="dgx_h100", plan=False)
    told = next(f.advice for f in found.findings if f.role == "trainer").partition("nearest: set ")[2]
    keys, _, size = told.partition(" (")
    assert "micro_batch_size_per_gpu: 1" in keys
    host = (key + "=True" for key in ("param_offload", "optimizer_offload"))
    settings = [each.replace(": ", "=") for each in keys.split(", ")]
    settings += [f"actor_rollout_ref.actor.fsdp_config.{each}" for each in host]
    large.write_text(large.read_text().rstrip() + "".join(f" \\\n    {each}" for each in settings) + "\n")
    again = rlperf.audit_config(large, cluster="dgx_h100", plan=False)
    use = again.predicted.memory_bytes["trainer"]  # type: ignore[union-attr]
    assert size.startswith(f"{human_bytes(use.total)} of ")
    assert use.total < 0.6 * found.predicted.memory_bytes["trainer"].total  # type: ignore[union-attr]


def test_states_on_the_host_by_fsdp2s_own_policy_are_said_not_to_be_counted(script: Path) -> None:
    key = "actor_rollout_ref.actor.fsdp_config.offload_policy"
    script.write_text(SCRIPT.rstrip() + f" \\\n    {key}=True\n")
    found = rlperf.audit_config(script, cluster="dgx_h100", plan=False)
    assert any(f.key == key and "not counted" in f.message for f in found.findings)
