"""Screen: every candidate of a slot by closed forms, pruned to those that can be part of a best plan.

A slot is one task in one group of rl_steps. Its candidates are pairs of a rollout column and a trainer column under a
mode, a split of the devices and a batch. Columns are pruned by dominance before they are paired, pairs by objective.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from rlperf.cost.reject import REASONS, Reject, count_reasons
from rlperf.layout import FloatArray, IntArray
from rlperf.plan.question.context import Context, TaskContext
from rlperf.plan.question.objective import Usage, objective_of
from rlperf.plan.question.words import layout_words
from rlperf.plan.search.configuration import Configuration, configuration_of
from rlperf.plan.search.fronts import rollout_criteria, trainer_criteria
from rlperf.plan.search.pareto import pareto_mask
from rlperf.plan.search.rollout_columns import RolloutColumns, rollout_columns
from rlperf.plan.search.rules import pair_rule_mask, trainer_rule_flags
from rlperf.plan.search.splits import Split, splits
from rlperf.plan.search.trainer_columns import (
    TrainerColumns,
    TrainerGrid,
    peak_limit,
    peak_limits,
    trainer_columns_of,
    trainer_grid,
)
from rlperf.sim.rl_step.demand import Batch, Demand
from rlperf.sim.rl_step.engine import Tabulated
from rlperf.sim.rl_step.pairs import Pairs
from rlperf.sim.rl_step.rollout_stage import Counted
from rlperf.sim.rl_step.stage_seconds import stage_seconds
from rlperf.specs.architecture import Architecture
from rlperf.specs.framework import FrameworkFacts
from rlperf.specs.modes import MODES

FINALISTS = 64
"""Pairs per slot that the judge may look at; the screen keeps this many of the best."""

PER_MODE = 8
"""Pairs of every mode that are kept beside them."""


PER_COUNT = 4
"""Of those, at most this many per device count where tasks compete for devices."""
FORGIVEN = int(
    Reject.MEMORY | Reject.KV | Reject.HOST_MEMORY | Reject.NODE | Reject.BATCH | Reject.FRAMEWORK | Reject.LIMIT
)
"""What a lenient screen lets pass: it can still be costed."""


@dataclass(frozen=True, eq=False)
class Screened:
    """What is left of one slot, best first.

    Attributes
    ----------
    configurations : the candidates
    objective : value per rl_step ``[candidates]``
    rl_step_s : seconds per rl_step ``[candidates]``
    demand : index of each candidate's batch in ``demands``
    candidates, rejected : columns and pairs that were refused or costed one by one, and how many fell to what
    combinations : whole configurations among which the best was found: every rollout column with every trainer column
        whose degrees are possible at all, in every batch, mode and split. Dominance decides most of them unseen.
    misses : nearest misses in words, for when nothing is left
    """

    configurations: tuple[Configuration, ...]
    objective: FloatArray
    rl_step_s: FloatArray
    demand: IntArray
    demands: tuple[Demand, ...]
    candidates: int
    combinations: int
    rejected: dict[str, int]
    misses: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _CostedPairs:
    """Feasible pairs of one split and batch."""

    context: Context
    demand: int
    split: Split
    pairs: Pairs[RolloutColumns, TrainerColumns]
    rl_step_s: FloatArray
    objective: FloatArray


def screen(
    context: Context,
    task: TaskContext,
    demands: tuple[Demand, ...],
    facts: FrameworkFacts | None = None,
    *,
    prune: bool = True,
    keep: int = FINALISTS,
    lenient: bool = False,
    forgiven: int = FORGIVEN,
) -> Screened:
    """All candidates of one slot by closed forms.

    Parameters
    ----------
    demands : one per batch that the task leaves open
    prune : drop dominated columns before pairing; False keeps every feasible pair (brute force, tests)
    keep : candidates kept, best first
    lenient : keep what breaks memory, a framework rule or a limit, so that it can be predicted and explained
    forgiven : which of these a lenient screen lets pass (`Reject` flags)
    """
    parts: list[_CostedPairs] = []
    tally = _Tally()
    variants = _variants(_Columns(context, task, facts, lenient))
    for index, demand in enumerate(demands):
        miss = _limit_miss(context, demand)
        if miss and not lenient:
            tally.refuse({REASONS[Reject.LIMIT]: 1})
            tally.misses.append(miss)
            continue
        for columns, split in product(variants, splits(context)):
            found = _screen_split(columns, index, demand, split, facts, prune, forgiven if lenient else 0, tally)
            if found is not None:
                parts.append(found)
    return _best(parts, demands, context.job.sharing == "devices", task.architecture, keep, tally)


@dataclass(eq=False)
class _Tally:
    """What a screen has looked at so far (fields: `Screened`)."""

    candidates: int = 0
    combinations: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    misses: list[str] = field(default_factory=list)

    def refuse(self, more: dict[str, int]) -> None:
        """Count candidates by what they fell to."""
        for reason, count in more.items():
            self.rejected[reason] = self.rejected.get(reason, 0) + count


def _best(
    parts: list[_CostedPairs], demands: tuple[Demand, ...], apart: bool, architecture: Architecture,
    keep: int, tally: _Tally,
) -> Screened:  # fmt: skip
    """The ``keep`` best pairs of all splits, as configurations; of those with equal layouts only the best."""
    sizes = [len(part.pairs) for part in parts]
    part_of = np.repeat(np.arange(len(parts)), sizes)
    row_of = np.concatenate([np.arange(size) for size in sizes]) if parts else np.zeros(0, dtype=np.int64)
    objective = np.concatenate([part.objective for part in parts]) if parts else np.zeros(0)
    step = np.concatenate([part.rl_step_s for part in parts]) if parts else np.zeros(0)
    made: dict[tuple[object, ...], tuple[int, Configuration]] = {}
    per_count: dict[int, int] = {}
    ranked = np.argsort(objective, kind="stable")
    modes = [part.split.mode for part in parts]
    mode_of = np.array([modes.index(mode) for mode in modes], dtype=np.int64)[part_of[ranked]]
    of_mode = [ranked[mode_of == code] for code in np.unique(mode_of)]

    def take(positions: IntArray, most: int) -> None:
        for position in positions:
            if len(made) >= most:
                return
            part, row = parts[part_of[position]], int(row_of[position])
            batch, mode = demands[part.demand].batch, part.split.mode
            pairs = part.pairs
            columns = pairs.rollout, int(pairs.r[row]), pairs.trainer, int(pairs.t[row])
            candidate = configuration_of(part.context, architecture, batch, mode, *columns)
            engine = candidate.pool("rollout").settings
            key = (candidate.signature, engine.rollout_dtype, engine.kv_dtype, engine.prefix_caching)
            if apart and key not in made:
                # tasks that compete for devices need candidates of every device count
                per_count[candidate.devices] = per_count.get(candidate.devices, 0) + 1
                if per_count[candidate.devices] > PER_COUNT:
                    continue
            made.setdefault(key, (int(position), candidate))

    take(ranked, keep)
    if keep > 1 and not apart:
        # closed forms are off by mode, so the judge hears the best of each
        for positions in sorted(of_mode, key=lambda own: float(objective[own[0]])):
            take(positions[:PER_MODE], keep + PER_MODE * len(of_mode))
    order = np.array([position for position, _ in made.values()], dtype=np.int64)
    demand = np.array([parts[part_of[position]].demand for position in order], dtype=np.int64)
    chosen = tuple(candidate for _, candidate in made.values())
    misses = tuple(dict.fromkeys(tally.misses))
    return Screened(
        chosen, objective[order], step[order], demand, demands,
        tally.candidates, tally.combinations, tally.rejected, misses,
    )  # fmt: skip


def _limit_miss(context: Context, demand: Demand) -> str | None:
    """Why a batch breaks a limit whatever the layout, in words."""
    most = context.job.limits.truncated_fraction
    if most is not None and demand.truncated_fraction > most:
        cap = demand.batch.max_response_tokens
        return f"a maximum of {cap:,} tokens cuts {demand.truncated_fraction:.1%} of the responses (limit {most:.1%})"
    return None


@dataclass(eq=False)
class _Columns:
    """Columns of a task, each computed once: modes and splits share those of equal devices and batch.

    ``repeated`` : the trainer's columns have been counted with another variant of the engine
    """

    context: Context
    task: TaskContext
    facts: FrameworkFacts | None
    lenient: bool
    repeated: bool = False
    _rollout: dict[tuple[int, ...], RolloutColumns] = field(default_factory=dict)
    _counted: dict[tuple[int, ...], Counted] = field(default_factory=dict)
    _tabulated: Tabulated = field(default_factory=dict)
    _trainer: dict[tuple[object, ...], dict[int, TrainerColumns]] = field(default_factory=dict)
    _grids: dict[tuple[int, bool], TrainerGrid] = field(default_factory=dict)
    _fronts: dict[tuple[Batch, int, bool, int], IntArray] = field(default_factory=dict)

    def rollout(self, demand: Demand, devices: int) -> RolloutColumns:
        """Rollout columns; the mini-batch makes no difference to them."""
        b = demand.batch
        key = (b.generated, b.group_size, b.max_prompt_tokens, b.max_response_tokens, devices)
        if key not in self._rollout:
            counted = self._counted.setdefault(key[:-1], Counted(demand, self._tabulated))
            self._rollout[key] = rollout_columns(
                self.context, self.task.architecture, demand, devices, counted, lenient=self.lenient
            )
        found = self._rollout[key]
        if b.over_provision > 1.0:
            # partial rollouts take the tail away: throughput is what is left, and the judge has the last word
            found = replace(found, makespan_s=np.minimum(found.makespan_s, found.steady_s))
        return found

    def trainer(self, demand: Demand, devices: int, colocated: bool) -> TrainerColumns:
        """Trainer columns."""
        key = (demand.batch, colocated)
        if key not in self._trainer:
            arch, backends = self.task.architecture, tuple(each.keys for each in self.context.trainers)
            self._trainer[key] = trainer_columns_of(
                self.context, arch, demand, self._grid(demand.batch.longest_tokens, colocated), lenient=self.lenient,
                refuse=lambda found: trainer_rule_flags(self.facts, found, backends, arch, demand.batch),
            )  # fmt: skip
        return self._trainer[key][devices]

    def front(self, batch: Batch, split: Split, forgiven: int, make: Callable[[], IntArray]) -> IntArray:
        """Trainer columns that are left after pruning: the same for all modes with pools of their own."""
        key = (batch, split.trainer, MODES[split.mode].shares_devices, forgiven)
        if key not in self._fronts:
            self._fronts[key] = make()
        return self._fronts[key]

    def _grid(self, longest_tokens: int, colocated: bool) -> TrainerGrid:
        """Trainer layouts on every device count that a split asks for."""
        key = (longest_tokens, colocated)
        if key not in self._grids:
            counts = dict.fromkeys(
                s.trainer for s in splits(self.context) if MODES[s.mode].shares_devices == colocated
            )  # fmt: skip
            arch = self.task.architecture
            self._grids[key] = trainer_grid(self.context, arch, longest_tokens, tuple(counts), colocated)
        return self._grids[key]


def _variants(columns: _Columns) -> list[_Columns]:
    """One per open precision and prefix caching of the engine; the trainer's columns are the same for all."""
    context = columns.context
    pool = context.job.pool("rollout")
    settings = pool.settings.alternatives()
    if len(settings) == 1:
        return [columns]
    others = tuple(each for each in context.job.pools if each.role != "rollout")
    jobs = [
        context.job.model_copy(update={"pools": (pool.model_copy(update={"settings": one}), *others)})
        for one in settings
    ]
    return [
        replace(columns, context=replace(context, job=job), repeated=number > 0, _rollout={}, _counted={})
        for number, job in enumerate(jobs)
    ]


def _screen_split(
    columns: _Columns, index: int, demand: Demand, split: Split,
    facts: FrameworkFacts | None, prune: bool, forgiven: int, tally: _Tally,
) -> _CostedPairs | None:  # fmt: skip
    """Feasible pairs of one split; what was looked at goes to the tally."""
    context, arch, batch = columns.context, columns.task.architecture, demand.batch
    rollout = columns.rollout(demand, split.rollout)
    trainer = columns.trainer(demand, split.trainer, MODES[split.mode].shares_devices)
    backends = tuple(each.keys for each in context.trainers)
    rollout_flags = rollout.flags
    trainer_flags = trainer.flags
    lenient = forgiven != 0
    rollout_flags, trainer_flags = rollout_flags & ~forgiven, trainer_flags & ~forgiven
    looked_at = (rollout_flags,) if columns.repeated else (rollout_flags, trainer_flags, trainer.dropped)
    for flags in looked_at:
        tally.refuse(count_reasons(flags))
        tally.candidates += len(flags)
    tally.combinations += rollout.possible * trainer.count
    tally.misses += _near_misses(context, rollout, trainer, trainer_flags)
    r_alive, t_alive = np.flatnonzero(rollout_flags == 0), np.flatnonzero(trainer_flags == 0)
    if not len(r_alive) or not len(t_alive):
        return None
    # closed forms leave preemptions out: of engines that they take for equal, the roomiest cache comes first
    r_alive = r_alive[np.argsort(-rollout.kv_tokens[r_alive], kind="stable")]
    if prune:
        r_alive = _front(r_alive, *rollout_criteria(rollout, r_alive, split.mode))
        t_alive = columns.front(
            batch, split, forgiven, lambda: _front(t_alive, *trainer_criteria(trainer, t_alive, split.mode))
        )
    r, t = (axis.ravel() for axis in np.meshgrid(r_alive, t_alive, indexing="ij"))
    pairs = Pairs(rollout, trainer, r, t)
    flags = np.zeros(len(pairs), dtype=np.int64)
    if MODES[split.mode].shares_devices and not forgiven & int(Reject.MEMORY):
        flags |= np.where(fit_together(context, pairs), 0, int(Reject.MEMORY))
    allowed = pair_rule_mask(facts, pairs, backends, arch, batch, alone=lenient)
    flags |= np.where(allowed, 0, int(Reject.FRAMEWORK))
    tally.candidates += len(pairs)
    tally.refuse(count_reasons(flags))
    pairs = pairs.take(flags == 0)
    if not len(pairs):
        tally.misses.append("engine and trainer fit the device each alone, but not together")
        return None
    staleness = MODES[split.mode].staleness(context.job.limits.staleness)
    seconds = stage_seconds(context.site, arch, demand, split.mode, staleness, pairs).rl_step_s
    usage = split.usage(context)
    objective = objective_of(context, demand, usage, seconds)
    within = _within_limits(context, usage, seconds) | lenient
    if not within.all():
        tally.refuse({REASONS[Reject.LIMIT]: int((~within).sum())})
        tally.misses.append(f"the fastest rl_step of {batch.prompts} x {batch.group_size} takes {seconds.min():.1f} s")
    pairs = pairs.take(within)
    return _CostedPairs(context, index, split, pairs, seconds[within], objective[within]) if len(pairs) else None


def _within_limits(context: Context, usage: Usage, rl_step_s: FloatArray) -> np.ndarray:
    limits = context.job.limits
    within = np.ones(len(rl_step_s), dtype=np.bool_)
    if limits.step is not None:
        within &= rl_step_s <= limits.step
    if limits.usd_per_step is not None:
        within &= rl_step_s * (usage.usd_per_s or 0.0) <= limits.usd_per_step
    return within


def fit_together(context: Context, pairs: Pairs[RolloutColumns, TrainerColumns]) -> np.ndarray:
    """Colocated pools: engine awake beside the idle trainer, engine asleep beside the training one."""
    rollout, trainer, r, t = pairs.rollout, pairs.trainer, pairs.r, pairs.t
    limit = context.hardware.device.memory * (1.0 - context.job.limits.memory_headroom)
    generating = rollout.awake_bytes[r] + trainer.idle_bytes[t] <= limit
    training = rollout.asleep_bytes[r] + trainer.peak_bytes[t] <= peak_limits(context, trainer.backend[t])
    return np.asarray(generating & training)


def _front(alive: IntArray, group: IntArray, criteria: FloatArray) -> IntArray:
    """The undominated of some columns."""
    return np.asarray(alive[pareto_mask(criteria, group)])


def _near_misses(
    context: Context, rollout: RolloutColumns, trainer: TrainerColumns, trainer_flags: IntArray
) -> list[str]:
    """The candidates that miss device memory by least, in words."""
    found = []
    over = np.flatnonzero(trainer_flags == int(Reject.MEMORY))
    if len(over) and not (trainer_flags == 0).any():
        least = over[np.argmin(trainer.peak_bytes[over])]
        limit = peak_limit(context, context.trainers[int(trainer.backend[least])])
        more = (trainer.peak_bytes[least] - limit) / 1e9
        words = layout_words(trainer.layout.take(least).values())
        found.append(f"the leanest trainer ({words}) needs {more:.1f} GB more per device")
    short = np.flatnonzero((rollout.flags == int(Reject.KV)) | (rollout.flags == int(Reject.MEMORY)))
    if len(short) and not (rollout.flags == 0).any():
        most = short[np.argmax(rollout.kv_tokens[short])]
        found.append(f"the roomiest engine caches {rollout.kv_tokens[most]:,.0f} tokens")
    for role, flags in (("rollout", rollout.flags), ("trainer", trainer_flags)):
        if not found and not (flags == 0).any():
            why = count_reasons(flags)
            found.append(f"no {role} layout is left: {max(why, key=lambda reason: why[reason])}" if why else
                         f"no {role} layout is left")  # fmt: skip
    return found
