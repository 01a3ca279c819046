"""Switches of a training stack: what a row says of them, and what they are worth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlperf.calibrate.row_switches import of_note, of_recipe, recomputed
from rlperf.cost.batching import Microbatches
from rlperf.cost.trainer_device import UpdateOptions
from rlperf.cost.training import TrainingCost, training_update
from rlperf.layout import RECOMPUTE, Layout
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
    ("CUDA graph: full_iteration; dispatcher: hybridep", {"cuda_graph": "full_iteration", "dispatcher": "deepep"}),
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
    assert float(norms.recompute_s) == 0.0 < float(attention.recompute_s)
    assert float(experts.exposed_ep_s) > float(attention.exposed_ep_s)


def test_eager_passes_and_scaled_rows_cost_more() -> None:
    layout, fsdp2 = Layout.of(data_parallel=8, zero_stage=3), load_trainer("fsdp2")
    fused, eager = (
        float(cost(layout, Switches(fused=on), architecture="dense", trainer=fsdp2).total_s) for on in (True, False)
    )
    assert eager > fused
    whole, rows = (
        float(cost(layout, Switches(rowwise=on), architecture="dense", trainer=fsdp2, dtype="fp8").total_s)
        for on in (False, True)
    )
    assert rows >= whole
