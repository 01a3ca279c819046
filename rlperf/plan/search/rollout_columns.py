"""Rollout columns: every engine layout with its memory fraction and max_running, and what a demand takes on it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from rlperf.cost.engine_memory import engine_memory, kv_bytes_per_request
from rlperf.cost.engine_step import EngineLimits, EngineStepCost, recompute_s
from rlperf.cost.inference import engine_step_cost
from rlperf.cost.operators import Replica as EngineReplica
from rlperf.cost.reject import Reject
from rlperf.cost.vision import Images
from rlperf.layout import FloatArray, IntArray, Layout
from rlperf.plan.question.context import Context
from rlperf.plan.question.demand import Demand
from rlperf.plan.search.candidates import Shape, rollout_layouts
from rlperf.sim.rl_step.overheads import engine_in_framework
from rlperf.sim.rollout.closed_form import StepCensus, take_census
from rlperf.sim.rollout.routing import route
from rlperf.sim.rollout.tail import last_of_groups
from rlperf.sim.rollout.trajectories import Trajectories
from rlperf.specs.architecture import Architecture
from rlperf.specs.job import PoolSpec
from rlperf.workload import LengthTable

MEMORY_FRACTIONS = (0.5, 0.6, 0.7, 0.8, 0.9)
MAX_RUNNING = (64, 256, 1024)
TOKEN_BUDGET = 8192
IMPOSSIBLE = int(Reject.DEVICES | Reject.HEADS | Reject.LAYERS | Reject.EXPERTS)
"""What arithmetic rules out."""
SCREENED_RL_STEPS = 2
"""rl_steps of a demand that the screen counts; the judge simulates all of them."""
HEAVIEST = 1
"""Replicas with the most tokens whose engine_steps the screen counts, beside that of the longest trajectory."""


@dataclass(frozen=True, eq=False)
class RolloutColumns:
    """Flat columns; every array has shape ``[columns]``.

    Attributes
    ----------
    engine : index into ``costs``
    memory_fraction : share of device memory that the engine takes [1]
    kv_tokens : cache of a replica [tokens]
    makespan_s : seconds until the last of an rl_step's responses, mean over the demand's rl_steps [s]
    steady_s : seconds per rl_step when finished requests are replaced at once [s]
    group_s : from the start of a group to its last response, mean [s]
    recompute_s : prefill of a replica's running requests, where a weight sync interrupts them [s]
    transition_s : the engine's weights and cache leaving and returning, once per rl_step [s]
    awake_bytes, asleep_bytes : per device while it generates, and while a colocated trainer runs
    flags : `Reject`
    weight_dtype : precision in which weights reach the engine
    """

    layout: Layout
    engine: IntArray
    memory_fraction: FloatArray
    max_running: IntArray
    kv_tokens: FloatArray
    makespan_s: FloatArray
    steady_s: FloatArray
    group_s: FloatArray
    recompute_s: FloatArray
    transition_s: FloatArray
    awake_bytes: FloatArray
    asleep_bytes: FloatArray
    flags: IntArray
    costs: tuple[EngineStepCost, ...]
    weight_dtype: str

    @property
    def count(self) -> int:
        """Number of columns."""
        return len(self.engine)

    @property
    def possible(self) -> int:
        """Columns whose degrees are possible: those that were costed, or refused for their memory."""
        return int(np.count_nonzero((self.flags & IMPOSSIBLE) == 0))

    def take(self, index: IntArray) -> RolloutColumns:
        """Some columns, by index."""
        values: dict[str, Any] = {
            name: value.take(index)
            if isinstance(value, Layout)
            else value
            if name in ("costs", "weight_dtype")
            else value[index]
            for name, value in vars(self).items()
        }
        return RolloutColumns(**values)

    def limits(self, index: int, pool: PoolSpec) -> EngineLimits:
        """Limits of one column's replicas, for the event simulator."""
        return engine_limits(pool, float(self.kv_tokens[index]), int(self.max_running[index]))


def engine_limits(pool: PoolSpec, kv_tokens: float, max_running: int) -> EngineLimits:
    """Limits with the user's settings where stated; engines' defaults elsewhere."""
    settings = pool.settings
    return EngineLimits(
        kv_tokens=kv_tokens,
        max_running=max_running,
        token_budget=settings.engine_token_budget or TOKEN_BUDGET,
        chunked_prefill=settings.chunked_prefill is not False,
        prefix_caching=settings.caches_prefixes,
    )


Tabulated = dict[tuple[object, ...], EngineStepCost]
"""Cost tables by engine shape; what is served by how many replicas makes no difference to them."""


@dataclass(eq=False)
class Counted:
    """What device counts share: the demand's flow, the busiest replicas' requests, engine_steps, and cost tables.

    Attributes
    ----------
    censuses : engine_steps by number of replicas and concurrency: of those replicas of each table that may be last
    """

    demand: Demand
    costs: Tabulated = field(default_factory=dict)
    censuses: dict[tuple[int, int], list[list[StepCensus]]] = field(default_factory=dict)
    _slowest: dict[int, list[list[Trajectories]]] = field(default_factory=dict)

    @cached_property
    def flow(self) -> Flow:
        """What the demand sends through the engines."""
        return Flow.of(self.demand)

    @cached_property
    def tables(self) -> list[Trajectories]:
        """Trajectories of the rl_steps that are counted."""
        return [Trajectories.from_table(table) for table in self.demand.tables[:SCREENED_RL_STEPS]]

    def census(self, replicas: int, concurrency: int, limits: EngineLimits) -> list[list[StepCensus]]:
        """Engine_steps at a concurrency; a cache that binds counts as one."""
        key = (replicas, concurrency)
        if key not in self.censuses:
            bound = replace(limits, kv_tokens=np.inf, max_running=concurrency)
            if replicas not in self._slowest:
                self._slowest[replicas] = [_slowest_replicas(table, replicas) for table in self.tables]
            self.censuses[key] = [[take_census(each, bound) for each in part] for part in self._slowest[replicas]]
        return self.censuses[key]


def rollout_columns(
    context: Context, architecture: Architecture, demand: Demand, devices: int, counted: Counted | None = None
) -> RolloutColumns:
    """Every rollout column on ``devices`` devices, infeasible ones flagged.

    ``counted`` : what was counted of this demand before; new counts are added
    """
    pool = context.job.pool("rollout")
    shape = Shape(
        architecture,
        devices,
        context.rollout_hardware.cluster.scale_up_domain,
        demand.batch.longest_tokens,
        context.rollout_hardware.device.memory,
    )
    layout, flags = rollout_layouts(shape, pool)
    return _columns(context, architecture, demand, pool, layout, flags, counted or Counted(demand))


def _columns(
    context: Context, architecture: Architecture, demand: Demand, pool: PoolSpec, layout: Layout, flags: IntArray,
    counted: Counted,
) -> RolloutColumns:  # fmt: skip
    """Engine shapes crossed with memory fractions and max_running; each shape is tabulated once."""
    # a replica across nodes is refused, but it can be costed: a pinned one is predicted all the same
    can_cost = (flags & ~int(Reject.NODE)) == 0
    keep, dead = np.flatnonzero(can_cost), layout.flat(~can_cost)
    shapes = layout.take(keep)
    costs = tabulate(context, architecture, pool, shapes, known=counted.costs, images=demand.images)
    fractions = np.array(pool.settings.memory_fraction or MEMORY_FRACTIONS)
    options = np.array(pool.settings.max_running or MAX_RUNNING, dtype=np.int64)
    e, f, m = (a.ravel() for a in np.meshgrid(np.arange(len(keep)), fractions, options, indexing="ij"))
    rows = shapes.take(e)
    memory = replica_memory(context, architecture, pool, rows, f, m)
    why = flags[keep][e] | np.where(memory.kv_tokens < demand.batch.longest_tokens, int(Reject.KV), 0)
    why |= np.where(memory.cache_bytes > 0, 0, int(Reject.MEMORY))
    makespan, steady, again = (np.full(len(e), np.inf) for _ in range(3))
    alive = np.flatnonzero((why & ~int(Reject.NODE)) == 0)
    makespan[alive], steady[alive], again[alive] = _seconds(pool, costs, rows, e, memory.kv_tokens, m, alive, counted)
    joined = Layout(**{n: np.concatenate([v.ravel(), getattr(dead, n).ravel()]) for n, v in vars(rows.flat()).items()})

    def padded(values: Any, fill: float) -> Any:
        return np.concatenate([values, np.full(dead.size, fill)])

    return RolloutColumns(
        layout=joined,
        engine=padded(e, 0).astype(np.int64),
        memory_fraction=padded(f, 0.0),
        max_running=padded(m, 0).astype(np.int64),
        kv_tokens=padded(memory.kv_tokens, 0.0),
        makespan_s=padded(makespan, np.inf),
        steady_s=padded(steady, np.inf),
        group_s=padded(counted.flow.group_seconds(makespan, steady), np.inf),
        recompute_s=padded(again, np.inf),
        transition_s=padded(2.0 * memory.weight_bytes / context.rollout_hardware.device.host_bandwidth, np.inf),
        awake_bytes=padded(memory.awake_bytes, np.inf),
        asleep_bytes=padded(memory.asleep_bytes, np.inf),
        flags=np.concatenate([why, flags[~can_cost]]),
        costs=costs,
        weight_dtype=pool.settings.weight_dtype,
    )


def tabulate(
    context: Context, architecture: Architecture, pool: PoolSpec, layout: Layout, backend: int = 0,
    known: Tabulated | None = None, images: Images | None = None,
) -> tuple[EngineStepCost, ...]:  # fmt: skip
    """Cost table of every engine shape in a flat layout, with the host's time in the job's software stack.

    ``backend``: index of the trainer that the engine works with. The screen takes the first for all, since the host's
    time hardly differs between the backends of one framework; the judge takes the candidate's own.
    ``known``: tables that were made before, of one architecture and its images; new ones are added.
    """
    gemm_dtype, kv_dtype = pool.settings.weight_dtype, pool.settings.cache_dtype
    framework, tables = context.trainers[backend].framework, {} if known is None else known
    costs = []
    for row in layout.rows():
        key = (*row.with_(data_parallel=1).to_dict().values(), gemm_dtype, kv_dtype, backend)
        if key not in tables:
            cost = engine_step_cost(
                architecture, context.rollout_hardware, context.engine, row,
                gemm_dtype=gemm_dtype, kv_dtype=kv_dtype, images=images,
            )  # fmt: skip
            tables[key] = engine_in_framework(cost, framework)
        costs.append(tables[key])
    return tuple(costs)


@dataclass(frozen=True, eq=False)
class ReplicaMemory:
    """Bytes per device of one replica of each column [bytes], and the tokens its cache holds; ``[columns]``."""

    weight_bytes: FloatArray
    workspace_bytes: FloatArray
    cache_bytes: FloatArray
    awake_bytes: FloatArray
    asleep_bytes: FloatArray
    kv_tokens: FloatArray


def replica_memory(
    context: Context,
    architecture: Architecture,
    pool: PoolSpec,
    layout: Layout,
    fraction: FloatArray,
    running: IntArray,
) -> ReplicaMemory:
    """Memory of engines at a memory fraction; what a request holds whatever its length is taken off the cache first."""
    gemm_dtype, kv_dtype = pool.settings.weight_dtype, pool.settings.cache_dtype
    found = engine_memory(
        architecture, context.rollout_hardware, context.engine, layout, gemm_dtype=gemm_dtype, kv_dtype=kv_dtype,
        memory_fraction=fraction, cuda_graphs=pool.settings.cuda_graphs,
    )  # fmt: skip
    replica = EngineReplica.of(architecture, context.rollout_hardware, context.engine, layout, gemm_dtype, kv_dtype)
    held = running / replica.attention_data * kv_bytes_per_request(replica)
    share = np.maximum(1.0 - held / np.maximum(found.kv_cache_bytes, 1.0), 0.0)
    shape = np.shape(fraction)
    asleep = found.graphs_bytes + found.non_torch_bytes
    return ReplicaMemory(
        weight_bytes=np.broadcast_to(found.weights_bytes, shape),
        workspace_bytes=np.broadcast_to(found.activation_bytes + asleep, shape),
        cache_bytes=np.broadcast_to(found.kv_cache_bytes * share, shape),
        awake_bytes=np.broadcast_to(fraction * context.rollout_hardware.device.memory, shape),
        asleep_bytes=np.broadcast_to(asleep, shape),
        kv_tokens=np.broadcast_to(found.kv_tokens * share, shape),
    )


@dataclass(frozen=True)
class Flow:
    """What a demand sends through the engines, means over its rl_steps.

    Attributes
    ----------
    requests, generated, prompt_tokens, prompt_pairs : trajectories, generated tokens, prompt tokens and half the sum
        of their squares, per rl_step
    context : mean cached tokens of a running request, weighted by the time it runs: E[L (p + L / 2)] / E[L] [tokens]
    group_length, group_work : of a group's longest trajectory, mean: its length over that of the rl_step's longest, and
        the share of all generated tokens that are there when it ends [1]
    """

    requests: float
    generated: float
    prompt_tokens: float
    prompt_pairs: float
    context: float
    group_length: float = 1.0
    group_work: float = 1.0

    @classmethod
    def of(cls, demand: Demand) -> Flow:
        """Sums over all replicates."""
        tables = demand.trajectories
        prompts = np.concatenate([table.prompt_tokens for table in tables]).astype(np.float64)
        responses = np.concatenate([table.response_tokens for table in tables]).astype(np.float64)
        n, generated = len(tables), float(responses.sum())
        context = float((responses * (prompts + responses / 2.0)).sum()) / max(generated, 1.0)
        pairs = float((prompts**2).sum()) / 2.0
        length, work = np.mean([_groups_within(table) for table in tables], axis=0).tolist()
        return cls(len(prompts) / n, generated / n, float(prompts.sum()) / n, pairs / n, context, length, work)

    def group_seconds(self, makespan_s: FloatArray, steady_s: FloatArray) -> FloatArray:
        """Mean time of a group within a rollout [s]: by work as far as throughput rules, by length in the tail.

        It grows with both arguments (group_work >= group_length), so a dominated column stays dominated.
        """
        with np.errstate(invalid="ignore"):
            busy = np.minimum(steady_s, makespan_s)
            seconds = self.group_length * (makespan_s - busy) + self.group_work * busy
        return np.asarray(np.where(np.isfinite(makespan_s), seconds, np.inf))


def _groups_within(table: LengthTable) -> tuple[float, float]:
    """(length, work) of a group's longest trajectory, relative to the rl_step's, mean over groups [1]."""
    tokens = table.response_tokens.astype(np.float64)
    last, _ = last_of_groups(table.group, tokens)
    ordered = np.sort(tokens)
    below = np.searchsorted(ordered, last, side="right")
    done = np.concatenate([[0.0], np.cumsum(ordered)])[below] + last * (ordered.size - below)
    return float(last.mean() / ordered[-1]), float(done.mean() / ordered.sum())


def steady_running(limits: EngineLimits, replicas: int, flow: Flow) -> float:
    """Requests of a replica that run at once when finished ones are replaced: max_running, the cache, or its share."""
    share = max(flow.requests / replicas, 1.0)
    return max(min(float(limits.max_running), limits.kv_tokens / flow.context, share), 1.0)


def steady_seconds(
    cost: EngineStepCost, limits: EngineLimits, replicas: int, demand: Demand, flow: Flow | None = None
) -> float:
    r"""Seconds per rl_step of replicas that always find the next request: throughput, without a tail.

    .. math:: t = \frac{1}{R} \Big( \frac{G}{C}\, t_{step}(C, C \bar k) + t_{prefill} \Big)

    G generated tokens per rl_step, R replicas, C requests running at once (max_running, or what the cache holds at the
    mean context), k mean context in flight (`Flow.context`) [tokens].
    """
    flow = flow or Flow.of(demand)
    running = steady_running(limits, replicas, flow)
    step = float(cost.decode_s(running, running * flow.context))
    copies = max(demand.batch.group_size, 1) if limits.prefix_caching else 1
    budget = float(limits.token_budget)
    steps = flow.prompt_tokens / copies / budget
    prefill = (
        steps * float(cost.engine_step_s(0.0, 0.0, budget, 0.0, 1.0))
        + cost.prefill_per_pair_s * flow.prompt_pairs / copies
    )
    return (flow.generated / running * step + float(prefill)) / replicas


def interrupted_seconds(cost: EngineStepCost, limits: EngineLimits, replicas: int, flow: Flow) -> float:
    """Prefill of what a replica has under way in the steady state [s]."""
    return recompute_s(cost, float(limits.token_budget), steady_running(limits, replicas, flow), flow.context)


def _seconds(
    pool: PoolSpec, costs: tuple[EngineStepCost, ...], layout: Layout, e: IntArray,
    kv_tokens: FloatArray, running: IntArray, alive: IntArray, counted: Counted,
) -> tuple[FloatArray, FloatArray, FloatArray]:  # fmt: skip
    """Makespan, steady seconds and an interruption's of the columns ``alive``, means over some of the rl_steps.

    Which requests share an engine_step does not depend on what it costs, so the engine_steps of a workload are counted
    once per number of replicas and concurrency, and every engine shape costs a dot product (`StepCensus`).
    """
    makespan, steady, again = (np.zeros(len(alive)) for _ in range(3))
    demand, flow = counted.demand, counted.flow
    known: dict[tuple[int, int], float] = {}
    flowing: dict[tuple[int, float], tuple[float, float]] = {}
    for position, column in enumerate(alive):
        engine, replicas = int(e[column]), int(layout.data_parallel[column])
        limits = engine_limits(pool, float(kv_tokens[column]), int(running[column]))
        same = (engine, steady_running(limits, replicas, flow))
        if same not in flowing:
            flowing[same] = (
                steady_seconds(costs[engine], limits, replicas, demand, flow),
                interrupted_seconds(costs[engine], limits, replicas, flow),
            )
        steady[position], again[position] = flowing[same]
        points = _concurrency(limits, counted.tables, replicas, flow.context)
        for concurrency, _ in points:
            if (engine, concurrency) not in known:
                census = counted.census(replicas, concurrency, limits)
                each = [max(float(c.makespan_s(costs[engine])) for c in censuses) for censuses in census]
                known[engine, concurrency] = float(np.mean(each))
        makespan[position] = sum(weight * known[engine, concurrency] for concurrency, weight in points)
    return makespan, steady, again


def _concurrency(
    limits: EngineLimits, tables: list[Trajectories], replicas: int, held: float
) -> tuple[tuple[int, float], ...]:
    """Requests of a replica that run at once, as points that are counted with their weights.

    That is its share of the batch, max_running, or what the cache holds. A cache that binds counts as a bound on
    concurrency between two powers of two, interpolated in the logarithm; preemptions are left to the judge.
    """
    share = max(-(-len(table) // replicas) for table in tables)
    running = min(limits.max_running, share)
    fit = max(limits.kv_tokens * (1.0 - limits.watermark) / held, 1.0)
    if fit >= running:
        return ((running, 1.0),)
    low = 1 << int(np.log2(fit))
    high = min(2 * low, running)
    if high <= low:
        return ((low, 1.0),)
    upper = float(np.log(fit / low) / np.log(high / low))
    return ((low, 1.0 - upper), (high, upper))


def _slowest_replicas(table: Trajectories, replicas: int) -> list[Trajectories]:
    """What the replicas that may be the slowest serve: those with the most tokens, and the longest trajectory."""
    chosen = route(table, "round_robin", np.ones(replicas))
    tokens = np.bincount(chosen, table.generated_tokens, replicas)
    heavy = np.argsort(-tokens, kind="stable")[:HEAVIEST]
    slowest = {*heavy.tolist(), int(chosen[int(np.argmax(table.generated_tokens))])}
    return [table.take(np.flatnonzero(chosen == r)) for r in sorted(slowest) if tokens[r] > 0]
