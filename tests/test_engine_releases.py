"""What an engine's release changes: products that ran slower, host time that shows, the release of a day."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlperf.calibrate.serving.rows import ServingCase
from rlperf.cost.inference import engine_step_cost
from rlperf.cost.replica import Replica, gemm_operator
from rlperf.layout import Layout
from rlperf.sim.rollout import EngineOptions
from rlperf.specs.engine_calibration import EngineCalibration, load_engine_calibration
from rlperf.specs.hardware import Hardware, load_hardware
from rlperf.specs.profiles import load_architecture
from tests.served_row import read_row

H100, B200 = load_hardware("h100_sxm", "dgx_h100"), load_hardware("b200_sxm", "dgx_b200")
LLAMA = load_architecture("Llama-3.1-8B")


def product_s(release: str, rows: float, hw: Hardware = H100, dtype: str = "fp8") -> float:
    """Seconds of a product of vLLM's in a release."""
    replica = Replica.of(LLAMA, hw, load_engine_calibration("vllm", release), Layout.of(), dtype)
    return float(gemm_operator(replica, "qkv", 1.0, rows, 8192, 8192, dtype).seconds)


@pytest.mark.parametrize(("rows", "times"), [(16, 1.0), (17, 1.25), (64, 1.25), (65, 1.0)])
def test_narrow_products_of_an_old_release_take_longer_between_two_sizes(rows: int, times: float) -> None:
    """Llama-3.1-70B in fp8 of October 2025 takes a quarter longer from 16 to 32 clients; no later table has that."""
    assert product_s("0.11", rows) == pytest.approx(times * product_s("0.19", rows), rel=1e-12)
    assert product_s("0.11", rows, dtype="bf16") == product_s("0.19", rows, dtype="bf16")
    assert product_s("0.11", rows, B200) == product_s("0.19", rows, B200)
    assert product_s("", rows) == product_s("nightly", rows) == product_s("0.19", rows)


def test_of_a_request_s_host_time_less_shows_where_steps_are_scheduled_ahead() -> None:
    """vLLM does so since 0.14 (TensorRT-LLM's PyTorch runtime and SGLang in every release here), gpt-fast does not."""

    def shown(engine: EngineCalibration) -> float:
        return engine.per_request_s / engine.overhead.per_request

    old, new, newest = (load_engine_calibration("vllm", release) for release in ("0.13", "0.14", ""))
    assert (shown(old), shown(new), shown(newest)) == (1.0, new.shown, new.shown) and new.shown < 1.0
    assert [load_engine_calibration(one).schedules_ahead for one in ("sglang", "trtllm", "trtllm-0", "gpt-fast")] == [
        True, True, False, False,
    ]  # fmt: skip
    apart = [engine.model_copy(update={"factors": ()}) for engine in (old, new)]  # releases have factors, too
    costs = [engine_step_cost(Replica.of(LLAMA, H100, engine, Layout.of())) for engine in apart]
    spared = old.overhead.per_request * (1.0 - new.shown)
    assert costs[0].host_per_request_s - costs[1].host_per_request_s == pytest.approx(spared, rel=1e-9)
    assert [EngineOptions.of(engine).async_scheduling for engine in (old, new)] == [False, True]


def served(tmp_path: Path, **cells: str) -> ServingCase:
    """A row of a served Llama, as it is read."""
    row = {
        "row_id": "a", "group": "aic_silicon", "engine": "vllm", "engine_version": "", "architecture": "Llama-3.1-70B",
        "gpu": "h200_sxm", "n_gpus": "2", "tensor_parallel": "2", "gemm_dtype": "fp8", "mode": "online_concurrency",
        "isl": "1024", "osl": "1024", "concurrency": "32", "measured_tpot_ms": "20.0",
        "note": "measured 2025-10-29",
    } | cells  # fmt: skip
    return read_row(tmp_path, row)


def test_a_row_without_a_version_has_the_newest_of_its_day(tmp_path: Path) -> None:
    by_day = served(tmp_path)
    assert by_day.engine.release == "0.11" and any("engine_version=0.11" in text for text in by_day.assumed)
    assert served(tmp_path, engine_version="0.19.1").engine.release == "0.19"
    for cells in ({"note": ""}, {"note": "measured 2026-03-01"}, {"engine": "sglang"}):
        one = served(tmp_path, **cells)
        assert one.engine.release == "" and not any("engine_version" in text for text in one.assumed)
