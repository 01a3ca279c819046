"""The begin of a rollout in one go: all that have a place are prefilled together, before the event loop takes over.

At t = 0 nothing happens but admission in order. If the cache takes all first prompts and no response ends meanwhile,
the state after the prefill phase follows from sorted arrays (`prefill_phase`); no loop over requests is needed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from rlperf.cost.engine_step import EngineLimits
from rlperf.layout import IntArray
from rlperf.sim.rollout.event_engine import EventEngine
from rlperf.sim.rollout.static import PrefillPhase, prefill_phase, prefix_hits
from rlperf.sim.rollout.trajectories import Trajectories


def warm_start(engine: EventEngine, limits: EngineLimits) -> None:
    """Take the engine past its prefill phase where that can be done at once; else leave it as it is."""
    trajectories = engine.trajectories
    if trajectories.arrival_s.any() or not engine.batch.plain or engine.max_running < 2:
        return
    first = first_turns(trajectories)
    hits = prefix_hits(first, limits)
    places = engine.max_running
    if not _fits(engine, first, hits, limits):
        return
    ended = np.full(places, -1.0)
    head = first if places == engine.n else first.take(np.arange(places))
    phase = prefill_phase(head, hits[:places], engine.seconds, limits, engine.log, ended, behind=engine.n - places)
    if (ended >= 0.0).any():
        engine.log.rows.clear()
        return
    _load(engine, first, hits[:places], phase)


def first_turns(trajectories: Trajectories) -> Trajectories:
    """The first turn of every trajectory."""
    if trajectories.single_turn:
        return trajectories
    rows = trajectories.offsets[:-1]
    cached = trajectories.cached_tokens
    made = Trajectories.of(
        trajectories.prompt_tokens[rows], trajectories.response_tokens[rows], group=trajectories.group
    )
    made = replace(made, shared_tokens=trajectories.shared_tokens)
    return made if cached is None else replace(made, cached_tokens=cached[rows])


def _fits(engine: EventEngine, first: Trajectories, hits: IntArray, limits: EngineLimits) -> bool:
    """Whether the cache holds all first prompts with what is decoded meanwhile, by a bound."""
    if not engine.finite:
        return True
    places, block = engine.max_running, engine.cache.block
    shared = hits[:places] // block if engine.cache.sharing else 0
    blocks = (-(-first.prompt_tokens[:places] // block) - shared).sum()
    uncached = int((first.prompt_tokens - hits)[:places].sum())
    steps = 2 + uncached // max(limits.token_budget - (places if limits.chunked_prefill else 0), 1)
    return bool(blocks + places * (steps // block + 2) + engine.cache.reserve <= engine.cache.total)


def _load(engine: EventEngine, first: Trajectories, hits: IntArray, phase: PrefillPhase) -> None:
    """The engine's state at the end of the phase."""
    places, n = len(hits), engine.n
    rows = engine.trajectories.offsets[:-1]
    prompt = first.prompt_tokens
    for column, values in ((engine.scheduled, phase.begin_s), (engine.first_token, phase.ready_s)):
        made = np.array(column)
        made[rows[:places]] = values
        column[:] = made.tolist()
    engine.known = prompt.tolist()
    engine.arrivals.clear()
    engine.waiting = deque(range(places, n))
    engine.running = dict.fromkeys(range(places))
    engine.batch.step(phase.clock)
    need = phase.ready_clock + first.response_tokens[:places] - 1
    engine.batch.load(prompt[:places] - phase.ready_clock, need)
    held = np.bincount(np.array(engine.cache.group[:places]), minlength=len(engine.cache.holders))
    engine.cache.holders = held.tolist()
    shared = np.array(engine.cache.shared)
    engine.cache.adjust = int((shared * ((held > 0) - held)).sum())
    engine.hit_tokens = int(hits.sum())
    engine.looked_up = int(prompt[:places].sum())
    engine.seen_s = engine.log.rows[-1][0]
    engine.now = phase.now
