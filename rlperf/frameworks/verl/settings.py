"""verl: the settings that are no table rows: placement, mode, algorithm, critic, scoring, and where they may stand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rlperf.errors import ExportError
from rlperf.frameworks.adapter import node_shape
from rlperf.frameworks.drafting import drafting_of, sglang_drafts, vllm_drafts
from rlperf.frameworks.fields import TOKENS_PER_DEVICE, Setting, Target, words
from rlperf.frameworks.hub import hub_name
from rlperf.frameworks.nearest import with_stage_ends
from rlperf.frameworks.phases import enough_epochs
from rlperf.frameworks.run import Run, TrainerRun

A = "actor_rollout_ref.actor."
R = "actor_rollout_ref.rollout."
M = "actor_rollout_ref.model."
REF = "actor_rollout_ref.ref."
F = A + "fsdp_config."
G = A + "megatron."
T = G + "override_transformer_config."
H = A + "optim.override_optimizer_config."
ORDER = ("0.4", "0.5", "0.6", "0.7", "0.8", "0.9", "main")


ASYNC_ENTRIES = {
    "one_step_off": "verl.experimental.one_step_off_policy.main_ppo",
    "fully_async": "verl.experimental.fully_async_policy.fully_async_main",
}


NO_SYNC = "use_no_sync_for_gradient_accumulation"
"""Key of 0.9.1; 0.9.0 lacks it and holds gradients whole (verl/workers/engine/fsdp/transformer_impl.py:673)."""
SPANNED = "policy versions that a sample may span: its own counts too, so staleness + 1"
"""Staleness in the sampler's words: step - step of submission + 1 (verl/trainer/ppo/v1/replay_buffer.py:511)."""


CHARACTERS = 4
"""Of a token of text, on average: what tokenizers of 100k words and more make of English and code."""
REPLAY = words(none="disabled")
OLD_REPLAY, OLD_WORKERS = A + "router_replay.mode", "0.7"
"""The key that the older of 0.7's two kinds of workers reads (0.7.1 workers/actor/megatron_actor.py:182). The newer
reads Megatron's own, and 0.8 on that alone (0.9.0 workers/engine_workers.py:494); 0.9.1 refuses this one."""


def at_least(version: str, first: str) -> bool:
    return ORDER.index(version) >= ORDER.index(first)


def is_noise(setting: Setting, target: Target) -> bool:
    """A null that the version's default is anyway, and what 0.9.0 has no key for where it is off."""
    off = setting.key.endswith(NO_SYNC) and not setting.value
    return off or (setting.value is None and target.default(setting.key) is None)


def with_derived(run: Run) -> Run:
    """Values that verl's keys speak of beside the plan's own."""
    run = with_stage_ends(run)
    ours, budget = run.trainer, run.trainer.token_budget
    trainer = ours.having(
        offload_optimizer=True if ours.offload in ("optimizer", "both") else None,
        offload_activations=ours.offload in ("activations", "both"),
        parks_optimizer=bool(ours.parked),
        parks_parameters=bool(ours.parked),
        packing=ours.packing is not False,
        dynamic=budget is not None,
        scoring_dynamic=ours.scoring_budget is not None,
        scoring_token_budget=ours.scoring_budget,
        microbatch=None if budget else ours.samples,
        scoring_microbatch=None if ours.scoring_budget else ours.scoring_microbatch or ours.samples,
    )
    context = run.batch.context_tokens or run.batch.longest_tokens
    return replace(run, trainer=trainer, batch=replace(run.batch, context_tokens=context))


def recipe_of(run: Run, version: str) -> str | None:
    """The experimental entry that runs the mode; None where the trainer itself does."""
    mode = run.traits
    if run.recipe is not None or mode.shares_devices:
        return run.recipe
    if mode.streams:
        return "fully_async"
    if at_least(version, "0.9"):
        return None
    return "fully_async" if mode.lag is None else "one_step_off"


def placement(run: Run, version: str) -> list[Setting]:
    """Nodes and GPUs of the trainer and, where it has its own, of the rollout pool; the mode's own keys."""
    nodes, gpus = _shape("trainer", run.trainer.devices, run.devices_per_node)
    own_nodes, own_gpus = _shape("rollout", run.rollout.devices, run.devices_per_node)
    settings = [Setting("trainer.nnodes", nodes), Setting("trainer.n_gpus_per_node", gpus)]
    bypass = [
        Setting("algorithm.rollout_correction.bypass_mode", not run.old_policy,
                "the engine's log-probs serve: no old_log_prob pass"),
        Setting(R + "calculate_log_probs", True),
    ]  # fmt: skip
    if run.traits.shares_devices:
        # 0.4 refuses free_cache_engine with CUDA graphs (its engine sleeps all the same).
        free = at_least(version, "0.5") or run.rollout.cuda_graphs is False
        settings.append(Setting(R + "free_cache_engine", free, "engine sleeps while the trainer works"))
        if at_least(version, "0.9"):
            settings.append(Setting("trainer.v1.trainer_mode", "sync"))
        return settings + (bypass if run.old_policy is False else [])
    settings += [
        Setting(R + "checkpoint_engine.backend", "nccl", "weight sync to a pool of its own"),
        *bypass,
    ]
    staleness = max(run.staleness, 1)
    recipe = recipe_of(run, version)
    if recipe is None:
        return [
            *settings,
            Setting(R + "nnodes", own_nodes, "rollout's own nodes"),
            Setting(R + "n_gpus_per_node", own_gpus),
            Setting("trainer.v1.trainer_mode", "separate_async"),
            Setting("trainer.v1.separate_async.parameter_sync_step", run.batch.updates,
                    "optimizer updates between weight syncs"),
            Setting("trainer.v1.separate_async.num_warmup_batches", staleness, "batches that rollout is ahead"),
            Setting("trainer.v1.sampler.max_off_policy_threshold", staleness + 1, SPANNED),
            Setting("trainer.v1.sampler.max_off_policy_strategy", "drop" if run.traits.lag is None else "wait",
                    "one step off meets at every weight sync and throws nothing away"),
        ]  # fmt: skip
    if version == "0.7":
        why = "the recipes' workers; start them in a checkout of v0.7.1, whose wheel has no programs of theirs"
        settings.append(Setting("trainer.use_legacy_worker_impl", "disable", why))
    settings += [
        Setting("actor_rollout_ref.hybrid_engine", False),
        Setting("rollout.nnodes", own_nodes, "rollout's own nodes"),
        Setting("rollout.n_gpus_per_node", own_gpus),
    ]
    if recipe == "one_step_off":
        return [*settings, Setting(R + "free_cache_engine", False)]
    return [*settings, *_fully_async(run)]


def _shape(role: str, devices: int, per_node: int) -> tuple[int, int]:
    """(nodes, GPUs of each) of a pool."""
    shape = node_shape(devices, per_node)
    if shape is None:
        raise ExportError(
            f"{role} has {devices} GPUs, which fill no whole number of nodes of {per_node}",
            "verl",
            {"nearest": f"devices that are a multiple of {per_node}, or at most {per_node}"},
        )
    return shape


def _fully_async(run: Run) -> list[Setting]:
    """The keys of the recipe that never waits for a batch; with staleness 0 it streams one."""
    ahead = 0.0 if run.traits.streams else float(max(run.staleness, 1))
    prompts, updates = run.last_rl_step and run.batch.prompts * run.last_rl_step, run.batch.updates
    return [
        Setting("data.train_batch_size", 0, "fully async draws single prompts"),
        Setting("data.gen_batch_size", 1),
        Setting("async_training.staleness_threshold", ahead, "share of a sync interval generated ahead"),
        Setting("async_training.trigger_parameter_sync_step", updates, "optimizer updates between weight syncs"),
        Setting("async_training.require_batches", 1),
        Setting("async_training.partial_rollout", True),
        Setting("async_training.use_trainer_do_validate", False),
        Setting(A + "use_rollout_log_probs", True),
        Setting("rollout.n", run.batch.group_size, "samples per prompt"),
        Setting("rollout.total_rollout_steps", prompts, "prompts of the whole run; null: trainer.total_epochs"),
    ]


def algorithm_settings(run: Run, version: str) -> list[Setting]:
    algorithm, reference = run.algorithm, run.reference
    settings = [
        Setting("algorithm.adv_estimator", "gae" if algorithm == "ppo" else "grpo"),
        Setting(A + "use_kl_loss", reference and algorithm != "ppo", "a KL term needs the reference's forward pass"),
        Setting("algorithm.use_kl_in_reward", reference and algorithm == "ppo"),
        Setting(A + "entropy_coeff", 0),
        Setting("data.truncation", "error"),
        Setting("data.filter_overlong_prompts", True),
        Setting(R + "update_weights_bucket_megabytes", 2048),
        Setting(R + "checkpoint_engine.update_weights_bucket_megabytes", 2048),
    ]
    if algorithm == "dapo":
        settings += [
            Setting(A + "clip_ratio_low", 0.2),
            Setting(A + "clip_ratio_high", 0.28),
            Setting(A + "loss_agg_mode", "token-mean"),
        ]
    if algorithm == "dapo" and at_least(version, "0.9"):
        # before, they are keys of the recipe's program (recipe.dapo.main_dapo), which main_ppo refuses
        settings += [
            Setting("algorithm.filter_groups.enable", True, "drop groups without a signal"),
            Setting("algorithm.filter_groups.metric", "acc"),
        ]
    if run.batch.turns > 1:
        settings += [
            Setting(R + "multi_turn.enable", True, "tools answer between the turns"),
            Setting(R + "multi_turn.max_assistant_turns", run.batch.turns),
            *_tool_answers(run, version),
            Setting(R + "multi_turn.tool_config_path", "/data/tools.yaml", "yours"),
            Setting(R + "agent.default_agent_loop", "tool_agent", "yours"),
        ]
    return settings


def _tool_answers(run: Run, version: str) -> list[Setting]:
    """Answers of tools as long as the response may be: verl cuts each to 256 characters by default (from 0.5 on).

    That is tool_agent_loop.py:499 of 0.9.1; one that does not fit into the response ends the trajectory anyway.
    """
    if not at_least(version, "0.5"):
        return []
    most = CHARACTERS * (run.batch.max_response_tokens or 1)
    return [Setting(R + "multi_turn.max_tool_response_length", most, "characters of a tool's answer; 256 by default")]


def megatron_settings(run: Run, target: Target) -> list[Setting]:
    """What Megatron's trainer wants said beside the table of fields: recompute, parked gradients, host optimizer."""
    settings: list[Setting] = []
    recompute = run.trainer.activation_recompute
    if target.backend == "megatron" and recompute == "full":
        old = M + "gradient_checkpointing_kwargs.activations_checkpoint_"
        settings += [
            Setting(T + "recompute_method", "uniform"),
            Setting(T + "recompute_num_layers", 1),
            Setting(M + "enable_gradient_checkpointing", True),
            Setting(old + "method", "uniform"),
            Setting(old + "num_layers", 1),
        ]
    if target.backend == "megatron" and run.trainer.parked and not at_least(target.version, "0.8"):
        # later nothing reads it, and 0.9.1 refuses it
        settings.append(Setting(G + "grad_offload", True, "gradients leave with the optimizer"))
    if target.backend == "megatron" and target.version == OLD_WORKERS and run.trainer.router_replay in ("R2", "R3"):
        settings.append(Setting(OLD_REPLAY, run.trainer.router_replay, "what its older workers read"))
    if target.backend == "megatron" and run.trainer.offload_optimizer:
        settings += [
            Setting(H + "optimizer_offload_fraction", 1.0),
            Setting(H + "overlap_cpu_optimizer_d2h_h2d", True),
            Setting(H + "use_precision_aware_optimizer", True, "the optimizer on the host needs it"),
        ]
    return settings


_MIRRORED = (
    (F, ("critic.fsdp.", "critic.fsdp_config.", "critic.model.fsdp_config.")),
    (G, ("critic.megatron.",)),
    (H, ("critic.optim.override_optimizer_config.",)),
    (M, ("critic.model.",)),
    (A, ("critic.",)),
)
"""Section of the actor -> the critic's by that name, which moved with the versions."""


def critic_settings(run: Run, actors: Iterable[Setting], target: Target) -> list[Setting]:
    """The critic's keys: those that the actor writes for the critic's layout, under the critic's sections."""
    settings = [Setting("critic.model.path", hub_name(run.architecture)), Setting("critic.strategy", target.backend)]
    for setting in actors:
        section, own = next((row for row in _MIRRORED if setting.key.startswith(row[0])), ("", ()))
        name = setting.key.removeprefix(section)
        settings += [Setting(prefix + name, setting.value, setting.why) for prefix in own if name not in _ACTORS_OWN]
    budget = run.trainer.scoring_token_budget
    if budget is not None:
        settings.append(Setting("critic.forward_max_token_len_per_gpu", TOKENS_PER_DEVICE.write(budget, run)))
    return settings


_ACTORS_OWN = ("strategy", "freeze_vision_tower")


def _degrees(trainer: TrainerRun) -> tuple[tuple[str, int], ...]:
    """The keys of a Megatron section, and the degrees that roles beside the actor take over."""
    return (
        ("tensor_model_parallel_size", trainer.tensor_parallel),
        ("pipeline_model_parallel_size", trainer.pipeline_parallel),
        ("context_parallel_size", trainer.context_parallel),
        ("expert_model_parallel_size", trainer.expert_parallel),
        ("expert_tensor_parallel_size", trainer.expert_tensor_parallel),
    )


def scoring(run: Run, target: Target) -> list[Setting]:
    """The reference's forward pass takes the budgets of the actor's scoring pass, and its layout."""
    budget = run.trainer.scoring_token_budget
    settings = [Setting(REF + "log_prob_use_dynamic_bsz", bool(budget))]
    if budget:
        settings.append(Setting(REF + "log_prob_max_token_len_per_gpu", TOKENS_PER_DEVICE.write(budget, run)))
    else:
        settings.append(Setting(REF + "log_prob_micro_batch_size_per_gpu", run.trainer.scoring_microbatch or 1))
    if target.backend == "megatron":
        settings += [Setting(f"{REF}megatron.{key}", size) for key, size in _degrees(run.trainer)]
        settings.append(Setting(REF + "megatron.param_offload", True, "it waits on the host"))
        if run.trainer.virtual_pipeline > 1:
            chunks = run.trainer.virtual_pipeline
            settings.append(Setting(REF + "megatron.virtual_pipeline_model_parallel_size", chunks))
    return settings


def logging_settings(run: Run) -> list[Setting]:
    steps = run.rl_steps
    settings = [
        Setting("actor_rollout_ref.model.path", hub_name(run.architecture), "yours"),
        Setting("data.train_files", f"/data/{run.data}.parquet", "yours"),
        Setting("data.val_files", "/data/val.parquet", "yours"),
        Setting("trainer.balance_batch", True),
        Setting("trainer.logger", ["console"], "`rlperf calibrate logs` reads it"),
    ]
    if steps:
        settings.append(Setting("trainer.total_training_steps", run.ends_at, "through the last rl_step of this phase"))
        settings.append(enough_epochs("trainer.total_epochs", run))
        settings.append(Setting("trainer.save_freq", run.saves_every, "and at the end of the phase"))
        settings.append(Setting("trainer.resume_mode", "auto", "a phase goes on where the one before it ended"))
        kept = run.kept_in("checkpoints/rlperf")
        settings.append(Setting("trainer.default_local_dir", kept, "yours; the same for every phase of a task"))
    return settings


def entry_of(run: Run, target: Target) -> tuple[str, tuple[str, ...]]:
    """The module to run, and the defaults list of the primary config."""
    version = target.version
    megatron = target.backend == "megatron"
    group = ("override model_engine: megatron",) if megatron and at_least(version, "0.8") else ()
    base = "ppo_megatron_trainer" if megatron and not group else "ppo_trainer"
    recipe = recipe_of(run, version)
    if recipe is None:
        return "verl.trainer.main_ppo", (base, *group)
    # The recipes' own configs set hydra.searchpath, which hydra refuses in anything but the primary config: so the
    # trainer's config is the base here too, and `placement` states every key that the recipe adds.
    return ASYNC_ENTRIES[recipe], (base, *group)


def drafts(run: Run) -> list[Setting]:
    """Speculative decoding: a model's own layer under ``model.mtp``, other heads as the engine's own arguments.

    Engines start from random weights and wait for the policy's, so what no weight sync brings has to be loaded.
    """
    wanted = drafting_of(run, "verl")
    if wanted is None:
        return []
    mtp, own, sglang = M + "mtp.", f"{R}engine_kwargs.{run.rollout.backend}.", run.rollout.backend == "sglang"
    if wanted.method == "mtp":
        found = sglang_drafts(mtp.__add__, wanted) if sglang else vllm_drafts(mtp, wanted)
        on = [Setting(mtp + "enable", True, "the model's own prediction layer"), Setting(mtp + "enable_rollout", True)]
        found = [*on, *found]
    else:
        found = sglang_drafts(own.__add__, wanted) if sglang else vllm_drafts(own + "speculative_config.", wanted)
    if wanted.method == "eagle3" and not run.traits.shares_devices:
        found.append(Setting(R + "free_cache_engine", False, "asleep, engines would lose the draft head"))
    if wanted.method == "eagle3" or (wanted.method == "mtp" and run.trainer.backend == "fsdp2"):
        found.append(Setting(R + "load_format", "auto", "what drafts is the checkpoint's: no weight sync brings it"))
    return found
