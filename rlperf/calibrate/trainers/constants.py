"""Timing constants that all trainer backends share: what is believed of each without a row, and who differs.

`rlperf.calibrate.pooling` fits them together: a backend, a generation of devices, a device has its own share of a
constant as far as its rows prove it, and the pool's where they say nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rlperf.calibrate.pooling import STEP, Constant, Kind, Rows
from rlperf.calibrate.trainers.costs import batches_of, stack
from rlperf.calibrate.trainers.rows import TrainingRow
from rlperf.cost.batching import Microbatches
from rlperf.cost.dtypes import dtype_of
from rlperf.cost.trainer.update import training_update
from rlperf.cost.trainer_device import BEFORE_HOPPER
from rlperf.layout import FloatArray, IntArray, Layout
from rlperf.specs.cluster import Device
from rlperf.specs.trainer_calibration import Generation, TrainerCalibration


@dataclass(frozen=True)
class Shared:
    """A constant of all backends: what is believed of it, and within which bounds it means anything."""

    name: str
    start: float
    spread: float
    low: float
    high: float
    only: tuple[str, ...] = ()

    def serves(self, backend: str) -> bool:
        """Whether the backend has the mechanism at all."""
        return not self.only or backend in self.only


MEGATRON = ("megatron", "megatron_bridge", "megatron_bridge_narrow", "nemo")
EAGER = ("fsdp2", "automodel", "torchtitan")
SHARDED = ("megatron_bridge", *EAGER, "fsdp_llm_foundry", "deepspeed_legacy")

OF_DEVICE = (
    Shared("sustained", 0.75, 0.2, 0.3, 1.1),
    Shared("sustained_fp8", 0.95, 0.2, 0.3, 1.3),
    Shared("sustained_fp4", 0.9, 0.25, 0.3, 1.4),
    Shared("attention", 1.15, 0.3, 0.4, 4.5),
    Shared("flash2", 1.0, 0.4, 0.5, 8.0),
)
"""Constants of `Generation`; ``flash2`` before `WIDER`."""
WIDER: Mapping[str, float] = {"Hopper": 2.0, "Blackwell": 4.0}
"""Multiply-adds per clock and multiprocessor of a generation's newest tensor instructions over Ampere's 1,024 (bf16).

FlashAttention-2 issues Ampere's (mma.sync) on every device, newer kernels the newest: its time over theirs is so many
times what it is on Ampere. From NVIDIA's data sheets, clocks recalled: dense bf16 peak over clock,
multiprocessors and two FLOP, 312 TFLOP/s of the A100 at 1.41 GHz and 108, 989 of the H100 at 1.83 and 132, 2,250 of the
B200 at 1.85 and 148."""
OF_STACK = (
    Shared("collective", 0.9, 0.3, 0.3, 4.0),
    Shared("elementwise", 0.9, 0.35, 0.3, 4.0),
    Shared("flash1", 1.7, 0.2, 1.0, 3.0, only=("fsdp_llm_foundry",)),
    Shared("host_layer", 4e-4, 0.5, 1e-5, 1.5e-3),
    Shared("host_moe_layer", 2e-3, 0.6, 1e-4, 1e-2),
    Shared("host_expert", 8e-5, 0.8, 1e-6, 1e-3, only=MEGATRON),
    Shared("wide_expert", 0.4, 0.4, 0.05, 1.0, only=MEGATRON),
    Shared("hybrid_host", 0.8, 0.3, 0.2, 1.0, only=MEGATRON),
    Shared("host_norm", 5.0, 0.4, 2.0, 30.0),
    Shared("graph_host", 0.7, 0.25, 0.1, 1.0, only=MEGATRON),
    Shared("drop_host", 0.6, 0.3, 0.1, 1.0, only=MEGATRON),
    Shared("moe_layer", 2e-4, 0.8, 1e-6, 5e-3),
    Shared("expert_gap", 1e-4, 0.8, 1e-6, 1e-3, only=MEGATRON),
    Shared("moe_pass", 1.0, 0.3, 0.4, 4.0),
    Shared("permute", 1.5, 0.4, 0.3, 8.0),
    Shared("fused_permute", 0.7, 0.3, 0.1, 1.5),
    Shared("tensor_overlap", 0.5, 0.3, 0.02, 0.95),
    Shared("expert_overlap", 0.5, 0.3, 0.02, 0.95, only=MEGATRON),
    Shared("pipeline_overlap", 0.5, 0.3, 0.02, 0.95, only=MEGATRON),
    Shared("data_overlap", 0.7, 0.3, 0.02, 1.0, only=MEGATRON),
    Shared("contention", 0.1, 0.5, 0.005, 1.0, only=SHARDED),
    Shared("cross_entropy_bytes", 40.0, 0.5, 6.0, 150.0, only=(*EAGER, "fsdp_llm_foundry")),
    Shared("chunked_bytes", 90.0, 0.6, 12.0, 500.0, only=EAGER),
    Shared("lora_bytes", 6.0, 0.6, 0.5, 60.0),
    Shared("update", 0.02, 1.0, 1e-5, 1.0),
    Shared("microbatch", 1e-3, 1.0, 1e-6, 3e-2),
    Shared("eager", 1.3, 0.25, 1.0, 4.0, only=EAGER),
)
"""Constants of `Timing`."""
SHARED = (*OF_DEVICE, *OF_STACK)
RATES = ("sustained", "sustained_fp8", "sustained_fp4")

CONSTANTS = tuple(Constant(one.name, one.start, one.spread) for one in SHARED)
KINDS = (
    # the first FlashAttention is the same kernel in every stack
    Kind("backend", tuple(one.name for one in OF_STACK if one.name != "flash1"), most=0.6),
    Kind("generation", tuple(one.name for one in OF_DEVICE), most=0.3),
    Kind("device", (*RATES, "attention"), most=0.15),
    Kind("backend on generation", (*RATES, "attention", "flash2"), most=0.25),
)

TIMED_AS: Mapping[str, str] = {"megatron_bridge_narrow": "megatron_bridge", "torchtitan": "fsdp2"}
"""Backends that are another's code with states stored otherwise: one set of seconds serves both."""


def timed_as(backend: str) -> str:
    """The backend whose seconds a backend's are."""
    return TIMED_AS.get(backend, backend)


def generation_of(device: Device) -> str:
    """First word of a device's generation."""
    return device.generation.split()[0]


def labels_of(backend: str, generation: str, device: str) -> dict[str, list[str]]:
    """Groups of one row, by kind; empty where it is of none.

    >>> labels_of("nemo", "Hopper", "")["backend on generation"]
    ['nemo on Hopper']
    """
    own = timed_as(backend)
    both = f"{own} on {generation}" if own and generation else ""
    return {"backend": [own], "generation": [generation], "device": [device], "backend on generation": [both]}


@dataclass(frozen=True)
class RowBatch:
    """Rows that one call predicts."""

    indices: IntArray
    row: TrainingRow
    layout: Layout
    microbatches: Microbatches
    told: IntArray


class Timed:
    """Rows of training with their seconds as a function of the shared constants."""

    def __init__(self, rows: Sequence[TrainingRow]) -> None:
        self.rows = tuple(rows)
        self.batches = [self._batch(indices) for indices in batches_of(rows)]
        self._known: dict[tuple[int, bytes], FloatArray] = {}

    def _batch(self, indices: Sequence[int]) -> RowBatch:
        layout, cut = stack([self.rows[i].layout for i in indices], [self.rows[i].microbatches for i in indices])
        row = self.rows[indices[0]]
        told = [k for k, one in enumerate(SHARED) if _told(one, row)]
        return RowBatch(np.asarray(indices), row, layout, cut, np.asarray(told))

    def predict(self, logs: FloatArray) -> FloatArray:
        """ln of the seconds of every row from the logarithms of its constants ``[rows, constants]``."""
        found = np.empty(len(self.rows))
        for number, batch in enumerate(self.batches):
            values = logs[batch.indices[0]]
            key = number, values[batch.told].tobytes()
            if key not in self._known:
                if len(self._known) > 64 * len(self.batches):
                    self._known.clear()
                self._known[key] = np.log(self._seconds(batch, bounded(values)))
            found[batch.indices] = self._known[key]
        return found

    def moved(self, logs: FloatArray) -> FloatArray:
        """The same with one constant after the other larger by `STEP` ``[rows, constants]``: one call a batch."""
        found = np.repeat(self.predict(logs)[:, None], logs.shape[1], axis=1)
        for batch in self.batches:
            sets = np.tile(logs[batch.indices[0]], (len(batch.told), 1))
            sets[np.arange(len(sets)), batch.told] += STEP
            found[np.ix_(batch.indices, batch.told)] = np.log(self._seconds(batch, _by_set(sets, batch.told))).T
        return found

    def _seconds(self, batch: RowBatch, values: Mapping[str, FloatArray | float]) -> FloatArray:
        """Of a batch's rows ``[rows]``; ``[sets, rows]`` where constants are those of several sets ``[sets, 1]``."""
        row = batch.row
        device = row.hardware.device
        trainer = with_constants(row.trainer, values, row.trainer.generation(device), generation_of(device))
        cost = training_update(
            row.architecture, row.hardware, trainer, batch.layout, batch.microbatches, row.options
        ).total_s
        return np.broadcast_to(cost, (*cost.shape[:-1], len(batch.indices)))

    @cached_property
    def pool_rows(self) -> Rows:
        """The same for `rlperf.calibrate.pooling`."""
        groups = [labels_of(row.backend, generation_of(row.hardware.device), row.device) for row in self.rows]
        return Rows(
            predict=self.predict,
            moved=self.moved,
            measured=np.log(np.array([row.update_s for row in self.rows], dtype=np.float64)),
            constants=CONSTANTS,
            kinds=KINDS,
            labels={kind.name: [each[kind.name][0] for each in groups] for kind in KINDS},
            units=[row.configuration for row in self.rows],
            strata=["experts" if row.architecture.experts else "dense" for row in self.rows],
        )


EXPERTS = (
    "host_moe_layer", "host_expert", "drop_host", "moe_layer", "expert_gap", "moe_pass", "permute", "fused_permute",
    "expert_overlap",
)  # fmt: skip


def _told(one: Shared, row: TrainingRow) -> bool:
    """Whether a row's seconds depend on a constant at all."""
    narrow = {"fp8": "sustained_fp8", "mxfp8": "sustained_fp8", "nvfp4": "sustained_fp4", "mxfp4": "sustained_fp4"}
    second = row.flash2 or (row.flash1 and generation_of(row.hardware.device) not in BEFORE_HOPPER)
    asked = {
        "sustained_fp8": narrow.get(row.dtype) == "sustained_fp8" and not row.switches.rowwise,
        "sustained_fp4": narrow.get(row.dtype) == "sustained_fp4",
        "attention": not second,
        "flash2": second,
        "flash1": row.flash1,
        "hybrid_host": row.switches.dispatcher == "hybridep",
        "wide_expert": row.architecture.experts is not None and not dtype_of(row.dtype).narrow,
        "graph_host": row.switches.cuda_graph == "partial",
        "chunked_bytes": row.chunked_loss,
        "lora_bytes": bool(row.lora_rank),
        "eager": not row.switches.fused,
        **dict.fromkeys(EXPERTS, row.architecture.experts is not None),
    }
    return one.serves(row.backend) and asked.get(one.name, True)


def bounded(logs: FloatArray) -> dict[str, float]:
    """Constants by name from their logarithms, each inside its bounds."""
    values = zip(SHARED, np.exp(logs).tolist(), strict=True)
    return {one.name: min(max(value, one.low), one.high) for one, value in values}


def _by_set(sets: FloatArray, told: IntArray) -> dict[str, FloatArray | float]:
    """Constants by name from the logarithms of several sets ``[sets, constants]``: those told ``[sets, 1]``."""
    values = np.clip(np.exp(sets), [one.low for one in SHARED], [one.high for one in SHARED])
    several = set(told.tolist())
    return {
        one.name: values[:, place, None] if place in several else float(values[0, place])
        for place, one in enumerate(SHARED)
    }


def of_device(values: Mapping[str, FloatArray | float], generation: str) -> dict[str, FloatArray | float]:
    """Constants of `Generation` on devices of one generation; one that `WIDER` does not name runs what Ampere does.

    >>> shared = {one.name: one.start for one in OF_DEVICE}
    >>> [of_device(shared, name)["flash2"] for name in ("Ampere", "Hopper", "Blackwell", "")]
    [1.0, 2.0, 4.0, 1.0]
    """
    found = {one.name: values[one.name] for one in OF_DEVICE}
    return found | {"flash2": found["flash2"] * WIDER.get(generation, 1.0)}


def with_constants(
    trainer: TrainerCalibration, values: Mapping[str, FloatArray | float], entry: Generation, generation: str
) -> TrainerCalibration:
    """A backend with other constants, on devices of one entry and generation alone."""
    stack_part: dict[str, object] = {"arranged": True}
    stack_part |= {one.name: values[one.name] for one in OF_STACK if one.serves(trainer.id)}
    return trainer.model_copy(
        update={
            "timing": trainer.timing.model_copy(update=stack_part),
            "generations": (entry.model_copy(update={"generation": "*", **of_device(values, generation)}),),
        }
    )
