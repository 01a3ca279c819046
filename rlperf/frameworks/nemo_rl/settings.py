"""NeMo-RL: the settings that are no table rows: backend, budgets, placement, algorithm, and what its rules ask."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlperf.errors import ExportError, SpecError
from rlperf.frameworks.adapter import node_shape
from rlperf.frameworks.fields import Setting
from rlperf.frameworks.hub import hub_name
from rlperf.frameworks.nearest import with_stage_ends
from rlperf.frameworks.phases import enough_epochs
from rlperf.frameworks.run import Run
from rlperf.specs.profiles import load_architecture

P = "policy."
D = P + "dtensor_cfg."
G = P + "megatron_cfg."
V = P + "generation.vllm_cfg."
K = P + "generation.vllm_kwargs."
S = P + "generation.sglang_cfg."
ASYNC = "grpo.async_grpo."
IN_FLIGHT = ASYNC + "in_flight_weight_updates"
STREAM = "async_rl."
STREAMED_GROUPS = 32
"""min_groups_for_streaming_train of main 7ea279a: groups that the SingleController's trainer takes at once."""


@dataclass(frozen=True)
class NemoRlFacts:
    """What rules ask beside the run: how generation is placed, and how the loss corrects for stale samples."""

    colocated: bool
    async_enabled: bool
    importance_sampling: bool
    on_policy_ratio: bool
    train_pads_to: int | None = None
    generation_nodes: int | None = None
    generation_gpus_per_node: int | None = None
    both_backends: bool | None = None
    beside: tuple[tuple[str, str], ...] = ()


def with_derived(run: Run) -> Run:
    """The run with NeMo-RL's own words for it, and what its rules ask."""
    run = with_stage_ends(run)
    ours, engine = run.trainer, run.rollout
    packed = ours.packing is not False and (
        ours.token_budget is not None or bool(ours.packing) or ours.context_parallel > 1
    )
    offloads, recompute = ours.offload in ("optimizer", "both"), ours.activation_recompute
    trainer = ours.having(
        packing=packed,
        dynamic_batching=ours.token_budget is not None and not packed,
        microbatch=ours.samples,
        scoring_microbatch=ours.scoring_microbatch or ours.samples,
        offload_all=offloads,
        offload_optimizer=offloads,
        checkpointing=recompute != "none",
        granularity=None if recompute == "none" else recompute,
        replicas=(ours.data_parallel or 1) // ours.shard_size if ours.shard_size else None,
    )
    total, wide = run.batch.longest_tokens, engine.attention_data_parallel > 1
    rollout = engine.having(
        engine_context=total,
        engine_gpus=engine.tensor_parallel * engine.pipeline_parallel,
        async_engine=(run.traits.overlaps or engine.pipeline_parallel > 1) and not wide,
    )
    facts = NemoRlFacts(
        colocated=run.traits.shares_devices,
        async_enabled=run.traits.runs_ahead,
        importance_sampling=run.traits.runs_ahead or engine.rollout_dtype == "fp8",
        on_policy_ratio=_unscored(run),
    )
    return replace(run, batch=run.batch.with_context(), trainer=trainer, rollout=rollout, facts=facts)


def _unscored(run: Run) -> bool:
    """Whether the policy's own ratio is taken as 1, which wants a single update (algorithms/grpo.py:699)."""
    return run.old_policy is False and run.batch.updates == 1


def switches(run: Run) -> list[Setting]:
    """Backend, token budgets and padding."""
    megatron = run.trainer.backend == "megatron"
    budget = run.trainer.token_budget
    total, scoring = run.batch.context_tokens or 1, run.trainer.scoring_budget
    divisor = run.trainer.tensor_parallel if run.trainer.sequence_parallel else 1
    if run.trainer.context_parallel > 1:
        divisor *= 2 * run.trainer.context_parallel
    settings = [
        Setting(G + "enabled", megatron, "one of the two backends"),
        Setting(D + "enabled", not megatron),
        Setting(P + "make_sequence_length_divisible_by", divisor, "TP with sequence parallel, x 2 CP"),
        Setting(P + "offload_optimizer_for_logprob", run.traits.shares_devices and megatron),
    ]
    used = {"sequence_packing": run.trainer.packing, "dynamic_batching": run.trainer.dynamic_batching}
    for section, on in used.items():
        if on:
            tokens = budget or total * run.trainer.samples
            settings.append(Setting(f"{P}{section}.train_mb_tokens", tokens, "tokens per data-parallel rank"))
            counted = total * (run.trainer.scoring_microbatch or run.trainer.samples)
            settings.append(Setting(f"{P}{section}.logprob_mb_tokens", scoring or counted))
    if megatron and run.trainer.offload_optimizer:
        settings.append(Setting(G + "optimizer.optimizer_offload_fraction", 1.0))
    if megatron and run.trainer.expert_parallel > 1:
        settings.append(Setting(G + "moe_grouped_gemm", True))
    rank = run.trainer.lora_rank
    if rank:
        section = G + "peft." if megatron else D + "lora_cfg."
        settings += [Setting(section + "enabled", True), Setting(section + "dim", rank)]
    return settings


def _sees(run: Run) -> bool:
    """Whether the model has a vision tower."""
    try:
        return load_architecture(run.architecture).vision is not None
    except SpecError:
        return False


def placement(run: Run) -> list[Setting]:
    """Nodes and GPUs, and the share of generation."""
    per_node = run.devices_per_node
    trainer, rollout = run.trainer.devices, run.rollout.devices
    colocated = P + "generation.colocated."
    if run.traits.shares_devices:
        shape = node_shape(trainer, per_node)
        if shape is None:
            raise ExportError(f"{trainer} GPUs fill no whole nodes of {per_node}", "nemo_rl")
        return [Setting("cluster.num_nodes", shape[0]), Setting("cluster.gpus_per_node", shape[1]),
                Setting(colocated + "enabled", True, "engine and trainer take turns on the same GPUs")]  # fmt: skip
    total = trainer + rollout
    shared = Setting(colocated + "enabled", False, "the engine has GPUs of its own")
    if total <= per_node:
        return [shared, Setting("cluster.num_nodes", 1), Setting("cluster.gpus_per_node", total),
                Setting(colocated + "resources.gpus_per_node", rollout, "GPUs of the node for generation")]  # fmt: skip
    if trainer % per_node or rollout % per_node:
        raise ExportError(
            f"a generation pool of {rollout} GPUs beside {trainer} trainer GPUs takes no whole nodes of {per_node}",
            "nemo_rl",
            {"nearest": f"pools that are multiples of {per_node} GPUs"},
        )
    return [
        shared,
        Setting("cluster.num_nodes", total // per_node),
        Setting("cluster.gpus_per_node", per_node),
        Setting(colocated + "resources.num_nodes", rollout // per_node, "whole nodes for generation"),
        Setting(colocated + "resources.gpus_per_node", per_node),
    ]


def algorithm_settings(run: Run) -> list[Setting]:
    """Model, loss, asynchrony and length of the run."""
    reference, overlapped = run.reference, run.traits.runs_ahead
    settings = [
        Setting(P + "model_name", hub_name(run.architecture), "yours"),
        Setting("loss_fn.reference_policy_kl_penalty", 0.01 if reference else 0.0),
        Setting("grpo.skip_reference_policy_logprobs_calculation", not reference, "true without a KL term"),
        Setting(ASYNC + "enabled", overlapped),
        Setting("loss_fn.force_on_policy_ratio", _unscored(run)),
    ]
    fp8 = run.rollout.rollout_dtype == "fp8"
    if overlapped or fp8:
        settings.append(Setting("loss_fn.use_importance_sampling_correction", True, "async and fp8 rollout need it"))
    if overlapped:
        age = max(run.staleness, 1)
        settings.append(Setting(ASYNC + "max_trajectory_age_steps", age, "policy versions a sample may be behind"))
        settings.append(Setting(IN_FLIGHT, run.in_flight is not False, "false: engines are drained before every sync"))
    if run.traits.streams:
        settings += [
            Setting(STREAM + "min_groups_for_streaming_train", STREAMED_GROUPS, "groups trained at once"),
            Setting(STREAM + "sampler.max_staleness_versions", 0, "on-policy"),
        ]
    if run.algorithm == "dapo":
        settings += [
            Setting("grpo.use_dynamic_sampling", True, "drop groups without a signal"),
            Setting("loss_fn.ratio_clip_max", 0.28),
            Setting("loss_fn.token_level_loss", True),
        ]
        if together := run.batch.generation_batch or run.batch.generated_prompts:
            share = together / run.batch.prompts
            settings.append(Setting("grpo.batch_multiplier", share, "prompts rolled out per prompt trained"))
    if run.batch.turns > 1:
        settings.append(Setting("grpo.max_rollout_turns", run.batch.turns, "tools answer between the turns"))
    if _sees(run):
        settings.append(Setting("data.default.processor", "vlm_hf_data_processor", "images go through the processor"))
    if run.rl_steps:
        settings.append(Setting("grpo.max_num_steps", run.ends_at, "through the last rl_step of this phase"))
        settings.append(enough_epochs("grpo.max_num_epochs", run))
        settings.append(Setting("checkpointing.enabled", True))
        kept = run.kept_in("results/rlperf")
        settings.append(Setting("checkpointing.checkpoint_dir", kept, "yours; the same for every phase of a task"))
        settings.append(Setting("checkpointing.save_period", run.saves_every, "and at the end of the phase"))
    return settings
