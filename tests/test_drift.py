"""Canonical predictions: a change of any of them is seen, and has to be meant.

After a change that is meant, ``RLPERF_WRITE_DRIFT=1 python -m pytest tests/test_drift.py`` writes them anew;
the diff of ``tests/drift.csv`` then belongs to the commit.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path

from rlperf.api import predict_job
from rlperf.specs.job import Job

FILE = Path(__file__).parent / "drift.csv"
ARCHITECTURES = ("Qwen2.5-1.5B", "Qwen3-8B", "Qwen2.5-32B", "Qwen3-30B-A3B", "Moonlight-16B-A3B")
CLUSTERS = (("dgx_a100", 2), ("dgx_h100", 2), ("dgx_h200", 1), ("dgx_b200", 1))
WORKLOADS = (("math", 1024, 8192), ("searching", 4096, 3000))
SAME = 1e-6


def job(architecture: str, cluster: str, nodes: int, workload: tuple[str, int, int]) -> Job:
    name, prompt, response = workload
    task = {
        "name": name, "workload": name, "prompts_per_step": 64, "group_size": 4, "mini_batch": 32,
        "max_prompt_tokens": prompt, "max_response_tokens": response,
    }  # fmt: skip
    pools = [
        {"role": "rollout", "layout": {"tensor_parallel": 4}, "settings": {"memory_fraction": 0.6, "max_running": 256}},
        {
            "role": "trainer",
            "layout": {
                "tensor_parallel": 4,
                "context_parallel": 1,
                "pipeline_parallel": 1,
                "activation_recompute": "full",
            },
            "settings": {"backend": "megatron", "parked": True},
        },
    ]
    return Job.model_validate(
        {"architecture": architecture, "cluster": cluster, "nodes": nodes, "tasks": [task], "pools": pools}
    )


def predictions() -> dict[str, dict[str, float]]:
    found = {}
    for architecture in ARCHITECTURES:
        for cluster, nodes in CLUSTERS:
            for workload in WORKLOADS:
                predicted = predict_job(job(architecture, cluster, nodes, workload))
                stages = predicted.stages_s
                found[f"{architecture} {nodes} x {cluster} {workload[0]}"] = {
                    "rl_step_s": predicted.rl_step_s,
                    "rollout_s": stages.rollout,
                    "scoring_s": stages.scoring,
                    "training_s": stages.training,
                    "weight_sync_s": stages.weight_sync,
                    "trainer_bytes": predicted.memory_bytes["trainer"].total,
                }
    return found


def verdict(name: str, old: float, new: float) -> str:
    """One line of the report: slower and larger is a regression, faster and smaller a gain."""
    if abs(new / old - 1.0) <= SAME:
        return ""
    return f"{'REGRESSION' if new > old else 'GAIN'} {name}: {old:.6g} -> {new:.6g} ({100 * (new / old - 1):+.2f} %)"


def test_canonical_predictions_have_not_drifted() -> None:
    found = predictions()
    columns = list(next(iter(found.values())))
    if os.environ.get("RLPERF_WRITE_DRIFT"):
        with FILE.open("w", newline="") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(["case", *columns])
            writer.writerows([name, *(f"{row[c]:.9g}" for c in columns)] for name, row in found.items())
    with FILE.open() as stream:
        expected = {row["case"]: row for row in csv.DictReader(stream)}
    assert list(expected) == list(found)
    lines = [
        verdict(f"{name} {column}", float(expected[name][column]), row[column])
        for name, row in found.items()
        for column in columns
    ]
    changed = [line for line in lines if line]
    assert not changed, "DRIFT\n" + "\n".join(changed)


def test_the_report_tells_regressions_from_gains() -> None:
    assert verdict("x", 1.0, 1.0) == ""
    assert verdict("x", 1.0, 1.1).startswith("REGRESSION x: 1 -> 1.1 (+10.00 %)")
    assert verdict("x", 1.0, 0.9).startswith("GAIN")
