"""Keys that do nothing, and keys that change the work or the engine in a way that no prediction counts."""

from __future__ import annotations

from dataclasses import dataclass

from rlperf.frameworks.audit.finding import Finding
from rlperf.frameworks.engine_arguments import uncounted
from rlperf.frameworks.imports import Imported
from rlperf.frameworks.scorer_keys import misled
from rlperf.specs.releases import versions_of


@dataclass(frozen=True)
class IdleKey:
    """A key that a framework takes and that does nothing: why, in which versions, under which engine (empty: all)."""

    framework: str
    key: str
    why: str
    versions: str = ""
    engine: str = ""


@dataclass(frozen=True)
class UncountedKey:
    """A key that changes the work in a way that is not counted: how, at which values, unless which key has another."""

    framework: str
    key: str
    values: tuple[object, ...]
    why: str
    unless: str = ""


_SGLANG = "is not passed to SGLang (sglang_rollout/async_sglang_server.py:315 of 0.9.1), as engine_kwargs.sglang is"
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
IDLE = (
    IdleKey("rlinf", "rollout.sampling_params.max_new_tokens",
            "is read by SGLang's worker alone (vllm_worker.py:132 reads algorithm.sampling_params)", engine="vllm"),
    IdleKey("slime", "log-probs-max-tokens-per-gpu",
            "is parsed and never used (slime/utils/arguments.py:1869): scoring takes the train microbatches"),
    IdleKey("skyrl", "generator.inference_engine.enable_chunked_prefill",
            "reaches no engine (train/config/config.py)"),
    IdleKey("verl", _ACTOR + "router_replay.mode",
            "is read by nobody (0.9.0 workers/engine_workers.py:494): actor.megatron.router_replay.mode is", "0.8-"),
    *(IdleKey("verl", _ROLLOUT + name, _SGLANG, engine="sglang")
      for name in ("max_num_batched_tokens", "enable_chunked_prefill", "enable_prefix_caching")),
    IdleKey("verl", _ACTOR + "use_prefix_grouper",
            "is read by no worker since 0.8 (workers/actor/dp_actor.py:128 of 0.7.1 was the last)", "0.8-"),
)  # fmt: skip
_IN_FP32 = ("fp32", 32, "32", "32-true")
_ON_HOST = "FSDP2 then keeps parameters, gradients and optimizer in host memory and updates them there"
_APART = _ROLLOUT + "disaggregation."
UNCOUNTED = (
    *(UncountedKey("verl", section + ".offload_policy", (True,), _ON_HOST)
      for section in (_ACTOR + "fsdp_config", "critic.fsdp", "critic.model.fsdp_config")),
    UncountedKey("verl", _APART + "prefill_replicas", tuple(range(2, 65)),
                 "has several engines of a group read, where it is on"),
    UncountedKey("verl", _APART + "decode_tensor_model_parallel_size", tuple(range(1, 65)),
                 "gives engines that write a tensor parallel of their own, where it is on"),
    UncountedKey("verl", _ROLLOUT + "ignore_eos", (True,), "has every response run to its limit"),
    UncountedKey("verl", "trainer.balance_batch", (False,),
                 "leaves ranks with unequal tokens, where they are evened out"),
    UncountedKey("verl", "trainer.v1.trainer_mode", ("colocate_async",),
                 "has what did not end go on in the next rl_step (over_provision of a job) where all is waited for"),
    UncountedKey("verl", "algorithm.adv_estimator", ("remax",),
                 "has a greedy answer to every prompt generated after the samples"),
    *(UncountedKey("trl", f"load_in_{bits}bit", (True,),
                   f"holds the frozen weights in {bits} bits, and 16 are predicted") for bits in (4, 8)),
    UncountedKey("rlinf", "algorithm.down_sampling.do_down_sampling", (True,),
                 "trains on fewer responses than are generated"),
    UncountedKey("rlinf", "algorithm.max_num_gen_batches", tuple(range(2, 65)),
                 "loads this many batches of prompts for a step"),
    UncountedKey("rlinf", "actor.model.precision", _IN_FP32, "computes in fp32 where bf16 is predicted",
                 unless="actor.fsdp_config.mixed_precision.param_dtype"),
    UncountedKey("rlinf", "rollout.model.precision", _IN_FP32, "generates in fp32 where bf16 is predicted"),
)  # fmt: skip


def idle_or_uncounted(imported: Imported) -> list[Finding]:
    """Keys that do nothing, and those that change the work or the engine without being counted."""
    run, found = imported.run, list[Finding]()
    versions = imported.target.table.versions
    keys = imported.source.keys
    for idle in (each for each in IDLE if each.framework == imported.adapter.name):
        here = imported.target.version in versions_of(idle.versions, versions)
        value = keys.get(idle.key) if here and idle.engine in ("", run.rollout.backend) else None
        if value is not None and value != imported.target.default(idle.key):
            where = imported.where(idle.key)
            found.append(Finding("hint", idle.key, idle.why, "leave it out", "never", where, rule="idle_key"))
    for each in (each for each in UNCOUNTED if each.framework == imported.adapter.name):
        if keys.get(each.key) in each.values and keys.get(each.unless) in (None, *each.values):
            message = f"{each.why}, which is not counted"
            found.append(Finding("hint", each.key, message, "", "never", imported.where(each.key), rule="uncounted"))
    for key, (refused, why) in misled(imported.adapter.name, keys, run.scorers).items():
        when = "launch" if refused else "never"
        where = imported.where(key)
        found.append(Finding("error" if refused else "warning", key, why, "", when, where, rule="scorers"))
    for key, why in getattr(run.facts, "beside", ()):
        found.append(Finding("hint", key, why, "", "never", imported.where(key), rule="uncounted"))
    unknown = {item.key for item in imported.unknown}
    known = {key: value for key, value in imported.carried.items() if key not in unknown}
    for key in uncounted(known, imported.target.defaults(), run.rollout.backend):
        message = f"changes what the engine ({run.rollout.backend}) holds or how fast it is, and is not counted"
        found.append(Finding("hint", key, message, "", "never", imported.where(key), rule="uncounted"))
    return found
