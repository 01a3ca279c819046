"""Which working sets of which backend are fitted, and the run that fits and writes them; seconds: `timing_fits`.

``python -m rlperf.calibrate.trainer_fits DATA OUT [BACKEND ...]`` reads ``DATA/measured/training.csv`` and
``DATA/memory/rl_lora_phases.csv``, fits the memory of every backend on its calibration part and writes
``OUT/<backend>.yaml``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import date

import numpy as np

from rlperf.calibrate.columns import read_all
from rlperf.calibrate.tables import read_table
from rlperf.calibrate.trainers.costs import Fit, Knob, asked_fit, descend, write_trainer
from rlperf.calibrate.trainers.rows import SPLIT_SEED, TrainingRow, calibration_part, digest, read_training_rows
from rlperf.calibrate.validate_memory import PhaseRow, phase_bytes, predict_peaks
from rlperf.layout import FloatArray
from rlperf.specs.trainer_calibration import TrainerCalibration, TrainerProvenance, load_trainer

PHASE_KNOBS = (
    Knob("workspace.recompute_dense", 1.0, 6.0),
    Knob("workspace.optimizer_scratch", 2.0, 9.0),
    Knob("workspace.fixed", 1e6, 2e9), Knob("workspace.context", 1e7, 1e9),
    Knob("workspace.context_per_multiprocessor", 1e6, 2e7), Knob("workspace.engine_asleep", 1e7, 2e9),
    Knob("workspace.engine_outside", 1e7, 2e9), Knob("workspace.engine_activation", 0.2, 2.0),
)  # fmt: skip
"""Fitted memory constants of LoRA training beside an engine, for bf16 and for nf4 base weights."""


MEMORY_KNOBS: dict[str, tuple[Knob, ...]] = {
    "megatron": (
        Knob("workspace.weight_scratch", 0.5, 4.0), Knob("workspace.loss_scratch", 0.1, 4.0),
        Knob("workspace.logit_bytes", 2.0, 12.0), Knob("workspace.fixed", 1e7, 2e9),
        Knob("workspace.backward_dense", 0.1, 2.0), Knob("workspace.backward_moe", 0.1, 2.0),
    ),
    "fsdp2": (
        Knob("workspace.recompute_dense", 1.0, 5.0), Knob("workspace.recompute_moe", 1.0, 8.0),
        Knob("workspace.gathered_layers", 1.0, 5.0), Knob("workspace.logit_bytes", 8.0, 24.0),
    ),
}  # fmt: skip
"""Fitted working sets by backend."""


def _others(trainer: TrainerCalibration, kind: str) -> tuple[TrainerProvenance, ...]:
    return tuple(entry for entry in trainer.provenance if not entry.source.startswith(kind))


def _provenance(fit: Fit, knobs: Sequence[Knob], file: str) -> TrainerProvenance:
    return TrainerProvenance(
        constants=tuple(knob.path for knob in knobs),
        source=f"memory fit to {file}: coordinate descent on mean |ln(predicted / measured)|",
        date=date.today().isoformat(),
        n=fit.configurations,
        spread=f"mean |ln ratio| {fit.after:.3f} (before {fit.before:.3f}) on {fit.rows} rows",
        rows=f"every third configuration of each group by digest, seed {SPLIT_SEED}; digests in the file",
    )


def fit_memory(trainer: TrainerCalibration, rows: Sequence[TrainingRow]) -> TrainerCalibration:
    """Fit a backend's working sets on the peaks of the calibration part; without peaks, the backend as it is."""
    mine = [row for row in rows if row.peak_bytes and row.trainer.id == trainer.id]
    part = calibration_part([row for row in rows if row.peak_bytes])
    seen = [row for row in mine if digest(row.configuration) in part]
    knobs = MEMORY_KNOBS.get(trainer.id)
    if not seen or not knobs:
        return trainer
    measured = np.array([row.peak_bytes for row in seen])

    def predict(candidate: TrainerCalibration) -> FloatArray:
        return predict_peaks(seen, candidate)

    fit = descend(trainer, knobs, predict, measured, [row.configuration for row in seen], ridge=0.02)
    provenance = _provenance(fit, knobs, "peaks in measured/training")
    return _with_memory(fit.trainer, measured / predict(fit.trainer), 0.07, seen, provenance)


def _with_memory(
    trainer: TrainerCalibration, ratio: FloatArray, least: float, seen: Sequence[TrainingRow | PhaseRow],
    provenance: TrainerProvenance,
) -> TrainerCalibration:  # fmt: skip
    """A backend with its memory fit: measured over predicted peaks give the interval, never narrower than ``least``."""
    return trainer.model_copy(
        update={
            "memory_low": min(float(np.quantile(ratio, 0.05)), 1.0 - least),
            "memory_high": max(float(np.quantile(ratio, 0.95)), 1.0 + least),
            "memory_configurations": tuple(sorted({digest(row.configuration) for row in seen})),
            "provenance": (*_others(trainer, "memory fit"), provenance),
        }
    )


def fit_phases(name: str, rows: Sequence[PhaseRow]) -> TrainerCalibration:
    """Fit memory of LoRA phases on every third configuration in digest order; both phases of one move together."""
    mine = [row for row in rows if row.trainer.id == name]
    order = sorted({digest(row.configuration) for row in mine})
    part = frozenset(order[2::3])
    seen = [row for row in mine if digest(row.configuration) in part]

    def predict(candidate: TrainerCalibration) -> FloatArray:
        return np.array([phase_bytes(row, candidate) for row in seen])

    measured = np.array([row.peak_bytes for row in seen])
    names = [f"{row.configuration}{row.phase}" for row in seen]
    fit = descend(load_trainer(name), PHASE_KNOBS, predict, measured, names, ridge=0.01)
    provenance = _provenance(fit, PHASE_KNOBS, "memory/rl_lora_phases.csv")
    return _with_memory(fit.trainer, measured / predict(fit.trainer), 0.05, seen, provenance)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit and write; see the module."""
    asked = asked_fit(__doc__, arguments)
    rows, _ = read_training_rows(asked.data / "measured" / "training.csv")
    phases, _ = read_all(PhaseRow, read_table(asked.data / "memory" / "rl_lora_phases.csv"))
    for name in asked.backends or [*MEMORY_KNOBS, "peft", "peft_nf4"]:
        trainer = fit_phases(name, phases) if name.startswith("peft") else fit_memory(load_trainer(name), rows)
        write_trainer(trainer, asked.out / f"{name}.yaml")
        sys.stdout.write(f"{name}: {trainer.provenance[-1].spread}\n")


if __name__ == "__main__":
    main()
