"""Trainer columns: every layout of the trainer with its seconds and bytes for one demand, as flat arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlperf.cost.batching import Microbatches
from rlperf.cost.collectives import host_copy_s
from rlperf.cost.reject import Reject
from rlperf.cost.scoring import scoring_pass
from rlperf.cost.trainer_memory import MemoryParts, trainer_memory
from rlperf.cost.training import training_update
from rlperf.layout import OFFLOAD, BoolArray, FloatArray, IntArray, Layout
from rlperf.plan.answer.plan import SettingsValues
from rlperf.plan.question.context import Context, Trainer
from rlperf.plan.question.demand import Demand
from rlperf.plan.search.candidates import Shape, token_budgets, trainer_layouts
from rlperf.sim.rl_step.overheads import (
    padded_microbatches,
    routing_skew,
    scoring_in_framework_s,
    training_in_framework_s,
)
from rlperf.specs.architecture import Architecture
from rlperf.specs.job import PoolSettings, PoolSpec


@dataclass(frozen=True, eq=False)
class TrainerColumns:
    """Flat columns; every array has shape ``[columns]``.

    Attributes
    ----------
    backend : index into ``Context.trainers``
    token_budget : tokens per packed microbatch and replica
    parked : 1 where the states wait in host memory while a colocated engine runs
    training_s, scoring_s : all optimizer updates and all scoring passes of one rl_step [s]
    transition_s : parking the states and bringing them back, once per rl_step [s]
    peak_bytes, idle_bytes : per device while training, and while a colocated engine runs
    host_bytes : host memory per device
    low, high : 5th and 95th percentile of training over its prediction [1]
    flags : `Reject`
    dropped : `Reject` of the candidates that arithmetic rules out, which are not columns ``[dropped]``
    """

    backend: IntArray
    layout: Layout
    token_budget: IntArray
    parked: IntArray
    training_s: FloatArray
    scoring_s: FloatArray
    transition_s: FloatArray
    peak_bytes: FloatArray
    idle_bytes: FloatArray
    host_bytes: FloatArray
    low: FloatArray
    high: FloatArray
    flags: IntArray
    dropped: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def count(self) -> int:
        """Number of columns."""
        return len(self.token_budget)

    def take(self, index: IntArray | slice) -> TrainerColumns:
        """Some columns, by index."""
        values: dict[str, Any] = {
            name: value.take(index) if isinstance(value, Layout) else value if name == "dropped" else value[index]
            for name, value in vars(self).items()
        }
        return TrainerColumns(**values)


@dataclass(frozen=True)
class Lengths:
    """Moments of the trained sequences of a demand, means over replicates [tokens]."""

    mean: float
    mean_square: float
    longest: float

    @classmethod
    def of(cls, demand: Demand) -> Lengths:
        """Moments over all replicates; the longest is the mean of their maxima."""
        per_step = [demand.lengths(k) for k in range(len(demand.tables))]
        joined = np.concatenate(per_step)
        return cls(
            float(joined.mean()), float((joined**2).mean()), float(np.mean([lengths.max() for lengths in per_step]))
        )


def peak_limit(context: Context, trainer: Trainer) -> float:
    """Most that a trainer's predicted peak may be: headroom kept, and its 95th percentile inside the device [bytes]."""
    memory = context.hardware.device.memory
    return min(memory * (1.0 - context.job.limits.memory_headroom), memory / trainer.calibration.memory_high)


def peak_limits(context: Context, backend: IntArray) -> FloatArray:
    """`peak_limit` of the trainers with these indices [bytes]."""
    return np.array([peak_limit(context, trainer) for trainer in context.trainers])[backend]


def scoring_passes(context: Context, trainer: Trainer, updates: int) -> int:
    """Forward passes per rl_step on the trainer's devices: old policy, reference, and the critic's values for PPO."""
    rule = trainer.framework.old_policy_pass
    old = 1 if rule == "always" or (rule == "off_policy" and updates > 1) else 0
    roles = context.job.all_roles
    return old + ("reference" in roles) + ("critic" in roles)


Refuse = Callable[[TrainerColumns], IntArray]
"""Flags of the columns that a framework's rules refuse."""
COSTABLE = int(Reject.NODE | Reject.FRAMEWORK)
"""What is refused, but can be costed: a pinned layout is predicted all the same."""


def trainer_columns(
    context: Context, architecture: Architecture, demand: Demand, devices: int, *, colocated: bool,
    refuse: Refuse | None = None, lenient: bool = False,
) -> TrainerColumns:  # fmt: skip
    """Every trainer column on ``devices`` devices, infeasible ones flagged (arguments: `trainer_columns_of`)."""
    grid = trainer_grid(context, architecture, demand.batch.longest_tokens, (devices,), colocated)
    return trainer_columns_of(context, architecture, demand, grid, refuse=refuse, lenient=lenient)[devices]


@dataclass(frozen=True, eq=False)
class TrainerGrid:
    """Columns before a batch is known, of several device counts at once: per-call costs are paid once for all.

    Attributes
    ----------
    layout, backend, token_budget, parked, flags : as in `TrainerColumns` ``[columns]``
    settings : rows of one layout, which stand together: token budgets times parked or not
    cuts : device count -> its rows, which stand together
    dropped : device count -> `Reject` of its candidates that arithmetic rules out
    memory : bytes by sequences per optimizer update, of batches seen so far
    """

    layout: Layout
    backend: IntArray
    token_budget: IntArray
    parked: IntArray
    flags: IntArray
    settings: int
    cuts: dict[int, slice]
    dropped: dict[int, IntArray]
    memory: dict[float, list[TrainerBytes]] = field(default_factory=dict)

    def bytes_of(self, context: Context, architecture: Architecture, demand: Demand) -> list[TrainerBytes]:
        """Memory of every trainer's rows; of a batch it depends on the sequences of an update alone."""
        batch = demand.batch
        key = batch.sequences / batch.updates
        if key not in self.memory:
            settings = context.job.pool("trainer").settings
            self.memory[key] = [
                trainer_bytes(
                    context, trainer, architecture, demand, self.layout.take(rows), settings,
                    self.token_budget[rows], self.parked[rows],
                )
                for trainer, rows in zip(context.trainers, self.rows(len(context.trainers)), strict=True)
            ]  # fmt: skip
        return self.memory[key]

    def rows(self, trainers: int) -> list[IntArray]:
        """Rows of each trainer."""
        return [np.flatnonzero(self.backend == index) for index in range(trainers)]


def trainer_grid(
    context: Context, architecture: Architecture, longest_tokens: int, counts: Sequence[int], colocated: bool
) -> TrainerGrid:
    """Layouts of every backend times token budgets times parked or not, on each of ``counts`` devices."""
    pool = context.job.pool("trainer")
    budgets = token_budgets(pool.settings.token_budget, longest_tokens)
    parked = [int(pool.settings.parked)] if pool.settings.parked is not None else ([0, 1] if colocated else [0])
    options = np.array([(b, p) for b in budgets for p in parked], dtype=np.int64)  # parked last: see `_changes`
    layouts, backends, kept, cuts, dropped, end = [], [], [], {}, {}, 0
    for devices in counts:
        shape = Shape(architecture, devices, context.cluster.scale_up_domain, longest_tokens)
        dead_flags, start = [], end
        for index, trainer in enumerate(context.trainers):
            if pool.settings.backend is None or pool.settings.backend == trainer.backend:
                layout, flags = trainer_layouts(shape, pool, trainer.backend)
                dead = (flags & ~COSTABLE) != 0
                dead_flags.append(flags[dead])
                layouts.append(layout.flat(~dead))
                kept.append(flags[~dead])
                backends.append(np.full(len(kept[-1]), index, dtype=np.int64))
                end += len(kept[-1])
        cuts[devices] = slice(start * len(options), end * len(options))
        dropped[devices] = np.repeat(np.concatenate(dead_flags), len(options))
    rows = np.repeat(np.arange(end), len(options))
    axes = {name: np.concatenate([getattr(layout, name) for layout in layouts])[rows] for name in vars(layouts[0])}
    return TrainerGrid(
        layout=Layout(**axes),
        backend=np.concatenate(backends)[rows],
        token_budget=np.tile(options[:, 0], end),
        parked=np.tile(options[:, 1], end),
        flags=np.concatenate(kept)[rows],
        settings=len(options),
        cuts=cuts,
        dropped=dropped,
    )


def trainer_columns_of(
    context: Context, architecture: Architecture, demand: Demand, grid: TrainerGrid,
    *, refuse: Refuse | None = None, lenient: bool = False,
) -> dict[int, TrainerColumns]:  # fmt: skip
    """Columns of one demand by device count: what does not fit or is refused is flagged, the others are timed.

    Parameters
    ----------
    refuse : the framework's rules, applied before anything is timed
    lenient : time columns that memory or a rule refuses, too; else their seconds are infinite
    """
    found = _fitting(context, architecture, demand, grid)
    if refuse is not None:
        found = replace(found, flags=found.flags | refuse(found))
    wanted = ~_needless_offload(context, found, grid.settings)
    for index, trainer in enumerate(context.trainers):
        timed = np.flatnonzero(wanted & (found.backend == index) & ((found.flags == 0) | lenient))
        _time(context, trainer, architecture, demand, found, timed)
    return {
        devices: replace(found.take(rows[wanted[rows]]), dropped=grid.dropped[devices])
        for devices, rows in ((devices, np.arange(cut.start, cut.stop)) for devices, cut in grid.cuts.items())
    }  # fmt: skip


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
    twin = rows - settings  # offload is the last axis of the layouts
    limits = peak_limits(context, columns.backend[twin])
    found = np.zeros(columns.count, dtype=np.bool_)
    found[rows] = (columns.flags[twin] == 0) & (columns.peak_bytes[twin] <= TIGHT * limits)
    return found


def _fitting(context: Context, architecture: Architecture, demand: Demand, grid: TrainerGrid) -> TrainerColumns:
    """The grid's columns with their bytes for one demand, not yet timed."""
    count = len(grid.flags)
    peak, idle, host, transition = (np.empty(count) for _ in range(4))
    parts = grid.bytes_of(context, architecture, demand)
    for rows, memory in zip(grid.rows(len(context.trainers)), parts, strict=True):
        peak[rows], idle[rows], host[rows] = memory.peak, memory.idle, memory.host
        transition[rows] = transition_seconds(context, memory)
    per_node = np.minimum(context.cluster.devices_per_node, grid.layout.devices)
    host_limit = context.job.limits.host_memory or context.cluster.host_memory
    flags = grid.flags | np.where(peak > peak_limits(context, grid.backend), int(Reject.MEMORY), 0)
    flags = flags | np.where(host * per_node > host_limit, int(Reject.HOST_MEMORY), 0)
    flags = flags | np.where(grid.token_budget < demand.batch.longest_tokens, int(Reject.BATCH), 0)
    return TrainerColumns(
        backend=grid.backend,
        layout=grid.layout,
        token_budget=grid.token_budget,
        parked=grid.parked,
        training_s=np.full(count, np.inf),
        scoring_s=np.full(count, np.inf),
        transition_s=transition,
        peak_bytes=peak,
        idle_bytes=idle,
        host_bytes=host,
        low=np.ones(count),
        high=np.ones(count),
        flags=flags,
    )


def _time(
    context: Context, trainer: Trainer, architecture: Architecture, demand: Demand, columns: TrainerColumns,
    timed: IntArray,
) -> None:  # fmt: skip
    """Write the seconds of the rows ``timed``, all of one trainer; parked or not takes equally long."""
    if not len(timed):
        return
    pool = context.job.pool("trainer")
    same = np.concatenate([[True], _changes(columns, timed)])
    some, back = timed[same], np.cumsum(same) - 1
    times = _times(context, trainer, architecture, demand, pool, columns.layout.take(some), columns.token_budget[some])
    columns.training_s[timed] = times.training_s[back]
    columns.scoring_s[timed] = times.scoring_s[back]
    columns.low[timed] = times.low[back]
    columns.high[timed] = times.high[back]


def _changes(columns: TrainerColumns, rows: IntArray) -> BoolArray:
    """Whether each of ``rows`` but the first differs from the one before it in more than parking."""
    different = np.diff(columns.token_budget[rows]) != 0
    for values in vars(columns.layout).values():
        different |= np.diff(values[rows]) != 0
    return np.asarray(different)


@dataclass(frozen=True, eq=False)
class _Times:
    """Seconds and error bounds of layouts (fields: `TrainerColumns`) ``[layouts]``."""

    training_s: FloatArray
    scoring_s: FloatArray
    low: FloatArray
    high: FloatArray


def _times(
    context: Context, trainer: Trainer, architecture: Architecture, demand: Demand, pool: PoolSpec,
    layout: Layout, budget: IntArray,
) -> _Times:  # fmt: skip
    """Seconds of all updates and all scoring passes of one rl_step, from the moments of the lengths."""
    batch, lengths = demand.batch, Lengths.of(demand)
    hw, calibration = context.hardware, trainer.calibration
    dtype, rank = pool.settings.compute_dtype or "bf16", pool.settings.lora_rank
    chunked = bool(pool.settings.chunked_loss)
    whole = batch.sequences
    framework = trainer.framework
    update = padded_microbatches(framework, layout, _packed(layout, whole / batch.updates, lengths, budget), budget)
    skew = routing_skew(framework, layout)
    patches = demand.patches(architecture)
    cost = training_update(
        architecture, hw, calibration, layout, update, dtype=dtype, lora_rank=rank, skew=skew, chunked_loss=chunked,
        images=demand.images_per_token * update.tokens, patches=patches,
        vision_frozen=bool(pool.settings.freeze_vision),
    )  # fmt: skip
    update_s = training_in_framework_s(framework, architecture, layout, update, cost.total_s)
    scored = np.asarray(pool.settings.scoring_token_budget or budget)
    everything = _packed(layout, whole, lengths, scored)
    everything = padded_microbatches(framework, layout, everything, scored)
    passes = scoring_passes(context, trainer, batch.updates)
    one = scoring_pass(
        architecture, hw, calibration, layout, everything, dtype=dtype, skew=skew,
        images=demand.images_per_token * everything.tokens, patches=patches,
    ).total_s  # fmt: skip
    scoring = scoring_in_framework_s(framework, architecture, layout, everything, one) * passes
    # PPO's critic: a second policy-sized network on the same devices, updated and asked for values
    critics = 2.0 if "critic" in context.job.all_roles else 1.0
    shape = np.shape(budget)
    return _Times(
        training_s=np.broadcast_to(update_s * batch.updates * critics, shape),
        scoring_s=np.broadcast_to(scoring, shape),
        low=np.broadcast_to(cost.low, shape),
        high=np.broadcast_to(cost.high, shape),
    )


def _packed(layout: Layout, sequences: float, lengths: Lengths, budget: IntArray) -> Microbatches:
    return Microbatches.from_moments(
        layout, sequences, lengths.mean, lengths.mean_square, lengths.longest, token_budget=budget
    )


@dataclass(frozen=True, eq=False)
class TrainerBytes:
    """Bytes per device [bytes]: peak of training, while the engine runs, on the host, and parked there meanwhile."""

    peak: FloatArray
    idle: FloatArray
    host: FloatArray
    parked: FloatArray
    parts: MemoryParts


def trainer_bytes(
    context: Context, trainer: Trainer, architecture: Architecture, demand: Demand, layout: Layout,
    settings: SettingsValues | PoolSettings, budget: IntArray | None = None, parked: IntArray | None = None,
) -> TrainerBytes:  # fmt: skip
    """Memory of trainer layouts with full microbatches of the longest sequences: what must fit on the worst rl_step.

    ``budget`` and ``parked`` override the settings' own, one per layout ``[columns]``.
    """
    longest = float(demand.batch.longest_tokens)
    tokens = np.asarray(settings.token_budget if budget is None else budget, dtype=np.float64)
    park = np.asarray(int(bool(settings.parked)) if parked is None else parked)
    most = demand.batch.sequences / demand.batch.updates / layout.data_parallel * longest
    full = Microbatches.of(tokens, tokens * longest, longest, np.maximum(np.ceil(most / tokens), 1.0))
    parts = trainer_memory(
        architecture, context.hardware, trainer.calibration, layout, full,
        dtype=settings.compute_dtype or "bf16", lora_rank=settings.lora_rank,
        chunked_loss=bool(settings.chunked_loss),
        patches=demand.images_per_token * tokens * demand.patches(architecture),
    )  # fmt: skip
    copies = 2.0 if "critic" in context.job.all_roles else 1.0
    states = parts.states * copies
    shape = np.broadcast_shapes(np.shape(tokens), layout.shape)
    reference = _reference_bytes(context, trainer, architecture, layout)
    return TrainerBytes(
        peak=np.broadcast_to(parts.total + states - parts.states, shape),
        idle=np.broadcast_to(np.where(park == 1, 0.0, states) + parts.context, shape),
        host=np.broadcast_to(parts.host * copies + park * states + reference, shape),
        parked=np.broadcast_to(park * states, shape),
        parts=parts,
    )


def transition_seconds(context: Context, memory: TrainerBytes) -> FloatArray:
    """Parking the states and bringing them back, once per rl_step [s]."""
    return 2.0 * host_copy_s(context.hardware, memory.parked)


def _reference_bytes(context: Context, trainer: Trainer, architecture: Architecture, layout: Layout) -> FloatArray:
    """Host bytes per device of the frozen reference policy, which waits in host memory between its passes."""
    if "reference" not in context.job.all_roles:
        return np.zeros(())
    shards = np.where(layout.zero_stage >= 3, layout.shards, 1)
    split = layout.tensor_parallel * layout.pipeline_parallel * shards
    expert_split = layout.pipeline_parallel * layout.expert_parallel * layout.expert_tensor_parallel * shards
    width = trainer.calibration.storage.compute_weight
    dense = (architecture.parameters - architecture.routed_parameters) / split
    return np.asarray(width * (dense + architecture.routed_parameters / expert_split), dtype=np.float64)
