"""How many nodes for a 300 s rl_step of a 32B policy at 32k tokens, and what does a faster one cost?

Run: python studies/capacity/run.py [--write] [OUT]   (seconds; expected.csv is what it wrote; OUT keeps the figures)
"""

from __future__ import annotations

import argparse
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl

from rlperf.api import sweep_job
from rlperf.report.sweep_figures import write_sweep_figures
from rlperf.sweep import Sweep, SweepResult

HERE = Path(__file__).parent
TARGET_S = 300.0
JOB: dict[str, Any] = {
    "name": "capacity", "architecture": "Qwen3-32B", "cluster": "dgx_h200", "framework": "verl==0.9.1",
    "trainer_backends": ["megatron"],
    "tasks": [{"name": "math", "workload": "math", "prompts_per_step": 64, "group_size": 8, "max_prompt_tokens": 2048,
               "max_response_tokens": 32768}],
}  # fmt: skip
CLUSTERS = ({"cluster": "dgx_h100", "price": "2.50 USD/h"}, {"cluster": "dgx_h200", "price": "3.50 USD/h"})
NODES = [2, 4, 8, 16, 32]


def run(method: str = "events") -> SweepResult:
    """Every cluster at every size."""
    sweep = Sweep(name="capacity", job=JOB, method=method, points=CLUSTERS, grid={"nodes": NODES})
    return sweep_job(sweep, workers=1)


def check(table: pl.DataFrame) -> None:
    """Time falls with nodes and less than in proportion; price rises; the tail is what is left."""
    for cluster in ("dgx_h100", "dgx_h200"):
        rows = table.filter((pl.col("cluster") == cluster) & (pl.col("status") == "ok")).sort("nodes")
        step, usd = rows["rl_step_s"].to_list(), rows["usd_per_step"].to_list()
        assert all(later < earlier for earlier, later in pairwise(step))
        assert step[0] / step[-1] < rows["nodes"][-1] / rows["nodes"][0]
        assert usd[-1] > 1.5 * min(usd)
        assert rows["bottleneck"][-1] == "rollout"
    fast = table.filter(pl.col("rl_step_s") <= TARGET_S)
    assert fast.height >= 1, "the target is met"


def main() -> None:
    """The table, printed and with ``--write`` kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record expected.csv")
    parser.add_argument("out", nargs="?", type=Path, help="folder that keeps the figures")
    asked = parser.parse_args()
    found = run()
    names = (
        "cluster",
        "nodes",
        "status",
        "rl_step_s",
        "low_s",
        "high_s",
        "usd_per_step",
        "rollout_s",
        "training_s",
        "bottleneck",
    )
    table = found.frame.select(names)
    sys.stdout.write(table.write_csv(float_precision=3))
    if asked.out is not None:
        write_sweep_figures(found, asked.out)
    if asked.write:
        table.write_csv(HERE / "expected.csv", float_precision=3)
    check(table)


if __name__ == "__main__":
    main()
