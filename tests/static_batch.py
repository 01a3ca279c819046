"""A static batch by hand, and one replica by the cheapest method that is exact for it: what events are held against."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.layout import FloatArray
from rlperf.sim.rollout.closed_form import take_census
from rlperf.sim.rollout.options import EngineOptions
from rlperf.sim.rollout.replica import PLAIN, check, simulate_replica
from rlperf.sim.rollout.static import prefix_hits, static_applies
from rlperf.sim.rollout.trajectories import Trajectories

Method = Literal["closed form", "events"]


@dataclass(frozen=True)
class Estimate:
    """Makespan of one replica.

    Attributes
    ----------
    makespan_s : by ``method`` [s]
    method : the closed form where its assumptions hold, events elsewhere
    closed_form_s : what the closed form says, in either case [s]
    """

    makespan_s: float
    method: Method
    closed_form_s: float

    @property
    def gap(self) -> float:
        """Closed form over the method's makespan, minus 1; 0 where the closed form is exact."""
        return self.closed_form_s / self.makespan_s - 1.0


def estimate_replica(
    trajectories: Trajectories, cost: EngineStepCost, limits: EngineLimits, *, options: EngineOptions = PLAIN
) -> Estimate:
    """Makespan of one replica; the method is chosen by whether the closed form's assumptions hold.

    They are: one turn each, all there from the start, places and cache for all, all prompts in one engine_step.

    >>> cost = EngineStepCost(np.array([0.0, 1.0]), np.zeros(2), host_s=1.0)
    >>> estimate_replica(Trajectories.of(4, [3, 9]), cost, EngineLimits(np.inf, 8))
    Estimate(makespan_s=9.0, method='closed form', closed_form_s=9.0)
    >>> estimate_replica(Trajectories.of(4, [3, 9]), cost, EngineLimits(np.inf, 1)).method
    'events'
    """
    check(trajectories, limits, options)
    closed = screen_replica(trajectories, cost, limits)
    uncached = float((trajectories.prompt_tokens - prefix_hits(trajectories, limits)).sum())
    if static_applies(trajectories, limits, options) and uncached <= limits.token_budget:
        return Estimate(closed, "closed form", closed)
    return Estimate(simulate_replica(trajectories, cost, limits, options=options).makespan_s, "events", closed)


def screen_replica(trajectories: Trajectories, cost: EngineStepCost, limits: EngineLimits) -> float:
    """Closed-form makespan of one replica under any limits [s].

    A cache that binds counts as a bound on how many run at once: capacity over the mean context in flight,
    E[R (p + R / 2)] / E[R], weighted by the time that a request runs. Preemptions, speculation and tools are left out
    (turns count as one request that generates all their tokens).
    """
    single = _one_turn(trajectories)
    response, prompt = single.response_tokens.astype(np.float64), single.prompt_tokens.astype(np.float64)
    held = float((response * (prompt + response / 2.0)).sum() / response.sum())
    room = limits.kv_tokens * (1.0 - limits.watermark) / held
    places = max(int(min(limits.max_running, room, len(single))), 1)
    unlimited = replace(limits, kv_tokens=np.inf, max_running=places)
    if places < len(single):
        return float(take_census(single, unlimited).makespan_s(cost))
    hits = prefix_hits(single, unlimited).astype(np.float64)
    tokens, pairs = float((prompt - hits).sum()), float(((prompt**2 + prompt - hits**2 - hits) / 2.0).sum())
    steps = np.ceil(tokens / limits.token_budget)
    prefill_s = steps * float(cost.engine_step_s(0.0, 0.0, tokens / steps, pairs / steps, len(single) / steps))
    return float(closed_form_makespan_s(single.response_tokens, cost, prompt_tokens=prompt, prefill_s=prefill_s))


def _one_turn(trajectories: Trajectories) -> Trajectories:
    """Every trajectory as one request: its first prompt, and all it generates."""
    if trajectories.single_turn and not trajectories.arrival_s.any():
        return trajectories
    first = trajectories.offsets[:-1]
    return Trajectories.of(trajectories.prompt_tokens[first], trajectories.generated_tokens, group=trajectories.group)


def closed_form_makespan_s(
    response_tokens: npt.ArrayLike,
    cost: EngineStepCost,
    *,
    prompt_tokens: npt.ArrayLike = 0.0,
    prefill_s: npt.ArrayLike = 0.0,
) -> FloatArray:
    r"""Decode a static batch to its longest response, for many sampled workloads at once [s].

    With responses sorted, :math:`l_{(0)} = 1` the token of the prefill, and b = n - j + 1 requests left,

    .. math:: T = T_p + \sum_j (l_{(j)} - l_{(j-1)}) A(b_j) + d_k \sum_i \Big[ p_i (l_i - 1) + l_i (l_i - 1) / 2 \Big]

    Parameters
    ----------
    response_tokens : l, of one replica's requests, all running from the start ``[..., requests]``; integers sort fast
    cost : one cost; A(b) is its decode-only engine_step without the per-key part
    prompt_tokens : p, cached before the first decode ``[..., requests]`` or a number
    prefill_s : T_p, seconds until all prompts are computed ``[...]``

    Valid without cache limit, queue, tools or speculation, and equal to the events when every prompt is computed in
    one engine_step.

    >>> cost = EngineStepCost(np.array([0.0, 1.0]), np.zeros(2), host_s=1.0)
    >>> closed_form_makespan_s([[3, 9], [5, 5]], cost).tolist()
    [8.0, 4.0]
    """
    lengths = np.sort(np.asarray(response_tokens), axis=-1)
    n = lengths.shape[-1]
    running = np.arange(n, 0, -1, dtype=np.float64)
    engine_step_s = cost.decode_s(running, 0.0)
    # summation by parts: sum_j (l_j - l_{j-1}) A(n-j+1) = sum_j l_j (A(n-j+1) - A(n-j)) - A(n), with l_0 = 1
    jump = engine_step_s.copy()
    jump[:-1] -= engine_step_s[1:]
    seconds = lengths @ jump - engine_step_s[0]
    if cost.decode_per_kv_token_s:
        generated = np.asarray(response_tokens, dtype=np.float64)
        prompt = np.asarray(prompt_tokens, dtype=np.float64)
        keys = ((generated - 1.0) * (prompt + 0.5 * generated)).sum(axis=-1)
        seconds = seconds + cost.decode_per_kv_token_s * keys
    return np.asarray(seconds + np.asarray(prefill_s, dtype=np.float64), dtype=np.float64)
