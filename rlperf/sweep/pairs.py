"""The best pair of columns for every point of a group at once: the planner's screen, point by point the same answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlperf.cost.reject import REASONS, Reject
from rlperf.layout import WORDS, FloatArray, IntArray
from rlperf.plan.question.context import Context, TaskContext
from rlperf.plan.question.objective import objective_of
from rlperf.plan.search.fronts import rollout_criteria, trainer_criteria
from rlperf.plan.search.pareto import pareto_mask
from rlperf.plan.search.rollout_columns import RolloutColumns
from rlperf.plan.search.rules import pair_rule_mask, trainer_rule_flags
from rlperf.plan.search.screen import fit_together
from rlperf.plan.search.splits import Split, splits
from rlperf.plan.search.trainer_columns import TrainerColumns
from rlperf.sim.rl_step.demand import Demand
from rlperf.sim.rl_step.pairs import Pairs
from rlperf.sim.rl_step.stage_seconds import stage_seconds
from rlperf.specs.framework import FrameworkFacts
from rlperf.specs.modes import MODES, Mode
from rlperf.specs.pool import Role
from rlperf.sweep.caches import Columns
from rlperf.sweep.space import Group, column_field

BLOCK = 200_000
"""Pairs that are costed at once."""
CROWDED = 4
"""Columns per key from which dominated ones are dropped before pairing."""
WHOSE = ("rollout", "trainer", "rollout and trainer together")
"""Whose check failed, by code."""


@dataclass(frozen=True, eq=False)
class PairColumns:
    """Columns of one batch and one split of the devices, from which pairs are taken."""

    demand: Demand
    split: Split
    rollout: RolloutColumns
    trainer: TrainerColumns


@dataclass(eq=False)
class Best:
    """The best pair of every wanted combination of keys; -1 in ``source`` where there is none.

    Attributes
    ----------
    objective : value of the pair ``[combinations]``
    source, r, t : where it was found, and its columns ``[combinations]``
    reason : the check that the most successful pair failed: its `Reject` bit times 4 plus whose (`WHOSE`)
        ``[combinations]``
    """

    objective: FloatArray
    source: IntArray
    r: IntArray
    t: IntArray
    reason: IntArray
    sources: list[PairColumns] = field(default_factory=list)

    @classmethod
    def empty(cls, count: int) -> Best:
        """Nothing found yet."""
        none = np.full(count, -1, dtype=np.int64)
        return cls(np.full(count, np.inf), none.copy(), none.copy(), none.copy(), np.zeros(count, dtype=np.int64))


@dataclass(frozen=True, eq=False)
class Keys:
    """Settings of a group's points per role, each distinct one once.

    Attributes
    ----------
    fields : names of the role's column fields that vary
    rows : distinct settings ``[keys][fields]``
    of_point : key of each point ``[points]``
    """

    role: Role
    fields: tuple[str, ...]
    rows: FloatArray
    of_point: IntArray

    @classmethod
    def of(cls, group: Group, role: Role) -> Keys:
        """Keys of one role of a group."""
        named = [(index, column_field(path)) for index, path in enumerate(group.fields)]
        mine = [(index, found[1]) for index, found in named if found is not None and found[0] == role]
        if not mine:
            return cls(role, (), np.zeros((1, 0)), np.zeros(len(group.ids), dtype=np.int64))
        table = np.array([[_code(name, row[index]) for index, name in mine] for row in group.values], dtype=np.float64)
        rows, of_point = np.unique(table, axis=0, return_inverse=True)
        return cls(role, tuple(name for _, name in mine), rows, of_point.reshape(-1).astype(np.int64))

    def of_columns(self, columns: RolloutColumns | TrainerColumns) -> IntArray:
        """Key of every column; -1 where no point asks for it ``[columns]``."""
        if not self.fields:
            return np.zeros(columns.count, dtype=np.int64)
        layout = columns.layout.flat()
        values = [getattr(columns, n) if hasattr(columns, n) else getattr(layout, n) for n in self.fields]
        table = np.stack([np.broadcast_to(v, (columns.count,)) for v in values], axis=1).astype(np.float64)
        joined, inverse = np.unique(np.concatenate([self.rows, table]), axis=0, return_inverse=True)
        inverse = inverse.reshape(-1)
        number = np.full(len(joined), -1, dtype=np.int64)
        number[inverse[: len(self.rows)]] = np.arange(len(self.rows))
        return np.asarray(number[inverse[len(self.rows) :]])


def _code(name: str, value: Any) -> float:
    return float(WORDS[name].index(value) if name in WORDS else value)


def best_pairs(
    context: Context, task: TaskContext, facts: FrameworkFacts | None, group: Group, columns: Columns,
    demands: tuple[Demand, ...],
) -> tuple[Best, IntArray]:  # fmt: skip
    """The best pair per combination of keys, and the combination of each point ``[points]``.

    Every candidate that `rlperf.plan.search.screen.screen` would look at for one point alone is looked at, with the
    same flags, limits and objective.
    """
    engines, trainers = Keys.of(group, "rollout"), Keys.of(group, "trainer")
    wanted, of_point = np.unique(
        engines.of_point * len(trainers.rows) + trainers.of_point, return_inverse=True
    )  # combinations of keys, as one number each
    best = Best.empty(len(wanted))
    for demand in demands:
        most = context.job.limits.truncated_fraction
        if most is not None and demand.truncated_fraction > most:
            np.maximum(best.reason, 4 * int(Reject.LIMIT) + 2, out=best.reason)
            continue
        for split in splits(context):
            source = PairColumns(
                demand, split, columns.rollout(context, task.architecture, demand, split.rollout),
                columns.trainer(context, task.architecture, demand, split.trainer, MODES[split.mode].shares_devices),
            )  # fmt: skip
            _improve(best, context, task, facts, source, engines, trainers, wanted)
    return best, of_point.reshape(-1)


def _improve(
    best: Best, context: Context, task: TaskContext, facts: FrameworkFacts | None, source: PairColumns,
    engines: Keys, trainers: Keys, wanted: IntArray,
) -> None:  # fmt: skip
    """Let the pairs of one source compete."""
    rollout, trainer = source.rollout, source.trainer
    r_key, t_key = engines.of_columns(rollout), trainers.of_columns(trainer)
    backends = tuple(each.keys for each in context.trainers)
    t_flags = trainer.flags | trainer_rule_flags(facts, trainer, backends, task.architecture, source.demand.batch)
    r_why = _furthest(engines, r_key, rollout.flags)[wanted // len(trainers.rows)]
    t_why = _furthest(trainers, t_key, t_flags)[wanted % len(trainers.rows)]
    # a pair gets as far as the less successful of its two columns
    first = np.where((r_why > 0) & ((t_why == 0) | (r_why <= t_why)), 4 * r_why, np.where(t_why > 0, 4 * t_why + 1, 0))
    np.maximum(best.reason, first, out=best.reason)
    number = len(best.sources)
    best.sources.append(source)
    r_alive = _kept(rollout, np.flatnonzero((rollout.flags == 0) & (r_key >= 0)), r_key, source.split.mode)
    t_alive = _kept(trainer, np.flatnonzero((t_flags == 0) & (t_key >= 0)), t_key, source.split.mode)
    for r, t, combination in _blocks(r_alive, t_alive, r_key, t_key, len(trainers.rows), wanted):
        objective, flags = _judged(context, task, facts, source, r, t, backends)
        alive = flags == 0
        np.maximum.at(best.reason, combination[~alive], 4 * _first(flags[~alive]) + 2)
        r, t, combination, objective = r[alive], t[alive], combination[alive], objective[alive]
        order = np.lexsort((objective, combination))
        which, first = np.unique(combination[order], return_index=True)
        chosen = order[first]
        better = objective[chosen] < best.objective[which]
        which, chosen = which[better], chosen[better]
        best.objective[which], best.source[which] = objective[chosen], number
        best.r[which], best.t[which] = r[chosen], t[chosen]


def _judged(
    context: Context, task: TaskContext, facts: FrameworkFacts | None, source: PairColumns, r: IntArray, t: IntArray,
    backends: tuple[str, ...],
) -> tuple[FloatArray, IntArray]:  # fmt: skip
    """Objective and `Reject` flags of pairs ``[pairs]``."""
    split, batch, pairs = source.split, source.demand.batch, Pairs(source.rollout, source.trainer, r, t)
    flags = np.zeros(len(r), dtype=np.int64)
    if MODES[split.mode].shares_devices:
        flags |= np.where(fit_together(context, pairs), 0, int(Reject.MEMORY))
    allowed = pair_rule_mask(facts, pairs, backends, task.architecture, batch)
    flags |= np.where(allowed, 0, int(Reject.FRAMEWORK))
    staleness = MODES[split.mode].staleness(context.job.limits.staleness)
    seconds = stage_seconds(context.site, task.architecture, source.demand, split.mode, staleness, pairs).rl_step_s
    usage, limits = split.usage(context), context.job.limits
    if limits.step is not None:
        flags |= np.where(seconds <= limits.step, 0, int(Reject.LIMIT))
    if limits.usd_per_step is not None:
        flags |= np.where(seconds * (usage.usd_per_s or 0.0) <= limits.usd_per_step, 0, int(Reject.LIMIT))
    return objective_of(context, source.demand, usage, seconds), flags


def _blocks(
    r_alive: IntArray, t_alive: IntArray, r_key: IntArray, t_key: IntArray, trainers: int, wanted: IntArray
) -> Iterator[tuple[IntArray, IntArray, IntArray]]:
    """Pairs (rollout column, trainer column, combination) that a point asks for, in blocks."""
    parts: list[tuple[IntArray, IntArray, IntArray]] = []
    held = 0
    for key in np.unique(r_key[r_alive]):
        low, high = np.searchsorted(wanted, [key * trainers, (key + 1) * trainers])
        at = np.searchsorted(wanted[low:high], key * trainers + t_key[t_alive])
        asked = (at < high - low) & (wanted[np.minimum(low + at, len(wanted) - 1)] == key * trainers + t_key[t_alive])
        columns, found = t_alive[asked], (low + at)[asked]
        for row in r_alive[r_key[r_alive] == key]:
            parts.append((np.full(len(columns), row), columns, found))
            held += len(columns)
            if held >= BLOCK:
                yield _joined(parts)
                parts, held = [], 0
    if held:
        yield _joined(parts)


def _joined(parts: list[tuple[IntArray, IntArray, IntArray]]) -> tuple[IntArray, IntArray, IntArray]:
    r, t, combination = (np.concatenate([part[k] for part in parts]) for k in range(3))
    return r, t, combination


def _kept(columns: RolloutColumns | TrainerColumns, alive: IntArray, key: IntArray, mode: Mode) -> IntArray:
    """Columns that can be part of a best pair: of crowded keys only the undominated (``docs/theory/planner.md``)."""
    if len(alive) <= CROWDED * max(len(np.unique(key[alive])), 1):
        return alive
    if isinstance(columns, RolloutColumns):
        alike, criteria = rollout_criteria(columns, alive, mode)
    else:
        alike, criteria = trainer_criteria(columns, alive, mode)
    _, group = np.unique(np.stack([key[alive], alike]), axis=1, return_inverse=True)
    return np.asarray(alive[pareto_mask(criteria, group.reshape(-1))])


def _first(flags: IntArray) -> IntArray:
    """Lowest bit of every entry: reasons are checked in that order."""
    return np.asarray(flags & -flags)


def _furthest(keys: Keys, key: IntArray, flags: IntArray) -> IntArray:
    """The check that the most successful column of each key failed, as its `Reject` bit; 0 where one is left."""
    asked = key >= 0
    furthest = np.full(len(keys.rows), int(Reject.DEVICES), dtype=np.int64)
    np.maximum.at(furthest, key[asked], _first(flags[asked]))
    furthest[key[asked & (flags == 0)]] = 0
    return furthest


def reason_words(reason: int) -> str:
    """A reason in words.

    >>> reason_words(4 * 128 + 1)
    'trainer: device memory'
    """
    return f"{WHOSE[reason % 4]}: {REASONS[Reject(reason // 4)]}" if reason else "there is nothing to choose from"
