"""Is it worth changing the layout while a run goes on? Lengths that grow, one layout against one per group of rl_steps.

Run: python studies/dynamic_static/run.py [--write]   (about a minute; expected.csv is what it wrote)
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

from rlperf.api import ask, plan_job
from rlperf.plan.judge.evaluate import Judge
from rlperf.plan.search.configuration import Configuration
from rlperf.specs.job import Horizon, Job

HERE = Path(__file__).parent
GROWTHS = (1.0, 4.0, 16.0)
SWITCHES = ("0 s", "60 s", "100000 s")
RL_STEPS = 4
CAP = 24576


def trace(folder: Path, growth: float) -> Path:
    """Four rl_steps of 64 x 8 responses, whose mean grows by ``growth`` from the first to the last."""
    rng = np.random.default_rng(3)
    path = folder / f"growth{growth:g}.csv"
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["rl_step", "group", "prompt_tokens", "response_tokens", "max_response_tokens"])
        for rl_step in range(RL_STEPS):
            mean = 800.0 * growth ** (rl_step / (RL_STEPS - 1))
            lengths = rng.lognormal(np.log(mean) - 0.18, 0.6, size=(64, 8))
            for group, row in enumerate(lengths):
                out.writerows([rl_step, group, 300, int(min(max(n, 1), CAP)), CAP] for n in row)
    return path


def job(workload: Path, switch: str) -> Job:
    """GRPO, Qwen2.5-14B on two DGX H100: memory is tight, so short and long lengths want different layouts."""
    task: dict[str, Any] = {"name": "task", "workload": str(workload), "prompts_per_step": 64, "group_size": 8,
                            "max_prompt_tokens": 1024, "max_response_tokens": CAP}  # fmt: skip
    return Job.model_validate(
        {"name": "drift", "architecture": "Qwen2.5-14B", "cluster": "dgx_h100", "nodes": 2, "tasks": [task],
         "trainer_backends": ["megatron"], "modes": ["colocated", "disaggregated"], "objective": {"bold": True},
         "horizon": {"rl_steps": RL_STEPS, "group": 1, "switch": switch}}
    )  # fmt: skip


def kept_from_first(asked: Job) -> float:
    """Seconds of the horizon with the layout that is best for the first rl_step alone, judged on the same lengths."""
    first = asked.model_copy(update={"horizon": Horizon(rl_steps=1, group=1)})
    phase = plan_job(first).phases[0]
    context = ask(asked).context
    task = context.tasks[0]
    batch, judge = task.batches[0], Judge(context, task)
    configuration = Configuration(phase.mode, phase.staleness, batch, phase.pools)
    demands = [task.source.demand(batch, (k, k), asked.seed) for k in range(RL_STEPS)]
    return sum(judge.evaluate(demand, configuration).rl_step_s for demand in demands)


def run() -> pl.DataFrame:
    """One row per growth and switching cost."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for growth in GROWTHS:
            path = trace(Path(name), growth)
            first = kept_from_first(job(path, "0 s"))
            for switch in SWITCHES:
                plan = plan_job(job(path, switch))
                static = plan.static_objective or plan.objective
                rows.append(
                    {
                        "growth": growth,
                        "switch": switch,
                        "layouts": len(plan.phases),
                        "dynamic_s": plan.objective,
                        "static_s": static,
                        "gain": static / plan.objective - 1.0,
                        "first_layout_kept_s": first,
                        "first_layout_loss": first / static - 1.0,
                    }
                )
    return pl.DataFrame(rows)


def check(table: pl.DataFrame) -> None:
    """Changing never loses; a dear switch is never made; what is gained does not grow with the switching cost."""
    assert (table["gain"] >= -1e-9).all()
    assert (table.filter(pl.col("switch") == SWITCHES[-1])["layouts"] == 1).all()
    for growth in GROWTHS:
        gains = table.filter(pl.col("growth") == growth)["gain"].to_list()
        assert gains == sorted(gains, reverse=True)
    assert (table["first_layout_loss"] >= -1e-3).all(), "the static plan sees all rl_steps, the first's sees one"


def main() -> None:
    """The table, printed and with ``--write`` kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record expected.csv")
    asked = parser.parse_args()
    table = run()
    sys.stdout.write(table.write_csv(float_precision=5))
    if asked.write:
        table.write_csv(HERE / "expected.csv", float_precision=5)
    check(table)


if __name__ == "__main__":
    main()
