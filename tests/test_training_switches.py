"""Switches of a training stack: what a row says of them, and what they are worth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlperf.calibrate.trainers.switches import of_note, of_recipe, recomputed
from rlperf.cost.batching import Microbatches
from rlperf.cost.collectives import all_gather_s
from rlperf.cost.layers.moe import Moe
from rlperf.cost.roofline import cast_s, stream_s
from rlperf.cost.trainer.layers import layer_seconds
from rlperf.cost.trainer.microbatch import microbatch_seconds
from rlperf.cost.trainer.pipeline import launch_s
from rlperf.cost.trainer.update import TrainingCost, training_update
from rlperf.cost.trainer_device import TrainerDevice, UpdateOptions, work_of
from rlperf.layout import RECOMPUTE, Layout
from rlperf.specs.architecture import Architecture
from rlperf.specs.hardware import load_hardware
from rlperf.specs.profiles import load_architecture
from rlperf.specs.trainer_calibration import TrainerCalibration, load_trainer
from rlperf.specs.trainer_switches import Switches

H100 = load_hardware("h100_sxm")
MOE = load_architecture("Qwen3-30B-A3B")
DENSE = load_architecture("Llama-3.1-8B")


def cost(
    layout: Layout, switches: Switches, *, architecture: str = "moe", trainer: TrainerCalibration | None = None,
    length: int = 4096, **options: object,
) -> TrainingCost:  # fmt: skip
    arch = MOE if architecture == "moe" else DENSE
    asked = UpdateOptions(switches=switches, **options)  # type: ignore[arg-type]
    backend = trainer or load_trainer("megatron_bridge")
    return training_update(arch, H100, backend, layout, Microbatches.fixed(layout, length, 16), asked)


EXPERTS = Layout.of(data_parallel=8, expert_parallel=8, zero_stage=1)


@pytest.mark.parametrize(("note", "stated"), [
    ("CUDA graph: none; CUDA graph scope: full_iteration", {"cuda_graph": "none"}),
    ("CUDA graph: local; CUDA graph scope: full_iteration", {"cuda_graph": "full_iteration"}),
    ("CUDA graph: full_iteration; dispatcher: hybridep", {"cuda_graph": "full_iteration", "dispatcher": "hybridep"}),
    ("dispatcher: deepep", {"dispatcher": "deepep"}),
    ("CUDA graph: transformer_engine; CUDA graph scope: attn;moe_router", {"cuda_graph": "partial"}),
    ("TP comm overlap off, P2P overlap off, grad/param overlap off",
     {"tensor_overlap": False, "pipeline_overlap": False, "data_overlap": False}),
    ("overlap-grad-reduce, overlap-param-gather, tp-comm-overlap on", {"data_overlap": True, "tensor_overlap": True}),
    ("EP overlap off", {"expert_overlap": False}),
    ("EP overlap on (search run)", {"expert_overlap": True}),
    ("torch.compile False; async TP True", {"fused": False, "tensor_overlap": True}),
    ("nothing of the kind", {}),
])  # fmt: skip
def test_a_note_states_switches_in_the_frameworks_words(note: str, stated: dict[str, object]) -> None:
    found = of_note(note, "")
    assert {name: getattr(found, name) for name in found.model_fields_set} == stated


def test_a_recipe_stands_in_from_its_release_on() -> None:
    where = ("DeepSeek-V3", "gb300")
    assert of_recipe("Megatron-Bridge", "26.08", *where).cuda_graph == "full_iteration"
    assert of_recipe("Megatron-Bridge", "26.04", *where).cuda_graph == "partial"
    assert not of_recipe("Megatron-Bridge", "26.08", "Llama-3-8B", "gb300").model_fields_set
    assert recomputed("recomputed modules: mla_up_proj;mlp; x") == ("mla_up_proj", "mlp")
    assert recomputed("nothing") == ("core_attn",)


def test_a_graph_of_the_iteration_leaves_no_launches() -> None:
    host = {
        kind: float(cost(EXPERTS, Switches(cuda_graph=kind)).host_s) for kind in ("none", "partial", "full_iteration")
    }
    fixed = float(cost(EXPERTS, Switches(cuda_graph="full_iteration")).host_s)
    assert host["none"] > host["partial"] > host["full_iteration"] == fixed
    dropping = cost(EXPERTS, Switches(drops_tokens=True))
    assert float(dropping.total_s) < float(cost(EXPERTS, Switches()).total_s)


def test_a_deduplicating_dispatcher_sends_less_and_overlap_hides_it() -> None:
    plain, once = (float(cost(EXPERTS, Switches(dispatcher=kind)).exposed_ep_s) for kind in ("alltoall", "deepep"))
    # 8 experts reach 8 (1 - (7/8)^8) = 5.25 of 8 devices
    assert once / plain == pytest.approx(8.0 * (1.0 - (7.0 / 8.0) ** 8) / 8.0, rel=0.1)
    assert float(cost(EXPERTS, Switches(expert_overlap=True)).exposed_ep_s) < plain


def test_an_unbalanced_ring_waits_for_its_last_rank() -> None:
    attention = {}
    for ring in ("balanced", "unbalanced"):
        long = Layout.of(context_parallel=4, data_parallel=2, zero_stage=1)
        wide = cost(long, Switches(ring=ring), architecture="dense", length=65536)
        attention[ring] = float(wide.forward_s + wide.backward_s)
    extra = attention["unbalanced"] - attention["balanced"]
    no_ring = Layout.of(data_parallel=8, zero_stage=1)
    assert extra > 0.2 * attention["balanced"]
    same = [
        float(cost(no_ring, Switches(ring=ring), architecture="dense").total_s) for ring in ("balanced", "unbalanced")
    ]
    assert same[0] == same[1]


def test_traffic_is_hidden_only_where_it_is_switched_on() -> None:
    layout = Layout.of(data_parallel=8, tensor_parallel=8, sequence_parallel=1, pipeline_parallel=2, zero_stage=1)
    on = cost(layout, Switches(), architecture="dense")
    off = cost(layout, Switches(data_overlap=False, tensor_overlap=False, pipeline_overlap=False), architecture="dense")
    for part in ("exposed_dp_s", "exposed_tp_s", "exposed_pp_s"):
        assert float(getattr(off, part)) > float(getattr(on, part)), part


def test_selective_recompute_repeats_what_it_names() -> None:
    layout = replace(EXPERTS, activation_recompute=np.asarray(RECOMPUTE.index("selective")))
    attention, experts, norms = (
        cost(layout, Switches(), recompute_modules=names) for names in (("core_attn",), ("moe",), ("layernorm",))
    )
    nothing = pytest.approx(0.0, abs=1e-12)
    assert float(norms.recompute_s) == nothing
    assert float(attention.recompute_s) > 1e-3
    assert float(experts.exposed_ep_s) > float(attention.exposed_ep_s)
    # Megatron's mlp is a dense feed-forward: most of a dense layer, nothing of a mixture
    dense = replace(
        Layout.of(data_parallel=4, tensor_parallel=2, sequence_parallel=1, zero_stage=1),
        activation_recompute=layout.activation_recompute,
    )
    none, mlp = (cost(dense, Switches(), architecture="dense", recompute_modules=names) for names in ((), ("mlp",)))
    assert 0.6 < float((mlp.recompute_s - none.recompute_s) / none.forward_s) < 0.9
    assert float(mlp.exposed_tp_s) > float(none.exposed_tp_s)
    assert float(cost(layout, Switches(), recompute_modules=("mlp",)).recompute_s) == nothing


def test_eager_passes_cost_more() -> None:
    layout, fsdp2 = Layout.of(data_parallel=8, zero_stage=3), load_trainer("fsdp2")
    fused, eager = (
        float(cost(layout, Switches(fused=on), architecture="dense", trainer=fsdp2).total_s) for on in (True, False)
    )
    assert eager > fused


def test_scales_of_rows_by_hand() -> None:
    """Products at what 16 bits sustain; in the backward a cast more of each gradient and a pass over each result."""
    layout, tokens = Layout.of(zero_stage=3, tensor_parallel=2, sequence_parallel=1), 16384.0
    trainer, work = load_trainer("torchtitan"), work_of(layout, Microbatches.fixed(layout, 16384, 1))
    entry = trainer.generation(H100.device).model_copy(
        update={"generation": "*", "sustained": 0.8, "sustained_fp8": 0.8}
    )
    alike = trainer.model_copy(update={"generations": (entry,)})
    whole, rows = (
        layer_seconds(DENSE, TrainerDevice(H100, alike, layout, work, UpdateOptions(dtype="fp8", switches=switches)))
        for switches in (Switches(), Switches(rowwise=True))
    )
    assert float(rows.forward) == float(whole.forward)
    # outputs on a device of qkv, the attention's output, gate and up, down; their inputs, q, k and v each its own
    outputs, inputs = (3072, 4096, 14336, 4096), (3 * 4096, 2048, 2 * 4096, 7168)
    weights = 3072 * 4096 + 4096 * 2048 + 14336 * 4096 + 4096 * 7168
    added = sum(float(cast_s(H100, tokens * each, "fp8")) for each in outputs)
    added += float(stream_s(H100, 4.0 * (tokens * sum(inputs) + weights)))
    assert float(rows.backward - whole.backward) == pytest.approx(added, rel=1e-9)
    entry = entry.model_copy(update={"sustained_fp8": 1.2})
    faster = TrainerDevice(H100, alike.model_copy(update={"generations": (entry,)}), layout, work, UpdateOptions("fp8"))
    assert faster.rate == 1.2
    assert replace(faster, options=UpdateOptions("fp8", switches=Switches(rowwise=True))).rate == 0.8


def test_what_is_cast_first_is_gathered_in_8_bits_unless_rows_have_scales() -> None:
    """Both halves of a layer gather once forward and twice backward; what they sum up stays in 16 bits."""
    layout, tp = Layout.of(zero_stage=3, tensor_parallel=8, sequence_parallel=1), np.asarray(8.0)
    torchtitan, work = load_trainer("torchtitan"), work_of(layout, Microbatches.fixed(layout, 65536, 1))
    own = torchtitan.switches
    assert own.gathers_narrow and not load_trainer("fsdp2").switches.gathers_narrow

    def traffic(dtype: str, **switches: bool) -> tuple[float, float]:
        told = UpdateOptions(dtype, switches=own.model_copy(update=switches))
        found = microbatch_seconds(DENSE, TrainerDevice(H100, torchtitan, layout, work, told)).tensor
        return float(found.forward), float(found.backward)

    wide, narrow = traffic("bf16"), traffic("fp8")
    whole, half = (float(all_gather_s(H100, size * 65536.0 * 4096, tp, tp)) for size in (2.0, 1.0))
    spared = torchtitan.timing.collective * 2.0 * (whole - half)
    assert wide[0] - narrow[0] == pytest.approx(spared) and spared > 0.2 * wide[0]
    assert wide[1] - narrow[1] == pytest.approx(2.0 * spared)
    assert traffic("fp8", gathers_narrow=False) == traffic("fp8", rowwise=True) == wide


def test_experts_in_16_bits_and_hybrid_dispatch_launch_less_and_drops_leave_the_device_as_it_was() -> None:
    trainer = load_trainer("megatron_bridge")
    layer = [launch_s(MOE, trainer, EXPERTS, Switches(dispatcher=kind), "fp8") for kind in ("deepep", "hybridep")]
    assert layer[1] == pytest.approx(trainer.timing.hybrid_host * layer[0])
    saved = layer[0] - launch_s(MOE, trainer, EXPERTS, Switches(dispatcher="deepep"), "bf16")
    each = trainer.timing.host_expert * 128 / 8
    assert saved == pytest.approx((1.0 - trainer.timing.wide_expert) * each) and saved > 0.0
    plain, dropping = (cost(EXPERTS, Switches(drops_tokens=on)) for on in (False, True))
    assert float(plain.forward_s) == float(dropping.forward_s) and float(plain.host_s) > float(dropping.host_s)


def around_products(arch: Architecture, dtype: str, switches: Switches) -> tuple[float, float]:
    """Seconds of the experts of 4,096 tokens on one of eight devices, (forward, backward), without any gap."""
    trainer = load_trainer("megatron_bridge")
    timing = trainer.timing.model_copy(update={"moe_layer": 0.0, "expert_gap": 0.0})
    work = work_of(EXPERTS, Microbatches.fixed(EXPERTS, 4096, 16))
    options = UpdateOptions(dtype=dtype, switches=switches)
    bare = trainer.model_copy(update={"timing": timing})
    found = Moe(arch).training_s(TrainerDevice(H100, bare, EXPERTS, work, options))
    return float(found.forward), float(found.backward)


@pytest.mark.parametrize(("dispatcher", "forward", "backward"), [
    # casts of 2,048 and 768 values (backward 2 x 768), 2 bytes read and 1 + 1 written; padded and cut, 2 x (2 + 2)
    ("alltoall", 4 * (2048 + 768) + 8 * 2048, 4 * (2048 + 2 * 768) + 8 * 2048),
    ("hybridep", 4 * (2048 + 768), 4 * (2048 + 2 * 768)),
])  # fmt: skip
def test_passes_around_narrow_experts_by_hand(dispatcher: str, forward: float, backward: float) -> None:
    plain = Switches.model_validate({"dispatcher": dispatcher})
    fused = plain.model_copy(update={"cuda_graph": "full_iteration"})
    ahead, back = (
        one - other
        for one, other in zip(around_products(MOE, "fp8", plain), around_products(MOE, "fp8", fused), strict=True)
    )
    pairs = 4096 * 8
    assert ahead == pytest.approx(float(stream_s(H100, pairs * forward)))
    assert back == pytest.approx(float(stream_s(H100, pairs * backward)))
    assert around_products(MOE, "bf16", plain) == around_products(MOE, "bf16", fused)


def test_biases_of_experts_are_weighed_in_fp32_by_hand() -> None:
    """b p written (4), added (2 + 4, 4), joined (4, 4), made narrow (4, 2): 28 bytes of 2,880 values of a pair."""
    biased = load_architecture("gpt-oss-120b")
    assert biased.experts is not None
    bare = biased.model_copy(update={"experts": biased.experts.model_copy(update={"bias": False})})
    ahead, back = (
        one - other
        for one, other in zip(
            around_products(biased, "bf16", Switches()), around_products(bare, "bf16", Switches()), strict=True
        )
    )
    assert ahead == pytest.approx(float(stream_s(H100, 4096 * 4 * 28 * 2880)))
    assert back / ahead == pytest.approx(40.0 / 28.0)
