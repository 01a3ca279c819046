"""`rlperf calibrate measure` on recorded kernels: what it writes tells constants that hold for other shapes."""

from __future__ import annotations

import csv
import runpy
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlperf.calibrate import measure
from rlperf.calibrate.kernel_tables import Series, read_series
from rlperf.calibrate.kernels import fit_device, read_all
from rlperf.cost.attention import Heads, decode_with, prefill_attention_s
from rlperf.cost.roofline import gemm_with
from rlperf.errors import SpecError
from rlperf.specs.calibration import load_device_calibration
from rlperf.specs.hardware import load_hardware
from rlperf.specs.profiles import profile_root
from tests.recorded_torch import RecordedTorch

FEW = ["gemm", "attention", "decode", "stream"]


@pytest.fixture
def recorded(measured_data: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedTorch:
    torch = RecordedTorch(measured_data / "kernels", "h100_sxm", "NVIDIA H100 80GB HBM3")
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


def _error(predicted: np.ndarray, measured: np.ndarray) -> float:
    return float(np.abs(predicted / measured - 1.0).mean())


def _table(folder: Path, name: str, **wanted: str) -> Series:
    series = [one for one in read_series(folder / "kernels" / name) if one.device == "h100_sxm"]
    return next(one for one in series if all(getattr(one, key) == value for key, value in wanted.items()))


@pytest.mark.data
def test_constants_of_its_shapes_predict_recorded_timings_of_others(
    recorded: RecordedTorch, measured_data: Path, tmp_path: Path
) -> None:
    files = measure.measure(FEW, tmp_path)
    found, fits = fit_device(files, check=False)
    assert found.device == "h100_sxm"
    assert {fit.section: len(fit.series.measured_s) for fit in fits} == {
        "gemm": 200, "prefill": 64, "decode": 48, "stream": 19,
    }  # fmt: skip
    shipped, hw = load_device_calibration("h100_sxm"), load_hardware("h100_sxm")
    # products: every recorded shape that is not of its grid
    all_of = _table(measured_data, "gemm.csv", dtype="bf16")
    m, n, k = (all_of.shape[name] for name in ("m", "n", "k"))
    grid = set(measure.GEMM_WIDTHS)
    other = np.array(
        [a not in measure.GEMM_M or b not in grid or c not in grid for a, b, c in zip(m, n, k, strict=True)]
    )
    assert other.sum() > 200
    errors = [
        _error(gemm_with(hw.device, fits_[0], m, n, k, "bf16", cached=True)[other], all_of.measured_s[other])
        for fits_ in (found.gemm, shipped.gemm)
    ]
    assert errors[0] < 0.12 and errors[0] < errors[1] + 0.04
    # decode: other batches, lengths and heads
    rows = _table(measured_data, "attn_decode.csv", dtype="bf16")
    b, s, h, g = (rows.shape[name] for name in ("batch", "kv_len", "num_heads", "num_kv_heads"))
    predicted = decode_with(hw.device, found.decode[0], Heads(h, g, 128.0), b, b * s, cached=True)
    assert _error(predicted, rows.measured_s) < 0.15
    # prompts
    rows = _table(measured_data, "attn_prefill.csv", dtype="bf16")
    b, s, h, g = (rows.shape[name] for name in ("batch", "seq_len", "num_heads", "num_kv_heads"))
    predicted = prefill_attention_s(hw, Heads(h, g, 128.0), b, s, s, fit=found.prefill[0], cache_write=True)
    assert _error(predicted, rows.measured_s) < 0.15


@pytest.mark.data
def test_experts_and_collectives_write_what_was_recorded(
    recorded: RecordedTorch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (experts,) = measure.measure(["moe"], tmp_path)
    timings = set(recorded.timings.moe.values())
    written = next(one for one in read_all([experts]) if one.kind == "moe").measured_s
    assert sum(any(abs(one / other - 1) < 1e-3 for other in timings) for one in written) >= 12
    with pytest.raises(SpecError, match="torchrun"):
        measure.measure(["collectives"], tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "8")
    files = measure.measure(["collectives"], tmp_path)
    assert recorded.asked == ["nccl"]
    found = {one.variant: one for one in read_all(files)}
    assert set(found) == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    for one in found.values():
        table = recorded.timings.collectives[one.variant.replace("all_to_all", "alltoall")]
        truth = [table[int(size),] for size in one.shape["bytes"]]
        assert one.measured_s == pytest.approx(truth, rel=1e-3)
    monkeypatch.setenv("RANK", "1")
    assert measure.measure(["collectives"], tmp_path) == []


@pytest.mark.data
@pytest.mark.parametrize(
    ("device", "name", "profile", "library"),
    [("npu", "Ascend910B", "ascend_910b", "hccl"), ("xpu", "Intel Arc B60", None, "xccl")],
)
def test_other_makers_devices_run_the_same_suites(
    device: str, name: str, profile: str | None, library: str, measured_data: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    torch = RecordedTorch(measured_data / "kernels", "h100_sxm", name, device=device)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setenv("WORLD_SIZE", "8")
    files = measure.measure(["gemm", "collectives"], tmp_path, limit=6)
    assert torch.asked == [library]
    with files[0].open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 and (profile is None or {row["gpu"] for row in rows} == {profile})
    first = rows[0]
    shape = (int(first["m"]), int(first["n"]), int(first["k"]))
    assert float(first["latency_us"]) == pytest.approx(torch.timings.gemm[shape] * 1e6, rel=1e-3)


class RecordedEngine:
    """An engine whose decode takes what was recorded; prompts take some time of their own."""

    clock = 0.0
    asked: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, **values: Any) -> None:
        RecordedEngine.asked = values

    def generate(self, prompts: list[dict[str, list[int]]], wanted: Any, use_tqdm: bool) -> None:
        isl, running = len(prompts[0]["prompt_token_ids"]), len(prompts)
        step = 3.1e-3 + 2e-6 * running + 3e-9 * running * isl
        RecordedEngine.clock += 1e-5 * isl * running + step * wanted.max_tokens


def test_the_decode_loop_of_an_engine_is_told_from_two_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = types.ModuleType("vllm")
    vllm.__version__ = "0.24.0"  # type: ignore[attr-defined]
    vllm.LLM = RecordedEngine  # type: ignore[attr-defined]
    vllm.SamplingParams = lambda **values: types.SimpleNamespace(**values)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: RecordedEngine.clock)
    (file,) = measure._engine(tmp_path, "h100_sxm", 4)
    assert RecordedEngine.asked["load_format"] == "dummy"
    with file.open() as text:
        rows = list(csv.DictReader(text))
    assert len(rows) == 4
    for row in rows:
        isl, running = int(row["isl"]) - measure.ENGINE_TOKENS[0], int(row["concurrency"])
        step = 3.1 + 2e-3 * running + 3e-6 * running * isl
        assert float(row["measured_tpot_ms"]) == pytest.approx(step, rel=1e-4)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(SpecError, match="pip install vllm"):
        measure._engine(tmp_path, "h100_sxm", 4)


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100_sxm"), ("NVIDIA H100 PCIe", "h100_pcie"), ("NVIDIA H200", "h200_sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100_80g_sxm"), ("NVIDIA A100-SXM4-40GB", "a100_40g_sxm"), ("NVIDIA L4", "l4"),
        ("NVIDIA A100 80GB PCIe", "a100_80g_pcie"), ("NVIDIA B200", "b200_sxm"), ("NVIDIA L40S", "l40s"),
        ("AMD Instinct MI300X", "mi300x"), ("NVIDIA GeForce RTX 4090", "rtx_4090"), ("Ascend910B", "ascend_910b"),
        ("Moore Threads S4000", "moore_threads_s4000"),
    ],
)  # fmt: skip
def test_what_a_driver_calls_a_device_is_its_profile(driver: str, name: str) -> None:
    module = types.SimpleNamespace(get_device_name=lambda: driver)
    assert measure.device_name(measure.Backend("cuda", module, "", "nccl")) == name


@pytest.mark.data
def test_a_card_that_does_not_ship_is_fitted_by_the_file_of_its_profile(
    measured_data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch = RecordedTorch(measured_data / "kernels", "h100_sxm", "NVIDIA Foo 48GB")
    monkeypatch.setitem(sys.modules, "torch", torch)
    files = measure.measure(["stream"], tmp_path)
    with pytest.raises(SpecError, match=r"no device named 'nvidia_foo_48gb' \(.*the path of a profile of your own"):
        fit_device(files, check=False)
    sheet = (profile_root() / "devices" / "h100_sxm.yaml").read_text()
    kept = [line for line in sheet.splitlines() if not line.startswith(("name:", "aliases:", "relative:"))]
    own = tmp_path / "nvidia_foo_48gb.yaml"
    own.write_text("\n".join(["name: nvidia_foo_48gb", *kept]))
    found, fits = fit_device(files, str(own), check=False)
    assert found.device == "nvidia_foo_48gb" and [fit.section for fit in fits] == ["stream"]


def test_the_file_stands_alone(tmp_path: Path) -> None:
    alone = tmp_path / "measure.py"
    alone.write_text(Path(measure.__file__).read_text())
    code = "import sys; sys.modules['rlperf'] = None; sys.modules['torch'] = None; import runpy; runpy.run_path"
    found = subprocess.run(
        [sys.executable, "-I", "-c", f"{code}({str(alone)!r}, run_name='measure')['measure'](['gemm'], '.')"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert "measuring needs PyTorch" in found.stderr
    assert callable(runpy.run_path(str(alone), run_name="measure")["main"])
