"""The study of published gains of fp8 keeps its findings."""

from __future__ import annotations

import csv
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from .quick import slow_but

STUDY = Path(__file__).resolve().parent.parent / "studies" / "low_precision"


@pytest.fixture(scope="module")
def study() -> ModuleType:
    spec = importlib.util.spec_from_file_location("low_precision", STUDY / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["low_precision"] = module
    spec.loader.exec_module(module)
    return module


def as_expected(found: list[Any]) -> None:
    with (STUDY / "expected.csv").open() as stream:
        expected = {line["case"]: line for line in csv.DictReader(stream)}
    for one in found:
        assert one.published == pytest.approx(float(expected[one.case.name]["published"]), abs=1e-3)
        assert one.predicted == pytest.approx(float(expected[one.case.name]["predicted"]), rel=0.02)


@pytest.mark.parametrize("number", slow_but((0, 2), 0))
def test_rollouts_in_fp8_gain_as_published_where_no_expert_is(study: ModuleType, number: int) -> None:
    """Dense ones within a tenth; of experts the direction alone, since what does not narrow is more of their time."""
    (found,) = study.rollouts(study.ROLLOUTS[number : number + 1])
    as_expected([found])
    assert found.same_direction
    assert abs(found.error) < (0.15 if "A3B" in found.case.name else 0.1)


@pytest.mark.slow
@pytest.mark.data
def test_published_gains_of_fp8_have_their_direction_and_size(study: ModuleType, measured_data: Path) -> None:
    found = study.predict(measured_data)
    as_expected(found)
    assert sum(one.same_direction for one in found) >= 12
    assert sum(abs(one.error) < 0.105 for one in found) >= 13
    assert all(abs(one.error) < 0.115 for one in found if one.case.kind == "rl_step")


def test_no_gain_has_no_direction(study: ModuleType) -> None:
    case = study.CASES[0]
    assert study.Found(case, 1.01, 0.995, False).same_direction
    assert not study.Found(case, 1.0, 1.08, False).same_direction
    assert not study.Found(case, 0.9, 1.1, False).same_direction
