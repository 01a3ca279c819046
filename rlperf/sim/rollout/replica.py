"""One replica: the public entry that checks its input and chooses how to simulate."""

from __future__ import annotations

import numpy as np

from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.errors import Problem, SpecError
from rlperf.sim.rollout.events import run_events
from rlperf.sim.rollout.options import EngineOptions
from rlperf.sim.rollout.queued import queue_applies, run_queued
from rlperf.sim.rollout.static import run_static, static_applies
from rlperf.sim.rollout.timeline import ReplicaTimeline
from rlperf.sim.rollout.trajectories import Trajectories

PLAIN = EngineOptions()


def simulate_replica(
    trajectories: Trajectories,
    cost: EngineStepCost,
    limits: EngineLimits,
    *,
    options: EngineOptions = PLAIN,
) -> ReplicaTimeline:
    """Simulate one replica that serves ``trajectories`` with continuous batching, event by event.

    Parameters
    ----------
    trajectories : what it has to serve; queued first come, first served
    cost : seconds per engine_step of this replica
    limits : cache, max_running, token budget, chunked prefill or prefill first, prefix caching
    options : speculative decoding, tool concurrency

    Returns
    -------
    Times of every turn and what the engine did. The scheduler's rules stand in `rlperf.sim.rollout.events`; equal to
    `tests/token_loop.py` to rounding.

    Raises
    ------
    SpecError : a request alone does not fit the cache, or limits are not positive

    >>> import numpy as np
    >>> cost = EngineStepCost(tokens=np.array([0.0, 100.0]), linear_s=np.array([0.0, 0.1]), host_s=1.0)
    >>> limits = EngineLimits(kv_tokens=np.inf, max_running=8)
    >>> timeline = simulate_replica(Trajectories.of(10, [1, 3]), cost, limits)
    >>> timeline.finish_s.round(3).tolist()  # both prompts: 1 + 0.02 s; two tokens alone: 2 x 1.001 s
    [1.02, 3.022]
    """
    check(trajectories, limits, options)
    if len(trajectories) and static_applies(trajectories, limits, options):
        return run_static(trajectories, cost, limits, options)
    if len(trajectories) and queue_applies(trajectories, limits, options):
        queued = run_queued(trajectories, cost, limits, options)
        if queued is not None:
            return queued
    return run_events(trajectories, cost, limits, options)


def check(trajectories: Trajectories, limits: EngineLimits, options: EngineOptions = PLAIN) -> None:
    """Refuse what no engine could serve; every problem at once."""
    problems = []
    if limits.max_running < 1 or limits.block_tokens < 1:
        problems.append(Problem("rollout: max_running and block_tokens must be at least 1"))
    if limits.token_budget < options.tokens_in_flight:
        problems.append(Problem(f"rollout: token_budget {limits.token_budget} is less than one request needs per step"))
    if len(trajectories) and np.isfinite(limits.kv_tokens):
        most = int(trajectories.final_tokens.max()) + options.tokens_in_flight
        if -(-most // limits.block_tokens) > limits.kv_tokens // limits.block_tokens:
            problems.append(
                Problem(
                    f"rollout: one request needs {most} tokens of cache, the replica has {limits.kv_tokens:.0f}",
                    suggestion="lower the maximum length, raise the memory share, or use more devices per replica",
                )
            )
    if problems:
        raise SpecError(problems)
