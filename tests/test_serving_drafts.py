"""Served rows whose engine drafts tokens: read so, told per token of every request, and seen by no fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlperf.calibrate.leave_out_inference import served_cases
from rlperf.calibrate.serving.drafts import sigma_of
from rlperf.calibrate.serving.engines import measured_of
from rlperf.calibrate.serving.rows import CostTable, ServingCase, serve
from rlperf.calibrate.tables import read_table
from rlperf.calibrate.validate_inference import predict_case, predict_rows
from rlperf.errors import SpecError
from rlperf.specs.calibration import Spread
from tests.served_row import read_row

ROW = {
    "row_id": "a", "group": "aic_silicon", "engine": "trtllm", "engine_version": "1.2.0rc6.post3",
    "architecture": "DeepSeek-R1", "gpu": "b200_sxm", "n_gpus": "8", "tensor_parallel": "8", "expert_parallel": "8",
    "gemm_dtype": "fp8", "mode": "online_concurrency", "isl": "1024", "osl": "8192", "concurrency": "64",
    "measured_tpot_ms": "18.0",
}  # fmt: skip


def case(tmp_path: Path, **cells: str) -> ServingCase:
    """The row with other cells, as it is read."""
    return read_row(tmp_path, ROW | cells)


def seconds(one: ServingCase) -> float:
    return float(serve(one, CostTable()).tpot_s)


def test_what_a_row_drafts_is_stated_or_told_by_its_publication(tmp_path: Path) -> None:
    drafted = case(tmp_path)
    assert drafted.speculation == "mtp:3" and any("speculation=mtp:3" in text for text in drafted.assumed)
    others: list[dict[str, str]] = [
        {"engine_version": "1.2.0rc6.post2"}, {"group": "mine"}, {"speculation": "none"}, {"engine": "vllm"},
        {"architecture": "gpt-oss-120b", "gemm_dtype": "mxfp4"},
    ]  # fmt: skip
    for cells in others:
        assert case(tmp_path, **cells).speculation == "none"
    stated = case(tmp_path, group="mine", speculation="mtp:1")
    assert stated.speculation == "mtp:1" and not any("speculation" in text for text in stated.assumed)
    with pytest.raises(SpecError, match="nobody drafts by 'medusa'"):
        serve(case(tmp_path, speculation="medusa:3"), CostTable())


def test_drafts_take_fewer_seconds_a_token_where_few_run_and_are_told_wider(tmp_path: Path) -> None:
    plain, one, three = (case(tmp_path, concurrency="4", speculation=word) for word in ("none", "mtp:1", "mtp:3"))
    assert seconds(three) < seconds(one) < 0.8 * seconds(plain)
    (told,), (alone,) = predict_case(three, CostTable()), predict_case(plain, CostTable())
    assert told.high / told.low > 1.3 * alone.high / alone.low
    wider = Spread(low=0.9, high=1.1).beside(sigma_of("eagle3:3"))
    assert wider.low < 0.9 < 1.1 < wider.high


def test_a_shape_without_the_layer_that_drafts_is_told_with_one(tmp_path: Path) -> None:
    shape = {"architecture": "Llama-3.1-8B", "gpu": "h100_sxm", "tensor_parallel": "1", "expert_parallel": "1"}
    plain = case(tmp_path, **shape, n_gpus="1", speculation="none")
    assert seconds(case(tmp_path, **shape, n_gpus="1", speculation="mtp:1")) < seconds(plain)


def test_no_fit_sees_a_row_that_drafted(tmp_path: Path) -> None:
    assert measured_of(case(tmp_path)) == []
    assert len(measured_of(case(tmp_path, speculation="none"))) == 1


def test_rows_that_drafted_are_nearer_so_than_without(measured_data: Path) -> None:
    table = read_table(measured_data / "measured" / "inference.csv")
    assert all(one.speculation == "none" for one, _, _ in served_cases(table, CostTable()))
    found = [
        one
        for one in predict_rows(measured_data / "measured" / "inference.csv", table).predictions
        if one.metric == "tpot_ms" and any(text.startswith("speculation=") for text in one.assumed)
    ]
    assert len(found) > 20 and not any(one.used_in_calibration for one in found)
    errors = np.array([one.predicted / one.measured - 1.0 for one in found])
    assert np.abs(errors).mean() < 0.2, "without drafts 0.35"
    inside = np.mean([one.low <= one.measured <= one.high for one in found])
    assert inside > 0.85
