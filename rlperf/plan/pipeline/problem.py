"""What is to be planned, and bounds that hold for every plan of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rlperf.errors import SpecError
from rlperf.sim.pipeline import MicrobatchSizes, StageCosts, stage_costs
from rlperf.sim.pipeline.types import FloatArray
from rlperf.specs.pipeline_profile import LayerProfile
from rlperf.units import human_bytes


@dataclass(frozen=True)
class PipelineProblem:
    """One pipeline to plan.

    profile : layer costs; microbatches : M sizes; devices : P
    memory_bytes : limit of each device [bytes], shape (P,), or None
    bandwidth_bytes_per_s, latency_s : of transfers between devices; overlap : they run beside computation
    stages_per_device : how many stages one device may hold
    """

    profile: LayerProfile
    microbatches: MicrobatchSizes
    devices: int
    memory_bytes: FloatArray | None = None
    bandwidth_bytes_per_s: float = float("inf")
    latency_s: float = 0.0
    overlap: bool = True
    stages_per_device: int = 8

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise SpecError(f"{self.devices} devices: at least 1 is due")
        if self.devices > self.profile.layers:
            raise SpecError(f"{self.devices} devices for {self.profile.layers} layers of {self.profile.name}")
        if self.stages_per_device < 1:
            raise SpecError("stages_per_device must be at least 1")
        if not self.bandwidth_bytes_per_s > 0.0 or self.latency_s < 0.0:
            raise SpecError("bandwidth must be positive and latency not negative")
        if self.memory_bytes is not None:
            if self.memory_bytes.shape != (self.devices,) or np.any(self.memory_bytes <= 0.0):
                raise SpecError("memory_bytes needs one positive value per device")
            if not self.profile.knows_memory:
                raise SpecError(
                    f"a memory limit needs sizes: {self.profile.name} states neither activation_bytes nor state_bytes"
                )

    def layer_times(self, layer_s: FloatArray) -> FloatArray:
        """Time of each layer for each micro-batch [s], shape (L, M)."""
        q, mb = self.profile.quadratic_share, self.microbatches
        return np.outer(layer_s * (1.0 - q), mb.linear) + np.outer(layer_s * q, mb.quadratic)

    def stage_costs(self, partition: tuple[int, ...]) -> StageCosts:
        """What the stages of a partition cost, transfers included."""
        return stage_costs(
            self.profile,
            partition,
            self.microbatches,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
            latency_s=self.latency_s,
        )

    def exceeds(self, peak_bytes: FloatArray) -> str:
        """Empty where the peaks fit the memory, otherwise what is too much."""
        if self.memory_bytes is None:
            return ""
        over = peak_bytes - self.memory_bytes * (1.0 + 1e-9)
        worst = int(np.argmax(over))
        if over[worst] <= 0.0:
            return ""
        there = human_bytes(self.memory_bytes[worst])
        return f"needs {human_bytes(peak_bytes[worst])} on device {worst}, {there} are there"

    @cached_property
    def _sums(self) -> tuple[FloatArray, ...]:
        """Running sums over layers of F, B, W times and activation, weight-input sizes, shape (L + 1, M) each."""
        p, linear = self.profile, self.microbatches.linear
        parts = [self.layer_times(t) for t in (p.forward_s, p.backward_input_s, p.backward_weight_s)]
        parts += [np.outer(size, linear) for size in (p.activation_bytes, p.weight_input_bytes)]
        zero = np.zeros((1, self.microbatches.count))
        return tuple(np.concatenate([zero, np.cumsum(part, axis=0)]) for part in parts)

    @cached_property
    def _state(self) -> FloatArray:
        return np.concatenate([[0.0], np.cumsum(self.profile.state_bytes)])

    @cached_property
    def _transfer(self) -> FloatArray:
        sent = np.outer(self.profile.output_bytes, self.microbatches.linear)
        return self.latency_s + sent / self.bandwidth_bytes_per_s

    def costs(self, cuts: tuple[int, ...]) -> StageCosts:
        """`rlperf.sim.pipeline.stage_costs` from running sums: equal to rounding, and fast enough for a search."""
        edges = np.array((0, *cuts, self.profile.layers))
        f, b, w, act, kept = (np.maximum(np.diff(total[edges], axis=0), 0.0) for total in self._sums)
        return StageCosts(
            f, b, w, act, np.minimum(kept, act), np.diff(self._state[edges]), self._transfer[edges[1:-1] - 1]
        )

    def least_bytes(self, cuts: tuple[int, ...], placement: tuple[int, ...]) -> FloatArray:
        """State and the activations of the largest micro-batch alone, on each device [bytes], shape (P,)."""
        edges = np.array((0, *cuts, self.profile.layers))
        stage = np.diff(self._state[edges]) + np.diff(self._sums[3][edges], axis=0).max(axis=1)
        total: FloatArray = np.zeros(self.devices)
        np.add.at(total, np.asarray(placement), stage)
        return total

    @cached_property
    def first_forward_s(self) -> list[float]:
        """The earliest a micro-batch can reach each layer [s], length L + 1: least sum of forwards before it."""
        least: list[float] = self._sums[0].min(axis=1).tolist()
        return least

    @cached_property
    def layer_load_s(self) -> FloatArray:
        """F + B + W of each layer over all micro-batches [s], shape (L,)."""
        total: FloatArray = self.layer_times(self.profile.work_s).sum(axis=1)
        return total

    @cached_property
    def period_s(self) -> float:
        """Total work / (P M) [s]."""
        return float(self.layer_load_s.sum()) / (self.devices * self.microbatches.count)

    @cached_property
    def work_bound_s(self) -> float:
        """max(total work / P, heaviest layer): no plan ends before [s]."""
        return max(float(self.layer_load_s.sum()) / self.devices, float(self.layer_load_s.max()))

    @cached_property
    def bound_s(self) -> float:
        """The best bound over all partitions, placements and orders [s].

        Sort devices by their first layer. The k-th (k = 0..P-1) starts with layer k or a later one, so it is idle for
        at least h_k, the least time in which a micro-batch passes the k layers before. The sum of all idle time is at
        least sum(h_k), hence makespan >= (total work + sum_k h_k) / P. A second bound: the heaviest layer runs on
        one device, which starts no sooner than that layer's h, and after its last B all layers before it still have
        their B to do: makespan >= h_l + M-sum of work_l with what must precede and follow (W aside, it can wait).
        """
        heads = self.first_forward_s[: self.devices]
        average = (float(self.layer_load_s.sum()) + sum(heads)) / self.devices
        return max(average, self.work_bound_s, self._layer_bound(), self._path_bound())

    def _layer_bound(self) -> float:
        """For each layer: first arrival + its F, B of all micro-batches + the least rest of one backward [s].

        Where W of the layer fits behind its last B, it may hide the rest; so the larger of W and the rest counts.
        """
        f, b, w = self._sums[0], self._sums[1], self._sums[2]
        arrive = f.min(axis=1)[:-1]
        rest = b.min(axis=1)[:-1]
        own_fb = (np.diff(f, axis=0) + np.diff(b, axis=0)).sum(axis=1)
        own_w = np.diff(w, axis=0).sum(axis=1)
        return float((arrive + own_fb + np.maximum(rest, own_w)).max())

    def _path_bound(self) -> float:
        """The longest micro-batch through all F and all B, alone [s]."""
        return float((self._sums[0][-1] + self._sums[1][-1]).max())
