"""Shared fixtures. Measured data is found through RLPERF_DATA, by default ../shared/data beside the checkout."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # studies are a package of the checkout
    sys.path.append(str(ROOT))


SCORED = (
    "test_printed_accuracies_are_what_validate_measures", "test_rows_at_hand_are_not_scored",
    "test_served_rows", "test_rows_no_fit_saw", "test_groups_that_nobody_had_in_view",
    "test_every_prediction_states_its_lengths_and_has_an_interval", "test_measured_steps", "test_measured_peaks",
)  # fmt: skip
"""Tests that judge reports of `tests/scored.py`: one worker gets all of them and scores each table once."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With ``-n auto`` a worker gets a file's tests, which share its fixtures; `SCORED` are of one scope."""
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Grouped(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "scored" if nodeid.partition("[")[0].endswith(SCORED) else nodeid.partition("::")[0]

    return Grouped(config, log)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def measured_data() -> Path:
    folder = Path(os.environ.get("RLPERF_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"measured data is absent ({folder.name}); set RLPERF_DATA to its folder")
    return folder


@pytest.fixture(scope="module")
def script(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``SCRIPT`` of the test's own module as a file: how a run is launched."""
    path = tmp_path_factory.mktemp("launched") / "run.sh"
    path.write_text(request.module.SCRIPT)
    return path


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without figures, for tests of their words: to draw one takes longer than to plan."""
    monkeypatch.setattr("rlperf.report.html.figure", lambda drawing: "")
