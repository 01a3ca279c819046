"""Planted faults are found at their place and ranked first; healthy runs stay silent; detectors by hand."""

from __future__ import annotations

import csv

import numpy as np
import pytest

from rlperf.diagnose import graph as g
from rlperf.diagnose.explain import explain_graph
from rlperf.diagnose.peers import apart, stands_out
from rlperf.diagnose.scaling import explain_scales
from rlperf.errors import SpecError
from studies.root_cause.score import Score, kinds_of, run
from tests.conftest import ROOT

from .quick import slow_but

STUDY = ROOT / "studies" / "root_cause"


def score(number: int, kinds: tuple[str, ...] | None = None) -> Score:
    return run(number, kinds_of(number) if kinds is None else kinds, 2026)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(8))
def test_a_single_fault_is_ranked_first(number: int) -> None:
    """One of each kind; the study plants 144."""
    found = score(number)
    assert found.ranks == (1,)
    assert found.reported[0].path[-1].startswith("root: ")
    assert found.reported[0].advice


@pytest.mark.parametrize("number", slow_but((147, 171), 171))
def test_two_faults_are_both_in_the_first_three(number: int) -> None:
    assert all(0 < place <= 3 for place in score(number).ranks)


@pytest.mark.parametrize("number", range(1000, 1004))
def test_a_healthy_run_has_no_fault(number: int) -> None:
    found = score(number, ())
    assert found.reported
    assert all(cause.nature == "structure" for cause in found.reported)


def test_the_study_reaches_its_marks() -> None:
    """The recorded outcome of all 250 runs, of which the tests above repeat some."""
    with (STUDY / "expected.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    places = {
        n: [[int(p) for p in r["places"].split()] for r in rows if len(r["planted"].split()) == n] for n in (1, 2)
    }
    assert len(places[1]) + len(places[2]) == 200
    assert np.mean([p == [1] for p in places[1]]) >= 0.95
    assert np.mean([all(0 < place <= 3 for place in p) for p in places[2]]) >= 0.90
    clean = [r for r in rows if not r["planted"]]
    assert len(clean) == 50
    assert not any(r["false_faults"] for r in clean)


def test_outliers_stand_apart_from_drawn_lengths_only() -> None:
    rng = np.random.default_rng(1)
    alarms = 0
    for _ in range(200):
        tokens = np.exp(rng.normal(7.0, 0.5, 1000))
        alarms += apart(tokens, 5.0) > 0
        assert apart(np.append(tokens, 6.0 * tokens.max()), 5.0) == 1
    assert alarms <= 4
    pair = np.append(tokens, [5.0 * tokens.max(), 5.2 * tokens.max()])
    assert apart(pair, 5.0) == 2
    assert apart(np.ones(3), 5.0) == 0
    assert apart(np.full(100, 7.0), 5.0) == 0


def test_peers_need_three_and_a_clear_lead() -> None:
    assert stands_out(np.array([1.0, 9.0]), 1.3, 6.0).size == 0
    assert stands_out(np.array([1.0, 1.02, 0.98, 2.0, np.nan]), 1.3, 6.0).tolist() == [3]
    assert stands_out(np.array([1.0, 1.6, 0.5, 1.8, 0.9]), 1.3, 6.0).size == 0


def collectives(ranks: int, seconds: dict[int, tuple[int, float]]) -> g.PerformanceGraph:
    """Stages of equal work on every rank, all meeting after each; ``seconds``: stage -> (late rank, its seconds)."""
    build = g.GraphBuilder(("devices",), ranks)
    now, last = 0.0, None
    for stage, activity in enumerate((g.REWARD, g.SCORING, g.TRAINING, g.WEIGHT_SYNC)):
        spent = 1.0 + 0.01 * np.cos(np.arange(ranks) + stage)
        if stage in seconds:
            spent[seconds[stage][0]] = seconds[stage][1]
        work = build.add(activity, now, now + spent, after=last, at=g.Place(rank=np.arange(ranks)))
        now += float(spent.max())
        last = build.barrier(work, now)
    return build.freeze()


@pytest.mark.parametrize(
    ("stage", "kind"), [(0, "slow_reward"), (1, "slow_device"), (2, "slow_device"), (3, "slow_link")]
)
def test_a_late_rank_is_found_in_every_stage(stage: int, kind: str) -> None:
    found = explain_graph(collectives(16, {stage: (5, 2.5)})).causes[0]
    assert (found.kind, found.rank, found.nature) == (kind, 5, "fault")
    # Without it the stage takes what its slowest peer takes.
    healthy = collectives(16, {})
    late = collectives(16, {stage: (5, 2.5)})
    assert found.loss_s == pytest.approx(late.rl_step_s() - healthy.rl_step_s(), abs=0.02)
    assert any("16 wait for" in hop for hop in found.path)


def test_two_ranks_that_hide_each_other_are_both_reported() -> None:
    build = g.GraphBuilder(("devices",), 16)
    spent = 1.0 + 0.01 * np.cos(np.arange(16))
    spent[[3, 9]] = 2.0
    build.barrier(build.add(g.SCORING, np.zeros(16), spent, at=g.Place(rank=np.arange(16))), 2.0)
    found = explain_graph(build.freeze())
    assert {c.rank for c in found.faults} == {3, 9}
    for cause in found.faults:
        assert cause.loss_s == pytest.approx(0.0, abs=1e-9)  # removing one alone wins nothing
        assert cause.joint_s == pytest.approx(0.5, abs=0.02)
    together = next(i for i in found.interactions if all("slow_device" in kind for kind in i.kinds))
    assert together.excess_s == pytest.approx(1.0, abs=0.02)


def test_a_controller_that_grows_with_the_devices_is_a_scaling_fault() -> None:
    def at(devices: int, serial_s: float) -> g.PerformanceGraph:
        build = g.GraphBuilder(("devices",), devices)
        first = build.add(g.CONTROLLER, 0.0, serial_s)
        ranks = np.arange(devices // 8)
        work = build.add(g.TRAINING, serial_s, serial_s + 10.0, work=100.0, after=first, at=g.Place(rank=ranks))
        build.barrier(work, serial_s + 10.0)
        return build.freeze()

    growing = explain_scales([at(n, 0.1 * n / 64) for n in (256, 64, 128)])
    assert growing.devices == (64, 128, 256)
    assert growing.ideal == 0.0
    controller = next(a for a in growing.activities if a.activity == "controller")
    assert controller.slope == pytest.approx(1.0)
    assert controller.excess_s == pytest.approx(0.3)
    assert [c.kind for c in growing.largest.faults] == ["controller"]
    assert growing.largest.faults[0].loss_s == pytest.approx(0.3)
    assert growing.scaling_loss_s == pytest.approx(0.3)
    assert not explain_scales([at(n, 0.1) for n in (64, 128, 256)]).largest.faults
    with pytest.raises(SpecError, match="two different"):
        explain_scales([at(64, 0.1), at(64, 0.1)])
