"""Columns of scorers: the best engine of each teacher, reward model or judge on every number of devices it may have."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from rlperf.layout import Layout
from rlperf.plan.question.context import Context, ScorerContext, TaskContext
from rlperf.plan.question.pool import ScorerPlan
from rlperf.plan.search.rollout_columns import RolloutColumns, engine_settings, rollout_columns
from rlperf.sim.rl_step.demand import Demand
from rlperf.sim.rl_step.engine import ReplicaMemory, cache_granted, engine_limits, replica_memory, tabulate
from rlperf.sim.rl_step.rollout_counted import Counted
from rlperf.sim.rl_step.rollout_stage import Replicas
from rlperf.sim.rl_step.scorers import Ends, ScorerStage, read_tokens
from rlperf.sim.rollout.options import EngineOptions
from rlperf.sim.rollout.trajectories import Trajectories
from rlperf.specs.scorer import Scorer
from rlperf.workload import LengthTable

SHARED = 0
"""Devices of its own of a scorer that takes turns with the trainer."""


@dataclass(frozen=True, eq=False)
class ScorerColumn:
    """One scorer with its engine: what a plan states of it, its seconds, and its bytes per device while awake."""

    plan: ScorerPlan
    stage: ScorerStage
    awake_bytes: float


def seats(context: Context) -> list[tuple[int, ...]]:
    """Devices of its own of every scorer, in every combination that leaves some to rollout and trainer."""
    total = context.cluster.devices
    counts = seat_counts(total, context.cluster.devices_per_node)
    each = [_counts(one.scorer, counts) for one in context.scorers]
    return [found for found in product(*each) if sum(found) < total]


def _counts(scorer: Scorer, counts: list[int]) -> list[int]:
    found = [SHARED] if "shared" in scorer.placements else []
    if "own" in scorer.placements:
        found += scorer.devices or counts
    return found


def seat_counts(total: int, node: int) -> list[int]:
    """Devices that a model beside the policy may take of so many: part of a node, or whole nodes, as files count them.

    Powers of two, and three times one where it is the only node or nodes are counted.

    >>> seat_counts(5 * 8, 8)
    [1, 2, 4, 8, 16, 24, 32]
    >>> seat_counts(8, 8)
    [1, 2, 3, 4, 6]
    """
    if total <= node:
        return [n for n in smooth(total) if n < total]
    part = [1 << k for k in range(node.bit_length()) if 1 << k < node]
    return [*part, *(n * node for n in smooth(total // node) if n * node < total)]


def smooth(most: int) -> list[int]:
    """Powers of two and three times powers of two, up to about ``most``, ascending."""
    return sorted({n << k for n in (1, 3) for k in range(most.bit_length())})


def scorer_demand(demand: Demand, scorer: Scorer) -> Demand:
    """What a scorer's engine is asked for: to read every sequence, and to write its verdict."""
    tables = []
    for table in demand.tables:
        read = read_tokens(table, scorer)
        zero = np.zeros(len(read), dtype=np.int64)
        response = np.full(len(read), scorer.response_tokens)
        tables.append(LengthTable(read, response, np.arange(len(read)), zero, zero, scorer.response_tokens))
    count, batch = tables[0].n, demand.batch
    own = replace(batch, prompts=count, group_size=1, mini_batch=count, generated=count, over_provision=1.0)
    longest = batch.longest_tokens + scorer.prompt_tokens
    own = replace(
        own,
        max_trajectories=None,
        generation_batch=None,
        max_prompt_tokens=longest,
        max_response_tokens=scorer.response_tokens,
    )
    return Demand(scorer.name, demand.rl_steps, own, tuple(tables), 0.0, 0.0, ())


@dataclass(frozen=True, eq=False)
class ScorerWork:
    """What a demand asks of a scorer, with what its engines share on any number of devices.

    Attributes
    ----------
    counted : engine_steps of what it reads and writes (`scorer_demand`)
    ends : when the sequences end, of every rl_step ``[replicates]``
    """

    counted: Counted
    ends: tuple[Ends, ...]

    @classmethod
    def of(cls, demand: Demand, scorer: Scorer) -> ScorerWork:
        """With nothing counted yet."""
        ends = tuple(Ends.of(demand, scorer, number) for number in range(len(demand.tables)))
        return cls(Counted(scorer_demand(demand, scorer)), ends)


def scorer_column(
    context: Context, one: ScorerContext, task: TaskContext, asked: ScorerWork, devices: int, room: float | None = None,
    *, own: bool,
) -> ScorerColumn | None:  # fmt: skip
    """The fastest engine of a scorer on so many devices; None where none holds it.

    On the trainer's devices it takes as little memory as it can, so that the trainer need not park its states, or no
    more than ``room`` [bytes per device].
    """
    there, architecture = one.context(context), one.architecture or task.architecture
    demand = asked.counted.demand
    columns = rollout_columns(there, architecture, demand, devices, asked.counted)
    alive = np.flatnonzero((columns.flags == 0) & np.isfinite(columns.makespan_s))
    if not len(alive):
        return None
    if not own:
        lean = columns.memory_fraction[alive] == columns.memory_fraction[alive].min()
        alive = alive[lean if room is None else lean | (columns.awake_bytes[alive] <= room)]
    fastest = alive[columns.makespan_s[alive] <= columns.makespan_s[alive].min() * (1.0 + 1e-9)]
    best = int(fastest[np.lexsort((columns.max_running[fastest], columns.memory_fraction[fastest]))[0]])
    plan = _plan(there, one, columns, best, own)
    replicas, memory = serving(context, one, task, demand, plan)
    seconds = float(columns.makespan_s[best])
    stage = stage_of(context, one.scorer, asked, plan, replicas, seconds, memory)
    return ScorerColumn(plan, stage, float(columns.awake_bytes[best]))


def _plan(there: Context, one: ScorerContext, columns: RolloutColumns, best: int, own: bool) -> ScorerPlan:
    layout = columns.layout.take(best)
    return ScorerPlan(
        name=one.scorer.name,
        kind=one.scorer.kind,
        placement="own" if own else "shared",
        devices=int(layout.devices),
        device=there.cluster.device,
        layout=layout.values(),
        settings=engine_settings(there, columns, best),
    )


def serving(
    context: Context, one: ScorerContext, task: TaskContext, asked: Demand, plan: ScorerPlan
) -> tuple[Replicas, ReplicaMemory]:
    """The replicas of a scorer as a plan states them, and their memory."""
    there, architecture = one.context(context), one.architecture or task.architecture
    layout, settings = Layout.of_values(plan.layout), plan.settings.filled()
    cost = tabulate(there.site, architecture, settings, layout)[0]
    running = np.array([plan.settings.max_running or 1])
    fraction = np.array([plan.settings.memory_fraction or 0.0])
    memory = replica_memory(there.site, architecture, settings, layout, fraction, running, asked)
    held = float(cache_granted(memory.kv_tokens, asked.request_tokens)[0])
    count = plan.layout.data_parallel
    limits = engine_limits(settings, held, int(running[0]))
    return Replicas(cost, limits, count, plan.devices // count, EngineOptions.of(there.engine)), memory


def stage_of(
    context: Context, scorer: Scorer, asked: ScorerWork, plan: ScorerPlan, replicas: Replicas, makespan_s: float,
    memory: ReplicaMemory,
) -> ScorerStage:  # fmt: skip
    """The stage of a scorer whose engine takes ``makespan_s`` for all sequences at hand at once."""
    hides = scorer.overlap
    if hides is None:  # a reference is asked for by the trainer, when it has the batch
        frameworks = [trainer.framework for trainer in context.trainers]
        hidden = any(each.reward_hidden > 0 and not each.scorers_wait for each in frameworks)
        hides = hidden and scorer.kind != "reference"
    read = max(int(table.prompt_tokens.max()) for table in asked.counted.demand.tables)
    longest = Trajectories.of([read], [scorer.response_tokens])
    alone = replicas.serve(longest, np.zeros(1, dtype=np.int64)).makespan_s
    return ScorerStage(
        own=plan.placement == "own",
        overlap=hides,
        makespan_s=makespan_s,
        single_s=alone,
        transition_s=2.0 * float(memory.weight_bytes[0]) / context.hardware.device.host_bandwidth,
        ends=asked.ends,
        fields=scorer.fields,
        awake_bytes=float(memory.awake_bytes[0]),
    )
