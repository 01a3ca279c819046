"""Four findings on RLVR in production (arXiv 2509.25279), asked of the model: skew, layouts, batch, asynchrony.

Run: python studies/paper_findings/run.py [--write]   (half a minute; expected.csv is what it wrote)
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from rlperf.api import predict_job, sweep_job
from rlperf.specs.job import Job
from rlperf.sweep import Sweep

HERE = Path(__file__).parent
TASK = {"name": "task", "workload": "math", "prompts_per_step": 64, "group_size": 8, "max_prompt_tokens": 1024,
        "max_response_tokens": 16384}  # fmt: skip
JOB: dict[str, Any] = {
    "name": "findings", "architecture": "Qwen3-8B", "cluster": "dgx_h100", "nodes": 2, "trainer_backends": ["megatron"],
    "tasks": [TASK],
}  # fmt: skip
PINNED: dict[str, Any] = {
    **JOB,
    "pools": [
        {"role": "rollout", "layout": {"tensor_parallel": 2}, "settings": {"max_running": 256, "memory_fraction": 0.6}},
        {"role": "trainer", "layout": {"tensor_parallel": 2, "context_parallel": 4, "activation_recompute": "full"}},
    ],
}
MEAN = 2000.0
Row = dict[str, Any]


def trace(folder: Path, variation: float) -> Path:
    """A recorded rl_step of 64 x 8 responses with the same mean and a chosen coefficient of variation."""
    rng = np.random.default_rng(7)
    sigma = np.sqrt(np.log1p(variation**2))
    lengths = np.exp(sigma * rng.standard_normal((64, 8)))
    lengths = np.clip(np.round(MEAN * lengths / lengths.mean()), 1, 16384).astype(int)
    path = folder / f"cv{variation:g}.csv"
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["rl_step", "group", "prompt_tokens", "response_tokens", "max_response_tokens"])
        out.writerows([0, group, 300, int(n), 16384] for group, row in enumerate(lengths) for n in row)
    return path


def skew(folder: Path) -> list[Row]:
    """Idle devices of the rollout at equal mean length and growing skew."""
    rows = []
    for variation in (0.1, 0.5, 1.0, 1.5):
        task = {**TASK, "workload": str(trace(folder, variation))}
        found = predict_job(Job.model_validate({**PINNED, "tasks": [task]}))
        idle = sum(found.idle_fraction.values())
        rows.append({"finding": "skew", "case": f"cv {variation}", "rl_step_s": found.rl_step_s, "value": idle})
    return rows


def fixed() -> list[Row]:
    """One layout for all lengths against the best for each: loss of the best fixed pair of layouts."""
    layouts = {
        "pools.rollout.layout.tensor_parallel": [1, 2, 4, 8],
        "pools.trainer.layout.tensor_parallel": [1, 2, 4, 8],
        "pools.trainer.layout.context_parallel": [1, 2, 4, 8],
    }
    caps = [2048, 8192, 32768]
    grid = {"tasks.task.max_response_tokens": caps, **layouts}
    frame = sweep_job(Sweep(job=JOB, grid=grid), workers=1).frame
    best = frame.group_by("tasks.task.max_response_tokens").agg(pl.col("rl_step_s").min().alias("best"))
    joined = frame.filter(pl.col("status") == "ok").join(best, on="tasks.task.max_response_tokens")
    joined = joined.with_columns((pl.col("rl_step_s") / pl.col("best") - 1.0).alias("loss"))
    everywhere = joined.group_by(list(layouts)).agg(pl.len(), pl.col("loss").max().alias("worst"))
    kept = everywhere.filter(pl.col("len") == len(caps))
    short = joined.filter(pl.col("tasks.task.max_response_tokens") == caps[0]).sort("loss").head(1)
    same = joined.join(short.select(list(layouts)), on=list(layouts))
    long = same.filter(pl.col("tasks.task.max_response_tokens") == caps[-1])
    lost = float(long["loss"][0]) if long.height else float("inf")
    return [
        {
            "finding": "fixed",
            "case": "best single layout, worst length",
            "rl_step_s": 0.0,
            "value": float(kept["worst"].min()),
        },
        {"finding": "fixed", "case": "short task's layout on the long task", "rl_step_s": 0.0, "value": lost},
    ]


def batch() -> list[Row]:
    """rl_step over prompts and maximum length: a doubled batch costs less than twice, a longer maximum more tail."""
    grid = {"tasks.task.prompts_per_step": [32, 64, 128, 256], "tasks.task.max_response_tokens": [4096, 16384]}
    frame = sweep_job(Sweep(job=PINNED, method="events", grid=grid), workers=1).frame
    return [
        {
            "finding": "batch",
            "case": f"{row[2]} prompts, {row[1]} tokens",
            "rl_step_s": row[0],
            "value": row[0] / row[2],
        }
        for row in frame.select(
            "rl_step_s", "tasks.task.max_response_tokens", "tasks.task.prompts_per_step"
        ).iter_rows()
    ]


def overlap() -> list[Row]:
    """Synchronous against one step off and asynchronous on the same devices, best layouts of each."""
    points = (
        {"modes": ["colocated"]},
        {"modes": ["one_step_off"], "limits.staleness": 1},
        {"modes": ["async"], "limits.staleness": 4},
    )
    job = {**JOB, "nodes": 8}
    frame = sweep_job(Sweep(job=job, method="events", points=points), workers=1).frame
    base = frame["rl_step_s"][0]
    return [
        {"finding": "overlap", "case": mode, "rl_step_s": step, "value": base / step}
        for mode, step in frame.select("mode", "rl_step_s").iter_rows()
    ]


def check(rows: list[Row]) -> None:
    """What the findings say, as assertions."""
    value = {(row["finding"], row["case"]): float(row["value"]) for row in rows}
    idle = [value["skew", f"cv {v}"] for v in (0.1, 0.5, 1.0, 1.5)]
    assert idle == sorted(idle) and idle[0] < 0.25 and idle[-1] > 0.5
    assert 0.0 < value["fixed", "short task's layout on the long task"] < 0.1, "much weaker than its source suggests"
    assert value["fixed", "best single layout, worst length"] > 0.0
    for cap in (4096, 16384):
        each = [value["batch", f"{n} prompts, {cap} tokens"] for n in (32, 64, 128, 256)]
        assert each == sorted(each, reverse=True), "seconds per prompt fall with the batch"
    few = value["batch", "32 prompts, 16384 tokens"] / value["batch", "256 prompts, 16384 tokens"]
    assert few > 1.3, "small batches pay for their tail"
    assert value["overlap", "async"] >= value["overlap", "one_step_off"] > 1.0


def main() -> None:
    """All four; the table is printed, and written with ``--write``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record expected.csv")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rows = [*skew(Path(name)), *fixed(), *batch(), *overlap()]
    table = pl.DataFrame(rows, infer_schema_length=None)
    sys.stdout.write(table.write_csv(float_precision=4))
    if asked.write:
        table.write_csv(HERE / "expected.csv", float_precision=4)
    check(rows)


if __name__ == "__main__":
    main()
