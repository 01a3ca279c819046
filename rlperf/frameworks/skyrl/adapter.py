"""SkyRL: ``key=value`` words over dataclasses (skyrl-train: over a YAML); FSDP2 and Megatron trainers, vLLM engines.

Batch sizes count prompts; ``max_tokens_per_microbatch`` counts tokens of a data-parallel rank, whatever splits them.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlperf.errors import ExportError
from rlperf.frameworks.adapter import Emission, Limitation, Source, node_shape
from rlperf.frameworks.drafting import drafting_of, drafts_by, vllm_drafts, with_drafts
from rlperf.frameworks.engine_arguments import OF_A_RANK, VLLM_DISPATCH
from rlperf.frameworks.fields import (
    DEEPEP,
    ETP,
    FLEX,
    KV_DTYPE,
    LORA_RANK,
    NEGATED,
    QUANTIZED_VLLM,
    RECOMPUTE,
    RESHARD,
    Field,
    Setting,
    Target,
    Unit,
    elsewhere,
    field,
    one_as,
    read_fields,
    replay_as,
    resolve,
    write_fields,
    zero_as,
)
from rlperf.frameworks.hub import hub_name
from rlperf.frameworks.keytable import key_table
from rlperf.frameworks.nearest import (
    samples_within_budget,
    with_stage_ends,
    without_activation_offload,
    without_selective_recompute,
)
from rlperf.frameworks.nearest import without_ulysses as ring
from rlperf.frameworks.phases import enough_epochs
from rlperf.frameworks.run import BatchFacts, RolloutRun, Run, TrainerRun
from rlperf.frameworks.skyrl.reading import (
    ALSO_READ,
    OLD,
    OLDER,
    PACKAGE,
    A,
    E,
    F,
    G,
    H,
    K,
    L,
    P,
    SkyrlFacts,
    T,
    X,
    read_engine,
    read_rest,
    read_trainer,
)
from rlperf.frameworks.writing import comment, hydra_value, script, shell_word, yaml_scalar

ASYNC, PACKAGE_ASYNC = "examples.train.fully_async.main_fully_async", "examples.fully_async.main_fully_async"
"""In no package, and so by analogy: skyrl 0.4 names ``examples/train/fully_async/main_fully_async_sim.py``
(train/fully_async_trainer_sim.py:10); skyrl-train 0.3.1 has its examples in ``examples/`` (README.md:69, 84)."""

_UNSHIPPED = ("# yours to check: no package ships this program, so its name stands here by analogy",)
_EXTRAS = {(False, False): "fsdp", (False, True): "megatron", (True, False): "vllm", (True, True): "mcore"}
"""Extras of the package (skyrl-train's, Megatron's) that hold what trains and rolls out: METADATA of each."""
_ENGINE_TP = Unit(
    lambda value, run: int(value) * run.rollout.attention_data_parallel,
    lambda value, run: value // run.rollout.attention_data_parallel,
)
_BACKEND = Unit(lambda value, _: "fsdp2" if str(value).startswith("fsdp") else value,
                lambda value, _: "fsdp" if value == "fsdp2" else value)  # fmt: skip
_STEPS, _MERGED = "generator.step_wise_trajectories", "generator.merge_stepwise_output"
_WISE = Unit(lambda value, _: bool(value), lambda value, _: value or None)
_BUDGET = Unit(lambda value, _: int(value) if int(value) > 0 else None, lambda value, _: value)
_QUANTIZED = replace(QUANTIZED_VLLM, takes=frozenset({"bf16", "fp8"}))
"""Of one checkpoint that trainer and engines share, in 16 bits, vLLM makes no other types by itself."""
_KV = Unit(KV_DTYPE.read, lambda value, run: None if value == "bf16" else KV_DTYPE.write(value, run))

FIELDS: tuple[Field, ...] = (
    *elsewhere("rollout.devices", "num_engines x TP x DP x PP"),
    *elsewhere("trainer.parked", "placement.colocate_all, optimizer_config.offload_after_step"),
    field("batch.prompts_per_step", T + "train_batch_size", note="prompts; x n_samples_per_prompt = samples per step"),
    field("batch.group_size", "generator.n_samples_per_prompt"),
    field("batch.mini_batch", T + "policy_mini_batch_size", note="prompts per optimizer update"),
    field("batch.max_prompt_tokens", T + "max_prompt_length"),
    field("batch.max_response_tokens", "generator.sampling_params.max_generate_length", note="of each turn"),
    field("batch.turns", "generator.max_turns"),
    field("batch.context_tokens", f"{X}max_model_len {OLD}engine_init_kwargs.max_model_len", note="the engine's own"),
    field("trainer.backend", T + "strategy", _BACKEND),
    field("trainer.ulysses", P + "sequence_parallel_size", note="divides heads; Megatron takes 1"),
    field("trainer.shard_size", F + "fsdp_size", zero_as(-1), "-1: all GPUs; less: HSDP", backend="fsdp2"),
    field("trainer.zero_stage", F + "reshard_after_forward", RESHARD, backend="fsdp2"),
    field("trainer.offload_all", F + "cpu_offload", note="parameters and optimizer on the host", backend="fsdp2"),
    field("trainer.checkpointing", T + "gradient_checkpointing"),
    field("trainer.granularity", K + "recompute_granularity", RECOMPUTE, backend="megatron"),
    field("trainer.tensor_parallel", G + "tensor_model_parallel_size", backend="megatron"),
    field("trainer.pipeline_parallel", G + "pipeline_model_parallel_size", backend="megatron"),
    field("trainer.virtual_pipeline", K + "virtual_pipeline_model_parallel_size", one_as(None), backend="megatron"),
    field("trainer.first_stage_layers", K + "num_layers_in_first_pipeline_stage", backend="megatron"),
    field("trainer.last_stage_layers", K + "num_layers_in_last_pipeline_stage", backend="megatron"),
    field("trainer.context_parallel", G + "context_parallel_size", backend="megatron"),
    field("trainer.expert_parallel", G + "expert_model_parallel_size", backend="megatron"),
    field("trainer.expert_tensor_parallel", G + "expert_tensor_parallel_size", note=ETP, backend="megatron"),
    field("trainer.offload_optimizer", H + "optimizer_cpu_offload", note="updated on the host", backend="megatron"),
    field("trainer.expert_dispatch", K + "moe_enable_deepep", DEEPEP, backend="megatron"),
    field("trainer.expert_dispatch", G + "moe_token_dispatcher_type", FLEX, backend="megatron"),
    field("trainer.router_replay", G + "moe_enable_routing_replay", replay_as("R3"), "R3: experts of the rollout",
          backend="megatron"),
    field("trainer.turn_samples", _STEPS, _WISE, "every turn is a sample"),
    field("trainer.chunked_loss", T + "fused_lm_head_logprob", note="no full logits tensor", backend="megatron"),
    field("trainer.lora_rank", P + "model.lora.rank", LORA_RANK),
    field("trainer.epochs", T + "update_epochs_per_batch", note="times that a batch is trained on"),
    field("trainer.packing", f"{T}remove_microbatch_padding {T}use_sample_packing", note="packed, without padding"),
    field("trainer.token_budget", T + "max_tokens_per_microbatch", _BUDGET, "tokens of a rank; -1: samples"),
    field("trainer.microbatch", T + "micro_train_batch_size_per_gpu", note="samples"),
    field("trainer.scoring_microbatch", T + "micro_forward_batch_size_per_gpu", note="samples"),
    field("rollout.backend", f"{E}backend {OLD}backend"),
    field("rollout.attention_data_parallel", f"{E}data_parallel_size {OLD}inference_engine_data_parallel_size"),
    field("rollout.tensor_parallel", f"{E}tensor_parallel_size {OLD}inference_engine_tensor_parallel_size", _ENGINE_TP,
          "replica = TP x DP x PP GPUs"),
    field("rollout.pipeline_parallel", f"{E}pipeline_parallel_size {OLD}inference_engine_pipeline_parallel_size"),
    field("rollout.expert_parallel", f"{E}expert_parallel_size {OLD}inference_engine_expert_parallel_size",
          note="1, or TP x DP of a replica"),
    field("rollout.num_engines", f"{E}num_engines {OLD}num_inference_engines"),
    field("rollout.memory_fraction", f"{E}gpu_memory_utilization {OLD}gpu_memory_utilization"),
    field("rollout.max_running", f"{E}max_num_seqs {OLD}max_num_seqs", OF_A_RANK, "requests that a rank runs at once"),
    field("rollout.engine_token_budget", f"{E}max_num_batched_tokens {OLD}max_num_batched_tokens"),
    field("rollout.prefix_caching", f"{E}enable_prefix_caching {OLD}enable_prefix_caching"),
    field("rollout.cuda_graphs", f"{E}enforce_eager {OLD}enforce_eager", NEGATED),
    field("rollout.rollout_dtype", f"{X}quantization {OLD}engine_init_kwargs.quantization", _QUANTIZED),
    field("rollout.expert_dispatch", f"{X}all2all_backend {OLD}engine_init_kwargs.all2all_backend", VLLM_DISPATCH),
    field("rollout.kv_dtype", f"{X}kv_cache_dtype {OLD}engine_init_kwargs.kv_cache_dtype", _KV),
    field("rollout.speculation", f"{E}speculative_config.num_speculative_tokens", drafts_by("mtp")),
)  # fmt: skip


@dataclass(frozen=True)
class Skyrl:
    """The adapter."""

    name: str = "skyrl"
    title: str = "SkyRL"
    fields: tuple[Field, ...] = FIELDS

    def adapt(self, run: Run, version: str) -> tuple[Run, tuple[Limitation, ...]]:
        """No activation offload; FSDP has Ulysses, Megatron a ring; an asynchronous step is one update."""
        lost: list[Limitation] = []
        trainer, megatron = without_activation_offload(run.trainer, lost), run.trainer.backend == "megatron"
        if megatron and trainer.ulysses > 1:
            trainer = ring(trainer)
            lost.append(Limitation("Ulysses with Megatron", f"context parallel {trainer.context_parallel}", "a ring"))
        if trainer.virtual_pipeline > 1:
            stages, chunks = trainer.pipeline_parallel, trainer.virtual_pipeline
            trainer = trainer.having(virtual_pipeline=1)
            lost.append(Limitation(f"{chunks} virtual stages", "plain 1F1B", f"bubble x {chunks} ({stages} stages)"))
        if not megatron:
            trainer = without_selective_recompute(trainer, lost)
            if trainer.context_parallel > 1:
                lost.append(Limitation("ring context parallel with FSDP", "Ulysses", "all-to-all in place of a ring"))
                trainer = trainer.having(ulysses=trainer.sequence_split, context_parallel=1)
            if trainer.offload == "optimizer":
                lost.append(Limitation("optimizer offload alone", "cpu_offload (parameters too)", "PCIe each step"))
        batch, mode, staleness, older = run.batch, run.mode, run.staleness, version in OLDER
        if older and run.algorithm == "dapo" and run.traits.runs_ahead:
            lost.append(Limitation("dynamic sampling", "groups without a signal are trained on", "wasted samples"))
        if older and trainer.token_budget:
            samples = samples_within_budget(run)
            lost.append(Limitation(f"token budget {trainer.token_budget}", f"{samples} samples per forward",
                                   f"SkyRL {version} fills no microbatch by tokens"))  # fmt: skip
            trainer = trainer.having(token_budget=None, microbatch=samples, scoring_token_budget=None)
        if run.traits.runs_ahead:
            mode, staleness = "async", max(staleness, 1)
            if batch.updates > 1:
                lost.append(Limitation(f"{batch.updates} updates per rl_step", "one", "fully_async trains once a sync"))
                batch = replace(batch, mini_batch=batch.prompts)
        return replace(run, mode=mode, staleness=staleness, batch=batch, trainer=trainer), tuple(lost)

    def emit(self, run: Run, target: Target) -> Emission:
        """All settings of a run."""
        run = _with_derived(run)
        chosen = {setting.key: setting for setting in write_fields(self.fields, run, target)}
        wanted = drafting_of(run, "skyrl")
        chosen = with_drafts(chosen, f"{E}speculative_config.num_speculative_tokens",
                             vllm_drafts(f"{E}speculative_config.", wanted), target.has)  # fmt: skip
        extra = [*_names(run), *_placement(run, target), *_algorithm(run, target), *_reference(run, target)]
        chosen |= {setting.key: setting for setting in extra}
        lost: tuple[Limitation, ...] = ()
        if run.rl_steps and not target.has(_ENDS):  # epochs alone would end it
            chosen.pop(T + "epochs")
            lost = (
                Limitation(f"an end after rl_step {run.last_rl_step}", "the end of trainer.epochs", "yours to stop"),
            )
        kept = [s for s in chosen.values() if target.has(s.key) and not (s.value is None and not target.default(s.key))]
        older = target.version == PACKAGE
        ahead, base = (PACKAGE_ASYNC, "skyrl_train") if older else (ASYNC, "skyrl.train")
        entry = ahead if run.traits.runs_ahead else f"{base}.entrypoints.main_base"
        return Emission(tuple(kept), lost, entry, (PACKAGE,) if older else (), run)

    def render(self, emission: Emission, stem: str, header: Sequence[str]) -> dict[str, str]:
        """``<stem>.sh``: the words of the command line, one a line."""
        hydra = PACKAGE in emission.base
        extra = _EXTRAS[hydra, emission.run.trainer.backend == "megatron"]
        stated = key_table(self.name).keys(PACKAGE)
        lines, spelt = ["ARGS=("], hydra_value if hydra else yaml_scalar
        for setting in emission.settings:
            new = "+" if hydra and setting.key not in stated else ""  # hydra's word for a key that its base has not
            word = "  " + shell_word(f"{new}{setting.key}={spelt(setting.value)}")
            lines.append(f"{word.ljust(72)}  # {comment(setting.why)}" if setting.why else word)
        checkout = "skyrl-train of your SkyRL checkout" if hydra else "your SkyRL checkout"  # README.md:54 of 0.3.1
        body = [
            f'cd "${{SKYRL:?set SKYRL to {checkout}}}"',
            *lines,
            ")",
            *_UNSHIPPED[: emission.entry in (ASYNC, PACKAGE_ASYNC)],
            f'uv run --isolated --extra "${{EXTRA:-{extra}}}" -m {shlex.quote(emission.entry)} "${{ARGS[@]}}" "$@"',
        ]
        return {f"{stem}.sh": script(header, body)}

    def detect(self, source: Source) -> float:
        """Its package, or the sections that only its configurations have."""
        if source.entry.startswith(("skyrl.", "skyrl_train.")):
            return 1.0
        own = ("generator.inference_engine.", "trainer.placement.", "trainer.policy.")
        return 0.95 if any(key.startswith(own) for key in source.keys) else 0.0

    def target(self, source: Source, version: str | None) -> Target:
        """The trainer that ``trainer.strategy`` names."""
        table = key_table(self.name)
        megatron = source.keys.get(T + "strategy") == "megatron"
        return Target(table, table.version(version), "megatron" if megatron else "fsdp2")

    def read(self, source: Source, target: Target) -> tuple[Run, frozenset[str]]:
        """Neutral values of the keys over the defaults of the version."""
        flat = resolve({**target.defaults(), **source.keys})
        start = Run(
            trainer=TrainerRun(zero_stage=1 if target.backend == "megatron" else 3), rollout=RolloutRun(backend="vllm")
        )
        run, used = read_fields(self.fields, flat, target, start)
        apart = bool(run.trainer.turn_samples) and not flat.get(_MERGED)
        trainer = read_trainer(run.trainer).having(turn_samples=apart)
        run = replace(run, trainer=trainer, rollout=read_engine(run.rollout, flat))
        return read_rest(run, flat, source).completed(), frozenset(used | ALSO_READ | {_MERGED})


# -- writing ----------------------------------------------------------------------------------------------------------


def _with_derived(run: Run) -> Run:
    run = with_stage_ends(run)
    ours, engine, megatron = run.trainer, run.rollout, run.trainer.backend == "megatron"
    hosted = ours.offload == "optimizer"
    trainer = ours.having(
        checkpointing=ours.activation_recompute != "none",
        granularity=ours.activation_recompute if ours.activation_recompute != "none" else None,
        offload_all=hosted if not megatron else None,
        offload_optimizer=hosted if megatron else None,
        packing=ours.packing is not False,
        microbatch=ours.samples,
        scoring_microbatch=ours.scoring_microbatch or ours.samples,
        virtual_pipeline=ours.virtual_pipeline if megatron else 1,
    )
    rollout = engine.having(num_engines=max(engine.devices // (engine.tensor_parallel * engine.pipeline_parallel), 1))
    ahead, replays = run.traits.runs_ahead, ours.router_replay == "R3"
    facts = SkyrlFacts(run.traits.shares_devices, ahead, ahead, replays, replays, "mp" if replays else "ray")
    return replace(run, trainer=trainer, rollout=rollout, batch=run.batch.with_context(), facts=facts)


_ENDS = T + "max_training_steps"


def _names(run: Run) -> list[Setting]:
    settings = [
        Setting(P + "model.path", hub_name(run.architecture), "yours"),
        Setting("data.train_data", [f"/data/{run.data}.parquet"], "yours"),
        Setting("data.val_data", ["/data/val.parquet"], "yours"),
        Setting("environment.env_class", "gsm8k", "yours"),
        Setting(T + "logger", "console", "the seconds of every rl_step"),
        Setting(T + "eval_interval", -1, "yours"),
        Setting(T + "eval_before_train", False, "yours"),
    ]
    if run.rl_steps:
        settings += [
            Setting(_ENDS, run.ends_at, "through this phase's last rl_step"),
            enough_epochs(T + "epochs", run),
            Setting(T + "ckpt_interval", run.saves_every, "and at the end of the phase"),
            Setting(T + "ckpt_path", run.kept_in("/ckpt/rlperf"), "yours; the same for every phase of a task"),
            Setting(T + "resume_mode", "latest", "a phase goes on where the one before it ended"),
        ]
    return settings


def _placement(run: Run, target: Target) -> list[Setting]:
    shape = node_shape(run.trainer.devices, run.devices_per_node)
    if shape is None:
        raise ExportError(f"{run.trainer.devices} GPUs fill no whole nodes of {run.devices_per_node}", "skyrl")
    shares = run.traits.shares_devices
    settings = [
        Setting(L + "colocate_all", shares, "engine and trainer take turns on the same GPUs" if shares else ""),
        Setting(L + "policy_num_nodes", shape[0]),
        Setting(L + "policy_num_gpus_per_node", shape[1]),
        Setting(L + "ref_num_nodes", shape[0]),
        Setting(L + "ref_num_gpus_per_node", shape[1]),
        Setting(P + "optimizer_config.offload_after_step", run.trainer.parked is not False, "only where colocated"),
    ]
    if run.trainer.backend == "fsdp2" and target.version in OLDER:  # `fsdp` was FSDP1 there
        settings.append(Setting(T + "strategy", "fsdp2"))
    return settings


def _algorithm(run: Run, target: Target) -> list[Setting]:
    ahead, dapo = run.traits.runs_ahead, run.algorithm == "dapo"
    settings = [
        Setting(A + "advantage_estimator", "grpo"),
        Setting(A + "use_kl_loss", run.reference, "a KL term needs the reference's forward pass"),
        *_turns(run.batch),
    ]
    if dapo:
        settings += [Setting(A + "eps_clip_high", 0.28), Setting(A + "loss_reduction", "token_mean")]
    if dapo and not ahead:
        settings.append(Setting(A + "dynamic_sampling.type", "filter", "whole batches until enough have a signal"))
    if dapo and ahead:
        settings.append(Setting(A + "zero_variance_filter", True, "groups without a signal are dropped"))
        settings.append(Setting(T + "fully_async.sample_full_batch", True, "and others take their places"))
    if ahead:
        stale, prompts = run.staleness, run.batch.prompts
        settings += [
            Setting(T + "fully_async.enabled", True),
            Setting(T + "fully_async.max_staleness_steps", stale, "steps that a sample may be behind"),
            Setting(T + "fully_async.num_parallel_generation_workers", prompts * (stale + 1), "groups in flight"),
        ]
        if target.has(T + "fully_async.enabled"):
            settings.append(Setting(A + "policy_loss_type", "rollout_is", "fully_async wants rollout log-probs"))
    if run.trainer.router_replay == "R3":
        settings += [Setting(E + "enable_return_routed_experts", True, "what is replayed"),
                     Setting(E + "distributed_executor_backend", "mp", "routes want it")]  # fmt: skip
    if run.trainer.activation_recompute == "selective":  # Megatron takes both with full recompute alone
        settings += [Setting(K + "recompute_method", None), Setting(K + "recompute_num_layers", None)]
    if run.trainer.offload_optimizer:
        settings += [
            Setting(H + "optimizer_offload_fraction", 1.0),
            Setting(H + "overlap_cpu_optimizer_d2h_h2d", True),
        ]
    return settings


def _turns(batch: BatchFacts) -> list[Setting]:
    """Each turn generates its share; what came before stands in the next turn's input."""
    each = -(-(batch.max_response_tokens or 1) // max(batch.turns, 1))
    return [
        Setting("generator.sampling_params.max_generate_length", each, "of each turn"),
        Setting("generator.max_input_length", batch.longest_tokens - each, "of a turn: prompt and the turns before"),
    ]


def _reference(run: Run, target: Target) -> list[Setting]:
    """The reference in the layout of the policy, of whose keys its own inherit none (megatron_worker.py)."""
    ref, ours = "trainer.ref.", run.trainer
    if target.backend != "megatron":
        return [Setting(ref + "sequence_parallel_size", ours.ulysses),
                Setting(ref + "fsdp_config.cpu_offload", bool(ours.offload_all))]  # fmt: skip
    degrees = {
        "tensor_model_parallel_size": ours.tensor_parallel, "pipeline_model_parallel_size": ours.pipeline_parallel,
        "context_parallel_size": ours.context_parallel, "expert_model_parallel_size": ours.expert_parallel,
        "expert_tensor_parallel_size": ours.expert_tensor_parallel,
    }  # fmt: skip
    ends = {
        "num_layers_in_first_pipeline_stage": ours.first_stage_layers,
        "num_layers_in_last_pipeline_stage": ours.last_stage_layers,
    }
    stated = {**degrees, **{f"transformer_config_kwargs.{name}": layers for name, layers in ends.items() if layers}}
    return [Setting(f"{ref}megatron_config.{name}", size) for name, size in stated.items()]


ADAPTER = Skyrl()
