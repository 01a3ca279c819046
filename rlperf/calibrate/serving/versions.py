"""The version of a served row's engine where no cell says it: by the day it was measured, where a note has that."""

from __future__ import annotations

import re

from rlperf.calibrate.columns import Guess
from rlperf.calibrate.tables import Row

DAYS = (("vllm", "2025-10-02", "2025-12-02", "0.11"),)
"""Engine, first and last day on which a release was the newest (from memory of its list), and that release."""


def day_of(row: Row) -> str:
    """The day of the measurement as its note says it, year first; empty where it does not."""
    found = re.search(r"measured (\d{4}-\d\d-\d\d)", row.text("note"))
    return found.group(1) if found else ""


def version_of(row: Row) -> str | Guess[str]:
    """The newest version of the day; empty where nobody knows."""
    name, day = row.text("engine"), day_of(row)
    newest = (release for engine, first, last, release in DAYS if engine == name and first <= day <= last)
    found = next(newest, "")
    return Guess(found, "the newest of its day") if found else ""
