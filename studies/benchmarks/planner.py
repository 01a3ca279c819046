"""How long a plan takes: ``OMP_NUM_THREADS=1 python studies/benchmarks/planner.py``.

One process, no threads; seconds of the wall clock and of the processor (they differ on a busy machine). A *candidate*
is a rollout column (layout, memory fraction, max_running), a trainer column (backend, layout, token budget, parked) or
a pair of both, for one batch, mode and split, that was enumerated and then refused with its reason or costed. A
*combination* is a whole configuration: any rollout column with any trainer column of its batch, mode and split; most
are never looked at, as dominance proves that none can be part of a better plan (docs/theory/planner.md).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from rlperf.api import ask
from rlperf.plan.decisions import judged_objective
from rlperf.plan.evaluate import Judge
from rlperf.plan.planner import plan_job
from rlperf.plan.screen import screen

FOLDER = Path(__file__).resolve().parent
FINALISTS = 64


@dataclass(frozen=True)
class Clock:
    """Wall clock and processor time from a start on."""

    wall: float
    processor: float

    @classmethod
    def start(cls) -> Clock:
        return cls(time.perf_counter(), time.process_time())

    def __str__(self) -> str:
        return (
            f"{time.perf_counter() - self.wall:.1f} s ({time.process_time() - self.processor:.1f} s of the processor)"
        )


def one_task(name: str = "one-task-1024.yaml") -> None:
    """Screen of one task with every knob open, then its finalists by the event simulator."""
    question = ask(FOLDER / name)
    context, task = question.context, question.context.tasks[0]
    clock = Clock.start()
    demands = tuple(task.source.demand(batch, None, context.job.seed) for batch in task.batches)
    found = screen(context, task, demands, question.facts, keep=FINALISTS)
    spent = time.process_time() - clock.processor
    print(
        f"{name}: screen {clock}, {found.candidates:,} candidates, {found.candidates / spent:,.0f} a second, "
        f"among {found.combinations:.3g} combinations"
    )
    clock, judge = Clock.start(), Judge(context, task)
    values = [
        judged_objective(context, judge.evaluate(demands[int(d)], configuration))
        for configuration, d in zip(found.configurations, found.demand, strict=True)
    ]
    print(f"{name}: {len(values)} finalists judged {clock}; the screen's first loses {values[0] / min(values) - 1:.2%}")
    clock = Clock.start()
    plan = plan_job(context, facts=question.facts)
    print(f"{name}: whole plan {clock}, {plan.status}, gap {plan.mip_gap:.1e}")


def several_tasks(name: str = "seven-tasks-512.yaml") -> None:
    """Seven tasks over 100 rl_steps."""
    question = ask(FOLDER / name)
    clock = Clock.start()
    plan = plan_job(question.context, facts=question.facts)
    gain = (plan.static_objective or plan.objective) / plan.objective
    print(
        f"{name}: plan {clock}, {plan.candidates:,} candidates, {len(plan.plan)} phases, gap {plan.mip_gap:.1e}, "
        f"best static plan {gain:.3f} of it"
    )


if __name__ == "__main__":
    one_task()
    several_tasks()
