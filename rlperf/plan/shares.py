"""Operators of each role: seconds in the rl_step, what bounds them, and how far they are from the speed of light."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from rlperf.cost.roofline import sheet_flop_per_s
from rlperf.cost.training import TrainingCost
from rlperf.layout import FloatArray
from rlperf.plan.context import Context, TaskContext
from rlperf.plan.evaluate import Evaluation
from rlperf.plan.plan import OperatorShare
from rlperf.specs.job import Role

Bound = Literal["compute", "bandwidth", "latency", "network"]

TRAINING_PARTS: tuple[tuple[str, str, Bound], ...] = (
    ("forward_s", "forward", "compute"),
    ("backward_s", "backward", "compute"),
    ("recompute_s", "activation recompute", "compute"),
    ("bubble_s", "pipeline bubble", "latency"),
    ("host_s", "host launches", "latency"),
    ("exposed_tp_s", "tensor-parallel traffic", "network"),
    ("exposed_cp_s", "context-parallel traffic", "network"),
    ("exposed_ep_s", "expert traffic", "network"),
    ("exposed_pp_s", "stage-to-stage traffic", "network"),
    ("exposed_dp_s", "gradients and sharded weights", "network"),
    ("optimizer_s", "optimizer", "bandwidth"),
    ("offload_s", "host offload", "bandwidth"),
)


def rollout_shares(context: Context, task: TaskContext, evaluation: Evaluation) -> tuple[OperatorShare, ...]:
    """Operators of the rollout, summed over the engine_steps of the first simulated rl_step's slowest replica."""
    result = evaluation.rollouts[0]
    slowest = result.timelines[int(np.argmax(result.replica_finish_s))]
    cost, seg = evaluation.cost, slowest.segments
    steps, running = seg.steps.astype(np.float64), seg.running.astype(np.float64)
    tokens = np.where(seg.prefill_tokens > 0, running + seg.prefill_tokens, cost.padded(running))
    hw, arch = context.rollout_hardware, task.architecture
    degree = evaluation.configuration.pool("rollout").layout.tensor_parallel
    reads = arch.active_parameters * 2.0 / degree / hw.device.memory_bandwidth
    peak = sheet_flop_per_s(hw, "bf16")
    computes = 2.0 * arch.active_parameters * tokens / degree / peak
    pair_flop = 2.0 * (arch.query_width + arch.value_width) * arch.attention_layers / degree
    linear = steps * cost.linear(tokens)
    kv_bytes = float(evaluation.memory.cache_bytes[0] / max(evaluation.memory.kv_tokens[0], 1.0))
    decode = (running > 0) * (cost.decode_fixed_s + cost.decode_per_request_s * running) * steps
    decode = decode + cost.decode_per_kv_token_s * seg.keys
    prefill = (seg.prefill_tokens > 0) * cost.prefill_fixed_s + cost.prefill_per_request_s * seg.prefill_requests
    prefill = prefill + cost.prefill_per_pair_s * seg.prefill_pairs
    host = steps * (cost.host_s + cost.host_per_request_s * (running + seg.prefill_requests))
    rows: list[tuple[str, FloatArray, Bound, float]] = [
        ("matrix products and collectives", linear, "bandwidth", float((steps * np.maximum(reads, computes)).sum())),
        ("decode attention", decode, "bandwidth", float(seg.keys.sum()) * kv_bytes / hw.device.memory_bandwidth),
        ("prefill attention", prefill, "compute", float((pair_flop * seg.prefill_pairs).sum()) / peak),
        ("scheduler and launches", host, "latency", 0.0),
    ]
    total = max(slowest.makespan_s, 1e-12)
    return tuple(_rows("rollout", [(n, float(s.sum()), b, ideal) for n, s, b, ideal in rows], total))


def trainer_shares(context: Context, task: TaskContext, evaluation: Evaluation) -> tuple[OperatorShare, ...]:
    """Parts of the optimizer updates of the first rl_step; ideal: 6 N FLOP per token at the data sheet's peak."""
    cost, updates = evaluation.training, evaluation.demand.batch.updates
    tokens = float(evaluation.demand.lengths(0).sum()) / evaluation.configuration.pool("trainer").devices
    ideal = 2.0 * task.architecture.active_parameters * tokens / sheet_flop_per_s(context.hardware, "bf16")
    light = {"forward_s": ideal, "backward_s": 2.0 * ideal}
    rows = [
        (words, _first_step(cost, name, updates), bound, light.get(name, 0.0)) for name, words, bound in TRAINING_PARTS
    ]
    total = sum(seconds for _, seconds, _, _ in rows)
    return tuple(_rows("trainer", rows, total))


def _first_step(cost: TrainingCost, name: str, updates: int) -> float:
    whole = np.broadcast_to(getattr(cost, name), np.shape(cost.total_s)).ravel()
    return float(whole[:updates].sum())


def _rows(role: Role, rows: list[tuple[str, float, Bound, float]], total: float) -> Iterator[OperatorShare]:
    for words, seconds, bound, ideal in rows:
        if seconds > 0:
            yield OperatorShare(
                role=role, operator=words, seconds=seconds, share=seconds / total, bound=bound,
                speed_of_light=min(ideal / seconds, 1.0),
            )  # fmt: skip
