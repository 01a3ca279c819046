"""Latent attention: constants are recovered from timings, choose their engine, and reach who has none of their own."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from rlperf.calibrate.kernel_fits import KernelFit
from rlperf.calibrate.kernels import fit_device
from rlperf.cost.attention import Heads, prefill_attention_s
from rlperf.cost.basis import serving_basis
from rlperf.cost.latent import (
    absorbed_with,
    absorption_s,
    absorption_with,
    latent_decode_attention_s,
    latent_decode_fit,
    latent_prefill_attention_s,
)
from rlperf.cost.roofline import gemm_s
from rlperf.specs.calibration import AbsorptionFit, DeviceCalibration, LatentFit, load_device_calibration
from rlperf.specs.engine_calibration import load_engine_calibration
from rlperf.specs.hardware import load_hardware
from rlperf.specs.profiles import load_architecture, load_device

H100, RANK, ROPE = load_device("h100_sxm"), 512, 64
DECODES = LatentFit.model_construct(
    kernel="sglang", kv_dtype="bf16", fixed=1.2e-5, long_fixed=7e-6, compute=0.5, memory=0.8, exponent=2.0,
    per_head=1e-9, cached=0.0,
)  # fmt: skip
PRODUCTS = AbsorptionFit.model_construct(kernel="sglang", fixed=5e-6, compute=0.6, memory=0.8, cached=0.0)


def fitted(path: Path, columns: list[str], rows: list[list[object]]) -> tuple[DeviceCalibration, list[KernelFit]]:
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(columns)
        writer.writerows(rows)
    return fit_device([path], check=False, add=True)


def test_kernels_of_latent_attention_are_recovered(tmp_path: Path) -> None:
    """In the columns of kernels/mla_kernel.csv; absorbed prompts and casts of the cache (``flag``) are left aside."""
    prompts = (
        load_device_calibration("h100_sxm")
        .prefill[0]
        .model_copy(update={"fixed": 1.5e-5, "compute": 0.55, "memory": 0.3, "straggler": 0.3, "ramp_tokens": 400.0})
    )
    rows: list[list[object]] = []
    for heads in (16, 64, 128):
        for batch in (1, 16, 256):
            for past in (1023, 8191, 65535):
                us = 1e6 * float(absorbed_with(H100, DECODES, batch, batch * (past + 1), heads, RANK, ROPE))
                rows.append(["generation", heads, batch, 1, past, "", us])
            for tokens in (128, 2048, 16384):
                shape = Heads(heads, heads, 192, 128)
                us = 1e6 * float(
                    prefill_attention_s(load_hardware("h100_sxm"), shape, batch, tokens, tokens, fit=prompts)
                )
                rows.append(["context", heads, batch, tokens, 0, "", us])
                rows.append(["context", heads, batch, tokens, 0, "absorbed", 5.0 * us])
    columns = ["gpu", "src", "kernel", "attn_dtype", "kv_cache_dtype", "phase", "num_heads", "batch", "q_len",
               "past_len", "flag", "latency_us"]  # fmt: skip
    first: list[object] = ["h100_sxm", "sglang-9.9", "flash_attention", "bf16", "bf16"]
    calibration, fits = fitted(tmp_path / "mla.csv", columns, [[*first, *row] for row in rows])
    assert {fit.series.name: len(fit.series.measured_s) for fit in fits} == {
        "latent/h100_sxm/sglang/bf16/generation": 27, "latent/h100_sxm/sglang/bf16/context": 27,
    }  # fmt: skip
    told = next(fit for fit in calibration.latent_decode if fit.kernel == "sglang")
    assert (told.compute, told.memory) == pytest.approx((0.5, 0.8), rel=0.05)
    assert (told.fixed, told.long_fixed) == pytest.approx((1.2e-5, 7e-6), rel=0.1)
    own = next(fit for fit in calibration.latent_prefill if (fit.kernel, fit.kv_dtype) == ("sglang", "bf16"))
    assert (own.compute, own.memory) == pytest.approx((0.55, 0.3), rel=0.05)


def test_products_with_the_latents_are_recovered(tmp_path: Path) -> None:
    """In the columns of kernels/mla_bmm.csv: those of queries and of values in one series, 16 bits alone."""
    rows: list[list[object]] = []
    for name, dtype in (("mla_gen_pre", "bfloat16"), ("mla_gen_post", "bfloat16"), ("mla_gen_pre", "fp8")):
        for heads in (16, 32, 128):
            for tokens in (1, 64, 1024, 16384):
                us = 1e6 * float(absorption_with(H100, PRODUCTS, tokens, heads, 128, RANK))
                rows.append(["h100_sxm", "sglang-9.9", "default", name, dtype, tokens, heads, us])
    columns = ["gpu", "src", "kernel", "op", "dtype", "num_tokens", "num_heads", "latency_us"]
    calibration, fits = fitted(tmp_path / "bmm.csv", columns, rows)
    assert [(fit.series.name, len(fit.series.measured_s)) for fit in fits] == [("absorption/h100_sxm/sglang/bf16", 24)]
    told = next(fit for fit in calibration.absorption if fit.kernel == "sglang")
    assert (told.fixed, told.compute, told.memory) == pytest.approx((5e-6, 0.6, 0.8), rel=0.05)


def test_decodes_move_what_stands_between_their_products() -> None:
    """512 values a head go to memory and back: with 128 heads and 256 requests 67 MB, more than the weights' 17."""
    hw = load_hardware("h100_sxm")
    moved, plain = (float(one) for one in (
        absorption_s(hw, 256.0, 128.0, 128.0, 512.0, "vllm"), gemm_s(hw, 256.0, 128.0 * 128.0, 512.0)
    ))  # fmt: skip
    assert moved - plain > 256 * 128 * 512 * 2.0 / hw.device.memory_bandwidth
    untimed = load_hardware("mi355x")
    assert absorption_s(untimed, 256.0, 128.0, 128.0, 512.0, "vllm") == gemm_s(untimed, 256.0, 128.0 * 128.0, 512.0)


@pytest.mark.parametrize("device", ["h100_sxm", "h200_sxm", "b200_sxm", "b300_sxm", "gb200", "gb300"])
def test_latent_attention_grows_with_its_work(device: str) -> None:
    hw = load_hardware(device)
    for kv_dtype in ("bf16", "fp8"):
        for engine in ("vllm", "sglang", "trtllm"):
            few, many = (
                latent_decode_attention_s(hw, 32.0, 32.0 * 8192, heads, RANK, ROPE, kv_dtype=kv_dtype, engine=engine)
                for heads in (16.0, 128.0)
            )
            assert (
                float(many)
                > float(few)
                > 32.0 * 8192 * 576 * (1 if kv_dtype == "fp8" else 2) / (hw.device.memory_bandwidth)
            )
            lengths = [
                float(
                    latent_prefill_attention_s(
                        hw, Heads(16.0, 16.0, 192.0, 128.0), 1.0, q, q, kv_dtype=kv_dtype, engine=engine
                    )
                )
                for q in (512.0, 4096.0, 32768.0)
            ]
            assert np.all(np.diff(lengths) > 0.0)


def test_an_engine_takes_its_own_kernel_and_else_another_s() -> None:
    hw = load_hardware("b200_sxm")
    own, other = latent_decode_fit(hw, "fp8", "trtllm"), latent_decode_fit(hw, "fp8", "vllm")
    assert own is not None and (own.kernel, own.kv_dtype) == ("trtllm", "fp8")
    assert other is not None and other.kv_dtype == "fp8" and other.kernel != "vllm"
    assert latent_decode_fit(load_hardware("mi355x"), "bf16", "vllm") is None


def test_who_has_no_timings_of_latent_attention_says_so() -> None:
    """Its own are measured, a relative's are named, none are said to be none; sparse attention stays what it was."""
    engine = load_engine_calibration("vllm")

    def reasons(name: str, device: str) -> str:
        return "; ".join(serving_basis(load_architecture(name), load_hardware(device), engine).reasons)

    assert "latent" not in reasons("DeepSeek-V3", "h100_sxm") + reasons("DeepSeek-V3", "gb200")
    assert "latent attention was timed on h100_sxm" in reasons("DeepSeek-V3", "h200_sxm")
    assert "latent attention has no kernel table" in reasons("DeepSeek-V3", "mi355x")
    assert "sparse attention was timed as a module" in reasons("GLM-5", "h100_sxm")
