"""Pipeline simulator: oracle, closed forms, memory, transfers, any valid order, invalid orders."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlperf.errors import SpecError
from rlperf.sim.pipeline import (
    B,
    F,
    MicrobatchSizes,
    Orders,
    StageCosts,
    W,
    even_partition,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    peak_memory_bytes,
    round_robin,
    simulate,
    stage_costs,
    v_shape,
    zb_h1,
)
from rlperf.specs.pipeline_profile import LayerProfile, profile_names, read_profile

from .pipeline_samples import nemotron


def check_oracle(profile: LayerProfile) -> None:
    costs = stage_costs(profile, (15, 14, 14, 15), MicrobatchSizes.equal(8))
    timeline = simulate(costs, range(4), one_f_one_b(4, 8), merged=True)
    assert round(timeline.makespan_s * 1e3, 9) == 1331.21
    assert np.round(timeline.busy_s * 1e3, 9).tolist() == [850.00, 761.60, 761.60, 1034.56]


def test_published_makespan_and_busy_times_exactly() -> None:
    check_oracle(nemotron())


@pytest.mark.data
def test_profile_file_gives_the_published_makespan(measured_data: Path) -> None:
    path = measured_data / "pipeline" / "layer_profiles.yaml"
    assert "nemotron-nano-v2-9b" in profile_names(path)
    check_oracle(read_profile(path, "nemotron-nano-v2-9b"))


@pytest.mark.parametrize(("devices", "count"), [(1, 1), (2, 2), (2, 5), (4, 8), (8, 16), (3, 7)])
def test_closed_forms_of_uniform_stages(devices: int, count: int) -> None:
    f, b, w = 1.0, 1.25, 0.75
    costs = StageCosts.uniform(devices, count, f, b, w)
    whole = f + b + w
    for schedule in (gpipe, one_f_one_b):
        timeline = simulate(costs, range(devices), schedule(devices, count), merged=True)
        assert timeline.makespan_s == pytest.approx((count + devices - 1) * whole, rel=1e-12)
    one = simulate(costs, range(devices), one_f_one_b(devices, count), merged=True)
    assert one.peak_memory_bytes.tolist() == [min(devices - p, count) for p in range(devices)]
    if count >= devices:
        zero = simulate(costs, range(devices), zb_h1(devices, count))
        assert zero.makespan_s == pytest.approx(count * whole + (devices - 1) * (f + b - w), rel=1e-12)


@pytest.mark.parametrize(("devices", "count", "chunks"), [(2, 2, 2), (2, 4, 3), (4, 8, 2), (4, 4, 3), (8, 16, 4)])
def test_closed_form_of_interleaved_1f1b(devices: int, count: int, chunks: int) -> None:
    costs = StageCosts.uniform(devices * chunks, count, 1.0, 1.25, 0.75)
    placement = round_robin(devices * chunks, devices)
    timeline = simulate(costs, placement, interleaved_1f1b(devices, count, chunks), merged=True)
    assert timeline.makespan_s == pytest.approx((chunks * count + devices - 1) * 3.0, rel=1e-12)


def test_zb_h1_needs_no_more_memory_than_1f1b() -> None:
    count = np.ones((4, 8))
    costs = StageCosts(count, count, count, count, 0.5 * count, np.full(4, 10.0), np.zeros((3, 8)))
    one = peak_memory_bytes(costs, range(4), one_f_one_b(4, 8), merged=True)
    zero = peak_memory_bytes(costs, range(4), zb_h1(4, 8))
    # Device p: 4 - p in flight as in 1F1B, plus W's input (half a byte) of up to p micro-batches put off.
    assert one.tolist() == [14.0, 13.0, 12.0, 11.0]
    assert zero.tolist() == [14.0, 13.5, 13.0, 12.5]
    assert zero.max() <= one.max()


def test_interleaved_needs_whole_groups() -> None:
    with pytest.raises(SpecError, match="multiples of 4"):
        interleaved_1f1b(4, 6, 2)


def test_transfers_by_hand() -> None:
    # Two stages, one micro-batch, 2 s of travel: F0 0-1, F1 3-4, B1 4-5, B0 7-8, and W beside the travel.
    costs = StageCosts(*(np.ones((2, 1)) for _ in range(4)), np.zeros((2, 1)), np.zeros(2), np.full((1, 1), 2.0))
    orders: Orders = (((F, 0, 0), (B, 0, 0), (W, 0, 0)), ((F, 1, 0), (B, 1, 0), (W, 1, 0)))
    timeline = simulate(costs, (0, 1), orders)
    assert timeline.start_s[:, :, 0].tolist() == [[0.0, 3.0], [7.0, 4.0], [8.0, 5.0]]
    assert timeline.makespan_s == 9.0
    held = simulate(costs, (0, 1), orders, overlap=False)
    assert held.start_s[W, 1, 0] == 7.0  # the sender waits until its gradient is through
    one_device: Orders = (((F, 0, 0), (F, 1, 0), (B, 1, 0), (B, 0, 0), (W, 0, 0), (W, 1, 0)),)
    assert simulate(costs, (0, 0), one_device).makespan_s == 6.0  # no travel within a device


def test_transfers_queue_for_their_link() -> None:
    # F0 of two micro-batches end at 1 and 2; each travels 3 s, so the second arrives at 7 and not at 5.
    costs = StageCosts(*(np.ones((2, 2)) for _ in range(4)), np.zeros((2, 2)), np.zeros(2), np.full((1, 2), 3.0))
    timeline = simulate(costs, (0, 1), gpipe(2, 2), merged=True)
    assert timeline.start_s[F, 1].tolist() == [4.0, 7.0]


@st.composite
def random_orders(draw: st.DrawFn) -> tuple[StageCosts, tuple[int, ...], Orders, bool]:
    """Any topological order of all operations, dealt to any devices, is a valid order."""
    stages, count, devices = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    merged = draw(st.booleans())
    rng = random.Random(draw(st.integers(0, 2**32)))
    placement = tuple(rng.randrange(devices) for _ in range(stages))
    kinds = (F, B) if merged else (F, B, W)
    todo = set(itertools.product(kinds, range(stages), range(count)))
    done: set[tuple[int, int, int]] = set()
    orders: list[list[tuple[int, int, int]]] = [[] for _ in range(devices)]
    while todo:
        free = [
            (k, s, m)
            for k, s, m in sorted(todo)
            if (k == F and (s == 0 or (F, s - 1, m) in done))
            or (k == B and (F, s, m) in done and (s == stages - 1 or (B, s + 1, m) in done))
            or (k == W and (B, s, m) in done)
        ]
        op = rng.choice(free)
        todo.remove(op)
        done.add(op)
        orders[placement[op[1]]].append(op)
    times = np.random.default_rng(rng.randrange(2**32)).integers(0, 9, (3, stages, count)).astype(np.float64)
    sizes = np.ones((stages, count))
    travel = np.full((stages - 1, count), float(rng.randrange(3)))
    costs = StageCosts(times[0], times[1], times[2], sizes, 0.5 * sizes, np.zeros(stages), travel)
    return costs, placement, tuple(map(tuple, orders)), merged


@settings(max_examples=150, deadline=None)
@given(random_orders(), st.booleans())
def test_a_random_valid_order_never_locks_up(
    case: tuple[StageCosts, tuple[int, ...], Orders, bool], overlap: bool
) -> None:
    costs, placement, orders, merged = case
    timeline = simulate(costs, placement, orders, merged=merged, overlap=overlap)
    start, end = timeline.start_s, timeline.end_s
    for order in orders:  # one at a time, in order
        for before, after in itertools.pairwise(order):
            assert start[after] >= end[before]
    assert np.all(start[F, 1:] >= end[F, :-1])
    assert np.all(start[B] >= end[F])
    assert np.all(start[B, :-1] >= end[B, 1:])
    assert np.all(start[W] >= end[B])
    crossing = [s for s in range(costs.stages - 1) if placement[s] != placement[s + 1]]
    assert np.all(start[F, 1:][crossing] >= end[F, :-1][crossing] + costs.transfer_s[crossing])
    assert timeline.busy_s.sum() == pytest.approx(float(costs.work_s.sum()))
    assert timeline.makespan_s >= timeline.busy_s.max() - 1e-9
    assert 0.0 <= timeline.bubble <= 1.0 or timeline.makespan_s == 0.0


def test_an_order_that_waits_for_itself_is_refused_with_its_cycle() -> None:
    costs = StageCosts.uniform(2, 2, 1.0, 1.0, 1.0)
    first = ((F, 0, 0), (B, 0, 0), (F, 0, 1), (B, 0, 1))
    second = ((F, 1, 1), (F, 1, 0), (B, 1, 0), (B, 1, 1))
    with pytest.raises(SpecError) as error:
        simulate(costs, (0, 1), (first, second), merged=True)
    assert str(error.value) == (
        "the order waits for itself: "
        "BW(stage 0, microbatch 0) on device 0 waits for BW(stage 1, microbatch 0), which stands behind "
        "F(stage 1, microbatch 1); "
        "F(stage 1, microbatch 1) on device 1 waits for F(stage 0, microbatch 1), which stands behind "
        "BW(stage 0, microbatch 0)"
    )
    backwards: Orders = (((B, 0, 0), (F, 0, 0)),)
    with pytest.raises(SpecError, match=r"BW\(stage 0, microbatch 0\) on device 0 waits for F\(stage 0"):
        simulate(StageCosts.uniform(1, 1, 1.0, 1.0, 1.0), (0,), backwards, merged=True)


def test_wrong_orders_are_listed_whole() -> None:
    costs = StageCosts.uniform(2, 1, 1.0, 1.0, 1.0)
    orders = (((F, 0, 0), (F, 0, 0), (F, 1, 0)), ((B, 7, 0),))
    with pytest.raises(SpecError) as error:
        simulate(costs, (0, 1), orders, merged=True)
    text = str(error.value)
    assert "F(stage 0, microbatch 0) stands twice" in text
    assert "F(stage 1, microbatch 0) stands on device 0, its stage on 1" in text
    assert "(1, 7, 0), which does not exist" in text
    assert "BW(stage 1, microbatch 0) is missing" in text
    with pytest.raises(SpecError, match=r"outside 0\.\.0"):
        simulate(costs, (0, 1), (((F, 0, 0),),), merged=True)


def test_stage_costs_of_packed_microbatches() -> None:
    profile = LayerProfile.make("x", "AB", [1.0, 2.0], 1.0, 1.0, quadratic_share=[0.5, 0.0], activation_bytes=3.0)
    # of 100 tokens in one sequence, in two, and of 50
    sizes = MicrobatchSizes(np.array([1.0, 1.0, 0.5]), np.array([1.0, 0.5, 0.25]))
    costs = stage_costs(profile, (1, 1), sizes)
    # Layer A: 1 * (0.5 * linear + 0.5 * quadratic); layer B: 2 * linear.
    assert costs.forward_s.tolist() == [[1.0, 0.75, 0.375], [2.0, 2.0, 1.0]]
    assert costs.activation_bytes.tolist() == [[3.0, 3.0, 1.5], [3.0, 3.0, 1.5]]
    with pytest.raises(SpecError, match="sum to 2 layers"):
        stage_costs(profile, (1, 2), sizes)


def test_partitions_and_placements() -> None:
    assert even_partition(58, 4) == (15, 15, 14, 14)
    assert round_robin(6, 4) == (0, 1, 2, 3, 0, 1)
    assert v_shape(8, 4) == (0, 1, 2, 3, 3, 2, 1, 0)
    with pytest.raises(SpecError, match="cannot make 3 stages"):
        even_partition(2, 3)


GOOD = """
toy:
  layers: {T: 2}
  f: {E: 1, T: 2.0049, L: 3}
  b: {E: 1, T: 2, L: 3}
  w: {E: 0, T: 1, L: 0}
  activation_bytes: {T: 2 GB}
  output_bytes: 8 MB
"""


def test_profile_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(GOOD)
    profile = read_profile(path)
    assert profile.kinds == ("E", "T", "T", "L")
    assert profile.forward_s.tolist() == pytest.approx([1e-3, 2e-3, 2e-3, 3e-3])
    assert read_profile(path, resolution_s=0.0).forward_s[1] == pytest.approx(2.0049e-3, rel=1e-12)
    assert profile.activation_bytes.tolist() == [0.0, 2e9, 2e9, 0.0]
    assert profile.output_bytes.tolist() == [8e6] * 4


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("T: 2.0049, ", "", "f: no time for layer kind 'T'"),
        ("{T: 2 GB}", "{X: 2 GB}", "'X' is not in layers"),
        ("{T: 2 GB}", "{T: 2}", "2 has no unit"),
        ("  w:", "  ww:", "unknown field"),
        ("T: 1, L: 0", "T: -1, L: 0", "greater than or equal to 0"),
        ("  output_bytes: 8 MB", "  weight_input_bytes: {T: 3 GB}", "exceed activation_bytes"),
    ],
)
def test_wrong_profiles_are_refused_with_their_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "p.yaml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(SpecError, match=message):
        read_profile(path)


def test_unknown_profile_name(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(GOOD + GOOD.replace("toy", "other"))
    with pytest.raises(SpecError, match="did you mean toy"):
        read_profile(path, "toi")
    with pytest.raises(SpecError, match="several profiles"):
        read_profile(path)
