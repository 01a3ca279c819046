"""Softmax attention on one device: prefill (forward and backward), paged decode, latent attention."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from rlperf.cost.dtypes import cache_bytes, dtype_of
from rlperf.cost.roofline import Array, as_float, sheet_flop_per_s
from rlperf.layout import FloatArray
from rlperf.specs.calibration import DecodeFit, PrefillFit
from rlperf.specs.hardware import Hardware

Fit = TypeVar("Fit", PrefillFit, DecodeFit)


def prefill_fit(hw: Hardware, kv_dtype: str = "bf16", kernel: str | None = None) -> tuple[PrefillFit, bool]:
    """Constants of the attention kernel over prompts, and whether they stand in for another one."""
    return _choose(hw.calibration.prefill, kv_dtype, kernel)


def decode_fit(hw: Hardware, kv_dtype: str = "bf16", kernel: str | None = None) -> tuple[DecodeFit, bool]:
    """Constants of the paged decode kernel, and whether they stand in for another one."""
    return _choose(hw.calibration.decode, kv_dtype, kernel)


def _choose(fits: tuple[Fit, ...], kv_dtype: str, kernel: str | None) -> tuple[Fit, bool]:
    wanted = "bf16" if kv_dtype in ("fp16", "bf16") else kv_dtype
    named: list[Fit] = [fit for fit in fits if kernel is not None and fit.kernel == kernel]
    for fit in [*named, *fits]:
        if fit.kv_dtype == wanted:
            return fit, kernel is not None and fit.kernel != kernel
    return (named or list(fits))[0], True


def visible_pairs(
    query_tokens: Array, kv_tokens: Array, *, causal: bool = True, window: int | None = None
) -> FloatArray:
    """Pairs of (query, visible key) of one sequence whose last ``query_tokens`` of ``kv_tokens`` are queries [1].

    Causal: query i sees i keys, so q k - q (q - 1) / 2. A window w lets nobody see more than w keys.

    >>> float(visible_pairs(4, 4)), float(visible_pairs(4, 4, window=2)), float(visible_pairs(2, 10, causal=False))
    (10.0, 7.0, 20.0)
    """
    q, k = as_float(query_tokens), as_float(kv_tokens)
    if not causal:
        return q * (np.minimum(k, window) if window else k)
    pairs = q * k - q * (q - 1.0) / 2.0
    if not window:
        return pairs
    # queries at positions k-q+1 .. k; those beyond the window lose (position - window) keys each
    over = np.maximum(k - window, 0.0)
    first = np.maximum(k - q - window, 0.0)
    return pairs - (over * (over + 1.0) - first * (first + 1.0)) / 2.0


def prefill_attention_s(
    hw: Hardware,
    sequences: Array,
    query_tokens: Array,
    kv_tokens: Array,
    heads: Array,
    kv_heads: Array,
    head_dim: Array,
    *,
    causal: bool = True,
    window: int | None = None,
    dtype: str = "bf16",
    kernel: str | None = None,
    backward: bool = False,
    value_dim: Array | None = None,
) -> FloatArray:
    r"""Seconds of flash attention over ``sequences`` equal sequences.

    .. math:: t = t_0 + \frac{F (1 + S_0 / \bar k)}{P e_c} + \frac{IO}{W e_m},\quad F = 2 s h (d + d_v) \cdot pairs

    Parameters
    ----------
    sequences, query_tokens, kv_tokens : s, new tokens and visible tokens (cached ones included) of each [1]
    heads, kv_heads, head_dim, value_dim : h, key/value heads, d and d_v widths on this device [1]
    backward : backward pass: 2.5 x the FLOP (FlashAttention-2, arXiv 2307.08691, section 3.1.2), its own efficiency
    """
    s, q, k = as_float(sequences), as_float(query_tokens), as_float(kv_tokens)
    pairs = s * visible_pairs(q, k, causal=causal, window=window)
    return _flash_s(hw, s * q, s * k, pairs, heads, kv_heads, head_dim, value_dim, dtype, kernel, backward)


def packed_attention_s(
    hw: Hardware,
    tokens: Array,
    sum_squares: Array,
    max_len: Array,
    heads: Array,
    kv_heads: Array,
    head_dim: Array,
    *,
    causal: bool = True,
    window: int | None = None,
    dtype: str = "bf16",
    kernel: str | None = None,
    backward: bool = False,
    value_dim: Array | None = None,
) -> FloatArray:
    """Seconds of flash attention over a pack of whole sequences of unequal length.

    Parameters
    ----------
    tokens, sum_squares, max_len : sum of lengths [tokens], sum of squared lengths [tokens^2], longest [tokens]
    heads, kv_heads, head_dim, value_dim : on this device [1]

    Notes
    -----
    Pairs: (sum of squares + tokens) / 2 causal; the sum of squares without. A window is applied to a sequence of the
    token-weighted mean length, sum_squares / tokens (exact for equal lengths). ``max_len`` bounds that mean.
    """
    n, squares = as_float(tokens), as_float(sum_squares)
    mean = np.minimum(squares / np.maximum(n, 1.0), np.maximum(as_float(max_len), 1.0))
    pairs = (squares + n) / 2.0 if causal else squares
    if window:
        pairs = np.minimum(pairs, n * visible_pairs(mean, mean, causal=causal, window=window) / np.maximum(mean, 1.0))
    return _flash_s(hw, n, n, pairs, heads, kv_heads, head_dim, value_dim, dtype, kernel, backward)


def _flash_s(
    hw: Hardware,
    queries: FloatArray,
    keys: FloatArray,
    pairs: FloatArray,
    heads: Array,
    kv_heads: Array,
    head_dim: Array,
    value_dim: Array | None,
    dtype: str,
    kernel: str | None,
    backward: bool,
) -> FloatArray:
    fit, _ = prefill_fit(hw, dtype, kernel)
    h, g, d = as_float(heads), as_float(kv_heads), as_float(head_dim)
    v = d if value_dim is None else as_float(value_dim)
    flop = 2.0 * h * (d + v) * pairs
    mean_keys = 2.0 * pairs / np.maximum(queries, 1.0)
    peak = sheet_flop_per_s(hw, "bf16" if dtype_of(dtype).peak != "fp16" else "fp16") * fit.compute
    moved = queries * h * (d + v) * 2.0 + keys * g * (d + v) * 2.0
    ramp = fit.ramp_tokens
    if backward:
        flop, moved, peak, ramp = (
            flop * fit.backward_flop,
            moved * 2.0,
            peak * fit.backward_compute,
            ramp * fit.backward_ramp,
        )
    seconds = flop * (1.0 + ramp / np.maximum(mean_keys, 1.0)) / peak + moved / (
        hw.device.memory_bandwidth * fit.memory
    )
    return np.where(queries > 0, fit.fixed + seconds, 0.0)


def decode_attention_s(
    hw: Hardware,
    requests: Array,
    kv_tokens: Array,
    heads: Array,
    kv_heads: Array,
    head_dim: Array,
    *,
    kv_dtype: str = "bf16",
    kernel: str | None = None,
) -> FloatArray:
    r"""Seconds of paged decode attention, one query token per request.

    .. math:: t = t_0 + \frac{2 K g d\,b}{W e_m} + c\,r\,g

    Parameters
    ----------
    requests : r [1]
    kv_tokens : K, cached tokens read, summed over the requests [tokens]
    heads, kv_heads, head_dim : on this device [1]
    kv_dtype : of the cache; b bytes per value

    Notes
    -----
    fp8 caches reach a lower share of the bandwidth (their own constants): far less than twice the rate.
    """
    fit, _ = decode_fit(hw, kv_dtype, kernel)
    r, kv, g, d = as_float(requests), as_float(kv_tokens), as_float(kv_heads), as_float(head_dim)
    moved = 2.0 * kv * g * d * cache_bytes(kv_dtype) + 4.0 * r * as_float(heads) * d
    seconds = fit.fixed + moved / (hw.device.memory_bandwidth * fit.memory) + r * (fit.per_request + fit.per_pair * g)
    return np.where(r > 0, seconds, 0.0)


def latent_decode_attention_s(
    hw: Hardware,
    requests: Array,
    kv_tokens: Array,
    heads: Array,
    kv_rank: Array,
    rope_head_dim: Array,
    *,
    kv_dtype: str = "bf16",
    kernel: str | None = None,
) -> FloatArray:
    r"""Seconds of decode attention on the latent cache (MLA, absorbed form; DeepSeek-V2, arXiv 2405.04434, sec. 2.1).

    .. math:: t = t_0 + \max\left(\frac{K (c + r_d) b}{W e_m},\ \frac{2 K h (2 c + r_d)}{P e_c}\right) + c_p\,r

    Every head attends the same latent of width c plus the rotary key of width r_d, so the kernel is a product with
    about 2 h FLOP per byte: at 128 heads it is bound by compute. Extrapolated: no measured table stands behind it.
    """
    fit, _ = decode_fit(hw, kv_dtype, kernel)
    prefill, _ = prefill_fit(hw)
    r, kv, h = as_float(requests), as_float(kv_tokens), as_float(heads)
    c, rope = as_float(kv_rank), as_float(rope_head_dim)
    memory_s = kv * (c + rope) * cache_bytes(kv_dtype) / (hw.device.memory_bandwidth * fit.memory)
    compute_s = 2.0 * kv * h * (2.0 * c + rope) / (sheet_flop_per_s(hw, "bf16") * prefill.compute)
    seconds = fit.fixed + np.hypot(memory_s, compute_s) + r * (fit.per_request + fit.per_pair)
    return np.where(r > 0, seconds, 0.0)


def latent_prefill_attention_s(
    hw: Hardware,
    sequences: Array,
    query_tokens: Array,
    kv_tokens: Array,
    heads: Array,
    nope_head_dim: Array,
    rope_head_dim: Array,
    value_head_dim: Array,
    *,
    kernel: str | None = None,
    backward: bool = False,
) -> FloatArray:
    """Seconds of MLA over prompts: ordinary attention with query width nope + rope and its own value width [s].

    Extrapolated: no measured table stands behind widths other than 128.
    """
    width = as_float(nope_head_dim) + as_float(rope_head_dim)
    return prefill_attention_s(
        hw, sequences, query_tokens, kv_tokens, heads, heads, width,
        value_dim=value_head_dim, kernel=kernel, backward=backward,
    )  # fmt: skip
