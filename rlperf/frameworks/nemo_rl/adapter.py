"""NeMo-RL: one YAML over a parent config; DTensor (FSDP2) and Megatron-Core trainers; sync and async GRPO.

The optimizer's batch counts samples; token budgets are per data-parallel rank. NeMo-RL keeps unknown keys silently.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlperf.frameworks.adapter import Emission, Limitation, Source
from rlperf.frameworks.drafting import DRAFTS, drafting_of, read_vllm, vllm_drafts, with_drafts
from rlperf.frameworks.engine_arguments import OF_A_RANK, VLLM_DISPATCH
from rlperf.frameworks.fields import (
    CHECKPOINTING,
    DEEPEP,
    DISTRIBUTED,
    FLEX,
    KV_DTYPE,
    NEGATED,
    SAMPLES,
    Field,
    Setting,
    Target,
    Unit,
    computes,
    elsewhere,
    field,
    read_fields,
    replay_as,
    resolve,
    words,
    write_fields,
)
from rlperf.frameworks.keytable import ABSENT, Flat, key_table, sections
from rlperf.frameworks.nearest import without_ulysses
from rlperf.frameworks.nemo_rl.settings import (
    ASYNC,
    IN_FLIGHT,
    STREAM,
    D,
    G,
    K,
    NemoRlFacts,
    P,
    S,
    V,
    algorithm_settings,
    placement,
    switches,
    with_derived,
)
from rlperf.frameworks.run import BatchFacts, RolloutRun, Run, TrainerRun
from rlperf.frameworks.writing import script, yaml_text
from rlperf.specs.modes import mode_of_staleness
from rlperf.specs.pool import Offload
from rlperf.specs.releases import versions_of
from rlperf.units import human_seconds

_STREAMING_ENTRY = "SingleController"
_WORDS = words(bf16="bfloat16", fp16="float16", fp32="float32")
_DTYPE = computes(replace(_WORDS, write=lambda value, run: _WORDS.write("bf16" if value == "fp8" else value, run)))
_PRECISION = computes(_WORDS, ("bf16", "fp16", "fp32", "fp8"))
"""An engine's: vLLM's own dtype, or fp8 that is quantised at load."""
_FP8 = Unit(
    lambda value, run: "fp8" if value else run.trainer.compute_dtype,
    lambda value, _: value == "fp8",
    takes=frozenset({"bf16", "fp16", "fp32", "fp8"}),
)
_ENGINE_TP = Unit(
    lambda value, run: max(int(value), run.rollout.expert_parallel),
    lambda value, run: value // run.rollout.attention_data_parallel,
)
_CHUNKED = Unit(lambda value, _: bool(value), lambda value, _: 1024 if value else None)

FIELDS: tuple[Field, ...] = (
    *elsewhere("trainer.shard_size", "GPUs / data_parallel_replicate_size", backend="fsdp2"),
    *elsewhere("trainer.lora_rank", "dtensor_cfg.lora_cfg, megatron_cfg.peft"),
    *elsewhere("run.in_flight", "grpo.async_grpo.in_flight_weight_updates"),
    *elsewhere("trainer.token_budget", "train_mb_tokens of sequence_packing or dynamic_batching"),
    *elsewhere("trainer.scoring_token_budget", "logprob_mb_tokens of the same"),
    field("batch.prompts_per_step", "grpo.num_prompts_per_step", note="prompts"),
    field("batch.group_size", "grpo.num_generations_per_prompt", note="samples per prompt"),
    field("batch.stated_samples", P + "train_global_batch_size", read_only=True),
    field("batch.mini_batch", P + "train_global_batch_size", SAMPLES),
    field("batch.context_tokens", P + "max_total_sequence_length", note="prompt + response"),
    field("batch.max_response_tokens", P + "generation.max_new_tokens"),
    field("trainer.microbatch", P + "train_micro_batch_size", note="samples per data-parallel rank"),
    field("trainer.scoring_microbatch", P + "logprob_batch_size", note="samples per data-parallel rank"),
    field("trainer.compute_dtype", P + "precision", _DTYPE),
    field("trainer.compute_dtype", G + "fp8_cfg.enabled", _FP8, "in blocks, unless it says else", backend="megatron"),
    field("trainer.tensor_parallel", D + "tensor_parallel_size", backend="fsdp2"),
    field("trainer.context_parallel", D + "context_parallel_size", backend="fsdp2"),
    field("trainer.expert_parallel", D + "expert_parallel_size", backend="fsdp2"),
    field("trainer.replicas", D + "dp_replicate_size", note="HSDP replicas", backend="fsdp2"),
    field("trainer.sequence_parallel", D + "sequence_parallel", backend="fsdp2"),
    field("trainer.activation_recompute", D + "activation_checkpointing", CHECKPOINTING, backend="fsdp2"),
    field("trainer.offload_all", D + "cpu_offload", note="parameters and optimizer in host memory", backend="fsdp2"),
    field("trainer.freeze_vision", D + "automodel_kwargs.freeze_config.freeze_vision_tower", backend="fsdp2"),
    field("trainer.freeze_vision", G + "freeze_config.freeze_vision_model", backend="megatron"),
    field("trainer.router_replay", P + "router_replay.enabled", replay_as("R3"), "R3: experts of the rollout"),
    field("trainer.chunked_loss", P + "logprob_chunk_size", _CHUNKED, "tokens of logits at once", backend="fsdp2"),
    field("trainer.chunked_loss", G + "use_fused_linear_logprobs", note="no full logits", backend="megatron"),
    field("trainer.tensor_parallel", G + "tensor_model_parallel_size", backend="megatron"),
    field("trainer.pipeline_parallel", G + "pipeline_model_parallel_size", backend="megatron"),
    field("trainer.context_parallel", G + "context_parallel_size", backend="megatron"),
    field("trainer.expert_parallel", G + "expert_model_parallel_size", backend="megatron"),
    field("trainer.expert_tensor_parallel", G + "expert_tensor_parallel_size", backend="megatron"),
    field("trainer.sequence_parallel", G + "sequence_parallel", backend="megatron"),
    field("trainer.zero_stage", G + "optimizer.use_distributed_optimizer", DISTRIBUTED, backend="megatron"),
    field("trainer.checkpointing", G + "activation_checkpointing", backend="megatron"),
    field("trainer.granularity", G + "recompute_granularity", backend="megatron"),
    field("trainer.offload_optimizer", G + "optimizer.optimizer_cpu_offload", backend="megatron"),
    field("trainer.expert_dispatch", G + "moe_enable_deepep", DEEPEP, backend="megatron"),
    field("trainer.expert_dispatch", G + "moe_token_dispatcher_type", FLEX, backend="megatron"),
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
    field("rollout.rollout_dtype", V + "precision", _PRECISION),
    field("rollout.kv_dtype", V + "kv_cache_dtype", KV_DTYPE),
    field("rollout.prefix_caching", V + "enable_prefix_caching"),
    field("rollout.async_engine", V + "async_engine"),
    field("rollout.max_running", K + "max_num_seqs", OF_A_RANK, "requests that a rank runs at once"),
    field("rollout.engine_token_budget", K + "max_num_batched_tokens", note="tokens per engine step"),
    field("rollout.expert_dispatch", K + "all2all_backend", VLLM_DISPATCH, "how tokens reach experts"),
    field("rollout.speculation", K + "speculative_config.num_speculative_tokens", DRAFTS),
    field("rollout.draft_training", "policy.draft.enabled", note="the draft head is trained with the policy"),
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
    if run.rollout.backend != "sglang":
        return FIELDS
    return (*(entry for entry in FIELDS if not any(key.startswith((V, K)) for key in entry.keys)), *SGLANG)


def _entry(name: str) -> str:
    """The program as a word of bash; the SingleController's script is yours to name."""
    if name == _STREAMING_ENTRY:
        return '"${NEMO_RL_SINGLE_CONTROLLER:?set it to the script that starts the SingleController}"'
    return shlex.quote(name)


@dataclass(frozen=True)
class NemoRl:
    """The adapter."""

    name: str = "nemo_rl"
    title: str = "NeMo-RL"
    fields: tuple[Field, ...] = (*FIELDS, *SGLANG)

    def adapt(self, run: Run, version: str) -> tuple[Run, tuple[Limitation, ...]]:
        """No Ulysses, no virtual pipeline stages, no activation offload; DTensor recomputes in full or not at all."""
        lost: list[Limitation] = []
        left: Offload
        trainer, rollout, dtensor = run.trainer, run.rollout, run.trainer.backend != "megatron"
        if trainer.ulysses > 1:
            trainer = without_ulysses(trainer)
            ring = f"context parallel {trainer.context_parallel}"
            lost.append(Limitation("Ulysses", ring, "ring exchange in place of all-to-all"))
        if run.trainer.virtual_pipeline > 1:
            stages, chunks = run.trainer.pipeline_parallel, run.trainer.virtual_pipeline
            trainer = trainer.having(virtual_pipeline=1)
            lost.append(Limitation(f"{chunks} virtual stages", "plain 1F1B", f"bubble x {chunks} ({stages} stages)"))
        offload, recompute = run.trainer.offload, run.trainer.activation_recompute
        if offload in ("activations", "both"):
            recompute, left = "full", "optimizer" if offload == "both" else "none"
            trainer = trainer.having(offload=left, activation_recompute=recompute)
            lost.append(Limitation("activation offload", "full recompute", _third(run)))
        if dtensor and recompute == "selective":
            trainer = trainer.having(activation_recompute="full")
            lost.append(Limitation("selective recompute with DTensor", "full recompute", _third(run)))
        if dtensor and offload in ("optimizer", "both"):
            lost.append(
                Limitation("optimizer offload alone", "cpu_offload (parameters too)", "parameters come over PCIe")
            )
        width, experts = run.rollout.tensor_parallel, run.rollout.expert_parallel
        if run.rollout.backend == "vllm" and experts not in (1, width):
            rollout = rollout.having(expert_parallel=width)
            lost.append(Limitation(f"rollout expert_parallel {experts}", str(width), "vLLM spans the whole replica"))
        if run.traits.shares_devices and run.trainer.parked is False:
            lost.append(Limitation("trainer states on the GPU during rollout", "offloaded before every refit",
                                   "a few seconds per rl_step; memory is not the problem"))  # fmt: skip
        wide = run.rollout.attention_data_parallel
        if wide > 1 and rollout.expert_parallel == 1 and run.rollout.backend == "vllm":
            # vLLM's data parallel here is expert_parallel_size / tensor_parallel_size (vllm_generation.py:130).
            rollout = rollout.having(expert_parallel=width)
            lost.append(Limitation(f"attention data parallel {wide} with experts on every device",
                                   f"expert parallel {width}", "tokens go to the experts' devices"))  # fmt: skip
        if wide > 1 and run.traits.runs_ahead and run.rollout.backend == "vllm":
            rollout = rollout.having(attention_data_parallel=1)
            lost.append(Limitation(f"attention data parallel {wide} with async GRPO", f"tensor parallel {width}",
                                   "async needs the async engine, which excludes EP other than TP"))  # fmt: skip
        # what its bound counts, whatever the mode is called
        mode = mode_of_staleness(run.staleness, beyond="k_step_off") if run.traits.lag is None else run.mode
        return replace(run, mode=mode, trainer=trainer, rollout=rollout), tuple(lost)

    def emit(self, run: Run, target: Target) -> Emission:
        """A complete configuration: every default of the version, with the decisions in place."""
        run = with_derived(run)
        megatron = run.trainer.backend == "megatron"
        backend = "megatron" if megatron else "fsdp2"
        decided = write_fields(fields_of(run), run, Target(target.table, target.version, backend))
        decided += [s for s in (*switches(run), *placement(run), *algorithm_settings(run)) if target.has(s.key)]
        chosen = {setting.key: setting for setting in decided if setting.value is not None}
        config, drafted = K + "speculative_config.", drafting_of(run, "nemo_rl")
        chosen = with_drafts(chosen, config + "num_speculative_tokens", vllm_drafts(config, drafted), target.has)
        dropped = ("policy.optimizer", "policy.scheduler") if megatron else ()
        settings: dict[str, Setting] = {}
        replaced = sections(chosen)
        for key, spec in target.table.keys(target.version).items():
            if key.startswith(dropped) if dropped else False:
                continue
            if spec.default is not ABSENT and key not in replaced:
                settings[key] = Setting(key, {} if spec.default == "{}" else spec.default)
        settings.update({key: Setting(key, None, "Megatron has its own") for key in dropped})
        settings.update(chosen)
        # Decisions first: a reader sees them without scrolling through the defaults.
        order = [key.split(".")[0] for key in (*chosen, *settings)]
        ranked = sorted(settings.values(), key=lambda s: (order.index(s.key.split(".")[0]), s.key not in chosen))
        entry = "examples/run_vlm_grpo.py" if "data.default.processor" in chosen else "examples/run_grpo.py"
        return Emission(tuple(ranked), (), _STREAMING_ENTRY if run.traits.streams else entry, (), run)

    def render(self, emission: Emission, stem: str, header: Sequence[str]) -> dict[str, str]:
        """``<stem>.yaml`` (self-contained) and ``<stem>.sh``."""
        note = "Keys with a comment were decided; the others are the version's defaults, so that no parent is needed."
        body = [
            'HERE="$(cd "$(dirname "$0")" && pwd)"',
            'cd "${NEMO_RL:?set NEMO_RL to your NeMo-RL checkout}"',
            f'uv run {_entry(emission.entry)} --config "$HERE/{stem}.yaml" "$@"',
        ]
        return {
            f"{stem}.yaml": yaml_text(emission.settings, [*header, note]),
            f"{stem}.sh": script([f"Launches {stem}.yaml on the head of a Ray cluster."], body),
        }

    def detect(self, source: Source) -> float:
        """NeMo-RL's sections, or its entry point."""
        if source.entry.endswith(("run_grpo.py", "run_vlm_grpo.py")):
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
        return Target(table, table.version(version), "megatron" if _on_megatron(source) else "fsdp2")

    def read(self, source: Source, target: Target) -> tuple[Run, frozenset[str]]:
        """Neutral values of the keys over the defaults of the parent config."""
        flat = target.defaults()
        for key in sections(flat) & set(source.keys):
            for old in [name for name in flat if name.startswith(key + ".")]:
                del flat[old]
        alone = {D + "enabled": False, G + "enabled": True} if _absent(source) and _on_megatron(source) else {}
        flat = resolve({**flat, **alone, **source.keys})
        engine = RolloutRun(backend=flat.get(P + "generation.backend"))
        start = Run(trainer=TrainerRun(backend=target.backend), rollout=engine)
        run, used = read_fields(fields_of(start), flat, target, start)
        run = _read_mode(replace(run, architecture=str(flat.get(P + "model_name"))), flat, _absent(source))
        trainer = _read_trainer(_read_budgets(run.trainer, flat), target.backend)
        batch = _read_filtering(_read_lengths(run.batch), flat)
        rollout = _read_engine(run.rollout, flat).having(speculation=read_vllm(flat, K + "speculative_config."))
        skips = target.version in versions_of("0.7-", target.table.versions)
        scored = not (skips and flat.get("loss_fn.force_on_policy_ratio") and flat.get(_CHECKED) is None)
        run = replace(run, batch=batch, trainer=trainer, rollout=rollout, old_policy=scored)
        return run.completed(), frozenset(used | _ALSO_READ)


def _third(run: Run) -> str:
    third = f"{human_seconds(run.training_s / 3)} per rl_step" if run.training_s else "a third of the training time"
    return f"up to {third} more"


# -- reading ----------------------------------------------------------------------------------------------------------

_CHECKED = "grpo.seq_logprob_error_threshold"
"""Where it is stated, the policy is scored whatever the ratio is taken as (algorithms/opd.py:115)."""
_ALSO_READ = frozenset(
    {
        _CHECKED,
        P + "model_name", D + "enabled", G + "enabled", "cluster.num_nodes", "cluster.gpus_per_node",
        P + "generation.colocated.enabled", P + "generation.colocated.resources.num_nodes",
        P + "generation.colocated.resources.gpus_per_node", ASYNC + "enabled", ASYNC + "max_trajectory_age_steps",
        IN_FLIGHT,
        P + "sequence_packing.train_mb_tokens", P + "sequence_packing.logprob_mb_tokens",
        P + "dynamic_batching.train_mb_tokens", P + "dynamic_batching.logprob_mb_tokens",
        "loss_fn.reference_policy_kl_penalty", "grpo.use_dynamic_sampling", "loss_fn.force_on_policy_ratio",
        "loss_fn.use_importance_sampling_correction", P + "make_sequence_length_divisible_by",
        "grpo.batch_multiplier", "grpo.max_rollout_turns", "data.default.processor",
        "grpo.skip_reference_policy_logprobs_calculation", G + "peft.enabled", G + "peft.dim",
        D + "lora_cfg.enabled", D + "lora_cfg.dim",
    }
)  # fmt: skip


def _read_budgets(trainer: TrainerRun, flat: Flat) -> TrainerRun:
    """Token budgets of whichever of packing and dynamic batching is on."""
    section = "sequence_packing" if trainer.packing else "dynamic_batching"
    on = bool(trainer.packing or trainer.dynamic_batching)
    train, scoring = flat.get(f"{P}{section}.train_mb_tokens"), flat.get(f"{P}{section}.logprob_mb_tokens")
    return trainer.having(
        token_budget=int(train) if on and isinstance(train, int | float) else None,
        scoring_token_budget=int(scoring) if on and isinstance(scoring, int | float) else None,
        dynamic=on,
    )


def _read_lengths(batch: BatchFacts) -> BatchFacts:
    """Prompt and response caps: NeMo-RL limits their sum; a prompt's share of it is assumed (an eighth)."""
    total, response = batch.context_tokens or 1, batch.max_response_tokens or 1
    prompt = total - response if total > response else max(min(1024, total // 8), 1)
    return replace(batch, max_prompt_tokens=prompt, max_response_tokens=max(total - prompt, 1))


def _read_filtering(batch: BatchFacts, flat: Flat) -> BatchFacts:
    """Prompts of a round of rollouts where groups are filtered, whole rounds (algorithms/grpo.py:1751), and turns."""
    share = float(flat.get("grpo.batch_multiplier") or 1.0) if flat.get("grpo.use_dynamic_sampling") else 1.0
    generated = round(batch.prompts * share) if share > 1.0 else None
    turns = int(flat.get("grpo.max_rollout_turns") or 1)
    return replace(batch, generated_prompts=generated, generation_batch=generated, turns=turns)


_PARENT = "grpo_math_1B"
"""The shipped configuration whose values are known, and which others name as theirs."""


def _absent(source: Source) -> tuple[str, ...]:
    """Bases of a file that nobody has here, other than the one whose values are known."""
    return tuple(base for base in source.bases if base != _PARENT)


def _on_megatron(source: Source) -> bool:
    """Whether Megatron trains: as is stated, or as a base that is not here is named (``grpo_math_8B_megatron``)."""
    ours, theirs = (source.keys.get(section + "enabled") for section in (G, D))
    named = theirs is not True and any("megatron" in base for base in _absent(source))
    return named if ours is None else ours is True


def _read_mode(run: Run, flat: Flat, absent: Sequence[str]) -> Run:
    """Devices, mode, algorithm, and what rules ask."""
    nodes, per_node = int(flat.get("cluster.num_nodes") or 1), int(flat.get("cluster.gpus_per_node") or 1)
    total = nodes * per_node
    colocated = bool(flat.get(P + "generation.colocated.enabled", True))
    overlapped = bool(flat.get(ASYNC + "enabled"))
    age = int(flat.get(ASYNC + "max_trajectory_age_steps") or 1)
    own_nodes = flat.get(P + "generation.colocated.resources.num_nodes")
    own_gpus = flat.get(P + "generation.colocated.resources.gpus_per_node")
    rollout = total if colocated else int(own_nodes or 1) * int(own_gpus or (per_node if own_nodes else 0))
    trainer = total if colocated else max(total - rollout, 0)
    mode = mode_of_staleness(age, beyond="k_step_off") if overlapped else mode_of_staleness(0, shares_devices=colocated)
    if flat.get(STREAM + "min_groups_for_streaming_train") is not None:
        mode = "streaming"
    return replace(
        run,
        mode=mode,
        staleness=age if overlapped else 0,
        in_flight=bool(flat.get(IN_FLIGHT)) if overlapped else None,
        devices=total,
        nodes=nodes,
        devices_per_node=per_node,
        algorithm="dapo" if flat.get("grpo.use_dynamic_sampling") else "grpo",
        reference=bool(flat.get("loss_fn.reference_policy_kl_penalty")),
        trainer=run.trainer.having(devices=trainer, parked=colocated or None, lora_rank=_lora_rank(run, flat)),
        rollout=run.rollout.having(devices=rollout),
        facts=NemoRlFacts(
            colocated=colocated,
            async_enabled=overlapped,
            importance_sampling=bool(flat.get("loss_fn.use_importance_sampling_correction")),
            on_policy_ratio=bool(flat.get("loss_fn.force_on_policy_ratio")),
            train_pads_to=flat.get(P + "make_sequence_length_divisible_by"),
            generation_nodes=own_nodes,
            generation_gpus_per_node=own_gpus,
            both_backends=bool(flat.get(D + "enabled")) == bool(flat.get(G + "enabled")),
            beside=tuple(
                ("defaults", f"{base} is not here: what it states is taken as {_PARENT} states it") for base in absent
            ),
        ),
    )


def _lora_rank(run: Run, flat: Flat) -> int | None:
    """The rank of adapters, where they are switched on."""
    section = G + "peft." if run.trainer.backend == "megatron" else D + "lora_cfg."
    return int(flat.get(section + "dim") or 0) or None if flat.get(section + "enabled") else None


def _read_trainer(trainer: TrainerRun, backend: str) -> TrainerRun:
    """What the two trainers say in different words."""
    if backend == "megatron":
        return trainer.having(
            activation_recompute=(trainer.granularity or "full") if trainer.checkpointing else "none",
            offload="optimizer" if trainer.offload_optimizer else "none",
        )
    return trainer.having(
        zero_stage=3,
        shard_size=trainer.devices // trainer.replicas if trainer.replicas else 0,
        offload="optimizer" if trainer.offload_all else "none",
    )


def _read_engine(rollout: RolloutRun, flat: Flat) -> RolloutRun:
    """vLLM's expert parallel spans tensor and data parallel; what the file has is kept beside it."""
    if rollout.backend != "vllm":
        return rollout
    experts, narrow = rollout.expert_parallel, int(flat.get(V + "tensor_parallel_size") or 1)
    ranks = max(experts // narrow, 1)
    return rollout.having(
        own_tensor_parallel=narrow,
        own_expert_parallel=experts,
        attention_data_parallel=ranks,
        max_running=rollout.max_running and ranks * rollout.max_running,
        expert_parallel=rollout.tensor_parallel if experts > 1 else 1,
    )


ADAPTER = NemoRl()
