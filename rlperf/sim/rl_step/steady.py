"""The steady state of an asynchronous run on given pools: what `asynchronous.simulate` asks for, from its stages."""

from __future__ import annotations

import numpy as np

from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.sim.rl_step.asynchronous import AsyncRun, Update
from rlperf.sim.rl_step.compose import StepStages
from rlperf.sim.rl_step.modes import Execution
from rlperf.sim.rollout.trajectories import Trajectories
from rlperf.specs.modes import Mode
from rlperf.specs.rl_calibration import FrameworkCalibration


def execution_of(framework: FrameworkCalibration, mode: Mode, staleness: int, chunks: int = 1) -> Execution:
    """The mode as the framework runs it: weights in flight, interrupted requests, what its staleness bound counts."""
    flags = int(framework.in_flight_updates), int(framework.partial_rollout), int(framework.counts_groups)
    return Execution(mode, max(staleness, 1), 1, *flags, chunks=chunks)


def under_way(limits: EngineLimits, replicas: int, trajectories: Trajectories, batches: int = 1) -> tuple[int, float]:
    """(requests that a replica runs at once, their mean cached tokens) in the steady state.

    What the engine and its cache admit, at most its share of ``batches``. A running request is length-biased, and half
    done: prompt + E[L^2] / E[L] / 2.
    """
    generated = trajectories.generated_tokens.astype(np.float64)
    context = float(trajectories.prompt_tokens[trajectories.offsets[:-1]].mean())
    context += float((generated**2).mean() / generated.mean()) / 2.0
    fit = int(limits.kv_tokens // context) if np.isfinite(limits.kv_tokens) else 1 << 30
    share = -(-len(trajectories) * batches // replicas)
    return max(min(limits.max_running, fit, share), 1), context


def steady_run(
    framework: FrameworkCalibration,
    cost: EngineStepCost,
    limits: EngineLimits,
    replicas: int,
    stages: StepStages,
    trajectories: Trajectories,
    *,
    max_staleness: int,
    sync_interval: int = 1,
) -> AsyncRun:
    """An asynchronous run, ready for `asynchronous.simulate`; ``cost`` holds the framework's host time already.

    One token of every request of a replica takes what the engine takes at the mean context, linear between one running
    request and all slots. Slots: what the engine and its cache admit, at most the batches that the staleness bound lets
    start. The framework says whether weights are taken in flight, and whether requests are interrupted.
    """
    size = int(np.unique(trajectories.group).size)
    per_group = len(trajectories) // size
    lengths = trajectories.generated_tokens[: size * per_group].reshape(size, per_group).astype(np.float64)
    prompt = float(trajectories.prompt_tokens[trajectories.offsets[:-1]].mean())
    slots, context = under_way(limits, replicas, trajectories, max_staleness + 1)
    alone, full = float(cost.decode_s(1.0, context)), float(cost.decode_s(float(slots), slots * context))
    each = (full - alone) / max(slots - 1, 1)
    prefill = cost.engine_step_s(slots, slots * context, prompt, prompt * (prompt + 1.0) / 2.0, 1.0)
    times = stages.times()
    work = np.maximum(times.scoring_s, times.reference_s) + np.maximum(times.training_s, times.critic_s)
    update: Update = "in_flight" if framework.in_flight_updates else "drain"
    if framework.partial_rollout:
        update = "interrupt"
    return AsyncRun(
        response_tokens=lengths,
        batch=len(trajectories),
        train_s=float(work) + stages.data_movement_s + stages.other_s,
        replicas=replicas,
        slots=slots,
        token_s=max(alone - each, 0.0),
        token_s_per_running=each,
        wait_s=float(stages.reward_s.max()),
        prompt_tokens=prompt,
        prefill_token_s=max(float(prefill) - full, 0.0) / max(prompt, 1.0),
        sync_s=stages.weight_sync_s,
        # an engine that does not take weights in flight stands still for the whole of a sync
        swap_s=stages.swap_s if framework.in_flight_updates else stages.weight_sync_s,
        sync_interval=sync_interval,
        update=update,
        max_staleness=max_staleness,
    )
