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

from rlperf.calibrate.engines import measured_of
from rlperf.calibrate.inference_rows import CostTable, case_of, serve
from rlperf.calibrate.leave_out import ALL, report_of
from rlperf.calibrate.leave_out_inference import Refits, predict_groups
from rlperf.calibrate.serving_stack import PLACES, ServingStack
from rlperf.calibrate.tables import Table, read_table
from rlperf.cli.main import run
from rlperf.cost.inference import with_overhead
from rlperf.errors import SpecError

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


def test_what_is_left_out_is_not_seen(tmp_path: Path) -> None:
    found = []
    for name, slow in (("a", 1.0), ("b", 1.3)):
        (tmp_path / name).mkdir()
        table = toy(tmp_path / name, slow)
        found.append({one.name: one for one in predict_groups(Path(table.file), table, "device")})
    plain, odd = found
    held, other = (
        [np.asarray([one.predicted for one in side[gpu].left_out]) for side in found]
        for gpu in ("h200_sxm", "h100_sxm")
    )
    # whatever the H200's rows say, its predictions without them are the same; the H100's, fitted to them, are not
    assert held[0].tolist() == held[1].tolist()
    assert np.median(other[1] / other[0]) > 1.1
    assert odd["h200_sxm"].borrowed == "kernels of h100_sxm" and odd["h200_sxm"].in_fit == 1
    # a quarter of the layouts was fitted as shipped: these rows are scored on neither side
    assert len(held[0]) == len(plain["h200_sxm"].seen) == 15
    assert [one.row_id for one in odd["h100_sxm"].seen] == [one.row_id for one in odd["h100_sxm"].left_out]


def test_shipped_constants_serve_what_no_fit_saw(tmp_path: Path) -> None:
    new = {"row_id": "h20", "engine": "vllm", "architecture": "Llama-3.1-8B", "gpu": "h20_sxm", "n_gpus": 1,
           "tensor_parallel": 1, "gemm_dtype": "bf16", "attention_data_parallel": 1, "mode": "single_stream",
           "isl": 1000, "osl": 500, "measured_ttft_ms": 20.0, "measured_tpot_ms": 5.0}  # fmt: skip
    table = toy(tmp_path, more=(new,))
    one = next(group for group in predict_groups(Path(table.file), table, "device") if group.name == "h20_sxm")
    assert one.in_fit == 0 and one.borrowed == "kernels of h200_sxm" and one.seen == one.left_out


def test_an_engine_left_out_takes_the_pool_and_a_version_its_engine(tmp_path: Path) -> None:
    old = tuple(
        {"row_id": f"v{load}_{tensor}", "engine": "vllm", "engine_version": "0.12.0", "architecture": "Llama-3.1-8B",
         "gpu": "h100_sxm", "n_gpus": tensor, "tensor_parallel": tensor, "gemm_dtype": "bf16",
         "attention_data_parallel": 1, "mode": "single_stream", "isl": 500, "osl": load, "measured_tpot_ms": 8.0}
        for tensor in (1, 2) for load in (100, 200, 300, 400, 500)
    )  # fmt: skip
    other = tuple({**row, "row_id": f"s{row['row_id']}", "engine": "sglang", "engine_version": ""} for row in old)
    fits = Refits(toy(tmp_path, more=(*old, *other)))
    assert fits.without("version", "vllm 0.12").borrowed == "vllm-0.12: vllm"
    pooled = fits.without("engine", "sglang")
    assert pooled.borrowed == "sglang: overheads of the other engines" and len(pooled.left_out) == 5
    fits = Refits(toy(tmp_path))
    with pytest.raises(SpecError, match="0 are left to fit"):
        fits.without("engine", "vllm")


def test_stacked_rows_are_served_as_one_by_one(tmp_path: Path) -> None:
    loads: tuple[dict[str, object], ...] = (
        {"mode": "static_batch", "concurrency": 16},
        {"mode": "offline", "note": "400 requests"},
        {"mode": "online_rate", "note": "request rate 2/s; 500 requests"},
        {"mode": "online_concurrency", "concurrency": 700, "engine": "sglang"},
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
    for place, share in PLACES.items():
        fast = np.array([4e-6, 9e-6, 0.78])
        alone = []
        for case, metric, _ in cases:
            engine = with_overhead(case.engine, 9e-6, 0.78, **{place: 4e-6 * share})
            served = serve(replace(case, engine=engine), costs)
            tpot = metric == "tpot_ms"
            alone.append(float(served.tpot_s) * 1e3 if tpot else case.devices / float(served.output_tokens_per_s))
        assert stack.predicted(fast, place) == pytest.approx(alone, rel=1e-12)


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
    assert line.metric == "tpot_ms" and 0.95 * line.seen.mean < line.left_out.mean < 40.0
