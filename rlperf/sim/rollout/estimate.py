"""One replica's makespan by the cheapest method that is exact for it, and how far the closed form is off."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.sim.rollout.closed_form import closed_form_makespan_s, take_census
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
