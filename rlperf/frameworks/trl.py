"""TRL: ``trl grpo`` with one YAML and an accelerate config; data parallel only (DDP, ZeRO or FSDP), vLLM beside it.

Batches count completions: per_device_train_batch_size x gradient_accumulation_steps x GPUs per optimizer update,
per_device_train_batch_size x steps_per_generation x GPUs per rollout. There is no token budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlperf.errors import ExportError
from rlperf.frameworks.adapter import Emission, Limitation, Source, hub_name, node_shape
from rlperf.frameworks.fields import Field, Setting, Target, Unit, field, read_fields, write_fields
from rlperf.frameworks.keytable import ABSENT, Value, key_table
from rlperf.frameworks.run import Run, complete_layouts
from rlperf.frameworks.writing import script, yaml_text
from rlperf.specs.modes import mode_of_staleness

_CHECKPOINTING = Unit(lambda value, _: "full" if value else "none", lambda value, _: value != "none")

FIELDS: tuple[Field, ...] = (
    field("batch.group_size", "num_generations", note="completions per prompt"),
    field("batch.max_response_tokens", "max_completion_length"),
    field("batch.context_tokens", "vllm_max_model_length", note="prompt + completion"),
    field("trainer.microbatch", "per_device_train_batch_size", note="completions per GPU and forward"),
    field("trainer.accumulation", "gradient_accumulation_steps", note="forwards per optimizer update"),
    field("trainer.generation_steps", "steps_per_generation", note="forwards per rollout"),
    field("trainer.activation_recompute", "gradient_checkpointing", _CHECKPOINTING),
    field("trainer.lora_rank", "lora_r"),
    field("trainer.chunked_loss", "use_liger_kernel", note="no full logits tensor"),
    field("rollout.tensor_parallel", "vllm_tensor_parallel_size"),
    field("rollout.memory_fraction", "vllm_gpu_memory_utilization"),
    field("rollout.sleeps", "vllm_enable_sleep_mode", note="engine and trainer take turns"),
)

_NO_KEY = {
    "rollout.max_running": "vLLM's default of max_num_seqs",
    "rollout.engine_token_budget": "vLLM's default of max_num_batched_tokens",
}


METRICS = {
    "step_time": "rl_step_s",
    "completions/mean_length": "response_tokens",
    "completions/max_length": "response_tokens_max",
    "completions/clipped_ratio": "truncated_fraction",
}
"""Metric -> column of `StepLog`; TRL times the whole optimizer update only."""


@dataclass(frozen=True)
class Trl:
    """The adapter."""

    name: str = "trl"
    title: str = "TRL"
    fields: tuple[Field, ...] = FIELDS

    # -- export -------------------------------------------------------------------------------------------------

    def adapt(self, run: Run, version: str) -> tuple[Run, tuple[Limitation, ...]]:
        """No model parallel training, no asynchronous mode, no token budget."""
        for degree in ("pipeline_parallel", "expert_parallel", "tensor_parallel", "context_parallel", "ulysses"):
            if run.number(f"trainer.{degree}") > 1:
                raise ExportError(
                    f"the trainer has no {degree} ({run.number('trainer.' + degree)} in the plan)",
                    "trl",
                    {"nearest": "trainer_backends: deepspeed with ulysses, tensor and context parallel pinned to 1"},
                )
        if run.get("run.algorithm") == "ppo":
            raise ExportError("GRPO has no critic", "trl", {"nearest": "algorithm: grpo, or verl / OpenRLHF for ppo"})
        lost: list[Limitation] = []
        changes: dict[str, Value] = {"rollout.backend": "vllm"}
        changes.update(_trainer(run, lost))
        total = run.number("batch.max_prompt_tokens") + run.number("batch.max_response_tokens")
        changes["trainer.microbatch"] = self._microbatch(run, total)
        if run.get("trainer.token_budget"):
            lost.append(Limitation(f"token budget {run.get('trainer.token_budget')}",
                                   f"{changes['trainer.microbatch']} completions per forward, padded",
                                   "padding to the longest of each forward"))  # fmt: skip
        if run.traits.runs_ahead:
            changes.update({"run.mode": "disaggregated", "run.staleness": 0})
            lost.append(Limitation(f"mode {run.get('run.mode')}", "vllm server in turn with the trainer",
                                   _serial(run)))  # fmt: skip
        if run.get("trainer.parked"):
            changes["trainer.parked"] = False
            lost.append(Limitation("trainer states parked on the host during rollout", "they stay on the GPU",
                                   "less memory for the engine: lower vllm_gpu_memory_utilization"))  # fmt: skip
        if run.get("trainer.activation_recompute") == "selective":
            changes["trainer.activation_recompute"] = "full"
            lost.append(Limitation("selective recompute", "full recompute", "up to a third of the training time more"))
        if run.get("trainer.offload") in ("activations", "both"):
            changes.update({"trainer.activation_recompute": "full"})
            lost.append(Limitation("activation offload", "full recompute", "up to a third of the training time more"))
        lost += [Limitation(f"{name} = {run.get(name)}", nearest, "the engine may preempt or queue otherwise")
                 for name, nearest in _NO_KEY.items() if run.get(name) is not None]  # fmt: skip
        for degree in ("expert_parallel", "attention_data_parallel"):
            if run.number(f"rollout.{degree}") > 1:
                changes[f"rollout.{degree}"] = 1
                asked = f"rollout {degree} {run.number('rollout.' + degree)}"
                lost.append(Limitation(asked, "tensor parallel alone", "more KV and weight traffic"))
        width, depth = run.number("rollout.tensor_parallel"), run.number("rollout.pipeline_parallel")
        if depth > 1:
            changes.update({"rollout.tensor_parallel": width * depth, "rollout.pipeline_parallel": 1})
            lost.append(
                Limitation(f"rollout pipeline_parallel {depth}", f"tensor parallel {width * depth}", "all-reduce")
            )
        return run.with_(changes), tuple(lost)

    @staticmethod
    def _microbatch(run: Run, total: int) -> int:
        """The largest microbatch within the token budget that divides the completions of an update per GPU."""
        world = run.number("trainer.devices")
        share, rest = divmod(run.number("batch.mini_batch") * run.number("batch.group_size"), world)
        if rest or not share:
            raise ExportError(
                f"{share * world + rest} completions per update do not divide over {world} GPUs",
                "trl",
                {"nearest": f"mini_batch x group_size a multiple of {world}"},
            )
        budget = run.get("trainer.token_budget")
        most = max(int(budget) // total, 1) if budget else run.number("trainer.microbatch")
        return next(size for size in range(min(most, share), 0, -1) if share % size == 0)

    def emit(self, run: Run, target: Target) -> Emission:
        """All settings of a run."""
        world, micro = run.number("trainer.devices"), run.number("trainer.microbatch")
        group = run.number("batch.group_size")
        colocated = run.traits.shares_devices
        run = run.with_(
            {
                "batch.context_tokens": run.number("batch.max_prompt_tokens") + run.number("batch.max_response_tokens"),
                "trainer.accumulation": run.number("batch.mini_batch") * group // (world * micro),
                "trainer.generation_steps": run.number("batch.prompts_per_step") * group // (world * micro),
                "rollout.sleeps": colocated,
            }
        )
        settings = write_fields(self.fields, run, target)
        chosen = {s.key: s for s in (*_names(run), *settings, *_mode(run), *_algorithm(run))}
        kept = [s for s in chosen.values() if target.has(s.key)]
        return Emission(tuple(kept), (), "trl grpo", (), run)

    def render(self, emission: Emission, stem: str, header: Sequence[str]) -> dict[str, str]:
        """``<stem>.yaml``, the accelerate config, and ``<stem>.sh``."""
        run = emission.run
        per_node = run.number("run.devices_per_node", 8)
        shape = node_shape(run.number("trainer.devices"), per_node)
        if shape is None:
            raise ExportError(f"{run.number('trainer.devices')} GPUs fill no whole nodes of {per_node}", "trl")
        body = ['cd "$(dirname "$0")"']
        if not run.traits.shares_devices:
            width = run.number("rollout.tensor_parallel")
            replicas = run.number("rollout.devices") // width
            length = run.number("batch.context_tokens")
            model = hub_name(str(run.get("run.architecture", "")))
            body += [
                "# on the rollout GPUs first (another node, or another CUDA_VISIBLE_DEVICES):",
                f'#   trl vllm-serve --model "{model}" --tensor_parallel_size {width} \\',
                f"#     --data_parallel_size {replicas} --max_model_len {length}",
            ]
        launch = f"accelerate launch --config_file {stem}_accelerate.yaml -m trl.scripts.grpo --config {stem}.yaml"
        body.append(f'{launch} "$@"')
        return {
            f"{stem}.yaml": yaml_text(emission.settings, header),
            f"{stem}_accelerate.yaml": _accelerate(run, *shape),
            f"{stem}.sh": script([f"Launches {stem}.yaml on every node (set machine_rank)."], body),
        }

    # -- import -------------------------------------------------------------------------------------------------

    def detect(self, source: Source) -> float:
        """TRL's entry, or its flat batch keys."""
        if source.entry.startswith(("trl.", "trl ")):
            return 1.0
        return 0.9 if {"num_generations", "max_completion_length", "use_vllm"} & set(source.keys) else 0.0

    def target(self, source: Source, version: str | None) -> Target:
        """One backend."""
        table = key_table(self.name)
        return Target(table, table.version(version))

    def read(self, source: Source, target: Target) -> tuple[Run, frozenset[str]]:
        """Neutral values of the fields over the dataclass defaults; GPUs from ``num_processes`` where stated."""
        specs = target.table.keys(target.version)
        flat = {key: spec.default for key, spec in specs.items() if spec.default is not ABSENT}
        flat.update(source.keys)
        start = Run({**_read_trainer(source), "rollout.backend": "vllm"})
        run, used = read_fields(self.fields, flat, target, start)
        run = run.with_(_read_batch(run, flat, source))
        return Run(complete_layouts(run.values)), frozenset(used | _ALSO_READ)


def _serial(run: Run) -> str:
    training, rollout = run.get("predicted.training"), run.get("predicted.rollout")
    if training and rollout:
        return f"nothing overlaps: about {min(training, rollout):.1f} s per rl_step more"
    return "nothing overlaps: the shorter of rollout and training is added to each step"


def _names(run: Run) -> list[Setting]:
    return [
        Setting("model_name_or_path", hub_name(str(run.get("run.architecture", ""))), "yours"),
        Setting("dtype", "float32" if run.get("trainer.backend") == "ddp" else "bfloat16", "of the weights as loaded"),
        Setting("attn_implementation", "flash_attention_2"),
        Setting("dataset_name", "trl-lib/DeepMath-103K", "yours"),
        Setting("reward_funcs", ["accuracy_reward"], "yours"),
        Setting("output_dir", "outputs", "yours"),
        Setting("bf16", True),
        Setting("logging_steps", 1, "`rlperf calibrate logs` reads trainer_state.json"),
    ]


def _mode(run: Run) -> list[Setting]:
    settings = [Setting("use_vllm", True)]
    settings.append(Setting("vllm_mode", "colocate" if run.traits.shares_devices else "server"))
    if run.get("trainer.lora_rank"):
        settings.append(Setting("use_peft", True))
    return settings


def _algorithm(run: Run) -> list[Setting]:
    settings = [
        Setting("beta", 0.001 if run.get("run.reference") else 0.0, "0: no reference pass"),
        Setting("loss_type", "dapo" if run.get("run.algorithm") == "dapo" else "grpo"),
    ]
    if run.get("run.algorithm") == "dapo":
        settings.append(Setting("epsilon_high", 0.28))
    if run.get("run.rl_steps"):
        updates = max(run.number("batch.prompts_per_step") // run.number("batch.mini_batch"), 1)
        last = run.number("run.last_rl_step", run.number("run.rl_steps"))
        settings.append(Setting("max_steps", last * updates, "optimizer updates through this phase's last rl_step"))
        settings.append(Setting("save_steps", run.number("run.rl_steps") * updates, "the next phase resumes from here"))
    return settings


_DISTRIBUTED = {"deepspeed": "DEEPSPEED", "fsdp2": "FSDP", "ddp": "MULTI_GPU"}
"""Trainer backend -> ``distributed_type`` of accelerate."""


def _trainer(run: Run, lost: list[Limitation]) -> dict[str, Value]:
    """The backend as accelerate launches it; other trainers become DeepSpeed, or replicas where nothing is sharded."""
    backend, stage = run.get("trainer.backend"), run.number("trainer.zero_stage", 0)
    if backend in _DISTRIBUTED:
        if backend == "fsdp2" and run.get("trainer.offload") in ("optimizer", "both"):
            lost.append(
                Limitation("optimizer offload alone", "fsdp_offload_params", "parameters come over the host link too")
            )
        return {}
    nearest = "deepspeed" if stage else "ddp"
    if backend is not None:
        lost.append(Limitation(f"{backend} trainer", nearest, f"training time was predicted for {backend}"))
    return {"trainer.backend": nearest}


def _read_trainer(source: Source) -> dict[str, Value]:
    """Backend, ZeRO stage and offload of an accelerate config; where none is given, DeepSpeed ZeRO-3, TRL's recipe."""
    told = source.launcher
    kind = str(told.get("distributed_type") or "DEEPSPEED").upper()
    backend = next((name for name, word in _DISTRIBUTED.items() if word == kind), "ddp")
    if backend == "deepspeed":
        offloaded = told.get("deepspeed_config.offload_optimizer_device") == "cpu"
        stage = int(told.get("deepspeed_config.zero_stage") or 3)
    elif backend == "fsdp2":
        offloaded = bool(told.get("fsdp_config.fsdp_offload_params"))
        stage = 3 if told.get("fsdp_config.fsdp_reshard_after_forward", True) in (True, "FULL_SHARD") else 2
    else:
        offloaded, stage = False, 0
    offload = "optimizer" if offloaded else "none"
    return {"trainer.backend": backend, "trainer.zero_stage": stage, "trainer.offload": offload}


def _accelerate(run: Run, nodes: int, gpus: int) -> str:
    """An accelerate config for the plan's trainer backend and ZeRO stage."""
    backend, stage = str(run.get("trainer.backend")), run.number("trainer.zero_stage", 0)
    offloaded = run.get("trainer.offload") in ("optimizer", "both")
    settings = [
        Setting("compute_environment", "LOCAL_MACHINE"),
        Setting("mixed_precision", "bf16"),
        Setting("num_machines", nodes),
        Setting("machine_rank", 0, "differs by node"),
        Setting("num_processes", nodes * gpus),
        Setting("main_training_function", "main"),
        Setting("distributed_type", _DISTRIBUTED[backend]),
    ]
    if backend == "fsdp2":
        settings += [
            Setting("fsdp_config.fsdp_version", 2),
            Setting("fsdp_config.fsdp_reshard_after_forward", stage == 3),
            Setting("fsdp_config.fsdp_offload_params", offloaded),
            Setting("fsdp_config.fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
            Setting("fsdp_config.fsdp_cpu_ram_efficient_loading", True),
            Setting("fsdp_config.fsdp_state_dict_type", "FULL_STATE_DICT"),
        ]
    if backend == "deepspeed":
        settings += [
            Setting("deepspeed_config.zero_stage", stage),
            Setting("deepspeed_config.offload_optimizer_device", "cpu" if offloaded else "none"),
            Setting("deepspeed_config.offload_param_device", "none"),
            Setting("deepspeed_config.zero3_init_flag", stage == 3),
            Setting("deepspeed_config.zero3_save_16bit_model", stage == 3),
            Setting("deepspeed_config.deepspeed_multinode_launcher", "standard"),
        ]
    return yaml_text(settings, ["accelerate config for the layout of the plan"])


# -- reading ----------------------------------------------------------------------------------------------------------

_ALSO_READ = frozenset(
    {
        "generation_batch_size", "use_vllm", "vllm_mode", "beta", "loss_type", "model_name_or_path",
        "use_peft", "num_iterations", "bf16", "dtype",
    }
)  # fmt: skip


def _read_batch(run: Run, flat: dict[str, Value], source: Source) -> dict[str, Value]:
    """Prompts per rollout and per update, from completions per device."""
    world = int(source.launcher.get("num_processes") or source.launcher.get("nproc_per_node") or 8)
    micro, group = run.number("trainer.microbatch"), run.number("batch.group_size")
    accumulation = run.number("trainer.accumulation")
    steps = int(run.get("trainer.generation_steps") or 0)
    generated = int(flat.get("generation_batch_size") or 0) or micro * world * (steps or accumulation)
    context = run.get("batch.context_tokens")
    response = run.number("batch.max_response_tokens", 512)
    colocated = flat.get("vllm_mode") != "server"
    return {
        "trainer.devices": world,
        "rollout.devices": world if colocated else run.number("rollout.tensor_parallel"),
        "run.devices": world if colocated else world + run.number("rollout.tensor_parallel"),
        "run.devices_per_node": min(world, 8),
        "run.nodes": -(-world // 8),
        "run.mode": mode_of_staleness(0, shares_devices=colocated),
        "run.staleness": 0,
        "run.use_vllm": bool(flat.get("use_vllm")),
        "run.generated": generated,
        "run.both_generation_keys": bool(flat.get("generation_batch_size")) and bool(steps),
        "run.architecture": str(flat.get("model_name_or_path")),
        "run.algorithm": "dapo" if flat.get("loss_type") == "dapo" and source.keys.get("epsilon_high") else "grpo",
        "run.reference": float(flat.get("beta") or 0) > 0,
        "batch.prompts_per_step": max(generated // group, 1),
        "batch.mini_batch": max(micro * world * accumulation // group, 1),
        "batch.max_prompt_tokens": int(context) - response if context and int(context) > response else 1024,
        "trainer.packing": False,
        "trainer.parked": False if colocated else None,
        "trainer.lora_rank": run.get("trainer.lora_rank") if flat.get("use_peft") else None,
    }


ADAPTER = Trl()
