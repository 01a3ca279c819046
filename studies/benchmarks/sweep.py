"""A sweep of about a million points by closed forms: points per second, and the most memory that the process takes.

``python studies/benchmarks/sweep.py [FOLDER]``; the points share model, lengths and cluster and differ in both layouts.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time

import rlperf
from rlperf.sweep import Sweep, check_sweep

ROLLOUT, TRAINER = "pools.rollout.", "pools.trainer."
GRID = {
    "price": ["2 USD/h", "3 USD/h"],
    ROLLOUT + "layout.tensor_parallel": [1, 2, 4, 8],
    ROLLOUT + "settings.max_running": [16, 32, 64, 128, 256, 512, 1024],
    ROLLOUT + "settings.memory_fraction": [0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9],
    TRAINER + "layout.tensor_parallel": [1, 2, 4, 8],
    TRAINER + "layout.context_parallel": [1, 2, 4, 8],
    TRAINER + "layout.pipeline_parallel": [1, 2, 4],
    TRAINER + "layout.zero_stage": [0, 1, 2, 3],
    TRAINER + "layout.activation_recompute": ["none", "selective", "full"],
    TRAINER + "settings.token_budget": [12288, 16384, 24576],
}


def main(out: str) -> None:
    """Sweep and say what it took."""
    job = rlperf.short_job("Qwen3-8B", 16, "h100", max_response="8k", prompts=64)
    sweep = Sweep(job=job.model_dump(mode="json", exclude_none=True), grid=GRID)
    began = time.perf_counter()
    found = rlperf.sweep_job(sweep, out, workers=1)
    seconds, points = time.perf_counter() - began, check_sweep(sweep).points
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(
        f"{points:,} points in {seconds:.0f} s, {points / seconds:,.0f} a second; at most {peak:.2f} GB; {found.counts}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="where the rows stay; default: nowhere")
    asked = parser.parse_args()
    if asked.folder is not None:
        main(asked.folder)
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(folder)
