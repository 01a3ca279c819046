"""Plans for two recorded workloads on two DGX H100: equal to brute force, feasible, and what one loses on the other.

Run: python studies/recorded_workloads/run.py [FOLDER OF POLYTRACE] [--write]   (default: $RLPERF_DATA/polytrace)
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl

from rlperf.api import facts_of
from rlperf.plan.answer.memory_uses import memory_uses
from rlperf.plan.judge.budgets import scored_apart
from rlperf.plan.judge.evaluate import Judge
from rlperf.plan.judge.value import judged_objective
from rlperf.plan.planner import plan_job
from rlperf.plan.question.context import Context, resolve
from rlperf.plan.search.configuration import Configuration
from rlperf.plan.search.screen import screen
from rlperf.sim.rl_step.demand import Demand
from rlperf.specs.job import Job

HERE = Path(__file__).parent
# A reduced grid, small enough that every feasible pair can be judged by simulation.
POOLS = [
    {
        "role": "rollout",
        "layout": {"tensor_parallel": [2, 4, 8], "pipeline_parallel": 1},
        "settings": {"memory_fraction": [0.5, 0.7], "max_running": 256},
    },
    {
        "role": "trainer",
        "layout": {
            "tensor_parallel": [2, 4, 8], "pipeline_parallel": [1, 2], "context_parallel": [1, 2],
            "virtual_pipeline": 1, "activation_recompute": ["selective", "full"],
        },
    },
]  # fmt: skip
TASKS = {
    "dapo_32b": {"prompts_per_step": 96, "mini_batch": 16, "max_prompt_tokens": 2048, "max_response_tokens": 16384},
    "deepcoder_14b": {
        "prompts_per_step": 16,
        "mini_batch": 16,
        "max_prompt_tokens": 4096,
        "max_response_tokens": 16000,
    },
}
ARCHITECTURES = {
    "both on Qwen2.5-32B": {"dapo_32b": "Qwen2.5-32B", "deepcoder_14b": "Qwen2.5-32B"},
    "each on its own": {"dapo_32b": "Qwen2.5-32B", "deepcoder_14b": "DeepSeek-R1-Distill-Qwen-14B"},
}


def job_of(name: str, architecture: str, data: Path) -> Job:
    """The job of one recording on two DGX H100, every layout of the reduced grid open."""
    return Job.model_validate(
        {
            "name": name, "architecture": architecture, "cluster": "dgx_h100", "nodes": 2, "framework": "verl==0.9.1",
            "trainer_backends": ["megatron"], "pools": POOLS, "objective": {"bold": True},
            "tasks": [{"name": name, "workload": str(data / name), "group_size": 8, **TASKS[name]}],
        }
    )  # fmt: skip


def brute_force(context: Context, demand: Demand, job: Job) -> tuple[float, Configuration, int]:
    """Every feasible pair judged by event simulation: best objective, its configuration, number of pairs."""
    task = context.tasks[0]
    screened = screen(context, task, (demand,), facts_of(job), prune=False, keep=10**6)
    judge = Judge(context, task)
    judged = [judge.evaluate(demand, each) for each in screened.configurations]
    # uneven stages, and scoring in budgets of its own, which no pair of the screen has
    for beside in (judge.staged, partial(scored_apart, judge)):
        more = [beside(each) for each in judged]
        judged += [judge.evaluate(demand, each) for each in more if each is not None]
    values = [judged_objective(context, each) for each in judged]
    best = int(np.argmin(values))
    return values[best], judged[best].configuration, len(screened.configurations)


def regret(context: Context, demand: Demand, own: float, other: Configuration) -> float | None:
    """What another workload's layouts lose on this one: objective / the best - 1; None where they do not fit here."""
    task = context.tasks[0]
    pools = []
    for pool in other.pools:
        if pool.role != "rollout":
            budget = max(pool.settings.token_budget or 0, demand.batch.longest_tokens)
            enough = {"token_budget": budget, "scoring_token_budget": budget}
            pool = pool.model_copy(update={"settings": pool.settings.model_copy(update=enough)})
        pools.append(pool)
    moved = Judge(context, task).evaluate(demand, replace(other, batch=demand.batch, pools=tuple(pools)))
    uses = memory_uses(context, moved).values()
    return judged_objective(context, moved) / own - 1.0 if all(use.total <= use.allowed for use in uses) else None


def study(data: Path) -> pl.DataFrame:
    """One row per setting and workload."""
    rows = []
    for setting, architectures in ARCHITECTURES.items():
        found = {}
        for name, architecture in architectures.items():
            job = job_of(name, architecture, data)
            context = resolve(job)
            demand = context.tasks[0].source.demand(context.tasks[0].batches[0], None, job.seed)
            plan = plan_job(context, facts=facts_of(job))
            best, configuration, pairs = brute_force(context, demand, job)
            found[name] = (context, demand, plan, best, configuration, pairs)
        for name, other in zip(found, reversed(found), strict=True):
            context, demand, plan, best, configuration, pairs = found[name]
            lost = regret(context, demand, best, found[other][4])
            rows.append(
                {
                    "setting": setting, "workload": name, "pairs": pairs,
                    "plan_s": round(plan.phases[0].predicted.rl_step_s, 3), "brute_force_s": round(best, 3),
                    "fits": plan.phases[0].predicted.fits,
                    "regret_of_the_others_plan": lost if lost is None else round(lost, 4),
                    "rollout_tensor_parallel": configuration.pool("rollout").layout.tensor_parallel,
                    "trainer": f"TP{configuration.pool('trainer').layout.tensor_parallel} "
                    f"PP{configuration.pool('trainer').layout.pipeline_parallel} "
                    f"CP{configuration.pool('trainer').layout.context_parallel}",
                }
            )  # fmt: skip
    return pl.DataFrame(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record expected.csv")
    usual = Path(os.environ.get("RLPERF_DATA", "../shared/data")) / "polytrace"
    parser.add_argument("polytrace", nargs="?", type=Path, default=usual)
    asked = parser.parse_args()
    table = study(asked.polytrace)
    with pl.Config(tbl_cols=-1, tbl_width_chars=200):
        print(table)
    if asked.write:
        table.write_csv(HERE / "expected.csv")
