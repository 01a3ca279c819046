"""How long a plan takes: ``OMP_NUM_THREADS=1 python studies/benchmarks/planner.py``.

One process, no threads; seconds of the wall clock and of the processor (they differ on a busy machine). A *candidate*
is a rollout column (layout, memory fraction, max_running), a trainer column (backend, layout, token budget, parked) or
a pair of both, for one batch, mode and split, that was enumerated and then refused with its reason or costed. A
*combination* is a whole configuration: any rollout column with any trainer column of its batch, mode and split; most
are never looked at, as dominance proves that none can be part of a better plan (docs/theory/planner.md).

Targets are held against seconds of the processor; a missed one ends the run with exit code 1.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rlperf.api import ask, load_job
from rlperf.plan.judge.evaluate import Judge
from rlperf.plan.judge.value import judged_objective
from rlperf.plan.planner import plan_job
from rlperf.plan.search.screen import screen

FOLDER = Path(__file__).resolve().parent
FINALISTS = 64
SCREEN_S, JUDGE_S, SEVERAL_S, ANY_S, PER_S, GAP = 5.0, 10.0, 30.0, 60.0, 1e6, 1e-3
"""Targets: screen of one task, its finalists judged, several tasks, any plan; candidates a second, gap."""


@dataclass(frozen=True)
class Clock:
    """Wall clock and processor time from a start on."""

    wall: float
    processor: float

    @classmethod
    def start(cls) -> Clock:
        return cls(time.perf_counter(), time.process_time())

    @property
    def spent(self) -> float:
        """Seconds of the processor since."""
        return time.process_time() - self.processor

    def __str__(self) -> str:
        return f"{time.perf_counter() - self.wall:.1f} s ({self.spent:.1f} s of the processor)"


def one_task(name: str = "one-task-1024.yaml") -> dict[str, bool]:
    """Screen of one task with every knob open, then its finalists by the event simulator."""
    question = ask(FOLDER / name)
    context, task = question.context, question.context.tasks[0]
    clock = Clock.start()
    demands = tuple(task.source.demand(batch, None, context.job.seed) for batch in task.batches)
    found = screen(context, task, demands, question.facts, keep=FINALISTS)
    spent = clock.spent
    print(
        f"{name}: screen {clock}, {found.candidates:,} candidates, {found.candidates / spent:,.0f} a second, "
        f"among {found.combinations:.3g} combinations"
    )
    met = {f"screen under {SCREEN_S:g} s": spent <= SCREEN_S}
    met[f"{PER_S:,.0f} candidates a second"] = found.candidates / spent >= PER_S
    clock, judge = Clock.start(), Judge(context, task)
    values = [
        judged_objective(context, judge.evaluate(demands[int(d)], configuration))
        for configuration, d in zip(found.configurations, found.demand, strict=True)
    ]
    print(f"{name}: {len(values)} finalists judged {clock}; the screen's first loses {values[0] / min(values) - 1:.2%}")
    met[f"{FINALISTS} finalists judged under {JUDGE_S:g} s"] = clock.spent <= JUDGE_S
    clock = Clock.start()
    plan = plan_job(context, facts=question.facts)
    print(f"{name}: whole plan {clock}, {plan.status}, gap {plan.mip_gap:.1e}")
    return met


def several_tasks(name: str = "seven-tasks-512.yaml") -> dict[str, bool]:
    """Seven tasks over 100 rl_steps."""
    question = ask(FOLDER / name)
    clock = Clock.start()
    plan = plan_job(question.context, facts=question.facts)
    spent, gain = clock.spent, (plan.static_objective or plan.objective) / plan.objective
    print(
        f"{name}: plan {clock}, {plan.candidates:,} candidates, {len(plan.phases)} phases, gap {plan.mip_gap:.1e}, "
        f"best static plan {gain:.3f} of it"
    )
    return {f"several tasks under {SEVERAL_S:g} s at a gap of {GAP:.1%}": spent <= SEVERAL_S and plan.mip_gap <= GAP}


def by_devices(name: str = "one-task-1024.yaml") -> dict[str, bool]:
    """Seconds and memory of a plan from 8 to 16,384 devices, one batch; each in a process of its own."""
    met = {}
    for nodes in (1, 8, 64, 512, 2048):
        asked = f"import studies.benchmarks.planner as p; p.alone({name!r}, {nodes})"
        run = subprocess.run([sys.executable, "-c", asked], cwd=FOLDER.parents[1], capture_output=True, text=True)
        print(run.stdout.strip() or run.stderr.strip().splitlines()[-1])
        spent = float(run.stdout.split()[-2]) if run.returncode == 0 else float("inf")
        met[f"{8 * nodes:,} devices under {ANY_S:g} s"] = spent <= ANY_S
    return met


def alone(name: str, nodes: int) -> None:
    """One plan: its seconds of the processor at the end of the line."""
    job = load_job(FOLDER / name)
    task = job.tasks[0].model_copy(
        update={"prompts_per_step": (512,), "group_size": (8,), "mini_batch": (128,), "max_response_tokens": (16384,)}
    )
    objective = job.objective.model_copy(update={"minimize": "step_time"})
    limits = job.limits.model_copy(update={"step": None, "truncated_fraction": None})
    changes = {"architecture": "Qwen3-8B", "nodes": nodes, "tasks": (task,), "objective": objective, "limits": limits}
    clock, question = Clock.start(), ask(job.model_copy(update=changes))
    plan = plan_job(question.context, facts=question.facts)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{8 * nodes:,} devices: {plan.candidates:,} candidates, {memory:.2f} GB, {clock.spent:.1f} s")


if __name__ == "__main__":
    met = {**one_task(), **several_tasks(), **by_devices()}
    for target, kept in met.items():
        print(f"{target}: {'met' if kept else 'MISSED'}")
    sys.exit(0 if all(met.values()) else 1)
