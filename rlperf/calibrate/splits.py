"""Which measured rows were at hand when constants and forms were settled, and which came afterwards.

A row is one of these. *Fitted*: a fit saw it; the calibrations list these, and no summary counts them. *Held out*: no
fit saw it, but its group was in view when the forms of the cost functions were chosen. *New*: its group came later and
nobody had it in view; an error there is that of a forecast. Timings of kernels know one more: the constants were told
of the *same series*, and no list says of which of its rows. These are never summed up together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from rlperf.calibrate.tables import Row
from rlperf.specs.profiles import profile_root
from rlperf.specs.reader import read_document

HELD_OUT, NEW, SAME_SERIES = "held out", "new", "same series"
FILE = "measured_groups.yaml"


@dataclass(frozen=True)
class RowGroup:
    """A group of rows that was at hand; rows all of whose cells agree with one entry of ``later`` were not."""

    name: str
    later: tuple[tuple[tuple[str, tuple[str, ...]], ...], ...] = ()

    def holds(self, row: Row) -> bool:
        """Whether a row of this group was at hand."""
        return not any(all(row.text(column) in texts for column, texts in entry) for entry in self.later)


@cache
def groups_at_hand() -> dict[str, dict[str, RowGroup]]:
    """Groups by kind of measurement and by name, from the shipped ``calibrations/measured_groups.yaml``.

    >>> "verl" in groups_at_hand()["rl_step"]
    True
    """
    data = read_document(profile_root() / "calibrations" / FILE).data
    return {kind: {name: _group(name, later or ()) for name, later in found.items()} for kind, found in data.items()}


def _group(name: str, later: Iterable[dict[str, Any]]) -> RowGroup:
    entries = (tuple((column, tuple(map(str, texts))) for column, texts in entry.items()) for entry in later)
    return RowGroup(name, tuple(entries))


def is_new(kind: str, row: Row) -> bool:
    """Whether nobody had the row in view; never so for kinds that leave out a part of each table (kernels, logs)."""
    known = groups_at_hand().get(kind)
    if known is None:
        return False
    group = known.get(row.group)
    return group is None or not group.holds(row)
