"""What each Hugging Face ``model_type`` implies beside the numbers in its ``config.json``: data, one line a family."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
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
    expert_bias, attention_sinks, attention_gate, attention_gate_heads, post_norms, qk_norm, qk_norm_whole, head_bias :
        as in `Architecture`
    all_moe : every layer is a mixture of experts, so that their number must be given
    alternate : period of full attention (the last of each period) among sliding or linear layers; 0 = all alike
    windowed : whether ``sliding_window`` counts when ``layer_types`` does not say
    switched_window : the window counts only where ``use_sliding_window`` says so, from ``max_window_layers`` on
    sliding_kv_times : key heads of sliding layers over those of full ones where the configuration does not say
    sliding_heads : query heads of sliding layers where the configuration does not say; 0: those of all
    other : mixer of the other layers; empty: sliding attention where there is a window
    words : words of layer lists that mean something else here than in `rlperf.specs.hf.names.WORDS`
    compressed : keys are gathered, so that the tokens of one must be given for every layer
    latent : attention is multi-head latent, so that its ranks must be given
    gate_reads_queries : as in `LatentAttention`
    single_halves : every layer is a mixer or a feed-forward (Nemotron-H)
    alone : mixer of which every layer consists, without attention or a feed-forward
    parallel_mamba : a Mamba-2 mixer runs beside attention in every layer
    dense_beside : a dense feed-forward runs beside the experts of every layer
    double_layers : a layer of the file is two: attention and feed-forward twice, experts beside the second
    full_gates : gates of Kimi Delta Attention have no rank
    learned_positions : positions are a table
    ffn_pairs : the stated width of a dense feed-forward is of its gate and its values together
    ffn_times : width of a dense feed-forward in widths of the residual stream where the file states none
    modal_experts : numbers of experts are pairs: of text, and of images, whose experts no token of text reaches
    nested : parts of the file whose fields count as its own
    left_out : what of its layers the kinds here do not have, in words; intervals are wider for it
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
    attention_gate_heads: bool = False
    head_bias: bool = False
    all_moe: bool = False
    alternate: int = 0
    windowed: bool = False
    switched_window: bool = False
    sliding_kv_times: int = 1
    sliding_heads: int = 0
    other: str = ""
    words: Mapping[str, str] = field(default_factory=dict)
    compressed: bool = False
    latent: bool = False
    gate_reads_queries: bool = False
    single_halves: bool = False
    alone: str = ""
    parallel_mamba: bool = False
    dense_beside: bool = False
    double_layers: bool = False
    full_gates: bool = False
    learned_positions: bool = False
    ffn_pairs: bool = False
    ffn_times: int = 0
    modal_experts: bool = False
    nested: tuple[str, ...] = ()
    left_out: str = ""
    defaults: Mapping[str, int | float | bool] = field(default_factory=dict)


_QWEN2 = Family(biased="qkv", attention_bias=True, switched_window=True)
_QWEN3 = Family(qk_norm=True, switched_window=True)
_QWEN3_NEXT = Family(
    qk_norm=True, attention_gate=True, shared_gate=True, alternate=4, other="linear", switched_window=True
)
_GLM = Family(biased="qkv")
_GLM4 = Family(biased="qkv", attention_bias=True, post_norms=True)
_LATENT = Family(latent=True)
_COMPRESSED = Family(all_moe=True, compressed=True)
_BAILING = Family(biased="none")
_GEMMA4 = Family(tied=True, qk_norm=True, post_norms=True, alternate=6, windowed=True)
_STEP = Family(qk_norm=True, attention_gate_heads=True, windowed=True, sliding_heads=96)
_LIGHTNING = Family(words={"linear_attention": "lightning"}, all_moe=True)
_OLMO2 = Family(qk_norm=True, qk_norm_whole=True, windowed=True, alternate=4)
_NAS = Family()
_GPT = Family(norm_weights=2, gated=False, attention_bias=True, ffn_bias=True, tied=True, ffn_times=4)
_GPT_POSITIONS = replace(_GPT, learned_positions=True)
_ERNIE_VL = Family(all_moe=True, modal_experts=True)
_GPTJ = Family(norm_weights=2, gated=False, ffn_bias=True, head_bias=True, ffn_times=4)
_PERSIMMON = Family(norm_weights=2, gated=False, attention_bias=True, ffn_bias=True, qk_norm=True)
_HY_V4 = Family(latent=True, attention_gate=True, attention_sinks=True)
_INKLING = Family(
    qk_norm=True,
    words={"hybrid": "full", "hybrid_sliding": "sliding"},
    left_out="short convolutions around halves, keys and values, and logits of relative positions",
)
_GEMMA3 = Family(
    tied=True,
    qk_norm=True,
    post_norms=True,
    alternate=6,
    windowed=True,
)
_MLLAMA = Family(left_out="cross-attention to images (costed as a window of their tokens)")
_LLAMA4 = Family(alternate=4, defaults={"attention_chunk_size": 8192})

FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "granite": Family(),
    "mistral": Family(windowed=True),
    "mixtral": Family(windowed=True, all_moe=True),
    "phi3": Family(windowed=True),
    "mimo": _QWEN2,
    "qwen": Family(biased="qkv", attention_bias=True, ffn_pairs=True),
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
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "kimi_k2": _LATENT,
    "glm4": _GLM4,
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
    "nemotron_h": Family(gated=False, single_halves=True),
    "llama4": _LLAMA4,
    "gpt": _GPT,
    "gpt2": _GPT,
    "gptj": _GPTJ,
    "gpt_neox": Family(norm_weights=2, gated=False, attention_bias=True, ffn_bias=True),
    "starcoder2": Family(norm_weights=2, gated=False, attention_bias=True, ffn_bias=True, tied=True, windowed=True),
    "mpt": Family(norm_weights=2, gated=False, tied=True),
    "falcon": Family(norm_weights=2, gated=False, tied=True, ffn_times=4),
    "gemma": Family(tied=True),
    "gemma2": Family(tied=True, post_norms=True, alternate=2, windowed=True),
    "gemma3": _GEMMA3,
    # hybrids
    "kimi_linear": Family(latent=True, other="kda"),
    "mamba": Family(alone="mamba1", tied=True),
    "falcon_mamba": Family(alone="mamba1", tied=True),
    "mamba2": Family(alone="mamba"),
    "jamba": Family(other="mamba1", words={"mamba": "mamba1"}),
    "bamba": Family(other="mamba"),
    "granitemoehybrid": Family(other="mamba"),
    "falcon_h1": Family(parallel_mamba=True),
    "lfm2": Family(qk_norm=True, tied=True, other="short_conv", defaults={"block_auto_adjust_ff_dim": True}),
    "lfm3": Family(qk_norm=True, tied=True, post_norms=True, attention_gate_heads=True, other="short_conv"),
    "olmo_hybrid": Family(qk_norm=True, qk_norm_whole=True, other="linear", alternate=4),
    "lfm2_moe": Family(qk_norm=True, tied=True, other="short_conv"),
    "minimax_text_01": _LIGHTNING,
    "minimax_m1": _LIGHTNING,
    "minimax": _LIGHTNING,
    "bailing_moe_linear": Family(biased="none", other="lightning"),
    "bailing_moe_linear_v2": Family(biased="none", other="lightning"),
    "bailing_hybrid": Family(biased="none", latent=True, other="lightning", full_gates=True),
    "bailing_moe_v2_5": Family(biased="none", latent=True, other="lightning"),
    # learned choices of keys
    "deepseek_v32": _LATENT,
    "glm_moe_dsa": Family(biased="qkv", latent=True),
    "deepseek_v4": _COMPRESSED,
    "deepseek_v41": _COMPRESSED,
    "minimax_m3": Family(qk_norm=True, all_moe=True),
    "minimax_m3_vl": Family(qk_norm=True, all_moe=True),
    # layers that differ
    "nemotron-nas": _NAS,
    "nemotron_nas": _NAS,
    "deci": _NAS,
    "decilm": _NAS,
    "gemma4": _GEMMA4,
    "step3": Family(),
    "step3_vl": Family(),
    "step3p5": _STEP,
    "step3p7": _STEP,
    "mimo_v2": Family(),
    "mimo_v2_flash": Family(sliding_kv_times=2),
    "longcat_flash": Family(latent=True, all_moe=True, double_layers=True),
    "longcat_flash_ngram": Family(latent=True, all_moe=True, double_layers=True),
    # plain ones
    "kimi_vl": _LATENT,
    "kimi_k25": _LATENT,
    "glm4v": _GLM4,
    "glm4v_moe": _GLM,
    "ministral": Family(windowed=True),
    "ministral3": Family(windowed=True),
    "mistral3": Family(windowed=True),
    "pixtral": Family(windowed=True),
    "qwen3_omni_moe": _QWEN3,
    "qwen2_5_omni": _QWEN2,
    "phimoe": Family(norm_weights=2, attention_bias=True, head_bias=True, windowed=True, all_moe=True),
    "phi4mm": Family(windowed=True, left_out="what sees and hears, and adapters for it"),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "olmoe": Family(qk_norm=True, qk_norm_whole=True, all_moe=True),
    "cohere": Family(tied=True),
    "cohere2": Family(tied=True, windowed=True, alternate=4),
    "cohere2_moe": Family(tied=True, windowed=True, alternate=4),
    "smollm3": Family(tied=True, switched_window=True),
    "seed_oss": Family(biased="qkv", attention_bias=True),
    "ernie4_5": Family(tied=True),
    "ernie4_5_moe": Family(tied=True, all_moe=True),
    "ernie4_5_vl_moe": _ERNIE_VL,
    "ernie4_5_moe_vl": _ERNIE_VL,
    "hunyuan_v1_dense": Family(qk_norm=True),
    "hunyuan_v1_moe": Family(qk_norm=True, all_moe=True, defaults={"num_shared_expert": 1}),
    "hunyuan": Family(),
    "bailing_moe": _BAILING,
    "bailing_moe_v2": _BAILING,
    "dots_ocr": _QWEN2,
    "dots1": Family(biased="qkv", qk_norm=True),
    "exaone": Family(),
    "exaone4": Family(qk_norm=True, windowed=True),
    "exaone_moe": Family(qk_norm=True, windowed=True),
    "solar_open": _GLM,
    "sarvam_moe": replace(_GLM, qk_norm=True),
    "granitemoe": Family(all_moe=True),
    "granitemoeshared": Family(all_moe=True),
    "apertus": Family(gated=False, qk_norm=True),
    "apertus1p5": Family(gated=False, qk_norm=True),
    "arcee": Family(gated=False),
    "afmoe": Family(qk_norm=True, post_norms=True, attention_gate=True, windowed=True, alternate=4),
    "stablelm": Family(norm_weights=2, biased="qkv"),
    "internlm2": Family(),
    "internlm3": Family(),
    "hy_v3": Family(qk_norm=True),
    "mellum": Family(qk_norm=True),
    "laguna": Family(qk_norm=True, attention_gate_heads=True, windowed=True),
    "kolibri1": Family(qk_norm=True, post_norms=True, windowed=True),
    "flint": Family(qk_norm=True, attention_sinks=True, windowed=True),
    "lara_mini": Family(tied=True, qk_norm=True, all_moe=True),
    "beam": Family(qk_norm=True, post_norms=True, attention_gate=True, windowed=True),
    "muse_glimmer": Family(post_norms=True, attention_gate=True, windowed=True),
    "muse_spark": Family(post_norms=True, attention_gate=True, windowed=True),
    "cohere_compass": Family(tied=True, windowed=True),
    "cwm": Family(windowed=True),
    "glm": Family(biased="qkv", attention_bias=True),
    "glm_ocr": Family(biased="qkv", post_norms=True),
    "glmga": _GLM4,
    "glm46v": _GLM4,
    "exaone4_5": Family(qk_norm=True, windowed=True),
    "granite_swa": Family(tied=True, attention_sinks=True, windowed=True),
    "granitemoe_swa": Family(attention_sinks=True, windowed=True, all_moe=True),
    "vaultgemma": Family(tied=True, alternate=2, windowed=True),
    "gemma4_unified": _GEMMA4,
    "flex_olmo": Family(qk_norm=True, qk_norm_whole=True, all_moe=True),
    "olmo": Family(norm_weights=0),
    "phi4_multimodal": Family(windowed=True),
    "qwen3_omni_moe_thinker": _QWEN3,
    "qwen2_5_omni_thinker": _QWEN2,
    "hunyuan_vl": Family(qk_norm=True),
    "aria": Family(),
    "bitnet": Family(tied=True),
    "helium": Family(),
    "iquestcoder": Family(),
    "hyperclovax": Family(),
    "doge": Family(qk_norm=True, left_out="the mask that leaves keys out", defaults={"is_moe": False}),
    "arctic": Family(all_moe=True),
    "grok1": Family(post_norms=True),
    "grok": Family(post_norms=True),
    "chatglm": Family(biased="qkv"),
    "baichuan": Family(),
    "molmo": Family(biased="qkv", ffn_pairs=True, left_out="the vision tower, of which its file says nothing"),
    "molmo2": Family(qk_norm=True),
    "PanguProMoE": Family(),
    "smallthinker": Family(all_moe=True),
    "dbrx": Family(nested=("ffn_config", "attn_config"), all_moe=True),
    # latent attention
    "deepseek": Family(),
    "deepseek_vl_v2": _LATENT,
    "pangu_ultra_moe": Family(latent=True, post_norms=True),
    "mistral4": _LATENT,
    "mistral_large4": _LATENT,
    "axk1": _LATENT,
    "axk2": Family(
        latent=True, attention_gate=True, gate_reads_queries=True, left_out="gates of low rank behind norms"
    ),
    "sarvam_mla": _LATENT,
    "youtu": replace(_LATENT, tied=True),
    "minicpm": Family(
        tied=True, left_out="sparse attention where a file switches it on (InfLLM: costed as full attention)"
    ),
    "minicpm3": replace(_LATENT, tied=True),
    "hy_v4": _HY_V4,
    "hy_v4_vl": _HY_V4,
    "dots3_note": Family(latent=True, attention_gate_heads=True),
    "glm5_next": Family(latent=True, other="kda"),
    # feed-forwards without a gate
    "phi": Family(norm_weights=2, gated=False, attention_bias=True, ffn_bias=True, head_bias=True),
    "jais2": Family(norm_weights=2, gated=False),
    "nanochat": Family(norm_weights=0, gated=False),
    "cosmos3_edge": Family(gated=False),
    "persimmon": _PERSIMMON,
    "fuyu": _PERSIMMON,
    "codegen": _GPTJ,
    "bloom": _GPT,
    "xglm": _GPT,
    "opt": _GPT_POSITIONS,
    "biogpt": _GPT_POSITIONS,
    "openai-gpt": _GPT_POSITIONS,
    "gpt_bigcode": replace(_GPT_POSITIONS, defaults={"num_key_value_heads": 1}),
    "gpt_neo": replace(_GPT_POSITIONS, attention_bias=False, windowed=True),
    # described in part
    "zaya": Family(
        tied=True,
        all_moe=True,
        words={"hybrid": "full"},
        left_out="convolutions over queries and keys (CCA), routers of several layers, scales of the stream",
    ),
    "qwen4_exp": replace(_QWEN3_NEXT, left_out="seconds of the products of low rank that mix its streams"),
    "mllama": _MLLAMA,
    "mllama_text_model": _MLLAMA,
    "gemma3n": Family(
        tied=True,
        qk_norm=True,
        post_norms=True,
        alternate=5,
        windowed=True,
        left_out="updates of the streams in turn (AltUp: costed as hyper-connections) and sparse activations",
    ),
    "inkling": _INKLING,
    "inkling_mm_model": _INKLING,
    "inkling2": replace(_INKLING, qk_norm=False, attention_gate=True),
}
"""Families by model_type; a trailing ``_text`` is dropped before the look-up."""

_TWO_STACKS = "it is an encoder-decoder; rlperf models decoder-only language models"
_ENCODER = "it is an encoder without generation; rlperf models decoder-only language models"
_DENOISES = "it denoises a block of tokens at once; rlperf models decoders that generate one after another"
_LOOPS = "some of its layers run several times for every token, which rlperf does not model"
_RECURRENT = "its token mixer is neither attention, a state-space model nor a delta rule"

REFUSED: dict[str, str] = {
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
    "rwkv7": "a delta rule with decays by channel, which neither vLLM nor SGLang serves and no kind here describes",
    "hymba": "attention and a state-space model share one projection, behind tokens of memory",
    "xlstm": _RECURRENT,
    "recurrent_gemma": _RECURRENT,
    "zamba": "one attention block is shared by many layers, which rlperf does not model",
    "zamba2": "one attention block is shared by many layers, which rlperf does not model",
    "bert-generation": "its layers are BERT's, which no family here describes",
    "diffusion_gemma": _DENOISES,
    "llada": _DENOISES,
    "llada2_moe": _DENOISES,
    "Dream": _DENOISES,
    "blt": "a second model joins its bytes into patches, which rlperf does not model",
    "jetmoe": "its attention is a mixture of experts, which rlperf does not model",
    "hrm": "its layers run in cycles of two depths, which rlperf does not model",
    "dory": _LOOPS,
    "inkling2_loop": _LOOPS,
    "ouro": _LOOPS,
    "huginn_raven": _LOOPS,
    "moshi": "it generates several streams of audio codes by a second decoder, which rlperf does not model",
    "phi4flash": "its second half reads one cache through gated memory units, which rlperf does not model",
}
"""model_types that are known and cannot be represented, each with the reason."""
_REFUSED_PARTS = {r"^rwkv": _RECURRENT, r"diffusion|(?<![a-z])dllm|llada|^dream|^sdar": _DENOISES}
"""What names of the same kind of model have in common, whatever their release and size: RWKV-6, Fast-dLLM."""


_REFUSED_FIELDS: dict[str, tuple[bool, str]] = {
    "is_encoder_decoder": (True, _TWO_STACKS),
    "use_bidirectional_attention": (True, _ENCODER),  # EmbeddingGemma; in a part it holds for a prompt (PaliGemma)
    "is_causal": (False, _ENCODER),
}
"""Values of a file's own fields, not of its parts', that make another model of a known model_type."""


def refusal(kind: str, classes: Iterable[str] = (), stated: Mapping[str, object] = MappingProxyType({})) -> str:
    """Why a model_type, a model of these classes, or what a file states, cannot be represented; empty where it can.

    >>> refusal("rwkv6") == REFUSED["rwkv"], refusal("new", ["Fast_dLLM_QwenForCausalLM"]) == REFUSED["llada"]
    (True, True)
    >>> refusal("new", ["MedLLMForCausalLM"])  # an LLM of its own name
    ''
    """
    if kind in REFUSED:
        return REFUSED[kind]
    names = [name.lower() for name in (kind, *classes)]
    reasons = [why for part, why in _REFUSED_PARTS.items() if any(re.search(part, name) for name in names)]
    found = [each for each, (value, _) in _REFUSED_FIELDS.items() if stated.get(each) is value]
    reasons += [f"by its {each}, {_REFUSED_FIELDS[each][1]}" for each in found]
    return next(iter(reasons), "")
