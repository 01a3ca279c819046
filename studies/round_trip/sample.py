"""Jobs at random, over everything that a job can ask and a framework may have a key for."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from rlperf.frameworks.adapter import framework_facts
from rlperf.specs.job import Job
from rlperf.specs.modes import MODES

SMALL = ("Qwen2.5-7B", "Qwen3-4B", "Qwen3-8B", "Llama-3.1-8B")
LARGE = ("Qwen2.5-32B", "Qwen3-30B-A3B", "Qwen3-32B", "Qwen3-14B")
CLUSTERS = ("dgx_a100", "dgx_h100", "dgx_h200", "dgx_b200")
ENGINES = ("vllm", "sglang")
CRITICS = ("verl", "openrlhf", "areal")
"""Frameworks that train one."""
EIGHT_BITS = ("nemo_rl", "slime", "miles")
"""Frameworks with keys for training in FP8, by Megatron."""
SCORES_OR_NOT = ("verl", "areal", "rlinf")
"""Frameworks with a key for either: that the old policy is scored, and that it is not."""


def sampled(framework: str, random: Random, *, few: bool = False) -> Job:
    """A job that the framework can run: model, devices, modes, algorithm, batch and settings at random.

    ``few``: few and short samples, so that hundreds of plans take minutes; all else is drawn from as much.
    """
    facts = framework_facts(framework)
    known = [mode for mode in facts.modes if framework not in MODES[mode].had_by]
    modes = random.sample(known, 1 if random.random() < 0.7 else min(2, len(known)))
    apart = any(not MODES[mode].shares_devices for mode in modes)
    large = random.random() < 0.4
    algorithms = ["grpo", "dapo", *(["ppo"] if framework in CRITICS else [])]
    job: dict[str, Any] = {
        "architecture": random.choice(LARGE if large else SMALL), "cluster": random.choice(CLUSTERS),
        "nodes": random.choice([2, 3, 4] if apart or large else [1, 2, 3]), "framework": framework, "modes": modes,
        "engine": random.choice([name for name in facts.engines if name in ENGINES]),
        "algorithm": random.choice(algorithms), "tasks": [_task(random, *(FEW if few else MANY))],
        "limits": {"staleness": max(*(MODES[mode].least_staleness for mode in modes), random.choice([1, 2, 3]))},
        "pools": [
            {"role": "rollout", "settings": _engine(random)},
            {"role": "trainer", "settings": _trainer(random, framework)},
        ],
    }  # fmt: skip
    if random.random() < 0.2:
        job["reference"] = random.random() < 0.5
    if framework in SCORES_OR_NOT and random.random() < 0.3:
        job["old_policy"] = random.random() < 0.5
    if random.random() < 0.2:
        job["trainer_backends"] = list(facts.backends)
    elif framework == "verl" and random.random() < 0.15:
        job["trainer_backends"] = ["fsdp2"]
        job["pools"][1]["settings"]["whole_gradients"] = True
    return Job.model_validate(job)


MANY = ("math", "math", "programming", "tool_use", "searching"), (64, 128, 192), (2048, 4096, 8192)
FEW = (*["math"] * 9, "programming", "tool_use"), (64,), (512, 1024)
"""Workloads, prompts of an rl_step, and longest responses; turns take ten times as long to judge."""


def _task(random: Random, workloads: Sequence[str], prompts: Sequence[int], lengths: Sequence[int]) -> dict[str, Any]:
    """A task of one of the presets; its batch is pinned or partly open."""
    mini = random.choice([16, 32, 64, [16, 32]])
    return {
        "name": "t", "workload": random.choice(workloads),
        "prompts_per_step": random.choice(prompts), "group_size": random.choice([4, 8, 16]), "mini_batch": mini,
        "max_prompt_tokens": random.choice([1024, 2048]), "max_response_tokens": random.choice(lengths),
    }  # fmt: skip


def _engine(random: Random) -> dict[str, Any]:
    """Settings of the engine, pinned or open, each in a few jobs."""
    every: dict[str, Any] = {
        "rollout_dtype": ["bf16", "fp8"], "kv_dtype": ["bf16", "fp8"], "prefix_caching": random.choice([True, False]),
        "memory_fraction": random.choice([0.6, [0.5, 0.7]]), "max_running": random.choice([16, 32]),
        "engine_token_budget": random.choice([4096, 16384]), "cuda_graphs": False, "chunked_prefill": True,
    }  # fmt: skip
    return {name: value for name, value in every.items() if random.random() < 0.12}


def _trainer(random: Random, framework: str) -> dict[str, Any]:
    """Settings of the trainer, each in a few jobs."""
    every: dict[str, Any] = {"lora_rank": 32, "chunked_loss": True, "parked": random.choice([True, False])}
    if framework in EIGHT_BITS:
        every["compute_dtype"] = "fp8"
    return {name: value for name, value in every.items() if random.random() < 0.12}
