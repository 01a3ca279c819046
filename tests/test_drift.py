"""Canonical predictions: a change of any of them is seen, and has to be meant.

After a change that is meant, ``RLPERF_WRITE_DRIFT=1 python -m pytest tests/test_drift.py`` writes them anew;
the diff of ``tests/drift.csv`` then belongs to the commit.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

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


CASES = {
    f"{architecture} {nodes} x {cluster} {workload[0]}": (architecture, cluster, nodes, workload)
    for architecture in ARCHITECTURES
    for cluster, nodes in CLUSTERS
    for workload in WORKLOADS
}
BY_TURNS = tuple(name for k, name in enumerate(CASES) if (k + k // 2 + k // 8) % 2 == 0)
"""Half of the cases, in which every two of architecture, cluster and workload meet."""


def predictions(names: Iterable[str]) -> dict[str, dict[str, float]]:
    found = {}
    for name in names:
        predicted = predict_job(job(*CASES[name]))
        stages = predicted.stages_s
        found[name] = {
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


def expected() -> dict[str, dict[str, str]]:
    """What the file says of every case, written anew where that is asked for."""
    if os.environ.get("RLPERF_WRITE_DRIFT"):
        found = predictions(CASES)
        with FILE.open("w", newline="") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(["case", *next(iter(found.values()))])
            writer.writerows([name, *(f"{row[c]:.9g}" for c in row)] for name, row in found.items())
    with FILE.open() as stream:
        return {row["case"]: row for row in csv.DictReader(stream)}


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(BY_TURNS, id="by_turns"),
        pytest.param(tuple(set(CASES) - set(BY_TURNS)), id="others", marks=pytest.mark.slow),
    ],
)
def test_canonical_predictions_have_not_drifted(names: tuple[str, ...]) -> None:
    written = expected()
    assert list(written) == list(CASES)
    lines = [
        verdict(f"{name} {column}", float(written[name][column]), value)
        for name, row in predictions(names).items()
        for column, value in row.items()
    ]
    changed = [line for line in lines if line]
    assert not changed, "DRIFT\n" + "\n".join(changed)


def test_half_of_the_cases_has_every_pair() -> None:
    assert len(BY_TURNS) == len(CASES) / 2
    for first, second in ((0, 1), (0, 3), (1, 3)):
        pairs = [
            {(case[first], case[second]) for case in cases}
            for cases in (CASES.values(), [CASES[name] for name in BY_TURNS])
        ]
        assert pairs[0] == pairs[1]


def test_the_report_tells_regressions_from_gains() -> None:
    assert verdict("x", 1.0, 1.0) == ""
    assert verdict("x", 1.0, 1.1).startswith("REGRESSION x: 1 -> 1.1 (+10.00 %)")
    assert verdict("x", 1.0, 0.9).startswith("GAIN")
