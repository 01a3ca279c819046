"""Rollout columns: every engine layout with its memory fraction and max_running, and what a demand takes on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from rlperf.cost.engine_step import EngineStepCost
from rlperf.cost.memory_risk import ENGINE_SPREAD, PHASES, spread_at
from rlperf.cost.reject import Reject
from rlperf.layout import BoolArray, FloatArray, IntArray, Layout
from rlperf.plan.question.context import Context
from rlperf.plan.search.beaten_path import SHARED_FRACTION, doublings, rollout_departures
from rlperf.plan.search.candidates import Shape, rollout_layouts
from rlperf.sim.rl_step.counted_ends import counted_ends_s
from rlperf.sim.rl_step.demand import Demand
from rlperf.sim.rl_step.engine import (
    HALF_GROWN,
    ReplicaMemory,
    apart_of,
    cache_granted,
    least_cache,
    replica_memory,
    short_cache,
    tabulate,
)
from rlperf.sim.rl_step.rollout_counted import (
    Counted,
    counted_ahead_s,
    counted_lent_s,
    counted_seconds,
    least_seconds,
    pools_of,
)
from rlperf.sim.rl_step.rollout_stage import RolloutStage
from rlperf.sim.rl_step.simulated_rollouts import Engines
from rlperf.sim.rollout.apart import Apart
from rlperf.sim.rollout.group_ends import ENDS
from rlperf.sim.rollout.lent import AT
from rlperf.specs.architecture import Architecture
from rlperf.specs.modes import MODES
from rlperf.specs.pool import Settings, SettingsValues

MEMORY_FRACTIONS = (0.5, 0.6, 0.7, 0.8, 0.9)
BESIDE_STATES = (0.3, 0.4)
"""Beside a trainer whose states never leave the shared devices, less pays too: TRL's own default is 0.3."""
MAX_RUNNING = (64, 256, 1024)
"""Requests at once that are tried, of a replica or of each of its copies of the attention."""
STREAMED_RUNNING = (16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256, 1024)
"""The same where a trainer is fed as groups end: of fewer the first end sooner and the last later."""
FEWEST = 8
"""Requests at once: engines count in eights."""
IMPOSSIBLE = int(Reject.DEVICES | Reject.HEADS | Reject.LAYERS | Reject.EXPERTS)
"""What arithmetic rules out."""


ENGINE_BYTES = ("awake_bytes", "unbound_bytes", "asleep_bytes", "waking_bytes")
"""What columns have of an engine's memory."""


@dataclass(frozen=True, eq=False)
class RolloutColumns(RolloutStage):
    """Pools as flat columns: the stage (means over a demand's rl_steps) and what the search asks of them ``[columns]``.

    Attributes
    ----------
    engine : index into ``costs``, and into ``aparts``, who reads its prompts
    memory_fraction : share of device memory that the engine takes [1]
    departures, doubled : how far off the beaten path, and how many doublings on it (`rlperf.plan.search.beaten_path`)
    weight_share : of device memory that weights take [1]
    kv_tokens : cache of a replica [tokens]
    awake_bytes, asleep_bytes : per device while it generates, and while a colocated trainer runs
    unbound_bytes : of the former what no share that the engine is told bounds
    waking_bytes : while a colocated engine receives weights, and has no cache yet
    flags : `Reject`
    guessed : where seconds are no more than the least that a simulation leaves, since nobody has simulated them yet
    """

    engine: IntArray
    memory_fraction: FloatArray
    max_running: IntArray
    departures: IntArray
    doubled: FloatArray
    weight_share: FloatArray
    kv_tokens: FloatArray
    awake_bytes: FloatArray
    unbound_bytes: FloatArray
    asleep_bytes: FloatArray
    waking_bytes: FloatArray
    flags: IntArray
    costs: tuple[EngineStepCost, ...]
    aparts: tuple[Apart | None, ...]
    guessed: BoolArray

    @property
    def count(self) -> int:
        """Number of columns."""
        return len(self.engine)

    @property
    def possible(self) -> int:
        """Columns whose degrees are possible: those that were costed, or refused for their memory."""
        return int(np.count_nonzero((self.flags & IMPOSSIBLE) == 0))


def engine_settings(context: Context, columns: RolloutColumns, row: int) -> SettingsValues:
    """Settings of the engines of one column, what a job states of them in place."""
    engine = context.job.pool("rollout").settings.filled()
    return engine.planned(
        "rollout",
        backend=engine.backend or context.job.engine,
        max_running=int(columns.max_running[row]),
        memory_fraction=float(columns.memory_fraction[row]),
        cuda_graphs=engine.cuda_graphs is not False,
    )


def awake_limits(context: Context, beside: FloatArray) -> FloatArray:
    """Most bytes of an engine and its neighbour at the job's risk [bytes]; arrays broadcast.

    The engine sizes its cache to the share that it is told, so that only what lies ``beside`` is uncertain: context,
    communicators and graphs (`ReplicaMemory.unbound_bytes`), and a colocated trainer that waits.
    """
    risk = context.job.limits.out_of_memory_risk / PHASES
    return context.rollout_hardware.device.usable_memory - beside * (spread_at(risk, *ENGINE_SPREAD) - 1.0)


def rollout_columns(
    context: Context, architecture: Architecture, demand: Demand, devices: int, counted: Counted | None = None,
    *, lenient: bool = False, lent: int = 0, least: bool = False, streams: bool = False,
) -> RolloutColumns:  # fmt: skip
    """Every rollout column on ``devices`` devices, infeasible ones flagged.

    ``counted`` : what was counted of this demand before; new counts are added
    ``lenient`` : time columns whose cache holds no request, too; else their seconds are infinite
    ``lent`` : devices of a trainer that engines may join on while it waits
    ``least`` : what would have to be simulated is guessed, no more than it may take, until `simulated` asks for it
    ``streams`` : say when parts of the groups are complete
    """
    pool = context.job.pool("rollout")
    shape = Shape(
        architecture,
        devices,
        context.rollout_hardware.cluster.scale_up_domain,
        demand.batch.longest_tokens,
        context.rollout_hardware.device.usable_memory,
    )
    layout, flags = rollout_layouts(shape, pool)
    counted = counted or Counted(demand)
    columns = _columns(context, architecture, demand, layout, flags, counted, lenient, least, streams)
    if not lent:
        return columns
    alive = np.flatnonzero(np.isfinite(columns.makespan_s))
    return _joined(columns, alive, counted, pool.settings.filled(), lent, least=least)


def simulated(context: Context, columns: RolloutColumns, rows: IntArray, counted: Counted, lent: int) -> RolloutColumns:
    """The columns with those of ``rows`` simulated that are guessed so far (arguments: `rollout_columns`)."""
    rows, settings = rows[columns.guessed[rows]], context.job.pool("rollout").settings.filled()
    one_by_one = not (lent or settings.prefill_replicas or counted.single_turn)
    known = np.flatnonzero(columns.guessed) if one_by_one else rows
    held = cache_granted(columns.kv_tokens[known], counted.demand.request_tokens)
    pools = pools_of(
        settings, columns.costs, columns.layout.take(known), columns.engine[known], held, columns.max_running[known],
        counted, columns.aparts, columns.ends_s is not None,
    )  # fmt: skip
    makespan, guessed = columns.makespan_s.copy(), columns.guessed.copy()
    if one_by_one:
        _serve_roomiest(columns, np.flatnonzero(np.isin(known, rows)), known, pools, counted)
        makespan[known], guessed[known] = least_seconds(pools, counted)
    else:
        makespan[rows], guessed[rows] = counted_seconds(pools, counted)[0], False
    group = counted.flow.group_seconds(makespan, columns.steady_s)
    ends = None if columns.ends_s is None else columns.ends_s.copy()
    if ends is not None:
        ends[known] = counted_ends_s(pools, counted, makespan[known], group[known])
    made = replace(columns, makespan_s=makespan, group_s=group, guessed=guessed, ends_s=ends)
    return _joined(made, rows, counted, settings, lent) if lent else made


def _serve_roomiest(
    columns: RolloutColumns, asked: IntArray, rows: IntArray, pools: list[Engines], counted: Counted
) -> None:
    """Serve agents on the roomiest engines of each layout that are ``asked`` for (of ``rows``, whose are ``pools``).

    What they take tells that smaller caches take longer than was guessed, which may then not be asked for any more;
    and where others have told that of one already, it is not served yet.
    """
    told, _ = least_seconds(pools, counted)
    asked = asked[told[asked] <= columns.makespan_s[rows[asked]]]
    places = np.array([counted.places(pools[at]) for at in asked])
    asked = asked[np.lexsort((-columns.kv_tokens[rows[asked]], -places))]
    first = np.unique(columns.engine[rows[asked]], return_index=True)[1]
    counted_seconds([pools[at] for at in asked[first]], counted)


def _joined(
    columns: RolloutColumns, rows: IntArray, counted: Counted, settings: Settings, lent: int, *, least: bool = False
) -> RolloutColumns:
    """The columns with what the rollouts of ``rows`` take where engines on ``lent`` devices join them."""
    held = cache_granted(columns.kv_tokens[rows], counted.demand.request_tokens)
    shares = counted_lent_s(
        settings, columns.costs, columns.layout.take(rows), columns.engine[rows], held, columns.max_running[rows],
        counted, lent, least=least,
    )  # fmt: skip
    known, guessed = columns.lent_s, columns.guessed.copy()
    lent_s = np.full((columns.count, len(AT)), np.inf) if known is None else known.copy()
    lent_s[rows], guessed[rows] = shares * columns.makespan_s[rows, None], least
    return replace(columns, lent_s=lent_s, guessed=guessed)


def memory_fractions(context: Context) -> tuple[float, ...]:
    """Shares of a device's memory for engines: those that the job lists, else those that are worth asking about."""
    if given := context.job.pool("rollout").settings.memory_fraction:
        return given
    stays = context.job.pool("trainer").settings.parked is False
    shared = any(MODES[mode].shares_devices for mode in context.job.modes)
    return (*BESIDE_STATES, *MEMORY_FRACTIONS) if stays and shared else MEMORY_FRACTIONS


def usual_fraction(context: Context) -> float:
    """The largest of them beside a waiting trainer that does not leave the beaten path: what a job states does not."""
    return max(SHARED_FRACTION, min(memory_fractions(context)))


def places_tried(streams: bool, turns: bool = False) -> tuple[int, ...]:
    """Requests at once that are tried where a job states none; agents, whose ``turns`` wait, gain nothing by few."""
    return STREAMED_RUNNING if streams and not turns else MAX_RUNNING


def _slots_with_room(memory: ReplicaMemory, each: IntArray, ranks: IntArray, demand: Demand) -> IntArray:
    """``each`` of every rank that admits requests of its own, but no more than the cache has room for.

    To closed forms more are level, and the judge tries all at once.
    """
    room = np.floor(HALF_GROWN * np.maximum(memory.kv_tokens, 0.0) / demand.moments.mean).astype(np.int64)
    whole = np.maximum(FEWEST, ranks)
    return np.asarray(np.minimum(each * ranks, np.maximum(room // whole * whole, whole)), dtype=np.int64)


def _alone(context: Context, memory: ReplicaMemory) -> BoolArray:
    """Whether an engine with a cache fits a device that nothing else is on."""
    return np.asarray((memory.cache_bytes > 0) & (memory.awake_bytes <= awake_limits(context, memory.unbound_bytes)))


def _stacked(rows: Layout, more: Layout) -> Layout:
    """Some flat layouts, and more behind them."""
    return Layout(
        **{name: np.concatenate([own.ravel(), getattr(more, name).ravel()]) for name, own in vars(rows).items()}
    )


def _columns(
    context: Context, architecture: Architecture, demand: Demand, layout: Layout, flags: IntArray, counted: Counted,
    lenient: bool, least: bool, streams: bool,
) -> RolloutColumns:  # fmt: skip
    """Engine shapes crossed with memory fractions and max_running; each shape is tabulated once."""
    # a replica across nodes is refused, but it can be costed: a pinned one is predicted all the same
    can_cost = (flags & ~int(Reject.NODE)) == 0
    keep, dead = np.flatnonzero(can_cost), layout.flat(~can_cost)
    shapes, settings = layout.take(keep), (asked := context.job.pool("rollout").settings).filled()
    costs = tabulate(
        context.site, architecture, settings, shapes, known=counted.costs, images=demand.images,
        read_tokens=demand.read_tokens(settings.prefix_caching),
    )  # fmt: skip
    paces = np.array([cost.pace_s for cost in costs]).reshape(-1, 3)
    places = places_tried(streams, not counted.single_turn)
    options = np.arange(len(keep)), memory_fractions(context), asked.max_running or places
    e, f, m = (np.asarray(a).ravel() for a in np.meshgrid(*options, indexing="ij"))
    held_by = partial(replica_memory, context.site, architecture, settings, rows := shapes.take(e), f, demand=demand)
    m = m if asked.max_running else _slots_with_room(held_by(m), m, rows.attention_data_parallel, demand)
    memory = held_by(m)
    why = flags[keep][e] | np.where(memory.kv_tokens < least_cache(demand.request_tokens), int(Reject.KV), 0)
    writers = rows.data_parallel - settings.prefill_replicas
    why |= np.where(_alone(context, memory), 0, int(Reject.MEMORY)) | np.where(writers > 0, 0, int(Reject.READERS))
    makespan, steady, again = (np.full(len(e), np.inf) for _ in range(3))
    runs = (why & ~int(Reject.NODE | (Reject.KV | Reject.MEMORY if lenient else 0))) == 0
    alive = np.flatnonzero(runs if counted.refuses is None else runs & ~counted.refuses(shapes)[e])
    held = cache_granted(memory.kv_tokens[alive], demand.request_tokens)
    guessed, aparts = np.zeros(len(e), dtype=np.bool_), apart_of(context.site, architecture, settings, shapes)
    pools = pools_of(settings, costs, rows.take(alive), e[alive], held, m[alive], counted, aparts, streams)
    makespan[alive], steady[alive], again[alive], guessed[alive] = counted_seconds(pools, counted, least=least)
    group, ends = counted.flow.group_seconds(makespan, steady), np.full((len(e) + dead.size, ENDS), np.inf)
    if streams:
        ends[alive] = counted_ends_s(pools, counted, makespan[alive], group[alive])
    device, domain = context.rollout_hardware.device, context.rollout_hardware.cluster.scale_up_domain
    weights, short = memory.weight_bytes / device.usable_memory, short_cache(memory.kv_tokens, demand.request_tokens)

    def padded(values: Any, fill: float) -> Any:
        return np.concatenate([values, np.full(dead.size, fill)])

    return RolloutColumns(
        layout=_stacked(rows.flat(), dead),
        engine=padded(e, 0).astype(np.int64),
        memory_fraction=padded(f, 0.0),
        max_running=padded(m, 0).astype(np.int64),
        departures=padded(rollout_departures(rows, why == 0, domain, weights, short), 0).astype(np.int64),
        doubled=padded(doublings(rows, np.zeros(len(e), dtype=np.int64)), 0.0),
        weight_share=padded(weights, np.inf), kv_tokens=padded(memory.kv_tokens, 0.0),
        makespan_s=padded(makespan, np.inf), steady_s=padded(steady, np.inf),
        group_s=padded(group, np.inf), recompute_s=padded(again, np.inf),
        writers=padded(writers, 0).astype(np.int64), slots=padded(m, 0).astype(np.int64),
        pace_s=np.stack([padded(each, np.inf) for each in paces[e].T], axis=1),
        transition_s=padded(2.0 * memory.weight_bytes / device.host_bandwidth, np.inf),
        **{name: padded(getattr(memory, name), np.inf) for name in ENGINE_BYTES},
        flags=np.concatenate([why, flags[~can_cost]]),
        costs=costs, aparts=aparts,
        guessed=padded(guessed, 0).astype(np.bool_),
        weight_dtype=settings.rollout_dtype,
        ends_s=ends if streams else None,
        ahead_s=counted_ahead_s(pools, counted, alive, len(e) + dead.size),
    )  # fmt: skip
