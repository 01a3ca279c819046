"""How much of a calibration's error is a layout's own? ``python studies/measured_best/own_share.py``.

Configurations that differ in their layout alone share device, software, architecture and lengths: what is left among
their errors is the layouts' own. Its spread over the calibration's is `rlperf.sim.rl_step.uncertainty.OWN_SHARE`. Needs
the measured data; a minute of one core. Engines' constants saw their rows, so the rollout's share is a lower bound.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import training
from run import measured_folder

from rlperf.calibrate.columns import read_all
from rlperf.calibrate.tables import read_table
from rlperf.calibrate.trainers.costs import predict_seconds
from rlperf.calibrate.trainers.rows import TrainingRow
from rlperf.calibrate.validate import validate_file
from rlperf.layout import FloatArray
from rlperf.sim.rl_step.uncertainty import log_sigma

ALIKE = (
    "engine",
    "engine_version",
    "architecture",
    "gpu",
    "gemm_dtype",
    "kv_dtype",
    "mode",
    "isl",
    "osl",
    "concurrency",
)
DEGREES = ("tensor_parallel", "pipeline_parallel", "expert_parallel", "attention_data_parallel")
"""Columns of serving rows that are equal in a set, and those that tell its layouts apart."""


def share(sets: Iterable[tuple[FloatArray, float]]) -> str:
    """Pooled spread inside the sets over the calibrations' sigma, in words."""
    squares = freedom = sigmas = count = 0.0
    for errors, sigma in sets:
        squares += float(((errors - errors.mean()) ** 2).sum())
        freedom, sigmas, count = freedom + len(errors) - 1, sigmas + (len(errors) - 1) * sigma**2, count + 1
    inside, sigma = np.sqrt(squares / freedom), np.sqrt(sigmas / freedom)
    return f"{inside / sigma:.2f} ({inside:.3f} of {sigma:.3f}; {count:.0f} sets, {freedom:.0f} degrees of freedom)"


def training_sets(path: Path) -> list[tuple[FloatArray, float]]:
    """ln(measured / predicted) of updates in sets of layouts that no fit saw, and their calibration's sigma."""
    rows = [row for row in read_all(TrainingRow, read_table(path))[0] if row.update_s]
    errors = np.log([row.update_s for row in rows]) - np.log(predict_seconds(rows))
    members = [each for each in training.sets_of(rows) if not any(rows[i].used for i in each)]
    return [(errors[m], float(log_sigma(rows[m[0]].trainer.low, rows[m[0]].trainer.high))) for m in members]


def serving_sets(path: Path) -> list[tuple[FloatArray, float]]:
    """The same of times per output token, one mean error of each layout."""
    cells = {row.row_id: dict(row.cells) for row in read_table(path)}
    found: dict[tuple[str, ...], dict[tuple[str, ...], list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for one in validate_file(path, "inference").predictions:
        if one.metric == "tpot_ms":
            row = cells[one.row_id]
            key = (one.group, *(row[name] for name in ALIKE))
            error = float(np.log(one.measured / one.predicted)), float(log_sigma(one.low, one.high))
            found[key][tuple(row[name] for name in DEGREES)].append(error)
    return [
        (np.array([np.mean([e for e, _ in each]) for each in layouts.values()]), next(iter(layouts.values()))[0][1])
        for layouts in found.values()
        if len(layouts) > 1
    ]


if __name__ == "__main__":
    folder = measured_folder()
    print(f"rollout: {share(serving_sets(folder / 'inference.csv'))}")
    print(f"training: {share(training_sets(folder / 'training.csv'))}")
