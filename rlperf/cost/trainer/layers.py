"""Seconds of one microbatch in one mean layer of one device: products, attention, experts, memory-bound passes.

The layers of the architecture (`rlperf.cost.layers`) state theirs; here they are weighed by how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rlperf.cost.layers import stack_of
from rlperf.cost.layers.layer import Matrix
from rlperf.cost.roofline import cast_s, gemm_s, small_op_s, stream_s
from rlperf.cost.streams import mixed_bytes
from rlperf.cost.trainer.parameters import head_columns
from rlperf.cost.trainer_device import TrainerDevice
from rlperf.layout import FloatArray
from rlperf.specs.architecture import Architecture
from rlperf.specs.hardware import Hardware


@dataclass(frozen=True)
class LayerSeconds:
    """Device seconds of one microbatch in the mean layer (or head); every field broadcasts.

    ``attention``, ``experts`` and ``feed_forward`` are the forward of attention, of routed experts and of dense
    feed-forwards with their norm: what selective recompute repeats.
    ``last`` is that of the dense MLP's down projection: what a recompute that stops early leaves out. ``again`` is what
    a chunked loss adds to a head: the projection once more, and the bytes that it moves beyond a plain one's.
    """

    forward: FloatArray
    backward: FloatArray
    attention: FloatArray
    last: FloatArray = field(default_factory=lambda: np.zeros(()))
    experts: FloatArray = field(default_factory=lambda: np.zeros(()))
    feed_forward: FloatArray = field(default_factory=lambda: np.zeros(()))
    again: FloatArray = field(default_factory=lambda: np.zeros(()))


def matrix_s(
    hw: Hardware, rows: FloatArray, outputs: FloatArray, inputs: FloatArray, dtype: str, *, frozen: bool = False
) -> tuple[FloatArray, FloatArray]:
    """(forward, backward) seconds of one matrix: y = x W; backward dx = dy W' and, unless frozen, dW = x' dy."""
    forward = gemm_s(hw, rows, outputs, inputs, dtype)
    backward = gemm_s(hw, rows, inputs, outputs, dtype)
    if not frozen:
        backward = backward + gemm_s(hw, inputs, outputs, rows, dtype)
    return forward, backward


def layer_seconds(arch: Architecture, device: TrainerDevice) -> LayerSeconds:
    """Mean layer: matrices, what each kind of layer does beside them, and memory-bound passes."""
    stack, rate, work = stack_of(arch), device.rate, device.work
    forward: FloatArray = np.zeros(())
    backward: FloatArray = np.zeros(())
    attention: FloatArray = np.zeros(())
    last: FloatArray = np.zeros(())
    experts: FloatArray = np.zeros(())
    for matrix, _, count in stack.matrices:
        share = count / arch.layers
        ahead, back = matrix_s(device.hw, work.tokens, *matrix.on(device.tensor), device.dtype, frozen=device.frozen)
        forward, backward = forward + share * ahead / rate, backward + share * back / rate
        if device.switches.rowwise:
            backward = backward + share * _by_row_s(matrix, device)
    for half in stack.halves:
        last = last + half.share * half.layer.last_s(device)
        own = half.layer.training_s(device)
        if own is not None:
            forward, backward = forward + half.share * own.forward, backward + half.share * own.backward
            attention, experts = attention + half.share * own.attention, experts + half.share * own.experts
    passes = _passes_s(arch, device) + _scans_s(arch, device)
    forward, backward = forward + passes, backward + 2.0 * passes
    if device.options.lora_rank:
        adapters = device.options.adapted * _adapter_s(arch, device)
        forward, backward = forward + adapters, backward + 2.0 * adapters
    return LayerSeconds(
        forward, backward, attention, last=last, experts=experts, feed_forward=_feed_forward_s(arch, device)
    )


def _by_row_s(matrix: Matrix, device: TrainerDevice) -> FloatArray:
    """What scales of rows add to the backward of a matrix.

    The gradient of its output is cast along either dimension, and kernels that scale rows are left for ones that do
    not, whose results are scaled in a pass of their own: torchao 0.11, ``matmul_with_hp_or_float8_args`` and
    ``addmm_float8_unwrapped``, where sums are not accumulated fast (backward).
    """
    outputs, inputs = matrix.on(device.tensor)
    tokens = device.work.tokens
    results = matrix.parts * tokens * inputs + (0.0 if device.frozen else outputs * inputs)
    return cast_s(device.hw, tokens * outputs, device.dtype) + stream_s(device.hw, 4.0 * results)


def _feed_forward_s(arch: Architecture, device: TrainerDevice) -> FloatArray:
    """Forward of dense feed-forwards, norm and activation included, in the mean layer."""
    found: FloatArray = np.zeros(())
    for half in (half for half in stack_of(arch).halves if half.layer.ends_in_product):
        products = sum(
            matrix_s(device.hw, device.work.tokens, *matrix.on(device.tensor), device.dtype)[0] / device.rate
            for matrix in half.layer.matrices()
        )
        moved = half.layer.pass_bytes(device.tensor) * device.work.tokens
        moved = (moved + 4.0 * arch.hidden * device.work.stream_tokens) * _fused(device)
        found = found + half.share * (products + small_op_s(device.hw, moved))
    return found


def _fused(device: TrainerDevice) -> FloatArray | float:
    """Bytes that small passes move over the least."""
    timing = device.trainer.timing
    return timing.elementwise * (1.0 if device.switches.fused else timing.eager)


def head_seconds(arch: Architecture, device: TrainerDevice) -> LayerSeconds:
    """Output projection and loss, always in 16 bits: cross-entropy over the vocabulary, or of a critic's one value."""
    hw, work, width = device.hw, device.work, np.asarray(float(arch.hidden))
    columns, tokens = head_columns(arch, device.tensor), work.tokens * device.options.head_share
    forward, backward = matrix_s(hw, tokens, columns, width, "bf16", frozen=device.frozen)
    timing, logits = device.trainer.timing, tokens * columns
    loss = stream_s(hw, logits * timing.cross_entropy_bytes)
    embedding = small_op_s(hw, work.stream_tokens * arch.hidden * 8.0)
    rate = device.generation.sustained
    return LayerSeconds(
        forward / rate + 0.5 * loss + embedding,
        backward / rate + 0.5 * loss + embedding,
        np.zeros(()),
        again=forward / rate + stream_s(hw, logits * (timing.chunked_bytes - timing.cross_entropy_bytes)),
    )


def _passes_s(arch: Architecture, device: TrainerDevice) -> FloatArray:
    """Norms, residual sums, rotary embedding and activation of the mean layer, forward, at 2 bytes a value.

    Bytes: norm 2 reads or writes of h, residual 3 of h, in front of each half; several residual streams are mixed in
    front of and behind it instead; what a kind adds it states itself.
    """
    stack, work, streams = stack_of(arch), device.work, arch.residual_streams
    each = 2.0 * mixed_bytes(streams, arch.hidden) + 4.0 * arch.hidden if streams > 1 else 5.0 * 2.0 * arch.hidden
    stream = stack.norms / arch.layers * each * work.stream_tokens
    own = sum((half.share * half.layer.pass_bytes(device.tensor) for half in stack.halves), np.zeros(()))
    return small_op_s(device.hw, (stream + own * work.tokens) * _fused(device))


def _scans_s(arch: Architecture, device: TrainerDevice) -> FloatArray:
    """What moves around scans of recurrent layers, and in scans that no table holds, forward.

    Values of 2 bytes in bandwidth form; extrapolated.
    """
    values = sum(half.share * half.layer.scan_values(device.hw) for half in stack_of(arch).halves)
    return small_op_s(device.hw, 2.0 * values * device.work.tokens / device.tensor) if values else np.zeros(())


def _adapter_s(arch: Architecture, device: TrainerDevice) -> FloatArray:
    """LoRA beside every matrix, forward: two thin products and a sum, bound by memory and by launches."""
    stack, timing = stack_of(arch), device.trainer.timing
    values: FloatArray = np.zeros(())
    number = 0.0
    for matrix, _, count in stack.matrices:
        outputs, inputs = matrix.on(device.tensor)
        share = count / arch.layers
        values, number = values + share * (outputs + inputs), number + share
    for route, count in stack.routed:
        each = count / arch.layers * route.matrices
        values = values + each * (route.width + route.hidden) * route.active / device.tensor
        number += each
    return stream_s(device.hw, values * device.work.tokens * timing.lora_bytes) + number * timing.lora_linear
