"""Hyper-connections: several residual streams, mixed around every half of a layer (arXiv 2512.24880)."""

from __future__ import annotations

import numpy as np

from rlperf.cost.roofline import L2_SHARE, Array, as_float, still_in_l2
from rlperf.layout import FloatArray
from rlperf.specs.architecture import Architecture
from rlperf.specs.calibration import StreamsFit
from rlperf.specs.cluster import Device
from rlperf.specs.hardware import Hardware


def mixed_bytes(streams: Array, hidden: Array) -> FloatArray:
    """Bytes of a token that mixing moves on one side of a half: all streams twice, and its input or output once.

    In front they are read for the weights of the mixture and once more to be mixed, and the input is written; behind
    they are read and written, and the output is read. Values of two bytes.
    """
    return np.asarray(2.0 * (2.0 * as_float(streams) + 1.0) * as_float(hidden))


def streams_fit(hw: Hardware, engine: str) -> StreamsFit:
    """Constants of an engine's kernels; another engine's where its own were not timed; small passes where nobody's.

    Of other engines' the one whose product is quickest: where an engine has no kernel for a device, PyTorch's stood in.
    """
    fits, small = hw.calibration.streams, hw.calibration.stream
    if fits:
        return next((fit for fit in fits if fit.kernel == engine), min(fits, key=lambda fit: fit.product))
    # the mixture's weights take a product, the normalisation of a small matrix and the mixing: three kernels
    return StreamsFit.model_construct(
        kernel=engine, before=3.0 * small.small_fixed, behind=small.small_fixed, memory=small.stream_memory, cached=0.0
    )


def mixing_with(
    device: Device, fit: StreamsFit, tokens: Array, streams: Array, hidden: Array, *, cached: bool = False
) -> tuple[FloatArray, FloatArray]:
    r"""Seconds in front of and behind one half of a layer: :math:`t = t_0 + (1 + c)\,2 n (2 s + 1) h / (W e_m)`.

    Parameters
    ----------
    tokens : n [tokens]
    streams, hidden : s, and h, width of one stream [1]
    cached : streams stand in L2 from the last call, as in kernel benchmarks

    Notes
    -----
    c is 0 behind, and ``fit.product`` in front, where the mixture's weights are a product of all streams: kernels
    without tensor cores (fp32, or PyTorch's own one by one) take that long for it beside the reads, in L2 or not.
    """
    n = as_float(tokens)
    moved = n * mixed_bytes(streams, hidden)
    memory_s = moved / (device.memory_bandwidth * fit.memory)
    product_s = fit.product * memory_s
    if cached:
        memory_s = still_in_l2(device, memory_s, moved, fit.cached, share=2.0 * L2_SHARE)
    return np.where(n > 0, fit.before + memory_s + product_s, 0.0), np.where(n > 0, fit.behind + memory_s, 0.0)


def stream_parameters(arch: Architecture) -> int:
    """Parameters of the mixture in front of one half: ``(s^2 + 2 s)`` weights from all streams, biases and scales.

    Where the input is mixed by a product of low rank (Qwen4), ``2 r s h`` besides.
    """
    streams = arch.residual_streams
    weights = streams * streams + 2 * streams
    mixed = 2 * arch.residual_rank * streams * arch.hidden
    return weights * (streams * arch.hidden + 1) + 3 + mixed if streams > 1 else 0
