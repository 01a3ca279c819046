"""What a device runs on: no product above the data sheet's peak, no all-reduce slower than NCCL's, and nothing beside
constants that are told from served rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlperf.cost.collectives import all_reduce_s
from rlperf.cost.inference import decode_step_s
from rlperf.cost.operators import decode_operators, prefill_operators, token_operators
from rlperf.cost.replica import Operator, Replica, in_engine
from rlperf.cost.roofline import sheet_flop_per_s
from rlperf.layout import Layout
from rlperf.specs.engine_calibration import load_engine_calibration
from rlperf.specs.hardware import Hardware, load_hardware
from rlperf.specs.profiles import load_architecture, profile_names

ENGINES = [load_engine_calibration(name) for name in ("vllm", "sglang", "trtllm")]
TOKENS = np.array([128.0, 2048.0, 32768.0, 131072.0])
RUNNING = np.array([1.0, 16.0, 128.0, 512.0])


def replica_of(name: str, hardware: Hardware, gemm_dtype: str = "bf16", engine: int = 0) -> Replica:
    layout = Layout.of(tensor_parallel=4)
    return Replica.of(load_architecture(name), hardware, ENGINES[engine], layout, gemm_dtype)


def share_of_peak(operators: list[Operator], scale: float) -> float:
    """Largest share of the data sheet's peak that an operator computes at, inside an engine [1]."""
    shares = [np.max(one.compute_s / np.maximum(in_engine(one, scale), 1e-30)) for one in operators]
    return float(max(shares))


@pytest.mark.parametrize("device", profile_names("devices"))
def test_no_product_of_any_device_is_faster_than_its_peak(device: str) -> None:
    """H20, of a sixth of its relative's peak, ran experts at 1.06 of its own and DeepSeek-V4's attention at 1.36."""
    hardware = load_hardware(device)
    dtypes = ["bf16"] + ["fp8"] * (hardware.device.peaks.fp8 is not None)
    for name in ("Mixtral-8x7B", "DeepSeek-V3.2", "DeepSeek-V4-Flash"):
        for engine in range(len(ENGINES)):
            for dtype in dtypes:
                replica = replica_of(name, hardware, dtype, engine)
                scale = replica.engine.overhead.kernel_scale
                prompts = token_operators(replica, TOKENS, np.ones(4))
                prompts += prefill_operators(replica, np.ones(4), TOKENS, TOKENS)
                decodes = token_operators(replica, RUNNING, RUNNING)
                decodes += decode_operators(replica, RUNNING, RUNNING * 8192.0)
                assert share_of_peak(prompts, scale) <= 1.0 + 1e-9, (name, replica.engine.engine, dtype)
                assert share_of_peak(decodes, scale) <= 1.0 + 1e-9, (name, replica.engine.engine, dtype)


def test_keys_are_scored_at_the_peak_of_eight_bits() -> None:
    """DeepSeek-V3.2, one prompt of 64k: 64 heads of 128 score every pair in fp8, 128 read 2,048 keys in bf16."""
    hardware, tokens = load_hardware("h100_sxm"), np.array(65536.0)
    replica = replica_of("DeepSeek-V3.2", hardware)
    (found,) = prefill_operators(replica, np.array(1.0), tokens, tokens)
    pairs, read = tokens * (tokens + 1) / 2, 2048 * tokens - 2048 * 2047 / 2
    scored_s = pairs * 2 * 64 * 128 / sheet_flop_per_s(hardware, "fp8")
    fit = next(fit for fit in hardware.calibration.sparse if (fit.mixer, fit.kernel) == ("sparse", "sglang"))
    computed = read + fit.padded * (2048 * tokens - read)
    read_s = computed * 64 * 2 * (576 + 512) / sheet_flop_per_s(hardware, "bf16")  # 32 heads fill a tile of 64
    assert float(found.compute_s) == pytest.approx(61 * (scored_s + read_s), rel=1e-9)


@pytest.mark.parametrize("device", profile_names("devices"))
def test_no_all_reduce_of_an_engine_is_slower_than_nccls(device: str) -> None:
    hardware, sizes = load_hardware(device), np.array([2.0**power for power in range(10, 31)])
    for group in (2.0, 4.0, 8.0):
        by_nccl = all_reduce_s(hardware, sizes, group, group)
        for kernel in ("custom", "trtllm"):
            assert np.all(all_reduce_s(hardware, sizes, group, group, implementation=kernel) <= by_nccl)


def test_two_gb200_reduce_prompts_as_two_b200_do() -> None:
    """134 MB, of 8,192 tokens of a 70B: timed at 271 us by vLLM 0.14, at 738 by 0.24 (280 on B200, 276 on GB300)."""
    found = [
        float(all_reduce_s(load_hardware(name), 2.0**27, 2.0, 2.0, implementation="custom"))
        for name in ("gb200", "b200_sxm", "gb300")
    ]
    assert max(found) < 1.1 * min(found) and found[0] == pytest.approx(280e-6, rel=0.1)
    small = load_hardware("gb200"), 2.0**16, 2.0, 2.0
    assert all_reduce_s(*small, implementation="custom") < 0.6 * all_reduce_s(*small)


def test_units_for_four_bits_serve_an_engine_that_has_kernels_for_them() -> None:
    """mxfp4 experts on RTX PRO 6000 were timed with Marlin, in vLLM and SGLang; on B200 none runs it."""
    named = {
        name: [replica_of("gpt-oss-20b", load_hardware(name), "mxfp4", engine).roles.expert for engine in range(3)]
        for name in ("rtx_pro_6000_server", "rtx_5090", "b200_sxm", "mi355x", "h100_sxm")
    }
    assert named["rtx_pro_6000_server"] == named["rtx_5090"] == ["mxfp4", "mxfp4", "w4a8_mxfp4"]
    assert set(named["b200_sxm"]) == {"w4a8_mxfp4"} and set(named["mi355x"]) == {"w4a4_mxfp4"}
    assert set(named["h100_sxm"]) == {"mxfp4"}


@pytest.mark.parametrize("engine", range(2))
def test_an_rtx_5090_decodes_mxfp4_no_slower_than_an_rtx_4090(engine: int) -> None:
    """It has 1.8 times the bandwidth, and took 1.2 times as long with kernels that these engines do not run."""
    new, old = (replica_of("gpt-oss-20b", load_hardware(name), "mxfp4", engine) for name in ("rtx_5090", "rtx_4090"))
    few = RUNNING[:3]
    assert np.all(decode_step_s(new, few, few * 2048) < decode_step_s(old, few, few * 2048))


def test_nothing_stands_beside_what_served_rows_told() -> None:
    """B200 had lent MI355X its experts in int4 (Marlin): half as fast as those of MI350X."""
    told = load_hardware("mi355x")
    assert {fit.timed_on for fit in told.calibration.moe} == {None} and not told.calibration.exchange
    slower = load_hardware("mi350x")
    for dtype in ("bf16", "fp8", "mxfp4", "int4_wo", "int8_wo"):
        fast, slow = (replica_of("Mixtral-8x7B", one, dtype) for one in (told, slower))
        slow = replace(slow, engine=fast.engine)  # factors of served groups apart
        assert np.all(decode_step_s(fast, RUNNING, RUNNING * 2048) <= decode_step_s(slow, RUNNING, RUNNING * 2048))
