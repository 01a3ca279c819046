"""Dotted paths into a job: ``nodes``, ``tasks.math.group_size``, ``tasks.*.workload``, ``pools.trainer.devices``."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from rlperf.errors import did_you_mean

NAMES = {"tasks": "name", "pools": "role"}
"""Lists of a job, and the field that names their entries."""


def with_values(data: dict[str, Any], values: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """A copy of a job's data with fields replaced; pools that are not there yet are made.

    >>> with_values({"nodes": 1, "tasks": [{"name": "math", "group_size": 8}]}, (("tasks.math.group_size", 4),))
    {'nodes': 1, 'tasks': [{'name': 'math', 'group_size': 4}]}

    Raises
    ------
    ValueError : a path leads nowhere; with what is there
    """
    changed = deepcopy(data)
    for path, value in values:
        if not isinstance(path, str):
            raise ValueError(f"a dotted path is due, such as 'tasks.*.group_size' (given: {path!r})")
        parts = path.split(".")
        for holder in _holders(changed, parts[:-1], path):
            holder[parts[-1]] = deepcopy(value)
    return changed


def _holders(data: dict[str, Any], parts: list[str], path: str) -> list[dict[str, Any]]:
    """The mappings that the last part of a path is a key of."""
    here: list[Any] = [data]
    for position, part in enumerate(parts):
        key = NAMES.get(parts[position - 1]) if position == 1 else None
        if key is not None:
            here = [entry for entries in here for entry in _entries(entries, key, part, path)]
            continue
        found = []
        for mapping in here:
            inner = mapping.setdefault(part, [] if position == 0 and part in NAMES else {})
            if part == "objective" and isinstance(inner, str):
                inner = mapping[part] = {"minimize": inner}
            if inner is None:
                inner = mapping[part] = {}
            if not isinstance(inner, dict | list):
                raise ValueError(f"{part} is {inner!r} and has no field below it")
            found.append(inner)
        here = found
    if any(isinstance(holder, list) for holder in here):
        raise ValueError(f"name an entry of {parts[-1]}, its number, or *")
    return here


def _entries(entries: list[dict[str, Any]], key: str, part: str, path: str) -> list[dict[str, Any]]:
    """The entries of a list that ``part`` names: by name or role, by number, or all."""
    if part == "*":
        return entries
    named = [entry for entry in entries if entry.get(key) == part]
    if named:
        return named
    if part.isdigit() and int(part) < len(entries):
        return [entries[int(part)]]
    if key == "role" and not part.isdigit():
        entries.append({"role": part})
        return [entries[-1]]
    known = [str(entry.get(key)) for entry in entries]
    hint = did_you_mean(part, known)
    raise ValueError(f"no entry {part!r} in {path.split('.')[0]}: {hint or 'there is ' + ', '.join(known)}")
