"""Operators of each role: seconds in the rl_step, what bounds them, and how far they are from the speed of light."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, cast

import numpy as np

from rlperf.cost.inference import decode_breakdown
from rlperf.cost.parameters import active_parameters, attention_flop, pair_flop
from rlperf.cost.replica import Replica
from rlperf.cost.roofline import sheet_flop_per_s
from rlperf.cost.trainer.update import TrainingCost
from rlperf.layout import Layout
from rlperf.plan.answer.plan import OperatorShare
from rlperf.plan.judge.evaluate import Evaluation
from rlperf.plan.question.context import Context, TaskContext
from rlperf.sim.rollout.timeline import Segments
from rlperf.specs.pool import Role

NEGLIGIBLE_S = 1e-6
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
    """Operators of the rollout: those of the first rl_step's slowest replica, scaled to the mean rollout.

    Decode time is split by the breakdown at the replica's mean engine_step. Engine_steps with prefill are one row;
    their ideal is the FLOP of prompt tokens and pairs at the data sheet's peak.
    """
    result = evaluation.rollouts[0]
    slowest = result.timelines[int(np.argmax(result.replica_finish_s))]
    seg, pool = slowest.segments, evaluation.configuration.pool("rollout")
    mixed = seg.prefill_tokens > 0
    decode_s, prefill_s = float(seg.seconds[~mixed].sum()), float(seg.seconds[mixed].sum())
    total = max(slowest.makespan_s, 1e-12)
    to_mean = float(evaluation.seconds.rollout_s.mean()) / total
    rows: list[OperatorShare] = []
    steps = float(seg.steps[~mixed].sum())
    if steps:
        weights = seg.seconds[~mixed] / max(decode_s, 1e-12)
        running = max(float(weights @ seg.running[~mixed]), 1.0)
        keys = float(weights @ (seg.keys[~mixed] / np.maximum(seg.steps[~mixed], 1)))
        layout = Layout.of_values(pool.layout).with_(data_parallel=[1]).take(0)
        dtypes = pool.settings.rollout_dtype or "bf16", pool.settings.kv_dtype or "bf16"
        replica = Replica.of(task.architecture, context.rollout_hardware, context.engine, layout, *dtypes)
        lines = decode_breakdown(replica, running, keys)
        # the host's share is the engine's and the framework's together, which the breakdown does not know
        host = steps * evaluation.cost.host_s + evaluation.cost.host_per_request_s * float(
            (seg.running * seg.steps)[~mixed].sum()
        )
        device = [line for line in lines if line.name != "host"]
        scale = max(decode_s - host, 0.0) / sum(line.seconds for line in device)
        for line in device:
            made = (f"decode: {line.name}", scale * line.seconds, cast(Bound, line.bound))
            rows += _rows("rollout", [(*made, scale * line.seconds * line.percent_of_light / 100.0)], total)
        rows += _rows("rollout", [("decode: scheduler and launches", host, "latency", 0.0)], total)
    devices = pool.layout.tensor_parallel * pool.layout.pipeline_parallel
    ideal = _prefill_flop(task, seg) / devices / sheet_flop_per_s(context.rollout_hardware, "bf16")
    rows += _rows("rollout", [("prefill engine_steps", prefill_s, "compute", ideal)], total)
    rows += _rows("rollout", [("waiting for tools", slowest.tool_wait_s, "latency", 0.0)], total)
    return tuple(row.model_copy(update={"seconds": to_mean * row.seconds}) for row in rows)


def _prefill_flop(task: TaskContext, segments: Segments) -> float:
    """FLOP of all prefill: 2 per active parameter and token, 2 (query + value width) per layer and pair."""
    arch = task.architecture
    pairs = pair_flop(arch) * float(segments.prefill_pairs.sum())
    return 2.0 * active_parameters(arch) * float(segments.prefill_tokens.sum()) + pairs


def trainer_shares(context: Context, task: TaskContext, evaluation: Evaluation) -> tuple[OperatorShare, ...]:
    """Parts of the optimizer updates of an rl_step, mean over the replicates.

    Ideal at the data sheet's peak: 2 N FLOP per token and what attention's pairs take forwards, both twice backwards;
    of weights that adapters leave frozen no gradient is made, and products go backwards once.
    """
    cost, demand, pool = evaluation.training, evaluation.demand, evaluation.configuration.pool("trainer")
    count, arch, hw = len(demand.tables), task.architecture, context.hardware
    lengths = np.concatenate([np.ravel(demand.lengths(index)) for index in range(count)])
    each = context.site.epochs / (count * pool.devices)
    products = 2.0 * active_parameters(arch) * each * float(lengths.sum())
    products /= sheet_flop_per_s(hw, pool.settings.compute_dtype or "bf16")
    pairs = each * float(attention_flop(arch, lengths).sum()) / sheet_flop_per_s(hw, "bf16")
    again = 1.0 if pool.settings.lora_rank else 2.0
    light = {"forward_s": products + pairs, "backward_s": again * products + 2.0 * pairs}
    rows = [
        (words, _mean_step(cost, name, context.site.updates(demand.batch)), bound, light.get(name, 0.0))
        for name, words, bound in TRAINING_PARTS
    ]
    rest = float(evaluation.trainer.training_s.mean()) - sum(seconds for _, seconds, _, _ in rows)
    if context.site.critic_shared:
        rows.append(("the critic, and the framework between updates", rest, "compute", 0.0))
    else:
        rows.append(("the framework between updates", rest, "latency", 0.0))
    total = sum(max(seconds, 0.0) for _, seconds, _, _ in rows)
    return tuple(_rows("trainer", rows, total))


def _mean_step(cost: TrainingCost, name: str, updates: int) -> float:
    """Seconds of one part over all updates of an rl_step, mean over the replicates [s]."""
    return updates * float(np.broadcast_to(getattr(cost, name), np.shape(cost.total_s)).mean())


def _rows(role: Role, rows: list[tuple[str, float, Bound, float]], total: float) -> Iterator[OperatorShare]:
    for words, seconds, bound, ideal in rows:
        if seconds > NEGLIGIBLE_S:
            yield OperatorShare(
                role=role, operator=words, seconds=seconds, share=seconds / total, bound=bound,
                speed_of_light=min(ideal / seconds, 1.0),
            )  # fmt: skip
