"""Timings of one kernel that dispatches tokens, runs their experts and combines them, against the sum that a plan has.

Columns: gpu, src, kernel, phase, dtype, num_tokens (of one device), hidden_size, inter_size, topk, num_experts,
ep_size, distribution, latency_us (DeepGEMM's MegaMoE). A plan is charged dispatch and combine by DeepEP and the
engine's expert kernels between them, one after the other; no plan takes the fused kernel.
"""

from __future__ import annotations

from rlperf.calibrate.kernel_tables import DTYPE_NAMES
from rlperf.calibrate.tables import Row, Table
from rlperf.calibrate.validate import Outcome, PredictedFigure, each_row
from rlperf.cost.collectives import dispatch_combine_s
from rlperf.cost.moe import Dealt, ExpertShape, grouped_with, moe_fit
from rlperf.errors import SpecError
from rlperf.specs.calibration import MoeFit
from rlperf.specs.engine_calibration import load_engine_calibration

COLUMNS = (
    "gpu", "src", "kernel", "phase", "dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts",
    "ep_size", "distribution", "latency_us",
)  # fmt: skip
BALANCED, SKEWED = "balanced", "power_law_1.2"


def outcome(table: Table) -> Outcome:
    """All rows of a table."""
    return each_row(table, lambda row: [figure(row)])


def figure(row: Row) -> PredictedFigure:
    """Microseconds of one layer's experts on one of the devices that share them."""
    engine, hw = load_engine_calibration(row.text("src").split("-")[0]), row.hardware()
    tokens, width, active = (row.count(name) for name in ("num_tokens", "hidden_size", "topk"))
    experts, group = row.count("num_experts"), row.count("ep_size")
    dtype = DTYPE_NAMES.get(row.text("dtype"), row.text("dtype"))
    fit, stands_in = moe_fit(hw, dtype, engine.moe_kernels)
    shape = ExpertShape(width, row.count("inter_size"), experts, active)
    products = grouped_with(
        hw.device, fit, float(tokens * group), shape, group, dtype=dtype, dealt=_dealt(row, fit, group)
    )
    near = min(group, hw.cluster.scale_up_domain)
    sent = dispatch_combine_s(hw, tokens, width, active, experts, group, near)
    return PredictedFigure.of_kernel(
        row, hw, float(products + sent), fit.quality.spread,
        group=f"{row.text('phase')}, {row.text('distribution')}", stratum=f"{hw.device.name} x {group}",
        assumed=("dispatch, experts and combine one after the other",), extrapolated=stands_in,
    )  # fmt: skip


def _dealt(row: Row, fit: MoeFit, group: int) -> Dealt:
    routing = row.text("distribution")
    if routing == BALANCED:
        return Dealt(dispatched=True, balanced=True)
    if routing != SKEWED:
        raise SpecError(f"routing by {routing}, of which no constants are told")
    return Dealt(skew=float(group) ** fit.skew_exponent, touched_share=fit.skew_touched, dispatched=True)
