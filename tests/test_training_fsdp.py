"""What `fully_shard` and PyTorch's checkpoints add to an update or spare it, counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from rlperf.cost.batching import Microbatches
from rlperf.cost.collectives import all_gather_s, all_reduce_s, reduce_scatter_s
from rlperf.cost.roofline import gemm_s, stream_s
from rlperf.cost.trainer.parallel import shard_traffic
from rlperf.cost.trainer.parameters import stage_parameters
from rlperf.cost.trainer.scoring import scoring_pass
from rlperf.cost.trainer.update import TrainingCost, training_update
from rlperf.cost.trainer_device import UpdateOptions
from rlperf.layout import Layout
from rlperf.specs.hardware import Hardware, load_hardware
from rlperf.specs.profiles import load_architecture
from rlperf.specs.trainer_calibration import TrainerCalibration, load_trainer
from rlperf.specs.trainer_switches import Switches

TOKENS = 8192.0
BATCH = Microbatches.of(TOKENS, TOKENS**2, TOKENS, 2.0)
ONE, SHARDED = Layout.of(zero_stage=3), Layout.of(zero_stage=3, data_parallel=8)
FULL = Layout.of(zero_stage=3, activation_recompute=2)


@pytest.fixture(scope="module")
def h100() -> Hardware:
    return load_hardware("h100_sxm")


def backend(name: str = "fsdp2", **timing: object) -> TrainerCalibration:
    trainer = load_trainer(name)
    return trainer.model_copy(update={"timing": trainer.timing.model_copy(update=timing)})


def update(
    h100: Hardware, trainer: TrainerCalibration, layout: Layout, model: str = "Qwen3-4B", **settings: object
) -> TrainingCost:
    return training_update(load_architecture(model), h100, trainer, layout, BATCH, UpdateOptions(**settings))  # type: ignore[arg-type]


def test_copies_of_the_sharded_buffers_hold_up_the_compute_stream(h100: Hardware) -> None:
    arch = load_architecture("Qwen3-4B")
    stage = stage_parameters(arch, SHARDED)
    each = arch.layers * float(stage.layer_dense)
    tables = float(stage.embedding + stage.head)
    plain, copying = backend(unpack_bytes=0.0, pack_bytes=0.0), backend(unpack_bytes=4.0, pack_bytes=6.0)
    added = update(h100, copying, SHARDED).exposed_dp_s - update(h100, plain, SHARDED).exposed_dp_s
    # two microbatches; layers are gathered twice, the tables once
    expected = 2.0 * float(stream_s(h100, 4.0 * (2.0 * each + tables) + 6.0 * (each + tables)))
    assert float(added) == pytest.approx(expected)
    scored = [scoring_pass(arch, h100, t, SHARDED, BATCH).exposed_dp_s for t in (plain, copying)]
    assert float(scored[1] - scored[0]) == pytest.approx(2.0 * float(stream_s(h100, 4.0 * (each + tables))))


def test_whole_gradients_are_reduced_once_an_update(h100: Hardware) -> None:
    """Of two microbatches one reduction is left, which hides under a backward as far as the backend's traffic does."""
    whole, plain = (update(h100, backend(), SHARDED, whole_gradients=on) for on in (True, False))
    assert float(whole.exposed_dp_s) < float(plain.exposed_dp_s)
    saved = float(plain.total_s - whole.total_s)
    arch, stage = load_architecture("Qwen3-4B"), stage_parameters(load_architecture("Qwen3-4B"), SHARDED)
    held = arch.layers * stage.layer_dense + stage.embedding + stage.head
    once = float(shard_traffic(h100, backend(), SHARDED, held, np.zeros(()), np.ones(())).scatter)
    assert 0.0 < saved < 2.0 * once
    one = [update(h100, backend(), ONE, whole_gradients=on).total_s for on in (True, False)]
    assert float(one[0]) == float(one[1])


def test_what_is_not_resharded_after_forward_is_gathered_in_every_microbatch_all_the_same(h100: Hardware) -> None:
    """FSDP's ZeRO 2 spares the backward's gather, one a layer and microbatch; a pass without backward gathers once."""
    trainer = backend(shard_overlap=0.0, contention=0.0, unpack_bytes=0.0, pack_bytes=0.0)
    arch, kept = load_architecture("Qwen3-4B"), SHARDED.with_(zero_stage=2)
    stage = stage_parameters(arch, SHARDED)
    gathers = [
        float(shard_traffic(h100, trainer, SHARDED, np.asarray(size), np.zeros(()), np.zeros(())).gather)
        for size in (stage.layer_dense, stage.embedding + stage.head)
    ]
    both = [update(h100, trainer, layout).exposed_dp_s for layout in (SHARDED, kept)]
    assert float(both[0] - both[1]) == pytest.approx(2.0 * arch.layers * gathers[0])  # of two microbatches
    scored = [float(scoring_pass(arch, h100, trainer, layout, BATCH).exposed_dp_s) for layout in (SHARDED, kept)]
    assert scored[0] == pytest.approx(2.0 * scored[1]) and scored[1] > arch.layers * gathers[0] + gathers[1]


def test_one_device_and_lower_stages_copy_nothing(h100: Hardware) -> None:
    for layout in (ONE, Layout.of(zero_stage=1, data_parallel=8)):
        traffic = shard_traffic(h100, backend(), layout, np.asarray(1e9), np.asarray(0.0), np.ones(()))
        assert [float(part) for part in (traffic.gather, traffic.scatter, traffic.unpack, traffic.pack)] == [0.0] * 4


def test_frozen_weights_are_unpacked_but_have_no_gradients_to_pack(h100: Hardware) -> None:
    traffic = shard_traffic(h100, backend(), SHARDED, np.asarray(1e9), np.asarray(0.0), np.zeros(()))
    assert float(traffic.unpack) == pytest.approx(float(stream_s(h100, 4e9)))
    assert float(traffic.pack) == 0.0


def test_recompute_stops_before_the_down_projection(h100: Hardware) -> None:
    arch = load_architecture("Qwen3-4B")
    whole = update(h100, backend(recompute_stops_early=False), FULL)
    early = update(h100, backend(recompute_stops_early=True), FULL)
    assert float(whole.recompute_s) == pytest.approx(float(whole.forward_s), rel=0.2)  # the head is not repeated
    rate = load_trainer("fsdp2").generation(h100.device).sustained
    down = gemm_s(h100, np.asarray(TOKENS), np.asarray(float(arch.hidden)), np.asarray(float(arch.ffn_hidden)))
    spared = 2.0 * arch.layers * float(down) / rate
    assert float(whole.recompute_s - early.recompute_s) == pytest.approx(spared)
    assert 0.1 < spared / float(whole.recompute_s) < 0.35
    assert float(whole.forward_s) == float(early.forward_s)


def test_recompute_that_stops_early_spares_the_way_back(h100: Hardware) -> None:
    experts = Layout.of(zero_stage=3, activation_recompute=2, data_parallel=8, expert_parallel=8)
    split = Layout.of(zero_stage=3, activation_recompute=2, tensor_parallel=2)
    whole, early = backend(recompute_stops_early=False), backend(recompute_stops_early=True)
    tokens = [float(update(h100, t, experts, "Qwen3-30B-A3B").exposed_ep_s) for t in (whole, early)]
    # to the experts and back: forward, again, backward; the second way back is spared
    assert tokens[1] / tokens[0] == pytest.approx(5.0 / 6.0)
    reduced = [float(update(h100, t, split).exposed_tp_s) for t in (whole, early)]
    # two all-reduces each in forward, again and backward; that after the down projection is spared once
    assert reduced[1] / reduced[0] == pytest.approx(5.0 / 6.0)


def test_loops_over_experts_burden_the_older_stack_alone(h100: Hardware) -> None:
    b200 = load_hardware("b200_sxm")
    arch = load_architecture("Qwen3-30B-A3B")
    slow = backend()
    quick = slow.model_copy(
        update={"generations": tuple(entry.model_copy(update={"moe_layer": 0.0}) for entry in slow.generations)}
    )
    seconds = {
        (stack, kernel): float(
            training_update(arch, b200, trainer, ONE, BATCH, UpdateOptions(attention_kernel=kernel)).total_s
        )
        for stack, trainer in (("slow", slow), ("quick", quick))
        for kernel in ("flash", "flash2")
    }
    assert seconds["slow", "flash"] == seconds["quick", "flash"]
    added = 2.0 * arch.layers * slow.generation(b200.device).moe_layer
    assert seconds["slow", "flash2"] - seconds["quick", "flash2"] == pytest.approx(added)


def test_adapters_cost_once_per_update_not_once_per_microbatch(h100: Hardware) -> None:
    arch = load_architecture("Qwen2.5-7B")
    few, many = (
        training_update(
            arch, h100, backend(), FULL, Microbatches.of(n, n * 1024, 1024.0, 65536.0 / n), UpdateOptions(lora_rank=32)
        )
        for n in (16384.0, 1024.0)
    )
    assert float(many.total_s / few.total_s) < 1.15
    free = backend(lora_update=0.0)
    plain = update(h100, free, FULL, lora_rank=32)
    added = update(h100, backend(lora_update=0.3), FULL, lora_rank=32).total_s - plain.total_s
    assert float(added) == pytest.approx(0.3)
    assert float(update(h100, backend(lora_update=0.3), FULL).total_s) == float(update(h100, free, FULL).total_s)


def test_a_chunked_loss_projects_again_and_moves_its_own_bytes(h100: Hardware) -> None:
    arch = load_architecture("Qwen3-4B")
    trainer = backend(cross_entropy_bytes=60.0, chunked_bytes=130.0)
    plain, chunked = update(h100, trainer, ONE), update(h100, trainer, ONE, chunked_loss=True)
    rate = trainer.generation(h100.device).sustained
    vocabulary = np.asarray(float(arch.vocab))
    again = float(gemm_s(h100, np.asarray(TOKENS), vocabulary, np.asarray(float(arch.hidden)))) / rate
    moved = float(stream_s(h100, TOKENS * arch.vocab * 70.0))
    assert float(chunked.total_s - plain.total_s) == pytest.approx(2.0 * (again + moved))


def test_matrices_that_fetch_their_own_inputs_cost_a_gather_each(h100: Hardware) -> None:
    """As CommDebugMode counts a layer's collectives: 5 gathers and 2 reduce-scatters forward, 2 and 2 backward."""
    arch = load_architecture("Llama-3.1-70B")
    each = backend().model_copy(update={"switches": Switches(gathers_once=False, tensor_overlap=False)})
    once = backend().model_copy(update={"switches": Switches(tensor_overlap=False)})
    size, tp = np.asarray(2.0 * TOKENS * arch.hidden), np.asarray(8.0)
    gather, scatter, reduce = (f(h100, size, tp, tp) for f in (all_gather_s, reduce_scatter_s, all_reduce_s))
    split = Layout.of(zero_stage=3, tensor_parallel=8, sequence_parallel=1)
    whole = Layout.of(zero_stage=3, tensor_parallel=8)
    again = Layout.of(zero_stage=3, tensor_parallel=8, sequence_parallel=1, activation_recompute=2)

    def traffic(trainer: TrainerCalibration, layout: Layout) -> float:
        return float(update(h100, trainer, layout, "Llama-3.1-70B").exposed_tp_s) / 2.0 / arch.layers

    assert traffic(once, split) == pytest.approx(float(6.0 * gather + 4.0 * scatter))
    assert traffic(each, split) == pytest.approx(float(7.0 * gather + 4.0 * scatter))
    assert traffic(once, whole) == pytest.approx(float(4.0 * reduce))
    assert traffic(each, whole) == pytest.approx(float(7.0 * reduce))
    # the last reduce-scatter is not repeated
    assert traffic(each, again) == pytest.approx(float(12.0 * gather + 5.0 * scatter))
    scored = [scoring_pass(arch, h100, t, split, BATCH).exposed_tp_s / 2.0 / arch.layers for t in (once, each)]
    assert [float(s) for s in scored] == pytest.approx([float(n * gather + 2.0 * scatter) for n in (2.0, 5.0)])


def test_the_policy_is_scored_with_its_adapters() -> None:
    """They stay beside their matrices, as in a forward of training; a reference is the policy without them."""
    model, hardware, trainer = load_architecture("Qwen3-8B"), load_hardware("h100_sxm"), load_trainer("fsdp2")
    layout, held = Layout.of(data_parallel=8, zero_stage=3), Microbatches.of(32768.0, 32768.0 * 4096, 4096.0, 1.0)

    def seconds(**options: object) -> float:
        return float(scoring_pass(model, hardware, trainer, layout, held, UpdateOptions(**options)).forward_s)

    plain, policy = seconds(), seconds(lora_rank=32)
    update = training_update(model, hardware, trainer, layout, held, UpdateOptions(lora_rank=32))
    bare = training_update(model, hardware, trainer, layout, held, UpdateOptions())
    assert policy - plain == pytest.approx(float(update.forward_s - bare.forward_s), rel=1e-9)
    assert policy - plain > 0.1 * plain
    assert seconds(lora_rank=32, adapted=0.0) == pytest.approx(plain, rel=1e-12)


def test_shares_of_the_head_are_told_apart_row_by_row() -> None:
    """Rows that ask the same are costed once: the head's share is part of what they ask."""
    model, hardware, trainer = load_architecture("Qwen3-8B"), load_hardware("h100_sxm"), load_trainer("fsdp2")
    share = np.linspace(0.1, 1.0, 128)
    layout = Layout.of(data_parallel=np.full(128, 8), zero_stage=3)
    held = Microbatches.of(np.full(128, 32768.0), np.full(128, 32768.0 * 4096), np.full(128, 4096.0), np.ones(128))
    all_rows = scoring_pass(model, hardware, trainer, layout, held, UpdateOptions(head_share=share)).forward_s
    one, alone = Layout.of(data_parallel=8, zero_stage=3), Microbatches.of(32768.0, 32768.0 * 4096, 4096.0, 1.0)
    one_by_one = [
        float(scoring_pass(model, hardware, trainer, one, alone, UpdateOptions(head_share=each)).forward_s)
        for each in (share[0], share[-1])
    ]
    assert all_rows[[0, -1]] == pytest.approx(one_by_one, rel=1e-9)
