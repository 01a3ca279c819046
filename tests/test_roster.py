"""Configurations of current models: read by their fields to the published number of parameters, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlperf.api import ask
from rlperf.cost.basis import serving_basis
from rlperf.cost.layers import stack_of
from rlperf.cost.parameters import active_parameters, language_parameters, parameters
from rlperf.errors import SpecError
from rlperf.specs.engine_calibration import load_engine_calibration
from rlperf.specs.hardware import load_hardware
from rlperf.specs.hf.config import from_hf
from rlperf.specs.hf.defaults import left_out
from rlperf.specs.profiles import load_architecture
from rlperf.specs.short_job import job_text, short_job

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 1000,
}  # fmt: skip


def _shape(kind: str, sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """A configuration of (hidden, layers, heads, kv_heads, feed-forward, vocabulary)."""
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
            "vocab_size")  # fmt: skip
    return {"model_type": kind, **dict(zip(keys, sizes, strict=True)), **more}


OWN_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
"""What every file of a language model states."""
PIXTRAL = {"hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 4096, "num_attention_heads": 16,
           "patch_size": 14, "image_size": 1540, "model_type": "pixtral"}  # fmt: skip

# Sizes from the published config.json of each, total as its hub page or report prints it.
PUBLISHED: dict[str, tuple[float, dict[str, Any]]] = {
    # LiquidAI/LFM2-1.2B: 1.17B (1,170,340,608 in its checkpoint)
    "LFM2-1.2B": (1_170_340_608, _shape(
        "lfm2", (2048, 16, 32, 8, 12288, 65536), block_auto_adjust_ff_dim=True, block_multiple_of=256,
        block_ff_dim=12288, conv_L_cache=3, full_attn_idxs=[2, 5, 8, 10, 12, 14])),
    # HuggingFaceTB/SmolLM3-3B: 3.08B
    "SmolLM3-3B": (3.075e9, _shape("smollm3", (2048, 36, 16, 4, 11008, 128256))),
    # ibm-granite/granite-4.0-h-tiny: 6.94B
    "granite-4.0-h-tiny": (6.94e9, _shape(
        "granitemoehybrid", (1536, 40, 12, 4, 512, 100352), num_local_experts=64, num_experts_per_tok=6,
        shared_intermediate_size=1024, mamba_n_heads=48, mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1,
        mamba_d_conv=4, tie_word_embeddings=True,
        layer_types=["attention" if index in (5, 15, 25, 35) else "mamba" for index in range(40)])),
    # allenai/OLMo-2-1124-7B: 7.30B
    "OLMo-2-7B": (7.30e9, _shape("olmo2", (4096, 32, 32, 32, 11008, 100352))),
    # ByteDance-Seed/Seed-OSS-36B-Base: 36.2B
    "Seed-OSS-36B": (36.15e9, _shape(
        "seed_oss", (5120, 64, 80, 8, 27648, 155136), head_dim=128, attention_bias=True, attention_out_bias=False)),
    # tencent/Hunyuan-A13B-Instruct: 80.4B
    "Hunyuan-A13B": (80.4e9, _shape(
        "hunyuan_v1_moe", (4096, 32, 32, 8, 3072, 128167), num_experts=64, moe_topk=[8] * 32,
        moe_intermediate_size=[3072] * 32, num_shared_expert=[1] * 32, use_qk_norm=True, tie_word_embeddings=True)),
    # baidu/ERNIE-4.5-21B-A3B: 21.8B
    "ERNIE-4.5-21B-A3B": (21.8e9, _shape(
        "ernie4_5_moe", (2560, 28, 20, 4, 12288, 103424), moe_num_experts=64, moe_k=6, moe_intermediate_size=1536,
        moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=27, moe_layer_interval=1,
        tie_word_embeddings=True)),
    # inclusionAI/Ling-mini-2.0: 16.3B
    "Ling-mini-2.0": (16.26e9, _shape(
        "bailing_moe_v2", (2048, 20, 16, 4, 5120, 157184), head_dim=128, num_experts=256, num_experts_per_tok=8,
        moe_intermediate_size=512, num_shared_experts=1, first_k_dense_replace=1, use_qk_norm=True)),
    # meituan-longcat/LongCat-Flash-Chat: 562B (560B in its report, arXiv 2509.01322)
    "LongCat-Flash": (562e9, {
        "model_type": "longcat_flash", "hidden_size": 6144, "num_layers": 28, "num_attention_heads": 64,
        "ffn_hidden_size": 12288, "expert_ffn_hidden_size": 2048, "n_routed_experts": 512, "zero_expert_num": 256,
        "moe_topk": 12, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "vocab_size": 131072}),
    # XiaomiMiMo/MiMo-V2-Flash: 309B
    "MiMo-V2-Flash": (309e9, _shape(
        "mimo_v2_flash", (4096, 48, 64, 4, 16384, 152576), head_dim=192, v_head_dim=128, swa_num_attention_heads=64,
        swa_num_key_value_heads=8, swa_head_dim=192, swa_v_head_dim=128, sliding_window=128,
        add_swa_attention_sink_bias=True, n_routed_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048,
        moe_layer_freq=[0] + [1] * 47, hybrid_layer_pattern=[0, *([1, 1, 1, 1, 0] + [1, 1, 1, 1, 1, 0] * 7)])),
    # ai21labs/Jamba-v0.1: 51.6B
    "Jamba-v0.1": (51.57e9, _shape(
        "jamba", (4096, 32, 32, 8, 14336, 65536), num_experts=16, num_experts_per_tok=2, attn_layer_period=8,
        attn_layer_offset=4, expert_layer_period=2, expert_layer_offset=1, mamba_d_state=16, mamba_d_conv=4,
        mamba_expand=2, mamba_dt_rank=256)),
    # MiniMaxAI/MiniMax-Text-01: 456B (arXiv 2501.08313)
    "MiniMax-Text-01": (456e9, _shape(
        "minimax_text_01", (6144, 80, 64, 8, 9216, 200064), head_dim=128, num_local_experts=32,
        num_experts_per_tok=2, attn_type_list=[int(index % 8 == 7) for index in range(80)])),
    # ibm-ai-platform/Bamba-9B: 9.78B
    "Bamba-9B": (9.78e9, _shape(
        "bamba", (4096, 32, 32, 8, 14336, 128256), attn_layer_indices=[9, 18, 27], mamba_n_heads=128,
        mamba_d_head="auto", mamba_expand=2, mamba_d_state=128, mamba_n_groups=1, mamba_d_conv=4)),
    # tiiuae/Falcon-H1-0.5B-Base: 521,411,104
    "Falcon-H1-0.5B": (521_411_104, _shape(
        "falcon_h1", (1024, 36, 8, 2, 2048, 32784), head_dim=64, mamba_d_ssm=1536, mamba_n_heads=24, mamba_d_head=64,
        mamba_d_state=128, mamba_n_groups=1, mamba_d_conv=4, mamba_chunk_size=128)),
    # LGAI-EXAONE/EXAONE-4.0-32B: 32.0B
    "EXAONE-4.0-32B": (32.0e9, _shape(
        "exaone4", (5120, 64, 40, 8, 27392, 102400), sliding_window=4096, sliding_window_pattern="LLLG")),
    # microsoft/Phi-4-mini-instruct: 3.84B
    "Phi-4-mini": (3.836e9, _shape(
        "phi3", (3072, 32, 24, 8, 8192, 200064), tie_word_embeddings=True, sliding_window=262144)),
    # CohereLabs/c4ai-command-a-03-2025: 111B
    "command-a": (111e9, _shape(
        "cohere2", (12288, 64, 96, 8, 36864, 256000), head_dim=128, sliding_window=4096, sliding_window_pattern=4)),
    # mistralai/Mistral-Small-3.1-24B-Instruct-2503: 24,011,361,280 in its checkpoint
    "Mistral-Small-3.1": (24_011_361_280, {
        "model_type": "mistral3", "spatial_merge_size": 2, "vision_config": PIXTRAL,
        "text_config": _shape("mistral", (5120, 40, 32, 8, 32768, 131072), head_dim=128)}),
    # inclusionAI/Ling-1T: 1000B
    "Ling-1T": (1000e9, _shape(
        "bailing_moe_v2", (8192, 80, 64, 8, 18432, 157184), head_dim=128, num_experts=256, num_experts_per_tok=8,
        moe_intermediate_size=2048, num_shared_experts=1, first_k_dense_replace=4, use_qk_norm=True)),
    # inclusionAI/Ring-flash-linear-2.0: 104B
    "Ring-flash-linear-2.0": (104e9, _shape(
        "bailing_moe_linear", (4096, 32, 32, 4, 9216, 157184), head_dim=128, num_experts=256, num_experts_per_tok=8,
        moe_intermediate_size=1024, num_shared_experts=1, first_k_dense_replace=1, use_qk_norm=True,
        layer_group_size=8)),
    # nvidia/NVIDIA-Nemotron-Nano-9B-v2: 8.89B
    "Nemotron-Nano-9B-v2": (8.89e9, _shape(
        "nemotron_h", (4480, 56, 40, 8, 15680, 131072), head_dim=128, mamba_num_heads=128, mamba_head_dim=80,
        ssm_state_size=128, n_groups=8, conv_kernel=4, chunk_size=128,
        hybrid_override_pattern="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-")),
    # xai-org/grok-2: 270B; its model_type is another model's, its class is not
    "grok-2": (270e9, _shape(
        "git", (8192, 64, 64, 8, 32768, 131072), architectures=["Grok1ForCausalLM"], head_dim=128,
        num_local_experts=8, num_experts_per_tok=2, moe_intermediate_size=16384, residual_moe=True)),
    # openpangu Pro MoE: 72B (arXiv 2505.21411)
    "Pangu-Pro-MoE": (72e9, _shape(
        "PanguProMoE", (5120, 48, 40, 8, 5376, 153376), head_dim=128, num_experts=64, num_experts_per_tok=8,
        moe_intermediate_size=1344, shared_expert_intermediate_size=5376)),
    # zai-org/chatglm3-6b: 6.24B
    "chatglm3-6b": (6.24e9, {
        "model_type": "chatglm", "hidden_size": 4096, "num_layers": 28, "num_attention_heads": 32,
        "multi_query_group_num": 2, "ffn_hidden_size": 13696, "kv_channels": 128, "padded_vocab_size": 65024,
        "add_qkv_bias": True, "seq_length": 8192}),
    # OpenGVLab/InternVL3_5-8B: 8.53B
    "InternVL3_5-8B": (8.53e9, {
        "model_type": "internvl_chat", "downsample_ratio": 0.5,
        "llm_config": _shape("qwen3", (4096, 36, 32, 8, 12288, 151936), head_dim=128),
        "vision_config": {
            "model_type": "intern_vit_6b", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
            "intermediate_size": 4096, "image_size": 448, "patch_size": 14}}),
    # baidu/ERNIE-4.5-VL-28B-A3B: 29.4B in its checkpoint, experts of images included
    "ERNIE-4.5-VL-28B-A3B": (29.4e9, {
        **_shape("ernie4_5_moe_vl", (2560, 28, 20, 4, 12288, 103424), moe_num_experts=[64, 64], moe_k=6,
                 moe_intermediate_size=[1536, 512], moe_layer_start_index=[1, 1], moe_layer_end_index=[29, 28],
                 moe_num_shared_experts=2, tie_word_embeddings=True),
        "vision_config": {"depth": 32, "hidden_size": 1280, "mlp_ratio": 4, "num_heads": 16, "patch_size": 14}}),
    # language model of deepseek-ai/deepseek-vl2-tiny, whose attention is not latent, as Transformers counts one of its
    # sizes (unlimited_ocr)
    "deepseek-vl2-tiny": (2_934_735_360, {"model_type": "deepseek_vl_v2", "language_config": _shape(
        "deepseek_v2", (1280, 12, 10, 10, 6848, 129280), use_mla=False, v_head_dim=0, first_k_dense_replace=1,
        moe_intermediate_size=896, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6)}),
    # LGAI-EXAONE/EXAONE-3.5-7.8B-Instruct: 7.82B
    "EXAONE-3.5-7.8B": (7.82e9, {
        "model_type": "exaone", "hidden_size": 4096, "num_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 102400}),
    # swiss-ai/Apertus-70B-2509: 70.6B
    "Apertus-70B": (70.6e9, _shape("apertus", (8192, 80, 64, 8, 43008, 131072), qk_norm=True)),
    # openbmb/MiniCPM4-8B: 8.19B; its class ties the head where a file is silent, as that of MiniCPM-2B is
    "MiniCPM4-8B": (8.19e9, _shape("minicpm", (4096, 32, 32, 2, 16384, 73448), scale_emb=12, dim_model_base=256,
                                   tie_word_embeddings=False)),
    # internlm/Intern-S1: 241B
    "Intern-S1": (241e9, {
        "model_type": "interns1", "downsample_ratio": 0.5,
        "text_config": _shape("qwen3_moe", (4096, 94, 64, 4, 12288, 153216), head_dim=128, num_experts=128,
                              num_experts_per_tok=8, moe_intermediate_size=1536),
        "vision_config": {
            "model_type": "interns1_vision", "hidden_size": 3200, "num_hidden_layers": 45, "num_attention_heads": 25,
            "intermediate_size": 12800, "image_size": [448, 448], "patch_size": [14, 14]}}),
    # Qwen/Qwen-7B: 7,721,324,544 in its checkpoint; its width is of gate and values together
    "Qwen-7B": (7_721_324_544, {
        "model_type": "qwen", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "intermediate_size": 22016, "kv_channels": 128, "vocab_size": 151936, "seq_length": 8192, "no_bias": True}),
    # FreedomIntelligence/openPangu-Ultra-MoE-718B: 718B
    "openPangu-Ultra-MoE": (718e9, _shape(
        "pangu_ultra_moe", (7680, 61, 128, 128, 18432, 153600), num_dense_layers=3, attention_qk_dim=128,
        attention_qk_rope_dim=64, attention_v_dim=128, attention_kv_lora_dim=512, attention_q_lora_dim=1536,
        moe_intermediate_size=2048, num_routed_experts=256, num_shared_experts=1, num_experts_per_tok=8,
        sandwich_norm=True)),
    # meta-llama/Llama-3.2-11B-Vision-Instruct: 10,670,220,835 in its checkpoint
    "Llama-3.2-11B-Vision": (10_670_220_835, {
        "model_type": "mllama",
        "text_config": _shape("mllama_text_model", (4096, 40, 32, 8, 14336, 128256),
                              cross_attention_layers=[3, 8, 13, 18, 23, 28, 33, 38]),
        "vision_config": {
            "model_type": "mllama_vision_model", "attention_heads": 16, "hidden_size": 1280, "image_size": 560,
            "intermediate_size": 5120, "max_num_tiles": 4, "num_global_layers": 8, "num_hidden_layers": 32,
            "patch_size": 14, "vision_output_dim": 7680, "supported_aspect_ratios": [
                [1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]]}}),
    # tiiuae/falcon-mamba-7b: 7,272,665,088 in its checkpoint
    "falcon-mamba-7b": (7_272_665_088, {
        "model_type": "falcon_mamba", "hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 64,
        "state_size": 16, "time_step_rank": 256, "conv_kernel": 4, "vocab_size": 65024, "tie_word_embeddings": False}),
    # stepfun-ai/step3: 316B of the language model (arXiv 2507.19427)
    "Step-3": (316e9, {
        "model_type": "step3_text", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64,
        "num_attention_groups": 1, "head_dim": 256, "share_q_dim": 2048, "intermediate_size": 18432,
        "moe_num_experts": 48, "moe_top_k": 3, "moe_intermediate_size": 5120, "share_expert_dim": 5120,
        "moe_layers_enum": ",".join(map(str, range(4, 60))), "vocab_size": 128815}),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_total_is_within_half_a_percent_of_the_published_number(name: str) -> None:
    total, data = PUBLISHED[name]
    arch = from_hf(data, name=name, source="test")
    assert parameters(arch) == pytest.approx(total, rel=0.005)
    stack_of(arch)  # of kinds that rlperf has


GIVEN_TOTALS = {
    # DeepSeek-V4 model cards: 284B and 1.6T; zai-org/GLM-5: 744B; google/gemma-4-26B-A4B: 25.2B without its tower;
    # nvidia/Llama-3_3-Nemotron-Super-49B-v1: 49.9B; stepfun-ai/Step-3.5-Flash: 196.81B; Kimi-Linear: 49.1B
    "nvidia--DeepSeek-V4-Flash-NVFP4": 284e9,
    "zai-org--GLM-5": 744e9,
    "google--gemma-4-26B-A4B": 25.2e9,
    "nvidia--Llama-3_3-Nemotron-Super-49B-v1": 49.87e9,
    "stepfun-ai--Step-3.7-Flash": 196.81e9,
    "moonshotai--Kimi-Linear-48B-A3B-Instruct": 49.1e9,
    "nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": 550e9,
    "Qwen--Qwen3-Next-80B-A3B-Instruct": 80e9,
}


@pytest.mark.data
def test_every_given_configuration_loads_with_its_published_total(measured_data: Path) -> None:
    files = sorted((measured_data / "architectures_hf").glob("*.json"))
    found = {path.stem: load_architecture(path) for path in files}
    assert len(found) >= 28
    for name, total in GIVEN_TOTALS.items():
        assert language_parameters(found[name]) == pytest.approx(total, rel=0.005), name
    for arch in found.values():
        assert 0 < active_parameters(arch) <= parameters(arch)
    assert active_parameters(found["zai-org--GLM-5"]) == pytest.approx(40e9, rel=0.05)
    kinds = {type(half.layer).__name__ for arch in found.values() for half in stack_of(arch).halves}
    assert {"Sparse", "SparseReusing", "Compressed", "BlockSparse", "Kda", "Linear", "Mamba", "Nothing"} <= kinds


def test_an_unknown_model_type_is_read_by_its_fields_and_says_so() -> None:
    known, unknown = (from_hf({**LLAMA, "model_type": kind}, name="x", source="t") for kind in ("llama", "lama"))
    assert unknown.assumed == ("model_type 'lama' is not known: it is read by its fields (did you mean llama?)",)
    assert parameters(unknown) == parameters(known)
    of_its_own = from_hf({**LLAMA, "model_type": "llamav"}, name="x", source="t")  # with a family's name in front
    assert of_its_own.assumed == ("model_type 'llamav' is not known: it is read by its fields",)
    by_class = from_hf({**LLAMA, "model_type": "new", "architectures": ["Qwen3ForCausalLM"]}, name="x", source="t")
    assert by_class.qk_norm and not by_class.assumed
    asked = from_hf({**LLAMA, "model_type": "new", "ssm_mixing": 3}, name="x", source="t", like="qwen2")
    assert asked.qkv_bias
    assert asked.assumed == ("model_type 'new' is read as qwen2, as asked", "ssm_mixing: not read")
    for kind in ("new", "llama"):  # whether or not it is needed
        with pytest.raises(SpecError, match=r"knows no family 'lama' \(did you mean llama"):
            from_hf({**LLAMA, "model_type": kind}, name="x", source="t", like="lama")


_H, _VALUES = 4096, 64 * 128
_EXPERT = {"sarvam_moe": 3 * _H * 1024, "sarvam_mla": 3 * _H * 2048}
_ATTENTION = {
    "sarvam_moe": 2 * _H * 64 * 64 + 2 * _H * 4 * 64 + 2 * 64,
    "sarvam_mla": _H * 64 * 192 + _H * (512 + 64) + 512 + 512 * 64 * (128 + 128) + _VALUES * _H,
    "minicpm3": 2560 * 768 + 768 + 768 * 40 * 96 + 2560 * 288 + 256 + 256 * 40 * (64 + 64) + 40 * 64 * 2560,
}
"""Matrices of a layer by the classes of transformers/models of 5.24.0; norms of queries and keys, or of ranks, too."""


@pytest.mark.parametrize(
    ("kind", "total"),
    [
        ("sarvam_moe", 2 * 262144 * _H + _H + 19 * (_ATTENTION["sarvam_moe"] + 2 * _H) + 3 * _H * 8192
         + 18 * (129 * _EXPERT["sarvam_moe"] + 128 * _H)),
        ("sarvam_mla", 2 * 262144 * _H + _H + 32 * (_ATTENTION["sarvam_mla"] + 2 * _H) + 3 * _H * 16384
         + 31 * (129 * _EXPERT["sarvam_mla"] + 128 * _H)),
        ("minicpm3", 73448 * 2560 + 2560 + 62 * (_ATTENTION["minicpm3"] + 3 * 2560 * 6400 + 2 * 2560)),
    ],
    ids=["sarvam_moe", "sarvam_mla", "minicpm3"],
)  # fmt: skip
def test_what_files_leave_out_is_their_class_s(kind: str, total: int) -> None:
    """MiniCPM3's class derives the width of its values, and files without it were refused."""
    sizes = {name: value for name, value in left_out(kind, {}, part=True).items() if name in OWN_SIZES}
    ranks = {"q_lora_rank": 768} if kind == "minicpm3" else {}
    arch = from_hf({"model_type": kind, **sizes, **ranks}, name="x", source="t")
    assert (arch.assumed, parameters(arch)) == ((), total)


def test_layers_of_lara_mini_slide_reach_all_or_keep_a_state() -> None:
    """transformers/models/lara_mini of 5.24.0: queries and keys have norms, the shared expert has no gate."""
    words = ["linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention"]
    arch = from_hf({**_shape("lara_mini", (1024, 5, 16, 4, 0, 151936)), "layer_types": words, "sliding_window": 512},
                   name="x", source="t")  # fmt: skip
    assert arch.layer_mixers == ("linear", "sliding", "linear", "full", "sliding")
    assert arch.experts is not None and arch.qk_norm and arch.tied_embeddings and not arch.assumed
    assert (arch.experts.count, arch.experts.shared_hidden, arch.experts.shared_gate) == (128, 512, False)


def test_what_was_assumed_widens_the_interval_and_is_said() -> None:
    hw, engine = load_hardware("h100_sxm", "dgx_h100"), load_engine_calibration("vllm")
    known, unknown = (from_hf({**LLAMA, "model_type": kind}, name="x", source="t") for kind in ("llama", "lama"))
    plain, wide = (serving_basis(arch.model_copy(update={"family": "llama"}), hw, engine) for arch in (known, unknown))
    assert wide.spread.high > plain.spread.high and wide.spread.low < plain.spread.low
    assert unknown.assumed[0] in wide.reasons


def test_smallthinker_names_its_experts_and_windows_its_own_way() -> None:
    arch = from_hf(
        {
            "model_type": "smallthinker", "hidden_size": 2560, "num_hidden_layers": 8, "num_attention_heads": 28,
            "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "moe_ffn_hidden_size": 768,
            "moe_num_primary_experts": 64, "moe_num_active_primary_experts": 6, "sliding_window_size": 4096,
            "sliding_window_layout": [0, 1, 1, 1] * 2,
        }, name="x", source="test",
    )  # fmt: skip
    assert arch.layer_mixers == ("full", "sliding", "sliding", "sliding") * 2
    assert arch.experts is not None
    assert (arch.experts.count, arch.experts.active, arch.experts.hidden, arch.window) == (64, 6, 768, 4096)


def test_layers_of_one_kind_may_differ() -> None:
    blocks = [
        {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 3.0}},
        {"attention": {"no_op": True}, "ffn": {"ffn_mult": 6.0}},
        {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}},
        {"attention": {"n_heads_in_group": 4}, "ffn": {"replace_with_linear": True}},
    ]
    data = {**LLAMA, "model_type": "nemotron-nas", "hidden_size": 512, "block_configs": blocks}
    data = {key: value for key, value in data.items() if key not in ("intermediate_size", "num_key_value_heads")}
    arch = from_hf(data, name="x", source="t")
    # two attentions of 8 heads and 2 key heads of 64, one square of 512 for attention and one for a feed-forward,
    # feed-forwards of 2 x 3 x 512 / 3 and twice as wide; norms: two, one, one, two, and the last
    attention = 512 * (512 + 2 * 128) + 512 * 512
    assert parameters(arch) == 2 * attention + 2 * 512**2 + 3 * 512 * (1024 + 2048) + 7 * 512 + 2 * 1000 * 512
    with pytest.raises(SpecError, match="sparsify: attention of this block is not modelled"):
        from_hf({**data, "block_configs": [{"attention": {"sparsify": {"a": 1}}, "ffn": {}}] * 4}, name="x", source="t")


def test_numbers_of_a_layer_list_mean_what_the_list_says() -> None:
    """A config.json of MiniMax-M2 lists attention of type 1 in every layer, and was refused: only M1 had numbers."""
    listed = _shape("minimax_m2", (64, 4, 8, 2, 32, 1000), head_dim=16, num_local_experts=8, num_experts_per_tok=2)
    plain = from_hf(listed, name="x", source="t")
    assert from_hf({**listed, "attn_type_list": [1] * 4}, name="x", source="t") == plain
    mixed = from_hf({**LLAMA, "hybrid_layer_pattern": [0, 1, 1, 0], "sliding_window": 8}, name="x", source="t")
    assert mixed.layer_mixers == ("full", "sliding", "sliding", "full")
    with pytest.raises(SpecError, match="layer_types: rlperf does not know 1"):
        from_hf({**LLAMA, "layer_types": [1] * 4}, name="x", source="t")


@pytest.mark.parametrize(
    ("classed", "scores"),
    [
        ("Qwen2ForProcessRewardModel", True),  # Qwen/Qwen2.5-Math-PRM-7B
        ("InternLM2ForRewardModel", True),
        ("LlamaForRewardModelWithGating", True),  # RLHFlow/ArmoRM
        ("LlamaForScore", True),
        ("LlamaForTokenClassification", True),
        ("LlamaForCausalLM", False),
    ],
)
def test_classes_of_reward_models_have_no_head_over_the_vocabulary(classed: str, scores: bool) -> None:
    """Of such a model the parameters held a head of 545M that a 7B does not have, and it was planned as a policy."""
    whole, arch = (from_hf({**LLAMA, **more}, name="x", source="t") for more in ({}, {"architectures": [classed]}))
    assert arch.classifies == scores
    assert parameters(whole) - parameters(arch) == scores * 64 * (1000 - 1)


@pytest.mark.parametrize(("field", "value"), [("use_bidirectional_attention", True), ("is_causal", False)])
def test_attention_to_both_sides_is_refused_by_its_field(field: str, value: bool) -> None:
    """EmbeddingGemma has the model_type of Gemma 3, and was read as a policy."""
    with pytest.raises(SpecError, match=f"llama cannot be modelled: by its {field}, it is an encoder"):
        from_hf({**LLAMA, field: value}, name="x", source="t")
    for other in (not value, "vision", None):  # Gemma 4 has it between the patches of an image
        from_hf({**LLAMA, field: other}, name="x", source="t")
    from_hf({"model_type": "llava", "text_config": {**LLAMA, field: value}}, name="x", source="t")  # of its prompt


_SO400M = {"hidden_size": 1152, "num_hidden_layers": 27, "intermediate_size": 4304, "num_attention_heads": 16,
           "image_size": 384, "patch_size": 14}  # fmt: skip
_SO400M_BLOCK = 4 * 1152**2 + 4 * 1152 + 2 * 1152 * 4304 + 4304 + 1152 + 4 * 1152


def _sees(kind: str, of: str, text_hidden: int, **outer: Any) -> int:
    vision = {**_SO400M, "model_type": of, **outer.pop("vision", {})}
    text = {**LLAMA, "hidden_size": text_hidden}
    arch = from_hf({"model_type": kind, "text_config": text, "vision_config": vision, **outer}, name="x", source="t")
    assert not arch.assumed and arch.vision is not None
    return arch.vision.parameters


def test_a_llava_projector_reads_as_many_layers_as_are_listed_and_siglip_pools_unless_it_says_no() -> None:
    """Transformers' LlavaNextMultiModalProjector; SiglipVisionTransformer (granite-vision states four layers)."""
    one = _sees("llava_next", "siglip_vision_model", 2048, vision_feature_layer=-2)
    four = _sees("llava_next", "siglip_vision_model", 2048, vision_feature_layer=[-24, -20, -12, -1])
    assert four - one == 3 * 1152 * 2048
    bare = _sees("llava_next", "siglip_vision_model", 2048, vision={"vision_use_head": False})
    assert one - bare == _SO400M_BLOCK - 1152


def test_ovis_sees_in_words_of_a_vocabulary_of_its_own() -> None:
    """A head from joined patches to the words, a norm of both values, and the table that the language model reads."""
    tower = 3 * 14**2 * 1152 + 1152 + 27**2 * 1152 + 27 * _SO400M_BLOCK + 2 * 1152
    words = {"vision": {"hidden_stride": 2}, "visual_vocab_size": 65536}
    assert _sees("ovis2_5", "siglip2_navit", 4096, **words) == tower + (4 * 1152 + 2) * (65536 - 4) + 65536 * 4096
    aimv2 = {"hidden_size": 1536, "num_hidden_layers": 24, "intermediate_size": 4096, "num_attention_heads": 12,
             "image_size": 448, "vocab_size": 65536, "num_visual_indicator_tokens": 5, "hidden_stride": 2}  # fmt: skip
    blocks = 24 * (4 * 1536**2 + 3 * 1536 * 4096 + 2 * 1536)
    seen = _sees("ovis2", "ovis2_vision_model", 3584, vision=aimv2)
    assert seen == pytest.approx(blocks + 4 * 1536 * 65531 + 65536 * 3584 + 32**2 * 1536, rel=0.002)


def test_null_experts_are_scored_and_not_multiplied() -> None:
    total, data = PUBLISHED["LongCat-Flash"]
    arch = from_hf(data, name="x", source="t")
    assert arch.experts is not None and (arch.experts.active, arch.experts.null_count) == (8, 256)
    # its report: 18.6B to 31.3B of a token, 27B on average
    assert active_parameters(arch) == pytest.approx(27e9, rel=0.05)
    assert arch.layers == 56 and total > 5e11


def test_a_job_says_what_an_unknown_configuration_is_like(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "model_type": "new", "ssm_mixing": 3}))
    with pytest.raises(SpecError, match=r"nor what its ssm_mixing make of its layers .*--like FAMILY"):
        ask(short_job(str(path), 8), folder=tmp_path)
    job = short_job(str(path), 8, like="qwen3")
    assert "like: qwen3" in job_text(job)
    task = ask(job, folder=tmp_path).context.tasks[0]
    assert task.architecture.qk_norm and len(task.architecture.assumed) == 2
