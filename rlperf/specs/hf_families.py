"""What each Hugging Face ``model_type`` implies beside the numbers in its ``config.json``: data, one line a family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Biases = Literal["none", "qkv", "all"]
"""Linear layers of softmax attention that carry a bias."""


@dataclass(frozen=True)
class Family:
    """Conventions of one model_type: the defaults of its ``transformers`` configuration class and its module's weights.

    Attributes
    ----------
    biased : layers a bias covers where attention has one
    attention_bias : whether attention has one when the configuration does not say
    tied : whether the output head is the embedding when the configuration does not say
    norm_weights : values per channel in a norm (1 RMSNorm, 2 LayerNorm with bias)
    gated, ffn_bias : feed-forward with a gate matrix; with biases
    shared_gate : the shared expert is scaled by a gate of its own
    expert_bias, attention_sinks, attention_gate, post_norms, qk_norm, qk_norm_whole, head_bias : as in
        `Architecture`
    all_moe : every layer is a mixture of experts, so that their number must be given
    alternate : period of full attention (the last of each period) among sliding or linear layers; 0 = all alike
    windowed : whether ``sliding_window`` counts when ``layer_types`` does not say
    linear : the other layers are linear attention
    latent : attention is multi-head latent, so that its ranks must be given
    defaults : values of fields that published files leave out
    """

    biased: Biases = "all"
    attention_bias: bool = False
    tied: bool = False
    norm_weights: int = 1
    gated: bool = True
    ffn_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    post_norms: bool = False
    attention_sinks: bool = False
    attention_gate: bool = False
    expert_bias: bool = False
    shared_gate: bool = False
    head_bias: bool = False
    all_moe: bool = False
    alternate: int = 0
    windowed: bool = False
    linear: bool = False
    latent: bool = False
    defaults: Mapping[str, int | float | bool] = field(default_factory=dict)


_QWEN2 = Family(biased="qkv", attention_bias=True)
_QWEN3 = Family(qk_norm=True)
_QWEN3_NEXT = Family(qk_norm=True, attention_gate=True, shared_gate=True, alternate=4, linear=True)
_GLM = Family(biased="qkv")
_GPT = Family(norm_weights=2, gated=False, attention_bias=True, ffn_bias=True, tied=True)
_GEMMA3 = Family(
    tied=True,
    qk_norm=True,
    post_norms=True,
    alternate=6,
    windowed=True,
    # Gemma3TextConfig's defaults: the published 4B file leaves them out.
    defaults={"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208},
)
_LLAMA4 = Family(alternate=4, defaults={"attention_chunk_size": 8192})

FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "granite": Family(),
    "mistral": Family(windowed=True),
    "mixtral": Family(windowed=True, all_moe=True),
    "phi3": Family(windowed=True),
    "mimo": _QWEN2,
    "qwen2": _QWEN2,
    "qwen2_moe": Family(biased="qkv", attention_bias=True, shared_gate=True),
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5": _QWEN3_NEXT,
    "qwen3_5_moe": _QWEN3_NEXT,
    "deepseek_v2": Family(latent=True),
    "deepseek_v3": Family(latent=True),
    "kimi_k2": Family(latent=True),
    "glm4": Family(biased="qkv", attention_bias=True, post_norms=True),
    "glm4_moe": _GLM,
    "glm4_moe_lite": Family(biased="qkv", latent=True),
    "minimax_m2": Family(qk_norm=True, qk_norm_whole=True, all_moe=True),
    "gpt_oss": Family(
        attention_bias=True,
        attention_sinks=True,
        expert_bias=True,
        all_moe=True,
        alternate=2,
        windowed=True,
        defaults={"sliding_window": 128},
    ),
    "nemotron": Family(norm_weights=2, gated=False),
    "nemotron_h": Family(gated=False),
    "llama4": _LLAMA4,
    "gpt": _GPT,
    "gpt2": _GPT,
    "gptj": Family(norm_weights=2, gated=False, ffn_bias=True, head_bias=True),
    "gpt_neox": Family(norm_weights=2, gated=False, attention_bias=True, ffn_bias=True),
    "starcoder2": Family(norm_weights=2, gated=False, attention_bias=True, ffn_bias=True, tied=True),
    "mpt": Family(norm_weights=2, gated=False, tied=True),
    "falcon": Family(norm_weights=2, gated=False, tied=True),
    "gemma": Family(tied=True),
    "gemma2": Family(tied=True, post_norms=True, alternate=2, windowed=True),
    "gemma3": _GEMMA3,
}
"""Families by model_type; a trailing ``_text`` is dropped before the look-up."""

_SPARSE = "its attention picks keys with a learned indexer, which rlperf does not model"
_TWO_STACKS = "it is an encoder-decoder; rlperf models decoder-only language models"
_ENCODER = "it is an encoder without generation; rlperf models decoder-only language models"
_RECURRENT = "its token mixer is neither attention, Mamba-2 nor a gated delta rule"

REFUSED: dict[str, str] = {
    "glm_moe_dsa": _SPARSE,
    "deepseek_v32": _SPARSE,
    "deepseek_v4": _SPARSE,
    "t5": _TWO_STACKS,
    "mt5": _TWO_STACKS,
    "umt5": _TWO_STACKS,
    "t5gemma": _TWO_STACKS,
    "bart": _TWO_STACKS,
    "mbart": _TWO_STACKS,
    "whisper": _TWO_STACKS,
    "marian": _TWO_STACKS,
    "pegasus": _TWO_STACKS,
    "bert": _ENCODER,
    "roberta": _ENCODER,
    "deberta-v2": _ENCODER,
    "modernbert": _ENCODER,
    "clip": _ENCODER,
    "vit": _ENCODER,
    "rwkv": _RECURRENT,
    "rwkv7": _RECURRENT,
    "mamba": "its mixer is Mamba-1; rlperf models Mamba-2",
    "jamba": "its mixer is Mamba-1; rlperf models Mamba-2",
    "minimax_text_01": "its mixer is lightning attention, which rlperf does not model",
    "minimax": "its mixer is lightning attention, which rlperf does not model",
    "mllama": "images enter through cross-attention layers, which rlperf does not model",
    "kimi_k25": "its vision tower is not modelled; save its text_config as a file of its own",
}
"""model_types that are known and cannot be represented, each with the reason."""
