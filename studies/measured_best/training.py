"""Measured training rows: is the best measured layout among those that the planner cannot tell from its best?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlperf.calibrate.columns import read_all
from rlperf.calibrate.splits import is_new
from rlperf.calibrate.tables import read_table
from rlperf.calibrate.trainers.costs import predict_seconds, shared_arguments
from rlperf.calibrate.trainers.rows import TrainingRow
from rlperf.cost.batching import Microbatches
from rlperf.cost.trainer.memory import trainer_memory
from rlperf.cost.trainer.update import training_update
from rlperf.layout import FloatArray, Layout
from rlperf.plan.search.candidates import Shape, powers_of_two, trainer_layouts
from rlperf.sim.rl_step.uncertainty import CALIBRATED, OWN_SHARE, log_sigma
from rlperf.specs.calibration import Z95
from rlperf.specs.pool import LayoutChoice, PoolSpec
from rlperf.specs.trainer_calibration import load_trainer

HEADROOM = 0.05
"""Share of device memory that candidates keep free."""


@dataclass(frozen=True)
class Outcome:
    """One set of measured configurations that differ in layout alone.

    Attributes
    ----------
    unseen : no fit saw any of its rows
    new : nobody had its group in view when constants and forms were settled
    tied : layouts that the planner cannot tell from the one it predicts fastest, that one included
    best_is_tied : the measured best is among them
    regret : measured time of the layout predicted fastest over that of the best, minus 1
    own : predicted time of the planner's own layout over that of the fastest predicted of the set
    """

    kind: str
    name: str
    layouts: int
    unseen: bool
    new: bool
    tied: int
    best_is_tied: bool
    regret: float
    own: float


def outcomes(path: Path) -> list[Outcome]:
    """Every set of at least two layouts in ``training.csv``."""
    table = read_table(path)
    new = {row.row_id for row in table if is_new("training", row)}
    rows = [row for row in read_all(TrainingRow, table)[0] if row.update_s]
    seconds = predict_seconds(rows)
    return [_outcome([rows[i] for i in members], seconds[members], new) for members in sets_of(rows)]


def sets_of(rows: list[TrainingRow]) -> Iterator[list[int]]:
    """Indices of rows equal in everything but the layout; repeats of one layout stay in."""
    found: dict[tuple[object, ...], list[int]] = {}
    for index, row in enumerate(rows):
        key = (row.group, *shared_arguments(row), int(row.layout.devices), float(row.microbatches.max_len), _batch(row))
        found.setdefault(key, []).append(index)
    for members in found.values():
        if len({_text(rows[i].layout) for i in members}) > 1:
            yield members


def _text(layout: Layout) -> str:
    return str(sorted(layout.to_dict().items()))


def _batch(row: TrainingRow) -> int:
    return round(float(row.microbatches.count * row.layout.data_parallel * row.layout.microbatch))


def _outcome(rows: list[TrainingRow], seconds: FloatArray, new: set[str]) -> Outcome:
    first = rows[0]
    measured = np.array([row.update_s for row in rows], dtype=np.float64)
    fastest, best = int(np.argmin(seconds)), int(np.argmin(measured))
    sigma = float(log_sigma(first.trainer.low, first.trainer.high))
    tied = [cannot_tell(sigma, seconds[fastest], other) for other in seconds]
    layouts = {_text(row.layout): near for row, near in zip(rows, tied, strict=True)}
    return Outcome(
        kind="training",
        name=f"{first.architecture.name}, {int(first.layout.devices)} {first.device}, {first.backend}",
        layouts=len(layouts),
        unseen=not any(row.used for row in rows),
        new=any(row.row_id in new for row in rows),
        tied=sum(layouts.values()),
        best_is_tied=tied[best],
        regret=float(measured[fastest] / measured[best] - 1.0),
        own=own_seconds(first) / float(seconds[fastest]),
    )


def cannot_tell(sigma: float, one: float, other: float) -> bool:
    """The rule of `rlperf.sim.rl_step.uncertainty.Contenders.apart`, for two layouts that differ in training alone."""
    own = OWN_SHARE[CALIBRATED.index("training_s")]
    variance = (sigma * own) ** 2 * (one**2 + other**2) + (sigma * (one - other)) ** 2
    return bool(abs(one - other) <= Z95 * np.sqrt(variance))


def own_seconds(row: TrainingRow) -> float:
    """Seconds of the fastest candidate that the planner enumerates for a row's architecture, devices and batch.

    The candidates are the planner's own, with the knobs open in which rows differ: microbatch and shard stage (fully
    sharded without a pipeline). The batch must divide. They have to fit the device as in a plan:
    headroom kept, and the 95th percentile of the peak inside.
    """
    devices, length, batch = int(row.layout.devices), float(row.microbatches.max_len), _batch(row)
    backend = "megatron" if row.backend.startswith(("megatron", "nemo")) else "fsdp2"
    choice = LayoutChoice(microbatch=tuple(powers_of_two(min(batch, 64))), zero_stage=(0, 1, 2, 3))
    if backend == "megatron":
        choice = choice.model_copy(update={"zero_stage": (0, 1, 3)})
    shape = Shape(row.architecture, devices, row.hardware.cluster.scale_up_domain, int(length))
    layout, flags = trainer_layouts(shape, PoolSpec(role="trainer", layout=choice), load_trainer(backend).capability)
    layout = layout.flat(flags == 0)
    layout = layout.flat((layout.zero_stage < 3) | (layout.pipeline_parallel == 1))
    layout = layout.flat(batch % (layout.data_parallel * layout.microbatch) == 0)
    work = Microbatches.fixed(layout, length, batch)
    cost = training_update(row.architecture, row.hardware, row.trainer, layout, work, row.options)
    memory = trainer_memory(row.architecture, row.hardware, row.trainer, layout, work, row.options)
    device = row.hardware.device.memory
    fits = memory.total <= min(device * (1.0 - HEADROOM), device / row.trainer.memory_high)
    return float(np.min(np.where(fits, cost.total_s, np.inf), initial=np.inf))
