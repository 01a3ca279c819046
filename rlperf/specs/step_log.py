"""StepLog: what a framework's log says about its rl_steps, in neutral words. Numpy only."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rlperf.errors import SpecError

FloatArray = npt.NDArray[np.float64]
STAGES = ("rollout", "reward", "scoring", "training", "weight_sync", "data_movement", "offload", "other")
"""Stages of an rl_step, as `rlperf.plan.answer.plan.PredictedStages` names them."""


@dataclass(frozen=True, eq=False)
class StepLog:
    """Struct of arrays, one entry per rl_step; not-a-number where the log says nothing.

    rl_step                   int64 [n]
    rl_step_s                    [s], the whole rl_step, validation and checkpoints left out
    rollout_s .. other_s      [s], by stage; in asynchronous modes rollout_s is what the trainer waited
    prompt_tokens, response_tokens, response_tokens_max
                              [tokens], mean and maximum over the sequences of the rl_step
    truncated_fraction        [1], responses cut at the maximum length
    total_tokens              [tokens], trained
    tokens_per_s_per_device   [tokens/s]
    device_memory_bytes       [bytes], peak that the trainer's allocator reports
    host_memory_bytes         [bytes]
    pause_s                   [s], validation and checkpoints beside the rl_step
    of_updates                whether a row is of an optimizer update, of which an rl_step may have several
    origin                    digest of the log that it was made of; empty: its own
    """

    rl_step: npt.NDArray[np.int64]
    rl_step_s: FloatArray
    rollout_s: FloatArray
    reward_s: FloatArray
    scoring_s: FloatArray
    training_s: FloatArray
    weight_sync_s: FloatArray
    data_movement_s: FloatArray
    offload_s: FloatArray
    other_s: FloatArray
    prompt_tokens: FloatArray
    response_tokens: FloatArray
    response_tokens_max: FloatArray
    truncated_fraction: FloatArray
    total_tokens: FloatArray
    tokens_per_s_per_device: FloatArray
    device_memory_bytes: FloatArray
    host_memory_bytes: FloatArray
    pause_s: FloatArray
    framework: str = ""
    source: str = ""
    of_updates: bool = False
    origin: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray) and value.shape != self.rl_step.shape:
                raise SpecError(f"step log: column {field.name} has {value.size} entries for {self.rl_step.size} steps")

    @classmethod
    def of(
        cls, rl_step: npt.ArrayLike, *, framework: str = "", source: str = "", of_updates: bool = False,
        **columns: npt.ArrayLike,
    ) -> StepLog:  # fmt: skip
        """A log from the columns that are known.

        >>> log = StepLog.of([1, 2], rl_step_s=[57.0, 58.0], rollout_s=[32.0, 33.0])
        >>> log.n, log.stage_means()
        (2, {'rollout': 32.5})
        """
        steps = np.asarray(rl_step, dtype=np.int64)
        unknown = set(columns) - set(COLUMNS)
        if unknown:
            raise TypeError(f"unknown column: {', '.join(sorted(unknown))}")
        values: dict[str, Any] = {
            name: np.asarray(columns.get(name, np.full(steps.shape, np.nan)), dtype=np.float64) for name in COLUMNS
        }
        return cls(rl_step=steps, framework=framework, source=source, of_updates=of_updates, **values)

    @property
    def n(self) -> int:
        """Number of rl_steps."""
        return int(self.rl_step.size)

    @property
    def digest(self) -> str:
        """Short digest of what it says, whichever file said it.

        >>> StepLog.of([1], rl_step_s=[57.0]).digest == StepLog.of([1], rl_step_s=[57.0], source="elsewhere").digest
        True
        """
        if self.origin:
            return self.origin
        said = hashlib.blake2s(self.rl_step.tobytes(), digest_size=6)
        for name in COLUMNS:
            if name != "pause_s":  # no part of an rl_step
                said.update(getattr(self, name).tobytes())
        return said.hexdigest()

    def mean(self, column: str) -> float | None:
        """Mean over the rl_steps that state a column; None where none does."""
        values: FloatArray = getattr(self, column)
        known = values[~np.isnan(values)]
        return float(known.mean()) if known.size else None

    def stage_means(self) -> dict[str, float]:
        """Mean seconds of every stage that the log states."""
        means = {stage: self.mean(f"{stage}_s") for stage in STAGES}
        return {stage: value for stage, value in means.items() if value is not None}

    def rollout_holds_sync(self, shares_devices: bool) -> bool:
        """Whether the rollout's timer holds the weight sync and the engine's waking: where rollout and trainer share
        devices, the engine takes new weights as it wakes, and a log that states no weight sync (verl up to 0.6) times
        all of it as one.

        >>> StepLog.of([1], rollout_s=[40.0]).rollout_holds_sync(True)
        True
        """
        stated = self.stage_means()
        return shares_devices and "rollout" in stated and "weight_sync" not in stated

    def settled(self, warm_up: int = 1) -> StepLog:
        """Without the first rl_steps, which compile, capture and start up, where enough others are left to judge by.

        >>> StepLog.of([1, 2, 3, 4], rl_step_s=[99.0, 57.0, 57.0, 57.0]).settled().mean("rl_step_s")
        57.0
        """
        return self.without_first(warm_up) if self.n > 3 * warm_up else self

    def without_first(self, count: int) -> StepLog:
        """The log without its first rl_steps, which compile, capture and warm up."""
        keep = slice(count, None)
        columns: dict[str, Any] = {name: getattr(self, name)[keep] for name in COLUMNS}
        return replace(self, rl_step=self.rl_step[keep], **columns)

    def by_rl_step(self, updates: int) -> StepLog:
        """One row per rl_step of ``updates`` optimizer updates, where the rows are of updates; else as it is.

        Rows may be of every update or means over some; only updates after a generation have its seconds. A last rl_step
        with fewer rows than others is cut off.

        >>> log = StepLog.of([1, 2, 3, 4, 5], rl_step_s=[50.0, 10.0, 50.0, 10.0, 50.0], of_updates=True)
        >>> log.by_rl_step(2).rl_step_s.tolist()
        [60.0, 60.0]
        """
        if not self.of_updates or updates <= 1:
            return self
        number, row, count = np.unique((self.rl_step - 1) // updates, return_inverse=True, return_counts=True)
        whole = slice(None) if number.size == 1 or count[-1] == count.max() else slice(-1)

        def mean(values: FloatArray) -> FloatArray:
            known = ~np.isnan(values)
            rows = np.bincount(row[known], minlength=number.size)
            total = np.bincount(row[known], weights=values[known], minlength=number.size)
            return np.where(rows > 0, total / np.maximum(rows, 1), np.nan)[whole]

        columns: dict[str, Any] = {name: mean(getattr(self, name)) for name in COLUMNS}
        columns["rl_step_s"] = columns["rl_step_s"] * updates
        return replace(self, rl_step=number[whole] + 1, of_updates=False, origin=self.digest, **columns)


_OTHERS = ("rl_step", "framework", "source", "of_updates", "origin")
COLUMNS = tuple(field.name for field in fields(StepLog) if field.name not in _OTHERS)
