"""Layout: how a role's work is spread over devices. A struct of arrays: one layout, a grid of open axes, or a list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from rlperf.specs.pool import ATTRIBUTES, LayoutValues, Offload, Recompute

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

RECOMPUTE: tuple[str, ...] = get_args(Recompute)
"""Names of the activation_recompute codes 0, 1, 2."""
OFFLOAD: tuple[str, ...] = get_args(Offload)
"""Names of the offload codes 0..3: what the trainer keeps in host memory."""
WORDS = {"activation_recompute": RECOMPUTE, "offload": OFFLOAD}
"""Attributes of a layout that are words, and the codes that stand for them in arrays."""


def code(name: str, value: int | float | str) -> int:
    """The number that stands for an attribute's value in the arrays of a layout.

    >>> code("offload", "both"), code("sequence_parallel", True), code("tensor_parallel", 4)
    (3, 1, 4)
    """
    return WORDS[name].index(str(value)) if name in WORDS else int(value)


_DEFAULTS = {each.name: code(each.name, each.default or 0) for each in ATTRIBUTES if each.part == "layout"}


@dataclass(frozen=True)
class Layout:
    """Parallel degrees and the settings that go with them; every field is an int64 array and all broadcast together.

    Attributes
    ----------
    tensor_parallel, pipeline_parallel, data_parallel : degrees [1]
    context_parallel : ring context parallel [1]
    ulysses : Ulysses sequence parallel (all-to-all over heads) [1]
    expert_parallel, expert_tensor_parallel : expert degrees; they regroup the devices of TP x CP x DP [1]
    virtual_pipeline : model chunks per pipeline stage (1 = no interleaving)
    sequence_parallel : 1 where activations outside the tensor-parallel matrices are split too
    zero_stage : 0 replicas, 1 optimizer sharded, 2 gradients too, 3 weights too (FSDP)
    shard_size : devices over which ZeRO shards (HSDP); 0 = all of data_parallel
    activation_recompute : index into RECOMPUTE
    offload : index into OFFLOAD
    microbatch : sequences per forward on one replica (with packing: per padded microbatch)
    attention_data_parallel : engine: data-parallel attention inside one replica
    """

    tensor_parallel: IntArray
    pipeline_parallel: IntArray
    data_parallel: IntArray
    context_parallel: IntArray
    ulysses: IntArray
    expert_parallel: IntArray
    expert_tensor_parallel: IntArray
    virtual_pipeline: IntArray
    sequence_parallel: IntArray
    zero_stage: IntArray
    shard_size: IntArray
    activation_recompute: IntArray
    offload: IntArray
    microbatch: IntArray
    attention_data_parallel: IntArray

    @classmethod
    def of(cls, **degrees: npt.ArrayLike) -> Layout:
        """Layout from numbers or flat columns; what is not named is 1 (flags, ZeRO, recompute, offload: 0).

        >>> Layout.of(tensor_parallel=4, data_parallel=[1, 2]).devices.tolist()
        [4, 8]
        >>> tensor, data = np.ix_([1, 2, 4], [1, 8])  # open axes: broadcasting shares what is common
        >>> Layout.of(tensor_parallel=tensor, data_parallel=data).devices.tolist()
        [[1, 8], [2, 16], [4, 32]]
        """
        unknown = set(degrees) - set(_DEFAULTS)
        if unknown:
            raise TypeError(f"unknown layout axis: {', '.join(sorted(unknown))}")
        values = {name: np.asarray(degrees.get(name, default), dtype=np.int64) for name, default in _DEFAULTS.items()}
        np.broadcast_shapes(*(value.shape for value in values.values()))
        return cls(**values)

    @classmethod
    def of_values(cls, values: LayoutValues) -> Layout:
        """What a plan states as one flat row, in arrays of length 1.

        >>> Layout.of_values(LayoutValues(tensor_parallel=4, activation_recompute="full")).activation_recompute.tolist()
        [2]
        """
        return cls.of(**{name: [code(name, value)] for name, value in values})

    def values(self) -> LayoutValues:
        """A scalar layout as a plan states it."""
        numbers: dict[str, Any] = self.to_dict()
        return LayoutValues(**numbers | {name: words[numbers[name]] for name, words in WORDS.items()})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of all fields broadcast together."""
        shapes = {values.shape for values in vars(self).values()}
        return shapes.pop() if len(shapes) == 1 else np.broadcast_shapes(*shapes)

    @property
    def size(self) -> int:
        """Number of candidates."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def replica_devices(self) -> IntArray:
        """Devices of one replica: TP x PP x CP x Ulysses."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel * self.ulysses

    @property
    def devices(self) -> IntArray:
        """Devices of the whole layout: replica x data_parallel."""
        return self.replica_devices * self.data_parallel

    @property
    def shards(self) -> IntArray:
        """Devices over which ZeRO shards one stage's parameters: shard_size, or data x context x Ulysses parallel."""
        everyone = self.data_parallel * self.context_parallel * self.ulysses
        return np.where(self.shard_size > 0, np.minimum(self.shard_size, everyone), everyone)

    @property
    def expert_data_parallel(self) -> IntArray:
        """Replicas of each expert shard: stage devices / (expert_parallel x expert_tensor_parallel)."""
        stage = self.devices // self.pipeline_parallel
        return np.maximum(stage // (self.expert_parallel * self.expert_tensor_parallel), 1)

    def flat(self, mask: BoolArray | None = None) -> Layout:
        """Every field as a flat column of equal length, those of ``mask`` only if given, which may have more axes."""
        if mask is None:
            return Layout(**{name: values.ravel() for name, values in self._broadcast(self.shape).items()})
        shape = np.broadcast_shapes(self.shape, mask.shape)
        keep = np.broadcast_to(mask, shape)
        return Layout(**{name: values[keep] for name, values in self._broadcast(shape).items()})

    def take(self, index: Any) -> Layout:
        """Rows of a flat layout by index, slice or mask."""
        return Layout(**{name: values[index] for name, values in self._broadcast(self.shape).items()})

    def _broadcast(self, shape: tuple[int, ...]) -> dict[str, IntArray]:
        """Fields of one shape; most are already, and broadcasting costs more than taking a few rows."""
        named = vars(self).items()
        return {name: values if values.shape == shape else np.broadcast_to(values, shape) for name, values in named}

    def with_(self, **changes: npt.ArrayLike) -> Layout:
        """A copy with some fields replaced."""
        return replace(self, **{name: np.asarray(value, dtype=np.int64) for name, value in changes.items()})

    def on(self, devices: npt.ArrayLike) -> Layout:
        """The same replicas on other numbers of devices: as many as these hold, one at least.

        >>> Layout.of(tensor_parallel=[1, 2], data_parallel=[8, 4]).on(4).data_parallel.tolist()
        [4, 2]
        """
        return self.with_(data_parallel=np.maximum(np.asarray(devices) // self.replica_devices, 1))

    def rows(self) -> Iterator[Layout]:
        """Scalar layouts of a flat one, in order."""
        flat = self.flat()
        return (flat.take(index) for index in range(flat.size))

    def to_dict(self) -> dict[str, int]:
        """A scalar layout as plain numbers."""
        return {field.name: int(getattr(self, field.name)) for field in fields(self)}


def distinct_rows(columns: Sequence[npt.NDArray[Any]]) -> tuple[IntArray, IntArray] | None:
    """(index of the first of each distinct row, distinct row of each row) of columns of 8-byte numbers.

    Rows are told apart by a hash, then compared; None in the unlikely case that two rows share one.

    >>> first, back = distinct_rows([np.array([1, 2, 1]), np.array([0.5, 0.5, 0.5])])
    >>> first[back].tolist()
    [0, 1, 0]
    """
    mixed = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        mixed = (mixed ^ np.ascontiguousarray(column).view(np.uint64)) * _MIX
        mixed ^= mixed >> np.uint64(29)
    _, first, back = np.unique(mixed, return_index=True, return_inverse=True)
    if any((column[first][back] != column).any() for column in columns):
        return None
    return first, back


_MIX = np.uint64(0x9E3779B97F4A7C15)
"""Odd multiplier that spreads bits (Knuth's golden ratio)."""


Stage = TypeVar("Stage")


def taken(stage: Stage, index: Any, whole: tuple[str, ...] = ()) -> Stage:
    """Some rows of a struct of arrays and layouts; what is neither, and the fields ``whole``, go with all of them."""
    rows = {
        name: value.take(index) if isinstance(value, Layout) else value[index]
        for name, value in vars(stage).items()
        if isinstance(value, np.ndarray | Layout) and name not in whole
    }
    return replace(stage, **rows)  # type: ignore[type-var]
