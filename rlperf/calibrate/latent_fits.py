"""Fits of latent attention's kernels: absorbed decodes on cached latents, their products, and prompts."""

from __future__ import annotations

from rlperf.calibrate.fitting import Bounds
from rlperf.calibrate.kernel_fits import KernelFit, digits, microseconds, run_fit
from rlperf.calibrate.kernel_seconds import absorption_seconds, latent_seconds
from rlperf.calibrate.kernel_tables import Series
from rlperf.layout import FloatArray
from rlperf.specs.calibration import AbsorptionFit, LatentFit, PrefillFit
from rlperf.specs.cluster import Device
from rlperf.specs.hardware import BEST_READ


def fit_latent(series: Series, device: Device, base: PrefillFit, *, check: bool) -> KernelFit:
    """One engine's kernel in one phase and dtype of the cache."""
    if series.variant == "generation":
        return _fit_absorbed(series, device, check)
    return _fit_rebuilt(series, device, base, check)


def _fit_absorbed(series: Series, device: Device, check: bool) -> KernelFit:
    seconds = latent_seconds(series, device)

    def build(p: FloatArray) -> LatentFit:
        return LatentFit.model_construct(
            kernel=series.kernel, kv_dtype=series.dtype, fixed=p[0], long_fixed=p[1], compute=p[2], memory=p[3],
            exponent=p[4], per_head=p[5], cached=p[6],
        )  # fmt: skip

    bounds = Bounds.of(
        (1e-7, 1e-5, 1e-4), (1e-9, 1e-6, 3e-5), (0.02, 0.5, 1.0), (0.05, 0.7, BEST_READ), (1.0, 2.0, 12.0),
        (1e-12, 1e-9, 1e-7), (1e-3, 0.3, 5.0),
    )  # fmt: skip
    fitted = run_fit(series, build, seconds, bounds, ("batch", "num_heads", "past_len"), check)
    p = fitted.parameters
    constants = LatentFit.model_validate(
        {
            "kernel": series.kernel, "kv_dtype": series.dtype, "fixed": microseconds(p[0]),
            "long_fixed": microseconds(p[1]), "compute": digits(p[2]), "memory": digits(p[3]),
            "exponent": digits(p[4]), "per_head": microseconds(p[5]), "cached": digits(p[6]),
            "quality": fitted.quality(series.name),
        }
    )  # fmt: skip
    return KernelFit("latent_decode", constants, fitted, series, seconds)


def _fit_rebuilt(series: Series, device: Device, base: PrefillFit, check: bool) -> KernelFit:
    """Whole prompts, nothing cached before nor written; what backward passes take is that of ``base``."""
    kept = {name: getattr(base, name) for name in ("backward_flop", "backward_compute", "backward_ramp_tokens")}
    seconds = latent_seconds(series, device)

    def build(p: FloatArray) -> PrefillFit:
        return PrefillFit.model_construct(
            kernel=series.kernel, kv_dtype=series.dtype, fixed=p[0], compute=p[1], memory=p[2], straggler=p[3],
            ramp_tokens=p[4], tiles=base.tiles, **kept,
        )  # fmt: skip

    bounds = Bounds.of((1e-7, 1e-5, 1e-4), (0.03, 0.6, 1.2), (0.02, 0.5, 3.0), (0.01, 0.5, 10.0), (1.0, 100.0, 2000.0))
    fitted = run_fit(series, build, seconds, bounds, ("batch", "num_heads"), check)
    p = fitted.parameters
    constants = PrefillFit.model_validate(
        {
            "kernel": series.kernel, "kv_dtype": series.dtype, "fixed": microseconds(p[0]), "compute": digits(p[1]),
            "memory": digits(p[2]), "straggler": digits(p[3]), "ramp_tokens": digits(p[4]), "tiles": base.tiles, **kept,
            "quality": fitted.quality(series.name),
        }
    )  # fmt: skip
    return KernelFit("latent_prefill", constants, fitted, series, seconds)


def fit_absorption(series: Series, device: Device, *, check: bool) -> KernelFit:
    """An engine's products with the latents, those of queries and of values in one fit."""
    seconds = absorption_seconds(series, device)

    def build(p: FloatArray) -> AbsorptionFit:
        return AbsorptionFit.model_construct(
            kernel=series.kernel, fixed=p[0], compute=p[1], memory=p[2], cached=p[3]
        )  # fmt: skip

    bounds = Bounds.of((1e-7, 5e-6, 3e-5), (0.02, 0.6, 1.0), (0.05, 0.8, BEST_READ), (1e-3, 0.5, 10.0))
    fitted = run_fit(series, build, seconds, bounds, ("num_tokens", "num_heads"), check)
    p = fitted.parameters
    constants = AbsorptionFit.model_validate(
        {
            "kernel": series.kernel, "fixed": microseconds(p[0]), "compute": digits(p[1]), "memory": digits(p[2]),
            "cached": digits(p[3]), "quality": fitted.quality(series.name),
        }
    )  # fmt: skip
    return KernelFit("absorption", constants, fitted, series, seconds)
