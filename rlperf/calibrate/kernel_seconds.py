"""Seconds of a series of kernel timings by given constants: the cost functions themselves, as a benchmark runs them.

A fit tries constants in them, a validation puts in those that a plan would take. What a benchmark repeats stands in L2
as far as it fits (``cached``), which nothing in an engine does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from rlperf.calibrate.kernel_tables import Series
from rlperf.cost.attention import Heads, decode_with, edge_pairs, flash_with, visible_pairs
from rlperf.cost.collectives import link_bytes_per_s, reached
from rlperf.cost.dtypes import dtype_of
from rlperf.cost.exchange import SUMMED_BYTES, exchanged_with
from rlperf.cost.latent import absorbed_with, absorption_with
from rlperf.cost.moe import Dealt, ExpertShape, grouped_with
from rlperf.cost.roofline import gemm_with
from rlperf.cost.scan import chunked_with, convolved_with, scan_with, step_with
from rlperf.cost.streams import mixing_with
from rlperf.layout import BoolArray, FloatArray
from rlperf.specs.calibration import (
    AbsorptionFit,
    DecodeFit,
    DispatchFit,
    ExchangeFit,
    GemmFit,
    LatentFit,
    MoeFit,
    PrefillFit,
    ScanFit,
    StreamFit,
    StreamsFit,
)
from rlperf.specs.cluster import Device

Seconds = Callable[[Any, BoolArray], FloatArray]
"""Seconds from constants, for the rows of a mask."""

KV_RANK, ROPE, NOPE, VALUE = 512.0, 64.0, 128.0, 128.0
"""Widths of DeepSeek-V2 and -V3, of which all tables of latent attention's kernels are."""
EXPERTS = ("num_tokens", "hidden_size", "inter_size", "num_experts", "topk", "moe_ep_size")
"""Columns of an expert kernel's shape, beside the devices that share an expert."""

Own = TypeVar("Own", PrefillFit, DecodeFit)


def own_fit(series: Series, fits: Sequence[Own]) -> Own | None:
    """Of a device's constants those of the very kernel of a series."""
    return next((fit for fit in fits if (fit.kernel, fit.kv_dtype) == (series.kernel, series.dtype)), None)


def _columns(series: Series, *names: str) -> list[FloatArray]:
    return [series.shape[name] for name in names]


def gemm_seconds(series: Series, device: Device) -> Seconds:
    """Products."""
    m, n, k = _columns(series, "m", "n", "k")

    def seconds(fit: GemmFit, r: BoolArray) -> FloatArray:
        return gemm_with(device, fit, m[r], n[r], k[r], series.dtype, cached=True)

    return seconds


def within_window(series: Series, tokens: FloatArray) -> FloatArray:
    """Keys that a query sees at most; no window is one of 0."""
    window = series.shape["window_size"]
    return np.where(window > 0.0, np.minimum(window, tokens), tokens)


def prefill_seconds(series: Series, device: Device) -> Seconds:
    """Flash attention over whole prompts, cache write included."""
    b, s, h, g, d = _columns(series, "batch", "seq_len", "num_heads", "num_kv_heads", "head_dim")
    seen = within_window(series, s)
    pairs = visible_pairs(s, s, window=seen)

    def seconds(fit: PrefillFit, r: BoolArray) -> FloatArray:
        held = b[r] * (pairs[r] + edge_pairs(fit, s[r], s[r], seen[r]))
        return flash_with(device, fit, (b * s)[r], held, seen[r], (b * s)[r], Heads(h[r], g[r], d[r]))

    return seconds


def encoder_seconds(series: Series, device: Device) -> Seconds:
    """A vision tower's attention, without a mask."""
    b, s, h, d = _columns(series, "batch", "seq_len", "num_heads", "head_dim")

    def seconds(fit: PrefillFit, r: BoolArray) -> FloatArray:
        heads = Heads(h[r], h[r], d[r], causal=False)
        return flash_with(device, fit, (b * s)[r], (b * s * s)[r], s[r], 0.0, heads)

    return seconds


def decode_seconds(series: Series, device: Device) -> Seconds:
    """Paged decode attention."""
    b, s, h, g, d = _columns(series, "batch", "kv_len", "num_heads", "num_kv_heads", "head_dim")
    seen, windowed = within_window(series, s), series.shape["window_size"] > 0.0

    def seconds(fit: DecodeFit, r: BoolArray) -> FloatArray:
        heads = Heads(h[r], g[r], d[r])
        return decode_with(device, fit, heads, b[r], (b * seen)[r], cached=True, windowed=windowed[r])

    return seconds


def latent_seconds(series: Series, device: Device) -> Seconds:
    """Latent attention: absorbed decodes, or whole prompts with nothing cached before nor written."""
    h, b, q, past = _columns(series, "num_heads", "batch", "q_len", "past_len")

    def decodes(fit: LatentFit, r: BoolArray) -> FloatArray:
        return absorbed_with(device, fit, b[r], (b * (past + 1.0))[r], h[r], KV_RANK, ROPE, cached=True)

    def prompts(fit: PrefillFit, r: BoolArray) -> FloatArray:
        heads = Heads(h[r], h[r], NOPE + ROPE, VALUE)
        return flash_with(device, fit, (b * q)[r], (b * visible_pairs(q, q))[r], q[r], 0.0, heads)

    return decodes if series.variant == "generation" else prompts


def absorption_seconds(series: Series, device: Device) -> Seconds:
    """A decode's products with the latents."""
    n, h = _columns(series, "num_tokens", "num_heads")

    def seconds(fit: AbsorptionFit, r: BoolArray) -> FloatArray:
        return absorption_with(device, fit, n[r], h[r], NOPE, KV_RANK, cached=True)

    return seconds


Dealing = Callable[[MoeFit, BoolArray], Dealt]
"""How the tokens of the rows of a mask come to experts."""


def evenly(series: Series, touched_share: FloatArray | None = None) -> Dealing:
    """Tokens dealt out as a series says, evenly or by chance; ``touched_share`` of its rows, 1 where None."""
    share = np.ones_like(series.measured_s) if touched_share is None else touched_share
    return lambda _, r: Dealt(touched_share=share[r], balanced=series.variant == "balanced")


def by_power_law(series: Series) -> Dealing:
    """Power-law routing, by a kernel's own constants of it."""
    ep = series.shape["moe_ep_size"]
    return lambda fit, r: Dealt(skew=ep[r] ** fit.skew_exponent, touched_share=fit.skew_touched)


def brought(series: Series) -> Dealing:
    """An all-to-all brings each rank the tokens of its own experts, evenly or by a power law."""
    if series.variant == "uniform":
        return lambda _, r: Dealt(dispatched=True, balanced=True)
    dealt = by_power_law(series)
    return lambda fit, r: replace(dealt(fit, r), dispatched=True)


def expert_seconds(series: Series, device: Device, dealt: Dealing) -> Seconds:
    """Grouped expert products, one layer again and again."""
    n, h, w, e, a, ep = _columns(series, *EXPERTS)
    tp = series.shape.get("moe_tp_size", np.ones_like(n))
    matrices = matrices_of(series.kernel)

    def seconds(fit: MoeFit, r: BoolArray) -> FloatArray:
        shape = ExpertShape(h[r], w[r], e[r], a[r], matrices)
        return grouped_with(
            device, fit, n[r], shape, ep[r], tp[r], dtype=series.dtype, dealt=dealt(fit, r), cached=True
        )

    return seconds


def matrices_of(kernel: str) -> int:
    """Matrices of one expert: two without a gate."""
    return 2 if kernel.endswith("nongated") else 3


def dispatch_seconds(series: Series, device: Device, per_node: int) -> Seconds:
    """Expert dispatch or combine over one number of nodes: t = fixed + experts c + bytes / rate."""
    nodes = int(series.shape["node_num"][0])
    copies, experts = series.shape["num_topk"], series.shape["num_experts"]
    if series.kernel == "deepep_normal":
        copies = reached(copies, float(nodes if nodes > 1 else per_node))
    sent_bytes = dtype_of(series.dtype.split("/")[-1]).activation_bytes if series.dtype else 1.0
    value_bytes = sent_bytes if series.variant.startswith("dispatch") else 2.0
    moved = series.shape["num_token"] * copies * series.shape["hidden_size"] * value_bytes
    rate = link_bytes_per_s(device)

    def seconds(fit: DispatchFit, r: BoolArray) -> FloatArray:
        return np.asarray(fit.fixed + experts[r] * fit.per_expert + moved[r] / (fit.rate * rate))

    return seconds


def exchange_seconds(series: Series, device: Device) -> Seconds:
    """An engine's own dispatch or combine of tokens whose experts lie apart, on as many devices as there can be."""
    group, width, tokens, active = _columns(series, "ep_size", "hidden_size", "num_tokens", "topk")
    value_bytes = dtype_of(series.dtype).activation_bytes if series.variant == "dispatch" else SUMMED_BYTES
    moved = tokens * np.minimum(active, group) * width * value_bytes

    def seconds(fit: ExchangeFit, r: BoolArray) -> FloatArray:
        return exchanged_with(device, fit, moved[r], group[r])

    return seconds


def mixer_of_scan(series: Series) -> str:
    """The recurrent mixer that was timed; a Gated DeltaNet where nothing is said."""
    return series.dtype or "gated_delta"


def scan_seconds(series: Series, device: Device) -> Seconds:
    """A recurrent mixer of one engine in one phase: its scan, or one step of its recurrence, drafts verified or not."""
    b, s, h, k, v = _columns(series, "batch", "seq_len", "num_v_heads", "head_k_dim", "head_v_dim")
    prompts = series.variant == "context"

    def seconds(fit: ScanFit, r: BoolArray) -> FloatArray:
        if mixer_of_scan(series) == "mamba":
            return chunked_with(device, fit, b[r], s[r], h[r], k[r], v[r], series.shape["chunk_size"][r])
        if prompts:
            return scan_with(device, fit, b[r], s[r], h[r], k[r], v[r])
        return step_with(device, fit, b[r], 4.0 * (h * k * v)[r], drafts=s[r] - 1.0, cached=True)

    return seconds


def convolution_seconds(series: Series, device: Device) -> Seconds:
    """The convolution in front of a recurrent mixer."""
    b, s, channels, taps = _columns(series, "batch", "seq_len", "channels", "taps")

    def seconds(fit: ScanFit, r: BoolArray) -> FloatArray:
        return convolved_with(device, fit, b[r], s[r], channels[r], taps[r], cached=True)

    return seconds


def streams_seconds(series: Series, device: Device) -> Seconds:
    """Hyper-connections: kernels in front of a half of a layer, and the one behind it."""
    n, hidden, streams, sites, before = _columns(series, "num_tokens", "hidden_size", "hc_mult", "num_sites", "before")

    def seconds(fit: StreamsFit, r: BoolArray) -> FloatArray:
        front, back = mixing_with(device, fit, n[r], streams[r], hidden[r], cached=True)
        return np.asarray(sites[r] * np.where(before[r] > 0, front, back))

    return seconds


def stream_seconds(series: Series, device: Device) -> Seconds:
    """Large memory-bound passes: t = fixed + bytes / (W e)."""
    moved = series.shape["n_bytes"]

    def seconds(fit: StreamFit, r: BoolArray) -> FloatArray:
        return np.asarray(fit.small_fixed + moved[r] / (fit.stream_memory * device.memory_bandwidth))

    return seconds
