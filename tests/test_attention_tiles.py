"""Heads of other widths and windows in attention: the forms, their fits on several devices, who lends kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlperf.calibrate.attention_tiles import fit_tiles, fit_windows, with_kernels, with_tiles, with_windows
from rlperf.calibrate.kernel_seconds import decode_seconds, prefill_seconds
from rlperf.calibrate.kernel_tables import Series
from rlperf.calibrate.leave_out_kernels import predict_groups, strangers_constants
from rlperf.calibrate.tables import read_table
from rlperf.cost.attention import (
    Heads,
    decode_with,
    edge_pairs,
    narrow_heads,
    packed_attention_s,
    prefill_attention_s,
)
from rlperf.specs.calibration import (
    DeviceCalibration,
    PrefillFit,
    Quality,
    RoundsFit,
    TileFit,
    WindowFit,
    load_device_calibration,
)
from rlperf.specs.hardware import load_hardware
from rlperf.specs.profiles import load_device
from rlperf.told import quiet

FA3 = "FlashAttention-3's bars of 16,384 tokens, not causal (arXiv 2407.08608, figures 5 and 6) [TFLOP/s]"
FORWARD, BACKWARD = {64: 497.0, 128: 648.0, 256: 756.0}, {64: 474.0, 128: 561.0}


def own(device: str, tiles: TileFit | None = None) -> PrefillFit:
    fit = load_device_calibration(device).prefill[0]
    return fit.model_copy(update={"tiles": tiles}) if tiles else fit


def test_published_rates_of_other_widths_are_told_by_the_exponentials() -> None:
    fit = own("h100_sxm", TileFit())
    for width, rate in FORWARD.items():
        assert 1.0 / float(narrow_heads(fit, width)) == pytest.approx(rate / FORWARD[128], rel=0.03), FA3
    assert 1.0 / float(narrow_heads(fit, 64, backward=True)) == pytest.approx(BACKWARD[64] / BACKWARD[128], rel=0.03)
    assert float(narrow_heads(own("h100_sxm"), 64)) == pytest.approx(FORWARD[128] / FORWARD[64], rel=0.06)


def test_narrow_heads_lose_more_where_tensor_cores_doubled_and_exponentials_did_not() -> None:
    hopper, blackwell, ada = (float(narrow_heads(own(name), 64)) for name in ("h100_sxm", "b200_sxm", "l40s"))
    assert 1.0 < ada < hopper < 1.6 < blackwell < 2.0
    assert float(narrow_heads(own("b200_sxm"), 128)) == 1.0


def test_what_trains_gains_nothing_in_wide_heads() -> None:
    hw, tokens = load_hardware("h100_sxm"), 16384.0
    wide, usual = Heads(16, 16, 256), Heads(32, 32, 128)
    trained = [float(packed_attention_s(hw, heads, tokens, tokens**2, tokens)) for heads in (wide, usual)]
    served = [float(prefill_attention_s(hw, heads, 1, tokens, tokens)) for heads in (wide, usual)]
    assert trained[0] == pytest.approx(trained[1], rel=0.05)
    assert served[0] < 0.9 * served[1]


def test_a_window_pays_for_keys_beyond_it_only_where_it_binds() -> None:
    fit = own("b200_sxm", TileFit(window_edge=100.0))
    assert float(edge_pairs(fit, 10.0, 500.0, 128)) == 1000.0
    assert float(edge_pairs(fit, 10.0, 148.0, 128)) == 155.0  # 11 to 20 keys are left out, and no tile holds others
    assert float(edge_pairs(fit, 10.0, 128.0, 128)) == float(edge_pairs(fit, 10.0, 500.0, None)) == 0.0


@pytest.mark.parametrize("device", ["b200_sxm", "h20_sxm", "l40s", "a100_80g_sxm", "mi355x"])
def test_prompts_in_a_window_never_cost_more_than_in_a_wider_one(device: str) -> None:
    """With a window of 800 of 1,024 tokens B200 took 10 % longer than without one: its tiles held 1.19 of all pairs."""
    hw = load_hardware(device)
    for tokens in (256.0, 1024.0, 4096.0):
        seconds = [
            float(prefill_attention_s(hw, Heads(32, 8, 256, window=window), 8, tokens, tokens, fit=fit))
            for fit in hw.calibration.prefill
            for window in (128, 256, 500, 800, 1000, 2048, 3600, None)
        ]
        assert np.all(np.diff(np.reshape(seconds, (-1, 8)), axis=1) >= -1e-12)


def test_one_multiprocessor_reads_a_window_that_is_not_split() -> None:
    device = load_device("l40s")
    window = WindowFit(fixed="4 us", start="2 us", bytes_per_clock=10.0, memory=0.6)
    fit = load_device_calibration("l40s").decode[0].model_copy(update={"window": window})
    clock, one = float(device.boost_clock or 0.0), 4.0 * 128 * 8192
    alone = float(decode_with(device, fit, Heads(8, 1, 128), 1, 8192, windowed=True))
    assert alone == pytest.approx(4e-6 + 2e-6 + one / (10.0 * clock))
    assert float(decode_with(device, fit, Heads(8, 1, 128), 16, 16 * 8192, windowed=True)) == pytest.approx(alone)
    waves = float(decode_with(device, fit, Heads(64, 1, 128), 16, 16 * 8192, windowed=True))  # 1,024 heads on 142
    assert waves == pytest.approx(4e-6 + 8 * (alone - 4e-6))
    full = float(decode_with(device, fit, Heads(8, 1, 128), 1, 8192))
    assert full < 0.3 * alone  # whole contexts are split


def windows(device: str, place: int, planted: dict[str, Any]) -> tuple[Series, DeviceCalibration]:
    """Timings of windows that a device's kernel would give, without noise."""
    constants = load_device_calibration(device)
    fit = constants.decode[place]
    b, s, h = (x.ravel() for x in np.meshgrid([1.0, 16.0, 256.0], [1024.0, 16384.0], [8.0, 64.0]))
    shape = {
        "batch": b, "kv_len": s, "num_heads": h, "num_kv_heads": 0 * b + 8.0, "head_dim": 0 * b + 128.0,
        "window_size": np.tile([128.0, 4096.0, 0.0], len(b) // 3),
    }  # fmt: skip
    ids = tuple(f"{device}_{row}" for row in range(len(b)))
    blank = Series("decode", device, fit.kernel, "bf16", "", "engine-1.0", shape, 0 * b + 1.0, ids)
    every = np.ones(len(b), dtype=bool)
    seconds = decode_seconds(blank, load_device(device))(fit.model_copy(update=planted), every)
    return replace(blank, measured_s=seconds), constants


@pytest.mark.parametrize("kind", ["window", "rounds"])
def test_windows_that_are_not_split_are_recovered(kind: str) -> None:
    """FlashAttention-2 gives every query head of a request to a multiprocessor, FlashAttention-3 every key head."""
    planted: WindowFit | RoundsFit = RoundsFit(fixed="13 us", each="3 us")
    devices, kernel = ["h100_sxm"], ("flash_attn_fa3", "bf16")
    if kind == "window":
        planted = WindowFit(fixed="4 us", start="2 us", bytes_per_clock=10.0, memory=0.6)
        devices, kernel = ["l40s", "rtx_pro_6000_server"], ("flash_attn_fa2", "bf16")
    parts = {name: windows(name, 0, {kind: planted}) for name in devices}
    found = fit_windows([one for one, _ in parts.values()], {name: own for name, (_, own) in parts.items()})
    told = found[kernel]
    assert fit_windows([], {}) == {} and type(told) is type(planted)
    near = {"bytes_per_clock": 0.03, "start": 0.1, "fixed": 0.05, "each": 0.05}
    for name in near.keys() & vars(planted).keys():
        assert getattr(told, name) == pytest.approx(getattr(planted, name), rel=near[name]), name
    held = {(fit.kernel, fit.kv_dtype): getattr(fit, kind) for fit in with_windows(parts[devices[0]][1], found).decode}
    own = {(fit.kernel, fit.kv_dtype): getattr(fit, kind) for fit in parts[devices[0]][1].decode}
    assert held == own | {kernel: told}


def test_kernels_that_split_windows_are_held_against_their_timings() -> None:
    """Constants of full contexts, on windows that no fit saw: their error stands beside them, and they stay."""
    series, constants = windows("b200_sxm", 0, {})
    fit = constants.decode[0]
    bare = constants.model_copy(update={"decode": (fit.model_copy(update={"in_windows": None}),)})
    found = fit_windows([replace(series, measured_s=series.measured_s * 1.1)], {"b200_sxm": bare})
    told = found[fit.kernel, "bf16"]
    assert isinstance(told, Quality) and told.n == 8
    assert told.left_out_mape == pytest.approx(100.0 * (1.0 - 1.0 / 1.1), abs=0.01)
    held = with_windows(bare, found).decode[0]
    assert held.windows_timed and not bare.decode[0].windows_timed
    assert held.model_copy(update={"in_windows": None}) == bare.decode[0]


def test_key_heads_take_a_round_for_every_multiprocessor() -> None:
    """512 key heads are four rounds of H100's 132 multiprocessors, 128 are one; full contexts know no rounds."""
    device, fit = load_device("h100_sxm"), load_device_calibration("h100_sxm").decode[0]
    assert fit.rounds is not None
    bare = fit.model_copy(update={"rounds": None})
    for requests, later in ((1, 0), (16, 0), (32, 1), (64, 3), (256, 15)):
        asked = Heads(64, 8, 64), requests, 128.0 * requests
        took, plain = (float(decode_with(device, one, *asked, windowed=True)) for one in (fit, bare))
        assert took - plain == pytest.approx(fit.rounds.fixed - fit.fixed + later * fit.rounds.each)
        assert float(decode_with(device, fit, *asked)) == plain


def series(device: str, tiles: TileFit, kernel: str | None = None) -> tuple[Series, DeviceCalibration]:
    """Timings that a device would give with these tiles, without noise."""
    constants = load_device_calibration(device)
    fit = constants.prefill[0]
    b, s, d, w = (
        x.ravel() for x in np.meshgrid([1.0, 8.0], [512.0, 4096.0, 16384.0], [64.0, 128.0, 256.0], [0.0, 128.0])
    )
    shape = {
        "batch": b, "seq_len": s, "num_heads": 0 * b + 32.0, "num_kv_heads": 0 * b + 8.0, "head_dim": d,
        "window_size": w,
    }  # fmt: skip
    ids = tuple(f"{device}_{row}" for row in range(len(b)))
    blank = Series("prefill", device, kernel or fit.kernel, "bf16", "", "engine-1.0", shape, 0 * b + 1.0, ids)
    planted = fit.model_copy(update={"tiles": tiles})
    every = np.ones(len(b), dtype=bool)
    return replace(blank, measured_s=prefill_seconds(blank, load_device(device))(planted, every)), constants


def test_constants_of_a_kernel_are_recovered_from_all_its_devices() -> None:
    planted = TileFit(exponentials=100.0, overlap=3.0, moved_width=0.4, cache_width=0.2, window_edge=80.0)
    parts = [series(device, planted) for device in ("b200_sxm", "gb200")]
    found = fit_tiles([one for one, _ in parts], {constants.device: constants for _, constants in parts})
    assert set(found) == {("flashinfer_trtllmprefill", "bf16"), ("", "")}
    told = found["flashinfer_trtllmprefill", "bf16"]
    assert told.exponentials == pytest.approx(100.0, rel=0.02) and told.overlap == pytest.approx(3.0, rel=0.05)
    assert told.moved_width == pytest.approx(0.4, rel=0.1) and told.window_edge == pytest.approx(80.0, rel=0.02)
    assert told.quality.left_out_mape is not None and told.quality.left_out_mape < 1.0
    held = with_tiles(parts[0][1], found).prefill
    by_kernel = {(fit.kernel, fit.kv_dtype): fit.tiles for fit in held}
    assert by_kernel["flashinfer_trtllmprefill", "bf16"] == told
    assert by_kernel["flashinfer_trtllmprefill", "fp8"] == found["", ""]  # nobody timed it: that of all kernels


def test_a_kernel_timed_in_one_width_stands_beside_with_the_devices_tiles() -> None:
    whole, constants = series("b200_sxm", TileFit(), "another_kernel")
    narrow = whole.take(whole.shape["head_dim"] == 64.0)
    assert fit_tiles([narrow], {"b200_sxm": constants}) == {}
    added = with_kernels(constants, [narrow], check=False).prefill
    assert [fit.kernel for fit in added] == [*(fit.kernel for fit in constants.prefill), "another_kernel"]
    assert added[-1].tiles == constants.prefill[0].tiles and added[-1].quality.n == len(narrow.measured_s)


def test_a_relative_of_the_generation_lends_kernels_over_prompts() -> None:
    lent = {fit.kernel: fit.timed_on for fit in load_hardware("h200_sxm").calibration.prefill}
    assert lent["torch_flow"] == "h100_sxm" and lent["flash_attn_fa3"] is None
    assert {fit.kernel for fit in load_hardware("a100_80g_sxm").calibration.prefill} == {"flash_attn"}


def test_a_device_left_out_asks_the_next_that_runs_its_kernels() -> None:
    """B300 asks GB300, whose relative it is; Mamba-2's scan, which GB300 lacks, B200 of the same generation has."""
    stranger = strangers_constants(load_device("b300_sxm"))
    experts = {fit.dtype: fit.timed_on for fit in stranger.moe}
    assert experts["w4a8_mxfp4"] is None and experts["fp8"] is None
    assert {fit.timed_on for fit in stranger.scan if (fit.mixer, fit.phase) == ("mamba", "context")} == {"b200_sxm"}


@pytest.mark.parametrize("table", ["attn_prefill_window.csv", "attn_decode_window.csv"])
def test_windows_and_widths_on_a_device_that_no_fit_saw(measured_data: Path, table: str) -> None:
    file = measured_data / "kernels" / table
    groups = predict_groups(file, read_table(file), "device", quiet)
    errors = {
        one.name: float(np.median([abs(each.predicted / each.measured - 1.0) for each in one.left_out]))
        for one in groups
    }
    assert max(errors.values()) < 0.25 and np.mean(list(errors.values())) < 0.20, errors
