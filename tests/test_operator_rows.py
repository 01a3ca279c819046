"""Tables of single operators, of a layer in an engine and of training: what a plan is charged for them, row by row."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from rlperf.calibrate.rows_beside import HOST_FLOOR
from rlperf.calibrate.training_rows import CAST_BYTES, MEGATRON_BYTES
from rlperf.calibrate.validate import Report, validate_file
from rlperf.cost.collectives import dispatch_combine_s
from rlperf.cost.moe import Dealt, ExpertShape, grouped_with, moe_fit
from rlperf.cost.roofline import gemm_s, small_op_s, stream_s
from rlperf.specs.engine_calibration import load_engine_calibration
from rlperf.specs.hardware import load_hardware
from rlperf.specs.trainer_calibration import load_trainer

LAYER = ("gpu", "src", "model", "tp", "layer", "unit", "num", "latency_us")
TRAINING = ("gpu", "src", "kernel", "provider", "pass", "x_name", "x_value", "config", "latency_us")
FUSED = ("gpu", "src", "kernel", "phase", "dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts",
         "ep_size", "distribution", "latency_us")  # fmt: skip
ENGINE, EAGER = "llmservingsim-vllm-0.19.0", "llmservingsim-v0-hf-eager"
LLAMA = "meta-llama/Llama-3.1-8B"
H100 = load_hardware("h100_sxm")
FSDP2, MEGATRON = load_trainer("fsdp2").timing, load_trainer("megatron").timing


def told(folder: Path, columns: tuple[str, ...], rows: list[tuple[object, ...]]) -> Report:
    path = folder / "rows.csv"
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([columns, *rows])
    return validate_file(path, "kernels")


def seconds(report: Report) -> list[float]:
    return [1e-6 * one.predicted for one in report.predictions]


def test_an_engines_kernels_are_what_a_step_is_charged(tmp_path: Path) -> None:
    tokens = 512
    rows: list[tuple[object, ...]] = [
        ("h100_sxm", ENGINE, LLAMA, tensor, layer, "tokens", tokens, 10)
        for layer, tensor in (
            ("layernorm", 1), ("rotary_emb", 1), ("act_fn", 2), ("gate_up_proj", 2), ("down_proj", 2), ("lm_head", 2),
            ("sampler", 1),
        )
    ]  # fmt: skip
    norm, rope, activation, up, down, head, sampler = seconds(told(tmp_path, LAYER, rows))
    hidden, inner, vocab = 4096.0, 14336.0, 128256.0
    # hand count: sum and norm read and write two values; queries and keys of 32 and 8 heads read and written; gate, up
    assert norm == pytest.approx(float(small_op_s(H100, tokens * hidden * 8.0)))
    assert rope == pytest.approx(float(small_op_s(H100, tokens * 40.0 * 128.0 * 4.0)))
    assert activation == pytest.approx(float(small_op_s(H100, tokens * inner * 6.0 / 2.0)))
    assert up == pytest.approx(float(gemm_s(H100, tokens, inner, hidden)))
    assert down == pytest.approx(float(gemm_s(H100, tokens, hidden, inner / 2.0)))
    assert head == pytest.approx(float(gemm_s(H100, tokens, vocab / 2.0, hidden)))
    assert sampler == pytest.approx(float(small_op_s(H100, tokens * vocab * 10.0)))


def test_rotation_and_norms_of_heads_are_two_operators(tmp_path: Path) -> None:
    model = "Qwen/Qwen3-32B"
    rows = [("h100_sxm", ENGINE, model, 1, layer, "tokens", 64, 5) for layer in ("qk_norm", "rotary_emb")]
    normed, rotated = seconds(told(tmp_path, LAYER, rows))
    assert normed == rotated == pytest.approx(float(small_op_s(H100, 64 * 72.0 * 128.0 * 4.0)))


def test_small_passes_of_hugging_face_are_an_eager_trainers(tmp_path: Path) -> None:
    rows = [("h100_sxm", src, LLAMA, 1, "act_fn", "tokens", 2048, 98) for src in (ENGINE, EAGER)]
    engine, eager = seconds(told(tmp_path, LAYER, rows))
    start = H100.calibration.stream.small_fixed
    assert eager - start == pytest.approx((engine - start) * FSDP2.elementwise * FSDP2.eager)


def test_layers_without_a_term_are_refused(tmp_path: Path) -> None:
    experts = "Qwen/Qwen3-30B-A3B-Instruct-2507"
    report = told(tmp_path, LAYER, [
        ("h100_sxm", ENGINE, LLAMA, 1, "embedding", "tokens", 64, 3),
        ("h100_sxm", ENGINE, experts, 1, "act_fn", "tokens", 64, 3),
        ("h100_sxm", ENGINE, LLAMA, 1, "o_prj", "tokens", 64, 3),
        ("rtx_2080", ENGINE, LLAMA, 1, "o_proj", "tokens", 64, 3),
    ])  # fmt: skip
    assert not report.predictions
    said = "; ".join(report.refused)
    assert all(word in said for word in ("no embedding", "routed experts", "'o_prj'", "no device named 'rtx_2080'"))


def test_losses_move_their_bytes_per_logit(tmp_path: Path) -> None:
    logits = 8192.0 * 65536.0
    rows: list[tuple[object, ...]] = [
        ("h100_sxm", "liger-0.8.0", kernel, provider, each, "V", 65536, "B=4;T=2048", 9)
        for kernel, provider, each in (
            ("cross_entropy", "torch", "full"),
            ("cross_entropy", "torch", "forward"),
            ("megatron_cross_entropy", "megatron-fused", "full"),
            ("megatron_cross_entropy", "megatron-unfused", "full"),
        )
    ]
    eager, forward, fused, unfused = seconds(told(tmp_path, TRAINING, rows))
    # logits are in fp32 from the start: the two casts (2 + 4 and 4 + 2) of a framework's loss are left out
    assert eager == pytest.approx(float(stream_s(H100, logits * (FSDP2.cross_entropy_bytes - 12.0))))
    assert CAST_BYTES == 12.0 and forward == pytest.approx(0.5 * eager)
    assert fused == pytest.approx(float(stream_s(H100, logits * MEGATRON.cross_entropy_bytes)))
    assert unfused == pytest.approx(float(stream_s(H100, logits * sum(MEGATRON_BYTES.values()))))


def test_a_loss_with_its_projection_is_the_head_of_an_update(tmp_path: Path) -> None:
    tokens, hidden, columns = 2048.0, 4096.0, 128256.0
    config = "H=4096;V=128256;dtype=bfloat16"
    rows: list[tuple[object, ...]] = [
        ("h100_sxm", "liger-0.4.2", "fused_linear_cross_entropy", way, "full", "BT", 2048, config, 9)
        for way in ("huggingface", "liger")
    ]
    shape = "T=1024;H=4096;V=128256"
    rows.append(("h100_sxm", "liger-0.6.1", "fused_linear_grpo_loss_token", "torch", "full", "B", 2, shape, 9))
    whole, chunked, grpo = told(tmp_path, TRAINING, rows).predictions
    forward = float(gemm_s(H100, tokens, columns, hidden))
    products = forward + float(gemm_s(H100, tokens, hidden, columns) + gemm_s(H100, hidden, columns, tokens))
    loss, again = (
        float(stream_s(H100, tokens * columns * moved)) for moved in (FSDP2.cross_entropy_bytes, FSDP2.chunked_bytes)
    )
    assert 1e-6 * whole.predicted == pytest.approx(products + loss)
    assert 1e-6 * chunked.predicted == pytest.approx(products + forward + again)
    # a reference beside the policy: one more projection, and the forward half of the loss
    assert 1e-6 * grpo.predicted == pytest.approx(products + forward + 1.5 * loss)
    assert any("reference" in word for word in grpo.assumed) and not whole.assumed


def test_rows_of_twice_the_size_and_the_same_time_show_the_host(tmp_path: Path) -> None:
    def row(tokens: int, us: float) -> tuple[object, ...]:
        shape = "hidden_size=4096;num_attention_heads=32;num_key_value_heads=8;bsz=1"
        return "h100_sxm", "liger-0.8.0", "rope", "liger_triton", "backward", "T", tokens, shape, us

    report = told(tmp_path, TRAINING, [row(1024, 290), row(2048, 300), row(8192, 500)])
    assert report.refused == {HOST_FLOOR: 2} and report.refused_lines[HOST_FLOOR] == (2, 3)
    assert len(report.predictions) == 1
    # a pass of a second that grows by a fifth is no launch
    assert len(told(tmp_path, TRAINING, [row(1024, 900), row(2048, 1000)]).predictions) == 2


def test_a_kernel_of_experts_and_their_exchange_is_held_against_the_sum_of_both(tmp_path: Path) -> None:
    routings = ("balanced", "power_law_1.2", "power_law_1.01")
    rows: list[tuple[object, ...]] = [
        ("b200_sxm", "sglang-0.5.16", "deepgemm_megamoe", "generation", "w4a8_mxfp4_mxfp8", 64, 3584, 3072, 16, 896, 8,
         routing, 400)
        for routing in routings
    ]  # fmt: skip
    report = told(tmp_path, FUSED, rows)
    even, skewed = seconds(report)
    hw, engine = load_hardware("b200_sxm"), load_engine_calibration("sglang")
    fit, _ = moe_fit(hw, "w4a8_mxfp4", engine.moe_kernels)
    shape, sent = ExpertShape(3584, 3072, 896, 16), float(dispatch_combine_s(hw, 64, 3584, 16, 896, 8, 8))
    # 64 tokens a device: 512 of the group, whose 8,192 pairs touch all 896 experts
    products = grouped_with(
        hw.device, fit, 512.0, shape, 8, dtype="w4a8_mxfp4", dealt=Dealt(dispatched=True, balanced=True)
    )
    assert even == pytest.approx(float(products) + sent)
    uneven = Dealt(skew=8.0**fit.skew_exponent, touched_share=fit.skew_touched, dispatched=True)
    assert skewed - sent == pytest.approx(
        float(grouped_with(hw.device, fit, 512.0, shape, 8, dtype="w4a8_mxfp4", dealt=uneven))
    )
    assert list(report.refused_lines.values()) == [(4,)]


@pytest.mark.parametrize(
    ("kernel", "provider", "each", "word"),
    [
        ("kl_div", "torch", "full", "no update of a plan"),
        ("rms_norms", "torch", "full", "no operator that rlperf knows"),
        ("rms_norm", "tensorflow", "full", "provider 'tensorflow'"),
        ("rms_norm", "torch", "sideways", "'sideways' is no pass"),
        ("cross_entropy", "liger", "full", "no framework's loss"),
        ("fused_moe", "huggingface", "full", "a loop over experts"),
        ("tiled_swiglu", "deepspeed_tiled", "full", "tiles of tokens"),
        ("rms_norm", "torch", "forward", "states none of H, N, hidden_size"),
    ],
)
def test_operators_without_a_term_are_refused(tmp_path: Path, kernel: str, provider: str, each: str, word: str) -> None:
    row = ("h100_sxm", "liger-0.8.0", kernel, provider, each, "V", 1024, "B=8;T=512", 9)
    report = told(tmp_path, TRAINING, [row])
    assert not report.predictions and word in next(iter(report.refused))


def test_cells_that_are_no_numbers_refuse_their_row_alone(tmp_path: Path) -> None:
    def row(name: str, value: object, config: str, us: object) -> tuple[object, ...]:
        return "h100_sxm", "liger-0.8.0", "relu_squared", "torch", "full", name, value, config, us

    report = told(tmp_path, TRAINING, [
        row("N", 4096, "M=4096", 178), row("N", "many", "M=4096", 178), row("N", 4096, "M=4096", ""),
        row("N", 4096, "M=nan", 178), row("N", 4096, "M=-1", 178),
    ])  # fmt: skip
    assert len(report.predictions) == 1 and sum(report.refused.values()) == 4
    layer = told(tmp_path, LAYER, [("h100_sxm", ENGINE, LLAMA, 1, "act_fn", "tokens", "few", 9)])
    assert not layer.predictions and "'few' is not a number" in next(iter(layer.refused))


def test_given_tables_are_predicted(measured_data: Path) -> None:
    layers = validate_file(measured_data / "kernels" / "layer_ops.csv", "kernels")
    assert layers.rows == 778 and layers.predicted == 701
    products = [one for one in layers.predictions if one.group in ("down_proj, engine", "gate_up_proj, engine")]
    off = [abs(one.predicted / one.measured - 1.0) for one in products]
    assert len(off) == 88 and np.median(off) < 0.06
    training = validate_file(measured_data / "kernels" / "training_ops.csv", "kernels")
    assert training.rows == 1091 and training.predicted + sum(training.refused.values()) == 1091
    fused = validate_file(measured_data / "kernels" / "megamoe.csv", "kernels")
    assert (fused.rows, fused.predicted) == (292, 260)
    decodes = [one for one in fused.predictions if one.group.startswith("generation")]
    assert np.median([abs(one.predicted / one.measured - 1.0) for one in decodes]) < 0.2
    heads = [one for one in training.predictions if one.group.startswith("fused_linear_grpo_loss_token, torch, full")]
    assert len(heads) == 5
