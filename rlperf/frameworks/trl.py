"""TRL: ``trl grpo`` with one YAML and an accelerate config; data parallel only (DDP, ZeRO or FSDP), vLLM beside it.

Batches count completions: per_device_train_batch_size x gradient_accumulation_steps x GPUs per optimizer update,
per_device_train_batch_size x steps_per_generation x GPUs per rollout. There is no token budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

from rlperf.errors import ExportError
from rlperf.frameworks.adapter import Emission, Limitation, Source, node_shape
from rlperf.frameworks.fields import (
    CHECKPOINTING,
    RESHARD,
    Field,
    Setting,
    Target,
    elsewhere,
    field,
    read_fields,
    write_fields,
)
from rlperf.frameworks.hub import hub_name
from rlperf.frameworks.keytable import Flat, key_table
from rlperf.frameworks.nearest import (
    THIRD,
    most_dividing,
    wide_degrees,
    without_pipeline,
    without_selective_recompute,
)
from rlperf.frameworks.run import RolloutRun, Run, TrainerRun
from rlperf.frameworks.writing import argument_array, script, yaml_text
from rlperf.specs.modes import mode_of_staleness
from rlperf.units import human_seconds

FIELDS: tuple[Field, ...] = (
    *elsewhere("trainer.zero_stage", "the accelerate config", RESHARD, backend="fsdp2"),
    *elsewhere("trainer.zero_stage", "the accelerate config", backend="deepspeed"),
    *elsewhere("trainer.zero_stage", "the accelerate config", backend="ddp"),
    *elsewhere("rollout.devices", "the launch of the vLLM server"),
    *elsewhere("trainer.token_budget", "per_device_train_batch_size, in completions", unread=True),
    field("batch.group_size", "num_generations", note="completions per prompt"),
    field("batch.max_response_tokens", "max_completion_length"),
    field("batch.context_tokens", "vllm_max_model_length", note="prompt + completion"),
    field("trainer.microbatch", "per_device_train_batch_size", note="completions per GPU and forward"),
    field("trainer.accumulation", "gradient_accumulation_steps", note="forwards per optimizer update"),
    field("trainer.generation_steps", "steps_per_generation", note="forwards per rollout"),
    field("trainer.activation_recompute", "gradient_checkpointing", CHECKPOINTING),
    # its name in transformers 5.24, which goes before; older ones refuse it, and this one takes both
    field("trainer.activation_recompute", "activation_checkpointing", CHECKPOINTING, read_only=True),
    field("trainer.lora_rank", "lora_r"),
    field("trainer.epochs", "num_iterations", note="times that a batch is trained on"),
    field("trainer.chunked_loss", "use_liger_kernel", note="no full logits tensor", until="1.14"),
    field("rollout.tensor_parallel", "vllm_tensor_parallel_size"),
    field("rollout.memory_fraction", "vllm_gpu_memory_utilization"),
    field("rollout.sleeps", "vllm_enable_sleep_mode", note="engine and trainer take turns"),
)


@dataclass(frozen=True)
class Trl:
    """The adapter."""

    name: str = "trl"
    title: str = "TRL"
    fields: tuple[Field, ...] = FIELDS

    def adapt(self, run: Run, version: str) -> tuple[Run, tuple[Limitation, ...]]:
        """No model parallel training, no asynchronous mode, no token budget."""
        ours = run.trainer
        degrees = {"pipeline_parallel": ours.pipeline_parallel, "expert_parallel": ours.expert_parallel,
                   "tensor_parallel": ours.tensor_parallel, "context_parallel": ours.context_parallel,
                   "ulysses": ours.ulysses}  # fmt: skip
        for degree, size in degrees.items():
            if size > 1:
                raise ExportError(
                    f"the trainer has no {degree} ({size} in the plan)",
                    "trl",
                    {"nearest": "trainer_backends: deepspeed with ulysses, tensor and context parallel pinned to 1"},
                )
        lost: list[Limitation] = []
        if run.batch.turns > 1:
            lost.append(
                Limitation(
                    f"{run.batch.turns} turns with tools",
                    "one turn",
                    "`tools` are an argument of GRPOTrainer, no key: the launch is yours",
                )
            )
        if run.algorithm == "dapo":
            lost.append(Limitation("dynamic sampling", "groups without a signal are trained on", "wasted samples"))
        micro = _microbatch(run)
        trainer = ours.having(backend=_trainer(ours, lost), microbatch=micro)
        if ours.token_budget and ours.packing is not False:
            lost.append(Limitation(f"token budget {ours.token_budget}", f"{micro} completions per forward, padded",
                                   "padding to the longest of each forward"))  # fmt: skip
        mode, staleness = run.mode, run.staleness
        if run.traits.runs_ahead:
            lost.append(Limitation(f"mode {mode}", "vllm server in turn with the trainer", _serial(run)))
            mode, staleness = "disaggregated", 0
        if ours.parked:
            trainer = trainer.having(parked=False)
            lost.append(Limitation("trainer states parked on the host during rollout", "they stay on the GPU",
                                   "less memory for the engine: lower vllm_gpu_memory_utilization"))  # fmt: skip
        trainer = without_selective_recompute(trainer, lost)
        if ours.offload in ("activations", "both"):
            trainer = trainer.having(activation_recompute="full")
            lost.append(Limitation("activation offload", "full recompute", THIRD))
        rollout = _engine(run.rollout, lost)
        return replace(run, mode=mode, staleness=staleness, trainer=trainer, rollout=rollout), tuple(lost)

    def emit(self, run: Run, target: Target) -> Emission:
        """All settings of a run."""
        forward = run.trainer.devices * run.trainer.samples
        trainer = run.trainer.having(
            accumulation=run.batch.mini * run.batch.group_size // forward,
            generation_steps=run.batch.prompts * run.batch.group_size // forward,
        )
        batch, rollout = run.batch.with_context(), run.rollout.having(sleeps=run.traits.shares_devices)
        run = replace(run, batch=batch, trainer=trainer, rollout=rollout)
        settings = write_fields(self.fields, run, target)
        chosen = {s.key: s for s in (*_names(run), *settings, *_mode(run), *_algorithm(run))}
        kept = [s for s in chosen.values() if target.has(s.key)]
        return Emission(tuple(kept), (), "trl grpo", (), run)

    def render(self, emission: Emission, stem: str, header: Sequence[str]) -> dict[str, str]:
        """``<stem>.yaml``, the accelerate config, and ``<stem>.sh``."""
        run = emission.run
        per_node = run.devices_per_node
        shape = node_shape(run.trainer.devices, per_node)
        if shape is None:
            raise ExportError(f"{run.trainer.devices} GPUs fill no whole nodes of {per_node}", "trl")
        several = shape[0] > 1
        launch = f"accelerate launch --config_file {stem}_accelerate.yaml" + several * ' "${MEETING[@]}"'
        body = ['cd "$(dirname "$0")"', *(_MEETING if several else ())]
        body.append(f'{launch} -m trl.scripts.grpo --config {stem}.yaml "$@"')
        return {
            **_server(run, stem),
            f"{stem}.yaml": yaml_text(emission.settings, header),
            f"{stem}_accelerate.yaml": _accelerate(run, *shape),
            f"{stem}.sh": script([f"Launches {stem}.yaml: run it on every node of the trainer."], body),
        }

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
        flat = {**target.defaults(), **source.keys}
        start = Run(trainer=_read_trainer(source), rollout=RolloutRun(backend="vllm"))
        run, used = read_fields(self.fields, flat, target, start)
        run = _read_rest(_read_batch(run, flat, source), flat, source)
        return run.completed(), frozenset(used | _ALSO_READ)


_MEETING = (
    'MEETING=(--machine_rank "${NODE_RANK:?which of the nodes this is, from 0}"',
    '  --main_process_ip "${MASTER_ADDR:?the host of node 0}" --main_process_port "${MASTER_PORT:-29500}")',
)
"""What accelerate asks of each of several nodes (utils/launch.py: without an address the host is called "None")."""


def _microbatch(run: Run) -> int:
    """The largest microbatch within the token budget that divides the completions of an update per GPU."""
    world = run.trainer.devices
    share, rest = divmod(run.batch.mini * run.batch.group_size, world)
    if rest or not share:
        raise ExportError(
            f"{share * world + rest} completions per update do not divide over {world} GPUs",
            "trl",
            {"nearest": f"mini_batch x group_size a multiple of {world}"},
        )
    budget = run.trainer.token_budget if run.trainer.packing is not False else None
    most = max(budget // run.batch.longest_tokens, 1) if budget else run.trainer.samples
    return most_dividing(share, most)


def _server(run: Run, stem: str) -> dict[str, str]:
    """The launch of the vLLM server, where rollout has GPUs of its own."""
    if run.traits.shares_devices:
        return {}
    width = run.rollout.tensor_parallel
    flags = [
        Setting("model", hub_name(run.architecture), "yours"),
        Setting("tensor_parallel_size", width),
        Setting("data_parallel_size", run.rollout.devices // width, "engines"),
        Setting("max_model_len", run.batch.longest_tokens, "prompt + completion"),
        Setting("gpu_memory_utilization", run.rollout.memory_fraction),
    ]
    header = [
        f"The vLLM server of {stem}.yaml: start it first, on the rollout GPUs (CUDA_VISIBLE_DEVICES, or a node).",
        f"On a node of its own: {stem}.sh --vllm_server_host HOST.",
    ]
    body = [*argument_array("ARGS", flags), 'exec trl vllm-serve "${ARGS[@]}" "$@"']
    return {f"{stem}_server.sh": script(header, body)}


def _engine(rollout: RolloutRun, lost: list[Limitation]) -> RolloutRun:
    """The engine with tensor parallel alone."""
    for degree, size in wide_degrees(rollout):
        lost.append(Limitation(f"rollout {degree} {size}", "tensor parallel alone", "more KV and weight traffic"))
    engine, depth = without_pipeline(rollout), rollout.pipeline_parallel
    if depth > 1:
        nearest = f"tensor parallel {engine.tensor_parallel}"
        lost.append(Limitation(f"rollout pipeline_parallel {depth}", nearest, "all-reduce"))
    return engine.having(backend="vllm", expert_parallel=1, attention_data_parallel=1)


def _serial(run: Run) -> str:
    training, rollout = run.training_s, run.rollout_s
    if training and rollout:
        return f"nothing overlaps: about {human_seconds(min(training, rollout))} per rl_step more"
    return "nothing overlaps: the shorter of rollout and training is added to each step"


def _names(run: Run) -> list[Setting]:
    return [
        Setting("model_name_or_path", hub_name(run.architecture), "yours"),
        Setting("dtype", "float32" if run.trainer.backend == "ddp" else "bfloat16", "of the weights as loaded"),
        Setting("attn_implementation", "flash_attention_2"),
        Setting("dataset_name", "trl-lib/DeepMath-103K", "yours"),
        Setting("reward_funcs", ["accuracy_reward"], "yours"),
        Setting("output_dir", run.kept_in("outputs"), "yours"),
        Setting("bf16", True),
        Setting("logging_steps", 1, "`rlperf calibrate logs` reads trainer_state.json"),
    ]


def _mode(run: Run) -> list[Setting]:
    settings = [Setting("use_vllm", True)]
    if run.old_policy is False and run.updates == 1:
        settings.append(Setting("vllm_importance_sampling_correction", False, "else the old policy is scored"))
    settings.append(Setting("max_prompt_length", run.batch.max_prompt_tokens))
    settings.append(Setting("vllm_mode", "colocate" if run.traits.shares_devices else "server"))
    if run.trainer.lora_rank:
        # model_config.py makes a word of a list of one; PEFT's own list has but q and v of Qwen
        settings += [
            Setting("use_peft", True),
            Setting("lora_target_modules", ["all-linear"], "every matrix, as planned; else PEFT's list"),
        ]
    return settings


def _algorithm(run: Run) -> list[Setting]:
    settings = [
        Setting("beta", 0.001 if run.reference else 0.0, "0: no reference pass"),
        Setting("loss_type", "dapo" if run.algorithm == "dapo" else "grpo"),
    ]
    if run.algorithm == "dapo":
        settings.append(Setting("epsilon_high", 0.28))
    if run.rl_steps:
        updates = run.updates
        through = run.through(lambda batch: batch.updates) * updates // run.batch.updates
        settings.append(Setting("max_steps", through, "optimizer updates through this phase's last rl_step"))
        each = gcd(through, (run.checkpoint_every or run.rl_steps) * updates)
        settings.append(Setting("save_steps", each, "and at the end of the phase"))
        if run.resumes:  # transformers trainer.py: a text is the checkpoint itself, no folder of several
            ended = f"{run.kept_in('outputs')}/checkpoint-{through - run.rl_steps * updates}"
            settings.append(Setting("resume_from_checkpoint", ended, "the last of the phase before"))
        if run.before or run.after:
            settings.append(Setting("lr_scheduler_type", "constant", "yours: linear ends at 0 with every phase"))
    return settings


_DISTRIBUTED = {"deepspeed": "DEEPSPEED", "fsdp2": "FSDP", "ddp": "MULTI_GPU"}
"""Trainer backend -> ``distributed_type`` of accelerate."""


def _trainer(trainer: TrainerRun, lost: list[Limitation]) -> str:
    """The backend as accelerate launches it; other trainers become DeepSpeed, or replicas where nothing is sharded."""
    backend = trainer.backend
    if backend is not None and backend in _DISTRIBUTED:
        if backend == "fsdp2" and trainer.offload in ("optimizer", "both"):
            lost.append(
                Limitation("optimizer offload alone", "fsdp_offload_params", "parameters come over the host link too")
            )
        return backend
    nearest = "deepspeed" if trainer.zero_stage else "ddp"
    if backend is not None:
        lost.append(Limitation(f"{backend} trainer", nearest, f"training time was predicted for {backend}"))
    return nearest


def _read_trainer(source: Source) -> TrainerRun:
    """Backend, ZeRO stage and offload of an accelerate config; where none is given, DeepSpeed ZeRO-3, TRL's recipe.

    The trainer's own ``deepspeed`` and ``fsdp`` stand over what started it.
    """
    told = source.launcher
    own = next((name.upper() for name in ("deepspeed", "fsdp") if source.keys.get(name)), None)
    kind = own or str(told.get("distributed_type") or "DEEPSPEED").upper()
    backend = next((name for name, word in _DISTRIBUTED.items() if word == kind), "ddp")
    if backend == "deepspeed":
        offloaded = told.get("deepspeed_config.offload_optimizer_device") == "cpu"
        stated = told.get("deepspeed_config.zero_stage")
        stage = 3 if stated is None else int(stated)
    elif backend == "fsdp2":
        offloaded = bool(told.get("fsdp_config.fsdp_offload_params"))
        stage = 3 if told.get("fsdp_config.fsdp_reshard_after_forward", True) in (True, "FULL_SHARD") else 2
    else:
        offloaded, stage = False, 0
    return TrainerRun(backend=backend, zero_stage=stage, offload="optimizer" if offloaded else "none")


def _accelerate(run: Run, nodes: int, gpus: int) -> str:
    """An accelerate config for the plan's trainer backend and ZeRO stage."""
    backend, stage = str(run.trainer.backend), run.trainer.zero_stage
    offloaded = run.trainer.offload in ("optimizer", "both")
    settings = [
        Setting("compute_environment", "LOCAL_MACHINE"),
        Setting("mixed_precision", "bf16"),
        Setting("num_machines", nodes),
        Setting("machine_rank", 0, "the launch gives it by node"),
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
        "vllm_importance_sampling_correction",
        "generation_batch_size", "use_vllm", "vllm_mode", "beta", "loss_type", "model_name_or_path",
        "use_peft", "num_iterations", "bf16", "dtype", "max_prompt_length", "auto_find_batch_size",
    }
)  # fmt: skip


@dataclass(frozen=True)
class TrlFacts:
    """What rules ask beside the run: completions of a rollout, and whether two keys state them."""

    generated: int
    both_generation_keys: bool
    serves: bool
    """An engine generates, not transformers."""
    finds_batch_size: bool = False
    """The update's batch is halved when memory runs out (transformers)."""


def _world(source: Source) -> int:
    """GPUs that the launcher is told of, torchrun by node, else those that it sees, or a node of eight."""
    told = source.launcher
    each = int(told.get("nproc_per_node") or told.get("visible_devices") or 8)
    return int(told.get("num_processes") or each * int(told.get("nnodes") or 1))


def _nodes(source: Source, world: int, served: int) -> tuple[int, int]:
    """Nodes and the GPUs of each: as the launcher of the trainer says where it has several, else nodes of eight.

    GPUs that are ``served`` beside them fill nodes of their own.
    """
    machines = int(source.launcher.get("num_machines") or source.launcher.get("nnodes") or 1)
    if machines > 1 and world % machines == 0:
        per_node = world // machines
        return machines + -(-served // per_node), per_node
    return -(-(world + served) // 8), min(world + served, 8)


def _read_batch(run: Run, flat: Flat, source: Source) -> Run:
    """Prompts per rollout and per update, from completions per device."""
    batch, forward = run.batch, run.trainer.samples * _world(source)
    accumulation, steps = run.trainer.accumulation or 1, run.trainer.generation_steps or 0
    generated = int(flat.get("generation_batch_size") or 0) or forward * (steps or accumulation)
    context, response = batch.context_tokens, batch.max_response_tokens or 512
    stated = flat.get("max_prompt_length")  # until 0.27
    batch = replace(
        batch,
        prompts_per_step=max(generated // batch.group_size, 1),
        mini_batch=max(forward * accumulation // batch.group_size, 1),
        max_prompt_tokens=int(stated) if stated else context - response if context and context > response else 1024,
    )
    both = bool(flat.get("generation_batch_size")) and bool(steps)
    serves, finds = bool(flat.get("use_vllm")), bool(flat.get("auto_find_batch_size"))
    return replace(run, batch=batch, facts=TrlFacts(generated, both, serves=serves, finds_batch_size=finds))


_SERVED = ("tensor_parallel_size", "data_parallel_size", "gpu_memory_utilization")
"""What a server's launch says of the engines; the trainer's keys of the same names act in colocate mode alone."""


def _read_rest(run: Run, flat: Flat, source: Source) -> Run:
    """Devices, mode, algorithm and trainer; ZeRO stands in the accelerate config."""
    # without vLLM the trainer's own GPUs generate, whatever the mode of a server that is not asked
    world, colocated = _world(source), not flat.get("use_vllm") or flat.get("vllm_mode") != "server"
    server = {name: source.launcher.get(f"vllm-serve.{name}") for name in _SERVED}
    launched = not colocated and any(value is not None for value in server.values())
    width = int(server["tensor_parallel_size"] or 1) if launched else run.rollout.tensor_parallel
    engines = world if colocated else width * int(server["data_parallel_size"] or 1)
    fraction = run.rollout.memory_fraction if colocated else server["gpu_memory_utilization"] or 0.9
    served = 0 if colocated else engines
    nodes, per_node = _nodes(source, world, served)
    trainer = run.trainer.having(
        devices=world,
        packing=False,
        parked=False if colocated else None,
        lora_rank=run.trainer.lora_rank if flat.get("use_peft") else None,
    )
    return replace(
        run,
        architecture=str(flat.get("model_name_or_path")),
        algorithm="dapo" if flat.get("loss_type") == "dapo" and source.keys.get("epsilon_high") else "grpo",
        reference=float(flat.get("beta") or 0) > 0,
        # grpo_trainer.py:2561: one update alone, and no correction of the engine's log-probs, on by default
        old_policy=bool(flat.get("use_vllm") and flat.get("vllm_importance_sampling_correction")) or run.updates > 1,
        mode=mode_of_staleness(0, shares_devices=colocated),
        staleness=0,
        devices=world + served,
        nodes=nodes,
        devices_per_node=per_node,
        trainer=trainer,
        rollout=run.rollout.having(devices=engines, tensor_parallel=width, memory_fraction=fraction),
    )


ADAPTER = Trl()
