"""Turns and their tools, served for the screen: what the event loop finds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.sim.rl_step.rollout_counted import Counted
from rlperf.sim.rl_step.simulated_rollouts import Engines, SimulatedRollouts
from rlperf.sim.rollout import EngineOptions, Trajectories
from rlperf.sim.rollout.apart import Apart
from rlperf.sim.rollout.replica import simulate_replica
from rlperf.sim.rollout.turns import serve_turns


def _agents(rng: np.random.Generator, n: int, long: int = 1) -> Trajectories:
    """Groups of agents whose contexts grow by what they write and what tools answer; some answer at once.

    ``long``: times as long are answers, and as many turns
    """
    offsets = np.concatenate([[0], np.cumsum(rng.integers(1, 9 * long, n))])
    response, answer = rng.integers(1, 60, offsets[-1]), rng.integers(0, 200 * long, offsets[-1])
    group, begin = rng.integers(0, max(n // 4, 1), n), rng.integers(5, 300, n)
    grown = np.concatenate([[0], np.cumsum(response + answer)[:-1]])
    owner = np.repeat(np.arange(n), np.diff(offsets))
    prompt = begin[group][owner] + grown - grown[offsets[:-1]][owner]
    tool_s = rng.exponential(rng.choice([0.5, 20.0, 200.0]), offsets[-1]) * (rng.random(offsets[-1]) < 0.9)
    return Trajectories(prompt, response, tool_s, offsets, group, np.zeros(n))


COST = EngineStepCost(
    np.array([0.0, 64.0, 8192.0]), np.array([0.002, 0.004, 0.2]), host_s=0.004, decode_per_kv_token_s=2e-7,
    prefill_per_pair_s=1e-9, graph_buckets=np.array([1, 8, 16, 32, 64]),
)  # fmt: skip


def test_turns_are_served_as_the_events_serve_them() -> None:
    """Few places, prompts cut at the budget, slots of an environment, idle engines, prefill first; nothing evicted."""
    for seed in range(60):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(2, 40))
        agents, slots = _agents(rng, n), int(rng.integers(1, n + 1))
        limits = EngineLimits(
            kv_tokens=np.inf,
            max_running=int(rng.integers(1, n + 3)),
            token_budget=int(rng.choice([64, 256, 8192])),
            prefix_caching=bool(seed % 4),
            chunked_prefill=seed % 7 > 0,
        )
        options = EngineOptions(trajectories=slots if seed % 2 else None)
        served = serve_turns(agents, COST, limits, options)
        events = simulate_replica(agents, COST, limits, options=options).trajectory_finish_s
        np.testing.assert_allclose(served.finish_s, events, rtol=0.01, err_msg=f"seed {seed}")
        assert served.finish_s.max() == pytest.approx(events.max(), rel=0.004)


@pytest.mark.parametrize("share", [0.15, 0.25, 0.5, 0.75])
def test_contexts_that_are_evicted_while_their_tools_run_are_read_again(share: float) -> None:
    """Closed forms had agents whose cache was too small at half of what events take."""
    again, off = 0.0, []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        agents = _agents(rng, 48, long=8)
        kv_tokens = share * float(agents.final_tokens[agents.offsets[1:] - 1].sum())
        limits = EngineLimits(kv_tokens, max_running=48, watermark=0.01 * (seed % 2))
        served = serve_turns(agents, COST, limits)
        events = simulate_replica(agents, COST, limits)
        off.append(float(served.finish_s.max()) / events.makespan_s - 1.0)
        assert np.mean(served.finish_s) == pytest.approx(float(events.trajectory_finish_s.mean()), rel=0.02)
        again += float(events.segments.recomputed.sum()) / float(events.segments.prefill_tokens.sum()) / 6
    assert abs(np.mean(off)) < 0.01 and max(map(abs, off)) < 0.04
    assert again > {0.15: 0.9, 0.25: 0.85, 0.5: 0.05}.get(share, -1.0)


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
