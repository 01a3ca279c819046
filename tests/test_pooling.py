"""Partial pooling: groups of many rows go their own way, groups of few stay with the pool, strangers get the pool."""

from __future__ import annotations

import numpy as np
import pytest

from rlperf.calibrate.pooling import Constant, Kind, Rows, fit_pool, left_out
from rlperf.layout import FloatArray

GROUPS, EACH = 30, 12


def _rows(effect: FloatArray, noise: float, *, silent: tuple[str, ...] = ()) -> Rows:
    """Seconds exp(a) + x exp(b), where groups differ in b and rows of ``silent`` have x = 0."""
    rng = np.random.default_rng(1)
    labels = [f"g{k:02d}" for k in range(GROUPS) for _ in range(EACH)]
    x = np.where(np.isin(labels, silent), 0.0, rng.uniform(0.5, 4.0, len(labels)))

    def predict(logs: FloatArray) -> FloatArray:
        return np.log(np.exp(logs[:, 0]) + x * np.exp(logs[:, 1]))

    true = np.stack([np.full(len(labels), 0.3), 0.2 + np.repeat(effect, EACH)], axis=1)
    measured = predict(true) + noise * rng.standard_normal(len(labels))
    constants = (Constant("a", 1.0, 1.0), Constant("b", 1.0, 1.0))
    units = [str(k) for k in range(len(labels))]
    return Rows(predict, measured, constants, (Kind("group", ("b",)),), {"group": labels}, units, [""] * len(labels))


EFFECT = 0.4 * np.random.default_rng(2).standard_normal(GROUPS)


def test_groups_with_rows_find_their_own_and_how_far_groups_differ() -> None:
    found = fit_pool(_rows(EFFECT, 0.03))
    level = found.levels["group"]
    assert found.mean == pytest.approx([0.3, 0.2], abs=0.15)
    assert found.mean[1] + level.effect[:, 0] == pytest.approx(0.2 + EFFECT, abs=0.12)
    assert level.between[0] == pytest.approx(float(EFFECT.std()), rel=0.3)


def test_a_constant_that_a_groups_rows_cannot_tell_stays_with_the_pool_and_says_so() -> None:
    found = fit_pool(_rows(EFFECT, 0.03, silent=("g03",))).levels["group"]
    place = found.names.index("g03")
    assert found.effect[place, 0] == pytest.approx(0.0, abs=1e-6)
    assert found.spread[place, 0] == pytest.approx(found.between[0], rel=1e-3)
    assert found.spread[place + 1, 0] < 0.3 * found.between[0]


def test_a_left_out_group_is_predicted_by_the_pool_alone() -> None:
    rows = _rows(EFFECT, 0.03)
    whole = fit_pool(rows)
    predicted, fits = left_out(rows, rows.labels["group"], whole)
    assert (
        np.abs(predicted - rows.measured).mean()
        > 3 * np.abs(rows.predict(whole.logs(rows.labels, len(rows.measured))) - rows.measured).mean()
    )
    held = np.asarray(rows.labels["group"]) == "g05"
    alone = fits["g05"].logs({"group": ["nobody"] * len(held)}, len(held))
    assert predicted[held] == pytest.approx(rows.predict(alone)[held])


def test_rows_that_repeat_one_configuration_weigh_as_one() -> None:
    rows = _rows(EFFECT, 0.0)
    labels = rows.labels["group"]
    shifted = rows.measured + 0.5 * (np.asarray(labels) == "g07")
    repeated = Rows(
        rows.predict, shifted, rows.constants, (Kind("group", ("b",), 0.05),), rows.labels,
        ["one" if name == "g07" else str(k) for k, name in enumerate(labels)], rows.strata,
    )  # fmt: skip
    apart = Rows(
        rows.predict, shifted, rows.constants, repeated.kinds, rows.labels, rows.units, rows.strata,
    )  # fmt: skip
    place = 7
    together = fit_pool(repeated).levels["group"].effect[place, 0]
    assert together < fit_pool(apart).levels["group"].effect[place, 0]


@pytest.mark.parametrize("truth", [(-2.0, 2.0, -0.5), (0.0, 3.0, 1.0)])
def test_constants_that_hang_together_are_followed_to_the_least_misfit(truth: tuple[float, float, float]) -> None:
    """Host and device joined by a norm: a step cut constant by constant stops where seconds are off by a third."""
    work = np.geomspace(0.1, 10.0, 60)

    def predict(logs: FloatArray) -> FloatArray:
        device, host, norm = np.exp(logs[:, 0]) * work, np.exp(logs[:, 1]), 4.0 * np.exp(logs[:, 2])
        return np.log((device**norm + host**norm) ** (1.0 / norm))

    measured = predict(np.tile(truth, (60, 1))) + 0.02 * np.random.default_rng(1).standard_normal(60)
    constants = tuple(Constant(name, 1.0, 1.5) for name in ("device", "host", "norm"))
    rows = Rows(predict, measured, constants, (), {}, [str(k) for k in range(60)], [""] * 60)
    found = fit_pool(rows)
    assert np.abs(predict(np.tile(found.mean, (60, 1))) - measured).mean() < 0.02
    assert found.mean[1] == pytest.approx(truth[1], abs=0.02)  # the host alone shows in these rows


def test_what_the_fit_leaves_open_is_as_large_as_what_it_misses() -> None:
    away = tuple(f"g{k:02d}" for k in range(10))
    rows = _rows(EFFECT, 0.03)
    held = np.isin(rows.labels["group"], away)
    found = fit_pool(rows, ~held)
    logs = found.logs(rows.labels, len(held))
    variance, missed = found.variance(rows.labels, rows.slopes(logs)), rows.measured - rows.predict(logs)
    one_each = (missed / np.sqrt(variance + 0.03**2))[held].reshape(10, EACH)
    assert 0.6 < np.sqrt(np.mean(one_each**2)) < 1.5
    assert variance[held].min() > 4.0 * variance[~held].max()


def test_a_group_that_is_in_no_table_differs_as_one_without_rows_does() -> None:
    rows = _rows(EFFECT, 0.03, silent=("g03",))
    found = fit_pool(rows)
    slopes = np.array([[0.2, 0.8]])
    silent, strange, pool = (float(found.variance({"group": [name]}, slopes)[0]) for name in ("g03", "?", ""))
    between = float(found.levels["group"].between[0])
    assert strange == pytest.approx(pool + (0.8 * between) ** 2)
    assert silent == pytest.approx(strange, rel=0.02)
