"""Audit: planted mistakes are found with the right key named; sound configurations raise no alarm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

import rlperf
from rlperf.cli.main import app
from rlperf.errors import SpecError
from rlperf.frameworks.adapter import framework_facts
from rlperf.frameworks.audit.answer import Audit, memory_words, report
from rlperf.frameworks.audit.audit import audit
from rlperf.frameworks.audit.beside_log import Compared, log_findings
from rlperf.frameworks.audit.finding import Finding
from rlperf.frameworks.audit.repairs import broken_rules, in_keys, with_keys
from rlperf.frameworks.export import plan_texts
from rlperf.frameworks.imports import import_config, job_of
from rlperf.frameworks.keytable import flatten
from rlperf.frameworks.registry import FRAMEWORKS
from rlperf.frameworks.run import ref
from rlperf.layout import Layout
from rlperf.plan.predict import predict_job
from rlperf.plan.question.context import resolve
from rlperf.specs.rule_expressions import MissingValueError, evaluate
from rlperf.specs.short_job import short_job
from rlperf.specs.step_log import StepLog
from tests.nested import nest

A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
M = A + "megatron."

VERL = {
    "data.train_batch_size": 128, "data.max_prompt_length": 2048, "data.max_response_length": 8192,
    "actor_rollout_ref.model.path": "Qwen/Qwen3-8B", A + "strategy": "fsdp2", A + "ppo_mini_batch_size": 64,
    A + "use_dynamic_bsz": True, A + "ppo_max_token_len_per_gpu": 12288, A + "fsdp_config.optimizer_offload": True,
    A + "fsdp_config.param_offload": True, "actor_rollout_ref.model.use_fused_kernels": True,
    R + "name": "vllm", R + "n": 8, R + "tensor_model_parallel_size": 2, R + "gpu_memory_utilization": 0.7,
    R + "max_model_len": 10240, R + "max_num_seqs": 128, "trainer.nnodes": 1, "trainer.n_gpus_per_node": 8,
    "algorithm.adv_estimator": "grpo",
}  # fmt: skip
VERL_MOE = {
    **VERL, "model_engine": "megatron", A + "strategy": "megatron",
    "actor_rollout_ref.model.path": "Qwen/Qwen3-30B-A3B",
    M + "tensor_model_parallel_size": 2, M + "expert_model_parallel_size": 8, M + "param_offload": True,
    M + "optimizer_offload": True, M + "grad_offload": True,
    M + "override_transformer_config.recompute_granularity": "full", "trainer.nnodes": 4,
}  # fmt: skip
VERL_MOE = {key: value for key, value in VERL_MOE.items() if "fsdp_config" not in key}
NEMO = {
    "grpo.num_prompts_per_step": 64, "grpo.num_generations_per_prompt": 16, "policy.model_name": "Qwen/Qwen3-8B",
    "policy.train_global_batch_size": 512, "policy.train_micro_batch_size": 1, "policy.logprob_batch_size": 1,
    "policy.max_total_sequence_length": 8192, "policy.dtensor_cfg.enabled": False, "policy.megatron_cfg.enabled": True,
    "policy.megatron_cfg.tensor_model_parallel_size": 2, "policy.megatron_cfg.activation_checkpointing": True,
    "policy.sequence_packing.enabled": True, "policy.sequence_packing.train_mb_tokens": 8192,
    "policy.make_sequence_length_divisible_by": 2, "policy.generation.max_new_tokens": 7168,
    "policy.generation.vllm_cfg.tensor_parallel_size": 2, "policy.generation.vllm_cfg.gpu_memory_utilization": 0.6,
    "cluster.gpus_per_node": 8, "cluster.num_nodes": 2,
}  # fmt: skip
SLIME = (
    "train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --hf-checkpoint /ckpt/Qwen3-8B "
    "--ref-load /ckpt/Qwen3-8B_dist --num-rollout 100 --rollout-batch-size 64 --n-samples-per-prompt 8 "
    "--rollout-max-response-len 8192 --global-batch-size 256 --tensor-model-parallel-size 2 --sequence-parallel "
    "--use-dynamic-batch-size --max-tokens-per-gpu 10240 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1 --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7"
)
OPENRLHF = (
    "openrlhf.cli.train_ppo_ray --actor.model_name_or_path Qwen/Qwen3-8B --actor.num_nodes 1 "
    "--actor.num_gpus_per_node 8 --ref.num_nodes 1 --ref.num_gpus_per_node 8 --vllm.num_engines 4 "
    "--vllm.tensor_parallel_size 2 --vllm.gpu_memory_utilization 0.6 --vllm.enable_sleep --ds.enable_sleep "
    "--train.colocate_all --algo.advantage.estimator group_norm --rollout.batch_size 128 "
    "--rollout.n_samples_per_prompt 8 --train.batch_size 512 --train.dynamic_batch_enable "
    "--train.max_tokens_per_gpu 12288 --rollout.max_tokens_per_gpu 24576 --data.max_len 10240 "
    "--rollout.max_new_tokens 8192 --ds.zero_stage 3 --ds.packing_samples --actor.gradient_checkpointing_enable"
)
AREAL = {
    "experiment_name": "e", "trial_name": "t", "cluster.n_nodes": 1, "cluster.n_gpus_per_node": 8,
    "rollout.backend": "sglang:d2t2", "actor.backend": "fsdp:d4", "rollout.max_head_offpolicyness": 2,
    "actor.path": "Qwen/Qwen3-8B", "actor.gradient_checkpointing": True, "actor.mb_spec.max_tokens_per_mb": 10240,
    "actor.ppo_n_minibatches": 2, "train_dataset.batch_size": 128, "train_dataset.max_length": 2048,
    "gconfig.n_samples": 8, "gconfig.max_new_tokens": 8192, "gconfig.max_tokens": 10240,
    "sglang.context_length": 10240, "sglang.mem_fraction_static": 0.85, "train_dataset.path": "d",
    "train_dataset.type": "rl", "rollout.consumer_batch_size": "${train_dataset.batch_size}",
}  # fmt: skip
TRL = {
    "model_name_or_path": "Qwen/Qwen2.5-7B-Instruct", "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 8, "steps_per_generation": 16, "num_generations": 8, "max_completion_length": 4096,
    "use_vllm": True, "vllm_mode": "colocate", "vllm_tensor_parallel_size": 2, "vllm_gpu_memory_utilization": 0.35,
    "vllm_enable_sleep_mode": True, "vllm_max_model_length": 6144, "use_liger_kernel": True, "bf16": True,
}  # fmt: skip
BASES: dict[str, dict[str, object] | str] = {
    "verl": VERL, "verl_moe": VERL_MOE, "nemo_rl": NEMO, "slime": SLIME, "openrlhf": OPENRLHF, "areal": AREAL,
    "trl": TRL,
}  # fmt: skip


PREDICTED = ("out_of_memory", "kv_starvation", "eager", "sound")


def _audit(tmp_path: Path, base: str, change: object, rule: str = "sound") -> Audit:
    """Audit a base with a change: keys set (None: removed) or a replacement in a command line."""
    given = BASES[base]
    name = base.partition("_moe")[0]
    if isinstance(given, str):
        text = given
        for old, new in change if isinstance(change, tuple) else ():
            assert old in text
            text = text.replace(old, new)
        file = tmp_path / "run.sh"
        file.write_text("python3 -m " + text if base == "openrlhf" else "python3 " + text)
    else:
        keys = {**given, **(change if isinstance(change, dict) else {})}
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(nest((key, value) for key, value in keys.items() if value != "absent")))
    return audit(import_config([file], name), cluster="dgx_h100", plan=False, predict=rule in PREDICTED)


# (base, change, key that must be named, rule that must speak)
PLANTED = [
    ("verl", {A + "ppo_mini_batchsize": 64}, A + "ppo_mini_batchsize", "unknown_key"),
    ("verl", {A + "ppo_max_token_len_per_gpu": 4096}, A + "ppo_max_token_len_per_gpu", "token_budget"),
    ("verl", {R + "log_prob_max_token_len_per_gpu": 8192},
     R + "log_prob_max_token_len_per_gpu", "scoring_token_budget"),
    ("verl", {A + "ppo_mini_batch_size": 256, A + "use_dynamic_bsz": False, A + "ppo_micro_batch_size_per_gpu": 1},
     A + "ppo_mini_batch_size", "batch_by_mini_batch"),
    ("verl", {A + "ppo_mini_batch_size": 256}, A + "ppo_mini_batch_size", "batch_divides_filled"),
    ("verl", {A + "use_dynamic_bsz": False, A + "ppo_micro_batch_size": 8, A + "ppo_micro_batch_size_per_gpu": 1},
     A + "ppo_micro_batch_size", "microbatch_once"),
    ("verl", {A + "use_dynamic_bsz": False, A + "ppo_micro_batch_size": 4}, A + "ppo_micro_batch_size",
     "microbatch_of_all"),
    ("verl", {A + "ulysses_sequence_parallel_size": 4, "actor_rollout_ref.model.path": "microsoft/phi-4"},
     A + "ulysses_sequence_parallel_size", "ulysses_kv_heads"),
    ("verl", {A + "ppo_mini_batch_size": 50}, A + "ppo_mini_batch_size", "batch_divides_filled"),
    ("verl", {A + "ppo_mini_batch_size": 1, "trainer.nnodes": 2}, A + "ppo_mini_batch_size", "mini_batch_by_dp"),
    ("verl", {R + "tensor_model_parallel_size": 3}, R + "tensor_model_parallel_size", "rollout_world"),
    ("verl", {R + "max_model_len": 8192}, R + "max_model_len", "context_length"),
    ("verl", {R + "max_model_len": 131072}, R + "max_model_len", "context_positions"),
    ("verl", {A + "ulysses_sequence_parallel_size": 8, "actor_rollout_ref.model.use_remove_padding": False},
     "actor_rollout_ref.model.use_remove_padding", "ulysses_packing"),
    ("verl", {R + "mode": "sync"}, R + "mode", "rollout_mode_sync"),
    ("verl", {R + "pipeline_model_parallel_size": 2}, R + "pipeline_model_parallel_size", "rollout_pipeline"),
    ("verl", {A + "use_dynamic_bsz": False}, A + "ppo_micro_batch_size_per_gpu", "microbatch_stated"),
    ("verl", {A + "use_dynamic_bsz": False, A + "ppo_micro_batch_size_per_gpu": 32,
              R + "log_prob_micro_batch_size_per_gpu": 32, "actor_rollout_ref.model.use_fused_kernels": False},
     A + "ppo_micro_batch_size_per_gpu", "out_of_memory"),
    ("verl", {A + "ppo_max_token_len_per_gpu": 131072, "actor_rollout_ref.model.use_fused_kernels": False},
     A + "ppo_max_token_len_per_gpu", "out_of_memory"),
    ("verl", {R + "gpu_memory_utilization": 0.99, A + "fsdp_config.param_offload": False,
              A + "fsdp_config.optimizer_offload": False}, R + "gpu_memory_utilization", "out_of_memory"),
    ("verl", {R + "gpu_memory_utilization": 0.22, R + "tensor_model_parallel_size": 1},
     R + "gpu_memory_utilization", "kv_starvation"),
    ("verl", {"critic.fsdp.use_no_sync_for_gradient_accumulation": True},
     "critic.fsdp.use_no_sync_for_gradient_accumulation", "unsharded_gradients"),
    ("verl", {R + "enforce_eager": True}, R + "enforce_eager", "eager"),
    ("verl", {R + "max_model_len": "absent"}, R + "max_model_len", "max_model_len"),
    ("verl", {R + "n": "eight"}, R + "n", "illegal_value"),
    ("verl_moe", {R + "expert_parallel_size": 4}, R + "expert_parallel_size", "rollout_experts"),
    ("verl_moe", {M + "tensor_model_parallel_size": 64, "trainer.nnodes": 8},
     M + "tensor_model_parallel_size", "megatron_heads"),
    ("verl_moe", {M + "pipeline_model_parallel_size": 5, "trainer.nnodes": 5},
     M + "pipeline_model_parallel_size", "megatron_layers"),
    ("verl_moe", {M + "pipeline_model_parallel_size": 4,
                  M + "override_transformer_config.num_layers_in_first_pipeline_stage": 5},
     M + "override_transformer_config.num_layers_in_first_pipeline_stage", "megatron_ends"),
    ("verl_moe", {M + "expert_model_parallel_size": 12, "trainer.nnodes": 3},
     M + "expert_model_parallel_size", "megatron_experts"),
    ("verl", {"trainer.v1.trainer_mode": "separate_async", R + "nnodes": 1, R + "n_gpus_per_node": 8,
              "trainer.v1.separate_async.parameter_sync_step": 3, R + "checkpoint_engine.backend": "nccl"},
     "trainer.v1.separate_async.parameter_sync_step", "separate_sync"),
    ("verl", {"trainer.v1.trainer_mode": "separate_async", R + "nnodes": 1, R + "n_gpus_per_node": 8,
              "trainer.v1.separate_async.parameter_sync_step": 2}, R + "checkpoint_engine.backend", "separate_backend"),
    ("nemo_rl", {"policy.train_micro_batchsize": 2}, "policy.train_micro_batchsize", "unknown_key"),
    ("nemo_rl", {"policy.dtensor_cfg.enabled": True}, "policy.megatron_cfg.enabled", "one_backend"),
    ("nemo_rl", {"policy.train_global_batch_size": 500}, "policy.train_global_batch_size", "step_by_global_batch"),
    ("nemo_rl", {"policy.sequence_packing.train_mb_tokens": 4096},
     "policy.sequence_packing.train_mb_tokens", "token_budget"),
    ("nemo_rl", {"policy.megatron_cfg.context_parallel_size": 2, "policy.sequence_packing.enabled": False},
     "policy.sequence_packing.enabled", "context_packing"),
    ("nemo_rl", {"policy.megatron_cfg.tensor_model_parallel_size": 4, "policy.logprob_batch_size": 2},
     "policy.logprob_batch_size", "wide_tp_batches"),
    ("nemo_rl", {"grpo.async_grpo.enabled": True}, "policy.generation.colocated.enabled", "async_pools"),
    ("nemo_rl", {"policy.generation.colocated.enabled": False, "policy.generation.colocated.resources.num_nodes": 1,
                 "policy.generation.colocated.resources.gpus_per_node": 4},
     "policy.generation.colocated.resources.num_nodes", "split_nodes"),
    ("nemo_rl", {"policy.megatron_cfg.sequence_parallel": True, "policy.make_sequence_length_divisible_by": 1},
     "policy.make_sequence_length_divisible_by", "padding_divisor"),
    ("slime", (("--global-batch-size", "--globl-batch-size"),), "globl-batch-size", "unknown_key"),
    ("slime", (("--global-batch-size 256", "--global-batch-size 300"),), "global-batch-size", "step_by_global_batch"),
    ("slime", (("--global-batch-size 256", "--global-batch-size 3000"),), "global-batch-size", "one_update"),
    ("slime", (("train.py", "train_async.py"),), "colocate", "async_colocate"),
    ("slime", (("--colocate ", ""),), "rollout-num-gpus", "rollout_stated"),
    ("slime", (("--max-tokens-per-gpu 10240", "--max-tokens-per-gpu 2048"),), "max-tokens-per-gpu", "token_budget"),
    ("openrlhf", (("--vllm.num_engines 4", "--vllm.num_engines 2"),), "vllm.num_engines", "colocated_engines"),
    ("openrlhf", (("--train.colocate_all", "--train.colocate_all --train.async_enable"),), "vllm.enable_sleep",
     "async_sleep"),
    ("openrlhf", (("--train.colocate_all ", ""),), "vllm.enable_sleep", "sleep_alone"),
    ("openrlhf", (("--train.max_tokens_per_gpu 12288", "--train.max_tokens_per_gpu 8192"),),
     "train.max_tokens_per_gpu", "token_budget"),
    ("openrlhf", (("--vllm.tensor_parallel_size", "--vllm_tensor_parallel_size"),),
     "vllm_tensor_parallel_size", "unknown_key"),
    ("areal", {"actor.backend": "fsdp:d8"}, "cluster.n_nodes", "cluster_size"),
    ("areal", {"rollout.scheduling_strategy.type": "colocation"}, "enable_offload", "colocate_offload"),
    ("areal", {"train_dataset.batch_size": 126}, "train_dataset.batch_size", "batch_by_dp"),
    ("trl", {"num_generations": 7}, "num_generations", "generation_by_group"),
    ("trl", {"vllm_tensor_parallel_size": 3}, "vllm_tensor_parallel_size", "engine_world"),
    ("trl", {"per_device_batch_size": 4}, "per_device_batch_size", "unknown_key"),
]  # fmt: skip


# Mistakes that one key does not mend, or whose key is refused: what to write is a person's choice.
NO_ONE_VALUE = {
    (base, rule)
    for base, rules in (
        ("verl", "unknown_key illegal_value microbatch_once"),
        ("verl_moe", "megatron_layers"),
        ("nemo_rl", "unknown_key async_pools split_nodes"),
        ("slime", "unknown_key async_colocate"),
        ("openrlhf", "unknown_key"),
        ("trl", "unknown_key"),
    )
    for rule in rules.split()
}


@pytest.mark.parametrize(
    ("base", "change", "key", "rule"), PLANTED, ids=[f"{p[0]}-{p[3]}-{i}" for i, p in enumerate(PLANTED)]
)
def test_planted_mistakes_are_found_with_their_key(
    tmp_path: Path, base: str, change: object, key: str, rule: str
) -> None:
    found = _audit(tmp_path, base, change, rule)
    finding = next(each for each in found.findings if (each.rule, each.key) == (rule, key))
    follow = {"one_update": "step_by_global_batch", "generation_by_group": "completions_divide"}.get(rule)
    assert follow is None or follow not in {each.rule for each in found.findings}, "one mistake, said once"
    if finding.settings:
        assert finding.advice.startswith(("set ", "leave out ")), "the advice is the framework's key with a value"
        repair = with_keys(found.imported, finding.settings)
        assert repair is not None, "no advice is a no-op"
        assert rule not in broken_rules(repair.imported)
    else:
        assert (base, rule) in NO_ONE_VALUE, "a value that fits"
    # slime drops the samples that fill no update (dp_schedule.py:135): nothing fails
    if rule not in ("eager", "max_model_len", "sleep_alone") and (base, rule) != ("slime", "step_by_global_batch"):
        assert not found.passes


@pytest.mark.parametrize("base", list(BASES))
def test_sound_configurations_pass_without_alarm(tmp_path: Path, base: str) -> None:
    found = _audit(tmp_path, base, None)
    assert [finding for finding in found.findings if finding.severity != "hint"] == []
    assert found.passes
    assert found.predicted is not None
    assert found.predicted.rl_step_s > 0


@pytest.mark.data
def test_no_alarm_on_the_accepted_examples(measured_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlperf.frameworks.audit.audit.what_ifs", lambda *_: [])  # hints are no alarm, and take long
    tight = []
    for path in sorted((measured_data / "frameworks" / "examples").iterdir()):
        found = audit(import_config([path]), cluster="dgx_h100", plan=False)
        raised = [f for f in found.findings if f.severity != "hint"]
        assert [f for f in raised if f.rule != "tight_memory"] == [], path.name
        assert not found.broken
        tight += [path.name for _ in raised]
    # an 8B on four devices, nothing recomputed, fp32 logits twice: parsers accepted it, nobody said that it ran
    assert tight in ([], ["slime_async_qwen3_8b_4train_4rollout.argv"])


def test_gains_are_predicted_and_sorted(tmp_path: Path) -> None:
    found = _audit(tmp_path, "verl", {R + "enforce_eager": True, R + "enable_prefix_caching": False})
    gains = [finding.gain_s for finding in found.findings if finding.gain_s is not None]
    assert gains == sorted(gains, reverse=True)
    eager = next(finding for finding in found.findings if finding.rule == "eager")
    assert eager.gain_s is not None
    assert found.predicted is not None
    assert eager.gain_s > 0.01 * found.predicted.rl_step_s


def test_two_signs_of_one_remedy_are_one_finding(tmp_path: Path) -> None:
    """A cache that holds too few requests, and the share of memory that makes it so."""
    found = _audit(tmp_path, "verl", {R + "gpu_memory_utilization": 0.4})
    remedies = [finding.advice for finding in found.findings if finding.gain_s]
    assert len(remedies) == len(set(remedies))
    low = next(finding for finding in found.findings if finding.rule == "memory_fraction_low")
    assert "only 40 % of the GPU; " in low.message and "the KV cache holds" in low.message


def test_a_folder_says_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"is a folder without a configuration \(name a YAML file"):
        import_config([tmp_path])
    (tmp_path / "run.sh").write_text("true")
    with pytest.raises(SpecError, match=r"is a folder \(name what runs: run.sh\)"):
        import_config([tmp_path])


def test_an_offer_is_what_the_framework_reads_back(tmp_path: Path) -> None:
    """Microbatches of a fixed number: the offer is that number, since a token budget would be ignored."""
    fixed = {A + "use_dynamic_bsz": False, A + "ppo_micro_batch_size_per_gpu": 1,
             R + "log_prob_micro_batch_size_per_gpu": 1}  # fmt: skip
    found = _audit(tmp_path, "verl", fixed)
    unused = next(finding for finding in found.findings if finding.rule == "memory_unused")
    assert unused.key == A + "ppo_micro_batch_size_per_gpu"
    assert unused.settings[unused.key] in (2, 4)
    assert found.predicted is not None
    again = _audit(tmp_path, "verl", {**fixed, **unused.settings})
    assert again.predicted is not None
    assert again.predicted.rl_step_s == pytest.approx(found.predicted.rl_step_s - (unused.gain_s or 0.0), rel=1e-9)


def test_a_flag_that_is_nothing_by_default_is_left_out(tmp_path: Path) -> None:
    """`set recompute-granularity: null` was advised, which the flag takes for a word."""
    (tmp_path / "run.sh").write_text("python3 " + SLIME)
    flags = ("recompute-granularity", "recompute-method", "recompute-num-layers")
    repair = with_keys(import_config([tmp_path / "run.sh"]), {"max-tokens-per-gpu": 20480, **dict.fromkeys(flags)})
    assert repair is not None and repair.imported.run.trainer.activation_recompute == "none"
    assert repair.words == f"set max-tokens-per-gpu: 20480; leave out {', '.join(flags)}"


@pytest.mark.parametrize(("version", "left"), [("0.5", False), ("0.6", False), ("0.7", True), ("0.9", True)])
def test_engines_have_the_models_length_since_verl_0_7(version: str, left: bool, tmp_path: Path) -> None:
    """Until 0.6 an unset ``max_model_len`` was prompt + response, and "left at the model's maximum" was said of it."""
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(nest((key, VERL[key]) for key in VERL if not key.endswith("max_model_len"))))
    found = audit(import_config([file], f"verl=={version}"), cluster="dgx_h100", plan=False, predict=False)
    assert ("max_model_len" in {each.rule for each in found.findings}) is left


def test_what_verl_carries_over_and_a_teacher_without_devices_are_told_of(tmp_path: Path) -> None:
    """The first was predicted as waiting for all, without a word; the second was "no layout" at no key of verl."""
    mode, teacher = "trainer.v1.trainer_mode", "distillation.teacher_models.teacher_model."
    [told] = [each for each in _audit(tmp_path, "verl", {mode: "colocate_async"}).findings if each.key == mode]
    assert told.rule == "uncounted" and "over_provision" in told.message
    given = {"distillation.enabled": True, teacher + "model_path": "Qwen/Qwen3-8B", teacher + "num_replicas": 1}
    errors = [each for each in _audit(tmp_path, "verl", given, "sound").findings if each.severity == "error"]
    assert [each.key for each in errors] == ["distillation.nnodes"] and "at least one node" in errors[0].message


def test_a_key_that_no_file_states_is_not_set_to_what_it_is(tmp_path: Path) -> None:
    """Less recompute was "set enable_gradient_checkpointing: true; leave out recompute_granularity"."""
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(nest(VERL_MOE.items())))
    read = import_config([file])
    assert read.run.trainer.activation_recompute == "full"
    repair = in_keys(read, [(ref("trainer.activation_recompute"), "none")])
    assert repair is not None and repair.words == f"leave out {M}override_transformer_config.recompute_granularity"


@pytest.mark.parametrize("version", ["0.5", "0.7", "0.9", "main"])
def test_any_field_of_megatrons_configuration_is_legal_below_its_override(version: str, tmp_path: Path) -> None:
    """A field of TransformerConfig in a YAML file, our own export of a ``+`` among them, was "refused" as unknown."""
    file = tmp_path / "run.yaml"
    fields = {f"{M}override_transformer_config.{name}": True for name in ("moe_permute_fusion", "bias_dropout_fusion")}
    of_reference = "actor_rollout_ref.ref.megatron.override_transformer_config.apply_rope_fusion"
    file.write_text(yaml.safe_dump(nest({**VERL_MOE, **fields, of_reference: True, M + "moe_fusion": True}.items())))
    read = import_config([file], f"verl=={version}")
    assert [each.key for each in read.unknown if "megatron" in each.key] == [M + "moe_fusion"]


def test_a_reference_that_no_loss_reads_is_told_of(tmp_path: Path) -> None:
    """slime's recipes load it with a switch, multiply its term with 0, and pay for its pass in every rl_step."""
    script = tmp_path / "run.sh"

    def found(flags: str) -> Audit:
        script.write_text(f"python3 {SLIME} {flags}\n")
        return audit(import_config([script]), cluster="dgx_h100", plan=False)

    before = found("--use-kl-loss --kl-loss-coef 0.00")
    [hint] = [each for each in before.findings if each.rule == "unweighted_reference"]
    assert (hint.key, hint.advice) == ("use-kl-loss", "leave out use-kl-loss")
    after = found("--kl-loss-coef 0.00").predicted
    assert before.predicted is not None and after is not None
    assert before.predicted.rl_step_s - after.rl_step_s == pytest.approx(hint.gain_s, rel=1e-6)
    assert not [each for each in found("--use-kl-loss --kl-loss-coef 0.01").findings if each.key == "use-kl-loss"]
    scored = {A + "use_kl_loss": True, A + "kl_loss_coef": 0.0}
    assert A + "use_kl_loss" in {each.key for each in _audit(tmp_path, "verl", scored).findings}
    weighted = _audit(tmp_path, "verl", {**scored, A + "kl_loss_coef": 0.001}).findings
    assert A + "use_kl_loss" not in {each.key for each in weighted}


def test_requests_of_groups_that_a_filter_drops_are_on_the_engines_too(tmp_path: Path) -> None:
    """A quarter of those that slime sends beside its filter were counted, and advised at most."""
    filtered = " --dynamic-sampling-filter-path f --over-sampling-batch-size 256 --sglang-max-running-requests 16"
    script = tmp_path / "run.sh"
    script.write_text(f"python3 {SLIME}{filtered}\n")
    found = audit(import_config([script]), cluster="dgx_h100", plan=False).findings
    [low] = [each for each in found if each.rule == "max_running_low"]
    assert low.message.startswith(f"each engine gets {256 * 8 // 4} requests but runs 16 at once")


def test_wider_replicas_are_fewer_where_a_string_states_their_number(tmp_path: Path) -> None:
    """AReaL's allocation kept its `d`, so that a wider engine took devices that the run has not: nothing mended it."""
    large = {"actor.path": "Qwen/Qwen2.5-72B-Instruct", "rollout.backend": "sglang:d4t1"}
    found = _audit(tmp_path, "areal", large)
    [one] = [each for each in found.findings if each.role == "rollout" or each.rule == "kv_starvation"]
    assert (one.rule, dict(one.settings)) == ("out_of_memory", {"rollout.backend": "sglang:d2t2"})
    again = _audit(tmp_path, "areal", {**large, **one.settings})
    assert again.imported.run.devices == found.imported.run.devices
    assert not [each for each in again.findings if each.role == "rollout" and each.severity == "error"]


def test_hints_that_do_not_fit_together_say_so(tmp_path: Path) -> None:
    """A larger budget and no recompute each fitted: whoever followed both ran out of memory, above 99 %."""
    base = {A + "use_dynamic_bsz": True, A + "ppo_max_token_len_per_gpu": 8192,
            "actor_rollout_ref.model.enable_gradient_checkpointing": True}  # fmt: skip
    hints = [each for each in _audit(tmp_path, "verl", base).findings if each.settings and each.gain_s]
    first, second = sorted(hints, key=lambda hint: -(hint.gain_s or 0.0))[:2]
    assert {first.rule, second.rule} == {"memory_unused", "needless_recompute"}
    assert second.advice.endswith(f"(instead: with {first.key} it does not fit)") and "instead" not in first.advice
    both = _audit(tmp_path, "verl", {**base, **first.settings, **second.settings}).predicted
    alone = _audit(tmp_path, "verl", {**base, **second.settings}).predicted
    assert both is not None and not both.fits
    assert alone is not None and alone.fits


def test_the_imported_job_is_predicted_as_the_configuration_was_audited(tmp_path: Path) -> None:
    fixed = {A + "use_dynamic_bsz": False, A + "ppo_micro_batch_size_per_gpu": 2,
             R + "log_prob_micro_batch_size_per_gpu": 2}  # fmt: skip
    found = _audit(tmp_path, "verl", fixed)
    job = job_of(import_config([tmp_path / "run.yaml"], "verl"), cluster="dgx_h100")
    assert job.pool("trainer").settings.token_budget is None
    predicted = predict_job(resolve(job))
    assert found.predicted is not None
    assert predicted.rl_step_s == pytest.approx(found.predicted.rl_step_s, rel=1e-9)


def test_a_log_is_compared_even_where_nothing_is_predicted(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(nest({**VERL, "actor_rollout_ref.model.path": "own/model"}.items())))
    log = StepLog.of([1, 2], rl_step_s=[60.0] * 2, rollout_s=[40.0] * 2, framework="verl", source="run.log")
    found = audit(import_config([file]), cluster="dgx_h100", plan=False, log=log)
    assert found.passes is None
    assert "rollout: measured 40 s, not predicted" in report(found)


def test_padding_is_found_with_what_it_costs(tmp_path: Path) -> None:
    change = {
        A + "use_dynamic_bsz": False, A + "ppo_micro_batch_size_per_gpu": 1, R + "log_prob_micro_batch_size_per_gpu": 1,
        "actor_rollout_ref.model.use_remove_padding": False,
    }  # fmt: skip
    found = {finding.rule: finding for finding in _audit(tmp_path, "verl", change).findings}
    padding = found["no_packing"]
    assert padding.key == "actor_rollout_ref.model.use_remove_padding"
    assert padding.gain_s is not None
    assert padding.gain_s > 1.0


def test_a_log_shows_slow_stages_and_cut_responses(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(nest(VERL.items())))
    imported = import_config([file])
    plain = audit(imported, cluster="dgx_h100", plan=False)
    assert plain.predicted is not None
    stages = plain.predicted.stages_s
    log = StepLog.of(
        [1, 2], rl_step_s=[600.0] * 2, rollout_s=[stages.rollout] * 2, training_s=[stages.training * 3] * 2,
        weight_sync_s=[stages.weight_sync] * 2, truncated_fraction=[0.4, 0.5], framework="verl", source="run.log",
    )  # fmt: skip
    found = audit(imported, cluster="dgx_h100", plan=False, log=log)
    assert found.predicted is not None
    told = {each.stage: (each.measured_s, each.predicted_s) for each in found.measured}
    assert told["rollout"] == (log.mean("rollout_s"), found.predicted.stages_s.rollout)
    assert all(each.words in report(found) for each in found.measured)
    rules = {f.rule: f for f in found.findings}
    assert rules["slow_stage"].key == "timing of training"
    assert rules["truncated"].key == "data.max_response_length"
    waited = (Compared("rollout", 500.0, 9.0, "what the trainer waited for it"), Compared("weight_sync", 500.0, 9.0))
    slow = [each for each in log_findings(imported, waited, found.predicted, log) if each.rule == "slow_stage"]
    assert [each.key for each in slow] == ["timing of rollout", "timing of weight sync"]
    assert slow[0].message.startswith("rollout (what the trainer waited for it) took ")


def test_the_gate(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(yaml.safe_dump(nest(VERL.items())))
    bad.write_text(yaml.safe_dump(nest({**VERL, A + "ppo_max_token_len_per_gpu": 4096}.items())))
    runner = CliRunner()
    passed = runner.invoke(app, ["audit", str(good), "--cluster", "dgx_h100", "--json"])
    assert passed.exit_code == 0, passed.output
    report = yaml.safe_load(passed.stdout)
    assert report["passes"]
    assert report["best"]["predicted"]["rl_step_s"] <= 1.02 * report["predicted"]["rl_step_s"]
    failed = runner.invoke(app, ["audit", str(bad), "--no-plan"])
    assert failed.exit_code == 1
    assert "ppo_max_token_len_per_gpu" in failed.stdout


def test_what_is_said_of_memory_agrees_with_the_gate(tmp_path: Path) -> None:
    """At 1 to 50 % a plan would not take it, and a gate lets it through: one line says both."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(nest(VERL.items())))
    found = audit(import_config([tmp_path / "run.yaml"]), cluster="dgx_h100", plan=False, gains=False)
    assert found.predicted is not None and found.predicted.fits
    assert memory_words(found) == "fits: runs out of memory with a probability below 0.01 %"
    rollout = found.predicted.memory_bytes["rollout"].model_copy(update={"risk": 0.039})
    uses = {**found.predicted.memory_bytes, "rollout": rollout}
    risky = replace(found, predicted=found.predicted.model_copy(update={"memory_bytes": uses, "fits": False}))
    assert risky.passes and memory_words(risky) in report(risky)
    assert memory_words(risky) == (
        "runs out of memory with a probability of 3.9 %: a plan would not take it (out_of_memory_risk: 1 %, half for "
        "each role), a gate stops it above 50 %"
    )
    uses["rollout"] = rollout.model_copy(update={"risk": 0.61})
    likely = replace(risky, predicted=found.predicted.model_copy(update={"memory_bytes": uses, "fits": False}))
    assert likely.passes is False and likely.passes_at(0.7) and not risky.passes_at(0.03)
    broken = Finding("error", "key", "out of GPU memory", rule="out_of_memory")
    assert memory_words(replace(risky, findings=(broken,))).startswith("does not fit: ")
    assert not any("fits: " in line for line in report(risky))


def test_what_does_not_fit_is_not_called_faster_than_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration in need of 432 GB a device was said to be one beside which the planner finds nothing faster."""
    asked: list[float] = []

    def best(_job: object, _facts: object, now_s: float, *_: object) -> tuple[None, str]:
        asked.append(now_s)
        return None, ""

    monkeypatch.setattr("rlperf.frameworks.audit.audit.best_of", best)
    large = {**VERL, A + "ppo_max_token_len_per_gpu": 500_000}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(nest(large.items())))
    found = audit(import_config([tmp_path / "run.yaml"]), cluster="dgx_h100", gains=False)
    assert memory_words(found).startswith("does not fit") and found.predicted is not None
    assert asked and asked[0] != found.predicted.rl_step_s  # that of the mended one, or no time at all


def test_a_cache_too_small_for_a_request_is_no_risk_of_running_out(tmp_path: Path) -> None:
    """It said "does not fit: runs out of memory with a probability below 0.01 %"."""
    small = {**VERL, R + "name": "sglang", R + "gpu_memory_utilization": 0.15, R + "tensor_model_parallel_size": 1}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(nest(small.items())))
    found = audit(import_config([tmp_path / "run.yaml"]), cluster="dgx_h100", plan=False, gains=False)
    assert found.predicted is not None and not found.predicted.fits and not found.passes
    assert memory_words(found).startswith("does not fit: the engine's cache holds ")
    assert "runs out of memory" not in memory_words(found)
    both = replace(found, findings=(Finding("error", "key", "out of GPU memory", rule="out_of_memory"),))
    assert "runs out of memory" in memory_words(both) and found.shortage in memory_words(both)


def test_rules_speak_of_arrays_of_layouts_too() -> None:
    """The planner's use: one text over open axes gives a mask; the same text over one run gives one answer."""
    facts = framework_facts("verl", "0.9")
    tensors, pipelines = np.ix_([1, 2, 3], [1, 5])
    grid = Layout.of(tensor_parallel=tensors, pipeline_parallel=pipelines)
    architecture = SimpleNamespace(heads=32, kv_heads=8, layers=36, experts=0)
    refused = facts.refused({"trainer": grid, "architecture": architecture}, "megatron")
    expected = np.array([[False], [False], [True]])
    assert (np.broadcast_to(refused["megatron_heads"], (3, 2)) == np.broadcast_to(expected, (3, 2))).all()
    assert np.broadcast_to(refused["megatron_layers"], (3, 2)).tolist() == [[False, True]] * 3


def test_experts_that_tensor_parallel_widens_keep_their_number_of_devices(tmp_path: Path) -> None:
    """Left out, expert tensor parallel is 4: of EP16, audit made EP8, GLM-4.5's rl_step 1.6 times as long."""
    wide = {M + "tensor_model_parallel_size": 4, M + "expert_model_parallel_size": 16}
    found = _audit(tmp_path, "verl_moe", wide, "megatron_expert_grid")
    [finding] = [each for each in found.findings if each.rule == "megatron_expert_grid"]
    assert finding.settings == {M + "expert_tensor_parallel_size": 1}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_rule_parses_and_names_a_key_of_its_framework(framework: str) -> None:
    from rlperf.frameworks.keytable import key_table

    table = key_table(framework)
    for version in table.versions:
        facts = framework_facts(framework, version)
        assert "colocated" in facts.modes
        for rule in facts.rules:
            assert rule.groups
            derived = rule.id.startswith("no_key_" + rule.key.replace(".", "_"))
            assert derived or table.lifetime(rule.key) is not None, rule.key
            assert not rule.mend or table.lifetime(rule.mend) is not None, rule.mend
    assert len({rule.id for rule in facts.rules}) == len(facts.rules)


def test_facts_say_what_of_a_job_cannot_run() -> None:
    slime, old = framework_facts("slime"), framework_facts("verl", "0.5")
    both = ("fsdp2", "megatron")
    assert slime.objections(("colocated",), both, "sglang") == []
    [engine] = slime.objections(("colocated", "async"), both, "vllm")
    assert (engine.message, engine.suggestion) == ("slime main does not roll out with vllm", "engine: sglang")
    assert [p.message for p in old.objections(("async",), both, "vllm")] == ["verl 0.5 has no mode async"]
    assert [p.suggestion for p in slime.objections(("colocated",), ("fsdp2",), "sglang")] == [
        "trainer_backends: megatron"
    ]


@pytest.mark.parametrize("text", ["__import__('os')", "a.b.c", "[x for x in a.b]", "lambda: 1", "a.b ** 2"])
def test_rule_expressions_are_arithmetic_and_nothing_else(text: str) -> None:
    with pytest.raises((SpecError, MissingValueError)):
        evaluate(text, {"a": SimpleNamespace(b=2)})


def test_flatten_and_nest_are_inverse() -> None:
    assert flatten(nest(VERL.items())) == VERL


def test_a_reference_of_openrlhf_on_gpus_of_its_own_may_have_another_number(tmp_path: Path) -> None:
    """Its published script of a 70B has 4 GPUs for the reference beside 32 of the actor, and was said not to start."""
    apart = OPENRLHF.replace("--train.colocate_all ", "").replace(
        "--ref.num_gpus_per_node 8", "--ref.num_gpus_per_node 4"
    )
    apart = apart.replace("--vllm.enable_sleep --ds.enable_sleep ", "") + " --algo.kl.init_coef 0.01"

    def found(text: str) -> dict[str, str]:
        (tmp_path / "run.sh").write_text(f"python3 -m {text}")
        audited = audit(import_config([tmp_path / "run.sh"], "openrlhf"), predict=False)
        return {each.rule: each.severity for each in audited.findings if each.rule.startswith("reference")}

    assert found(apart) == {"reference_apart": "warning"}
    assert found(f"{apart} --train.colocate_actor_ref") == {"reference_shape": "error"}
    assert found(f"{apart} --train.colocate_actor_ref".replace("init_coef 0.01", "init_coef 0")) == {}
    assert found(OPENRLHF) == {}


@pytest.mark.parametrize("size", [500, 768])
def test_what_openrlhf_leaves_over_is_no_failure(tmp_path: Path, size: int) -> None:
    """It divides whole, by ranks and by updates, and asserts neither (trainer/ppo_utils/replay_buffer.py of 0.11.2)."""
    changed = OPENRLHF.replace("--train.batch_size 512", f"--train.batch_size {size}")
    (tmp_path / "run.sh").write_text("python3 -m " + changed)
    found = audit(import_config([tmp_path / "run.sh"], "openrlhf"), predict=False)
    severities = {each.rule: each.severity for each in found.findings if each.key == "train.batch_size"}
    assert severities == {"step_by_batch": "warning", **({"batch_by_ranks": "warning"} if size == 500 else {})}
    assert found.passes is None, "keys and rules alone were asked"


SCORED = (
    "python3 -m verl.trainer.main_ppo data.train_batch_size=256 data.max_prompt_length=512 "
    "data.max_response_length=1024 actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.rollout.name=vllm "
    "actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.use_kl_loss=True "
)
DYNAMIC, COUNTED = (
    "actor_rollout_ref.actor.use_dynamic_bsz=True ",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 ",
)
OURS, THEIRS = "actor_rollout_ref.rollout.log_prob_", "actor_rollout_ref.ref.log_prob_"


@pytest.mark.parametrize(
    ("version", "words", "rules"),
    [
        ("0.7", DYNAMIC, set()),
        ("0.7", DYNAMIC + OURS + "use_dynamic_bsz=False", {"scoring_split"}),
        ("0.7", DYNAMIC + OURS + "use_dynamic_bsz=False " + OURS + "micro_batch_size_per_gpu=4", set()),
        ("0.9", COUNTED, {"scoring_counted", "reference_counted"}),
        ("0.9", COUNTED + OURS + "micro_batch_size_per_gpu=4 " + THEIRS + "micro_batch_size_per_gpu=4", set()),
        ("0.9", DYNAMIC + THEIRS + "max_token_len_per_gpu=1024", {"reference_token_budget"}),
    ],
)
def test_both_scoring_passes_of_verl_have_a_size_that_holds_a_sequence(
    tmp_path: Path, version: str, words: str, rules: set[str]
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(SCORED + words + "\n")
    found = audit(import_config([path], f"verl=={version}"), predict=False).findings
    assert {each.rule for each in found if each.severity == "error"} == rules


def test_a_budget_of_the_references_own_is_said_not_to_be_counted(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(SCORED + DYNAMIC + THEIRS + "max_token_len_per_gpu=65536\n")
    found = audit(import_config([path], "verl"), predict=False).findings
    assert [each.key for each in found if each.rule == "uncounted"] == [THEIRS + "max_token_len_per_gpu"]


@pytest.mark.parametrize(("model", "short"), [("Kimi-K2-Instruct-BF16", True), ("Kimi-K2-Instruct", False)])
def test_the_cache_of_what_cannot_be_laid_out_is_of_the_weights_that_it_serves(
    model: str, short: bool, tmp_path: Path
) -> None:
    """Where the trainer's layout is none, the engine was held against weights of 16 bits, whatever it serves."""
    flags = (f"--hf-checkpoint /ckpt/{model} --actor-num-nodes 16 --colocate --rollout-batch-size 128 "
             "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 32 --rollout-max-response-len 8192 "
             "--rollout-num-gpus-per-engine 32 --sglang-ep-size 32 --sglang-enable-dp-attention --sglang-dp-size 4 "
             "--sglang-mem-fraction-static 0.7 --use-dynamic-batch-size --max-tokens-per-gpu 16384")  # fmt: skip
    (tmp_path / "run.sh").write_text(f"python3 train.py {flags}\n")
    found = audit(import_config([tmp_path / "run.sh"]), plan=False)
    assert found.predicted is None
    assert ("the KV cache holds 0 tokens" in " ".join(each.message for each in found.findings)) is short


@pytest.mark.parametrize(
    ("key", "usual", "told"),
    [
        ("algorithm.adv_estimator", "grpo", "remax"),  # a second rollout, greedy
        ("actor_rollout_ref.rollout.ignore_eos", "False", "True"),
        ("trainer.balance_batch", "True", "False"),
    ],
)
def test_work_of_verl_that_is_not_counted_is_told_of(key: str, usual: str, told: str, tmp_path: Path) -> None:
    for value in (usual, told):
        (tmp_path / "run.sh").write_text(
            f"python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-8B {key}={value}\n"
        )
        found = audit(import_config([tmp_path / "run.sh"]), plan=False, predict=False).findings
        assert any(each.key == key and each.rule == "uncounted" for each in found) is (value == told)


def test_what_is_followed_comes_as_promised_on_the_devices_that_the_launcher_states(tmp_path: Path) -> None:
    """They were judged without what accelerate is told, on eight devices: on two they ran out of memory."""
    script = tmp_path / "run.sh"
    flags = ("--model_name_or_path Qwen/Qwen2.5-3B --num_generations 8 --per_device_train_batch_size 8 --use_vllm "
             "--gradient_accumulation_steps 8 --max_completion_length 4096 --vllm_mode colocate --bf16 "
             "--vllm_gpu_memory_utilization 0.3 --gradient_checkpointing False")  # fmt: skip
    script.write_text(f"accelerate launch --num_processes 2 trl/scripts/grpo.py {flags}\n")

    def found(*more: Path) -> Audit:
        return audit(import_config([script, *more], "trl==1.16"), cluster="dgx_a100", plan=False)

    before = found()
    [repair] = [each for each in before.findings if each.rule == "out_of_memory"]
    followed = tmp_path / "more.yaml"
    followed.write_text(yaml.safe_dump({**repair.settings}))
    after = found(followed)
    assert not [each for each in after.findings if each.rule == "out_of_memory"]
    again = with_keys(before.imported, repair.settings)
    assert again is not None and again.imported.source.launcher == before.imported.source.launcher
    assert after.predicted is not None
    for offer in [each for each in after.findings if each.gain_s]:
        followed.write_text(yaml.safe_dump({**repair.settings, **offer.settings}))
        then = found(followed).predicted
        assert then is not None
        assert after.predicted.rl_step_s - then.rl_step_s == pytest.approx(offer.gain_s, rel=1e-6)


def test_a_run_whose_log_ends_out_of_memory_does_not_pass(tmp_path: Path) -> None:
    config, log = tmp_path / "run.yaml", tmp_path / "run.log"
    config.write_text(yaml.safe_dump(nest(VERL.items())))
    log.write_text("step:1 - timing_s/gen:20.0 - timing_s/step:60.0\ntorch.OutOfMemoryError: CUDA out of memory.\n")
    command = ["audit", str(config), "--cluster", "dgx_h100", "--no-plan"]
    assert CliRunner().invoke(app, command).exit_code == 0
    ended = CliRunner().invoke(app, [*command, "--log", str(log)])
    assert ended.exit_code == 1 and "the run ended out of device memory" in ended.output
    assert "does not pass" in ended.output


def test_engines_that_drain_are_told_to_take_weights_in_flight_where_that_gains(tmp_path: Path) -> None:
    """No hint named the key of NeMo-RL by which a plan is a fifth shorter: 64 prompts x 8 of up to 16k tokens."""
    job = short_job("Qwen3-8B", 16, max_response="16k", prompts=64, mode="async", framework="nemo_rl")
    config = tmp_path / "config.yaml"
    gains = {}
    for in_flight in (False, True):
        plan = rlperf.plan_job(job, in_flight_updates=in_flight)
        config.write_text(plan_texts(plan)["config.yaml"])
        found = rlperf.audit_config(config, plan=False).findings
        gains[in_flight] = {each.key: (each.advice, each.gain_s) for each in found if each.rule == "drained_sync"}
    [(key, (advice, gain_s))] = gains[False].items()
    assert advice == f"set {key}: true" and key == "grpo.async_grpo.in_flight_weight_updates"
    assert gain_s is not None and gain_s > 20.0
    assert not gains[True]
