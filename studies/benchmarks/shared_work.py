"""What is not done twice, or not at all: ``OMP_NUM_THREADS=1 python -m studies.benchmarks.shared_work``.

Ratios of processor time within one run, so that they hold on any machine; each is held against its target, and a missed
one ends the run with exit code 1.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from rlperf.api import ask
from rlperf.plan.judge.evaluate import Judge
from rlperf.plan.judge.stages import MOST_MICROBATCHES, best_ends, makespan_s, partitions
from rlperf.plan.pipeline import PipelineProblem, optimize
from rlperf.plan.search.screen import screen
from rlperf.sim.pipeline import MicrobatchSizes
from rlperf.specs.job import Job
from rlperf.specs.pipeline_profile import LayerProfile

JOB = {
    "architecture": "Qwen3-8B", "cluster": "dgx_h100", "nodes": 2, "framework": "slime", "limits": {"staleness": 1},
    "tasks": [{"name": "math", "workload": "math", "prompts_per_step": 64, "group_size": 8, "mini_batch": 64,
               "max_prompt_tokens": 2048, "max_response_tokens": 8192, "over_provision": 1.5}],
}  # fmt: skip


@dataclass(frozen=True)
class Ratio:
    """Processor time of the less over that of the more, and what it may be."""

    name: str
    found: float
    most: float

    def __str__(self) -> str:
        return f"{self.name}: {self.found:.2f} (at most {self.most:g}) {'met' if self.found <= self.most else 'MISSED'}"


def spent(work: Callable[[], object]) -> float:
    """Seconds of the processor."""
    began = time.process_time()
    work()
    return time.process_time() - began


def judged() -> list[Ratio]:
    """A second candidate with the same engines, and memory alone, against the first candidate judged whole."""
    question = ask(Job.model_validate(JOB), to_plan=True)
    context, task = question.context, question.context.tasks[0]
    demand = task.source.demand(task.batches[0], None, 0)
    found = screen(context, task, (demand,), question.facts).configurations
    first = found[0]
    other = next(c for c in found if c.pool("rollout") == first.pool("rollout") and c != first)
    judge = Judge(context, task)
    holding = spent(lambda: Judge(context, task).holds(demand, first))
    whole = spent(lambda: judge.evaluate(demand, first))
    again = spent(lambda: judge.evaluate(demand, other))
    return [
        Ratio("partial rollouts, another candidate with the same engines", again / whole, 0.3),
        Ratio("memory of a candidate, without its seconds", holding / whole, 0.3),
    ]


def stage_ends(layers: int = 62, stages: int = 8) -> Ratio:
    """The best first and last stage, against all partitions simulated."""
    forward = [0.1, *[1.0] * layers, 1.7]
    profile = LayerProfile.make("alike", ("E", *["a"] * layers, "L"), forward, forward, forward)
    every = partitions(layers, stages)
    bounded = spent(lambda: best_ends(profile, layers, stages, MOST_MICROBATCHES))
    return Ratio("first and last stage, of all partitions", bounded / spent(
        lambda: [makespan_s(profile, each, MOST_MICROBATCHES) for each in every if max(each) <= layers / stages + 2]
    ), 0.6)  # fmt: skip


def free_schedule(layers: int = 62, stages: int = 8) -> Ratio:
    """What a free schedule takes, as a plan asks for it, against the same with the bound that proves how good it is."""
    profile = LayerProfile.make("alike", ("E", *["a"] * layers, "L"), *[[0.1, *[1.0] * layers, 1.7]] * 3)
    problem = PipelineProblem(profile, MicrobatchSizes.equal(MOST_MICROBATCHES), stages)
    found = []
    search = spent(lambda: found.append(optimize(problem, passes=200, time_limit_s=math.inf, exact_nodes=0)))
    bound = spent(lambda: found[0].bound_s)
    return Ratio("a free schedule, without its proven bound", search / (search + bound), 0.9)


if __name__ == "__main__":
    ratios = [*judged(), stage_ends(), free_schedule()]
    print("\n".join(map(str, ratios)))
    sys.exit(0 if all(each.found <= each.most for each in ratios) else 1)
