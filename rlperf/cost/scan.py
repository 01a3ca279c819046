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


def scan_fit(hw: Hardware, mixer: str, phase: str, engine: str) -> ScanFit | None:
    """Constants of an engine's kernel in a phase; another engine's where its own was not timed; None: nobody's."""
    fits = [fit for fit in hw.calibration.scan if fit.phase == phase and fit.mixer == mixer]
    return next((fit for fit in fits if fit.kernel == engine), fits[0] if fits else None)


def step_with(device: Device, fit: ScanFit, requests: Array, state_bytes: Array, *, cached: bool = False) -> FloatArray:
    r"""Seconds of one step of the recurrence: every state is read and written, :math:`t = t_0 + 2 r S / (W e_m)`.

    Parameters
    ----------
    requests : r, running requests [1]
    state_bytes : S, state of one request in fp32 on this device [bytes]
    cached : states stand in L2 from the last call, as in kernel benchmarks; in an engine they never do

    Notes
    -----
    Fitted for 1..512 requests and 4..64 heads of 128 x 128.
    """
    moved = 2.0 * as_float(requests) * as_float(state_bytes)
    memory_s = moved / (device.memory_bandwidth * fit.memory)
    if cached:
        memory_s = still_in_l2(device, memory_s, moved, fit.cached, share=2.0 * L2_SHARE)
    return np.where(moved > 0, fit.fixed + memory_s, 0.0)


def scan_flop(tokens: Array, heads: Array, keys: Array, values: Array) -> FloatArray:
    """FLOP of a chunked scan: products inside a chunk, and of every token with the state [FLOP]."""
    inside = CHUNK * (as_float(keys) + as_float(values))
    return 2.0 * as_float(tokens) * as_float(heads) * (inside + 2.0 * as_float(keys) * as_float(values))


def scan_with(
    device: Device, fit: ScanFit, sequences: Array, query_tokens: Array, heads: Array, keys: Array, values: Array
) -> FloatArray:
    r"""Seconds of the chunked scan over prompts (arXiv 2412.06464, section 3.3).

    .. math:: t = t_0 + \left(\left[\frac{F}{P e_c}\right]^2 + [s\,c_s]^2\right)^{1/2}

    Parameters
    ----------
    sequences, query_tokens : prompts, and s, new tokens of each [1, tokens]
    heads, keys, values : of the state on this device [1]

    Notes
    -----
    F of `scan_flop`. Chunks of one sequence wait for each other: c_s seconds a token, whatever the heads. Fitted for
    1..64 prompts of 128..32k tokens and 4..64 heads of 128 x 128.
    """
    s = as_float(query_tokens)
    flop = scan_flop(as_float(sequences) * s, heads, keys, values)
    compute_s = flop / (sheet_peak(device, "bf16") * fit.compute)
    return np.where(flop > 0, fit.fixed + joined(compute_s, s * fit.per_step, 2.0), 0.0)


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
