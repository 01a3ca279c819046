"""Timings of single kernels inside attention over chosen keys: scores of the index, the choice, and attention.

Each is one term of `rlperf.cost.sparse`, whose constants timings of whole modules told, behind the start of a kernel.
What they tell themselves is attention over a cache of 16 bits, with which no module was timed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlperf.calibrate.fitting import Bounds
from rlperf.calibrate.kernel_fits import KernelFit, digits, run_fit
from rlperf.calibrate.kernel_seconds import Seconds
from rlperf.calibrate.kernel_tables import Series
from rlperf.calibrate.rows_beside import WIDE
from rlperf.cost.layers import stack_of
from rlperf.cost.layers.choosing import Choosing
from rlperf.cost.replica import Replica, Roles
from rlperf.cost.sparse import SCORE_BYTES, choice_with, read_with, scored_with, sparse_fit
from rlperf.errors import SpecError
from rlperf.layout import BoolArray, FloatArray
from rlperf.specs.calibration import SparseFit
from rlperf.specs.engine_calibration import load_engine_calibration
from rlperf.specs.hardware import Hardware
from rlperf.specs.profiles import load_architecture

SCORES = ("mqa_logits", "paged_mqa_logits")
CHOICES = ("topk", "csa_topk")


def timed_part(series: Series) -> Choosing:
    """The layer that a kernel is of, on one device.

    Raises
    ------
    SpecError : nobody describes the model, or it has no such layer
    """
    model, ratio = series.variant.split("/")[1], series.shape["compress_ratio"][0]
    layers = (half.layer for half in stack_of(load_architecture(model)).halves)
    for layer in layers:
        if isinstance(layer, Choosing) and layer.ratio == ratio:
            return layer
    raise SpecError(f"{model} keeps no key for {ratio:g} tokens")


def part_fit(series: Series, hw: Hardware) -> SparseFit:
    """The constants that a plan takes for such a layer."""
    phase, wide = series.variant.rsplit("/", 1)[1], series.variant.startswith(WIDE)
    return sparse_fit(hw, timed_part(series).table, phase, series.kernel, narrow=not wide)


def part_seconds(series: Series, hw: Hardware) -> Seconds:
    """Seconds of one kernel: a start, and its term."""
    layer, operation = timed_part(series), series.variant.split("/")[0]
    cache, one = "bf16" if operation == WIDE else "fp8", np.ones(1)
    roles = Roles("bf16", "bf16", "bf16", "bf16")
    engine = load_engine_calibration(series.kernel)
    work = layer.choice(Replica(layer.arch, hw, engine, roles, cache, one, one, one, one, one))
    batch, query, past = (series.shape[name] for name in ("batch", "q_len", "past_len"))
    asked = layer.queried(batch, query, past + query)
    scored = asked.pairs / layer.ratio

    def term(fit: SparseFit) -> FloatArray:
        if operation in SCORES:
            longest = asked.longest if operation == "mqa_logits" else 0.0
            return scored_with(hw.device, fit, work, scored, asked.keys / layer.ratio, SCORE_BYTES, longest)
        if operation in CHOICES:
            read_s = SCORE_BYTES * scored / (hw.device.memory_bandwidth * fit.index_memory)
            return choice_with(fit, asked.choices) + read_s
        return read_with(hw.device, fit, work, asked.queries, layer.computed_pairs(fit, asked))

    def seconds(fit: SparseFit, r: BoolArray) -> FloatArray:
        return np.asarray(hw.calibration.stream.small_fixed + term(fit)[r])

    return seconds


def fit_wide(series: Series, hw: Hardware, *, check: bool) -> KernelFit:
    """Attention over chosen keys of 16 bits in prompts: it computes all places, and gathers them on the way."""
    base = sparse_fit(hw, timed_part(series).table, "context", series.kernel)
    seconds = part_seconds(series, hw)
    named: dict[str, Any] = {"cache": "bf16", "gather": None, "padded": 1.0, "timed_on": None}

    def build(p: FloatArray) -> SparseFit:
        return base.model_copy(update={**named, "compute": p[0]})

    fitted = run_fit(series, build, seconds, Bounds.of((0.02, 0.5, 1.2)), ("batch", "q_len"), check)
    found = {"compute": digits(fitted.parameters[0]), "quality": fitted.quality(series.name)}
    return KernelFit("sparse", base.model_copy(update={**named, **found}), fitted, series)
