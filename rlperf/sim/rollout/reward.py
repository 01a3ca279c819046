"""Reward of the trajectories: verified on CPU workers or by a judge model, while the rollout runs or after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from rlperf.errors import SpecError
from rlperf.layout import FloatArray, IntArray
from rlperf.sim.rollout.rollout import ReplicaCosts, RolloutResult, simulate_rollout
from rlperf.sim.rollout.trajectories import Trajectories


@dataclass(frozen=True, eq=False)
class RewardResult:
    """When every trajectory is scored.

    Attributes
    ----------
    finish_s : end of each trajectory's reward [s] ``[trajectories]``
    rollout_s : end of the rollout [s]
    """

    finish_s: FloatArray
    rollout_s: float

    @property
    def exposed_s(self) -> float:
        """Seconds that the reward adds after the rollout."""
        return max(float(self.finish_s.max()) - self.rollout_s, 0.0)


def verify(
    result: RolloutResult,
    seconds: npt.ArrayLike,
    *,
    workers: int,
    overlap: bool = True,
    per_rank: bool = False,
) -> RewardResult:
    """Score every trajectory on one of a number of workers (sandboxes, verifier processes), first come first served.

    Parameters
    ----------
    result : the rollout
    seconds : time of each trajectory's verification [s] ``[trajectories]`` or one number
    workers : that run at once: of all ranks together, or of each rank where ``per_rank``
    overlap : a trajectory is scored as soon as it is complete; otherwise when the whole rollout is
    per_rank : every replica has a pool of its own and scores what it generated (the rl_step waits for the slowest)

    >>> from rlperf.cost.engine_step import EngineLimits, EngineStepCost
    >>> cost = EngineStepCost(np.array([0.0, 1.0]), np.zeros(2), host_s=1.0)
    >>> rollout = simulate_rollout(Trajectories.of(4, [3, 9]), 1, cost=cost, limits=EngineLimits(np.inf, 8))
    >>> verify(rollout, 5.0, workers=1).finish_s.tolist()
    [8.0, 14.0]
    >>> verify(rollout, 5.0, workers=2, overlap=False).exposed_s
    5.0
    """
    if workers < 1:
        raise SpecError("reward: at least one worker is needed")
    n = len(result.finish_s)
    duration = np.broadcast_to(np.asarray(seconds, dtype=np.float64), (n,))
    ready = result.finish_s if overlap else np.full(n, result.makespan_s)
    finish = np.zeros(n)
    for members in result.members if per_rank else (np.arange(n),):
        finish[members] = _serve(ready[members], duration[members], workers)
    return RewardResult(finish, result.makespan_s)


def _serve(ready: FloatArray, duration: FloatArray, workers: int) -> FloatArray:
    """First come first served on equal workers: end of each job [s]."""
    finish = np.zeros(len(ready))
    free = [0.0] * min(workers, len(ready))
    starts, lengths = ready.tolist(), duration.tolist()
    for i in np.argsort(ready, kind="stable").tolist():
        end = max(heappop(free), starts[i]) + lengths[i]
        finish[i] = end
        heappush(free, end)
    return finish


def judge(
    result: RolloutResult,
    trajectories: Trajectories,
    replicas: Sequence[ReplicaCosts],
    *,
    verdict_tokens: npt.ArrayLike,
    instruction_tokens: int = 0,
    overlap: bool = True,
) -> RewardResult:
    """Score every trajectory with a judge model that reads it and writes a verdict, on replicas of its own.

    Parameters
    ----------
    result, trajectories : the rollout and what it served
    replicas : of the judge's engine
    verdict_tokens : generated per trajectory [tokens] ``[trajectories]`` or one number
    instruction_tokens : of the judge's prompt beside the trajectory [tokens]
    overlap : judged as soon as complete; otherwise when the whole rollout is
    """
    last = trajectories.offsets[1:] - 1
    requests = Trajectories.of(
        trajectories.final_tokens[last] + instruction_tokens,
        np.broadcast_to(np.asarray(verdict_tokens, dtype=np.int64), (len(trajectories),)),
        arrival_s=result.finish_s if overlap else result.makespan_s,
    )
    return RewardResult(simulate_rollout(requests, replicas, routing="round_robin").finish_s, result.makespan_s)


def slowest_rank_s(recorded_s: npt.ArrayLike, ranks: int, *, draws: int = 2000, seed: int = 0) -> FloatArray:
    """Reward stage of rl_steps whose ranks draw their times from recorded ones: the maximum over ranks [s] ``[draws]``.

    For sandboxes whose time has nothing to do with the tokens (recorded: 37 to 125 s per rank in PolyTrace
    deepcoder_14b), so that only the empirical distribution is of use.

    >>> slowest_rank_s([10.0, 10.0], ranks=4, draws=2).tolist()
    [10.0, 10.0]
    """
    times = np.asarray(recorded_s, dtype=np.float64)
    if times.size == 0 or ranks < 1:
        raise SpecError("reward: at least one recorded time and one rank are needed")
    picks: IntArray = np.random.default_rng(seed).integers(0, times.size, (draws, ranks))
    return np.asarray(times[picks].max(axis=1), dtype=np.float64)
