"""Studies that rest on the planner alone give what they have recorded."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from rlperf.frameworks.registry import FRAMEWORKS

from .quick import slow_but

STUDIES = Path(__file__).resolve().parent.parent / "studies"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"study_{name}", STUDIES / name / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_batch_sweep() -> None:
    found = load("batch_sweep").sweep()
    expected = pl.read_csv(STUDIES / "batch_sweep" / "expected.csv")
    assert_frame_equal(found, expected, check_dtypes=False, rel_tol=1e-3)
    by_cap = found.filter(pl.col("prompts_per_step") == 128).sort("max_response_tokens")
    assert by_cap["rl_step_s"].is_sorted()
    assert by_cap["truncated_fraction"].is_sorted(descending=True)


@pytest.mark.slow
@pytest.mark.data
def test_recorded_workloads_equal_brute_force(measured_data: Path) -> None:
    found = load("recorded_workloads").study(measured_data / "polytrace")
    assert found["fits"].all()
    assert found["plan_s"].to_list() == pytest.approx(found["brute_force_s"].to_list(), rel=1e-3)
    regrets = [regret for regret in found["regret_of_the_others_plan"] if regret is not None]
    assert all(regret >= -1e-3 for regret in regrets)


def expected_fidelity() -> pl.DataFrame:
    return pl.read_csv(STUDIES / "workload_fidelity" / "expected.csv")


def test_the_guide_shows_the_workload_fidelity_of_the_study() -> None:
    study, table = load("workload_fidelity"), expected_fidelity()
    page = (STUDIES.parent / "docs" / "guide" / "workloads.md").read_text()
    rows = study.guide(table)
    assert len(rows) == len(study.SPLITS) + len(study.PERFECT)
    for row in rows:
        assert row in page, row


@pytest.mark.slow
@pytest.mark.data
def test_workload_fidelity_where_the_criterion_can_be_met(measured_data: Path) -> None:
    """Video's second half again, and fewer recordings of its law: what a law without error meets, the fit meets."""
    study, data = load("workload_fidelity"), measured_data / "polytrace"
    split = next(one for one in study.SPLITS if one.recording == "video_7b")
    found = study.frame([study.held_out(data, split)])
    expected = expected_fidelity().filter(pl.col("part") == "held_out", pl.col("recording") == "video_7b").head(1)
    assert_frame_equal(found, expected.select(found.columns), check_dtypes=False, abs_tol=0.005, rel_tol=0.02)
    assert found.select(study.criterion(pl.col("bias"), pl.col("width"))).item()
    law = study.perfect_law(data, study.PERFECT[0], recordings=8, replicates=40)
    assert law.bias_met >= 0.6
    assert 0.75 <= law.inside <= 1.0
    assert abs(law.mean_bias) < law.luck


@pytest.mark.slow
@pytest.mark.data
def test_configurations_predict_the_same_after_a_round_trip(measured_data: Path) -> None:
    found = load("round_trip").files(measured_data / "frameworks" / "examples")
    assert found.row(0) == (12, 12, 12, 12, 12)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["areal", "miles", "nemo_rl", "openrlhf", "slime", "trl", "verl"])
def test_exported_plans_predict_what_was_planned(framework: str) -> None:
    """Some of what ``python -m studies.round_trip.run FOLDER`` goes through: 50 jobs for each framework."""
    found = [each for each in load("round_trip").plans(framework, 3) if not each.refused]
    assert len(found) == 3
    assert [each for each in found if not each.same] == []


@pytest.mark.slow
@pytest.mark.parametrize("framework", slow_but(FRAMEWORKS, "verl", "slime"))
def test_what_a_search_kept_and_did_not_choose_is_what_its_files_say(framework: str) -> None:
    found = [each for each in load("round_trip").candidates(framework, 4, 7711) if not each.refused]
    assert len(found) == 4
    assert [each for each in found if abs(each.excess) > 1e-9 or each.findings] == []
    fixed = "GPUs of their own take fixed microbatches"  # RLinf's: the budget of the plan stands for those
    assert [lost for each in found for lost in each.lost if fixed not in lost] == []


@pytest.mark.slow
@pytest.mark.data
def test_one_log_brings_the_other_configurations_nearer(measured_data: Path) -> None:
    """Two measured configurations on a cluster that takes 1.25 times as long in every stage: each as the other's log.

    Without rows of other groups a cluster is as uncertain as a configuration, so that about half is taken over.
    """
    study = load("one_log")
    kept = ("nemo_rl_v0_3_0002", "nemo_rl_v0_3_0004")
    rows = [
        replace(row, measured={name: 1.25 * seconds for name, seconds in row.measured.items()})
        for row in study.measured_rows(measured_data / "measured" / "rl_step.csv")
        if row.row_id in kept
    ]
    found = [one for one in study.pairs(rows) if one.metric == "step_s"]
    assert {(one.log, one.row) for one in found} == {kept, kept[::-1]}
    for one in found:
        before, after = (abs(np.log(seconds / one.measured)) for seconds in (one.before, one.after))
        assert after < 0.75 * before
        assert one.inside


def test_the_guide_shows_what_one_log_is_worth() -> None:
    page = (STUDIES.parent / "docs" / "guide" / "accuracy-rl-step.md").read_text()
    for row in load("one_log").guide(pl.read_csv(STUDIES / "one_log" / "expected.csv")):
        assert row in page, row
