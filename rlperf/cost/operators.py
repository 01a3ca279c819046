"""Operators of one engine_step on one device of a replica: what runs, how often, how long, and its speed of light.

The layers of the architecture (`rlperf.cost.layers`) state theirs; here they are put together with the head, the
norms and the collectives.
"""

from __future__ import annotations

import numpy as np

from rlperf.cost.collectives import all_reduce_s, point_to_point_s
from rlperf.cost.layers import Matrix, stack_of
from rlperf.cost.layers.moe import SHARED, shared_is_joined
from rlperf.cost.replica import Operator, Replica, gemm_operator, memory_operator, network_operator
from rlperf.cost.roofline import Array, as_float, small_op_s
from rlperf.cost.streams import mixed_bytes, mixing_with, streams_fit
from rlperf.layout import BoolArray, FloatArray
from rlperf.specs.engine_calibration import has_reached
from rlperf.specs.hardware import capability


def token_operators(replica: Replica, tokens: Array, sampled: Array) -> list[Operator]:
    """Operators whose time depends on the number of tokens alone: products, experts, norms, collectives, head.

    Parameters
    ----------
    tokens : tokens of the replica in this engine_step [tokens]; a stage works on those of one of its `Replica.batches`
    sampled : rows that go through the head [tokens]
    """
    stack, hidden = stack_of(replica.arch), replica.arch.hidden
    whole = as_float(tokens) / replica.batches
    local = whole / replica.attention_data
    summed = _all_reduces(replica)
    found = [_norms(replica, local, summed)]
    if replica.arch.residual_streams > 1:
        found.append(_mixing(replica, float(stack.norms), local))
    for matrix, weights, count in stack.products:
        product = product_operator(replica, matrix, replica.roles.of(weights, matrix.name), float(count), local)
        found.append(product.times(~shared_is_joined(replica)) if matrix.name == SHARED else product)
    for half in stack.halves:
        found += half.layer.token_operators(replica, float(half.count), whole, local)
    found.append(_all_reduce(replica, local, summed))
    found += head_operators(replica, sampled)
    hop = point_to_point_s(replica.hw, local * hidden * 2.0, replica.within(replica.tensor * replica.pipeline))
    found.append(network_operator(replica, "pipeline", 1.0, hop * (replica.pipeline - 1.0), local * hidden * 2.0))
    return found


def _mixing(replica: Replica, count: float, tokens: FloatArray) -> Operator:
    """Residual streams around ``count`` halves of layers."""
    arch, device = replica.arch, replica.hw.device
    fit = streams_fit(replica.hw, replica.engine.engine)
    seconds = sum(mixing_with(device, fit, tokens, arch.residual_streams, arch.hidden), np.zeros(()))
    moved = 2.0 * tokens * mixed_bytes(arch.residual_streams, arch.hidden)
    zero = np.zeros(())
    return Operator("hyper-connections", count * seconds, zero, count * moved / device.memory_bandwidth, zero)


def product_operator(replica: Replica, matrix: Matrix, dtype: str, count: float, tokens: FloatArray) -> Operator:
    """``count`` products of one matrix; per-head ones are batched and stay in 16 bits."""
    outputs, inputs = matrix.on(replica.attention_tensor)
    if matrix.batched:
        count, outputs, dtype = matrix.batched * count, outputs / matrix.batched, "bf16"
    return gemm_operator(replica, matrix.name, count, tokens, outputs, inputs, dtype)


def _norms(replica: Replica, local: FloatArray, summed: FloatArray) -> Operator:
    """Norms in front of the halves of layers, each with the residual sum.

    A pass reads the half before and the residual and writes both (8 bytes of 16-bit values). Where it is part of the
    ``summed`` all-reduces, nothing is launched for it, and what these would have written for it to read stays in
    registers: 4 bytes are left.
    """
    hw, hidden, norms = replica.hw, local * replica.arch.hidden, float(stack_of(replica.arch).norms)
    inside = np.where(_has_norms(replica, 2.0 * hidden), np.minimum(summed, norms), 0.0)
    seconds = (norms - inside) * small_op_s(hw, 8.0 * hidden) + inside * small_op_s(hw, 4.0 * hidden, launched=False)
    zero, moved = np.zeros(()), (8.0 * norms - 4.0 * inside) * hidden
    return Operator("norm", seconds, zero, moved / hw.device.memory_bandwidth, zero)


def _has_norms(replica: Replica, message: FloatArray) -> BoolArray:
    """Whether the engine's all-reduces of a ``message`` [bytes] over the tensor parallel group have a norm inside."""
    engine, at = replica.engine, replica.attention_tensor
    found = np.zeros(np.broadcast_shapes(message.shape, at.shape), dtype=bool)
    for one in engine.fused_norms:
        if one.capability == capability(replica.hw.device) and has_reached(engine.release, one.since):
            limits = one.up_to.items()
            found |= np.any([(at == n) & (message <= most) for n, most in limits], axis=0) if limits else at > 1.0
    return found


def _all_reduces(replica: Replica) -> FloatArray:
    """All-reduces of the hidden state behind the halves of layers [1]."""
    return sum((half.count * half.layer.all_reduces(replica) for half in stack_of(replica.arch).halves), np.zeros(()))


def _all_reduce(replica: Replica, local: FloatArray, number: FloatArray) -> Operator:
    """These ``number`` all-reduces."""
    at = replica.attention_tensor
    size = local * replica.arch.hidden * 2.0
    reduced = all_reduce_s(replica.hw, size, at, replica.within(at), implementation=replica.engine.all_reduce)
    return network_operator(replica, "all-reduce", 1.0, reduced * number, number * size * 2.0 * (at - 1.0) / at)


def head_operators(replica: Replica, sampled: Array) -> list[Operator]:
    """Output head and sampling of ``sampled`` rows, each sampled where its request is."""
    rows = as_float(sampled) / replica.batches
    outputs = replica.arch.head_outputs
    width = np.maximum(outputs / replica.head_tensor, 1.0)
    seen = rows * replica.head_tensor / replica.tensor
    own = rows / replica.attention_data
    return [
        gemm_operator(replica, "head", 1.0, seen, width, replica.arch.hidden, replica.roles.head),
        memory_operator(replica, "sampling", 1.0, own * outputs * 10.0),
    ]


def decode_operators(replica: Replica, running: Array, kv_tokens: Array) -> list[Operator]:
    """Attention of a decode: ``running`` requests that read ``kv_tokens`` cached tokens altogether."""
    share = replica.batches * replica.attention_data
    requests, kv = as_float(running) / share, as_float(kv_tokens) / share
    found: list[Operator] = []
    for half in stack_of(replica.arch).halves:
        found += half.layer.decode_operators(replica, float(half.count), requests, kv)
    return found


def recording_s(replica: Replica) -> FloatArray:
    """What every drafted token adds to a verification, per running request: `Layer.recording_s` of all layers [s]."""
    halves = stack_of(replica.arch).halves
    each = sum((half.count * half.layer.recording_s(replica) for half in halves), np.zeros(()))
    return np.asarray(each / (replica.batches * replica.attention_data))


def prefill_operators(replica: Replica, requests: Array, query_tokens: Array, kv_tokens: Array) -> list[Operator]:
    """Attention over prompts: ``requests`` with ``query_tokens`` new of ``kv_tokens`` visible tokens each."""
    sequences = as_float(requests) / (replica.batches * replica.attention_data)
    query, kv = as_float(query_tokens), as_float(kv_tokens)
    found: list[Operator] = []
    for half in stack_of(replica.arch).halves:
        found += half.layer.prefill_operators(replica, float(half.count), sequences, query, kv)
    return found
