"""Events, static fast path and census against the token-by-token reference, on random small cases."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.sim.rollout import (
    EngineOptions,
    Speculation,
    Trajectories,
    event_engine,
    simulate_replica,
    take_census,
)
from rlperf.sim.rollout.event_engine import EventEngine
from rlperf.sim.rollout.events import run_events
from rlperf.sim.rollout.queued import Runs, count_queued, queue_applies, run_queued
from rlperf.sim.rollout.static import run_static, static_applies
from rlperf.sim.rollout.warm_start import warm_start

from .static_batch import closed_form_makespan_s, estimate_replica
from .token_loop import run_token_loop

Case = tuple[Trajectories, EngineStepCost, EngineLimits, EngineOptions]


def random_case(seed: int) -> Case:
    """Groups of one or several turns; any mix of tight cache, small budget, buckets, tools, speculation, arrivals."""
    rng = np.random.default_rng(seed)
    groups, size = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    n = groups * size
    turns = rng.integers(1, 4, n) if rng.random() < 0.5 else np.ones(n, dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(turns)])
    group = np.repeat(np.arange(groups), size)
    if rng.random() < 0.3:
        group = rng.permutation(group)
    first = rng.integers(1, 60, groups)
    prompt, response = np.zeros((2, offsets[-1]), dtype=np.int64)
    tool = rng.exponential(1.0, offsets[-1])
    for i in range(n):
        context = first[group[i]]
        for k in range(offsets[i], offsets[i + 1]):
            prompt[k], response[k] = context, rng.integers(1, 40)
            context += response[k] + rng.integers(0, 30)
    cached = (prompt * rng.random(len(prompt))).astype(np.int64) if rng.random() < 0.15 else None
    arrival = rng.exponential(2.0, n) * (rng.random() < 0.5)
    shared = np.random.default_rng([seed, 1]).integers(0, 60, groups)[group] if seed % 4 == 3 else None
    trajectories = Trajectories(prompt, response, tool, offsets, group, arrival, cached, shared)
    draft = Speculation(int(rng.integers(1, 5)), float(rng.random()), *(rng.random(2) * 0.01).tolist())
    options = EngineOptions(
        speculation=draft if rng.random() < 0.3 else None,
        tool_concurrency=int(rng.integers(1, 4)) if rng.random() < 0.3 else None,
        async_scheduling=bool(rng.random() < 0.3),
    )
    block = int(rng.choice([1, 4, 16]))
    least = (int(trajectories.final_tokens.max()) + options.tokens_in_flight) // block + 1
    tight = float(block * (least + int(rng.integers(0, 3 * least))) + int(rng.integers(0, block)))
    limits = EngineLimits(
        kv_tokens=np.inf if rng.random() < 0.3 else tight,
        max_running=int(rng.choice([2, 4, 100])),
        token_budget=int(rng.choice([8, 20, 64, 1000])),
        block_tokens=block,
        chunked_prefill=bool(rng.random() < 0.6),
        prefix_caching=bool(rng.random() < 0.7),
        watermark=float(rng.choice([0, 0.01, 0.1])),
    )
    scale = np.array([0.1, 0.01, 0.05, 0.01, 1e-4, 0.05, 0.02, 1e-5])
    cost = EngineStepCost(
        np.array([0.0, 4.0, 16.0, 300.0]),
        np.cumsum(rng.random(4)),
        *(rng.random(8) * scale).tolist(),
        graph_buckets=np.array([1.0, 2.0, 4.0, 8.0]) if rng.random() < 0.5 else None,
    )
    if rng.random() < 0.5:
        cost = replace(cost, mixed_linear_s=np.maximum(cost.linear_s, rng.random()))
    return trajectories, cost, limits, options


@pytest.mark.slow
def test_events_equal_the_token_loop_on_200_random_cases() -> None:
    preemptions = hits = speculative = multi_turn = 0
    for seed in range(200):
        trajectories, cost, limits, options = random_case(seed)
        want = run_token_loop(trajectories, cost, limits, options)
        got = run_events(trajectories, cost, limits, options, warm=seed % 2 == 0)
        np.testing.assert_allclose(got.finish_s, want.finish_s, rtol=1e-9, err_msg=f"seed {seed}")
        np.testing.assert_allclose(got.first_token_s, want.first_token_s, rtol=1e-9, err_msg=f"seed {seed}")
        assert (got.preemptions, got.hit_tokens) == (want.preemptions, want.hit_tokens), f"seed {seed}"
        preemptions += got.preemptions
        hits += got.hit_tokens > 0
        speculative += options.speculation is not None
        multi_turn += not trajectories.single_turn
    # the cases are only worth something if they reach the mechanisms
    assert preemptions > 50
    assert min(hits, speculative, multi_turn) > 40


def test_warm_start_changes_nothing() -> None:
    """All first prompts at once, against one by one: every time, every engine_step, every counter."""
    warmed = 0
    for seed in range(300):
        trajectories, cost, limits, options = random_case(seed)
        trajectories = replace(trajectories, arrival_s=np.zeros(len(trajectories)))
        options = replace(options, speculation=None)
        limits = replace(limits, token_budget=max(limits.token_budget, 20), kv_tokens=4.0 * limits.kv_tokens)
        cold = run_events(trajectories, cost, limits, options, warm=False)
        warm = run_events(trajectories, cost, limits, options)
        engine = EventEngine(trajectories, cost, limits, options)
        warm_start(engine, limits)
        warmed += engine.now > 0.0
        for name in ("arrival_s", "scheduled_s", "first_token_s", "finish_s"):
            np.testing.assert_allclose(getattr(warm, name), getattr(cold, name), rtol=1e-9, atol=1e-12)
        for name in ("preemptions", "hit_tokens", "prompt_tokens", "engine_steps"):
            assert getattr(warm, name) == getattr(cold, name), f"{name}, seed {seed}"
        np.testing.assert_allclose(warm.segments.keys.sum(), cold.segments.keys.sum())
    assert warmed > 60


def static_case(seed: int) -> tuple[Trajectories, EngineStepCost, EngineLimits]:
    trajectories, cost, limits, _ = random_case(seed)
    first = trajectories.offsets[:-1]
    made = Trajectories.of(
        trajectories.prompt_tokens[first], trajectories.response_tokens[first], group=trajectories.group
    )
    limits = replace(limits, kv_tokens=np.inf, max_running=100, token_budget=max(limits.token_budget, len(made)))
    return made, cost, limits


def test_static_batch_equals_events() -> None:
    for seed in range(150):
        trajectories, cost, limits = static_case(seed)
        assert static_applies(trajectories, limits, EngineOptions())
        events = run_events(trajectories, cost, limits, EngineOptions())
        static = run_static(trajectories, cost, limits, EngineOptions())
        np.testing.assert_allclose(static.finish_s, events.finish_s, rtol=1e-9, err_msg=f"seed {seed}")
        np.testing.assert_allclose(static.first_token_s, events.first_token_s, rtol=1e-9, err_msg=f"seed {seed}")
        np.testing.assert_allclose(static.scheduled_s, events.scheduled_s, rtol=1e-9, atol=1e-12)
        assert static.hit_tokens == events.hit_tokens
        np.testing.assert_allclose(static.busy_s, events.busy_s, rtol=1e-9)
        assert static.engine_steps == events.engine_steps


def test_queue_equals_events() -> None:
    """List scheduling of more requests than places, against the event loop; and it must apply often enough."""
    applied = 0
    for seed in range(300):
        trajectories, cost, limits = static_case(seed)
        rng = np.random.default_rng(seed)
        limits = replace(limits, max_running=int(rng.integers(2, 6)), token_budget=200, chunked_prefill=True)
        if rng.random() < 0.5:
            limits = replace(limits, kv_tokens=float(rng.integers(200, 2000)))
        options = EngineOptions(async_scheduling=bool(rng.random() < 0.3))
        if not queue_applies(trajectories, limits, options):
            continue
        queued = run_queued(trajectories, cost, limits, options)
        if queued is None:
            continue
        applied += 1
        events = run_events(trajectories, cost, limits, options)
        np.testing.assert_allclose(queued.finish_s, events.finish_s, rtol=1e-9, err_msg=f"seed {seed}")
        np.testing.assert_allclose(queued.first_token_s, events.first_token_s, rtol=1e-9, err_msg=f"seed {seed}")
        np.testing.assert_allclose(queued.scheduled_s, events.scheduled_s, rtol=1e-9, atol=1e-12)
        assert (queued.hit_tokens, queued.engine_steps) == (events.hit_tokens, events.engine_steps)
        np.testing.assert_allclose(queued.segments.keys.sum(), events.segments.keys.sum(), rtol=1e-12)
        np.testing.assert_allclose(queued.busy_s, events.busy_s, rtol=1e-9)
        counted = count_queued(trajectories, cost, limits, options)
        assert counted is not None
        for name in Runs.__dataclass_fields__:
            np.testing.assert_array_equal(getattr(counted, name), getattr(queued.segments, name), err_msg=name)
    assert applied > 60


def test_census_gives_the_makespan_of_any_cost() -> None:
    """Counted with one second per engine_step, exact for other costs: queue, preemption and prefix hits included."""
    checked = 0
    for seed in range(300):
        trajectories, cost, limits, options = random_case(seed)
        if not trajectories.single_turn or options != EngineOptions() or trajectories.arrival_s.any():
            continue
        census = take_census(trajectories, limits)
        makespan = simulate_replica(trajectories, cost, limits).makespan_s
        np.testing.assert_allclose(census.makespan_s(cost), makespan, rtol=1e-9, err_msg=f"seed {seed}")
        checked += 1
    assert checked > 25


def test_census_of_many_layouts_at_once_equals_one_by_one() -> None:
    rng = np.random.default_rng(3)
    trajectories = Trajectories.of(rng.integers(10, 200, 64), rng.integers(1, 500, 64), group=np.arange(64) // 8)
    census = take_census(trajectories, EngineLimits(kv_tokens=8000, max_running=24, token_budget=256))
    tokens = np.array([1.0, 8.0, 64.0, 512.0])
    linear = np.cumsum(rng.random((5, 4)), axis=1)
    scalars = rng.random((8, 5)) * 1e-3
    many = census.makespan_s(EngineStepCost(tokens, linear, *scalars, graph_buckets=np.array([8.0, 16.0, 32.0])))
    assert many.shape == (5,)
    for j in range(5):
        one = EngineStepCost(tokens, linear[j], *scalars[:, j].tolist(), graph_buckets=np.array([8.0, 16.0, 32.0]))
        np.testing.assert_allclose(many[j], census.makespan_s(one), rtol=1e-12)


@pytest.mark.parametrize("per_key", [0.0, 2e-5])
def test_closed_form_equals_events_where_its_assumptions_hold(per_key: float) -> None:
    rng = np.random.default_rng(5)
    buckets = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    cost = EngineStepCost(
        np.array([0.0, 8.0, 64.0]), np.array([1.0, 1.5, 4.0]), host_s=0.2, decode_per_request_s=0.01,
        decode_per_kv_token_s=per_key, graph_buckets=buckets, mixed_linear_s=np.array([2.0, 2.0, 4.0]),
    )  # fmt: skip
    limits = EngineLimits(kv_tokens=np.inf, max_running=64, token_budget=10_000, chunked_prefill=False)
    for _ in range(20):
        n = int(rng.integers(1, 40))
        prompt, response = rng.integers(1, 50, n), rng.integers(1, 300, n)
        timeline = simulate_replica(Trajectories.of(prompt, response), cost, limits)
        got = closed_form_makespan_s(response, cost, prompt_tokens=prompt, prefill_s=timeline.prefill_s)
        np.testing.assert_allclose(got, timeline.makespan_s, rtol=1e-9)


def test_closed_form_takes_many_workloads() -> None:
    cost = EngineStepCost(np.array([0.0, 4.0]), np.array([1.0, 2.0]))
    lengths = np.random.default_rng(1).integers(1, 100, (7, 12)).astype(np.uint16)
    rows = [float(closed_form_makespan_s(row, cost)) for row in lengths]
    np.testing.assert_allclose(closed_form_makespan_s(lengths, cost), rows, rtol=1e-12)


def test_estimate_chooses_the_closed_form_only_where_it_is_exact() -> None:
    methods = {"closed form": 0, "events": 0}
    for seed in range(160):
        trajectories, cost, limits = static_case(seed)
        roomy = replace(limits, token_budget=100_000)
        for each in (roomy, limits, replace(limits, max_running=3)):
            found = estimate_replica(trajectories, cost, each)
            methods[found.method] += 1
            want = run_events(trajectories, cost, each, EngineOptions()).makespan_s
            np.testing.assert_allclose(found.makespan_s, want, rtol=1e-9, err_msg=f"seed {seed}")
            if found.method == "closed form":
                assert found.gap == 0.0
    assert min(methods.values()) > 60


def test_gap_of_the_closed_form_is_small_without_preemption_and_reported_with() -> None:
    rng = np.random.default_rng(0)
    trajectories = Trajectories.of(
        np.repeat(rng.integers(60, 300, 64), 8), rng.gamma(2.4, 300.0, 512), group=np.arange(512) // 8
    )
    cost = EngineStepCost(np.array([0.0, 1000.0]), np.array([5e-3, 2.5e-2]), 1e-3, decode_per_kv_token_s=1e-8)
    gaps = [
        abs(estimate_replica(trajectories, cost, EngineLimits(kv, running)).gap)
        for kv, running in ((np.inf, 512), (np.inf, 64), (1e5, 512))
    ]
    assert gaps[0] < 0.01
    assert gaps[1] < 0.01
    assert 0.0 < gaps[2] < 0.25


@pytest.mark.parametrize("few", [1, 8])
def test_completions_all_at_once_change_nothing(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that surely complete before the cache is full, against one by one; and what is held meanwhile."""
    monkeypatch.setattr(event_engine, "FEW", few)
    partly = preemptions = 0
    original = EventEngine._drain

    def counted(engine: EventEngine) -> bool:
        nonlocal partly
        worked = original(engine)
        partly += worked and bool(engine.running)
        return worked

    monkeypatch.setattr(EventEngine, "_drain", counted)
    for seed in range(160):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(40, 160))
        response = np.clip(rng.lognormal(4.5, 0.6, n), 1, 600).astype(np.int64)
        group = np.arange(n) // 4
        trajectories = Trajectories.of(rng.integers(5, 90, n)[group * 4], response, group=group)
        limits = EngineLimits(
            kv_tokens=float(max(trajectories.final_tokens.sum() * rng.uniform(0.3, 0.8), 800.0)),
            max_running=n,
            token_budget=int(rng.choice([128, 4096])),
            block_tokens=int(rng.choice([1, 16])),
            chunked_prefill=bool(rng.random() < 0.7),
            prefix_caching=bool(rng.random() < 0.7),
        )
        speculation = Speculation(3, 0.6) if rng.random() < 0.3 else None
        options = EngineOptions(speculation=speculation, async_scheduling=bool(rng.random() < 0.4))
        cost = EngineStepCost(np.array([0.0, 4096.0]), np.array([0.01, 0.1]), 0.002, decode_per_kv_token_s=1e-7)
        found = run_events(trajectories, cost, limits, options)
        with monkeypatch.context() as one_by_one:
            one_by_one.setattr(EventEngine, "_drain", lambda self: False)
            want = run_events(trajectories, cost, limits, options)
        np.testing.assert_allclose(found.finish_s, want.finish_s, rtol=1e-9, err_msg=f"seed {seed}")
        np.testing.assert_allclose(found.segments.held_tokens.max(), want.segments.held_tokens.max())
        assert found.engine_steps == want.engine_steps and found.preemptions == want.preemptions
        if len(found.segments) == len(want.segments):
            np.testing.assert_array_equal(found.segments.held_tokens, want.segments.held_tokens, f"seed {seed}")
        preemptions += found.preemptions
    assert partly > 10  # the cases are only worth something if the cache fills after some have completed
    assert preemptions > 200
