"""Seconds of an optimizer update: schedule algebra, properties, published tables, measured rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlperf.cost.batching import Microbatches
from rlperf.cost.layers import stack_of
from rlperf.cost.layers.linear import Linear
from rlperf.cost.layers.mamba import Mamba
from rlperf.cost.layers.recurrent import BACKWARD, Recurrent
from rlperf.cost.layers.vision import TowerWork
from rlperf.cost.parameters import embedding_parameters, language_parameters, routed_parameters
from rlperf.cost.scan import chunked_with, scan_fit, scan_with
from rlperf.cost.trainer.scoring import scoring_pass
from rlperf.cost.trainer.update import PARTS, layer_table, training_update
from rlperf.cost.trainer_device import PLAIN, Seconds, TrainerDevice, UpdateOptions, work_of
from rlperf.layout import Layout
from rlperf.specs.architecture import Architecture
from rlperf.specs.hardware import Hardware, load_hardware
from rlperf.specs.profiles import load_architecture
from rlperf.specs.trainer_calibration import TrainerCalibration, load_trainer

from .scored import scored


def gpt(hidden: int, layers: int, heads: int) -> Architecture:
    """GPT with vocabulary 51200 and length 2048, as in the papers of 2021 and 2022."""
    return Architecture(
        name=f"gpt-{hidden}", source="arXiv 2104.04473, table 1", hidden=hidden, layers=layers, heads=heads,
        kv_heads=heads, head_dim=hidden // heads, ffn_hidden=4 * hidden, ffn_gated=False, vocab=51200,
        norm_weights=2, tied_embeddings=True, learned_positions=2048,
    )  # fmt: skip


@pytest.fixture(scope="module")
def a100() -> Hardware:
    return load_hardware("a100_80g_sxm")


@pytest.fixture(scope="module")
def h100() -> Hardware:
    return load_hardware("h100_sxm")


@pytest.fixture(scope="module")
def megatron() -> TrainerCalibration:
    return load_trainer("megatron")


def quiet(trainer: TrainerCalibration) -> TrainerCalibration:
    """The backend without host time and fixed costs, so that algebra shows."""
    nothing = dict.fromkeys(("host_layer", "host_moe_layer", "microbatch", "update", "moe_layer"), 0.0)
    return trainer.model_copy(update={"timing": trainer.timing.model_copy(update=nothing)})


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3-30B-A3B"])
def test_flat_columns_cost_what_each_row_costs_alone(name: str, h100: Hardware, megatron: TrainerCalibration) -> None:
    """Rows that share a microbatch's work are costed once; every row gets what it would get on its own."""
    arch, rng = load_architecture(name), np.random.default_rng(0)
    rows = 200
    tp = rng.choice([1, 2, 4], rows)
    layout = Layout.of(
        tensor_parallel=tp, pipeline_parallel=rng.choice([1, 2, 4], rows), data_parallel=rng.choice([2, 4], rows),
        context_parallel=rng.choice([1, 2], rows), sequence_parallel=(tp > 1).astype(int),
        expert_parallel=rng.choice([1, 2, 8], rows) if arch.experts else np.ones(rows, int),
        zero_stage=rng.choice([1, 3], rows), activation_recompute=rng.choice([0, 1, 2], rows),
        offload=rng.choice([0, 1, 2, 3], rows),
    )  # fmt: skip
    budget = rng.choice([8192.0, 16384.0], rows)
    skew = layout.expert_parallel.astype(float) ** 0.1
    batches = Microbatches.from_moments(layout, 512, 2000.0, 6e6, 8000.0, token_budget=budget)
    for cost in (training_update, scoring_pass):
        whole = cost(arch, h100, megatron, layout, batches, UpdateOptions(skew=skew))
        for row in range(0, rows, 7):
            one = Microbatches(**{key: value[row : row + 1] for key, value in vars(batches).items()})
            here = UpdateOptions(skew=skew[row : row + 1])
            alone = cost(arch, h100, megatron, layout.take(slice(row, row + 1)), one, here)
            for part in PARTS:
                np.testing.assert_allclose(
                    np.broadcast_to(getattr(whole, part), (rows,))[row], np.ravel(getattr(alone, part))[0], rtol=1e-12
                )


def test_flop_of_the_matrices_is_twice_parameters() -> None:
    for name in ("Qwen2.5-7B", "Nemotron-3-Nano-30B-A3B", "DeepSeek-V3"):
        arch = load_architecture(name)
        values = sum(count * matrix.values for matrix, _, count in stack_of(arch).matrices)
        outside = embedding_parameters(arch) + routed_parameters(arch)
        # norms, biases, routers, convolutions are the rest
        assert values == pytest.approx(language_parameters(arch) - outside, rel=0.012)


def test_bubble_is_p_minus_1_over_v_m(h100: Hardware, megatron: TrainerCalibration) -> None:
    arch = gpt(4096, 64, 32).model_copy(update={"vocab": 2})
    trainer = quiet(megatron)
    for p, v, m in ((2, 1, 4), (4, 1, 16), (8, 2, 32), (4, 4, 8)):
        layout = Layout.of(pipeline_parallel=p, virtual_pipeline=v)
        cost = training_update(arch, h100, trainer, layout, Microbatches.of(4096.0, 4096.0 * 2048, 2048.0, m))
        busy = cost.forward_s + cost.backward_s + cost.exposed_pp_s
        assert float(cost.bubble_s / busy) == pytest.approx((p - 1) / (v * m), rel=0.03)


def test_uneven_stages_wait_for_the_fullest(h100: Hardware, megatron: TrainerCalibration) -> None:
    even = training_update(
        gpt(4096, 32, 32).model_copy(update={"vocab": 2}), h100, quiet(megatron), Layout.of(pipeline_parallel=4),
        Microbatches.of(4096.0, 4096.0 * 2048, 2048.0, 64.0),
    )  # fmt: skip
    uneven = training_update(
        gpt(4096, 33, 32).model_copy(update={"vocab": 2}), h100, quiet(megatron), Layout.of(pipeline_parallel=4),
        Microbatches.of(4096.0, 4096.0 * 2048, 2048.0, 64.0),
    )  # fmt: skip
    assert float(uneven.total_s / even.total_s) == pytest.approx(9 / 8, rel=0.04)


def test_full_recompute_repeats_the_forward(h100: Hardware, megatron: TrainerCalibration) -> None:
    arch, layout = load_architecture("Qwen2.5-7B"), Layout.of(activation_recompute=[0, 1, 2])
    cost = training_update(arch, h100, megatron, layout, Microbatches.of(8192.0, 8192.0**2, 8192.0, 8.0))
    layer, _ = layer_table(arch, h100, megatron, layout, Microbatches.of(8192.0, 8192.0**2, 8192.0, 8.0))
    assert cost.recompute_s[0] == 0
    assert cost.recompute_s[1] == pytest.approx(8 * arch.layers * float(layer.attention))
    assert cost.recompute_s[2] == pytest.approx(8 * arch.layers * float(layer.forward))


def test_attention_is_quadratic_in_sequences_not_in_the_pack(h100: Hardware, megatron: TrainerCalibration) -> None:
    arch, layout = load_architecture("Qwen2.5-7B"), Layout.of()
    short = Microbatches.of(32768.0, 32768.0 * 1024, 1024.0, 1.0)
    long = Microbatches.of(32768.0, 32768.0**2, 32768.0, 1.0)
    few, _ = layer_table(arch, h100, megatron, layout, short)
    many, _ = layer_table(arch, h100, megatron, layout, long)
    assert float(many.attention) > 8 * float(few.attention)
    assert float(many.forward - many.attention) == pytest.approx(float(few.forward - few.attention))


def test_the_first_flash_attention_takes_its_share_of_the_seconds(
    a100: Hardware, h100: Hardware, megatron: TrainerCalibration
) -> None:
    """The newest kernel on an A100 was the second one; a backend that states no ``flash1`` has it in ``attention``."""
    arch, batch = load_architecture("Qwen2.5-7B"), Microbatches.of(32768.0, 32768.0**2, 32768.0, 1.0)

    def seconds(hw: Hardware, kernel: str, flash1: float) -> float:
        trainer = megatron.model_copy(update={"timing": megatron.timing.model_copy(update={"flash1": flash1})})
        table, _ = layer_table(arch, hw, trainer, Layout.of(), batch, UpdateOptions(attention_kernel=kernel))
        return float(table.attention)

    for hw, second in ((a100, "flash"), (h100, "flash2")):
        assert seconds(hw, "flash1", 1.7) == pytest.approx(1.7 * seconds(hw, second, 1.7))
        assert seconds(hw, "flash1", 0.0) == seconds(hw, "flash", 0.0) == seconds(hw, "flash", 1.7)
    assert seconds(h100, "flash2", 1.7) > seconds(h100, "flash", 1.7)


def test_context_parallel_and_ulysses_share_the_tokens(h100: Hardware) -> None:
    batch = Microbatches.of(65536.0, 65536.0**2, 65536.0, 1.0)
    ring = work_of(Layout.of(context_parallel=4), batch)
    heads = work_of(Layout.of(ulysses=4), batch)
    assert float(ring.tokens) == float(heads.tokens) == 16384
    assert float(ring.pairs) == 65536.0**2 / 4
    assert float(heads.attention_tokens) == 65536


def test_a_ring_of_small_chunks_is_not_free(h100: Hardware, megatron: TrainerCalibration) -> None:
    """The same sequences on eight devices: what a ring adds grows with its steps and as the chunks shrink."""
    arch = load_architecture("Llama-3.1-8B")

    def added(length: float, ring: int) -> float:
        layouts = [Layout.of(context_parallel=cp, data_parallel=8 // cp, zero_stage=1) for cp in (1, ring)]
        plain, cut = (
            training_update(arch, h100, quiet(megatron), layout, Microbatches.fixed(layout, length, 64))
            for layout in layouts
        )
        return float(cut.forward_s + cut.backward_s) / float(plain.forward_s + plain.backward_s) - 1.0

    assert 0.01 < added(8192.0, 2) < added(8192.0, 4) < added(8192.0, 8)
    assert added(8192.0, 8) > 0.05  # a thousand tokens a rank
    assert added(131072.0, 8) < added(8192.0, 8)


def test_interleaving_needs_microbatches_to_go_around(h100: Hardware, megatron: TrainerCalibration) -> None:
    """Two microbatches in eight stages: chunks no longer shorten the fill, as the schedule's makespan shows."""
    arch, trainer = load_architecture("Qwen3-32B"), quiet(megatron)
    seconds = {}
    for count, chunks in ((2, 1), (2, 4), (8, 1), (8, 4)):
        layout = Layout.of(pipeline_parallel=8, virtual_pipeline=chunks, zero_stage=1)
        seconds[count, chunks] = float(
            training_update(arch, h100, trainer, layout, Microbatches.fixed(layout, 4096.0, count)).bubble_s
        )
    assert seconds[8, 4] < 0.4 * seconds[8, 1]
    assert seconds[2, 4] > 0.8 * seconds[2, 1]


def test_lora_spares_weight_gradients_and_their_traffic(h100: Hardware, megatron: TrainerCalibration) -> None:
    arch, layout = load_architecture("Llama-3-70B"), Layout.of(tensor_parallel=8, data_parallel=4, sequence_parallel=1)
    batch = Microbatches.of(8192.0, 8192.0**2, 8192.0, 8.0)
    trainer = load_trainer("megatron_bridge")
    whole = training_update(arch, h100, trainer, layout, batch)
    lora = training_update(arch, h100, trainer, layout, batch, UpdateOptions(lora_rank=16))
    assert float(lora.backward_s) < 0.75 * float(whole.backward_s)
    assert float(lora.exposed_dp_s) < 0.1 * float(whole.exposed_dp_s)
    assert float(lora.optimizer_s) < 0.05 * float(whole.optimizer_s)


@pytest.mark.parametrize("name", ["megatron", "megatron_bridge", "nemo"])
def test_adapters_on_megatron_are_faster_than_all_weights(h100: Hardware, name: str) -> None:
    """NeMo's pages, Llama-2-7B on 8 H100 in fp8: 23,711 to 25,206 tokens/s with LoRA, 16,891 to 16,934 without."""
    layout = Layout.of(data_parallel=8, zero_stage=1)
    where = load_architecture("Llama-2-7B"), h100, load_trainer(name), layout, Microbatches.fixed(layout, 4096.0, 4.0)
    whole, lora = (training_update(*where, UpdateOptions("fp8", lora_rank=rank)).total_s for rank in (None, 32))
    assert float(lora / whole) == pytest.approx(0.69, rel=0.2)


def test_skew_slows_the_experts(h100: Hardware, megatron: TrainerCalibration) -> None:
    arch, layout = load_architecture("Qwen3-30B-A3B"), Layout.of(data_parallel=8, expert_parallel=8, zero_stage=1)
    batch = Microbatches.of(8192.0, 8192.0 * 4096, 4096.0, 8.0)
    balanced = training_update(arch, h100, megatron, layout, batch)
    skewed = training_update(arch, h100, megatron, layout, batch, UpdateOptions(skew=1.7))
    assert float(skewed.total_s) > 1.05 * float(balanced.total_s)


@settings(deadline=None, max_examples=25)
@given(
    tp=st.sampled_from([1, 2, 4, 8]), pp=st.sampled_from([1, 2, 4, 8]), cp=st.sampled_from([1, 2]),
    dp=st.sampled_from([1, 4, 16]), zero=st.integers(0, 3), recompute=st.integers(0, 2), offload=st.integers(0, 3),
    tokens=st.sampled_from([1024, 8192, 32768]), moe=st.booleans(),
)  # fmt: skip
def test_scalar_equals_array_and_parts_are_not_negative(
    tp: int, pp: int, cp: int, dp: int, zero: int, recompute: int, offload: int, tokens: int, moe: bool
) -> None:
    arch = load_architecture("Qwen3-30B-A3B" if moe else "Qwen2.5-7B")
    hw, trainer = load_hardware("h100_sxm"), load_trainer("fsdp2")
    one = Layout.of(
        tensor_parallel=tp, pipeline_parallel=pp, context_parallel=cp, data_parallel=dp, zero_stage=zero,
        activation_recompute=recompute, offload=offload, sequence_parallel=int(tp > 1),
    )  # fmt: skip
    batch = Microbatches.of(float(tokens), float(tokens) * 1024, 1024.0, 8.0)
    scalar = training_update(arch, hw, trainer, one, batch)
    pair = one.with_(tensor_parallel=[1, tp])
    array = training_update(arch, hw, trainer, pair, batch)
    assert float(scalar.total_s) == pytest.approx(float(np.broadcast_to(array.total_s, (2,))[1]), rel=1e-12)
    assert all(np.all(getattr(array, name) >= 0) for name in PARTS)
    assert float(scalar.total_s) == pytest.approx(sum(float(getattr(scalar, name)) for name in PARTS))


def test_more_bandwidth_is_never_slower(h100: Hardware) -> None:
    arch, trainer = load_architecture("Llama-3-70B"), load_trainer("fsdp2")
    layout = Layout.of(tensor_parallel=[1, 4, 8], data_parallel=16, zero_stage=[3, 1, 0], sequence_parallel=[0, 1, 1])
    batch = Microbatches.of(8192.0, 8192.0**2, 8192.0, 4.0)
    slow = training_update(arch, h100, trainer, layout, batch).total_s
    wide = replace(h100, network=h100.network.model_copy(update={"bandwidth": 2 * h100.network.bandwidth}))
    memory = h100.device.model_copy(update={"memory_bandwidth": 2 * h100.device.memory_bandwidth})
    assert np.all(training_update(arch, wide, trainer, layout, batch).total_s <= slow)
    assert np.all(training_update(arch, replace(h100, device=memory), trainer, layout, batch).total_s < slow)


def test_twice_the_microbatches_take_twice_the_steady_state(h100: Hardware, megatron: TrainerCalibration) -> None:
    arch, layout = load_architecture("Qwen2.5-7B"), Layout.of(pipeline_parallel=4, tensor_parallel=2)
    times = [
        float(training_update(arch, h100, megatron, layout, Microbatches.of(4096.0, 4096.0**2, 4096.0, m)).total_s)
        for m in (8.0, 16.0, 32.0)
    ]
    assert times[2] - times[1] == pytest.approx(2 * (times[1] - times[0]), rel=1e-9)


def test_scoring_is_the_forward_alone(h100: Hardware, megatron: TrainerCalibration) -> None:
    arch, layout = load_architecture("Qwen2.5-7B"), Layout.of(data_parallel=8)
    batch = Microbatches.of(16384.0, 16384.0 * 4096, 4096.0, 8.0)
    training = training_update(arch, h100, megatron, layout, batch)
    scoring = scoring_pass(arch, h100, megatron, layout, batch)
    assert float(scoring.forward_s) == pytest.approx(float(training.forward_s))
    assert float(scoring.backward_s) == float(scoring.optimizer_s) == 0
    assert 0.25 < float(scoring.total_s / training.total_s) < 0.4


def test_a_vision_tower_costs_time_and_memory_with_its_images(h100: Hardware, megatron: TrainerCalibration) -> None:
    from rlperf.cost.trainer.memory import trainer_memory

    arch, batch = load_architecture("Qwen2.5-VL-7B"), Microbatches.of(8192.0, 8192.0 * 2048, 2048.0, 8.0)
    layout = Layout.of(pipeline_parallel=[1, 2])
    text = training_update(arch, h100, megatron, layout, batch)
    images, frozen = (
        training_update(arch, h100, megatron, layout, batch, UpdateOptions(frozen_tower=flag), tower=TowerWork(8, 1024))
        for flag in (False, True)
    )
    assert np.all(images.total_s > frozen.total_s)
    assert np.all(frozen.total_s > text.total_s)
    score = [
        scoring_pass(arch, h100, megatron, layout, batch, tower=TowerWork(images=n, patches=1024)).total_s
        for n in (0, 8)
    ]
    assert np.all(score[1] > score[0])
    bare = trainer_memory(arch, h100, megatron, layout, batch).activations
    assert np.all(trainer_memory(arch, h100, megatron, layout, batch, patches=8192.0).activations >= bare)
    words = load_architecture("Qwen2.5-7B")
    same = [
        training_update(words, h100, megatron, layout, batch, tower=TowerWork(images=n, patches=1024)).total_s
        for n in (0, 8)
    ]
    assert np.all(same[0] == same[1])


# -- published tables ------------------------------------------------------------------------------------------------

# Korthikanti et al. 2022, arXiv 2205.05198, table 5: hidden, layers, heads, t, p, v, batch, seconds per iteration of
# full recompute and of sequence parallelism with selective recompute
TABLE_5 = (
    (6144, 48, 64, 8, 1, 1, 4, 4, 1.42, 1.10),
    (12288, 96, 96, 8, 8, 3, 64, 1, 18.13, 13.75),
    (20480, 105, 128, 8, 35, 3, 280, 1, 49.05, 37.83),
    (25600, 128, 160, 8, 64, 1, 512, 1, 94.42, 71.49),
)


@pytest.mark.parametrize("row", TABLE_5, ids=["22B", "175B", "530B", "1T"])
def test_korthikanti_table_5(row: tuple[int, ...], a100: Hardware) -> None:
    hidden, layers, heads, t, p, v, batch, each, full_s, selective_s = row
    arch, trainer = gpt(hidden, layers, heads), load_trainer("megatron_legacy")
    base = Layout.of(
        tensor_parallel=t, pipeline_parallel=p, virtual_pipeline=v, microbatch=each, activation_recompute=[2, 1],
        sequence_parallel=[0, 1],
    )  # fmt: skip
    cost = training_update(
        arch, a100, trainer, base, Microbatches.fixed(base, 2048, batch), UpdateOptions(dtype="fp16")
    )
    assert cost.total_s == pytest.approx([full_s, selective_s], rel=0.12)
    # the paper's result: 29 to 32 % faster
    assert float(cost.total_s[0] / cost.total_s[1]) == pytest.approx(full_s / selective_s, rel=0.10)


# Narayanan et al. 2021, arXiv 2104.04473, table 1 (as the repository prints it): hidden, layers, heads, t, p, devices,
# batch, published TFLOP/s per device with F = 96 B s l h^2 (1 + s / 6h + V / 16 l h)
TABLE_1 = (
    (2304, 24, 24, 1, 1, 32, 512, 137.0),
    (4096, 36, 32, 4, 1, 128, 512, 142.0),
    (10240, 60, 80, 8, 4, 1024, 1792, 140.0),
    (12288, 80, 96, 8, 8, 1536, 2304, 148.0),
    (16384, 96, 128, 8, 16, 1920, 2160, 155.0),
    (20480, 105, 128, 8, 35, 2520, 2520, 163.0),
    (25600, 128, 160, 8, 64, 3072, 3072, 163.0),
)


def test_narayanan_table_1_scaling(a100: Hardware) -> None:
    trainer = load_trainer("megatron_legacy")
    found = []
    for hidden, layers, heads, t, p, devices, batch, _ in TABLE_1:
        layout = Layout.of(
            tensor_parallel=t, pipeline_parallel=p, data_parallel=devices // (t * p), activation_recompute=2,
            virtual_pipeline=1 if p == 1 else 3 if layers % (3 * p) == 0 else 1, microbatch=4 if p == 1 else 1,
        )  # fmt: skip
        cost = training_update(
            gpt(hidden, layers, heads),
            a100,
            trainer,
            layout,
            Microbatches.fixed(layout, 2048, batch),
            UpdateOptions(dtype="fp16"),
        )
        flop = 96.0 * batch * 2048 * layers * hidden**2 * (1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden))
        found.append(flop / devices / float(cost.total_s) / 1e12)
    published = [row[-1] for row in TABLE_1]
    # the microbatch is not printed, so 18 % each; the trend (a trillion parameters run at a higher rate than 2 billion)
    assert found == pytest.approx(published, rel=0.18)
    assert found[-1] > found[0]


@pytest.mark.data
def test_measured_steps(measured_data: Path) -> None:
    report = scored(measured_data / "measured" / "training.csv", "training")
    errors = {one.group: one for one in report.metrics if one.split == "held out"}
    assert report.predicted > 890
    assert errors["dense, 16 bit"].median_ape < 5.0
    assert errors["dense, 16 bit"].mape < 6.5
    assert errors["all"].median_ape < 5.5
    assert errors["all"].mape < 8.0
    assert errors["all"].p90_ape < 17.0
    assert 0.9 < (errors["all"].interval_coverage or 0.0) < 0.98
    # strangers to the first fits; releases of 2026 and float8 with context parallelism among them
    limits = {
        "mlperf": 9.0, "megatron_bridge": 12.0, "megatron_bridge_same_config": 12.0, "torchtitan": 11.0,
        "megatron_core_h100": 12.0,
    }  # fmt: skip
    for group, limit in limits.items():
        assert errors[group].mape < limit, group
    assert not any(one.used_in_calibration for one in report.predictions) or report.used_in_calibration < 450


def test_scans_of_a_trained_delta_rule_take_the_seconds_of_their_kernel() -> None:
    """One long sequence waits for its chunks, eight short ones do not; untimed devices move the chunks' states."""
    arch = load_architecture("Qwen3.5-35B-A3B")
    layer = next(half.layer for half in stack_of(arch).halves if isinstance(half.layer, Linear))
    hw, untimed = load_hardware("h100_sxm"), load_hardware("mi355x")
    fit = scan_fit(hw, "gated_delta", "context", "sglang")
    assert fit is not None
    long, short = (_scan_of(layer, hw, count) for count in (1.0, 8.0))
    heads, keys, values = layer.state.heads, layer.state.keys, layer.state.values
    assert long.forward == pytest.approx(float(scan_with(hw.device, fit, 1.0, 8192.0, heads / 16, keys, values)))
    assert long.backward == pytest.approx(BACKWARD * float(long.forward)) and 2.0 < BACKWARD < 4.0
    assert long.forward > 1.3 * short.forward
    assert layer.training_s(_device(untimed, 1.0)) is None
    assert layer.scan_values(untimed) - layer.scan_values(hw) == layer.chunk_state_bytes


def test_scans_of_a_trained_mamba_take_the_seconds_of_their_kernel() -> None:
    layer = next(
        half.layer
        for half in stack_of(load_architecture("Nemotron-3-Nano-30B-A3B")).halves
        if isinstance(half.layer, Mamba)
    )
    hw, untimed = load_hardware("b200_sxm"), load_hardware("mi355x")
    fit = scan_fit(hw, "mamba", "context", "")
    assert fit is not None
    # a sixteenth of 64 heads of 128 x 64, chunks of 128
    found, forward = _scan_of(layer, hw, 1.0), chunked_with(hw.device, fit, 1.0, 8192.0, 4.0, 128, 64, 128)
    assert float(found.forward) == pytest.approx(float(forward))
    assert float(found.backward) == pytest.approx(BACKWARD * float(forward))
    assert layer.scan_values(untimed) - layer.scan_values(hw) == layer.chunk_state_bytes


def _scan_of(layer: Recurrent, hw: Hardware, sequences: float) -> Seconds:
    found = layer.training_s(_device(hw, sequences))
    assert found is not None
    return found


def _device(hw: Hardware, sequences: float) -> TrainerDevice:
    """A sixteenth of the heads and 8,192 tokens in sequences of one length."""
    layout, each = Layout.of(tensor_parallel=16), 8192.0 / sequences
    batch = Microbatches.of(8192.0, sequences * each**2, each, 1.0)
    return TrainerDevice(hw, load_trainer("megatron"), layout, work_of(layout, batch), PLAIN)
