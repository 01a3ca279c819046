"""Operators: hand calculations, properties that physics demands, limits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlperf.cost import collectives, exchange
from rlperf.cost.attention import (
    Heads,
    decode_attention_s,
    packed_attention_s,
    prefill_attention_s,
    visible_pairs,
)
from rlperf.cost.dtypes import cache_bytes, dtype_of
from rlperf.cost.latent import latent_decode_attention_s, latent_prefill_attention_s
from rlperf.cost.layers.vision import encoder_fit, vision_prefill_s
from rlperf.cost.moe import Dealt, ExpertShape, busiest, grouped_gemm_s, grouped_with, moe_fit, touched_experts
from rlperf.cost.roofline import gemm_fit, gemm_s, sheet_flop_per_s, small_op_s, stream_s
from rlperf.cost.scan import scan_fit, scan_with, step_with
from rlperf.errors import SpecError
from rlperf.specs.hardware import Hardware, load_hardware
from rlperf.specs.profiles import load_architecture, load_device
from rlperf.specs.trainer_calibration import load_trainer

H100 = load_hardware("h100_sxm", "dgx_h100")
B200 = load_hardware("b200_sxm")


def faster(hw: Hardware, factor: float) -> Hardware:
    """The same machine with every rate of the data sheet times ``factor``."""
    device = hw.device
    sheet = {name: getattr(device.peaks, name) for name in type(device.peaks).model_fields}
    peaks = device.peaks.model_copy(update={name: v * factor for name, v in sheet.items() if v is not None})
    up = device.scale_up
    if up is not None:
        up = up.model_copy(update={"bandwidth": up.bandwidth * factor})
    changed = device.model_copy(
        update={
            "peaks": peaks,
            "memory_bandwidth": device.memory_bandwidth * factor,
            "host_bandwidth": device.host_bandwidth * factor,
            "scale_up": up,
        }
    )
    link = hw.network.model_copy(update={"bandwidth": hw.network.bandwidth * factor})
    return dataclasses.replace(hw, device=changed, network=link)


def test_large_product_runs_at_the_attainable_peak() -> None:
    flop = 2.0 * 16384**3
    seconds = float(gemm_s(H100, 16384, 16384, 16384))
    assert seconds == pytest.approx(
        flop / (sheet_flop_per_s(H100, "bf16") * gemm_fit(H100, "bf16")[0].compute), rel=0.03
    )


def test_thin_product_is_bound_by_the_weights() -> None:
    # one token through 8192 x 28672 in bf16: 470 MB of weights at 0.82 of 3.35 TB/s = 170 us
    weights = 2.0 * 8192 * 28672
    ideal = weights / (H100.device.memory_bandwidth * gemm_fit(H100, "bf16")[0].memory)
    assert float(gemm_s(H100, 1, 28672, 8192)) == pytest.approx(ideal, rel=0.05)


@pytest.mark.parametrize(("dtype", "at_most"), [("bf16", 1.3), ("fp8", 1.5)])
def test_few_tokens_are_read_where_the_peak_is_low(dtype: str, at_most: float) -> None:
    # an H20 has a sixth of the products of an H200 and 0.83 of its bandwidth: 64 empty rows would take twice the read
    h20, rows = load_hardware("h20_sxm"), np.arange(1, 200)
    seconds = gemm_s(h20, rows, 28672, 4096, dtype)
    read = 28672 * 4096 * (2.0 if dtype == "bf16" else 1.0) / h20.device.memory_bandwidth
    assert read < seconds[0] < at_most * read
    assert np.all(seconds >= 2.0 * rows * 28672 * 4096 / sheet_flop_per_s(h20, dtype))
    assert np.min(seconds[1:] / seconds[:-1]) >= 1.0 and np.max(seconds[1:] / seconds[:-1]) < 1.17
    assert gemm_fit(load_hardware("gh200_96g"), dtype)[0].rows == 64.0  # the chip that was timed


def test_narrow_weights_cost_fewer_bytes() -> None:
    wide, narrow = (float(gemm_s(H100, 1, 16384, 16384, dtype)) for dtype in ("bf16", "fp8"))
    assert 0.45 < narrow / wide < 0.75
    assert float(gemm_s(H100, 1, 16384, 16384, "int4_wo")) < narrow


def test_no_work_takes_no_time() -> None:
    assert gemm_s(H100, [0, 4, 4], [8, 0, 8], [8, 8, 0]).tolist() == [0.0, 0.0, 0.0]
    assert float(small_op_s(H100, 0.0)) == 0.0 == float(stream_s(H100, 0.0))
    assert float(decode_attention_s(H100, Heads(32, 8, 128), 0, 0)) == 0.0
    assert float(prefill_attention_s(H100, Heads(32, 8, 128), 0, 512, 512)) == 0.0
    assert float(grouped_gemm_s(H100, 0, ExpertShape(2048, 768, 128, 8))) == 0.0


def test_missing_units_fall_back_and_say_so() -> None:
    assert sheet_flop_per_s(H100, "nvfp4") == H100.device.peaks.fp8
    assert gemm_fit(H100, "nvfp4")[1] and not gemm_fit(H100, "fp16")[1] and not gemm_fit(B200, "nvfp4")[1]
    with pytest.raises(SpecError, match="known: bf16"):
        dtype_of("bf17")
    assert cache_bytes("fp8") == 1.0


@given(m=st.integers(1, 20000), n=st.integers(64, 20000), k=st.integers(64, 20000))
@settings(max_examples=60, deadline=None)
def test_product_never_beats_light_and_a_machine_twice_as_fast_at_most_halves_it(m: int, n: int, k: int) -> None:
    seconds = float(gemm_s(H100, m, n, k))
    light = max(2.0 * m * n * k / 989.4e12, 2.0 * (m * k + n * k + m * n) / H100.device.memory_bandwidth)
    assert seconds > light
    twice = float(gemm_s(faster(H100, 2.0), m, n, k))
    fit, _ = gemm_fit(H100, "bf16")
    assert (seconds - fit.fixed) / 2.0 * 0.999 <= twice - fit.fixed <= seconds - fit.fixed


def test_arrays_equal_scalars() -> None:
    m, n = np.array([1, 64, 4096])[:, None], np.array([1024, 8192])
    grid = gemm_s(H100, m, n, 4096)
    assert grid.shape == (3, 2)
    assert float(grid[1, 1]) == float(gemm_s(H100, 64, 8192, 4096))
    reduced = collectives.all_reduce_s(H100, 1e6, [1, 2, 3, 8, 16], [1, 2, 3, 8, 8])
    one_by_one = [
        float(collectives.all_reduce_s(H100, 1e6, g, w)) for g, w in ((1, 1), (2, 2), (3, 3), (8, 8), (16, 8))
    ]
    assert reduced.tolist() == pytest.approx(one_by_one, rel=1e-12)


@given(q=st.integers(1, 40), past=st.integers(0, 40), window=st.none() | st.integers(1, 50))
@settings(max_examples=80, deadline=None)
def test_visible_pairs_count_what_a_mask_shows(q: int, past: int, window: int | None) -> None:
    k = q + past
    shown = 0
    for row in range(past, k):
        first = 0 if window is None else max(0, row - window + 1)
        shown += row - first + 1
    assert float(visible_pairs(q, k, window=window)) == shown


def test_a_pack_of_equal_sequences_is_a_batch() -> None:
    batch = prefill_attention_s(H100, Heads(32, 8, 128), 4, 2048, 2048)
    pack = packed_attention_s(H100, Heads(32, 8, 128), 4 * 2048, 4 * 2048**2, 2048)
    assert float(pack) == pytest.approx(float(batch), rel=1e-9)
    windowed = prefill_attention_s(H100, Heads(32, 8, 128, window=256), 4, 2048, 2048)
    packed = packed_attention_s(H100, Heads(32, 8, 128, window=256), 4 * 2048, 4 * 2048**2, 2048)
    assert float(packed) == pytest.approx(float(windowed), rel=1e-9)
    assert float(windowed) < 0.5 * float(batch)


def test_attention_is_quadratic_in_each_sequence_not_in_the_pack() -> None:
    one = float(packed_attention_s(H100, Heads(32, 8, 128), 32768, 32768**2, 32768))
    many = float(packed_attention_s(H100, Heads(32, 8, 128), 32768, 32 * 1024**2, 1024))
    assert one > 8.0 * many


def test_backward_takes_two_and_a_half_times_the_work_and_more() -> None:
    pack = H100, Heads(32, 32, 128), 16384, 16384**2, 16384
    forward, backward = (float(packed_attention_s(*pack, backward=direction)) for direction in (False, True))
    assert 2.5 < backward / forward < 3.5


def test_cache_writes_and_narrow_heads_cost_extra() -> None:
    plain = float(prefill_attention_s(H100, Heads(32, 8, 128), 8, 1024, 1024))
    assert float(prefill_attention_s(H100, Heads(32, 8, 128), 8, 1024, 1024, cache_write=True)) > plain
    half = float(prefill_attention_s(H100, Heads(64, 64, 64), 1, 16384, 16384))
    whole = float(prefill_attention_s(H100, Heads(32, 32, 128), 1, 16384, 16384))
    assert half > 1.15 * whole  # the same FLOP in narrower heads


def test_decode_reads_the_cache_once() -> None:
    kv_bytes = 2.0 * 64 * 32768 * 8 * 128 * 2.0
    seconds = float(decode_attention_s(H100, Heads(32, 8, 128), 64, 64 * 32768))
    assert kv_bytes / H100.device.memory_bandwidth < seconds < 1.25 * kv_bytes / H100.device.memory_bandwidth
    narrow = float(decode_attention_s(H100, Heads(32, 8, 128), 64, 64 * 32768, kv_dtype="fp8"))
    assert 0.5 < narrow / seconds < 0.8  # far less than twice the rate


LATENT = Heads(128, 128, 128 + 64, 128)


def test_latent_attention_is_bound_by_compute_with_many_heads() -> None:
    few = float(latent_decode_attention_s(H100, 32, 32 * 8192, 16, 512, 64))
    many = float(latent_decode_attention_s(H100, 32, 32 * 8192, 128, 512, 64))
    assert many > 1.2 * few  # timed: 1.26 by TensorRT-LLM
    assert float(latent_prefill_attention_s(H100, LATENT, 1, 4096, 4096, cache_values=576)) > float(
        latent_prefill_attention_s(H100, LATENT, 1, 4096, 4096)
    )


def test_touched_experts_match_a_draw() -> None:
    rng = np.random.default_rng(3)
    drawn = np.mean([len(set(rng.integers(0, 64, 40))) for _ in range(2000)])
    assert float(touched_experts(40, 64)) == pytest.approx(drawn, rel=0.02)


def test_experts_split_over_devices_and_skew() -> None:
    alone = float(grouped_gemm_s(H100, 4096, ExpertShape(4096, 1536, 128, 8)))
    split = float(grouped_gemm_s(H100, 4096, ExpertShape(4096, 1536, 128, 8), 8))
    assert alone / 8.0 < split < alone / 2.0
    assert float(grouped_gemm_s(H100, 4096, ExpertShape(4096, 1536, 128, 8), 8, dealt=Dealt(skew=1.7))) > 1.2 * split
    assert not moe_fit(H100, "bf16")[1]
    assert moe_fit(H100, "bf16", ("vllm_triton",))[0].kernel == "vllm_triton"
    assert moe_fit(H100, "bf16", ("fp8:vllm_triton",))[0].kernel != "vllm_triton"


def test_block_scaled_experts_cost_time_by_their_number_even_untouched() -> None:
    # CUTLASS with block scales on H200, the layer of DeepSeek-V3 over 8 devices, one token: 115 us with all experts on
    # every device, 35 us with an eighth of them (kernel timings), though either way a device reads few of them
    h200 = load_hardware("h200_sxm")
    fit, _ = moe_fit(h200, "fp8_block", ("trtllm_cutlass",))
    all_held, eighth = (
        float(grouped_with(h200.device, fit, 1, ExpertShape(7168, 2048, 256, 8), ep, 8, dtype="fp8_block"))
        for ep in (1, 8)
    )
    assert all_held == pytest.approx(115e-6, rel=0.15)
    assert eighth == pytest.approx(35e-6, rel=0.25)
    bare = fit.model_copy(update={"per_held_expert": 0.0})
    for ep in (1, 8):
        seconds = [
            float(grouped_with(h200.device, one, 1, ExpertShape(7168, 2048, 256, 8), ep, dtype="fp8_block"))
            for one in (fit, bare)
        ]
        assert seconds[0] - seconds[1] == pytest.approx(256 / ep * fit.per_held_expert, rel=1e-9)


def test_every_device_handles_all_tokens_whatever_its_share_of_the_experts() -> None:
    fit, _ = moe_fit(H100, "bf16")
    bare = fit.model_copy(update={"token_bytes": 0.0})
    for parallel in (1, 8, 64):
        seconds = [
            float(grouped_with(H100.device, one, 4096, ExpertShape(4096, 1536, 128, 8), parallel))
            for one in (fit, bare)
        ]
        extra = 4096 * 4096 * fit.token_bytes / H100.device.memory_bandwidth
        assert seconds[0] - seconds[1] == pytest.approx(extra, rel=1e-6)
        own = float(
            grouped_with(
                H100.device, fit, 4096, ExpertShape(4096, 1536, 128, 8), parallel, dealt=Dealt(dispatched=True)
            )
        )
        assert own - seconds[1] == pytest.approx(extra / parallel, rel=1e-6)
    assert fit.token_bytes > 1.0


def test_collectives_of_one_device_are_free() -> None:
    for collective in (
        collectives.all_reduce_s,
        collectives.all_gather_s,
        collectives.reduce_scatter_s,
        collectives.all_to_all_s,
    ):
        assert float(collective(H100, 1e6, 1, 1)) == 0.0 == float(collective(H100, 0.0, 8, 8))
    assert float(collectives.point_to_point_s(H100, 0.0, 1)) == 0.0


def test_without_peer_access_every_byte_crosses_pcie_twice() -> None:
    direct = load_hardware("rtx_pro_6000_server")
    host = dataclasses.replace(direct, cluster=direct.cluster.model_copy(update={"peer_access": False}))
    size = np.array([1e4, 1e6, 1e8])
    pair = collectives.all_reduce_s(direct, size, 2, 2)
    np.testing.assert_allclose(collectives.all_reduce_s(host, size, 2, 2), 2.0 * pair)
    # engines' own kernels need peer access: without, NCCL serves them too
    own = collectives.all_reduce_s(direct, size, 2, 2, implementation="custom")
    assert (own < pair * 1.02).all()
    through = collectives.all_reduce_s(host, size, 2, 2, implementation="custom")
    np.testing.assert_allclose(through, 2.0 * pair)
    for group in (4, 8):  # no group is faster than its pairs, nor than it is directly
        many = collectives.all_gather_s(host, size, group, group)
        bus = size * (group - 1) / group
        assert (many >= 2.0 * collectives.all_gather_s(direct, 2.0 * bus, 2, 2) * (1 - 1e-9)).all()
        assert (many >= collectives.all_gather_s(direct, size, group, group) * (1 - 1e-9)).all()
    # GeForce drivers never allow it; fast links do not ask
    assert not collectives.reaches_peers(load_hardware("rtx_4090"))
    linked = dataclasses.replace(H100, cluster=H100.cluster.model_copy(update={"peer_access": False}))
    assert collectives.reaches_peers(linked)


def test_groups_over_several_boards_start_later() -> None:
    """Of one NVLink domain of 72 boards of four were timed: beyond them a doubling costs steps, which bytes hide."""
    hw = load_hardware("gb300")
    small = [1e6 * float(collectives.all_reduce_s(hw, 4096, n, n)) for n in (4, 8, 16, 64)]
    assert small[0] < 17.0 and small[1] == pytest.approx(28.0, rel=0.25) and small[2] == pytest.approx(49.0, rel=0.1)
    assert small[3] - small[2] == pytest.approx(2 * 16.4, rel=0.05)
    near, far = (float(collectives.all_gather_s(hw, 1e9 * 15 / 16 / (n - 1) * n, n, n)) for n in (4, 16))
    assert far == pytest.approx(near, rel=0.05)  # the same bytes over the busiest link
    sizes = np.array([0.0, 1.0, 64.0, 1e12])  # smaller than what smoothing between protocols takes off
    assert np.all(np.isfinite(collectives.all_gather_s(hw, sizes, 32, 32)))
    # a board's own kernel is left as timed, and nodes of eight have no board to leave
    assert float(collectives.all_reduce_s(hw, 4096, 4, 4, implementation="custom")) < 1e-5
    assert {fit.across for fit in H100.calibration.collectives} == {0.0}


@pytest.mark.data
def test_all_reduces_over_four_boards(measured_data: Path) -> None:
    rows = pl.read_csv(measured_data / "kernels" / "custom_allreduce_more.csv", infer_schema_length=10_000).filter(
        (pl.col("gpu") == "gb300") & (pl.col("num_gpus") == 16) & pl.col("impl").str.contains("graph")
    )
    hw = load_hardware("gb300")
    seconds = collectives.all_reduce_s(hw, rows["bytes"].to_numpy().astype(np.float64), 16, 16)
    errors = np.abs(1e6 * seconds / rows["latency_us"].to_numpy() - 1.0)
    assert len(errors) >= 40 and float(np.mean(errors)) < 0.1


def test_large_all_reduce_runs_at_the_measured_bus_rate() -> None:
    # NCCL, 8 x H100: about 480 GB/s of bus bandwidth (NVLS) at 512 MB, published and tabulated alike
    size = 512e6
    bus = collectives.bus_share("all_reduce", 8) * size / collectives.all_reduce_s(H100, size, 8, 8)
    assert 420e9 < float(bus) < 520e9


def test_across_nodes_the_network_binds_and_oversubscription_hurts() -> None:
    inside, across = (float(collectives.all_reduce_s(H100, 1e9, 8 * n, 8)) for n in (1, 2))
    assert across > inside
    thin = dataclasses.replace(H100, cluster=H100.cluster.model_copy(update={"oversubscription": 4.0}))
    assert float(collectives.all_reduce_s(thin, 1e9, 16, 8)) > 2.0 * across
    assert float(collectives.all_to_all_s(H100, 1e8, 16, 8)) > float(collectives.all_to_all_s(H100, 1e8, 8, 8))
    near, far = collectives.point_to_point_s(H100, 1e8, np.array([True, False]))
    assert far > near


def test_engine_kernels_beat_nccl_for_small_messages() -> None:
    nccl = float(collectives.all_reduce_s(H100, 65536, 8, 8))
    assert float(collectives.all_reduce_s(H100, 65536, 8, 8, implementation="custom")) < 0.7 * nccl


def test_engine_kernels_do_not_reach_across_nodes() -> None:
    custom, nccl = (float(collectives.all_reduce_s(H100, 65536, 16, 8, implementation=k)) for k in ("custom", "nccl"))
    assert custom == nccl


@pytest.mark.parametrize("rack", ["gb200", "gb300"])
def test_over_trays_of_a_rack_engines_fall_back_to_nccl(rack: str) -> None:
    """Measured on GB300: 13 us over two trays and 48 over four, whatever the bytes; 4 to 8 us within one."""
    hw = load_hardware(rack)
    one, two, four, more = (
        float(collectives.all_reduce_s(hw, 65536, n, n, implementation="custom")) for n in (4, 8, 16, 32)
    )
    assert one < 9e-6
    assert two == pytest.approx(14e-6, rel=0.05) and four == pytest.approx(50e-6, rel=0.05)
    # nobody timed more trays: a step more for every doubling
    assert more == pytest.approx(four + 16.4e-6, rel=0.1)


def test_a_slow_link_delays_small_messages_and_without_order_there_are_no_flags() -> None:
    def small(**update: object) -> float:
        link = H100.network.model_copy(update=update)
        return float(collectives.all_reduce_s(dataclasses.replace(H100, network=link), 65536, 32, 8))

    # a tree over four nodes crosses twice up and twice down
    assert small(latency=H100.network.latency + 10e-6) == pytest.approx(small() + 40e-6)
    assert small(in_order=False) > small() + 2.0 * 7.0 * (H100.library.bulk.tree_step - H100.library.low.tree_step)


def test_rings_grow_with_devices_trees_with_the_logarithm_of_nodes() -> None:
    nodes = np.array([4.0, 16.0, 64.0])
    tree = collectives.all_reduce_s(H100, 1e4, 8.0 * nodes, 8.0)
    hop = H100.library.low.tree_hop + H100.network.latency
    assert np.diff(tree) == pytest.approx([4.0 * hop, 4.0 * hop], rel=0.05)
    ring = collectives.all_gather_s(H100, 1e4, 8.0 * nodes, 8.0)
    assert ring[2] - ring[1] == pytest.approx(4.0 * (ring[1] - ring[0]), rel=0.05)
    large = collectives.all_gather_s(H100, 8e9, 8.0 * nodes, 8.0)
    assert large == pytest.approx(8e9 / 8.0 / (H100.library.ring * 50e9), rel=0.08)


def test_a_mesh_of_links_is_as_fast_as_the_links_between_the_group() -> None:
    mi300x = load_hardware("mi300x")
    link = mi300x.device.scale_up
    assert link is not None and link.pair_bandwidth is not None
    pair, eight = (collectives.all_reduce_s(mi300x, 4e9, n, n) for n in (2, 8))
    bus = [float(collectives.bus_share("all_reduce", n) * 4e9 / t) for n, t in ((2, pair), (8, eight))]
    assert 0.5 * link.pair_bandwidth < bus[0] < link.pair_bandwidth
    assert bus[1] > 6.0 * bus[0]


def test_a_torus_gathers_along_its_axes_and_pays_for_distance_in_an_all_to_all() -> None:
    """By hand: a v5p cube of 4 x 4 x 4 has 2 x 90 GB/s an axis; a v6e group of 8 is no ring."""
    v5p, v6e = load_hardware("tpu_v5p"), load_hardware("tpu_v6e")
    torus = v5p.device.scale_up.torus if v5p.device.scale_up else None
    assert torus is not None
    group = np.array([4.0, 16.0, 64.0, 4096.0])
    gather = collectives.torus_bytes_per_s(torus, "all_gather", group)
    assert gather == pytest.approx([180e9, 360e9, 540e9, 540e9])
    # a ring of 4 has an average distance of one link each way; one of 16 of four
    assert collectives.torus_bytes_per_s(torus, "all_to_all", group) == pytest.approx([180e9, 180e9, 180e9, 45e9])
    assert collectives.torus_hops(torus, group) == pytest.approx([2.0, 4.0, 6.0, 24.0])
    seconds = collectives.all_gather_s(v5p, 1e10, group, group)
    assert 1e10 * 0.75 / 180e9 < seconds[0] < 2e10 * 0.75 / 180e9
    assert seconds[0] > seconds[1] > seconds[2]
    line = v6e.device.scale_up.torus if v6e.device.scale_up else None
    assert line is not None
    assert float(collectives.torus_bytes_per_s(line, "all_gather", np.array(8.0))) == pytest.approx(180e9)
    assert float(collectives.torus_bytes_per_s(line, "all_gather", np.array(256.0))) == pytest.approx(360e9)


def test_dispatch_grows_with_tokens_and_has_a_fallback() -> None:
    few, many = collectives.dispatch_combine_s(H100, np.array([1.0, 128.0]), 7168, 8, 256, 8, 8)
    assert 20e-6 < few < many < 1e-3
    a100 = load_hardware("a100_80g_sxm")
    assert float(collectives.dispatch_combine_s(a100, 128, 7168, 8, 256, 8, 8)) > 0.0


def test_prompts_are_sent_once_to_a_node() -> None:
    """Low-latency kernels for the few tokens of decodes, a copy an expert; normal ones for prompts, one a node."""
    normal, quick = (
        tuple(fit for fit in H100.calibration.dispatch if fit.kernel == kernel)
        for kernel in ("deepep_normal", "deepep")
    )
    assert {fit.group for fit in normal} == {fit.group for fit in quick} == {8, 16, 32, 64}
    only = dataclasses.replace(H100, calibration=H100.calibration.model_copy(update={"dispatch": quick}))
    tokens = np.array([16.0, 4096.0])
    both, copies = (collectives.dispatch_combine_s(hw, tokens, 7168, 8, 256, 32, 8) for hw in (H100, only))
    assert both[0] == copies[0] and both[1] < 0.6 * collectives.dispatch_combine_s(only, 4096, 7168, 8, 256, 32, 8)
    rates = {fit.operation: fit for fit in normal if fit.group == 32}
    reach = 4.0 * (1.0 - 0.75**8)
    by_hand = sum(
        rates[each].fixed + 4096 * 7168 * reach * value / (rates[each].rate * 450e9)
        for each, value in (("dispatch", 1.0), ("combine", 2.0))
    )
    assert float(both[1]) == pytest.approx(by_hand)


def test_dispatch_across_nodes_goes_by_the_network() -> None:
    """Where one node was timed alone: H200 takes H100's kernels beyond it, Blackwell an all-to-all of the copies."""
    for name in ("h200_sxm", "b200_sxm", "b300_sxm"):
        hw = load_hardware(name)
        near, far = (float(collectives.dispatch_combine_s(hw, 512, 7168, 8, 256, n, 8)) for n in (8, 64))
        assert far > 4.0 * near
    tray = load_hardware("gb200")  # 72 devices of one domain
    near, far = (float(collectives.dispatch_combine_s(tray, 512, 7168, 8, 256, n, n)) for n in (4, 64))
    assert far < 1.5 * near


def test_own_kernels_send_a_token_once_to_a_device() -> None:
    rack = load_hardware("gb200", "gb200_nvl72")
    ways = {fit.operation: fit for fit in rack.calibration.exchange}
    beside = 31.0 * (1.0 - (1.0 - 1.0 / 32.0) ** 8)  # of 32 devices those beside its own that a token's experts lie on
    by_hand = sum(
        ways[each].fixed + 5.0 * ways[each].per_doubling + 512 * 7168 * beside * value / (ways[each].rate * 900e9)
        for each, value in (("dispatch", 0.5625), ("combine", 2.0))
    )
    assert float(exchange.exchange_s(rack, "trtllm", 512, 7168, 8, 0.5625, 32)) == pytest.approx(by_hand)
    assert float(exchange.exchange_s(rack, "trtllm", 512, 7168, 8, 0.5625, 1)) == 0.0
    lent = load_hardware("gb300", "gb300_nvl72").calibration.exchange
    assert {fit.timed_on for fit in lent} == {"gb200"} and [fit.rate for fit in lent] == [
        fit.rate for fit in rack.calibration.exchange
    ]


def test_host_copy_runs_at_the_host_link() -> None:
    assert float(collectives.host_copy_s(H100, 55e9)) == pytest.approx(1.0, rel=0.05)


def test_vision_tower_by_hand() -> None:
    vision = load_architecture("Qwen2.5-VL-7B").vision
    assert vision is not None
    patches = (1344 / vision.patch_size) ** 2
    assert patches == 9216.0
    seconds = float(vision_prefill_s(H100, vision, 1, patches))
    flop = 2.0 * 9216 * (vision.parameters - 3 * 2 * 14 * 14 * 1280)
    assert flop / 989.4e12 < seconds < 12.0 * flop / 989.4e12
    assert float(vision_prefill_s(H100, vision, 1, patches, 4)) < seconds
    assert float(vision_prefill_s(H100, vision, 4, patches)) > 2.0 * seconds


def test_vision_attention_is_the_engines_own() -> None:
    """By width of heads where it was timed; a language model's kernel for wide heads and where no tower was timed."""
    gb300 = load_hardware("gb300")
    assert [encoder_fit(gb300, "sglang", each).width for each in (64.0, 72.0, 88.0)] == [64, 72, 80]  # type: ignore[union-attr]
    assert encoder_fit(gb300, "fastertransformer", 72.0) == encoder_fit(gb300, "vllm", 72.0)
    assert encoder_fit(gb300, "sglang", 128.0) is None and encoder_fit(load_hardware("mi300x"), "sglang", 72.0) is None
    lent = encoder_fit(load_hardware("h200_sxm"), "vllm", 80.0)
    assert lent is not None and lent.timed_on == "h100_sxm"
    vision = load_architecture("Qwen3-VL-8B").vision
    assert vision is not None
    slow, fast = (float(vision_prefill_s(gb300, vision, 1, 9216, engine=name)) for name in ("sglang", "vllm"))
    assert slow > 3.0 * fast  # Triton instead of flash attention


def test_text_alone_costs_no_vision() -> None:
    vision = load_architecture("Qwen2.5-VL-7B").vision
    assert vision is not None
    seconds = vision_prefill_s(H100, vision, np.array([0.0, 1.0, 0.0, 1.0]), np.array([1024.0, 0.0, 0.0, 1024.0]))
    assert seconds[:3].tolist() == [0.0, 0.0, 0.0]
    assert seconds[3] == float(vision_prefill_s(H100, vision, 1, 1024)) > 0.0


def test_borrowed_constants_are_marked_and_wider() -> None:
    own, borrowed = load_hardware("h200_sxm").calibration, load_hardware("h20_sxm").calibration
    assert not own.extrapolated and borrowed.extrapolated
    assert borrowed.spread.high > own.spread.high and borrowed.spread.low < own.spread.low


def test_a_cut_down_chip_reaches_more_of_its_peak_than_one_that_its_power_holds() -> None:
    """An H20 has a sixth of an H200's products in over half of its power: 0.90 of the peak, as an H200 on zeros."""
    large = [gemm_s(hw := load_hardware(name), 16384, 8192, 8192, "bf16") * hw.device.peaks.bf16
             for name in ("h200_sxm", "h20_sxm", "h20_3e_sxm")]  # fmt: skip
    assert large[1] == pytest.approx(large[0] * 0.7985 / 0.9054, rel=0.03)
    assert large[2] == pytest.approx(large[1], rel=0.02)
    trainer = load_trainer("megatron")
    rates = [trainer.generation(load_device(name)).sustained for name in ("h200_sxm", "h20_sxm", "h20_3e_sxm")]
    assert rates[0] < rates[1] == rates[2]


def test_the_busiest_of_many_devices_makes_the_others_wait() -> None:
    """Pairs routed at random: the estimate against the mean of the largest count of 4,000 draws."""
    rng = np.random.default_rng(0)
    for devices, mean in ((8, 5), (8, 40), (4, 100), (64, 20)):
        drawn = rng.multinomial(devices * mean, np.full(devices, 1.0 / devices), size=4000).max(axis=1).mean()
        assert float(busiest(mean, devices)) * mean == pytest.approx(drawn, rel=0.2)
    assert float(busiest(1e-3, 8)) == 8.0 and float(busiest(10.0, 1)) == 1.0


def test_steps_and_scans_of_linear_attention_by_hand() -> None:
    """A step moves its states twice at the fitted share; a scan waits chunk by chunk however few heads there are."""
    hw = load_hardware("h100_sxm")
    step, scan = (scan_fit(hw, "gated_delta", phase, "sglang") for phase in ("generation", "context"))
    assert step is not None and scan is not None and step.kernel == scan.kernel == "sglang"
    state = 4.0 * 64 * 128 * 128
    seconds = step_with(hw.device, step, np.array([0.0, 256.0]), state)
    assert seconds[0] == 0.0
    assert seconds[1] == pytest.approx(step.fixed + 512.0 * state / (step.memory * 3.352e12))
    # one prompt of 16k tokens on one head is bound by its chunks, many heads by products
    few, more = (float(scan_with(hw.device, scan, 1.0, 16384.0, heads, 128, 128)) for heads in (1.0, 64.0))
    assert few == pytest.approx(scan.fixed + 16384.0 * scan.per_step, rel=0.05)
    assert more > 3.0 * few
    # no table is of H200: its relative's kernels, said so; an engine without its own takes another's
    lent = scan_fit(load_hardware("h200_sxm"), "gated_delta", "context", "sglang")
    assert lent is not None and lent.timed_on == "h100_sxm"
    assert scan_fit(hw, "gated_delta", "context", "fastertransformer") is not None
    assert scan_fit(load_hardware("mi355x"), "gated_delta", "context", "sglang") is None


@pytest.mark.data
@pytest.mark.parametrize(("device", "kernel"), [("h100_sxm", "trtllm_cutlass"), ("b200_sxm", "vllm_flashinfer_trtllm")])
def test_experts_of_one_rank_under_wide_expert_parallelism(measured_data: Path, device: str, kernel: str) -> None:
    """SGLang's experts on 8 to 64 ranks, decodes and prompts beyond the host's floor of 600 us; no fit saw them."""
    rows = pl.read_csv(measured_data / "kernels" / "wideep_moe.csv", infer_schema_length=10_000).filter(
        (pl.col("gpu") == device) & (pl.col("kernel") == "deepepmoe") & (pl.col("distribution") == "uniform")
    )
    hw = load_hardware(device)
    fit = next(fit for fit in hw.calibration.moe if (fit.kernel, fit.dtype) == (kernel, "fp8_block"))
    for phase, least_us in (("generation", 0.0), ("context", 600.0)):
        part = rows.filter((pl.col("phase") == phase) & (pl.col("latency_us") > least_us))
        tokens, width, hidden, count, active, ranks = (
            part[name].to_numpy().astype(np.float64)
            for name in ("num_tokens", "hidden_size", "inter_size", "num_experts", "topk", "moe_ep_size")
        )
        shape = ExpertShape(width, hidden, count, active)
        dealt = Dealt(dispatched=True, balanced=True)
        seconds = grouped_with(hw.device, fit, tokens, shape, ranks, dtype="fp8_block", dealt=dealt)
        ratio = 1e6 * seconds / part["latency_us"].to_numpy()
        assert len(ratio) >= 8 and 0.8 < float(np.median(ratio)) < 1.25
