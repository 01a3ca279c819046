"""Measured tables as rlperf scores them, each once a process: several tests judge the same report.

With ``-n auto`` one worker gets all of them (`tests/conftest.py`).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from rlperf.calibrate.leave_out_inference import Refits, report_apart
from rlperf.calibrate.tables import read_table
from rlperf.calibrate.validate import Report, validate_file


@cache
def scored(file: Path, kind: str) -> Report:
    """Every row predicted by the shipped constants."""
    return validate_file(file, kind)


@cache
def refits(file: Path) -> Refits:
    """Served rows, and fits without a part of them."""
    return Refits(read_table(file))


def scored_apart(file: Path) -> Report:
    """Every served row predicted by a fit without its configuration."""
    return report_apart(file, refits(file))
