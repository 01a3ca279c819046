"""Keys that a framework accepts beside those of its default config: added to the generated tables by hand, with why."""

from __future__ import annotations

import json

Entry = tuple[str, str, str, str, str]


def _plain(names: str, kind: str = "") -> tuple[Entry, ...]:
    return tuple((name, "null", "", "", kind) for name in names.split())


EXTRA_KEYS: dict[str, tuple[Entry, ...]] = {}

# TRL's `grpo` script parses GRPOScriptArguments and ModelConfig from the same file (trl/scripts/grpo.py); defaults are
# those of trl/trainer/model_config.py and trl/scripts/utils.py, the same from 0.27.2 to 1.16.0.
EXTRA_KEYS["trl"] = (
    *_plain(
        "model_name_or_path attn_implementation lora_modules_to_save lora_target_modules lora_target_parameters "
        "bnb_4bit_quant_storage dataset_name dataset_config reward_funcs reward_model_name_or_path datasets"
    ),
    *((name, "false", "", "", "bool")
      for name in ("use_peft", "load_in_8bit", "load_in_4bit", "use_rslora", "use_dora", "use_bnb_nested_quant",
                   "dataset_streaming", "ignore_bias_buffers")),
    *((name, json.dumps(default), "", "", "str")
      for name, default in (("model_revision", "main"), ("dtype", "float32"), ("lora_task_type", "CAUSAL_LM"),
                            ("bnb_4bit_quant_type", "nf4"), ("dataset_train_split", "train"),
                            ("dataset_test_split", "test"))),
    ("lora_r", "16", "", "", "int"),
    ("lora_alpha", "32", "", "", "int"),
    ("lora_dropout", "0.05", "", "", "float"),
    # of transformers 5.24's TrainingArguments, which any of these releases may stand on
    ("activation_checkpointing", "null", "", "", "bool"),
    ("activation_checkpointing_kwargs", "null", "", "", "map"),
    ("dataloader_in_order", "true", "", "", "bool"),
    ("dataloader_multiprocessing_context", "null", "", "", "str"),
)  # fmt: skip

# verl: the two asynchronous recipes add sections to the trainer's config (verl/experimental/*/config/*.yaml).
_VERL_ASYNC: tuple[tuple[str, object, str, str], ...] = (
    ("async_training.staleness_threshold", 0.1, "0.7-", "float"),
    ("async_training.trigger_parameter_sync_step", 4, "0.7-", "int"),
    ("async_training.require_batches", 1, "0.7-", "int"),
    ("async_training.partial_rollout", True, "0.7-", "bool"),
    # of the recipe as it first was (recipe/fully_async_policy; recalled): what its published scripts still state
    ("async_training.use_rollout_log_probs", True, "0.7-0.7", "bool"),
    ("async_training.compute_prox_log_prob", False, "0.7-0.7", "bool"),
    ("async_training.checkpoint_engine.enable", True, "0.7-0.7", "bool"),
    ("async_training.checkpoint_engine.overlap_broadcast_and_consume", False, "0.7-0.7", "bool"),
    ("async_training.checkpoint_engine.device_buffer_size_M", 4096, "0.7-0.7", "int"),
    ("async_training.use_trainer_do_validate", False, "0.7-", "bool"),
    ("async_training.use_dynamic_resource_scheduling", False, "0.9-", "bool"),
    ("async_training.dynamic_schedule_policy", "default", "0.9-", "str"),
    ("async_training.dynamic_schedule_deactivate_ratio", 0.3, "0.9-", "float"),
    ("async_training.dynamic_schedule_enable_rebalance", True, "0.9-", "bool"),
    ("async_training.concurrent_samples_per_replica", 16, "0.9-", "int"),
    ("rollout.nnodes", 1, "0.7-", "int"),
    ("rollout.n_gpus_per_node", 8, "0.7-", "int"),
    ("rollout.n", 4, "0.7-", "int"),
    ("rollout.total_rollout_steps", 100, "0.7-", "int"),
    ("actor_rollout_ref.rollout.standalone_gpu_memory_utilization", None, "0.9-", "float"),
    ("actor_rollout_ref.actor.use_rollout_log_probs", True, "0.7-", "bool"),
)
# The DAPO recipe's own program (recipe/dapo/config/dapo_trainer.yaml), before the trainer itself could filter groups.
_VERL_DAPO: tuple[tuple[str, object, str, str], ...] = (
    ("data.gen_batch_size", None, "-0.8", "int"),
    ("algorithm.filter_groups.enable", False, "-0.8", "bool"),
    ("algorithm.filter_groups.metric", None, "-0.8", "str"),
    ("algorithm.filter_groups.max_num_gen_batches", 0, "-0.8", "int"),
    ("reward_model.overlong_buffer.enable", False, "-0.8", "bool"),
    ("reward_model.overlong_buffer.len", 0, "-0.8", "int"),
    ("reward_model.overlong_buffer.penalty_factor", 0.0, "-0.8", "float"),
    ("reward_model.overlong_buffer.log", False, "-0.8", "bool"),
)
# Any field of Megatron's TransformerConfig is legal here, new to hydra's eyes (verl/models/mcore/config_converter.py).
_FIELDS: tuple[Entry, ...] = tuple(
    (f"{role}.megatron.override_transformer_config", "null", span, "megatron", "map")
    for role, span in (("actor_rollout_ref.actor", "0.5-"), ("critic", "0.6-"))
)
_STAGES = tuple(
    (f"actor_rollout_ref.{role}.megatron.override_transformer_config.num_layers_in_{end}_pipeline_stage",
     "null", "0.5-", "megatron", "int")
    for role in ("actor", "ref")
    for end in ("first", "last")
)  # fmt: skip
_DISPATCH = tuple(
    (f"actor_rollout_ref.{role}.megatron.override_transformer_config.{name}", "null", "0.5-", "megatron", kind)
    for role in ("actor", "ref")
    for name, kind in (("moe_enable_deepep", "bool"), ("moe_token_dispatcher_type", "str:allgather|alltoall|flex"))
)
# Any field of Megatron's OptimizerConfig is legal here (verl/utils/megatron/optimizer.py init_megatron_optim_config).
_HOST_OPTIMIZER = tuple(
    (f"actor_rollout_ref.actor.optim.override_optimizer_config.{name}", "null", "0.6-", "megatron", kind)
    for name, kind in (("optimizer_cpu_offload", "bool"), ("optimizer_offload_fraction", "float"),
                       ("overlap_cpu_optimizer_d2h_h2d", "bool"), ("use_precision_aware_optimizer", "bool"))
)  # fmt: skip
# What verl 0.9.1 of the package index added to 0.9.0, and the snapshot of main lacks (its _generated_*_trainer.yaml).
_SNAPSHOTS = "global_profiler.global_tool_config.torch_memory.memory_snapshot_num_steps"
_VERL_091: tuple[Entry, ...] = (
    *((f"{section}.use_no_sync_for_gradient_accumulation", "false", "0.9-", "fsdp2", "bool")
      for section in ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp")),
    *((f"{role}.profiler.tool_config.torch_memory.memory_snapshot_num_steps",
       json.dumps(f"${{oc.select:{_SNAPSHOTS},1}}"), "0.9-", "", "int")
      for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")),
    (_SNAPSHOTS, "1", "0.9-", "", "int"),
    ("actor_rollout_ref.rollout.router_config_path", "null", "0.9-", "", "str"),
    ("trainer.checkpoint_callback_class", "null", "0.9-", "", "str"),
)  # fmt: skip
# Any field of the model's own configuration is legal here (verl/utils/model.py update_model_config).
_POSITIONS: Entry = ("actor_rollout_ref.model.override_config.max_position_embeddings", "null", "", "", "int")
EXTRA_KEYS["verl"] = (
    _POSITIONS,
    *_FIELDS,
    *_STAGES,
    *_DISPATCH,
    *_VERL_091,
    *_HOST_OPTIMIZER,
    *((key, json.dumps(default), span, "", kind) for key, default, span, kind in (*_VERL_ASYNC, *_VERL_DAPO)),
)

# NeMo-RL hands this map to vLLM as it is; slime passes every SGLang ServerArgs field under its prefix.
EXTRA_KEYS["nemo_rl"] = (("policy.generation.vllm_kwargs", "{}", "", "", "map"),)

# OpenRLHF 0.11.2 of the package index: what its parser has beside the flags listed (openrlhf/cli/train_ppo_ray.py).
EXTRA_KEYS["openrlhf"] = (
    ("actor.loss_agg_mode", '"token-mean"', "0.11-", "", "str:token-mean|seq-mean-token-mean"),
    ("algo.advantage.is_correction_level", '"off"', "0.11-", "", "str:off|token|seq"),
    ("algo.advantage.is_correction_mode", '"mask"', "0.11-", "", "str:mask|clip"),
    ("algo.advantage.is_correction_gating", '"ratio"', "0.11-", "", "str:ratio|binary_kl|tv"),
    ("algo.kl.unbiased_gradient", "false", "0.11-", "", "flag"),
)
