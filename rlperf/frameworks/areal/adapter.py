"""AReaL: one YAML of ``GRPOConfig``; FSDP or Megatron trainer, SGLang or vLLM engines, asynchronous at heart.

Allocation strings say the layout: ``sglang:d4t2p1``, ``fsdp:d4c2``, ``megatron:(attn:d2t2p2c1|ffn:d1t1p2e4)``. Token
budgets are per data-parallel rank; the optimizer's batch is the step divided by ``ppo_n_minibatches``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlperf.errors import ExportError
from rlperf.frameworks.adapter import Emission, Limitation, Source
from rlperf.frameworks.areal.allocation import allocation, parse_allocation, with_backend
from rlperf.frameworks.areal.microbatches import cap_of, whole_passes
from rlperf.frameworks.areal.reading import ALSO_READ, ArealFacts, read_rest, read_trainer, stated_role, unread_teacher
from rlperf.frameworks.areal.trained import adapters, in_eight_bits
from rlperf.frameworks.engine_arguments import SGLANG_CHUNK, sglang_prefill, whole_prompts
from rlperf.frameworks.fields import (
    COMPUTE_DTYPE,
    DEEPEP,
    ENGINE_DTYPE,
    FLEX,
    MANDATORY,
    NEGATED,
    RECOMPUTE,
    SGLANG_KV_DTYPE,
    UPDATES,
    Field,
    Setting,
    Target,
    Unit,
    elsewhere,
    field,
    read_fields,
    replay_as,
    resolve,
    write_fields,
)
from rlperf.frameworks.hub import hub_name
from rlperf.frameworks.keytable import Flat, Value, key_table
from rlperf.frameworks.nearest import THIRD, wide_degrees, without_ulysses
from rlperf.frameworks.phases import enough_epochs
from rlperf.frameworks.run import RolloutRun, Run, TrainerRun
from rlperf.frameworks.writing import defaults, script, yaml_text
from rlperf.specs.modes import mode_of_staleness

_EXPORTS = "rollout.agent.export_style"
_STYLE = Unit(lambda value, _: value == "individual", lambda value, _: "individual" if value else None)
_WHOLE = 1 << 20
_CHUNKED = Unit(lambda value, _: 0 < int(value) < _WHOLE, lambda value, _: 1024 if value else _WHOLE)

FIELDS: tuple[Field, ...] = (
    *elsewhere("trainer.tensor_parallel trainer.expert_parallel trainer.expert_tensor_parallel", "actor.backend"),
    *elsewhere("trainer.pipeline_parallel trainer.context_parallel", "actor.backend", backend="megatron"),
    *elsewhere("trainer.ulysses", "actor.backend, as c", backend="fsdp2"),
    *elsewhere("trainer.lora_rank", "actor.use_lora, actor.lora_rank"),
    *elsewhere("rollout.tensor_parallel rollout.pipeline_parallel", "rollout.backend"),
    field("batch.prompts_per_step", "train_dataset.batch_size", note="prompts"),
    field("batch.group_size", "gconfig.n_samples"),
    field("batch.mini_batch", "actor.ppo_n_minibatches", UPDATES),
    field("batch.max_prompt_tokens", "train_dataset.max_length"),
    field("batch.max_response_tokens", "gconfig.max_new_tokens"),
    field("batch.context_tokens", "gconfig.max_tokens", note="prompt + response"),
    field("trainer.token_budget", "actor.mb_spec.max_tokens_per_mb", note="tokens per data-parallel rank"),
    field("trainer.checkpointing", "actor.gradient_checkpointing"),
    field("trainer.compute_dtype", "actor.dtype", COMPUTE_DTYPE),
    field("trainer.chunked_loss", "actor.megatron.enable_chunked_logits", backend="megatron"),
    field("trainer.expert_dispatch", "actor.megatron.moe_enable_deepep", DEEPEP, backend="megatron"),
    field("trainer.expert_dispatch", "actor.megatron.moe_token_dispatcher_type", FLEX, backend="megatron"),
    field("trainer.router_replay", "rollout.return_routed_experts", replay_as("R3"), "R3: experts of the rollout"),
    field("trainer.turn_samples", _EXPORTS, _STYLE, "every turn is a sample, or a trajectory"),
    field("trainer.shared_prefix", "actor.enable_tree_training", note="a trie of the sequences, flex attention"),
    field("trainer.chunked_loss", "actor.logprobs_chunk_size", _CHUNKED, "tokens of logits at once", backend="fsdp2"),
    field("trainer.virtual_pipeline", "actor.megatron.virtual_pipeline_parallel_size", backend="megatron"),
    field("trainer.granularity", "actor.megatron.recompute_granularity", RECOMPUTE, backend="megatron"),
    field("trainer.offload_all", "actor.fsdp.offload_params", note="parameters and optimizer in host memory",
          backend="fsdp2"),
)  # fmt: skip

ENGINES: dict[str, tuple[Field, ...]] = {
    "sglang": (
        *elsewhere("rollout.chunked_prefill", "sglang.chunked_prefill_size -1, sglang.max_prefill_tokens"),
        field("rollout.memory_fraction", "sglang.mem_fraction_static"),
        field("rollout.max_running", "sglang.max_running_requests", note="requests that an engine runs at once"),
        field("rollout.engine_token_budget", "sglang.chunked_prefill_size", SGLANG_CHUNK, "tokens per prefill chunk"),
        field("rollout.engine_context", "sglang.context_length"),
        field("rollout.cuda_graphs", "sglang.disable_cuda_graph", NEGATED),
        field("rollout.prefix_caching", "sglang.disable_radix_cache", NEGATED),
        field("rollout.rollout_dtype", "sglang.dtype", ENGINE_DTYPE),
        field("rollout.kv_dtype", "sglang.kv_cache_dtype", SGLANG_KV_DTYPE),
        field("rollout.attention_data_parallel", "sglang.dp_size"),
        field("rollout.attention_dp_enabled", "sglang.enable_dp_attention"),
        field("rollout.expert_parallel", "sglang.ep_size"),
    ),
    "vllm": (
        field("rollout.memory_fraction", "vllm.gpu_memory_utilization"),
        field("rollout.rollout_dtype", "vllm.dtype", ENGINE_DTYPE),
        field("rollout.max_running", "vllm.max_num_seqs", note="requests that an engine runs at once"),
        field("rollout.engine_context", "vllm.max_model_len"),
        field("rollout.cuda_graphs", "vllm.enforce_eager", NEGATED),
        field("rollout.prefix_caching", "vllm.no_enable_prefix_caching", NEGATED),
        field("rollout.chunked_prefill", "vllm.no_enable_chunked_prefill", NEGATED),
    ),
}
BACKENDS = {"fsdp": "fsdp2", "archon": "fsdp2", "megatron": "megatron"}


@dataclass(frozen=True)
class Areal:
    """The adapter."""

    name: str = "areal"
    title: str = "AReaL"
    fields: tuple[Field, ...] = (*FIELDS, *ENGINES["sglang"], *ENGINES["vllm"])

    def adapt(self, run: Run, version: str) -> tuple[Run, tuple[Limitation, ...]]:
        """FSDP has no pipeline or expert parallel; offload is all or nothing; engines are SGLang or vLLM."""
        lost: list[Limitation] = []
        if run.batch.turns > 1:
            asked = f"{run.batch.turns} turns with tools"
            lost.append(Limitation(asked, "one turn", "your workflow's arun_episode has to take the turns"))
        trainer, rollout, megatron = run.trainer, run.rollout, run.trainer.backend == "megatron"
        if rollout.backend not in ENGINES:
            lost.append(Limitation(f"engine {rollout.backend}", "sglang", "predicted for another engine"))
            rollout = rollout.having(backend="sglang")
        if megatron and trainer.ulysses > 1:
            trainer = without_ulysses(trainer)
            ring = f"context parallel {trainer.context_parallel}"
            lost.append(Limitation("Ulysses", ring, "ring exchange in place of all-to-all"))
        if not megatron and trainer.context_parallel > 1:
            lost.append(Limitation("ring context parallel with FSDP", "Ulysses", "all-to-all in place of a ring"))
            trainer = trainer.having(ulysses=trainer.sequence_split, context_parallel=1)
        if run.algorithm == "dapo":
            lost.append(Limitation("dynamic sampling", "groups without a signal are trained on",
                                   "no key: your workflow's should_accept_fn has to reject them"))  # fmt: skip
        if trainer.activation_recompute == "selective" and not megatron:
            trainer = trainer.having(activation_recompute="full")
            lost.append(Limitation("selective recompute with FSDP", "full", THIRD))
        if trainer.offload in ("activations", "both"):
            trainer = trainer.having(activation_recompute="full")
            lost.append(Limitation("activation offload", "full recompute", THIRD))
        if trainer.offload in ("optimizer", "both"):
            if megatron:
                raise ExportError(
                    "Megatron here has no optimizer offload", "areal", {"nearest": "offload: none, or fsdp2"}
                )
            lost.append(Limitation("optimizer offload alone", "offload_params (parameters too)", "PCIe each step"))
        if run.rollout.backend == "vllm":
            for degree, size in wide_degrees(rollout):
                lost.append(Limitation(f"rollout {degree} {size}", "tensor parallel alone", "more KV traffic"))
            rollout = rollout.having(expert_parallel=1, attention_data_parallel=1)
        mode = mode_of_staleness(run.staleness) if run.traits.lag is None else run.mode
        return replace(run, mode=mode, trainer=trainer, rollout=rollout), tuple(lost)

    def emit(self, run: Run, target: Target) -> Emission:
        """All settings of a run."""
        run = _with_derived(run)
        engine = ENGINES[run.rollout.backend or "sglang"]
        settings = write_fields((*FIELDS, *engine), run, target)
        settings += whole_prompts(run, _sglang) if run.rollout.backend == "sglang" else []
        chosen = {s.key: s for s in (*_names(run), *settings, *_placement(run), *_algorithm(run))}
        chosen = {key: s for key, s in chosen.items() if key != _EXPORTS or s.value}  # its type has no null
        kept = [s for s in chosen.values() if target.has(s.key) or s.key.endswith("scheduling_spec")]
        anew = run.trainer.backend == "megatron" and bool(run.before)
        return Emission(tuple(kept), (_ANEW,) if anew else (), "examples/math/gsm8k_rl.py", (), run)

    def render(self, emission: Emission, stem: str, header: Sequence[str]) -> dict[str, str]:
        """``<stem>.yaml`` and ``<stem>.sh``."""
        body = [
            'HERE="$(cd "$(dirname "$0")" && pwd)"',
            'cd "${AREAL:?set AREAL to your AReaL checkout}"',
            *defaults({"ENTRY": emission.entry}),
            f'python3 "$ENTRY" --config "$HERE/{stem}.yaml" \\',
            '  ++scheduler.type="${SCHEDULER:-local}" "$@"',
        ]
        return {
            f"{stem}.yaml": yaml_text(emission.settings, header),
            f"{stem}.sh": script([f"Launches {stem}.yaml; SCHEDULER: local, ray or slurm."], body),
        }

    def detect(self, source: Source) -> float:
        """Its launcher, an allocation string, or AReaL's sections."""
        if source.entry.startswith("areal."):
            return 1.0
        markers = {"actor.backend", "rollout.backend", "gconfig.n_samples", "allocation_mode",
                   "rollout.max_head_offpolicyness"}  # fmt: skip
        return 0.95 if len(markers & set(source.keys)) >= 2 else 0.0

    def target(self, source: Source, version: str | None) -> Target:
        """The trainer that the actor's allocation names."""
        table = key_table(self.name)
        mode = _from_allocation_mode(source.keys).get("actor.backend", "")
        name = str(source.keys.get("actor.backend", mode)).partition(":")[0]
        return Target(table, table.version(version), BACKENDS.get(name, "fsdp2"))

    def read(self, source: Source, target: Target) -> tuple[Run, frozenset[str]]:
        """Neutral values of the keys over the dataclass defaults."""
        flat = resolve({**target.defaults(), **source.keys})
        flat.update(_from_allocation_mode(flat))
        pools = {"rollout.backend": "sglang:d1", "actor.backend": "fsdp:d1"}
        missing = tuple(key for key in pools if flat.get(key) == MANDATORY)
        stated = {key: str(flat.get(key) or usual) for key, usual in pools.items() if key not in missing}
        engine, rollout = parse_allocation(stated.get("rollout.backend", pools["rollout.backend"]))
        _, trainer = parse_allocation(stated.get("actor.backend", pools["actor.backend"]))
        start = Run(
            trainer=TrainerRun(backend=target.backend).having(**trainer),
            rollout=RolloutRun(backend=engine or "sglang").having(**rollout),
        )
        run, used = read_fields((*FIELDS, *ENGINES.get(engine, ())), flat, target, start)
        if engine == "sglang":
            run = replace(run, rollout=run.rollout.having(**sglang_prefill(flat, _sglang)))
        if _EXPORTS not in source.keys:  # agents' default, which workflows of one turn or with tokens do not read
            run = replace(run, trainer=run.trainer.having(turn_samples=None))
        run = read_rest(replace(run, trainer=read_trainer(run.trainer, flat)), flat)
        run = replace(run, trainer=whole_passes(run, flat), wrong=(*run.wrong, *unread_teacher(source)))
        run = replace(run, reference=run.reference and stated_role("ref", source))
        run, eight = in_eight_bits(run, source.keys)
        return replace(run.completed(), missing=(*run.missing, *missing)), frozenset(used | ALSO_READ | eight)


def _sglang(name: str) -> str:
    return f"sglang.{name}"


def _with_derived(run: Run) -> Run:
    ours, total = run.trainer, run.batch.longest_tokens
    trainer = ours.having(
        token_budget=cap_of(run),
        checkpointing=ours.activation_recompute != "none",
        granularity=ours.activation_recompute,
        offload_all=ours.offload in ("optimizer", "both"),
    )
    wide = run.rollout.attention_data_parallel > 1
    rollout = run.rollout.having(engine_context=total, attention_dp_enabled=wide)
    facts = ArealFacts(colocate=run.traits.shares_devices)
    return replace(run, batch=run.batch.with_context(), trainer=trainer, rollout=rollout, facts=facts)


_WORKER = {"task_type": "worker", "gpu": 1, "cpu": 4, "mem": 64, "port_count": 2,
           "cmd": "python3 -m areal.infra.rpc.rpc_server"}  # fmt: skip


def _names(run: Run) -> list[Setting]:
    """Names, paths and the sections that AReaL wants filled."""
    model = hub_name(run.architecture)
    pair = [("experiment_name", "${experiment_name}"), ("trial_name", "${trial_name}")]
    trial = run.kept_in("trial0").replace("/", "_")
    settings = [Setting("experiment_name", "rlperf"), Setting("trial_name", trial), Setting("seed", 1)]
    settings.append(Setting("tokenizer_path", "${actor.path}"))
    for section in ("rollout", "actor", "saver", "recover", "evaluator", "stats_logger"):
        settings += [Setting(f"{section}.{name}", value) for name, value in pair]
    for section in ("rollout", "saver", "recover", "evaluator", "stats_logger"):
        settings.append(Setting(f"{section}.fileroot", "${cluster.fileroot}"))
    settings += [
        Setting("cluster.fileroot", "/tmp/areal", "yours"),
        Setting("actor.path", model, "yours"),
        Setting("rollout.tokenizer_path", "${tokenizer_path}"),
        Setting("actor.scheduling_spec", [_WORKER], "one worker process a GPU"),
        Setting("rollout.scheduling_spec", "${actor.scheduling_spec}"),
        Setting("actor.optimizer.type", "adam"),
        Setting("actor.optimizer.lr", 1e-6, "yours"),
        Setting("actor.optimizer.lr_scheduler_type", "constant"),
        Setting("rollout.dump_to_file", True, "lengths and staleness for `rlperf import`"),
        Setting("train_dataset.path", "openai/gsm8k", "yours"),
        Setting("train_dataset.type", "rl"),
        Setting("sglang.model_path" if run.rollout.backend == "sglang" else "vllm.model", "${actor.path}"),
    ]
    return settings


def _placement(run: Run) -> list[Setting]:
    per_node = run.devices_per_node
    megatron = run.trainer.backend == "megatron"
    total = run.devices
    nodes = -(-total // per_node)
    if nodes > 1 and total % per_node:
        raise ExportError(f"{total} GPUs fill no whole nodes of {per_node}", "areal")
    backend = allocation("megatron" if megatron else "fsdp", run.trainer)
    settings = [
        Setting("cluster.n_nodes", nodes),
        Setting("cluster.n_gpus_per_node", min(per_node, total)),
        Setting("actor.backend", backend),
        Setting("rollout.backend", allocation(str(run.rollout.backend), run.rollout)),
        Setting("rollout.consumer_batch_size", "${train_dataset.batch_size}"),
    ]
    if run.traits.shares_devices:
        return [
            *settings,
            Setting("enable_offload", True, "engine and trainer take turns on the same GPUs"),
            Setting("rollout.scheduling_strategy.type", "colocation"),
            Setting("rollout.scheduling_strategy.target", "actor"),
            Setting("actor.weight_update_mode", "disk", "colocation takes disk or awex"),
            Setting("rollout.max_head_offpolicyness", 0),
        ]
    settings += [
        Setting("actor.weight_update_mode", "xccl"),
        Setting("rollout.max_head_offpolicyness", run.staleness, "policy versions a sample may be behind"),
    ]
    if run.staleness:
        # left out, as many groups run at once as a batch has, stragglers among them (infra/staleness_manager.py:79)
        settings.append(_groups_under_way(run))
    return settings


def _groups_under_way(run: Run) -> Setting:
    """As many as may be behind, or fewer where the plan bounds trajectories."""
    behind, bound = (run.staleness + 1) * run.batch.prompts, run.batch.max_trajectories
    most = min(behind, -(-bound // run.batch.group_size)) if bound else behind
    why = "as many as may be behind" if most == behind else f"for {bound} trajectories"
    return Setting("rollout.max_concurrent_rollouts", most, f"groups under way: {why}")


_ANEW = Limitation(
    "going on from the optimizer states of the phase before",
    "its weights alone",
    "AReaL keeps none of Megatron's distributed optimizer: moments start anew",
)


def _algorithm(run: Run) -> list[Setting]:
    stale = run.staleness > 0
    reference = run.reference
    settings = [
        Setting("actor.kl_ctl", 0.001 if reference else 0.0, "0: no reference pass"),
        Setting("actor.recompute_logprob", run.old_policy is not False, "old log-probs by the trainer"),
        Setting("actor.use_decoupled_loss", stale and run.old_policy is not False),
        *adapters(run),
    ]
    roles = (["ref"] if reference else []) + (["critic"] if run.algorithm == "ppo" else [])
    if any(scorer.kind == "teacher" for scorer in run.scorers):
        roles.append("teacher.train")  # refused without (1.0.4 api/cli_args.py TeacherConfig); its keys say the path
    for role in roles:
        settings += [
            Setting(f"{role}.{name}", value)
            for name, value in (
                ("experiment_name", "${experiment_name}"),
                ("trial_name", "${trial_name}"),
                ("path", "${actor.path}"),
                ("backend", "${actor.backend}"),
                ("scheduling_strategy.type", "colocation"),
                ("scheduling_strategy.target", "actor"),
            )
        ]
        settings.append(Setting(f"{role}.mb_spec.max_tokens_per_mb", run.trainer.token_budget))
    if run.algorithm == "dapo":
        settings.append(Setting("actor.eps_clip_higher", 0.28))
    if run.rl_steps:
        settings.append(Setting("total_train_steps", run.ends_at, "through the last rl_step of this phase"))
        settings.append(enough_epochs("total_train_epochs", run))
        settings.append(Setting("saver.freq_steps", run.saves_every, "and at the end of the phase"))
        settings.append(Setting("recover.freq_steps", run.saves_every))
        settings.append(Setting("recover.mode", "auto", "a phase goes on where the one before it ended"))
        if run.trainer.backend == "megatron":
            # "required" beside its distributed optimizer (1.0.4 api/cli_args.py:2355)
            settings += [
                Setting(f"recover.no_{what}_optim", True, "its shards cannot be kept") for what in ("save", "load")
            ]
    return settings


_NAMELESS = re.compile(r"([dtpcse]\d+)+")
"""An allocation without a backend in front."""
_DOTTED = re.compile(r"^(\w+)\.")


def _from_allocation_mode(flat: Flat) -> dict[str, Value]:
    """The two allocations of the deprecated ``allocation_mode: sglang:d4t2+fsdp:d4``, where the new keys are absent.

    Releases up to 0.3 had ``sglang.d4p1t1+d4p1t1`` (AReaL-lite's examples; recalled).
    """
    found: dict[str, Value] = {}
    for part in filter(None, str(flat.get("allocation_mode") or "").split("+")):
        part = _DOTTED.sub(r"\1:", part.strip())
        part = with_backend(part) if _NAMELESS.fullmatch(part) else part
        name = part.partition(":")[0].partition("[")[0]
        key = "rollout.backend" if name in ENGINES else "actor.backend" if name in BACKENDS else ""
        if key and flat.get(key) in (None, "", "???", *BACKENDS):  # a backend alone says no degrees
            found[key] = part
    return found


ADAPTER = Areal()
