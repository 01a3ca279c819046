r"""Prefill apart from decode: some replicas read every prompt, the others write, and the cache travels between them.

A turn of p context tokens is read by one of the readers (its cached beginning apart), which samples the first token.
Then its cache is sent, and a writer decodes the other L - 1 tokens without ever reading a prompt:

.. math:: a_w = \max(f_r, s) + h + p\,c, \qquad s \leftarrow \max(f_r, s) + p\,c

f_r end of its prefill, s when the reader's link is free, p c seconds of its bytes on the link, h latency of a message,
a_w its arrival at the writer [s]. A reader keeps the prompts that it read, not what writers wrote: of a further turn
the response before and the tool's answer are read anew. A writer keeps nothing of a turn that has ended (as SGLang's
decode servers without a radix cache), so the whole context travels with every turn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.errors import SpecError
from rlperf.layout import FloatArray, IntArray
from rlperf.sim.rollout.options import EngineOptions
from rlperf.sim.rollout.replica import PLAIN
from rlperf.sim.rollout.rollout import ReplicaCosts, RolloutResult, simulate_rollout
from rlperf.sim.rollout.routing import Routing
from rlperf.sim.rollout.trajectories import Trajectories

MOST_ROUNDS, CLOSE = 16, 5e-3
"""Rounds in which turns of readers and writers are made to agree, and the share of the makespan that is near enough."""


@dataclass(frozen=True)
class Apart:
    """Replicas that read prompts for the others.

    Attributes
    ----------
    readers : how many of the pool's replicas [1]
    token_s : one token's cache on the link of a device [s]
    message_s : latency of a transfer, with what a request holds whatever its length [s]
    """

    readers: int
    token_s: float = 0.0
    message_s: float = 0.0


def writing_cost(cost: EngineStepCost) -> EngineStepCost:
    """Of replicas that only decode: an engine_step in which a request begins is one like any other.

    Its first read of the whole context is counted at the rate of a prompt's pairs, one engine_step of L - 1. What a
    preempted request had written is computed again at the rates of a prompt.
    """
    return replace(cost, mixed_linear_s=None, prefill_fixed_s=0.0)


def written(trajectories: Trajectories) -> Trajectories:
    """What writers serve: contexts that have come with their first token, and the tokens after it.

    >>> served = written(Trajectories.of(10, [5, 1]))
    >>> served.prompt_tokens.tolist(), served.cached_tokens.tolist(), served.response_tokens.tolist()
    ([11, 11], [10, 10], [4, 1])
    """
    return replace(
        trajectories,
        prompt_tokens=trajectories.prompt_tokens + 1,
        response_tokens=np.maximum(trajectories.response_tokens - 1, 1),
        cached_tokens=trajectories.prompt_tokens,
        shared_tokens=None,
    )


def sent_s(ready_s: FloatArray, wire_s: FloatArray) -> FloatArray:
    """When each of a link's messages has left, in the order in which they are ready [s].

    >>> sent_s(np.array([0.0, 1.0, 9.0]), np.array([3.0, 2.0, 1.0])).tolist()
    [3.0, 5.0, 10.0]
    """
    order = np.argsort(ready_s, kind="stable")
    behind = np.cumsum(wire_s[order])
    left = np.empty(ready_s.size)
    left[order] = np.maximum.accumulate(ready_s[order] - behind + wire_s[order]) + behind
    return left


def simulate_apart(
    trajectories: Trajectories,
    replicas: int,
    apart: Apart,
    *,
    cost: EngineStepCost,
    limits: EngineLimits,
    devices_per_replica: int = 1,
    routing: Routing = "round_robin",
    options: EngineOptions = PLAIN,
    rounds: int = MOST_ROUNDS,
) -> RolloutResult:
    """A synchronous rollout whose prompts are read by ``apart.readers`` of ``replicas`` equal replicas.

    Without further turns readers depend on nobody, so both are simulated once. With them a turn's reading depends on
    the writing before it, and the reverse: both are simulated in turn until they agree. What a trajectory does first
    is settled first, since nothing waits for what comes later.

    A trajectory that waits for a free environment (``options.trajectories``) has its first prompt read meanwhile.
    ``rounds``: that are simulated at most; after the first a rollout of agents is within some 3 % of where they agree.

    Raises
    ------
    SpecError : no replica is left to write
    """
    writers = replicas - apart.readers
    if writers < 1:
        raise SpecError(f"prefill_replicas: of {replicas} replicas {apart.readers} read prompts, and none writes")
    kinds = [ReplicaCosts(cost, limits, devices_per_replica)] * apart.readers
    own = replace(limits, chunked_prefill=True, prefix_caching=False)
    decoders = [ReplicaCosts(writing_cost(cost), own, devices_per_replica)] * writers
    serves, plain = written(trajectories), EngineOptions(async_scheduling=options.async_scheduling)
    running = min(limits.max_running, -(-len(trajectories) // writers))
    pace_s = float(cost.decode_s(running, running * float(serves.prompt_tokens.mean())))
    writing_s = serves.response_tokens * pace_s
    makespan_s, roomy_tokens, full_places = 0.0, 0.0, False
    for _ in range(rounds):
        gaps_s = writing_s + trajectories.tool_latency_s
        asked = replace(trajectories, response_tokens=np.ones_like(trajectories.response_tokens), tool_latency_s=gaps_s)
        read = simulate_rollout(asked, kinds, routing=routing, options=plain)
        reading_s = _reading_s(asked, read, apart)
        wrote = simulate_rollout(_arriving(serves, reading_s), decoders, routing=routing, options=options)
        writing_s = _turns(trajectories, wrote, "finish_s") - _turns(trajectories, wrote, "arrival_s")
        roomy_tokens = max(roomy_tokens, read.roomy_tokens, wrote.roomy_tokens)
        full_places |= read.full_places or wrote.full_places
        near = abs(wrote.makespan_s - makespan_s) <= CLOSE * wrote.makespan_s
        makespan_s = wrote.makespan_s
        if trajectories.single_turn or near:
            break
    return replace(
        wrote,
        readers=read.timelines,
        engines=(*decoders, *kinds),
        generated_tokens=int(trajectories.response_tokens.sum()),
        roomy_tokens=roomy_tokens,
        full_places=full_places,
    )


def _arriving(serves: Trajectories, reading_s: FloatArray) -> Trajectories:
    """What writers serve, every turn when its context has been read and sent."""
    first, last = serves.offsets[:-1], serves.offsets[1:] - 1
    later_s = np.concatenate([reading_s[1:], [0.0]])
    later_s[last] = 0.0
    return replace(
        serves, arrival_s=serves.arrival_s + reading_s[first], tool_latency_s=serves.tool_latency_s + later_s
    )


def _turns(trajectories: Trajectories, result: RolloutResult, name: str) -> FloatArray:
    """A column of all replicas' turns in the order of the trajectories ``[turns]``."""
    found = np.empty(trajectories.n_turns)
    for members, timeline in zip(result.members, result.timelines, strict=True):
        found[_rows(trajectories, members)] = getattr(timeline, name)
    return found


def _rows(trajectories: Trajectories, members: IntArray) -> IntArray:
    """Turns of some trajectories."""
    counts = trajectories.turns_per_trajectory[members]
    starts = trajectories.offsets[members]
    before = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)
    return np.repeat(starts - before, counts) + np.arange(int(counts.sum()))


def _reading_s(asked: Trajectories, read: RolloutResult, apart: Apart) -> FloatArray:
    """From a turn's arrival at its reader to its cache's arrival at its writer [s] ``[turns]``."""
    seconds = np.empty(asked.n_turns)
    for members, timeline in zip(read.members, read.timelines, strict=True):
        rows = _rows(asked, members)
        wire_s: FloatArray = apart.token_s * asked.prompt_tokens[rows].astype(np.float64)
        seconds[rows] = sent_s(timeline.finish_s, wire_s) + apart.message_s - timeline.arrival_s
    return seconds
