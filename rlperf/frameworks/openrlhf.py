"""OpenRLHF: flags of ``openrlhf.cli.train_ppo_ray``, dotted since 0.10; DeepSpeed ZeRO trainer, vLLM engines.

The optimizer's batch counts samples; token budgets are per GPU, times ring attention and DeepSpeed tensor parallel.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlperf.errors import ExportError
from rlperf.frameworks.adapter import Emission, Limitation, Source, node_shape
from rlperf.frameworks.fields import (
    CHECKPOINTING,
    LORA_RANK,
    NEGATED,
    OPTIMIZER,
    SAMPLES,
    Field,
    Setting,
    Target,
    Unit,
    computes,
    elsewhere,
    field,
    read_fields,
    write_fields,
)
from rlperf.frameworks.hub import hub_name
from rlperf.frameworks.keytable import Flat, Value, key_table
from rlperf.frameworks.nearest import (
    plain_engine,
    without_activation_offload,
    without_selective_recompute,
    without_ulysses,
)
from rlperf.frameworks.releases import OPENRLHF_NAMES
from rlperf.frameworks.run import RolloutRun, Run, TrainerRun
from rlperf.frameworks.writing import argument_array, defaults, script
from rlperf.specs.modes import MODES, mode_of_staleness


def _spread(trainer: TrainerRun) -> int:
    return trainer.context_parallel * trainer.tensor_parallel


_TOKENS = Unit(
    lambda value, run: int(value) * _spread(run.trainer),
    lambda value, run: -(-value // _spread(run.trainer)),
    "tokens per GPU; times ring attention and ds.tensor_parallel_size at run time",
)
_SHARD = Unit(lambda value, _: 0 if value == 1 else value, lambda value, _: value or 1)

FIELDS: tuple[Field, ...] = (
    field("batch.prompts_per_step", "rollout.batch_size rollout_batch_size", note="prompts"),
    field("batch.group_size", "rollout.n_samples_per_prompt n_samples_per_prompt"),
    field("batch.stated_samples", "train.batch_size train_batch_size", read_only=True),
    field("batch.mini_batch", "train.batch_size train_batch_size", SAMPLES),
    field("batch.context_tokens", "data.max_len max_len", note="prompt + response"),
    field("batch.max_response_tokens", "rollout.max_new_tokens generate_max_len"),
    field("trainer.context_parallel", "ds.ring_attn_size ring_attn_size", note="ring attention"),
    field("trainer.tensor_parallel", "ds.tensor_parallel_size ds_tensor_parallel_size"),
    field("trainer.zero_stage", "ds.zero_stage zero_stage"),
    field("trainer.optimizer", "actor.optim", OPTIMIZER),
    field("trainer.shard_size", "ds.zpg zpg", _SHARD, "ZeRO++ partition group; 1: all GPUs"),
    field("trainer.compute_dtype", "ds.param_dtype", computes(dtypes=("bf16", "fp16"))),
    field("trainer.offload_optimizer", "ds.adam_offload adam_offload", note="optimizer in host memory"),
    field("trainer.activation_recompute", "actor.gradient_checkpointing_enable gradient_checkpointing", CHECKPOINTING),
    *elsewhere("trainer.parked", "ds.enable_sleep"),
    field("trainer.packing", "ds.packing_samples packing_samples", note="sequences packed without padding"),
    field("trainer.lora_rank", "ds.lora.rank lora_rank", LORA_RANK),
    field("trainer.epochs", "train.max_epochs max_epochs", note="times that a batch is trained on"),
    field("trainer.dynamic", "train.dynamic_batch_enable use_dynamic_batch"),
    field("trainer.token_budget", "train.max_tokens_per_gpu train_max_tokens_per_gpu", _TOKENS),
    field("trainer.scoring_token_budget", "rollout.max_tokens_per_gpu rollout_max_tokens_per_gpu", _TOKENS),
    field("trainer.microbatch", "train.micro_batch_size micro_train_batch_size", note="samples per GPU"),
    field("trainer.scoring_microbatch", "rollout.micro_batch_size micro_rollout_batch_size", note="samples per GPU"),
    field("rollout.tensor_parallel", "vllm.tensor_parallel_size vllm_tensor_parallel_size"),
    field("rollout.data_parallel", "vllm.num_engines vllm_num_engines", note="engines"),
    field("rollout.memory_fraction", "vllm.gpu_memory_utilization vllm_gpu_memory_utilization"),
    field("rollout.prefix_caching", "vllm.enable_prefix_caching enable_prefix_caching"),
    field("rollout.cuda_graphs", "vllm.enforce_eager enforce_eager", NEGATED),
    field("rollout.sleeps", "vllm.enable_sleep vllm_enable_sleep", note="engine and trainer take turns"),
    field("trainer.sleeps", "ds.enable_sleep deepspeed_enable_sleep"),
)


@dataclass(frozen=True)
class OpenRlhf:
    """The adapter."""

    name: str = "openrlhf"
    title: str = "OpenRLHF"
    fields: tuple[Field, ...] = FIELDS

    def adapt(self, run: Run, version: str) -> tuple[Run, tuple[Limitation, ...]]:
        """DeepSpeed only; engines know tensor parallel alone; several engine settings have no flag."""
        lost: list[Limitation] = []
        trainer = run.trainer
        if trainer.pipeline_parallel > 1 or trainer.expert_parallel > 1:
            raise ExportError(
                "DeepSpeed has no pipeline or expert parallel",
                "openrlhf",
                {"nearest": "trainer_backends: deepspeed in the job, and plan again"},
            )
        planned = trainer.backend or "deepspeed"
        if planned != "deepspeed":
            stage = max(trainer.zero_stage, 1)
            trainer = trainer.having(zero_stage=stage)
            loss = f"training time was predicted for {planned}"
            lost.append(Limitation(f"{planned} trainer", f"DeepSpeed ZeRO-{stage}", loss))
        if trainer.ulysses > 1:
            trainer = without_ulysses(trainer)
            ring = f"ring attention {trainer.context_parallel}"
            lost.append(Limitation("Ulysses", ring, "ring exchange in place of all-to-all"))
        trainer = without_activation_offload(without_selective_recompute(trainer, lost), lost)
        rollout = plain_engine(run.rollout, lost)
        if trainer.chunked_loss:
            lost.append(Limitation("trainer.chunked_loss", "whole logits tensor", "more memory"))
        trainer, rollout = trainer.having(backend="deepspeed"), rollout.having(backend="vllm")
        # what its bound counts, whatever the mode is called
        mode = mode_of_staleness(run.staleness, beyond="k_step_off") if run.traits.lag is None else run.mode
        return replace(run, mode=mode, trainer=trainer, rollout=rollout), tuple(lost)

    def emit(self, run: Run, target: Target) -> Emission:
        """All flags of a run."""
        run = _with_derived(run)
        settings = write_fields(self.fields, run, target)
        old = {} if target.has("vllm.num_engines") else {new: name for name, new in OPENRLHF_NAMES.items()}
        rates, lost = _rates(run, target)
        own = (*_placement(run), *_algorithm(run), *rates)
        added = [replace(s, key=old.get(s.key, s.key)) for s in own]
        if old:  # what became one length
            added.append(Setting("prompt_max_len", run.batch.max_prompt_tokens))
        chosen = {s.key: s for s in (*settings, *added)}
        kept = [s for s in chosen.values() if s.value is not None and s.value is not False and target.has(s.key)]
        return Emission(tuple(kept), lost, "openrlhf.cli.train_ppo_ray", (), run)

    def render(self, emission: Emission, stem: str, header: Sequence[str]) -> dict[str, str]:
        """``<stem>.sh`` with one array of flags."""
        yours = {
            "actor.model_name_or_path": "MODEL_PATH",
            "data.prompt_dataset": "PROMPT_DATA",
            "reward.remote_url": "REWARD_FUNC",
        }
        yours |= {old: yours[new] for old, new in OPENRLHF_NAMES.items() if new in yours}
        given = {yours[s.key]: s.value for s in emission.settings if s.key in yours}
        launch = f'python3 -m {shlex.quote(emission.entry)} "${{ARGS[@]}}" "$@"'
        body = ['cd "$(dirname "$0")"', *defaults(given), *argument_array("ARGS", emission.settings, yours), launch]
        return {f"{stem}.sh": script(header, body)}

    def detect(self, source: Source) -> float:
        """The entry point, or its dotted (or, up to 0.9, underscored) flags."""
        if source.entry.startswith("openrlhf."):
            return 1.0
        return 0.9 if {"vllm.num_engines", "vllm_num_engines"} & set(source.keys) else 0.0

    def target(self, source: Source, version: str | None) -> Target:
        """One backend."""
        table = key_table(self.name)
        return Target(table, table.version(version))

    def read(self, source: Source, target: Target) -> tuple[Run, frozenset[str]]:
        """Neutral values of the flags over argparse's defaults."""
        flat = _dotted({**Target(target.table, target.table.versions[-1]).defaults(), **source.keys})
        start = Run(trainer=TrainerRun(backend="deepspeed"), rollout=RolloutRun(backend="vllm"))
        run, used = read_fields(self.fields, flat, target, start)
        run = _read_placement(_read_settings(run, flat), flat)
        return run.completed(), frozenset(used | _ALSO_READ | OPENRLHF_NAMES.keys() | {"prompt_max_len"})


@dataclass(frozen=True)
class OpenRlhfFacts:
    """What rules ask beside the run: which roles share devices, and what flags add up to."""

    colocate_all: bool
    async_enabled: bool
    partial_rollout: bool | None = None
    generate_batch: int | None = None
    ref_devices: int | None = None
    ref_shared: bool | None = None
    needs_groups: bool | None = None


def _with_derived(run: Run) -> Run:
    ours = run.trainer
    trainer = ours.having(
        offload_optimizer=ours.offload in ("optimizer", "both"),
        packing=ours.packing is not False or bool(ours.token_budget) or ours.context_parallel > 1,
        dynamic=ours.token_budget is not None,
        scoring_token_budget=ours.scoring_budget or ours.token_budget,
        compute_dtype=ours.compute_dtype or "bf16",
        sleeps=run.traits.shares_devices and ours.parked is not False,
    )
    batch, rollout = run.batch.with_context(), run.rollout.having(sleeps=run.traits.shares_devices)
    facts = OpenRlhfFacts(colocate_all=_all_together(run), async_enabled=run.traits.runs_ahead)
    return replace(run, batch=batch, trainer=trainer, rollout=rollout, facts=facts)


def _all_together(run: Run) -> bool:
    """Whether all roles share GPUs; in asynchronous modes all but the engines, which is what a critic shares them by.

    Raises
    ------
    ExportError : a critic on the actor's GPUs beside engines that have their own, in turn with them: it gets its own
    """
    if run.together and not run.traits.shares_devices and not run.traits.runs_ahead:
        nearest = "a critic pool with placement: own and its devices, or another mode"
        raise ExportError(f"in mode {run.mode} a critic has GPUs of its own", "openrlhf", {"nearest": nearest})
    return run.together


def _placement(run: Run) -> list[Setting]:
    per_node, own = run.devices_per_node, run.trainer.devices
    roles = {"actor": own, "ref": own}
    if run.algorithm == "ppo":
        roles |= {"critic": run.critic_devices or own, "reward": own}
    settings = []
    for role, devices in roles.items():
        shape = node_shape(devices, per_node)
        if shape is None and role == "actor":
            raise ExportError(f"{devices} GPUs of the {role} fill no whole nodes of {per_node}", "openrlhf")
        if shape is None:  # Ray packs single GPUs (ray/launcher.py:245-251): the product counts
            each = max(gpus for gpus in range(1, per_node) if devices % gpus == 0)
            shape = devices // each, each
        settings += [Setting(f"{role}.num_nodes", shape[0]), Setting(f"{role}.num_gpus_per_node", shape[1])]
    if _all_together(run):
        who = "all roles" if run.traits.shares_devices else "all that train and score"
        settings.append(Setting("train.colocate_all", True, f"{who} on the same GPUs, in turn"))
    else:
        settings.append(Setting("train.colocate_actor_ref", True, "the reference shares the actor's GPUs"))
    if run.traits.runs_ahead:
        queue = max(run.staleness, 1)
        settings += [Setting("train.async_enable", True), Setting("train.async_queue_size", queue, "batches ahead")]
    return [*settings, Setting("vllm.sync_backend", "nccl")]


def _algorithm(run: Run) -> list[Setting]:
    algorithm, reference = run.algorithm, run.reference
    settings = [
        Setting("actor.model_name_or_path", hub_name(run.architecture), "yours"),
        Setting("data.prompt_dataset", f"/data/{run.data}.jsonl", "yours"),
        Setting("data.input_key", "prompt", "yours"),
        Setting("data.label_key", "label", "yours"),
        Setting("data.apply_chat_template", True),
        Setting("algo.advantage.estimator", "gae" if algorithm == "ppo" else "group_norm"),
        Setting("algo.kl.init_coef", 0.001 if reference else 0.0, "0: no reference pass"),
    ]
    if reference and algorithm != "ppo":
        settings += [Setting("algo.kl.use_loss", True), Setting("algo.kl.estimator", "k3")]
    if not any(scorer.kind == "reward" for scorer in run.scorers):  # beside a remote_url no reward model is loaded
        settings.append(Setting("reward.remote_url", "/ws/reward_func.py", "yours"))
    if run.batch.turns > 1:
        settings.append(Setting("train.agent_func_path", "/ws/agent.py", "yours: the turns with your tools"))
    if algorithm == "dapo":
        settings += [
            Setting("algo.dynamic_filtering_enable", True, "drop groups without a signal"),
            Setting("actor.eps_clip_low_high", [0.2, 0.28]),
        ]
    if run.rl_steps:
        samples = run.through(lambda batch: batch.generated_prompts or batch.prompts)
        drawn = "on average drawn" if algorithm == "dapo" else "drawn"
        settings.append(Setting("data.max_samples", samples, f"prompts {drawn} through the last rl_step of this phase"))
        settings.append(Setting("ckpt.save_steps", run.saves_every, "and at the end of the phase"))
        settings.append(Setting("ckpt.path", run.kept_in("ckpt/rlperf"), "yours; the same for every phase of a task"))
        settings.append(Setting("ckpt.load_enable", run.resumes, "goes on where the phase before ended"))
    return settings


def _rates(run: Run, target: Target) -> tuple[list[Setting], tuple[Limitation, ...]]:
    """What keeps learning rates from falling to their end with every phase, as the cosine over data.max_samples does.

    Which schedules take ``min_lr`` is asked since 0.11 (0.11.2 utils/deepspeed/deepspeed.py:369): before, none is
    written.
    """
    if not (run.before or run.after):
        return [], ()
    if target.version in ("0.9", "0.10"):
        lost = "the learning rate falls to its end in each of them"
        return [], (Limitation("one schedule of the learning rate over all phases", "one of each phase", lost),)
    roles = ("actor", "critic") if run.algorithm == "ppo" else ("actor",)
    return [Setting(f"{role}.lr_scheduler", "constant", "yours, over all phases") for role in roles], ()


# -- reading ----------------------------------------------------------------------------------------------------------

_ALSO_READ = frozenset(
    {
        "actor.num_nodes", "actor.num_gpus_per_node", "ref.num_nodes", "ref.num_gpus_per_node", "train.colocate_all",
        "train.async_enable", "train.async_queue_size", "algo.advantage.estimator", "algo.kl.init_coef",
        "actor.model_name_or_path", "algo.dynamic_filtering_enable", "critic.num_nodes", "critic.num_gpus_per_node",
        "reward.num_nodes", "reward.num_gpus_per_node", "train.partial_rollout_enable",
        "rollout.vllm_generate_batch_size",
    }
)  # fmt: skip


def _dotted(flat: Flat) -> dict[str, Value]:
    """Flags under the names that they have had since 0.10; the two lengths of before as the one that they became."""
    old = {OPENRLHF_NAMES[name]: value for name, value in flat.items() if name in OPENRLHF_NAMES}
    lengths = [flat.get("prompt_max_len"), flat.get("generate_max_len")]
    if any(lengths) and "data.max_len" not in old:
        old["data.max_len"] = sum(int(each or 1024) for each in lengths)
    return {**flat, **old}


def _read_settings(run: Run, flat: Flat) -> Run:
    """Lengths, offload and budgets in the words of a plan."""
    ours, context = run.trainer, run.batch.context_tokens or 1
    response = min(run.batch.max_response_tokens or context, context)
    prompt = context - response if context > response else max(min(1024, context // 8), 1)
    dynamic = bool(flat.get("train.dynamic_batch_enable"))
    trainer = ours.having(
        offload="optimizer" if ours.offload_optimizer else "none",
        token_budget=ours.token_budget if dynamic else None,
        scoring_token_budget=ours.scoring_token_budget or ours.token_budget if dynamic else None,
    )
    turns = 2 if flat.get("train.agent_func_path") else 1
    batch = replace(run.batch, max_prompt_tokens=prompt, max_response_tokens=context - prompt, turns=turns)
    return replace(run, batch=batch, trainer=trainer)


def _devices(flat: Flat, role: str) -> int:
    """GPUs of a role."""
    return int(flat.get(f"{role}.num_nodes") or 1) * int(flat.get(f"{role}.num_gpus_per_node") or 8)


def _node_size(flat: Flat, roles: Sequence[str], total: int) -> int:
    """GPUs of a node: what a role of several nodes says, else eight of those that there are, or a role's if more.

    Ray packs single GPUs (ray/launcher.py:245-251, PACK): a role on part of a node says nothing of the node's size.
    """
    shapes = [(int(flat.get(f"{role}.num_nodes") or 1), int(flat.get(f"{role}.num_gpus_per_node") or 8))
              for role in roles]  # fmt: skip
    whole = [gpus for nodes, gpus in shapes if nodes > 1]
    return max(whole) if whole else max(min(8, total), *(min(gpus, total) for _, gpus in shapes))


def _read_placement(run: Run, flat: Flat) -> Run:
    """Devices, mode, algorithm, and what rules ask."""
    trainer = _devices(flat, "actor")
    engines = run.rollout.data_parallel
    rollout = engines * run.rollout.tensor_parallel if engines else trainer
    asynchronous, colocated = bool(flat.get("train.async_enable")), bool(flat.get("train.colocate_all"))
    queue = int(flat.get("train.async_queue_size") or 1)
    behind = queue if asynchronous else 0
    mode = mode_of_staleness(behind, shares_devices=colocated and not asynchronous, beyond="k_step_off")
    shares = MODES[mode].shares_devices
    estimator, filtered = flat.get("algo.advantage.estimator"), bool(flat.get("algo.dynamic_filtering_enable"))
    # without colocate_all a critic has GPUs of its own, and so has a reward model, which rules and rlperf leave out
    critic = _devices(flat, "critic") if estimator == "gae" and not colocated else 0
    total = critic + (trainer if shares else trainer + rollout)
    per_node = _node_size(flat, ("actor", "ref", *(["critic"] if critic else [])), total)
    return replace(
        run,
        critic_devices=critic,
        architecture=str(flat.get("actor.model_name_or_path")),
        algorithm="ppo" if estimator == "gae" else "dapo" if filtered else "grpo",
        reference=float(flat.get("algo.kl.init_coef") or 0) > 0,
        old_policy=True,  # trainer/ppo_utils/experience_maker.py:136-182: no switch leaves it out
        mode=mode,
        staleness=behind,
        devices=total,
        nodes=-(-total // per_node),
        devices_per_node=per_node,
        trainer=run.trainer.having(devices=trainer, parked=bool(run.trainer.sleeps) if shares else None),
        rollout=run.rollout.having(devices=rollout, num_engines=engines or 0),
        facts=OpenRlhfFacts(
            colocate_all=colocated,
            async_enabled=asynchronous,
            partial_rollout=bool(flat.get("train.partial_rollout_enable")),
            generate_batch=flat.get("rollout.vllm_generate_batch_size") or run.batch.prompts,
            ref_devices=_devices(flat, "ref") if float(flat.get("algo.kl.init_coef") or 0) > 0 else 0,
            ref_shared=colocated or bool(flat.get("train.colocate_actor_ref")),
            needs_groups=estimator in ("rloo", "reinforce_baseline", "group_norm", "dr_grpo"),
        ),
    )


ADAPTER = OpenRlhf()
