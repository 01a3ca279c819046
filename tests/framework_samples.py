"""Random runs that a planner could have chosen for a framework: all modes, dense and MoE, 1 to 64 nodes."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from rlperf.frameworks.adapter import framework_facts
from rlperf.frameworks.generate import READERS
from rlperf.frameworks.run import Run, ref
from rlperf.specs.architecture import Architecture
from rlperf.specs.modes import MODES
from rlperf.specs.profiles import load_architecture
from rlperf.specs.trainer_calibration import load_trainer

SHIPPED = tuple(sorted(READERS))
"""Frameworks whose key tables are read from their own releases. What tests sample or count is theirs; one that is added
by hand (docs/contributing.md) is held by the tests over all `FRAMEWORKS`."""

DENSE = ("Qwen2.5-7B", "Qwen3-8B", "Qwen2.5-32B", "Llama-3.1-70B")
MOE = ("Qwen3-30B-A3B", "Qwen3-235B-A22B")


def with_values(run: Run, values: Mapping[str, Any]) -> Run:
    """The run with some values changed, by the names that key tables use."""
    return run.having({ref(name): value for name, value in values.items()})


def _divisors(number: int, most: int) -> list[int]:
    return [size for size in (1, 2, 4, 8, 16, 32, 64) if size <= most and number % size == 0]


def _trainer(random: Random, arch: Architecture, devices: int, backend: str, framework: str) -> dict[str, Any]:
    values: dict[str, Any] = {"devices": devices, "backend": backend, "packing": True}
    values["activation_recompute"] = random.choice(["none", "selective", "full"])
    capability = load_trainer(backend).capability
    values["offload"] = random.choice(
        [word for word in ("none", "none", "optimizer") if word in capability.offload.all]
    )
    model_parallel = framework != "trl"
    if not capability.has("pipeline_parallel"):
        sizes = _divisors(min(arch.heads, arch.kv_heads) if framework == "nemo_rl" else arch.heads, min(8, devices))
        values["ulysses"] = random.choice(sizes) if model_parallel else 1
        if framework in ("nemo_rl", "openrlhf"):
            values["context_parallel"], values["ulysses"] = values["ulysses"], 1
        stages = capability.zero_stages.searched
        values["zero_stage"] = random.choice(stages) if len(stages) > 1 else stages[0]
        return values
    tensor = random.choice(_divisors(arch.kv_heads, min(8, devices)))
    pipeline = random.choice([p for p in (1, 2, 4, 8) if arch.layers % p == 0 and p * tensor <= devices])
    context = random.choice([c for c in (1, 2, 4) if c * tensor * pipeline <= devices])
    experts = 1
    if arch.experts:
        stage = devices // pipeline
        experts = random.choice([e for e in (1, 2, 4, 8, 16) if stage % e == 0 and arch.experts.count % e == 0])
    virtual = 2 if pipeline > 1 and arch.layers % (2 * pipeline) == 0 and random.random() < 0.3 else 1
    return {**values, "tensor_parallel": tensor, "pipeline_parallel": pipeline, "context_parallel": context,
            "expert_parallel": experts, "virtual_pipeline": virtual, "sequence_parallel": tensor > 1,
            "zero_stage": 1, "offload": "none" if framework == "areal" else values["offload"]}  # fmt: skip


def _rollout(random: Random, arch: Architecture, devices: int, engine: str, framework: str) -> dict[str, Any]:
    width = random.choice([t for t in _divisors(arch.heads, min(8, devices)) if devices % t == 0])
    values: dict[str, Any] = {"devices": devices, "backend": engine, "tensor_parallel": width}
    values["max_running"] = random.choice([64, 256, 512])
    values["memory_fraction"] = random.choice([0.5, 0.7, 0.85])
    values["prefix_caching"], values["cuda_graphs"] = random.random() < 0.7, random.random() < 0.9
    values["chunked_prefill"], values["engine_token_budget"] = True, random.choice([8192, 16384])
    if arch.experts and width > 1 and random.random() < 0.5:
        values["expert_parallel"] = width
        if random.random() < 0.5:
            values["attention_data_parallel"] = width
    if random.random() < 0.2 and framework in ("nemo_rl", "slime"):
        values["kv_dtype"] = "bf16"
    return values


def sample_run(random: Random, framework: str, version: str | None = None) -> Run:
    """One random run that respects divisibility and what the framework's facts name as possible."""
    facts = framework_facts(framework, version)
    arch = load_architecture(random.choice(DENSE + MOE))
    backend = random.choice(facts.backends)
    engine = random.choice([name for name in facts.engines if name in ("vllm", "sglang")])
    per_node = 8
    # a mode that a row of the table gives the framework has no keys yet
    mode = random.choice([mode for mode in facts.modes if framework not in MODES[mode].had_by])
    nodes = random.choice([1, 2, 4, 8, 16, 32, 64])
    if MODES[mode].shares_devices:
        trainer_devices = rollout_devices = nodes * per_node
    else:
        half = max(nodes // 2, 1) * per_node
        trainer_devices = rollout_devices = half if nodes > 1 else per_node // 2
        if framework == "trl":
            rollout_devices = min(rollout_devices, per_node)  # its server is on one node
    group = random.choice([8, 16])
    values = {f"trainer.{k}": v for k, v in _trainer(random, arch, trainer_devices, backend, framework).items()}
    values |= {f"rollout.{k}": v for k, v in _rollout(random, arch, rollout_devices, engine, framework).items()}
    prompt, response = random.choice([1024, 2048]), random.choice([4096, 8192, 16384])
    # A mini batch that divides over every data-parallel rank, and a step of whole mini batches.
    mini = max(trainer_devices // group, 16) * random.choice([1, 2])
    if framework == "areal":
        mini = max(mini, trainer_devices)
    if MODES[mode].shares_devices:
        values["trainer.parked"] = framework != "trl" and random.random() < 0.5
    total = trainer_devices if MODES[mode].shares_devices else trainer_devices + rollout_devices
    values |= {
        "run.architecture": arch.name,
        "run.algorithm": random.choice(["grpo", "grpo", "dapo"]),
        "run.reference": random.random() < 0.5,
        "run.mode": mode,
        "run.staleness": MODES[mode].staleness(random.choice([2, 4])),
        "run.devices": total,
        "run.devices_per_node": per_node,
        "run.nodes": -(-total // per_node),
        "run.rl_steps": 50,
        "run.last_rl_step": 50,
        "batch.prompts_per_step": mini * random.choice([1, 2, 4]),
        "batch.group_size": group,
        "batch.mini_batch": mini,
        "batch.max_prompt_tokens": prompt,
        "batch.max_response_tokens": response,
    }
    if random.random() < 0.8:
        values["trainer.token_budget"] = (prompt + response) * random.choice([1, 2])
    else:
        values["trainer.microbatch"] = 1
    return with_values(Run(), values).completed()
