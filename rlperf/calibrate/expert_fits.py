"""Fits of grouped expert products: constants of one kernel, uneven routing, and timings whose share is not known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlperf.calibrate.fitting import Bounds, fit_with_left_out
from rlperf.calibrate.kernel_fits import KernelFit, digits, microseconds, run_fit
from rlperf.calibrate.kernel_seconds import EXPERTS, by_power_law, evenly, expert_seconds
from rlperf.calibrate.kernel_tables import Series, joined_series
from rlperf.cost.moe import WIDE
from rlperf.layout import BoolArray, FloatArray
from rlperf.specs.calibration import MoeFit, Quality, load_device_calibration
from rlperf.specs.cluster import Device
from rlperf.specs.hardware import BEST_READ

PULL = 0.03
"""Pull of an expert kernel's constants to their start, in units of the misfit: eleven of them, some series of 20 rows.
Errors left out fall from 26 to 22 % on tables of four-bit experts and stay where rows are many."""


def layers_of(series: Series) -> FloatArray:
    """A key that names the layer of expert timings: widths and expert count together."""
    shape = series.shape
    return np.asarray(shape["hidden_size"] * 1e9 + shape["inter_size"] * 1e4 + shape["num_experts"])


GROUPED_LAYER = (7168.0, 256.0, 8.0)
"""hidden, experts, topk of DeepSeek-V3: 8 groups of experts, of which a token may use 4 (arXiv 2412.19437, 2.1.2)."""


RUNS_ALL = {"sglang_marlin": ("sglang-0.5.10",)}
"""Releases of a kernel whose times do not fall when experts are spread over devices: 8.3 ms for 4,096 tokens on one of
8 devices, 8.8 ms on one that holds all experts (A100, 128 experts of 1536)."""


NARROW_CHOICE = {"vllm_marlin": "l40s"}
"""Kernels that some devices timed with more than 512 experts only, and the device that timed them with fewer. Its fixed
time and time per doubling of the tokens stand there too: one token through an eighth of gpt-oss's layer (4 of 128)
takes 28 us on an L40S and 29 on an RTX PRO 6000, through an eighth of Kimi-K3's (16 of 896) 70 on an H100."""


def routes_itself(kernel: str) -> bool:
    """Whether a kernel's timings contain choosing and sorting the tokens of each expert."""
    return kernel.startswith("vllm") or "min_latency" in kernel


def group_limited(series: Series) -> tuple[Series, FloatArray]:
    """The series without timings of unknown share, and touched experts over those of balanced routing [1].

    Benchmarks hand equal logits to kernels that route for themselves. With group-limited routing the ties all go to
    the first 4 of 8 groups, so that half of the experts are touched. Timings show it: taken as balanced, the weights
    of this layer would come in at up to 1.7 times the data sheet's bandwidth on every device, and no other layer
    does. Over several devices the experts chosen are not spread evenly and no file says how: those timings are left
    out. So are those of kernels that ran the pairs of all experts on every device (`RUNS_ALL`).
    """
    if series.software in RUNS_ALL.get(series.kernel, ()):
        series = series.take(series.shape["moe_ep_size"] <= 1.0)
    n, h, _, e, a, ep = (series.shape[name] for name in EXPERTS)
    here = (h == GROUPED_LAYER[0]) & (e == GROUPED_LAYER[1]) & (a == GROUPED_LAYER[2])
    if not routes_itself(series.kernel) or series.variant != "balanced" or not here.any():
        return series, np.ones_like(n)
    kept = ~here | (ep <= 1.0)
    fewer = replace(
        series,
        shape={name: values[kept] for name, values in series.shape.items()},
        measured_s=series.measured_s[kept],
        row_ids=tuple(name for name, keep in zip(series.row_ids, kept, strict=True) if keep),
    )
    return fewer, np.where(here[kept], 0.5, 1.0)


def with_single_tokens(balanced: Series, skewed: Series | None) -> Series:
    """The series with timings of one token under power-law routing, on devices that hold all experts.

    One token goes to as many experts as it may, no two the same, however uneven the routing: it touches a of E either
    way, and there is no busiest device where there is one. Some kernels were timed with few tokens so only: a fixed
    time that is told from sixteen tokens and more comes out at a third of what one token takes, or at twice that.
    """
    if skewed is None or balanced.variant != "balanced":
        return balanced
    alone = (skewed.shape["num_tokens"] == 1.0) & (skewed.shape["moe_ep_size"] <= 1.0)
    return joined_series(balanced, skewed.take(alone)) if alone.any() else balanced


def bounds_of(kernel: str, wide: bool) -> Bounds:
    """Of a `MoeFit`'s constants, in the order of `expert_constants`."""
    return Bounds.of(
        (1e-6, 2e-5, 3e-4), (0.03, 0.6, 1.1), (0.05, 0.8, BEST_READ), (0.02, 0.6, 8.0), (1e-11, 1e-9, 1e-7),
        (0.7, 2.0, 8.0),
        (1e-9, 1e-7, 1e-5), (0.01, 5.0, 300.0), (1e-9, 1e-7, 1e-5), (1e-3, 0.3, 15.0),
        *([(1e-9, 1e-6, 1e-5)] if routes_itself(kernel) else []),
        *([(1e-6, 4e-5, 1e-4)] if wide else []),
        pull=PULL,
    )  # fmt: skip


def expert_constants(kernel: str, dtype: str, p: FloatArray, wide: bool) -> MoeFit:
    """Constants of a trial."""
    return MoeFit.model_construct(
        kernel=kernel, dtype=dtype, fixed=p[0], compute=p[1], memory=p[2], activation_memory=p[3], per_pair=p[4],
        exponent=p[5], per_expert=p[6], token_bytes=p[7], per_held_expert=p[8], cached=p[9],
        per_doubling=p[10] if routes_itself(kernel) else 0.0, wide_choice=p[11] if wide else 0.0,
    )  # fmt: skip


def as_written(fit: MoeFit, skew: tuple[float, float], quality: Quality) -> MoeFit:
    """The constants as calibrations hold them: four digits, times in microseconds."""
    times = ("fixed", "per_pair", "per_expert", "per_held_expert", "per_doubling", "wide_choice")
    shares = ("compute", "memory", "activation_memory", "exponent", "token_bytes", "cached")
    exponent, touched = skew
    return MoeFit.model_validate(
        {
            "kernel": fit.kernel, "dtype": fit.dtype,
            "skew_exponent": digits(exponent), "skew_touched": digits(touched),
            **{name: microseconds(getattr(fit, name)) for name in times},
            **{name: digits(getattr(fit, name)) for name in shares},
            "quality": quality,
        }
    )  # fmt: skip


def fit_moe(series: Series, device: Device, skewed: Series | None = None, *, check: bool) -> KernelFit:
    """Grouped expert products from balanced routing; then skew and touched experts from power-law routing."""
    wide = series.kernel in NARROW_CHOICE and bool((series.shape["num_experts"] > WIDE).all())
    series = with_single_tokens(series, skewed)
    series, touched_share = group_limited(series)

    def build(p: FloatArray) -> MoeFit:
        return expert_constants(series.kernel, series.dtype, p, wide)

    seconds = expert_seconds(series, device, evenly(series, touched_share))
    bounds = bounds_of(series.kernel, wide)
    if wide:
        own = load_device_calibration(NARROW_CHOICE[series.kernel]).moe
        few = next(one for one in own if (one.kernel, one.dtype) == (series.kernel, series.dtype))
        bounds = bounds.held(0, few.fixed).held(10, few.per_doubling)
    fitted = run_fit(series, build, seconds, bounds, ("num_tokens", "moe_ep_size"), check)
    found = build(fitted.parameters)
    skew = fit_skew(found, skewed, device) if skewed is not None else (0.0, 1.0)
    return KernelFit("moe", as_written(found, skew, fitted.quality(series.name)), fitted, series, seconds)


def fit_skew(fit: MoeFit, series: Series, device: Device) -> tuple[float, float]:
    """Power-law routing: exponent of the busiest device, and touched experts over those of uniform routing."""
    seconds = expert_seconds(series, device, by_power_law(series))

    def predict(p: FloatArray, r: BoolArray) -> FloatArray:
        return seconds(fit.model_copy(update={"skew_exponent": p[0], "skew_touched": p[1]}), r)

    fitted = fit_with_left_out(
        predict, Bounds.of((0.01, 0.3, 1.0), (0.2, 0.9, 1.3)), series.measured_s, {}, left_out=False
    )
    return float(fitted.parameters[0]), float(fitted.parameters[1])
