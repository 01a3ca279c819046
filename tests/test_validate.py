"""Validation: tables, blanks, refusals, rows that a calibration saw, and accuracy on the measured data."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlperf.calibrate import validate as core
from rlperf.calibrate.leave_out import ALL, leave_out
from rlperf.calibrate.leave_out import report_of as left_out_report
from rlperf.calibrate.leave_out_inference import predict_groups
from rlperf.calibrate.serving.engines import calibration_cases, engine_text, fit_engine
from rlperf.calibrate.serving.rows import CostTable, case_of, serve
from rlperf.calibrate.splits import HELD_OUT, NEW, SAME_SERIES, groups_at_hand
from rlperf.calibrate.tables import Refusal, Row, read_table
from rlperf.calibrate.validate import Outcome, PredictedFigure, report_of, split_of, text_of, validate_file
from rlperf.calibrate.validate_inference import LOOP, TOLD_AGAIN
from rlperf.cli.main import run
from rlperf.cost.inference import decode_step_s, engine_step_cost
from rlperf.cost.replica import Replica
from rlperf.cost.roofline import gemm_s
from rlperf.errors import SpecError
from rlperf.layout import Layout
from rlperf.specs.engine_calibration import EngineCalibration, load_engine_calibration
from rlperf.specs.hardware import load_hardware
from rlperf.specs.profiles import load_architecture
from rlperf.specs.reader import read_spec

from .quick import slow_but
from .scored import refits, scored

COLUMNS = [
    "cached_tokens",
    "row_id", "group", "engine", "engine_version", "architecture", "gpu", "n_gpus", "tensor_parallel",
    "pipeline_parallel", "expert_parallel", "attention_data_parallel", "gemm_dtype", "kv_dtype", "mode", "isl", "osl",
    "concurrency", "measured_ttft_ms", "measured_tpot_ms", "measured_output_tokens_per_s_per_gpu", "note",
]  # fmt: skip


def served_row(**cells: object) -> dict[str, object]:
    row: dict[str, object] = dict.fromkeys(COLUMNS, "")
    row.update(
        row_id="mine_1", group="mine", engine="vllm", architecture="Llama-3.1-8B", gpu="h100_sxm", n_gpus=1,
        tensor_parallel=1, pipeline_parallel=1, attention_data_parallel=1, gemm_dtype="bf16", mode="online_concurrency",
        isl=1000, osl=500, concurrency=16, measured_tpot_ms=9.0, measured_ttft_ms=80.0,
    )  # fmt: skip
    row.update(cells)
    return row


def table(folder: Path, *rows: dict[str, object], name: str = "served.csv") -> Path:
    path = folder / name
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_users_table_is_predicted(tmp_path: Path) -> None:
    path = table(
        tmp_path,
        served_row(),
        served_row(row_id="mine_2", mode="single_stream", concurrency="", measured_ttft_ms=25.0),
        served_row(row_id="mine_3", mode="static_batch", measured_tpot_ms="",
                   measured_output_tokens_per_s_per_gpu=1500),
        served_row(row_id="mine_4", mode="offline", concurrency="", measured_tpot_ms="",
                   measured_output_tokens_per_s_per_gpu=9000),
        served_row(row_id="mine_5", mode="online_rate", concurrency="", note="request rate 2/s; 500 requests"),
    )  # fmt: skip
    report = validate_file(path, "inference")
    assert report.rows == report.predicted == 5 and not report.refused
    by_row = {(one.row_id, one.metric): one for one in report.predictions}
    assert set(by_row) == {
        ("mine_1", "tpot_ms"), ("mine_1", LOOP), ("mine_2", "tpot_ms"), ("mine_2", "ttft_ms"), ("mine_3", "ttft_ms"),
        ("mine_3", "tokens_per_s_per_gpu"), ("mine_4", "tokens_per_s_per_gpu"), ("mine_5", "tpot_ms"),
        ("mine_5", "ttft_ms"),
    }  # fmt: skip
    for one in report.predictions:
        assert one.low < one.predicted < one.high and "vllm" in one.calibration
    assert "kv_dtype=bf16 (default)" in by_row["mine_1", "tpot_ms"].assumed
    assert any("batch that fits the cache" in text for text in by_row["mine_4", "tokens_per_s_per_gpu"].assumed)
    assert by_row["mine_1", "tpot_ms"].predicted > by_row["mine_2", "tpot_ms"].predicted


def test_first_tokens_of_a_closed_loop_are_those_of_its_whole_run(tmp_path: Path) -> None:
    notes = {"1": "16 requests", "10": "", "100": "1600 requests", "middle": "1600 requests; medians"}
    rows = [served_row(row_id=name, note=note, measured_ttft_ms=80 + n) for n, (name, note) in enumerate(notes.items())]
    rows.append(
        served_row(row_id="again", group="aic_silicon", engine_version="0.12.0", measured_ttft_ms=90)
    )  # the same prompts again
    found = {one.row_id: one for one in validate_file(table(tmp_path, *rows), "inference").predictions
             if one.metric == LOOP}  # fmt: skip
    assert set(found) == set(notes)
    first, ten, hundred, middle = (found[name].predicted for name in notes)
    assert ten == pytest.approx(hundred + (first - hundred) / 11) and first > 1.5 * ten  # t + (t_w - t) / k
    assert middle == pytest.approx(hundred - (first - hundred) / 99)
    assert "requests_of_each_client=10 (as InferenceX sends)" in found["10"].assumed
    assert not any("requests_of_each_client" in text for text in found["100"].assumed)


def test_what_the_prefix_cache_has_is_read_and_not_computed(tmp_path: Path) -> None:
    rate = {"mode": "online_rate", "concurrency": "", "note": "request rate 4/s", "isl": 4000}
    rows = [served_row(**rate, row_id=str(cached), cached_tokens=cached) for cached in (0, 3000)]
    rows.append(served_row(**{**rate, "isl": 1000}, row_id="short"))
    report = validate_file(table(tmp_path, *rows), "inference")
    found = {(one.row_id, one.metric): one.predicted for one in report.predictions}
    first, further = (
        {name: found[name, metric] for name in ("0", "3000", "short")} for metric in ("ttft_ms", "tpot_ms")
    )
    assert first["3000"] < 0.5 * first["0"]
    # the cached part is still tokenised, 3 us a token, and attended to, by prompt and decodes
    assert first["3000"] > 1.02 * first["short"] + 9.0 and further["3000"] > 1.05 * further["short"]


def test_first_tokens_that_fitted_the_front_end_are_never_scored(tmp_path: Path) -> None:
    rate = {"mode": "online_rate", "concurrency": "", "note": "request rate 2/s", "engine": "trtllm"}
    path = table(
        tmp_path, served_row(**rate, engine_version="0.14"), served_row(**rate, row_id="b", measured_ttft_ms=81)
    )
    used = {(one.row_id, one.metric): one.used_in_calibration for one in validate_file(path, "inference").predictions}
    assert used == {
        ("mine_1", "tpot_ms"): False, ("mine_1", "ttft_ms"): True, ("b", "tpot_ms"): False, ("b", "ttft_ms"): False,
    }  # fmt: skip


def test_refusals_are_counted_by_reason(tmp_path: Path) -> None:
    path = table(
        tmp_path,
        served_row(architecture="Lama-3.1-8B"),
        served_row(row_id="b", architecture="Lama-3.1-8B"),
        served_row(row_id="c", mode="online_concurrency", concurrency=""),
        served_row(row_id="d", gemm_dtype="fp7"),
        served_row(row_id="e", isl=""),
        served_row(row_id="f", mode="online_rate"),
        served_row(row_id="g", concurrency=4096, isl=8000, measured_ttft_ms=50.0),
        served_row(row_id="h", tensor_parallel=1.5),
        served_row(row_id="i", measured_tpot_ms="", measured_ttft_ms=""),
        served_row(row_id="j", gpu="a100_80g_sxm", gemm_dtype="fp8"),
    )
    report = validate_file(path, "inference")
    assert report.predicted == 0 and sum(report.refused.values()) == 10
    assert (
        report.refused[
            "there is no architecture named 'Lama-3.1-8B' (did you mean Llama-3.1-8B, or the path of its config.json?)"
        ]
        == 2
    )
    assert any("no queueing" in reason for reason in report.refused)


def test_what_no_device_holds_is_refused(tmp_path: Path) -> None:
    path = table(
        tmp_path,
        served_row(row_id="a", architecture="DeepSeek-V3", gemm_dtype="fp8", tensor_parallel=8, n_gpus=8),
        served_row(row_id="b", architecture="Qwen3-30B-A3B", gpu="rtx_4090", attention_data_parallel=""),
        served_row(row_id="c", architecture="Qwen3-30B-A3B", engine_version="0.12.0", attention_data_parallel=""),
        served_row(row_id="d", mode="static_batch", concurrency=1024),
        served_row(row_id="e", isl=10_000_000),
        served_row(row_id="f", gemm_dtype="nvfp4"),
    )
    report = validate_file(path, "inference")
    said = "\n".join(report.refused)
    assert "fp8 weights of DeepSeek-V3 and 1 x the cache of a request take 85." in said
    # one device is at hand: seven more for copies of the attention are none of it
    assert "GB of each of 1 rtx_4090, which have 25.7" in said
    assert "bf16 weights of Llama-3.1-8B and 1024 x the cache of a request take 217." in said
    assert "1 x the cache of a request take 1326." in said and "h100_sxm has no nvfp4 units" in said
    assert {one.row_id for one in report.predictions} == {"c"}
    case = case_of(read_table(path).rows[2])
    assert (case.devices, case.load, case.attention_data) == (1, 16.0, 1)


def test_blanks_are_filled_in_and_named(tmp_path: Path) -> None:
    path = table(
        tmp_path,
        served_row(architecture="Qwen3-235B-A22B", gpu="h200_sxm", tensor_parallel=2, n_gpus=2, gemm_dtype="fp8",
                   attention_data_parallel="", engine_version="0.12.0", group="aic_silicon"),
        served_row(row_id="b", architecture="DeepSeek-V3", gpu="h200_sxm", gemm_dtype="fp8", attention_data_parallel="",
                   engine="sglang", n_gpus=8, tensor_parallel=1),
    )  # fmt: skip
    first, second = (case_of(row) for row in read_table(path))
    assert (first.tensor, first.attention_data, first.expert, first.load) == (8, 4, 8, 64.0)
    assert second.attention_data == 8  # what makes the weights fit
    assert any("attention_data_parallel" in text for text in (*first.assumed, *second.assumed))
    assert len(first.assumed) == 5  # that the same prompts are sent again, too


def test_options_of_a_publication_outrank_the_layout_that_its_table_prints(tmp_path: Path) -> None:
    said = "v1.0 MoE tables print TP only; options file sets enable_attention_dp"
    moe = served_row(architecture="Qwen3-30B-A3B", gpu="h200_sxm", engine="trtllm", tensor_parallel=8, n_gpus=8)
    path = table(tmp_path, {**moe, "note": said}, moe, served_row(tensor_parallel=8, n_gpus=8, note=said))
    told, printed, dense = (case_of(row) for row in read_table(path))
    assert (told.tensor, told.attention_tensor, told.attention_data, told.expert, told.load) == (8, 1, 8, 8, 16.0)
    assert any("options of the publication" in text for text in told.assumed)
    assert (printed.attention_data, printed.expert) == (1, 1) and dense.attention_data == 1


def test_devices_counted_once_for_each_way_of_experts_are_told_by_their_twins(tmp_path: Path) -> None:
    moe = served_row(group="aic_silicon", architecture="gpt-oss-120b", gpu="h200_sxm", engine="trtllm",
                     gemm_dtype="mxfp4", n_gpus=4, tensor_parallel=4, expert_parallel=2)  # fmt: skip
    copies = {**moe, "tensor_parallel": 1, "attention_data_parallel": 4}
    both = {**moe, "n_gpus": 8, "attention_data_parallel": 2}
    rows = (moe, copies, {**moe, "group": "mine"}, {**moe, "expert_parallel": 4}, both, {**both, "expert_parallel": 4})
    found = [case_of(row) for row in read_table(table(tmp_path, *rows))]
    layouts = [(one.tensor, one.attention_data, one.expert, one.given_devices, one.load) for one in found]
    assert layouts[:4] == [(2, 1, 2, 2, 16.0), (2, 2, 2, 2, 16.0), (4, 1, 2, 4, 16.0), (4, 1, 4, 4, 16.0)]
    # tensor and attention data beside each other: all devices are counted twice (four times), not each of the two
    assert layouts[4:] == [(4, 2, 2, 4, 16.0), (2, 2, 4, 2, 16.0)]
    assert [any("twins" in text for text in one.assumed) for one in found] == [True, True, False, False, True, True]


def test_lengths_that_a_benchmark_draws_enter_at_their_mean(tmp_path: Path) -> None:
    told = served_row(isl=1024, osl=8192, note="median TPOT; lengths uniform in 0.8-1.0 of isl/osl")
    twin = served_row(group="aic_silicon", isl=8192, osl=1024)
    as_printed = ({**told, "note": ""}, {**twin, "osl": 512}, {**twin, "mode": "single_stream"})
    found = [case_of(row) for row in read_table(table(tmp_path, told, twin, *as_printed))]
    lengths = [(one.isl, one.osl) for one in found]
    assert lengths[:2] == [(921.6, 7372.8), (7372.8, 921.6)]
    assert lengths[2:] == [(1024.0, 8192.0), (8192.0, 512.0), (8192.0, 1024.0)]
    # what a row states is not assumed; what is read into a row of the same loads is, and said
    assumed = [[text for text in one.assumed if "lengths" in text] for one in found]
    assert [len(texts) for texts in assumed] == [0, 2, 0, 0, 0]
    assert assumed[1][0].startswith("isl") and assumed[1][1].startswith("osl")


def test_prompts_sent_again_stand_in_the_prefix_cache_of_that_benchmark_alone(tmp_path: Path) -> None:
    row = served_row(group="aic_silicon", gpu="h200_sxm", gemm_dtype="fp8", engine_version="0.12.0", isl=8000, osl=100)
    rows = (row, {**row, "concurrency": 4}, {**row, "group": "mine"}, {**row, "engine_version": "0.15.0"})
    found = [case_of(one) for one in read_table(table(tmp_path, *rows))]
    assert [one.repeated for one in found] == [1.0 - 5.0 / 16.0, 0.0, 0.0, 0.0]
    assert [any("sent again" in text for text in one.assumed) for one in found] == [True, True, False, False]
    # new prompts alone stand in the way of the other clients' decodes
    costs = CostTable()
    told, mine = (float(serve(found[i], costs).tpot_s) for i in (0, 2))
    assert told < 0.85 * mine


def test_rows_are_fitted_and_predicted_with_the_same_cost(tmp_path: Path) -> None:
    # fits tabulate kernels once and add an engine's overheads; predictions tabulate the engine itself
    path = table(
        tmp_path,
        served_row(gpu="h200_sxm", engine="sglang"),
        served_row(row_id="b", gpu="h200_sxm", engine="trtllm", gemm_dtype="fp8"),
        served_row(row_id="c", gpu="b200_sxm", engine="sglang", architecture="Qwen3.5-397B-A17B", tensor_parallel=8),
    )
    for row in read_table(path):
        case = case_of(row)
        added, _ = CostTable().cost(case)
        replica = Replica.of(case.arch, case.hardware, case.engine, case.layout, case.gemm_dtype, case.kv_dtype)
        direct = engine_step_cost(replica, typical_context=case.isl + case.osl / 2.0)
        for running in (1.0, 64.0):
            context = running * 8192.0
            assert float(added.decode_s(running, context)) == pytest.approx(float(direct.decode_s(running, context)))


def test_experts_of_a_four_bit_checkpoint_stay_four_bit(tmp_path: Path) -> None:
    path = table(tmp_path, served_row(architecture="gpt-oss-20b"), served_row(row_id="b", architecture="Mixtral-8x7B"))
    four_bit, plain = (case_of(row) for row in read_table(path))
    assert (four_bit.gemm_dtype, four_bit.kv_dtype, plain.gemm_dtype) == ("mxfp4", "bf16", "bf16")
    assert any("mxfp4" in text for text in four_bit.assumed)


def test_rows_that_a_calibration_saw_are_left_out() -> None:
    def one(row: str, predicted: float, **more: bool) -> PredictedFigure:
        return PredictedFigure(row, "g", "step_s", 1.0, predicted, 0.9, 1.2, **more)

    outcome = Outcome((one("a", 1.1), one("b", 9.0, used_in_calibration=True)), (Refusal("c", "why"),))
    report = report_of("training", "f.csv", 3, outcome)
    (everything, group, covered) = report.metrics
    assert everything.rows == 1 and everything.mape == pytest.approx(10.0)
    assert (group.group, covered.group) == ("g", "covered")
    assert (report.predicted, report.used_in_calibration, dict(report.refused)) == (2, 1, {"why": 1})
    data = json.loads(json.dumps(report.to_dict()))
    assert data["schema_version"] == 1 and len(data["predictions"]) == 2
    assert {"median_ape", "mape", "p90_ape", "wape", "median_bias", "pairwise_ranking", "interval_coverage"} <= set(
        data["metrics"][0]
    )


def test_tables_without_names_get_stable_ones(tmp_path: Path) -> None:
    path = tmp_path / "kernel.csv"
    path.write_text("# made up\ngpu,bytes\na,1\nb,2\n")
    rows = read_table(path).rows
    assert rows[0].group == "kernel" and rows[0].row_id != rows[1].row_id and rows[1].line == 4
    path.write_text("gpu,bytes\nb,2\na,1\n")
    assert {row.row_id for row in read_table(path)} == {row.row_id for row in rows}
    assert Row("r", "g", 2, {"x": "1.5"}).number("x") == 1.5 and Row("r", "g", 2, {}).number("x") is None


def test_groups_that_nobody_had_in_view_are_summed_up_apart(tmp_path: Path) -> None:
    path = table(
        tmp_path,
        served_row(group="aic_silicon"),
        served_row(row_id="mine_3", measured_ttft_ms=81.0),
    )  # fmt: skip
    report = validate_file(path, "inference")
    assert {one.row_id: one.new for one in report.predictions} == {"mine_1": False, "mine_3": True}
    rows = {(one.group, one.split): one.rows for one in report.metrics if one.metric == "tpot_ms"}
    assert rows["all", "held out"] == rows["aic_silicon", "held out"] == rows["all", "new"] == 1
    assert "groups that no calibration had in view" in text_of(report)


@pytest.mark.data
@pytest.mark.parametrize("kind", ["training", "inference", "rl_step", "weight_sync"])
def test_groups_at_hand_stand_in_a_table(kind: str, measured_data: Path) -> None:
    rows = read_table(measured_data / "measured" / f"{kind}.csv")
    assert set(groups_at_hand()[kind]) <= {row.group for row in rows}
    for group in groups_at_hand()[kind].values():
        for entry in group.later:
            assert any(all(row.text(column) in texts for column, texts in entry) for row in rows), (kind, entry)


@pytest.mark.data
@pytest.mark.parametrize("kind", slow_but(("training", "inference", "rl_step", "weight_sync"), "training"))
def test_rows_at_hand_are_not_scored(kind: str, measured_data: Path) -> None:
    """Whichever rows fits have seen since they came, none of them is scored."""
    report = scored(measured_data / "measured" / f"{kind}.csv", kind)
    unseen = [one for one in report.predictions if not one.used_in_calibration]
    for split, new in ((HELD_OUT, False), (NEW, True)):
        told = {one.metric: one.rows for one in report.metrics if (one.group, one.split) == ("all", split)}
        assert all(n == sum(p.metric == metric and p.new == new for p in unseen) for metric, n in told.items())


def test_bad_tables_list_every_problem(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1\n1,2,3\n")
    with pytest.raises(SpecError) as caught:
        read_table(path)
    assert [problem.line for problem in caught.value.problems] == [2, 3]
    path.write_text("a,a\n1,2\n")
    with pytest.raises(SpecError, match="stands twice"):
        read_table(path)
    path.write_text("a\n")
    with pytest.raises(SpecError, match="holds no rows"):
        read_table(path)
    path.write_text("engin,gpu\nvllm,h100\n")
    with pytest.raises(SpecError) as caught:
        validate_file(path, "inference")
    assert any("did you mean engin" in str(problem) for problem in caught.value.problems)
    with pytest.raises(SpecError, match="did you mean kernels"):
        validate_file(path, "kernel")


def test_an_engine_is_fitted_on_whole_configurations(tmp_path: Path) -> None:
    hw, arch = load_hardware("h100_sxm"), load_architecture("Llama-3.1-8B")
    engine = load_engine_calibration("vllm")
    slow = engine.model_copy(
        update={
            "overhead": engine.overhead.model_copy(
                update={"per_layer": 2e-5, "per_request": 2e-5, "kernel_scale": 1.1}
            ),
            "factors": (),
        }
    )
    rows = []
    for tensor in (1, 2, 4, 8):
        for index, osl in enumerate((100, 1000, 4000)):
            context = 1000 + osl / 2
            truth = (
                float(decode_step_s(Replica.of(arch, hw, slow, Layout.of(tensor_parallel=tensor)), 1, context)) * 1e3
            )
            rows.append(served_row(row_id=f"r{tensor}_{index}", tensor_parallel=tensor, n_gpus=tensor,
                                   mode="single_stream", osl=osl, measured_tpot_ms=truth))  # fmt: skip
    served = read_table(table(tmp_path, *rows))
    chosen = calibration_cases(served, engine.id)
    assert len(chosen) == 3 and len({case.tensor for case, _, _ in chosen}) == 1
    with pytest.raises(SpecError, match="only 3 rows"):
        fit_engine(served, engine)
    with pytest.raises(SpecError, match=f"no row is of sglang-.*are of {engine.id}"):
        fit_engine(served, load_engine_calibration("sglang"))
    broken = read_table(table(tmp_path, *({**row, "gpu": "h900"} for row in rows)))
    with pytest.raises(SpecError, match=r":2: there is no device named 'h900'"):
        fit_engine(broken, engine)
    with pytest.raises(SpecError, match="column 'isl' is missing"):
        fit_engine(replace(served, columns=tuple(c for c in served.columns if c != "isl")), engine)
    twice = read_table(table(tmp_path, *rows, *({**row, "row_id": f"{row['row_id']}b", "isl": 8000} for row in rows)))
    fitted = fit_engine(twice, engine)
    assert fitted.rows == 6 and len(fitted.engine.overhead.row_ids) == 6
    assert fitted.in_sample_mape < 8.0
    path = tmp_path / "engine.yaml"
    path.write_text(engine_text(fitted.engine))
    assert read_spec(path, EngineCalibration).overhead.row_ids == fitted.engine.overhead.row_ids


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(tmp_path, served_row(), served_row(row_id="b", architecture="nothing"))
    assert _exit(["validate", str(path), "--kind", "inference", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["rows"], data["predicted"], sum(data["refused"].values())) == (2, 1, 1)
    assert _exit(["validate", str(path), "--kind", "inference"]) == 0
    text = capsys.readouterr().out
    assert "tpot_ms" in text and "refused     1" in text
    assert _exit(["validate", str(tmp_path / "absent.csv"), "--kind", "inference"]) == 2
    assert "no such file" in capsys.readouterr().err


def _exit(arguments: list[str]) -> int:
    import sys
    from unittest.mock import patch

    with patch.object(sys, "argv", ["rlperf", *arguments]):
        try:
            return int(run() or 0)
        except SystemExit as stop:
            return int(stop.code or 0)


def test_kernels_are_predicted_by_the_constants_of_a_plan(tmp_path: Path) -> None:
    """On H100 its own, which saw rows of the series; on H200, whose scans nobody timed, those of H100."""
    path = tmp_path / "gemm.csv"
    hw = load_hardware("h100_sxm")
    shapes = [(m, n) for m in (1, 64, 4096) for n in (1024, 16384)]
    lines = [f"h100_sxm,trtllm-1.3.0,bf16,{m},{n},1024,{1e6 * gemm_s(hw, m, n, 1024)}" for m, n in shapes]
    path.write_text("\n".join(["gpu,src,dtype,m,n,k,latency_us", *lines, "h900,trtllm-1.3.0,bf16,1,1024,1024,4"]))
    report = validate_file(path, "kernels")
    assert report.rows == 7 and report.predicted == 6 and report.refused == {"there is no device named 'h900'": 1}
    assert {(one.split, one.group) for one in report.metrics} >= {(SAME_SERIES, "gemm bf16"), (SAME_SERIES, "all")}
    # beyond L2 a benchmark finds what a plan finds
    assert report.predictions[-1].predicted == pytest.approx(report.predictions[-1].measured, rel=0.02)
    scans = tmp_path / "gdn.csv"
    head = "gpu,src,kernel,phase,batch,seq_len,num_v_heads,head_k_dim,head_v_dim,latency_us"
    scans.write_text(f"{head}\nh200_sxm,vllm-0.24.0,gdn,context,1,16384,32,128,128,900\n")
    (figure,) = validate_file(scans, "kernels").predictions
    assert figure.extrapolated and figure.assumed == ("constants of h100_sxm",)
    assert split_of(figure) == HELD_OUT


def test_rows_beside_the_point_of_their_table_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "ranks.csv"
    path.write_text(
        "gpu,src,kernel,phase,dtype,num_tokens,rank0_num_tokens,hidden_size,inter_size,topk,num_experts,moe_ep_size,"
        "distribution,latency_us\n"
        "h100_sxm,sglang-0.5.10,deepepmoe,generation,fp8_block,512,,7168,2048,8,256,16,uniform,270\n"
        "h100_sxm,sglang-0.5.10,deepepmoe,context,fp8_block,512,,7168,2048,8,256,16,uniform,400\n"
        "h100_sxm,trtllm-1.3.0,wideep_compute_cutlass,,fp8_block,512,300,7168,2048,8,256,16,power_law_1.2,120\n"
    )
    report = validate_file(path, "kernels")
    # each of 16 experts is read: 3 x 7168 x 2048 bytes at 3.35 TB/s, 210 us at least
    assert report.predicted == 1 and 210.0 < report.predictions[0].predicted < 1.5 * 210.0
    assert sorted(report.refused_lines.values()) == [(3,), (4,)]
    path.write_text(path.read_text().replace(",400\n", ",fast\n"))
    with pytest.raises(SpecError, match=r"ranks.csv:3: is no timing"):
        validate_file(path, "kernels")


def test_deepep_in_engines_counts_beyond_the_host(tmp_path: Path) -> None:
    path = tmp_path / "engines.csv"
    head = "gpu,src,backend,phase,comm_dtype,ep_size,node_num,sms,hidden_size,topk,num_experts,num_tokens,latency_us"
    rows = [
        f"h100_sxm,{engine},{backend},dispatch,{sent},8,1,0,7168,8,256,{tokens},{us}"
        for engine, backend, sent, tokens, us in (
            ("trtllm-1.3.0", "trtllm_deepep_ht", "bfloat16", 32, 72),
            ("trtllm-1.3.0", "trtllm_deepep_ht", "bfloat16", 256, 114),
            ("trtllm-1.3.0", "trtllm_deepep_ht", "bfloat16", 16384, 4000),
            ("vllm-0.24.0", "deepep_v2_context", "default", 16384, 5000),
        )
    ]
    path.write_text("\n".join([head, *rows]) + "\n")
    report = validate_file(path, "kernels")
    # 16,384 tokens to 5.25 of 8 devices in 16 bits at two thirds of the link
    (figure,) = report.predictions
    assert figure.predicted == pytest.approx(16384 * 5.25 * 7168 * 2 / (0.667 * 450e9) * 1e6, rel=0.02)
    assert not figure.series_in_fit
    assert sorted(report.refused_lines.values()) == [(2, 3), (5,)]


def test_quantising_passes_are_plain_ones_beyond_l2(tmp_path: Path) -> None:
    path = tmp_path / "quantise.csv"
    rows = ("fp8_static_quantize,32768,65536,2900", "fp8_dynamic_minus_static,32768,65536,2900")
    path.write_text(
        "gpu,src,kernel,op,m,k,latency_us\n" + "".join(f"h100_sxm,vllm-0.24.0,scaled_fp8_quant,{row}\n" for row in rows)
    )
    report = validate_file(path, "kernels")
    (figure,) = report.predictions  # two bytes in, one out, near the bandwidth
    assert 3 * 32768 * 65536 / 3.35e12 < figure.predicted / 1e6 < 1.25 * 3 * 32768 * 65536 / 3.35e12
    assert sorted(report.refused_lines.values()) == [(3,)]


def test_published_bus_bandwidths_are_predicted_by_shipped_constants(tmp_path: Path) -> None:
    path = tmp_path / "bus.csv"
    path.write_text(
        "gpu,nodes,n_gpus,collective,bytes,busbw_GBps,note\n"
        "H100,1,8,all_reduce,1073741824,480.0,\n"
        "H100,2,16,all_gather,1073741824,350.0,\n"
        "H100,4,32,all_reduce,1048576,5.0,EFA\n"
        "B200,4,32,all_reduce,2097152,10.38,seen by a calibration\n"
        "H100,4,32,all_reduce,1048576,0.0,no digits\n"
        "H100,4,32,broadcast,1048576,5.0,\n"
        "H900,4,32,all_reduce,1048576,5.0,\n"
    )
    report = validate_file(path, "kernels")
    assert report.rows == 7 and report.predicted == 4 and report.used_in_calibration == 1
    assert sum(report.refused.values()) == 3
    near, far, efa, _ = report.predictions
    assert near.predicted == pytest.approx(near.measured, rel=0.1)
    assert far.predicted == pytest.approx(far.measured, rel=0.25) and far.assumed == ("network=ib_ndr",)
    assert efa.assumed == ("network=efa_400",) and efa.predicted > 200.0


@pytest.mark.data
def test_collectives_across_nodes(measured_data: Path) -> None:
    report = validate_file(measured_data / "kernels" / "published_collectives.csv", "kernels")
    by_group = {one.group: one for one in report.metrics}
    assert by_group["b200_sxm x 4"].rows == 14 and by_group["b200_sxm x 4"].mape < 12.0
    assert by_group["all_reduce, one node"].median_ape < 10.0
    assert by_group["mi300x x 1"].mape < 20.0


def test_kinds_are_imported_by_name() -> None:
    assert {"kernels", "inference", "training", "memory"} <= set(core.KINDS)
    for kind in ("kernels", "inference"):
        assert callable(core.predictor(kind))


def test_cli_help_lists_kinds() -> None:
    import typer

    from rlperf.cli.validate import validate

    app = typer.Typer()
    app.command()(validate)
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0


# Published targets (mean absolute % error on left-out shapes) and the files they are about.
TARGETS = {
    "gemm.csv": {"gemm/a100_80g_sxm/trtllm/bf16": 7.5, "gemm/h100_sxm/trtllm/bf16": 7.0,
                 "gemm/h200_sxm/trtllm/bf16": 7.0, "gemm/b200_sxm/trtllm/bf16": 10.0},
    "attn_prefill.csv": {"prefill/h100_sxm/flash_attn_fa3/bf16": 8.5, "prefill/a100_80g_sxm/flash_attn/bf16": 11.0,
                         "prefill/b200_sxm/flashinfer_trtllmprefill/bf16": 13.0},
    "attn_decode.csv": {"decode/h100_sxm/flash_attn_fa3/bf16": 8.0, "decode/a100_80g_sxm/flash_attn/bf16": 16.0,
                        "decode/b200_sxm/flashinfer_trtllmdecode/bf16": 11.0},
}  # fmt: skip


@pytest.mark.data
@pytest.mark.parametrize("file", slow_but(TARGETS, "attn_prefill.csv", "attn_decode.csv"))
def test_left_out_kernels_meet_their_targets(file: str, measured_data: Path, tmp_path: Path) -> None:
    wanted = TARGETS[file]
    devices = {name.split("/")[1] for name in wanted} | {"a100_sxm"}
    lines = (measured_data / "kernels" / file).read_text().splitlines()
    mine = [lines[0], *(line for line in lines[1:] if line.split(",")[0] in devices and "fp8" not in line)]
    copy = tmp_path / file
    copy.write_text("\n".join(mine))
    errors = {one.group: one.left_out.mean for one in leave_out(copy, "kernels", "shape").lines}
    for name, limit in wanted.items():
        found = [value for group, value in errors.items() if group.startswith(f"{name} without")]
        assert len(found) >= 2
        assert max(found) < limit, name


@pytest.mark.data
@pytest.mark.slow
def test_served_rows(measured_data: Path) -> None:
    """Every row predicted by a fit that did not see its configuration; the shipped constants saw all of them."""
    file = measured_data / "measured" / "inference.csv"
    report, table = scored(file, "inference"), read_table(file)
    others = {reason: rows for reason, rows in report.refused.items() if reason != TOLD_AGAIN}
    assert sum(others.values()) < 0.02 * report.rows and 0 < report.refused[TOLD_AGAIN] < 0.06 * report.rows
    primary = [one for one in report.predictions if one.metric == "tpot_ms"]
    names = {row.row_id: (row.text("architecture"), row.text("gpu")) for row in table}
    # seen rows are never reported; no fit takes those of GLM-5, where nobody timed its attention, nor drafted ones
    unseen = [one for one in primary if not one.used_in_calibration]
    drafted = {("DeepSeek-R1", "b200_sxm"), ("DeepSeek-R1", "h200_sxm"), ("Qwen3.5-397B-A17B", "b200_sxm")}
    assert {names[one.row_id] for one in unseen} == {("GLM-5", "mi355x"), *drafted}
    assert sum(one.low <= one.measured <= one.high for one in unseen) >= 0.8 * len(unseen)
    groups = predict_groups(file, table, "configuration", refits=refits(file))
    lines = {
        (one.metric, one.group): one for one in left_out_report("inference", file.name, "configuration", groups).lines
    }
    whole = lines["tpot_ms", ALL]
    assert whole.rows > 1500
    assert whole.left_out.median < 8.5 and whole.left_out.mean < 12.0
    assert 0.86 < whole.left_out.inside < 0.95 and whole.left_out.width < 60.0
    assert lines["tokens_per_s_per_gpu", ALL].left_out.mean < 19.0


def test_engine_command(tmp_path: Path) -> None:
    from rlperf.cli.calibrate import app

    rows = [
        served_row(row_id=f"r{tensor}_{osl}", tensor_parallel=tensor, n_gpus=tensor, mode="single_stream", osl=osl,
                   measured_tpot_ms=3.0 + 12.0 / tensor)
        for tensor in (1, 2, 4, 8)
        for osl in (100, 200, 400, 800)
    ]  # fmt: skip
    out = tmp_path / "vllm.yaml"
    served = table(tmp_path, *rows)
    result = CliRunner().invoke(app, ["engine", str(served), "--name", "vllm", "--out", str(out), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["rows"] == 4
    assert len(read_spec(out, EngineCalibration).overhead.row_ids) == 4
    result = CliRunner().invoke(app, ["engine", str(served), "--name", "vllm", "--out", str(out)])
    assert "4 rows" in result.output and "us a request" in result.output
