"""A device's constants from served rows, where nobody has published timings of its kernels.

Times per output token of several models, layouts, batch sizes and prompt lengths tell a device's rates and fixed times
apart: weights read once a step, products of prompts, attention over the cache, all-reduces that come with every device
more. They do not tell everything apart, so each constant starts at what is published or known of the kind of kernel and
is pulled back to it by how sure that is: least squares with a normal prior on the logarithm. Constants that the rows do
not speak of stay where they started, and the file says so.

The engine's overheads are the shipped ones: a device has no scheduler of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date

import numpy as np

from rlperf.calibrate.serving.engines import SPLIT, measured_of, split_of
from rlperf.calibrate.serving.rows import CostTable, case_of, check, serve
from rlperf.calibrate.serving.stack import Measured
from rlperf.calibrate.statistics import absolute_percentage_errors, spread_of
from rlperf.calibrate.tables import Table
from rlperf.errors import SpecError
from rlperf.layout import FloatArray
from rlperf.specs.calibration import (
    CollectiveFit,
    CollectivePoint,
    DecodeFit,
    DeviceCalibration,
    GemmFit,
    MoeFit,
    PrefillFit,
    Quality,
    Spread,
    load_device_calibration,
)
from rlperf.specs.cluster import Device
from rlperf.specs.hardware import timed_relative
from rlperf.specs.profiles import load_device

NOISE = 0.06
"""Scatter of served rows around any model, in the logarithm: the same load, served by another release."""
TOLD = 0.8
"""A constant is told by the rows where they narrow its prior to less than this share."""
LEAST = 24
"""Rows that a device needs at least."""


@dataclass(frozen=True)
class DeviceKnob:
    """A constant: where it starts, its bounds, and how sure the start is (standard deviation of its logarithm)."""

    start: float
    low: float
    high: float
    doubt: float
    said: str


# Bounds of memory are below 0.95 of the data sheet. Starts: middle of the devices with timed kernels, unless said.
KNOBS: dict[str, DeviceKnob] = {
    "gemm_fixed": DeviceKnob(5e-6, 1e-6, 3e-5, 0.6, "fixed time of a product [s]"),
    "quantise_fixed": DeviceKnob(3e-6, 2e-7, 3e-5, 0.7, "added to a product in fewer than 16 bits [s]"),
    "attention_fixed": DeviceKnob(12e-6, 4e-6, 5e-5, 0.5, "fixed time of attention [s]"),
    "small_fixed": DeviceKnob(3e-6, 1e-6, 2e-5, 0.5, "a norm, rotation or activation [s]"),
    "memory": DeviceKnob(0.75, 0.5, 0.92, 0.1, "products over the data sheet's bandwidth"),
    "fp8": DeviceKnob(0.5, 0.15, 0.8, 0.25, "products in fp8 over their peak"),
    "fp4": DeviceKnob(0.4, 0.1, 0.7, 0.3, "products in four bits over their peak"),
    "prefill": DeviceKnob(0.4, 0.1, 0.7, 0.3, "attention over prompts over the 16-bit peak"),
    "decode_memory": DeviceKnob(0.7, 0.3, 0.92, 0.1, "attention over the cache over the data sheet's bandwidth"),
    "decode_pair": DeviceKnob(5e-9, 1e-11, 1e-7, 1.0, "attention per request and key/value head [s]"),
    "expert_fixed_8": DeviceKnob(5e-5, 1e-5, 4e-4, 0.6, "fixed time of the experts of a layer, fp8 [s]"),
    "expert_fixed_4": DeviceKnob(5e-5, 1e-5, 4e-4, 0.6, "the same in four bits [s]"),
    "expert_8": DeviceKnob(0.35, 0.05, 0.8, 0.4, "experts in fp8 over their peak"),
    "expert_4": DeviceKnob(0.25, 0.03, 0.7, 0.4, "experts in four bits over their peak"),
    "expert_memory": DeviceKnob(0.7, 0.3, 0.92, 0.2, "weights of experts over the data sheet's bandwidth"),
    "expert_pair": DeviceKnob(3e-9, 1e-11, 2e-7, 1.2, "permutation per token and expert [s]"),
    "expert_token": DeviceKnob(10.0, 0.1, 100.0, 0.7, "traffic of a token around experts [bytes per hidden value]"),
    "reduce_fixed": DeviceKnob(12e-6, 4e-6, 6e-5, 0.5, "latency of an engine's all-reduce over four devices [s]"),
    "reduce_bandwidth": DeviceKnob(0.75, 0.3, 3.0, 0.05, "its rate over that of the links (published: RCCL's)"),
}

FOUR_BITS = "w4a4_mxfp4"
LATENCY = {2: 0.85, 4: 1.0, 8: 1.2}
"""All-reduce latency by group over that of four: half a step more for each doubling of the peers to wait for."""
LIBRARY = {2: (15e-6, 0.745), 4: (18e-6, 0.72), 8: (20e-6, 0.70)}
"""The vendor's collective library: latency [s], judgement, and share of the links' rate, published for MI300X as 47.7
of 64 GB/s (2 devices) and 312.9 of 448 GB/s (8) at 4 GiB: stas00/ml-engineering@744d01e network README."""
COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "point_to_point")


@dataclass(frozen=True)
class ServedFit:
    """A device told from served rows: its calibration, and which constants the rows narrowed (share of the prior)."""

    calibration: DeviceCalibration
    values: dict[str, float]
    narrowed: dict[str, float]
    rows: int
    in_sample_mape: float
    left_out_mape: float


def constants_of(values: FloatArray, device: Device, base: DeviceCalibration) -> DeviceCalibration:
    """A calibration with the knobs at ``values`` (in their order); the rest is ``base``'s: host, backward, scans.

    16-bit products run at the published rate where the device's file states one.
    """
    v = dict(zip(KNOBS, (float(value) for value in values), strict=True))
    attained = device.attained.bf16 if device.attained else None
    bf16 = round(attained / device.peaks.bf16, 4) if attained and device.peaks.bf16 else v["fp8"]
    gemm = (
        _gemm("bf16", v, bf16, 0.0),
        *(_gemm(dtype, v, v["fp8"], v["quantise_fixed"]) for dtype in ("fp8", "fp8_block")),
        _gemm(FOUR_BITS, v, v["fp4"], v["quantise_fixed"]),
    )
    moe = (
        _experts("bf16", v, round(bf16 * v["expert_8"] / v["fp8"], 4), v["expert_fixed_8"]),
        *(_experts(dtype, v, v["expert_8"], v["expert_fixed_8"]) for dtype in ("fp8", "fp8_block")),
        _experts(FOUR_BITS, v, v["expert_4"], v["expert_fixed_4"]),
    )
    return base.model_copy(
        update={
            "device": device.name,
            "gemm": gemm,
            "prefill": tuple(_prefill(dtype, v, base.prefill[0]) for dtype in ("bf16", "fp8")),
            "decode": tuple(_decode(dtype, v) for dtype in ("bf16", "fp8")),
            "moe": moe,
            "collectives": _collectives(v),
            "dispatch": (),
            "scan": (),
            "stream": base.stream.model_copy(update={"small_fixed": v["small_fixed"], "small_memory": 0.4}),
            "extrapolated_from": None,
        }
    )


def _gemm(dtype: str, v: dict[str, float], compute: float, extra: float) -> GemmFit:
    """Waves, reuse and splitting as the middle of devices with timed kernels."""
    return GemmFit.model_construct(
        dtype=dtype, kernel="served", fixed=v["gemm_fixed"] + extra, compute=compute, memory=v["memory"], exponent=3.0,
        wave=0.6, reuse=60.0, split=3e-6, cached=0.0, quantise_fixed=0.0, quantise_memory=0.5 if extra else 0.0,
        quality=Quality(),
    )  # fmt: skip


def _prefill(dtype: str, v: dict[str, float], base: PrefillFit) -> PrefillFit:
    return base.model_copy(
        update={
            "kernel": "served", "kv_dtype": dtype, "fixed": v["attention_fixed"], "compute": v["prefill"],
            "memory": 0.5, "ramp_tokens": 300.0, "straggler": 0.7, "cache_memory": 0.2, "quality": Quality(),
        }
    )  # fmt: skip


def _decode(dtype: str, v: dict[str, float]) -> DecodeFit:
    return DecodeFit.model_construct(
        kernel="served", kv_dtype=dtype, fixed=v["attention_fixed"], long_fixed=3e-6, memory=v["decode_memory"],
        per_pair=v["decode_pair"], per_head=0.0, per_request=0.0, cached=0.0, quality=Quality(),
    )  # fmt: skip


def _experts(dtype: str, v: dict[str, float], compute: float, fixed: float) -> MoeFit:
    return MoeFit.model_construct(
        kernel="served", dtype=dtype, fixed=fixed, compute=compute, memory=v["expert_memory"], activation_memory=0.6,
        per_pair=v["expert_pair"], per_expert=0.0, per_held_expert=0.0, per_doubling=0.0,
        token_bytes=v["expert_token"], exponent=2.0, skew_exponent=0.0, skew_touched=1.0, quality=Quality(),
    )  # fmt: skip


def _collectives(v: dict[str, float]) -> tuple[CollectiveFit, ...]:
    library = tuple(_point(group, *numbers) for group, numbers in LIBRARY.items())
    own = tuple(_point(group, round(v["reduce_fixed"] * of, 9), v["reduce_bandwidth"]) for group, of in LATENCY.items())

    def fit(name: str, implementation: str, points: tuple[CollectivePoint, ...]) -> CollectiveFit:
        return CollectiveFit.model_construct(
            collective=name, implementation=implementation, points=points, quality=Quality()
        )

    return (*(fit(name, "nccl", library) for name in COLLECTIVES), fit("all_reduce", "custom", own))


def _point(group: int, fixed: float, bandwidth: float) -> CollectivePoint:
    return CollectivePoint.model_construct(
        group=group, low_fixed=fixed, low_bandwidth=bandwidth, fixed=fixed, bandwidth=bandwidth, root=0.0
    )


def fit_served_device(table: Table, name: str, *, check: bool, today: str | None = None) -> ServedFit:
    """Fit a device to the rows of the table that fall into the engines' calibration split (`SPLIT`).

    Parameters
    ----------
    check : also leave one architecture out in turn, for the error and the interval (slower)
    """
    device = load_device(name)
    related = timed_relative(device)
    if related is None:
        raise SpecError(f"{name} has no relative, whose host and backward constants stand where rows do not speak")
    base = load_device_calibration(related).borrowed_by(device.name)
    rows = _split(table, device, base)
    if len(rows) < LEAST:
        raise SpecError(f"only {len(rows)} rows of {name} fall into the calibration split, {LEAST} are needed")
    values, narrowed = _fit(rows, device, base)
    truth = _truth(rows)
    inside = _predicted(rows, constants_of(values, device, base))
    left = inside.copy()
    models = np.asarray([case.arch.name for case, _, _ in rows])
    for model in np.unique(models) if check else ():
        kept = [one for one, other in zip(rows, models == model, strict=True) if not other]
        without, _ = _fit(kept, device, base)
        left[models == model] = _predicted(rows, constants_of(without, device, base))[models == model]
    fit = ServedFit(
        base, dict(zip(KNOBS, values.tolist(), strict=True)), dict(zip(KNOBS, narrowed.tolist(), strict=True)),
        len(rows), float(absolute_percentage_errors(inside, truth).mean()),
        float(absolute_percentage_errors(left, truth).mean()),
    )  # fmt: skip
    day = today or date.today().isoformat()
    calibration = _described(fit, rows, constants_of(values, device, base), spread_of(left, truth), day)
    return replace(fit, calibration=calibration)


def _split(table: Table, device: Device, base: DeviceCalibration) -> list[Measured]:
    """Rows of a device in the split of every engine, as cases on constants that no row has shaped."""
    costs = CostTable()
    by_engine: dict[str, list[Measured]] = {}
    for row in table:
        if row.text("gpu") not in (device.name, *device.aliases):
            continue
        try:
            case = case_of(row, constants={device.name: base})
            check(case, costs)
        except SpecError:
            continue
        by_engine.setdefault(case.engine.id, []).extend(measured_of(case))
    return [one for rows in by_engine.values() for one in split_of(rows)]


def _truth(rows: Sequence[Measured]) -> FloatArray:
    return np.asarray([value if metric == "tpot_ms" else 1.0 / value for _, metric, value in rows])


def _predicted(rows: Sequence[Measured], constants: DeviceCalibration) -> FloatArray:
    """Milliseconds per token, or inverse throughput where that is the metric, of every row."""
    costs = CostTable()
    found = []
    for case, metric, _ in rows:
        seen = serve(replace(case, hardware=replace(case.hardware, calibration=constants)), costs)
        rate = case.devices / float(seen.output_tokens_per_s)
        found.append(float(seen.tpot_s) * 1e3 if metric == "tpot_ms" else rate)
    return np.asarray(found)


def _fit(rows: Sequence[Measured], device: Device, base: DeviceCalibration) -> tuple[FloatArray, FloatArray]:
    """Knobs, and the share of their prior's width that the rows leave.

    Minimises the sum over rows of soft |ln(predicted / measured)| / `NOISE`, every configuration of equal weight, plus
    that over knobs of (ln(knob / start) / doubt)^2.
    """
    from scipy.optimize import least_squares

    knobs = list(KNOBS.values())
    start, low, high, doubt = (
        np.asarray([getattr(knob, name) for knob in knobs]) for name in ("start", "low", "high", "doubt")
    )
    truth = np.log(_truth(rows))
    names = [case.configuration for case, _, _ in rows]
    weight = np.asarray([1.0 / names.count(name) for name in names])
    weight = np.sqrt(weight / weight.mean()) / NOISE

    def residuals(z: FloatArray) -> FloatArray:
        misses = weight * (np.log(_predicted(rows, constants_of(np.exp(z), device, base))) - truth)
        soft = np.sign(misses) * np.sqrt(2.0 * (np.sqrt(1.0 + misses**2) - 1.0))
        return np.concatenate([soft, (z - np.log(start)) / doubt])

    result = least_squares(
        residuals, np.log(start), bounds=(np.log(low), np.log(high)), diff_step=[0.01], max_nfev=15
    )  # fmt: skip
    slopes = np.asarray(result.jac, dtype=np.float64)
    left = np.sqrt(np.diag(np.linalg.inv(slopes.T @ slopes)))
    return np.asarray([float(f"{value:.4g}") for value in np.exp(result.x)]), np.asarray(left / doubt)


def _described(
    fit: ServedFit, rows: Sequence[Measured], constants: DeviceCalibration, spread: Spread, day: str
) -> DeviceCalibration:
    silent = [name for name, share in fit.narrowed.items() if share > TOLD]
    return constants.model_copy(
        update={
            "id": f"{constants.device}-{day}",
            "source": "served rows of measured/inference.csv; published rates of products and collectives",
            "date": day,
            "software": ", ".join(sorted({case.engine.engine for case, _, _ in rows})) + ", releases mixed",
            "n": 0,
            "spread": spread,
            "served_rows": tuple(case.row.row_id for case, _, _ in rows),
            "notes": f"Told from {fit.rows} served rows ({SPLIT}): {fit.in_sample_mape:.1f} % mean error inside, "
            f"{fit.left_out_mape:.1f} % with one architecture left out in turn, which is the spread. No kernel was "
            f"timed. The rows do not speak of: {', '.join(silent) or 'nothing'}; these stand where they started. "
            f"Host, backward attention and scans: {fit.calibration.extrapolated_from}.",
        }
    )
