"""Expert kernels whose timings are in part an autotuner's odd picks: told of alike devices together.

``python -m rlperf.calibrate.shared_experts TIMINGS FOLDER`` reads timings of expert kernels
(``moe_lowbit_nongated.csv``), tells those of `BENT` once for all devices of a compute capability that timed them, in
shares of their data sheets, and writes them into the calibrations of FOLDER that hold the kernel.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlperf.calibrate.expert_fits import (
    as_written,
    bounds_of,
    expert_constants,
    fit_skew,
    group_limited,
    with_single_tokens,
)
from rlperf.calibrate.fitting import Fitted, Predict
from rlperf.calibrate.kernel_fits import fit_together, spans_of
from rlperf.calibrate.kernel_seconds import evenly, expert_seconds
from rlperf.calibrate.kernel_tables import Series, read_series
from rlperf.calibrate.kernels import calibration_text, merged
from rlperf.layout import FloatArray
from rlperf.specs.calibration import DeviceCalibration, MoeFit, load_device_calibration
from rlperf.specs.hardware import capability
from rlperf.specs.profiles import load_device
from rlperf.specs.writer import write_atomic

BENT = ("w4a8_mxfp4",)
"""Dtypes whose kernels were timed with odd picks, other ones on each device: 1,024 tokens take an eighth of gpt-oss's
experts 232 us on a B200 and 77 on a GB200. A device's 24 to 41 timings alone do not tell them from the rest."""

Key = tuple[str, str, str]
"""Device, kernel, dtype."""


def fit_shared(series: Sequence[Series], *, check: bool = True) -> dict[Key, MoeFit]:
    """Constants of every device and kernel of `BENT` that was timed on more than one of a compute capability."""
    timed: dict[tuple[str, ...], list[Series]] = {}
    for one in merged([one for one in series if one.kind == "moe" and one.dtype in BENT]):
        timed.setdefault((capability(load_device(one.device)), one.kernel, one.dtype, one.variant), []).append(one)
    found: dict[Key, MoeFit] = {}
    for (runs, kernel, dtype, variant), balanced in timed.items():
        if variant == "balanced" and len({one.device for one in balanced}) > 1:
            skewed = timed.get((runs, kernel, dtype, "power_law_1.2"), [])
            found |= _of_all(balanced, {one.device: one for one in skewed}, check)
    return found


def with_shared(constants: DeviceCalibration, shared: Mapping[Key, MoeFit]) -> DeviceCalibration:
    """Constants of a device with those of its generation where it holds the kernel, timed there or lent by another."""
    moe = tuple(
        told.model_copy(update={"timed_on": fit.timed_on})
        if (told := shared.get((fit.timed_on or constants.device, fit.kernel, fit.dtype)))
        else fit
        for fit in constants.moe
    )
    return constants.model_copy(update={"moe": moe})


def _of_all(series: Sequence[Series], skewed: Mapping[str, Series], check: bool) -> dict[Key, MoeFit]:
    """One kernel's constants by device: alike but for uneven routing, and with each device's errors."""
    kernel, dtype = series[0].kernel, series[0].dtype
    parts = [group_limited(with_single_tokens(one, skewed.get(one.device))) for one in series]
    kept = [one for one, _ in parts]

    def build(p: FloatArray) -> MoeFit:
        return expert_constants(kernel, dtype, p, wide=False)

    def seconds(one: Series, touched_share: FloatArray) -> Predict:
        by = expert_seconds(one, load_device(one.device), evenly(one, touched_share))
        return lambda p, r: by(build(p), r)

    keys = ("num_tokens", "moe_ep_size", "device")
    by_device = [seconds(one, share) for one, share in parts]
    fitted = fit_together(kept, by_device, bounds_of(kernel, False), keys, check, outliers=True)
    told, names = build(fitted.parameters), ", ".join(one.device for one in kept)
    return {
        (one.device, kernel, dtype): as_written(
            told,
            fit_skew(told, skewed[one.device], load_device(one.device)) if one.device in skewed else (0.0, 1.0),
            _of_rows(fitted, span).quality(f"{one.name}, fitted with {names}"),
        )
        for one, span in zip(kept, spans_of(kept), strict=True)
    }


def _of_rows(fitted: Fitted, rows: slice) -> Fitted:
    """The part of a fit's errors that a device's rows have."""
    left_out = {name: values[rows] for name, values in fitted.left_out.items()}
    return replace(fitted, predicted=fitted.predicted[rows], left_out=left_out, measured=fitted.measured[rows])


def main(timings: str, folder: str) -> None:
    """Write expert kernels that devices of a generation share into the calibrations of a folder."""
    shared = fit_shared(read_series(Path(timings)))
    for path in sorted(Path(folder).glob("*.yaml")):
        held = load_device_calibration(path.stem, file=path)
        told = with_shared(held, shared)
        if not held.told and told != held:
            write_atomic(path, calibration_text(told))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=main.__doc__)
    for name in ("timings", "folder"):
        parser.add_argument(name)
    main(**vars(parser.parse_args()))
