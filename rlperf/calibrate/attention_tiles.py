"""Widths of heads and edges of windows in attention over prompts: told of a kernel on all its devices together.

``python -m rlperf.calibrate.attention_tiles TABLE OUT`` reads timings of heads of 64 to 256 and of windows
(``attn_prefill_window.csv``), tells each kernel's `TileFit` beside every device's own constants for heads of 128, and
writes it into the calibrations of OUT that hold the kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rlperf.calibrate.fitting import Bounds, fit_with_left_out
from rlperf.calibrate.kernel_fits import digits, fit_prefill, prefill_seconds
from rlperf.calibrate.kernel_tables import Series, read_series
from rlperf.calibrate.kernels import added, calibration_text
from rlperf.layout import BoolArray, FloatArray
from rlperf.specs.calibration import DeviceCalibration, PrefillFit, TileFit, load_device_calibration
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
        if (fit := own_fit(one, constants.get(one.device))) is not None and len(np.unique(one.shape["head_dim"])) > 1
    ]
    found = {}
    for kernel in dict.fromkeys((one.kernel, one.dtype) for one, _ in timed):
        found[kernel] = _fit([each for each in timed if (each[0].kernel, each[0].dtype) == kernel], check)
    return found | ({("", ""): _fit(timed, check)} if timed else {})


def own_fit(series: Series, constants: DeviceCalibration | None) -> PrefillFit | None:
    """A device's constants of the very kernel of a series."""
    own = constants.prefill if constants and series.kind == "prefill" else ()
    return next((fit for fit in own if (fit.kernel, fit.kv_dtype) == (series.kernel, series.dtype)), None)


def _fit(timed: Sequence[tuple[Series, PrefillFit]], check: bool) -> TileFit:
    """One kernel's, on rows of heads that are not too wide."""
    parts = [(one.take(one.shape["head_dim"] <= WIDEST), fit) for one, fit in timed]
    ends = np.cumsum([0, *(len(one.measured_s) for one, _ in parts)])
    seconds = [prefill_seconds(one, load_device(one.device)) for one, _ in parts]
    measured = np.concatenate([one.measured_s for one, _ in parts])
    names = list(dict.fromkeys(one.device for one, _ in parts))
    device = np.concatenate([np.full(len(one.measured_s), float(names.index(one.device))) for one, _ in parts])
    batch = np.concatenate([one.shape["batch"] for one, _ in parts])

    def predict(p: FloatArray, rows: BoolArray) -> FloatArray:
        tiles = TileFit.model_construct(
            exponentials=p[0], overlap=p[1], moved_width=p[2], cache_width=p[3], window_edge=p[4]
        )
        told = []
        for (_, fit), second, start, end in zip(parts, seconds, ends, ends[1:], strict=False):
            told.append(second(fit.model_copy(update={"tiles": tiles}), rows[start:end]))
        return np.concatenate(told)

    keys = {"device": device} if len(names) > 1 else {"batch": batch}
    fitted = fit_with_left_out(predict, BOUNDS, measured, keys, left_out=check)
    exponentials, overlap, moved, cached, edge = (digits(value) for value in fitted.parameters)
    rows = f"prefill of {', '.join(dict.fromkeys(one.kernel for one, _ in parts))}, on {', '.join(names)}"
    return TileFit(
        exponentials=exponentials, overlap=overlap, moved_width=moved, cache_width=cached, window_edge=edge,
        quality=fitted.quality(rows),
    )  # fmt: skip


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
        and (len(np.unique(one.shape["head_dim"])) == 1 or own_fit(one, constants) is None)
    ]
    return added([fit_prefill(one, device, first, check=check) for one in others], constants) if others else constants


def main(table: str, folder: str) -> None:
    """Write the tiles of all kernels of a table, and kernels with one width, into the calibrations of a folder."""
    files = sorted(Path(folder).glob("*.yaml"))
    held = {path: load_device_calibration(path.stem, file=path) for path in files}
    series = read_series(Path(table))
    tiles = fit_tiles(series, {path.stem: one for path, one in held.items()})
    for path, one in held.items():
        if not one.told:
            write_atomic(path, calibration_text(with_kernels(with_tiles(one, tiles), series)))


if __name__ == "__main__":
    main(*sys.argv[1:])
