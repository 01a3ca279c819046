"""Fields of a foreign configuration: every one that is missing or wrong is noted, none raises on its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from rlperf.errors import Problem

_LARGEST = 1e12
Line = Callable[[tuple[str | int, ...]], int | None]


class Fields:
    """Reads values of a mapping under any of several names; ``problems`` gathers what is wrong.

    >>> fields = Fields({"n_embd": 768, "n_layer": "12"}, file="config.json")
    >>> fields.need("hidden_size", "n_embd"), fields.need("num_hidden_layers", "n_layer")
    (768, 1)
    >>> [str(problem) for problem in fields.problems]
    ["config.json: n_layer: '12' is not a whole number"]
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        file: str | None = None,
        line: Line | None = None,
        prefix: tuple[str, ...] = (),
        problems: list[Problem] | None = None,
    ) -> None:
        self.data = data
        self.problems: list[Problem] = [] if problems is None else problems
        self._file, self._line, self._prefix = file, line, prefix
        self._asked: set[str] = set()

    def child(self, key: str) -> Fields:
        """The fields of a nested mapping; its problems join this one's."""
        self._asked.add(key)
        value = self.data.get(key)
        if not isinstance(value, Mapping):
            self.note(key, f"{value!r} is not an object")
            value = {}
        return self.beside(value, key)

    def beside(self, data: Mapping[str, Any], *path: str) -> Fields:
        """Fields of ``data``, whose problems join this one's as of ``path`` in it."""
        return Fields(data, self._file, self._line, (*self._prefix, *path), self.problems)

    def note(self, key: str, message: str, suggestion: str | None = None) -> None:
        """Record a problem at ``key``, each only once."""
        path = (*self._prefix, key)
        where = self._line(path) if self._line else None
        problem = Problem(f"{'.'.join(path)}: {message}", self._file, where, suggestion)
        if problem not in self.problems:
            self.problems.append(problem)

    def has(self, *names: str) -> bool:
        """Whether one of ``names`` is given and not null."""
        return self._found(names) is not None

    def _found(self, names: tuple[str, ...]) -> str | None:
        self._asked.update(names)
        return next((name for name in names if self.data.get(name) is not None), None)

    def unread(self, wanted: str, harmless: str) -> list[str]:
        """Given fields that nobody asked for whose name has a part of ``wanted`` and none of ``harmless``.

        >>> Fields({"ssm_state": 8, "moe_aux_loss": 0.1, "moe_hash": 3}).unread("ssm|moe", "loss")
        ['moe_hash', 'ssm_state']
        """
        given = (key for key, value in self.data.items() if value not in (None, 0, False, "", [], {}))
        left = (key for key in given if key not in self._asked and re.search(wanted, key))
        return sorted(key for key in left if not re.search(harmless, key))

    def need(self, *names: str) -> int:
        """A positive whole number under the first of ``names`` that is given; noted where missing or wrong."""
        name = self._found(names)
        if name is None:
            also = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
            self.note(names[0], f"is missing{also}")
            return 1
        value = self._whole(name)
        if value is not None and value < 1:
            self.note(name, f"must be at least 1 (given: {value})")
        return max(value, 1) if value is not None else 1

    def optional(self, *names: str, default: int = 0) -> int:
        """A whole number >= 0 where given and not null, else ``default``."""
        name = self._found(names)
        if name is None:
            return default
        value = self._whole(name)
        if value is not None and value < 0:
            self.note(name, f"must not be negative (given: {value})")
        return default if value is None else max(value, 0)

    def side(self, name: str, *, default: int = 0) -> int:
        """A size of an image or a patch, which may be written as a list of height and width.

        >>> Fields({"image_size": [448, 448]}).side("image_size")
        448
        """
        value = self.listed(name)
        if isinstance(value, list) and value and isinstance(value[0], int) and value[0] > 0:
            return value[0]
        return self.optional(name, default=default)

    def _whole(self, name: str) -> int | None:
        value = self.data[name]
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole:
            self.note(name, f"{value!r} is not a whole number")
            return None
        if abs(value) > _LARGEST:
            self.note(name, "is larger than any real one")
            return None
        return int(value)

    def number(self, name: str, *, default: float) -> float:
        """A positive number where given, else ``default``."""
        value = self.data.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LARGEST:
            self.note(name, f"{value!r} is not a positive number")
            return default
        return float(value)

    def flag(self, *names: str, default: bool) -> bool:
        """True or false where given and not null, else ``default``."""
        name = self._found(names)
        if name is None:
            return default
        value = self.data[name]
        if not isinstance(value, bool):
            self.note(name, f"{value!r} is not true or false")
            return default
        return value

    def text(self, *names: str, default: str = "") -> str:
        """A text where given and not null, else ``default``."""
        name = self._found(names)
        if name is None:
            return default
        value = self.data[name]
        if not isinstance(value, str):
            self.note(name, f"{value!r} is not a text")
            return default
        return value

    def items(self, name: str) -> list[Any]:
        """A list where given and not null, else an empty one."""
        self._asked.add(name)
        value = self.data.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            self.note(name, f"{value!r} is not a list")
            return []
        return value

    def listed(self, name: str) -> Any:
        """A value as it stands."""
        self._asked.add(name)
        return self.data.get(name)

    def word_list(self, *names: str) -> tuple[str, list[str]] | None:
        """The first of ``names`` that is given, and its entries as words; None where none is."""
        name = self._found(names)
        return None if name is None else (name, [str(item) for item in self.items(name)])
