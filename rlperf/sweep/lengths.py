"""Lengths that points of a sweep share: each workload is opened once, each batch drawn once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rlperf.plan.question.context import Context, TaskContext
from rlperf.plan.question.demand import LengthSource
from rlperf.sim.remembered import Remembered
from rlperf.sim.rl_step.demand import Demand

KEPT = 24
"""Results of a kind that are kept: a sweep's groups run in an order in which neighbours share."""


@dataclass(eq=False)
class LengthCache:
    """Demands of a sweep's workloads."""

    _sources: Remembered[LengthSource] = field(default_factory=lambda: Remembered(8))
    _demands: Remembered[Demand] = field(default_factory=lambda: Remembered(KEPT))

    def demands(self, context: Context, folder: Path | None) -> tuple[TaskContext, tuple[Demand, ...]]:
        """The first task of a job with its lengths, and one demand per batch that it leaves open."""
        task, seed = context.tasks[0], context.job.seed
        named = task.task
        key = (
            named.name, named.workload, named.rl_steps, named.reward_s, named.images, task.source.sees, str(folder),
        )  # fmt: skip
        source = self._sources.get(key, lambda: task.source)
        drawn = tuple(
            self._demands.get((*key, batch, seed), partial(source.demand, batch, None, seed)) for batch in task.batches
        )
        return replace(task, source=source), drawn
