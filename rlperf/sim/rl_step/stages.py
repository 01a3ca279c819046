"""Seconds of the stages of one rl_step from lengths, layouts and calibrations: what `compose` puts in order."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rlperf.cost.batching import Microbatches
from rlperf.cost.collectives import host_copy_s
from rlperf.cost.engine_step import EngineLimits, EngineStepCost, recompute_s
from rlperf.cost.packing import over_all_replicas
from rlperf.cost.scoring import scoring_pass
from rlperf.cost.training import training_update
from rlperf.cost.weight_sync import SyncPayload, SyncShape, weight_sync_s
from rlperf.layout import FloatArray, IntArray, Layout
from rlperf.sim.rl_step.asynchronous import AsyncRun, Update
from rlperf.sim.rl_step.compose import StepStages, Transitions
from rlperf.sim.rl_step.data_movement import BatchShape, data_movement_s
from rlperf.sim.rl_step.modes import Execution
from rlperf.sim.rl_step.overheads import (
    engine_in_framework,
    padded_microbatches,
    routing_skew,
    scoring_in_framework_s,
    training_in_framework_s,
)
from rlperf.sim.rollout.rollout import RolloutResult, simulate_rollout
from rlperf.sim.rollout.routing import Routing
from rlperf.sim.rollout.tail import last_of_groups
from rlperf.sim.rollout.trajectories import Trajectories
from rlperf.specs.architecture import Architecture
from rlperf.specs.hardware import Hardware
from rlperf.specs.modes import Mode
from rlperf.specs.rl_calibration import FrameworkCalibration, Transport
from rlperf.specs.trainer_calibration import TrainerCalibration


@dataclass(frozen=True, eq=False)
class RolloutSetup:
    """The rollout pool: equal replicas of one engine, and how requests reach them.

    ``cost`` is the engine's alone; the framework's host time per engine_step comes on top (`engine_in_framework`).
    """

    cost: EngineStepCost
    limits: EngineLimits
    replicas: int
    devices_per_replica: int
    routing: Routing = "round_robin"


@dataclass(frozen=True, eq=False)
class TrainerSetup:
    """The trainer pool.

    Attributes
    ----------
    layout : one layout (scalars)
    mini_batch : sequences per optimizer update [1]
    token_budget, scoring_token_budget : tokens per packed microbatch and replica; None = ``layout.microbatch`` [tokens]
    scoring_microbatch : sequences per scoring forward where there is no budget [1]
    packing : sequences packed; else padded to the longest of their microbatch (`TrainerOverheads.batching`)
    scoring_passes : log-probability passes on the trainer's devices [1]
    offload_bytes : bytes per device that leave before rollout and return after it; colocated only [bytes]
    """

    architecture: Architecture
    hardware: Hardware
    trainer: TrainerCalibration
    layout: Layout
    mini_batch: int
    token_budget: float | None = None
    scoring_token_budget: float | None = None
    scoring_microbatch: int | None = None
    packing: bool = True
    scoring_passes: int = 2
    dtype: str = "bf16"
    offload_bytes: float = 0.0


@dataclass(frozen=True)
class SyncSetup:
    """The weight sync: path, payload, and who sends to whom."""

    transport: Transport
    payload: SyncPayload
    shape: SyncShape


def microbatches(
    framework: FrameworkCalibration,
    setup: TrainerSetup,
    sequences: int,
    lengths: FloatArray,
    token_budget: float | None,
    each: int | None = None,
    *,
    balanced: bool = True,
) -> Microbatches:
    """Microbatches of one pass over ``sequences`` drawn like ``lengths``.

    Closed form in their moments, except where the framework cuts the sequences of all ranks together.

    ``balanced`` : token loads are evened out over the ranks within this pass.
    """
    layout = setup.layout if each is None else replace(setup.layout, microbatch=np.asarray(each, np.int64))
    together = framework.training.batching == "all" and token_budget is not None
    found = Microbatches.from_moments(
        layout,
        sequences,
        float(lengths.mean()),
        float((lengths**2).mean()),
        float(lengths.max()),
        token_budget=token_budget if setup.packing or together else None,
        packing=setup.packing or together,
        balanced=balanced,
    )
    if together and token_budget is not None:
        ranks = int(layout.data_parallel)
        found = over_all_replicas(found, lengths, sequences, ranks, token_budget, packing=setup.packing)
    return padded_microbatches(framework, layout, found, token_budget)


def training_s(framework: FrameworkCalibration, setup: TrainerSetup, lengths: npt.ArrayLike) -> float:
    """All optimizer updates of one rl_step [s]: `training_in_framework_s` times their number.

    ``lengths`` : prompt + response of every sequence [tokens] ``[sequences]``
    """
    table = np.asarray(lengths, np.float64)
    updates = max(-(-table.size // setup.mini_batch), 1)
    even = framework.training.balance == "update" or updates == 1
    size = min(setup.mini_batch, table.size)
    batch = microbatches(framework, setup, size, table, setup.token_budget, balanced=even)
    cost = training_update(
        setup.architecture,
        setup.hardware,
        setup.trainer,
        setup.layout,
        batch,
        dtype=setup.dtype,
        skew=float(routing_skew(framework, setup.layout)),
    )
    own = training_in_framework_s(framework, setup.architecture, setup.layout, batch, cost.total_s)
    return updates * float(own)


def scoring_s(framework: FrameworkCalibration, setup: TrainerSetup, lengths: npt.ArrayLike) -> float:
    """All scoring passes of one rl_step [s]: `scoring_in_framework_s` times their number; ``lengths`` as above."""
    if not setup.scoring_passes:
        return 0.0
    table = np.asarray(lengths, np.float64)
    budget = setup.scoring_token_budget
    batch = microbatches(framework, setup, table.size, table, budget, setup.scoring_microbatch)
    cost = scoring_pass(
        setup.architecture,
        setup.hardware,
        setup.trainer,
        setup.layout,
        batch,
        dtype=setup.dtype,
        skew=float(routing_skew(framework, setup.layout)),
    )
    # of several passes one scores the reference policy
    reference = 1.0 / setup.scoring_passes if setup.scoring_passes > 1 else 0.0
    own = scoring_in_framework_s(framework, setup.architecture, setup.layout, batch, cost.total_s, reference=reference)
    return setup.scoring_passes * float(own)


def roll_out(setup: RolloutSetup, framework: FrameworkCalibration, trajectories: Trajectories) -> RolloutResult:
    """The rollout of one rl_step in this framework's stack, event by event."""
    return simulate_rollout(
        trajectories,
        setup.replicas,
        cost=engine_in_framework(setup.cost, framework),
        limits=setup.limits,
        devices_per_replica=setup.devices_per_replica,
        routing=setup.routing,
    )


def transitions(setup: TrainerSetup, framework: FrameworkCalibration) -> Transitions:
    """What a colocated pool does between its roles: fixed parts of the framework, bytes over the host link."""
    copy = float(host_copy_s(setup.hardware, setup.offload_bytes)) if setup.offload_bytes else 0.0
    return Transitions(sleep_s=framework.sleep.value, onload_s=copy, offload_s=copy, wake_s=framework.wake.value)


def execution_of(framework: FrameworkCalibration, mode: Mode, staleness: int, chunks: int = 1) -> Execution:
    """The mode as the framework runs it: weights in flight, interrupted requests, what its staleness bound counts."""
    flags = int(framework.in_flight_updates), int(framework.partial_rollout), int(framework.counts_groups)
    return Execution(mode, max(staleness, 1), 1, *flags, chunks=chunks)


def swap_s(framework: FrameworkCalibration, sync: SyncSetup) -> float:
    """What an engine stands still when it takes weights in flight: the fixed part of the path, not the transfer."""
    return framework.sync_fit(sync.transport).fixed


def step_stages(
    framework: FrameworkCalibration,
    rollout: RolloutSetup,
    trainer: TrainerSetup,
    sync: SyncSetup,
    trajectories: Trajectories,
    *,
    reward_s: float = 0.0,
    nodes: int = 1,
    colocated: bool = True,
) -> tuple[StepStages, RolloutResult]:
    """Stages of one rl_step, with the rollout behind them.

    Parameters
    ----------
    framework : behaviour and overheads
    rollout, trainer, sync : the pools and the path between them
    trajectories : of one rl_step
    reward_s : reward of the whole batch where it is not hidden; the framework hides ``reward_hidden`` of it [s]
    nodes : over which a distributed controller spreads [1]
    colocated : whether the pools share devices (then they offload, onload, sleep and wake)
    """
    result = roll_out(rollout, framework, trajectories)
    lengths = np.asarray(trajectories.final_tokens[trajectories.offsets[1:] - 1], np.float64)
    prompts = trajectories.prompt_tokens[trajectories.offsets[:-1]]
    moved = BatchShape(
        sequences=len(trajectories),
        prompt_tokens=float(prompts.mean()),
        response_tokens=float(lengths.mean() - prompts.mean()),
        scoring_passes=trainer.scoring_passes,
    )
    running, context = under_way(rollout.limits, rollout.replicas, trajectories)
    again = recompute_s(engine_in_framework(rollout.cost, framework), rollout.limits.token_budget, running, context)
    hardware = trainer.hardware
    weights = weight_sync_s(hardware, framework.sync_fit(sync.transport), sync.payload, sync.shape)
    stages = StepStages.of(
        result,
        scoring_s=scoring_s(framework, trainer, lengths),
        training_s=training_s(framework, trainer, lengths),
        reward_s=reward_s * (1.0 - framework.reward_hidden),
        weight_sync_s=float(weights),
        data_movement_s=float(data_movement_s(framework, moved, nodes)),
        fixed_s=framework.step.value,
        rollout_group_s=group_seconds(result.finish_s, trajectories.group),
        recompute_s=again,
        swap_s=swap_s(framework, sync),
        transitions=transitions(trainer, framework) if colocated else Transitions(),
    )
    return stages, result


def group_seconds(finish_s: FloatArray, group: IntArray) -> float:
    """Mean time at which a group's last response is there, all started together [s].

    >>> group_seconds(np.array([1.0, 4.0, 2.0]), np.array([7, 7, 9]))
    3.0
    """
    return float(last_of_groups(group, finish_s)[0].mean())


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


def asynchronous_run(
    framework: FrameworkCalibration,
    rollout: RolloutSetup,
    stages: StepStages,
    trajectories: Trajectories,
    *,
    max_staleness: int,
    sync_interval: int = 1,
) -> AsyncRun:
    """The steady state of an asynchronous run on these pools: `steady_run` of their engine in this framework."""
    return steady_run(
        framework, engine_in_framework(rollout.cost, framework), rollout.limits, rollout.replicas, stages, trajectories,
        max_staleness=max_staleness, sync_interval=sync_interval,
    )  # fmt: skip


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
        train_s=float(work) + stages.data_movement_s + stages.fixed_s,
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
