"""Linear attention with a gated delta rule on one device: the scan over prompts and one step of the recurrence."""

from __future__ import annotations

import numpy as np

from rlperf.cost.roofline import L2_SHARE, Array, as_float, joined, sheet_peak, still_in_l2
from rlperf.layout import FloatArray
from rlperf.specs.calibration import ScanFit
from rlperf.specs.cluster import Device
from rlperf.specs.hardware import Hardware

CHUNK = 64.0
"""Tokens of a chunk in every kernel that was timed."""
STATES_SHARE = 1.4
"""Bytes of states read and written again over L2 at which half of what L2 spares is lost: 0.7 of it are states, which a
kernel that runs again finds all or not at all (0.7 to 2.0 and edges of 3 to 12 tried on 30 series of timings)."""
PASSED_SHARE = 2.0
"""Bytes passed between all kernels of a scan over L2 at which half of what L2 would spare is lost: five pass them."""


def scan_fit(hw: Hardware, mixer: str, phase: str, engine: str) -> ScanFit | None:
    """Constants of an engine's kernel in a phase; another engine's where its own was not timed; None: nobody's."""
    fits = [fit for fit in hw.calibration.scan if fit.phase == phase and fit.mixer == mixer]
    return next((fit for fit in fits if fit.kernel == engine), fits[0] if fits else None)


def step_with(
    device: Device, fit: ScanFit, requests: Array, state_bytes: Array, *, drafts: Array = 0.0, cached: bool = False
) -> FloatArray:
    r"""Seconds of one step of the recurrence, :math:`t = t_0 + (2 + k) r S / (W e_m)`: every state is read and written.

    Parameters
    ----------
    requests : r, running requests [1]
    state_bytes : S, state of one request in fp32 on this device [bytes]
    drafts : k, tokens verified beside the one that is decoded: the state behind each is written, too, so that the
        engine can go back to where drafts are rejected [1]
    cached : states stand in L2 from the last call, as in kernel benchmarks; in an engine they never do

    Notes
    -----
    Fitted for 1..512 requests and 4..64 heads of 128 x 128, without drafts.
    """
    moved = (2.0 + as_float(drafts)) * as_float(requests) * as_float(state_bytes)
    memory_s = moved / (device.memory_bandwidth * fit.memory)
    if cached:
        memory_s = still_in_l2(device, memory_s, moved, fit.cached, share=STATES_SHARE, edge=6.0)
    return np.where(moved > 0, fit.fixed + memory_s, 0.0)


def convolved_with(
    device: Device, fit: ScanFit, sequences: Array, query_tokens: Array, channels: Array, taps: Array,
    *, cached: bool = False,
) -> FloatArray:  # fmt: skip
    r"""Seconds of the causal convolution in front of a recurrence.

    .. math:: t = t_0 + \left(\left[\frac{s\,n\,c\,b}{W e_m}\right]^2 + [s\,c\,c_b]^2\right)^{1/2}

    Parameters
    ----------
    sequences, query_tokens : s prompts of n new tokens; in a step the running requests, of one token each, or of all
        that are verified [1, tokens]
    channels, taps : c, channels on this device, and k, tokens that the convolution sees [1]
    cached : inputs stand in L2 from the last call, as in kernel benchmarks

    Notes
    -----
    b is 4 bytes in prompts (two read, two written); a step reads the last k - 1 inputs too, and writes those behind
    each of its tokens: n b = 4 n + 2 (k - 1) (n + 1).
    c_b: some kernels have a block of threads for every sequence and channel, however few its tokens. Fitted for
    1..512 requests, 128..512k tokens and 1k..37k channels.
    """
    s, c = as_float(sequences), as_float(channels)
    moved = s * c * 4.0 * as_float(query_tokens)
    if fit.phase == "generation":
        moved = moved + s * c * 2.0 * (as_float(taps) - 1.0) * (as_float(query_tokens) + 1.0)
    memory_s = moved / (device.memory_bandwidth * fit.memory)
    if cached:
        memory_s = still_in_l2(device, memory_s, moved, fit.cached, share=2.0 * L2_SHARE)
    return np.where(moved > 0, fit.fixed + joined(memory_s, s * c * fit.per_block, 2.0), 0.0)


def scan_flop(tokens: Array, heads: Array, keys: Array, values: Array) -> FloatArray:
    """FLOP of a chunked scan: products inside a chunk, and of every token with the state [FLOP]."""
    inside = CHUNK * (as_float(keys) + as_float(values))
    return 2.0 * as_float(tokens) * as_float(heads) * (inside + 2.0 * as_float(keys) * as_float(values))


def scan_bytes(tokens: Array, heads: Array, keys: Array, values: Array) -> FloatArray:
    """Bytes that a chunked scan passes between its kernels, in five launches as flash-linear-attention has them.

    Of a token and head keys are read or written seven times and values six, in two bytes; products of the chunk's keys
    with each other are written and read in fp32, their inverse in two bytes; of every chunk the state is written and
    read in two bytes. Kernels that fuse launches move less.
    """
    inside = 2.0 * (7.0 * as_float(keys) + 6.0 * as_float(values)) + 12.0 * CHUNK
    return as_float(tokens) * as_float(heads) * (inside + 4.0 * as_float(keys) * as_float(values) / CHUNK)


def scan_with(
    device: Device, fit: ScanFit, sequences: Array, query_tokens: Array, heads: Array, keys: Array, values: Array
) -> FloatArray:
    r"""Seconds of the chunked scan over prompts (arXiv 2412.06464, section 3.3).

    .. math::

        t = t_0 + \left(\left[\frac{F}{P e_c}\right]^2 + \left[\frac{B}{W e_m}\right]^2 + [s\,c_s]^2\right)^{1/2}

    Parameters
    ----------
    sequences, query_tokens : prompts, and s, new tokens of each [1, tokens]
    heads, keys, values : of the state on this device [1]

    Notes
    -----
    F of `scan_flop`, B of `scan_bytes`. What one kernel passes to the next stands in L2 as far as it fits (in an engine
    too), where it is read at e times more. Chunks of one sequence wait for each other: c_s seconds a token, whatever
    the heads. Fitted for 1..64 prompts of 128..32k tokens and 4..64 heads of 128 x 128.
    """
    s = as_float(query_tokens)
    tokens = as_float(sequences) * s
    compute_s = scan_flop(tokens, heads, keys, values) / (sheet_peak(device, "bf16") * fit.compute)
    moved = scan_bytes(tokens, heads, keys, values)
    memory_s = moved / (device.memory_bandwidth * fit.memory)
    memory_s = still_in_l2(device, memory_s, moved, fit.cached, share=PASSED_SHARE)
    return np.where(moved > 0, fit.fixed + joined(joined(compute_s, memory_s, 2.0), s * fit.per_step, 2.0), 0.0)


def chunked_with(
    device: Device, fit: ScanFit, sequences: Array, query_tokens: Array, heads: Array, keys: Array, values: Array,
    chunk: Array,
) -> FloatArray:  # fmt: skip
    r"""Seconds of Mamba-2's chunked scan over prompts (arXiv 2405.21060, section 6), which memory bounds.

    .. math:: t = t_0 + \frac{s \lceil n / q \rceil\,h d\,(8 q + 16 k)}{W e_m}

    Parameters
    ----------
    sequences, query_tokens : s prompts of n new tokens; a chunk of q that is not full takes as long [1, tokens]
    heads, keys, values : h, k and d of the state on this device [1]

    Notes
    -----
    Of every token input, gate and output in two bytes and the step are moved, of every chunk its state in fp32 between
    four kernels. Fitted for 1..64 prompts of 1..32k tokens and 64..256 heads of 64 x 64..256.
    """
    chunks = as_float(sequences) * np.ceil(as_float(query_tokens) / as_float(chunk))
    moved = chunks * as_float(heads) * as_float(values) * (8.0 * as_float(chunk) + 16.0 * as_float(keys))
    return np.where(moved > 0, fit.fixed + moved / (device.memory_bandwidth * fit.memory), 0.0)
