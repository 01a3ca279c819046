"""A plan against what people set by rule of thumb, on twelve (architecture, device, task) cases.

Run: python studies/rule_of_thumb/run.py [--write]   (a few minutes; expected.csv is what it wrote)
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import polars as pl

from rlperf.api import ask, sweep_job
from rlperf.cost.parameters import parameters
from rlperf.specs.job import Job
from rlperf.sweep import Sweep

HERE = Path(__file__).parent
CASES = [
    (architecture, cluster, nodes, workload, cap)
    for architecture, nodes in (("Qwen2.5-7B", 2), ("Qwen2.5-14B", 2), ("Qwen2.5-32B", 4))
    for cluster in ("dgx_h100", "dgx_h200")
    for workload, cap in (("math", 16384), ("programming", 30000))
]
ROLLOUT_SHARE = 0.4
"""Weights may take this share of a device in rollout, by the rule."""


def job(architecture: str, cluster: str, nodes: int, workload: str, cap: int) -> dict[str, Any]:
    """The open question of a case."""
    task = {"name": "task", "workload": workload, "prompts_per_step": 128, "group_size": 8, "mini_batch": 64,
            "max_prompt_tokens": 2048, "max_response_tokens": cap}  # fmt: skip
    return {"name": f"{architecture} {cluster} {workload}", "architecture": architecture, "cluster": cluster,
            "nodes": nodes, "framework": "verl==0.9.1", "tasks": [task]}  # fmt: skip


def by_rule(case: tuple[str, str, int, str, int]) -> dict[str, Any]:
    """What recipes do: colocated; the smallest rollout tensor parallel whose weights take at most 40 % of a device, a
    memory fraction of 0.6 and 256 requests; FSDP with full recompute up to 14B and Ulysses 4 for long contexts; above,
    Megatron with tensor parallel 8, full recompute and context parallel for long contexts; states parked."""
    made = job(*case)
    context = ask(Job.model_validate(made)).context
    weights = 2.0 * parameters(context.tasks[0].architecture)
    degree = 1
    while weights / degree > ROLLOUT_SHARE * context.hardware.device.memory and degree < 8:
        degree *= 2
    small = parameters(context.tasks[0].architecture) < 2e10
    trainer: dict[str, Any] = {"activation_recompute": "full"}
    trainer |= {"ulysses": 4} if small else {"tensor_parallel": 8, "pipeline_parallel": 1, "context_parallel": 4}
    longest = 2048 + case[4]
    made["trainer_backends"] = ["fsdp2"] if small else ["megatron"]
    made["pools"] = [
        {"role": "rollout", "layout": {"tensor_parallel": degree},
         "settings": {"memory_fraction": 0.6, "max_running": 256}},
        {"role": "trainer", "layout": trainer, "settings": {"token_budget": longest, "parked": True}},
    ]  # fmt: skip
    return made


def run() -> pl.DataFrame:
    """One row per case: seconds by rule and by plan, both judged by events."""
    rows = []
    for case in CASES:
        names = dict(zip(("architecture", "cluster", "nodes", "workload", "max_response_tokens"), case, strict=True))
        ruled = sweep_job(Sweep(job=by_rule(case), method="events", grid={"seed": [0]}), workers=1).frame
        planned = sweep_job(Sweep(job=job(*case), method="plan", grid={"seed": [0]}), workers=1).frame
        rule_s, plan_s = ruled["rl_step_s"][0], planned["rl_step_s"][0]
        layout = (f"rollout TP{planned['rollout_tensor_parallel'][0]}; {planned['trainer_backend'][0]} "
                  f"TP{planned['trainer_tensor_parallel'][0]} PP{planned['trainer_pipeline_parallel'][0]} "
                  f"CP{planned['trainer_context_parallel'][0]} U{planned['trainer_ulysses'][0]} "
                  f"recompute {planned['trainer_activation_recompute'][0]}")  # fmt: skip
        speedup = None if rule_s is None else rule_s / plan_s
        rows.append({**names, "rule": ruled["status"][0], "rule_s": rule_s, "plan_s": plan_s, "speedup": speedup,
                     "low_s": planned["low_s"][0], "high_s": planned["high_s"][0], "plan": layout})  # fmt: skip
        sys.stderr.write(f"{case}: {rule_s} {plan_s}\n")
    return pl.DataFrame(rows, infer_schema_length=None)


def check(table: pl.DataFrame) -> None:
    """A plan is never slower than the rule by more than a tie, and faster on the whole."""
    assert table.height == 12 and table["plan_s"].null_count() == 0
    both = table.drop_nulls("speedup")
    assert both["speedup"].min() >= 0.999  # type: ignore[operator]
    assert both["speedup"].log().mean() > 0.05  # type: ignore[operator]


def main() -> None:
    """The table, printed and with ``--write`` kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record expected.csv")
    asked = parser.parse_args()
    table = run()
    sys.stdout.write(table.write_csv(float_precision=3))
    if asked.write:
        table.write_csv(HERE / "expected.csv", float_precision=3)
    check(table)


if __name__ == "__main__":
    main()
