"""Fits of trainer backends on made-up measurements: they find what was put in, and say what they saw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlperf.calibrate import trainer_fits
from rlperf.calibrate.trainer_rows import digest, read_training_rows
from rlperf.calibrate.trainers import Knob, predict_seconds
from rlperf.calibrate.validate_memory import predict_peaks
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


def test_a_timing_fit_finds_the_sustained_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    knob = Knob("generations.Hopper.sustained", 0.3, 1.1)
    monkeypatch.setitem(trainer_fits.KNOBS, "automodel", (knob,))
    monkeypatch.setattr(trainer_fits, "RIDGE", 0.0)
    rows, _ = read_training_rows(write(tmp_path, "NeMo AutoModel", [(1.0, 1.0)] * 9))
    truth = knob.write(load_trainer("automodel"), 0.55)
    seconds = predict_seconds(rows, {"automodel": truth})
    rows, _ = read_training_rows(write(tmp_path, "NeMo AutoModel", [(float(s), 1.0) for s in seconds]))
    (fitted,) = trainer_fits.fit_backend("automodel", rows)
    assert knob.read(fitted) == pytest.approx(0.55, rel=0.06)
    assert len(fitted.configurations) == 3
    assert set(fitted.configurations) <= {digest(row.configuration) for row in rows}
    last = fitted.provenance[-1]
    assert last.constants == (knob.path,)
    assert last.n == 3


def test_many_constants_on_few_configurations_widen_the_interval() -> None:
    ratio = np.exp(np.linspace(-0.1, 0.1, 21))
    few, many = (trainer_fits.interval_of(ratio, 10, knobs) for knobs in (2, 9))
    assert many[0] < few[0] < 1.0 < few[1] < many[1]
    assert few[1] == pytest.approx(np.exp(0.09 * 1.5 * np.sqrt(1.0 + 12.0 / 10.0)))
    low, high = trainer_fits.interval_of(np.ones(2), 2, 2)
    assert low <= 0.8 and high >= 1.25  # two constants meet two configurations whatever they are


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
    monkeypatch.setitem(trainer_fits.KNOBS, "automodel", (Knob("timing.contention", 0.01, 1.0),))
    monkeypatch.setattr(trainer_fits, "PHASE_KNOBS", (Knob("workspace.fixed", 1e6, 2e9),))
    write(tmp_path, "NeMo AutoModel", [(3.0 * (i + 1), 30.0) for i in range(6)])
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
    trainer_fits.main([str(tmp_path), str(out), "automodel", "peft"])
    assert sorted(path.name for path in out.iterdir()) == ["automodel.yaml", "peft.yaml"]
    assert load_trainer("peft", file=out / "peft.yaml").memory_configurations
    assert "automodel: mean" in capsys.readouterr().out
