"""Whole groups left out of the engines' fits: nothing of a group is seen, and what stands in for it is said."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from rlperf.calibrate.leave_out import ALL, report_of
from rlperf.calibrate.leave_out_inference import Refits, predict_groups
from rlperf.calibrate.pooling import fit_pool
from rlperf.calibrate.serving.engines import measured_of
from rlperf.calibrate.serving.pool import (
    configuration_of,
    first_token_spread,
    fold_of,
    profiles_of,
    spread_served,
)
from rlperf.calibrate.serving.rows import CostTable, case_of, serve
from rlperf.calibrate.serving.stack import ServingStack
from rlperf.calibrate.serving_profiles import calibrate_serving, profile_text
from rlperf.calibrate.tables import Table, read_table
from rlperf.calibrate.validate_inference import TOLD_AGAIN, predict_rows, told_again
from rlperf.cli.main import run
from rlperf.cost.basis import PLAIN, ServedLoad, serving_basis
from rlperf.cost.inference import with_overhead
from rlperf.errors import SpecError
from rlperf.specs.calibration import Spread
from rlperf.specs.engine_calibration import load_engine_calibration

COLUMNS = [
    "row_id", "engine", "engine_version", "architecture", "gpu", "n_gpus", "tensor_parallel", "gemm_dtype",
    "attention_data_parallel", "mode", "isl", "osl", "concurrency", "note", "measured_ttft_ms", "measured_tpot_ms",
    "measured_output_tokens_per_s_per_gpu",
]  # fmt: skip


def toy(folder: Path, slow: float = 1.0, more: tuple[dict[str, object], ...] = ()) -> Table:
    """Two devices with one vLLM each; the second device's rows take ``slow`` times as long as predicted."""
    rows: list[dict[str, object]] = []
    for gpu in ("h100_sxm", "h200_sxm"):
        for tensor in (1, 2, 4, 8):
            for load in (1, 4, 16, 64, 128):
                rows.append(
                    {"row_id": f"{gpu}_{tensor}_{load}", "engine": "vllm", "architecture": "Llama-3.1-8B", "gpu": gpu,
                     "n_gpus": tensor, "tensor_parallel": tensor, "gemm_dtype": "bf16", "attention_data_parallel": 1,
                     "mode": "online_concurrency", "isl": 1000, "osl": 500, "concurrency": load,
                     "measured_tpot_ms": 1.0}
                )  # fmt: skip
    path, costs = folder / "served.csv", CostTable()
    _write(path, [*rows, *more])
    for row, line in zip(rows, read_table(path), strict=False):
        seconds = float(serve(case_of(line), costs).tpot_s)
        row["measured_tpot_ms"] = seconds * 1e3 * (slow if row["gpu"] == "h200_sxm" else 1.0)
    _write(path, [*rows, *more])
    return read_table(path)


def _write(path: Path, rows: list[dict[str, object]]) -> None:
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.slow
def test_what_is_left_out_is_not_seen(tmp_path: Path) -> None:
    found = []
    for name, slow in (("a", 1.0), ("b", 1.3)):
        (tmp_path / name).mkdir()
        found.append(Refits(toy(tmp_path / name, slow)))
    plain, odd = ({gpu: one.without("device", gpu) for gpu in ("h100_sxm", "h200_sxm")} for one in found)
    held, other = (
        [np.asarray([one.predicted for one in side[gpu].left_out]) for side in (plain, odd)]
        for gpu in ("h200_sxm", "h100_sxm")
    )
    # the H200's predictions without its rows know nothing of them; the H100's are fitted to the H200's alone
    assert held[0] == pytest.approx(held[1], rel=1e-12)
    assert np.median(other[1] / other[0]) > 1.02
    assert odd["h200_sxm"].borrowed == "kernels of h100_sxm" and odd["h200_sxm"].in_fit == 4
    assert len(held[0]) == len(plain["h200_sxm"].seen) == 20
    assert [one.row_id for one in odd["h100_sxm"].seen] == [one.row_id for one in odd["h100_sxm"].left_out]


@pytest.mark.slow
def test_rows_see_no_fit_of_their_configuration(tmp_path: Path) -> None:
    fits = Refits(toy(tmp_path, 1.3))
    parts = {fold_of(case) for case in fits.cases}
    configurations = {configuration_of(case): fold_of(case) for case in fits.cases}
    assert len(configurations) == 8 and len(parts) > 1
    for part in parts:
        one = fits.without("configuration", part)
        assert one.in_fit == 0 and one.seen == one.left_out
        assert not any(figure.used_in_calibration for figure in one.left_out)


@pytest.mark.slow
def test_an_engine_left_out_takes_the_pool(tmp_path: Path) -> None:
    other = tuple(
        {"row_id": f"s{load}_{tensor}", "engine": "sglang", "architecture": "Llama-3.1-8B", "gpu": "h100_sxm",
         "n_gpus": tensor, "tensor_parallel": tensor, "gemm_dtype": "bf16", "attention_data_parallel": 1,
         "mode": "single_stream", "isl": 500, "osl": load, "measured_tpot_ms": 8.0}
        for tensor in (1, 2) for load in (100, 200, 300, 400, 500)
    )  # fmt: skip
    fits = Refits(toy(tmp_path, more=other))
    pooled = fits.without("engine", "sglang")
    assert pooled.borrowed == "sglang: the pool's" and len(pooled.left_out) == 10
    with pytest.raises(SpecError, match="0 are left to fit"):
        Refits(toy(tmp_path)).without("engine", "vllm")


def test_what_runs_without_times_per_token_show_is_their_own(tmp_path: Path) -> None:
    run = {"engine": "vllm", "architecture": "Llama-3.1-8B", "gpu": "h200_sxm", "gemm_dtype": "bf16",
           "attention_data_parallel": 1, "mode": "static_batch", "isl": 500}  # fmt: skip
    found = {}
    for name, slow in (("as predicted", 1.0), ("slower", 1.3)):
        (tmp_path / name).mkdir()
        rows = [{**run, "row_id": f"b{tensor}_{batch}_{osl}", "n_gpus": tensor, "tensor_parallel": tensor, "osl": osl,
                 "concurrency": batch, "measured_output_tokens_per_s_per_gpu": 1.0}
                for tensor in (1, 2, 4, 8) for batch in (8, 32, 128) for osl in (128, 512)]  # fmt: skip
        plain = toy(tmp_path / name, more=tuple(rows))
        for row, line in zip(rows, list(plain)[-len(rows) :], strict=True):
            case = case_of(line)
            rate = float(serve(case, CostTable()).output_tokens_per_s) / case.devices
            row["measured_output_tokens_per_s_per_gpu"] = rate / slow
        fits = Refits(toy(tmp_path / name, more=tuple(rows)))
        pooled, seen = fit_pool(fits.served.rows), np.ones(len(fits.cases), dtype=bool)
        found[name] = next(iter(profiles_of(pooled, fits.served, seen, [load_engine_calibration("vllm")]).values()))
    asked = ("h200_sxm", "llama", "Llama-3.1-8B", "bf16")
    times, rates = (
        [one.at(*asked, way).overhead.kernel_scale for one in (found["slower"], found["as predicted"])]
        for way in ("", "static_batch")
    )
    assert times[0] / times[1] == pytest.approx(1.0, abs=0.02), "times per token follow what only throughput shows"
    assert 1.15 < rates[0] / rates[1] < 1.35
    elsewhere = found["slower"].at("h100_sxm", *asked[1:], "static_batch").overhead
    assert elsewhere == found["slower"].at("h100_sxm", *asked[1:]).overhead, "a device where nobody ran so has it"


def test_a_measurement_told_again_counts_once(tmp_path: Path) -> None:
    base = {"engine": "trtllm", "architecture": "DeepSeek-V3", "gpu": "h200_sxm", "n_gpus": 8, "tensor_parallel": 8,
            "gemm_dtype": "fp8", "mode": "online_concurrency", "isl": 1000, "osl": 500, "concurrency": 8,
            "attention_data_parallel": 1, "measured_ttft_ms": 290.08}  # fmt: skip
    told = ({"measured_tpot_ms": 16.389}, {"architecture": "DeepSeek-R1", "measured_tpot_ms": 16.39},
            {"measured_tpot_ms": 16.45}, {"measured_tpot_ms": 16.39, "concurrency": 9})  # fmt: skip
    path = tmp_path / "told.csv"
    _write(path, [{**base, **one, "row_id": str(index)} for index, one in enumerate(told)])
    table = read_table(path)
    assert told_again(table) == {"1"}
    found = predict_rows(path, table)
    assert {one.row_id for one in found.predictions} == {"0", "2", "3"}
    assert [one.reason for one in found.refused] == [TOLD_AGAIN]
    parts = {fold_of(case_of(row)) for row in table}
    assert len(parts) == 1, "one model under two names is in two parts: a fit has seen what it predicts"


def test_stacked_rows_are_served_as_one_by_one(tmp_path: Path) -> None:
    loads: tuple[dict[str, object], ...] = (
        {"mode": "static_batch", "concurrency": 16},
        {"mode": "offline", "note": "400 requests"},
        {"mode": "online_rate", "note": "request rate 2/s; 500 requests"},
        {"mode": "online_concurrency", "concurrency": 700, "engine": "sglang", "measured_ttft_ms": 5e4},
        {"mode": "online_concurrency", "concurrency": 8, "engine": "gpt-fast", "measured_tpot_ms": ""},
        {"mode": "offline", "architecture": "Qwen3-30B-A3B", "gpu": "b200_sxm", "engine": "trtllm"},
    )
    base = {"engine": "vllm", "architecture": "Llama-3.1-8B", "gpu": "h100_sxm", "n_gpus": 1, "tensor_parallel": 1,
            "gemm_dtype": "bf16", "attention_data_parallel": 1, "isl": 3000, "osl": 500, "measured_tpot_ms": 9.0,
            "measured_output_tokens_per_s_per_gpu": 900.0}  # fmt: skip
    path = tmp_path / "loads.csv"
    _write(path, [{**base, **load, "row_id": str(index)} for index, load in enumerate(loads)])
    costs = CostTable()
    cases = [one for row in read_table(path) for one in measured_of(case_of(row))]
    stack = ServingStack(cases, costs)
    for scale, tolerance in ((1.3, 1e-9), (0.84, 1e-9), (0.8, 0.015)):  # between the factors tried it interpolates
        alone, first = [], []
        for case, metric, _ in cases:
            engine = with_overhead(
                case.engine, 9e-6, scale, step=3e-4, per_layer=4e-6, per_expert_layer=2e-6, uncaptured=5e-4
            )
            served = serve(replace(case, engine=engine), costs)
            tpot = metric == "tpot_ms"
            alone.append(float(served.tpot_s) * 1e3 if tpot else case.devices / float(served.output_tokens_per_s))
            first.append(float(served.ttft_s))
        constants = np.array([3e-4, 4e-6, 2e-6, 9e-6, 5e-4, scale])
        assert stack.predicted(constants) == pytest.approx(alone, rel=tolerance)
        assert stack.first_tokens_s(constants)[[3, 4]] == pytest.approx([first[3], first[4]], rel=tolerance)


def test_factors_add_up_and_strangers_have_the_pools(tmp_path: Path) -> None:
    fits = Refits(toy(tmp_path, 1.3))
    served = fits.served
    seen = np.ones(len(served.cases), dtype=bool)
    whole = fit_pool(served.rows)
    profiles = profiles_of(whole, served, seen, [served.cases[0][0].engine])
    engine = next(iter(profiles.values()))
    costs = CostTable()
    logs = served.rows.predict(whole.logs(served.rows.labels, len(seen)))
    for (case, _, _), log in zip(served.cases, logs, strict=True):
        # a profile gives what the fit gave: the same factors, rounded to four digits
        one = serve(case_of(case.row, {engine.id: engine}), costs)
        assert float(one.tpot_s) * 1e3 == pytest.approx(np.exp(log), rel=0.01)
    near = engine.at("h200_sxm", "llama", "Llama-3.1-8B", "bf16")
    far = engine.at("a100_80g_sxm", "gemma", "Gemma-9B", "fp8")
    assert near.factors == far.factors == () and near.at("h100_sxm", "llama", "Llama-3.1-8B", "bf16") is near
    assert far.overhead.kernel_scale == engine.overhead.kernel_scale < near.overhead.kernel_scale
    assert engine.strange("a100_80g_sxm", "gemma") == ("device", "family")
    assert engine.strange("h200_sxm", "llama") == ()
    unserved = engine.model_copy(update={"overhead": engine.overhead.model_copy(update={"row_ids": ()})})
    assert unserved.strange("h200_sxm", "llama") == ("engine",)


def test_intervals_know_the_kind_of_load_and_strangers(tmp_path: Path) -> None:
    single = tuple(
        {"row_id": f"s{tensor}_{osl}", "engine": "vllm", "architecture": "Llama-3.1-8B", "gpu": "h100_sxm",
         "n_gpus": tensor, "tensor_parallel": tensor, "gemm_dtype": "bf16", "attention_data_parallel": 1,
         "mode": "single_stream", "isl": 500, "osl": osl, "measured_tpot_ms": 8.0}
        for tensor in (1, 2, 4, 8) for osl in range(100, 1100, 100)
    )  # fmt: skip
    served = Refits(toy(tmp_path, more=single)).served
    closed = np.asarray([case.closed_loop for case, _, _ in served.cases])
    assert closed.sum() == len(single) == 40 == (~closed).sum()
    # off by 0.1 where clients wait for their answers, by 0.3 elsewhere, one row in twenty by 1
    apart = served.rows.measured + np.where(closed, 0.1, 0.3) + (np.arange(80) % 20 == 0)
    spread = spread_served(served, apart)
    assert spread is not None
    assert (spread.usual, spread.other_loads, spread.rows) == pytest.approx((0.1, 0.3, 80), abs=1e-4)
    assert spread.usual < spread.experts_apart <= 0.3  # nobody showed experts apart: all rows stand for them
    engine = served.cases[0][0].engine.model_copy(
        update={"spread_served": spread.model_copy(update={"stranger": 0.2}), "spread_throughput": Spread()}
    )
    case = served.cases[0][0]

    def width(name: str, load: ServedLoad = PLAIN) -> float:
        architecture = case.arch.model_copy(update={"family": name})
        return float(np.log(serving_basis(architecture, case.hardware, engine, load).spread.high))

    assert width("llama") == pytest.approx(0.1, abs=1e-3)
    assert width("llama", ServedLoad(closed_loop=False)) == pytest.approx(0.3, abs=1e-3)
    assert width("nobody") == pytest.approx(np.hypot(0.1, 0.2), abs=1e-3)
    # a weight format that no kernel table covers is as much wider as its rows missed more
    wider = spread.model_copy(update={"extrapolated": 1.2, "extrapolated_other": 1.6})
    engine = engine.model_copy(update={"spread_served": wider})
    for load, times in ((PLAIN, 1.2), (ServedLoad(closed_loop=False), 1.6)):
        known, borrowed = (
            serving_basis(case.arch, case.hardware, engine, load, gemm_dtype=dtype) for dtype in ("bf16", "int4_wo")
        )
        assert borrowed.extrapolated and not known.extrapolated
        assert np.log(borrowed.spread.high) == pytest.approx(times * np.log(known.spread.high), rel=0.01)
    # without a spread of all engines, as in a profile of one's own, it is the engine's
    alone = engine.model_copy(update={"spread_served": None})
    assert serving_basis(case.arch, case.hardware, alone).spread == alone.overhead.quality.spread


def test_kernels_without_a_table_widen_by_what_their_rows_missed_more(tmp_path: Path) -> None:
    borrowed = tuple(
        {"row_id": f"w{tensor}_{isl}", "engine": "vllm", "architecture": "Llama-3.1-8B", "gpu": "h100_sxm",
         "n_gpus": tensor, "tensor_parallel": tensor, "gemm_dtype": "int4_wo", "attention_data_parallel": 1,
         "mode": "online_concurrency", "isl": isl, "osl": 500, "concurrency": 8, "measured_tpot_ms": 8.0}
        for tensor in (1, 2, 4, 8) for isl in range(100, 1100, 100)
    )  # fmt: skip
    served = Refits(toy(tmp_path, more=borrowed)).served
    covered = np.asarray([case.covered for case, _, _ in served.cases])
    assert (~covered).sum() == len(borrowed) == 40 == covered.sum()
    spread = spread_served(served, served.rows.measured + np.where(covered, 0.1, 0.15))
    assert spread is not None and (spread.usual, spread.extrapolated) == pytest.approx((0.1, 1.5), abs=1e-3)
    # they miss less: no narrower for that
    spread = spread_served(served, served.rows.measured + np.where(covered, 0.1, 0.05))
    assert spread is not None and spread.extrapolated == 1.0


def test_first_tokens_of_closed_loops_tell_their_own_interval(tmp_path: Path) -> None:
    rows = list(toy(tmp_path))
    _write(tmp_path / "said.csv", [{**row.cells, "measured_ttft_ms": 100.0} for row in rows])
    silent, said = (Refits(read_table(tmp_path / name)).served for name in ("served.csv", "said.csv"))
    engine = said.cases[0][0].engine
    assert first_token_spread(engine, silent, np.full(40, 0.05)) == {}
    found = first_token_spread(engine, said, np.full(40, 0.05))["spread_first_token"]
    assert (found.low, found.high) == (0.95, 2.0)  # all twice as long: what is predicted stays inside
    narrow = first_token_spread(engine, said, np.full(40, 0.1))["spread_first_token"]
    assert (narrow.low, narrow.high) == (0.95, 1.053)


@pytest.mark.slow
def test_profiles_of_one_engine_alone_are_fitted_and_read_again(tmp_path: Path) -> None:
    found = calibrate_serving(toy(tmp_path, 1.3), today="2030-01-01")
    assert found.rows == 40 and set(found.engines) == {"vllm"}
    file = tmp_path / "vllm.yaml"
    file.write_text(profile_text(found.engines["vllm"]))
    again = load_engine_calibration("vllm", file=file)
    # no engine can be left out; devices can, and the H200 takes 1.3 times as long as the H100 lets expect
    assert again.id == "vllm-2030-01-01" and again.spread_served is not None
    assert again.spread_served.stranger > 0.1 and again.spread_served.rows == 40
    assert {one.group for one in again.factors if one.kind == "device"} == {"", "h100_sxm", "h200_sxm"}
    # too few rows to tell a width from, and nothing to leave out
    whole = toy(tmp_path)
    alone = calibrate_serving(replace(whole, rows=tuple(row for row in whole if row.text("gpu") == "h100_sxm")))
    assert alone.engines["vllm"].spread_served is None and alone.rows == 20


@pytest.mark.slow
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["validate", toy(tmp_path).file, "--kind", "inference", "--leave-out", "device"]
    assert _exit([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {one["group"] for one in data["lines"]} >= {"all rows", "h100_sxm", "h200_sxm"}
    assert _exit(words) == 0
    assert "kernels of h200_sxm" in capsys.readouterr().out


def _exit(words: list[str]) -> int:
    with patch.object(sys, "argv", ["rlperf", *words]):
        try:
            return int(run() or 0)
        except SystemExit as stop:
            return int(stop.code or 0)


@pytest.mark.data
@pytest.mark.slow
def test_leaving_out_a_release_that_others_describe(measured_data: Path) -> None:
    whole = read_table(measured_data / "measured" / "inference.csv")
    table = replace(whole, rows=tuple(row for row in whole if row.text("engine") in ("sglang", "vllm")))
    groups = predict_groups(Path(table.file), table, "version")
    assert {one.name for one in groups} >= {"sglang 0.5", "vllm 0.12", "vllm 0.19"}
    line = next(one for one in report_of("inference", table.file, "version", groups).lines if one.group == ALL)
    # leaving rows out never helps by much
    assert line.metric == "tpot_ms" and 0.95 * line.seen.mean < line.left_out.mean < 25.0
