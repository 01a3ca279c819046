"""Latent attention on one device: absorbed decodes on the cached latents, and prompts with their keys rebuilt."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from rlperf.cost.attention import CACHE_SHARE, Heads, decode_fit, prefill_attention_s, prefill_fit, split_share
from rlperf.cost.dtypes import cache_bytes
from rlperf.cost.roofline import Array, as_float, gemm_s, joined, sheet_flop_per_s, sheet_peak, still_in_l2
from rlperf.layout import FloatArray
from rlperf.specs.calibration import AbsorptionFit, LatentFit, PrefillFit
from rlperf.specs.cluster import Device
from rlperf.specs.hardware import Hardware

Fit = TypeVar("Fit", LatentFit, PrefillFit)


def latent_decode_fit(hw: Hardware, kv_dtype: str, engine: str) -> LatentFit | None:
    """Constants of an engine's kernel over cached latents, else another engine's; None where nobody timed any."""
    return _of_engine(hw.calibration.latent_decode, kv_dtype, engine)


def latent_prefill_fit(hw: Hardware, kv_dtype: str, engine: str) -> PrefillFit | None:
    """The same over prompts."""
    return _of_engine(hw.calibration.latent_prefill, kv_dtype, engine)


def _of_engine(fits: tuple[Fit, ...], kv_dtype: str, engine: str) -> Fit | None:
    wanted = "bf16" if kv_dtype in ("fp16", "bf16") else kv_dtype
    found = sorted(fits, key=lambda fit: (fit.kv_dtype != wanted, fit.kernel != engine))
    return found[0] if found else None


def absorption_with(
    device: Device,
    fit: AbsorptionFit,
    tokens: Array,
    heads: Array,
    width: Array,
    kv_rank: Array,
    *,
    cached: bool = False,
) -> FloatArray:
    r"""Seconds of one of a decode's two products with the latents, a batched product of every head.

    .. math::

        t = t_0 + \sqrt{\left(\frac{2 h\,(d c + n (d + c))}{W e_m}\right)^2 + \left(\frac{2 n h d c}{P e_c}\right)^2}

    Parameters
    ----------
    tokens, heads : n and h on the device [1]
    width, kv_rank : d of a head (keys without rotation, or values) and c of the latent [1]
    cached : the same operands were just read, as in kernel benchmarks (L2)

    Notes
    -----
    n h c values go to memory and back between the products and the attention, for which prompts, whose keys are
    rebuilt, have no use. Fitted for 1 to 16,384 tokens and 16 to 128 heads of 128 by 512.
    """
    n, h, d, c = (as_float(one) for one in (tokens, heads, width, kv_rank))
    moved = 2.0 * h * (d * c + n * (d + c))
    memory_s = moved / (device.memory_bandwidth * fit.memory)
    if cached:
        memory_s = still_in_l2(device, memory_s, moved, fit.cached)
    compute_s = 2.0 * n * h * d * c / (sheet_peak(device, "bf16") * fit.compute)
    return np.where(n > 0, fit.fixed + np.hypot(memory_s, compute_s), 0.0)


def absorption_s(hw: Hardware, tokens: Array, heads: Array, width: Array, kv_rank: Array, engine: str) -> FloatArray:
    """Seconds of one of a decode's two products with the latents: see `absorption_with`.

    Where nobody timed it, the plain product of as many values (judged).
    """
    fits = hw.calibration.absorption
    if not fits:
        return gemm_s(hw, tokens, as_float(heads) * as_float(width), kv_rank)
    fit = next((one for one in fits if one.kernel == engine), fits[0])
    return absorption_with(hw.device, fit, tokens, heads, width, kv_rank)


def absorbed_with(
    device: Device,
    fit: LatentFit,
    requests: Array,
    kv_tokens: Array,
    heads: Array,
    kv_rank: Array,
    rope_head_dim: Array,
    *,
    cached: bool = False,
) -> FloatArray:
    r"""Seconds of decode attention on the latent cache (MLA, absorbed form; DeepSeek-V2, arXiv 2405.04434, sec. 2.1).

    .. math::

        t = t_0 + t_1 \min(1, \tfrac14\log_2 \tfrac{K/r}{256})
            + \left(\left[\frac{K (c + r_d) b}{W e_m}\right]^n
                + \left[\frac{2 K h (2 c + r_d)}{P e_c}\right]^n\right)^{1/n} + r h c_h

    Parameters
    ----------
    requests : r [1]
    kv_tokens : K, cached tokens read, summed over the requests [tokens]
    heads : h, query heads on the device [1]
    kv_rank, rope_head_dim : c and r_d, widths of the latent and of the rotary key [1]
    cached : the same latents were just read, as in kernel benchmarks (L2)

    Notes
    -----
    Every head attends the same latent, so that the kernel is a product with about 2 h FLOP per byte: at 128 heads it
    is bound by compute. P is the peak of the cache's dtype. Fitted for 16 to 128 heads, 1 to 512 requests, 1024 to
    65,536 tokens of DeepSeek-V3's widths (512 and 64).
    """
    r, kv, h = as_float(requests), as_float(kv_tokens), as_float(heads)
    c, rope = as_float(kv_rank), as_float(rope_head_dim)
    moved = kv * (c + rope) * cache_bytes(fit.kv_dtype)
    memory_s = moved / (device.memory_bandwidth * fit.memory)
    if cached:
        memory_s = still_in_l2(device, memory_s, moved, fit.cached, share=CACHE_SHARE)
    compute_s = 2.0 * kv * h * (2.0 * c + rope) / (sheet_peak(device, fit.kv_dtype) * fit.compute)
    kernel_s = fit.fixed + fit.long_fixed * split_share(r, kv)
    seconds = kernel_s + joined(memory_s, compute_s, fit.exponent) + r * h * fit.per_head
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
    engine: str = "vllm",
    kernel: str | None = None,
) -> FloatArray:
    r"""Seconds of absorbed decodes with the device's constants, cache in memory: see `absorbed_with`.

    Where nobody timed them (judged), with those of its paged decodes (``kernel``) and of its prompts:

    .. math:: t = t_0 + t_1 + \sqrt{\left(\frac{K (c + r_d) b}{W e_m}\right)^2
        + \left(\frac{2 K h (2 c + r_d)}{P e_c}\right)^2} + r (c_r + c_g)
    """
    told = latent_decode_fit(hw, kv_dtype, engine)
    if told is not None:
        factor = cache_bytes(kv_dtype) / cache_bytes(told.kv_dtype)
        return absorbed_with(hw.device, told, requests, as_float(kv_tokens) * factor, heads, kv_rank, rope_head_dim)
    fit, _ = decode_fit(hw, kv_dtype, kernel)
    prefill, _ = prefill_fit(hw)
    r, kv, h = as_float(requests), as_float(kv_tokens), as_float(heads)
    c, rope = as_float(kv_rank), as_float(rope_head_dim)
    memory_s = kv * (c + rope) * cache_bytes(kv_dtype) / (hw.device.memory_bandwidth * fit.memory)
    compute_s = 2.0 * kv * h * (2.0 * c + rope) / (sheet_flop_per_s(hw, "bf16") * prefill.compute)
    seconds = fit.fixed + fit.long_fixed + np.hypot(memory_s, compute_s) + r * (fit.per_request + fit.per_pair)
    return np.where(r > 0, seconds, 0.0)


def latent_prefill_attention_s(
    hw: Hardware,
    heads: Heads,
    sequences: Array,
    query_tokens: Array,
    kv_tokens: Array,
    *,
    kv_dtype: str = "bf16",
    engine: str = "vllm",
    kernel: str | None = None,
    cache_values: Array = 0.0,
) -> FloatArray:
    """Seconds of MLA over an engine's prompts: ordinary attention with query width nope + rope and its own value width.

    ``cache_values`` are the values an engine caches per token: the latent and the rotary key.

    Where nobody timed it, the kernel for heads of one width (``kernel``) stands in (judged).
    """
    fit = latent_prefill_fit(hw, kv_dtype, engine) or prefill_fit(hw, kernel=kernel)[0]
    seconds = prefill_attention_s(hw, heads, sequences, query_tokens, kv_tokens, fit=fit)
    written = as_float(sequences) * as_float(query_tokens) * as_float(cache_values)
    return np.asarray(seconds + 4.0 * written / hw.device.memory_bandwidth)
