"""One fit per kind of kernel: the cost functions themselves, with trial constants, against a series of timings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from rlperf.calibrate.fitting import Bounds, Fitted, Predict, fit_with_left_out
from rlperf.calibrate.kernel_seconds import (
    Seconds,
    decode_seconds,
    dispatch_seconds,
    encoder_seconds,
    exchange_seconds,
    gemm_seconds,
    own_fit,
    prefill_seconds,
    stream_seconds,
    streams_seconds,
)
from rlperf.calibrate.kernel_tables import Series
from rlperf.cost.basis import UNTIMED
from rlperf.cost.collectives import bus_share, link_bytes_per_s, point_with
from rlperf.layout import BoolArray, FloatArray
from rlperf.specs.calibration import (
    CollectiveFit,
    CollectivePoint,
    DecodeFit,
    DeviceCalibration,
    DispatchFit,
    ExchangeFit,
    GemmFit,
    PrefillFit,
    Quality,
    Spread,
    StreamFit,
    StreamsFit,
)
from rlperf.specs.cluster import Device
from rlperf.specs.hardware import BEST_READ


@dataclass(frozen=True)
class KernelFit:
    """Fitted constants of one series and how good they are.

    Attributes
    ----------
    section : the field of `DeviceCalibration` that holds such constants
    seconds : what constants of that section say of the rows of a mask; None where a part of the rows has its own
    """

    section: str
    constants: Any
    fitted: Fitted
    series: Series
    seconds: Seconds | None = None


def run_fit(
    series: Series,
    build: Callable[[FloatArray], Any],
    seconds: Seconds,
    bounds: Bounds,
    keys: Sequence[str],
    check: bool,
) -> Fitted:
    shape = {name: series.shape[name] for name in keys}

    def predict(p: FloatArray, rows: BoolArray) -> FloatArray:
        return seconds(build(p), rows)

    return fit_with_left_out(predict, bounds, series.measured_s, shape, left_out=check)


def spans_of(series: Sequence[Series]) -> list[slice]:
    """Where the rows of each series stand among those of all."""
    ends = np.cumsum([0, *(len(one.measured_s) for one in series)]).tolist()
    return [slice(start, end) for start, end in pairwise(ends)]


def fit_together(
    series: Sequence[Series],
    seconds: Sequence[Predict],
    bounds: Bounds,
    keys: Sequence[str],
    check: bool,
    *,
    outliers: bool = False,
) -> Fitted:
    """What series of several devices share.

    Parameters
    ----------
    seconds : of each series, from parameters and a mask of its own rows
    keys : parts of the shape, or ``device``, of which each value is left out in turn
    outliers : see `rlperf.calibrate.fitting.fit_log`
    """
    spans = spans_of(series)
    names = list(dict.fromkeys(one.device for one in series))

    def column(name: str) -> FloatArray:
        if name == "device":
            return np.concatenate([np.full(len(one.measured_s), float(names.index(one.device))) for one in series])
        return np.concatenate([one.shape[name] for one in series])

    def predict(p: FloatArray, rows: BoolArray) -> FloatArray:
        return np.concatenate([second(p, rows[span]) for second, span in zip(seconds, spans, strict=True)])

    measured = np.concatenate([one.measured_s for one in series])
    told_by = {name: column(name) for name in keys}
    return fit_with_left_out(predict, bounds, measured, told_by, left_out=check, outliers=outliers)


def digits(value: float) -> float:
    """Four significant digits."""
    return float(f"{value:.4g}")


def microseconds(value: float) -> str:
    """Seconds as calibrations write them."""
    return f"{value * 1e6:.4g} us"


def interval_of(constants: Any) -> Spread:
    """Measured over predicted of fitted constants; of judged ones, and of none, as wide as is judged."""
    quality: Quality | None = getattr(constants, "quality", None)
    return quality.spread if quality else Spread(low=1.0 / UNTIMED, high=UNTIMED)


def rounded(names: Sequence[str], values: FloatArray, in_seconds: Sequence[str]) -> dict[str, Any]:
    """Fitted parameters by name as calibrations write them: four digits, times in microseconds."""
    return {
        name: (microseconds if name in in_seconds else digits)(value) for name, value in zip(names, values, strict=True)
    }


def fit_gemm(series: Series, device: Device, *, base_fixed: float | None, check: bool) -> KernelFit:
    """Matrix products of one dtype; what a quantising kernel takes above ``base_fixed`` is its quantising pass."""
    quantises = series.dtype in ("fp8", "fp8_block", "int8", "nvfp4") and base_fixed is not None

    def build(p: FloatArray) -> GemmFit:
        return GemmFit.model_construct(
            dtype=series.dtype, fixed=p[0], compute=p[1], memory=p[2], exponent=p[3], wave=p[4], reuse=p[5],
            split=p[6], cached=p[7], quantise_fixed=0.0, quantise_memory=p[8] if quantises else 0.0,
        )  # fmt: skip

    seconds = gemm_seconds(series, device)
    bounds = Bounds.of(
        (1e-7, 4e-6, 5e-5), (0.1, 0.75, 1.1), (0.1, 0.8, BEST_READ), (1.0, 3.0, 12.0), (0.01, 0.5, 1.0),
        (0.1, 30.0, 300.0), (1e-8, 1e-6, 2e-5), (1e-3, 0.05, 5.0), *([(0.05, 0.5, 3.0)] if quantises else []),
    )  # fmt: skip
    fitted = run_fit(series, build, seconds, bounds, ("n", "k"), check)
    p = fitted.parameters
    extra = max(p[0] - base_fixed, 0.0) if quantises and base_fixed is not None else 0.0
    constants = GemmFit.model_validate(
        {
            "dtype": series.dtype, "kernel": series.software, "fixed": microseconds(p[0] - extra),
            "compute": digits(p[1]),
            "memory": digits(p[2]), "exponent": digits(p[3]), "wave": digits(p[4]), "reuse": digits(p[5]),
            "split": microseconds(p[6]), "cached": digits(p[7]), "quantise_fixed": microseconds(extra),
            "quantise_memory": digits(p[8]) if quantises else 0.0, "quality": fitted.quality(series.name),
        }
    )  # fmt: skip
    return KernelFit("gemm", constants, fitted, series, seconds)


def fit_prefill(series: Series, device: Device, base: PrefillFit, *, check: bool) -> KernelFit:
    """Flash attention over whole prompts: constants of its backward and of its tiles are those of ``base``."""
    kept = {
        name: getattr(base, name) for name in ("tiles", "backward_flop", "backward_compute", "backward_ramp_tokens")
    }
    seconds = prefill_seconds(series, device)

    def build(p: FloatArray) -> PrefillFit:
        return PrefillFit.model_construct(
            kernel=series.kernel, kv_dtype=series.dtype, fixed=p[0], compute=p[1], memory=p[2], straggler=p[3],
            cache_memory=p[4], ramp_tokens=p[5], cache_exponent=p[6], **kept,
        )  # fmt: skip

    bounds = Bounds.of(
        (1e-7, 1e-5, 1e-4), (0.05, 0.6, 1.2), (0.02, 0.7, 3.0), (0.01, 0.5, 10.0), (0.005, 0.2, 3.0),
        (1.0, 100.0, 2000.0), (0.2, 0.7, 1.3),
    )  # fmt: skip
    fitted = run_fit(series, build, seconds, bounds, ("batch", "num_heads"), check)
    p = fitted.parameters
    constants = PrefillFit.model_validate(
        {
            "kernel": series.kernel, "kv_dtype": series.dtype, "fixed": microseconds(p[0]), "compute": digits(p[1]),
            "memory": digits(p[2]), "straggler": digits(p[3]), "cache_memory": digits(p[4]),
            "ramp_tokens": digits(p[5]), "cache_exponent": digits(p[6]),
            **kept,
            "quality": fitted.quality(series.name),
        }
    )  # fmt: skip
    return KernelFit("prefill", constants, fitted, series, seconds)


def fit_encoder(series: Series, device: Device, base: PrefillFit, *, check: bool) -> KernelFit:
    """A vision tower's attention, without a mask, in heads of one width; what queries and tiles move is ``base``'s."""
    width = int(series.shape["head_dim"][0])
    named = {"kernel": series.kernel, "kv_dtype": series.dtype, "width": width, "timed_on": None}
    seconds = encoder_seconds(series, device)

    def build(p: FloatArray) -> PrefillFit:
        return base.model_copy(update={**named, "fixed": p[0], "compute": p[1], "ramp_tokens": p[2]})

    bounds = Bounds.of((1e-7, 1e-5, 1e-4), (0.005, 0.5, 1.5), (1.0, 100.0, 2000.0))
    fitted = run_fit(series, build, seconds, bounds, ("batch", "num_heads"), check)
    fixed, compute, ramp = fitted.parameters
    constants = PrefillFit.model_validate(
        {**base.model_dump(), **named, "fixed": microseconds(fixed), "compute": digits(compute),
         "ramp_tokens": digits(ramp), "quality": fitted.quality(series.name)}
    )  # fmt: skip
    return KernelFit("encoder", constants, fitted, series, seconds)


def fit_decode(series: Series, device: Device, base: DeviceCalibration, *, check: bool) -> KernelFit:
    """Paged decode attention; what a kernel takes for windows is that of ``base``."""
    own = own_fit(series, base.decode)
    window = own.window if own else None
    seconds = decode_seconds(series, device)

    def build(p: FloatArray) -> DecodeFit:
        return DecodeFit.model_construct(
            kernel=series.kernel, kv_dtype=series.dtype, fixed=p[0], memory=p[1], per_pair=p[2], per_request=p[3],
            cached=p[4], per_head=p[5], long_fixed=p[6], window=window,
        )  # fmt: skip

    bounds = Bounds.of(
        (1e-8, 1e-5, 1e-4), (0.05, 0.8, BEST_READ), (1e-11, 1e-8, 1e-6), (1e-12, 1e-9, 1e-6), (1e-3, 0.5, 5.0),
        (1e-12, 1e-9, 1e-7), (1e-9, 1e-6, 3e-5),
    )  # fmt: skip
    fitted = run_fit(series, build, seconds, bounds, ("batch", "num_heads", "kv_len"), check)
    p = fitted.parameters
    constants = DecodeFit.model_validate(
        {
            "kernel": series.kernel, "kv_dtype": series.dtype, "fixed": microseconds(p[0]), "memory": digits(p[1]),
            "per_pair": microseconds(p[2]), "per_request": microseconds(p[3]), "cached": digits(p[4]),
            "per_head": microseconds(p[5]),
            "long_fixed": microseconds(p[6]), "window": window, "quality": fitted.quality(series.name),
        }
    )  # fmt: skip
    return KernelFit("decode", constants, fitted, series, seconds)


def fit_collective(all_series: Series, device: Device, *, check: bool) -> KernelFit:
    """One collective: constants for every group size; one message size left out in turn."""
    sizes, counts = all_series.shape["bytes"], all_series.shape["num_gpus"]
    x = sizes * bus_share(all_series.variant, counts)
    rate = link_bytes_per_s(device)
    points: list[CollectivePoint] = []
    predicted, left_out = np.full(len(x), np.nan), np.full(len(x), np.nan)

    def build(p: FloatArray, group: int) -> CollectivePoint:
        return CollectivePoint.model_construct(
            group=group, low_fixed=p[0], low_bandwidth=p[1], fixed=p[2], bandwidth=p[3], root=p[4]
        )

    for group in np.unique(counts):
        rows = counts == group
        mine = x[rows]

        def predict(p: FloatArray, r: BoolArray, mine: FloatArray = mine, group: int = int(group)) -> FloatArray:
            return point_with(build(p, group), mine[r], rate)

        bounds = Bounds.of(
            (1e-6, 1e-5, 3e-3), (1e-4, 0.1, 1.2), (1e-6, 2e-5, 3e-3), (3e-3, 0.75, 1.3), (1e-14, 1e-9, 1e-6)
        )
        one = fit_with_left_out(predict, bounds, all_series.measured_s[rows], {"bytes": sizes[rows]}, left_out=check)
        p = one.parameters
        predicted[rows] = one.predicted
        left_out[rows] = one.left_out.get("bytes", one.predicted)
        points.append(
            CollectivePoint.model_validate(
                {
                    "group": int(group), "low_fixed": microseconds(p[0]), "low_bandwidth": digits(p[1]),
                    "fixed": microseconds(p[2]),
                    "bandwidth": digits(p[3]), "root": digits(p[4]),
                }
            )
        )  # fmt: skip
    fitted = Fitted(np.empty(0), predicted, {"bytes": left_out} if check else {}, all_series.measured_s)
    constants = CollectiveFit(
        collective=all_series.variant, implementation=all_series.kernel, points=tuple(points),
        quality=fitted.quality(all_series.name),
    )  # fmt: skip
    return KernelFit("collectives", constants, fitted, all_series)


TOLD_BY_EXPERTS = 1.4
"""Least factor between the expert counts of timings that tell what an expert takes."""
FEWEST_EXPERTS = 64.0
"""Of fewer a kernel's blocks, one for each expert, do not fill the device: 8 and 16 take up to four times as long, and
are left out of fits (nobody is known to serve them behind DeepEP)."""


def fit_dispatch(every: Series, device: Device, per_node: int, *, check: bool) -> KernelFit:
    """Expert dispatch or combine over one number of nodes: t = fixed + experts c + bytes / rate."""
    series = every.take(every.shape["num_experts"] >= FEWEST_EXPERTS)
    group = int(series.shape["node_num"][0]) * per_node
    experts = series.shape["num_experts"]
    counted = experts.max() >= TOLD_BY_EXPERTS * experts.min()
    named: dict[str, Any] = {
        "kernel": series.kernel, "operation": series.variant.split("@")[0], "group": group, "within": per_node,
    }  # fmt: skip

    def build(p: FloatArray) -> DispatchFit:
        each = float(p[2]) if counted else 0.0
        return DispatchFit.model_construct(**named, fixed=p[0], rate=p[1], per_expert=each)

    bounds = Bounds.of((1e-6, 2e-5, 1e-3), (1e-3, 0.3, 3.0), *([(1e-10, 2e-8, 1e-6)] if counted else []))
    keys = ("num_token", "num_experts") if counted else ("num_token",)
    fitted = run_fit(series, build, dispatch_seconds(series, device, per_node), bounds, keys, check)
    p = fitted.parameters
    constants = DispatchFit.model_validate(
        {
            **named, "fixed": microseconds(p[0]), "rate": digits(p[1]),
            "per_expert": microseconds(p[2] if counted else 0.0), "quality": fitted.quality(series.name),
        }
    )  # fmt: skip
    return KernelFit("dispatch", constants, fitted, series)


def fit_exchange(series: Series, device: Device, *, check: bool) -> KernelFit:
    """An engine's own dispatch or combine in one domain, all sizes of the group at once."""
    named: dict[str, Any] = {"kernel": series.kernel, "operation": series.variant}
    names = ("fixed", "per_doubling", "rate")

    def build(p: FloatArray) -> ExchangeFit:
        return ExchangeFit.model_construct(**named, **dict(zip(names, p, strict=True)))

    bounds = Bounds.of((1e-6, 1e-5, 1e-3), (1e-8, 2e-6, 1e-4), (0.01, 0.7, 1.5))
    fitted = run_fit(series, build, exchange_seconds(series, device), bounds, ("ep_size", "num_tokens"), check)
    found = rounded(names, fitted.parameters, names[:2])
    constants = ExchangeFit.model_validate({**named, **found, "quality": fitted.quality(series.name)})
    return KernelFit("exchange", constants, fitted, series)


def fit_streams(series: Series, device: Device, *, check: bool) -> KernelFit:
    """Hyper-connections of one engine: kernels in front of a half of a layer, and the one behind it."""
    seconds = streams_seconds(series, device)

    def build(p: FloatArray) -> StreamsFit:
        return StreamsFit.model_construct(
            kernel=series.kernel, before=p[0], behind=p[1], memory=p[2], cached=p[3], product=p[4]
        )

    bounds = Bounds.of(
        (1e-7, 8e-6, 1e-4), (1e-7, 3e-6, 1e-4), (0.05, 0.8, BEST_READ), (1e-3, 0.3, 15.0), (1e-3, 0.1, 30.0)
    )
    fitted = run_fit(series, build, seconds, bounds, ("num_tokens", "hidden_size"), check)
    p = fitted.parameters
    constants = StreamsFit.model_validate(
        {"kernel": series.kernel, "before": microseconds(p[0]), "behind": microseconds(p[1]), "memory": digits(p[2]),
         "cached": digits(p[3]), "product": digits(p[4]), "quality": fitted.quality(series.name)}
    )  # fmt: skip
    return KernelFit("streams", constants, fitted, series, seconds)


def fit_stream(series: Series, device: Device, base: StreamFit, *, check: bool) -> KernelFit:
    """Large memory-bound passes: t = fixed + bytes / (W e); what small operators reach is that of ``base``."""
    seconds = stream_seconds(series, device)

    def build(p: FloatArray) -> StreamFit:
        return base.model_copy(update={"small_fixed": p[0], "stream_memory": p[1]})

    fitted = run_fit(series, build, seconds, Bounds.of((1e-7, 2e-6, 1e-4), (0.05, 0.85, 1.5)), ("n_bytes",), check)
    constants = base.model_copy(
        update={
            "small_fixed": float(fitted.parameters[0]),
            "stream_memory": digits(fitted.parameters[1]),
            "quality": fitted.quality(series.name),
        }
    )
    return KernelFit("stream", constants, fitted, series)
