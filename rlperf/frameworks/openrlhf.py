"""OpenRLHF: dotted flags of ``openrlhf.cli.train_ppo_ray`` (0.10 and later); DeepSpeed ZeRO trainer, vLLM engines.

The optimizer's batch counts samples; token budgets are per GPU, times ring attention and DeepSpeed tensor parallel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlperf.errors import ExportError
from rlperf.frameworks.adapter import Emission, Limitation, Source, hub_name, node_shape
from rlperf.frameworks.fields import NEGATED, SAMPLES, Field, Setting, Target, Unit, field, read_fields, write_fields
from rlperf.frameworks.keytable import ABSENT, Value, key_table
from rlperf.frameworks.run import Run, complete_layouts
from rlperf.frameworks.writing import argument_array, script
from rlperf.specs.modes import MODES, mode_of_staleness


def _spread(run: Run) -> int:
    return run.number("trainer.context_parallel") * run.number("trainer.tensor_parallel")


_TOKENS = Unit(
    lambda value, run: int(value) * _spread(run),
    lambda value, run: -(-int(value) // _spread(run)),
    "tokens per GPU; times ring attention and ds.tensor_parallel_size at run time",
)
_CHECKPOINTING = Unit(lambda value, _: "full" if value else "none", lambda value, _: value != "none")
_SHARD = Unit(lambda value, _: 0 if value == 1 else value, lambda value, _: value or 1)
_LORA = Unit(lambda value, _: int(value) or None, lambda value, _: value)

FIELDS: tuple[Field, ...] = (
    field("batch.prompts_per_step", "rollout.batch_size", note="prompts"),
    field("batch.group_size", "rollout.n_samples_per_prompt"),
    field("batch.stated_samples", "train.batch_size", read_only=True),
    field("batch.mini_batch", "train.batch_size", SAMPLES),
    field("batch.context_tokens", "data.max_len", note="prompt + response"),
    field("batch.max_response_tokens", "rollout.max_new_tokens"),
    field("trainer.context_parallel", "ds.ring_attn_size", note="ring attention"),
    field("trainer.tensor_parallel", "ds.tensor_parallel_size"),
    field("trainer.zero_stage", "ds.zero_stage"),
    field("trainer.shard_size", "ds.zpg", _SHARD, "ZeRO++ partition group; 1: all GPUs"),
    field("trainer.compute_dtype", "ds.param_dtype"),
    field("trainer.offload_optimizer", "ds.adam_offload", note="optimizer in host memory"),
    field("trainer.activation_recompute", "actor.gradient_checkpointing_enable", _CHECKPOINTING),
    field("trainer.packing", "ds.packing_samples", note="sequences packed without padding"),
    field("trainer.lora_rank", "ds.lora.rank", _LORA),
    field("trainer.dynamic", "train.dynamic_batch_enable"),
    field("trainer.token_budget", "train.max_tokens_per_gpu", _TOKENS),
    field("trainer.scoring_token_budget", "rollout.max_tokens_per_gpu", _TOKENS),
    field("trainer.microbatch", "train.micro_batch_size", note="samples per GPU"),
    field("trainer.scoring_microbatch", "rollout.micro_batch_size", note="samples per GPU"),
    field("rollout.tensor_parallel", "vllm.tensor_parallel_size"),
    field("rollout.data_parallel", "vllm.num_engines", note="engines"),
    field("rollout.memory_fraction", "vllm.gpu_memory_utilization"),
    field("rollout.prefix_caching", "vllm.enable_prefix_caching"),
    field("rollout.cuda_graphs", "vllm.enforce_eager", NEGATED),
    field("rollout.sleeps", "vllm.enable_sleep", note="engine and trainer take turns"),
    field("trainer.sleeps", "ds.enable_sleep"),
)

_NO_KEY = {
    "rollout.max_running": "vLLM's default of max_num_seqs",
    "rollout.engine_token_budget": "vLLM's default of max_num_batched_tokens",
    "trainer.chunked_loss": "whole logits tensor",
}


METRICS = {
    "timing/step_total": "rl_step_s",
    "timing/generation": "rollout_s",
    "timing/make_experience": "scoring_s",
    "timing/ppo_train": "training_s",
    "timing/broadcast": "weight_sync_s",
    "rollout/response_length_mean": "response_tokens",
    "rollout/truncated_rate": "truncated_fraction",
}
"""Metric -> column of `StepLog` (openrlhf/trainer/ppo_trainer.py); make_experience scores and rewards."""


@dataclass(frozen=True)
class OpenRlhf:
    """The adapter."""

    name: str = "openrlhf"
    title: str = "OpenRLHF"
    fields: tuple[Field, ...] = FIELDS

    # -- export -------------------------------------------------------------------------------------------------

    def adapt(self, run: Run, version: str) -> tuple[Run, tuple[Limitation, ...]]:
        """DeepSpeed only; engines know tensor parallel alone; several engine settings have no flag."""
        lost: list[Limitation] = []
        changes: dict[str, Value] = {"trainer.backend": "deepspeed", "rollout.backend": "vllm"}
        if run.traits.lag is None:
            changes["run.mode"] = "k_step_off"  # what its queue counts, whatever the mode is called
        if run.number("trainer.pipeline_parallel") > 1 or run.number("trainer.expert_parallel") > 1:
            raise ExportError(
                "DeepSpeed has no pipeline or expert parallel",
                "openrlhf",
                {"nearest": "trainer_backends: deepspeed in the job, and plan again"},
            )
        planned = run.get("trainer.backend", "deepspeed")
        if planned != "deepspeed":
            stage = max(run.number("trainer.zero_stage", 0), 1)
            changes["trainer.zero_stage"] = stage
            loss = f"training time was predicted for {planned}"
            lost.append(Limitation(f"{planned} trainer", f"DeepSpeed ZeRO-{stage}", loss))
        if run.number("trainer.ulysses") > 1:
            ring = run.number("trainer.context_parallel") * run.number("trainer.ulysses")
            changes.update({"trainer.context_parallel": ring, "trainer.ulysses": 1})
            lost.append(Limitation("Ulysses", f"ring attention {ring}", "ring exchange in place of all-to-all"))
        if run.get("trainer.activation_recompute") == "selective":
            changes["trainer.activation_recompute"] = "full"
            lost.append(Limitation("selective recompute", "full recompute", "up to a third of the training time more"))
        if run.get("trainer.offload") in ("activations", "both"):
            changes["trainer.activation_recompute"] = "full"
            changes["trainer.offload"] = "optimizer" if run.get("trainer.offload") == "both" else "none"
            lost.append(Limitation("activation offload", "full recompute", "up to a third of the training time more"))
        changes.update(_engine(run, lost))
        for name, nearest in _NO_KEY.items():
            if run.get(name):
                loss = "more memory" if name.startswith("trainer.") else "the engine may preempt or queue otherwise"
                lost.append(Limitation(f"{name} = {run.get(name)}", nearest, loss))
        return run.with_(changes), tuple(lost)

    def emit(self, run: Run, target: Target) -> Emission:
        """All flags of a run."""
        run = _with_derived(run)
        settings = write_fields(self.fields, run, target)
        chosen = {s.key: s for s in (*settings, *_placement(run), *_algorithm(run))}
        kept = [s for s in chosen.values() if s.value is not None and s.value is not False and target.has(s.key)]
        return Emission(tuple(kept), (), "openrlhf.cli.train_ppo_ray", (), run)

    def render(self, emission: Emission, stem: str, header: Sequence[str]) -> dict[str, str]:
        """``<stem>.sh`` with one array of flags."""
        yours = {
            "actor.model_name_or_path": "MODEL_PATH",
            "data.prompt_dataset": "PROMPT_DATA",
            "reward.remote_url": "REWARD_FUNC",
        }
        flags = [
            Setting(s.key, f"${{{yours[s.key]}:-{s.value}}}" if s.key in yours else s.value, s.why)
            for s in emission.settings
        ]
        body = [*argument_array("ARGS", flags), f'python3 -m {emission.entry} "${{ARGS[@]}}" "$@"']
        return {f"{stem}.sh": script(header, body)}

    # -- import -------------------------------------------------------------------------------------------------

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
        specs = target.table.keys(target.version)
        flat: dict[str, Value] = {key: spec.default for key, spec in specs.items() if spec.default is not ABSENT}
        flat.update(source.keys)
        start = Run({"trainer.backend": "deepspeed", "rollout.backend": "vllm"})
        run, used = read_fields(self.fields, flat, target, start)
        run = run.with_(_read_placement(run, flat))
        return Run(complete_layouts(run.values)), frozenset(used | _ALSO_READ)


def _engine(run: Run, lost: list[Limitation]) -> dict[str, Value]:
    """Tensor parallel is all that an engine has."""
    width, depth = run.number("rollout.tensor_parallel"), run.number("rollout.pipeline_parallel")
    changes: dict[str, Value] = {}
    if depth > 1:
        changes.update({"rollout.tensor_parallel": width * depth, "rollout.pipeline_parallel": 1})
        lost.append(
            Limitation(f"rollout pipeline_parallel {depth}", f"tensor parallel {width * depth}", "more all-reduce")
        )
    for degree in ("expert_parallel", "attention_data_parallel"):
        size = run.number(f"rollout.{degree}")
        if size > 1:
            changes[f"rollout.{degree}"] = 1
            lost.append(
                Limitation(f"rollout {degree} {size}", f"tensor parallel {width * depth}", "more KV and weight traffic")
            )
    return changes


def _with_derived(run: Run) -> Run:
    budget = run.get("trainer.token_budget")
    colocated = run.traits.shares_devices
    scoring = run.get("trainer.scoring_token_budget") or (2 * int(budget) if budget else None)
    packing = run.get("trainer.packing")
    return run.with_(
        {
            "batch.context_tokens": run.number("batch.max_prompt_tokens") + run.number("batch.max_response_tokens"),
            "trainer.offload_optimizer": run.get("trainer.offload") in ("optimizer", "both"),
            "trainer.packing": True
            if packing is None or budget or run.number("trainer.context_parallel") > 1
            else packing,
            "trainer.dynamic": budget is not None,
            "trainer.scoring_token_budget": scoring,
            "trainer.compute_dtype": run.get("trainer.compute_dtype", "bf16"),
            "rollout.sleeps": colocated,
            "trainer.sleeps": colocated and run.get("trainer.parked") is not False,
            "run.colocate_all": colocated,
            "run.async_enabled": run.traits.runs_ahead,
        }
    )


def _placement(run: Run) -> list[Setting]:
    per_node = run.number("run.devices_per_node", 8)
    shape = node_shape(run.number("trainer.devices"), per_node)
    if shape is None:
        raise ExportError(f"{run.number('trainer.devices')} trainer GPUs fill no whole nodes of {per_node}", "openrlhf")
    roles = ["actor", "ref"] + (["critic", "reward"] if run.get("run.algorithm") == "ppo" else [])
    settings = [
        setting
        for role in roles
        for setting in (Setting(f"{role}.num_nodes", shape[0]), Setting(f"{role}.num_gpus_per_node", shape[1]))
    ]
    if run.get("run.colocate_all"):
        settings.append(Setting("train.colocate_all", True, "all roles on the same GPUs, in turn"))
    else:
        settings.append(Setting("train.colocate_actor_ref", True, "the reference shares the actor's GPUs"))
    if run.get("run.async_enabled"):
        queue = max(run.number("run.staleness", 1), 1)
        settings += [Setting("train.async_enable", True), Setting("train.async_queue_size", queue, "batches ahead")]
    return [*settings, Setting("vllm.sync_backend", "nccl")]


def _algorithm(run: Run) -> list[Setting]:
    algorithm, reference = run.get("run.algorithm", "grpo"), bool(run.get("run.reference"))
    settings = [
        Setting("actor.model_name_or_path", hub_name(str(run.get("run.architecture", ""))), "yours"),
        Setting("data.prompt_dataset", "/data/prompts.jsonl", "yours"),
        Setting("data.input_key", "prompt", "yours"),
        Setting("data.label_key", "label", "yours"),
        Setting("data.apply_chat_template", True),
        Setting("reward.remote_url", "/ws/reward_func.py", "yours"),
        Setting("algo.advantage.estimator", "gae" if algorithm == "ppo" else "group_norm"),
        Setting("algo.kl.init_coef", 0.001 if reference else 0.0, "0: no reference pass"),
    ]
    if reference and algorithm != "ppo":
        settings += [Setting("algo.kl.use_loss", True), Setting("algo.kl.estimator", "k3")]
    if algorithm == "dapo":
        settings += [
            Setting("algo.dynamic_filtering_enable", True, "drop groups without a signal"),
            Setting("actor.eps_clip_low_high", [0.2, 0.28]),
        ]
    if run.get("run.rl_steps"):
        steps = run.number("run.last_rl_step", run.number("run.rl_steps"))
        samples = steps * run.number("batch.prompts_per_step")
        settings.append(Setting("data.max_samples", samples, "prompts through the last rl_step of this phase"))
        settings.append(Setting("ckpt.save_steps", run.number("run.rl_steps"), "the next phase resumes from here"))
        settings.append(Setting("ckpt.load_enable", steps > run.number("run.rl_steps")))
    return settings


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


def _read_placement(run: Run, flat: Mapping[str, Value]) -> dict[str, Value]:
    per_node = int(flat.get("actor.num_gpus_per_node") or 8)
    trainer = int(flat.get("actor.num_nodes") or 1) * per_node
    engines = run.get("rollout.data_parallel")
    rollout = int(engines) * run.number("rollout.tensor_parallel") if engines else trainer
    asynchronous, colocated = bool(flat.get("train.async_enable")), bool(flat.get("train.colocate_all"))
    queue = int(flat.get("train.async_queue_size") or 1)
    behind = queue if asynchronous else 0
    mode = mode_of_staleness(behind, shares_devices=colocated and not asynchronous, beyond="k_step_off")
    total = trainer if MODES[mode].shares_devices else trainer + rollout
    context = run.number("batch.context_tokens")
    response = min(run.number("batch.max_response_tokens", context), context)
    prompt = context - response if context > response else max(min(1024, context // 8), 1)
    filtered = bool(flat.get("algo.dynamic_filtering_enable"))
    estimator, dynamic = flat.get("algo.advantage.estimator"), bool(flat.get("train.dynamic_batch_enable"))
    return {
        "trainer.devices": trainer,
        "rollout.devices": rollout,
        "rollout.num_engines": engines or 0,
        "trainer.parked": bool(run.get("trainer.sleeps")) if MODES[mode].shares_devices else None,
        "run.devices": total,
        "run.devices_per_node": per_node,
        "run.nodes": -(-total // per_node),
        "run.mode": mode,
        "run.staleness": behind,
        "run.colocate_all": colocated,
        "run.async_enabled": asynchronous,
        "run.partial_rollout": bool(flat.get("train.partial_rollout_enable")),
        "run.generate_batch": flat.get("rollout.vllm_generate_batch_size") or run.number("batch.prompts_per_step"),
        "run.ref_devices": int(flat.get("ref.num_nodes") or 1) * int(flat.get("ref.num_gpus_per_node") or 8),
        "run.needs_groups": estimator in ("rloo", "reinforce_baseline", "group_norm", "dr_grpo"),
        "run.architecture": str(flat.get("actor.model_name_or_path")),
        "run.algorithm": "ppo" if estimator == "gae" else "dapo" if filtered else "grpo",
        "run.reference": float(flat.get("algo.kl.init_coef") or 0) > 0,
        "batch.max_prompt_tokens": prompt,
        "batch.max_response_tokens": context - prompt,
        "trainer.offload": "optimizer" if run.get("trainer.offload_optimizer") else "none",
        "trainer.token_budget": run.get("trainer.token_budget") if dynamic else None,
        "trainer.scoring_token_budget": (run.get("trainer.scoring_token_budget") or run.get("trainer.token_budget"))
        if dynamic
        else None,
    }  # fmt: skip


ADAPTER = OpenRlhf()
