"""The best pair of columns for every point of a group at once: the planner's screen, asked for what each point wants.

A *key* is what one or more points of a group pin of a pool, a *combination* a key of each pool. The screen's step says
which columns and pairs are left and what they take (`rlperf.plan.search.split_columns`); here stands which of them
belong to which point, and which check the others failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlperf.cost.reject import REASONS, Reject
from rlperf.layout import WORDS, FloatArray, IntArray
from rlperf.plan.search.columns import Columns
from rlperf.plan.search.rollout_columns import RolloutColumns
from rlperf.plan.search.split_columns import SplitColumns, truncates
from rlperf.plan.search.splits import splits
from rlperf.plan.search.trainer_columns import TrainerColumns
from rlperf.sim.rl_step.demand import Demand
from rlperf.specs.pool import Role
from rlperf.sweep.space import Group, column_field

BLOCK = 200_000
"""Pairs that are costed at once."""
WHOSE = ("rollout", "trainer", "rollout and trainer together")
"""Whose check failed, by code."""


@dataclass(eq=False)
class Best:
    """The best pair of every wanted combination of keys; -1 in ``source`` where there is none.

    Attributes
    ----------
    objective : value of the pair ``[combinations]``
    priced : the same with the price of leaving the beaten path, by which the best is the best ``[combinations]``
    source, r, t : where it was found, and its columns ``[combinations]``
    reason : the check that the most successful pair failed: its `Reject` bit times 4 plus whose (`WHOSE`)
        ``[combinations]``
    """

    objective: FloatArray
    priced: FloatArray
    source: IntArray
    r: IntArray
    t: IntArray
    reason: IntArray
    sources: list[SplitColumns] = field(default_factory=list)

    @classmethod
    def empty(cls, count: int) -> Best:
        """Nothing found yet."""
        none = np.full(count, -1, dtype=np.int64)
        nothing = np.zeros(count, dtype=np.int64)
        return cls(np.full(count, np.inf), np.full(count, np.inf), none.copy(), none.copy(), none.copy(), nothing)


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
        coded = [group.values[index] for index, _ in mine]
        numbers = [np.array([_code(n, v) for v in c.choices]) for c, (_, n) in zip(coded, mine, strict=True)]
        table = np.stack([number[c.code] for number, c in zip(numbers, coded, strict=True)], axis=1)
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


@dataclass(frozen=True, eq=False)
class Wanted:
    """What the points of a group ask for.

    Attributes
    ----------
    combinations : of a rollout and a trainer key, as one number each, ascending ``[combinations]``
    """

    engines: Keys
    trainers: Keys
    combinations: IntArray

    @property
    def engine_of(self) -> IntArray:
        """Rollout key of each combination."""
        return self.combinations // len(self.trainers.rows)

    @property
    def trainer_of(self) -> IntArray:
        """Trainer key of each combination."""
        return self.combinations % len(self.trainers.rows)


def best_pairs(columns: Columns, group: Group, demands: tuple[Demand, ...]) -> tuple[Best, IntArray]:
    """The best pair per combination of keys, and the combination of each point ``[points]``."""
    engines, trainers = Keys.of(group, "rollout"), Keys.of(group, "trainer")
    numbers, of_point = np.unique(engines.of_point * len(trainers.rows) + trainers.of_point, return_inverse=True)
    wanted, best = Wanted(engines, trainers, numbers), Best.empty(len(numbers))
    for demand in demands:
        if truncates(columns.context, demand):
            np.maximum(best.reason, 4 * int(Reject.LIMIT) + 2, out=best.reason)
            continue
        for split in splits(columns.context):
            _improve(best, columns.of(demand, split), wanted)
    return best, of_point.reshape(-1)


def _improve(best: Best, source: SplitColumns, wanted: Wanted) -> None:
    """Let the pairs of one source compete."""
    r_key, t_key = wanted.engines.of_columns(source.rollout), wanted.trainers.of_columns(source.trainer)
    r_why = _furthest(wanted.engines, r_key, source.rollout_flags)[wanted.engine_of]
    t_why = _furthest(wanted.trainers, t_key, source.trainer_flags)[wanted.trainer_of]
    # a pair gets as far as the less successful of its two columns
    first = np.where((r_why > 0) & ((t_why == 0) | (r_why <= t_why)), 4 * r_why, np.where(t_why > 0, 4 * t_why + 1, 0))
    np.maximum(best.reason, first, out=best.reason)
    if not source.possible:
        return
    source = source.apart(r_key, t_key)
    number = len(best.sources)
    best.sources.append(source)
    for r, t, combination in _blocks(source.rollout_left(r_key), source.trainer_left(t_key), r_key, t_key, wanted):
        found = source.screened(r, t)
        refused = found.flags != 0
        np.maximum.at(best.reason, combination[refused], 4 * _first(found.flags[refused]) + 2)
        left = np.flatnonzero(~refused)
        priced = found.objective + found.price
        order = left[np.lexsort((priced[left], combination[left]))]
        which, first = np.unique(combination[order], return_index=True)
        chosen = order[first]
        better = priced[chosen] < best.priced[which]
        which, chosen = which[better], chosen[better]
        best.objective[which], best.priced[which] = found.objective[chosen], priced[chosen]
        best.source[which] = number
        best.r[which], best.t[which] = r[chosen], t[chosen]


def _blocks(
    r_left: IntArray, t_left: IntArray, r_key: IntArray, t_key: IntArray, wanted: Wanted
) -> Iterator[tuple[IntArray, IntArray, IntArray]]:
    """Pairs (rollout column, trainer column, combination) that a point asks for, in blocks."""
    parts: list[tuple[IntArray, IntArray, IntArray]] = []
    numbers, trainers, held = wanted.combinations, len(wanted.trainers.rows), 0
    for key in np.unique(r_key[r_left]):
        number = key * trainers + t_key[t_left]
        at = np.minimum(np.searchsorted(numbers, number), len(numbers) - 1)
        asked = numbers[at] == number
        columns, found = t_left[asked], at[asked]
        for row in r_left[r_key[r_left] == key]:
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
