"""How much longer trainers take under RL frameworks: the pool, who has it, and what it multiplies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlperf.calibrate.columns import read_all
from rlperf.calibrate.leave_out_rl_step import stranger
from rlperf.calibrate.rl_step.rows import StepRow
from rlperf.calibrate.tables import read_table
from rlperf.calibrate.trainer_pace_pool import STAGES, Residual, fit_pace, fit_paces
from rlperf.cost.batching import Microbatches
from rlperf.layout import Layout
from rlperf.sim.rl_step.overheads import scoring_in_framework_s, training_in_framework_s
from rlperf.specs.profiles import load_architecture
from rlperf.specs.rl_calibration import load_framework_calibration
from rlperf.specs.trainer_pace import load_trainer_paces

DAY = "2026-11-27"


def told(errors: dict[str, list[float]]) -> list[Residual]:
    """Rows of several frameworks, one configuration each."""
    return [
        Residual(f"{name}_{k}", f"{name}_{k}", name, name, error)
        for name, each in errors.items()
        for k, error in enumerate(each)
    ]


def test_a_pool_of_many_frameworks_finds_what_they_share() -> None:
    random = np.random.default_rng(3)
    rows = told({f"f{k}": list(0.3 + random.normal(0.0, 0.05, 3)) for k in range(30)})
    assert fit_pace(rows, "training", DAY).value == pytest.approx(np.exp(0.3), rel=0.05)
    assert fit_pace(told({"one": [0.3]}), "training", DAY).value == pytest.approx(
        np.exp(0.1), rel=0.05
    )  # drawn to none


def test_one_row_far_off_tells_no_more_than_its_share() -> None:
    rows = told({"a": [0.2, 0.2, 0.2], "b": [0.2], "c": [0.2]})
    far = told({"a": [0.2, 0.2, 0.2, 2.0], "b": [0.2], "c": [0.2]})
    assert fit_pace(far, "training", DAY).value < 1.1 * fit_pace(rows, "training", DAY).value


def test_a_framework_left_out_says_nothing() -> None:
    rows = told({"a": [0.9, 0.9], "b": [0.1], "c": [0.1]})
    assert fit_pace(rows, "scoring", DAY, "a").value == fit_pace(rows[2:], "scoring", DAY).value
    assert fit_pace(rows, "scoring", DAY, "a").provenance.rows == ("b_0", "c_0")
    assert fit_pace(rows, "scoring", DAY).value > fit_pace(rows, "scoring", DAY, "a").value


def test_who_was_fitted_has_no_pace_and_a_stranger_that_of_the_others() -> None:
    paces = load_trainer_paces()
    assert load_framework_calibration("nemo_rl_megatron").pace is None
    for name in ("slime", "verl_megatron", "skyrl"):
        found = load_framework_calibration(name, "megatron")
        assert found.pace == paces.of_stranger("", "megatron")
        assert found.running(found.framework, "megatron", "").pace == found.pace
    left_out = stranger(load_framework_calibration("nemo_rl_megatron"))
    assert left_out.pace == paces.of_stranger("nemo_rl", "megatron") != paces.of_stranger("", "megatron")
    assert left_out.running("nemo_rl", "megatron", "0.6").pace == left_out.pace
    other = load_framework_calibration("areal", "fsdp2").running("areal", "megatron", "")
    assert other.pace == paces.of_stranger("", "megatron")


def test_a_pace_multiplies_its_stage() -> None:
    own, arch = load_framework_calibration("slime"), load_architecture("Qwen3-4B")
    assert own.pace is not None
    free, where = own.model_copy(update={"pace": None}), (arch, Layout.of(), Microbatches.of(4096, 4096.0**2, 4096, 2))
    ratios = [
        stage(own, *where, 1.0) / stage(free, *where, 1.0)
        for stage in (training_in_framework_s, scoring_in_framework_s)
    ]
    assert ratios == pytest.approx([own.pace.training.value, own.pace.scoring.value])


@pytest.mark.slow
@pytest.mark.data
def test_the_shipped_paces_are_what_their_rows_give(measured_data: Path) -> None:
    rows = [row for row in read_all(StepRow, read_table(measured_data / "measured" / "rl_step.csv"))[0] if row.measured]
    for trainer in ("megatron", "fsdp2"):
        for found in fit_paces(rows, trainer, DAY):
            shipped = load_trainer_paces().of_stranger(found.without, trainer)
            assert shipped is not None
            assert shipped.without == found.without
            for stage in STAGES:
                # rows that were added since, and engines or trainers fitted anew, move it by less than it is sure of
                assert getattr(found, stage).value == pytest.approx(getattr(shipped, stage).value, rel=0.05)
