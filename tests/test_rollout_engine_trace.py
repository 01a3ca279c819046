"""Recorded multi-turn rollouts: constants of one rl_step predict the others."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rlperf.calibrate.requests.engine_trace import TraceFit, fit_traces, predict_trace, read_engine_traces
from rlperf.errors import SpecError


def write_trace(path: Path, seed: int, fit: TraceFit, *, drop: int = 0) -> Path:
    """A recording of 4 groups of 4, with the latencies that ``fit`` itself would give."""
    rng = np.random.default_rng(seed)
    records = []
    for group in range(4):
        for sample in range(4):
            first, answer = int(rng.integers(5, 60)), int(rng.integers(5, 60))
            turns = [{"turn": 0, "prompt_tokens": 40 + group, "cached_tokens": 0, "completion_tokens": first}]
            context = 40 + group + first + 30
            turns.append({"turn": 1, "prompt_tokens": context, "cached_tokens": 32, "completion_tokens": answer})
            records.append(
                {
                    "step": seed, "turns": [{**t, "engine_latency_s": 1.0} for t in turns],
                    "tool_calls": [{"turn": 0, "latency_s": float(rng.exponential(0.5))}],
                    "prompt_group_id": group, "sample_id": sample,
                }
            )  # fmt: skip
    path.write_text("\n".join(map(json.dumps, records)))
    (trace,) = read_engine_traces([path], groups_per_replica=4)
    latency, _ = predict_trace(trace, fit)
    at = iter(latency.tolist())
    for record in records:
        for turn in record["turns"]:
            turn["engine_latency_s"] = next(at)
    path.write_text("\n".join(map(json.dumps, records[drop:])))
    return path


TRUTH = TraceFit(0.02, 0.004, 0.01, 2e-4)


def test_fit_finds_the_engine_that_made_the_recording(tmp_path: Path) -> None:
    seen = read_engine_traces([write_trace(tmp_path / "a_step_1.jsonl", 1, TRUTH)], groups_per_replica=4)
    other = read_engine_traces([write_trace(tmp_path / "b_step_2.jsonl", 2, TRUTH)], groups_per_replica=4)
    fit = fit_traces(seen, evaluations=400)
    latency, makespan = predict_trace(other[0], fit)
    assert np.abs(latency - other[0].latency_s).sum() < 0.01 * other[0].latency_s.sum()
    assert makespan == pytest.approx(other[0].makespan_s, rel=0.01)


def test_incomplete_replicas_are_marked_and_not_fitted(tmp_path: Path) -> None:
    (trace,) = read_engine_traces([write_trace(tmp_path / "x_step_3.jsonl", 3, TRUTH, drop=5)], groups_per_replica=4)
    assert trace.missing == 5
    with pytest.raises(SpecError, match="no replica with all its trajectories"):
        fit_traces([trace])


def test_damaged_lines_are_all_listed(tmp_path: Path) -> None:
    bad = tmp_path / "bad_step_1.jsonl"
    bad.write_text('{"step": 1\n[]\n{"step": 1, "turns": []}\n')
    with pytest.raises(SpecError) as caught:
        read_engine_traces([bad, tmp_path / "absent.jsonl"])
    assert [problem.line for problem in caught.value.problems] == [1, 2, 3, None]


@pytest.mark.slow
@pytest.mark.data
def test_search_r1_fitted_on_step_0_predicts_steps_1_and_2(measured_data: Path) -> None:
    """Recorded SGLang rollouts of 512 trajectories a replica (PolyTrace search_r1_7b); targets of 4 % and 3 %."""
    folder = measured_data / "polytrace" / "search_r1_7b"
    traces = read_engine_traces(sorted(folder.glob("multiturn_workload_step_*.jsonl")))
    fit = fit_traces([t for t in traces if t.rl_step == 0])
    tested = [t for t in traces if t.rl_step != 0 and not t.missing]
    assert len(tested) == 8
    predicted = [predict_trace(t, fit) for t in tested]
    wrong = sum(np.abs(p[0] - t.latency_s).sum() for p, t in zip(predicted, tested, strict=True))
    assert wrong / sum(t.latency_s.sum() for t in tested) < 0.04
    assert np.mean([abs(p[1] / t.makespan_s - 1.0) for p, t in zip(predicted, tested, strict=True)]) < 0.03
