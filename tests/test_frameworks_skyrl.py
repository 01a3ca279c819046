"""SkyRL: what its command lines say in every release, what it refuses itself, and what rlperf does not read of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from rlperf.api import plan_job
from rlperf.errors import InfeasibleError, SpecError
from rlperf.frameworks.adapter import framework_facts
from rlperf.frameworks.audit.audit import audit
from rlperf.frameworks.export import export_run, losses
from rlperf.frameworks.expressible import as_framework_runs
from rlperf.frameworks.imports import Imported, import_config, job_of
from rlperf.frameworks.registry import adapter_of
from rlperf.frameworks.scripts.flow import commands
from rlperf.specs.job import Job

from .framework_samples import sample_run, with_values

SCRIPT = """set -x
: "${NUM_GPUS:=8}"
: "${DATA_DIR:="$HOME/data/gsm8k"}"
uv run --isolated --extra fsdp -m skyrl.train.entrypoints.main_base \\
  data.train_data="['$DATA_DIR/train.parquet']" \\
  trainer.policy.model.path="Qwen/Qwen2.5-1.5B-Instruct" \\
  trainer.placement.policy_num_gpus_per_node=$NUM_GPUS \\
  trainer.placement.ref_num_gpus_per_node=$NUM_GPUS \\
  generator.inference_engine.num_engines=$NUM_GPUS \\
  trainer.train_batch_size=512 \\
  trainer.policy_mini_batch_size=128 \\
  trainer.micro_train_batch_size_per_gpu=4 \\
  trainer.micro_forward_batch_size_per_gpu=8 \\
  trainer.max_prompt_length=512 \\
  generator.sampling_params.max_generate_length=1024 \\
  generator.inference_engine.max_num_seqs=256 \\
  generator.n_samples_per_prompt=8 \\
  $@
"""
KWARGS = "trainer__policy__megatron_config__transformer_config_kwargs__"
RELEASES = framework_facts("skyrl").versions


def read(folder: Path, text: str, framework: str | None = None) -> Imported:
    (folder / "run.sh").write_text(text)
    return import_config([folder / "run.sh"], framework)


def changed(**keys: object) -> str:
    """The script with more words: ``__`` for a dot."""
    words = " ".join(f"{name.replace('__', '.')}={value}" for name, value in keys.items())
    return SCRIPT.replace("$@", words + " $@")


def test_a_launch_script_is_read_with_the_defaults_of_the_release(tmp_path: Path) -> None:
    found = read(tmp_path, SCRIPT)
    run = found.run
    assert (found.adapter.name, found.target.version, found.unknown, found.illegal) == ("skyrl", "0.4", (), ())
    assert (run.mode, run.devices, run.nodes, run.architecture) == ("colocated", 8, 1, "Qwen/Qwen2.5-1.5B-Instruct")
    assert (run.batch.prompts, run.batch.group_size, run.batch.mini, run.batch.updates) == (512, 8, 128, 4)
    assert (run.batch.max_prompt_tokens, run.batch.max_response_tokens) == (512, 1024)
    assert (run.trainer.backend, run.trainer.zero_stage, run.trainer.activation_recompute) == ("fsdp2", 3, "full")
    assert (run.trainer.microbatch, run.trainer.scoring_microbatch, run.trainer.packing) == (4, 8, True)
    assert (run.trainer.parked, run.reference) == (True, True), "use_kl_loss is true unless told otherwise"
    assert (run.rollout.devices, run.rollout.max_running, run.rollout.cuda_graphs) == (8, 256, True)
    assert read(tmp_path, SCRIPT, "skyrl==0.1").run.rollout.cuda_graphs is False, "enforce_eager until 0.2"
    clean = audit(found, cluster="dgx_h100", plan=False, predict=False)
    assert [each for each in clean.findings if each.severity != "hint"] == []
    assert job_of(found).framework == "skyrl==0.4"


def test_several_nodes_say_how_large_they_are(tmp_path: Path) -> None:
    text = changed(trainer__placement__policy_num_nodes=2, trainer__placement__policy_num_gpus_per_node=4)
    run = read(tmp_path, text).run
    assert (run.devices, run.nodes, run.devices_per_node) == (8, 2, 4)


def test_what_the_shell_is_started_with_goes_before_the_default(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    assert import_config([tmp_path / "run.sh", "NUM_GPUS=4"]).run.devices == 4
    [command] = commands('A=1\n: "${A:=2}" ${B:=${A}3}\npython x.py $A $B')
    assert [word.text for word in command] == ["python", "x.py", "1", "13"]


def test_the_names_of_skyrl_train_mean_the_same(tmp_path: Path) -> None:
    old = SCRIPT.replace("skyrl.train.", "skyrl_train.").replace("--extra fsdp", "--extra vllm")
    for ours, theirs in (("num_engines", "num_inference_engines"), ("max_num_seqs", "max_num_seqs")):
        old = old.replace(f"generator.inference_engine.{ours}", f"generator.{theirs}")
    old = old.replace("$@", "generator.inference_engine_tensor_parallel_size=1 generator.enforce_eager=false $@")
    found, ours = read(tmp_path, old).run, read(tmp_path, SCRIPT, "skyrl==0.2").run
    assert read(tmp_path, old).target.version == "train0.3"
    assert (found.trainer, found.batch, found.devices) == (ours.trainer, ours.batch, ours.devices)
    assert found.rollout.having(cuda_graphs=None) == ours.rollout.having(cuda_graphs=None)
    assert read(tmp_path, old.replace("tensor_parallel_size=1", "")).run.rollout.tensor_parallel == 4, "its default"


@pytest.mark.parametrize("version", RELEASES)
def test_exports_read_back_as_they_were_meant(tmp_path: Path, version: str) -> None:
    adapter = adapter_of("skyrl")
    modes = set()
    for seed in range(12):
        phase = export_run(sample_run(Random(seed), "skyrl", version), adapter, version, "config")
        (tmp_path / "config.sh").write_text(dict(phase.files)["config.sh"])
        back = import_config([tmp_path / "config.sh"], f"skyrl=={version}")
        meant = phase.emission.run
        assert (back.unknown, back.illegal, back.run.wrong) == ((), (), ()), seed
        for name in ("mode", "staleness", "reference", "devices", "nodes"):
            assert getattr(back.run, name) == getattr(meant, name), (seed, name)
        names = "prompts_per_step group_size mini_batch max_prompt_tokens max_response_tokens turns"
        assert all(getattr(back.run.batch, name) == getattr(meant.batch, name) for name in names.split()), seed
        layout = (
            "devices tensor_parallel pipeline_parallel context_parallel ulysses expert_parallel data_parallel "
            "attention_data_parallel expert_tensor_parallel virtual_pipeline zero_stage activation_recompute offload "
            "packing token_budget microbatch parked memory_fraction max_running cuda_graphs prefix_caching"
        )
        for pool in ("trainer", "rollout"):
            for name in layout.split():
                ours, theirs = getattr(getattr(meant, pool), name), getattr(getattr(back.run, pool), name)
                assert ours == theirs, (seed, pool, name)
        modes.add(meant.mode)
    assert modes == {"colocated", "disaggregated", "async"}


def test_new_keys_of_the_older_package_are_said_as_hydra_wants_them(tmp_path: Path) -> None:
    run = sample_run(Random(1), "skyrl", "train0.3")
    old = dict(export_run(run, adapter_of("skyrl"), "train0.3", "config").files)["config.sh"]
    new = dict(export_run(run, adapter_of("skyrl"), "0.4", "config").files)["config.sh"]
    assert "  +generator.engine_init_kwargs.max_model_len=" in old
    assert "generator.inference_engine.engine_init_kwargs.max_model_len=" in new and "+generator" not in new


@pytest.mark.parametrize(
    ("version", "program"), [("train0.3", "examples.fully_async"), ("0.4", "examples.train.fully_async")]
)
def test_a_program_that_no_package_ships_is_marked_as_such(version: str, program: str) -> None:
    run = next(run for run in (sample_run(Random(seed), "skyrl", version) for seed in range(50)) if run.mode == "async")
    lines = dict(export_run(run, adapter_of("skyrl"), version, "config").files)["config.sh"].splitlines()
    assert f"-m {program}.main_fully_async " in lines[-1] and lines[-2].startswith("# yours to check: no package ships")
    together = dict(export_run(replace(run, mode="colocated"), adapter_of("skyrl"), version, "config").files)[
        "config.sh"
    ]
    assert "yours to check" not in together
    assert ("skyrl-train of your" in together) is (version == "train0.3")


@pytest.mark.parametrize(
    ("keys", "rule", "key"),
    [
        ({"trainer__policy_mini_batch_size": 96}, "updates_divide", "trainer.policy_mini_batch_size"),
        ({"trainer__micro_train_batch_size_per_gpu": 3}, "microbatches_divide",
         "trainer.micro_train_batch_size_per_gpu"),
        ({"generator__inference_engine__num_engines": 4}, "colocated_pools", "generator.inference_engine.num_engines"),
        ({"trainer__strategy": "megatron", "trainer__policy__sequence_parallel_size": 2}, "megatron_ulysses",
         "trainer.policy.sequence_parallel_size"),
        ({"trainer__strategy": "megatron", "trainer__policy__megatron_config__tensor_model_parallel_size": 3},
         "megatron_world", "trainer.policy.megatron_config.tensor_model_parallel_size"),
        ({"trainer__strategy": "megatron", "trainer__policy__megatron_config__pipeline_model_parallel_size": 2,
          f"{KWARGS}virtual_pipeline_model_parallel_size": 2}, "no_virtual_stages",
         KWARGS.replace("__", ".")[:-1]),
        ({"trainer__policy__sequence_parallel_size": 8}, "ulysses_heads", "trainer.policy.sequence_parallel_size"),
        ({"generator__inference_engine__expert_parallel_size": 2}, "engine_experts",
         "generator.inference_engine.expert_parallel_size"),
        ({"generator__max_input_length": 2048}, "one_turn_input", "generator.max_input_length"),
        ({"trainer__algorithm__use_kl_in_reward": "true"}, "one_kl", "trainer.algorithm.use_kl_in_reward"),
        ({"trainer__fully_async__enabled": "true"}, "async_apart", "trainer.placement.colocate_all"),
        ({"trainer__fully_async__enabled": "true"}, "async_one_update", "trainer.train_batch_size"),
        ({"trainer__fully_async__enabled": "true"}, "async_loss", "trainer.algorithm.policy_loss_type"),
        ({"trainer__train_batch_sise": 4}, "unknown_key", "trainer.train_batch_sise"),
    ],
)  # fmt: skip
def test_what_skyrl_refuses_is_found_before(tmp_path: Path, keys: dict[str, object], rule: str, key: str) -> None:
    found = audit(read(tmp_path, changed(**keys), "skyrl==0.4"), cluster="dgx_h100", plan=False, predict=False)
    assert (rule, key) in {(each.rule, each.key) for each in found.findings}


@pytest.mark.parametrize("version", RELEASES)
def test_the_reference_is_split_as_the_policy_is(version: str) -> None:
    """SkyRL's reference has Megatron arguments of its own: without them it cut 94 layers into 4 even stages."""
    asked = {
        "trainer.backend": "megatron", "trainer.pipeline_parallel": 4, "trainer.virtual_pipeline": 2,
        "trainer.tensor_parallel": 1, "trainer.context_parallel": 1, "trainer.ulysses": 1,
        "trainer.expert_parallel": 1, "trainer.expert_tensor_parallel": 1,
        "trainer.first_stage_layers": None, "trainer.last_stage_layers": None,
    }  # fmt: skip
    samples = (sample_run(Random(seed), "skyrl", version) for seed in range(200))
    run = next(run for run in samples if run.trainer.backend == "megatron" and run.trainer.devices % 4 == 0)
    run = replace(with_values(run, asked), architecture="qwen3_235b_a22b")
    phase = export_run(run, adapter_of("skyrl"), version, "config")
    stated = {each.key: each.value for each in phase.emission.settings}
    for end in ("first", "last"):
        key = f"transformer_config_kwargs.num_layers_in_{end}_pipeline_stage"
        policy, reference = (stated[f"trainer.{role}.megatron_config.{key}"] for role in ("policy", "ref"))
        assert policy == reference and policy
    assert phase.emission.run.trainer.virtual_pipeline == 1 and "plain 1F1B" in str(phase.emission.limitations)
    assert not any("virtual_pipeline" in key for key in stated)


def test_asynchronous_training_has_engines_of_its_own(tmp_path: Path) -> None:
    apart = {"trainer__placement__colocate_all": "false"}
    serial = read(tmp_path, changed(**apart)).run
    assert (serial.mode, serial.devices, serial.trainer.parked) == ("disaggregated", 16, None)
    keys = {
        **apart, "trainer__fully_async__enabled": "true", "trainer__fully_async__max_staleness_steps": 2,
        "trainer__policy_mini_batch_size": 512, "trainer__algorithm__policy_loss_type": "rollout_is",
        "trainer__fully_async__sample_full_batch": "true",
    }  # fmt: skip
    found = read(tmp_path, changed(**keys))
    assert (found.run.mode, found.run.staleness, found.run.algorithm) == ("async", 2, "dapo")
    clean = audit(found, cluster="dgx_h100", plan=False, predict=False)
    assert [each for each in clean.findings if each.severity != "hint"] == []
    one_off = read(tmp_path, changed(**apart).replace("skyrl.train.entrypoints.main_base", "examples.a.main_async"))
    assert one_off.run.mode == "one_step_off", "which rlperf plans as async, and says so"
    assert "one_step_off" not in framework_facts("skyrl").modes


def test_turns_share_the_context(tmp_path: Path) -> None:
    keys = {"generator__max_turns": 4, "generator__max_input_length": 4096}
    batch = read(tmp_path, changed(**keys)).run.batch
    assert (batch.turns, batch.max_response_tokens) == (4, 4096 - 512 + 1024)
    run = with_values(sample_run(Random(3), "skyrl"), {"batch.turns": 3, "batch.max_response_tokens": 8191})
    text = dict(export_run(run, adapter_of("skyrl"), "0.4", "config").files)["config.sh"]
    again = read(tmp_path, text).run.batch
    assert (again.turns, again.max_response_tokens) == (3, 8191)


def test_what_drafts_is_read_where_it_stands(tmp_path: Path) -> None:
    keys: dict[str, object] = {"trainer__strategy": "megatron", "trainer__mtp__enabled": "true"}
    assert read(tmp_path, changed(**keys)).run.rollout.speculation == "mtp:1"
    keys["generator__inference_engine__speculative_config"] = "'{method: mtp, num_speculative_tokens: 3}'"
    assert read(tmp_path, changed(**keys)).run.rollout.speculation == "mtp:3"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"trainer__algorithm__advantage_estimator": "gae"}, "reads no critic of SkyRL"),
        ({"generator__inference_engine__enable_pd": "true"}, "engines that prefill alone"),
        ({"generator__max_turns": 0}, "nothing would be generated"),
        ({"generator__inference_engine__run_engines_locally": "false"}, "the file says nothing of"),
        ({"trainer__strategy": "megatron", "trainer__policy__megatron_config__fp8": "e4m3"}, "no FP8 training"),
        ({"trainer__placement__colocate_all": "false", "trainer__placement__colocate_policy_ref": "false"},
         "a reference on GPUs of its own"),
    ],
)  # fmt: skip
def test_what_rlperf_does_not_read_is_refused_by_name(tmp_path: Path, keys: dict[str, object], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        job_of(read(tmp_path, changed(**keys)))


def test_an_asynchronous_plan_has_one_update_a_step() -> None:
    """What its files could not say is not planned: fully_async trains one mini batch between two weight syncs."""
    job = {
        "name": "small", "architecture": "Qwen3-0.6B", "nodes": 1, "modes": ["async"], "cluster": "dgx_h100",
        "framework": "skyrl", "limits": {"truncated_fraction": 1.0, "staleness": 1},
        "tasks": [{"name": "math", "workload": "math", "prompts_per_step": 128, "group_size": 4, "mini_batch": 64,
                   "max_prompt_tokens": 512, "max_response_tokens": 1024}],
    }  # fmt: skip
    with pytest.raises(InfeasibleError):
        plan_job(job)
    job["tasks"][0]["mini_batch"] = [64, 128]  # type: ignore[index]
    plan = plan_job(job)
    assert (plan.phases[0].mode, plan.phases[0].settings.mini_batch) == ("async", 128)
    assert losses(plan) == ()


def test_a_setting_that_one_trainer_has_a_key_for_is_planned_with_that_trainer() -> None:
    """FSDP2 was planned with a chunked loss, which only Megatron's section of SkyRL can switch on."""
    job = {
        "name": "small", "architecture": "Qwen3-0.6B", "nodes": 1, "cluster": "dgx_h100", "framework": "skyrl",
        "limits": {"truncated_fraction": 1.0},
        "tasks": [{"name": "math", "workload": "math", "prompts_per_step": 64, "group_size": 4, "mini_batch": 64,
                   "max_prompt_tokens": 512, "max_response_tokens": 1024}],
        "pools": [{"role": "trainer", "settings": {"chunked_loss": True}}],
    }  # fmt: skip
    plan = plan_job(job)
    assert (plan.phases[0].pool("trainer").settings.backend, losses(plan)) == ("megatron", ())
    free = as_framework_runs(Job.model_validate({**job, "pools": []}), framework_facts("skyrl"))
    assert free.trainer_backends == ("fsdp2", "megatron")
