"""What points of a sweep share, kept while a process works: lengths, columns and judges."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from rlperf.plan.question.context import Context, TaskContext
from rlperf.plan.question.demand import LengthSource
from rlperf.plan.search.rollout_columns import RolloutColumns, rollout_columns
from rlperf.plan.search.trainer_columns import TrainerColumns, trainer_columns
from rlperf.sim.rl_step.demand import Batch, Demand
from rlperf.specs.architecture import Architecture
from rlperf.specs.job import Job
from rlperf.specs.pool import Role

Value = TypeVar("Value")
KEPT = 24
"""Entries per cache: a sweep's groups run in an order in which neighbours share."""


class Recent:
    """The last few results by key."""

    def __init__(self, most: int = KEPT) -> None:
        self._most = most
        self._held: OrderedDict[object, Any] = OrderedDict()

    def get(self, key: object, make: Callable[[], Value]) -> Value:
        """The value of ``key``, made when it is not there."""
        if key in self._held:
            self._held.move_to_end(key)
        else:
            self._held[key] = make()
            if len(self._held) > self._most:
                self._held.popitem(last=False)
        found: Value = self._held[key]
        return found


@dataclass(eq=False)
class DemandCache:
    """Demands of a sweep's workloads, each drawn once."""

    _sources: Recent = field(default_factory=lambda: Recent(8))
    _demands: Recent = field(default_factory=Recent)

    def demands(self, context: Context, folder: Path | None) -> tuple[TaskContext, tuple[Demand, ...]]:
        """The first task of a job with its lengths, and one demand per batch that it leaves open."""
        task = context.tasks[0]
        named = task.task
        key = (named.name, named.workload, named.rl_steps, named.reward_s, str(folder))
        source: LengthSource = self._sources.get(key, lambda: task.source)
        seed = context.job.seed

        def drawn(batch: Batch) -> Demand:
            # the mini-batch changes no length: batches that differ in it alone share their tables
            whole = replace(batch, mini_batch=batch.prompts)
            made: Demand = self._demands.get((key, whole, seed), lambda: source.demand(whole, None, seed))
            return made if batch == whole else self._demands.get(
                (key, batch, seed), lambda: replace(made, batch=batch)
            )  # fmt: skip

        return replace(task, source=source), tuple(drawn(batch) for batch in task.batches)


def _columns_key(job: Job, role: Role) -> str:
    """What the columns of a job depend on, devices and batch apart."""
    data = job.model_dump(mode="json", exclude={"price", "objective", "modes", "name", "horizon", "tasks", "sharing"})
    data["limits"] = [data["limits"]["memory_headroom"], data["limits"]["host_memory"]]
    pools = {pool.role: {**pool.model_dump(mode="json"), "devices": None} for pool in job.pools}
    clusters = [(pool.cluster, pool.nodes) for pool in job.pools]
    data["pools"] = [pools.get(role), clusters]
    return json.dumps([data, job.tasks[0].architecture], sort_keys=True, default=str)


def _lengths_key(demand: Demand) -> tuple[object, ...]:
    """What columns read of a demand, its batch apart."""
    return demand.keys, demand.reward_s, demand.images


@dataclass(eq=False)
class Columns:
    """Columns of the groups of a sweep; groups that differ in what no column reads share them."""

    _rollout: Recent = field(default_factory=Recent)
    _trainer: Recent = field(default_factory=Recent)

    def rollout(self, context: Context, arch: Architecture, demand: Demand, devices: int) -> RolloutColumns:
        """Rollout columns; the mini-batch makes no difference to them."""
        batch = replace(demand.batch, mini_batch=demand.batch.prompts)
        key = (_columns_key(context.job, "rollout"), *_lengths_key(demand), batch, devices)
        found: RolloutColumns = self._rollout.get(key, lambda: rollout_columns(context, arch, demand, devices))
        return found

    def trainer(
        self, context: Context, arch: Architecture, demand: Demand, devices: int, colocated: bool
    ) -> TrainerColumns:
        """Trainer columns."""
        key = (_columns_key(context.job, "trainer"), *_lengths_key(demand), demand.batch, devices, colocated)
        found: TrainerColumns = self._trainer.get(
            key, lambda: trainer_columns(context, arch, demand, devices, colocated=colocated)
        )
        return found
