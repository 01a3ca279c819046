"""Matrix products and memory-bound passes on one device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rlperf.cost.dtypes import dtype_of
from rlperf.layout import FloatArray
from rlperf.specs.calibration import GemmFit
from rlperf.specs.hardware import Hardware

Array = npt.ArrayLike


def as_float(value: Array) -> FloatArray:
    """Any number or array as float64, so that no product is formed in integers."""
    return np.asarray(value, dtype=np.float64)


def sheet_flop_per_s(hw: Hardware, dtype: str) -> float:
    """Dense peak of the data sheet for a dtype [FLOP/s]; that of the next wider one where the device lacks the unit."""
    peaks = hw.device.peaks
    for name in (dtype_of(dtype).peak, *_WIDER.get(dtype_of(dtype).peak, ())):
        value = getattr(peaks, name)
        if value is not None:
            return float(value)
    return float(peaks.fp32 or peaks.fp16 or peaks.bf16 or np.nan)


_WIDER = {
    "fp4": ("fp8", "bf16", "fp16"),
    "fp8": ("bf16", "fp16"),
    "int8": ("fp8", "bf16", "fp16"),
    "bf16": ("fp16", "fp32"),
    "fp16": ("bf16", "fp32"),
    "tf32": ("fp32",),
}


def gemm_fit(hw: Hardware, dtype: str) -> tuple[GemmFit, bool]:
    """Constants for a dtype, and whether they are a stand-in's (then every interval is wider)."""
    fits = {fit.dtype: fit for fit in hw.calibration.gemm}
    if dtype in fits:
        return fits[dtype], False
    for other in dtype_of(dtype).stand_ins:
        if other in fits:
            return fits[other], not (dtype == "fp16" and other == "bf16")
    return hw.calibration.gemm[0], True


def peak_flop_per_s(hw: Hardware, dtype: str = "bf16") -> float:
    """Attainable rate of large matrix products, in short bursts [FLOP/s]: data-sheet peak x fitted share."""
    return sheet_flop_per_s(hw, dtype) * gemm_fit(hw, dtype)[0].compute


def gemm_s(hw: Hardware, m: Array, n: Array, k: Array, dtype: str = "bf16") -> FloatArray:
    r"""Seconds of ``[m, k] x [k, n]``.

    .. math::

        t = t_0 + (t_c^q + t_m^q)^{1/q} + t_a,\quad t_c = 2mnk / (P e_c),

        t_m = (mk\,b_a + kn\,b_w + mn\,b_o) / (W e_m)

    Parameters
    ----------
    m, n, k : rows (tokens), columns, inner length [1], broadcast together
    dtype : of weights and activations, see `rlperf.cost.dtypes`

    Returns
    -------
    seconds [s]; 0 where m, n or k is 0. t_a is the pass that quantises activations (dynamic fp8).

    Notes
    -----
    Fitted for m 1..16k, n and k 1k..16k, random data, weights larger than L2. Constants: `GemmFit`.
    """
    fit, _ = gemm_fit(hw, dtype)
    kind = dtype_of(dtype)
    m, n, k = as_float(m), as_float(n), as_float(k)
    bandwidth = hw.device.memory_bandwidth
    compute_s = 2.0 * m * n * k / (sheet_flop_per_s(hw, dtype) * fit.compute)
    moved = m * k * kind.activation_bytes + n * k * kind.weight_bytes + m * n * kind.output_bytes
    memory_s = moved / (bandwidth * fit.memory)
    q = fit.exponent
    longer = np.maximum(np.maximum(compute_s, memory_s), 1e-30)
    shorter = np.minimum(compute_s, memory_s) / longer
    seconds = fit.fixed + longer * (1.0 + shorter**q) ** (1.0 / q)
    if fit.quantise_fixed > 0.0:
        seconds = (
            seconds + fit.quantise_fixed + m * k * (2.0 + kind.activation_bytes) / (bandwidth * fit.quantise_memory)
        )
    return np.where((m > 0) & (n > 0) & (k > 0), seconds, 0.0)


def stream_s(hw: Hardware, n_bytes: Array) -> FloatArray:
    """Seconds of a large memory-bound pass that moves ``n_bytes`` (read plus written): bytes / (W e) [s]."""
    return as_float(n_bytes) / (hw.device.memory_bandwidth * hw.calibration.stream.stream_memory)


def small_op_s(hw: Hardware, n_bytes: Array) -> FloatArray:
    """Seconds of one small unfused operator (norm, rope, activation, residual): t_0 + bytes / (W e); 0 for 0 bytes."""
    moved = as_float(n_bytes)
    fit = hw.calibration.stream
    return np.where(moved > 0, fit.small_fixed + moved / (hw.device.memory_bandwidth * fit.small_memory), 0.0)
