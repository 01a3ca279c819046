"""Training with a framework, release, device or model family left out: backends fitted again, their rows predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from rlperf.calibrate.columns import read_all
from rlperf.calibrate.leave_out import LeftOutGroup, group_of
from rlperf.calibrate.refit import Refit, Tangent, middle, refit, tangent
from rlperf.calibrate.tables import Table
from rlperf.calibrate.trainer_fits import HOPPER, KNOBS, RIDGE, interval_of
from rlperf.calibrate.trainer_rows import TrainingRow, calibration_part, digest
from rlperf.calibrate.trainers import Knob, predict_seconds
from rlperf.calibrate.validate import PredictedFigure
from rlperf.calibrate.validate_training import NEEDED, figure_of
from rlperf.specs.trainer_calibration import TrainerCalibration, load_trainer

RELATIVES: Mapping[str, tuple[str, ...]] = {
    "megatron": ("nemo", "megatron_bridge", "megatron_legacy"),
    "megatron_bridge": ("megatron_bridge_narrow", "nemo", "megatron"),
    "megatron_bridge_narrow": ("megatron_bridge", "megatron", "nemo"),
    "nemo": ("megatron_bridge", "megatron"),
    "megatron_legacy": ("megatron_deepspeed", "nemo"),
    "megatron_deepspeed": ("megatron_legacy", "nemo"),
    "fsdp2": ("automodel", "fsdp_llm_foundry"),
    "automodel": ("fsdp2", "fsdp_llm_foundry"),
    "fsdp_llm_foundry": ("fsdp2", "automodel"),
    "deepspeed_legacy": ("megatron_legacy", "megatron_deepspeed", "nemo"),
}
"""Whose constants stand in where none of a backend's rows is left: the same code by another name first, then age."""

RATE_OF_ANOTHER = ("fsdp2", "automodel")
"""Backends whose rate of products on Hopper is another's fit: fitted here too, or rows of that one would speak."""


def knobs_of(backend: str) -> tuple[Knob, ...]:
    """Constants that are forgotten and fitted again: those of `KNOBS`, and what was copied from another's fit."""
    return (*KNOBS[backend], *([Knob(f"{HOPPER}.sustained", 0.4, 1.1)] if backend in RATE_OF_ANOTHER else []))


def predict_groups(path: Path, table: Table, by: str) -> list[LeftOutGroup]:
    """Seconds of an optimizer update of every group's rows outside the calibration part, with and without the group.

    Seen: backends fitted on the calibration part of all rows. Left out: the same without any row of the group.
    """
    table.need(*NEEDED)
    found, _ = read_all(TrainingRow, table)
    rows = [row for row in found if row.update_s]
    part = calibration_part(rows)
    in_part = [digest(row.configuration) in part for row in rows]
    backends = [
        Backend(name, tuple(row for row, used in zip(rows, in_part, strict=True) if used and row.backend == name))
        for name in sorted({row.backend for row, used in zip(rows, in_part, strict=True) if used})
    ]
    names = np.array([group_of(row.row, by) for row in rows])
    whole = fit_stacks(backends, frozenset(), frozenset(row.backend for row in rows))
    groups = []
    for name in sorted(set(names.tolist()) - {""}):
        members = np.flatnonzero(names == name)
        scored = [rows[i] for i in members if not in_part[i]]
        if scored:
            without = frozenset(rows[i].row_id for i in members)
            left = fit_stacks(backends, without, frozenset(row.backend for row in scored), whole)
            groups.append(
                LeftOutGroup(
                    name=name,
                    in_fit=len({digest(rows[i].configuration) for i in members if in_part[i]}),
                    seen=_figures(scored, whole),
                    left_out=_figures(scored, left),
                    borrowed=", ".join(f"{own}: {relative}" for own, relative in left.borrowed.items()),
                )
            )
    return groups


def _figures(rows: Sequence[TrainingRow], stacks: Stacks) -> tuple[PredictedFigure, ...]:
    seconds = predict_seconds(rows, stacks.trainers)
    return tuple(
        figure_of(row, stacks.trainers[row.backend], float(value)) for row, value in zip(rows, seconds, strict=True)
    )


@dataclass(frozen=True)
class Stacks:
    """Backends fitted on some rows: by name, with those that had no row left and whose constants they have."""

    trainers: Mapping[str, TrainerCalibration]
    borrowed: Mapping[str, str]


@dataclass(frozen=True)
class Backend:
    """One backend's calibration rows with their tangent in the middle of its knobs' bounds, made when first asked."""

    name: str
    rows: tuple[TrainingRow, ...]

    @property
    def knobs(self) -> Sequence[Knob]:
        """Constants that fits may move."""
        return knobs_of(self.name)

    @cached_property
    def start(self) -> Tangent:
        """Where every fit of the backend starts."""
        return tangent(middle(load_trainer(self.name), self.knobs), self.rows, self.knobs)

    def fitted(self, without: frozenset[str]) -> TrainerCalibration | None:
        """Constants from the rows that are not ``without`` (their ids); None where no row is left."""
        keep = np.array([row.row_id not in without for row in self.rows], dtype=bool)
        if not keep.any():
            return None
        rows = [row for row, kept in zip(self.rows, keep, strict=True) if kept]
        found = refit(self.start.of(keep), rows, self.knobs, ridge=RIDGE)
        configurations = tuple(sorted({digest(row.configuration) for row in rows}))
        low, high = interval_of(np.exp(found.residual), len(configurations), len(self.knobs))
        update = {"low": low, "high": high, "configurations": configurations}
        return _undetermined_from_others(found, self.knobs).model_copy(update=update)


def _undetermined_from_others(found: Refit, knobs: Sequence[Knob]) -> TrainerCalibration:
    """Constants of a device of which no row is left: the geometric mean over this backend's other devices.

    The device counts as not measured from then on, which widens the interval.
    """
    trainer = found.trainer
    told = {knob.path for knob, known in zip(knobs, found.determined, strict=True) if known}
    entries = {path.split(".")[1] for path in told if path.startswith("generations.")}
    for knob in knobs:
        head, *rest = knob.path.split(".")
        if knob.path in told or head != "generations":
            continue
        others = [k for k in knobs if k.path in told and k.path.startswith("generations.") and k.path.endswith(rest[1])]
        if others:
            mean = float(np.exp(np.mean([np.log(other.read(trainer)) for other in others])))
            trainer = knob.write(trainer, float(np.clip(mean, knob.low, knob.high)))
    stranger = {knob.path.split(".")[1] for knob in knobs if knob.path.startswith("generations.")} - entries
    generations = tuple(
        each.model_copy(update={"measured": False}) if each.generation in stranger else each
        for each in trainer.generations
    )
    return trainer.model_copy(update={"generations": generations})


def fit_stacks(
    backends: Sequence[Backend], without: frozenset[str], wanted: frozenset[str], whole: Stacks | None = None
) -> Stacks:
    """Backends fitted without some rows; one that has no such row is ``whole``'s; ``wanted`` ones may borrow."""
    fitted: dict[str, TrainerCalibration | None] = {}

    by_name = {backend.name: backend for backend in backends}

    def one(name: str) -> TrainerCalibration | None:
        if name not in fitted:
            backend = by_name.get(name)
            if backend is None:
                fitted[name] = None
            elif whole is not None and not any(row.row_id in without for row in backend.rows):
                fitted[name] = whole.trainers[name]
            else:
                fitted[name] = backend.fitted(without)
        return fitted[name]

    trainers: dict[str, TrainerCalibration] = {}
    borrowed: dict[str, str] = {}
    for name in sorted(wanted):
        found = one(name)
        if found is None:
            relative = next((other for other in RELATIVES.get(name, ()) if one(other) is not None), "")
            kin = one(relative) if relative else None
            found = _borrowing(name, kin)
            borrowed[name] = relative or "no row at all"
        trainers[name] = found
    return Stacks(trainers, borrowed)


def _borrowing(name: str, relative: TrainerCalibration | None) -> TrainerCalibration:
    """A backend whose fitted constants and devices are its relative's; what was read of it, and storage, stay.

    The interval is twice as wide (in ln), as `rlperf.specs.trainer_calibration` has it.
    """
    own = middle(load_trainer(name), knobs_of(name))
    if relative is None:
        return own.model_copy(update={"low": 0.5, "high": 2.0, "configurations": ()})
    timing = [knob for knob in knobs_of(name) if not knob.path.startswith("generations.")]
    for knob in timing:
        own = knob.write(own, float(np.clip(knob.read(relative), knob.low, knob.high)))
    update = {"generations": relative.generations, "low": relative.low**2, "high": relative.high**2}
    return own.model_copy(update={**update, "configurations": ()})
