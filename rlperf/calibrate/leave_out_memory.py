"""Peak memory with a framework, release, device or model family left out: working sets fitted again, rows predicted.

Backends without a fit of memory (all but those of `MEMORY_KNOBS`) are counted, not fitted: both sides say the same of
them, and ``in_fit`` is 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlperf.calibrate.columns import read_all
from rlperf.calibrate.leave_out import LeftOutGroup, group_of, in_turn
from rlperf.calibrate.tables import Table
from rlperf.calibrate.trainer_fits import MEMORY_KNOBS
from rlperf.calibrate.trainers.costs import descend, middle
from rlperf.calibrate.trainers.rows import TrainingRow, calibration_part, digest
from rlperf.calibrate.validate import PredictedFigure
from rlperf.calibrate.validate_memory import peak_figure, predict_peaks
from rlperf.layout import FloatArray
from rlperf.specs.trainer_calibration import TrainerCalibration, load_trainer
from rlperf.told import Tell, quiet

RIDGE = 0.02
"""Pull to the start, as `rlperf.calibrate.trainer_fits.fit_memory` has it."""


@dataclass(frozen=True)
class PeakRows:
    """Rows with a measured peak, and which of them fits may see."""

    rows: tuple[TrainingRow, ...]
    in_part: tuple[bool, ...]

    def fitted(self, without: frozenset[str]) -> dict[str, TrainerCalibration]:
        """Backends with their working sets fitted to rows that are not ``without``; from no row, as judged."""
        found = {}
        for name, knobs in MEMORY_KNOBS.items():
            seen = [
                row
                for row, used in zip(self.rows, self.in_part, strict=True)
                if used and row.trainer.id == name and row.row_id not in without
            ]
            start = middle(load_trainer(name), knobs)
            if not seen:
                found[name] = start
                continue

            def predict(candidate: TrainerCalibration, seen: Sequence[TrainingRow] = seen) -> FloatArray:
                return predict_peaks(list(seen), candidate)

            measured = np.array([row.peak_bytes for row in seen])
            found[name] = descend(
                start, knobs, predict, measured, [row.configuration for row in seen], ridge=RIDGE
            ).trainer
        return found

    def figures(self, members: Sequence[int], fitted: Mapping[str, TrainerCalibration]) -> tuple[PredictedFigure, ...]:
        """The rows ``members``, predicted with fitted backends, or with what is shipped where none is fitted."""
        rows = [self.rows[i] for i in members]
        predicted = np.zeros(len(rows))
        for name in {row.trainer.id for row in rows}:
            own = [i for i, row in enumerate(rows) if row.trainer.id == name]
            predicted[own] = predict_peaks([rows[i] for i in own], fitted.get(name))
        return tuple(peak_figure(row, float(value)) for row, value in zip(rows, predicted, strict=True))


def predict_groups(path: Path, table: Table, by: str, tell: Tell = quiet) -> list[LeftOutGroup]:
    """Peaks of every group's rows outside the calibration part, with and without the group in the fit."""
    table.need("framework", "architecture", "gpu", "n_gpus", "measured_peak_memory_gb")
    found = tuple(row for row in read_all(TrainingRow, table)[0] if row.peak_bytes)
    part = calibration_part(found)
    peaks = PeakRows(found, tuple(digest(row.configuration) in part for row in found))
    names = np.array([group_of(row.row, by) for row in found])
    whole = peaks.fitted(frozenset())
    groups = []
    for name in in_turn(sorted(set(names.tolist()) - {""}), tell):
        members = np.flatnonzero(names == name)
        scored = [int(i) for i in members if not peaks.in_part[i]]
        if scored:
            without = frozenset(found[i].row_id for i in members)
            fits = {digest(found[i].configuration) for i in members
                    if peaks.in_part[i] and found[i].trainer.id in MEMORY_KNOBS}  # fmt: skip
            left = peaks.fitted(without) if fits else whole
            groups.append(LeftOutGroup(name, len(fits), peaks.figures(scored, whole), peaks.figures(scored, left)))
    return groups
