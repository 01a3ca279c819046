"""Turns counted one by one at a constant pace: what the event loop counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.sim.rl_step.rollout_counted import Counted, Engines, SimulatedRollouts
from rlperf.sim.rollout import EngineOptions, StepCensus, Trajectories, take_census
from rlperf.sim.rollout import closed_form as counting
from rlperf.sim.rollout.apart import Apart
from rlperf.sim.rollout.closed_form import paced
from rlperf.sim.rollout.replica import simulate_replica


def _agents(rng: np.random.Generator, n: int) -> Trajectories:
    """Groups of agents whose contexts grow by what they write and what tools answer; some answer at once."""
    offsets = np.concatenate([[0], np.cumsum(rng.integers(1, 9, n))])
    response, answer = rng.integers(1, 60, offsets[-1]), rng.integers(0, 200, offsets[-1])
    group, begin = rng.integers(0, max(n // 4, 1), n), rng.integers(5, 300, n)
    grown = np.concatenate([[0], np.cumsum(response + answer)[:-1]])
    owner = np.repeat(np.arange(n), np.diff(offsets))
    prompt = begin[group][owner] + grown - grown[offsets[:-1]][owner]
    tool_s = rng.exponential(rng.choice([0.5, 20.0, 200.0]), offsets[-1]) * (rng.random(offsets[-1]) < 0.9)
    return Trajectories(prompt, response, tool_s, offsets, group, np.zeros(n))


def _by_events(monkeypatch: pytest.MonkeyPatch, *args: object, **named: object) -> StepCensus:
    with monkeypatch.context() as patched:
        patched.setattr(counting, "turns_apply", lambda *_: False)
        return take_census(*args, **named)  # type: ignore[arg-type]


def test_counts_are_those_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few places, prompts cut at the budget, slots of an environment, idle engines."""
    waits = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(2, 40))
        agents, slots = _agents(rng, n), int(rng.integers(1, n + 1))
        limits = EngineLimits(
            kv_tokens=np.inf,
            max_running=int(rng.integers(1, n + 3)),
            token_budget=int(rng.choice([64, 256, 8192])),
            prefix_caching=bool(seed % 4),
        )
        asked = {"cost": paced(float(rng.choice([0.013, 0.7, 3.1]))),
                 "options": EngineOptions(trajectories=slots if seed % 2 else None)}  # fmt: skip
        counted, events = take_census(agents, limits, **asked), _by_events(monkeypatch, agents, limits, **asked)
        for name in StepCensus.__dataclass_fields__:
            if name != "_weights":
                np.testing.assert_allclose(
                    getattr(counted, name), getattr(events, name), rtol=1e-6, atol=1e-6, err_msg=f"seed {seed}: {name}"
                )
        waits += counted.wait_s > 0.0
    assert waits > 10


def test_agents_are_counted_without_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """The screen of agents on four nodes spent a minute in the event loop."""
    monkeypatch.setattr(counting, "simulate_replica", None)
    agents = _agents(np.random.default_rng(0), 40)
    limits = EngineLimits(kv_tokens=np.inf, max_running=16)
    assert take_census(agents, limits, cost=paced(0.02)).steps > 0


def test_a_simulation_that_no_limit_bound_holds_under_others() -> None:
    """What-if of readers simulated every cache and every number of places, most of which bind nobody: of agents on two
    nodes 350 times instead of 72."""
    cost = EngineStepCost(np.array([0.0, 4096.0]), np.array([0.0, 0.2]), host_s=0.01, decode_per_kv_token_s=1e-7)
    held = 0
    for seed in range(24):
        rng = np.random.default_rng(seed)
        apart = Apart(1 + seed % 2)
        limits = EngineLimits(
            float(rng.choice([4e3, 1e4, 4e4])), int(rng.choice([4, 12, 64])), prefix_caching=seed % 3 > 0
        )

        def pool(limits: EngineLimits, apart: Apart = apart) -> Engines:
            return Engines(cost, limits, 3, apart)

        counted = Counted(None)  # type: ignore[arg-type]
        counted.tables = [_agents(rng, 16)]
        known = counted.apart_s(pool(limits), apart)
        assert counted.known_apart_s(pool(limits), apart) == known
        assert counted.known_apart_s(pool(replace(limits, token_budget=512)), apart) is None
        for other in (
            replace(limits, kv_tokens=limits.kv_tokens * 3), replace(limits, max_running=limits.max_running * 3),
            replace(limits, kv_tokens=limits.kv_tokens * 0.7),
        ):  # fmt: skip
            if counted.known_apart_s(pool(other), apart) is not None:
                held += 1
                alone = replace(counted, simulated=SimulatedRollouts())
                alone.tables = counted.tables
                assert alone.apart_s(pool(other), apart) == pytest.approx(known, rel=1e-9)
    assert 12 < held < 60


def test_a_cache_that_was_large_enough_may_be_as_small_as_what_was_asked_of_it() -> None:
    cost = EngineStepCost(np.array([0.0, 4096.0]), np.array([0.0, 0.2]), host_s=0.01, decode_per_kv_token_s=1e-7)
    smaller = 0
    for seed in range(160):
        rng = np.random.default_rng(seed)
        work = _agents(rng, 24)
        if seed % 2:
            first = work.offsets[:-1]
            work = Trajectories.of(work.prompt_tokens[first], rng.integers(1, 400, 24), group=work.group)
        limits = EngineLimits(
            float(rng.choice([1e4, 3e4, 1e5])), int(rng.choice([4, 12, 64])), prefix_caching=seed % 3 > 0,
            chunked_prefill=seed % 5 > 0, watermark=0.01 * (seed % 4 == 0),
        )  # fmt: skip
        options = EngineOptions(async_scheduling=seed % 7 > 3)
        found = simulate_replica(work, cost, limits, options=options)
        if found.roomy_tokens < limits.kv_tokens:
            smaller += 1
            least = simulate_replica(work, cost, replace(limits, kv_tokens=found.roomy_tokens), options=options)
            np.testing.assert_allclose(least.finish_s, found.finish_s, rtol=1e-9)
            assert (least.preemptions, least.hit_tokens) == (found.preemptions, found.hit_tokens)
            assert least.roomy_tokens <= found.roomy_tokens
    assert smaller > 40
