"""One microbatch on one device of a trainer: what depends on its work and few degrees alone, costed once where shared.

Candidates that differ in pipeline chunks, ZeRO, recompute or offload put the same matrices through the same device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np

from rlperf.cost.trainer.layers import LayerSeconds, head_seconds, layer_seconds
from rlperf.cost.trainer.parallel import Passes, context_traffic, expert_traffic, tensor_traffic
from rlperf.cost.trainer_device import TrainerDevice, Work
from rlperf.layout import FloatArray, IntArray, Layout, distinct_rows
from rlperf.specs.architecture import Architecture

READ = (
    "tensor_parallel",
    "context_parallel",
    "ulysses",
    "expert_parallel",
    "expert_tensor_parallel",
    "sequence_parallel",
)
"""Axes of a layout that the operators of a layer and their traffic read."""
FEW = 64
"""Rows below which looking for equal ones costs more than it saves."""


@dataclass(frozen=True)
class MicrobatchSeconds:
    """Seconds of one microbatch: the mean layer, the head, and the mean layer's tensor, context and expert traffic."""

    layer: LayerSeconds
    head: LayerSeconds
    tensor: Passes
    context: Passes
    expert: Passes


def microbatch_seconds(arch: Architecture, device: TrainerDevice) -> MicrobatchSeconds:
    """Operators and traffic of one microbatch.

    Flat columns are costed on their distinct rows; open axes as they are.
    """

    def costed(some: TrainerDevice) -> MicrobatchSeconds:
        where = (arch, some.hw, some.trainer, some.layout, some.work)
        on = some.switches
        return MicrobatchSeconds(
            layer=layer_seconds(arch, some),
            head=head_seconds(arch, some),
            tensor=tensor_traffic(*where, on, some.gathered_bytes),
            context=context_traffic(*where),
            expert=expert_traffic(*where, some.options.skew, on),
        )

    return _on_distinct(device, costed)


def _on_distinct(device: TrainerDevice, costed: Callable[[TrainerDevice], MicrobatchSeconds]) -> MicrobatchSeconds:
    """``costed`` of the distinct rows, handed back to all rows; of everything where there are no flat columns."""
    layout, work, options = device.layout, device.work, device.options
    axes = {name: getattr(layout, name) for name in READ}
    tasks = {field.name: getattr(work, field.name) for field in fields(work)}
    columns = [np.asarray(value) for value in (*axes.values(), *tasks.values(), options.skew, options.head_share)]
    shape = np.broadcast_shapes(*(column.shape for column in columns))
    if len(shape) != 1 or shape[0] < FEW or any(column.shape not in ((), shape) for column in columns):
        return costed(device)
    found = distinct_rows([column for column in columns if column.shape == shape])
    if found is None:
        return costed(device)
    first, back = found

    def some(value: FloatArray | IntArray | float) -> np.ndarray:
        return np.asarray(value)[first] if np.shape(value) == shape else np.asarray(value)

    small = costed(
        replace(
            device,
            layout=Layout.of(**{name: some(value) for name, value in axes.items()}),
            work=Work(**{name: some(value) for name, value in tasks.items()}),
            options=replace(options, skew=some(options.skew), head_share=some(options.head_share)),
        )
    )
    return MicrobatchSeconds(
        **{field.name: _spread(getattr(small, field.name), first, back) for field in fields(small)}
    )


Part = TypeVar("Part", LayerSeconds, Passes)


def _spread(part: Part, first: IntArray, back: IntArray) -> Part:
    """Distinct rows back in the places of all rows; what all share stays a number."""
    values = {field.name: getattr(part, field.name) for field in fields(part)}
    return type(part)(
        **{name: value[back] if np.shape(value) == first.shape else value for name, value in values.items()}
    )
