"""RLinf's reasoning task: hydra YAML; FSDP and Megatron trainers, SGLang and vLLM engines, placed by ranks of GPUs.

``data.rollout_batch_size`` counts prompts, ``algorithm.training_batch_size_per_gpu`` samples of a microbatch, which
becomes ``actor.micro_batch_size`` (config.py:1204), ``runner.max_tokens_per_mbs`` tokens per GPU (x CP).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlperf.frameworks.adapter import Emission, Limitation, Source
from rlperf.frameworks.fields import (
    DISTRIBUTED,
    NEGATED,
    RECOMPUTE,
    RESHARD,
    TOKENS_PER_DEVICE,
    UPDATES,
    Field,
    Setting,
    Target,
    Unit,
    elsewhere,
    field,
    megatron_degrees,
    put,
    read_fields,
    resolve,
    write_fields,
)
from rlperf.frameworks.hub import hub_name
from rlperf.frameworks.keytable import Flat, Value, key_table
from rlperf.frameworks.nearest import (
    plain_engine,
    samples_within_budget,
    without_activation_offload,
    without_selective_recompute,
    without_ulysses,
)
from rlperf.frameworks.phases import enough_epochs
from rlperf.frameworks.rlinf.placement import PLACED, grouped, placements, ranks_of
from rlperf.frameworks.run import RolloutRun, Run, TrainerRun, ref
from rlperf.frameworks.writing import comment, hydra_value, script, shell_word, yaml_scalar

M, F, A = "actor.model.", "actor.fsdp_config.", "algorithm."
SAMPLING = "rollout.sampling_params"
"""Where it is stated, SGLang's worker reads it whole and leaves algorithm.sampling_params (sglang_worker.py:73)."""
APART = ("inference", "actor_inference", "critic", "critic_inference")
"""Components that rlperf places nowhere of their own."""

_BACKEND = Unit(lambda value, _: "fsdp2" if value == "fsdp" else value,
                lambda value, _: "fsdp" if value == "fsdp2" else value)  # fmt: skip
SHARDED = {"full_shard": 3, "shard_grad_op": 2, "no_shard": 0}
"""``sharding_strategy`` as ZeRO stage: read under ``strategy: fsdp`` alone (strategy/fsdp.py:156), the default."""
_RESHARD = replace(RESHARD, takes=frozenset(SHARDED.values()))
"""Of ``strategy: fsdp2``, which always shards: stage 0 is written as FSDP1's."""

FIELDS: tuple[Field, ...] = (
    *elsewhere("trainer.parked", "actor.enable_offload (FSDP), actor.offload_weight and offload_optimizer (Megatron)"),
    *elsewhere("trainer.scoring_token_budget", "runner.max_tokens_per_mbs: both passes fill alike"),
    field("batch.prompts_per_step", "data.rollout_batch_size", note="prompts"),
    field("batch.group_size", A + "group_size"),
    field("batch.mini_batch", A + "n_minibatches", UPDATES),
    field("batch.max_prompt_tokens", "data.max_prompt_length"),
    field("batch.max_response_tokens", A + "sampling_params.max_new_tokens"),
    field("batch.context_tokens", "runner.seq_length", note="prompt + response"),
    field("trainer.backend", "actor.training_backend", _BACKEND),
    field("trainer.microbatch", A + "training_batch_size_per_gpu", note="samples"),
    field("trainer.scoring_microbatch", A + "logprob_forward_micro_batch_size", note="samples"),
    field("trainer.packing", M + "variable_seq_lengths", note="without padding"),
    field("trainer.epochs", "algorithm.update_epoch", note="times that a batch is trained on"),
    field("trainer.zero_stage", F + "reshard_after_forward", _RESHARD, "under strategy: fsdp2", backend="fsdp2"),
    field("trainer.checkpointing", F + "gradient_checkpointing", backend="fsdp2"),
    field("trainer.offload_all", F + "cpu_offload", note="parameters and optimizer on the host", backend="fsdp2"),
    field("trainer.whole_gradients", F + "enable_gradient_accumulation",
          note="gradients are reduced with an update's last microbatch, and whole before", backend="fsdp2"),
    field("trainer.activation_recompute", M + "recompute_granularity", RECOMPUTE, backend="megatron"),
    *megatron_degrees(M),
    field("trainer.zero_stage", "actor.optim.use_distributed_optimizer", DISTRIBUTED, backend="megatron"),
    field("trainer.offload_optimizer", "actor.optim.optimizer_cpu_offload", note="updated on the host",
          backend="megatron"),
    field("trainer.dynamic", "runner.enable_dynamic_batch_size"),
    field("trainer.token_budget", "runner.max_tokens_per_mbs", TOKENS_PER_DEVICE),
    field("rollout.backend", "rollout.rollout_backend"),
    field("rollout.tensor_parallel", "rollout.tensor_parallel_size"),
    field("rollout.pipeline_parallel", "rollout.pipeline_parallel_size", read_only=True),
    field("rollout.memory_fraction", "rollout.gpu_memory_utilization"),
    field("rollout.max_running", "rollout.max_running_requests", note="requests that an engine runs at once"),
    field("rollout.cuda_graphs", "rollout.enforce_eager", NEGATED),
)  # fmt: skip
VLLM: tuple[Field, ...] = (
    field("rollout.engine_token_budget", "rollout.vllm.max_num_batched_tokens"),
    field("rollout.prefix_caching", "rollout.vllm.enable_prefix_caching"),
    field("rollout.chunked_prefill", "rollout.vllm.enable_chunked_prefill"),
)
"""SGLang is started without these: its own values hold (workers/rollout/sglang/sglang_worker.py:164)."""


@dataclass(frozen=True)
class Rlinf:
    """The adapter."""

    name: str = "rlinf"
    title: str = "RLinf"
    fields: tuple[Field, ...] = (*FIELDS, *VLLM)

    def adapt(self, run: Run, version: str) -> tuple[Run, tuple[Limitation, ...]]:
        """Engines of tensor parallel alone; no Ulysses; fixed microbatches where rollout and training overlap."""
        lost: list[Limitation] = []
        trainer, megatron = without_activation_offload(run.trainer, lost), run.trainer.backend == "megatron"
        if trainer.ulysses > 1:
            trainer = without_ulysses(trainer)
            lost.append(Limitation("Ulysses", f"context parallel {trainer.context_parallel}", "a ring"))
        if not megatron:
            trainer = without_selective_recompute(trainer, lost)
        if trainer.scoring_token_budget not in (None, trainer.token_budget):
            trainer = trainer.having(scoring_token_budget=trainer.token_budget)
            lost.append(Limitation("a budget for scoring", "training's", "smaller microbatches"))
        streams = not run.traits.shares_devices
        if streams and trainer.token_budget:
            samples, fixed = samples_within_budget(run), "GPUs of their own take fixed microbatches"
            lost.append(Limitation(f"token budget {trainer.token_budget}", f"{samples} samples per forward", fixed))
            trainer = trainer.having(token_budget=None, microbatch=samples, scoring_token_budget=None)
        if run.batch.turns > 1:
            own = "its agents (rlinf/agents) are programs of their own"
            lost.append(Limitation(f"{run.batch.turns} turns with tools", "one turn", own))
        if run.algorithm == "dapo":
            lost.append(Limitation("dynamic sampling", "groups without a signal are trained on", "wasted samples"))
        mode = "streaming" if streams else run.mode
        run = replace(run, mode=mode, staleness=0, trainer=trainer, rollout=plain_engine(run.rollout, lost))
        return replace(run, algorithm="grpo"), tuple(lost)

    def emit(self, run: Run, target: Target) -> Emission:
        """What a plan decides; the rest is a configuration of the user's, over which it is laid."""
        run = _with_derived(run)
        fields = (*FIELDS, *(VLLM if run.rollout.backend == "vllm" else ()))
        chosen = {setting.key: setting for setting in write_fields(fields, run, target)}
        chosen |= {setting.key: setting for setting in (*_placement(run), *_algorithm(run), *_names(run))}
        kept = [setting for setting in chosen.values() if target.has(setting.key)]
        return Emission(tuple(kept), (), "", (), run)

    def render(self, emission: Emission, stem: str, header: Sequence[str]) -> dict[str, str]:
        """``<stem>.sh``: hydra overrides over a configuration of the user's, which RLinf's packages do not hold."""
        lines = ["ARGS=(", f"  '~{PLACED}'"]
        for setting in emission.settings:
            word = "  " + shell_word(f"++{setting.key}={hydra_value(setting.value)}")
            lines.append(f"{word.ljust(72)}  # {comment(setting.why)}" if setting.why else word)
        body = [
            'cd "${RLINF:?set RLINF to your RLinf checkout}"',
            *lines,
            ")",
            "# yours: the program of its examples for reasoning, and a configuration with data, reward and optimizer",
            'python "${PROGRAM:?set PROGRAM}" --config-path "${CONFIG_PATH:?set CONFIG_PATH}" \\',
            '  --config-name "${CONFIG:?set CONFIG}" "${ARGS[@]}" "$@"',
        ]
        return {f"{stem}.sh": script(header, body)}

    def detect(self, source: Source) -> float:
        """Its placement of components, or keys that only it has."""
        own = {"runner.task_type", "data.rollout_batch_size", "algorithm.training_batch_size_per_gpu"}
        placed = any(key.startswith(PLACED) for key in source.keys)
        return 0.95 if placed or len(own & set(source.keys)) >= 2 else 0.0

    def target(self, source: Source, version: str | None) -> Target:
        """The trainer that ``actor.training_backend`` names."""
        table = key_table(self.name)
        megatron = source.keys.get("actor.training_backend") == "megatron"
        return Target(table, table.version(version), "megatron" if megatron else "fsdp2")

    def read(self, source: Source, target: Target) -> tuple[Run, frozenset[str]]:
        """Neutral values of the keys over what the validators fill in."""
        flat = resolve({**target.defaults(target.backend), **source.keys})
        megatron = target.backend == "megatron"
        start = Run(trainer=TrainerRun(backend=target.backend, zero_stage=1 if megatron else 3),
                    rollout=RolloutRun(backend="sglang"))  # fmt: skip
        fields = (*FIELDS, *(VLLM if flat.get("rollout.rollout_backend") == "vllm" else ()))
        run, used = read_fields(fields, flat, target, start)
        run = _read_rest(replace(run, trainer=_read_trainer(run.trainer, flat)), flat)
        placed = {key for key in source.keys if key.startswith(PLACED)}
        return run.completed(), frozenset(used | placed | _ALSO_READ)


@dataclass(frozen=True)
class RlinfFacts:
    """What rules ask beside the run.

    inference : an FSDP actor apart has GPUs for inference; ungrouped : ``adv_type`` takes single responses
    row_length : tokens of a row of a batch; longest : tokens that the engine may hand over for it
    """

    colocate: bool
    placed: bool | None = None
    contiguous: bool | None = None
    rewarded: bool | None = None
    inference: bool = False
    ungrouped: bool = False
    row_length: int | None = None
    longest: int | None = None
    log_probs: bool | None = None
    n_minibatches: int | None = None
    stated_microbatch: int | None = None


# -- writing ----------------------------------------------------------------------------------------------------------


def _with_derived(run: Run) -> Run:
    ours, megatron = run.trainer, run.trainer.backend == "megatron"
    hosted = ours.offload == "optimizer"
    trainer = ours.having(
        dynamic=ours.token_budget is not None,
        checkpointing=ours.activation_recompute != "none",
        offload_all=hosted if not megatron else None,
        offload_optimizer=hosted if megatron else None,
        packing=ours.packing is not False,
        microbatch=ours.samples,
        scoring_microbatch=ours.scoring_microbatch or ours.samples,
        virtual_pipeline=ours.virtual_pipeline if megatron else 1,
    )
    facts = RlinfFacts(colocate=run.traits.shares_devices)
    return replace(run, batch=run.batch.with_context(), trainer=trainer, facts=facts)


def _placement(run: Run) -> list[Setting]:
    """Ranks of GPUs: the trainer's first; rewards are computed beside the rollout."""
    trainer, shares = run.trainer.devices, run.traits.shares_devices
    first, parked = 0 if shares else trainer, run.trainer.parked is not False
    engine = f"{first}-{first + run.rollout.devices - 1}"
    settings = [
        Setting("cluster.num_nodes", run.nodes),
        Setting(f"{PLACED}.actor", f"0-{trainer - 1}"),
        Setting(f"{PLACED}.rollout", engine, "engine and trainer take turns" if shares else "GPUs of their own"),
        Setting(f"{PLACED}.reward", engine),
    ]
    if run.trainer.backend == "megatron":
        names = ("offload_weight", "offload_optimizer", "offload_grad")
        return [*settings, *(Setting(f"actor.{name}", shares and parked) for name in names)]
    return [*settings, Setting("actor.enable_offload", shares and parked)]


def _algorithm(run: Run) -> list[Setting]:
    settings = [
        Setting("runner.task_type", "reasoning"),
        Setting(A + "adv_type", "grpo"),
        Setting("critic.use_critic_model", False, "asked for whatever the algorithm"),
        Setting(A + "kl_beta", 0.001 if run.reference else 0.0, "0: no reference pass"),
        Setting(A + "recompute_logprobs", run.old_policy is not False, "old log-probs by the trainer"),
        Setting("rollout.return_logprobs", run.old_policy is False),
        Setting(M + "encoder_seq_length", run.batch.context_tokens, "of every row of a batch"),
    ]
    if run.rollout.backend == "sglang" and run.rollout.max_running:
        settings.append(Setting("rollout.cuda_graph_max_bs", run.rollout.max_running, "no more than run at once"))
    if run.rollout.backend == "sglang":
        settings.append(Setting(SAMPLING, None, "it would hide algorithm.sampling_params"))
    if run.trainer.backend == "megatron" and run.trainer.activation_recompute == "full":
        settings += [Setting(M + "recompute_method", "uniform"), Setting(M + "recompute_num_layers", 1)]
    if run.trainer.offload_optimizer:
        settings.append(Setting("actor.optim.optimizer_offload_fraction", 1.0))
    if run.trainer.backend != "fsdp2":
        return settings
    if run.trainer.zero_stage:
        return [*settings, Setting(F + "strategy", "fsdp2")]
    return [*settings, Setting(F + "strategy", "fsdp"), Setting(F + "sharding_strategy", "no_shard")]


def _names(run: Run) -> list[Setting]:
    model = f"/ckpt/{hub_name(run.architecture).rpartition('/')[2]}"
    named = ("rollout.model.model_path", M + "model_path", "actor.tokenizer.tokenizer_model")
    settings = [Setting(key, model, "yours") for key in named]
    return settings + (_lasting(run) if run.rl_steps else [])


def _lasting(run: Run) -> list[Setting]:
    """How long the run is; checkpoints go to ``output_dir/experiment_name/checkpoints`` and auto looks for them below
    the logger's path (runners/reasoning_runner.py:360, 291 of 0.3.0), so the two are one folder, and every task's own.
    """
    above, name = run.kept_in("results/rlperf").rsplit("/", 1)
    return [
        Setting("runner.max_steps", run.ends_at, "through this phase's last"),
        enough_epochs("runner.max_epochs", run),
        Setting("runner.save_interval", run.saves_every, "and at the end of the phase"),
        Setting("runner.resume_dir", "auto" if run.resumes else None, "goes on where one ended"),
        Setting("runner.output_dir", above, "yours"),
        Setting("runner.experiment_name", name, "yours; the same for every phase of a task"),
        Setting("runner.logger.log_path", f"{above}/{name}", "where resume_dir=auto looks: output_dir/experiment_name"),
    ]


# -- reading ----------------------------------------------------------------------------------------------------------

_ALSO_READ = frozenset(
    {
        "cluster.num_nodes", "cluster.auto_scheduler", "runner.task_type", A + "adv_type", A + "kl_beta",
        A + "reinpp_kl_beta", A + "recompute_logprobs", "rollout.return_logprobs", A + "importance_sampling_fix",
        "rollout.model.model_path", M + "model_path", M + "encoder_seq_length", "rollout.cuda_graph_max_bs",
        "actor.enable_offload", "actor.offload_weight", "actor.offload_optimizer", "actor.offload_grad",
        M + "is_lora", F + "strategy", F + "sharding_strategy", "critic.use_critic_model", SAMPLING,
        SAMPLING + ".max_new_tokens",
    }
)  # fmt: skip


def _read_trainer(ours: TrainerRun, flat: Flat) -> TrainerRun:
    """Recompute, offload and microbatches.

    Without variable_seq_lengths rows are as long as encoder_seq_length; Megatron's attention alone leaves their padding
    out (megatron_actor_worker.py:126, hybrid_engines/megatron/utils.py:57). Filled by tokens, FSDP packs them; Megatron
    gives every sequence of a microbatch max_tokens_per_mbs then, costed as encoder_seq_length: nothing is packed.
    """
    megatron = ours.backend == "megatron"
    recompute = ours.activation_recompute if megatron else ("full" if ours.checkpointing else "none")
    hosted = ours.offload_optimizer if megatron else ours.offload_all
    etp = flat.get(M + "expert_tensor_parallel_size") or ours.tensor_parallel
    fills = ours.dynamic and not (megatron and not ours.packing)
    filled = ours.having() if fills else ours.having(token_budget=None)
    sharded = SHARDED.get(str(flat.get(F + "sharding_strategy")), ours.zero_stage)
    return filled.having(
        zero_stage=ours.zero_stage if megatron or flat.get(F + "strategy") == "fsdp2" else sharded,
        activation_recompute=recompute,
        offload="optimizer" if hosted else "none",
        expert_tensor_parallel=int(etp) if megatron else 1,
        scoring_token_budget=filled.token_budget,
        packing=bool(ours.packing or fills),
    )


def _read_response(run: Run, flat: Flat) -> Run:
    """The longest response: of the section that the engine's worker reads; what the sequence leaves where none says."""
    hidden = [key for key, value in flat.items() if key.startswith(SAMPLING + ".") and value is not None]
    if hidden and run.rollout.backend == "sglang":
        key = SAMPLING + ".max_new_tokens"
        if flat.get(key) is None:
            return replace(run, missing=(*run.missing, key))
        return put(run, ref("batch.max_response_tokens"), flat[key], key)
    length, prompt = run.batch.context_tokens, run.batch.max_prompt_tokens
    if run.batch.max_response_tokens is None and length and prompt:
        return replace(run, batch=replace(run.batch, max_response_tokens=max(length - prompt, 1)))
    return run


def _longest(run: Run) -> int | None:
    """Tokens of the longest sequence: vLLM ends it at runner.seq_length (vllm_worker.py:347), SGLang does not."""
    prompt, response, length = run.batch.max_prompt_tokens, run.batch.max_response_tokens, run.batch.context_tokens
    if prompt is None or response is None:
        return None
    return min(prompt + response, length) if run.rollout.backend == "vllm" and length else prompt + response


def _read_rest(run: Run, flat: Flat) -> Run:
    """Devices, mode, and what rules ask."""
    nodes, placed, run = int(flat.get("cluster.num_nodes") or 1), placements(flat), _read_response(run, flat)
    actor, rollout, _ = ordered = [ranks_of(placed, role, 8 * nodes) for role in ("actor", "rollout", "reward")]
    missing = [f"{PLACED}.{role}" for role, ranks in (("actor", actor), ("rollout", rollout)) if not ranks]
    shares = actor == rollout
    both = {*actor, *rollout} or {0}
    kl = max(float(flat.get(A + name) or 0.0) for name in ("kl_beta", "reinpp_kl_beta"))
    offloads = ("enable_offload",) if run.trainer.backend == "fsdp2" else ("offload_weight", "offload_optimizer")
    parked = all(bool(flat.get(f"actor.{name}")) for name in offloads)
    trainer = run.trainer.having(devices=max(len(actor), 1), parked=parked if shares else None)
    log_probs = [flat.get(A + "recompute_logprobs"), flat.get("rollout.return_logprobs")]
    return replace(
        run,
        architecture=str(flat.get("rollout.model.model_path") or flat.get(M + "model_path") or ""),
        reference=kl > 0,
        old_policy=bool(flat.get(A + "recompute_logprobs")),
        mode="colocated" if shares else "streaming",
        devices=len(both),
        nodes=nodes,
        devices_per_node=-(-(max(both) + 1) // nodes),
        trainer=trainer,
        rollout=run.rollout.having(devices=max(len(rollout), 1)),
        missing=(*run.missing, *missing),
        wrong=(*run.wrong, *_unread(flat)),
        facts=RlinfFacts(
            colocate=shares,
            placed=shares or not set(actor) & set(rollout),
            contiguous=all(ranks == tuple(range(ranks[0], ranks[-1] + 1)) for ranks in ordered[:2] if ranks),
            rewarded="reward" in placed,
            inference="inference" in placed or "actor_inference" in placed,
            ungrouped=flat.get(A + "adv_type") not in (None, "grpo", "grpo_dynamic", "reinpp_baseline"),
            row_length=int(flat.get(M + "encoder_seq_length") or 0) or None,
            longest=_longest(run),
            log_probs=any(log_probs) if None not in log_probs else None,
            n_minibatches=int(flat.get(A + "n_minibatches") or 1),
            stated_microbatch=int(flat.get(A + "training_batch_size_per_gpu") or 1),
        ),
    )


def _unread(flat: Flat) -> list[str]:
    """What a file states that no job of rlperf says."""
    placed = placements(flat)
    one = flat.get("actor.training_backend") == "fsdp" and flat.get(F + "strategy") != "fsdp2"
    hybrid = one and flat.get(F + "sharding_strategy") == "hybrid_shard"
    refused: list[tuple[str, Value, str]] = [
        ("runner.task_type", flat.get("runner.task_type") not in (None, "reasoning"), "rlperf reads reasoning alone"),
        ("cluster.auto_scheduler", flat.get("cluster.auto_scheduler"), "pools that change their size as they run"),
        (A + "adv_type", flat.get(A + "adv_type") == "gae", "rlperf reads no critic of RLinf"),
        ("critic.use_critic_model", flat.get("critic.use_critic_model"), "rlperf reads no critic of RLinf"),
        (M + "is_lora", flat.get(M + "is_lora"), "rlperf reads no adapters of RLinf"),
        (F + "sharding_strategy", hybrid, "rlperf reads no sharding within groups of GPUs"),
    ]
    refused += [(key, True, "ranks count within the group, which rlperf does not resolve") for key in grouped(flat)]
    found = [f"{key}: {yaml_scalar(flat.get(key))} ({why})" for key, states, why in refused if states]
    return found + [f"{PLACED}.{name}: {placed[name]} (GPUs of its own)" for name in APART if name in placed]


ADAPTER = Rlinf()
