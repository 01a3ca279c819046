"""Rows of a training table: backends, blank cells, refusals, the split, ranking."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from rlperf.calibrate.columns import read_all
from rlperf.calibrate.tables import read_table
from rlperf.calibrate.trainers.costs import predict_parts, predict_seconds
from rlperf.calibrate.trainers.rows import TrainingRow, backend_of, calibration_part, digest, read_training_rows
from rlperf.calibrate.validate import validate_file
from rlperf.calibrate.validate_memory import PhaseRow, phase_bytes
from rlperf.errors import SpecError
from rlperf.specs.profiles import load_device
from rlperf.specs.trainer_calibration import load_trainer

COLUMNS = (
    "row_id,group,framework,framework_version,architecture,gpu,n_gpus,compute_dtype,tensor_parallel,pipeline_parallel,"
    "zero_stage,microbatch,global_batch,seq_len,activation_recompute,measured_step_s,measured_tokens_per_s_per_gpu,"
    "measured_peak_memory_gb,note"
)


def table(tmp_path: Path, *lines: str) -> Path:
    """A file of rows under ``measured``."""
    path = tmp_path / "measured" / "mine.csv"
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join([COLUMNS, *lines]) + "\n", encoding="utf-8")
    return path


def test_frameworks_and_ages_choose_the_backend() -> None:
    found = [
        backend_of({"framework": name, "framework_version": version, "architecture": arch})
        for name, version, arch in (
            ("Megatron-LM", "2022", ""), ("Megatron-LM", "23e00ed096", ""), ("Megatron-DeepSpeed", "", ""),
            ("DeepSpeed ZeRO-3", "2021", ""), ("ALST/DeepSpeed + Liger", "", ""), ("prime-rl (PyTorch FSDP2)", "x", ""),
            ("llm-foundry (PyTorch FSDP)", "", ""), ("Megatron-Bridge", "26.04", "DeepSeek-V3"), ("JAX", "", ""),
            ("NeMo-RL (vLLM + PyTorch DTensor)", "", ""), ("torchtitan", "", ""), ("NeMo Framework", "", ""),
        )
    ]  # fmt: skip
    assert found == [
        "megatron_legacy", "megatron", "megatron_deepspeed", "deepspeed_legacy", "deepspeed", "fsdp2",
        "fsdp_llm_foundry", "megatron_bridge_narrow", None, "fsdp2", "torchtitan", "nemo",
    ]  # fmt: skip


def test_a_framework_of_no_row_is_its_nearest_relative_and_says_so(tmp_path: Path) -> None:
    shared = "Llama-3-70B,h100_sxm,64,bf16,4,4,1,1,128,4096,none,9.0,,,"
    path = table(tmp_path, f"a,user,MegaScale,,{shared}", f"b,user,NeMo (Megatron-Core),,{shared}")
    strange, known = validate_file(path, "training").predictions
    assert strange.predicted == known.predicted
    assert strange.extrapolated
    assert "backend=nemo (nearest relative of MegaScale)" in strange.assumed
    assert strange.high / strange.predicted > known.high / known.predicted


def test_a_framework_that_no_fit_saw_and_a_mixture_are_less_certain(tmp_path: Path) -> None:
    dense, mixture = (f"{name},h100_sxm,8,bf16,1,1,3,1,64,4096,full,9.0,,," for name in ("Qwen2.5-7B", "Qwen3-30B-A3B"))
    path = table(
        tmp_path, f"a,user,torchtitan (FSDP2),,{dense}", f"b,user,torchtitan (FSDP2),a release of mine,{dense}",
        f"c,user,my FSDP2,,{dense}", f"d,user,torchtitan (FSDP2),,{mixture}",
    )  # fmt: skip
    known, newer, strange, experts = (
        float(np.log(one.high / one.predicted)) for one in validate_file(path, "training").predictions
    )
    assert newer == known
    assert strange > 1.2 * known and experts > 1.2 * known
    doubt = load_trainer("torchtitan").generation(load_device("h100_sxm")).doubt
    assert doubt is not None
    assert known == pytest.approx(2.132 * doubt.dense, rel=1e-3)


def test_a_device_that_others_timed_is_no_less_certain_than_one_that_nobody_timed() -> None:
    """Jobs of a backend tell more of its jobs than toy models of another there: 0.34 where 0.12 is left open."""
    for name in ("megatron", "megatron_bridge", "automodel"):
        trainer = load_trainer(name)
        a100, v100 = (trainer.generation(load_device(device)).doubt for device in ("a100_80g_sxm", "v100_32g_sxm"))
        assert a100 is not None and v100 is not None
        assert a100.dense <= v100.dense * 1.05 and a100.experts <= v100.experts * 1.05


def test_packs_of_short_samples_see_but_themselves_and_their_age_tells_the_kernel(tmp_path: Path) -> None:
    shared = "Llama-2-7B,h100_sxm,8,fp8,1,1,1,1,32,4096,none,0.7,,"
    path = table(
        tmp_path, f"a,user,NeMo (Megatron-Core),24.07,{shared},pretraining",
        f"b,user,NeMo (Megatron-Core),24.07,{shared},SQuAD packed to 4096 tokens; LoRA",
        f"c,user,NeMo (Megatron-Core),25.02,{shared},",
    )  # fmt: skip
    rows, refused = read_training_rows(path)
    assert not refused
    whole, packed, later = rows
    assert float(packed.microbatches.tokens) == float(whole.microbatches.tokens) == 4096.0
    assert float(packed.microbatches.sum_squares) == pytest.approx(float(whole.microbatches.sum_squares) * 250 / 4096)
    assert float(packed.microbatches.max_len) == 250.0
    assert [row.options.attention_kernel for row in rows] == ["flash2", "flash2", "flash"]
    assert later.microbatches.sum_squares == whole.microbatches.sum_squares
    seconds = predict_seconds(rows)
    assert 0.7 < seconds[1] / seconds[0] < 0.9


def test_blank_cells_are_filled_named_and_widen_the_interval(tmp_path: Path) -> None:
    path = table(
        tmp_path,
        "a,user,fsdp2,,Qwen2.5-7B,h100_sxm,8,bf16,1,1,3,2,64,4096,full,9.0,,,",
        "b,user,fsdp2,,Qwen2.5-7B,h100_sxm,8,bf16,1,1,,2,64,4096,full,9.0,,,",
        "c,user,megatron-core,,Llama-3-70B,h100_sxm,64,bf16,4,4,,,128,4096,none,,1000,,",
    )
    rows, refused = read_training_rows(path)
    assert not refused
    assert int(rows[1].layout.zero_stage) == 3
    assert "zero_stage=3 (the backend's)" in rows[1].assumed
    assert "context_parallel=1 (no such column)" in rows[1].assumed
    assert rows[1].blanks == 1
    assert int(rows[2].layout.data_parallel) == 4
    assert int(rows[2].layout.virtual_pipeline) == 5
    assert int(rows[2].layout.microbatch) == 1
    assert rows[2].update_s == pytest.approx(128 * 4096 / (1000 * 64))
    report = validate_file(path, "training")
    wide = [(one.high - one.low) / one.predicted for one in report.predictions]
    assert wide[1] > wide[0]
    assert report.predictions[0].predicted == pytest.approx(report.predictions[1].predicted)


def test_rows_that_cannot_be_predicted_say_why(tmp_path: Path) -> None:
    path = table(
        tmp_path,
        "a,user,JAX,,Qwen2.5-7B,h100_sxm,8,bf16,1,1,3,2,64,4096,full,9.0,,,",
        "b,user,fsdp2,,Qwen2.5-7B,h100_sxm,8,bf16,1,1,3,2,,4096,full,9.0,,,",
        "c,user,fsdp2,,Nobody-7B,h100_sxm,8,bf16,1,1,3,2,64,4096,full,9.0,,,",
        "d,user,fsdp2,,Qwen2.5-7B,h100_sxm,8,bf16,1,1,3,2,64,4096,full,,,40.0,",
        "e,user,fsdp2,,Qwen2.5-7B,h100_sxm,8,float7,1,1,3,2,64,4096,full,9.0,,,",
    )
    report = validate_file(path, "training")
    assert report.predicted == 0
    assert sum(report.refused.values()) == 5
    assert any("JAX" in reason for reason in report.refused)
    assert any("float7" in reason for reason in report.refused)
    assert validate_file(path, "memory").predicted == 1
    bad = tmp_path / "bad.csv"
    bad.write_text("row_id,framework,architecture,gpu,n_gpus,seq_len\n1,fsdp2,x,y,8,1\n", encoding="utf-8")
    with pytest.raises(SpecError, match="global_batch"):
        validate_file(bad, "training")


def test_unknown_recompute_is_full_where_nothing_else_fits(tmp_path: Path) -> None:
    path = table(
        tmp_path,
        "a,user,fsdp2,,Llama-3-70B,h100_sxm,64,bf16,1,1,3,2,128,8192,,20,,,",
        "b,user,fsdp2,,Qwen2.5-0.5B,h100_sxm,8,bf16,1,1,3,1,64,1024,,1,,,",
    )
    rows, _ = read_training_rows(path)
    assert [int(row.layout.activation_recompute) for row in rows] == [2, 0]
    assert any("none does not fit" in entry for entry in rows[0].assumed)


def test_notes_tell_kernels_and_losses_apart(tmp_path: Path) -> None:
    path = table(
        tmp_path,
        "a,user,prime-rl,,Qwen3-4B,h100_sxm,8,bf16,1,1,3,1,16,16384,full,5,,,task rl; flash_attention_3",
        "b,user,prime-rl,,Qwen3-4B,h100_sxm,8,bf16,1,1,3,1,16,16384,full,5,,,task sft; flash_attention_2",
        "c,user,llm-foundry (PyTorch FSDP),,Qwen3-4B,h100_sxm,8,bf16,1,1,3,1,16,2048,full,5,,,",
    )
    rows, _ = read_training_rows(path)
    assert [row.chunked_loss for row in rows[:2]] == [True, False]
    assert [row.options.attention_kernel for row in rows] == ["flash", "flash2", "flash1"]
    parts = predict_parts(rows)
    assert parts.sum(axis=1) == pytest.approx(predict_seconds(rows))


def test_a_dispatcher_between_ranks_means_expert_parallelism(tmp_path: Path) -> None:
    experts = "NeMo AutoModel,,gpt-oss-120b,h100_sxm,64,bf16,1,1,3,2,512,4096,,4.3,,"
    path = table(tmp_path, f"a,user,{experts},kernels: TE + DeepEP", f"b,user,{experts},kernels: TE")
    rows, _ = read_training_rows(path)
    # 128 experts on 64 devices: two each
    assert [int(row.layout.expert_parallel) for row in rows] == [64, 1]
    assert any(text.startswith("expert_parallel=64 (DeepEP") for text in rows[0].assumed)
    assert float(predict_seconds(rows)[0]) < float(predict_seconds(rows)[1])


def test_split_takes_a_third_and_keeps_releases_together(tmp_path: Path) -> None:
    lines = [
        f"{size}_{release},user,megatron-core,{release},Qwen2.5-7B,h100_sxm,8,bf16,1,1,1,{size},{64 * size},4096,,9,,,"
        for size in range(1, 11)
        for release in ("r1", "r2")
    ]
    rows, _ = read_training_rows(table(tmp_path, *lines))
    part = calibration_part(rows)
    assert len(part) == 3
    chosen = {row.row_id.split("_")[0] for row in rows if digest(row.configuration) in part}
    assert len(chosen) == 3


@dataclass(frozen=True)
class Ranking:
    """Order and choice among rows that differ in layout alone.

    Attributes
    ----------
    pairs, right : pairs whose measured times differ by more than 10 %, and the share in the right order
    sets, median_regret : sets with at least two layouts, and the median of (time of the layout predicted best) over
        (time of the best) - 1
    """

    pairs: int
    right: float
    sets: int
    median_regret: float


def rank_layouts(rows: list[TrainingRow], seconds: list[float]) -> Ranking:
    """Ranking over rows equal in architecture, devices, length, batch and dtype (and group and LoRA rank)."""
    sets: dict[tuple[object, ...], list[int]] = {}
    for index, row in enumerate(rows):
        batch = round(float(row.microbatches.count * row.layout.data_parallel * row.layout.microbatch))
        key = (row.group, row.architecture.name, row.device, int(row.layout.devices), row.dtype, row.lora_rank)
        sets.setdefault((*key, float(row.microbatches.max_len), batch), []).append(index)
    right = pairs = 0
    regrets: list[float] = []
    for members in sets.values():
        layouts = {tuple(rows[i].layout.to_dict().items()) for i in members}
        if len(layouts) < 2:
            continue
        for a, i in enumerate(members):
            for j in members[a + 1 :]:
                if rows[i].layout.to_dict() == rows[j].layout.to_dict():
                    continue
                ratio = np.log(float(rows[i].update_s or 1.0) / float(rows[j].update_s or 1.0))
                if abs(ratio) > np.log(1.1):
                    pairs += 1
                    right += int(np.sign(ratio) == np.sign(np.log(seconds[i] / seconds[j])))
        chosen = min(members, key=lambda i: seconds[i])
        best = min(float(rows[i].update_s or np.inf) for i in members)
        regrets.append(float(rows[chosen].update_s or np.inf) / best - 1.0)
    return Ranking(pairs, right / max(pairs, 1), len(regrets), float(np.median(regrets)) if regrets else 0.0)


def test_ranking_by_hand(tmp_path: Path) -> None:
    rows, _ = read_training_rows(
        table(
            tmp_path,
            "a,user,megatron-core,,Qwen2.5-7B,h100_sxm,8,bf16,1,1,1,1,64,4096,none,10,,,",
            "b,user,megatron-core,,Qwen2.5-7B,h100_sxm,8,bf16,2,1,1,1,64,4096,none,12,,,",
            "c,user,megatron-core,,Qwen2.5-7B,h100_sxm,8,bf16,4,1,1,1,64,4096,none,20,,,",
        )
    )
    right = rank_layouts(rows, [1.0, 2.0, 3.0])
    assert (right.pairs, right.right, right.sets, right.median_regret) == (3, 1.0, 1, 0.0)
    wrong = rank_layouts(rows, [3.0, 2.0, 1.0])
    assert (wrong.pairs, wrong.right) == (3, 0.0)
    assert wrong.median_regret == pytest.approx(1.0)


def test_phases_of_a_colocated_engine(tmp_path: Path) -> None:
    path = tmp_path / "phases.csv"
    knobs = "knob_gpu_memory_utilization,knob_group_size,knob_lora_rank,knob_micro_batch,knob_quantization,knob_seq_len"
    path.write_text(
        f"model,device,phase,nvml_polled_bytes,{knobs},knob_n_prompts\n"
        "Qwen/Qwen2.5-0.5B-Instruct,NVIDIA L4,training,3e9,0.2,4,8,1,none,512,1\n"
        "Qwen/Qwen2.5-0.5B-Instruct,NVIDIA L4,training,5e9,0.2,4,8,4,none,4096,1\n"
        "Qwen/Qwen2.5-0.5B-Instruct,NVIDIA L4,generation,5e9,0.2,4,8,1,none,512,1\n"
        "Qwen/Qwen2.5-0.5B-Instruct,NVIDIA L4,generation,1e10,0.4,4,8,1,none,512,1\n"
        "Qwen/Qwen2.5-0.5B-Instruct,Unknown,generation,1e10,0.4,4,8,1,none,512,1\n",
        encoding="utf-8",
    )
    rows, refused = read_all(PhaseRow, read_table(path))
    assert len(refused) == 1
    small, large, low, high = (phase_bytes(row) for row in rows)
    assert large > small > 1e9
    # twice the share: 0.2 of the device more
    assert high - low == pytest.approx(0.2 * rows[0].hardware.device.usable_memory)
    assert np.isfinite(validate_file(path, "memory").metrics[0].mape)
