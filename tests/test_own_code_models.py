"""Models whose classes are in their repositories, not in Transformers: read with their published totals, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from rlperf.cost.parameters import parameters
from rlperf.errors import SpecError
from rlperf.specs.architecture import Architecture
from rlperf.specs.hf.config import from_hf

MINICPM_2B: dict[str, Any] = {
    "model_type": "minicpm", "hidden_size": 2304, "intermediate_size": 5760, "num_hidden_layers": 40,
    "num_attention_heads": 36, "num_key_value_heads": 36, "vocab_size": 122753, "scale_emb": 12, "scale_depth": 1.4,
    "dim_model_base": 256,
}  # fmt: skip
LONGCAT_LITE: dict[str, Any] = {
    "model_type": "longcat_flash_ngram", "hidden_size": 3072, "num_layers": 14, "num_attention_heads": 32,
    "ffn_hidden_size": 6144, "expert_ffn_hidden_size": 1024, "n_routed_experts": 256, "zero_expert_num": 128,
    "moe_topk": 12, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "vocab_size": 131072, "ngram_vocab_size_ratio": 78, "emb_neighbor_num": 4, "emb_split_num": 4,
}  # fmt: skip
PIXTRAL: dict[str, Any] = {  # neither part states the sizes of its class
    "model_type": "llava",
    "text_config": {"model_type": "mistral", "head_dim": 128, "hidden_size": 5120, "intermediate_size": 14336,
                    "num_hidden_layers": 40, "num_key_value_heads": 8, "sliding_window": None, "vocab_size": 131072},
    "vision_config": {"model_type": "pixtral", "head_dim": 64, "image_size": 1024, "patch_size": 16,
                      "rope_theta": 10000.0},
}  # fmt: skip


def _read(data: dict[str, Any], **changes: Any) -> Architecture:
    return from_hf({**data, **changes}, name="x", source="test")


@pytest.mark.parametrize(
    ("data", "published"),
    [(MINICPM_2B, 2.72e9), (LONGCAT_LITE, 68.5e9), (PIXTRAL, 12.68e9)],
    ids=["MiniCPM-2B", "LongCat-Flash-Lite", "pixtral-12b"],
)
def test_totals_are_within_half_a_percent_of_model_cards(data: dict[str, Any], published: float) -> None:
    """Recalled: openbmb/MiniCPM-2B, meituan-longcat/LongCat-Flash-Lite, mistral-community/pixtral-12b."""
    assert parameters(_read(data)) == pytest.approx(published, rel=0.005)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "ouro", "total_ut_steps": 4}, "ouro cannot be modelled: some of its layers run several times"),
        ({"model_type": "new", "total_ut_steps": 4}, "nor what its total_ut_steps make of its layers"),
        ({"model_type": "new", "num_loops": 4}, "nor what its num_loops make of its layers"),
        ({"model_type": "new", "kv_compression_factor": 4}, "nor what its kv_compression_factor make of its layers"),
        ({"model_type": "new", "mask_token_id": 7}, "new cannot be modelled: it denoises a block of tokens at once"),
        ({"model_type": "fast_dllm"}, "fast_dllm cannot be modelled: it denoises a block of tokens at once"),
        ({"model_type": "new", "architectures": ["Fast_dLLM_QwenForCausalLM"]}, "new cannot be modelled: it denoises"),
        ({"model_type": "rwkv6"}, "rwkv6 cannot be modelled: its token mixer is neither attention"),
        ({"model_type": ""}, r"model_type: is missing \(the config.json that Transformers reads states it\)"),
    ],
)
def test_what_runs_several_times_or_denoises_is_no_plain_decoder(changes: dict[str, Any], message: str) -> None:
    """Ouro-2.6B runs its 48 layers four times: read as plain ones it had a quarter of its FLOPs and of its cache.

    What a name holds by chance makes it no harmless one: `steps` has `eps`, and `factor` has `act`.
    """
    with pytest.raises(SpecError, match=message):
        _read(MINICPM_2B, **changes)


def test_experts_of_arctic_have_a_dense_half_beside_them_as_wide_as_the_stream() -> None:
    """Its own code builds the residual one of hidden_size; the file was refused for its moe_layer_frequency."""
    file = {
        "model_type": "arctic", "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 100, "num_local_experts": 8,
        "num_experts_per_tok": 2, "moe_layer_frequency": 2, "parallel_attn_mlp_res": True, "use_residual": True,
        "tie_word_embeddings": False,
    }  # fmt: skip
    arch = _read(file)
    assert arch.experts is not None
    assert (arch.experts.hidden, arch.experts.shared_hidden, arch.assumed) == (48, 64, ())
    assert arch.feed_forwards == ("dense", "moe", "dense", "moe")
    alone = _read(file, parallel_attn_mlp_res=False)
    assert parameters(arch) - parameters(alone) == 2 * 3 * 64 * 64
