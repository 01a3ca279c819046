"""One replica from completion to completion: continuous batching, paged KV, preemption, prefix caching, tools.

The engine_step, in this order:

1. Turns whose time has come join the queue (first come, first served; ties by trajectory).
2. Chunked prefill: if the decoding requests do not fit the cache, the last admitted are preempted (recompute: they
   lose their blocks and go to the front of the queue). Otherwise a cut prompt continues and queued turns are admitted
   while max_running, token budget and free blocks (less the watermark) allow; a prompt is cut at the budget.
   Prefill first: queued turns are admitted first, whole prompts up to the budget (at least one), in an engine_step of
   their own while decodes stall; only without any does the batch decode, with preemption as above.
3. The step takes `EngineStepCost` seconds. Decoding requests gain a token (speculation: `DecodeClock`), prompts that
   are complete gain their first one; turns that are complete leave and their tool call starts.

Runs of decode-only engine_steps are one event: their seconds are an arithmetic series in the context.
"""

from __future__ import annotations

import numpy as np

from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.layout import FloatArray, IntArray
from rlperf.sim.rollout.event_engine import EventEngine
from rlperf.sim.rollout.options import EngineOptions
from rlperf.sim.rollout.timeline import Pauses, ReplicaTimeline
from rlperf.sim.rollout.trajectories import Trajectories
from rlperf.sim.rollout.warm_start import warm_start


def run_events(
    trajectories: Trajectories,
    cost: EngineStepCost,
    limits: EngineLimits,
    options: EngineOptions,
    *,
    warm: bool = True,
) -> ReplicaTimeline:
    """Simulate one replica event by event (semantics: module docstring; arguments: `simulate_replica`).

    ``warm`` : begin with `warm_start` where it applies; the outcome is the same.
    """
    engine = EventEngine(trajectories, cost, limits, options)
    if warm and len(trajectories) and not engine.later:
        warm_start(engine, limits)
    while engine.advance():
        pass
    return timeline_of(engine)


def timeline_of(engine: EventEngine, members: IntArray | None = None) -> ReplicaTimeline:
    """The outcome as columns, of all trajectories or of ``members``."""
    offsets = engine.trajectories.offsets
    rows: IntArray | slice = slice(None)
    own = None
    if members is not None:
        mine = np.zeros(engine.n, dtype=np.bool_)
        mine[members] = True
        rows = own = np.flatnonzero(mine[engine.trajectories.turn_owner])
    finish: FloatArray = np.array(engine.finish)
    return ReplicaTimeline(
        arrival_s=np.array(engine.arrival)[rows],
        scheduled_s=np.array(engine.scheduled)[rows],
        first_token_s=np.array(engine.first_token)[rows],
        finish_s=finish[rows],
        trajectory_finish_s=finish[offsets[1:] - 1][slice(None) if members is None else members],
        segments=engine.log.close(),
        preemptions=engine.preemptions,
        pauses=Pauses.of(engine.pauses, own),
        hit_tokens=engine.hit_tokens,
        prompt_tokens=engine.looked_up,
        roomy_tokens=engine.cache.roomy_tokens if engine.finite and not engine.full_cache else np.inf,
        full_places=engine.full_places,
    )
