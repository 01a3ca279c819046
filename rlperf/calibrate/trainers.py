"""Predict training rows in batches and fit a backend's constants on the calibration part of the configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

import numpy as np

from rlperf.calibrate.trainer_rows import TrainingRow
from rlperf.cost.batching import Microbatches
from rlperf.cost.training import PARTS, TrainingCost, training_update
from rlperf.layout import FloatArray, Layout
from rlperf.specs.trainer_calibration import TrainerCalibration

Trainers = Mapping[str, TrainerCalibration]


def stack(layouts: Sequence[Layout], batches: Sequence[Microbatches]) -> tuple[Layout, Microbatches]:
    """Scalar layouts and microbatches as flat columns."""
    columns = {f.name: np.array([getattr(layout, f.name) for layout in layouts]).ravel() for f in fields(Layout)}
    numbers = (np.array([getattr(batch, f.name) for batch in batches]).ravel() for f in fields(Microbatches))
    return Layout(**columns), Microbatches.of(*numbers)


def shared_arguments(row: TrainingRow) -> tuple[object, ...]:
    """What rows must share to be predicted in one call."""
    return (
        row.backend, row.architecture.name, row.device, row.dtype, row.lora_rank, row.chunked_loss,
        row.flash2, row.expert_overlap, row.recompute_experts,
    )  # fmt: skip


def batches_of(rows: Sequence[TrainingRow]) -> list[list[int]]:
    """Indices of rows by their shared arguments."""
    found: dict[tuple[object, ...], list[int]] = {}
    for index, row in enumerate(rows):
        found.setdefault(shared_arguments(row), []).append(index)
    return list(found.values())


def predict_costs(rows: Sequence[TrainingRow], trainers: Trainers | None = None) -> dict[int, TrainingCost]:
    """Cost of each batch of rows, by the index of its first row; see `predict_seconds` for flat seconds."""
    costs = {}
    for indices in batches_of(rows):
        first = rows[indices[0]]
        layout, batch = stack([rows[i].layout for i in indices], [rows[i].microbatches for i in indices])
        costs[indices[0]] = training_update(
            first.architecture, first.hardware, (trainers or {}).get(first.backend, first.trainer), layout, batch,
            dtype=first.dtype, lora_rank=first.lora_rank, chunked_loss=first.chunked_loss,
            attention_kernel="flash2" if first.flash2 else "flash", expert_overlap=first.expert_overlap,
        )  # fmt: skip
    return costs


def predict_parts(rows: Sequence[TrainingRow], trainers: Trainers | None = None) -> FloatArray:
    """Seconds of every row by part, ``[rows, parts]`` in the order of `rlperf.cost.training.PARTS`."""
    out = np.zeros((len(rows), len(PARTS)))
    costs = predict_costs(rows, trainers)
    for indices in batches_of(rows):
        cost = costs[indices[0]]
        for column, name in enumerate(PARTS):
            out[indices, column] = np.broadcast_to(getattr(cost, name), (len(indices),))
    return out


def predict_seconds(rows: Sequence[TrainingRow], trainers: Trainers | None = None) -> FloatArray:
    """Seconds of one optimizer update of every row ``[rows]``."""
    return np.asarray(predict_parts(rows, trainers).sum(axis=1))
