"""The claims of studies/rollout_tail hold: signs and bounds, and its rows to a hundredth, as calibrations move."""

from __future__ import annotations

import csv
import importlib.util
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "studies" / "rollout_tail"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rollout_tail_run", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str], float]:
    return {(question, case): value for question, case, _, value in load().run()}


def test_longest_response_predicts_the_other_ranks(rows: dict[tuple[str, str], float]) -> None:
    found = [value for (question, _), value in rows.items() if question == "longest response"]
    assert len(found) == 2
    assert all(abs(value - 1.0) < 0.03 for value in found)


def test_more_nodes_approach_the_floor(rows: dict[tuple[str, str], float]) -> None:
    floor = rows["more nodes", "longest response alone"]
    times = [rows["more nodes", f"{n} GPUs"] for n in (8, 16, 32, 64, 128, 256, 512)]
    assert all(a >= b for a, b in pairwise(times))
    assert times[0] / times[1] > 1.5
    assert times[-2] / times[-1] < 1.15
    assert times[-1] >= floor


def test_tensor_parallel_pays_for_tails_only(rows: dict[tuple[str, str], float]) -> None:
    assert rows["tensor parallel", "heavy tail, TP2 over TP1"] > 1.1
    assert rows["tensor parallel", "equal lengths, TP2 over TP1"] < 1.0


def test_no_policy_beats_the_bound(rows: dict[tuple[str, str], float]) -> None:
    bound = rows["policies, drawn math", "bound on the rl_step's gain"]
    gains = {case: value for (question, case), value in rows.items() if case.endswith("rl_step gain")}
    assert len(gains) == 4
    assert all(value <= bound for value in gains.values())
    assert max(gains.values()) > 1.1


def test_expected_rows_are_those_of_the_run(rows: dict[tuple[str, str], float]) -> None:
    with (FOLDER / "expected.csv").open() as stream:
        expected = {(row["question"], row["case"]): float(row["value"]) for row in csv.DictReader(stream)}
    assert expected == pytest.approx(rows, rel=0.01)
