"""Shared fixtures. Measured data is found through RLPERF_DATA, by default ../shared/data beside the checkout."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # studies are a package of the checkout
    sys.path.append(str(ROOT))


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """With ``-n auto`` tests of one ``xdist_group`` go to one worker, which works out once what they share."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "loadgroup"


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
