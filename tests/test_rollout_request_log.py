"""Request logs of serving engines, and ``rlperf validate`` on recordings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlperf.calibrate.requests.log import RequestLog, read_request_log
from rlperf.calibrate.requests.replay import EngineSettings, replay, setup_of
from rlperf.calibrate.validate import validate_paths
from rlperf.errors import SpecError
from rlperf.layout import Layout
from rlperf.sim.rollout import simulate_replica
from rlperf.specs.profiles import load_architecture


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


def test_a_log_runs_on_the_engine_of_its_release_and_settings(tmp_path: Path) -> None:
    """Steps that are not scheduled ahead hide nothing of what the host does for requests."""
    plain = {"tensor_parallel_size": 1, "async_scheduling": False}
    new, held, old = (
        setup_of(read_request_log(write_log(tmp_path / name, **cells)))
        for name, cells in (("a", {}), ("b", {"engine_kwargs": plain}), ("c", {"vllm_version": "0.11.2"}))
    )
    assert [one.options.async_scheduling for one in (new, held, old)] == [True, False, False]
    assert new.cost.host_per_request_s < held.cost.host_per_request_s
    assert not any("async_scheduling" in text for text in held.assumed)
    assert "async_scheduling=False (default of the version)" in old.assumed


def test_layout_and_limits_are_those_of_all_ranks(tmp_path: Path) -> None:
    """Data-parallel ranks of a mixture of experts share experts and steps; those of a dense model share nothing."""
    kv = {"num_kv_tokens": 5000}
    kwargs = {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True, "max_num_seqs": 4}
    moe = setup_of(
        read_request_log(write_log(tmp_path / "a", model="Qwen/Qwen3-30B-A3B", engine_kwargs=kwargs, kv_cache=kv))
    )
    assert (moe.replicas, moe.limits.max_running, moe.limits.kv_tokens) == (1, 8, 10000.0)
    assert moe.limits.token_budget == 2 * 8192  # each rank's own default on a device of 80 GB
    dense = setup_of(read_request_log(write_log(tmp_path / "b", engine_kwargs=kwargs, kv_cache=kv)))
    assert (dense.replicas, dense.limits.max_running, dense.limits.kv_tokens) == (2, 4, 5000.0)
    settings = EngineSettings.of({"resolved_config": {"parallel_config": {"data_parallel_size": 4}}})
    assert settings.data == 4  # what the engine resolved to stands in for what nobody gave
    layout = EngineSettings.of({"engine_kwargs": kwargs}).layout(load_architecture("Qwen3-30B-A3B"))
    expected = Layout.of(tensor_parallel=4, expert_parallel=4, attention_data_parallel=2)
    assert layout.to_dict() == expected.to_dict()


def test_replicas_take_requests_in_turn(tmp_path: Path) -> None:
    one = read_request_log(write_log(tmp_path / "a", n=40))
    kwargs = {"data_parallel_size": 2, "max_num_seqs": 4, "max_num_batched_tokens": 2048}
    two = read_request_log(write_log(tmp_path / "b", n=40, engine_kwargs=kwargs))
    setups = setup_of(one), setup_of(two)
    alone, shared = (replay(log, setup) for log, setup in zip((one, two), setups, strict=True))
    assert shared.latency_s.mean() < alone.latency_s.mean()
    half = replace(two, trajectories=two.trajectories.take(np.arange(0, 40, 2)))
    even = replay(half, replace(setups[1], replicas=1))
    np.testing.assert_allclose(shared.latency_s[::2], even.latency_s, rtol=1e-12)


def test_devices_without_links_are_taken_to_meet_in_host_memory(tmp_path: Path) -> None:
    kwargs = {"tensor_parallel_size": 2, "max_num_seqs": 4, "max_num_batched_tokens": 2048}
    card = "NVIDIA RTX PRO 6000 Blackwell"
    open_ = setup_of(read_request_log(write_log(tmp_path / "a", device=card, engine_kwargs=kwargs)))
    assert any("host memory" in text for text in open_.assumed)
    hardware = {"device_name": card, "peer_access": True}
    stated = setup_of(read_request_log(write_log(tmp_path / "b", hardware=hardware, engine_kwargs=kwargs)))
    assert not any("host memory" in text for text in stated.assumed)
    batch = np.array([1.0, 64.0])
    slow, fast = (one.cost.decode_s(batch, 500.0 * batch) for one in (open_, stated))
    assert (slow > fast).all()
    # the interval's lower end takes the machine at its best
    np.testing.assert_allclose(open_.quick.decode_s(batch, 500.0 * batch), fast)
    linked = setup_of(read_request_log(write_log(tmp_path / "c", engine_kwargs=kwargs)))
    assert linked.quick is linked.cost and not any("host memory" in text for text in linked.assumed)


def test_precision_is_the_engines_or_what_the_checkpoint_is_called(tmp_path: Path) -> None:
    base = {"max_num_seqs": 4, "max_num_batched_tokens": 2048}
    seconds = {}
    for name, model, extra in (
        ("bf16", "Llama-3.1-8B", {}),
        ("given", "Llama-3.1-8B", {"quantization": "fp8"}),
        ("named", "RedHatAI/Llama-3.1-8B-FP8", {"quantization": "compressed-tensors"}),
        ("cache", "Llama-3.1-8B", {"kv_cache_dtype": "fp8_e4m3"}),
    ):
        log = read_request_log(write_log(tmp_path / name, model=model, engine_kwargs={**base, **extra}))
        setup = setup_of(log)
        seconds[name] = float(setup.cost.decode_s(1.0, 0.0))
        if name == "cache":
            assert setup.limits.kv_tokens > 1.9 * setup_of(read_request_log(tmp_path / "bf16")).limits.kv_tokens
    assert seconds["given"] == seconds["named"] < 0.8 * seconds["bf16"]


def test_the_way_to_the_engine_shows_where_the_clock_is_the_clients(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "log")
    assert not read_request_log(folder).by_client
    rows = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    for row in rows:
        row["queued_ts"] = row["arrival_time"] = row["arrival_time"] - 993.0
    (folder / "requests.jsonl").write_text("\n".join(map(json.dumps, rows)))
    log = read_request_log(folder)
    setup = setup_of(log)
    assert log.by_client and (setup.front_s, setup.tokenise_s) == (pytest.approx(0.005), pytest.approx(3e-6))
    inside = replay(log, replace(setup, front_s=0.0, tokenise_s=0.0))
    outside = replay(log, setup).ttft_s - inside.ttft_s
    np.testing.assert_allclose(outside, 0.005 + 3e-6 * log.trajectories.prompt_tokens)


def test_prompts_that_begin_alike_are_computed_once(tmp_path: Path) -> None:
    def log_with(name: str, **fields: object) -> RequestLog:
        folder = write_log(tmp_path / name, n=240)
        rows = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
        rows = [row | {"input_toks": 1000} | fields for row in rows]
        (folder / "requests.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return read_request_log(folder)

    apart = log_with("apart")
    assert apart.trajectories.shared_tokens is None and apart.trajectories.cached_tokens is None
    alike, recorded = log_with("alike", prefix_id="system", prefix_toks=907), log_with("recorded", cached_toks=896)
    setup = setup_of(apart)
    line = simulate_replica(alike.trajectories, setup.cost, setup.limits, options=setup.options)
    # full blocks of 16, for all but the first
    assert line.hit_tokens == 239 * (907 // 16) * 16
    none, some, said = (replay(log, setup).ttft_s for log in (apart, alike, recorded))
    assert some[0] == pytest.approx(none[0]) and said[0] < none[0]
    assert some[1:].mean() < 0.75 * none[1:].mean()
    # the first prompt, which one log computes and the other does not, holds up those behind it until a queue empties
    assert np.median(said[1:]) == pytest.approx(np.median(some[1:]), rel=0.02)
    assert said[-40:].mean() == pytest.approx(some[-40:].mean(), rel=1e-3)
    off = replace(setup, limits=replace(setup.limits, prefix_caching=False))
    np.testing.assert_allclose(replay(alike, off).ttft_s, none)


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
