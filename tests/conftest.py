"""Shared fixtures. Measured data is found through RLPERF_DATA, by default ../shared/data beside the checkout."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # studies are a package of the checkout
    sys.path.append(str(ROOT))
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # dozens of processes are started that load what these have compiled
sys.dont_write_bytecode = False
os.environ.setdefault("LOKY_MAX_CPU_COUNT", "1")  # the suite's own workers have the cores
gc.set_threshold(50_000, 20, 100)  # thousands of collected tests stay: going through them again and again takes seconds


SCORED = (
    "test_printed_accuracies_are_what_validate_measures", "test_rows_at_hand_are_not_scored",
    "test_served_rows", "test_rows_no_fit_saw", "test_groups_that_nobody_had_in_view",
    "test_every_prediction_states_its_lengths_and_has_an_interval", "test_measured_steps", "test_measured_peaks",
)  # fmt: skip
"""Tests that judge reports of `tests/scored.py`: one worker gets all of them and scores each table once."""


LONG = frozenset(
    f"tests/test_{name}.py" for name in (
        "contributing", "drift", "engine_host_pool", "leave_out_inference", "leave_out_kernels", "leave_out_memory",
        "leave_out_training", "measured_best", "memory_risk", "memory_verdicts", "mixed_replicas_study", "mixed_tasks",
        "plan_alone", "plan_replan", "plan_stages", "plan_whole", "rollout_engine_trace", "same_bytes",
        "served_devices", "studies", "sweep_run", "techniques", "training_fits", "workload_dependence",
    )
)  # fmt: skip
"""Files of few tests that take over ten seconds together: begun last, they would leave the other workers idle."""


def scope_of(nodeid: str) -> str:
    """What one worker gets: a file's tests, which share its fixtures; `SCORED` are of one scope."""
    return "scored" if nodeid.partition("[")[0].endswith(SCORED) else nodeid.partition("::")[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long scopes first, then by their number of tests: what is left at the end is short."""
    scopes = {item.nodeid: scope_of(item.nodeid) for item in items}
    tests = Counter(scopes.values())
    items.sort(key=lambda item: (scopes[item.nodeid] not in LONG, -tests[scopes[item.nodeid]]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With ``-n auto`` a worker gets one scope after the other, in the order of the items."""
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Grouped(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    config.option.loadscopereorder = False
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
