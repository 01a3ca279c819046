"""Peak memory, predicted against measured: training tables, LoRA phases with a colocated engine, known-to-fit lists."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlperf.calibrate.columns import Reading, column, count, derived, number, read_all, text
from rlperf.calibrate.tables import Refusal, Row, Table
from rlperf.calibrate.trainers.costs import batches_of, stack
from rlperf.calibrate.trainers.rows import TrainingRow, digest
from rlperf.calibrate.validate import Outcome, PredictedFigure, each_row
from rlperf.cost.batching import Microbatches
from rlperf.cost.layers import stack_of
from rlperf.cost.trainer.memory import MemoryParts, trainer_memory
from rlperf.cost.trainer_device import UpdateOptions
from rlperf.errors import Problem, SpecError, did_you_mean
from rlperf.layout import FloatArray, Layout
from rlperf.specs.architecture import Architecture
from rlperf.specs.hardware import Hardware, load_hardware
from rlperf.specs.profiles import load_architecture
from rlperf.specs.trainer_calibration import TrainerCalibration, load_trainer

_BUDGET = 16384
PHASE_DEVICES = {"NVIDIA L4": "l4", "NVIDIA A100-SXM4-40GB": "a100_40g_sxm", "NVIDIA A100-SXM4-80GB": "a100_80g_sxm"}
"""Device names as the driver prints them."""


def predict_rows(path: Path, table: Table) -> Outcome:
    """Predict peaks of a training table, of a table of LoRA phases, or the margin of a known-to-fit list."""
    if "knob_lora_rank" in table.columns:
        return _phases(table)
    if {"resource", "max_batch"} <= set(table.columns):
        return each_row(table, _known_to_fit)
    if "weights_gib" in table.columns:
        reason = "engine start-up breakdown: a matter of the engine, see kind inference"
        return Outcome((), tuple(Refusal.of(row, reason) for row in table))
    table.need("framework", "architecture", "gpu", "n_gpus", "measured_peak_memory_gb")
    rows, refused = read_all(TrainingRow, table)
    peaks = [row for row in rows if row.peak_bytes]
    predictions = tuple(peak_figure(row, float(value)) for row, value in zip(peaks, predict_peaks(peaks), strict=True))
    without = [Refusal.of(row.row, "no peak memory in the row") for row in rows if not row.peak_bytes]
    return Outcome(predictions, (*without, *refused))


def predict_peaks(rows: list[TrainingRow], trainer: TrainerCalibration | None = None) -> FloatArray:
    """What the framework's allocator reports at its peak, per row [bytes]; never above what the device has."""
    out = np.zeros(len(rows))
    for indices in batches_of(rows):
        first = rows[indices[0]]
        layout, batch = stack([rows[i].layout for i in indices], [rows[i].microbatches for i in indices])
        parts = trainer_memory(
            first.architecture, first.hardware, trainer or first.trainer, layout, batch, first.options
        )
        out[indices] = np.minimum(parts.allocated, first.hardware.device.usable_memory - parts.context)
    return out


def peak_figure(row: TrainingRow, predicted: float) -> PredictedFigure:
    """A row with its predicted peak and interval."""
    widen = 1.5 ** min(row.blanks, 3)
    return PredictedFigure(
        row_id=row.row_id,
        group=row.group,
        metric="peak_memory_gb",
        measured=float(row.peak_bytes or np.nan) / 1e9,
        predicted=predicted / 1e9,
        low=predicted * row.trainer.memory_low**widen / 1e9,
        high=predicted * row.trainer.memory_high**widen / 1e9,
        calibration=row.trainer.id,
        assumed=row.assumed,
        extrapolated=any(half.layer.unmeasured_training for half in stack_of(row.architecture).halves),
        used_in_calibration=digest(row.configuration) in row.trainer.memory_configurations,
    )


# -- LoRA GRPO with a colocated engine: training and generation phase of one device ---------------------------------


def _phase_device(row: PhaseRow) -> str:
    if row.printed_device not in PHASE_DEVICES:
        raise SpecError(f"device {row.printed_device!r} is none of {', '.join(PHASE_DEVICES)}")
    return PHASE_DEVICES[row.printed_device]


def _phase_model(cell: str) -> str:
    return cell.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class PhaseRow(Reading):
    """One measured phase of LoRA GRPO on one device, with what decides its memory; fields in the order of reading."""

    phase: str = column(text, "")
    printed_device: str = column(text, "", name="device")
    device: str = derived(_phase_device)
    model: str = column(_phase_model, "")
    architecture: Architecture = derived(lambda row: load_architecture(row.model))
    hardware: Hardware = derived(lambda row: load_hardware(row.device))
    quantisation: str = column(text, "none", name="knob_quantization")
    trainer: TrainerCalibration = derived(lambda row: load_trainer("peft_nf4" if row.quantisation == "nf4" else "peft"))
    microbatch: int = column(count, 1, name="knob_micro_batch")
    group_size: int = column(count, 1, name="knob_group_size")
    prompts: int = column(count, 1, name="knob_n_prompts")
    sequences: int = derived(lambda row: row.group_size * row.prompts)
    seq_len: float = column(number, 0.0, name="knob_seq_len")
    lora_rank: int = column(count, 1, name="knob_lora_rank")
    engine_share: float = column(number, 0.0, name="knob_gpu_memory_utilization")
    polled_bytes: float | None = column(number, None, name="nvml_polled_bytes")
    printed_peak_bytes: float | None = column(number, None, name="device_peak_bytes")

    @property
    def group(self) -> str:
        """Phase, model and device."""
        return f"{self.phase}, {self.model}, {self.printed_device}"

    @property
    def peak_bytes(self) -> float:
        """Measured peak of the device: as the driver was polled, else as the run printed it."""
        return self.polled_bytes or self.printed_peak_bytes or float("nan")

    @property
    def configuration(self) -> str:
        """Text that is equal for repeats of one configuration."""
        knobs = "|".join(f"{key}={value}" for key, value in self.row.cells.items() if key.startswith("knob_"))
        return f"{self.model}|{self.device}|{knobs}"


def phase_bytes(row: PhaseRow, trainer: TrainerCalibration | None = None) -> float:
    """Peak of the device, engine and trainer together [bytes].

    Training: the trainer's parts and what the sleeping engine leaves. Generation: the engine's share of the device,
    less the activations that it set aside for its largest batch and does not touch, plus graphs and context, which
    it does not count.
    """
    constants = trainer or row.trainer
    space = constants.workspace
    if row.phase == "training":
        return float(_phase_training(row, constants).total) + space.engine_asleep
    device = row.hardware.device
    arch = row.architecture
    largest = min(row.sequences * row.seq_len, space.engine_batch_tokens)
    unused = largest * 2.0 * (3.0 * arch.ffn_hidden + arch.hidden) * space.engine_activation
    outside = space.engine_outside + space.context_per_multiprocessor * (device.multiprocessors or 0)
    return row.engine_share * device.usable_memory + outside - unused


def _phase_training(row: PhaseRow, trainer: TrainerCalibration) -> MemoryParts:
    each = min(row.microbatch, row.sequences)
    count = -(-row.sequences // each)
    batch = Microbatches.of(each * row.seq_len, each * row.seq_len**2, row.seq_len, count)
    layout = Layout.of(activation_recompute=2, microbatch=each)
    return trainer_memory(
        row.architecture,
        row.hardware,
        trainer,
        layout,
        batch,
        UpdateOptions(lora_rank=row.lora_rank, chunked_loss=True),
    )


def _phases(table: Table) -> Outcome:
    rows, refused = read_all(PhaseRow, table)
    predictions = []
    for row in rows:
        predicted = phase_bytes(row) / 1e9
        predictions.append(
            PredictedFigure(
                row_id=row.row_id,
                group=row.group,
                metric="peak_memory_gb",
                measured=row.peak_bytes / 1e9,
                predicted=predicted,
                low=predicted * row.trainer.memory_low,
                high=predicted * row.trainer.memory_high,
                calibration=row.trainer.id,
                used_in_calibration=digest(row.configuration) in row.trainer.memory_configurations,
                stratum=row.phase,
            )
        )
    return Outcome(tuple(predictions), tuple(refused))


# -- Configurations that are known to run ----------------------------------------------------------------------------


def _known_to_fit(row: Row) -> list[PredictedFigure]:
    """Share of the device that the larger colocated phase takes; measured is 1: it ran, so less is right."""
    share = known_to_fit_share(row)
    return [
        PredictedFigure(
            row_id=row.row_id, group="known to fit", metric="share_of_device", measured=1.0, predicted=share,
            low=share * 0.9, high=share * 1.1, calibration="fsdp2",
            assumed=(f"token_budget={_BUDGET}", "response=1024", "states and weights offloaded while colocated"),
        )
    ]  # fmt: skip


def known_to_fit_share(row: Row) -> float:
    """Predicted peak of training over the memory of a device, for a line such as ``GRPO-LoRA, 2*H100``."""
    printed, _, name = row.text("resource").partition("*")
    device = {"H100": "h100_sxm", "H800": "h800_sxm", "A100": "a100_80g_sxm", "H200": "h200_sxm", "H20": "h20_sxm"}
    if name not in device:
        hint = did_you_mean(name, device)
        raise SpecError(Problem(f"resource: device {name!r} is not known", line=row.line, suggestion=hint))
    if not printed.isdecimal() or int(printed) < 1:
        raise SpecError(Problem(f"resource: {printed!r} is not a positive whole number", line=row.line))
    hw = load_hardware(device[name])
    trainer = load_trainer("fsdp2")
    model = row.text("model")
    arch = load_architecture("Qwen2-72B" if model == "Qwen2-70B" else model)
    layout = Layout.of(data_parallel=int(printed), zero_stage=3, activation_recompute=2, offload=1)
    batch = Microbatches.of(_BUDGET / 2, _BUDGET / 2 * 2048.0, 2048.0, 4.0)
    rank = 32 if "LoRA" in row.text("task") else None
    parts = trainer_memory(arch, hw, trainer, layout, batch, UpdateOptions(lora_rank=rank, chunked_loss=True))
    return float(parts.total + trainer.workspace.engine_asleep) / hw.device.usable_memory
