"""Studies that rest on the planner alone give what they have recorded."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import polars as pl
import pytest
from polars.testing import assert_frame_equal

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
    assert by_cap["step_s"].is_sorted()
    assert by_cap["truncated_fraction"].is_sorted(descending=True)


@pytest.mark.slow
@pytest.mark.data
def test_recorded_workloads_equal_brute_force(measured_data: Path) -> None:
    found = load("recorded_workloads").study(measured_data / "polytrace")
    assert found["fits"].all()
    assert found["plan_s"].to_list() == pytest.approx(found["brute_force_s"].to_list(), rel=1e-3)
    regrets = [regret for regret in found["regret_of_the_others_plan"] if regret is not None]
    assert all(regret >= -1e-3 for regret in regrets)
