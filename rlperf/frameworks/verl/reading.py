"""verl: what its keys say beside the table of fields: trainer, mode, pools, batch, and what rules ask."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rlperf.frameworks.adapter import Source
from rlperf.frameworks.drafting import read_sglang, read_vllm
from rlperf.frameworks.fields import TOKENS_PER_DEVICE
from rlperf.frameworks.keytable import Flat
from rlperf.frameworks.run import BatchFacts, Run, TrainerRun
from rlperf.frameworks.verl.settings import CHARACTERS, NO_SYNC, OLD_REPLAY, REF, A, G, M, R
from rlperf.specs.job import Algorithm
from rlperf.specs.modes import MODES, Mode, mode_of_staleness
from rlperf.specs.pool import Offload

RECIPE_DEFAULTS = {
    "algorithm.rollout_correction.bypass_mode": True,
    R + "calculate_log_probs": True,
    R + "checkpoint_engine.backend": "nccl",
}
QAT = tuple(f"{A}{engine}qat.enable" for engine in ("", "fsdp_config.", "megatron."))
"""Engines in NVFP4 and a trainer that rounds to it (0.9.1 workers/rollout/vllm_rollout/vllm_async_server.py:1216)."""
ALSO_READ = frozenset(
    {
        "algorithm.rollout_correction.bypass_mode",
        "trainer.nnodes", "trainer.n_gpus_per_node", R + "nnodes", R + "n_gpus_per_node", "rollout.nnodes",
        "rollout.n_gpus_per_node", "algorithm.adv_estimator", A + "use_kl_loss", "algorithm.use_kl_in_reward",
        "trainer.v1.trainer_mode", "trainer.v1.separate_async.parameter_sync_step", "async_training.require_batches",
        "trainer.v1.sampler.max_off_policy_threshold", "trainer.v1.sampler.max_off_policy_strategy",
        "trainer.v1.separate_async.num_warmup_batches", "async_training.staleness_threshold", M + "path",
        "data.gen_batch_size", R + "multi_turn.enable", R + "multi_turn.max_assistant_turns",
        A + "ppo_micro_batch_size", R + "log_prob_micro_batch_size",
        "async_training.trigger_parameter_sync_step", "data.train_batch_size", "algorithm.filter_groups.enable",
        *QAT, OLD_REPLAY,
    }
)  # fmt: skip


def is_async_recipe(source: Source) -> bool:
    """Whether one of the asynchronous recipes runs: by its program, its base or its keys.

    The recipes alone read ``async_training`` and a ``rollout`` at the top (experimental/*/config/*.yaml); a program
    that is named and is none of theirs has no such pool (0.8.0's ppo/ray_trainer.py:334, "only hybrid engine").
    """
    return (
        "experimental" in source.entry
        or any("async_ppo" in base or "one_step" in base for base in source.bases)
        or any(key.startswith("async_training.") for key in source.keys)
        or (not source.entry and any(key.startswith("rollout.") for key in source.keys))
    )


def _is_fully(source: Source) -> bool:
    """Whether the fully asynchronous recipe is named, or set up by ``async_training``, which it alone reads."""
    keyed = any(key.startswith("async_training.") for key in source.keys)
    return keyed or any("fully_async" in name for name in (source.entry, *source.bases))


def read_trainer(flat: Flat, trainer: TrainerRun) -> TrainerRun:
    """Offload, parking and token budgets in the words of a plan."""
    # What is parked between the phases is back on the device while training.
    moved: dict[tuple[bool, bool], Offload] = {
        (False, False): "none", (True, False): "optimizer", (False, True): "activations", (True, True): "both"
    }  # fmt: skip
    if trainer.backend == "megatron" and flat.get(G + "expert_tensor_parallel_size") is None:
        trainer = trainer.having(expert_tensor_parallel=trainer.tensor_parallel)
    scored = trainer.dynamic if trainer.scoring_dynamic is None else trainer.scoring_dynamic
    old_key = flat.get(A + "ppo_micro_batch_size")
    return trainer.having(
        offload=moved[bool(trainer.offload_optimizer), bool(trainer.offload_activations)],
        parked=bool(trainer.parks_parameters and trainer.parks_optimizer),
        token_budget=trainer.token_budget if trainer.dynamic else None,
        scoring_token_budget=trainer.scoring_token_budget if scored else None,
        scoring_microbatch=None if scored else trainer.scoring_microbatch,
        microbatch_stated=trainer.microbatch is not None or old_key is not None,
    )


def with_old_keys(flat: Flat, trainer: TrainerRun) -> TrainerRun:
    """Microbatches as older scripts state them, over all GPUs: divided by the data-parallel ranks as verl does it.

    verl/workers/fsdp_workers.py: ``ppo_micro_batch_size //= world // ulysses``; megatron_workers.py: by the dp size.
    """
    ranks = max(trainer.devices // trainer.replica_devices, 1)
    old = {"microbatch": A + "ppo_micro_batch_size", "scoring_microbatch": R + "log_prob_micro_batch_size"}
    given = {
        name: max(int(flat[key]) // ranks, 1)
        for name, key in old.items()
        if getattr(trainer, name) is None
        and isinstance(flat.get(key), int | float)
        and not (name == "scoring_microbatch" and trainer.scoring_token_budget)
    }
    return trainer.having(**given)


def read_batch(flat: Flat, batch: BatchFacts, *, whole: bool) -> BatchFacts:
    """Prompts that are rolled out where groups are filtered, and turns.

    ``whole``: batches of ``gen_batch_size`` follow one another until enough groups are left (dapo_ray_trainer.py:276 of
    verl's recipes); since v0.9 single prompts take the places of those that were dropped, however many those are.
    """
    generated = flat.get("data.gen_batch_size")
    more = flat.get("algorithm.filter_groups.enable") and isinstance(generated, int) and generated > batch.prompts
    turns = flat.get(R + "multi_turn.max_assistant_turns") if _takes_turns(flat) else 1
    together = generated if more and whole else None
    return replace(batch, generated_prompts=together, generation_batch=together, turns=int(turns or 2))


def _one_by_one(flat: Flat) -> list[tuple[str, str]]:
    """That the prompts of a generation batch are no number that V1's trainer reads (since 0.9, ppo/v1)."""
    key = "data.gen_batch_size"
    if not (flat.get("trainer.use_v1") and flat.get("algorithm.filter_groups.enable")) or flat.get(key) in (None, 1):
        return []
    why = "is set to 1 by the V1 trainer, which draws prompts one by one for those that filtering drops"
    return [(key, f"{why}: how many are rolled out is not in the file (generated_prompts of a job)")]


def _takes_turns(flat: Flat) -> bool:
    """Whether tools answer: by its switch, or as tools are named (a base that is not here may hold the switch)."""
    return any(flat.get(f"{R}multi_turn.{key}") for key in ("enable", "tool_config_path", "function_tool_path"))


def algorithm_of(flat: Flat) -> Algorithm:
    """PPO by its advantages, DAPO by its filter, else GRPO."""
    if flat.get("algorithm.adv_estimator") == "gae":
        return "ppo"
    return "dapo" if flat.get("algorithm.filter_groups.enable") else "grpo"


def has_reference(flat: Flat) -> bool:
    """Whether a reference policy is scored."""
    return bool(flat.get(A + "use_kl_loss")) or bool(flat.get("algorithm.use_kl_in_reward"))


@dataclass(frozen=True)
class VerlFacts:
    """What rules ask of an imported configuration: pools and weight sync, the rollout's mode and memory; samples of a
    microbatch over all GPUs, as older scripts state them, and whether those of one GPU stand beside them; engines of
    which one reads prompts for the others; whether trainer GPUs are lent in a way that is not predicted."""

    rollout_mode: str
    free_cache_engine: bool
    separate_pools: bool | None = None
    sync_backend: str | None = None
    parameter_sync_step: int | None = None
    microbatch_of_all: int | None = None
    microbatch_twice: bool = False
    prefill_group: int | None = None
    hybrid_uncounted: bool = False
    scoring_counted: bool | None = None
    scoring_counted_twice: bool = False
    reference_counted: bool | None = None
    reference_budget: int | None = None
    """Of the scoring passes: whether a count of samples is stated, for the old policy and for the reference, and the
    tokens of a replica's microbatch of the reference where it is cut by them."""
    unsharded_gradients: bool = False
    """Whether the critic's gradients are summed over microbatches before they are sharded, and the actor's are not."""
    reference_resident: bool = False
    """Whether the reference's weights stay on the trainer's GPUs (Megatron's; FSDP's are always taken to the host)."""
    others: tuple[str, ...] = ()
    """Trainers that a file names and rlperf does not know: their sections are not read."""
    beside: tuple[tuple[str, str], ...] = ()
    """Keys whose work is not counted, and how it differs."""


def read_placement(flat: Flat, run: Run, source: Source) -> Run:
    """Mode, staleness and devices; verl's separate pools stand in three places, by version."""
    per_node = int(flat.get("trainer.n_gpus_per_node") or _NODE)
    trainer = int(flat.get("trainer.nnodes") or 1) * per_node
    recipe = is_async_recipe(source)
    v1 = str(flat.get("trainer.v1.trainer_mode") or "sync")
    own = R if v1 == "separate_async" else "rollout." if recipe else ""
    fully = recipe and (_is_fully(source) or flat.get("data.train_batch_size") == 0)
    rollout = trainer
    if own:
        own_gpus = int(flat.get(own + "n_gpus_per_node") or per_node)
        rollout = int(flat.get(own + "nnodes") or 1) * own_gpus
        # Ray places the pools one by one: 6 and 2 GPUs a node stand beside each other on nodes of 8
        per_node = per_node + own_gpus if per_node + own_gpus <= _NODE else max(per_node, own_gpus)
    total = trainer + (rollout if own else 0)
    mode, staleness, batch = _mode(flat, own, recipe, fully, run.batch)
    of_all = flat.get(A + "ppo_micro_batch_size")
    return replace(
        run,
        mode=mode,
        staleness=staleness,
        devices=total,
        nodes=-(-total // per_node),
        devices_per_node=per_node,
        recipe=("fully_async" if fully else "one_step_off") if recipe else None,
        batch=batch,
        trainer=run.trainer.having(devices=trainer),
        rollout=run.rollout.having(devices=rollout),
        facts=VerlFacts(
            rollout_mode=str(flat.get(R + "mode")),
            free_cache_engine=bool(flat.get(R + "free_cache_engine")),
            separate_pools=True if own else None,
            sync_backend=str(flat.get(R + "checkpoint_engine.backend") or "naive") if own else None,
            parameter_sync_step=flat.get("trainer.v1.separate_async.parameter_sync_step") if own == R else None,
            microbatch_of_all=of_all if isinstance(of_all, int) else None,
            prefill_group=1 + int(flat.get(R + "disaggregation.decode_replicas") or 1),
            microbatch_twice=None not in (of_all, flat.get(A + "ppo_micro_batch_size_per_gpu")),
            unsharded_gradients=bool(flat.get(f"critic.fsdp.{NO_SYNC}")) and not run.trainer.whole_gradients,
            reference_resident=has_reference(flat)
            and run.trainer.backend == "megatron"
            and not (run.trainer.lora_rank or flat.get("actor_rollout_ref.ref.megatron.param_offload")),
            others=tuple(name for name in OTHERS if any(name in text for text in other_engines(source))),
            **_scoring_facts(flat, run),
        ),
    )


_NODE = 8
"""GPUs of a usual node, where a file states those of its pools alone; a cluster of smaller ones counts its own."""
OTHERS = ("veomni", "torchtitan", "automodel", "mindspeed")
"""Trainers of verl whose keys and costs rlperf does not know (trainer/config/engine, workers/engine of 0.9.1)."""


def other_engines(source: Source) -> tuple[str, ...]:
    """Where a file names one of them: a group, a strategy, or a base configuration (``ppo_veomni_trainer``)."""
    stated = [(key, source.keys.get(key)) for key in ("model_engine", A + "strategy")]
    stated += [("defaults", base) for base in source.bases]
    return tuple(
        f"{key}: {value} (of verl's trainers rlperf knows FSDP and Megatron)"
        for key, value in stated
        if any(name in str(value) for name in OTHERS)
    )


def _scoring_facts(flat: Flat, run: Run) -> dict[str, Any]:
    """What rules ask of the two scoring passes: the reference's keys are its own, by default the actor's."""
    counts = {section: [flat.get(f"{section}log_prob_micro_batch_size{end}") for end in ("", "_per_gpu")]
              for section in (R, REF)}  # fmt: skip
    budget = flat.get(REF + "log_prob_max_token_len_per_gpu") if flat.get(REF + "log_prob_use_dynamic_bsz") else None
    scored, beside = has_reference(flat), []
    for name in ("log_prob_max_token_len_per_gpu", "log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz"):
        ours, theirs = flat.get(R + name), flat.get(REF + name)
        used = name.endswith("dynamic_bsz") or bool(flat.get(REF + "log_prob_use_dynamic_bsz")) == ("token" in name)
        if scored and used and theirs not in (None, ours):
            beside.append((REF + name, f"the reference's pass is predicted with the rollout's {ours}"))
    return {
        "scoring_counted": any(count is not None for count in counts[R]),
        "scoring_counted_twice": None not in counts[R],
        "reference_counted": any(count is not None for count in counts[REF]) if scored else None,
        "reference_budget": TOKENS_PER_DEVICE.read(budget, run) if scored and isinstance(budget, int) else None,
        "beside": (*beside, *_cut_answers(flat, run), *_old_reward_model(flat), *_one_by_one(flat)),
    }


def _old_reward_model(flat: Flat) -> list[tuple[str, str]]:
    """That a reward model is served by a trainer's passes, as releases before 0.7 did (workers/fsdp_workers.py)."""
    if not flat.get("reward_model.enable"):
        return []
    why = "a reward model on GPUs, as releases up to 0.6 run it: neither its seconds nor its memory are counted"
    return [("reward_model.enable", f"{why} (the job's scorers, kind reward, are its nearest)")]


def _cut_answers(flat: Flat, run: Run) -> list[tuple[str, str]]:
    """That answers of tools are cut (by default to 256 characters), as those of a workload are not."""
    key, most = R + "multi_turn.max_tool_response_length", run.batch.max_response_tokens or 0
    cut = flat.get(key) if _takes_turns(flat) else None
    if not isinstance(cut, int) or cut >= CHARACTERS * most:
        return []
    why = f"cuts every answer of a tool to {cut:,} characters, some {cut // CHARACTERS:,} tokens"
    return [(key, f"{why}; those of the workload are predicted whole")]


def _mode(flat: Flat, own: str, recipe: bool, fully: bool, batch: BatchFacts) -> tuple[Mode, int, BatchFacts]:
    """Mode, staleness, and the batch, which fully asynchronous training counts in syncs."""
    if fully:
        sync = int(flat.get("async_training.trigger_parameter_sync_step") or 1)
        batches = int(flat.get("async_training.require_batches") or 1)
        ahead = float(flat.get("async_training.staleness_threshold") or 0)
        mode = "async" if ahead > 0 else "streaming"
        batch = replace(batch, prompts_per_step=batch.mini * batches * sync)
        return mode, max(MODES[mode].least_staleness, round(ahead)), batch
    if own == R:
        return *_separate(flat), batch
    return ("one_step_off", 1, batch) if recipe else ("colocated", 0, batch)


def _separate(flat: Flat) -> tuple[Mode, int]:
    """Mode and staleness of V1's separate pools.

    Its sampler counts the versions that a sample spans, so one more than it is behind (replay_buffer.py:511); how far
    it is behind is held down by the batches that are submitted ahead, one a step (trainer_separate_async.py).
    """
    spanned = int(flat.get("trainer.v1.sampler.max_off_policy_threshold") or 1)
    ahead = int(flat.get("trainer.v1.separate_async.num_warmup_batches") or 1)
    behind = max(min(spanned - 1, ahead), 1)
    waits = flat.get("trainer.v1.sampler.max_off_policy_strategy") == "wait"
    return (mode_of_staleness(behind) if waits else "async"), behind


def read_drafts(flat: Flat, run: Run) -> str | None:
    """Speculative decoding as `rlperf.frameworks.verl.settings.drafts` writes it."""
    mtp, own = M + "mtp.", f"{R}engine_kwargs.{run.rollout.backend}."
    sglang = run.rollout.backend == "sglang"
    if flat.get(mtp + "enable") and flat.get(mtp + "enable_rollout"):
        return read_sglang(flat, mtp.__add__, True) if sglang else read_vllm({**flat, mtp + "method": "mtp"}, mtp)
    return read_sglang(flat, own.__add__, False) if sglang else read_vllm(flat, own + "speculative_config.")


def quantised_training(flat: Flat) -> tuple[str, ...]:
    """That a trainer is aware of its engines' quantisation, which no job of rlperf says."""
    stated = next((key for key in QAT if flat.get(key)), None)
    return () if stated is None else (f"{stated}: true (rlperf reads no quantisation-aware training of verl)",)
