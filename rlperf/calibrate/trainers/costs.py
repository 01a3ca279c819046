"""Predict training rows in batches and fit a backend's constants on the calibration part of the configurations."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from rlperf.calibrate.trainers.rows import TrainingRow
from rlperf.calibrate.trainers.switches import recomputed
from rlperf.cost.batching import Microbatches
from rlperf.cost.trainer.update import PARTS, TrainingCost, training_update
from rlperf.layout import FloatArray, Layout
from rlperf.specs.trainer_calibration import TrainerCalibration


def stack(layouts: Sequence[Layout], batches: Sequence[Microbatches]) -> tuple[Layout, Microbatches]:
    """Scalar layouts and microbatches as flat columns."""
    columns = {f.name: np.array([getattr(layout, f.name) for layout in layouts]).ravel() for f in fields(Layout)}
    numbers = (np.array([getattr(batch, f.name) for batch in batches]).ravel() for f in fields(Microbatches))
    return Layout(**columns), Microbatches.of(*numbers)


def shared_arguments(row: TrainingRow) -> tuple[object, ...]:
    """What rows must share to be predicted in one call."""
    return (
        row.backend, row.architecture.name, row.device, row.hardware.cluster.devices_per_node, row.dtype,
        row.lora_rank, row.chunked_loss,
        row.flash2, row.switches, row.recompute_experts, recomputed(row.note),
        row.compiled, row.compiled_loss,
    )  # fmt: skip


def batches_of(rows: Sequence[TrainingRow]) -> list[list[int]]:
    """Indices of rows by their shared arguments."""
    found: dict[tuple[object, ...], list[int]] = {}
    for index, row in enumerate(rows):
        found.setdefault(shared_arguments(row), []).append(index)
    return list(found.values())


def predict_costs(rows: Sequence[TrainingRow]) -> dict[int, TrainingCost]:
    """Cost of each batch of rows, by the index of its first row; see `predict_seconds` for flat seconds."""
    costs = {}
    for indices in batches_of(rows):
        first = rows[indices[0]]
        layout, batch = stack([rows[i].layout for i in indices], [rows[i].microbatches for i in indices])
        costs[indices[0]] = training_update(
            first.architecture,
            first.hardware,
            first.trainer,
            layout,
            batch,
            first.options,
        )
    return costs


def predict_parts(rows: Sequence[TrainingRow]) -> FloatArray:
    """Seconds of every row by part, ``[rows, parts]`` in the order of `rlperf.cost.trainer.update.PARTS`."""
    out = np.zeros((len(rows), len(PARTS)))
    costs = predict_costs(rows)
    for indices in batches_of(rows):
        cost = costs[indices[0]]
        for column, name in enumerate(PARTS):
            out[indices, column] = np.broadcast_to(getattr(cost, name), (len(indices),))
    return out


def predict_seconds(rows: Sequence[TrainingRow]) -> FloatArray:
    """Seconds of one optimizer update of every row ``[rows]``."""
    return np.asarray(predict_parts(rows).sum(axis=1))


@dataclass(frozen=True)
class Knob:
    """One constant that a fit may move: where it stands, and how far from its start it is believed to lie."""

    path: str
    low: float
    high: float

    def read(self, trainer: TrainerCalibration) -> float:
        """Present value."""
        head, *rest = self.path.split(".")
        if head == "generations":
            return float(getattr(trainer.entry(rest[0]), rest[1]))
        return float(getattr(getattr(trainer, head), rest[0]))

    def write(self, trainer: TrainerCalibration, value: float) -> TrainerCalibration:
        """A copy with the constant replaced."""
        head, *rest = self.path.split(".")
        if head == "generations":
            entries = tuple(
                entry.model_copy(update={rest[1]: value}) if entry is trainer.entry(rest[0]) else entry
                for entry in trainer.generations
            )
            return trainer.model_copy(update={"generations": entries})
        part = getattr(trainer, head).model_copy(update={rest[0]: value})
        return trainer.model_copy(update={head: part})


@dataclass(frozen=True)
class Fit:
    """A fitted backend with its errors on the rows that it saw: mean |ln(predicted / measured)| before and after."""

    trainer: TrainerCalibration
    configurations: int
    rows: int
    before: float
    after: float


def middle(trainer: TrainerCalibration, knobs: Sequence[Knob]) -> TrainerCalibration:
    """A backend with every knob at the geometric mean of its bounds: what is believed of it without a row."""
    for knob in knobs:
        trainer = knob.write(trainer, float(np.sqrt(knob.low * knob.high)))
    return trainer


def descend(
    trainer: TrainerCalibration,
    knobs: Sequence[Knob],
    predict: Callable[[TrainerCalibration], FloatArray],
    measured: FloatArray,
    configurations: Sequence[str],
    *,
    ridge: float,
    sweeps: int = 3,
) -> Fit:
    """Coordinate descent on the mean |ln(predicted / measured)| of the configurations, with a pull to the start.

    Each knob in turn is moved on a shrinking grid of factors inside its bounds; ``ridge`` / n x (ln of the change)^2
    keeps constants that the rows do not determine where judgement put them. A configuration has one weight.
    """
    logs = np.log(measured)
    names, index = np.unique(list(configurations), return_inverse=True)
    weight = 1.0 / np.bincount(index)[index] / len(names)
    start = {knob.path: max(knob.read(trainer), 1e-12) for knob in knobs}

    def misfit(candidate: TrainerCalibration) -> float:
        return float((weight * np.abs(np.log(predict(candidate)) - logs)).sum())

    def loss(candidate: TrainerCalibration) -> float:
        moved = sum(np.log(max(knob.read(candidate), 1e-12) / start[knob.path]) ** 2 for knob in knobs)
        return misfit(candidate) + ridge / len(names) * float(moved)

    best, best_loss, before = trainer, loss(trainer), misfit(trainer)
    for sweep in range(sweeps):
        reach = 1.0 / 2.0**sweep
        for knob in knobs:
            here = max(knob.read(best), knob.low, 1e-9)
            for step in (-1.0, -0.5, -0.25, -0.1, 0.1, 0.25, 0.5, 1.0):
                value = float(np.clip(here * np.exp(step * reach), knob.low, knob.high))
                candidate = knob.write(best, value)
                found = loss(candidate)
                if found < best_loss - 1e-6:
                    best, best_loss = candidate, found
    return Fit(best, len(names), len(measured), before, misfit(best))


def asked_fit(does: str | None, arguments: Sequence[str] | None) -> argparse.Namespace:
    """``DATA OUT [BACKEND ...]`` of a command that fits trainers: folders `data` and `out`, names `backends`."""
    parser = argparse.ArgumentParser(description=does, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("backends", nargs="*")
    return parser.parse_args(arguments)


def write_trainer(trainer: TrainerCalibration, path: Path) -> None:
    """Write a backend's constants as YAML, fields that stand at their defaults left out, numbers to 4 digits."""
    import yaml

    from rlperf.specs.writer import write_atomic

    def short(value: object) -> object:
        if isinstance(value, float):
            return float(f"{value:.4g}")
        if isinstance(value, dict):
            return {key: short(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [short(item) for item in value]
        return _short_quantity(value) if isinstance(value, str) else value

    data = short(trainer.model_dump(mode="json", exclude_defaults=True))
    write_atomic(path, yaml.safe_dump(data, sort_keys=False, width=110, allow_unicode=True))


def _short_quantity(text: str) -> str:
    """``'0.0008912345 s'`` as ``'0.0008912 s'``; any other text as it is."""
    number, _, unit = text.partition(" ")
    try:
        return f"{float(number):.4g} {unit}" if unit in ("s", "B", "kB", "MB", "GB") else text
    except ValueError:
        return text
