"""Trainer memory: hand counts, published formulas, monotonicity, and cases that cannot fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlperf.cost.batching import Microbatches
from rlperf.cost.layers import stack_of
from rlperf.cost.parameters import language_parameters, parameters
from rlperf.cost.trainer.activations import layer_activations
from rlperf.cost.trainer.knobs import first_knob, knobs
from rlperf.cost.trainer.memory import DEVICE_PARTS, trainer_memory
from rlperf.cost.trainer.parameters import in_flight, lora_parameters, routed_layers, stage_layers
from rlperf.cost.trainer_device import Keeping, UpdateOptions
from rlperf.layout import Layout
from rlperf.specs.architecture import Architecture
from rlperf.specs.hardware import Hardware, load_hardware
from rlperf.specs.profiles import load_architecture
from rlperf.specs.trainer_calibration import TrainerCalibration, load_trainer

from .scored import scored


@pytest.fixture(scope="module")
def h100() -> Hardware:
    return load_hardware("h100_sxm")


@pytest.fixture(scope="module")
def megatron() -> TrainerCalibration:
    return load_trainer("megatron")


@pytest.fixture(scope="module")
def fsdp2() -> TrainerCalibration:
    return load_trainer("fsdp2")


def gpt(**changes: object) -> Architecture:
    """GPT of Korthikanti et al. 2022, table 3 (22B)."""
    values: dict[str, object] = {
        "name": "gpt-22B", "source": "arXiv 2205.05198, table 3", "hidden": 6144, "layers": 48, "heads": 64,
        "kv_heads": 64, "head_dim": 96, "ffn_hidden": 24576, "ffn_gated": False, "vocab": 51200, "norm_weights": 2,
        "tied_embeddings": True, "learned_positions": 2048, "qkv_bias": True, "output_bias": True, "ffn_bias": True,
    }  # fmt: skip
    return Architecture.model_validate({**values, **changes})


def test_a_draft_head_that_is_trained_is_held(h100: Hardware, megatron: TrainerCalibration) -> None:
    """EAGLE-3 of Qwen3-8B: a layer, 3 h^2 of projection, a head of 32,000; 2, 4 and 12 / 8 bytes at TP 2."""
    layout, arch = Layout.of(tensor_parallel=2, data_parallel=8, zero_stage=1), load_architecture("Qwen3-8B")
    where = arch, h100, megatron, layout, Microbatches.fixed(layout, 8192.0, 4.0)
    without, plain, adapted = (
        trainer_memory(*where, UpdateOptions(trained_draft=method, lora_rank=rank))
        for method, rank in ((None, None), ("eagle3", None), ("eagle3", 32))
    )
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288
    head = (layer + 3 * 4096**2 + 32_000 * 4096) / 2
    for part, each in (("weights", 2.0), ("gradients", 4.0), ("optimizer", 12.0 / 8)):
        more = float(getattr(plain, part) - getattr(without, part))
        assert more == pytest.approx(each * head, rel=2e-3), part
    bare = trainer_memory(*where, UpdateOptions(lora_rank=32))
    assert float(adapted.states - bare.states) == pytest.approx(float(plain.states - without.states), rel=1e-6)


def unfused_layer(arch: Architecture, tp: int, sp: bool, sequence: int, microbatch: int) -> float:
    """Bytes of one layer by the tensor count, with dropout and materialised scores."""
    layout = Layout.of(tensor_parallel=tp, sequence_parallel=int(sp))
    kept = layer_activations(arch, Keeping(layout, dropout=True, unfused=True))
    tokens = sequence * microbatch
    return float(kept.dense * tokens + kept.scores * microbatch * sequence**2)


def korthikanti_layer_bytes(
    sequence: npt.ArrayLike,
    microbatch: npt.ArrayLike,
    hidden: npt.ArrayLike,
    heads: npt.ArrayLike,
    tensor_parallel: npt.ArrayLike = 1,
    *,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> npt.NDArray[np.float64]:
    r"""Activation bytes of one GELU layer as published: Korthikanti et al. 2022, equations 1, 2 and 4, and table 2.

    .. math::

        none: s b h (34 + 5 a s / h),\qquad TP: s b h (10 + 24/t + 5 a s / (h t)),

        TP + SP: s b h / t\,(34 + 5 a s / h),\qquad selective: 34 s b h / t,\qquad full: 2 s b h

    Parameters
    ----------
    sequence, microbatch, hidden, heads, tensor_parallel : s, b, h, a, t [1], broadcast together

    >>> float(korthikanti_layer_bytes(2048, 1, 12288, 96)) / (2048 * 12288)
    114.0
    """
    s, b, h, a, t = (np.asarray(v, dtype=np.float64) for v in (sequence, microbatch, hidden, heads, tensor_parallel))
    scores = 0.0 if recompute == "selective" else 5.0 * a * s / h
    if recompute == "full":
        return np.asarray(2.0 * s * b * h)
    if sequence_parallel:
        return np.asarray(s * b * h / t * (34.0 + scores))
    return np.asarray(s * b * h * (10.0 + 24.0 / t + scores / t))


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (8, False), (8, True), (2, True)])
def test_tensor_count_is_korthikanti_equations_1_2_and_4(tp: int, sp: bool) -> None:
    arch = gpt()
    published = korthikanti_layer_bytes(2048, 4, arch.hidden, arch.heads, tp, sequence_parallel=sp)
    assert unfused_layer(arch, tp, sp, 2048, 4) == pytest.approx(float(published), rel=1e-12)


def test_equation_1_by_hand() -> None:
    # s b h (34 + 5 a s / h) with s 2048, b 1, h 12288, a 96: 5 * 96 * 2048 / 12288 = 80
    assert float(korthikanti_layer_bytes(2048, 1, 12288, 96)) == 2048 * 12288 * (34 + 80)


@pytest.mark.parametrize(
    ("hidden", "heads", "left"),
    [(12288, 96, 34 / 114), (20480, 128, 34 / 98)],
)
def test_selective_recompute_drops_what_the_paper_says(hidden: int, heads: int, left: float) -> None:
    # section 5: 5 a s / h is 80 for GPT-3 (175B) and 64 for MT-NLG (530B): selective recompute saves 70 % and 65 %
    whole = korthikanti_layer_bytes(2048, 1, hidden, heads, 8, sequence_parallel=True)
    part = korthikanti_layer_bytes(2048, 1, hidden, heads, 8, sequence_parallel=True, recompute="selective")
    assert float(part / whole) == pytest.approx(left, rel=1e-12)
    assert round(100 * (1 - float(part / whole))) in (65, 70)


def test_recomputing_the_mlp_keeps_the_input_of_its_norm(h100: Hardware) -> None:
    """At the loss all 80 layers lack gate, up, activation and the norm's output: 6 f / t + 2 h / t bytes a token."""
    arch, bridge = load_architecture("Llama-3.1-70B"), load_trainer("megatron_bridge")
    layout = Layout.of(tensor_parallel=4, sequence_parallel=1, zero_stage=1, activation_recompute=1)
    batch = Microbatches.fixed(layout, 4096, 1)
    attention, mlp, both = (
        float(trainer_memory(arch, h100, bridge, layout, batch, UpdateOptions(recompute_modules=names)).activations)
        for names in (("core_attn",), ("mlp",), ("mlp", "core_attn"))
    )
    statistics = 4 * 64 / 4 * 4096
    assert attention - both == pytest.approx(80 * (6 * 28672 + 2 * 8192) / 4 * 4096)
    assert mlp - both == pytest.approx(80 * statistics)
    # Megatron's mlp is no mixture of experts
    moe = load_architecture("Qwen3-30B-A3B")
    kept = [
        float(trainer_memory(moe, h100, bridge, layout, batch, UpdateOptions(recompute_modules=names)).activations)
        for names in ((), ("mlp",))
    ]
    assert kept[0] == kept[1]


def test_an_update_of_16_bit_gradients_makes_fp32_ones(h100: Hardware) -> None:
    """Of the shard that a rank updates, after activations are gone: 4 bytes each of 8B / 8."""
    arch, bridge, layout = load_architecture("Llama-3.1-8B"), load_trainer("megatron_bridge"), Layout.of(zero_stage=1)
    plain = bridge.model_copy(update={"workspace": bridge.workspace.model_copy(update={"optimizer_scratch": 0.0})})
    short, long = (Microbatches.fixed(layout, tokens, 1) for tokens in (128, 8192))
    added = [
        float(trainer_memory(arch, h100, bridge, layout, batch).total)
        - float(trainer_memory(arch, h100, plain, layout, batch).total)
        for batch in (short, long)
    ]
    assert 0.8 * 4 * parameters(arch) < added[0] < 4 * parameters(arch)
    assert added[1] < 0.5 * added[0]


def test_matrices_that_gather_their_own_inputs_keep_them(h100: Hardware, fsdp2: TrainerCalibration) -> None:
    """q, k, v, gate and up save what DTensor gathered for them, whole, in place of two outputs cut eight ways."""
    arch = load_architecture("Llama-3.1-70B")
    split, whole = (Layout.of(tensor_parallel=8, sequence_parallel=s, zero_stage=3) for s in (1, 0))

    def added(layout: Layout, **options: Any) -> float:
        apart = layer_activations(arch, Keeping(layout, gathers_once=False, **options))
        return float(apart.dense - layer_activations(arch, Keeping(layout, **options)).dense)

    assert added(split) == pytest.approx(2 * 8192 * (5 - 2 / 8))
    assert added(split, linear_input=1.0) == pytest.approx(8192 * (5 - 2 / 8))
    # nothing to gather: all of them save one tensor
    assert added(whole) == added(Layout.of(sequence_parallel=1)) == 0.0
    each = fsdp2.model_copy(update={"switches": fsdp2.switches.model_copy(update={"gathers_once": False})})
    batch = Microbatches.fixed(split, 4096, 2)
    parts = [trainer_memory(arch, h100, trainer, split, batch) for trainer in (each, fsdp2)]
    grown = float(parts[0].activations - parts[1].activations)
    assert grown == pytest.approx(arch.layers * 4096 * 2 * 8192 * 4.75)  # the loss is the peak: no working set
    scored = [trainer_memory(arch, h100, t, split, batch, forward_only=True).total for t in (each, fsdp2)]
    assert scored[0] == scored[1]


@pytest.mark.parametrize(
    ("name", "readers"),
    [
        ("Qwen3-4B", 5.0),  # q, k, v, gate, up
        ("Qwen3-30B-A3B", 4.0),  # q, k, v, and what router and experts share
        ("DeepSeek-V3", (61 * 2 + 3 * 2 + 58 * 3) / 61),  # two down projections; gate and up, of shared experts too
    ],
)
def test_inputs_behind_norms_are_counted_from_the_matrices(name: str, readers: float) -> None:
    arch = load_architecture(name)
    assert stack_of(arch).readers / arch.layers == pytest.approx(readers)


def test_recompute_by_operator_keeps_every_second_product_by_hand(h100: Hardware) -> None:
    """Llama-3.1-8B in torchtitan: input, queries, values, attention output and gate, in 16 bits; softmax statistics."""
    arch = load_architecture("Llama-3.1-8B")
    by_hand = 2 * (4096 + 4096 + 1024 + 4096 + 14336) + 4 * 32
    assert float(layer_activations(arch, Keeping(Layout.of(), compiled=True)).operators) == by_hand
    assert (
        float(layer_activations(arch, Keeping(Layout.of())).operators) == by_hand + 2 * 4096
    )  # nothing reads the down product
    # eight ways: all is cut, and the scattered output of attention is kept beside the product that made it
    split = layer_activations(arch, Keeping(Layout.of(tensor_parallel=8, sequence_parallel=1), compiled=True))
    assert float(split.operators) == by_hand / 8 + 2 * 4096 / 8
    trainer, batch = load_trainer("torchtitan"), Microbatches.fixed(Layout.of(microbatch=2), 8192, 2)
    layout = Layout.of(zero_stage=3, data_parallel=128, microbatch=2, activation_recompute=1)
    parts = trainer_memory(arch, h100, trainer, layout, batch, UpdateOptions(compiled=True))
    assert float(parts.activations) == 16384 * (32 * by_hand + 4 * 4096)
    assert float(parts.logits) == 14 * 16384 * 128256
    compiled = trainer_memory(arch, h100, trainer, layout, batch, UpdateOptions(compiled=True, compiled_loss=True))
    assert float(compiled.logits) == 6 * 16384 * 128256


def test_a_loss_over_a_cut_vocabulary_holds_one_tensor_more(h100: Hardware) -> None:
    arch, trainer = load_architecture("Llama-3.1-8B"), load_trainer("torchtitan")
    layout = Layout.of(zero_stage=3, data_parallel=8, tensor_parallel=8, sequence_parallel=1, microbatch=16)
    batch = Microbatches.fixed(layout, 8192, 128)
    held = [float(trainer_memory(arch, h100, trainer, layout, batch, UpdateOptions(compiled_loss=each)).logits)
            for each in (False, True)]  # fmt: skip
    assert held == [each * 16 * 8192 * 128256 / 8 for each in (18, 6)]


def test_fsdp_that_does_not_reshard_keeps_the_gathered_copy_beside_its_shards(
    h100: Hardware, fsdp2: TrainerCalibration, megatron: TrainerCalibration
) -> None:
    arch, batch = load_architecture("Llama-3.1-8B"), Microbatches.of(4096.0, 4096.0**2, 4096.0, 4.0)

    def weights(trainer: TrainerCalibration, zero: int) -> float:
        layout = Layout.of(data_parallel=8, zero_stage=zero)
        return float(trainer_memory(arch, h100, trainer, layout, batch).weights) / parameters(arch)

    assert weights(fsdp2, 3) == pytest.approx(4.0 / 8, rel=1e-3)
    assert weights(fsdp2, 2) == pytest.approx(4.0 / 8 + 2.0, rel=1e-3)
    assert weights(megatron, 2) == pytest.approx(2.0, rel=1e-3)


def test_sequence_parallel_with_selective_recompute_is_the_published_fivefold_saving() -> None:
    # abstract and figure 7: tensor parallel alone against tensor + sequence parallel + selective recompute, t = 8
    for hidden, heads in ((6144, 64), (12288, 96), (20480, 128), (25600, 160)):
        base = korthikanti_layer_bytes(2048, 1, hidden, heads, 8)
        best = korthikanti_layer_bytes(2048, 1, hidden, heads, 8, sequence_parallel=True, recompute="selective")
        assert 0.14 < float(best / base) < 0.22


def test_mixed_precision_adam_is_18_bytes_and_zero_shards_it(h100: Hardware, megatron: TrainerCalibration) -> None:
    arch = load_architecture("Qwen2.5-7B")
    batch = Microbatches.of(1.0, 1.0, 1.0, 1.0)
    layout = Layout.of(data_parallel=8, zero_stage=[0, 1, 2, 3])
    parts = trainer_memory(arch, h100, megatron, layout, batch)
    count = language_parameters(arch) - arch.norm_weights * arch.hidden
    per_parameter = parts.states / count
    # weight 2, gradient 4, master and moments 12
    assert per_parameter == pytest.approx([18.0, 6 + 12 / 8, 2 + 16 / 8, 18 / 8], rel=1e-3)


def test_stage_layers_and_in_flight_microbatches_by_hand() -> None:
    arch = gpt(layers=126)
    layout = Layout.of(pipeline_parallel=[1, 7, 8], virtual_pipeline=[1, 1, 4])
    assert stage_layers(arch, layout).tolist() == [126, 18, 16]
    batch = Microbatches.of(1.0, 1.0, 1.0, [64.0, 64.0, 64.0])
    first, second, last = in_flight(layout, batch)
    assert first.tolist() == pytest.approx([1, 7, 8 + 7 / 4])
    assert second.tolist() == pytest.approx([0, 6, 8 + 5 / 4])
    assert last.tolist() == pytest.approx([1, 1, 1 + 8 * 3 / 4])
    few = Microbatches.of(1.0, 1.0, 1.0, 2.0)
    assert in_flight(Layout.of(pipeline_parallel=8), few)[0] == 2


def test_dense_layers_come_first_so_the_last_stage_holds_more_experts() -> None:
    arch = load_architecture("DeepSeek-V3")
    first, between, last = routed_layers(arch, Layout.of(pipeline_parallel=[1, 16, 61]))
    # 16 stages: 3 layers, 14 times 4, and 2, as files state them
    assert first.tolist() == [58, 0, 0]
    assert between.tolist() == [58, 4, 1]
    assert last.tolist() == [58, 2, 1]
    stated = routed_layers(arch, Layout.of(pipeline_parallel=12), (6, 5))
    assert [float(each) for each in stated] == [3, 5, 5]  # no stage between holds as many as the first


def test_a_stage_between_holds_experts_where_the_first_has_dense_layers(
    h100: Hardware, megatron: TrainerCalibration
) -> None:
    """GLM-4.5 on 32 stages: its three dense layers fill the first, the second has experts in 31 microbatches."""
    arch = load_architecture("GLM-4.5-355B-A32B")
    layout = Layout.of(tensor_parallel=2, pipeline_parallel=32, expert_parallel=2, sequence_parallel=True, zero_stage=1)
    parts = trainer_memory(arch, h100, megatron, layout, Microbatches.of(8192.0, 8192.0**2, 8192.0, 64.0))
    experts = 3 * 160 * 3 * arch.hidden * 1536 / 2  # of three layers, on two devices
    assert float(parts.weights) > 2.0 * experts
    assert float(parts.logits) == 0.0


def test_lora_parameters_by_hand() -> None:
    # Qwen2.5-7B: h 3584, q 3584, kv 512 each, ffn 18944; rank 16
    arch = load_architecture("Qwen2.5-7B")
    per_layer = (3584 + 3584) * 2 + (3584 + 512) * 2 + 3 * (3584 + 18944)
    dense, routed = lora_parameters(arch, 16)
    assert dense == 16 * per_layer
    assert routed == 0


def test_lora_adapts_every_kind_of_layer() -> None:
    # Nemotron 3 Nano: 23 Mamba-2 layers (gate, x 4096 each, B and C of 8 groups of 128, 64 steps), 6 of attention
    # (q 4096, k and v 256 each), 23 of experts with a shared one of 3712; h 2688
    arch = load_architecture("Nemotron-3-Nano-30B-A3B")
    mamba = (2688 + 2 * 4096 + 2 * 8 * 128 + 64) + (4096 + 2688)
    attention = (2688 + 4096) * 2 + (2688 + 256) * 2
    shared = 2 * (2688 + 3712)
    dense, routed = lora_parameters(arch, 16)
    assert dense * 52 == pytest.approx(16 * (23 * mamba + 6 * attention + 23 * shared), rel=1e-12)
    assert routed * 52 == pytest.approx(16 * 23 * 128 * 2 * (2688 + 1856), rel=1e-12)


@settings(deadline=None, max_examples=40)
@given(
    tp=st.sampled_from([1, 2, 4, 8]), pp=st.sampled_from([1, 2, 4]), dp=st.sampled_from([1, 2, 8]),
    tokens=st.integers(512, 65536), recompute=st.integers(0, 2), zero=st.integers(0, 2),
)  # fmt: skip
def test_memory_never_grows_with_zero_recompute_or_fewer_tokens(
    tp: int, pp: int, dp: int, tokens: int, recompute: int, zero: int
) -> None:
    arch, hw, trainer = load_architecture("Qwen2.5-7B"), load_hardware("h100_sxm"), load_trainer("megatron")
    base = Layout.of(
        tensor_parallel=tp, pipeline_parallel=pp, data_parallel=dp, sequence_parallel=int(tp > 1),
        zero_stage=zero, activation_recompute=recompute,
    )  # fmt: skip

    def total(layout: Layout, size: float) -> float:
        return float(trainer_memory(arch, hw, trainer, layout, Microbatches.of(size, size * 512, 512, 16)).total)

    here = total(base, tokens)
    assert total(base, tokens / 2) <= here
    assert float(trainer_memory(arch, hw, trainer, base, Microbatches.of(tokens, tokens, 1, 16)).states) >= float(
        trainer_memory(
            arch, hw, trainer, base.with_(zero_stage=min(zero + 1, 3)), Microbatches.of(tokens, tokens, 1, 16)
        ).states
    )
    parts = trainer_memory(arch, hw, trainer, base, Microbatches.of(tokens, tokens * 512, 512, 16))
    assert sum(float(getattr(parts, name)) for name in DEVICE_PARTS) == pytest.approx(float(parts.total))
    assert min(float(getattr(parts, name)) for name in DEVICE_PARTS) >= 0


def test_scalar_layouts_equal_the_array(h100: Hardware, fsdp2: TrainerCalibration) -> None:
    arch = load_architecture("Qwen3-30B-A3B")
    names = ("tensor_parallel", "data_parallel", "expert_parallel", "zero_stage", "offload", "activation_recompute")
    axes = np.ix_([1, 2], [4, 8], [1, 4], [1, 3], [0, 1, 2, 3], [0, 1, 2])
    grid = Layout.of(**dict(zip(names, axes, strict=True))).flat()
    batch = Microbatches.of(8192.0, 8192.0 * 4096, 4096.0, 4.0)
    whole = trainer_memory(arch, h100, fsdp2, grid, batch)
    for index in range(0, grid.size, 17):
        one = trainer_memory(arch, h100, fsdp2, grid.take(index), batch)
        assert float(one.total) == pytest.approx(float(whole.total[index]), rel=1e-12)
        assert float(one.host) == pytest.approx(float(np.broadcast_to(whole.host, grid.shape)[index]), rel=1e-12)


def test_offload_moves_bytes_to_the_host(h100: Hardware, fsdp2: TrainerCalibration) -> None:
    arch = load_architecture("Qwen2.5-7B")
    batch = Microbatches.of(16384.0, 16384.0 * 4096, 4096.0, 4.0)
    layout = Layout.of(data_parallel=8, zero_stage=3, activation_recompute=2, offload=[0, 1, 2, 3])
    parts = trainer_memory(arch, h100, fsdp2, layout, batch, UpdateOptions(chunked_loss=True))
    assert parts.total[0] > parts.total[1] > parts.total[3]
    assert parts.total[0] > parts.total[2] > parts.total[3]
    assert parts.host[0] == 0
    # moments of fp32 Adam: 8 bytes a parameter over 8 shards
    assert parts.host[1] == pytest.approx(parameters(arch), rel=0.01)
    assert parts.host[3] == pytest.approx(parts.host[1] + parts.host[2])


def test_whole_gradients_stand_beside_activations_between_microbatches(
    h100: Hardware, fsdp2: TrainerCalibration
) -> None:
    """4 bytes of every parameter on each of eight devices; of a single microbatch nothing waits for another."""
    arch, layout = load_architecture("Qwen2.5-7B"), Layout.of(data_parallel=8, zero_stage=3, activation_recompute=2)
    both = [UpdateOptions(whole_gradients=on) for on in (True, False)]
    for count, of_parameter in ((4.0, 4.0), (1.0, 0.0)):
        batch = Microbatches.of(16384.0, 16384.0 * 4096, 4096.0, count)
        whole, plain = (trainer_memory(arch, h100, fsdp2, layout, batch, options) for options in both)
        expected = of_parameter * parameters(arch) * (1.0 - 1.0 / 8.0)
        assert float(whole.total - plain.total) == pytest.approx(expected, rel=0.01)
        assert float(whole.states) == float(plain.states)  # what stays between two updates
        scored = [trainer_memory(arch, h100, fsdp2, layout, batch, o, forward_only=True).total for o in both]
        assert float(scored[0]) == float(scored[1])


def test_scoring_keeps_no_gradients(h100: Hardware, megatron: TrainerCalibration) -> None:
    arch = load_architecture("Qwen2.5-7B")
    batch = Microbatches.of(8192.0, 8192.0 * 4096, 4096.0, 4.0)
    parts = trainer_memory(arch, h100, megatron, Layout.of(tensor_parallel=2), batch, forward_only=True)
    assert float(parts.gradients) == float(parts.optimizer) == 0
    assert float(parts.total) < float(trainer_memory(arch, h100, megatron, Layout.of(tensor_parallel=2), batch).total)


def test_first_knob_names_what_is_largest(
    h100: Hardware, megatron: TrainerCalibration, fsdp2: TrainerCalibration
) -> None:
    arch = load_architecture("Qwen2.5-7B")
    limit = h100.device.usable_memory * 0.92
    replicas = Layout.of(data_parallel=8)
    parts = trainer_memory(arch, h100, megatron, replicas, Microbatches.of(4096.0, 4096.0**2, 4096.0, 4.0))
    assert first_knob(replicas, parts, limit).setting.startswith("distributed optimizer")  # type: ignore[union-attr]
    sharded = Layout.of(data_parallel=8, zero_stage=3, activation_recompute=2)
    long = trainer_memory(arch, h100, fsdp2, sharded, Microbatches.of(32768.0, 32768.0**2, 32768.0, 4.0))
    assert first_knob(sharded, long, limit).setting == "fused or chunked loss"  # type: ignore[union-attr]
    small = trainer_memory(
        arch, h100, fsdp2, sharded, Microbatches.of(4096.0, 4096.0**2, 4096.0, 4.0), UpdateOptions(chunked_loss=True)
    )
    assert first_knob(sharded, small, limit) is None
    assert all(knob.frees_bytes >= 0 for knob in knobs(sharded, long, 32768.0))
    # of a fixed number of devices only what ZeRO leaves on every rank gets smaller with wider replicas
    at = (Layout.of(data_parallel=8, zero_stage=stage) for stage in range(4))
    wider = [[knob for knob in knobs(layout, parts, 4096.0) if "tensor" in knob.setting] for layout in at]
    assert not wider[3]
    held = (parts.states, parts.weights + parts.gradients, parts.weights)
    for stage, states in enumerate(held):
        assert wider[stage][0].frees_bytes == pytest.approx(0.5 * float(states))


@pytest.mark.data
def test_measured_peaks(measured_data: Path) -> None:
    report = scored(measured_data / "measured" / "training.csv", "memory")
    errors = {one.group: one.mape for one in report.metrics}
    assert errors["simumax_b200"] < 1.5
    assert errors["prime_rl"] < 6.0
    assert errors["torchtitan"] < 3.0  # counted, not fitted
    phases = scored(measured_data / "memory" / "rl_lora_phases.csv", "memory")
    errors = {one.group: one.mape for one in phases.metrics}
    assert errors["training"] < 6.0
    assert errors["generation"] < 5.0


@pytest.mark.data
def test_every_configuration_that_is_known_to_run_fits(measured_data: object) -> None:
    from pathlib import Path

    from rlperf.calibrate.validate import validate_file

    report = validate_file(Path(str(measured_data)) / "memory" / "verl_known_to_fit.csv", "memory")
    assert report.predicted == 6
    assert all(one.predicted < 1.0 for one in report.predictions)
