"""Softmax attention on one device: prefill (forward and backward) and paged decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from rlperf.cost.dtypes import cache_bytes
from rlperf.cost.roofline import Array, as_float, joined, sheet_peak, still_in_l2
from rlperf.layout import FloatArray
from rlperf.specs.calibration import DecodeFit, PrefillFit, WindowFit
from rlperf.specs.cluster import Device
from rlperf.specs.hardware import Hardware

Fit = TypeVar("Fit", bound=PrefillFit | DecodeFit)


def prefill_fit(hw: Hardware, kv_dtype: str = "bf16", kernel: str | None = None) -> tuple[PrefillFit, bool]:
    """Constants of the attention kernel over prompts, and whether they stand in for another one."""
    return _choose(hw.calibration.prefill, kv_dtype, kernel)


def decode_fit(hw: Hardware, kv_dtype: str = "bf16", kernel: str | None = None) -> tuple[DecodeFit, bool]:
    """Constants of the paged decode kernel, and whether they stand in for another one."""
    return _choose(hw.calibration.decode, kv_dtype, kernel)


def _choose(fits: Sequence[Fit], kv_dtype: str, kernel: str | None) -> tuple[Fit, bool]:
    wanted = "bf16" if kv_dtype in ("fp16", "bf16") else kv_dtype
    named = [fit for fit in fits if kernel is not None and fit.kernel == kernel]
    for fit in [*named, *fits]:
        if fit.kv_dtype == wanted:
            return fit, kernel is not None and fit.kernel != kernel
    return (named or list(fits))[0], True


def visible_pairs(
    query_tokens: Array, kv_tokens: Array, *, causal: bool = True, window: Array | None = None
) -> FloatArray:
    """Pairs of (query, visible key) of one sequence whose last ``query_tokens`` of ``kv_tokens`` are queries [1].

    Causal: query i sees i keys, so q k - q (q - 1) / 2. A window w lets nobody see more than w keys.

    >>> float(visible_pairs(4, 4)), float(visible_pairs(4, 4, window=2)), float(visible_pairs(2, 10, causal=False))
    (10.0, 7.0, 20.0)
    """
    q, k = as_float(query_tokens), as_float(kv_tokens)
    if not causal:
        return np.asarray(q * (k if window is None else np.minimum(k, window)))
    pairs = q * k - q * (q - 1.0) / 2.0
    if window is None:
        return pairs
    # queries at positions k-q+1 .. k; those beyond the window lose (position - window) keys each
    most = as_float(window)
    over = np.maximum(k - most, 0.0)
    first = np.maximum(k - q - most, 0.0)
    return pairs - (over * (over + 1.0) - first * (first + 1.0)) / 2.0


def edge_pairs(fit: PrefillFit, query_tokens: Array, kv_tokens: Array, window: Array | None) -> FloatArray:
    """Pairs outside its window that tiles of one sequence hold beside `visible_pairs` [1]; 0 where it sees all.

    No more than the window leaves out: tiles that hold every visible pair are those of a layer without one.
    """
    q, k = as_float(query_tokens), as_float(kv_tokens)
    if window is None:
        return 0.0 * q * k
    left_out = visible_pairs(q, k) - visible_pairs(q, k, window=window)
    return np.asarray(np.minimum(q * fit.tiles.window_edge, left_out))


@dataclass(frozen=True)
class Heads:
    """Heads of softmax attention on one device; every number broadcasts.

    Attributes
    ----------
    heads, kv_heads : of queries, and of keys and values [1]
    head_dim, value_dim : width of a query or key, and of a value; None: the same [1]
    causal : a token sees none behind it
    window : most keys that a token sees; None: all
    """

    heads: Array
    kv_heads: Array
    head_dim: Array
    value_dim: Array | None = None
    causal: bool = True
    window: int | None = None

    @property
    def width(self) -> FloatArray:
        """Query or key plus value [1]."""
        key = as_float(self.head_dim)
        return key + (key if self.value_dim is None else as_float(self.value_dim))


QUERY_TILE = 128.0
"""Query rows of one tile of the flash-attention kernels."""

TIMED_WIDTH = 128.0
"""Width of the heads that kernels' rates are stated for."""


def narrow_heads(fit: PrefillFit, width: Array, *, backward: bool = False) -> FloatArray:
    r"""Seconds per FLOP of heads of ``width`` over those of heads of 128 [1].

    .. math:: \frac{N(d)/d}{N(128)/128}, \qquad N(d) = (d^p + x^p)^{1/p}

    A pair of a query and a key is one exponential whatever the width d of its head, which takes as long as products of
    width x; tensor cores and the special function units overlap by the kernel (norm p). The backward has
    ``fit.backward_flop`` times the products and the same exponentials: at 64 beside 128 told 1.15 of FlashAttention-3,
    published 1.18 (arXiv 2407.08608, figure 6).

    >>> from rlperf.specs.calibration import TileFit
    >>> fit = PrefillFit.model_construct(tiles=TileFit(), backward_flop=2.5)
    >>> round(float(narrow_heads(fit, 64.0)), 2), round(float(narrow_heads(fit, 64.0, backward=True)), 2)
    (1.31, 1.15)
    """
    products = fit.backward_flop if backward else 1.0
    tiles, d = fit.tiles, as_float(width)
    beside = joined(d * products, as_float(tiles.exponentials), tiles.overlap) / np.maximum(d, 1.0)
    timed = joined(as_float(TIMED_WIDTH * products), as_float(tiles.exponentials), tiles.overlap) / TIMED_WIDTH
    return np.asarray(beside / timed)


def flash_with(
    device: Device,
    fit: PrefillFit,
    queries: Array,
    pairs: Array,
    longest: Array,
    written: Array,
    heads: Heads,
    *,
    backward: bool = False,
    trains: bool = False,
) -> FloatArray:
    r"""Seconds of flash attention with given constants.

    .. math::

        t = t_0 + \left(\left[\frac{F\,\nu(w/2)\,(1 + S_0 / 2\bar k)}{P e_c}\right]^6 +
            \left[\sigma \frac{2 \cdot 128\,w (k_{max} + S_0)}{P e_c / SM}\right]^6\right)^{1/6}
            + \frac{4 \cdot 128\,q h\,(w/256)^\mu}{W e_m} + \frac{8 n_w \cdot 128\,(w/256)^\kappa g^\gamma}{W e_{kv}}

    Parameters
    ----------
    queries : q, query tokens of all sequences [tokens]
    pairs : (query, key) pairs of all sequences that tiles hold [1]: F = 2 h w pairs, mean keys = pairs / q; nu is
        `narrow_heads`
    longest : k_max, keys that the longest row sees [tokens]
    written : n_w, tokens whose keys and values go into the cache [tokens]; 0 in training
    heads : h, g and w = query/key width plus value width of one head
    backward : fit.backward_flop x the FLOP (FlashAttention-2, arXiv 2307.08691, section 3.1.2) at its own efficiency
    trains : kernels of trainers, to which heads wider than 128 bring nothing: FlashAttention-2 and cuDNN lose 12 and
        2 % at 256 (arXiv 2407.08608, figure 5), FlashAttention-3 gains

    Notes
    -----
    The second term is the longest tile when tiles are fewer than multiprocessors. Fitted for 128..16k tokens, 1..256
    sequences, causal: head_dim 128 by device, other widths (64..256) and windows by kernel (``fit.tiles``).
    """
    q, n_pairs, far = as_float(queries), as_float(pairs), as_float(longest)
    h, g, w = as_float(heads.heads), as_float(heads.kv_heads), heads.width
    peak, ramp, flop = sheet_peak(device, "bf16") * fit.compute, fit.ramp_tokens, 2.0 * h * w * n_pairs
    widths = w / (2.0 * TIMED_WIDTH)
    moved = 4.0 * TIMED_WIDTH * q * h * widths**fit.tiles.moved_width
    narrow = narrow_heads(fit, w / 2.0, backward=backward)
    flop = flop * (np.maximum(narrow, 1.0) if trains else narrow)
    if backward:
        flop, moved = flop * fit.backward_flop, moved * 2.0
        peak, ramp = peak * fit.backward_compute, ramp + fit.backward_ramp_tokens
    mean_keys = n_pairs / np.maximum(q, 1.0)
    compute_s = flop * (1.0 + ramp / np.maximum(2.0 * mean_keys, 1.0)) / peak
    multiprocessors = float(device.multiprocessors or 100)
    tile_s = fit.straggler * 2.0 * QUERY_TILE * w * (far + ramp) * multiprocessors / peak
    tile_s = tile_s * (fit.backward_flop if backward else 1.0)
    seconds = joined(compute_s, tile_s, 6.0) + moved / (device.memory_bandwidth * fit.memory)
    stored = 2.0 * TIMED_WIDTH * widths**fit.tiles.cache_width * g**fit.cache_exponent
    cache_s = as_float(written) * stored * 4.0 / (device.memory_bandwidth * fit.cache_memory)
    return np.where(q > 0, fit.fixed + seconds + cache_s, 0.0)


def prefill_attention_s(
    hw: Hardware,
    heads: Heads,
    sequences: Array,
    query_tokens: Array,
    kv_tokens: Array,
    *,
    fit: PrefillFit | None = None,
    cache_write: bool = False,
) -> FloatArray:
    """Seconds of flash attention over ``sequences`` equal sequences: see `flash_with`.

    Parameters
    ----------
    sequences, query_tokens, kv_tokens : new tokens and visible tokens (cached ones included) of each [1]
    fit : constants of another kernel or cache than the device's own in 16 bits
    cache_write : an engine's kernel, which also writes keys and values into the paged cache
    """
    s, q, k = as_float(sequences), as_float(query_tokens), as_float(kv_tokens)
    fit = fit or prefill_fit(hw)[0]
    pairs = s * (visible_pairs(q, k, causal=heads.causal, window=heads.window) + edge_pairs(fit, q, k, heads.window))
    longest = np.minimum(k, heads.window) if heads.window else k
    return flash_with(hw.device, fit, s * q, pairs, longest, s * q * cache_write, heads)


def packed_attention_s(
    hw: Hardware, heads: Heads, tokens: Array, sum_squares: Array, max_len: Array, *, backward: bool = False
) -> FloatArray:
    """Seconds of flash attention over a pack of whole sequences of unequal length: see `flash_with`.

    Parameters
    ----------
    tokens, sum_squares, max_len : sum of lengths [tokens], sum of squared lengths [tokens^2], longest [tokens]

    Notes
    -----
    Pairs: (sum of squares + tokens) / 2 causal; the sum of squares without. A window is applied to a sequence of the
    token-weighted mean length, sum_squares / tokens (exact for equal lengths).
    """
    n, squares, longest = as_float(tokens), as_float(sum_squares), as_float(max_len)
    fit = prefill_fit(hw)[0]
    causal, window = heads.causal, heads.window
    pairs = (squares + n) / 2.0 if causal else squares
    if window:
        mean = np.minimum(squares / np.maximum(n, 1.0), np.maximum(longest, 1.0))
        seen = visible_pairs(mean, mean, causal=causal, window=window) + edge_pairs(fit, mean, mean, window)
        pairs = np.minimum(pairs, n * seen / np.maximum(mean, 1.0))
        longest = np.minimum(longest, window)
    return flash_with(hw.device, fit, n, pairs, longest, 0.0, heads, backward=backward, trains=True)


CACHE_SHARE = 0.6
"""Share of the L2 cache that a repeated decode finds its keys and values in."""


def split_share(requests: FloatArray, kv_tokens: FloatArray) -> FloatArray:
    """How far contexts are split over multiprocessors: from none at 256 tokens each to all at 4096 [1]."""
    context = kv_tokens / np.maximum(requests, 1.0)
    return np.clip(np.log2(np.maximum(context, 1.0) / 256.0) / 4.0, 0.0, 1.0)


USUAL_CLOCK = 2e9
"""Boost clock of a device that states none [Hz]."""


def decode_with(
    device: Device,
    fit: DecodeFit,
    heads: Heads,
    requests: Array,
    kv_tokens: Array,
    *,
    cached: bool = False,
    windowed: Array = False,
) -> FloatArray:
    r"""Seconds of paged decode attention, one query token per request, with given constants.

    .. math::

        t = t_0 + t_1 \min(1, \tfrac14\log_2 \tfrac{K/r}{256}) + \frac{2 K g d\,b}{W e_m} + r (c_r + c_g g + c_h h)

    Parameters
    ----------
    heads : h, g, d
    requests : r [1]
    kv_tokens : K, cached tokens read, summed over the requests [tokens]
    cached : the same keys and values were just read, as in kernel benchmarks (L2)
    windowed : the layer has a window, however short the context

    Notes
    -----
    Most kernels split the keys of a request over multiprocessors, in a window as elsewhere. FlashAttention-2 does not
    (``fit.window``): one multiprocessor reads the window of a request's query head, :math:`\beta` bytes a clock, and
    :math:`\lceil r h / SM \rceil` of them one after the other,

    .. math::

        t = t_w + \max\left(\left\lceil \frac{r h}{SM} \right\rceil
            \left(t_s + \frac{2 (K/r) d\,b}{\beta f}\right), \frac{2 K g d\,b}{W e_w}\right)

    FlashAttention-3 (``fit.rounds``) gives a window of one key head, its query heads packed, to one multiprocessor:

    .. math:: t = t_w - t_0 + t_{full} + \left(\left\lceil \frac{r g}{SM} \right\rceil - 1\right) t_s

    fp8 caches reach a lower share of the bandwidth (their own constants): far less than twice the rate. Fitted for
    head_dim 128, 1..1024 requests, 512..131072 tokens.
    """
    r, kv, g = as_float(requests), as_float(kv_tokens), as_float(heads.kv_heads)
    moved = 2.0 * kv * g * as_float(heads.head_dim) * cache_bytes(fit.kv_dtype)
    memory_s = moved / (device.memory_bandwidth * fit.memory)
    if cached:
        memory_s = still_in_l2(device, memory_s, moved, fit.cached, share=CACHE_SHARE)
    long = split_share(r, kv)
    each = fit.per_request + fit.per_pair * g + fit.per_head * as_float(heads.heads)
    seconds = fit.fixed + fit.long_fixed * long + memory_s + r * each
    if fit.window is not None and np.any(windowed):
        seconds = np.where(windowed, _window_s(device, fit.window, heads, r, moved), seconds)
    if fit.rounds is not None and np.any(windowed):
        later = np.ceil(r * g / float(device.multiprocessors or 100)) - 1.0
        beside = fit.rounds.fixed - fit.fixed + np.maximum(later, 0.0) * fit.rounds.each
        seconds = np.where(windowed, seconds + beside, seconds)
    return np.where(r > 0, seconds, 0.0)


def _window_s(device: Device, fit: WindowFit, heads: Heads, requests: FloatArray, moved: FloatArray) -> FloatArray:
    """Seconds of windows that are not split, ``moved`` bytes of keys and values of all requests: see `decode_with`."""
    each = moved / np.maximum(requests * as_float(heads.kv_heads), 1.0)
    alone = fit.start + each / (fit.bytes_per_clock * (device.boost_clock or USUAL_CLOCK))
    waves = np.ceil(requests * as_float(heads.heads) / float(device.multiprocessors or 100))
    return np.asarray(fit.fixed + np.maximum(waves * alone, moved / (device.memory_bandwidth * fit.memory)))


def decode_attention_s(
    hw: Hardware,
    heads: Heads,
    requests: Array,
    kv_tokens: Array,
    *,
    kv_dtype: str = "bf16",
    kernel: str | None = None,
    windowed: bool = False,
) -> FloatArray:
    """Seconds of paged decode attention with the device's constants, cache in memory: see `decode_with`."""
    fit, _ = decode_fit(hw, kv_dtype, kernel)
    factor = cache_bytes(kv_dtype) / cache_bytes(fit.kv_dtype)
    return decode_with(hw.device, fit, heads, requests, as_float(kv_tokens) * factor, windowed=windowed)
