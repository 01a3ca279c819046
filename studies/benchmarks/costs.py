"""Evaluations per second of the cost models on one core, and the time of ``import rlperf``; against stated targets.

Run: OMP_NUM_THREADS=1 python studies/benchmarks/costs.py
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from rlperf.cost.batching import Microbatches
from rlperf.cost.inference import decode_step_s
from rlperf.cost.replica import Replica
from rlperf.cost.trainer.memory import trainer_memory
from rlperf.cost.trainer.update import training_update
from rlperf.layout import Layout
from rlperf.specs.engine_calibration import load_engine_calibration
from rlperf.specs.hardware import load_hardware
from rlperf.specs.profiles import load_architecture
from rlperf.specs.trainer_calibration import load_trainer

PER_SECOND = 1e6
IMPORT_S = 0.3


def rate(evaluate: Callable[[], int]) -> float:
    """Evaluations per second: the best of five runs."""
    evaluate()
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        count = evaluate()
        best = max(best, count / (time.perf_counter() - start))
    return best


def layouts() -> Layout:
    """Open axes: 4 x 4 x 4 x 6 x 3 x 2 layouts, with batches as the last axis."""
    names = ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel", "activation_recompute",
             "virtual_pipeline")  # fmt: skip
    axes = np.ix_([1, 2, 4, 8], [1, 2, 4, 8], [1, 2, 4, 8], [1, 2, 4, 8, 16, 32], [0, 1, 2], [1, 2])
    return Layout.of(**dict(zip(names, axes, strict=True)), zero_stage=1)


def training(count: int = 256) -> int:
    """Optimizer updates: every layout with ``count`` batches."""
    grid = layouts()
    arch, hw, trainer = (
        load_architecture("Qwen2.5-32B"),
        load_hardware("h100_sxm", "dgx_h100"),
        load_trainer("megatron"),
    )
    axes = {name: value[..., None] if value.ndim else value for name, value in vars(grid).items()}
    open_grid = Layout(**axes)
    tokens = np.linspace(8192, 32768, count)
    batches = Microbatches.of(tokens, tokens * 8192, 8192.0, np.linspace(1, 64, count).round())
    return int(training_update(arch, hw, trainer, open_grid, batches).total_s.size)


def memory(count: int = 256) -> int:
    """Memory of the same layouts and batches."""
    grid = layouts()
    arch, hw, trainer = (
        load_architecture("Qwen2.5-32B"),
        load_hardware("h100_sxm", "dgx_h100"),
        load_trainer("megatron"),
    )
    open_grid = Layout(**{name: value[..., None] if value.ndim else value for name, value in vars(grid).items()})
    tokens = np.linspace(8192, 32768, count)
    batches = Microbatches.of(tokens, tokens * 8192, 8192.0, np.linspace(1, 64, count).round())
    return int(trainer_memory(arch, hw, trainer, open_grid, batches).total.size)


def decode() -> int:
    """Decode engine_steps: layouts x batch sizes x contexts."""
    layout = Layout.of(tensor_parallel=np.array([1, 2, 4, 8])[:, None, None])
    arch, hw, engine = (
        load_architecture("Qwen2.5-32B"),
        load_hardware("h100_sxm", "dgx_h100"),
        load_engine_calibration("vllm"),
    )
    running = np.arange(1, 257, dtype=np.float64)[None, :, None]
    context = np.linspace(128, 32768, 1000)[None, None, :]
    return int(decode_step_s(Replica.of(arch, hw, engine, layout), running, running * context).size)


def import_seconds() -> float:
    """``import rlperf`` in a fresh interpreter, start of the interpreter taken off; best of five [s]."""

    def run(code: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - start

    return min(run("import rlperf") for _ in range(5)) - min(run("pass") for _ in range(5))


if __name__ == "__main__":
    failed = False
    for name, evaluate in (("training updates", training), ("trainer memory", memory), ("decode engine_steps", decode)):
        found = rate(evaluate)
        failed |= found < PER_SECOND
        print(f"{name:22s} {found:12,.0f} per second on one core ({found / PER_SECOND:.1f} x the target)")
    seconds = import_seconds()
    failed |= seconds > IMPORT_S
    print(f"{'import rlperf':22s} {seconds:12.3f} s (target {IMPORT_S} s)")
    sys.exit("slower than its target" if failed else 0)
