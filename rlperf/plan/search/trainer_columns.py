"""Trainer columns: every layout of the trainer with its seconds and bytes for one demand, as flat arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Self

import numpy as np

from rlperf.cost.memory_risk import PHASES, spread_at
from rlperf.cost.reject import Reject
from rlperf.cost.trainer.parameters import OFFLOADS_OPTIMIZER
from rlperf.layout import OFFLOAD, BoolArray, FloatArray, IntArray, Layout, taken
from rlperf.plan.question.context import Context
from rlperf.plan.search.beaten_path import EXPERTS_SPREAD, doublings, experts_reach, trainer_departures
from rlperf.plan.search.candidates import Shape, token_budgets, trainer_flags, trainer_layouts
from rlperf.sim.rl_step.cuts import cut_by_budget
from rlperf.sim.rl_step.demand import Demand
from rlperf.sim.rl_step.site import Site, TrainerStack
from rlperf.sim.rl_step.trainer_bytes import TrainerBytes, trainer_bytes, transition_seconds
from rlperf.sim.rl_step.trainer_stage import TrainerStage, closed_training
from rlperf.specs.architecture import Architecture


@dataclass(frozen=True, eq=False)
class TrainerColumns(TrainerStage):
    """Pools as flat columns: the stage and what the search asks of them ``[columns]``.

    Attributes
    ----------
    token_budget : tokens per packed microbatch and replica
    departures, doubled : how far off the beaten path, and how many doublings on it (`rlperf.plan.search.beaten_path`)
    peak_bytes, idle_bytes, syncing_bytes : per device while training, while a colocated engine runs, and while it
        receives weights
    flags : `Reject`
    fits : whether memory, framework and nodes take it, whatever the batch divides by (`UNFIT`)
    dropped : `Reject` of the candidates that arithmetic rules out, which are not columns ``[dropped]``
    """

    token_budget: IntArray
    departures: IntArray
    doubled: FloatArray
    peak_bytes: FloatArray
    idle_bytes: FloatArray
    syncing_bytes: FloatArray
    flags: IntArray
    fits: BoolArray
    dropped: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def count(self) -> int:
        """Number of columns."""
        return len(self.token_budget)

    def take(self, index: IntArray | slice) -> Self:
        """Some columns, by index."""
        return taken(self, index, whole=("dropped",))


def peak_limit(context: Context, trainer: TrainerStack) -> float:
    """Most that a trainer's predicted peak may be, its neighbours included, at the job's risk [bytes]."""
    own, risk = trainer.calibration, context.job.limits.out_of_memory_risk / PHASES
    return context.hardware.device.usable_memory / float(spread_at(risk, own.memory_low, own.memory_high))


def peak_limits(context: Context, backend: IntArray) -> FloatArray:
    """`peak_limit` of the trainers with these indices [bytes]."""
    return np.array([peak_limit(context, trainer) for trainer in context.trainers])[backend]


Refuse = Callable[[TrainerColumns], tuple[IntArray, IntArray]]
"""Flags of the columns that a framework's rules refuse: those that speak of no batch, and all."""
COSTABLE = int(Reject.NODE | Reject.FRAMEWORK)
"""What is refused, but can be costed: a pinned layout is predicted all the same."""


UNFIT = int(Reject.MEMORY | Reject.HOST_MEMORY | Reject.BUDGET | Reject.FRAMEWORK | Reject.NODE)
"""What more pipeline stages are needed for; that a batch divides by no other layout is no need."""


@dataclass(frozen=True, eq=False)
class TrainerGrid:
    """Columns before a batch is known, of several device counts at once: per-call costs are paid once for all.

    Attributes
    ----------
    layout, backend, token_budget, parked, doubled, flags : as in `TrainerColumns` ``[columns]``
    settings : token budgets, and parked or not, of one layout, whose rows stand together
    critic : devices of a critic's own; 0: there is none ``[columns]``
    cuts : devices of the trainer and of the critic's own -> their rows, which stand together
    dropped : the same -> `Reject` of their candidates that arithmetic rules out
    """

    layout: Layout
    backend: IntArray
    token_budget: IntArray
    parked: IntArray
    doubled: FloatArray
    flags: IntArray
    settings: tuple[int, int]
    critic: IntArray
    cuts: dict[tuple[int, int], slice]
    dropped: dict[tuple[int, int], IntArray]

    def bytes_of(
        self, context: Context, architecture: Architecture, demand: Demand, site: Site, layout: Layout
    ) -> list[TrainerBytes]:
        """Memory of every trainer's rows, or of a critic's on its own ``site`` and ``layout``.

        As a table of layouts, budgets and parking: states are those of a layout, whatever its token budget, and what a
        budget needs is the same wherever states wait.
        """
        settings = context.job.pool("trainer").settings.filled()
        tables = [rows.reshape(-1, *self.settings) for rows in self.rows(len(context.trainers))]
        return [
            trainer_bytes(
                site, trainer, architecture, demand, layout.take(table[:, :1, :1]), settings,
                self.token_budget[table[:1, :, :1]], self.parked[table[:1, :1]],
            )
            for trainer, table in zip(context.trainers, tables, strict=True)
        ]  # fmt: skip

    def rows(self, trainers: int) -> list[IntArray]:
        """Rows of each trainer."""
        return [np.flatnonzero(self.backend == index) for index in range(trainers)]


def trainer_grid(
    context: Context, architecture: Architecture, longest_tokens: int, counts: Sequence[tuple[int, int]],
    colocated: bool,
) -> TrainerGrid:  # fmt: skip
    """Layouts of every backend times token budgets times parked or not, on each of ``counts``.

    ``counts`` : devices of the trainer, and of a critic's own
    """
    pool = context.job.pool("trainer")
    budgets = token_budgets(pool.settings.token_budget, longest_tokens, pool.layout.microbatch)
    packing = pool.settings.filled().packing
    if not any(cut_by_budget(packing, trainer.framework) for trainer in context.trainers):
        budgets = budgets[:1]  # sequences are counted, whatever a budget is
    parked = [0] if not colocated else [0, 1] if pool.settings.parked is None else [int(pool.settings.parked)]
    options = np.array([(b, p) for b in budgets for p in parked], dtype=np.int64)  # parked last: see `_timed`
    layouts, backends, critics, kept, cuts, dropped, end = [], [], [], [], {}, {}, 0
    for devices, critic in counts:
        shape = Shape(architecture, devices, context.cluster.scale_up_domain, longest_tokens)
        dead_flags, start = [], end
        for index, trainer in enumerate(context.trainers):
            if pool.settings.backend is None or pool.settings.backend == trainer.backend:
                layout, flags = trainer_layouts(shape, pool, trainer.calibration.capability)
                flags |= _critic_flags(context, replace(shape, devices=critic), trainer, layout)
                dead = (flags & ~COSTABLE) != 0
                dead_flags.append(flags[dead])
                layouts.append(layout.flat(~dead))
                kept.append(flags[~dead])
                backends.append(np.full(len(kept[-1]), index, dtype=np.int64))
                critics.append(np.full(len(kept[-1]), critic, dtype=np.int64))
                end += len(kept[-1])
        cuts[devices, critic] = slice(start * len(options), end * len(options))
        dropped[devices, critic] = np.repeat(np.concatenate(dead_flags), len(options))
    rows = np.repeat(np.arange(end), len(options))
    axes = {name: np.concatenate([getattr(layout, name) for layout in layouts])[rows] for name in vars(layouts[0])}
    layout, waiting = Layout(**axes), np.tile(options[:, 1], end)
    return TrainerGrid(
        layout=layout,
        backend=np.concatenate(backends)[rows],
        token_budget=np.tile(options[:, 0], end),
        parked=waiting,
        doubled=doublings(layout, waiting, EXPERTS_SPREAD),
        flags=np.concatenate(kept)[rows],
        settings=(len(budgets), len(parked)),
        critic=np.concatenate(critics)[rows],
        cuts=cuts,
        dropped=dropped,
    )


def _critic_flags(context: Context, shape: Shape, trainer: TrainerStack, layout: Layout) -> IntArray:
    """What keeps trainer layouts from standing on a critic's own devices, too, as `Reject` flags ``[layouts]``.

    ``shape`` : of the critic's devices; 0: it has none
    """
    if not shape.devices:
        return np.zeros(layout.shape, dtype=np.int64)
    choice, capability = context.job.pool("critic").layout, trainer.calibration.capability
    found = trainer_flags(shape, choice, capability, layout.on(shape.devices))
    return found & int(Reject.DEVICES | Reject.EXPERTS)


def trainer_columns_of(
    context: Context, architecture: Architecture, demand: Demand, grid: TrainerGrid,
    *, refuse: Refuse | None = None, lenient: bool = False, longer: bool = False,
) -> dict[tuple[int, int], TrainerColumns]:  # fmt: skip
    """Columns of one demand by devices of the trainer and of a critic's own.

    What does not fit or is refused is flagged, the others are timed.

    Parameters
    ----------
    refuse : the framework's rules, applied before anything is timed
    lenient : time columns that memory or a rule refuses, too; else their seconds are infinite
    longer : a sequence above the budget is a microbatch of its own; else none of them runs
    """
    found = _fitting(context, architecture, demand, grid)
    if longer:
        found = replace(found, flags=found.flags & ~int(Reject.BUDGET))
    if refuse is not None:
        alone, flags = (found.flags | each for each in refuse(found))
        if context.site.critic_apart:
            theirs = refuse(replace(found, layout=found.layout.on(found.critic)))
            alone, flags = alone | theirs[0], flags | theirs[1]
        found = replace(found, flags=flags, fits=(alone & UNFIT) == 0)
    wanted = ~_needless_offload(context, found, prod(grid.settings))
    for index, trainer in enumerate(context.trainers):
        timed = np.flatnonzero(wanted & (found.backend == index) & ((found.flags == 0) | lenient))
        found = _timed(context, trainer, architecture, demand, found, timed, grid.settings[1])
    columns: dict[tuple[int, int], TrainerColumns] = {}
    for devices, cut in grid.cuts.items():
        kept = cut if wanted[cut].all() else cut.start + np.flatnonzero(wanted[cut])
        some = replace(found.take(kept), dropped=grid.dropped[devices])
        columns[devices] = replace(some, departures=departures_of(context, architecture, demand, some, some.backend))
    return columns


def departures_of(
    context: Context, architecture: Architecture, demand: Demand, columns: TrainerColumns, group: IntArray
) -> IntArray:
    """How far columns of one number of devices lie off the beaten path, compared within a ``group`` ``[columns]``."""
    return trainer_departures(
        architecture, columns.layout, group, columns.fits,
        microbatches=_microbatches(context, demand, columns), longest_tokens=demand.batch.longest_tokens,
        reach=experts_reach(architecture, context.cluster.scale_up_domain, context.hardware.device.memory),
        domain=context.cluster.scale_up_domain,
    )  # fmt: skip


def _microbatches(context: Context, demand: Demand, columns: TrainerColumns) -> FloatArray:
    """Microbatches of an optimizer update on one rank, roughly: its tokens over the budget, or its sequences."""
    demand = context.site.trained(demand)
    batch, layout = demand.batch, columns.layout
    each = batch.sequences / batch.updates / layout.data_parallel
    tokens = np.ceil(each * demand.moments.mean / columns.token_budget)
    counted = np.ceil(each / layout.microbatch)
    return np.asarray(np.where(_by_budget(context, columns.backend), tokens, counted), dtype=np.float64)


def _by_budget(context: Context, backend: IntArray) -> BoolArray:
    """Whether columns cut their microbatches by tokens; a budget says nothing to those that count sequences."""
    packing = context.job.pool("trainer").settings.filled().packing
    of_trainer = np.array([cut_by_budget(packing, trainer.framework) for trainer in context.trainers])
    return np.asarray(of_trainer[backend])


TIGHT = 0.95
"""Share of its limit from which a trainer's peak may be too much beside what a sleeping engine keeps."""


def _needless_offload(context: Context, columns: TrainerColumns, settings: int) -> BoolArray:
    """Rows that offload the optimizer, unasked, from a layout that fits with it on the device and is then faster.

    ``settings``: rows of one layout.
    """
    offloaded = columns.layout.offload == OFFLOAD.index("optimizer")
    if context.job.pool("trainer").layout.offload or not offloaded.any():
        return np.zeros(columns.count, dtype=np.bool_)
    rows = np.flatnonzero(offloaded)
    twin = rows - settings  # offload is the last axis of the layouts, and follows none where a backend tries both
    limits = peak_limits(context, columns.backend[twin])
    found = np.zeros(columns.count, dtype=np.bool_)
    found[rows] = (columns.flags[twin] == 0) & (columns.peak_bytes[twin] <= TIGHT * limits)
    return found


def _fitting(context: Context, architecture: Architecture, demand: Demand, grid: TrainerGrid) -> TrainerColumns:
    """The grid's columns with their bytes for one demand, not yet timed."""
    count = len(grid.flags)
    peak, idle, syncing, host, transition = (np.empty(count) for _ in range(5))
    parts = grid.bytes_of(context, architecture, demand, context.site, grid.layout)
    for rows, memory in zip(grid.rows(len(context.trainers)), parts, strict=True):
        peak[rows], idle[rows], host[rows] = memory.peak.ravel(), memory.idle.ravel(), memory.host.ravel()
        syncing[rows] = memory.syncing.ravel()
        transition[rows] = transition_seconds(context.site, memory).ravel()
    flags = grid.flags | _memory_flags(context, grid.backend, grid.layout, peak, host)
    if context.site.critic_apart:
        layout, theirs = grid.layout.on(grid.critic), np.empty((2, count))
        parts = grid.bytes_of(context, architecture, demand, context.site.critic, layout)
        for rows, memory in zip(grid.rows(len(context.trainers)), parts, strict=True):
            theirs[:, rows] = memory.peak.ravel(), memory.host.ravel()
        flags = flags | _memory_flags(context, grid.backend, layout, *theirs)
    short = _by_budget(context, grid.backend) & (grid.token_budget < demand.batch.longest_tokens)
    flags = flags | np.where(short, int(Reject.BUDGET), 0)
    if context.job.pool("trainer").settings.shared_prefix:
        # neither a ring nor Ulysses knows who shares a prompt with whom
        split = grid.layout.context_parallel * grid.layout.ulysses
        flags = flags | np.where(split > 1, int(Reject.FRAMEWORK), 0)
    if context.job.pool("trainer").settings.optimizer == "muon":
        # its products are no work for a host
        flags = flags | np.where(np.isin(grid.layout.offload, OFFLOADS_OPTIMIZER), int(Reject.FRAMEWORK), 0)
    return TrainerColumns(
        backend=grid.backend,
        layout=grid.layout,
        token_budget=grid.token_budget,
        departures=np.zeros(count, dtype=np.int64),
        doubled=grid.doubled,
        parked=grid.parked,
        training_s=np.full(count, np.inf),
        scoring_s=np.full(count, np.inf),
        critic=grid.critic,
        critic_s=np.zeros(count),
        values_s=np.zeros(count),
        transition_s=transition,
        peak_bytes=peak,
        idle_bytes=idle,
        syncing_bytes=syncing,
        low=np.ones(count),
        high=np.ones(count),
        flags=flags,
        fits=(flags & UNFIT) == 0,
    )


def _memory_flags(context: Context, backend: IntArray, layout: Layout, peak: FloatArray, host: FloatArray) -> IntArray:
    """`Reject` flags of pools whose devices or nodes hold less than these bytes per device ``[columns]``."""
    over = np.where(peak > peak_limits(context, backend), int(Reject.MEMORY), 0)
    return np.asarray(over | np.where(hosts_hold(context, layout, host), 0, int(Reject.HOST_MEMORY)))


def hosts_hold(context: Context, layout: Layout, host: FloatArray) -> BoolArray:
    """Whether nodes hold these bytes of host memory per device ``[columns]``."""
    per_node = np.minimum(context.cluster.devices_per_node, layout.devices)
    return np.asarray(host * per_node <= (context.job.limits.host_memory or context.cluster.host_memory))


def _timed(
    context: Context, trainer: TrainerStack, architecture: Architecture, demand: Demand, columns: TrainerColumns,
    timed: IntArray, parked: int,
) -> TrainerColumns:  # fmt: skip
    """The columns with the seconds of the rows ``timed``, all of one trainer; parked or not takes equally long.

    ``parked``: rows that differ in it alone, which stand together
    """
    if not len(timed):
        return columns
    first = np.concatenate([[True], np.diff(timed // parked) != 0])
    some, back = timed[first], np.cumsum(first) - 1
    settings, site = context.job.pool("trainer").settings.filled(), context.site
    asked = trainer, architecture, demand
    layout, budget = columns.layout.take(some), columns.token_budget[some]
    training, scoring, cost = closed_training(site, *asked, layout, settings, budget)

    def written(before: FloatArray, seconds: FloatArray) -> FloatArray:
        after = before.copy()
        after[timed] = np.broadcast_to(seconds, some.shape)[back]
        return after

    if site.critic_apart:
        apart = layout.on(columns.critic[some])
        updates, values, _ = closed_training(site.critic, *asked, apart, settings, budget)
        columns = replace(
            columns, critic_s=written(columns.critic_s, updates), values_s=written(columns.values_s, values)
        )
    return replace(
        columns,
        training_s=written(columns.training_s, training),
        scoring_s=written(columns.scoring_s, scoring),
        low=written(columns.low, cost.low),
        high=written(columns.high, cost.high),
    )
