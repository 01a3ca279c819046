"""Pipeline planner: exact search against brute force, search against exact, floors, memory, command line."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from rlperf.errors import InfeasibleError, SpecError
from rlperf.plan.pipeline import (
    Freedom,
    PipelineProblem,
    beyond_frameworks,
    exact,
    optimize,
    standard_schedules,
    uniform_partition,
)
from rlperf.plan.pipeline.bounds import assignment_bound_s
from rlperf.plan.pipeline.exact import best_order, best_plan
from rlperf.plan.pipeline.list_schedule import ListScheduler, Policy, priorities
from rlperf.sim.pipeline import (
    B,
    F,
    MicrobatchSizes,
    Op,
    StageCosts,
    W,
    peak_memory_bytes,
    round_robin,
    simulate,
    stage_costs,
)
from rlperf.specs.pipeline_profile import LayerProfile

from .pipeline_samples import nemotron


def random_profile(seed: int, layers: int) -> LayerProfile:
    rng = np.random.default_rng(seed)
    f, b, w = rng.integers(1, 6, layers), rng.integers(1, 6, layers), rng.integers(0, 5, layers)
    return LayerProfile.make(
        "random", "T" * layers, f, b, w, activation_bytes=1.0, weight_input_bytes=0.5, state_bytes=1.0
    )


def device_orders(stage: int, count: int) -> list[tuple[Op, ...]]:
    """Every order of one stage's operations that keeps F before B before W of each micro-batch."""
    ops = [(k, stage, m) for k in (F, B, W) for m in range(count)]
    return [
        order
        for order in itertools.permutations(ops)
        if all(
            order.index((F, stage, m)) < order.index((B, stage, m)) < order.index((W, stage, m)) for m in range(count)
        )
    ]


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("sizes", [(1.0, 1.0), (1.0, 2.0)])
def test_exact_order_equals_brute_force(sizes: tuple[float, float], limited: bool) -> None:
    microbatches = MicrobatchSizes(np.array(sizes), np.array(sizes))
    costs = stage_costs(random_profile(3, 2), (1, 1), microbatches, latency_s=0.5)
    # Room for the state and the larger micro-batch's activations, not for those of both.
    room = 1.0 + sum(sizes) - 0.25 if limited else 100.0
    memory = np.array([room, room])
    best = np.inf
    for orders in itertools.product(device_orders(0, 2), device_orders(1, 2)):
        if np.any(peak_memory_bytes(costs, (0, 1), orders) > memory + 1e-9):
            continue
        try:
            best = min(best, simulate(costs, (0, 1), orders).makespan_s)
        except SpecError:  # an order that waits for itself
            continue
    found = best_order(costs, (0, 1), 2, memory_bytes=memory.tolist(), identical=len(set(sizes)) == 1)
    assert found.proven
    assert found.makespan_s == pytest.approx(best, rel=1e-12)
    assert found.orders is not None
    assert simulate(costs, (0, 1), found.orders).makespan_s == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize(
    ("seed", "layers", "devices", "count"), [(0, 3, 2, 2), (1, 4, 2, 2), (2, 4, 3, 2), (3, 5, 2, 2)]
)
def test_small_plans_are_proven_optimal(seed: int, layers: int, devices: int, count: int) -> None:
    problem = PipelineProblem(random_profile(seed, layers), MicrobatchSizes.equal(count), devices)
    plan = optimize(problem, passes=400, time_limit_s=60.0)
    assert plan.optimal
    assert plan.gap == 0.0
    # Asked afresh, without the search's plan as a start, the exact search finds the same optimum.
    fresh = best_plan(problem, float("inf"))
    assert fresh.proven
    assert fresh.makespan_s == pytest.approx(plan.makespan_s, rel=1e-9)
    assert problem.work_bound_s <= problem.bound_s * (1 + 1e-12)
    assert assignment_bound_s(problem) <= plan.makespan_s * (1.0 + 1e-9)


def test_exact_gives_up_honestly() -> None:
    problem = PipelineProblem(random_profile(5, 5), MicrobatchSizes.equal(3), 2)
    assert not best_plan(problem, float("inf"), max_nodes=50).proven


def test_exact_counts_what_it_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules that differ in times alone stand side by side by thousands: comparing them is most of the work."""
    compared = [0]
    keep = exact._keep

    def counting(front: list[exact._Node], new: exact._Node) -> None:
        compared[0] += len(front)
        keep(front, new)

    monkeypatch.setattr(exact, "_keep", counting)
    monkeypatch.setattr(exact, "COMPARED", 1)
    problem = PipelineProblem(random_profile(5, 5), MicrobatchSizes.equal(3), 2)
    found = best_order(problem.costs((1, 2, 3, 4)), (0, 1, 0, 1, 0), 2, identical=True, max_nodes=5_000)
    assert not found.proven
    assert 1_000 < compared[0] < found.nodes < 6_000


@pytest.mark.slow
def test_published_plan_is_beaten() -> None:
    problem = PipelineProblem(nemotron(), MicrobatchSizes.equal(8), 4)
    assert problem.work_bound_s == pytest.approx(0.85194, rel=1e-9)
    plan = optimize(problem, passes=3000, time_limit_s=60.0)
    assert plan.makespan_s <= 0.89870  # the authors' best, arXiv 2509.23722
    assert plan.makespan_s >= plan.bound_s >= problem.bound_s > problem.work_bound_s
    costs = stage_costs(problem.profile, plan.partition, problem.microbatches)
    again = simulate(costs, plan.placement, plan.orders, merged=plan.timeline.merged)
    assert again.makespan_s == plan.makespan_s


def test_the_search_is_reproducible() -> None:
    problem = PipelineProblem(nemotron(), MicrobatchSizes.equal(8), 4)
    first, second = (optimize(problem, passes=100, time_limit_s=60.0, seed=7) for _ in range(2))
    assert (first.partition, first.placement, first.orders) == (second.partition, second.placement, second.orders)


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(2, 9),
    st.integers(2, 4),
    st.integers(1, 6),
    st.booleans(),
    st.sampled_from([0.0, 1.0]),
)
def test_never_slower_than_any_standard_schedule(
    seed: int, layers: int, devices: int, count: int, overlap: bool, latency: float
) -> None:
    devices = min(devices, layers)
    problem = PipelineProblem(
        random_profile(seed, layers), MicrobatchSizes.equal(count), devices, latency_s=latency, overlap=overlap
    )
    plan = optimize(problem, passes=40, time_limit_s=60.0, exact_nodes=500)
    for standard in plan.standards:
        if standard.runs and standard.timeline is not None:
            assert plan.makespan_s <= standard.timeline.makespan_s * (1.0 + 1e-12)
    assert plan.makespan_s >= plan.bound_s * (1.0 - 1e-9)
    assert plan.timeline.makespan_s >= plan.timeline.busy_s.max() - 1e-9


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 3), st.integers(1, 6), st.floats(1.0, 3.0), st.booleans()
)
def test_list_passes_keep_the_memory_and_never_lock_up(
    seed: int, stages: int, devices: int, count: int, room: float, merged: bool
) -> None:
    rng = np.random.default_rng(seed)
    shape = (stages, count)
    act = rng.integers(1, 5, shape).astype(np.float64)
    travel = rng.integers(0, 3, (stages - 1, count)).astype(np.float64)
    times = rng.integers(0, 6, (3, *shape)).astype(np.float64)
    costs = StageCosts(times[0], times[1], times[2], act, 0.5 * act, rng.integers(0, 4, stages) * 1.0, travel)
    placement = tuple(int(d) for d in rng.integers(0, devices, stages))
    home = np.asarray(placement)
    # ``room`` times the least: the state and the largest single micro-batch of each device.
    least = np.array([costs.state_bytes[home == d].sum() + act[home == d].sum(axis=0).max() for d in range(devices)])
    memory = np.maximum(room * least, 1e-6)
    sequence = rng.permutation(count).tolist()
    rank = np.argsort(np.asarray(sequence)).astype(np.float64)
    policy = Policy(float(rng.choice([0.0, 0.5, 5.0])), 0.3, merged)
    keys = priorities(costs, policy, rank, devices) + rng.normal(0.0, 5.0, (2, *shape))
    found = ListScheduler(costs, placement, devices, memory, merged).run(keys, 0.3, sequence)
    assert found is not None
    timeline = simulate(costs, placement, found.orders(stages, count), merged=merged)
    assert np.all(timeline.peak_memory_bytes <= memory * (1.0 + 1e-8) + 1e-6)
    assert timeline.makespan_s <= found.makespan_s * (1.0 + 1e-9) + 1e-9


def test_memory_limit_is_kept_and_costs_time() -> None:
    profile = random_profile(11, 8)
    free = optimize(PipelineProblem(profile, MicrobatchSizes.equal(6), 2), passes=300, time_limit_s=60.0)
    limit = np.full(2, 4.0 + 8.0)
    tight = optimize(PipelineProblem(profile, MicrobatchSizes.equal(6), 2, limit), passes=300, time_limit_s=60.0)
    assert free.timeline.peak_memory_bytes.max() > limit.max()
    assert np.all(tight.timeline.peak_memory_bytes <= limit * (1.0 + 1e-9))
    assert tight.makespan_s >= free.makespan_s


def test_room_is_made_where_no_uniform_pipeline_fits() -> None:
    # The head holds 6 bytes, every other layer 1, a device 7: only the plan that leaves the head almost alone fits.
    profile = LayerProfile.make("x", "TTTTTTTTL", 1.0, 1.0, 1.0, activation_bytes=0.01, state_bytes=[1.0] * 8 + [6.0])
    problem = PipelineProblem(profile, MicrobatchSizes.equal(4), 2, np.full(2, 8.0))
    assert not any(s.runs for s in standard_schedules(problem))
    plan = optimize(problem, passes=200, time_limit_s=60.0)
    assert np.all(plan.timeline.peak_memory_bytes <= 8.0)


def test_too_little_memory_names_the_nearest_miss() -> None:
    problem = PipelineProblem(random_profile(1, 4), MicrobatchSizes.equal(2), 2, np.full(2, 1.5))
    with pytest.raises(InfeasibleError, match=r"nearest miss: .* needs"):
        optimize(problem, passes=10)
    plain = LayerProfile.make("plain", "TT", 1.0, 1.0, 1.0)
    with pytest.raises(SpecError, match="memory limit needs sizes"):
        PipelineProblem(plain, MicrobatchSizes.equal(2), 2, np.full(2, 1.0))


def test_order_of_different_microbatches_is_a_decision() -> None:
    # A short micro-batch in front lets the second device start early.
    profile = LayerProfile.make("x", "AB", [2.0, 2.0], [0.5, 0.5], [0.5, 0.5])
    sizes = np.array([4.0, 3.0, 2.0, 1.0])
    problem = PipelineProblem(profile, MicrobatchSizes(sizes, sizes), 2)
    given_order = min(s.timeline.makespan_s for s in standard_schedules(problem) if s.timeline is not None)
    plan = optimize(problem, passes=300, time_limit_s=60.0)
    assert plan.makespan_s < given_order
    firsts = [op[2] for op in plan.orders[plan.placement[0]] if op[0] == F and op[1] == 0]
    assert firsts != [0, 1, 2, 3]
    assert plan.makespan_s >= plan.bound_s


def test_each_freedom_is_kept() -> None:
    problem = PipelineProblem(nemotron(), MicrobatchSizes.equal(8), 4)
    fixed = optimize(problem, freedom=Freedom(False, False, False), passes=50, time_limit_s=60.0)
    assert fixed.partition == uniform_partition(problem, 8)
    assert fixed.placement == (0, 1, 2, 3, 0, 1, 2, 3)
    assert fixed.timeline.merged
    cut = optimize(problem, freedom=Freedom(True, False, False), passes=200, time_limit_s=60.0)
    assert cut.makespan_s < fixed.makespan_s


def test_what_a_framework_can_take_over() -> None:
    problem = PipelineProblem(nemotron(), MicrobatchSizes.equal(8), 4)
    plan = optimize(problem, passes=60, time_limit_s=60.0)
    one = next(s for s in plan.standards if s.name == "1F1B")
    assert one.timeline is not None
    stated = replace(
        plan, partition=one.partition, placement=one.timeline.placement, timeline=one.timeline, source="1F1B"
    )
    assert beyond_frameworks(stated) == ()
    free = beyond_frameworks(plan)
    assert any("order of operations" in text for text in free)
    assert any("split" in text for text in free)
    moved = plan.placement != round_robin(len(plan.partition), 4)
    assert any("placement" in text for text in free) == moved


def test_bound_knows_whole_layers() -> None:
    # Three equal layers on two devices: one device holds two of them, whatever the average says.
    problem = PipelineProblem(LayerProfile.make("x", "TTT", 1.0, 1.0, 1.0), MicrobatchSizes.equal(4), 2)
    assert problem.work_bound_s == 18.0
    assert assignment_bound_s(problem) == pytest.approx(24.0, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"devices": 0}, "at least 1"),
        ({"devices": 9}, "9 devices for 4 layers"),
        ({"stages_per_device": 0}, "at least 1"),
        ({"latency_s": -1.0}, "not negative"),
        ({"memory_bytes": np.ones(3)}, "one positive value per device"),
    ],
)
def test_wrong_problems_are_refused(change: dict[str, object], message: str) -> None:
    given = {"profile": random_profile(0, 4), "microbatches": MicrobatchSizes.equal(2), "devices": 2, **change}
    with pytest.raises(SpecError, match=message):
        PipelineProblem(**given)  # type: ignore[arg-type]


PROFILE = """
toy:
  layers: {T: 6}
  f: {E: 1, T: 2, L: 9}
  b: {E: 1, T: 2, L: 9}
  w: {E: 0, T: 1, L: 1}
  activation_bytes: {T: 1 GB}
  state_bytes: {T: 1 GB}
"""


def run_cli(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``rlperf pipeline``, with errors as the entry point treats them."""
    import typer

    from rlperf.cli.pipeline import pipeline
    from rlperf.errors import RlperfError

    app = typer.Typer()
    app.command()(pipeline)
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, RlperfError):
        return result.exception.exit_code, result.stdout, str(result.exception)
    return result.exit_code, result.stdout, result.stderr


def test_command_line(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(PROFILE)
    trace, figure = tmp_path / "t.json", tmp_path / "f.svg"
    base = (str(path), "--devices", "2", "--microbatches", "4", "--time-limit", "0.3")
    code, out, _ = run_cli(*base, "--json", "--trace", str(trace), "--figure", str(figure))
    assert code == 0
    answer = json.loads(out)
    assert answer["bound_ms"] == pytest.approx((2 + 30 + 19) * 4 / 2)
    assert sum(answer["best"]["partition"]) == 8
    assert len(answer["best"]["partition"]) == len(answer["best"]["placement"])
    assert answer["best"]["gap"] == pytest.approx(answer["best"]["makespan_ms"] / answer["bound_ms"] - 1.0)
    assert {"1F1B", "interleaved 1F1B", "ZB-H1"} <= set(answer["schedules"])
    assert answer["best"]["makespan_ms"] <= min(answer["schedules"].values())
    events = json.loads(trace.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(answer["best"]["makespan_ms"] * 1e3)
    assert max(e["args"]["bytes"] for e in events if e["ph"] == "C") == max(answer["best"]["peak_memory_bytes"])
    assert figure.read_text().lstrip().startswith("<?xml")
    code, out, _ = run_cli(*base, "--name", "toy")
    assert code == 0
    assert "best" in out
    assert "1F1B" in out


def test_command_line_errors(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(PROFILE)
    assert run_cli(str(path), "--devices", "2", "-M", "4", "--memory", "1 GB")[0] == 1
    for wrong, message in (
        (("--memory", "80"), "has no unit"),
        (("--name", "toi"), "did you mean toy"),
        (("--sizes", "1,2"), "--sizes names 2"),
        (("--figure", "x.pdf"), ".svg or .png"),
        (("--devices", "0"), "at least 1"),
        (("--time-limit", "0"), "positive"),
    ):
        code, _, text = run_cli(str(path), "--devices", "2", "-M", "4", *wrong)
        assert (code, message in text) == (2, True), (wrong, text)
