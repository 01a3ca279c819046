"""Wrong cells in tables of measurements: the row is refused by column, value and line, never counted, never a crash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

TRAINING = {
    "framework": "megatron", "architecture": "Qwen2.5-7B", "gpu": "h100_sxm", "n_gpus": "8", "global_batch": "64",
    "seq_len": "4096", "measured_step_s": "9.5",
}  # fmt: skip
INFERENCE = {
    "architecture": "Qwen2.5-7B", "gpu": "h100_sxm", "engine": "vllm", "tensor_parallel": "1", "gemm_dtype": "bf16",
    "mode": "static_batch", "isl": "512", "osl": "128", "concurrency": "8", "expert_parallel": "1",
    "measured_tpot_ms": "8.5",
}  # fmt: skip
RL_STEP = {
    "framework": "verl", "architecture": "Qwen2.5-7B", "gpu": "h100_sxm", "n_gpus": "8", "isl_mean": "256",
    "osl_mean": "1024", "rollout_tensor_parallel": "1", "measured_step_s": "90",
}  # fmt: skip
SYNC = {"method": "nccl", "architecture": "Qwen2.5-7B", "gpu": "h100_sxm", "n_rollout_gpus": "8", "measured_s": "2.5"}
GOOD = {"training": TRAINING, "memory": {**TRAINING, "measured_peak_memory_gb": "60"}, "inference": INFERENCE,
        "rl_step": RL_STEP, "weight_sync": SYNC}  # fmt: skip


def table(folder: Path, *rows: dict[str, str]) -> Path:
    path = folder / "rows.csv"
    path.write_text("\n".join([",".join(rows[0]), *(",".join(row.values()) for row in rows)]) + "\n")
    return path


def validate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str, str]:
    from rlperf.cli.main import run

    monkeypatch.setattr("sys.argv", ["rlperf", "validate", *words])
    with pytest.raises(SystemExit) as stopped:
        run()
    streams = capsys.readouterr()
    return int(stopped.value.code or 0), streams.out, streams.err


WRONG = [
    ("training", "seq_len", "8192 s", "is not a number"),
    ("training", "global_batch", "abc", "is not a number"),
    ("training", "global_batch", "-4", "is negative"),
    ("training", "seq_len", "0", "is not above zero"),
    ("training", "n_gpus", "0", "is not a positive whole number"),
    ("training", "n_gpus", "inf", "is not a finite number"),
    ("training", "measured_step_s", "-9.5", "is negative"),
    ("memory", "measured_peak_memory_gb", "-60", "is negative"),
    ("memory", "global_batch", "many", "is not a number"),
    ("inference", "isl", "512 tokens", "is not a number"),
    ("inference", "expert_parallel", "two", "is not a number"),
    ("inference", "measured_tpot_ms", "-8.5", "is negative"),
    ("inference", "measured_tpot_ms", "fast", "is not a number"),
    ("rl_step", "osl_mean", "1k", "is not a number"),
    ("rl_step", "rollout_tensor_parallel", "one", "is not a number"),
    ("rl_step", "n_gpus", "1000000", "is beyond any cluster: at most 131,072 devices"),
    ("rl_step", "osl_mean", "1000000", "is beyond any rollout: at most 524,288 tokens"),
    ("rl_step", "measured_step_s", "-90", "is negative"),
    ("weight_sync", "measured_s", "2.5 s", "is not a number"),
    ("weight_sync", "measured_s", "-2.5", "is negative"),
]


@pytest.mark.parametrize(("kind", "column", "cell", "why"), WRONG)
def test_a_wrong_cell_refuses_its_row(
    kind: str, column: str, cell: str, why: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    good = GOOD[kind]
    path = table(tmp_path, good, {**good, column: cell})
    code, out, err = validate(capsys, monkeypatch, str(path), "--kind", kind)
    assert (code, err) == (0, "")
    assert "2 rows" in out and "1 predicted" in out
    assert f"{column} {cell!r} {why} (line 3)" in out
    code, out, _ = validate(capsys, monkeypatch, str(path), "--kind", kind, "--json")
    assert json.loads(out)["refused_lines"] == {f"{column} {cell!r} {why}": [3]}


def test_a_table_without_one_prediction_is_wrong_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {**TRAINING, "architecture": "Qwen2.5-7C"}
    path = table(tmp_path, wrong, {**wrong, "n_gpus": "16"}, {**TRAINING, "seq_len": "long"})
    code, out, err = validate(capsys, monkeypatch, str(path), "--kind", "training")
    assert (code, out) == (2, "")
    assert "not one of 3 rows of kind training could be predicted" in err
    named = "'Qwen2.5-7C' (did you mean Qwen2.5-7B, or the path of its config.json?)"
    assert f"rows.csv:2: there is no architecture named {named}, in 2 rows" in err
    assert "rows.csv:4: seq_len 'long' is not a number" in err


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ("training", "measured_step_s", "measured_step"),
        ("inference", "measured_tpot_ms", "measured_tpot"),
        ("rl_step", "measured_step_s", "step_s"),
        ("weight_sync", "measured_s", "measured"),
    ],
)
def test_a_misnamed_measured_column_is_named(
    kind: str, right: str, wrong: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path = table(tmp_path, {wrong if name == right else name: cell for name, cell in GOOD[kind].items()})
    code, out, err = validate(capsys, monkeypatch, str(path), "--kind", kind)
    assert (code, out) == (2, "")
    assert "rows.csv:1:" in err and right in err and wrong in err.split("(")[1]


def test_an_rl_step_may_state_a_stage_and_not_the_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {("measured_rollout_s" if name == "measured_step_s" else name): cell for name, cell in RL_STEP.items()}
    code, out, _ = validate(capsys, monkeypatch, str(table(tmp_path, row)), "--kind", "rl_step")
    assert code == 0 and "1 predicted" in out


def test_a_product_of_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    product = {"gpu": "h100_sxm", "dtype": "bf16", "m": "64", "n": "4096", "k": "4096", "latency_us": "14.5"}
    path = table(tmp_path, product, {**product, "m": "0"})
    code, out, err = validate(capsys, monkeypatch, str(path), "--kind", "kernels")
    assert code == 0 and "2 rows of kind kernels, 1 predicted" in out and "nothing in it" in out + err
