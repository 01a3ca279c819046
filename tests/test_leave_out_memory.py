"""Peak memory with whole stacks left out of the fit of working sets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlperf.calibrate.leave_out import ALL, leave_out
from rlperf.calibrate.leave_out_memory import PeakRows
from rlperf.calibrate.trainer_fits import MEMORY_KNOBS
from rlperf.calibrate.trainers.rows import TrainingRow, calibration_part, digest, read_training_rows
from rlperf.specs.trainer_calibration import load_trainer


@pytest.fixture(scope="module")
def rows(measured_data: Path) -> list[TrainingRow]:
    return [row for row in read_training_rows(measured_data / "measured" / "training.csv")[0] if row.peak_bytes]


@pytest.mark.slow
@pytest.mark.data
def test_peaks_of_frameworks_left_out(measured_data: Path) -> None:
    found = leave_out(measured_data / "measured" / "training.csv", "memory", "framework")
    lines = {line.group: line for line in found.lines}
    assert lines[ALL].left_out.median <= 3.0
    assert lines[ALL].left_out.mean <= 6.0
    assert lines["torchtitan (FSDP2)"].in_fit == 0
    assert lines["torchtitan (FSDP2)"].seen == lines["torchtitan (FSDP2)"].left_out
    prime = lines["prime-rl (PyTorch FSDP2)"]
    assert prime.in_fit > 0
    assert prime.left_out.mean > prime.seen.mean  # its own rows helped


@pytest.mark.data
def test_a_fit_without_rows_is_what_is_judged(rows: list[TrainingRow]) -> None:
    part = calibration_part(rows)
    peaks = PeakRows(tuple(rows), tuple(digest(row.configuration) in part for row in rows))
    bare = peaks.fitted(frozenset(row.row_id for row in rows))
    for name, knobs in MEMORY_KNOBS.items():
        for knob in knobs:
            assert knob.read(bare[name]) == pytest.approx(np.sqrt(knob.low * knob.high))
    assert any(knob.read(load_trainer("fsdp2")) != knob.read(bare["fsdp2"]) for knob in MEMORY_KNOBS["fsdp2"])
