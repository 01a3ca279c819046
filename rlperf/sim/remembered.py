"""Results that are kept by the values that they were made from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")
Key = tuple[Hashable, ...]


class Remembered(Generic[Value]):
    """The last ``most`` results by key; None: all.

    >>> found = Remembered[int](most=1)
    >>> [found.get((key,), lambda: number) for number, key in enumerate("aaba")]
    [0, 0, 2, 3]
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._held: OrderedDict[Key, Value] = OrderedDict()

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """The value of ``key``, made when it is not there; several threads may ask."""
        try:
            self._held.move_to_end(key)
            return self._held[key]
        except KeyError:
            pass
        value = self._held[key] = make()
        if self._most is not None and len(self._held) > self._most:
            self._held.popitem(last=False)
        return value
