"""A device told from served rows: known constants come back, and what rows say nothing of stays where it started."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlperf.calibrate.served_devices import KNOBS, constants_of, fit_served_device
from rlperf.calibrate.serving.rows import CostTable, case_of, serve
from rlperf.calibrate.tables import Row, Table
from rlperf.errors import SpecError
from rlperf.specs.calibration import load_device_calibration
from rlperf.specs.engine_calibration import EngineCalibration, EngineOverhead, load_engine_calibration
from rlperf.specs.hardware import at_published_rates, load_hardware
from rlperf.specs.profiles import load_device

MI355X = load_device("mi355x")
BASE = load_device_calibration("b200_sxm").borrowed_by("mi355x")


def table(values: np.ndarray, models: tuple[tuple[str, str], ...]) -> Table:
    """Rows that a device with these constants would have served."""
    constants = constants_of(values, MI355X, BASE)
    rows = []
    for model, dtype in models:
        for tensor in (1, 4, 8):
            for isl in (1024, 8192):
                for concurrency in (1, 4, 16, 64):
                    cells = {
                        "engine": "vllm", "architecture": model, "gpu": "mi355x", "n_gpus": str(tensor),
                        "tensor_parallel": str(tensor), "attention_data_parallel": "1", "expert_parallel": "1",
                        "gemm_dtype": dtype, "mode": "online_concurrency", "isl": str(isl), "osl": "1024",
                        "concurrency": str(concurrency), "measured_tpot_ms": "1",
                    }  # fmt: skip
                    row = Row(f"{model}_{tensor}_{isl}_{concurrency}", "toy", len(rows) + 2, cells)
                    seen = serve(case_of(row, constants={"mi355x": constants}), CostTable())
                    told = {**cells, "measured_tpot_ms": f"{float(seen.tpot_s) * 1e3:.5f}"}
                    rows.append(Row(row.row_id, "toy", row.line, told))
    return Table("toy.csv", tuple(rows[0].cells), tuple(rows))


@pytest.mark.slow
def test_known_constants_come_back_and_silence_is_named() -> None:
    start = np.asarray([knob.start for knob in KNOBS.values()])
    truth = start.copy()
    names = list(KNOBS)
    truth[names.index("fp4")] *= 0.75
    truth[names.index("expert_fixed_4")] *= 1.9
    models = (("Llama-3.1-70B", "fp8"), ("Llama-3.1-70B", "mxfp4"), ("gpt-oss-120b", "mxfp4"))
    found = fit_served_device(table(truth, models), "mi355x", check=False, today="2026-01-01")
    again = dict(zip(names, truth.tolist(), strict=True))
    for name, within in (("fp4", 0.1), ("expert_fixed_4", 0.2)):
        assert found.values[name] == pytest.approx(again[name], rel=within)
        assert abs(np.log(found.values[name] / again[name])) < 0.4 * abs(np.log(KNOBS[name].start / again[name]))
        assert found.narrowed[name] < 0.6
    assert found.in_sample_mape < 2.0
    # no row has fp8 experts: their constants stay, and the file says so
    assert found.values["expert_fixed_8"] == KNOBS["expert_fixed_8"].start
    assert found.narrowed["expert_fixed_8"] == pytest.approx(1.0) and "expert_fixed_8" in found.calibration.notes
    # a part of the configurations was seen, and is listed
    assert len(found.calibration.served_rows) == found.rows == 24
    assert found.calibration.told and not found.calibration.extrapolated


def test_too_few_rows_and_devices_without_a_relative_are_refused() -> None:
    one = table(np.asarray([knob.start for knob in KNOBS.values()]), (("gpt-oss-120b", "mxfp4"),))
    with pytest.raises(SpecError, match="are needed"):
        fit_served_device(Table(one.file, one.columns, one.rows[:6]), "mi355x", check=False)


def test_no_constant_reads_faster_than_the_data_sheet() -> None:
    """Within 0.95 of the bandwidth, for what ships and at every knob's bound."""
    high = constants_of(np.asarray([knob.high for knob in KNOBS.values()]), MI355X, BASE)
    for constants in (high, load_hardware("mi355x").calibration, load_hardware("mi300x").calibration):
        for fit in (*constants.gemm, *constants.decode, *constants.moe):
            assert fit.memory <= 0.95


def test_a_relative_is_brought_to_what_a_device_attains() -> None:
    mi300x = load_device("mi300x")
    assert mi300x.attained is not None and mi300x.attained.bf16 is not None and MI355X.attained is not None
    lent = load_device_calibration("mi355x").borrowed_by("mi300x")
    found = load_hardware("mi300x").calibration
    assert found == at_published_rates(lent, mi300x, MI355X)
    bf16 = next(fit for fit in found.gemm if fit.dtype == "bf16")
    # its published 668 TFLOP/s
    assert bf16.compute * mi300x.peaks.bf16 == pytest.approx(mi300x.attained.bf16, rel=0.01)
    assert found.extrapolated_from == "mi355x"
    silent = MI355X.model_copy(update={"attained": None})
    assert at_published_rates(lent, silent, MI355X) == lent


def _unseen(engine: EngineCalibration) -> EngineOverhead:
    return engine.overhead.model_copy(update={"row_ids": ()})


def test_amd_rows_outside_the_split_are_predicted(measured_data: Path) -> None:
    """MI355X rows that its constants were not told from, on engines whose pool never saw them; 16.2 % on B200's."""
    from rlperf.calibrate.tables import read_table
    from rlperf.calibrate.validate_inference import predict_case

    whole = read_table(measured_data / "measured" / "inference.csv")
    costs, errors, inside, bias = CostTable(), [], [], []
    shipped = (load_engine_calibration(name) for name in ("vllm", "sglang"))
    alone = {
        one.id: one.model_copy(
            update={"factors": tuple(f for f in one.factors if not f.group), "overhead": _unseen(one)}
        )
        for one in shipped
    }
    for row in whole:
        if row.text("gpu") != "mi355x" or row.text("architecture") == "GLM-5":
            continue  # kernels of its sparse attention were timed on no AMD device: judged in test_validate
        try:
            found = predict_case(case_of(row, alone), costs)
        except SpecError:
            continue
        for one in found:
            if not one.used_in_calibration:
                errors.append(abs(one.predicted / one.measured - 1.0))
                bias.append(one.predicted / one.measured - 1.0)
                inside.append(one.low <= one.measured <= one.high)
    assert len(errors) > 200
    assert np.median(errors) < 0.11 and np.mean(errors) < 0.15
    assert abs(np.median(bias)) < 0.05
    # on the pool's host times, which are not AMD's, and in intervals of other devices 230 of 272 lie inside (232 before
    # vLLM's experts on Hopper became Marlin's); by a fit without the device, as `--leave-out device` does, 0.89 do
    assert 0.84 < np.mean(inside) <= 1.0


def test_a_factor_of_a_group_that_nobody_forms_is_refused_where_it_is_read() -> None:
    found = load_engine_calibration("vllm").model_dump(exclude_unset=True)
    found["factors"] = [{"kind": "day of the week", "group": "", "spread": 0.1}]
    kinds = "'release', 'device', 'family', 'path', 'cell' or 'throughput'"
    with pytest.raises(ValueError, match=rf"(?s)factors.0.kind.*{kinds}"):
        EngineCalibration.model_validate(found)
