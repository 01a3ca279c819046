"""Matrix products and memory-bound passes on one device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rlperf.cost.dtypes import dtype_of
from rlperf.layout import FloatArray
from rlperf.specs.calibration import GemmFit
from rlperf.specs.cluster import Device
from rlperf.specs.hardware import Hardware

Array = npt.ArrayLike


def as_float(value: Array) -> FloatArray:
    """Any number or array as float64, so that no product is formed in integers."""
    return np.asarray(value, dtype=np.float64)


def sheet_peak(device: Device, dtype: str) -> float:
    """Dense peak of the data sheet for a dtype [FLOP/s]; that of the next wider one where the device lacks the unit."""
    wanted = dtype_of(dtype).peak
    for name in (wanted, *_WIDER.get(wanted, ())):
        value = getattr(device.peaks, name)
        if value is not None:
            return float(value)
    return float(device.peaks.fp32 or device.peaks.fp16 or device.peaks.bf16 or np.nan)


def sheet_flop_per_s(hw: Hardware, dtype: str) -> float:
    """Dense peak of the data sheet for a dtype [FLOP/s], see `sheet_peak`."""
    return sheet_peak(hw.device, dtype)


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


TILES = ((64.0, 64.0), (64.0, 128.0), (128.0, 128.0), (128.0, 256.0))
"""Tile shapes that a library of kernels offers (rows x columns of the output)."""
SPLITS = (1, 4)
"""Ways to cut the inner length so that few tiles keep all multiprocessors busy."""


def ways_for(
    fit: GemmFit, m: FloatArray, shape: tuple[int, ...]
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Rows and columns of every tile, the rows of a tile of the device timed that is as efficient, and parts of k [1].

    `TILES`; and where the peak is lower than there (``fit.rows``), up to 256 tokens in one tile that holds them. Axes:
    tiles, `SPLITS`, and those of the products, of that ``shape``.
    """
    ones = [1] * len(shape)
    rows, columns = (np.reshape(each, (-1, 1, *ones)) for each in zip(*TILES, strict=True))
    like, parts = rows, np.reshape(np.array(SPLITS, dtype=np.float64), (-1, *ones))
    if fit.rows < TILES[0][0]:
        few = fit.rows * np.ceil(np.minimum(m, 256.0) / fit.rows)
        timed = np.minimum(few * TILES[0][0] / fit.rows, 256.0)
        rows, like = (
            np.concatenate([np.broadcast_to(rows, (len(TILES), 1, *shape)), np.broadcast_to(own, (1, 1, *shape))])
            for own in (np.where(m <= 256.0, few, 128.0), np.where(m <= 256.0, timed, 128.0))
        )
        columns = np.concatenate([columns, np.reshape(128.0, (1, 1, *ones))])
    return rows, columns, like, parts


def gemm_with(
    device: Device, fit: GemmFit, m: Array, n: Array, k: Array, dtype: str, *, cached: bool = False
) -> FloatArray:
    r"""Seconds of ``[m, k] x [k, n]`` with given constants: the fastest of a few tiles, with smoothed waves.

    .. math::

        t = t_0 + \min_{tile, s} (t_c^q + t_m^q)^{1/q} + t_s + t_a,\quad
        t_m = \frac{mk\,b_a + kn\,b_w + mn\,b_o}{W e_m},\quad
        t_c = [w + \omega(\lceil w \rceil - w)]\, \frac{2\,SM\,b_m b_n k/s}{P e_c e_{tile}}

    Parameters
    ----------
    m, n, k : rows (tokens), columns, inner length [1], broadcast together
    dtype : of weights and activations, see `rlperf.cost.dtypes`
    cached : operands stand in L2 from the last call, as in kernel benchmarks; in an engine they never do

    Returns
    -------
    seconds [s]; 0 where m, n or k is 0

    Notes
    -----
    w = tiles x s / SM waves of multiprocessors; e_tile falls with the reuse a tile lacks against 128 x 256:
    (1 + r (1/128 + 1/256)) / (1 + r (1/b_m + 1/b_n)). t_s reduces the s partial products. t_a is the pass that
    quantises the activations (dynamic fp8): read in bf16, write in the narrow type. Fitted for m 1..16k, n and k
    1k..16k, random data. Tiles and waves as in NVIDIA's "Matrix Multiplication Background User's Guide", sections
    "Tile Quantization" and "Wave Quantization"; the smoothing is ours.
    """
    kind = dtype_of(dtype)
    m, n, k = as_float(m), as_float(n), as_float(k)
    multiprocessors = float(device.multiprocessors or 100)
    peak = sheet_peak(device, dtype) * fit.compute
    moved = m * k * kind.activation_bytes + n * k * kind.weight_bytes + m * n * kind.output_bytes
    rate = device.memory_bandwidth * fit.memory
    memory_s = moved / rate
    if cached:
        memory_s = still_in_l2(device, memory_s, moved, fit.cached)
    # ways to cut the product along two axes of their own, before those of m, n and k
    rows, columns, like, parts = ways_for(fit, m, np.broadcast(m, n, k).shape)
    full = (1.0 + fit.reuse * (1 / 128 + 1 / 256)) / (1.0 + fit.reuse * (1 / like + 1 / columns))
    waves = np.ceil(m / rows) * np.ceil(n / columns) * parts / multiprocessors
    waves = waves + fit.wave * (np.ceil(waves) - waves)
    compute_s = waves * multiprocessors * 2.0 * rows * columns * (k / parts) / (peak * full)
    again = np.where(parts > 1, parts, 0.0)
    reduced_s = m * n * 8.0 * again / (2.0 * rate)
    seconds = joined(compute_s, memory_s, fit.exponent) + reduced_s + np.where(parts > 1, fit.split, 0.0)
    best = seconds.min(axis=(0, 1))
    total = fit.fixed + best + _cast_s(device, fit, m * k, dtype)
    return np.where((m > 0) & (n > 0) & (k > 0), total, 0.0)


def _cast_s(device: Device, fit: GemmFit, values: FloatArray, dtype: str) -> FloatArray | float:
    if fit.quantise_memory <= 0.0:
        return 0.0
    passed = values * (2.0 + dtype_of(dtype).activation_bytes)
    return fit.quantise_fixed + passed / (device.memory_bandwidth * fit.quantise_memory)


def cast_s(hw: Hardware, values: Array, dtype: str) -> FloatArray:
    """Seconds in which 16-bit values become narrow with scales of their own, as in front of a product `gemm_s`."""
    fit, _ = gemm_fit(hw, dtype)
    return as_float(_cast_s(hw.device, fit, as_float(values), dtype))


_KNOWN: dict[tuple[object, ...], FloatArray] = {}
_MOST = 4096
"""Products remembered at once."""
_SMALL = 64
"""Elements up to which a product is remembered; beyond, finding it again takes about as long as working it out."""


def gemm_known(device: Device, fit: GemmFit, m: Array, n: Array, k: Array, dtype: str) -> FloatArray:
    """`gemm_with` of operands in memory, worked out once: a plan asks nine times in ten for a product that it has had.

    The result is read-only, for others have it too.
    """
    m, n, k = as_float(m), as_float(n), as_float(k)
    if max(m.size, n.size, k.size) > _SMALL:
        return gemm_with(device, fit, m, n, k, dtype)
    of_device = device.multiprocessors, device.memory_bandwidth, sheet_peak(device, dtype)
    key = (*of_device, fit, dtype, *((one.shape, one.tobytes()) for one in (m, n, k)))
    found = _KNOWN.get(key)
    if found is None:
        if len(_KNOWN) >= _MOST:
            _KNOWN.clear()
        found = _KNOWN[key] = gemm_with(device, fit, m, n, k, dtype)
        found.flags.writeable = False
    return found


L2_SHARE = 0.35
"""Share of the L2 cache that a repeated kernel finds its operands in."""


def still_in_l2(
    device: Device, seconds: FloatArray, moved: Array, rate: float, *, share: float = L2_SHARE, edge: float = 3.0
) -> FloatArray:
    r"""Seconds of reads that a repeated kernel finds in L2 as far as they fit, :math:`t / (1 + e / (1 + (B / s L)^w))`.

    ``moved``: B [bytes]; ``rate``: e, extra rate of what is still there [1]; ``share``: s, of the cache L [1];
    ``edge``: w, how sharply the cache ends [1].
    """
    if rate <= 0.0 or not device.l2_cache:
        return seconds
    return seconds / (1.0 + rate / (1.0 + (as_float(moved) / (share * device.l2_cache)) ** edge))


def joined(first: FloatArray, second: FloatArray, exponent: float) -> FloatArray:
    """q-norm of two times that overlap: (a^q + b^q)^(1/q), safe for large q [s].

    >>> float(joined(np.array(3.0), np.array(4.0), 2.0))
    5.0
    """
    longer = np.maximum(np.maximum(first, second), 1e-30)
    shorter = np.minimum(first, second)
    return np.asarray(longer * (1.0 + (shorter / longer) ** exponent) ** (1.0 / exponent))


def gemm_s(hw: Hardware, m: Array, n: Array, k: Array, dtype: str = "bf16") -> FloatArray:
    """Seconds of ``[m, k] x [k, n]`` with the device's constants, operands in memory: see `gemm_with`."""
    fit, _ = gemm_fit(hw, dtype)
    return gemm_known(hw.device, fit, m, n, k, dtype)


def stream_s(hw: Hardware, n_bytes: Array) -> FloatArray:
    """Seconds of a large memory-bound pass that moves ``n_bytes`` (read plus written): bytes / (W e) [s]."""
    return as_float(n_bytes) / (hw.device.memory_bandwidth * hw.calibration.stream.stream_memory)


def small_op_s(hw: Hardware, n_bytes: Array, *, launched: bool = True) -> FloatArray:
    """Seconds of one small operator (norm, rope, activation, residual): t_0 + bytes / (W e); 0 for 0 bytes.

    One that is not ``launched`` is part of another kernel, and has no t_0.
    """
    moved = as_float(n_bytes)
    fit = hw.calibration.stream
    fixed = fit.small_fixed if launched else 0.0
    return np.where(moved > 0, fixed + moved / (hw.device.memory_bandwidth * fit.small_memory), 0.0)
