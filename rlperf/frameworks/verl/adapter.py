"""verl: hydra YAML over the trainer's default config; FSDP and Megatron; versions 0.4 to main.

Batch sizes count prompts; token budgets are per GPU and grow by Ulysses or context parallel at run time.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlperf.errors import ExportError
from rlperf.frameworks.adapter import Emission, Limitation, Source
from rlperf.frameworks.drafting import DRAFTS, with_drafts
from rlperf.frameworks.engine_arguments import (
    OF_A_RANK,
    SGLANG_CHUNK,
    SGLANG_DISPATCH,
    VLLM_DISPATCH,
    sglang_experts,
    sglang_prefill,
    whole_prompts,
)
from rlperf.frameworks.fields import (
    CHECKPOINTING,
    COMPUTE_DTYPE,
    DEEPEP,
    DISTRIBUTED,
    ENGINE_DTYPE,
    FLEX,
    KV_DTYPE,
    LORA_RANK,
    NEGATED,
    OPTIMIZER,
    QUANTIZED_SGLANG,
    QUANTIZED_VLLM,
    RECOMPUTE,
    RESHARD,
    SAME,
    SGLANG_KV_DTYPE,
    TOKENS_PER_DEVICE,
    Field,
    Setting,
    Target,
    Unit,
    elsewhere,
    field,
    megatron_degrees,
    quantized,
    read_fields,
    resolve,
    write_fields,
    zero_as,
)
from rlperf.frameworks.keytable import flatten, key_table
from rlperf.frameworks.nearest import without_pipeline, without_ulysses
from rlperf.frameworks.run import RolloutRun, Run, TrainerRun
from rlperf.frameworks.verl.reading import (
    ALSO_READ,
    RECIPE_DEFAULTS,
    VerlFacts,
    algorithm_of,
    has_reference,
    is_async_recipe,
    other_engines,
    quantised_training,
    read_batch,
    read_drafts,
    read_placement,
    read_trainer,
    with_old_keys,
)
from rlperf.frameworks.verl.settings import (
    NO_SYNC,
    OLD_REPLAY,
    OLD_WORKERS,
    REPLAY,
    A,
    F,
    G,
    H,
    M,
    R,
    T,
    algorithm_settings,
    at_least,
    critic_settings,
    drafts,
    entry_of,
    is_noise,
    logging_settings,
    megatron_settings,
    placement,
    scoring,
    with_derived,
)
from rlperf.frameworks.writing import script, yaml_text
from rlperf.specs.pool import Offload
from rlperf.units import human_seconds

_ENGINE_TP = Unit(
    lambda value, run: int(value) * run.rollout.attention_data_parallel,
    lambda value, run: value // run.rollout.attention_data_parallel,
)
_WHOLE_IN_090 = "as of 0.9.1: 0.9.0 holds gradients whole between microbatches, 4 bytes a parameter more"
_LARGER = Unit(lambda value, run: max(int(value), run.trainer.ulysses), lambda value, _: value)
_KV = Unit(KV_DTYPE.read, lambda value, run: None if value == "bf16" else KV_DTYPE.write(value, run))
_SGLANG_KV = Unit(KV_DTYPE.read, lambda value, run: None if value == "bf16" else SGLANG_KV_DTYPE.write(value, run))
_APART = Unit(lambda value, _: int(bool(value)), lambda value, _: bool(value))
"""One engine of a group reads (workers/rollout/sglang_rollout/sglang_pd_replica.py:62 of 0.8.0); as many as groups."""
_QUANTIZED = quantized("fp8")
"""Both engines refuse any other (vllm_async_server.py:1240, async_sglang_server.py:312 of 0.9.1; so since 0.7.0)."""
_BACKEND = Unit(lambda value, _: "megatron" if value == "megatron" else "fsdp2", lambda value, _: value)

S = f"{R}engine_kwargs.sglang."
HYBRID = "trainer.v1.separate_async.hybrid_rollout.enable_switch"
_WRITERS = f"{R}disaggregation.decode_replicas"
GROUPED = "0.7"
"""The release whose trainer forwards grouped (workers/actor/dp_actor.py:128 of 0.7.1; gone with it in 0.8.0)."""
VLLM_ALONE = tuple(R + name for name in ("max_num_batched_tokens", "enable_chunked_prefill", "enable_prefix_caching"))
"""SGLang is not told these (workers/rollout/sglang_rollout/async_sglang_server.py:315 of 0.9.1, so since 0.6.1)."""
V = f"{R}engine_kwargs.vllm."
_REPLACES = (
    ("rollout.attention_data_parallel", S + "dp_size", SAME),
    ("rollout.expert_parallel", S + "ep_size", SAME),
    ("rollout.memory_fraction", S + "mem_fraction_static", SAME),
    ("rollout.max_running", S + "max_running_requests", SAME),
    ("rollout.cuda_graphs", S + "disable_cuda_graph", NEGATED),
    ("rollout.rollout_dtype", S + "quantization", QUANTIZED_SGLANG),
    ("batch.context_tokens", V + "max_model_len", SAME),
    ("rollout.memory_fraction", V + "gpu_memory_utilization", SAME),
    ("rollout.max_running", V + "max_num_seqs", OF_A_RANK),
    ("rollout.engine_token_budget", V + "max_num_batched_tokens", SAME),
    ("rollout.chunked_prefill", V + "enable_chunked_prefill", SAME),
    ("rollout.prefix_caching", V + "enable_prefix_caching", SAME),
    ("rollout.cuda_graphs", V + "enforce_eager", NEGATED),
    ("rollout.rollout_dtype", V + "quantization", QUANTIZED_VLLM),
)
"""Arguments that are spread last, over those that verl passes of its own keys (async_sglang_server.py:337,
vllm_async_server.py:349 of 0.9.1): read where they stand, and written in verl's own keys."""


def _sglang(name: str) -> str:
    return S + name


FIELDS: tuple[Field, ...] = (
    field("batch.prompts_per_step", "data.train_batch_size", note="prompts; x rollout.n = samples per rl_step"),
    field("batch.group_size", R + "n", note="samples per prompt"),
    field("batch.mini_batch", A + "ppo_mini_batch_size", note="prompts per optimizer update"),
    field("batch.max_prompt_tokens", "data.max_prompt_length"),
    field("batch.max_response_tokens", "data.max_response_length"),
    field("batch.context_tokens", R + "max_model_len", note="prompt + response; null: the model's maximum"),
    field("batch.max_positions", M + "override_config.max_position_embeddings", note="of its config.json otherwise"),
    field("trainer.backend", A + "strategy", _BACKEND),
    field("trainer.ulysses", A + "ulysses_sequence_parallel_size", backend="fsdp2", note="divides heads"),
    field("trainer.ulysses", F + "ulysses_sequence_parallel_size", _LARGER, backend="fsdp2", read_only=True),
    field("trainer.shard_size", F + "fsdp_size", zero_as(-1), "-1: all GPUs; less: HSDP", backend="fsdp2"),
    field("trainer.zero_stage", F + "reshard_after_forward", RESHARD, backend="fsdp2"),
    field("trainer.activation_recompute", M + "enable_gradient_checkpointing", CHECKPOINTING, backend="fsdp2"),
    field("trainer.parks_optimizer", F + "optimizer_offload", note="waits on the host", backend="fsdp2"),
    field("trainer.parks_parameters", F + "param_offload", note="states wait on the host", backend="fsdp2"),
    field("trainer.offload_activations", M + "enable_activation_offload", backend="fsdp2"),
    field("trainer.compute_dtype", F + "dtype", COMPUTE_DTYPE, backend="fsdp2"),
    *megatron_degrees(G),
    field("trainer.zero_stage", G + "use_distributed_optimizer", DISTRIBUTED, backend="megatron"),
    field(
        "trainer.activation_recompute",
        f"{T}recompute_granularity {M}gradient_checkpointing_kwargs.activations_checkpoint_granularity",
        RECOMPUTE,
        backend="megatron",
    ),
    field("trainer.first_stage_layers", T + "num_layers_in_first_pipeline_stage", backend="megatron"),
    field("trainer.last_stage_layers", T + "num_layers_in_last_pipeline_stage", backend="megatron"),
    field("trainer.expert_dispatch", T + "moe_enable_deepep", DEEPEP, backend="megatron"),
    field("trainer.expert_dispatch", T + "moe_token_dispatcher_type", FLEX, backend="megatron"),
    field("trainer.parks_optimizer", G + "optimizer_offload", note="waits on the host", backend="megatron"),
    field("trainer.offload_optimizer", H + "optimizer_cpu_offload", note="updated on the host", backend="megatron"),
    field("trainer.parks_parameters", G + "param_offload", note="states wait on the host", backend="megatron"),
    field("trainer.compute_dtype", G + "dtype", COMPUTE_DTYPE, backend="megatron"),
    *elsewhere("trainer.parked", "param_offload, optimizer_offload"),
    field("trainer.packing", M + "use_remove_padding", note="sequences packed without padding"),
    field("trainer.epochs", A + "ppo_epochs", note="times that a batch is trained on"),
    field("trainer.lora_rank", M + "lora_rank", LORA_RANK, backend="fsdp2"),
    field("trainer.lora_rank", M + "lora.rank", LORA_RANK, "lora_rank is FSDP's", backend="megatron"),
    field("trainer.whole_gradients", F + NO_SYNC, note="0.9.1", backend="fsdp2"),
    field("trainer.chunked_loss", M + "use_fused_kernels", note="no full logits tensor"),
    field("trainer.optimizer", A + "optim.optimizer", OPTIMIZER, note="adam, or Megatron's muon", backend="megatron"),
    field("trainer.router_replay", f"{G}router_replay.mode {OLD_REPLAY}", REPLAY, "experts as recorded",
          backend="megatron"),
    field("trainer.shared_prefix", A + "use_prefix_grouper", note="a group's prompt once", backend="fsdp2",
          until=GROUPED),
    field("trainer.freeze_vision", A + "freeze_vision_tower", note="the vision tower is not trained"),
    field("trainer.dynamic", A + "use_dynamic_bsz"),
    field("trainer.token_budget", A + "ppo_max_token_len_per_gpu", TOKENS_PER_DEVICE),
    field("trainer.microbatch", A + "ppo_micro_batch_size_per_gpu", note="samples"),
    field("trainer.scoring_dynamic", R + "log_prob_use_dynamic_bsz"),
    field("trainer.scoring_token_budget", R + "log_prob_max_token_len_per_gpu", TOKENS_PER_DEVICE),
    field("trainer.scoring_microbatch", R + "log_prob_micro_batch_size_per_gpu", note="samples"),
    field("rollout.backend", R + "name"),
    field("rollout.attention_data_parallel", R + "data_parallel_size", note="attention data parallel in a replica"),
    field("rollout.tensor_parallel", R + "tensor_model_parallel_size", _ENGINE_TP, "replica = TP x DP x PP GPUs"),
    field("rollout.pipeline_parallel", R + "pipeline_model_parallel_size"),
    field("rollout.expert_parallel", R + "expert_parallel_size", note="1, or TP x DP of a replica"),
    field("rollout.memory_fraction", R + "gpu_memory_utilization", note="share of GPU memory for the engine"),
    field("rollout.max_running", R + "max_num_seqs", OF_A_RANK, "requests that a rank runs at once"),
    field("rollout.engine_token_budget", R + "max_num_batched_tokens", note="tokens per engine step"),
    field("rollout.chunked_prefill", R + "enable_chunked_prefill"),
    field("rollout.prefix_caching", R + "enable_prefix_caching"),
    field("rollout.cuda_graphs", R + "enforce_eager", NEGATED),
    field("rollout.rollout_dtype", R + "dtype", ENGINE_DTYPE),
    field("rollout.rollout_dtype", R + "quantization", _QUANTIZED),
    field("rollout.prefill_replicas", R + "disaggregation.enabled", _APART, "groups of engines: one reads prompts"),
    field("rollout.borrows", HYBRID, note="engines on the trainer's GPUs while it waits"),
    field("rollout.speculation", M + "mtp.num_speculative_tokens", DRAFTS),
    field("rollout.draft_training", M + "mtp.enable_train", note="the draft head is trained with the policy"),
    field("rollout.engine_token_budget", S + "chunked_prefill_size", SGLANG_CHUNK, "engine's own argument"),
    field("rollout.prefix_caching", S + "disable_radix_cache", NEGATED, "engine's own argument"),
    field("rollout.expert_dispatch", V + "all2all_backend", VLLM_DISPATCH, "engine's own argument"),
    field("rollout.expert_dispatch", S + "moe_a2a_backend", SGLANG_DISPATCH, "engine's own argument"),
    field("rollout.kv_dtype", V + "kv_cache_dtype", _KV, "engine's own argument"),
    field("rollout.kv_dtype", S + "kv_cache_dtype", _SGLANG_KV, "engine's own argument"),
    *(field(name, key, unit, "replaces verl's own", read_only=True) for name, key, unit in _REPLACES),
)  # fmt: skip


def _writers(rollout: RolloutRun) -> list[Setting]:
    """Engines that write beside each that reads prompts."""
    readers, replicas = rollout.prefill_replicas or 0, rollout.data_parallel or 1
    return [Setting(_WRITERS, replicas // readers - 1, "engines that write, for each that reads")] if readers else []


def _lending(run: Run) -> Run:
    """The run without a lent trainer where nothing tells what lending is worth, which a rule then says."""
    told = run.traits.lends(in_flight=False) and run.batch.turns == 1
    if told or not run.rollout.borrows or not isinstance(run.facts, VerlFacts):
        return run
    return replace(run, rollout=run.rollout.having(borrows=False), facts=replace(run.facts, hybrid_uncounted=True))


@dataclass(frozen=True)
class Verl:
    """The adapter."""

    name: str = "verl"
    title: str = "verl"
    fields: tuple[Field, ...] = FIELDS

    def adapt(self, run: Run, version: str) -> tuple[Run, tuple[Limitation, ...]]:
        """Mode, recompute, offload and engine parallelism as this version can express them."""
        lost: list[Limitation] = []
        trainer, backend = run.trainer, run.trainer.backend or "fsdp2"
        if backend == "fsdp2" and run.trainer.activation_recompute == "selective":
            trainer = trainer.having(activation_recompute="full")
            cost = "up to a third of the training time more"
            if run.training_s:
                cost = f"up to {human_seconds(run.training_s / 3)} per rl_step more (a third of training)"
            lost.append(Limitation("selective recompute with FSDP", "full recompute", cost))
        if backend == "fsdp2" and run.trainer.context_parallel > 1:
            ring = run.trainer.context_parallel
            trainer = trainer.having(ulysses=run.trainer.sequence_split, context_parallel=1)
            lost.append(Limitation(f"ring context parallel {ring}", "Ulysses of the same size", "all-to-all, not ring"))
        if backend == "megatron" and run.trainer.ulysses > 1:
            trainer = without_ulysses(trainer)
            joined = f"context parallel {trainer.context_parallel}"
            lost.append(Limitation("Ulysses with Megatron", joined, "ring, not all-to-all"))
        if backend == "megatron" and run.trainer.offload in ("activations", "both"):
            left: Offload = "optimizer" if run.trainer.offload == "both" else "none"
            trainer = trainer.having(offload=left, activation_recompute="full")
            lost.append(Limitation("activation offload with Megatron", "full recompute", "a third of training more"))
        if run.algorithm == "dapo" and not at_least(version, "0.9"):
            lost.append(Limitation("dynamic sampling", "groups without a signal are trained on", "wasted samples"))
        if run.trainer.offload in ("optimizer", "both") and (backend == "fsdp2" or not at_least(version, "0.6")):
            # `optimizer_offload` parks the optimizer between the phases; the update brings it back to the device.
            trainer = trainer.having(offload="activations" if run.trainer.offload == "both" else "none")
            lost.append(Limitation("optimizer updated on the host", "optimizer on the device", "12 bytes a parameter"))
        if trainer.shared_prefix and version != GROUPED:
            trainer = trainer.having(shared_prefix=False)
            lost.append(Limitation("a shared prefix", "every response computes its prompt",
                                   f"verl {version} reads use_prefix_grouper in no worker"))  # fmt: skip
        rollout = self._engine(run.rollout, version, lost)
        self._mode(run, version, lost)
        return replace(run, trainer=trainer, rollout=rollout), tuple(lost)

    def _engine(self, rollout: RolloutRun, version: str, lost: list[Limitation]) -> RolloutRun:
        """Rollout parallelism: EP is 1 or TP x DP; data and expert parallel keys exist since 0.6; PP never."""
        experts, attention = rollout.expert_parallel, rollout.attention_data_parallel
        width, depth = rollout.tensor_parallel, rollout.pipeline_parallel
        if not at_least(version, "0.6") and (experts > 1 or attention > 1):
            rollout = rollout.having(expert_parallel=1, attention_data_parallel=1)
            asked = f"expert parallel {experts}, attention data parallel {attention} in the engine"
            lost.append(Limitation(asked, f"tensor parallel {width}", f"verl {version} has no keys for it"))
        elif experts > 1 and experts != width:
            rollout = rollout.having(expert_parallel=width)
            lost.append(
                Limitation(f"rollout expert_parallel {experts}", f"{width} (= TP x DP)", "verl accepts no other")
            )
        if depth > 1:
            rollout = without_pipeline(rollout)
            lost.append(Limitation(f"rollout pipeline_parallel {depth}", f"tensor parallel {width * depth}",
                                   "more all-reduce in decode; verl's engines refuse PP"))  # fmt: skip
        return rollout

    def _mode(self, run: Run, version: str, lost: list[Limitation]) -> None:
        mode = run.traits
        if mode.shares_devices:
            return
        if not at_least(version, "0.7"):
            raise ExportError(
                f"mode {mode.name} needs a rollout pool of its own, which the {version} package lacks",
                f"verl=={version}",
                {"nearest": "verl 0.9 (trainer.v1.trainer_mode=separate_async), or modes: colocated in the job"},
            )
        if mode.lag is None and mode.bound_counts == "batches":
            lost.append(Limitation(f"mode {mode.name}, which counts batches", "a bound that counts prompts",
                                   "not slower, but prompts that take long are trained late"))  # fmt: skip
        if not mode.overlaps:
            lost.append(Limitation("synchronous disaggregated (staleness 0)", "one step off (staleness 1)",
                                   "not slower, but samples are one policy version behind"))  # fmt: skip

    def emit(self, run: Run, target: Target) -> Emission:
        """All settings of a run."""
        run = with_derived(run)
        own = f"{R}engine_kwargs.{run.rollout.backend}."
        settings = [s for s in write_fields(self.fields, run, target) if not is_noise(s, target)]
        settings = [s for s in settings if "engine_kwargs." not in s.key or s.key.startswith(own)]
        if target.version == "0.9" and target.backend == "fsdp2" and not run.trainer.whole_gradients:
            settings = [replace(s, why=_WHOLE_IN_090) if s.key == A + "strategy" else s for s in settings]
        if run.rollout.backend == "sglang":
            settings = [s for s in settings if s.key not in VLLM_ALONE] + whole_prompts(run, _sglang)
        extra = [
            *placement(run, target.version),
            *algorithm_settings(run, target.version),
            *megatron_settings(run, target),
            *scoring(run, target),
            *logging_settings(run),
            *([Setting(R + "enable_rollout_routing_replay", True)] if run.trainer.router_replay == "R3" else []),
            *_writers(run.rollout),
        ]
        chosen = {setting.key: setting for setting in settings}
        chosen = with_drafts(chosen, M + "mtp.num_speculative_tokens", drafts(run), target.has)
        chosen.update({s.key: s for s in extra if target.has(s.key)})
        if run.algorithm == "ppo":
            theirs = with_derived(replace(run, trainer=run.trainer.having(**dict(run.critic))))
            actors = [s for s in (*write_fields(self.fields, theirs, target), *megatron_settings(theirs, target))
                      if not is_noise(s, target)]  # fmt: skip
            chosen |= {s.key: s for s in critic_settings(theirs, actors, target) if target.has(s.key)}
        entry, base = entry_of(run, target)
        return Emission(tuple(chosen.values()), (), entry, base, run)

    def render(self, emission: Emission, stem: str, header: Sequence[str]) -> dict[str, str]:
        """``<stem>.yaml`` (hydra primary config) and ``<stem>.sh``."""
        bases = [f"  - {line}" for line in emission.base]
        recipe = emission.entry.rpartition(".")[0]
        search = [f"pkg://{recipe}.config"] if any("async_ppo" in b or "one_step" in b for b in emission.base) else []
        search.append("pkg://verl.trainer.config")
        top = ["hydra:", f"  searchpath: [{', '.join(search)}]", "defaults:", *bases, "  - _self_"]
        # The config group stands in the defaults list, not among the keys.
        settings = [setting for setting in emission.settings if setting.key != "model_engine"]
        yours = (("TRAIN_FILES", "data.train_files"), ("VAL_FILES", "data.val_files"), ("MODEL_PATH", M + "path"))
        given = {setting.key: setting.value for setting in settings}
        named = [(variable, key) for variable, key in yours if isinstance(given.get(key), str)]
        overrides = " ".join(f'${{{variable}:+"{key}=${variable}"}}' for variable, key in named)
        body = [
            'cd "$(dirname "$0")"',
            f"# yours, where they are set: {', '.join(variable for variable, _ in named)}",
            f'python3 -m {shlex.quote(emission.entry)} --config-path "$PWD" --config-name {stem} \\',
            f'  {overrides} "$@"',
        ]
        return {
            f"{stem}.yaml": yaml_text(settings, header, top=top),
            f"{stem}.sh": script([f"Launches {stem}.yaml on the head of a Ray cluster."], body),
        }

    def detect(self, source: Source) -> float:
        """verl's sections, or its entry point."""
        if source.entry.startswith("verl."):
            return 1.0
        return (
            0.95 if any(key.startswith(("actor_rollout_ref.", "+actor_rollout_ref.")) for key in source.keys) else 0.0
        )

    def target(self, source: Source, version: str | None) -> Target:
        """Megatron where the config group, the base config or the strategy says so; the newest version that fits."""
        table = key_table(self.name)
        megatron = (
            source.keys.get("model_engine") == "megatron"
            or any("megatron" in base for base in source.bases)
            or source.keys.get(A + "strategy") == "megatron"
        )
        return Target(table, table.version(version), "megatron" if megatron else "fsdp2")

    def read(self, source: Source, target: Target) -> tuple[Run, frozenset[str]]:
        """Neutral values of the keys, with this version's defaults below them."""
        flat = target.defaults(target.backend)
        if not is_async_recipe(source):
            flat = {key: value for key, value in flat.items() if not key.startswith(("async_training.", "rollout."))}
        else:
            flat.update(RECIPE_DEFAULTS)
        flat = resolve({**flat, **flatten(source.keys)})
        sglang = flat.get(R + "name") == "sglang"
        others = V if sglang else S
        flat = {key: value for key, value in flat.items()
                if not (key.startswith(others) or (sglang and key in VLLM_ALONE))}  # fmt: skip
        run, used = read_fields(self.fields, flat, target, Run(trainer=TrainerRun(backend=target.backend)))
        run = read_placement(flat, replace(run, trainer=read_trainer(flat, run.trainer)), source)
        run = replace(
            run,
            architecture=str(flat[M + "path"]),
            algorithm=algorithm_of(flat),
            reference=has_reference(flat),
            old_policy=not flat.get("algorithm.rollout_correction.bypass_mode"),
            batch=read_batch(flat, run.batch, whole=not at_least(target.version, "0.9")),
            trainer=with_old_keys(flat, run.trainer),
            rollout=run.rollout.having(
                speculation=read_drafts(flat, run),
                **({**sglang_experts(run), **sglang_prefill(flat, _sglang)} if sglang else {}),
            ),
        )
        if target.version == OLD_WORKERS and target.backend == "megatron":
            run = replace(run, trainer=run.trainer.having(router_replay=REPLAY.read(flat.get(OLD_REPLAY), run)))
        whole = _lending(run.completed())
        if whole.rollout.prefill_replicas:
            group = 1 + int(flat.get(_WRITERS) or 1)
            readers = max((whole.rollout.data_parallel or 1) // group, 1)
            whole = replace(whole, rollout=whole.rollout.having(prefill_replicas=readers))
        whole = replace(whole, wrong=(*whole.wrong, *other_engines(source), *quantised_training(flat)))
        return whole, frozenset(used | ALSO_READ | {_WRITERS})


__all__ = ["ADAPTER", "VerlFacts"]  # rules find the facts of a framework in its module
ADAPTER = replace(Verl())
