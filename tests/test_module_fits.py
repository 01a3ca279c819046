"""Attention over chosen keys, hyper-connections and Kimi Delta Attention: their costs by hand, and their fits."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlperf.calibrate.kernel_tables import Series, read_series
from rlperf.calibrate.kernels import added, fit_series, merged
from rlperf.calibrate.module_fits import fit_modules, mixer_of, module_seconds, timed_layer
from rlperf.calibrate.tables import read_table
from rlperf.calibrate.validate_kernels import predict_rows
from rlperf.cost.engine_memory import kv_bytes_per_request, kv_bytes_per_token
from rlperf.cost.inference import decode_breakdown
from rlperf.cost.layers import stack_of
from rlperf.cost.layers.choosing import Choosing
from rlperf.cost.layers.layer import Layer
from rlperf.cost.layers.recurrent import Recurrent
from rlperf.cost.replica import Replica, total
from rlperf.cost.scan import chunked_with, convolved_with, scan_fit, scan_with
from rlperf.cost.sparse import KeyChoice, chosen_with, scored_with, sparse_fit
from rlperf.cost.streams import mixed_bytes, mixing_with, streams_fit
from rlperf.cost.trainer.activations import layer_activations
from rlperf.cost.trainer_device import Keeping
from rlperf.layout import Layout
from rlperf.specs.calibration import ScanFit, SparseFit, StreamsFit, load_device_calibration
from rlperf.specs.engine_calibration import load_engine_calibration
from rlperf.specs.hardware import at_published_rates, load_hardware
from rlperf.specs.profiles import load_architecture, load_device

H100 = load_hardware("h100_sxm", "dgx_h100")
VLLM = load_engine_calibration("vllm")
TRUTH = SparseFit.model_construct(
    kernel="sglang", mixer="sparse", phase="generation", fixed=4e-5, compute=0.5, memory=0.7, passes=1.0,
    index_compute=0.4, index_memory=0.5, index_fixed=2e-5, per_choice=1e-8,
)  # fmt: skip


def _layer(model: str, name: str) -> Layer:
    layers = [half.layer for half in stack_of(load_architecture(model)).halves]
    return next(layer for layer in layers if type(layer).__name__ == name)


def _replica(model: str, **layout: int) -> Replica:
    return Replica.of(load_architecture(model), H100, VLLM, Layout.of(**layout), "fp8", "bf16")


def _seconds(model: str, name: str, context: float, requests: float = 8.0) -> float:
    operators = _layer(model, name).decode_operators(
        _replica(model), 1.0, np.asarray(requests), np.asarray(requests * context)
    )
    return float(total(operators))


def test_a_choice_bounds_what_is_read_and_the_index_sees_all() -> None:
    dense, sparse = (
        [_seconds(model, name, context) for context in (2048.0, 131072.0)]
        for model, name in (("DeepSeek-V3", "Latent"), ("DeepSeek-V3.2", "Sparse"))
    )
    assert sparse[1] < 0.6 * dense[1]  # 64 times the context, most of it only scored
    assert sparse[1] > sparse[0]
    reusing = [_seconds("GLM-5.2", "SparseReusing", context) for context in (4096.0, 131072.0)]
    assert reusing[0] == pytest.approx(reusing[1], rel=1e-9)  # an earlier layer has chosen


def test_a_prompt_gathers_its_keys_and_may_compute_places_that_it_did_not_fill() -> None:
    layer, replica = _layer("DeepSeek-V3.2", "Sparse"), _replica("DeepSeek-V3.2")

    def seconds(queries: float, cache: str, **constants: float) -> float:
        fit = TRUTH.model_copy(update={"phase": "context", "passes": 0.0, "fixed": 0.0, **constants})
        hw = replace(H100, calibration=H100.calibration.model_copy(update={"sparse": (fit,)}))
        here = replace(replica, hw=hw, kv_dtype=cache)
        one, length = np.asarray(16384.0 / queries), np.asarray(queries)
        return float(total(layer.prefill_operators(here, 1.0, one, length, length)))

    plain = {"compute": 1e6, "index_compute": 1e6, "index_memory": 1e6, "index_fixed": 0.0, "per_choice": 0.0}
    short, full = (seconds(256.0, "bf16", gather=1.0, padded=padded, **plain) for padded in (0.0, 1.0))
    assert full == pytest.approx(seconds(2048.0, "bf16", gather=1.0, padded=1.0, **plain), rel=1e-4)
    assert full == pytest.approx(short * 2048.0 / 128.5, rel=1e-3)  # 128.5 keys behind a query in the mean
    assert full == pytest.approx(16384 * 2048 * 1152 / H100.device.memory_bandwidth, rel=1e-3)
    assert seconds(256.0, "fp8", gather=1.0, padded=1.0, **plain) == pytest.approx(full / 2.0, rel=1e-3)


def test_a_tile_of_heads_takes_its_time_beside_the_keys() -> None:
    work = KeyChoice(np.array([64.0, 128.0]), 2048.0, 576.0, 0.0, 0.0, np.array(1024.0), narrow=False)
    fit = TRUTH.model_copy(update={"phase": "context", "passes": 0.0, "fixed": 0.0, "per_tile": 5e-8})
    none, keys = (chosen_with(H100.device, fit, work, 1000.0, 0.0, read, 0.0, 0.0) for read in (0.0, 1e5))
    assert none == pytest.approx([5e-5, 1e-4])
    assert keys - none == pytest.approx(1e5 * np.array([64.0, 128.0]) * 2048 / (0.5 * 989.4e12), rel=1e-3)


def test_a_cache_of_sixteen_bits_has_its_own_kernel_where_it_was_timed() -> None:
    own = next(fit for fit in H100.calibration.sparse if fit.cache == "bf16")
    asked = (("sglang", False), ("sglang", True), ("vllm", False), ("trtllm", False))
    found = [sparse_fit(H100, "sparse", "context", engine, narrow=narrow) for engine, narrow in asked]
    assert [(fit.kernel, fit.cache) for fit in found] == [
        ("sglang", "bf16"), ("sglang", None), ("sglang", "bf16"), ("trtllm", None),
    ]  # fmt: skip
    assert own.gather is None and own.padded == 1.0  # every place of a list is computed, and gathered on the way
    layer, lengths = _layer("GLM-5", "Sparse"), np.array([512.0, 2048.0])
    replica = replace(_replica("GLM-5"), engine=load_engine_calibration("sglang"))
    short, full = total(layer.prefill_operators(replica, 1.0, 16384.0 / lengths, lengths, lengths))
    pairs_s = 16384 * 2048 * 64 * 2176 / (own.compute * H100.device.peaks.bf16)
    assert short == pytest.approx(full, rel=0.1) and pairs_s < full < 1.3 * pairs_s


KERNEL = "gpu,src,kernel,op,model,score_mode,compress_ratio,batch,q_len,past_len,latency_us"


def test_single_kernels_are_terms_of_the_module(tmp_path: Path) -> None:
    """FlashMLA at half of the peak is told as such; scores of a prompt go by the constants of whole modules."""
    launch = H100.calibration.stream.small_fixed
    tile = sparse_fit(H100, "sparse", "context", "sglang").per_tile
    rows, truth = [], []
    for batch, query in ((1, 1024), (4, 1024), (1, 4096), (4, 4096), (2, 2048), (8, 1024), (2, 1024), (16, 4096)):
        queries = batch * query
        truth += [launch + queries * (tile + 2048 * 64 * 2176 / (0.5 * H100.device.peaks.bf16))]
        rows += [f"h100_sxm,sglang-1,fwd,sparse_mla,GLM-5,,1,{batch},{query},8192,{1e6 * truth[-1]}"]
    rows += ["h100_sxm,sglang-1,fwd,sparse_mla,GLM-5,,1,4,1,8192,30"]
    rows += ["h100_sxm,sglang-1,gemm,mqa_logits,GLM-5,,1,1,4096,65536,2500"]
    (tmp_path / "kernels.csv").write_text("\n".join([KERNEL, *rows]) + "\n")
    series = read_series(tmp_path / "kernels.csv")
    fit = next(one for one in fit_series(series, H100.device, H100.calibration, check=False))
    assert (fit.constants.cache, fit.constants.mixer) == ("bf16", "sparse")
    assert fit.constants.compute == pytest.approx(0.5, rel=0.01)
    found = predict_rows(tmp_path / "kernels.csv", read_table(tmp_path / "kernels.csv"))
    assert [each.reason for each in found.refused] == ["a kernel of prompts, which no decode runs"]
    scores = next(each for each in found.predictions if "mqa_logits" in each.group)
    assert scores.predicted == pytest.approx(2500.0, rel=0.15) and not scores.series_in_fit


def test_few_queries_wait_for_the_block_that_goes_through_all_keys() -> None:
    """Scores of 4 or of 128 queries of a prompt, 32 heads each, take one multiprocessor a block: equally long."""
    fit = TRUTH.model_copy(update={"index_memory": 1e6})
    work = KeyChoice(np.array(64.0), 2176.0, 576.0, 8192.0, 132.0, np.array(1024.0), False, block_flop=2.0 * 128 * 128)
    queries, keys = np.array([4.0, 128.0, 65536.0]), 65536.0
    seconds = scored_with(H100.device, fit, work, queries * keys, keys, 4.0, keys)
    assert seconds[0] == pytest.approx(seconds[1], rel=0.01)
    assert seconds[1] == pytest.approx(keys * 32768 * 132 / (0.4 * 1978.9e12), rel=0.02)
    assert seconds[2] == pytest.approx(queries[2] * keys * 8192 / (0.4 * 1978.9e12), rel=0.01)


def test_layers_of_a_window_alone_stand_for_no_timing() -> None:
    """DeepSeek-V4-Flash begins with two of them, by which its layers of all compressed keys were once told."""
    for part, ratio in (("csa", 4), ("hca", 128)):
        named = replace(_timings("deepseek-ai/DeepSeek-V3.2", TRUTH), variant=f"DeepSeek-V4-Flash/{part}/context")
        layer = timed_layer(named)
        assert isinstance(layer, Choosing) and layer.ratio == ratio


def test_caches_of_new_kinds_by_hand() -> None:
    # GLM-5: latent 512 and rotary key 64 in 16 bits, index key of 128 in 8 bits with a scale of 4 bytes, 78 layers
    assert float(kv_bytes_per_token(_replica("GLM-5"))) == 78 * (2 * 576 + 128 + 4)
    # GLM-5.2: of 78 layers those that choose themselves keep an index key
    own = load_architecture("GLM-5.2").layer_mixers.count("sparse")
    assert float(kv_bytes_per_token(_replica("GLM-5.2"))) == 78 * 2 * 576 + own * 132
    # DeepSeek-V4-Flash: keys of 512 for 4 or 128 tokens, an index key of 128 where tokens are 4; windows of 128
    arch = load_architecture("DeepSeek-V4-Flash")
    kinds = [int(arch.part(name)[1].numbers_of("compressed")["ratio"]) for name in arch.layer_mixers]
    short, long = kinds.count(4), kinds.count(128)
    assert float(kv_bytes_per_token(_replica(arch.name))) == pytest.approx(short * (1024 + 132) / 4 + long * 1024 / 128)
    assert float(kv_bytes_per_request(_replica(arch.name))) > 43 * 128 * 1024
    # MiniMax-M3: 4 key heads of 128, and an index key of 128 in all but the first three layers
    assert float(kv_bytes_per_token(_replica("MiniMax-M3"))) == 60 * 2 * 2 * 4 * 128 + 57 * 2 * 128
    # Kimi Linear: 20 layers with a state of 32 heads of 128 x 128 in 32 bits, 7 with a latent
    assert float(kv_bytes_per_request(_replica("Kimi-Linear-48B-A3B"))) == 20 * (4 * 32 * 128 * 128 + 2 * 3 * 4096 * 3)
    assert float(kv_bytes_per_token(_replica("Kimi-Linear-48B-A3B"))) == 7 * 2 * 576


def test_tensor_parallelism_cuts_heads_and_copies_the_index() -> None:
    for model, most in (("DeepSeek-V3.2", 128), ("Kimi-Linear-48B-A3B", 32), ("MiniMax-M3", 64)):
        stack = stack_of(load_architecture(model))
        degree = np.asarray(most)
        assert stack.divides(degree, np.asarray(1)).all()
        assert not stack.divides(3 * degree, np.asarray(1)).any()
    layer = _layer("GLM-5", "Sparse")
    index = sum(matrix.values for matrix in layer.matrices() if matrix.name == "index")
    assert index == 2048 * 32 * 128 + 6144 * (128 + 32)
    assert layer.replicated >= index


def test_residual_streams_cost_time_and_memory() -> None:
    arch = load_architecture("DeepSeek-V4-Flash")
    one = arch.model_copy(update={"residual_streams": 1})
    lines = {
        row.name: row.seconds
        for row in decode_breakdown(Replica.of(arch, H100, VLLM, Layout.of(tensor_parallel=8)), 64, 6e4)
    }
    assert lines["hyper-connections"] > 0
    kept, plain = (float(layer_activations(each, Keeping(Layout.of())).boundary) for each in (arch, one))
    assert kept == 4 * plain
    fit = StreamsFit.model_construct(kernel="sglang", before=1e-5, behind=2e-6, memory=0.5, cached=0.0)
    front, back = mixing_with(H100.device, fit, 1000.0, 4, 4096)
    assert float(front - back) == pytest.approx(8e-6)
    # 9 widths of 4096 in two bytes for a token
    assert float(mixed_bytes(4, 4096)) == 9 * 4096 * 2
    read_s = 1000 * 9 * 8192 / (0.5 * H100.device.memory_bandwidth)
    assert float(back) == pytest.approx(2e-6 + read_s)
    # a product without tensor cores takes its time in front, whether the streams stand in L2 or not
    slow = fit.model_copy(update={"product": 8.0, "cached": 4.0})
    front, back = mixing_with(H100.device, slow, 1000.0, 4, 4096, cached=True)
    assert float(front - back) == pytest.approx(8e-6 + 8.0 * read_s)
    # an engine without kernels takes the quickest of other engines', not PyTorch's own that stood in for one
    several = H100.calibration.model_copy(update={"streams": (slow, fit.model_copy(update={"kernel": "trtllm"}))})
    assert streams_fit(replace(H100, calibration=several), "vllm").kernel == "trtllm"
    assert streams_fit(replace(H100, calibration=several), "sglang").kernel == "sglang"


def test_a_cache_of_eight_bits_slows_kernels_that_convert_it() -> None:
    fit = SparseFit.model_construct(
        kernel="sglang",
        mixer="block_sparse",
        phase="context",
        fixed=0.0,
        compute=0.5,
        memory=0.9,
        passes=0.0,
        narrow=0.25,
    )
    wide = KeyChoice(np.array(8.0), 512.0, 512.0, 0.0, 0.0, np.array(1024.0), narrow=False)
    args = (1000.0, 0.0, 2e6, 0.0, 0.0)
    whole, converted = (float(chosen_with(H100.device, fit, one, *args)) for one in (wide, replace(wide, narrow=True)))
    assert converted == pytest.approx(4.0 * whole)


def test_a_scan_over_prompts_leaves_l2() -> None:
    """Kernels pass results through L2 while they fit: on L40S (96 MB) a token costs over twice as much beyond it."""
    hw = load_hardware("l40s")
    fit = scan_fit(hw, "gated_delta", "context", "sglang")
    assert fit is not None
    few, many = (
        float(scan_with(hw.device, fit, count, 128.0, 16.0, 128.0, 128.0) - fit.fixed) / count
        for count in (8.0, 1024.0)
    )
    assert many > 2.0 * few
    # a device with more bandwidth at the same peak gains what memory held up
    wide = hw.device.model_copy(update={"memory_bandwidth": 2.0 * hw.device.memory_bandwidth})
    slow, fast = (float(scan_with(each, fit, 64.0, 4096.0, 32.0, 128.0, 128.0)) for each in (hw.device, wide))
    assert 1.5 < slow / fast < 2.0


def test_convolutions_as_timed_stand_beside_the_recurrence() -> None:
    arch = load_architecture("Qwen3-Next-80B-A3B")
    lines = {row.name: row.seconds for row in decode_breakdown(Replica.of(arch, H100, VLLM, Layout.of()), 256, 6e4)}
    fit = scan_fit(H100, "gated_delta convolution", "generation", "vllm")
    assert fit is not None and fit.timed_on is None
    each = float(convolved_with(H100.device, fit, 256.0, 1.0, 8192.0, 4.0))
    layers = sum(half.count for half in stack_of(arch).halves if isinstance(half.layer, Recurrent))
    scale = lines["convolution"] / (layers * each)
    assert layers == 36 and 0.8 < scale < 1.2  # the engine's factor on kernels alone
    assert lines["gated norm"] > 0


def _timings(model: str, truth: SparseFit) -> Series:
    rows = [(h, b, 1.0, p) for h in (16.0, 128.0) for b in (1.0, 16.0, 256.0) for p in (1024.0, 16384.0, 131072.0)]
    table = np.asarray(rows)
    names = ("num_heads", "batch", "q_len", "past_len")
    shape = {name: table[:, column] for column, name in enumerate(names)}
    ids = tuple(map(str, range(len(rows))))
    blank = Series(
        "sparse", "h100_sxm", "sglang", "fp8_block/fp8", f"{model}//generation", "sglang-0.5.14", shape,
        np.ones(len(rows)), ids,
    )  # fmt: skip
    return replace(blank, measured_s=module_seconds(blank, H100)(truth))


def test_constants_are_told_from_timings_of_modules_of_several_models() -> None:
    modules = [_timings(model, TRUTH) for model in ("deepseek-ai/DeepSeek-V3.2", "zai-org/GLM-5")]
    fit = fit_modules(modules, H100, check=False)
    assert (fit.section, fit.constants.mixer, fit.constants.phase) == ("sparse", "sparse", "generation")
    assert fit.fitted.predicted == pytest.approx(np.concatenate([one.measured_s for one in modules]), rel=0.03)
    assert fit.constants.fixed == pytest.approx(TRUTH.fixed, rel=0.15)


def test_further_kernels_leave_the_others_of_a_calibration_alone() -> None:
    base = load_device_calibration("h100_sxm")
    modules = [_timings(model, TRUTH) for model in ("deepseek-ai/DeepSeek-V3.2", "zai-org/GLM-5")]
    found = added(fit_series(modules, H100.device, base, check=False), base)
    assert (found.gemm, found.scan, found.spread, found.id) == (base.gemm, base.scan, base.spread, base.id)
    others = [fit for fit in base.sparse if (fit.kernel, fit.mixer, fit.phase) != ("sglang", "sparse", "generation")]
    assert [fit for fit in found.sparse if fit in others] == others
    assert len(found.sparse) == len(base.sparse)


def test_a_device_without_timings_takes_its_relatives_and_says_so() -> None:
    lent = load_hardware("h200_sxm").calibration
    assert {fit.timed_on for fit in (*lent.sparse, *lent.streams)} == {"h100_sxm"}
    assert {fit.timed_on for fit in lent.scan if fit.mixer == "kda"} == {"h100_sxm"}
    told = load_hardware("mi355x").calibration
    assert not told.sparse and not told.streams


def test_rows_that_show_the_host_are_not_read(tmp_path: Path) -> None:
    head = "gpu,src,kernel,phase,model,skip_indexer,gemm_dtype,kv_cache_dtype,num_heads,batch,q_len,past_len,flag,"
    rows = [
        "h100_sxm,sglang-0.5,dsa,context,zai-org/GLM-5,0,fp8_block,fp8,64,1,128,0,eager,900",
        "h100_sxm,sglang-0.5,dsa,context,zai-org/GLM-5,0,fp8_block,fp8,64,1,8192,0,eager,9000",
        "h100_sxm,sglang-0.5,dsa,context,zai-org/GLM-5,0,fp8_block,fp8,8,1,4096,0,eager,1100",
        "h100_sxm,sglang-0.5,dense_mha_fa3,context,zai-org/GLM-5,0,fp8_block,fp8,64,1,8192,0,,900",
        "h100_sxm,sglang-0.5,dsa,context,zai-org/GLM-5.2-FP8,1,fp8_block,fp8,64,1,128,0,,100",
    ]
    path = tmp_path / "modules.csv"
    path.write_text("\n".join([head + "latency_us", *rows]) + "\n")
    found = {mixer_of(one): float(one.measured_s.sum()) for one in read_series(path)}
    # four thousand tokens through an eighth of the heads take hardly longer than the host takes for 128
    assert found == pytest.approx({("sparse", "context"): 9e-3, ("sparse_reusing", "context"): 1e-4})


@pytest.mark.data
def test_modules_on_a_device_that_is_left_out(measured_data: Path) -> None:
    """Constants of a relative alone, on rows that no fit of the device saw: a third of GB200's, of two tables."""
    tables = ("dsv4_attention", "msa_module")
    series = [one for table in tables for one in read_series(measured_data / "kernels" / f"{table}.csv")]
    device = load_device("gb200")
    lent = at_published_rates(load_device_calibration("b200_sxm"), device, load_device("b200_sxm"))
    hw = load_hardware("gb200")
    errors: dict[str, list[np.ndarray]] = {"context": [], "generation": []}
    for one in merged([each for each in series if each.device == "gb200"]):
        mixer, phase = mixer_of(one)
        fit = next(f for f in lent.sparse if (f.mixer, f.phase, f.kernel) == (mixer, phase, one.kernel))
        errors[phase].append(np.abs(module_seconds(one, hw)(fit) / one.measured_s - 1.0))
    context, generation = (np.concatenate(errors[phase]) for phase in ("context", "generation"))
    assert len(generation) > 400
    assert np.median(generation) < 0.08 and generation.mean() < 0.12
    assert np.median(context) < 0.08 and context.mean() < 0.13


def test_the_scan_of_mamba_goes_by_chunks_and_by_memory() -> None:
    fit = ScanFit.model_construct(kernel="trtllm", mixer="mamba", phase="context", fixed=1e-5, memory=0.5, cached=0.0)
    device = H100.device

    def seconds(tokens: float) -> float:
        return float(chunked_with(device, fit, 2.0, tokens, 64.0, 128.0, 64.0, 128.0)) - 1e-5

    # two prompts, one chunk of 128 tokens each: 64 heads of 64 values move 8 bytes a token and 16 a state of 128
    assert seconds(128.0) == pytest.approx(2 * 64 * 64 * (8 * 128 + 16 * 128) / (0.5 * device.memory_bandwidth))
    assert seconds(1.0) == seconds(128.0)
    assert seconds(129.0) == pytest.approx(2 * seconds(128.0))
    own = next(fit for fit in load_device_calibration("b200_sxm").scan if fit.mixer == "mamba")
    assert own.quality.n == 204 and (own.quality.left_out_mape or 100) < 20
    lent = [fit.timed_on for fit in load_hardware("gb200").calibration.scan if fit.mixer == "mamba"]
    assert lent == ["b200_sxm"]


def test_what_a_relative_borrows_is_lent_on_and_says_who_was_timed() -> None:
    """H20 stands on H200's constants, on which no mixer was timed; they are H100's, at H20's own peak and bandwidth."""
    lent, timed = load_hardware("h20_sxm").calibration, load_hardware("h100_sxm").calibration
    assert {fit.timed_on for fit in (*lent.sparse, *lent.streams, *lent.scan)} == {"h100_sxm"}
    assert {fit.mixer for fit in lent.sparse} == {fit.mixer for fit in timed.sparse}
    # a phase that was not timed on a device is asked of its relative beside the one that was
    scans = load_hardware("a100_80g_sxm").calibration.scan
    own = {(fit.phase, fit.timed_on) for fit in scans if fit.mixer == "gated_delta"}
    assert own == {("generation", None), ("context", "h100_sxm")}
    # experts in formats that a device has no units for are not lent to it, nor anything beside what served rows told
    assert "mxfp4" in {fit.dtype for fit in load_hardware("a800_80g_sxm").calibration.moe if fit.timed_on}
    assert not any(fit.timed_on for fit in load_hardware("mi300x").calibration.moe)


@pytest.mark.data
@pytest.mark.parametrize(("device", "mechanism", "bound"), [("rtx_5090", "gdn", 0.35), ("rtx_5090", "kda", 0.2)])
def test_scans_over_prompts_go_by_bandwidth_too(measured_data: Path, device: str, mechanism: str, bound: float) -> None:
    """Forward passes by Triton on a device that has none: its peak is 0.45 of its relative's, its bandwidth 1.12."""
    with (measured_data / "kernels" / "linear_attention_train.csv").open() as file:
        rows = [
            (float(row["n_seqs"]), float(row["total_tokens"]), float(row["num_v_heads"]), float(row["latency_us"]))
            for row in csv.DictReader(file)
            if (row["gpu"], row["mechanism"], row["impl"], row["pass"]) == (device, mechanism, "fla_triton", "forward")
        ]
    count, tokens, heads, measured_us = np.array(rows).T
    hw = load_hardware(device)
    fit = scan_fit(hw, "kda" if mechanism == "kda" else "gated_delta", "context", "sglang")
    assert fit is not None and len(rows) >= 6
    ratio = 1e6 * scan_with(hw.device, fit, count, tokens / count, heads, 128.0, 128.0) / measured_us
    assert abs(np.log(np.median(ratio))) < bound


def test_modules_of_models_that_nobody_describes_are_refused_row_by_row(tmp_path: Path) -> None:
    head = "gpu,src,kernel,phase,model,gemm_dtype,kv_cache_dtype,num_heads,batch,q_len,past_len,flag,latency_us"
    rows = [
        f"gb300,vllm-0.27.0,mla,generation,moonshotai/Kimi-K3-preview,bfloat16,bf16,96,{2**i},1,4096,,50"
        for i in range(8)
    ]
    (tmp_path / "modules.csv").write_text("\n".join([head, *rows]) + "\n")
    found = predict_rows(tmp_path / "modules.csv", read_table(tmp_path / "modules.csv"))
    assert not found.predictions and len(found.refused) == 8
    assert "a model that rlperf does not have" in found.refused[0].reason
