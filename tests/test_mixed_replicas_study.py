"""The claims of studies/mixed_replicas hold: signs, not digits, which follow the shipped calibrations."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parent.parent / "studies" / "mixed_replicas"


@pytest.fixture(scope="module")
def study():  # type: ignore[no-untyped-def]
    spec = importlib.util.spec_from_file_location("mixed_replicas_run", FOLDER / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_long_work_goes_to_the_wide_replicas(study) -> None:  # type: ignore[no-untyped-def]
    chosen = study.by_length(np.array([1.0, 9.0, 2.0, 8.0]), 2, 1, 0.5)
    assert chosen.tolist() == [1, 2, 0, 2]


@pytest.mark.slow
def test_a_mix_pays_only_for_a_router_that_knows_lengths(study, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(study, "cases", lambda: [study.runaways()])  # the quickest of the three
    monkeypatch.setattr(study, "LONG_SHARES", (0.005, 0.05))  # of ten: with fewer a known length gains no more
    rows = {(case, what): value for case, what, _, value in study.run()}
    for case in {name for name, _ in rows}:
        blind, prompt, known = (
            rows[case, f"best mix, {name}"] for name in ("nothing known", "prompt's mean known", "every length known")
        )
        # with runaways a blind mix is as fast as the best uniform pool: 1.01 and 0.99 by two fits of the engines
        assert blind > 0.97
        assert known < 1.0
        assert known <= prompt < blind
    assert rows["Qwen2.5-7B, 0.5 % runaways", "best mix, every length known"] < 0.9
