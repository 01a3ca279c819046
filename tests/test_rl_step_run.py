"""Data movement and the whole run: by hand, by simulation, and the orders they must respect."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlperf.errors import SpecError
from rlperf.sim.rl_step.data_movement import BatchShape, batch_bytes, data_movement_s, patch_bytes
from rlperf.sim.rl_step.spot import SpotFacts, elastic_factor, elastic_step_s
from rlperf.sim.rl_step.whole_run import RunFacts, best_checkpoint_s, whole_run
from rlperf.specs.profiles import load_architecture
from rlperf.specs.rl_calibration import load_framework_calibration


def test_batch_bytes_by_hand() -> None:
    # 24 bytes x 1000 tokens + 4 bytes x 5 fields x 900 response tokens, and an image of 5120 patches
    shape = BatchShape(16, 100, 900, image_patches=5120, patch_bytes=4704.0)
    assert float(batch_bytes(shape)) == 16 * (24 * 1000 + 20 * 900 + 5120 * 4704)


def test_padding_counts_the_maxima() -> None:
    packed = BatchShape(64, 100, 900, 2048, 8192)
    padded = BatchShape(64, 100, 900, 2048, 8192, padded=1)
    assert float(batch_bytes(padded)) == 64 * (24 * 10240 + 20 * 8192)
    assert float(batch_bytes(padded)) > 9 * float(batch_bytes(packed))


def test_single_controller_moves_the_batch_several_times_and_queues_scale_with_nodes() -> None:
    shape = BatchShape(np.array([256, 512, 1024]), 100, 900, image_patches=2000, patch_bytes=4704.0)
    single = data_movement_s(load_framework_calibration("verl", "fsdp2"), shape)
    queues = data_movement_s(load_framework_calibration("areal"), shape, nodes=8)
    assert single[1:] == pytest.approx(2 * single[:-1])
    assert np.all(queues < single / 8)


def test_patch_of_a_shipped_vision_tower() -> None:
    tower = load_architecture("Qwen2.5-VL-7B").vision
    assert tower is not None
    assert patch_bytes(tower) == 3 * 14 * 14 * 2 * 4


def test_run_without_failures_is_a_sum() -> None:
    facts = RunFacts(
        rl_steps=25,
        devices=64,
        trained_tokens=1e6,
        start_up_s=100.0,
        capture_s=20.0,
        checkpoint_every=10,
        checkpoint_s=30.0,
        validation_every=5,
        validation_s=12.0,
        usd_per_device_hour=3.0,
    )
    run = whole_run(40.0, facts)
    assert run.total_s == pytest.approx(25 * 40 + 120 + 2 * 30 + 5 * 12)
    assert run.goodput == pytest.approx(1000 / run.total_s)
    assert run.usd == pytest.approx(run.total_s * 64 / 3600 * 3.0)
    assert run.usd_per_million_tokens == pytest.approx(run.usd / 25)
    assert run.lost_s == pytest.approx(0.0)


def test_expected_time_with_failures_is_what_a_simulation_finds() -> None:
    facts = RunFacts(
        rl_steps=40, devices=100, checkpoint_every=8, checkpoint_s=5.0, device_mtbf_s=100 * 900.0, recovery_s=60.0
    )
    expected = whole_run(50.0, facts).total_s
    random = np.random.default_rng(0)
    totals = []
    for _ in range(3000):
        clock = 0.0
        for _ in range(5):
            while True:
                failure = random.exponential(900.0)
                if failure >= 8 * 50 + 5:
                    clock += 8 * 50 + 5
                    break
                clock += failure + 60.0
        totals.append(clock)
    assert expected == pytest.approx(np.mean(totals), rel=0.02)


def test_goodput_falls_with_failures_and_has_a_best_checkpoint_interval() -> None:
    def goodput(every: int, mtbf_s: float | None) -> float:
        facts = RunFacts(
            rl_steps=1000,
            devices=1024,
            checkpoint_every=every,
            checkpoint_s=60.0,
            device_mtbf_s=mtbf_s,
            recovery_s=300.0,
        )
        return whole_run(100.0, facts).goodput

    assert goodput(10, None) > goodput(10, 1024 * 36000.0) > goodput(10, 1024 * 7200.0)
    found = max(range(1, 60), key=lambda every: goodput(every, 1024 * 7200.0))
    assert found * 100.0 == pytest.approx(best_checkpoint_s(60.0, 1.0 / 7200.0), rel=0.15)


def test_a_rollout_whose_nodes_leave_takes_what_a_simulation_finds() -> None:
    """Work of w seconds that begins anew whenever its node leaves, on the share of nodes that are there."""
    spot, random, work = SpotFacts(8, leaves_s=1000.0, returns_s=250.0, elastic=True), np.random.default_rng(1), 600.0
    taken = []
    for _ in range(20_000):
        clock, left = 0.0, random.exponential(1000.0)
        while left < work:
            clock, left = clock + left, random.exponential(1000.0)
        taken.append(clock + work)
    there = random.exponential(1000.0, 50_000).sum()
    share = there / (there + random.exponential(250.0, 50_000).sum())
    assert float(elastic_factor(work, spot)) == pytest.approx(np.mean(taken) / work / share, rel=0.02)


def test_nodes_that_leave_cost_more_the_sooner_and_the_longer_they_are_gone() -> None:
    """Never gain, nothing where none leaves; beside a longer trainer they cost nothing; too many are refused."""

    def slower(leaves_s: float, returns_s: float) -> float:
        return float(elastic_factor(600.0, SpotFacts(4, leaves_s, returns_s, elastic=True)))

    assert slower(3600.0, 600.0) > slower(7200.0, 600.0) > slower(7200.0, 0.0) > 1.0
    assert slower(1e12, 0.0) == pytest.approx(1.0, abs=1e-6)
    spot = SpotFacts(4, 3600.0, 600.0, elastic=True)
    assert elastic_step_s(1000.0, 600.0, spot, overlaps=True) == 1000.0
    # a rollout that already binds, with a weight sync of 40 s behind it, grows from the first departure on
    grown = elastic_step_s(640.0, 600.0, spot, overlaps=True, behind_s=40.0)
    assert grown == pytest.approx(640.0 + 600.0 * (slower(3600, 600) - 1))
    assert elastic_step_s(1000.0, 600.0, spot, overlaps=False) == pytest.approx(
        1000.0 + 600.0 * (slower(3600, 600) - 1)
    )
    with pytest.raises(SpecError, match="next to none ends"):
        elastic_factor(600.0, SpotFacts(4, 60.0))


def test_spot_nodes_stop_a_run_that_cannot_go_on_as_failures_do() -> None:
    """One rate for both; who waits for a node in place of one that left starts later; elastic runs do not stop."""
    base = RunFacts(rl_steps=200, devices=64, start_up_s=100.0, checkpoint_every=10, checkpoint_s=20.0, recovery_s=50.0)
    fails = replace(base, device_mtbf_s=64 * 36000.0 / 8)
    leaves = replace(base, spot=SpotFacts(8, 36000.0))
    failed, left = whole_run(60.0, fails), whole_run(60.0, leaves)
    assert left.total_s == pytest.approx(failed.total_s) and left.departures == pytest.approx(failed.failures)
    assert left.failures == pytest.approx(0.0) and failed.departures == 0.0
    waits = whole_run(60.0, replace(base, spot=SpotFacts(8, 36000.0, 600.0)))
    assert waits.total_s - left.total_s == pytest.approx(600.0 * left.departures)
    both = whole_run(60.0, replace(fails, spot=SpotFacts(8, 36000.0)))
    assert both.departures == pytest.approx(both.failures) and both.total_s > left.total_s
    elastic = whole_run(60.0, replace(base, spot=SpotFacts(8, 36000.0, 600.0, elastic=True)))
    assert elastic.total_s == pytest.approx(whole_run(60.0, base).total_s)
    assert elastic.departures == pytest.approx((elastic.total_s - 100.0) * 8 / 36000.0)


def test_drifting_steps_are_summed_and_nonsense_is_refused() -> None:
    assert whole_run(np.arange(1.0, 11.0), RunFacts(rl_steps=10, devices=1)).total_s == 55.0
    with pytest.raises(SpecError):
        RunFacts(rl_steps=0, devices=8)
    with pytest.raises(SpecError):
        RunFacts(rl_steps=1, devices=8, device_mtbf_s=0.0)


def test_a_run_that_never_reaches_its_next_checkpoint_is_refused() -> None:
    facts = RunFacts(rl_steps=200, devices=16, checkpoint_every=20, checkpoint_s=30.0, device_mtbf_s=60.0)
    with pytest.raises(SpecError, match="does not end"):
        whole_run(280.0, facts)
