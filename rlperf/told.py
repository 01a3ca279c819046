"""How work that takes its time says how far it is."""

from __future__ import annotations

from collections.abc import Callable

Tell = Callable[[float, str], None]
"""Called with the share done [1] and a text."""


def quiet(_share: float, _text: str) -> None:
    """Tells nobody."""


def within(report: Tell, start: float, share: float, name: str = "") -> Tell:
    """What reports a part of some work: its own share done is one of ``share`` from ``start`` on.

    >>> within(lambda done, text: print(done, text), 0.5, 0.25, "math: ")(0.5, "judging")
    0.625 math: judging
    """
    return lambda done, text: report(start + share * done, name + text)
