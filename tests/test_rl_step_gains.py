"""The study of published gains keeps its findings."""

from __future__ import annotations

import csv
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

STUDY = Path(__file__).resolve().parent.parent / "studies" / "rl_step_gains"


@pytest.fixture(scope="module")
def study() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rl_step_gains", STUDY / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rl_step_gains"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, str]]:
    with (STUDY / "expected.csv").open() as stream:
        return {row["case"]: row for row in csv.DictReader(stream)}


def test_resharding_saves_what_was_published(study: ModuleType, expected: dict[str, dict[str, str]]) -> None:
    mean, largest = study.resharding()
    assert largest.verdict == mean.verdict == "within"
    for one in (mean, largest):
        assert one.computed_mid == pytest.approx(float(expected[one.case]["computed_mid"]), abs=0.02)


@pytest.mark.slow
def test_streaming_gains_are_near_the_published_range(study: ModuleType, expected: dict[str, dict[str, str]]) -> None:
    (one,) = study.streaming()
    assert one.verdict in ("within", "overlaps")
    assert one.computed_mid == pytest.approx(float(expected[one.case]["computed_mid"]), abs=0.02)


@pytest.mark.slow
def test_asynchrony_at_128_gpus_overlaps_the_published_range(study: ModuleType) -> None:
    (one,) = study.verl_fully_async()
    assert one.verdict in ("within", "overlaps")


@pytest.mark.slow
def test_one_step_off_on_equal_devices(study: ModuleType, expected: dict[str, dict[str, str]]) -> None:
    found = {one.case: one for one in study.one_step_off()}
    # verdicts flip where ranges touch (v0.5's end 0.0003 below the published one), sizes do not
    missed = [abs(one.computed_mid / (one.published_low * one.published_high) ** 0.5 - 1.0) for one in found.values()]
    assert max(missed) < 0.13 and sum(missed) / len(missed) < 0.11
    for case, one in found.items():
        assert one.computed_mid == pytest.approx(float(expected[case]["computed_mid"]), rel=0.1)


def test_verdicts(study: ModuleType) -> None:
    assert study.Gain("x", 1.0, 2.0, 1.0, 1.5, 3.0).verdict == "within"
    assert study.Gain("x", 1.0, 2.0, 1.5, 2.5, 3.0).verdict == "overlaps"
    assert study.Gain("x", 1.0, 2.0, 2.1, 2.5, 3.0).verdict == "outside"
