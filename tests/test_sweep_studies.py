"""Studies of sweeps and plans: what each claims holds for the table beside it, and the quick ones for a fresh run."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import polars as pl
import pytest

ROOT = Path(__file__).resolve().parent.parent
STUDIES = ROOT / "studies"


def study(name: str) -> ModuleType:
    spec = spec_from_file_location(f"study_{name}", STUDIES / name / "run.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def expected(name: str) -> pl.DataFrame:
    return pl.read_csv(STUDIES / name / "expected.csv")


@pytest.mark.slow
def test_capacity_holds_for_its_table_and_for_a_fresh_run() -> None:
    module = study("capacity")
    module.check(expected("capacity"))
    fresh = module.run("screen").frame
    kept = expected("capacity").sort("cluster", "nodes")
    assert fresh["status"].to_list() == ["ok"] * 10
    ratio = fresh.sort("cluster", "nodes")["rl_step_s"] / kept["rl_step_s"]
    # the table is judged by events and may be older than a calibration
    assert ratio.is_between(0.7, 1.4).all()


@pytest.mark.parametrize("name", ["rule_of_thumb", "dynamic_static"])
def test_what_a_study_claims_holds_for_its_table(name: str) -> None:
    study(name).check(expected(name))


def test_findings_hold_for_their_table_and_skew_for_a_fresh_run(tmp_path: Path) -> None:
    module = study("paper_findings")
    module.check(expected("paper_findings").to_dicts())
    rows: list[dict[str, Any]] = module.skew(tmp_path)
    idle = [row["value"] for row in rows]
    assert idle == sorted(idle) and idle[-1] > 2 * idle[0]
    step = [row["rl_step_s"] for row in rows]
    assert step == sorted(step)


def test_arguments_of_a_script_are_read_by_argparse() -> None:
    """One that takes words as they stand takes ``--help`` for a folder; it may set them for a command that it runs."""
    scripts = sorted(path for folder in (STUDIES, ROOT / "rlperf") for path in folder.rglob("*.py"))
    plain = [path for path in scripts if re.search(r"sys\.argv\[|in sys\.argv|\(sys\.argv", path.read_text())]
    assert [path.relative_to(ROOT).as_posix() for path in plain] == [] and len(scripts) > 400


def test_help_of_a_study_starts_no_work() -> None:
    asked = [sys.executable, str(STUDIES / "benchmarks" / "sweep.py"), "--help"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout.startswith("usage: sweep.py")


def test_every_study_of_this_kind_says_how_to_run_it() -> None:
    for name in ("capacity", "rule_of_thumb", "paper_findings", "dynamic_static"):
        text = (STUDIES / name / "README.md").read_text()
        assert f"python studies/{name}/run.py" in text and "**Question.**" in text
