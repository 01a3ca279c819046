"""Intervals and comparisons: widths by hand, coverage on synthetic runs, common random numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlperf.sim.rl_step.uncertainty import (
    Comparison,
    compare_draws,
    interval,
    unshared_error,
)
from rlperf.specs.rl_calibration import load_framework_calibration
from rlperf.workload import LengthTable
from rlperf.workload.bootstrap import bootstrap


def drawn(seed: int, groups: int = 64, size: int = 8) -> LengthTable:
    random = np.random.default_rng(seed)
    lengths = random.lognormal(6.0, 0.6, (groups, 1)) * random.lognormal(0.0, 0.4, (groups, size))
    return LengthTable.from_groups([100] * groups, lengths.astype(int).tolist(), max_response_tokens=1 << 20)


def drawn_seconds(seconds: Callable[[LengthTable], float], table: LengthTable, *, draws: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    return np.array([seconds(bootstrap(table, random)) for _ in range(draws)])


def test_a_release_that_nobody_measured_is_extrapolated_and_says_so() -> None:
    known, later = (load_framework_calibration(f"nemo_rl=={v}", "megatron") for v in ("0.5", "0.8"))
    assert not known.release_note
    assert "0.8 is extrapolated" in later.release_note
    assert later.step_spread.high > known.step_spread.high
    assert later.step_spread.low < known.step_spread.low
    # two releases beyond the last that was measured
    expected = np.hypot(np.log(known.step_spread.high), 1.6448536 * 2 * known.release_spread)
    assert np.log(later.step_spread.high) == pytest.approx(expected)
    drift = 1.6448536 * 2 * known.release_spread
    assert np.log(later.stage_spread.training[1]) == pytest.approx(
        np.hypot(np.log(known.stage_spread.training[1]), drift)
    )
    earlier = load_framework_calibration("nemo_rl==0.2", "megatron")
    assert earlier.release_note
    assert earlier.factors.training == 1.0


def test_releases_after_the_last_that_was_read_say_what_may_differ() -> None:
    read, later, none = (load_framework_calibration(f"nemo_rl{v}", "fsdp2") for v in ("==0.3", "==0.5", "==0.2"))
    assert "0.2.0 shares them" in later.release_note
    assert "0.2.0" not in read.release_note and "0.2.0" not in none.release_note


def test_later_releases_follow_the_drift_of_those_that_were_measured() -> None:
    """No two of them are silently equal, and a trend is not carried on beyond the releases that it was seen over."""
    found = [load_framework_calibration(f"nemo_rl=={v}", "megatron") for v in ("0.6", "0.7", "0.8", "0.12")]
    drift = found[0].release_drift
    assert [np.log(each.factors.rollout) for each in found] == pytest.approx([0.0, drift, 2 * drift, 2 * drift])
    widths = [each.step_spread.high / each.step_spread.low for each in found]
    assert widths == sorted(set(widths))


def test_bootstrap_draws_whole_groups() -> None:
    trajectories = drawn(0)
    again = bootstrap(trajectories, np.random.default_rng(1))
    assert again.n == trajectories.n
    known = {tuple(np.sort(trajectories.response_tokens[trajectories.group == g])) for g in range(64)}
    for group in np.unique(again.group):
        assert tuple(np.sort(again.response_tokens[again.group == group])) in known


def test_interval_adds_independent_parts_in_squares() -> None:
    slime = load_framework_calibration("slime")
    assert interval(100.0, [100.0] * 4, slime)[1] == pytest.approx(
        100 * slime.step_spread.high
    )  # measured: holds reruns
    judged = slime.step_spread.model_copy(update={"assumed": True})
    framework = slime.model_copy(update={"step_spread": judged})
    low, high = interval(100.0, [100.0] * 4, framework)
    spread, rerun = framework.step_spread, 1.6449 * framework.rerun_spread
    assert high == pytest.approx(100 * np.exp(np.hypot(np.log(spread.high), rerun)), rel=1e-4)
    assert low == pytest.approx(100 * np.exp(-np.hypot(np.log(spread.low), rerun)), rel=1e-4)
    measured = load_framework_calibration("nemo_rl_megatron")
    assert interval(100.0, [100.0] * 4, measured)[1] == pytest.approx(100 * measured.step_spread.high)
    wider = interval(100.0, [90.0, 100.0, 111.0], framework, extra=0.2)
    assert wider[0] < low
    assert wider[1] > high


def test_a_framework_that_nobody_measured_is_as_uncertain_as_those_left_out() -> None:
    """Whoever's overheads stand in: intervals of one that was fitted are its own alone, and never lent."""
    fitted, unfitted = load_framework_calibration("nemo_rl_megatron"), load_framework_calibration("verl_megatron")
    assert unfitted.borrowed_by("mine").step_spread == unfitted.step_spread
    lent = fitted.borrowed_by("mine")
    assert (lent.step_spread, lent.stage_spread) == (unfitted.step_spread, unfitted.stage_spread)
    assert lent.calibrated_on == () and lent.training == fitted.training
    strange = {
        load_framework_calibration(name).step_spread for name in ("trl", "areal", "openrlhf", "slime", "verl_fsdp")
    }
    assert strange == {unfitted.step_spread}
    assert unfitted.step_spread.high / unfitted.step_spread.low > fitted.step_spread.high / fitted.step_spread.low


def test_bootstrap_spread_covers_a_new_step() -> None:
    """The mean of a new rl_step lies inside the 90 % interval of the bootstrap about nine times in ten."""

    def seconds(trajectories: LengthTable) -> float:
        return float(trajectories.response_tokens.mean())

    truth = np.mean([seconds(drawn(seed)) for seed in range(1000, 1200)])
    inside = []
    for seed in range(150):
        draws = drawn_seconds(seconds, drawn(seed), draws=40, seed=seed)
        low, high = np.quantile(draws, [0.05, 0.95])
        inside.append(low <= truth <= high)
    assert 0.80 <= np.mean(inside) <= 0.97


def test_common_random_numbers_tell_close_ones_apart() -> None:
    trajectories = drawn(3)
    a = drawn_seconds(lambda t: float(t.response_tokens.max()), trajectories, draws=30, seed=5)
    b = drawn_seconds(lambda t: 1.05 * float(t.response_tokens.max()), trajectories, draws=30, seed=5)
    other = drawn_seconds(lambda t: 1.05 * float(t.response_tokens.max()), trajectories, draws=30, seed=6)
    assert compare_draws(a, b).ratio == pytest.approx(1.05)
    assert compare_draws(a, b).apart
    assert not compare_draws(a, other).apart
    assert not compare_draws(a, b, own=0.05).apart


@given(st.lists(st.floats(1.0, 100.0), min_size=2, max_size=12), st.floats(0.2, 5.0))
def test_comparison_is_antisymmetric(draws: list[float], factor: float) -> None:
    a = np.array(draws)
    one, other = compare_draws(a, factor * a, own=0.1), compare_draws(factor * a, a, own=0.1)
    assert one.ratio * other.ratio == pytest.approx(1.0)
    assert one.low * other.high == pytest.approx(1.0)
    assert one.apart == other.apart


def test_sentences() -> None:
    assert Comparison(0.5, 0.4, 0.8).sentence("plan", "default") == "default beats plan by 100 % (25 % .. 150 %)"
    assert "cannot be told apart" in Comparison(1.02, 0.9, 1.1).sentence()


def test_like_configurations_share_their_errors() -> None:
    a, sigma = np.array([50.0, 30.0, 20.0]), np.array([0.1, 0.2, 0.3])
    assert unshared_error(a, 2 * a, sigma, own_share=0.0) == pytest.approx(0.0)
    assert unshared_error(a, a, sigma, own_share=0.5) == pytest.approx(0.0)
    # by hand: only the second stage differs, shares .5 .3 .2 and .4 .44 .16
    b = np.array([50.0, 55.0, 20.0])
    expected = (0.1 * 0.1) ** 2 + 0.2**2 * (0.14**2 + 0.25 * (0.3**2 + 0.44**2)) + (0.3 * 0.04) ** 2
    assert unshared_error(a, b, sigma, own_share=0.5) == pytest.approx(np.sqrt(expected))
    assert unshared_error(a, b, sigma, own_share=0.5, shared=False) > unshared_error(a, b, sigma, own_share=0.5)
