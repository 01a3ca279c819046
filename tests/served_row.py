"""One served row, as the table of a user or a publication has it, read as a case."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from rlperf.calibrate.serving.rows import ServingCase, case_of
from rlperf.calibrate.tables import read_table


def read_row(folder: Path, cells: Mapping[str, str]) -> ServingCase:
    """The cells as a table of one row, written to ``folder`` and read."""
    path = folder / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, cells)
        writer.writeheader()
        writer.writerow(cells)
    return case_of(next(iter(read_table(path))))
