"""Fits of trainer backends on made-up measurements: they find what was put in, and say what they saw."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlperf.calibrate import trainer_fits
from rlperf.calibrate.trainers import timing_fits
from rlperf.calibrate.trainers.constants import EXPERTS, SHARED, Timed
from rlperf.calibrate.trainers.costs import Knob
from rlperf.calibrate.trainers.rows import TrainingRow, read_training_rows
from rlperf.calibrate.trainers.timing_fits import fit_rows
from rlperf.calibrate.validate_memory import predict_peaks
from rlperf.specs.profiles import load_device
from rlperf.specs.trainer_calibration import load_trainer

HEADER = (
    "row_id,group,framework,framework_version,architecture,gpu,n_gpus,compute_dtype,tensor_parallel,sequence_parallel,"
    "pipeline_parallel,virtual_pipeline,context_parallel,expert_parallel,data_parallel,zero_stage,microbatch,"
    "global_batch,seq_len,activation_recompute,offload,lora_rank,measured_step_s,measured_tokens_per_s_per_gpu,"
    "measured_peak_memory_gb,note"
)


def write(folder: Path, framework: str, values: list[tuple[float, float]]) -> Path:
    """One row a pair of (seconds, GB), each of its own length."""
    lines = [
        f"{i},made,{framework},,Qwen2.5-7B,h100_sxm,8,bf16,1,0,1,1,1,1,8,3,1,64,{1024 * (i + 1)},full,none,,"
        f"{s!r},,{g!r},"
        for i, (s, g) in enumerate(values)
    ]
    path = folder / "measured" / "training.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([HEADER, *lines]) + "\n", encoding="utf-8")
    return path


def made(folder: Path, shift: dict[str, float]) -> tuple[list[TrainingRow], Timed]:
    """Rows of three stacks whose seconds follow from the constants believed in, some of them moved by ln."""
    stacks = [
        (name, device, length)
        for name in ("FSDP2", "NeMo AutoModel", "llm-foundry")
        for device in ("h100_sxm", "b200_sxm")
        for length in range(1, 7)
    ]
    lines = [
        f"{name}{device}{k},{name},{name},,Qwen2.5-7B,{device},8,bf16,1,0,1,1,1,1,8,3,1,64,{1024 * k},full,none,,1,,1,"
        for name, device, k in stacks
    ]
    path = folder / "training.csv"
    path.write_text("\n".join([HEADER, *lines]) + "\n", encoding="utf-8")
    rows, _ = read_training_rows(path)
    timed = Timed(rows)
    logs = timed.pool_rows.start
    for column, one in enumerate(SHARED):
        logs[:, column] += shift.get(one.name, 0.0)
    seconds = np.exp(timed.predict(logs))
    rows = [replace(row, update_s=float(value)) for row, value in zip(rows, seconds, strict=True)]
    return rows, Timed(rows)


@pytest.mark.slow
def test_pooled_constants_are_found_and_what_rows_do_not_tell_stays(tmp_path: Path) -> None:
    rows, timed = made(tmp_path, {"sustained": -0.25})
    fit = fit_rows(rows)
    assert int(fit.seen.sum()) == 24  # two of three configurations
    assert np.abs(fit.predicted - timed.pool_rows.measured).max() < 0.03
    found = fit.trainer("fsdp2")
    assert found.entry("Hopper").sustained == pytest.approx(0.75 * np.exp(-0.25), rel=0.08)
    # no row has experts or eight bits: as believed
    assert found.timing.moe_pass == pytest.approx(1.0, rel=1e-3)
    assert found.entry("Hopper").sustained_fp8 == pytest.approx(0.95, rel=1e-3)
    # FlashAttention-2, half of Hopper's instructions and a quarter of Blackwell's, shows in llm-foundry's rows alone
    assert [found.entry(name).flash2 for name in ("Hopper", "Blackwell")] == pytest.approx([2.0, 4.0], rel=0.03)
    # a mechanism that a stack does not have keeps what its file states
    assert found.timing.host_expert == load_trainer("fsdp2").timing.host_expert
    assert found.entry("Blackwell").measured
    assert not found.entry("Ampere").measured if any(e.generation == "Ampere" for e in found.generations) else True


def test_slopes_of_all_constants_at_once_are_those_of_one_after_the_other(tmp_path: Path) -> None:
    _, timed = made(tmp_path, {})
    rows = timed.pool_rows
    logs = rows.start + 0.2 * np.random.default_rng(0).standard_normal(rows.start.shape[1])
    at_once, in_turn = rows.slopes(logs), replace(rows, moved=None).slopes(logs)
    assert np.array_equal(at_once, in_turn)
    assert (np.abs(at_once).max(axis=0) > 0.01).sum() > 5
    experts = [place for place, one in enumerate(SHARED) if one.name in EXPERTS]
    assert not at_once[:, experts].any()  # a dense model


@pytest.mark.slow
def test_intervals_are_read_where_a_fit_does_not_look(tmp_path: Path) -> None:
    rows, _ = made(tmp_path, {})
    noise = np.random.default_rng(0).normal(0.0, 0.15, len(rows))
    noisy = [
        replace(row, update_s=float(row.update_s or 0) * float(np.exp(by))) for row, by in zip(rows, noise, strict=True)
    ]
    fit = fit_rows(noisy)
    assert np.isnan(fit.left_out[~fit.seen]).all()
    low, high = fit.interval("fsdp2")
    assert 0.6 < low < 0.95 and 1.05 < high < 1.6
    strange = fit.interval("megatron")
    assert strange[0] < low and strange[1] > high  # no row of it
    exact = fit_rows(rows).interval("fsdp2")
    assert exact == pytest.approx((1.0 / 1.06, 1.06))  # as a rerun differs


def test_what_a_fit_leaves_open_is_more_where_it_saw_less(tmp_path: Path) -> None:
    rows, _ = made(tmp_path, {})
    fit = fit_rows(rows)
    found = fit.trainer("fsdp2")
    assert found.frameworks == ("FSDP2",)
    here, ampere = (found.entry(name).doubt for name in ("Hopper", "*"))
    assert here is not None and ampere is not None
    assert here.dense < here.dense_elsewhere and here.dense < ampere.dense
    strange = fit.trainer("megatron").entry("Hopper").doubt
    assert strange is not None and strange.dense == pytest.approx(strange.dense_elsewhere)  # no row of it
    assert here.dense < strange.dense


@pytest.mark.slow
@pytest.mark.parametrize("pooled", [True, False])
def test_the_run_writes_seconds_and_leaves_memory_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, pooled: bool
) -> None:
    monkeypatch.setattr(timing_fits, "POOLED", ("automodel",) if pooled else ())
    monkeypatch.setattr(timing_fits, "LENT", {"automodel": {"timing.microbatch": "fsdp2"}})
    made(tmp_path, {})
    (tmp_path / "measured").mkdir()
    (tmp_path / "training.csv").rename(tmp_path / "measured" / "training.csv")
    timing_fits.main([str(tmp_path), str(tmp_path / "out"), "automodel", "fsdp2"])
    before, again = load_trainer("automodel"), load_trainer("automodel", file=tmp_path / "out" / "automodel.yaml")
    assert again.workspace == before.workspace
    assert "fsdp2: " in capsys.readouterr().out
    last = again.provenance[-1]
    assert last.n == 8 and timing_fits.DOUBT in last.constants
    assert (again.timing.collective == before.timing.collective) != pooled
    assert ("timing.collective" in last.constants) == pooled
    assert len(again.configurations) == (8 if pooled else len(before.configurations))
    # what is lent is the pool's either way, and what the fit leaves open is these rows' alone
    assert again.timing.microbatch != before.timing.microbatch
    assert again.generation(load_device("h100_sxm")).doubt != before.generation(load_device("h100_sxm")).doubt


def test_a_memory_fit_finds_the_working_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    knob = Knob("workspace.recompute_dense", 1.0, 5.0)
    monkeypatch.setitem(trainer_fits.MEMORY_KNOBS, "fsdp2", (knob,))
    rows, _ = read_training_rows(write(tmp_path, "FSDP2", [(1.0, 1.0)] * 9))
    truth = knob.write(load_trainer("fsdp2"), 3.3)
    peaks = predict_peaks(rows, truth) / 1e9
    rows, _ = read_training_rows(write(tmp_path, "FSDP2", [(1.0, float(g)) for g in peaks]))
    fitted = trainer_fits.fit_memory(load_trainer("fsdp2"), rows)
    measured = [row.peak_bytes for row in rows]
    assert predict_peaks(rows, fitted) == pytest.approx(measured, rel=0.02)
    assert len(fitted.memory_configurations) == 3
    # a backend without knobs, or without peaks, stays as it is
    assert trainer_fits.fit_memory(load_trainer("nemo"), rows) is load_trainer("nemo")


def test_the_run_writes_a_file_per_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trainer_fits, "PHASE_KNOBS", (Knob("workspace.fixed", 1e6, 2e9),))
    write(tmp_path, "FSDP2", [(3.0 * (i + 1), 30.0) for i in range(6)])
    phases = tmp_path / "memory" / "rl_lora_phases.csv"
    phases.parent.mkdir()
    lines = [
        f"Qwen/Qwen2.5-0.5B-Instruct,NVIDIA L4,{phase},{4e9 + size * 1e5},0.2,4,8,1,none,{size},1"
        for size in (512, 1024, 2048, 4096)
        for phase in ("training", "generation")
    ]
    knobs = "knob_gpu_memory_utilization,knob_group_size,knob_lora_rank,knob_micro_batch,knob_quantization,knob_seq_len"
    header = f"model,device,phase,nvml_polled_bytes,{knobs},knob_n_prompts"
    phases.write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
    out = tmp_path / "out"
    trainer_fits.main([str(tmp_path), str(out), "fsdp2", "peft"])
    assert sorted(path.name for path in out.iterdir()) == ["fsdp2.yaml", "peft.yaml"]
    assert load_trainer("peft", file=out / "peft.yaml").memory_configurations
    assert "fsdp2: mean" in capsys.readouterr().out
