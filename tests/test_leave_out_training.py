"""Training stacks left out: fits from nothing find what was put in, and rows that are left out say nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import joblib
import numpy as np
import pytest

from rlperf.calibrate.leave_out import group_of, report_of
from rlperf.calibrate.leave_out_training import predict_groups
from rlperf.calibrate.tables import read_table
from rlperf.calibrate.trainers.constants import Timed
from rlperf.calibrate.trainers.rows import read_training_rows

HEADER = (
    "row_id,group,framework,framework_version,architecture,gpu,n_gpus,compute_dtype,tensor_parallel,pipeline_parallel,"
    "context_parallel,expert_parallel,data_parallel,zero_stage,microbatch,global_batch,seq_len,activation_recompute,"
    "measured_step_s"
)


def table_of(folder: Path, scales: dict[tuple[str, str], float]) -> Path:
    """Six lengths of a 7B for every (framework, device), each stack so many times what is believed without a row."""
    lines = [
        f"{framework}{device}{i},{framework},{framework},,Qwen2.5-7B,{device},8,bf16,1,1,1,1,8,3,1,64,{1024 * i},full,"
        for framework, device in scales
        for i in range(1, 7)
    ]
    path = folder / "training.csv"
    path.write_text("\n".join([HEADER, *(line + "1" for line in lines)]) + "\n", encoding="utf-8")
    timed = Timed(read_training_rows(path)[0])
    seconds = np.exp(timed.predict(timed.pool_rows.start)) * np.repeat(list(scales.values()), 6)
    rows = [f"{line}{value!r}" for line, value in zip(lines, seconds.tolist(), strict=True)]
    path.write_text("\n".join([HEADER, *rows]) + "\n", encoding="utf-8")
    return path


STACKS = {("prime-rl", "h100_sxm"): 1.0, ("prime-rl", "b200_sxm"): 1.1, ("llm-foundry", "h100_sxm"): 1.05}


@pytest.fixture
def one_process() -> Iterator[None]:
    """Fits of a few rows, each quicker than a process is started for it."""
    with joblib.parallel_config("sequential"):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
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
    seen = [[one.predicted for one in each.seen] for each in found]
    assert left[0] == pytest.approx(left[1], rel=1e-9)
    assert sum(seen[1]) > 1.05 * sum(seen[0])
    assert not any(one.used_in_calibration for each in found for one in (*each.seen, *each.left_out))


@pytest.mark.usefixtures("one_process")
def test_a_backend_without_a_row_left_has_the_pools_constants_and_says_so(tmp_path: Path) -> None:
    path = table_of(tmp_path, STACKS)
    told: list[tuple[float, str]] = []
    groups = predict_groups(path, read_table(path), "framework", lambda *said: told.append(said))
    found = {one.name: one for one in groups}
    assert told == [(0.0, "llm-foundry"), (0.5, "prime-rl")]
    assert found["llm-foundry"].borrowed == "fsdp_llm_foundry: the pool"
    assert found["prime-rl"].borrowed == "fsdp2: the pool"
    seen, left = (
        [one.high / one.predicted for one in side]
        for side in (found["llm-foundry"].seen, found["llm-foundry"].left_out)
    )
    assert min(left) > max(seen)


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
    # 15.6 and 23.4 %, below 13 and 23 before NeMo's kernel and packs were read, whose rows are nearest among
    # these five; with all frameworks beside it Megatron-LM goes from 11.2 to 10.2 %. Launches of the other no row tells
    assert lines["Megatron-LM"].left_out.median < 16.5
    assert lines["Megatron-DeepSpeed"].left_out.median < 24.5
    assert lines["NeMo (Megatron-Core)"].left_out.mean < 12.0  # 10.9 %
    assert lines["prime-rl (PyTorch FSDP2)"].left_out.mean < 17.0  # 15.4 %
    assert lines["all rows"].left_out.mean < 19.5  # 18.7 %, 20.6 before
    assert lines["Megatron-DeepSpeed"].borrowed == "megatron_deepspeed: the pool"
    assert lines["torchtitan (FSDP2)"].left_out.mean < 13.0  # 11.9 %, 16.0 before gathers in 8 bits
    # of means: torchtitan's median is of ten rows
    assert all(line.seen.mean < line.left_out.mean for line in lines.values())
    assert lines["all rows"].seen.median < 6.0
