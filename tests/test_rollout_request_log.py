"""Request logs of serving engines, and ``rlperf validate`` on recordings."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rlperf.calibrate.request_log import read_request_log, replay, setup_of
from rlperf.calibrate.validate import validate_paths
from rlperf.errors import SpecError


def write_log(folder: Path, n: int = 12, *, device: str = "NVIDIA H100 SXM", **meta: object) -> Path:
    folder.mkdir()
    settings = {"model": "meta-llama/Llama-3.1-8B", "vllm_version": "0.19.0", "hardware": {"device_name": device}}
    settings |= {"engine_kwargs": {"tensor_parallel_size": 1, "max_num_seqs": 4, "max_num_batched_tokens": 2048}}
    (folder / "meta.json").write_text(json.dumps(settings | meta))
    rng = np.random.default_rng(0)
    rows = []
    for i in range(n):
        arrival = 0.1 * i
        rows.append(
            {
                "request_id": f"r{i}", "input_toks": int(rng.integers(50, 500)),
                "output_toks": int(rng.integers(1, 90)),
                "arrival_time": 1000.0 + arrival, "queued_ts": 7.0 + arrival + 0.01 * (i % 3),
                "scheduled_ts": 7.1 + arrival, "first_token_ts": 7.2 + arrival, "last_token_ts": 8.0 + arrival,
            }
        )  # fmt: skip
    (folder / "requests.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def test_clocks_are_aligned_at_the_fastest_queueing(tmp_path: Path) -> None:
    log = read_request_log(write_log(tmp_path / "log"))
    np.testing.assert_allclose(log.trajectories.arrival_s, 0.1 * np.arange(12), atol=1e-9)
    np.testing.assert_allclose(log.measured.ttft_s, 0.2, atol=1e-9)
    np.testing.assert_allclose(log.measured.latency_s, 1.0, atol=1e-9)


def test_setup_follows_the_engine_settings(tmp_path: Path) -> None:
    kv = {"num_kv_tokens": 5000, "block_size": 32, "enable_prefix_caching": False}
    setup = setup_of(read_request_log(write_log(tmp_path / "log", kv_cache=kv)))
    assert (setup.limits.kv_tokens, setup.limits.block_tokens, setup.limits.max_running) == (5000.0, 32, 4)
    assert not setup.limits.prefix_caching
    assert setup.options.async_scheduling
    assert setup.assumed == ("async_scheduling=True (default of the version)",)
    assert "h100_sxm" in setup.calibration


def test_device_may_come_from_the_folder(tmp_path: Path) -> None:
    setup = setup_of(read_request_log(write_log(tmp_path / "rtx4090_llama", hardware=None)))
    assert setup.extrapolated
    assert any("folder" in text for text in setup.assumed)
    with pytest.raises(SpecError, match="device is neither"):
        setup_of(read_request_log(write_log(tmp_path / "unknown", hardware=None)))


def test_replay_is_monotone_in_the_cost(tmp_path: Path) -> None:
    log = read_request_log(write_log(tmp_path / "log"))
    setup = setup_of(log)
    slow, fast = replay(log, setup, 1.5), replay(log, setup, 0.7)
    assert fast.latency_s.mean() < replay(log, setup).latency_s.mean() < slow.latency_s.mean()


def test_validate_reports_every_metric(tmp_path: Path) -> None:
    report = validate_paths([write_log(tmp_path / "log")], "request_log")
    assert {one.metric for one in report.metrics} == {"latency_s", "ttft_s", "tpot_s"}
    assert report.rows == report.predicted == 12
    assert all(one.low <= one.predicted <= one.high for one in report.predictions)


def test_bad_logs_name_every_problem(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "log")
    (folder / "meta.json").write_text("{}")
    lines = (folder / "requests.jsonl").read_text().splitlines()
    (folder / "requests.jsonl").write_text("\n".join([lines[0], '{"input_toks": -3}', "{", lines[1]]))
    with pytest.raises(SpecError) as caught:
        read_request_log(folder)
    assert [(p.file is not None and Path(p.file).name, p.line) for p in caught.value.problems] == [
        ("meta.json", None),
        ("requests.jsonl", 2),
        ("requests.jsonl", 3),
    ]
    with pytest.raises(SpecError, match="no such file"):
        read_request_log(tmp_path / "absent")


def test_fit_belongs_to_engine_traces(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="--fit belongs to engine_trace"):
        validate_paths([tmp_path], "request_log", [tmp_path])
    with pytest.raises(SpecError, match="needs files to fit"):
        validate_paths([tmp_path], "engine_trace")
    with pytest.raises(SpecError, match="one file and no --fit"):
        validate_paths([tmp_path], "kernels", [tmp_path])


@pytest.mark.data
@pytest.mark.parametrize(
    ("folder", "latency", "tpot", "ttft"),
    [("rtxpro6000_llama-3.1-8b", 6.0, 5.0, 15.0), ("rtx4090_llama-3.1-8b", 12.0, 12.0, 20.0)],
)
def test_vllm_logs(measured_data: Path, folder: str, latency: float, tpot: float, ttft: float) -> None:
    """Mean errors per request [%] of vLLM 0.19 logs (LLMServingSim's benchmark runs); the 4090 has no kernel tables.

    Its time to first token is a queueing time, in which the error of the throughput adds up; there the mean over all
    requests must agree within 12 %, single requests within 20 % on average.
    """
    report = validate_paths([measured_data / "request_logs" / folder], "request_log")
    errors = {one.metric: one.mape for one in report.metrics if one.group == "all"}
    assert errors["latency_s"] <= latency
    assert errors["tpot_s"] <= tpot
    assert errors["ttft_s"] <= ttft
    first = [one for one in report.predictions if one.metric == "ttft_s"]
    mean = float(np.mean([one.predicted for one in first]) / np.mean([one.measured for one in first]))
    assert abs(mean - 1.0) <= 0.12
