"""Asynchronous steady state: exact small cases, a token-by-token oracle, conservation, the measured staleness."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.errors import SpecError
from rlperf.sim.rl_step.asynchronous import AsyncRun, simulate
from rlperf.sim.rl_step.modes import Execution, step_seconds
from rlperf.sim.rl_step.replicas import Agents, RunGroup, TokenPace, TurnReplica
from rlperf.sim.rl_step.stages import StageSeconds
from rlperf.sim.rollout.trajectories import Trajectories
from rlperf.sim.rollout.turns import serve_turns

from .async_closed_forms import async_staleness
from .quick import slow_but

# C, B, q, rho, M -> staleness: measured points of asynchronous runs (cost-model notes, section 4)
MEASURED = (
    (120, 240, 2, 0.63, 1.42, 1.26),
    (240, 120, 2, 0.92, 1.43, 3.59),
    (128, 128, 2, 1.07, 1.44, 3.09),
    (240, 120, 1, 0.86, 1.42, 3.40),
    (120, 120, 1, 0.67, 1.42, 1.92),
    (128, 128, 1, 1.14, 1.45, 2.01),
)


def lengths(group_size: int, tail: float, mean: float = 1000.0) -> np.ndarray:
    """Gamma lengths whose E[maximum of a group] / E[length] is ``tail`` (bisection on the spread)."""
    low, high = 0.01, 2.0
    for _ in range(30):
        cv = (low + high) / 2
        draw = np.random.default_rng(1).gamma(1 / cv**2, cv**2, (8000, group_size))
        low, high = (cv, high) if draw.max(1).mean() < tail else (low, cv)
    return mean * np.random.default_rng(0).gamma(1 / cv**2, cv**2, (4000, group_size))


def test_on_policy_run_is_the_synchronous_step() -> None:
    run = AsyncRun(np.full((1, 4), 100.0), 8, 5.0, TokenPace(0.1), slots=8, sync_s=2.0, max_staleness=0)
    result = simulate(run, rl_steps=6)
    times = StageSeconds.of(rollout_s=10.0, training_s=5.0, weight_sync_s=2.0)
    assert result.period_s == pytest.approx(float(step_seconds(Execution("disaggregated"), times)))
    assert result.staleness_counts.tolist() == [6 * 8]


def test_one_batch_ahead_overlaps_rollout_and_training() -> None:
    # 16 slots: one batch of 8 trains while the next is rolled out; constant lengths, so the maximum rules
    for train_s, expected in ((5.0, 10.0), (14.0, 14.0)):
        run = AsyncRun(np.full((1, 4), 100.0), 8, train_s, TokenPace(0.1), slots=8, max_staleness=1)
        assert simulate(run, rl_steps=10).period_s == pytest.approx(expected)


def test_latency_bounds_a_run_with_idle_engines() -> None:
    # k = 1: two batches under way between first token and end of training: period >= (10 + 4) / 2
    run = AsyncRun(np.full((1, 4), 100.0), 8, 4.0, TokenPace(0.1), slots=800, max_staleness=1)
    times = StageSeconds.of(rollout_s=10.0, training_s=4.0, rollout_steady_s=0.1)
    closed = float(step_seconds(Execution("k_step_off", staleness=1, in_flight_updates=1), times))
    assert closed == pytest.approx(7.0)
    assert simulate(run, rl_steps=20).period_s == pytest.approx(closed, rel=0.01)


@pytest.mark.parametrize("drawn", slow_but(((1, 1), (1, 2), (1, 4), (8, 1), (8, 2), (8, 4)), (1, 4), (8, 1), (8, 4)))
def test_long_groups_hold_up_no_batch_where_groups_are_counted(drawn: tuple[int, int]) -> None:
    """Heavy tails, engines that are never full: latency alone, and the batch's longest is far beyond a group's."""
    samples, bound = drawn
    tokens = np.random.default_rng(1).lognormal(6.0, 1.0, (512, samples)).round() + 1.0
    groups, group_s = 1024 // samples, float(tokens.max(axis=1).mean()) * 0.01
    run = AsyncRun(tokens, groups * samples, 0.25 * group_s, TokenPace(0.01), slots=99999, max_staleness=bound)
    whole_s = float(np.sort(tokens.max(axis=1))[-512 // groups :].mean()) * 0.01
    times = StageSeconds.of(whole_s, training_s=0.25 * group_s, rollout_steady_s=0.1, rollout_group_s=group_s)
    found = simulate(run, rl_steps=40).period_s
    one, many = (float(step_seconds(Execution("async", bound, 1, 1, 0, grouped), times)) for grouped in (1, 0))
    assert found == pytest.approx(one, rel=0.06)
    assert many > 2.0 * one


def token_loop(
    tokens: np.ndarray, batch: int, train_ticks: int, slots: int, k: int, batches: int, need: int
) -> list[int]:
    """Ends of training by walking one token at a time: one replica, one tick a token, groups in the given order.

    A group starts where it finds ``need`` free slots.
    """
    tick, version, launched, trained, busy_until = 0, 0, 0, [], -1
    running: list[list[int]] = []
    waiting: list[list[int]] = []
    ready = group = 0
    left: dict[int, int] = {}
    while len(trained) < batches:
        if busy_until == tick:
            version += 1
            trained.append(tick)
            busy_until = -1
        if busy_until < 0 and ready >= batch:
            ready -= batch
            busy_until = tick + train_ticks
        size = tokens.shape[1]
        while slots - len(running) >= (1 if waiting else need) and (waiting or launched < (version + k + 1) * batch):
            if not waiting:
                waiting = [[int(length), group] for length in tokens[group]]
                left[group] = size
                launched += size
                group += 1
            running.append(waiting.pop(0))
        for request in running:
            request[0] -= 1
        for request in [r for r in running if r[0] == 0]:
            left[request[1]] -= 1
            ready += size if left[request[1]] == 0 else 0
        running = [r for r in running if r[0] > 0]
        tick += 1
    return trained


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 30), st.integers(0, 3), st.booleans())
def test_events_equal_a_token_by_token_loop(seed: int, group_size: int, train_ticks: int, k: int, whole: bool) -> None:
    random = np.random.default_rng(seed)
    tokens = random.integers(1, 40, (64, group_size)).astype(np.float64)
    batch, slots = 2 * group_size, group_size * int(random.integers(1, 5))
    run = AsyncRun(tokens, batch, float(train_ticks), TokenPace(1.0), slots=slots, max_staleness=k)
    run = replace(run, whole_groups=whole)
    order = np.random.default_rng(seed).integers(0, 64, size=256)[::-1]
    expected = token_loop(tokens[order], batch, train_ticks, slots, k, 12, group_size if whole else 1)
    found = [count * simulate(run, rl_steps=count, warmup=0, seed=seed).period_s for count in range(1, 13)]
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("update", ["in_flight", "interrupt", "drain"])
def test_nothing_is_lost_and_no_device_is_over_full(update: str) -> None:
    run = AsyncRun(
        lengths(8, 1.8),
        batch=64,
        train_s=12.0,
        replicas=3,
        slots=40,
        engines=TokenPace(0.01, 2e-4, prompt_tokens=100.0, prefill_token_s=1e-4),
        wait_s=1.5,
        sync_s=3.0,
        swap_s=1.0,
        sync_interval=2,
        update=update,  # type: ignore[arg-type]
        max_staleness=2,
        train_cv=0.1,
    )
    result = simulate(run, rl_steps=40, seed=3)
    assert result.staleness_counts.sum() == 40 * 64
    assert 0.0 < result.slots_busy <= 1.0
    assert 0.0 < result.trainer_busy <= 1.0
    assert result.period_s >= 11.0 + 3.0 / 2 - 0.5


def test_draining_costs_more_than_swapping_in_flight() -> None:
    base = AsyncRun(lengths(8, 2.0), 64, 5.0, TokenPace(0.02), replicas=2, slots=64, sync_s=4.0, swap_s=0.5, queue=2)
    swap = simulate(base, rl_steps=60)
    drain = simulate(replace(base, update="drain"), rl_steps=60)
    again = TokenPace(0.02, prompt_tokens=500.0, prefill_token_s=2e-4)
    stop = simulate(replace(base, update="interrupt", engines=again), rl_steps=60)
    assert drain.period_s > 1.2 * swap.period_s
    assert swap.period_s < stop.period_s < drain.period_s


def test_a_trainer_that_waits_for_engines_to_drain_is_not_busy() -> None:
    run = AsyncRun(
        lengths(8, 2.0), 64, 5.0, TokenPace(0.02), replicas=2, slots=64, sync_s=4.0, max_staleness=1,
        update="drain",
    )  # fmt: skip
    found = simulate(run, rl_steps=60)
    assert found.period_s > 1.5 * (run.train_s + run.sync_s)
    assert found.trainer_busy == pytest.approx(run.train_s / found.period_s)


def test_staleness_of_the_measured_points() -> None:
    """Groups of 16 admitted whole (an assumption: the points state no group size): within 10 %, mean below 5 %.

    The closed form lies 5 to 10 % above every point; the events must do better on the mean.
    """
    errors, closed = [], []
    for concurrent, batch, queue, rho, tail, measured in MEASURED:
        run = AsyncRun(
            lengths(16, tail),
            batch=batch,
            train_s=rho * batch / concurrent * 1000 * 0.02,
            slots=concurrent,
            engines=TokenPace(0.02),
            queue=queue,
            whole_groups=True,
        )
        errors.append(simulate(run, rl_steps=150).staleness_mean / measured - 1)
        closed.append(float(async_staleness(concurrent, batch, queue, rho, tail)) / measured - 1)
    assert np.abs(errors).max() < 0.10
    assert np.abs(errors).mean() < 0.05
    assert np.abs(errors).mean() < np.abs(closed).mean()


def test_engines_that_drain_wait_for_tools_and_samples_hold_their_places_until_tools_end() -> None:
    """100 tokens of 0.1 s and a tool of 20 s in between: 30 s a sample, whatever its group."""
    turns, n = np.tile([10, 60], 4), 4
    drawn = Trajectories(
        turns, np.full(8, 50), np.tile([20.0, 0.0], n), offsets=np.arange(0, 9, 2), group=np.zeros(n, np.int64),
        arrival_s=np.zeros(n),
    )  # fmt: skip
    cost = EngineStepCost(np.array([0.0]), np.zeros(1), host_s=0.1)
    agents = Agents.of([drawn], cost, EngineLimits(np.inf, max_running=64))
    one = AsyncRun(
        np.full((1, 4), 100.0), batch=8, train_s=5.0, slots=8, engines=agents, max_staleness=1, update="drain"
    )  # fmt: skip
    assert simulate(one, rl_steps=10).period_s == pytest.approx(30.0, rel=0.01)
    few = replace(one, update="in_flight", slots=100, max_staleness=4, samples=6)
    assert simulate(few, rl_steps=30).period_s == pytest.approx(30.0 * 8 / 6, rel=0.02)
    reward = replace(few, wait_s=1000.0, max_staleness=100)  # which is no longer the environment's
    assert simulate(reward, rl_steps=30, warmup=60).period_s == pytest.approx(30.0 * 8 / 6, rel=0.02)


@pytest.mark.parametrize("share", [0.2, 5.0])
def test_agents_given_one_by_one_are_served_as_a_rollout_of_all(share: float) -> None:
    """A replica that is looked at every so often does what `serve_turns` does in one go, evictions with it."""
    rng = np.random.default_rng(2)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(3, 12, 24))])
    response, answer = rng.integers(20, 120, offsets[-1]), rng.integers(0, 300, offsets[-1])
    owner = np.repeat(np.arange(24), np.diff(offsets))
    grown = np.concatenate([[0], np.cumsum(response + answer)[:-1]])
    prompt = np.repeat(rng.integers(200, 900, 6), 4)[owner] + grown - grown[offsets[:-1]][owner]
    group = np.repeat(np.arange(6), 4)
    drawn = Trajectories(prompt, response, rng.exponential(2.0, offsets[-1]), offsets, group, np.zeros(24))
    cost = EngineStepCost(np.array([0.0, 8192.0]), np.array([0.002, 0.2]), host_s=0.004, decode_per_kv_token_s=2e-7)
    limits = EngineLimits(share * 24 * float(drawn.final_tokens.mean()), max_running=16)
    replica = TurnReplica(24, Agents.of([drawn], cost, limits), look_s=0.5)
    groups = [RunGroup(0, 4, 4, row=row) for row in range(6)]
    for at, row in enumerate(np.repeat(np.arange(6), 4)):
        replica.begin(0.0, groups[row], at % 4)
    ends, now = [], 0.0
    while (due := replica.due_s(now)) is not None:
        now = due
        if replica.ended(now) is not None:
            ends.append(now)
    assert ends == pytest.approx(np.sort(serve_turns(drawn, cost, limits).finish_s), rel=1e-9)


def test_trainer_limited_period_is_the_trainers() -> None:
    run = AsyncRun(lengths(4, 1.3), 64, 100.0, TokenPace(0.02), slots=64, queue=1)
    result = simulate(run, rl_steps=30)
    assert result.period_s == pytest.approx(100.0)
    assert result.trainer_busy == pytest.approx(1.0)
    assert result.queue_samples > 0


def test_more_staleness_never_slows_the_steady_state() -> None:
    base = AsyncRun(lengths(8, 2.2), 128, 20.0, TokenPace(0.02), slots=128, max_staleness=0)
    periods = [simulate(replace(base, max_staleness=k), rl_steps=60).period_s for k in (0, 1, 2, 4)]
    assert all(later <= earlier * 1.02 for earlier, later in itertools.pairwise(periods))
    assert periods[-1] < 0.75 * periods[0]


@pytest.mark.parametrize(
    "wrong", [{"queue": None}, {"queue": 0.5}, {"batch": 0}, {"response_tokens": np.zeros(3)}, {"slots": 0}]
)
def test_senseless_runs_are_refused(wrong: dict[str, object]) -> None:
    engines = TokenPace(0.02)
    good = {"response_tokens": np.ones((2, 2)), "batch": 2, "train_s": 1.0, "engines": engines, "queue": 1}
    with pytest.raises(SpecError):
        AsyncRun(**{**good, **wrong})  # type: ignore[arg-type]
