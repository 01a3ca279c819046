"""The steady state of an asynchronous run on given pools: what `asynchronous.simulate` asks for, from its stages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlperf.cost.engine_step import EngineLimits, EngineStepCost, recompute_s
from rlperf.sim.rl_step.asynchronous import AsyncRun, Update
from rlperf.sim.rl_step.flow import of_turns
from rlperf.sim.rl_step.modes import Execution, trainer_work_s
from rlperf.sim.rl_step.refilled import Refilled
from rlperf.sim.rl_step.replicas import Agents, TokenPace
from rlperf.sim.rl_step.stages import StageSeconds
from rlperf.sim.rollout.trajectories import Trajectories
from rlperf.specs.modes import Mode
from rlperf.specs.rl_calibration import FrameworkCalibration


def execution_of(framework: FrameworkCalibration, mode: Mode, staleness: int, chunks: int) -> Execution:
    """The mode as the framework runs it: weights in flight, interrupted requests, what its staleness bound counts."""
    flags = int(framework.in_flight_updates), int(framework.partial_rollout), int(framework.counts_groups)
    return Execution(mode, max(staleness, 1), 1, *flags, chunks=chunks)


def engine_slots(limits: EngineLimits, context: float) -> int:
    """Requests of ``context`` cached tokens that a replica may run at once: what the engine and its cache admit.

    How many there are is not said here: the staleness bound and whole groups decide it, event by event.
    """
    fit = int(limits.kv_tokens // context) if np.isfinite(limits.kv_tokens) else 1 << 30
    return max(min(limits.max_running, fit), 1)


def steady_run(
    framework: FrameworkCalibration,
    cost: EngineStepCost,
    limits: EngineLimits,
    replicas: int,
    stages: StageSeconds,
    rl_steps: Sequence[Trajectories],
    state: Refilled,
    *,
    max_staleness: int,
) -> AsyncRun:
    """An asynchronous run, ready for `asynchronous.simulate`; ``cost`` holds the framework's host time already.

    Groups are drawn from those of all ``rl_steps``, and ``stages`` are means over them: one rl_step of few prompts is
    a sample, whose mean length is off by as much as its longest responses are rare. One token of every request of a
    replica takes what the engine takes at the mean context (prompt + E[L^2] / E[L] / 2), linear between one running
    request and its share of the batches that the staleness bound lets start. What engines read per rl_step is spread
    over all tokens, as ``state`` says. Agents are served turn by turn. The framework says whether weights are taken in
    flight, and whether requests are interrupted; these compute their cache again as in `recompute_s`.
    """
    batch = len(rl_steps[0])
    size = batch // int(np.unique(rl_steps[0].group).size)
    lengths = np.concatenate([each.generated_tokens for each in rl_steps]).astype(np.float64)
    lengths = lengths[: lengths.size // size * size].reshape(-1, size)
    prompt = float(np.mean([each.prompt_tokens[each.offsets[:-1]].mean() for each in rl_steps]))
    context = of_turns(rl_steps)[0]
    # all that the staleness bound lets start; of agents the engine decides who runs
    most = -(-batch * (max_staleness + 1) // replicas)
    if all(each.single_turn for each in rl_steps):
        slots = engine_slots(limits, context)
        read_s = state.read_s * replicas * len(rl_steps) / float(lengths.sum())
        engines: TokenPace | Agents = _pace(cost, limits, max(min(slots, most), 1), context, prompt, read_s)
    else:
        slots, engines = most, Agents.of(rl_steps, cost, limits)
    update: Update = "in_flight" if framework.in_flight_updates else "drain"
    if framework.partial_rollout:
        update = "interrupt"
    # an engine that does not take weights in flight, or is interrupted for them, stands still for the whole of a sync
    swap_s = float((stages.swap_s if update == "in_flight" else stages.weight_sync_s).mean())
    return AsyncRun(
        response_tokens=lengths,
        batch=batch,
        train_s=float(trainer_work_s(stages).mean()),
        engines=engines,
        replicas=replicas,
        slots=slots,
        wait_s=float(stages.reward_s.mean()),
        sync_s=float(stages.weight_sync_s.mean()),
        swap_s=swap_s,
        update=update,
        max_staleness=max_staleness,
    )


def _pace(
    cost: EngineStepCost, limits: EngineLimits, running: int, context: float, prompt: float, read_s: float
) -> TokenPace:
    """The pace of a replica's tokens between one running request and ``running`` of them, each of ``context`` tokens.

    ``read_s`` : what the engine reads of prompts, per token that it writes [s]
    """
    alone, full = float(cost.decode_s(1.0, context)), float(cost.decode_s(float(running), running * context))
    each = (full - alone) / max(running - 1, 1)
    again_s = recompute_s(cost, float(limits.token_budget), running, context) / (running * context)
    return TokenPace(max(alone - each, 0.0), each + read_s, prompt, again_s)
