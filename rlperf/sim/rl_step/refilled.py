"""Engines whose finished requests are replaced at once: seconds per rl_step, without simulating who waits for whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from rlperf.cost.engine_step import EngineLimits, EngineStepCost, recompute_s
from rlperf.sim.rl_step.between_turns import crossing, first_steady_s
from rlperf.sim.rl_step.flow import Flow, Read


def steady_running(limits: EngineLimits, replicas: int, flow: Flow) -> float:
    """Requests of a replica that run at once when finished ones are replaced: max_running, the cache, or its share.

    Its share is of all batches under way: a staleness bound of k lets rollout run k batches ahead, so that many are
    rolled out at once where the trainer is the one that waits.
    """
    share = flow.under_way(flow.allowed.batches, replicas)
    return max(min(float(limits.max_running), limits.kv_tokens / flow.context, share), 1.0)


@dataclass(frozen=True)
class Refilled:
    """Replicas that always find the next request.

    Attributes
    ----------
    seconds : per rl_step: throughput, without a tail [s]
    running : requests of a replica that run at once, mean [1]
    read_s : what of the seconds reads prompts, and what tools have written [s]
    again_s : what of the seconds reads contexts again that were evicted between turns [s]
    waiting_s : what reading anew all contexts takes that wait in a replica's cache for their next turn [s]
    """

    seconds: float
    running: float
    read_s: float = 0.0
    again_s: float = 0.0
    waiting_s: float = 0.0


def refilled(cost: EngineStepCost, limits: EngineLimits, replicas: int, flow: Flow, readers: int = 0) -> Refilled:
    r"""What replicas that always find the next request take.

    .. math:: T = \frac{1}{R} \Big( \frac{G}{C}\, t_{step}(C, C \bar k) + t_{prefill} \Big)

    G generated tokens per rl_step, R replicas, C requests running at once (max_running, or what the cache holds at the
    mean context), k mean context in flight (`Flow.context`) [tokens]. Where ``readers`` others read the prompts, the
    slower of both stations binds: max(G t_step / (C R), t_prefill / readers). Agents: `with_under_way`, of k batches
    (how many there are hangs on the trainer: `ahead`).
    """
    if flow.waits is not None and not readers:
        return with_under_way(cost, limits, replicas, flow, flow.under_way(flow.allowed.batches, replicas))
    running, read = steady_running(limits, replicas, flow), flow.read(caching=limits.prefix_caching)
    decode, prefill = _decode_s(cost, flow, running), _reading(cost, limits)(read)
    if readers:
        return Refilled(max(decode / replicas, prefill / readers), running)
    return Refilled((decode + prefill) / replicas, running, prefill / replicas)


def with_under_way(cost: EngineStepCost, limits: EngineLimits, replicas: int, flow: Flow, most: float) -> Refilled:
    r"""The same of trajectories that leave the engine for their tools: a closed network of N (``most``) a replica.

    .. math::

        N = C + \frac{A}{R T} + W, \quad C \le M, \quad H(C) \le K, \quad
        T = \frac{1}{R} \Big( \frac{G}{C}\, t_{step}(C, C \bar k) + t_{prefill}(x) \Big), \\
        H(C) = C (\bar k - p) + \frac{N}{g} \Big( 1 - \big(1 - C / N\big)^g \Big) p

    A seconds of tools per rl_step, M max_running, K tokens of the cache, H of them held by those that run: what is
    their own, and once for every group of g that has one of them running its shared prompt of p tokens. W wait for a
    place while C is at its bound, each of the n turns that follow another for W R T / n. x is how long contexts are
    kept beside those that run (`BetweenTurns.kept_s`): what waits longer is read again.
    """
    waits = flow.waits
    assert waits is not None
    caching, group = limits.prefix_caching, float(flow.copies)
    shared = waits.shared if caching else 0.0
    own, read_s = max(flow.context - shared, 1.0), _reading(cost, limits)
    prompts_s = read_s(flow.read(caching=caching))

    def held(running: float) -> float:
        groups = most / group * (1.0 - float(np.power(1.0 - running / most, group)))
        return running * own + groups * shared

    places = min(float(limits.max_running), most)
    if held(places) > limits.kv_tokens:
        places = crossing(lambda running: held(running) - limits.kv_tokens, 0.0, places)
    places = max(places, 1.0)

    def state(rl_step_s: float, keeps: bool) -> Refilled:
        busy = max(most - waits.tool_total_s / (replicas * rl_step_s), most * 1e-6)
        running = min(busy, places)
        seconds, first_s = (_decode_s(cost, flow, running) + prompts_s) / replicas, prompts_s / replicas
        if keeps or not caching:
            return Refilled(seconds, running, first_s)
        wait_s = (busy - running) * replicas * rl_step_s / waits.turns
        room = replicas * max(limits.kv_tokens - held(running), 0.0)
        kept_s = waits.kept_s(room, wait_s, rl_step_s)
        found = waits.again(kept_s), waits.found(kept_s, wait_s, rl_step_s)
        again_s, waiting_s = (read_s(Read(*each)) / replicas for each in found)
        return Refilled(seconds + again_s, running, first_s, again_s, waiting_s)

    work_s = _decode_s(cost, flow, places) + prompts_s
    least = max(work_s, waits.tool_total_s / most) / replicas
    kept_s = first_steady_s(lambda s: state(s, True).seconds, least)
    found_s = first_steady_s(lambda s: state(s, False).seconds, kept_s)
    return replace(state(found_s, False), seconds=found_s)


def _decode_s(cost: EngineStepCost, flow: Flow, running: float) -> float:
    """Seconds in which ``running`` requests at once write an rl_step's tokens; fewer than one leave engines idle."""
    together = max(running, 1.0)
    return flow.generated / running * float(cost.decode_s(together, together * flow.context))


def _reading(cost: EngineStepCost, limits: EngineLimits) -> Callable[[Read], float]:
    """Seconds in which so much is read, in full token budgets."""
    budget = float(limits.token_budget)
    full = float(cost.engine_step_s(0.0, 0.0, budget, 0.0, 1.0))
    return lambda read: float(read.tokens / budget * full + cost.prefill_per_pair_s * read.pairs)


def interrupted_seconds(
    cost: EngineStepCost, limits: EngineLimits, replicas: int, flow: Flow, state: Refilled, readers: int = 0
) -> float:
    """Prefill of what a replica has under way when new weights void its cache [s]; by ``readers`` for all, if any.

    Requests that run are sent again, and contexts that wait for a tool are read anew by their next turn.
    """
    again = recompute_s(cost, float(limits.token_budget), state.running, flow.context) + state.waiting_s
    return again * replicas / readers if readers else again
