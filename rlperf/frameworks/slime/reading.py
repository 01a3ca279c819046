"""What slime's flags say: trainer, engine and lengths in the words of a plan, devices and mode, what its rules ask."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlperf.errors import Problem, SpecError
from rlperf.frameworks.adapter import Source
from rlperf.frameworks.drafting import read_sglang, sglang_running
from rlperf.frameworks.engine_arguments import sglang_experts, sglang_prefill
from rlperf.frameworks.keytable import Flat, Value
from rlperf.frameworks.run import BatchFacts, Run
from rlperf.specs.labels import key, last_part
from rlperf.specs.modes import mode_of_staleness
from rlperf.specs.profiles import architecture_reading, load_architecture

CONCURRENCY, FILTER = "sglang-server-concurrency", "dynamic-sampling-filter-path"
BOUND = "max-weight-staleness"
"""Versions that a fully asynchronous sample may lie behind, where a fork bounds them."""
SPELT = {
    "sglang-data-parallel-size": "sglang-dp-size", "sglang-expert-parallel-size": "sglang-ep-size",
    "sglang-ep": "sglang-ep-size", "sglang-pipeline-parallel-size": "sglang-pp-size",
    "sglang-attention-data-parallel-size": "sglang-attn-dp-size",
    "sglang-disable-decode-cuda-graph": "sglang-disable-cuda-graph",
    "sglang-enable-deepep-moe": "sglang-moe-a2a-backend",
}  # fmt: skip
"""Other names of SGLang's arguments (arg_groups/fields/parallel.py, exec_.py of 0.5.23)."""
# argparse defaults that a reader needs: slime/utils/arguments.py, Megatron arguments.py, SGLang ServerArgs.
DEFAULTS: Mapping[str, Value] = {
    "actor-num-nodes": 1, "actor-num-gpus-per-node": 8, "rollout-num-gpus-per-engine": 1, "num-gpus-per-node": 8,
    "n-samples-per-prompt": 1, "tensor-model-parallel-size": 1, "pipeline-model-parallel-size": 1,
    "context-parallel-size": 1, "expert-model-parallel-size": 1, "sequence-parallel": False,
    "use-distributed-optimizer": True, "optimizer-cpu-offload": False, "use-dynamic-batch-size": False,
    "sglang-dp-size": 1, "sglang-ep-size": 1, "sglang-disable-cuda-graph": False, "sglang-disable-radix-cache": False,
    "sglang-server-concurrency": 512,
    "colocate": False, "advantage-estimator": "grpo", "kl-loss-coef": 0.0, "kl-coef": 0.0,
    "sglang-enable-dp-attention": False,
}  # fmt: skip


@dataclass(frozen=True)
class SlimeFacts:
    """What rules ask beside the run: how it is launched, and flags that exclude each other."""

    colocate: bool
    asynchronous: bool
    rollout_stated: bool | None = None
    two_kl: bool | None = None
    over_sampling: int | None = None
    balance_by_flops: bool | None = None
    stated_samples: int | None = None


def sglang_flag(name: str) -> str:
    """SGLang's argument as slime and its forks pass it on."""
    return "sglang-" + name.replace("_", "-")


ALSO_READ = frozenset(
    {
        "actor-num-nodes", "actor-num-gpus-per-node", "rollout-num-gpus", "num-gpus-per-node", "colocate",
        "advantage-estimator", "kl-loss-coef", "use-kl-loss", "kl-coef", "hf-checkpoint", "num-steps-per-rollout",
        "over-sampling-batch-size", "update-weights-interval", "no-offload-train", "rollout-function-path",
        "dynamic-sampling-filter-path", "balance-by-flops", "log-probs-max-tokens-per-gpu", CONCURRENCY,
        "sglang-max-prefill-tokens", "sglang-attn-dp-size", "use-rollout-logprobs", "get-mismatch-metrics",
        "keep-old-actor",
    }
)  # fmt: skip
ARCHITECTURE = frozenset(
    {
        "swiglu", "num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "group-query-attention",
        "num-query-groups", "kv-channels", "qk-layernorm", "num-experts", "moe-router-topk", "moe-ffn-hidden-size",
        "vocab-size",
    }
)  # fmt: skip


def read_settings(run: Run, flat: Flat) -> Run:
    """Trainer, engine and lengths in the words of a plan."""
    batch, response = run.batch, run.batch.max_response_tokens or 1024
    context = batch.context_tokens
    prompt = context - response if context and context > response else 2048
    etp = flat.get("expert-tensor-parallel-size") or run.trainer.tensor_parallel
    trainer = run.trainer.having(
        expert_tensor_parallel=int(etp),
        offload="optimizer" if run.trainer.offload_optimizer else "none",
        packing=True,
        budget_stated=run.trainer.token_budget is not None,
        # slime/utils/arguments.py:1869 parses log-probs-max-tokens-per-gpu, which nothing reads
        scoring_token_budget=run.trainer.token_budget if run.trainer.dynamic else None,
    )
    depth, replica = run.rollout.pipeline_parallel, run.rollout.replica or 1
    drafted = read_sglang(flat, sglang_flag, own_layer=not flat.get(sglang_flag("speculative_draft_model_path")))
    running = sglang_running(run.rollout.max_running, drafted)
    sent = int(flat[CONCURRENCY])  # slime/rollout/sglang_rollout.py:94: so many of each engine, stated or not
    if sent < 1:
        raise SpecError(Problem(f"{CONCURRENCY} {sent}: an engine is sent no request, and the rollout never ends"))
    turns = 2 if flat.get("custom-generate-function-path") else 1  # what its examples of search and agents have
    running = running or sent if turns > 1 else min(running or sent, sent)
    rollout = run.rollout.having(tensor_parallel=max(replica // depth, 1), speculation=drafted, max_running=running)
    rollout = rollout.having(**sglang_prefill(flat, sglang_flag))
    rollout = rollout.having(rollout_dtype=rollout.rollout_dtype or served_dtype(_architecture_name(flat)))
    rollout = rollout.having(**sglang_experts(replace(run, rollout=rollout)))
    steps = flat.get("num-steps-per-rollout")
    mini = -(-batch.prompts // int(steps)) if steps and batch.mini_batch is None else batch.mini_batch
    sampled = flat.get("over-sampling-batch-size") if flat.get("dynamic-sampling-filter-path") else None
    more = isinstance(sampled, int) and sampled > batch.prompts
    batch = replace(batch, max_prompt_tokens=batch.max_prompt_tokens or prompt, mini_batch=mini)
    batch = replace(batch, generated_prompts=sampled if more else None, over_provision=_in_flight(flat, batch.prompts))
    batch = replace(batch, left_over=0 if flat.get("allow-partial-train-step") else _left_over(batch))
    return replace(run, batch=replace(batch, turns=turns), trainer=trainer, rollout=rollout)


def _left_over(batch: BatchFacts) -> int:
    """Prompts behind the last whole update, which slime drops before it scores (utils/dp_schedule.py:135).

    0 where updates are no whole groups, which no prediction counts.
    """
    stated = batch.stated_samples or batch.mini * batch.group_size
    whole = stated % batch.group_size == 0 and stated <= batch.prompts * batch.group_size
    return batch.prompts % batch.mini if whole else 0


_KEEPS_SCORING = ("get-mismatch-metrics", "keep-old-actor", "use-routing-replay")


def _scores_old_policy(run: Run, flat: Flat) -> bool:
    """Left out for the engine's log-probs, and since 0.3.0 where one update is all (megatron_utils/actor.py:461)."""
    if flat.get("use-rollout-logprobs") and not flat.get("get-mismatch-metrics"):
        return False
    always = any(flat.get(key) for key in _KEEPS_SCORING) or bool(float(flat.get("kl-coef") or 0))
    return always or run.batch.updates > 1 or flat["advantage-estimator"] not in ("grpo", "reinforce_plus_plus")


def _in_flight(flat: Flat, prompts: int) -> float:
    """Groups in flight over those that are waited for, where what is interrupted goes on in the next rl_step [1].

    Without the flag what the others had generated is thrown away, and beside a filter more are rolled out for those
    that it drops: neither is a partial rollout.
    """
    flight = flat.get("over-sampling-batch-size")
    if not flat.get("partial-rollout") or flat.get(FILTER) or not isinstance(flight, int):
        return 1.0
    return max(flight / prompts, 1.0)


def _at_once(run: Run, flat: Flat, rollout: int) -> int | None:
    """Trajectories of several turns under way: a semaphore of so many an engine, held while tools run, too.

    slime/rollout/sglang_rollout.py:94. None: no fewer than a batch has.
    """
    most = int(flat[CONCURRENCY]) * (rollout // (run.rollout.replica or 1))
    return most if run.batch.turns > 1 and 0 < most < run.batch.flight * run.batch.group_size else None


def read_placement(run: Run, flat: Flat, source: Source) -> Run:
    """Devices, mode, algorithm, and what rules ask."""
    per_node = int(flat["actor-num-gpus-per-node"])
    trainer = int(flat["actor-num-nodes"]) * per_node
    colocated, asynchronous = bool(flat["colocate"]), "async" in source.entry
    own = flat.get("rollout-num-gpus")
    rollout = trainer if colocated else int(own or 0)
    total = trainer if colocated else trainer + rollout
    per_node = max(per_node, min(int(flat["num-gpus-per-node"]), total))
    fully = asynchronous and "fully_async_rollout" in str(flat.get("rollout-function-path"))
    steps, samples = flat.get("num-steps-per-rollout"), run.batch.prompts * run.batch.group_size
    return replace(
        run,
        architecture=_architecture_name(flat),
        model_script=next(iter(source.bases), None),
        algorithm="ppo" if flat["advantage-estimator"] == "ppo" else "dapo" if flat.get(FILTER) else "grpo",
        # slime/ray/placement_group.py:178: the switch loads it, whatever the loss is multiplied with
        reference=bool(flat.get("use-kl-loss")) or bool(float(flat.get("kl-coef") or 0)),
        old_policy=_scores_old_policy(run, flat),
        mode="async" if fully else mode_of_staleness(int(asynchronous), shares_devices=colocated),
        staleness=int(flat.get(BOUND) or 1) if fully else int(asynchronous),
        devices=total,
        nodes=-(-total // per_node),
        devices_per_node=per_node,
        trainer=run.trainer.having(devices=trainer, parked=not flat.get("no-offload-train") if colocated else None),
        rollout=run.rollout.having(devices=rollout),
        batch=replace(run.batch, max_trajectories=_at_once(run, flat, rollout)),
        facts=SlimeFacts(
            colocate=colocated,
            asynchronous=asynchronous,
            rollout_stated=colocated or bool(own),
            two_kl=bool(flat.get("kl-loss-coef")) and bool(flat.get("kl-coef")),
            over_sampling=flat.get("over-sampling-batch-size") or run.batch.prompts,
            balance_by_flops=bool(flat.get("balance-by-flops")),
            stated_samples=-(-samples // int(steps)) if steps else None,
        ),
    )


def _architecture_name(flat: Flat) -> str:
    """The checkpoint folder's name, without what a converter appended."""
    name = str(flat.get("hf-checkpoint") or "").rstrip("/").rpartition("/")[2]
    return name.removesuffix("_torch_dist")


ENDINGS = {"fp8": "fp8_block", "mxfp8": "mxfp8", "int4": "int4_wo"}
"""What a checkpoint's name ends in -> what its engines serve, as those in FP8 are published: in blocks of 128 x 128."""
_PUBLISHED = {"fp8": "fp8_block"}
"""Weights of checkpoints that are published in 8 bits alone (DeepSeek-V3, Kimi-K2) -> what engines serve."""
_NAMED = {"kimi_k2_thinking": "int4_wo"}
"""Checkpoints stored otherwise than those whose shape they have (model card of moonshotai/Kimi-K2-Thinking)."""


def served_dtype(checkpoint: str) -> str | None:
    """In what engines serve a checkpoint, by its name or as its shape is published; None where neither says it.

    >>> served_dtype("Qwen3-30B-A3B-FP8"), served_dtype("Qwen3-30B-A3B")
    ('fp8_block', None)
    >>> served_dtype("Kimi-K2-Instruct"), served_dtype("Kimi-K2-Instruct-bf16"), served_dtype("Kimi-K2-Thinking")
    ('fp8_block', None, 'int4_wo')
    """
    named = ENDINGS.get(re.split("[-_]", checkpoint.lower())[-1]) or _NAMED.get(key(last_part(checkpoint)))
    if named:
        return named
    try:
        reading = architecture_reading(checkpoint)
        return None if reading.precise else _PUBLISHED.get(load_architecture(checkpoint).checkpoint_dtype)
    except SpecError:  # a shape that nobody knows is reported where the job is made
        return None
