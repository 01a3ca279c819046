"""Dotted keys of a framework as the file that people write."""

from __future__ import annotations

from collections.abc import Iterable

from rlperf.frameworks.keytable import Value


def nest(flat: Iterable[tuple[str, Value]]) -> dict[str, Value]:
    """Dotted keys as a nested mapping, in order.

    >>> nest([("a.b", 1), ("a.c", 2)])
    {'a': {'b': 1, 'c': 2}}
    """
    tree: dict[str, Value] = {}
    for key, value in flat:
        here = tree
        *parents, leaf = key.split(".")
        for name in parents:
            below = here.get(name)
            if not isinstance(below, dict):
                below = here[name] = {}
            here = below
        here[leaf] = value
    return tree
