"""Serving, predicted against measured: rows of ``measured/inference.csv`` and files in that form."""

from __future__ import annotations

import re
from pathlib import Path

from rlperf.calibrate.serving.drafts import sigma_of
from rlperf.calibrate.serving.rows import NEEDED, CostTable, ServingCase, case_of, serve
from rlperf.calibrate.tables import Row, Table
from rlperf.calibrate.validate import Outcome, PredictedFigure, each_row
from rlperf.cost.basis import ServedLoad, serving_basis
from rlperf.cost.parameters import parameters
from rlperf.errors import RlperfError, SpecError

LOOP = "closed_loop_ttft_ms"
"""Metric: mean time to first token of a closed loop, in milliseconds."""
TOLD_AGAIN = "the measurement of an earlier row, under another name or with fewer digits"
_LOAD = (
    "engine", "gpu", "n_gpus", "tensor_parallel", "expert_parallel", "gemm_dtype", "mode", "isl", "osl", "concurrency",
    "cached_tokens",
)  # fmt: skip
_SENT = re.compile(r"\d+ requests|rate \S+")
_TIMES = ("measured_tpot_ms", "measured_ttft_ms")


def predict_rows(path: Path, table: Table) -> Outcome:
    """Predict every row: time per output token, time to the first one, else throughput.

    The first tokens of closed loops are a metric of their own, `LOOP`: they hold queueing that rows do not describe
    (how many requests each client sends, how often the engine takes requests in and streams tokens out), and are not
    scored where the same prompts are sent again. Throughput is the metric only of rows without a time per token.
    """
    table.need(*NEEDED)
    table.need_one("measured_tpot_ms", "measured_ttft_ms", "measured_output_tokens_per_s_per_gpu")
    costs, again = CostTable(), told_again(table)

    def predict(row: Row) -> list[PredictedFigure]:
        if row.row_id in again:
            raise SpecError(TOLD_AGAIN)
        return predict_case(case_of(row), costs)

    return each_row(table, predict)


def told_again(table: Table) -> frozenset[str]:
    """Rows that print an earlier row's measurement again, which counts once.

    Tables of tables hold one run under two names of its model, under a release and its date, or rounded. Such rows have
    the same shape and load on the same devices, and the same times to a hundredth of a millisecond, which two runs do
    not have. A row that cannot be read is none of them: it is refused for what is wrong with it.
    """
    seen: set[tuple[object, ...]] = set()
    again: list[str] = []
    for row in table:
        try:
            arch = row.architecture()
            times = [format(row.number(name) or 0.0, ".2f") for name in _TIMES]
            rate = format(row.number("measured_output_tokens_per_s_per_gpu") or 0.0, ".3g")
        except RlperfError:
            continue
        load = (*(row.text(name) for name in _LOAD), *_SENT.findall(row.text("note")))
        key = (arch.family, parameters(arch), *load, *times, rate)
        if key in seen:
            again.append(row.row_id)
        seen.add(key)
    return frozenset(again)


def predict_case(case: ServingCase, costs: CostTable) -> list[PredictedFigure]:
    """Figures of one case; see `predict_rows` for which."""
    row, served = case.row, serve(case, costs)
    wanted: list[tuple[str, float, float]] = []
    tpot = row.number("measured_tpot_ms")
    ttft = row.number("measured_ttft_ms")
    rate = row.number("measured_output_tokens_per_s_per_gpu")
    if tpot:
        wanted.append(("tpot_ms", tpot, float(served.tpot_s) * 1e3))
    if ttft and case.mode != "offline" and not case.repeated:
        wanted.append((LOOP if case.closed_loop else "ttft_ms", ttft, float(served.ttft_s) * 1e3))
    if rate and not tpot:
        wanted.append(("tokens_per_s_per_gpu", rate, float(served.output_tokens_per_s) / case.devices))
    if not wanted:
        raise SpecError("no measured figure in the row")
    used = row.row_id in case.engine.overhead.row_ids or row.row_id in case.hardware.calibration.served_rows
    fitted = case.engine.front_end_fitted and case.mode == "online_rate"
    load = ServedLoad(
        context=case.isl + case.osl, prompt=case.isl - case.cached, running=float(served.running),
        experts_apart=case.expert > 1, closed_loop=case.closed_loop, throughput=bool(case.throughput),
    )  # fmt: skip
    basis = serving_basis(case.arch, case.hardware, case.engine, load, gemm_dtype=case.gemm_dtype)
    spread, drafted = basis.spread, sigma_of(case.speculation)
    if drafted:
        spread = spread.beside(drafted)
    found = []
    for metric, measured, predicted in wanted:
        low, high = spread.low, spread.high
        if metric == LOOP:
            low, high = case.engine.spread_first_token.low, case.engine.spread_first_token.high
        if metric == "tokens_per_s_per_gpu":
            low, high = 1.0 / high, 1.0 / low
        found.append(
            PredictedFigure(
                row_id=row.row_id,
                group=row.group,
                metric=metric,
                measured=measured,
                predicted=predicted,
                low=predicted * low,
                high=predicted * high,
                calibration=basis.calibration,
                assumed=case.assumed,
                extrapolated=basis.extrapolated,
                used_in_calibration=used or (fitted and metric == "ttft_ms"),
                stratum="concurrency > 128" if (row.number("concurrency") or 0) > 128 else "",
            )
        )
    return found
