"""Releases of a framework: spans of them, and where one that is asked for stands beside those that are known."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

Told = TypeVar("Told")


def versions_of(span: str, versions: Sequence[str]) -> tuple[str, ...]:
    """Versions of a span: ``all`` or nothing, one of ``versions`` (in order), or ``first-last`` with either end open.

    Raises
    ------
    ValueError : the span names a version that is not listed

    >>> versions_of("2.0-", ("1.0", "2.0", "main")), versions_of("1.0", ("1.0", "2.0")), versions_of("all", ("1.0",))
    (('2.0', 'main'), ('1.0',), ('1.0',))
    """
    if span in ("", "all"):
        return tuple(versions)
    first, dash, last = span.partition("-")
    last = last if dash else first
    for named in (first, last):
        if named and named not in versions:
            raise ValueError(f"{named!r} is no listed version: {', '.join(versions)}")
    low = versions.index(first) if first else 0
    high = versions.index(last) if last else len(versions) - 1
    return tuple(versions[low : high + 1])


NEWEST = 1 << 30
"""Stands for the release of what has no number: main, a commit."""


def _number(text: str, otherwise: int) -> tuple[int, int]:
    """Major and minor number of a release, 0 where it has a major one alone; no commit is one."""
    found = re.match(r"v?(\d+)(?:\.(\d+)|$)", text.strip())
    return (int(found[1]), int(found[2] or 0)) if found else (otherwise, otherwise)


def in_release(spans: Mapping[str, Told], version: str) -> list[Told]:
    """What facts say of the spans of versions that a release is in."""
    found = []
    for span, value in spans.items():
        first, dash, last = ("", "-", "") if span == "all" else span.partition("-")
        least, most = _number(first, NEWEST if first else 0), _number(last if dash else first, NEWEST)
        if least <= _number(version, NEWEST) <= most:
            found.append(value)
    return found


def beyond(asked: str | None, versions: Sequence[str]) -> int:
    """1 for a release newer than every one of ``versions`` that has a number, -1 for an older one; else 0.

    >>> [beyond(asked, ("1.9", "1.16", "main")) for asked in ("1.17", "v1.16.2", "1.10", "1.8", "main", None, "2")]
    [1, 0, 0, -1, 0, 0, 1]
    """
    number, known = _number(asked or "", -1), [_number(each, -1) for each in versions if each[0].isdigit()]
    if number[0] < 0 or not known:
        return 0
    return (number > max(known)) - (number < min(known))


def read_as(name: str, asked: str | None, versions: Sequence[str]) -> str:
    """That a release newer than every known one is taken for the newest of them; empty for others.

    >>> read_as("trl", "1.17", ("1.9", "1.16"))
    'trl 1.17 is newer than every release that is known: taken for 1.16'
    """
    if beyond(asked, versions) < 1:
        return ""
    return f"{name} {asked} is newer than every release that is known: taken for {versions[-1]}"
