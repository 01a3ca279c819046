"""How fast sweeps are: 100,000 points by closed forms, 2,000 by events, each on two processes.

python studies/benchmarks/sweep.py [screen] [events] [--backend dask] [--workers 2]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from rlperf.api import sweep_job
from rlperf.sweep import Sweep

JOB = {
    "name": "benchmark", "architecture": "Qwen3-8B", "cluster": "dgx_h100", "nodes": 2, "price": "2.50 USD/h",
    "tasks": [{"name": "math", "workload": "math", "prompts_per_step": 128, "group_size": 8, "mini_batch": 64,
               "max_response_tokens": 16384}],
}  # fmt: skip
ENGINE = {
    "pools.rollout.layout.tensor_parallel": [1, 2, 4, 8],
    "pools.rollout.settings.memory_fraction": [0.5, 0.6, 0.7, 0.8],
    "pools.rollout.settings.max_running": [64, 256],
}
GRIDS = {
    "screen": {
        "architecture": ["Qwen3-8B", "Qwen2.5-7B"],
        "cluster": ["dgx_h100", "dgx_h200"],
        "nodes": [1, 2, 4],
        "tasks.math.prompts_per_step": [64, 128],
        "tasks.math.max_response_tokens": [8192, 16384, 32000],
        **ENGINE,
        "pools.trainer.layout.tensor_parallel": [1, 2, 4, 8],
        "pools.trainer.layout.context_parallel": [1, 2, 4],
        "pools.trainer.layout.activation_recompute": ["none", "selective", "full"],
        "pools.trainer.settings.token_budget": {"min": 32768, "max": 65536, "factor": 2},
    },
    "events": {
        "nodes": [1, 2, 4],
        "tasks.math.prompts_per_step": [64, 128],
        "tasks.math.max_response_tokens": [8192, 16384, 32000],
        **ENGINE,
        "pools.trainer.layout.tensor_parallel": [1, 2, 4, 8],
    },
}


def main() -> None:
    """Run what is asked for and print seconds and points."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", default=["screen", "events"])
    parser.add_argument("--backend", default="processes")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    for method in options.what:
        sweep = Sweep(name=method, job=JOB, method=method, grid=GRIDS[method])
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            found = sweep_job(sweep, Path(folder), workers=options.workers, backend=options.backend)
            seconds = time.perf_counter() - started
        print(f"{method}: {found.frame.height:,} points in {seconds:.1f} s on {options.workers} {options.backend}; "
              f"{found.counts}")  # fmt: skip


if __name__ == "__main__":
    main()
