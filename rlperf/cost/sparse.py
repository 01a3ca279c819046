"""Attention that reads a choice of its keys, on one device: the index that scores them, and attention over the chosen.

Three kinds share it: a learned index over all tokens (DeepSeek-V3.2, GLM-5), over compressed tokens (DeepSeek-V4), over
blocks of tokens (MiniMax-M3). What differs is how many keys are scored and read, and how wide both are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlperf.cost.attention import decode_fit, prefill_fit
from rlperf.cost.roofline import Array, as_float, joined, sheet_peak
from rlperf.layout import FloatArray
from rlperf.specs.calibration import SparseFit
from rlperf.specs.cluster import Device
from rlperf.specs.hardware import Hardware

HEAD_TILE = 64.0
"""Query heads that kernels of shared keys compute at once: fewer take as long (FlashMLA)."""
SCORED_ROWS = 128.0
"""Rows, of a query and an index head, that one multiprocessor scores at once (DeepGEMM)."""
BLOCKS = 6.0
"""Norm that joins the longest block of queries with the work of all, as in flash attention."""
SCORE_BYTES = 4.0
"""Bytes of a score, in fp32, that is written by the index and read by the choice."""


@dataclass(frozen=True)
class KeyChoice:
    """What one device computes for each query; every number broadcasts.

    Attributes
    ----------
    heads : query heads that the device computes, those that fill up a tile of `HEAD_TILE` included [1]
    pair_flop : FLOP of a head and a key that it reads: 2 (key + value width) [FLOP]
    key_bytes : of a cached key (and value) that is read, all key heads of the device [bytes]
    index_flop : of a query and a key that the index scores: 2 heads x width; 0 without an index [FLOP]
    index_bytes : of a cached index key [bytes]
    width : values of a token's queries and outputs on the device, which small passes move [1]
    narrow : keys are cached in 8 bits, which kernels convert
    block_flop : of the queries that a multiprocessor scores at once and a key [FLOP]
    """

    heads: FloatArray
    pair_flop: float
    key_bytes: FloatArray | float
    index_flop: float
    index_bytes: float
    width: FloatArray
    narrow: bool
    block_flop: float = 0.0


def sparse_fit(hw: Hardware, mixer: str, phase: str, engine: str, *, narrow: bool = True) -> SparseFit:
    """Constants of an engine's kernels for a mixer and a phase; another engine's where its own were not timed.

    Those of a cache in 16 bits go first with one (not ``narrow``). Where nobody timed any: the shares that dense
    attention reaches, and half of them for the index (judged).
    """
    fits = [fit for fit in hw.calibration.sparse if (fit.mixer, fit.phase) == (mixer, phase)]
    held = [fit for fit in fits if fit.cache is None or not narrow]
    if held:
        return min(held, key=lambda fit: (fit.kernel != engine, fit.cache is None))
    dense, prompt = decode_fit(hw)[0], prefill_fit(hw)[0]
    return SparseFit.model_construct(
        kernel=engine, mixer=mixer, phase=phase, fixed=2.0 * (dense.fixed + dense.long_fixed),
        compute=0.8 * prompt.compute, memory=0.8 * dense.memory, index_compute=0.5 * prompt.compute,
        index_memory=0.5 * dense.memory, index_fixed=dense.fixed, per_choice=0.0, passes=4.0,
    )  # fmt: skip


def chosen_with(
    device: Device, fit: SparseFit, work: KeyChoice, queries: Array, scored: Array, read: Array, index_keys: Array,
    choices: Array, longest: Array = 0.0,
) -> FloatArray:  # fmt: skip
    r"""Seconds of sparse attention with given constants.

    .. math::

        t = t_0 + \frac{2 p\,q w}{W e_m} + t_i + n c_n + \frac{q h t_q}{64}
            + \left(\left[\frac{s f_i}{P_8 e_{ic}}\right]^2 +
                    \left[\frac{8 s + n_i b_i}{W e_{im}}\right]^2\right)^{1/2}
            + \left(\left[\frac{c\,h f}{P e_c}\right]^2 + \left[\frac{c\,b}{W e_m}\right]^2\right)^{1/2}

    Parameters
    ----------
    work : h, f, b, f_i, b_i, w
    queries : q, query tokens of all sequences [tokens]
    scored, read : s and c, (query, key) pairs that the index scores, and that attention reads [1]
    index_keys : n_i, cached index keys that are read [1]
    longest : keys that one block of queries goes through on one multiprocessor, in prompts [1]
    choices : n, queries that see more keys than they may read [1]; t_i only where there are some

    Notes
    -----
    s f_i is joined, in a sixth norm, with what the longest block of queries takes on its multiprocessor. In prompts
    neighbouring queries read mostly the same keys, which then stand in L2: there e_m of the keys is
    ``fit.gather``, which may be above 1. e_c is ``fit.narrow`` times as much with a cache of 8 bits. P_8 is the peak of
    fp8 (of 16 bits where a device has none), in which indices are scored.
    """
    q = as_float(queries)
    index = scored_with(device, fit, work, scored, index_keys, 2.0 * SCORE_BYTES, longest) + choice_with(fit, choices)
    index = index * (work.index_flop > 0)
    passes = 2.0 * fit.passes * q * work.width / (device.memory_bandwidth * fit.memory)
    return np.where(q > 0, fit.fixed + passes + index + read_with(device, fit, work, q, read), 0.0)


def scored_with(
    device: Device, fit: SparseFit, work: KeyChoice, scored: Array, index_keys: Array, score_bytes: float,
    longest: Array,
) -> FloatArray:  # fmt: skip
    """Seconds of the index over s pairs, of whose scores ``score_bytes`` each are moved; see `chosen_with`."""
    s = as_float(scored)
    narrow = sheet_peak(device, "fp8" if device.peaks.fp8 else "bf16")
    moved = score_bytes * s + as_float(index_keys) * work.index_bytes
    rate = narrow * fit.index_compute
    block_s = as_float(longest) * work.block_flop * float(device.multiprocessors or 100) / rate
    compute_s = joined(s * work.index_flop / rate, block_s, BLOCKS)
    return joined(compute_s, moved / (device.memory_bandwidth * fit.index_memory), 2.0)


def choice_with(fit: SparseFit, choices: Array) -> FloatArray:
    """Seconds in which n queries choose from scores, beside the reading of these; see `chosen_with`."""
    n = as_float(choices)
    return np.asarray(np.where(n > 0, fit.index_fixed, 0.0) + n * fit.per_choice)


def read_with(device: Device, fit: SparseFit, work: KeyChoice, queries: Array, read: Array) -> FloatArray:
    """Seconds of attention of q queries over c pairs; see `chosen_with`."""
    c, bandwidth = as_float(read), device.memory_bandwidth
    reached = fit.compute * (fit.narrow if work.narrow else 1.0)
    compute_s = c * work.heads * work.pair_flop / (sheet_peak(device, "bf16") * reached)
    gathered = fit.memory if fit.phase == "generation" else fit.gather or np.inf
    tiles = as_float(queries) * work.heads / HEAD_TILE * fit.per_tile
    return tiles + joined(compute_s, c * work.key_bytes / (bandwidth * gathered), 2.0)
