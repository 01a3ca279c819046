"""SkyRL: what its keys say beside the table of fields: trainer, engines, placement, mode, and what rules ask."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlperf.frameworks.adapter import Source
from rlperf.frameworks.drafting import read_vllm
from rlperf.frameworks.keytable import Flat
from rlperf.frameworks.run import BatchFacts, RolloutRun, Run, TrainerRun

T, P, L = "trainer.", "trainer.policy.", "trainer.placement."
F, G = P + "fsdp_config.", P + "megatron_config."
K, H = G + "transformer_config_kwargs.", G + "optimizer_config_kwargs."
A = "trainer.algorithm."
E = "generator.inference_engine."
OLD = "generator."
"""Where skyrl-train kept the engine's keys (skyrl 0.1.0 train/config/legacy.py lists the names)."""
X = f"{E}engine_init_kwargs."
INT4 = P + "model.fake_int4_qat."
PACKAGE = "train0.3"
"""The package skyrl-train, which went before skyrl 0.1."""
OLDER = (PACKAGE, "0.1", "0.2")
"""Releases that fill no microbatch by tokens and filter no groups in fully_async."""
_WIRES = {"blockwise": "fp8_block", "mxfp8": "mxfp8"}


@dataclass(frozen=True)
class SkyrlFacts:
    """What rules ask beside the run: who shares devices, and switches that want each other."""

    colocate: bool
    fully_async: bool
    rollout_loss: bool
    replays: bool
    returns_experts: bool
    executor: str
    two_kl: bool | None = None
    resamples: bool | None = None
    input_tokens: int | None = None
    workers: int | None = None


ALSO_READ = frozenset(
    {
        P + "model.path", L + "colocate_all", L + "policy_num_nodes", L + "policy_num_gpus_per_node",
        L + "colocate_policy_ref", P + "optimizer_config.offload_after_step", A + "advantage_estimator",
        A + "use_kl_loss", A + "use_kl_in_reward", A + "dynamic_sampling.type", A + "policy_loss_type",
        A + "zero_variance_filter", T + "fully_async.enabled", T + "fully_async.max_staleness_steps",
        T + "fully_async.sample_full_batch", T + "fully_async.num_parallel_generation_workers",
        "generator.max_input_length", E + "enable_return_routed_experts", E + "distributed_executor_backend",
        E + "speculative_config.method", T + "mtp.enabled", T + "mtp.num_speculative_tokens",
        E + "fp8_weight_sync_mode", G + "fp8", G + "fp8_recipe", INT4 + "enabled",
    }
)  # fmt: skip


def read_trainer(ours: TrainerRun) -> TrainerRun:
    """Recompute, offload, and what Megatron takes where nothing is stated."""
    megatron = ours.backend == "megatron"
    on = bool(ours.checkpointing)
    recompute = (ours.granularity or "none") if megatron else "full"
    hosted = ours.offload_optimizer if megatron else ours.offload_all
    return ours.having(
        activation_recompute=recompute if on else "none",
        offload="optimizer" if hosted else "none",
        sequence_parallel=megatron and ours.tensor_parallel > 1,
        budget_stated=ours.token_budget is not None,
        scoring_token_budget=ours.token_budget,
        packing=ours.packing is not False,
    )


def read_engine(engine: RolloutRun, flat: Flat) -> RolloutRun:
    """Devices of all engines, what drafts, and the weights' format where the sync states it."""
    devices = (engine.num_engines or 1) * engine.tensor_parallel * engine.pipeline_parallel
    drafts = read_vllm(flat, f"{E}speculative_config.")
    if drafts is None and flat.get(T + "mtp.enabled"):
        drafts = f"mtp:{int(flat.get(T + 'mtp.num_speculative_tokens') or 1)}"
    wire = _WIRES.get(str(flat.get(E + "fp8_weight_sync_mode")))
    return engine.having(
        devices=devices, speculation=drafts, rollout_dtype=wire or engine.rollout_dtype, chunked_prefill=True
    )


def read_rest(run: Run, flat: Flat, source: Source) -> Run:
    """Devices, mode, lengths, and what rules ask."""
    nodes, per_node = int(flat.get(L + "policy_num_nodes") or 1), int(flat.get(L + "policy_num_gpus_per_node") or 1)
    trainer = nodes * per_node
    colocated, ahead = bool(flat.get(L + "colocate_all")), _is_async(flat, source)
    total = trainer if colocated else trainer + run.rollout.devices
    if nodes == 1:  # engines may stand beside the policy on its node; several nodes say how large they are
        per_node = max(per_node, min(8, total))
    stale = int(flat.get(T + "fully_async.max_staleness_steps") or 0) if ahead else 0
    one_off = not ahead and "main_async" in source.entry
    mode = "async" if ahead else "one_step_off" if one_off else "colocated" if colocated else "disaggregated"
    kl = [bool(flat.get(A + name)) for name in ("use_kl_loss", "use_kl_in_reward")]
    filters = flat.get(A + "dynamic_sampling.type") == "filter"
    filtered = filters or bool(ahead and flat.get(T + "fully_async.sample_full_batch"))
    parks = colocated and bool(flat.get(P + "optimizer_config.offload_after_step", True))
    ours = run.trainer
    if ours.backend == "megatron" and flat.get(G + "expert_tensor_parallel_size") is None:
        ours = ours.having(expert_tensor_parallel=ours.tensor_parallel)
    return replace(
        run,
        architecture=str(flat.get(P + "model.path") or ""),
        algorithm="dapo" if filtered else "grpo",
        reference=any(kl),
        old_policy=not _against_rollout(flat),
        mode=mode,
        staleness=max(stale, 1) if ahead or one_off else 0,
        devices=total,
        nodes=-(-total // per_node),
        devices_per_node=per_node,
        batch=_read_lengths(run.batch, flat, filters),
        trainer=ours.having(devices=trainer, parked=parks if colocated else None),
        wrong=(*run.wrong, *_unread(flat, colocated, any(kl))),
        facts=SkyrlFacts(
            colocate=colocated,
            fully_async=ahead,
            rollout_loss=_against_rollout(flat),
            replays=bool(flat.get(G + "moe_enable_routing_replay")),
            returns_experts=bool(flat.get(E + "enable_return_routed_experts")),
            executor=str(flat.get(E + "distributed_executor_backend") or "mp"),
            two_kl=all(kl),
            resamples=flat.get(A + "dynamic_sampling.type") is not None,
            input_tokens=flat.get("generator.max_input_length") or run.batch.max_prompt_tokens,
            workers=flat.get(T + "fully_async.num_parallel_generation_workers"),
        ),
    )


def _is_async(flat: Flat, source: Source) -> bool:
    return bool(flat.get(T + "fully_async.enabled")) or "fully_async" in source.entry


def _against_rollout(flat: Flat) -> bool:
    """Whether the loss is against the engine's log-probs (backends/skyrl_train/utils/ppo_utils.py:461)."""
    loss = flat.get(A + "policy_loss_type")
    return loss in ("rollout_is", "dppo") or (loss == "cispo" and flat.get(A + "cispo.cispo_anchor") == "rollout")


def _read_lengths(batch: BatchFacts, flat: Flat, resamples: bool) -> BatchFacts:
    """A turn generates up to its cap after an input up to its own (train/generators/skyrl_gym_generator.py:460)."""
    prompt, each = batch.max_prompt_tokens or 1, batch.max_response_tokens or 1
    whole = int(flat.get("generator.max_input_length") or prompt) - prompt + each if batch.turns > 1 else each
    return replace(batch, max_response_tokens=max(whole, each), generation_batch=batch.prompts if resamples else None)


def _unread(flat: Flat, colocated: bool, reference: bool) -> list[str]:
    """What a file states that no job of rlperf says: pools beside the two, and PPO's critic."""
    found = []
    if flat.get(A + "advantage_estimator") == "gae":
        found.append(f"{A}advantage_estimator: gae (rlperf reads no critic of SkyRL)")
    if not colocated and reference and flat.get(L + "colocate_policy_ref") is False:
        found.append(f"{L}colocate_policy_ref: false (a reference on GPUs of its own)")
    if flat.get(E + "run_engines_locally", flat.get(OLD + "run_engines_locally")) is False:
        found.append(f"{E}run_engines_locally: false (engines that the file says nothing of)")
    if flat.get(E + "enable_pd"):
        found.append(f"{E}enable_pd: true (engines that prefill alone)")
    if flat.get("generator.max_turns") == 0:
        found.append("generator.max_turns: 0 (nothing would be generated)")
    if flat.get(INT4 + "enabled"):
        found.append(f"{INT4}enabled: true (rlperf reads no quantisation-aware training of SkyRL)")
    if flat.get(G + "fp8"):
        found.append(f"{G}fp8: {flat[G + 'fp8']} (rlperf reads no FP8 training of SkyRL)")
    return found
