"""Fits of recurrent mixers' kernels: the chunked scan over prompts and one step of the recurrence."""

from __future__ import annotations

from collections.abc import Sequence

from rlperf.calibrate.fitting import Bounds, Fitted
from rlperf.calibrate.kernel_fits import KernelFit, rounded, run_fit
from rlperf.calibrate.kernel_seconds import Seconds, convolution_seconds, mixer_of_scan, scan_seconds
from rlperf.calibrate.kernel_tables import CONVOLUTION, Series
from rlperf.layout import FloatArray
from rlperf.specs.calibration import ScanFit
from rlperf.specs.cluster import Device
from rlperf.specs.hardware import BEST_READ

COMPUTE = 0.28
"""Share of the peak that products of a chunked scan are believed to reach before a row tells. A token and head of Kimi
Delta Attention take 5.6 ns on H20 and 4.6 on H100 by Triton, 3.2 and 1.1 by FlashKDA (`linear_attention_train.csv`, 12
rows of H20, and `kda.csv`): with products by the peak and all else by bandwidth, 0.30 and 0.39 ns of them on H100."""
FUSED = 5.0
"""Bytes that a scan passes between its kernels (`rlperf.cost.scan.scan_bytes`) over those of its inputs and outputs."""
PULL = 0.02
"""Pull of a constant to its start, in units of the misfit: products and passes of a scan both grow with its tokens, and
only what leaves L2 tells them apart."""


def fit_scan(series: Series, device: Device, *, check: bool) -> KernelFit:
    """A recurrent mixer of one engine in one phase: its scan, its step, or the convolution in front of them."""
    if series.kind == CONVOLUTION:
        return _fit_convolution(series, device, check)
    seconds = scan_seconds(series, device)
    mixer = mixer_of_scan(series)
    prompts = series.variant == "context" and mixer != "mamba"
    names = ("fixed", "memory", "cached", *(("compute", "per_step") if prompts else ()))

    def build(p: FloatArray) -> ScanFit:
        own = dict(zip(names, p, strict=True))
        return ScanFit.model_construct(kernel=series.kernel, phase=series.variant, mixer=mixer, **own)

    read: tuple[tuple[float, float, float], ...] = ((0.05, 0.8, BEST_READ), (1e-3, 0.3, 15.0))
    if prompts:
        read = ((0.05, 0.8, FUSED * BEST_READ), read[1], (1e-3, COMPUTE, 1.0), (1e-12, 1e-8, 1e-6))
    bounds = Bounds.of((1e-7, 5e-6, 5e-4), *read, pull=PULL if prompts else 0.0)
    fitted = run_fit(series, build, seconds, bounds, ("batch", "num_v_heads"), check)
    return _fit_of(series, mixer, fitted, names, seconds)


def _fit_convolution(series: Series, device: Device, check: bool) -> KernelFit:
    seconds = convolution_seconds(series, device)
    names = ("fixed", "memory", "cached", "per_block")

    def build(p: FloatArray) -> ScanFit:
        own = dict(zip(names, p, strict=True))
        return ScanFit.model_construct(kernel=series.kernel, phase=series.variant, mixer=series.dtype, **own)

    bounds = Bounds.of((1e-7, 2e-6, 1e-4), (0.05, 0.8, BEST_READ), (1e-3, 0.3, 15.0), (1e-14, 1e-11, 1e-8))
    fitted = run_fit(series, build, seconds, bounds, ("batch", "channels"), check)
    return _fit_of(series, series.dtype, fitted, names, seconds)


def _fit_of(series: Series, mixer: str, fitted: Fitted, names: Sequence[str], seconds: Seconds) -> KernelFit:
    own = rounded(names, fitted.parameters, ("fixed", "per_step", "per_block"))
    constants = ScanFit.model_validate(
        {
            "kernel": series.kernel,
            "phase": series.variant,
            "mixer": mixer,
            **own,
            "quality": fitted.quality(series.name),
        }
    )
    return KernelFit("scan", constants, fitted, series, seconds)
