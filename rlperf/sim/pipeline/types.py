"""Nouns of the pipeline simulator: micro-batches, costs per stage, operations, orders, timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlperf.errors import SpecError
from rlperf.specs.pipeline_profile import LayerProfile

FloatArray = npt.NDArray[np.float64]

F, B, W = 0, 1, 2
KIND_NAMES = ("F", "B", "W")

# (kind, stage, microbatch), and what one device runs, in order, for every device.
Op = tuple[int, int, int]
Orders = tuple[tuple[Op, ...], ...]


def op_name(op: Op, merged: bool = False) -> str:
    """Text of an operation.

    >>> op_name((1, 3, 0))
    'B(stage 3, microbatch 0)'
    """
    kind = "BW" if merged and op[0] == B else KIND_NAMES[op[0]]
    return f"{kind}(stage {op[1]}, microbatch {op[2]})"


@dataclass(frozen=True)
class MicrobatchSizes:
    """Sizes of M micro-batches relative to the profile's reference micro-batch.

    A layer with time t and quadratic share q costs t * ((1 - q) * linear + q * quadratic). For a packed micro-batch of
    sequences with n_i tokens and a reference of r tokens: linear = sum(n_i) / r, quadratic = sum(n_i**2) / r**2.

    linear, quadratic : [-], shape (M,)
    """

    linear: FloatArray
    quadratic: FloatArray

    def __post_init__(self) -> None:
        if self.linear.ndim != 1 or self.linear.shape != self.quadratic.shape or self.linear.size == 0:
            raise SpecError("micro-batches need two vectors of one length, at least 1")
        if not (np.all(np.isfinite(self.linear)) and np.all(np.isfinite(self.quadratic))):
            raise SpecError("sizes of micro-batches must be finite")
        if np.any(self.linear <= 0.0) or np.any(self.quadratic < 0.0):
            raise SpecError("sizes of micro-batches must be positive")

    @property
    def count(self) -> int:
        """M."""
        return int(self.linear.size)

    @property
    def identical(self) -> bool:
        """Whether all micro-batches cost the same, so that their order is no decision."""
        return bool(np.all(self.linear == self.linear[0]) and np.all(self.quadratic == self.quadratic[0]))

    @classmethod
    def equal(cls, count: int) -> MicrobatchSizes:
        """``count`` reference micro-batches."""
        if count < 1:
            raise SpecError(f"{count} micro-batches: at least 1 is due")
        return cls(np.ones(count), np.ones(count))


@dataclass(frozen=True)
class StageCosts:
    """Times and sizes of S stages for M micro-batches.

    forward_s, backward_input_s, backward_weight_s : [s], shape (S, M)
    activation_bytes : held from the start of F to the end of B [bytes], shape (S, M)
    weight_input_bytes : the part held on until W has run [bytes], shape (S, M)
    state_bytes : held always [bytes], shape (S,)
    transfer_s : from stage s to s + 1 across devices (and as long for the gradient back) [s], shape (S - 1, M)
    """

    forward_s: FloatArray
    backward_input_s: FloatArray
    backward_weight_s: FloatArray
    activation_bytes: FloatArray
    weight_input_bytes: FloatArray
    state_bytes: FloatArray
    transfer_s: FloatArray

    def __post_init__(self) -> None:
        shape = self.forward_s.shape
        if len(shape) != 2 or shape[0] < 1 or shape[1] < 1:
            raise SpecError(f"stage times need shape (stages, microbatches), not {shape}")
        same = (self.backward_input_s, self.backward_weight_s, self.activation_bytes, self.weight_input_bytes)
        if any(array.shape != shape for array in same):
            raise SpecError("times and activation sizes of stages must have one shape")
        if self.state_bytes.shape != (shape[0],) or self.transfer_s.shape != (shape[0] - 1, shape[1]):
            raise SpecError("state_bytes must have shape (S,) and transfer_s shape (S - 1, M)")
        everything = (self.forward_s, *same, self.state_bytes, self.transfer_s)
        if any(not np.all(np.isfinite(array)) or np.any(array < 0.0) for array in everything):
            raise SpecError("times and sizes of stages must be finite and not negative")

    @property
    def stages(self) -> int:
        """S."""
        return int(self.forward_s.shape[0])

    @property
    def microbatches(self) -> int:
        """M."""
        return int(self.forward_s.shape[1])

    @property
    def work_s(self) -> FloatArray:
        """F + B + W of each stage over all micro-batches [s], shape (S,)."""
        total: FloatArray = (self.forward_s + self.backward_input_s + self.backward_weight_s).sum(axis=1)
        return total

    @classmethod
    def uniform(
        cls, stages: int, microbatches: int, forward_s: float, backward_input_s: float, backward_weight_s: float
    ) -> StageCosts:
        """Equal stages, one byte of activation each, no transfer time: the closed forms' case."""
        full = np.ones((stages, microbatches))
        return cls(
            full * forward_s,
            full * backward_input_s,
            full * backward_weight_s,
            full.copy(),
            full * 0.0,
            np.zeros(stages),
            np.zeros((stages - 1, microbatches)),
        )


def stage_costs(
    profile: LayerProfile,
    partition: Sequence[int],
    microbatches: MicrobatchSizes,
    *,
    bandwidth_bytes_per_s: float = float("inf"),
    latency_s: float = 0.0,
) -> StageCosts:
    """Costs of contiguous stages: sums over their layers, times the size of each micro-batch.

    t[s, m] = sum over the layers l of stage s of t_l ((1 - q_l) linear_m + q_l quadratic_m); bytes grow with linear_m.
    transfer[s, m] = latency + output_bytes(last layer of s) * linear_m / bandwidth (the alpha-beta model).

    partition : layers of each stage, summing to the profile's layers
    """
    sizes = [int(n) for n in partition]
    if not sizes or min(sizes) < 1 or sum(sizes) != profile.layers:
        raise SpecError(f"partition {sizes} must consist of positive parts that sum to {profile.layers} layers")
    if not bandwidth_bytes_per_s > 0.0 or latency_s < 0.0:
        raise SpecError("bandwidth must be positive and latency not negative")
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.int64)
    q = profile.quadratic_share

    def times(layer_s: FloatArray) -> FloatArray:
        linear: FloatArray = np.add.reduceat(layer_s * (1.0 - q), starts)
        quadratic: FloatArray = np.add.reduceat(layer_s * q, starts)
        return np.outer(linear, microbatches.linear) + np.outer(quadratic, microbatches.quadratic)

    def sizes_of(layer_bytes: FloatArray) -> FloatArray:
        return np.outer(np.add.reduceat(layer_bytes, starts), microbatches.linear)

    last = starts[1:] - 1
    return StageCosts(
        times(profile.forward_s),
        times(profile.backward_input_s),
        times(profile.backward_weight_s),
        sizes_of(profile.activation_bytes),
        sizes_of(profile.weight_input_bytes),
        np.add.reduceat(profile.state_bytes, starts),
        latency_s + np.outer(profile.output_bytes[last], microbatches.linear) / bandwidth_bytes_per_s,
    )


@dataclass(frozen=True)
class PipelineTimeline:
    """When everything happens, for one iteration of all micro-batches.

    makespan_s : end of the last operation [s]
    busy_s : time spent in operations, shape (P,)
    peak_memory_bytes : state plus activations at the worst moment, shape (P,)
    start_s, end_s : of each operation, shape (3, S, M); with merged backward W is empty and stands at the end of B
    orders : what each device runs, in order
    merged : whether B contains W
    """

    makespan_s: float
    busy_s: FloatArray
    peak_memory_bytes: FloatArray
    start_s: FloatArray
    end_s: FloatArray
    placement: tuple[int, ...]
    orders: Orders
    merged: bool

    @property
    def devices(self) -> int:
        """P."""
        return len(self.orders)

    @property
    def bubble(self) -> float:
        """Idle share of all device time [-]: 1 - sum(busy) / (P * makespan)."""
        total = self.devices * self.makespan_s
        return 1.0 - float(self.busy_s.sum()) / total if total > 0.0 else 0.0
