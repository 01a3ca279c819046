"""AReaL's own words read into those of a run: recompute and sharding, devices, mode, lengths, what rules ask."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlperf.frameworks.adapter import Source
from rlperf.frameworks.keytable import Flat
from rlperf.frameworks.run import BatchFacts, Run, TrainerRun
from rlperf.specs.modes import mode_of_staleness
from rlperf.specs.trainer_calibration import load_trainer

ALSO_READ = frozenset(
    {
        "rollout.backend", "actor.backend", "cluster.n_nodes", "cluster.n_gpus_per_node", "enable_offload",
        "rollout.scheduling_strategy.type", "rollout.scheduling_strategy.target", "actor.weight_update_mode",
        "rollout.max_head_offpolicyness", "actor.kl_ctl", "actor.path", "rollout.consumer_batch_size",
        "actor.mb_spec.n_mbs", "actor.mb_spec.n_mbs_divisor", "sglang.max_prefill_tokens", "allocation_mode",
        "rollout.max_concurrent_rollouts", "actor.recompute_logprob", "actor.use_decoupled_loss",
        "actor.use_lora", "actor.lora_rank", "rollout.use_lora", "sglang.enable_lora", "sglang.max_lora_rank",
        "vllm.enable_lora", "vllm.max_lora_rank",
    }
)  # fmt: skip


@dataclass(frozen=True)
class ArealFacts:
    """What rules ask beside the run: how pools share devices, what the file adds up to, and groups under way."""

    colocate: bool
    enable_offload: bool | None = None
    weight_update_mode: str | None = None
    cluster_devices: int | None = None
    deprecated_allocation: bool | None = None
    n_minibatches: int | None = None
    counted_groups: int | None = None


def read_trainer(trainer: TrainerRun, flat: Flat) -> TrainerRun:
    """Recompute, offload and sharding in the words of a plan."""
    megatron = trainer.backend == "megatron"
    # areal/engine/megatron_engine.py: recompute_granularity null is full, uniform, one layer
    how = (trainer.granularity or "full") if megatron else "full"
    if not megatron:
        trainer = trainer.having(ulysses=trainer.context_parallel, context_parallel=1)
    return trainer.having(
        sequence_parallel=megatron and trainer.tensor_parallel > 1,
        lora_rank=int(flat.get("actor.lora_rank") or 0) or None if flat.get("actor.use_lora") else None,
        scoring_token_budget=trainer.token_budget,
        devices=(trainer.data_parallel or 1) * trainer.replica_devices,
        dynamic=trainer.token_budget is not None,
        packing=True,
        zero_stage=load_trainer(str(trainer.backend)).capability.usual_zero_stage,
        activation_recompute=how if trainer.checkpointing else "none",
        offload="optimizer" if trainer.offload_all else "none",
    )


def stated_role(name: str, source: Source) -> bool:
    """Whether a file has the section of a role that there is none of by default.

    A KL coefficient, which there is, scores no reference by itself (1.0.4 trainer/rl_trainer.py:179).
    """
    return any(key.startswith(f"{name}.") for key in source.keys)


def unread_teacher(source: Source) -> tuple[str, ...]:
    """A teacher on engines of its own, which the usual type is (1.0.4 api/cli_args.py TeacherConfig)."""
    if not stated_role("teacher", source) or source.keys.get("teacher.engine_type") == "train":
        return ()
    return ("teacher.engine_type: rollout (rlperf reads no teacher of AReaL but of type train)",)


def read_rest(run: Run, flat: Flat) -> Run:
    """Devices, mode, lengths, and what rules ask."""
    trainer, rollout = run.trainer, run.rollout
    devices = (rollout.data_parallel or 1) * rollout.replica_devices
    colocated = flat.get("rollout.scheduling_strategy.type") == "colocation"
    stale = int(flat.get("rollout.max_head_offpolicyness") or 0)
    offload = bool(flat.get("enable_offload"))
    counted = int(flat.get("rollout.consumer_batch_size") or 1)
    at_once = int(flat.get("rollout.max_concurrent_rollouts") or counted)  # infra/staleness_manager.py:79
    bounded = stale > 0 and not colocated and at_once < (stale + 1) * counted
    batch = replace(run.batch, max_trajectories=at_once * run.batch.group_size if bounded else None)
    nodes, per_node = int(flat.get("cluster.n_nodes") or 1), int(flat.get("cluster.n_gpus_per_node") or 8)
    return replace(
        run,
        architecture=str(flat.get("actor.path")),
        algorithm="ppo" if "critic.path" in flat and flat.get("critic.path") else "grpo",
        reference=bool(flat.get("actor.kl_ctl")),
        old_policy=bool(flat.get("actor.recompute_logprob") or flat.get("actor.use_decoupled_loss")),
        mode=mode_of_staleness(stale, shares_devices=colocated),
        staleness=0 if colocated else stale,
        devices=trainer.devices if colocated else trainer.devices + devices,
        nodes=nodes,
        devices_per_node=per_node,
        batch=_read_lengths(replace(run, batch=batch), flat),
        trainer=trainer.having(parked=offload if colocated else None),
        rollout=rollout.having(devices=devices),
        facts=ArealFacts(
            colocate=colocated,
            enable_offload=offload,
            weight_update_mode=str(flat.get("actor.weight_update_mode")),
            cluster_devices=nodes * per_node,
            deprecated_allocation=bool(flat.get("allocation_mode")),
            n_minibatches=int(flat.get("actor.ppo_n_minibatches") or 1),
            counted_groups=counted,
        ),
    )


def _read_lengths(run: Run, flat: Flat) -> BatchFacts:
    """The context caps prompt and response; a prompt that is not capped itself is assumed to take the rest of it."""
    context = min(run.batch.context_tokens or 1, run.rollout.engine_context or 1 << 40)
    response = min(run.batch.max_response_tokens or 1, context)
    prompt = run.batch.max_prompt_tokens or max(min(1024, context - response), 1)
    return replace(
        run.batch,
        max_prompt_tokens=prompt,
        max_response_tokens=response,
    )
