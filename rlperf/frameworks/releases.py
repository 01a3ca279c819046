"""What is known of older releases of frameworks: keys that came, went, were renamed, or had another default.

A release here is *partial*: the lists that the tables are generated from are of one snapshot (verl: of every release),
so that what is not named below is taken to be as there, and a key that is not found is no proof of a mistake.
"""

from __future__ import annotations

from rlperf.frameworks.extra_keys import Entry

RELEASES: dict[str, tuple[str, ...]] = {
    "areal": ("1.0",),
    "nemo_rl": ("0.3", "0.4", "0.5", "0.6", "0.7"),
    "openrlhf": ("0.9", "0.10"),
    "slime": ("0.2", "0.3"),
    "trl": ("0.27", "0.28", "1.0", "1.6", "1.7", "1.9", "1.10", "1.11", "1.14", "1.15"),
}
"""Partial releases of each framework, oldest first, before those of its own list."""


_M = "policy.megatron_cfg."
# behaviour of NeMo-RL by tag: section 1 (reference pass), 2 (batch of log-probs), 3 (memory, permutation), 6 (async)
_NEMO_RL = (
    ("policy.logprob_batch_size", "4", "-0.5", "", ""),
    ("policy.logprob_batch_size", '"${policy.train_micro_batch_size}"', "0.6-", "", ""),
    (_M + "empty_unused_memory_level", "0", "-0.4", "", ""),
    (_M + "empty_unused_memory_level", "1", "0.5-", "", ""),
    (_M + "moe_permute_fusion", "false", "-0.6", "", ""),
    (_M + "moe_permute_fusion", "true", "0.7-", "", ""),
    ("grpo.skip_reference_policy_logprobs_calculation", "", "0.6-", "", ""),
)

# TRL's own renames and defaults by release (trl/trainer/grpo_config.py at v0.29.0, v1.0.0, v1.8.0, v1.9.0 and of the
# packages 1.9.2 to 1.16.0); its list is of July 2026, between 1.9 and 1.10, and with this has every key of 1.16.0
_TRL = (
    ("max_prompt_length", "512", "-0.27", "", "int"),
    ("vllm_mode", '"server"', "-0.28", "", "str"),
    ("vllm_mode", '"colocate"', "1.0-", "", "str"),
    ("max_completion_length", "256", "-1.9", "", "int"),
    ("max_completion_length", "512", "1.10-", "", "int"),
    ("use_bias_correction_kl", "false", "-1.9", "", "bool"),
    ("use_bias_correction_kl", "true", "1.10-", "", "bool"),
    ("router_aux_loss_coef", "0.001", "-1.11", "", "float"),
    ("router_aux_loss_coef", "null", "1.14-", "", "float"),
    ("pad_to_multiple_of", "null", "-1.15", "", "int"),
    ("pad_to_multiple_of", '"auto"', "1.16-", "", ""),
    ("vllm_importance_sampling_cap", "null", "", "", "float"),
    ("vllm_importance_sampling_clip_max", "3.0", "1.6-", "", "float"),
    ("use_transformers_continuous_batching", "false", "1.7-", "", "bool"),
)

OPENRLHF_NAMES = {
    "actor_num_nodes": "actor.num_nodes", "actor_num_gpus_per_node": "actor.num_gpus_per_node",
    "ref_num_nodes": "ref.num_nodes", "ref_num_gpus_per_node": "ref.num_gpus_per_node",
    "critic_num_nodes": "critic.num_nodes", "critic_num_gpus_per_node": "critic.num_gpus_per_node",
    "reward_num_nodes": "reward.num_nodes", "reward_num_gpus_per_node": "reward.num_gpus_per_node",
    "colocate_all_models": "train.colocate_all", "colocate_actor_ref": "train.colocate_actor_ref",
    "async_train": "train.async_enable", "async_queue_size": "train.async_queue_size",
    "agent_func_path": "train.agent_func_path", "partial_rollout": "train.partial_rollout_enable",
    "vllm_num_engines": "vllm.num_engines", "vllm_tensor_parallel_size": "vllm.tensor_parallel_size",
    "vllm_gpu_memory_utilization": "vllm.gpu_memory_utilization", "vllm_enable_sleep": "vllm.enable_sleep",
    "vllm_sync_backend": "vllm.sync_backend", "enable_prefix_caching": "vllm.enable_prefix_caching",
    "enforce_eager": "vllm.enforce_eager", "vllm_generate_batch_size": "rollout.vllm_generate_batch_size",
    "rollout_batch_size": "rollout.batch_size", "micro_rollout_batch_size": "rollout.micro_batch_size",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt", "generate_max_len": "rollout.max_new_tokens",
    "rollout_max_tokens_per_gpu": "rollout.max_tokens_per_gpu",
    "train_batch_size": "train.batch_size", "micro_train_batch_size": "train.micro_batch_size",
    "use_dynamic_batch": "train.dynamic_batch_enable", "train_max_tokens_per_gpu": "train.max_tokens_per_gpu",
    "max_epochs": "train.max_epochs", "max_len": "data.max_len", "max_samples": "data.max_samples",
    "prompt_data": "data.prompt_dataset", "input_key": "data.input_key", "label_key": "data.label_key",
    "apply_chat_template": "data.apply_chat_template",
    "zero_stage": "ds.zero_stage", "zpg": "ds.zpg", "adam_offload": "ds.adam_offload",
    "packing_samples": "ds.packing_samples", "ring_attn_size": "ds.ring_attn_size",
    "ds_tensor_parallel_size": "ds.tensor_parallel_size", "deepspeed_enable_sleep": "ds.enable_sleep",
    "overlap_comm": "ds.overlap_comm", "lora_rank": "ds.lora.rank",
    "gradient_checkpointing": "actor.gradient_checkpointing_enable", "pretrain": "actor.model_name_or_path",
    "eps_clip_low_high": "actor.eps_clip_low_high", "remote_rm_url": "reward.remote_url",
    "advantage_estimator": "algo.advantage.estimator", "init_kl_coef": "algo.kl.init_coef",
    "use_kl_loss": "algo.kl.use_loss", "kl_estimator": "algo.kl.estimator",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "save_steps": "ckpt.save_steps", "ckpt_path": "ckpt.path", "load_checkpoint": "ckpt.load_enable",
}  # fmt: skip
"""Flags of OpenRLHF up to 0.9 and the dotted ones that replaced them.

``init_kl_coef``, ``async_train``, ``vllm_num_engines`` and the two lengths that became one are from the behaviour
sheet and the key facts; the others are openrlhf/cli/train_ppo_ray.py of 0.9 (recalled, not re-read).
"""
_OPENRLHF_OTHERS = (
    "prompt_max_len bf16 flash_attn save_path save_hf_ckpt num_episodes temperature top_p seed normalize_reward "
    "actor_learning_rate critic_learning_rate logging_steps eval_steps use_wandb wandb_project wandb_run_name "
    "use_tensorboard lambd gamma eps_clip value_clip max_norm l2 reward_pretrain critic_pretrain ref_reward_offload "
    "disable_ds_ckpt max_ckpt_num lr_warmup_ratio entropy_loss_coef prompt_split prompt_data_probs input_template"
)
OPENRLHF_OLD = tuple((name, "null", "-0.9", "", "") for name in (*OPENRLHF_NAMES, *_OPENRLHF_OTHERS.split()))

# what areal 1.0.4 of the package index (areal/api/cli_args.py) lacks of the snapshot, which has every key of 1.0.4
_AREAL_TRAINER = (
    "enable_delta_weight_update gae_lambda_kwargs gae_timestep_unit logprobs_chunk_size optimizer.warmup_steps "
    "scheduling_spec.exclusive scheduling_spec.reservation use_cispo_loss weight_update_anchor_interval "
    "weight_update_delta_method workers_ready_timeout "
    "megatron.cross_entropy_loss_fusion megatron.disable_grad_buffers_cpu_backup megatron.enable_chunked_logits "
    "megatron.enable_fp32_lm_head megatron.enable_mtp megatron.entropy_requires_grad megatron.lm_head_loss_chunk_size "
    "megatron.moe_router_bias_update_rate megatron.moe_router_fusion megatron.moe_z_loss_coeff"
)
_AREAL_ROLLOUT = (
    "agent.drop_retry_orphans agent.message_preprocessors agent.prefix_matcher agent.scheduling_spec.exclusive "
    "agent.scheduling_spec.reservation deterministic_sampling scheduling_spec.exclusive scheduling_spec.reservation "
    "serialize_group_samples workers_ready_timeout"
)
_AREAL_OTHERS = (
    "gconfig.drop_incomplete_group gconfig.reward_normalization gconfig.seed eval_gconfig.drop_incomplete_group "
    "eval_gconfig.reward_normalization eval_gconfig.seed post_exit_hook sglang.enable_deterministic_inference "
    "sglang.load_format train_dataset.scheduling_spec.exclusive train_dataset.scheduling_spec.reservation "
    "valid_dataset.scheduling_spec.exclusive valid_dataset.scheduling_spec.reservation"
)
_AREAL_NEW = (
    *(f"{role}.{key}" for role in ("actor", "critic", "ref", "teacher.train") for key in _AREAL_TRAINER.split()),
    *(f"{role}.{key}" for role in ("rollout", "teacher.rollout") for key in _AREAL_ROLLOUT.split()),
    *_AREAL_OTHERS.split(),
)

# behaviour of AReaL, section 9: until 1.0.4 renamed it rejection_sampling
_AREAL = tuple((f"{role}.behave_imp_weight_cap", "null", "-1.0", "", "float") for role in ("actor", "critic"))

DRIFT: dict[str, tuple[Entry, ...]] = {"areal": _AREAL, "nemo_rl": _NEMO_RL, "trl": _TRL, "openrlhf": OPENRLHF_OLD}
"""Rows that replace all of the same key in a generated table."""
NOT_BEFORE: dict[str, dict[str, str]] = {
    "areal": dict.fromkeys(_AREAL_NEW, "main"),
    "nemo_rl": {"grpo.async_grpo": "0.4", "data_plane": "0.7"},
    "openrlhf": {"": "0.10"},  # dotted since then
    "slime": {"update-weight-mode": "0.3", "update-weight-transport": "0.3"},
}
"""Sections that came with a release (the empty one: every key)."""
