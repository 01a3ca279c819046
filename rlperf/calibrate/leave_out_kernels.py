"""Kernel timings by constants that did not see them: without their device, or without one value of their shape.

Without its device: by the constants that it would borrow; what is left out is all of its own calibration, products and
small passes inside a module's timing included. The other side is a fit of the device's own rows without one value of
their shape in turn (few rows: of all). Without one value of their shape: every series of the file is fitted anew
without each n, k, batch, head count, message size ... in turn. The other side is the fit of all its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlperf.calibrate.attention_tiles import fit_tiles, fit_windows, with_tiles, with_windows
from rlperf.calibrate.kernel_fits import KernelFit, interval_of
from rlperf.calibrate.kernel_tables import Series, read_series
from rlperf.calibrate.kernels import fit_series
from rlperf.calibrate.leave_out import LeftOutGroup, in_turn
from rlperf.calibrate.shared_experts import fit_shared, with_shared
from rlperf.calibrate.tables import Table
from rlperf.calibrate.validate import PredictedFigure
from rlperf.cost.sparse import sparse_fit
from rlperf.cost.streams import streams_fit
from rlperf.errors import SpecError
from rlperf.layout import FloatArray
from rlperf.specs.calibration import DeviceCalibration, load_device_calibration
from rlperf.specs.cluster import Device
from rlperf.specs.hardware import Hardware, lent_by, load_hardware, timed_relative
from rlperf.specs.profiles import load_device
from rlperf.told import Tell

_TOLD_BY = ("dtype", "kv_dtype", "width", "mixer", "phase")
"""What constants of another kernel must share to stand in; those of an engine's own kernel go first."""


def predict_groups(path: Path, table: Table, by: str, tell: Tell) -> list[LeftOutGroup]:
    """One group a device, or a series and a part of its shape.

    Of devices those that have constants of their own and a relative; collectives and plain passes have no stand-in.

    Raises
    ------
    SpecError : other groups than devices and shapes
    """
    if by not in ("device", "shape"):
        raise SpecError(f"timings of kernels are told apart by device or by shape, not by {by}")
    series = read_series(path)
    if by == "shape":
        names = list(dict.fromkeys(one.device for one in series if known_device(one.device)))
        return [group for name in in_turn(names, tell) for group in _shapes(name, series)]
    names = [name for name in dict.fromkeys(one.device for one in series) if _relative(name)]
    return [_group(load_device(name), series) for name in in_turn(names, tell)]


def known_device(name: str) -> bool:
    """Whether there is a profile of a device."""
    try:
        load_device(name)
    except SpecError:
        return False
    return True


def _shapes(name: str, series: Sequence[Series]) -> list[LeftOutGroup]:
    """Every series of a device fitted without each value of each part of its shape."""
    device = load_device(name)
    base = load_device_calibration(name, relative=timed_relative(device) or "h100_sxm")
    groups = []
    for fit in fit_series([one for one in series if one.device == name], device, base):
        for key, predicted in fit.fitted.left_out.items():
            rows = np.isfinite(predicted)
            seen, left = (_figures(fit, side[rows], rows, fit.constants) for side in (fit.fitted.predicted, predicted))
            named = f"{fit.series.name} without one {key}"
            groups.append(LeftOutGroup(named, int(rows.sum()), tuple(seen), tuple(left)))
    return groups


def _relative(name: str) -> str | None:
    """The relative of a device with a calibration of its own; None: none, or no profile."""
    return load_device(name).relative if _own_constants(name) is not None else None


def _own_constants(name: str) -> DeviceCalibration | None:
    """The calibration of a device that has one, and a relative."""
    device = load_device(name) if known_device(name) else None
    own = load_device_calibration(name, relative=timed_relative(device)) if device and device.relative else None
    return own if own is not None and own.device == name else None


def _group(device: Device, series: Sequence[Series]) -> LeftOutGroup:
    mine = [one for one in series if one.device == device.name]
    own, stranger = load_device_calibration(device.name), strangers_constants(device)
    stranger = _as_others_tell(stranger, [one for one in series if one.device != device.name])
    seen: list[PredictedFigure] = []
    left: list[PredictedFigure] = []
    hw, borrowed = replace(load_hardware(device.name), calibration=stranger), set()
    without = {fit.series.name: fit for fit in fit_series(mine, device, stranger, check=False)}
    for fit in fit_series(mine, device, own):
        again, lent = without[fit.series.name], stand_in(fit, hw)
        if again.seconds is None or lent is None:
            continue
        known = next(iter(fit.fitted.left_out.values()), fit.fitted.predicted)
        rows = np.isfinite(known)
        seen += _figures(fit, known[rows], rows, fit.constants)
        left += _figures(fit, again.seconds(lent, rows), rows, lent)
        borrowed.add(getattr(lent, "timed_on", None) or device.relative or "")
    return LeftOutGroup(device.name, len(seen), tuple(seen), tuple(left), ", ".join(sorted(borrowed)))


def _as_others_tell(stranger: DeviceCalibration, series: Sequence[Series]) -> DeviceCalibration:
    """What devices share as timings of other ones tell it: what is shipped was told with the one left out, too."""
    stranger = with_shared(stranger, fit_shared(series, check=False))
    constants = {name: one for name in {one.device for one in series} if (one := _own_constants(name)) is not None}
    if any(one.kind == "decode" for one in series):
        stranger = with_windows(stranger, fit_windows(series, constants, check=False))
    return with_tiles(stranger, fit_tiles(series, constants, check=False))


def strangers_constants(device: Device) -> DeviceCalibration:
    """What a device would run on without timings of its own."""
    related = load_device(timed_relative(device) or device.name)
    return lent_by(load_device_calibration(related.name).borrowed_by(device.name), related, device)


def stand_in(fit: KernelFit, hw: Hardware) -> Any:
    """Constants that stand in for a series' own on hardware without it; None where there is nothing of its kind."""
    own, section = fit.constants, fit.section
    held = getattr(hw.calibration, section)
    if section == "stream" or fit.seconds is None:
        return None
    if section == "streams":
        return streams_fit(hw, own.kernel)
    found = [one for one in held if all(getattr(one, name, "") == getattr(own, name, "") for name in _TOLD_BY)]
    if found:
        return next((one for one in found if one.kernel == own.kernel), found[0])
    return sparse_fit(hw, own.mixer, own.phase, own.kernel) if section == "sparse" else None


def _figures(fit: KernelFit, seconds: FloatArray, rows: np.ndarray, constants: Any) -> list[PredictedFigure]:
    spread = interval_of(constants)
    what = " ".join(
        part for part in (fit.section, *(getattr(constants, name, "") for name in ("mixer", "phase"))) if part
    )
    return [
        PredictedFigure(
            row_id=fit.series.row_ids[index],
            group=fit.series.device,
            metric=f"{what}_us",
            measured=1e6 * float(fit.series.measured_s[index]),
            predicted=1e6 * float(value),
            low=1e6 * float(value) * spread.low,
            high=1e6 * float(value) * spread.high,
            stratum=fit.series.kernel,
        )
        for index, value in zip(np.flatnonzero(rows), seconds, strict=True)
    ]
