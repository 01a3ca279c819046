"""Which constants of which backend are fitted, and the run that fits and writes them.

``python -m rlperf.calibrate.trainer_fits DATA OUT [BACKEND ...]`` reads ``DATA/measured/training.csv`` and
``DATA/memory/rl_lora_phases.csv``, fits every backend on its calibration part and writes ``OUT/<backend>.yaml``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import numpy as np

from rlperf.calibrate.columns import read_all
from rlperf.calibrate.tables import read_table
from rlperf.calibrate.trainer_rows import SPLIT_SEED, TrainingRow, calibration_part, digest, read_training_rows
from rlperf.calibrate.trainers import Fit, Knob, calibration_rows, descend, fit_trainer, predict_seconds, write_trainer
from rlperf.calibrate.validate_memory import PhaseRow, phase_bytes, predict_peaks
from rlperf.layout import FloatArray
from rlperf.specs.trainer_calibration import TrainerCalibration, TrainerProvenance, load_trainer

HOPPER, AMPERE, BLACKWELL = "generations.Hopper", "generations.Ampere", "generations.Blackwell"
COLLECTIVE = Knob("timing.collective", 0.5, 4.0)
ELEMENTWISE = Knob("timing.elementwise", 0.4, 4.0)
MOE = (Knob("timing.moe_pass", 0.5, 4.0), Knob("timing.permute", 0.5, 6.0), Knob("timing.moe_layer", 1e-5, 3e-2))

KNOBS: dict[str, tuple[Knob, ...]] = {
    "megatron": (
        Knob(f"{BLACKWELL}.sustained", 0.4, 1.1), COLLECTIVE, ELEMENTWISE, Knob(f"{BLACKWELL}.attention", 0.4, 3.0),
        Knob("timing.gradient_bytes", 1.0, 40.0), *MOE,
    ),
    "megatron_legacy": (
        Knob(f"{AMPERE}.sustained", 0.4, 1.1), Knob(f"{AMPERE}.attention", 0.3, 3.0), COLLECTIVE, ELEMENTWISE,
        Knob("generations.Volta.sustained", 0.4, 1.1),
    ),
    "megatron_deepspeed": (
        Knob("timing.host_layer", 1e-4, 2e-3), Knob(f"{AMPERE}.sustained", 0.4, 1.1), COLLECTIVE, ELEMENTWISE,
        Knob(f"{AMPERE}.attention", 0.3, 3.0), Knob("timing.optimizer_bytes", 10.0, 80.0),
        Knob("timing.microbatch", 1e-5, 2e-2), Knob("timing.update", 1e-5, 3e-2), Knob("timing.host_norm", 2.0, 30.0),
    ),
    "fsdp_llm_foundry": (
        Knob(f"{AMPERE}.sustained", 0.4, 1.1), Knob(f"{HOPPER}.sustained", 0.4, 1.1),
        Knob(f"{HOPPER}.sustained_fp8", 0.3, 1.2), Knob(f"{AMPERE}.attention", 0.3, 4.0),
        Knob(f"{HOPPER}.attention", 0.3, 4.0), ELEMENTWISE, Knob("timing.cross_entropy_bytes", 8.0, 100.0), COLLECTIVE,
    ),
    "fsdp2": (
        Knob(f"{HOPPER}.attention", 0.5, 3.0),
        Knob(f"{HOPPER}.flash2", 0.5, 5.0),
        Knob(f"{BLACKWELL}.flash2", 0.5, 8.0), Knob(f"{BLACKWELL}.moe_layer", 1e-3, 1.0),
        Knob("generations.rtx_a6000.sustained", 0.3, 1.1), Knob("generations.rtx_a6000.flash2", 0.3, 3.0), ELEMENTWISE,
        Knob("timing.cross_entropy_bytes", 24.0, 200.0), Knob("timing.chunked_bytes", 24.0, 500.0),
        Knob("timing.contention", 0.01, 1.0), Knob("timing.lora_bytes", 2.0, 60.0),
        Knob("timing.lora_update", 1e-3, 1.0), Knob("timing.update", 1e-3, 1.0), *MOE,
    ),
    "nemo": (
        Knob(f"{HOPPER}.sustained_fp8", 0.4, 1.6), Knob(f"{HOPPER}.attention", 0.5, 4.0),
        Knob("timing.tensor_overlap", 0.05, 0.95), ELEMENTWISE, Knob("timing.lora_bytes", 0.5, 30.0),
        Knob("timing.pipeline_overlap", 0.05, 0.99), COLLECTIVE,
    ),
    "automodel": (
        Knob("timing.lora_bytes", 0.5, 30.0), *MOE[:2],
        Knob("timing.contention", 0.01, 1.0),
    ),
    "megatron_bridge": (
        *(Knob(f"generations.{name}.sustained_fp8", 0.7, 1.25) for name in ("gb200", "gb300", "b200_sxm", "b300_sxm")),
        Knob(f"{HOPPER}.sustained_fp8", 0.6, 1.1), Knob("generations.b300_sxm.sustained", 0.4, 1.1),
        Knob("generations.gb200.sustained", 0.4, 1.1), Knob(f"{HOPPER}.sustained", 0.4, 1.1),
        *(Knob(f"generations.{name}.sustained_fp4", 0.3, 1.5) for name in ("gb200", "gb300")),
        Knob("timing.tensor_overlap", 0.05, 0.95), ELEMENTWISE, Knob("timing.host_moe_layer", 1e-4, 4e-3),
        Knob("timing.graph_host", 0.1, 1.0), Knob("timing.host_norm", 2.0, 30.0), *MOE, COLLECTIVE,
        Knob("timing.lora_bytes", 0.5, 20.0),
    ),
    "megatron_bridge_narrow": (
        *MOE, COLLECTIVE, Knob("timing.host_moe_layer", 1e-4, 8e-3), ELEMENTWISE,
        *(Knob(f"generations.{name}.attention", 0.5, 4.0) for name in ("gb200", "b200_sxm", "b300_sxm")),
    ),
    "deepspeed_legacy": (Knob("timing.collective", 0.5, 20.0), Knob(f"{AMPERE}.sustained", 0.4, 1.1)),
}  # fmt: skip
"""Fitted timing constants by backend; what is not listed was read or judged."""

UNFITTED = (0.8, 1.25)
"""5th and 95th percentile of measured over predicted for a backend without a fit, as `TrainerCalibration` has them."""

RIDGE = 0.3
"""Pull to the start over the number of configurations: constants of thin evidence stay near judgement."""

SHARED: dict[str, tuple[str, ...]] = {}
"""Backends that differ from another in storage alone share its timing."""

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


def fit_backend(name: str, rows: Sequence[TrainingRow]) -> list[TrainerCalibration]:
    """Fit one backend's timing on the calibration part; with it the backends that share its constants."""
    members = (name, *SHARED.get(name, ()))
    seen = calibration_rows(rows, members)
    fit = fit_trainer(load_trainer(name), seen, KNOBS[name], ridge=RIDGE)
    ratio = np.array([row.update_s for row in seen]) / predict_seconds(seen, dict.fromkeys(members, fit.trainer))
    low, high = interval_of(ratio, fit.configurations, len(KNOBS[name]))
    used = tuple(sorted({digest(row.configuration) for row in seen}))
    timing = fit.trainer.model_copy(
        update={
            "low": low,
            "high": high,
            "configurations": used,
            "provenance": (*_others(fit.trainer, "timing fit"), _provenance(fit, KNOBS[name], "measured/training.csv")),
        }
    )
    shared = ("timing", "generations", "low", "high", "configurations", "provenance")
    copies = [
        load_trainer(other).model_copy(update={key: getattr(timing, key) for key in shared}) for other in members[1:]
    ]
    return [timing, *copies]


def interval_of(ratio: FloatArray, configurations: int, knobs: int) -> tuple[float, float]:
    """5th and 95th percentile of measured over predicted for rows that a fit did not see.

    The percentiles on those it saw, widened in the logarithm by 1.5 sqrt(1 + (10 + k) / n): few configurations say
    little, and k constants that were moved to meet them make the rows that were seen look better than others will be.
    As many constants as configurations leave no residual to read: no narrower then than a backend without a fit.
    """
    wider = 1.5 * np.sqrt(1.0 + (10.0 + knobs) / configurations)
    low, high = np.exp(np.quantile(np.log(ratio), [0.05, 0.95]) * wider)
    least = UNFITTED if configurations <= knobs else (0.92, 1.08)
    return min(float(low), least[0]), max(float(high), least[1])


def _others(trainer: TrainerCalibration, kind: str) -> tuple[TrainerProvenance, ...]:
    return tuple(entry for entry in trainer.provenance if not entry.source.startswith(kind))


def _provenance(fit: Fit, knobs: Sequence[Knob], file: str) -> TrainerProvenance:
    kind = "memory fit" if "memory" in file or "peaks" in file else "timing fit"
    return TrainerProvenance(
        constants=tuple(knob.path for knob in knobs),
        source=f"{kind} to {file}: coordinate descent on mean |ln(predicted / measured)|",
        date=date.today().isoformat(),
        n=fit.configurations,
        spread=f"mean |ln ratio| {fit.after:.3f} (before {fit.before:.3f}) on {fit.rows} rows",
        rows=f"every third configuration of each group by digest, seed {SPLIT_SEED}; digests in the file",
    )


def fit_memory(trainer: TrainerCalibration, rows: Sequence[TrainingRow]) -> TrainerCalibration:
    """Fit a backend's working sets on the peaks of the calibration part; without peaks, the backend as it is."""
    mine = [row for row in rows if row.peak_bytes and row.memory_trainer.id == trainer.id]
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


def main(arguments: Sequence[str]) -> None:
    """Fit and write; see the module."""
    data, out, *names = arguments
    rows, _ = read_training_rows(Path(data) / "measured" / "training.csv")
    phases, _ = read_all(PhaseRow, read_table(Path(data) / "memory" / "rl_lora_phases.csv"))
    for name in names or [*KNOBS, "peft", "peft_nf4"]:
        fitted = [fit_phases(name, phases)] if name.startswith("peft") else fit_backend(name, rows)
        for trainer in [fit_memory(one, rows) for one in fitted]:
            write_trainer(trainer, Path(out) / f"{trainer.id}.yaml")
            sys.stdout.write(f"{trainer.id}: {trainer.provenance[-1].spread}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
