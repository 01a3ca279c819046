"""Training stacks left out: fits from nothing find what was put in, and rows that are left out say nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlperf.calibrate.leave_out import group_of, report_of
from rlperf.calibrate.leave_out_training import RELATIVES, knobs_of, predict_groups
from rlperf.calibrate.refit import log_seconds, middle, refit, tangent
from rlperf.calibrate.tables import read_table
from rlperf.calibrate.trainer_fits import KNOBS
from rlperf.calibrate.trainer_rows import read_training_rows
from rlperf.calibrate.trainers import Knob
from rlperf.specs.trainer_calibration import load_trainer

HEADER = (
    "row_id,group,framework,framework_version,architecture,gpu,n_gpus,compute_dtype,tensor_parallel,pipeline_parallel,"
    "context_parallel,expert_parallel,data_parallel,zero_stage,microbatch,global_batch,seq_len,activation_recompute,"
    "measured_step_s"
)


def table_of(folder: Path, seconds: dict[tuple[str, str], float]) -> Path:
    """Six lengths of a 7B for every (framework, device), the first one taking so many seconds."""
    lines = [
        f"{framework}{device}{i},{framework},{framework},,Qwen2.5-7B,{device},8,bf16,1,1,1,1,8,3,1,64,"
        f"{1024 * (i + 1)},full,{first * (i + 1)!r}"
        for (framework, device), first in seconds.items()
        for i in range(6)
    ]
    path = folder / "training.csv"
    path.write_text("\n".join([HEADER, *lines]) + "\n", encoding="utf-8")
    return path


def test_a_fit_from_the_middle_of_the_bounds_finds_what_was_put_in(tmp_path: Path) -> None:
    knobs = (Knob("generations.Hopper.sustained", 0.3, 1.1), Knob("timing.update", 1e-3, 1.0))
    rows, _ = read_training_rows(table_of(tmp_path, {("prime-rl", "h100_sxm"): 5.0}))
    truth = knobs[1].write(knobs[0].write(load_trainer("fsdp2"), 0.5), 0.2)
    rows = [
        replace(row, update_s=float(np.exp(value))) for row, value in zip(rows, log_seconds(truth, rows), strict=True)
    ]
    found = refit(tangent(middle(truth, knobs), rows, knobs), rows, knobs, ridge=1e-4)
    assert [knob.read(found.trainer) for knob in knobs] == pytest.approx([0.5, 0.2], rel=0.05)
    assert np.abs(found.residual).max() < 0.01
    assert found.determined.all()


STACKS = {
    ("prime-rl", "h100_sxm"): 2.0, ("prime-rl", "b200_sxm"): 1.5, ("prime-rl", "rtx_a6000"): 12.0,
    ("llm-foundry", "h100_sxm"): 1.6,
}  # fmt: skip


@pytest.mark.parametrize(("by", "group", "stack"), [
    ("device", "h100_sxm", ("prime-rl", "h100_sxm")),
    ("framework", "llm-foundry", ("llm-foundry", "h100_sxm")),
])  # fmt: skip
def test_what_a_left_out_group_measured_moves_no_prediction_of_it(
    tmp_path: Path, by: str, group: str, stack: tuple[str, str]
) -> None:
    found = []
    for scale in (1.0, 1.3):
        path = table_of(tmp_path, {**STACKS, stack: scale * STACKS[stack]})
        found.append({one.name: one for one in predict_groups(path, read_table(path), by)}[group])
    left = [[one.predicted for one in each.left_out] for each in found]
    bounds = [[(one.low, one.high) for one in each.left_out] for each in found]
    seen = [[one.predicted for one in each.seen] for each in found]
    assert left[0] == left[1]
    assert bounds[0] == bounds[1]
    assert sum(seen[1]) > 1.05 * sum(seen[0])
    assert not any(one.used_in_calibration for each in found for one in (*each.seen, *each.left_out))


def test_a_backend_without_a_row_left_borrows_and_says_from_whom(tmp_path: Path) -> None:
    path = table_of(tmp_path, STACKS)
    found = {one.name: one for one in predict_groups(path, read_table(path), "framework")}
    assert found["llm-foundry"].borrowed == "fsdp_llm_foundry: fsdp2"
    assert found["prime-rl"].borrowed == "fsdp2: fsdp_llm_foundry"


def test_every_fitted_backend_has_relatives_that_are_fitted() -> None:
    assert set(RELATIVES) == set(KNOBS)
    assert all(other in KNOBS and other != name for name, others in RELATIVES.items() for other in others)
    assert {knob.path for knob in knobs_of("fsdp2")} > {knob.path for knob in KNOBS["fsdp2"]}


@pytest.mark.data
@pytest.mark.slow
def test_dense_stacks_carry_over_to_frameworks_left_out(measured_data: Path) -> None:
    path = measured_data / "measured" / "training.csv"
    table = read_table(path)
    kept = (
        "Megatron-DeepSpeed",
        "Megatron-LM",
        "NeMo (Megatron-Core)",
        "torchtitan (FSDP2)",
        "prime-rl (PyTorch FSDP2)",
    )
    table = replace(table, rows=tuple(row for row in table if group_of(row, "framework") in kept))
    lines = {
        line.group: line
        for line in report_of("training", "", "framework", predict_groups(path, table, "framework")).lines
    }
    assert lines["Megatron-LM"].left_out.median < 12.0
    assert lines["Megatron-DeepSpeed"].left_out.median < 13.0
    assert lines["Megatron-DeepSpeed"].borrowed == "megatron_deepspeed: megatron_legacy"
    assert lines["torchtitan (FSDP2)"].left_out.median < 12.0
    assert all(line.seen.median < line.left_out.median + 1.0 for line in lines.values())
    assert lines["all rows"].seen.median < 7.0
