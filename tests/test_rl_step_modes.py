"""Closed forms of the rl_step: by hand, as arrays, and the orders they must respect."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlperf.sim.rl_step.modes import (
    Execution,
    step_seconds,
)
from rlperf.sim.rl_step.stages import StageSeconds
from rlperf.specs.modes import MODES

from .async_closed_forms import async_device_seconds, async_staleness

SECONDS = st.floats(0.0, 1e4)


def test_every_mode_by_hand() -> None:
    times = StageSeconds.of(
        rollout_s=100.0, rollout_steady_s=60.0, rollout_first_s=20.0, reward_s=5.0, scoring_s=12.0, training_s=40.0,
        data_movement_s=3.0, other_s=2.0, weight_sync_s=8.0, offload_s=6.0,
    )  # fmt: skip
    work = 12 + 40 + 3 + 2
    drained = max(60 + 8 + 40, work + 8, (105 + work + 8) / 4)  # a tail of 100 - 60 s before every sync
    expected = {
        "colocated": 100 + 5 + work + 8 + 6,
        "disaggregated": 100 + 5 + work + 8,
        "one_step_off": 105 + 8,
        "k_step_off": drained,
        "async": drained,
        "streaming": max(105 + work / 4, 20 + work) + 8,
    }
    assert set(expected) == {name for name, row in MODES.items() if not row.had_by}
    found = step_seconds(Execution(list(expected), staleness=3), times)
    assert found == pytest.approx(list(expected.values()))


def test_in_flight_updates_hide_the_sync_from_the_engines() -> None:
    times = StageSeconds.of(rollout_s=50.0, training_s=10.0, weight_sync_s=20.0, swap_s=1.0, rollout_steady_s=50.0)
    drained = step_seconds(Execution("async", staleness=4), times)
    hidden = step_seconds(Execution("async", staleness=4, in_flight_updates=1), times)
    assert float(drained) == pytest.approx(70.0)
    assert float(hidden) == pytest.approx(51.0)


def test_engines_that_neither_drain_nor_stop_are_faster_than_those_that_do() -> None:
    times = StageSeconds.of(
        rollout_s=90.0, training_s=10.0, weight_sync_s=6.0, swap_s=1.0, rollout_steady_s=50.0, recompute_s=20.0
    )

    def period(in_flight: int, interrupt: int, interval: int = 1) -> float:
        execution = Execution("async", 9, interval, in_flight, interrupt)
        return float(step_seconds(execution, times))

    assert period(0, 0) == pytest.approx(96.0)  # as long as a batch rolled out alone
    assert period(0, 1) == pytest.approx(76.0)  # the sync, and the cache again
    assert period(1, 1) == period(0, 1)  # what is interrupted waits for all of the weights
    assert period(1, 0) == pytest.approx(51.0)
    assert period(0, 0, interval=4) == pytest.approx(50.0 + (40.0 + 6.0) / 4.0)


def test_interruption_charges_the_recomputed_cache_once_per_sync() -> None:
    times = StageSeconds.of(rollout_s=50.0, recompute_s=6.0)
    run = Execution("k_step_off", staleness=9, interrupt=1, in_flight_updates=1, sync_interval=3)
    assert float(step_seconds(run, times)) == pytest.approx(52.0)


@given(SECONDS, SECONDS, SECONDS, SECONDS, st.floats(0.0, 1.0), st.integers(0, 9))
def test_less_waiting_is_never_slower(r: float, s: float, t: float, y: float, busy: float, k: int) -> None:
    times = StageSeconds.of(rollout_s=r, scoring_s=s, training_s=t, weight_sync_s=y, rollout_steady_s=busy * r)
    by_mode = step_seconds(Execution(list(MODES), staleness=k), times)
    sync = by_mode[MODES["disaggregated"].code]
    assert np.all(by_mode <= sync * (1 + 1e-12) + 1e-9)
    more = step_seconds(Execution("async", staleness=k + 1), times)
    assert more <= by_mode[MODES["async"].code] + 1e-9
    # no mode beats its busiest device
    assert by_mode[MODES["async"].code] >= max(busy * r, s + t) - 1e-9


@given(st.lists(st.tuples(SECONDS, SECONDS, st.sampled_from(list(MODES))), min_size=1, max_size=20))
def test_arrays_equal_scalars(rows: list[tuple[float, float, str]]) -> None:
    rollout, training, modes = (np.array(column) for column in zip(*rows, strict=True))
    together = step_seconds(
        Execution(modes), StageSeconds.of(rollout_s=rollout, training_s=training, weight_sync_s=1.0)
    )
    alone = [
        float(step_seconds(Execution(mode), StageSeconds.of(rollout_s=r, training_s=t, weight_sync_s=1.0)))
        for r, t, mode in rows
    ]
    assert together.tolist() == alone


@given(st.floats(0.1, 10.0))
def test_all_rates_scale_the_step(factor: float) -> None:
    def at(scale: float) -> np.ndarray:
        times = StageSeconds.of(
            rollout_s=30 * scale, training_s=20 * scale, weight_sync_s=3 * scale, offload_s=2 * scale, other_s=scale
        )
        return step_seconds(Execution(list(MODES)), times)

    assert at(factor) == pytest.approx(factor * at(1.0))


def test_staleness_is_continuous_where_the_rates_match() -> None:
    below, above = async_staleness(128, 128, 1, [1 - 1e-9, 1.0], 1.4)
    assert below == pytest.approx(above, abs=1e-6)


def test_device_seconds_are_least_where_rates_match() -> None:
    rho = np.linspace(0.3, 3.0, 271)
    assert rho[np.argmin(async_device_seconds(0.01, 0.03, rho))] == pytest.approx(1.0)
