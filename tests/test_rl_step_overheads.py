"""What a framework adds around its trainer: the swap with the reference, an optimizer that takes tensors singly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlperf.cost.batching import Microbatches
from rlperf.cost.engine_step import EngineStepCost
from rlperf.cost.parameters import parameters
from rlperf.cost.trainer.scoring import scoring_pass
from rlperf.cost.trainer.update import training_update
from rlperf.layout import Layout
from rlperf.sim.rl_step.overheads import (
    adapter_seconds,
    engine_in_framework,
    reference_swap_s,
    scoring_in_framework_s,
    trainer_in_framework,
)
from rlperf.specs.engine_calibration import load_engine_calibration
from rlperf.specs.hardware import load_hardware
from rlperf.specs.profiles import load_architecture
from rlperf.specs.rl_calibration import FrameworkCalibration, load_framework_calibration
from rlperf.specs.trainer_calibration import load_trainer

MEGATRON, DTENSOR = load_framework_calibration("nemo_rl_megatron"), load_framework_calibration("nemo_rl_dtensor")
DENSE, EXPERTS = load_architecture("Llama-3.1-8B"), load_architecture("Qwen3-30B-A3B")
BATCH = Microbatches.of(4096.0, 4096.0**2, 4096.0, 4.0)


def of_its_backend(framework: FrameworkCalibration) -> FrameworkCalibration:
    """The framework with the loss of its trainer backend."""
    return framework.model_copy(update={"training": framework.training.model_copy(update={"loss": None})})


def test_what_a_framework_adds_a_request_is_shared_by_the_schedulers_of_a_replica() -> None:
    cost = EngineStepCost(np.array([0.0]), np.zeros(1))
    alone, shared = (engine_in_framework(cost, MEGATRON, (0.0, 1e-6), ranks) for ranks in (1.0, 8.0))
    assert shared.host_per_request_s == pytest.approx(alone.host_per_request_s / 8.0) and alone.host_s == shared.host_s


def test_adapters_served_unmerged_cost_every_product_of_an_engine_step_and_merged_ones_nothing() -> None:
    small, engine = load_architecture("Qwen2.5-0.5B"), load_engine_calibration("vllm")
    assert engine.eager_call is not None
    eager = engine.model_copy(update={"cuda_graphs": False})
    verl = load_framework_calibration("verl_fsdp")
    served = verl.adapters
    assert served is not None
    # q, k and v are one product, and so are gate and up
    assert adapter_seconds(verl, small, engine) == pytest.approx((24 * 4 * served.graph.value, 0.0))
    expected = (24 * 4 * served.launches * engine.eager_call, 24 * 4 * served.eager_row.value)
    assert adapter_seconds(verl, small, eager) == pytest.approx(expected)
    assert adapter_seconds(load_framework_calibration("trl"), small, eager) == (0.0, 0.0)


def test_model_code_that_is_launched_eagerly_holds_up_small_microbatches_alone() -> None:
    verl, layout = load_framework_calibration("verl_fsdp"), Layout.of(data_parallel=8, zero_stage=3)
    small, hardware = load_architecture("Qwen2.5-0.5B"), load_hardware("h100_sxm")
    assert verl.training.host_layer is not None
    stack = trainer_in_framework(load_trainer("fsdp2"), of_its_backend(verl))
    seconds = {}
    for tokens in (512.0, 65536.0):
        batch = Microbatches.of(tokens, tokens * 512.0, 512.0, 1.0)
        seconds[tokens] = [
            float(training_update(small, hardware, trainer, layout, batch).total_s)
            for trainer in (load_trainer("fsdp2"), stack)
        ]
    assert seconds[65536.0][1] == pytest.approx(seconds[65536.0][0], rel=0.01)
    # three forwards' worth of launches in 24 layers, of which the device hides what it does itself
    launched = 3 * small.layers * verl.training.host_layer.value
    assert seconds[512.0][1] - seconds[512.0][0] == pytest.approx(launched, rel=0.5)


def test_experts_of_megatron_are_launched_one_by_one_so_that_more_of_them_on_a_device_hold_it_up() -> None:
    slime, hardware = load_framework_calibration("slime"), load_hardware("h100_sxm")
    own, stack = load_trainer("megatron"), trainer_in_framework(load_trainer("megatron"), of_its_backend(slime))
    alike = load_trainer("megatron_bridge").timing

    def seconds(expert: int, tokens: float, architecture: str = "Qwen3-30B-A3B") -> float:
        batch = Microbatches.of(tokens, tokens * 512.0, 512.0, 1.0)
        layout = Layout.of(data_parallel=64, expert_parallel=expert, zero_stage=1)
        arch = load_architecture(architecture)
        return float(
            training_update(arch, hardware, stack, layout, batch).total_s
            - training_update(arch, hardware, own, layout, batch).total_s
        )

    # 60 more experts of a device, in 16 bits: what the host launches, and the gaps between their kernels after it
    more = 48 * 60 * 3.0 * alike.host_expert * alike.wide_expert
    assert seconds(2, 64.0) - seconds(32, 64.0) == pytest.approx(more, rel=0.5)
    assert seconds(8, 64.0, "Llama-3.1-8B") == pytest.approx(0.0, abs=1e-6)


def test_three_copies_of_what_a_device_holds() -> None:
    rate = MEGATRON.training.reference_rate
    assert rate is not None
    whole = float(reference_swap_s(MEGATRON, DENSE, Layout.of(data_parallel=8, zero_stage=1)))
    assert whole == pytest.approx(3.0 * 2.0 * parameters(DENSE) / rate.value, rel=1e-3)
    shard = float(reference_swap_s(DTENSOR, DENSE, Layout.of(data_parallel=8, zero_stage=3)))
    assert shard == pytest.approx(whole * 2.0 / 8.0, rel=1e-3)  # an eighth, in fp32


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 8]))
@settings(max_examples=30, deadline=None)
def test_every_degree_that_splits_weights_shortens_the_swap(tensor: int, pipeline: int, expert: int) -> None:
    def swap(t: int, p: int, e: int) -> float:
        layout = Layout.of(tensor_parallel=t, pipeline_parallel=p, expert_parallel=e, data_parallel=8, zero_stage=1)
        return float(reference_swap_s(MEGATRON, EXPERTS, layout))

    here = swap(tensor, pipeline, expert)
    assert here > swap(2 * tensor, pipeline, expert)
    assert here > swap(tensor, 2 * pipeline, expert)
    assert here > swap(tensor, pipeline, 2 * expert)


def test_only_passes_of_the_reference_pay_and_a_model_of_its_own_is_free() -> None:
    layout = Layout.of(data_parallel=np.array([8, 8]), zero_stage=1)
    none, half, whole = (
        scoring_in_framework_s(MEGATRON, DENSE, layout, BATCH, 1.0, reference=share) for share in (0.0, 0.5, 1.0)
    )
    assert whole - half == pytest.approx(half - none)
    assert whole - none == pytest.approx(reference_swap_s(MEGATRON, DENSE, layout))
    verl = load_framework_calibration("verl_megatron")
    assert not np.any(reference_swap_s(verl, DENSE, layout))


def test_plain_all_to_all_costs_more_where_experts_lie_on_several_nodes() -> None:
    backend, hw = load_trainer("megatron"), load_hardware("h100_sxm")
    own = backend.switches.model_copy(update={"gathers_once": False})  # all that it states; else the backend's own
    assert trainer_in_framework(backend, DTENSOR) == backend.model_copy(update={"switches": own})

    def seconds(dispatcher: str, expert: int) -> float:
        switches = backend.switches.model_copy(update={"dispatcher": dispatcher})
        layout = Layout.of(data_parallel=64, expert_parallel=expert, zero_stage=1)
        trainer = backend.model_copy(update={"switches": switches})
        return float(training_update(EXPERTS, hw, trainer, layout, BATCH).total_s)

    alone, inside, across = (seconds("alltoall", expert) / seconds("deepep", expert) for expert in (1, 8, 32))
    assert alone == 1.0 < inside < 1.1 < across


def test_gradients_that_no_product_adds_are_read_and_written_once_a_microbatch() -> None:
    backend = load_trainer("megatron")
    plain = trainer_in_framework(backend, MEGATRON)
    assert (plain.storage.gradient, plain.storage.reduce, plain.timing.accumulate_bytes) == (2.0, 2.0, 6.0)
    fused = plain.model_copy(update={"timing": plain.timing.model_copy(update={"accumulate_bytes": 0.0})})
    hw, layout = load_hardware("h100_sxm"), Layout.of(data_parallel=8, zero_stage=1)
    whole, bare = (float(training_update(DENSE, hw, one, layout, BATCH).backward_s) for one in (plain, fused))
    least = 4.0 * 6.0 * parameters(DENSE) / hw.device.memory_bandwidth
    assert least < whole - bare < 1.3 * least


def test_the_loss_moves_what_its_source_says() -> None:
    """Of a small model with a large vocabulary the loss of an RL framework is a good part of a scoring pass."""
    backend, verl = load_trainer("megatron"), load_framework_calibration("verl_megatron")
    own = verl.training.loss
    assert own is not None
    timing = trainer_in_framework(backend, verl).timing
    assert (timing.cross_entropy_bytes, timing.scoring_bytes) == (own.update, own.scoring)
    assert timing.cross_entropy_bytes > backend.timing.cross_entropy_bytes
    small, hardware, layout = load_architecture("Qwen2.5-0.5B"), load_hardware("h100_sxm"), Layout.of(data_parallel=8)
    moved = {"fused": backend, "framework": trainer_in_framework(backend, verl)}
    seconds = {name: scoring_pass(small, hardware, one, layout, BATCH).forward_s for name, one in moved.items()}
    logits = float(BATCH.tokens * BATCH.count) * small.vocab
    wanted = logits * (own.scoring - 0.5 * backend.timing.cross_entropy_bytes) / hardware.device.memory_bandwidth
    assert seconds["framework"] - seconds["fused"] == pytest.approx(wanted, rel=0.3)
