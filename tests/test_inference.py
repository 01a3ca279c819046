"""Engine_steps, closed loops and engine memory."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlperf.cost import inference as inf
from rlperf.cost import serving
from rlperf.cost.basis import ServedLoad, serving_basis
from rlperf.cost.collectives import all_reduce_s
from rlperf.cost.engine_memory import engine_limits, engine_memory, max_running, weight_bytes
from rlperf.cost.engine_step import EngineStepCost
from rlperf.cost.layers import KINDS
from rlperf.cost.operators import decode_operators, head_operators, token_operators
from rlperf.cost.replica import BEST_BANDWIDTH, Replica, in_engine, roles_of, total
from rlperf.cost.serving import Load
from rlperf.errors import SpecError
from rlperf.layout import Layout
from rlperf.specs.calibration_files import calibration_names
from rlperf.specs.engine_calibration import EngineCalibration, load_engine_calibration
from rlperf.specs.hardware import Hardware, load_hardware
from rlperf.specs.profiles import load_architecture

H100 = load_hardware("h100_sxm", "dgx_h100")
H200 = load_hardware("h200_sxm")
B200 = load_hardware("b200_sxm")
VLLM = load_engine_calibration("vllm")
QWEN = load_architecture("Qwen2.5-7B")
ARCHITECTURES = ["Qwen2.5-7B", "Mixtral-8x7B", "DeepSeek-V3", "gpt-oss-20b", "Qwen3.5-35B-A3B", "Mistral-7B-v0.1"]


def step(arch: str, layout: Layout, running: object, kv: object, **settings: str) -> np.ndarray:
    replica = Replica.of(load_architecture(arch), H100, VLLM, layout, **settings)
    return inf.decode_step_s(replica, running, kv)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_breakdown_adds_up_and_never_beats_light(name: str) -> None:
    arch = load_architecture(name)
    layout = Layout.of(tensor_parallel=8)
    rows = inf.decode_breakdown(Replica.of(arch, H100, VLLM, layout), 32, 32 * 4096)
    whole = float(inf.decode_step_s(Replica.of(arch, H100, VLLM, layout), 32, 32 * 4096))
    assert sum(row.seconds for row in rows) == pytest.approx(whole, rel=1e-9)
    assert sum(row.share for row in rows) == pytest.approx(1.0)
    assert all(0.0 <= row.percent_of_light <= 100.0 for row in rows)
    assert {row.bound for row in rows} <= {"compute", "bandwidth", "latency", "network"}


def test_decode_of_a_dense_model_reads_its_weights() -> None:
    # 7.6e9 parameters in bf16, the input embedding (0.545e9) is looked up, not read: 14.1 GB at 3.35 TB/s = 4.2 ms
    seconds = float(step("Qwen2.5-7B", Layout.of(), 1, 1024))
    assert 4.2e-3 < seconds < 1.6 * 4.2e-3


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_more_requests_and_longer_contexts_take_longer(name: str) -> None:
    layout = Layout.of(tensor_parallel=8)
    running = np.array([1.0, 8.0, 64.0, 256.0])
    seconds = step(name, layout, running, running * 2048)
    assert (np.diff(seconds) > 0).all()
    longer = step(name, layout, running, running * 32768)
    assert (longer >= seconds).all()


def test_layout_axes_broadcast_and_equal_scalars() -> None:
    tensors, pipelines = np.ix_([1, 2, 4, 8], [1, 2])
    grid = Layout.of(tensor_parallel=tensors, pipeline_parallel=pipelines)
    running = np.array([4.0, 64.0])
    for index, tensor in enumerate((1, 2, 4, 8)):
        one = step("Qwen2.5-7B", Layout.of(tensor_parallel=tensor, pipeline_parallel=2), 64, 64 * 1000)
        assert float(step("Qwen2.5-7B", grid, 64, 64 * 1000)[index, 1]) == pytest.approx(float(one), rel=1e-12)
    assert step("Qwen2.5-7B", Layout.of(), running, running * 100).shape == (2,)


def test_pipeline_works_on_microbatches() -> None:
    deep = float(step("Qwen2.5-7B", Layout.of(pipeline_parallel=4), 256, 256 * 1000))
    flat = float(step("Qwen2.5-7B", Layout.of(), 256, 256 * 1000))
    small = float(step("Qwen2.5-7B", Layout.of(), 64, 64 * 1000))
    assert small * 0.95 < deep < flat  # each stage reads its weights for a quarter of the batch at a time


def test_attention_data_parallel_copies_attention_and_splits_requests() -> None:
    arch = load_architecture("DeepSeek-V3")
    tensor = Replica.of(arch, H200, VLLM, Layout.of(tensor_parallel=8, expert_parallel=8), "fp8")
    copies = Replica.of(
        arch, H200, VLLM, Layout.of(tensor_parallel=8, expert_parallel=8, attention_data_parallel=8), "fp8"
    )
    assert float(copies.heads(arch)) == 128.0 and float(tensor.heads(arch)) == 16.0
    many = 1024.0
    kv = many * 16384.0
    assert float(total(decode_operators(copies, many, kv))) < float(total(decode_operators(tensor, many, kv)))
    exchange = [one for one in token_operators(copies, 256, 256) if one.name == "expert exchange"]
    assert float(exchange[0].seconds) > 0.0
    # tokens travel as the experts read them (fp8 with a scale per 128 values here) and come back in 16 bits
    wide = Replica.of(
        arch, H200, VLLM, Layout.of(tensor_parallel=8, expert_parallel=8, attention_data_parallel=8), "bf16"
    )
    bf16 = [one for one in token_operators(wide, 256, 256) if one.name == "expert exchange"]
    assert float(exchange[0].network_s / bf16[0].network_s) == pytest.approx((1.0 + 1.0 / 32.0 + 2.0) / 4.0)


def test_copies_of_the_attention_have_the_table_of_tokens_and_unless_rows_are_gathered_the_output_head() -> None:
    """vLLM's copies are engines of their own; SGLang splits the head over all devices, which see all rows."""
    arch, sglang = load_architecture("DeepSeek-V3"), load_engine_calibration("sglang")
    table = arch.vocab * arch.hidden * 2.0

    def replica(engine: EngineCalibration, copies: int) -> Replica:
        layout = Layout.of(tensor_parallel=8, expert_parallel=8, attention_data_parallel=copies)
        return Replica.of(arch, H200, engine, layout, "fp8")

    def ends(engine: EngineCalibration, copies: int) -> float:
        lean = arch.model_copy(update={"vocab": 0})
        one = replica(engine, copies)
        return float(weight_bytes(one) - weight_bytes(replace(one, arch=lean)))

    assert [ends(engine, 1) for engine in (VLLM, sglang)] == pytest.approx([2.0 * table / 8.0] * 2)
    assert ends(VLLM, 8) == pytest.approx(2.0 * table)
    assert ends(sglang, 8) == pytest.approx(table + table / 8.0)
    # every copy reads its head for its share of the rows; one that all share is read once
    read = {engine.engine: float(head_operators(replica(engine, 8), 64.0)[0].memory_s) for engine in (VLLM, sglang)}
    assert 6.0 < read["vllm"] / read["sglang"] < 8.0


def test_norms_over_all_heads_are_summed_over_the_devices_that_share_them() -> None:
    arch = load_architecture("MiniMax-M2.5")
    apart = arch.model_copy(update={"qk_norm_whole": False})
    more = KINDS["full"](arch).parameters - KINDS["full"](apart).parameters
    assert arch.qk_norm_whole and more == (48 + 8 - 2) * 128
    for tensor, extra in ((1, 0.0), (8, 1.0)):
        one, two = (
            float(total(token_operators(Replica.of(a, H200, VLLM, Layout.of(tensor_parallel=tensor)), 16.0, 16.0)))
            for a in (arch, apart)
        )
        small = float(all_reduce_s(H200, 16.0 * 8.0, tensor, tensor, implementation=VLLM.all_reduce))
        assert one - two == pytest.approx(62 * small * extra, abs=1e-12)
    assert small > 3e-6


@pytest.mark.parametrize("tensor", [1, 4])
def test_a_norm_inside_an_all_reduce_is_not_launched(tensor: int) -> None:
    """Blackwell's all-reduces of vLLM have the norm behind them, Hopper's since 0.17; Llama has as many of both."""
    arch, layout = load_architecture("Llama-3.1-8B"), Layout.of(tensor_parallel=tensor)
    apart = VLLM.model_copy(update={"fused_norms": ()})

    def norms(engine: EngineCalibration, hw: Hardware = B200, tokens: float = 16.0) -> float:
        rows = token_operators(Replica.of(arch, hw, engine, layout), tokens, 16.0)
        return float(next(row.seconds for row in rows if row.name == "norm"))

    stream, hidden = B200.calibration.stream, 16 * arch.hidden
    spared = stream.small_fixed + 4.0 * hidden / (B200.device.memory_bandwidth * stream.small_memory)
    assert norms(apart) - norms(VLLM) == pytest.approx(2 * arch.layers * spared if tensor > 1 else 0.0)
    assert norms(apart, H200) == norms(VLLM, H200)
    before, since = (load_engine_calibration("vllm", release) for release in ("0.16.0", "0.19.1"))
    assert norms(before, H200) == norms(apart, H200)
    assert norms(since, H200) < norms(apart, H200) if tensor > 1 else norms(since, H200) == norms(apart, H200)
    # four H200 have it up to 2 MiB: 256 tokens of 4,096 values of 16 bits
    assert norms(since, H200, 512.0) == norms(apart, H200, 512.0)


def test_quantised_checkpoints_quantise_what_they_do() -> None:
    moe, dense = load_architecture("gpt-oss-120b"), load_architecture("Llama-3.1-70B")
    assert roles_of(moe, H100, "mxfp4").expert == "mxfp4" and roles_of(moe, H100, "mxfp4").projection == "bf16"
    assert roles_of(moe, B200, "mxfp4").expert == "w4a8_mxfp4"
    assert roles_of(dense, B200, "nvfp4").projection == "nvfp4" and roles_of(dense, B200, "nvfp4").head == "bf16"
    assert roles_of(load_architecture("DeepSeek-V3"), H200, "fp8").expert == "fp8_block"
    glm = roles_of(load_architecture("GLM-5"), H200, "fp8")  # weight_block_size of zai-org/GLM-5-FP8
    assert {glm.projection, glm.dense, glm.expert, glm.output} == {"fp8_block"}


def test_four_bit_checkpoints_leave_what_their_publishers_leave() -> None:
    """Lists of excluded modules: DeepSeek-V3.2-NVFP4, Kimi-K2.5-NVFP4, GLM-5.2-NVFP4, DeepSeek-V4-Flash-NVFP4."""
    found = {
        name: roles_of(load_architecture(name), B200, "nvfp4")
        for name in ("DeepSeek-V3.2", "Kimi-K2.5", "GLM-5.2", "DeepSeek-V4-Flash", "Qwen3-30B-A3B")
    }
    assert {name: (each.projection, each.dense, each.output) for name, each in found.items()} == {
        "DeepSeek-V3.2": ("bf16", "nvfp4", "nvfp4"),
        "Kimi-K2.5": ("bf16", "nvfp4", "bf16"),
        "GLM-5.2": ("bf16", "bf16", "bf16"),
        "DeepSeek-V4-Flash": ("fp8_block", "fp8_block", "fp8_block"),
        "Qwen3-30B-A3B": ("bf16", "bf16", "bf16"),
    }
    assert {each.expert for each in found.values()} == {"nvfp4"}
    assert roles_of(load_architecture("Kimi-K2.5"), H200, "int4_wo").dense == "bf16"
    v4 = roles_of(load_architecture("DeepSeek-V4-Pro"), H200, "mxfp4")
    assert (v4.projection, v4.expert) == ("fp8_block", "mxfp4")


def test_what_a_checkpoint_quantises_beside_its_experts_is_lighter_and_no_slower() -> None:
    """DeepSeek-V3: 61 output projections, 3 dense layers, 58 shared experts, 2 to 0.5625 bytes a weight."""
    replica = Replica.of(load_architecture("DeepSeek-V3"), B200, VLLM, Layout.of(tensor_parallel=8), "nvfp4")
    plain = replace(replica, roles=replace(replica.roles, dense="bf16", output="bf16"))
    values = 61 * 128 * 128 * 7168 + 3 * 3 * 7168 * 18432 + 58 * 3 * 7168 * 2048
    saved = float(weight_bytes(plain) - weight_bytes(replica))
    assert saved == pytest.approx(values * (2.0 - 0.5625) / 8, rel=1e-6)
    for running in (64.0, 1024.0):
        assert inf.decode_step_s(replica, running, running * 2048) < inf.decode_step_s(plain, running, running * 2048)


@pytest.mark.parametrize("scale", [0.6, 0.8, 1.0, 1.2])
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_no_factor_on_kernels_reads_the_cache_faster_than_memory(scale: float, kv_dtype: str) -> None:
    engine, arch = inf.with_overhead(VLLM, kernel_scale=scale), load_architecture("Llama-3.1-8B")
    cost = inf.engine_step_cost(Replica.of(arch, H200, engine, Layout.of(), kv_dtype=kv_dtype))
    byte_width = 2.0 if kv_dtype == "bf16" else 1.0
    light = 32 * 2 * 8 * 128 * byte_width / 4.8e12
    assert cost.decode_per_kv_token_s >= 0.999 * light / BEST_BANDWIDTH
    # constants of the kernel stand where the factor leaves it below that, and the table equals the operators
    fit = next(one for one in H200.calibration.decode if one.kv_dtype == kv_dtype)
    expected = max(scale * light / fit.memory, light / BEST_BANDWIDTH)
    assert cost.decode_per_kv_token_s == pytest.approx(expected, rel=0.04)
    exact = float(inf.decode_step_s(Replica.of(arch, H200, engine, Layout.of(), kv_dtype=kv_dtype), 64, 64 * 8192))
    rows = inf.decode_breakdown(Replica.of(arch, H200, engine, Layout.of(), kv_dtype=kv_dtype), 64, 64 * 8192)
    assert sum(row.seconds for row in rows) == pytest.approx(exact, rel=1e-9)
    assert float(cost.decode_s(64, 64 * 8192)) == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tabulated_step_equals_the_operators(name: str) -> None:
    arch, layout = load_architecture(name), Layout.of(tensor_parallel=8)
    cost = inf.engine_step_cost(Replica.of(arch, H100, VLLM, layout), typical_context=4096)
    for running in (1.0, 16.0, 64.0, 200.0):
        exact = float(inf.decode_step_s(Replica.of(arch, H100, VLLM, layout), running, running * 4096))
        assert float(cost.decode_s(running, running * 4096)) == pytest.approx(exact, rel=0.03)
    exact = float(inf.prefill_s(Replica.of(arch, H100, VLLM, layout), 1, 4096))
    assert float(cost.engine_step_s(0, 0, 4096, 4096 * 4097 / 2, 1)) == pytest.approx(exact, rel=0.08)


def test_a_million_decode_steps_a_second() -> None:
    cost = inf.engine_step_cost(Replica.of(QWEN, H100, VLLM, Layout.of()))
    running = np.linspace(1, 500, 20000)
    assert cost.decode_s(running, running * 1000).shape == (20000,)


def test_a_closed_loop_of_one_client_is_a_batch_of_one() -> None:
    cost = inf.engine_step_cost(Replica.of(QWEN, H100, VLLM, Layout.of()), typical_context=2048)
    alone = serving.closed_loop(cost, 1, Load(1024, 2048))
    assert float(alone.tpot_s) == pytest.approx(float(cost.decode_s(1, 2048)), rel=1e-6)
    batch = serving.static_batch(cost, 1, Load(1024, 2048))
    assert float(batch.ttft_s) == pytest.approx(float(alone.ttft_s), rel=1e-9)
    assert float(batch.tpot_s) == pytest.approx(float(alone.tpot_s), rel=1e-6)


def test_load_raises_time_per_token_and_throughput_until_the_cache_is_full() -> None:
    cost = inf.engine_step_cost(Replica.of(QWEN, H100, VLLM, Layout.of()), typical_context=1500)
    clients = np.array([1.0, 8.0, 64.0, 256.0, 512.0])
    served = serving.closed_loop(cost, clients, Load(1000, 1000, max_running=256))
    assert (np.diff(served.tpot_s[:4]) > 0).all() and (np.diff(served.output_tokens_per_s[:4]) > 0).all()
    assert float(served.tpot_s[4]) == pytest.approx(float(served.tpot_s[3]), rel=1e-9)
    assert float(served.ttft_s[4]) > 10.0 * float(served.ttft_s[3])  # the others queue
    apart = serving.closed_loop(cost, 64, Load(1000, 1000, interference=0.0))
    assert float(apart.tpot_s) < float(served.tpot_s[2])


def test_requests_hold_of_a_window_what_they_have() -> None:
    mistral = load_architecture("Mistral-7B-v0.1")  # windows of 4096 tokens in every layer
    keeps = VLLM.model_copy(update={"frees_windows": False})
    short, window, long = (
        [float(max_running(Replica.of(mistral, H100, engine, Layout.of()), isl, 0)) for engine in (VLLM, keeps)]
        for isl in (256, 4096, 32768)
    )
    assert short == [1024.0, 1024.0] and window[0] == window[1] == long[0]
    assert long[1] == pytest.approx(window[1] / 8, abs=1)


def test_a_share_of_what_is_free_is_no_share_of_the_device() -> None:
    free = VLLM.model_copy(update={"fraction_of": "free", "memory_fraction": 0.9})
    of_all, of_free = (engine_memory(Replica.of(QWEN, H100, engine, Layout.of())) for engine in (VLLM, free))
    taken = float(of_all.total_bytes - of_all.kv_cache_bytes)
    assert float(of_free.kv_cache_bytes) == pytest.approx(0.9 * (H100.device.usable_memory - taken))
    assert float(of_free.kv_cache_bytes) > float(of_all.kv_cache_bytes)


def test_sglangs_share_is_of_weights_and_cache() -> None:
    """What is free when it starts, times the share, less the weights: workspace and graphs lie beside it."""
    replica = Replica.of(QWEN, H100, load_engine_calibration("sglang"), Layout.of(tensor_parallel=2))
    vllm = engine_memory(Replica.of(QWEN, H100, VLLM, Layout.of(tensor_parallel=2)), memory_fraction=0.8)
    sglang = engine_memory(replica, memory_fraction=0.8)
    device = H100.device.usable_memory
    static = float(sglang.weights_bytes + sglang.kv_cache_bytes)
    assert static == pytest.approx(0.8 * (device - float(sglang.non_torch_bytes)))
    assert float(vllm.total_bytes) == pytest.approx(0.8 * device)
    beside = float(sglang.activation_bytes + sglang.graphs_bytes + sglang.non_torch_bytes)
    assert float(sglang.total_bytes) == pytest.approx(static + beside)
    assert float(sglang.unbound_bytes) == pytest.approx(beside)
    assert float(vllm.unbound_bytes) == pytest.approx(float(vllm.graphs_bytes + vllm.non_torch_bytes))
    alone = engine_memory(replica)  # told of no share it leaves room for the rest by itself
    assert float(alone.total_bytes) == pytest.approx(replica.engine.memory_fraction * device)


def test_prompts_that_wait_together_share_engine_steps() -> None:
    # one engine_step costs 1 s, a prompt token 1 ms more; decode is free of both kinds of size
    cost = EngineStepCost(tokens=np.array([0.0, 1e4]), linear_s=np.array([0.0, 10.0]), host_s=1.0)
    load = Load(1000, 1001, token_budget=8000, chunked=False)
    alone = serving.closed_loop(cost, 16, load)
    decode = 1.0 + 1e-3 * float(alone.running)
    # 16 / 1000 requests end in an engine_step, so that one with prompts holds one, rarely two
    together = 0.016 / (1.0 - math.exp(-0.016))
    assert float(alone.tpot_s) == pytest.approx(decode + 15 * (1 + together) / together / 1000, rel=1e-6)
    full = serving.closed_loop(cost, 16, load, arriving=100.0)
    # of an open loop all 16: in groups of eight, each an engine_step of 1 s + 8 x 1 s, 16 x 9 / 8 s over 1000 tokens
    assert float(full.tpot_s) == pytest.approx(1.0 + 1e-3 * float(full.running) + 16 * 9 / 8 / 1000, rel=1e-6)
    rare = serving.closed_loop(cost, 16, load, arriving=1e-9)
    assert float(rare.tpot_s) == pytest.approx(1.0 + 1e-3 * float(rare.running), rel=1e-6)
    # mixed with decode, a prompt adds its tokens alone
    mixed = serving.closed_loop(cost, 16, Load(1000, 1001, token_budget=8000))
    assert float(mixed.tpot_s) == pytest.approx(1.0 + 1e-3 * float(mixed.running) + 15 * 1 / 1000, rel=1e-6)
    # a prompt longer than the budget takes several engine_steps of its own
    chunks = serving.closed_loop(cost, 2, Load(16000, 1001, token_budget=8000, chunked=False))
    assert float(chunks.tpot_s) == pytest.approx(1.0 + 1e-3 * float(chunks.running) + 18 / 1000, rel=1e-6)


def test_prompts_run_outside_cuda_graphs_unless_these_hold_them() -> None:
    host = VLLM.overhead.model_copy(update={"uncaptured": 400e-6})
    engine = VLLM.model_copy(update={"overhead": host, "captures_prompts": False, "factors": ()})
    pieces = engine.model_copy(update={"captures_prompts": True})
    slow, fast = (
        inf.engine_step_cost(Replica.of(QWEN, H100, one, Layout.of(tensor_parallel=8))) for one in (engine, pieces)
    )
    issued = 400e-6 * QWEN.layers
    for tokens in (64.0, 1024.0):  # the kernels of so few tokens end before the host has issued them
        assert float(slow.linear(tokens, mixed=True)) == pytest.approx(issued)
    assert float(fast.linear(64.0, mixed=True)) == pytest.approx(float(fast.linear(64.0)))
    assert float(fast.linear(1024.0, mixed=True)) == pytest.approx(issued)
    many = float(slow.linear(16384.0, mixed=True))
    assert many > issued and many == pytest.approx(float(slow.linear(16384.0)))
    assert float(slow.decode_s(64, 64e3)) == pytest.approx(float(fast.decode_s(64, 64e3)))
    whole = [
        inf.prefill_s(Replica.of(QWEN, H100, one, Layout.of(tensor_parallel=8)), 1, 1024) for one in (engine, pieces)
    ]
    assert float(whole[0]) == float(whole[1]) > issued


def test_open_loop_has_littles_law() -> None:
    cost = inf.engine_step_cost(Replica.of(QWEN, H100, VLLM, Layout.of()), typical_context=600)
    served = serving.open_loop(cost, 4.0, Load(500, 200))
    in_flight = 4.0 * float(served.ttft_s + 199 * served.tpot_s)
    at_that = serving.closed_loop(cost, in_flight, Load(500, 200), arriving=4.0 * float(served.tpot_s))
    assert float(at_that.tpot_s) == pytest.approx(float(served.tpot_s), rel=0.01)
    assert float(serving.open_loop(cost, 1e4, Load(500, 200), sent=500).running) <= 250.0
    rare = serving.open_loop(cost, 1e-3, Load(500, 200))
    alone = serving.closed_loop(cost, 1, Load(500, 200))  # fewer than one in flight: nobody is in the way
    assert float(rare.tpot_s) == pytest.approx(float(alone.tpot_s), rel=0.01)
    assert float(serving.open_loop(cost, 50.0, Load(500, 1)).tpot_s) > 0.0


def test_without_graphs_launches_show() -> None:
    eager = VLLM.model_copy(update={"cuda_graphs": False})
    fast, slow = (float(inf.decode_step_s(Replica.of(QWEN, H100, one, Layout.of()), 1, 1000)) for one in (VLLM, eager))
    assert 1e-3 < slow - fast < 5e-3  # an 8B on H100: 8.4 ms eager, 5.1 ms with graphs


def test_every_copy_of_the_attention_schedules_its_own_requests() -> None:
    """SGLang's published decode on 72 H100 (256 requests a device) takes a tenth of one scheduler for all of them."""
    slow, quick = (inf.with_overhead(VLLM, per_request=each) for each in (1e-3, 0.0))
    model, layout = load_architecture("DeepSeek-V3"), Layout.of(tensor_parallel=16, attention_data_parallel=[1, 16])
    one, copies = (
        inf.decode_step_s(Replica.of(model, H100, slow, layout, "fp8"), 512, 1e6)
        - inf.decode_step_s(Replica.of(model, H100, quick, layout, "fp8"), 512, 1e6)
    )  # fmt: skip
    whole = 0.512 * VLLM.shown
    assert one == pytest.approx(whole) and copies == pytest.approx(whole / 16)
    more = [
        inf.engine_step_cost(Replica.of(model, H100, engine, layout.take(1), "fp8")).host_per_request_s
        for engine in (slow, quick)
    ]
    assert more[0] - more[1] == pytest.approx(1e-3 * VLLM.shown / 16)


def test_graph_buckets_pad_the_batch() -> None:
    assert inf.padded(VLLM, np.array([1.0, 3.0, 9.0, 600.0])).tolist() == [1.0, 4.0, 16.0, 600.0]


def test_engine_memory_by_hand() -> None:
    memory = engine_memory(Replica.of(load_architecture("Llama-3.1-8B"), H100, VLLM, Layout.of()), memory_fraction=0.9)
    assert float(memory.weights_bytes) == pytest.approx(8.03e9 * 2, rel=0.01)
    per_token = 2 * 8 * 128 * 32 * 2.0
    assert float(memory.kv_tokens) == pytest.approx(float(memory.kv_cache_bytes) / per_token)
    assert float(memory.total_bytes) == pytest.approx(0.9 * H100.device.usable_memory, rel=1e-9)
    assert bool(memory.fits)
    assert not bool(engine_memory(Replica.of(load_architecture("DeepSeek-V3"), H100, VLLM, Layout.of())).fits)


def test_capacity_limits_the_batch() -> None:
    arch = load_architecture("Llama-3.1-8B")
    short, long = max_running(Replica.of(arch, H100, VLLM, Layout.of()), [512, 16384], 1024)
    assert short > 10 * long > 0
    reserving = VLLM.model_copy(update={"reserves_output": True})
    assert float(max_running(Replica.of(arch, H100, reserving, Layout.of()), 1024, 8192)) < float(
        max_running(Replica.of(arch, H100, VLLM, Layout.of()), 1024, 8192)
    )
    limits = engine_limits(Replica.of(arch, H100, VLLM, Layout.of()))
    assert limits.kv_tokens > 1e5 and limits.max_running == VLLM.max_running
    wide = engine_limits(Replica.of(arch, H100, VLLM, Layout.of(tensor_parallel=2)))
    assert wide.kv_tokens > 2.0 * limits.kv_tokens


@pytest.mark.parametrize(("name", "device"), [("Qwen3-8B", "b200_sxm"), ("Qwen3-30B-A3B", "rtx_pro_6000_server")])
def test_one_long_request_takes_what_its_operators_take(name: str, device: str) -> None:
    arch, hw = load_architecture(name), load_hardware(device)
    engine = VLLM.at(device, arch.family, name, "bf16")
    assert engine.overhead.kernel_scale < 1.0  # many requests are read at the bandwidth, one is not
    found, few = [], np.array([1.0, 4.0, 16.0])
    for context in (16384.0, 32768.0, 65536.0):
        cost = inf.engine_step_cost(Replica.of(arch, hw, engine, Layout.of()), typical_context=context)
        exact = inf.decode_step_s(Replica.of(arch, hw, engine, Layout.of()), few, few * context)
        assert cost.decode_s(few, few * context) == pytest.approx(exact, rel=0.01)
        found.append(float(cost.decode_s(1.0, context)))
    assert found == sorted(found)


def test_ranks_that_hold_copies_of_the_attention_admit_for_themselves() -> None:
    layout = Layout.of(tensor_parallel=16, attention_data_parallel=[1, 16], expert_parallel=16)
    deepseek, h200 = load_architecture("DeepSeek-V3"), load_hardware("h200_sxm")
    one, copies = max_running(Replica.of(deepseek, h200, VLLM, layout, "fp8"), 1024, 1024)
    assert one < VLLM.max_running < 8 * VLLM.max_running < copies <= 16 * VLLM.max_running
    sglang = load_engine_calibration("sglang")  # its limit is shared out
    assert max_running(Replica.of(deepseek, h200, sglang, layout, "fp8"), 1024, 1024)[1] == sglang.max_running


def test_basis_says_what_is_extrapolated() -> None:
    plain = serving_basis(QWEN, H100, VLLM)
    assert not plain.extrapolated and plain.reasons == ()
    assert plain.spread.low < 1.0 < plain.spread.high
    latent = serving_basis(load_architecture("DeepSeek-V3"), load_hardware("h20_sxm"), VLLM, ServedLoad(context=262144))
    assert latent.extrapolated and len(latent.reasons) == 3
    assert latent.spread.high > plain.spread.high
    long = serving_basis(QWEN, H100, VLLM, ServedLoad(prompt=65536))
    assert long.reasons == ("prompt of 65536 is beyond the calibrated 16384",)
    assert np.log(long.spread.high) == pytest.approx(1.2 * np.log(plain.spread.high), rel=1e-6)


def test_engine_profiles_by_version() -> None:
    assert load_engine_calibration("vllm", "0.12.0").id != load_engine_calibration("vllm", "0.19.0").id
    with pytest.raises(SpecError, match="did you mean vllm"):
        load_engine_calibration("vlm")


def test_what_tensor_parallelism_copies_lies_on_every_device() -> None:
    """vLLM's ReplicatedLinear: routers, the down projections of latent attention; and heads beyond those there are."""
    arch = load_architecture("DeepSeek-V3")
    alone, split = (weight_bytes(Replica.of(arch, H100, VLLM, Layout.of(tensor_parallel=n))) for n in (1, 32))
    down, router = 61 * 7168 * (1536 + 512 + 64), 58 * 7168 * 256
    assert float(split) == pytest.approx(float(alone) / 32 + 2.0 * (down + router) * 31 / 32, rel=1e-12)
    # 8 heads of keys and values over 16 devices: one each, where half would be
    arch = load_architecture("Qwen3-32B")
    alone, split = (weight_bytes(Replica.of(arch, H100, VLLM, Layout.of(tensor_parallel=n))) for n in (1, 16))
    assert float(split) == pytest.approx(float(alone) / 16 + 64 * 2.0 * 2 * 128 * 5120 / 2, rel=1e-12)


@pytest.mark.data
def test_measured_engine_memory(measured_data: Path) -> None:
    """Start-up breakdowns of vLLM on H100 [GiB]: activations within 2 %, the cache within 0.4 GiB.

    Parts of gpt-oss-120b add up to 96 % of the device, where its share is 90 %: weights lie off by that, too.
    """
    names = {
        "gpt-oss-20b (MoE)": ("gpt-oss-20b", "mxfp4"),
        "gpt-oss-120b (MoE)": ("gpt-oss-120b", "mxfp4"),
        "Llama-3.3-70B-FP8": ("Llama-3.3-70B", "fp8"),
        "Llama-3.1-8B": ("Llama-3.1-8B", "bf16"),
        "Qwen3-0.6B": ("Qwen3-0.6B", "bf16"),
        "Qwen3-32B": ("Qwen3-32B", "bf16"),
    }
    checked = 0
    with (measured_data / "memory" / "vllm_engine_memory.csv").open() as stream:
        for row in csv.DictReader(stream):
            if row["model"] not in names:
                continue
            name, dtype = names[row["model"]]
            layout = Layout.of(tensor_parallel=int(row["tp"]))
            replica = Replica.of(load_architecture(name), H100, VLLM, layout, dtype)
            memory = engine_memory(replica, memory_fraction=float(row["gpu_mem_util"]))
            measured = float(row["kv_cache_gib"])
            off = 0.7 if name == "gpt-oss-120b" else 0.4
            assert float(memory.kv_cache_bytes) / 2**30 == pytest.approx(measured, abs=off)
            assert float(memory.activation_bytes) / 2**30 == pytest.approx(float(row["activation_gib"]), rel=0.02)
            assert float(memory.weights_bytes) / 2**30 == pytest.approx(float(row["weights_gib"]), rel=0.07)
            checked += 1
    assert checked == 7


@pytest.mark.parametrize("device", calibration_names("devices"))
def test_no_engine_is_faster_than_the_data_sheet(device: str) -> None:
    """Every shipped engine on every device with constants, in every dtype that these hold: light binds them all."""
    hw = load_hardware(device)
    sizes = np.array([1.0, 16.0, 256.0, 4096.0])
    for name in calibration_names("engines"):
        engine = load_engine_calibration(name)
        for arch in (load_architecture("Llama-3.1-8B"), load_architecture("Qwen3-30B-A3B")):
            for dtype in dict.fromkeys(fit.dtype for fit in hw.calibration.gemm):
                replica = Replica.of(arch, hw, engine, Layout.of(tensor_parallel=2), dtype)
                scale = 0.5 * replica.engine.overhead.kernel_scale  # a factor twice as good as fitted is held, too
                for one in token_operators(replica, sizes, sizes) + decode_operators(replica, sizes, 8192.0 * sizes):
                    seconds = in_engine(one, scale)
                    assert (seconds >= 0.999 * one.compute_s).all(), (name, arch.name, dtype, one.name)
                    assert (seconds >= 0.999 * one.memory_s / BEST_BANDWIDTH).all(), (name, arch.name, dtype, one.name)


def test_a_device_s_own_among_all_choices_are_found_in_every_layer_whose_experts_are_spread() -> None:
    """SGLang's rows lack 22 us a layer; with experts cut over the devices, as with dense layers, there is nothing."""
    sglang, arch = load_engine_calibration("sglang"), load_architecture("Qwen3-30B-A3B")
    none = sglang.model_copy(update={"overhead": sglang.overhead.model_copy(update={"per_spread_layer": 0.0})})
    cut, spread = (Layout.of(tensor_parallel=4, expert_parallel=each) for each in (1, 4))

    def more(layout: Layout, architecture: str = arch.name) -> float:
        replicas = (Replica.of(load_architecture(architecture), H100, engine, layout) for engine in (none, sglang))
        less, whole = (float(inf.decode_step_s(one, 8, 8 * 2048.0)) for one in replicas)
        return whole - less

    assert sglang.overhead.per_spread_layer == pytest.approx(22e-6)
    assert more(spread) == pytest.approx(22e-6 * arch.layers)
    assert more(cut) == more(Layout.of(tensor_parallel=4), "Llama-3.1-8B") == 0.0
    both = np.array([1, 4])
    steps = inf.decode_step_s(
        Replica.of(arch, H100, sglang, Layout.of(tensor_parallel=4, expert_parallel=both)), 8, 8e4
    )
    alone = [inf.decode_step_s(Replica.of(arch, H100, sglang, one), 8, 8e4) for one in (cut, spread)]
    assert steps.ravel() == pytest.approx([float(each) for each in alone])
