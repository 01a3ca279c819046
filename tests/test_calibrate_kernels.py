"""Fits recover constants that made the timings; files in many forms; the command line."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from rlperf.calibrate import measure
from rlperf.calibrate.fitting import Bounds, fit_with_left_out
from rlperf.calibrate.kernel_seconds import matrices_of
from rlperf.calibrate.kernel_tables import read_series, short_kernel
from rlperf.calibrate.kernels import calibration_text, fit_device, merged, read_all
from rlperf.calibrate.statistics import pairwise_ranking, spread_of, summarise
from rlperf.cli.calibrate import app
from rlperf.cost.attention import Heads, decode_with, flash_with, visible_pairs
from rlperf.cost.basis import borrowed_weights
from rlperf.cost.collectives import bus_share, link_bytes_per_s, point_with
from rlperf.cost.moe import Dealt, ExpertShape, grouped_with
from rlperf.cost.roofline import gemm_with
from rlperf.cost.scan import convolved_with, scan_with, step_with
from rlperf.errors import SpecError
from rlperf.specs.calibration import DeviceCalibration, DispatchFit, ScanFit, load_device_calibration
from rlperf.specs.engine_calibration import load_engine_calibration
from rlperf.specs.hardware import BEST_READ, load_hardware
from rlperf.specs.profiles import load_architecture, load_device
from rlperf.specs.reader import read_spec

H100 = load_device("h100_sxm")
OWN = load_device_calibration("h100_sxm")


def write(path: Path, columns: list[str], rows: list[list[object]]) -> Path:
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(columns)
        writer.writerows(rows)
    return path


def gemm_file(folder: Path, *, noise: float = 0.0) -> Path:
    """Timings that the shipped H100 constants would give."""
    rng = np.random.default_rng(0)
    fit = OWN.gemm[0]
    rows: list[list[object]] = []
    for m in (1, 16, 128, 1024, 8192):
        for n in (1024, 4096, 8192):
            for k in (1024, 4096, 8192):
                us = float(gemm_with(H100, fit, m, n, k, "bf16", cached=True)) * 1e6
                rows.append(["h100_sxm", "trtllm-1.3", "bfloat16", m, n, k, us * np.exp(noise * rng.normal())])
    return write(folder / "gemm.csv", ["gpu", "src", "dtype", "m", "n", "k", "latency_us"], rows)


def test_gemm_constants_are_recovered(tmp_path: Path) -> None:
    calibration, fits = fit_device([gemm_file(tmp_path)], check=False)
    known, found = OWN.gemm[0], calibration.gemm[0]
    assert found.compute == pytest.approx(known.compute, rel=0.03)
    assert found.memory == pytest.approx(known.memory, rel=0.03)
    assert fits[0].fitted.predicted == pytest.approx(fits[0].series.measured_s, rel=0.03)


def test_left_out_error_is_that_of_the_noise(tmp_path: Path) -> None:
    calibration, _ = fit_device([gemm_file(tmp_path, noise=0.05)])
    quality = calibration.gemm[0].quality
    assert quality.in_sample_mape is not None and quality.left_out_mape is not None
    assert quality.in_sample_mape <= quality.left_out_mape < 8.0
    assert quality.n == 45 and quality.spread.low < 1.0 < quality.spread.high


def test_attention_decode_and_expert_constants_are_recovered(tmp_path: Path) -> None:
    prefill, decode, moe = OWN.prefill[0], OWN.decode[0], OWN.moe[0]
    rows: list[list[object]] = []
    for b in (1, 8, 64):
        for s in (128, 1024, 8192):
            for h, g in ((8, 1), (32, 8), (64, 8)):
                seconds = flash_with(H100, prefill, b * s, b * visible_pairs(s, s), s, b * s, Heads(h, g, 128))
                rows.append(["h100_sxm", "vllm-1", "fa", "bf16", b, s, h, g, 128, float(seconds) * 1e6])
    columns = ["gpu", "src", "kernel", "kv_cache_dtype", "batch", "seq_len", "num_heads", "num_kv_heads", "head_dim"]
    first = write(tmp_path / "prefill.csv", [*columns, "latency_us"], rows)
    rows = []
    for b in (1, 8, 64, 256):
        for s in (512, 4096, 65536):
            for h, g in ((8, 1), (32, 8), (64, 4)):
                seconds = decode_with(H100, decode, Heads(h, g, 128), b, b * s, cached=True)
                rows.append(["h100_sxm", "vllm-1", "fa", "bf16", b, s, h, g, 128, float(seconds) * 1e6])
    second = write(tmp_path / "decode.csv", [*(c if c != "seq_len" else "kv_len" for c in columns), "latency_us"], rows)
    rows = []
    for n in (1, 16, 256, 4096, 16384):
        for ep, tp in ((1, 1), (8, 1), (1, 8)):
            seconds = grouped_with(H100, moe, n, ExpertShape(4096, 1536, 128, 8), ep, tp, dealt=Dealt(balanced=True))
            skewed = grouped_with(
                H100, moe, n, ExpertShape(4096, 1536, 128, 8), ep, tp,
                dealt=Dealt(skew=ep**0.4, touched_share=0.8 if n > 1 else 1.0),
            )  # fmt: skip
            shape = [n, 4096, 1536, 8, 128, tp, ep]
            rows.append(["h100_sxm", "trtllm-1", "cutlass", "bfloat16", *shape, "balanced", float(seconds) * 1e6])
            rows.append(["h100_sxm", "trtllm-1", "cutlass", "bfloat16", *shape, "power_law_1.2", float(skewed) * 1e6])
    shape = ["num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"]
    third = write(tmp_path / "moe.csv", ["gpu", "src", "kernel", "dtype", *shape, "distribution", "latency_us"], rows)
    calibration, _ = fit_device([first, second, third], "h100_sxm", check=False)
    assert calibration.prefill[0].compute == pytest.approx(prefill.compute, rel=0.05)
    assert calibration.decode[0].memory == pytest.approx(decode.memory, rel=0.05)
    assert calibration.moe[0].memory == pytest.approx(moe.memory, rel=0.15)
    assert calibration.moe[0].skew_exponent == pytest.approx(0.4, rel=0.2)
    assert calibration.gemm == OWN.gemm  # no timings: taken over, and the notes say so
    assert "taken over from h100_sxm: gemm" in calibration.notes


def test_group_limited_routing_touches_half_of_the_experts(tmp_path: Path) -> None:
    moe = OWN.moe[0]
    rows: list[list[object]] = []
    for n in (1, 16, 64, 256, 1024, 4096):
        for h, w, e, share in ((7168, 2048, 256, 0.5), (4096, 1536, 128, 1.0)):
            for ep, tp in ((1, 1), (1, 4), (8, 1)):
                seconds = grouped_with(
                    H100, moe, n, ExpertShape(h, w, e, 8), ep, tp, dealt=Dealt(touched_share=share, balanced=True)
                )
                us = float(seconds) * (1e6 if ep == 1 or e == 128 else 9e6)
                rows.append(["h100_sxm", "vllm-1", "vllm_x_triton", "bfloat16", n, h, w, 8, e, tp, ep, "balanced", us])
    shape = ["num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"]
    file = write(tmp_path / "moe.csv", ["gpu", "src", "kernel", "dtype", *shape, "distribution", "latency_us"], rows)
    _, fits = fit_device([file], "h100_sxm", check=False)
    assert len(fits[0].series.measured_s) == 30  # over several devices the shares are unknown
    assert fits[0].fitted.predicted == pytest.approx(fits[0].series.measured_s, rel=0.05)


def test_collectives_and_dispatch(tmp_path: Path) -> None:
    point = OWN.collectives[0].points[-1]
    x = np.array([2.0**p for p in range(10, 29, 2)])
    seconds = point_with(point, x * bus_share("all_reduce", 8), link_bytes_per_s(H100))
    rows = [["h100_sxm", "2.29", "all_reduce", 8, int(b), t * 1e6] for b, t in zip(x, seconds, strict=True)]
    nccl = write(tmp_path / "nccl.csv", ["gpu", "nccl_version", "collective", "num_gpus", "bytes", "latency_us"], rows)
    deep = [
        ["h100_sxm", "s-1", nodes, 7168, n, 8, 20 + n * nodes, 25 + 2 * n * nodes]
        for nodes in (1, 2)
        for n in range(1, 90, 9)
    ]
    columns = ["gpu", "src", "node_num", "hidden_size", "num_token", "num_topk", "dispatch_us", "combine_us"]
    calibration, fits = fit_device([nccl, write(tmp_path / "deep.csv", columns, deep)])
    assert {fit.group for fit in calibration.dispatch} == {8, 16}
    assert fits[0].fitted.predicted == pytest.approx(fits[0].series.measured_s, rel=0.05)


def test_an_engines_own_dispatch_in_a_rack(tmp_path: Path) -> None:
    """Constants behind made-up timings come back, from one-sided kernels alone."""
    columns = ["gpu", "src", "kernel", "phase", "dtype", "ep_size", "hidden_size", "topk", "num_tokens", "latency_us"]
    rows = [
        ["gb200", "trtllm-1", kernel, phase, "fp8", group, 7168, 8, tokens, slower * us]
        for kernel, slower in (("NVLinkOneSided", 1.0), ("NVLinkTwoSided", 3.0))
        for phase, value in (("dispatch", 1.0), ("combine", 2.0))
        for group in (2, 8, 64)
        for tokens in (1, 64, 1024, 16384)
        for moved in [tokens * 7168 * value * min(8, group) * (1 - 1 / group)]
        for us in [10.0 + 2.0 * np.log2(group) + moved / (0.6 * 900e9) * 1e6]
    ]
    file = write(tmp_path / "swap.csv", columns, rows)
    found, fits = fit_device([file], "gb200", add=True)
    assert {fit.operation for fit in found.exchange} == {"dispatch", "combine"} and len(fits) == 2
    for fit in found.exchange:
        assert (fit.fixed, fit.per_doubling, fit.rate) == pytest.approx((10e-6, 2e-6, 0.6), rel=0.01)
        assert fit.quality.n == 12 and fit.quality.left_out_mape == pytest.approx(0.0, abs=1.0)


def _of(fit: DispatchFit) -> tuple[str, str, int]:
    return fit.kernel, fit.operation, fit.group


def test_kernels_are_added_beside_those_of_the_base(tmp_path: Path) -> None:
    """Streams are one fit and no list; dispatch over one group of devices leaves that over others alone."""
    sizes = [2**power for power in range(14, 33)]
    rows = [["h100_sxm", "torch-2", "copy", n, 3.0 + n / (0.9 * 3.352e12) * 1e6] for n in sizes]
    streams = write(tmp_path / "s.csv", ["gpu", "src", "kernel", "n_bytes", "latency_us"], rows)
    columns = ["gpu", "src", "node_num", "hidden_size", "num_token", "num_topk", "dispatch_us", "combine_us"]
    deep = [["h100_sxm", "s-1", 2, 7168, n, 8, 20 + n, 25 + 2 * n] for n in range(1, 90, 9)]
    files = [streams, write(tmp_path / "deep.csv", columns, deep)]
    found, fits = fit_device(files, "h100_sxm", check=False, add=True)
    assert found.stream.stream_memory == pytest.approx(0.9, rel=0.02)
    assert (found.gemm, found.id, found.spread) == (OWN.gemm, OWN.id, OWN.spread)
    groups = [{_of(fit) for fit in each.dispatch} for each in (OWN, found)]
    assert ("deepep", "dispatch", 8) in groups[0] and ("deepep_normal", "combine", 32) in groups[0]
    assert groups[1] == groups[0] | {("deepep", "dispatch", 16), ("deepep", "combine", 16)}
    assert len(found.dispatch) == len(groups[1]) and len(fits) == 3
    (tmp_path / "found.yaml").write_text(calibration_text(found))
    again = read_spec(tmp_path / "found.yaml", DeviceCalibration)
    assert again.stream.stream_memory == found.stream.stream_memory
    # what is fitted a second time takes its own place and counts once
    twice, _ = fit_device(files, "h100_sxm", tmp_path / "found.yaml", check=False, add=True)
    assert (twice.n, [_of(one) for one in twice.dispatch]) == (found.n, [_of(one) for one in found.dispatch])


def test_written_calibration_reads_back(tmp_path: Path) -> None:
    calibration, _ = fit_device([gemm_file(tmp_path)], check=False, source="made up")
    path = tmp_path / "mine.yaml"
    path.write_text(calibration_text(calibration))
    again = read_spec(path, DeviceCalibration)
    assert again.gemm[0].compute == calibration.gemm[0].compute
    assert again.gemm[0].fixed == pytest.approx(calibration.gemm[0].fixed, rel=1e-3)
    assert again.source == "made up"
    assert load_device_calibration("h20_sxm", file=path).extrapolated_from == "h100_sxm"


def test_every_problem_of_a_file_is_named(tmp_path: Path) -> None:
    broken = write(
        tmp_path / "gemm.csv",
        ["gpu", "dtype", "m", "n", "k", "latency_us"],
        [
            ["h100_sxm", "bf16", 1, 2, 3, "fast"],
            ["h100_sxm", "bf16", -1, 2, 3, 4.0],
            ["h100_sxm", "bf16", 1, 2, 3, 4.0],
        ],
    )
    with pytest.raises(SpecError) as caught:
        read_series(broken)
    assert [problem.line for problem in caught.value.problems] == [2, 3]
    unknown = write(tmp_path / "other.csv", ["a", "b"], [[1, 2]])
    with pytest.raises(SpecError) as caught:
        read_all([broken, unknown, tmp_path / "absent.csv"])
    assert len(caught.value.problems) == 4
    with pytest.raises(SpecError, match="holds no rows"):
        read_series(write(tmp_path / "empty.csv", ["gpu", "dtype", "m", "n", "k", "latency_us"], []))


def test_several_devices_need_a_choice(tmp_path: Path) -> None:
    rows = [[gpu, "bf16", 2**i, 1024, 1024, 5.0 + i] for gpu in ("h100_sxm", "h200_sxm") for i in range(9)]
    path = write(tmp_path / "gemm.csv", ["gpu", "dtype", "m", "n", "k", "latency_us"], rows)
    with pytest.raises(SpecError, match="choose with --device"):
        fit_device([path])
    with pytest.raises(SpecError, match="no timings of 'a100_80g_sxm'"):
        fit_device([path], "a100")
    assert fit_device([path], "h200", check=False)[0].device == "h200_sxm"


def test_nccl_tests_output_is_read(tmp_path: Path) -> None:
    lines = ["# nccl-tests version 2.13 all_reduce_perf", "# busbw (GB/s)"]
    lines += [f"#  Rank  {r} Group  0 Pid  1 on host device  {r} [0x1b] NVIDIA H100 80GB HBM3" for r in range(8)]
    lines += [f"{8 << i}  {2 << i}  float  sum  -1  {20 + i}.5  0.0  0.0  0  {19 + i}.0  0.0  0.0  0" for i in range(9)]
    path = tmp_path / "nccl.txt"
    path.write_text("\n".join(lines))
    (series,) = read_series(path)
    assert series.variant == "all_reduce" and series.shape["num_gpus"][0] == 8
    assert series.measured_s[0] == pytest.approx(20.5e-6)
    path.write_text("\n".join(lines).replace("1 on host device  7", "1 on other device  7"))
    with pytest.raises(SpecError, match="of 2 nodes"):
        read_series(path)
    for word in (".", "1.2.3", "2x", "-3", "0", "nan", "inf"):
        path.write_text("\n".join(lines).replace("-1  20.5", f"-1  {word}"))
        with pytest.raises(SpecError, match=rf"nccl\.txt:11: a time of {re.escape(word)} us for 8 bytes is none"):
            read_series(path)
    path.write_text("busbw\n8 2 float sum 1 2 3 4")
    with pytest.raises(SpecError, match="without the collective's name"):
        read_series(path)


def test_newest_version_of_a_kernel_stands(tmp_path: Path) -> None:
    rows = [
        ["h100_sxm", src, "bf16", 2**i, 1024, 1024, 5.0] for src in ("trtllm-1.9.0", "trtllm-1.10.0") for i in range(9)
    ]
    path = write(tmp_path / "gemm.csv", ["gpu", "src", "dtype", "m", "n", "k", "latency_us"], rows)
    series = read_series(path)
    assert len(series) == 2 and [one.software for one in merged(series)] == ["trtllm-1.10.0"]
    assert short_kernel("moe", "moe_torch_flow_min_latency", "trtllm-1") == "trtllm_min_latency"


def test_left_out_values_are_never_seen() -> None:
    x = np.array([1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    y = np.where(x == 4.0, 100.0, x)  # the odd value is predicted from the others alone

    def predict(p: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return np.asarray(p[0] * x[rows])

    fitted = fit_with_left_out(predict, Bounds.of((0.01, 0.5, 100.0)), y, {"x": x})
    assert fitted.left_out["x"][x == 4.0] == pytest.approx(4.0, rel=1e-3)


def test_statistics_by_hand() -> None:
    one = summarise("t", "g", "held out", [1.1, 1.8, 3.0], [1.0, 2.0, 3.0], [0.9, 1.9, 2.0], [1.2, 2.1, 2.5])
    assert one.mape == pytest.approx(20.0 / 3) and one.median_ape == pytest.approx(10.0)
    assert one.wape == pytest.approx(100.0 * 0.3 / 6.0)  # 0.1 + 0.2 of 1 + 2 + 3
    assert one.interval_coverage == pytest.approx(2 / 3) and one.pairwise_ranking == 1.0
    assert pairwise_ranking(np.array([1.0, 2.0]), np.array([1.0, 1.001])) is None
    assert spread_of(np.ones(101), np.linspace(0.5, 1.5, 101)).low == pytest.approx(0.55)
    with pytest.raises(SpecError, match="below a thousandth of what the fit gives"):
        spread_of(np.full(4, 1e6), np.ones(4))


def test_command_fits_and_writes(tmp_path: Path) -> None:
    out = tmp_path / "new" / "mine.yaml"
    result = CliRunner().invoke(app, ["kernels", str(gemm_file(tmp_path)), "--out", str(out), "--no-check", "--json"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["device"] == "h100_sxm" and data["series"][0]["n"] == 45 and out.is_file()
    result = CliRunner().invoke(app, ["kernels", str(tmp_path / "gemm.csv"), "--out", str(out), "--no-check"])
    assert "45 timings of h100_sxm" in result.output


def test_measuring_without_torch_is_refused_clearly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SpecError, match="pip install torch"):
        measure.measure(["gemm"], tmp_path)
    with pytest.raises(SpecError, match="unknown suite flop"):
        measure.measure(["flop"], tmp_path)
    file = tmp_path / "file"
    file.write_text("")
    assert isinstance(CliRunner().invoke(app, ["measure", "--out", str(file)]).exception, SpecError)


def test_streams_are_fitted(tmp_path: Path) -> None:
    sizes = [2**power for power in range(14, 33)]
    rows = [["h100_sxm", "torch-2", "copy", n, 3.0 + n / (0.9 * 3.352e12) * 1e6] for n in sizes]
    calibration, _ = fit_device([write(tmp_path / "s.csv", ["gpu", "src", "kernel", "n_bytes", "latency_us"], rows)])
    assert calibration.stream.stream_memory == pytest.approx(0.9, rel=0.02)
    assert calibration.stream.small_fixed == pytest.approx(3e-6, rel=0.05)
    assert calibration.stream.small_memory == OWN.stream.small_memory


def lowbit_file(folder: Path, kernel: str, dtype: str, software: str, hidden: int) -> Path:
    """Timings of an expert kernel in the columns of kernels/moe_lowbit_nongated.csv."""
    columns = ["gpu", "src", "kernel", "dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts",
               "moe_tp_size", "moe_ep_size", "distribution", "latency_us"]  # fmt: skip
    rows: list[list[object]] = [
        ["h100_sxm", software, kernel, dtype, tokens, hidden, 2048, 4, 64, 1, parallel, "balanced", 50.0 + tokens]
        for tokens in (1, 16, 256, 1024)
        for parallel in (1, 8)
    ]
    return write(folder / f"{software}.csv", columns, rows)


def test_four_bit_experts_are_read_by_what_their_activations_are(tmp_path: Path) -> None:
    """Weights in mxfp4 alone run as mxfp4; with mxfp8 activations as a dtype of their own; no gate, two matrices."""
    found = {
        name: read_series(lowbit_file(tmp_path, kernel, dtype, f"x-{index}", 4096))[0]
        for index, (name, kernel, dtype) in enumerate(
            (
                ("marlin", "vllm_mxfp4moe_marlin_marlinexperts", "w4a16_mxfp4"),
                ("trtllm", "sglang_mxfp4_flashinfer_trtllm_moe", "w4a8_mxfp4_mxfp8"),
                ("plain", "moe_torch_flow_nongated", "bfloat16"),
            )
        )
    }
    assert {(one.kernel, one.dtype) for one in found.values()} == {
        ("vllm_marlin", "mxfp4"), ("sglang_flashinfer_trtllm", "w4a8_mxfp4"), ("trtllm_nongated", "bf16"),
    }  # fmt: skip
    assert matrices_of("trtllm_nongated") == 2 and matrices_of("vllm_marlin") == 3


def test_choosing_among_many_experts_is_told_from_a_kernel_s_own_overheads(tmp_path: Path) -> None:
    """Marlin timed over 896 experts only: constants that 40 us of choice are in give them back, and leave them to E."""
    truth = next(one for one in OWN.moe if (one.kernel, one.dtype) == ("vllm_marlin", "mxfp4"))
    truth = truth.model_copy(update={"wide_choice": 4e-5, "cached": 0.3})
    columns = ["gpu", "src", "kernel", "dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts",
               "moe_tp_size", "moe_ep_size", "distribution", "latency_us"]  # fmt: skip
    rows: list[list[object]] = []
    wide, balanced = ExpertShape(3584.0, 3072.0, 896.0, 16.0), Dealt(balanced=True)
    for n in (1, 16, 64, 256, 1024, 4096, 16384):
        for tensor, parallel in ((1, 1), (8, 1), (1, 8), (1, 32)):
            seconds = grouped_with(H100, truth, n, wide, parallel, tensor, dtype="mxfp4", dealt=balanced, cached=True)
            rows.append(
                ["h100_sxm", "vllm-0.24.0", "vllm_mxfp4moe_marlin_marlinexperts", "w4a16_mxfp4", n, 3584, 3072, 16, 896,
                 tensor, parallel, "balanced", float(seconds) * 1e6]
            )  # fmt: skip
    calibration, _ = fit_device([write(tmp_path / "marlin.csv", columns, rows)], check=False)
    found = next(one for one in calibration.moe if (one.kernel, one.dtype) == ("vllm_marlin", "mxfp4"))
    assert found.wide_choice == pytest.approx(truth.wide_choice, rel=0.25)
    few = ExpertShape(2880.0, 2880.0, 128.0, 4.0)
    for n in (1.0, 64.0, 8192.0):
        one, known = (float(grouped_with(H100, fit, n, few, 1, 8, dtype="mxfp4")) for fit in (found, truth))
        assert one == pytest.approx(known, rel=0.1)
    # a choice among few costs nothing of it
    alone = found.model_copy(update={"wide_choice": 0.0})
    same = [float(grouped_with(H100, fit, 16.0, few, 1, 8, dtype="mxfp4")) for fit in (found, alone)]
    assert same[0] == same[1]


def test_candidates_of_one_release_keep_layers_that_the_newest_lacks(tmp_path: Path) -> None:
    kernel, dtype = "moe_torch_flow", "w4a8_mxfp4_mxfp8"
    new, old, other = (
        read_series(lowbit_file(tmp_path, kernel, dtype, software, hidden))[0]
        for software, hidden in (("trtllm-1.3.0rc23", 4096), ("trtllm-1.3.0rc20", 2880), ("trtllm-1.2.0", 7168))
    )
    (one,) = merged([old, new, other])
    assert set(one.shape["hidden_size"]) == {4096.0, 2880.0} and one.software == "trtllm-1.3.0rc23, trtllm-1.3.0rc20"


def test_no_fit_reads_faster_than_the_data_sheet(tmp_path: Path) -> None:
    """Timings of twice the bandwidth, as a warm cache gives: the constant stops at 0.95."""
    rows: list[list[object]] = []
    for m in (1, 16):
        for n in (8192, 16384):
            for k in (4096, 8192, 16384):
                us = n * k * 2.0 / (2.0 * H100.memory_bandwidth) * 1e6
                rows.append(["h100_sxm", "trtllm-1.3", "bfloat16", m, n, k, us])
    file = write(tmp_path / "warm.csv", ["gpu", "src", "dtype", "m", "n", "k", "latency_us"], rows)
    calibration, _ = fit_device([file], check=False)
    assert calibration.gemm[0].memory <= BEST_READ
    for name in ("h100_sxm", "b200_sxm", "l40s", "rtx_pro_6000_server", "gb300", "a100_80g_sxm"):
        own = load_hardware(name).calibration
        assert all(fit.memory <= BEST_READ for fit in (*own.gemm, *own.decode, *own.moe))


def test_the_same_chip_lends_before_the_one_before_it() -> None:
    """B300's new kinds of layers are GB300's, whose attention has B300's pace and not B200's; a scan, B200's alone."""
    b300 = load_hardware("b300_sxm").calibration
    assert {fit.timed_on for fit in (*b300.encoder, *b300.sparse, *b300.latent_decode)} == {"gb300"}
    scans = {fit.mixer: fit.timed_on for fit in b300.scan if fit.phase == "context"}
    assert scans["gated_delta"] == "gb300" and scans["mamba"] == "b200_sxm"
    # served rows told MI355X, and B200 is its relative: it lends nothing
    lenders = {fit.timed_on for fit in (*b300.moe, *b300.prefill, *load_hardware("gb300").calibration.moe)}
    assert lenders <= {None, "gb300", "gb200", "b200_sxm"}


def test_experts_that_were_not_timed_on_a_device_are_its_relatives(tmp_path: Path) -> None:
    """No 4-bit kernel is in the tables of H200: H100's shares stand in and say so; H100 has its own."""
    h200, h100 = load_hardware("h200_sxm").calibration, load_hardware("h100_sxm").calibration
    lent = [fit for fit in h200.moe if fit.dtype == "mxfp4"]
    assert lent and all(fit.timed_on == "h100_sxm" for fit in lent)
    assert all(fit.timed_on is None for fit in h100.moe)
    assert all(fit.timed_on is None for fit in h200.moe if fit.dtype in ("bf16", "fp8", "fp8_block"))
    arch, engine = load_architecture("gpt-oss-120b"), load_engine_calibration("vllm")
    said = [borrowed_weights(arch, load_hardware(name), engine, "mxfp4") for name in ("h100_sxm", "h200_sxm")]
    assert said == ["", "mxfp4 experts were timed on h100_sxm"]


def test_scan_constants_are_recovered(tmp_path: Path) -> None:
    """Linear attention in the columns of kernels/gdn.csv; convolutions without their channels are not read."""
    scan = ScanFit.model_construct(
        kernel="sglang", phase="context", fixed=3e-5, compute=0.28, memory=0.4, cached=3.0, per_step=4e-8
    )
    step = ScanFit.model_construct(kernel="sglang", phase="generation", fixed=4e-6, memory=0.85, cached=0.0)
    rows: list[list[object]] = []
    for batch in (1, 8, 64):
        for heads in (4, 16, 64):
            for tokens in (128, 2048, 16384):
                us = float(scan_with(H100, scan, batch, tokens, heads, 128, 128)) * 1e6
                rows.append(["h100_sxm", "sglang-0.5", "chunk_rule", "context", batch, tokens, heads, 128, 128, us])
            us = float(step_with(H100, step, batch * 4, 4.0 * heads * 128 * 128)) * 1e6
            rows.append(["h100_sxm", "sglang-0.5", "packed_decode", "generation", batch * 4, 1, heads, 128, 128, us])
            rows.append(["h100_sxm", "sglang-0.5", "causal_conv1d", "context", batch, 128, heads, 128, 128, 9.0])
    columns = ["gpu", "src", "kernel", "phase", "batch", "seq_len", "num_v_heads", "head_k_dim", "head_v_dim",
               "latency_us"]  # fmt: skip
    calibration, fits = fit_device([write(tmp_path / "gdn.csv", columns, rows)], check=False)
    assert {fit.series.name for fit in fits} == {"scan/h100_sxm/sglang/context", "scan/h100_sxm/sglang/generation"}
    found = {fit.phase: fit for fit in calibration.scan}
    assert found["context"].compute == pytest.approx(0.28, rel=0.1)  # told from passes by L2 alone
    assert found["context"].memory == pytest.approx(0.4, rel=0.03)
    assert found["context"].cached == pytest.approx(3.0, rel=0.1)
    assert found["context"].per_step == pytest.approx(4e-8, rel=0.05)
    assert found["generation"].memory == pytest.approx(0.85, rel=0.03)
    assert calibration.gemm == OWN.gemm


def test_convolutions_are_recovered_beside_their_scans(tmp_path: Path) -> None:
    """Of Mamba-2: channels are the values and the keys and queries of every group; a block a sequence and channel."""
    true = ScanFit.model_construct(
        kernel="trtllm", phase="context", mixer="mamba convolution", fixed=4e-6, memory=0.7, cached=0.0, per_block=1e-9
    )
    rows: list[list[object]] = []
    for batch in (1, 8, 32):
        for heads in (16, 64, 128):
            for tokens in (128, 1024, 8192):
                channels = heads * 64 + 2 * 8 * 128
                us = float(convolved_with(H100, true, batch, tokens, channels, 4)) * 1e6
                shape = [batch, tokens, heads, 64, 128, 8, 256, 4]
                rows.append(["h100_sxm", "trtllm-1.3.0", "causal_conv1d_fn", "context", *shape, us])
    columns = ["gpu", "src", "kernel", "phase", "batch", "seq_len", "nheads", "head_dim", "d_state", "n_groups",
               "chunk_size", "d_conv", "latency_us"]  # fmt: skip
    calibration, _ = fit_device([write(tmp_path / "mamba2.csv", columns, rows)], check=False)
    (found,) = calibration.scan
    assert (found.kernel, found.mixer, found.phase) == ("trtllm", "mamba convolution", "context")
    assert found.memory == pytest.approx(0.7, rel=0.02)
    assert found.per_block == pytest.approx(1e-9, rel=0.02)


def test_attention_of_vision_towers_is_recovered_by_engine_and_width(tmp_path: Path) -> None:
    """Heads of 72 that an engine's fallback computes eight times slower; what queries move is the device's own."""
    rows: list[list[object]] = []
    for kernel, width, compute in (("vllm-0.24.0", 72, 0.5), ("sglang-0.5.14", 72, 0.0625), ("vllm-0.24.0", 64, 0.65)):
        fit = OWN.prefill[0].model_copy(update={"fixed": 8e-6, "compute": compute, "ramp_tokens": 200.0})
        for batch in (1, 8, 32):
            for heads in (4, 16):
                for tokens in (256, 4096, 16384):
                    own = Heads(heads, heads, width, causal=False)
                    us = 1e6 * float(flash_with(H100, fit, batch * tokens, batch * tokens**2, tokens, 0.0, own))
                    rows.append(["h100_sxm", kernel, "attention", "bf16", batch, tokens, heads, width, us])
    columns = ["gpu", "src", "kernel", "attn_dtype", "batch", "seq_len", "num_heads", "head_dim", "latency_us"]
    calibration, _ = fit_device([write(tmp_path / "encoder.csv", columns, rows)], check=False)
    found = {(fit.kernel, fit.width): fit.compute for fit in calibration.encoder}
    assert found == {
        ("vllm", 72): pytest.approx(0.5, rel=0.02),
        ("sglang", 72): pytest.approx(0.0625, rel=0.02),
        ("vllm", 64): pytest.approx(0.65, rel=0.02),
    }
    assert calibration.prefill == OWN.prefill
