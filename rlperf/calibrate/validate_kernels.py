"""Kernel timings, predicted by the constants that a plan takes on their device, its own or those it borrows.

No file says which rows of a series a fit saw. Where the constants were told of the very series, its rows are summed up
apart; errors of values that no fit saw are those of ``--leave-out shape`` (`rlperf.calibrate.leave_out_kernels`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rlperf.calibrate import collective_rows, fused_rows, layer_rows, training_rows
from rlperf.calibrate.expert_fits import group_limited
from rlperf.calibrate.kernel_fits import interval_of
from rlperf.calibrate.kernel_seconds import (
    Seconds,
    absorption_seconds,
    brought,
    by_power_law,
    convolution_seconds,
    decode_seconds,
    dispatch_seconds,
    encoder_seconds,
    evenly,
    exchange_seconds,
    expert_seconds,
    gemm_seconds,
    latent_seconds,
    mixer_of_scan,
    prefill_seconds,
    scan_seconds,
    stream_seconds,
    streams_seconds,
)
from rlperf.calibrate.kernel_tables import CONVOLUTION, Series, kind_of, read_series
from rlperf.calibrate.module_fits import mixer_of, module_seconds
from rlperf.calibrate.rows_beside import beside
from rlperf.calibrate.sparse_kernels import part_fit, part_seconds
from rlperf.calibrate.tables import Refusal, Table
from rlperf.calibrate.validate import Outcome, PredictedFigure
from rlperf.cost.attention import decode_fit, prefill_fit
from rlperf.cost.collectives import bus_share, collective_fit, domain_s
from rlperf.cost.exchange import exchange_fit
from rlperf.cost.latent import latent_decode_fit, latent_prefill_fit
from rlperf.cost.layers.vision import encoder_fit
from rlperf.cost.moe import moe_fit
from rlperf.cost.roofline import gemm_fit
from rlperf.cost.scan import scan_fit
from rlperf.cost.sparse import sparse_fit
from rlperf.cost.streams import streams_fit
from rlperf.errors import SpecError
from rlperf.layout import BoolArray, FloatArray
from rlperf.specs.calibration import Quality
from rlperf.specs.engine_calibration import load_engine_calibration
from rlperf.specs.hardware import Hardware, load_hardware

SKEWED = "power_law_1.2"
"""Routing of expert timings that a kernel's constants of uneven routing are told from."""
UNKNOWN_EXPERTS = "which experts were touched no file says: the kernel routed equal scores over several devices"
VERIFY = "verify"
"""Phase of timings of several drafted tokens a request, of which no constants are told."""
EMPTY = "a shape with nothing in it takes no time"
NO_CONSTANTS = "neither the device nor one that it borrows from has constants of such a kernel"

_BY_ROW = (
    (collective_rows.COLUMNS, collective_rows.outcome),
    (fused_rows.COLUMNS, fused_rows.outcome),
    (layer_rows.COLUMNS, layer_rows.outcome),
    (training_rows.COLUMNS, training_rows.outcome),
)
"""Tables that are predicted row by row, nothing of which is fitted: their columns, and who predicts them."""


def predict_rows(path: Path, table: Table) -> Outcome:
    """Every timing by shipped constants; rows that no constants speak of are refused."""
    for columns, outcome in _BY_ROW:
        if set(columns) <= set(table.columns):
            return outcome(table)
    predictions: list[PredictedFigure] = []
    kind = kind_of(table.columns)
    rows = list(table)
    reasons = beside(kind, [row.cells for row in rows])
    refused = [Refusal(row.row_id, reason, row.line) for row, reason in zip(rows, reasons, strict=True) if reason]
    hardware = cache(load_hardware)
    for one in read_series(path):
        try:
            found = shipped(one, hardware(one.device))
        except SpecError as error:
            refused += [Refusal(row, error.problems[0].message) for row in one.row_ids]
            continue
        predictions += [each for each in found if each.predicted > 0.0]
        refused += [Refusal(each.row_id, EMPTY) for each in found if not each.predicted > 0.0]
        seen = {each.row_id for each in found}
        refused += [Refusal(row, UNKNOWN_EXPERTS) for row in one.row_ids if row not in seen]
    return Outcome(tuple(predictions), tuple(refused))


def shipped(series: Series, hw: Hardware) -> list[PredictedFigure]:
    """Figures of one series.

    Raises
    ------
    SpecError : no constants speak of such a kernel
    """
    series, constants, seconds = _BY_KIND[series.kind](series, hw)
    quality: Quality | None = getattr(constants, "quality", None)
    spread = interval_of(constants)
    told_by = "/".join((series.kind, series.device, series.kernel))
    own = quality is not None and quality.rows.startswith(told_by) and series.variant != VERIFY
    lender = getattr(constants, "timed_on", None) or (None if own else hw.calibration.extrapolated_from)
    return [
        PredictedFigure(
            row_id=row,
            group=series.name,
            metric="latency_us",
            measured=float(measured) * 1e6,
            predicted=float(value) * 1e6,
            low=float(value) * spread.low * 1e6,
            high=float(value) * spread.high * 1e6,
            calibration=hw.calibration.id,
            assumed=(f"constants of {lender}",) if lender else (),
            extrapolated=bool(lender),
            series_in_fit=own,
            stratum=f"{series.kind} {series.dtype}".strip(),
        )
        for row, measured, value in zip(series.row_ids, series.measured_s, seconds, strict=True)
    ]


Told = tuple[Series, Any, FloatArray]
"""The rows that can be told, the constants that a plan takes for them, and seconds ``[rows]``."""


def _every(series: Series) -> BoolArray:
    return np.ones(len(series.measured_s), dtype=bool)


def _module(series: Series, hw: Hardware) -> Told:
    mixer, phase = mixer_of(series)
    return series, sparse_fit(hw, mixer, phase, series.kernel) if mixer else None, module_seconds(series, hw)(None)


def _part(series: Series, hw: Hardware) -> Told:
    fit = part_fit(series, hw)
    return series, fit, part_seconds(series, hw)(fit, _every(series))


def _collective(series: Series, hw: Hardware) -> Told:
    counts, taken = series.shape["num_gpus"], _taken(series.kernel)
    moved = series.shape["bytes"] * bus_share(series.variant, counts)
    return series, collective_fit(hw, series.variant, taken), domain_s(hw, series.variant, moved, counts, taken)


def _ranked_experts(series: Series, hw: Hardware) -> Told:
    fit, _ = moe_fit(hw, series.dtype, load_engine_calibration("sglang").moe_kernels)
    return series, fit, expert_seconds(series, hw.device, brought(series))(fit, _every(series))


def _experts(series: Series, hw: Hardware) -> Told:
    fit, _ = moe_fit(hw, series.dtype, (series.kernel,))
    kept, touched = group_limited(series)
    dealt = by_power_law(kept) if series.variant == SKEWED else evenly(kept, touched)
    return kept, fit, expert_seconds(kept, hw.device, dealt)(fit, _every(kept))


def _dispatch(series: Series, hw: Hardware) -> Told:
    per_node = hw.cluster.devices_per_node
    operation, nodes = series.variant.split("@")
    key = (series.kernel, operation, int(nodes) * per_node)
    timed = (fit for fit in hw.calibration.dispatch if (fit.kernel, fit.operation, fit.group) == key)
    fit = next(timed, None)
    if fit is None:
        raise SpecError(NO_CONSTANTS)
    return series, fit, dispatch_seconds(series, hw.device, per_node)(fit, _every(series))


def _chosen(
    seconds_of: Callable[[Series, Any], Seconds], choose: Callable[[Series, Hardware], Any]
) -> Callable[[Series, Hardware], Told]:
    """Of kinds whose seconds one set of constants gives: how, and which a plan takes."""

    def told(series: Series, hw: Hardware) -> Told:
        fit = choose(series, hw)
        if fit is None:
            raise SpecError(NO_CONSTANTS)
        return series, fit, seconds_of(series, hw.device)(fit, _every(series))

    return told


def _taken(kernel: str) -> str:
    """The implementation that a plan takes for an engine's own all-reduce."""
    owners = (("SGLang", "sglang"), ("TRTLLM", "trtllm"))
    engine = next((engine for name, engine in owners if kernel.startswith(name)), None)
    return load_engine_calibration(engine).all_reduce if engine else kernel


def _phase(series: Series) -> str:
    """A verification of drafts is a step of several tokens."""
    return "generation" if series.variant == VERIFY else series.variant


def _latent(series: Series, hw: Hardware) -> Any:
    if series.variant == "generation":
        return latent_decode_fit(hw, series.dtype, series.kernel)
    return latent_prefill_fit(hw, series.dtype, series.kernel)


def _absorption(series: Series, hw: Hardware) -> Any:
    fits = hw.calibration.absorption if series.dtype == "bf16" else ()
    return next((fit for fit in fits if fit.kernel == series.kernel), fits[0] if fits else None)


_BY_KIND: dict[str, Callable[[Series, Hardware], Told]] = {
    "gemm": _chosen(gemm_seconds, lambda one, hw: gemm_fit(hw, one.dtype)[0]),
    "prefill": _chosen(prefill_seconds, lambda one, hw: prefill_fit(hw, one.dtype, one.kernel)[0]),
    "encoder": _chosen(encoder_seconds, lambda one, hw: encoder_fit(hw, one.kernel, float(one.variant))),
    "decode": _chosen(decode_seconds, lambda one, hw: decode_fit(hw, one.dtype, one.kernel)[0]),
    "latent": _chosen(latent_seconds, _latent),
    "absorption": _chosen(absorption_seconds, _absorption),
    "scan": _chosen(scan_seconds, lambda one, hw: scan_fit(hw, mixer_of_scan(one), _phase(one), one.kernel)),
    CONVOLUTION: _chosen(convolution_seconds, lambda one, hw: scan_fit(hw, one.dtype, _phase(one), one.kernel)),
    "streams": _chosen(streams_seconds, lambda one, hw: streams_fit(hw, one.kernel)),
    "exchange": _chosen(exchange_seconds, lambda one, hw: exchange_fit(hw, one.kernel, one.variant)),
    "stream": _chosen(stream_seconds, lambda _, hw: hw.calibration.stream),
    "quantise": _chosen(stream_seconds, lambda _, hw: hw.calibration.stream),
    "sparse": _module,
    "chosen": _part,
    "collective": _collective,
    "ranked_experts": _ranked_experts,
    "moe": _experts,
    "dispatch": _dispatch,
    "dispatch_normal": _dispatch,
    "engine_dispatch": _dispatch,
}
