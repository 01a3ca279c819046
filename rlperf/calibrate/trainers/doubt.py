"""How far seconds of configurations that nobody timed may lie off, from what the fit of all backends leaves open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rlperf.calibrate.pooling import Pooled
from rlperf.calibrate.trainers.constants import generation_of, labels_of, timed_as
from rlperf.calibrate.trainers.rows import TrainingRow, digest
from rlperf.layout import BoolArray, FloatArray, IntArray
from rlperf.specs.trainer_calibration import Doubt

NOBODY = "?"
"""A group that is none of those fitted: it differs from the pool as they do from each other."""
STRATA = ("dense", "experts")


@dataclass(frozen=True, eq=False)
class Doubts:
    """A fit with how its predictions depend on the constants.

    Attributes
    ----------
    rows, slopes : every row, and how ln of its seconds follows the logarithm of every constant ``[rows, constants]``
    """

    pooled: Pooled
    rows: Sequence[TrainingRow]
    slopes: FloatArray

    @cached_property
    def _mixture(self) -> BoolArray:
        return np.array([row.architecture.experts is not None for row in self.rows])

    @cached_property
    def _configuration(self) -> IntArray:
        """Number of each row's configuration ``[rows]``."""
        _, index = np.unique([digest(row.configuration) for row in self.rows], return_inverse=True)
        return np.asarray(index)

    def of(self, backend: str, generation: str, device: str) -> Doubt:
        """Of a backend on a device, or on any other of a generation (empty: of a generation nobody fitted either)."""
        labels = labels_of(timed_as(backend), generation or NOBODY, device or NOBODY)
        elsewhere = labels | {name: [NOBODY] for name in ("backend", "backend on generation")}
        like = [self._like(backend, generation, stratum == "experts") for stratum in STRATA]
        known, strange = ([self._deviation(each, mine, stratum) for mine, stratum in zip(like, STRATA, strict=True)]
                          for each in (labels, elsewhere))  # fmt: skip
        return Doubt(dense=known[0], experts=known[1], dense_elsewhere=strange[0], experts_elsewhere=strange[1])

    def _like(self, backend: str, generation: str, experts: bool) -> BoolArray:
        """Rows that stand for others: of the backend on the generation, of either alone, or any with such layers.

        What a backend runs tells more of a job than where: another's toy models on a device wait for the host.
        """
        mine = np.array([timed_as(row.backend) == timed_as(backend) for row in self.rows])
        here = np.array([generation_of(row.hardware.device) == generation for row in self.rows])
        alike = self._mixture if experts else ~self._mixture
        wanted = (alike & mine & here, alike & mine, alike & here, alike)
        return next((each for each in wanted if each.any()), np.ones(len(self.rows), dtype=np.bool_))

    def _deviation(self, labels: dict[str, list[str]], like: BoolArray, stratum: str) -> float:
        """Root of the mean variance of some rows as if all were of one group; configurations of one weight."""
        pooled, count = self.pooled, int(like.sum())
        variance = pooled.variance({name: one * count for name, one in labels.items()}, self.slopes[like])
        own = stratum if stratum in pooled.unit else max(pooled.unit, key=lambda name: pooled.unit[name])
        variance = variance + pooled.unit[own] ** 2 + pooled.noise[own] ** 2
        index = self._configuration[like]
        return float(np.sqrt(np.average(variance, weights=1.0 / np.bincount(index)[index])))
