"""NeMo-RL: one YAML over a parent config; DTensor (FSDP2) and Megatron-Core trainers; sync and async GRPO.

The optimizer's batch counts samples; token budgets are per data-parallel rank. NeMo-RL keeps unknown keys silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlperf.errors import ExportError
from rlperf.frameworks.adapter import Emission, Limitation, Source, hub_name, node_shape, uneven_stages
from rlperf.frameworks.fields import (
    KV_DTYPE,
    NEGATED,
    SAMPLES,
    Field,
    Setting,
    Target,
    Unit,
    field,
    read_fields,
    resolve,
    words,
    write_fields,
)
from rlperf.frameworks.keytable import ABSENT, Value, key_table
from rlperf.frameworks.run import Run, complete_layouts
from rlperf.frameworks.writing import script, yaml_text
from rlperf.specs.modes import mode_of_staleness

P = "policy."
D = P + "dtensor_cfg."
G = P + "megatron_cfg."
V = P + "generation.vllm_cfg."
K = P + "generation.vllm_kwargs."
S = P + "generation.sglang_cfg."
ASYNC = "grpo.async_grpo."
STREAM = "async_rl."
STREAMED_GROUPS = 32
"""min_groups_for_streaming_train of main 7ea279a: groups that the SingleController's trainer takes at once."""
_STREAMING_ENTRY = '"${NEMO_RL_SINGLE_CONTROLLER:?set it to the script that starts the SingleController}"'

_DTYPE = words(bf16="bfloat16", fp16="float16", fp32="float32")
_ENGINE_TP = Unit(
    lambda value, run: max(int(value), run.number("rollout.expert_parallel")),
    lambda value, run: int(value) // run.number("rollout.attention_data_parallel"),
)
_DISTRIBUTED = Unit(lambda value, _: 1 if value else 0, lambda value, _: value >= 1)
_CHUNKED = Unit(lambda value, _: bool(value), lambda value, _: 1024 if value else None)
_CHECKPOINTING = Unit(lambda value, _: "full" if value else "none", lambda value, _: value != "none")

FIELDS: tuple[Field, ...] = (
    field("batch.prompts_per_step", "grpo.num_prompts_per_step", note="prompts"),
    field("batch.group_size", "grpo.num_generations_per_prompt", note="samples per prompt"),
    field("batch.stated_samples", P + "train_global_batch_size", read_only=True),
    field("batch.mini_batch", P + "train_global_batch_size", SAMPLES),
    field("batch.context_tokens", P + "max_total_sequence_length", note="prompt + response"),
    field("batch.max_response_tokens", P + "generation.max_new_tokens"),
    field("trainer.microbatch", P + "train_micro_batch_size", note="samples per data-parallel rank"),
    field("trainer.scoring_microbatch", P + "logprob_batch_size", note="samples per data-parallel rank"),
    field("trainer.compute_dtype", P + "precision", _DTYPE),
    field("trainer.tensor_parallel", D + "tensor_parallel_size", backend="fsdp2"),
    field("trainer.context_parallel", D + "context_parallel_size", backend="fsdp2"),
    field("trainer.expert_parallel", D + "expert_parallel_size", backend="fsdp2"),
    field("trainer.replicas", D + "dp_replicate_size", note="HSDP replicas", backend="fsdp2"),
    field("trainer.sequence_parallel", D + "sequence_parallel", backend="fsdp2"),
    field("trainer.activation_recompute", D + "activation_checkpointing", _CHECKPOINTING, backend="fsdp2"),
    field("trainer.offload_all", D + "cpu_offload", note="parameters and optimizer in host memory", backend="fsdp2"),
    field("trainer.freeze_vision", D + "automodel_kwargs.freeze_config.freeze_vision_tower", backend="fsdp2"),
    field("trainer.freeze_vision", G + "freeze_config.freeze_vision_model", backend="megatron"),
    field("trainer.chunked_loss", P + "logprob_chunk_size", _CHUNKED, "tokens of logits at once", backend="fsdp2"),
    field("trainer.chunked_loss", G + "use_fused_linear_logprobs", note="no full logits", backend="megatron"),
    field("trainer.tensor_parallel", G + "tensor_model_parallel_size", backend="megatron"),
    field("trainer.pipeline_parallel", G + "pipeline_model_parallel_size", backend="megatron"),
    field("trainer.context_parallel", G + "context_parallel_size", backend="megatron"),
    field("trainer.expert_parallel", G + "expert_model_parallel_size", backend="megatron"),
    field("trainer.expert_tensor_parallel", G + "expert_tensor_parallel_size", backend="megatron"),
    field("trainer.sequence_parallel", G + "sequence_parallel", backend="megatron"),
    field("trainer.zero_stage", G + "optimizer.use_distributed_optimizer", _DISTRIBUTED, backend="megatron"),
    field("trainer.checkpointing", G + "activation_checkpointing", backend="megatron"),
    field("trainer.granularity", G + "recompute_granularity", backend="megatron"),
    field("trainer.offload_optimizer", G + "optimizer.optimizer_cpu_offload", backend="megatron"),
    field("trainer.first_stage_layers", G + "num_layers_in_first_pipeline_stage", backend="megatron"),
    field("trainer.last_stage_layers", G + "num_layers_in_last_pipeline_stage", backend="megatron"),
    field("trainer.packing", P + "sequence_packing.enabled", note="sequences packed without padding"),
    field("trainer.dynamic_batching", P + "dynamic_batching.enabled"),
    field("rollout.backend", P + "generation.backend"),
    field("rollout.expert_parallel", V + "expert_parallel_size"),
    field("rollout.tensor_parallel", V + "tensor_parallel_size", _ENGINE_TP, "replica = TP x PP GPUs"),
    field("rollout.pipeline_parallel", V + "pipeline_parallel_size"),
    field("rollout.memory_fraction", V + "gpu_memory_utilization", note="share of GPU memory for the engine"),
    field("rollout.engine_context", V + "max_model_len"),
    field("rollout.cuda_graphs", V + "enforce_eager", NEGATED),
    field("rollout.rollout_dtype", V + "precision", _DTYPE),
    field("rollout.kv_dtype", V + "kv_cache_dtype", KV_DTYPE),
    field("rollout.prefix_caching", V + "enable_prefix_caching"),
    field("rollout.async_engine", V + "async_engine"),
    field("rollout.max_running", K + "max_num_seqs", note="requests that a replica runs at once"),
    field("rollout.engine_token_budget", K + "max_num_batched_tokens", note="tokens per engine step"),
    field("rollout.chunked_prefill", K + "enable_chunked_prefill"),
)

# The same engine settings where SGLang serves; vLLM's keys do nothing there.
SGLANG: tuple[Field, ...] = (
    field("rollout.tensor_parallel", S + "tp_size"),
    field("rollout.pipeline_parallel", S + "pp_size"),
    field("rollout.expert_parallel", S + "ep_size"),
    field("rollout.attention_data_parallel", S + "dp_size"),
    field("rollout.memory_fraction", S + "mem_fraction_static"),
    field("rollout.max_running", S + "max_running_requests"),
    field("rollout.engine_context", S + "context_length"),
    field("rollout.cuda_graphs", S + "disable_cuda_graph", NEGATED),
    field("rollout.engine_gpus", S + "sglang_server_config.num_gpus_per_engine"),
)


def fields_of(run: Run) -> tuple[Field, ...]:
    """The field table for the run's engine."""
    if run.get("rollout.backend") != "sglang":
        return FIELDS
    return (*(entry for entry in FIELDS if not entry.keys[0].startswith((V, K))), *SGLANG)


METRICS = {
    "timing/train/total_step_time": "rl_step_s",
    "timing/train/generation": "rollout_s",
    "timing/train/exposed_generation": "rollout_s",
    "timing/train/reward_calculation": "reward_s",
    "timing/train/policy_and_reference_logprobs": "scoring_s",
    "timing/train/policy_training": "training_s",
    "timing/train/prepare_for_generation/total": "weight_sync_s",
    "timing/train/weight_sync": "weight_sync_s",
    "timing/train/data_processing": "other_s",
    "timing/train/logprob_inference_prep": "other_s",
    "timing/train/advantage_calculation": "other_s",
    "timing/train/training_prep": "other_s",
    "train/mean_prompt_length": "prompt_tokens",
    "train/mean_gen_tokens_per_sample": "response_tokens",
    "train/truncation_rate": "truncated_fraction",
    "train/total_num_tokens": "total_tokens",
    "performance/tokens_per_sec_per_gpu": "tokens_per_s_per_device",
}
"""Metric -> column of `StepLog` (nemo_rl/algorithms/utils.py:519-907)."""


@dataclass(frozen=True)
class NemoRl:
    """The adapter."""

    name: str = "nemo_rl"
    title: str = "NeMo-RL"
    fields: tuple[Field, ...] = (*FIELDS, *SGLANG)

    # -- export -------------------------------------------------------------------------------------------------

    def adapt(self, run: Run, version: str) -> tuple[Run, tuple[Limitation, ...]]:
        """No Ulysses, no virtual pipeline stages, no activation offload; DTensor recomputes in full or not at all."""
        if run.get("run.algorithm") == "ppo":
            raise ExportError(
                "GRPO has no critic", "nemo_rl", {"nearest": "algorithm: grpo, or verl / OpenRLHF for ppo"}
            )
        lost: list[Limitation] = []
        changes: dict[str, Value] = {}
        if run.traits.lag is None:
            changes["run.mode"] = "k_step_off"  # what its bound counts, whatever the mode is called
        dtensor = run.get("trainer.backend") != "megatron"
        if run.number("trainer.ulysses") > 1:
            ring = run.number("trainer.context_parallel") * run.number("trainer.ulysses")
            changes.update({"trainer.context_parallel": ring, "trainer.ulysses": 1})
            lost.append(Limitation("Ulysses", f"context parallel {ring}", "ring exchange in place of all-to-all"))
        if run.number("trainer.virtual_pipeline") > 1:
            stages, chunks = run.number("trainer.pipeline_parallel"), run.number("trainer.virtual_pipeline")
            changes["trainer.virtual_pipeline"] = 1
            lost.append(Limitation(f"{chunks} virtual stages", "plain 1F1B", f"bubble x {chunks} ({stages} stages)"))
        offload, recompute = run.get("trainer.offload"), run.get("trainer.activation_recompute")
        if offload in ("activations", "both"):
            changes["trainer.offload"] = "optimizer" if offload == "both" else "none"
            changes["trainer.activation_recompute"] = recompute = "full"
            lost.append(Limitation("activation offload", "full recompute", _third(run)))
        if dtensor and recompute == "selective":
            changes["trainer.activation_recompute"] = "full"
            lost.append(Limitation("selective recompute with DTensor", "full recompute", _third(run)))
        if dtensor and offload in ("optimizer", "both"):
            lost.append(
                Limitation("optimizer offload alone", "cpu_offload (parameters too)", "parameters come over PCIe")
            )
        width, experts = run.number("rollout.tensor_parallel"), run.number("rollout.expert_parallel")
        if run.get("rollout.backend") == "vllm" and experts not in (1, width):
            changes["rollout.expert_parallel"] = width
            lost.append(Limitation(f"rollout expert_parallel {experts}", str(width), "vLLM spans the whole replica"))
        if run.traits.shares_devices and run.get("trainer.parked") is False:
            lost.append(Limitation("trainer states on the GPU during rollout", "offloaded before every refit",
                                   "a few seconds per rl_step; memory is not the problem"))  # fmt: skip
        wide = run.number("rollout.attention_data_parallel")
        if wide > 1 and run.traits.runs_ahead and run.get("rollout.backend") == "vllm":
            changes["rollout.attention_data_parallel"] = 1
            lost.append(Limitation(f"attention data parallel {wide} with async GRPO", f"tensor parallel {width}",
                                   "async needs the async engine, which excludes EP other than TP"))  # fmt: skip
        return run.with_(changes), tuple(lost)

    def emit(self, run: Run, target: Target) -> Emission:
        """A complete configuration: every default of the version, with the decisions in place."""
        run = _with_derived(run)
        megatron = run.get("trainer.backend") == "megatron"
        backend = "megatron" if megatron else "fsdp2"
        decided = write_fields(fields_of(run), run, Target(target.table, target.version, backend))
        decided += [s for s in (*_switches(run), *_placement(run), *_algorithm(run)) if target.has(s.key)]
        chosen = {setting.key: setting for setting in decided if setting.value is not None}
        dropped = ("policy.optimizer", "policy.scheduler") if megatron else ()
        settings: dict[str, Setting] = {}
        for key, spec in target.table.keys(target.version).items():
            if key.startswith(dropped) if dropped else False:
                continue
            if spec.default is not ABSENT and not any(other.startswith(key + ".") for other in chosen):
                settings[key] = Setting(key, {} if spec.default == "{}" else spec.default)
        settings.update({key: Setting(key, None, "Megatron has its own") for key in dropped})
        settings.update(chosen)
        # Decisions first: a reader sees them without scrolling through the defaults.
        order = [key.split(".")[0] for key in (*chosen, *settings)]
        ranked = sorted(settings.values(), key=lambda s: (order.index(s.key.split(".")[0]), s.key not in chosen))
        entry = _STREAMING_ENTRY if run.traits.streams else "examples/run_grpo.py"
        return Emission(tuple(ranked), (), entry, (), run)

    def render(self, emission: Emission, stem: str, header: Sequence[str]) -> dict[str, str]:
        """``<stem>.yaml`` (self-contained) and ``<stem>.sh``."""
        note = "Keys with a comment were decided; the others are the version's defaults, so that no parent is needed."
        body = [
            'HERE="$(cd "$(dirname "$0")" && pwd)"',
            'cd "${NEMO_RL:?set NEMO_RL to your NeMo-RL checkout}"',
            f'uv run {emission.entry} --config "$HERE/{stem}.yaml" "$@"',
        ]
        return {
            f"{stem}.yaml": yaml_text(emission.settings, [*header, note]),
            f"{stem}.sh": script([f"Launches {stem}.yaml on the head of a Ray cluster."], body),
        }

    # -- import -------------------------------------------------------------------------------------------------

    def detect(self, source: Source) -> float:
        """NeMo-RL's sections, or its entry point."""
        if "run_grpo" in source.entry:
            return 1.0
        markers = (
            "grpo.num_prompts_per_step",
            "policy.megatron_cfg.",
            "policy.dtensor_cfg.",
            "policy.generation.",
            "grpo.",
        )
        return 0.9 if any(key.startswith(markers) for key in source.keys) else 0.0

    def target(self, source: Source, version: str | None) -> Target:
        """Megatron where it is switched on."""
        table = key_table(self.name)
        enabled = source.keys.get(G + "enabled") is True
        return Target(table, table.version(version), "megatron" if enabled else "fsdp2")

    def read(self, source: Source, target: Target) -> tuple[Run, frozenset[str]]:
        """Neutral values of the keys over the defaults of the parent config."""
        specs = target.table.keys(target.version)
        flat = {key: spec.default for key, spec in specs.items() if spec.default is not ABSENT}
        for key in source.keys:
            for old in [name for name in flat if name.startswith(key + ".")]:
                del flat[old]
        flat = resolve({**flat, **source.keys})
        start = Run({"trainer.backend": target.backend, "rollout.backend": flat.get(P + "generation.backend")})
        run, used = read_fields(fields_of(start), flat, target, start)
        run = run.with_({"run.architecture": str(flat.get(P + "model_name"))})
        run = run.with_(_read_budgets(run, flat))
        run = run.with_(_read_lengths(run))
        run = run.with_(_read_mode(run, flat))
        run = run.with_(_read_layout(run, flat, target.backend))
        return Run(complete_layouts(run.values)), frozenset(used | _ALSO_READ)


def _third(run: Run) -> str:
    seconds = run.get("predicted.training")
    return f"up to {seconds / 3:.1f} s per rl_step more" if seconds else "up to a third of the training time more"


def _with_derived(run: Run) -> Run:
    budget, packing = run.get("trainer.token_budget"), run.get("trainer.packing")
    packed = packing is not False and (
        budget is not None or bool(packing) or run.number("trainer.context_parallel") > 1
    )
    offload, recompute = run.get("trainer.offload", "none"), run.get("trainer.activation_recompute", "none")
    total = run.number("batch.max_prompt_tokens") + run.number("batch.max_response_tokens")
    micro = run.number("trainer.microbatch")
    disaggregated = not run.traits.shares_devices
    overlapped = run.traits.runs_ahead
    shard = run.number("trainer.shard_size", 0)
    engine = run.number("rollout.tensor_parallel") * run.number("rollout.pipeline_parallel")
    wide = run.number("rollout.attention_data_parallel") > 1
    derived: dict[str, Value] = {
        **uneven_stages(run),
        "batch.context_tokens": total,
        "rollout.engine_context": total,
        "rollout.engine_gpus": engine,
        "trainer.packing": packed,
        "trainer.dynamic_batching": budget is not None and not packed,
        "trainer.microbatch": micro,
        "trainer.scoring_microbatch": run.number("trainer.scoring_microbatch", micro),
        "trainer.offload_all": offload in ("optimizer", "both"),
        "trainer.offload_optimizer": offload in ("optimizer", "both"),
        "trainer.checkpointing": recompute != "none",
        "trainer.granularity": None if recompute == "none" else recompute,
        "trainer.replicas": run.number("trainer.data_parallel") // shard if shard else None,
        "rollout.async_engine": (run.traits.overlaps or run.number("rollout.pipeline_parallel") > 1) and not wide,
        "run.disaggregated": disaggregated,
        "run.overlapped": overlapped,
        "run.colocated": not disaggregated,
        "run.async_enabled": overlapped,
        "run.importance_sampling": overlapped or run.get("rollout.rollout_dtype") == "fp8",
        "run.on_policy_ratio": False,
    }
    return run.with_(derived)


def _switches(run: Run) -> list[Setting]:
    """Backend, token budgets and padding."""
    megatron = run.get("trainer.backend") == "megatron"
    budget = run.get("trainer.token_budget")
    total = run.number("batch.context_tokens")
    scoring = run.get("trainer.scoring_token_budget") or (2 * int(budget) if budget else None)
    divisor = run.number("trainer.tensor_parallel") if run.get("trainer.sequence_parallel") else 1
    if run.number("trainer.context_parallel") > 1:
        divisor *= 2 * run.number("trainer.context_parallel")
    settings = [
        Setting(G + "enabled", megatron, "one of the two backends"),
        Setting(D + "enabled", not megatron),
        Setting(P + "make_sequence_length_divisible_by", divisor, "TP with sequence parallel, x 2 CP"),
        Setting(P + "offload_optimizer_for_logprob", run.traits.shares_devices and megatron),
    ]
    for section, used in (("sequence_packing", "trainer.packing"), ("dynamic_batching", "trainer.dynamic_batching")):
        if run.get(used):
            tokens = int(budget or total * run.number("trainer.microbatch"))
            settings.append(Setting(f"{P}{section}.train_mb_tokens", tokens, "tokens per data-parallel rank"))
            settings.append(Setting(f"{P}{section}.logprob_mb_tokens", int(scoring or tokens)))
    if megatron and run.get("trainer.offload_optimizer"):
        settings.append(Setting(G + "optimizer.optimizer_offload_fraction", 1.0))
    if megatron and run.number("trainer.expert_parallel") > 1:
        settings.append(Setting(G + "moe_grouped_gemm", True))
    rank = run.get("trainer.lora_rank")
    if rank:
        section = G + "peft." if megatron else D + "lora_cfg."
        settings += [Setting(section + "enabled", True), Setting(section + "dim", int(rank))]
    return settings


def _placement(run: Run) -> list[Setting]:
    per_node = run.number("run.devices_per_node", 8)
    trainer, rollout = run.number("trainer.devices"), run.number("rollout.devices")
    colocated = P + "generation.colocated."
    if not run.get("run.disaggregated"):
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


def _algorithm(run: Run) -> list[Setting]:
    reference, overlapped = bool(run.get("run.reference")), bool(run.get("run.overlapped"))
    settings = [
        Setting(P + "model_name", hub_name(str(run.get("run.architecture", ""))), "yours"),
        Setting("loss_fn.reference_policy_kl_penalty", 0.01 if reference else 0.0),
        Setting("grpo.skip_reference_policy_logprobs_calculation", not reference, "no KL: no reference pass"),
        Setting(ASYNC + "enabled", overlapped),
        Setting("loss_fn.force_on_policy_ratio", False),
    ]
    fp8 = run.get("rollout.rollout_dtype") == "fp8"
    if overlapped or fp8:
        settings.append(Setting("loss_fn.use_importance_sampling_correction", True, "async and fp8 rollout need it"))
    if overlapped:
        age = max(run.number("run.staleness", 1), 1)
        settings.append(Setting(ASYNC + "max_trajectory_age_steps", age, "policy versions a sample may be behind"))
    if run.traits.streams:
        settings += [
            Setting(STREAM + "min_groups_for_streaming_train", STREAMED_GROUPS, "groups trained at once"),
            Setting(STREAM + "sampler.max_staleness_versions", 0, "on-policy"),
        ]
    if run.get("run.algorithm") == "dapo":
        settings += [
            Setting("grpo.use_dynamic_sampling", True, "drop groups without a signal"),
            Setting("loss_fn.ratio_clip_max", 0.28),
            Setting("loss_fn.token_level_loss", True),
        ]
    if run.get("run.rl_steps"):
        steps = run.number("run.last_rl_step", run.number("run.rl_steps"))
        settings.append(Setting("grpo.max_num_steps", steps, "through the last rl_step of this phase"))
        settings.append(Setting("checkpointing.save_period", run.number("run.rl_steps"), "the next phase resumes here"))
    return settings


# -- reading ----------------------------------------------------------------------------------------------------------

_ALSO_READ = frozenset(
    {
        P + "model_name", D + "enabled", G + "enabled", "cluster.num_nodes", "cluster.gpus_per_node",
        P + "generation.colocated.enabled", P + "generation.colocated.resources.num_nodes",
        P + "generation.colocated.resources.gpus_per_node", ASYNC + "enabled", ASYNC + "max_trajectory_age_steps",
        P + "sequence_packing.train_mb_tokens", P + "sequence_packing.logprob_mb_tokens",
        P + "dynamic_batching.train_mb_tokens", P + "dynamic_batching.logprob_mb_tokens",
        "loss_fn.reference_policy_kl_penalty", "grpo.use_dynamic_sampling", "loss_fn.force_on_policy_ratio",
        "loss_fn.use_importance_sampling_correction", P + "make_sequence_length_divisible_by",
        "grpo.skip_reference_policy_logprobs_calculation",
    }
)  # fmt: skip


def _read_budgets(run: Run, flat: dict[str, Value]) -> dict[str, Value]:
    """Token budgets of whichever of packing and dynamic batching is on."""
    section = "sequence_packing" if run.get("trainer.packing") else "dynamic_batching"
    on = bool(run.get("trainer.packing") or run.get("trainer.dynamic_batching"))
    train, scoring = flat.get(f"{P}{section}.train_mb_tokens"), flat.get(f"{P}{section}.logprob_mb_tokens")
    return {
        "trainer.token_budget": int(train) if on and isinstance(train, int | float) else None,
        "trainer.scoring_token_budget": int(scoring) if on and isinstance(scoring, int | float) else None,
        "trainer.dynamic": on,
        "run.train_pads_to": flat.get(P + "make_sequence_length_divisible_by"),
    }


def _read_lengths(run: Run) -> dict[str, Value]:
    """Prompt and response caps: NeMo-RL limits their sum; a prompt's share of it is assumed (an eighth)."""
    total, response = run.number("batch.context_tokens"), run.number("batch.max_response_tokens")
    prompt = total - response if total > response else max(min(1024, total // 8), 1)
    return {"batch.max_prompt_tokens": prompt, "batch.max_response_tokens": max(total - prompt, 1)}


def _read_mode(run: Run, flat: dict[str, Value]) -> dict[str, Value]:
    nodes, per_node = int(flat.get("cluster.num_nodes") or 1), int(flat.get("cluster.gpus_per_node") or 1)
    total = nodes * per_node
    colocated = bool(flat.get(P + "generation.colocated.enabled", True))
    overlapped = bool(flat.get(ASYNC + "enabled"))
    age = int(flat.get(ASYNC + "max_trajectory_age_steps") or 1)
    own_nodes = flat.get(P + "generation.colocated.resources.num_nodes")
    own_gpus = flat.get(P + "generation.colocated.resources.gpus_per_node")
    rollout = total if colocated else int(own_nodes or 1) * int(own_gpus or (per_node if own_nodes else 0))
    mode = mode_of_staleness(age, beyond="k_step_off") if overlapped else mode_of_staleness(0, shares_devices=colocated)
    if flat.get(STREAM + "min_groups_for_streaming_train") is not None:
        mode = "streaming"
    kl = flat.get("loss_fn.reference_policy_kl_penalty")
    return {
        "run.mode": mode,
        "run.staleness": age if overlapped else 0,
        "run.colocated": colocated,
        "run.async_enabled": overlapped,
        "run.nodes": nodes,
        "run.devices": total,
        "run.devices_per_node": per_node,
        "run.generation_nodes": own_nodes,
        "run.generation_gpus_per_node": own_gpus,
        "rollout.devices": rollout,
        "trainer.parked": colocated or None,
        "trainer.devices": total if colocated else max(total - rollout, 0),
        "run.algorithm": "dapo" if flat.get("grpo.use_dynamic_sampling") else "grpo",
        "run.reference": bool(kl),
        "run.on_policy_ratio": bool(flat.get("loss_fn.force_on_policy_ratio")),
        "run.importance_sampling": bool(flat.get("loss_fn.use_importance_sampling_correction")),
        "run.both_backends": bool(flat.get(D + "enabled")) == bool(flat.get(G + "enabled")),
    }


def _read_layout(run: Run, flat: dict[str, Value], backend: str) -> dict[str, Value]:
    """What the two trainers say in different words."""
    experts, width = run.number("rollout.expert_parallel"), run.number("rollout.tensor_parallel")
    values: dict[str, Value] = {}
    if backend == "megatron":
        on = bool(run.get("trainer.checkpointing"))
        values["trainer.activation_recompute"] = (run.get("trainer.granularity") or "full") if on else "none"
        values["trainer.offload"] = "optimizer" if run.get("trainer.offload_optimizer") else "none"
    else:
        replicas = run.get("trainer.replicas")
        values["trainer.zero_stage"] = 3
        values["trainer.shard_size"] = run.number("trainer.devices") // int(replicas) if replicas else 0
        values["trainer.offload"] = "optimizer" if run.get("trainer.offload_all") else "none"
    if run.get("rollout.backend") == "vllm":
        narrow = int(flat.get(V + "tensor_parallel_size") or 1)
        values["rollout.own_tensor_parallel"], values["rollout.own_expert_parallel"] = narrow, experts
        values["rollout.attention_data_parallel"] = max(experts // narrow, 1)
        values["rollout.expert_parallel"] = width if experts > 1 else 1
    return values


ADAPTER = NemoRl()
