"""Points of a sweep in groups: points that differ only in layout and engine or trainer settings are costed together.

A *column field* is one that the planner's columns enumerate (`COLUMN_FIELDS`). All points that agree in every other
field make one group: its job is the base job with those other fields set and the column fields opened to all values
that occur, so that one pass over arrays costs every point of the group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlperf.layout import IntArray
from rlperf.specs.pool import Role, of_role
from rlperf.sweep.spec import Checked

ROLES: tuple[Role, ...] = ("rollout", "trainer")
PLACES = {role: {each.name: each.part for each in of_role(role) if each.axis} for role in ROLES}
COLUMN_FIELDS = {role: tuple(places) for role, places in PLACES.items()}
"""Fields that the planner's columns enumerate, by role."""
CHEAP = ("price", "objective", "limits.step", "limits.usd_per_step", "modes", "name")
"""Fields that change no column: their axes run fastest, so that columns are found again."""
SPARSE = 8
"""A listed group is split where its opened fields would make more than this many candidates per point."""


@dataclass(frozen=True, eq=False)
class Coded:
    """Values of one field at many points: ``choices[code]``, so that a million points cost a million small integers.

    Attributes
    ----------
    choices : values that occur
    code : index into them ``[points]``
    """

    choices: tuple[Any, ...]
    code: IntArray

    @classmethod
    def of(cls, values: Sequence[Any]) -> Coded:
        """Of values one by one; those that are equal and of one type share a code."""
        known: dict[tuple[type, Any], int] = {}
        code = [known.setdefault((type(value), value), len(known)) for value in values]
        return cls(tuple(value for _, value in known), np.array(code, dtype=np.int64))

    def take(self, points: IntArray | slice) -> Coded:
        """At some points; choices that none of them has go."""
        used, code = np.unique(self.code[points], return_inverse=True)
        return Coded(tuple(self.choices[k] for k in used), code.reshape(-1).astype(np.int64))

    def __getitem__(self, point: int) -> Any:
        return self.choices[self.code[point]]

    def values(self) -> list[Any]:
        """All of them, point by point."""
        return [self.choices[k] for k in self.code]


@dataclass(frozen=True, eq=False)
class Group:
    """Points that share everything but column fields.

    Attributes
    ----------
    common : (dotted path, value) of what they share
    fields : dotted paths of the column fields that vary
    ids : index of each point in the sweep ``[points]``
    values : of the column fields ``[fields][points]``
    """

    common: tuple[tuple[str, Any], ...]
    fields: tuple[str, ...]
    ids: IntArray
    values: tuple[Coded, ...]

    @property
    def settings(self) -> tuple[tuple[str, Any], ...]:
        """Everything set for the whole group: what is shared, and column fields opened to all their values."""
        opened = [
            (path, coded.choices[0] if len(coded.choices) == 1 else list(coded.choices))
            for path, coded in zip(self.fields, self.values, strict=True)
        ]
        return (*self.common, *opened)

    def column(self, path: str) -> Coded | None:
        """What its points set a field to; None where they leave it as it is in the job."""
        if path in self.fields:
            return self.values[self.fields.index(path)]
        own = dict(self.common)
        return Coded((own[path],), np.zeros(len(self.ids), dtype=np.int64)) if path in own else None

    def part(self, points: slice) -> Group:
        """Some of its points."""
        return Group(self.common, self.fields, self.ids[points], tuple(each.take(points) for each in self.values))


def column_field(path: str) -> tuple[Role, str] | None:
    """Role and name of a column field, or None.

    >>> column_field("pools.trainer.layout.tensor_parallel"), column_field("nodes")
    (('trainer', 'tensor_parallel'), None)
    """
    parts = path.split(".")
    if len(parts) != 4 or parts[0] != "pools" or parts[1] not in COLUMN_FIELDS:
        return None
    role: Role = "rollout" if parts[1] == "rollout" else "trainer"
    return (role, parts[3]) if PLACES[role].get(parts[3]) == parts[2] else None


def groups_of(checked: Checked) -> Iterator[Group]:
    """Every group of a sweep; each point is in exactly one.

    Points are numbered entry by entry of the list, and within it by the grid with its last axis fastest.
    """
    if checked.sweep.method == "plan":
        yield from _one_by_one(checked)
        return
    sizes = [len(values) for _, values in checked.axes]
    strides = [math.prod(sizes[k + 1 :]) for k in range(len(sizes))]
    per_entry = math.prod(sizes)
    inner = [k for k, (path, values) in enumerate(checked.axes) if column_field(path) and all(map(_scalar, values))]
    outer = [k for k in range(len(sizes)) if k not in inner]
    outer.sort(key=lambda k: checked.axes[k][0] in CHEAP)
    paths = tuple(checked.axes[k][0] for k in inner)
    wide = [sizes[k] for k in inner]
    codes = np.indices(wide, dtype=np.int32).reshape(len(inner), math.prod(wide))
    offsets = np.array([strides[k] for k in inner], dtype=np.int64) @ codes
    for shared, fields, members in _entry_groups(checked):
        entries = np.array([entry for entry, _ in members], dtype=np.int64) * per_entry
        own = (Coded.of([values[k] for _, values in members]) for k in range(len(fields)))
        crossed = (
            *(Coded(each.choices, np.repeat(each.code, len(offsets))) for each in own),
            *(Coded(checked.axes[k][1], np.tile(code, len(members))) for k, code in zip(inner, codes, strict=True)),
        )
        for at in itertools.product(*(range(sizes[k]) for k in outer)):
            start = sum(strides[k] * i for k, i in zip(outer, at, strict=True))
            common = tuple((checked.axes[k][0], checked.axes[k][1][i]) for k, i in zip(outer, at, strict=True))
            ids = (entries[:, None] + (start + offsets)[None, :]).reshape(-1)
            yield Group((*shared, *common), (*fields, *paths), ids, crossed)


def _scalar(value: Any) -> bool:
    return isinstance(value, str | int | float | bool)


Members = list[tuple[int, tuple[Any, ...]]]


def _entry_groups(checked: Checked) -> Iterator[tuple[tuple[tuple[str, Any], ...], tuple[str, ...], Members]]:
    """Entries of the list that share all but column fields: (what they share, column fields, members)."""
    found: dict[str, tuple[tuple[tuple[str, Any], ...], tuple[str, ...], Members]] = {}
    for index, entry in enumerate(checked.entries):
        own = sorted((path, value) for path, value in entry if column_field(path) and _scalar(value))
        shared = tuple((path, value) for path, value in entry if (path, value) not in own)
        fields = tuple(path for path, _ in own)
        slot = found.setdefault(repr((sorted(shared, key=repr), fields)), (shared, fields, []))
        slot[2].append((index, tuple(value for _, value in own)))
    for shared, fields, members in found.values():
        for part in _dense(members, len(fields)):
            yield shared, fields, part


def _dense(members: Members, fields: int) -> Iterator[Members]:
    """Members in parts whose opened fields do not multiply far beyond the points that are asked for."""
    opened = math.prod(len({row[k] for _, row in members}) for k in range(fields))
    if len(members) == 1 or opened <= SPARSE * len(members):
        yield members
        return
    members = sorted(members, key=lambda member: [(str(type(v)), v) for v in member[1]])
    middle = len(members) // 2
    yield from _dense(members[:middle], fields)
    yield from _dense(members[middle:], fields)


def _one_by_one(checked: Checked) -> Iterator[Group]:
    index = 0
    for entry in checked.entries:
        for values in itertools.product(*(values for _, values in checked.axes)):
            paths = (path for path, _ in checked.axes)
            yield Group((*entry, *zip(paths, values, strict=True)), (), np.array([index]), ())
            index += 1
