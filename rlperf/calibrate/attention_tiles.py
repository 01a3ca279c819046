"""Widths of heads and windows in attention: told of a kernel on all its devices together.

``python -m rlperf.calibrate.attention_tiles PROMPTS DECODES OUT`` reads timings of heads of 64 to 256 and of windows
(``attn_prefill_window.csv``, ``attn_decode_window.csv``), tells each kernel's `TileFit`, and the `WindowFit` or
`RoundsFit` of those that do not split a window's keys, beside every device's own constants for heads of 128, holds the
others' constants against their timings in windows, and writes it all into the calibrations of OUT that hold the kernel.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from rlperf.calibrate.fitting import Bounds, Fitted, Predict
from rlperf.calibrate.kernel_fits import digits, fit_prefill, fit_together, microseconds
from rlperf.calibrate.kernel_seconds import Own, Seconds, decode_seconds, own_fit, prefill_seconds
from rlperf.calibrate.kernel_tables import Series, read_series
from rlperf.calibrate.kernels import added, calibration_text
from rlperf.layout import FloatArray
from rlperf.specs.calibration import (
    DecodeFit,
    DeviceCalibration,
    PrefillFit,
    Quality,
    RoundsFit,
    TileFit,
    WindowFit,
    load_device_calibration,
)
from rlperf.specs.cluster import Device
from rlperf.specs.profiles import load_device
from rlperf.specs.writer import write_atomic

WIDEST = 256.0
"""Widest heads of a fit: those of 512 (Gemma 4) run other kernels, or in pieces."""

SAME_KERNEL = {"flash_attn": "flash_attn_fa2"}
"""FlashAttention-2 under another name: that of vLLM on A100."""

BOUNDS = Bounds.of((1.0, 60.0, 500.0), (1.0, 2.0, 8.0), (1e-3, 0.5, 1.0), (1e-3, 0.5, 1.0), (0.1, 60.0, 300.0))
"""Of a `TileFit`'s constants, in the order of its fields."""


def fit_tiles(
    series: Sequence[Series], constants: Mapping[str, DeviceCalibration], *, check: bool = True
) -> dict[tuple[str, str], TileFit]:
    """Tiles by kernel and dtype of the cache, and under ``("", "")`` those of all kernels, for one that nobody timed.

    Parameters
    ----------
    constants : by device, those of heads of 128; series of other devices are left aside
    check : errors with each device left out in turn (one device: each batch)
    """
    timed = [
        (one, fit)
        for one in series
        if one.kind == "prefill" and one.device in constants and len(np.unique(one.shape["head_dim"])) > 1
        if (fit := own_fit(one, constants[one.device].prefill)) is not None
    ]
    found = {}
    for kernel in dict.fromkeys((one.kernel, one.dtype) for one, _ in timed):
        found[kernel] = _fit([each for each in timed if (each[0].kernel, each[0].dtype) == kernel], check)
    return found | ({("", ""): _fit(timed, check)} if timed else {})


UNSPLIT = "flash_attn_fa2"
"""The kernel whose decodes do not split the keys of a window: FlashAttention-2 reads 8,192 of them at 25 GB/s for a
request's query head, on L40S and RTX PRO 6000 alike, and full contexts at the device's bandwidth."""
IN_ROUNDS = "flash_attn_fa3"
"""The kernel that takes windows in rounds: FlashAttention-3 takes H100 15 us for the 128 tokens of 128 key heads, and
24, 33 and 111 for 256, 512 and 2,048 of them, on 132 multiprocessors."""

Windows = dict[tuple[str, str], WindowFit | RoundsFit | Quality]
"""By kernel and dtype of the cache: constants of windows, or how constants of full contexts do in them."""


def fit_windows(series: Sequence[Series], constants: Mapping[str, DeviceCalibration], *, check: bool = True) -> Windows:
    """Decodes in windows, beside the devices' own constants of full contexts, a kernel on all its devices together."""
    timed = [
        (one.take((one.shape["window_size"] > 0.0) & (one.shape["head_dim"] <= WIDEST)), fit)
        for one in series
        if one.kind == "decode" and one.device in constants
        if (fit := own_fit(one, constants[one.device].decode)) is not None
    ]
    parts = [(one, fit) for one, fit in timed if len(one.measured_s)]
    found: Windows = {}
    for kernel in dict.fromkeys((one.kernel, one.dtype) for one, _ in parts):
        mine = [each for each in parts if (each[0].kernel, each[0].dtype) == kernel]
        if kernel[0] == UNSPLIT:
            found[kernel] = _unsplit(mine, check)
        elif kernel[0] == IN_ROUNDS:
            found[kernel] = _in_rounds(mine, check)
        else:
            found[kernel] = _in_windows(mine)
    return found


def _unsplit(parts: Sequence[tuple[Series, DecodeFit]], check: bool) -> WindowFit:
    def told(fit: DecodeFit, p: FloatArray) -> DecodeFit:
        window = WindowFit.model_construct(fixed=p[0], start=p[1], bytes_per_clock=p[2], memory=p[3])
        return fit.model_copy(update={"window": window})

    bounds = Bounds.of((1e-7, 5e-6, 3e-5), (1e-8, 1e-6, 1e-5), (0.5, 10.0, 128.0), (0.05, 0.5, 1.0))
    fitted, rows = _on_all(parts, decode_seconds, told, bounds, check)
    fixed, start, each, memory = fitted.parameters
    return WindowFit.model_validate(
        {
            "fixed": microseconds(fixed), "start": microseconds(start), "bytes_per_clock": digits(each),
            "memory": digits(memory), "quality": fitted.quality(rows),
        }
    )  # fmt: skip


def _in_rounds(parts: Sequence[tuple[Series, DecodeFit]], check: bool) -> RoundsFit:
    def told(fit: DecodeFit, p: FloatArray) -> DecodeFit:
        return fit.model_copy(update={"rounds": RoundsFit.model_construct(fixed=p[0], each=p[1])})

    bounds = Bounds.of((1e-7, 1e-5, 3e-5), (1e-8, 3e-6, 1e-5))
    fitted, rows = _on_all(parts, decode_seconds, told, bounds, check)
    fixed, each = (microseconds(value) for value in fitted.parameters)
    return RoundsFit.model_validate({"fixed": fixed, "each": each, "quality": fitted.quality(rows)})


def _in_windows(parts: Sequence[tuple[Series, DecodeFit]]) -> Quality:
    """Errors of constants that no window told, on windows."""
    every = [np.ones(len(one.measured_s), dtype=np.bool_) for one, _ in parts]
    told = [decode_seconds(one, load_device(one.device))(fit, r) for (one, fit), r in zip(parts, every, strict=True)]
    predicted, measured = np.concatenate(told), np.concatenate([one.measured_s for one, _ in parts])
    fitted = Fitted(np.empty(0), predicted, {"window": predicted}, measured)
    quality = fitted.quality(_rows_of([one for one, _ in parts]))
    return quality.model_copy(update={"in_sample_mape": None, "left_out_rule": "no window told the constants"})


def _fit(timed: Sequence[tuple[Series, PrefillFit]], check: bool) -> TileFit:
    """One kernel's, on rows of heads that are not too wide."""
    parts = [(one.take(one.shape["head_dim"] <= WIDEST), fit) for one, fit in timed]

    def told(fit: PrefillFit, p: FloatArray) -> PrefillFit:
        tiles = TileFit.model_construct(
            exponentials=p[0], overlap=p[1], moved_width=p[2], cache_width=p[3], window_edge=p[4]
        )
        return fit.model_copy(update={"tiles": tiles})

    fitted, rows = _on_all(parts, prefill_seconds, told, BOUNDS, check)
    exponentials, overlap, moved, cached, edge = (digits(value) for value in fitted.parameters)
    return TileFit(
        exponentials=exponentials, overlap=overlap, moved_width=moved, cache_width=cached, window_edge=edge,
        quality=fitted.quality(rows),
    )  # fmt: skip


def _on_all(
    parts: Sequence[tuple[Series, Own]],
    seconds_of: Callable[[Series, Device], Seconds],
    told: Callable[[Own, FloatArray], Own],
    bounds: Bounds,
    check: bool,
) -> tuple[Fitted, str]:
    """Constants that series of several devices share, each beside its device's own, and the rows in words.

    Each device is left out in turn; of one alone, each batch.
    """
    series = [one for one, _ in parts]

    def beside(one: Series, fit: Own) -> Predict:
        seconds = seconds_of(one, load_device(one.device))
        return lambda p, rows: seconds(told(fit, p), rows)

    names = list(dict.fromkeys(one.device for one in series))
    keys = ("device",) if len(names) > 1 else ("batch",)
    fitted = fit_together(series, [beside(one, fit) for one, fit in parts], bounds, keys, check)
    return fitted, _rows_of(series)


def _rows_of(series: Sequence[Series]) -> str:
    """Timings of one kind, in words."""
    kernels, devices = (
        dict.fromkeys(names) for names in zip(*((one.kernel, one.device) for one in series), strict=True)
    )
    return f"{series[0].kind} of {', '.join(kernels)}, on {', '.join(devices)}"


def with_tiles(constants: DeviceCalibration, tiles: Mapping[tuple[str, str], TileFit]) -> DeviceCalibration:
    """Constants of a device with the tiles of its kernels; those of all kernels where nothing was timed of one."""
    every = tiles.get(("", ""))

    def of(fit: PrefillFit) -> TileFit:
        return tiles.get((SAME_KERNEL.get(fit.kernel, fit.kernel), fit.kv_dtype), every) or fit.tiles

    prefill = tuple(fit.model_copy(update={"tiles": of(fit)}) for fit in constants.prefill)
    return constants.model_copy(update={"prefill": prefill})


def with_kernels(constants: DeviceCalibration, series: Sequence[Series], *, check: bool = True) -> DeviceCalibration:
    """Constants of a device, and those of kernels over prompts that were timed on it in other heads than of 128 only.

    Their tiles are those of the device's first kernel, since heads of one width do not tell them.
    """
    device, first = load_device(constants.device), constants.prefill[0]
    others = [
        one
        for one in series
        if one.device == device.name
        and np.max(one.shape["head_dim"]) <= WIDEST
        and (len(np.unique(one.shape["head_dim"])) == 1 or own_fit(one, constants.prefill) is None)
    ]
    return added([fit_prefill(one, device, first, check=check) for one in others], constants) if others else constants


def with_windows(constants: DeviceCalibration, windows: Windows) -> DeviceCalibration:
    """Constants of a device with what is known of its kernels in windows, wherever they were timed.

    Not of A100, which runs FlashAttention-2 by another name: how many of a kernel's blocks its larger memory holds was
    not timed.
    """

    def of(fit: DecodeFit) -> DecodeFit:
        told = windows.get((fit.kernel, fit.kv_dtype))
        if told is None:
            return fit
        kind = {WindowFit: "window", RoundsFit: "rounds", Quality: "in_windows"}[type(told)]
        return fit.model_copy(update={kind: told})

    return constants.model_copy(update={"decode": tuple(map(of, constants.decode))})


def main(prompts: str, decodes: str, folder: str) -> None:
    """Write the tiles of all kernels of two tables, and kernels with one width, into the calibrations of a folder."""
    files = sorted(Path(folder).glob("*.yaml"))
    held = {path: load_device_calibration(path.stem, file=path) for path in files}
    series, own = read_series(Path(prompts)), {path.stem: one for path, one in held.items()}
    tiles, windows = fit_tiles(series, own), fit_windows(read_series(Path(decodes)), own)
    for path, one in held.items():
        if not one.told:
            write_atomic(path, calibration_text(with_windows(with_kernels(with_tiles(one, tiles), series), windows)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=main.__doc__)
    for name in ("prompts", "decodes", "folder"):
        parser.add_argument(name)
    main(**vars(parser.parse_args()))
