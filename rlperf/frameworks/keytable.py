"""Which keys a framework's configuration has, by version, with their defaults: one tab-separated table each.

Form of a table (package data ``facts/<framework>.tsv``)::

    # versions: 0.4 0.5 ... main
    [actor_rollout_ref.rollout]
    max_num_seqs <TAB> 1024 <TAB> -0.8 <TAB> <TAB>
    max_num_seqs <TAB> 256  <TAB> 0.9- <TAB> <TAB>

Columns: key below the section, default as JSON (empty: the key is optional and has none), first and last version
(empty: all), backend (empty: every one), type as the framework's own source states it (empty: the default's).

``# named: a.b`` says that users give ``a`` more sections like ``b``, under names of theirs; ``# free: a.`` that any key
may begin so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from rlperf.errors import Problem, SpecError, did_you_mean, nearest
from rlperf.specs.framework_names import FACTS
from rlperf.specs.releases import beyond, versions_of

Value = Any
"""A value in a configuration: bool, int, float, str, None, list or dict as JSON knows them."""
Flat = Mapping[str, Value]
"""A configuration as dotted keys."""


class Absent:
    """Default of an optional key that has none."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = Absent()


@dataclass(frozen=True)
class KeySpec:
    """One key in one version and backend."""

    key: str
    default: Value
    kind: str = ""
    choices: tuple[str, ...] = ()

    @property
    def open_map(self) -> bool:
        """Whether the key takes any keys below it."""
        return self.default in ("{}", {}) or self.kind == "map" or str(self.default).endswith(",{}}")

    def complaint(self, value: Value) -> str | None:
        """Why ``value`` is not legal here, or None.

        >>> KeySpec("n", 1, "int").complaint("eight")
        "'eight' is not a whole number"
        """
        if value is None or (isinstance(value, str) and "${" in value):
            return None
        kind = self.kind.rstrip("?") or _kind_of(self.default)
        if self.choices and value not in self.choices:
            return f"{value!r} is not one of {', '.join(self.choices)}"
        if kind in ("bool", "flag") and not isinstance(value, bool):
            return f"{value!r} is not true or false"
        if kind == "int" and (isinstance(value, bool) or not isinstance(value, int)):
            return f"{value!r} is not a whole number"
        if kind == "float" and (isinstance(value, bool) or not isinstance(value, int | float)):
            return None if _number(value) else f"{value!r} is not a number"
        if kind == "str" and isinstance(value, list | dict):
            return f"{value!r} is not text"
        return None


@dataclass(frozen=True)
class _Row:
    spec: KeySpec
    first: int
    last: int
    backend: str


@dataclass(frozen=True)
class KeyTable:
    """All keys of one framework."""

    framework: str
    versions: tuple[str, ...]
    rows: tuple[_Row, ...]
    free_prefixes: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    partial: frozenset[str] = frozenset()
    """Releases of which only what changed is known: a key that is not found may be one of theirs."""
    _views: dict[tuple[int, str], dict[str, KeySpec]] = field(default_factory=dict, compare=False, repr=False)

    def version(self, asked: str | None) -> str:
        """The tabulated version for what the user wrote: ``v0.9.0`` and ``0.9.2`` are 0.9, ``1`` is 1.0.

        None, ``main`` and what is newer than every release that is known are the last one (`read_as` says the latter).
        """
        newest = self.versions[-1]
        if asked in self.versions:
            return asked
        match = re.match(r"v?(\d+)(?:\.(\d+)|$)", str(asked))
        short = f"{match[1]}.{match[2] or 0}" if match else ""
        if short in self.versions:
            return short
        if asked in (None, "", "main") or len(self.versions) == 1 or beyond(asked, self.versions) > 0:
            return newest
        if match and self.partial:
            return self._nearest(int(match[1]), int(match[2] or 0))
        raise SpecError(
            Problem(
                f"{self.framework} version {asked!r} is not tabulated; known: {', '.join(self.versions)}",
                suggestion=None if match else did_you_mean(str(asked), self.versions),  # no number is a misspelt one
            )
        )

    def _nearest(self, major: int, minor: int) -> str:
        """The newest tabulated release that is not newer (the next is where something changed); else the oldest."""
        numbers = {each: tuple(map(int, each.split("."))) for each in self.versions if each[0].isdigit()}
        older = [each for each, number in numbers.items() if number <= (major, minor)]
        return older[-1] if older else self.versions[0]

    def keys(self, version: str, backend: str = "") -> Mapping[str, KeySpec]:
        """Every key of a version; with ``backend``, of that backend only."""
        index = self.versions.index(version)
        view = self._views.get((index, backend))
        if view is None:
            view = {
                row.spec.key: row.spec
                for row in self.rows
                if row.first <= index <= row.last and (not row.backend or not backend or row.backend == backend)
            }
            self._views[(index, backend)] = view
        return view

    def find(self, key: str, version: str, backend: str = "") -> KeySpec | None:
        """The key's specification; a key below an open map is legal and has no default of its own."""
        keys = self.keys(version, backend)
        if key in keys:
            return keys[key]
        for section in self.named:
            there = section.rpartition(".")[0] + "."
            if key.startswith(there) and not key.startswith(section + "."):
                return self.find(f"{section}.{key.removeprefix(there).partition('.')[2]}", version, backend)
        parent = key
        while "." in parent:
            parent = parent.rpartition(".")[0]
            above = keys.get(parent)
            if above is not None:
                return KeySpec(key, ABSENT) if above.open_map else None
        if key.startswith(self.free_prefixes) if self.free_prefixes else False:
            return KeySpec(key, ABSENT)
        return None

    def is_section(self, key: str, version: str) -> bool:
        """Whether keys stand below ``key``."""
        return any(name.startswith(key + ".") for name in self.keys(version))

    def lifetime(self, key: str) -> str | None:
        """In which versions the key exists, as text; None if in none."""
        spans = [(row.first, row.last) for row in self.rows if row.spec.key == key]
        if not spans:
            return None
        first, last = min(a for a, _ in spans), max(b for _, b in spans)
        if len(self.versions) == 1 or (first, last) == (0, len(self.versions) - 1):
            return "every version"
        return f"{self.versions[first]} to {self.versions[last]}" if first != last else self.versions[first]

    def suggestion(self, key: str, version: str, backend: str = "") -> str | None:
        """What an unknown key may have meant: another version's, another backend's, or a misspelling."""
        lived = self.lifetime(key)
        if lived:
            if key in self.keys(version):
                return f"not with backend {backend}"
            return f"exists in {lived}"
        names = self.keys(version, backend)
        leaf = key.rpartition(".")[2]
        same_leaf = [name for name in names if name.rpartition(".")[2] == leaf]
        if near := _alike(key, names):
            return f"did you mean {near}?"
        if len(same_leaf) == 1:
            return f"did you mean {same_leaf[0]}?"
        other = _alike(key, dict.fromkeys(row.spec.key for row in self.rows))
        return f"did you mean {other}, which exists in {self.lifetime(other)}?" if other else None

    def spans(self) -> Iterator[tuple[str, Value, str, str, str]]:
        """(key, default, first version, last version, backend) of every row, for the reference page."""
        for row in self.rows:
            yield row.spec.key, row.spec.default, self.versions[row.first], self.versions[row.last], row.backend


def _alike(key: str, names: Iterable[str]) -> str | None:
    """The name most like a key, of those whose own last part is like the key's: a section alone makes no two alike."""
    leaf = key.rpartition(".")[2]
    close = [name for name in names if name[:1] == key[:1] and nearest(leaf, (name.rpartition(".")[2],))]
    return nearest(key, close)


def _kind_of(default: Value) -> str:
    if isinstance(default, bool):
        return "bool"
    # A default that prints as a whole number does not make its key one: top_p 1, weight_decay 0.
    return "float" if isinstance(default, int | float) else ""


def _number(value: Value) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def parse_table(text: str, framework: str) -> KeyTable:
    """A table from its text."""
    versions: tuple[str, ...] = ()
    free: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    section = ""
    rows: list[_Row] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("# versions:"):
            versions = tuple(line.partition(":")[2].split())
        elif line.startswith("# partial:"):
            partial = tuple(line.partition(":")[2].split())
        elif line.startswith("# free:"):
            free = tuple(line.partition(":")[2].split())
        elif line.startswith("# named:"):
            named = tuple(line.partition(":")[2].split())
        elif line.startswith("["):
            section = line[1:-1] + "." if len(line) > 2 else ""
        elif line and not line.startswith("#"):
            name, default, span, backend, kind = (*line.split("\t"), "", "", "", "")[:5]
            try:
                rows.append(_row(section + name, default, span, backend, kind, versions))
            except ValueError as error:  # no listed version, or a default that is no JSON
                raise SpecError(Problem(f"{name}: {error}", f"{framework}.tsv", number)) from error
    return KeyTable(framework, versions, tuple(rows), free, named, frozenset(partial))


def _row(key: str, default: str, span: str, backend: str, kind: str, versions: tuple[str, ...]) -> _Row:
    holds = versions_of(span, versions)
    low, high = versions.index(holds[0]), versions.index(holds[-1])
    kind, _, choices = kind.partition(":")
    value = json.loads(default) if default else ABSENT
    return _Row(KeySpec(key, value, kind, tuple(choices.split("|")) if choices else ()), low, high, backend)


@cache
def key_table(framework: str) -> KeyTable:
    """The shipped table of a framework."""
    return parse_table((FACTS / f"{framework}.tsv").read_text(encoding="utf-8"), framework)


def flatten(data: Mapping[str, Value], prefix: str = "") -> dict[str, Value]:
    """Nested mapping as dotted keys; an empty mapping stays a value.

    >>> flatten({"a": {"b": 1, "c": {}}})
    {'a.b': 1, 'a.c': {}}
    """
    flat: dict[str, Value] = {}
    for name, value in data.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def sections(keys: Iterable[str]) -> set[str]:
    """Every section that one of some dotted keys lies in.

    >>> sorted(sections(["actor.optim.lr", "name"]))
    ['actor', 'actor.optim']
    """
    return {key[:at] for key in keys for at, char in enumerate(key) if char == "."}
