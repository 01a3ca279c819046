"""Hugging Face ``config.json`` to `Architecture`.

Reads what `transformers` writes (composite configurations with ``text_config`` included) and its plain relatives. What
cannot be represented is refused by name with the reason; every missing or wrong field is listed, not only the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from rlperf.errors import Problem, SpecError, did_you_mean
from rlperf.specs.architecture import (
    Architecture,
    Experts,
    LatentAttention,
    LinearAttention,
    StateSpace,
    VisionTower,
)
from rlperf.specs.hf_families import FAMILIES, REFUSED, Family
from rlperf.specs.hf_fields import Fields, Line
from rlperf.specs.hf_vision import TOWERS

_EXPERT_COUNT = ("num_experts", "num_local_experts", "n_routed_experts")
_LAYERS = ("num_hidden_layers", "n_layers", "n_layer")
_HIDDEN = ("hidden_size", "d_model", "n_embd")
_HEADS = ("num_attention_heads", "n_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_MIXERS: dict[str, str] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "sliding",
    "linear_attention": "linear",
}
_NEMOTRON_LAYERS: dict[str, tuple[str, str]] = {
    "M": ("mamba", "none"),
    "*": ("full", "none"),
    "E": ("none", "moe"),
    "-": ("none", "dense"),
}
_NEMOTRON_WORDS = {"mamba": "M", "attention": "*", "moe": "E", "mlp": "-"}


def looks_like_hf(data: Mapping[str, Any]) -> bool:
    """Whether a JSON object is meant as a Hugging Face configuration (and not as one of ours)."""
    return any(key in data for key in ("model_type", "text_config", *_HIDDEN, *_LAYERS))


@dataclass(frozen=True)
class _Given:
    """What is being read: the language part's fields, its family, and the outer configuration around it."""

    fields: Fields
    outer: Fields
    kind: str
    family: Family

    @property
    def layers(self) -> int:
        return min(self.fields.need(*_LAYERS), 10_000)


def from_hf(
    data: Mapping[str, Any], *, name: str, source: str, file: str | None = None, line: Line | None = None
) -> Architecture:
    """The architecture that a Hugging Face ``config.json`` describes.

    Parameters
    ----------
    data : the parsed JSON object
    name, source : name of the architecture and where the file is from
    file, line : file name and line finder for messages

    Raises
    ------
    SpecError : a model_type that rlperf cannot represent (with the reason), or every missing or wrong field

    >>> tiny = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    ...         "intermediate_size": 16, "vocab_size": 10}
    >>> from_hf(tiny, name="tiny", source="example").layer_mixers
    ('full', 'full')
    """
    outer = Fields(data, file, line)
    given = _family(outer)
    try:
        values = _values(given)
        vision = _vision(given, values["hidden"])
        if outer.problems:
            raise SpecError(outer.problems)
        return Architecture(name=name, source=source, family=given.kind, vision=vision, **values)
    except ValidationError as error:
        messages = [str(item["msg"]).removeprefix("Value error, ") for item in error.errors(include_url=False)]
        raise SpecError([Problem(message, file) for message in messages]) from error


def _family(outer: Fields) -> _Given:
    """The language part and its family; refuses what cannot be represented."""
    fields = outer.child("text_config") if outer.has("text_config") else outer
    for part in (outer, fields):
        kind = part.text("model_type").removesuffix("_text")
        reason = REFUSED.get(kind)
        if reason is None and part.flag("is_encoder_decoder", default=False):
            reason = REFUSED["t5"]
        if reason is None and part.has("index_topk"):
            reason = REFUSED["deepseek_v32"]
        if reason is not None:
            part.note("model_type", f"{kind or 'this architecture'} cannot be modelled: {reason}")
            raise SpecError(outer.problems)
    kind = (fields.text("model_type") or outer.text("model_type")).removesuffix("_text")
    if not kind:
        fields.note("model_type", "is missing")
        family = Family()
    elif kind in FAMILIES:
        family = FAMILIES[kind]
    else:
        fields.note(
            "model_type",
            f"rlperf does not know {kind!r}",
            did_you_mean(kind, FAMILIES) or f"it knows {', '.join(sorted(FAMILIES))}",
        )
        raise SpecError(outer.problems)
    if family.defaults:
        merged = {**family.defaults, **{key: value for key, value in fields.data.items() if value is not None}}
        fields.data = merged
    return _Given(fields, outer, kind, family)


def _values(given: _Given) -> dict[str, Any]:
    """Arguments of `Architecture` except its name, source and vision tower."""
    fields, family = given.fields, given.family
    hidden, layers, heads = fields.need(*_HIDDEN), given.layers, fields.need(*_HEADS)
    if given.kind == "nemotron_h":
        mixers, halves = _nemotron_layers(fields, layers)
    else:
        mixers, halves = _mixers(given, layers), _feed_forwards(given, layers)
    latent = _latent(fields) if family.latent or fields.has("kv_lora_rank") else None
    if latent:
        mixers = tuple(["latent" if mixer == "full" else mixer for mixer in mixers])
    bias = fields.flag("attention_bias", "qkv_bias", "use_bias", "bias", default=family.attention_bias)
    if given.kind == "mpt" and fields.has("no_bias", "d_model"):
        bias = not fields.flag("no_bias", default=True)
    ffn_bias = fields.flag("mlp_bias", default=family.ffn_bias) or (given.kind in ("mpt", "falcon") and bias)
    gated = fields.flag("mlp_gated", default=family.gated)
    norm = family.norm_weights
    if given.kind == "mpt" and fields.has("no_bias", "d_model") and not bias:
        norm = 1
    return {
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": _kv_heads(given, heads),
        "head_dim": latent.nope_head_dim + latent.rope_head_dim if latent else _head_dim(fields, hidden, heads),
        "ffn_hidden": _dense_width(given, hidden) if "dense" in halves else 0,
        "ffn_gated": gated,
        "vocab": fields.need("vocab_size"),
        "tied_embeddings": fields.flag(
            "tie_word_embeddings", default=given.outer.flag("tie_word_embeddings", default=family.tied)
        ),
        "qkv_bias": bias and family.biased != "none",
        "output_bias": bias and family.biased == "all",
        "ffn_bias": ffn_bias,
        "qk_norm": fields.flag("qk_norm", "use_qk_norm", default=family.qk_norm),
        "qk_norm_whole": family.qk_norm_whole,
        "post_norms": family.post_norms,
        "attention_sinks": family.attention_sinks,
        "attention_gate": fields.flag("attn_output_gate", default=family.attention_gate),
        "head_bias": family.head_bias,
        "learned_positions": _learned_positions(given),
        "norm_weights": norm,
        "max_positions": fields.optional("max_position_embeddings", "n_positions", "max_seq_len") or None,
        "mixers": _shorten(mixers),
        "feed_forwards": _shorten(halves),
        "window": fields.need("sliding_window", "attention_chunk_size") if "sliding" in mixers else 0,
        "latent": latent,
        "experts": _experts(given, gated) if "moe" in halves else None,
        "state_space": _state_space(fields) if "mamba" in mixers else None,
        "linear_attention": _linear_attention(fields) if "linear" in mixers else None,
        "prediction_layers": _prediction_layers(fields),
        "checkpoint_dtype": _checkpoint_dtype(given),
    }


def _shorten(kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    return kinds[:1] if len(set(kinds)) == 1 else kinds


def _kv_heads(given: _Given, heads: int) -> int:
    fields = given.fields
    if given.kind == "falcon" and not fields.has("num_key_value_heads"):
        if fields.flag("new_decoder_architecture", default=False):
            return fields.optional("num_kv_heads", default=heads) or heads
        return 1 if fields.flag("multi_query", default=True) else heads
    if given.kind == "mpt" and fields.has("attn_config"):
        return fields.child("attn_config").optional("kv_n_heads", default=heads) or heads
    return fields.optional(*_KV_HEADS, default=heads) or heads


def _head_dim(fields: Fields, hidden: int, heads: int) -> int:
    if fields.has("head_dim"):
        return fields.need("head_dim")
    if hidden % heads and fields.has(*_HIDDEN) and fields.has(*_HEADS):
        fields.note("head_dim", f"is missing, and hidden_size ({hidden}) is not a multiple of the heads ({heads})")
    return max(hidden // heads, 1)


def _dense_width(given: _Given, hidden: int) -> int:
    fields = given.fields
    if given.kind == "llama4":
        return fields.need("intermediate_size_mlp")
    if given.kind in ("gpt", "gpt2", "gptj", "falcon") and not fields.has("intermediate_size", "ffn_hidden_size"):
        return fields.optional("n_inner") or 4 * hidden
    if given.kind == "mpt" and not fields.has("intermediate_size"):
        return round(fields.number("expansion_ratio", default=4.0) * hidden)
    return fields.need("intermediate_size", "ffn_hidden_size")


def _learned_positions(given: _Given) -> int:
    fields = given.fields
    if given.kind == "gpt2":
        return fields.optional("n_positions", "n_ctx", default=1024)
    if given.kind == "mpt" and not fields.has("position_embedding"):
        alibi = fields.has("attn_config") and fields.child("attn_config").flag("alibi", default=False)
        learned = fields.flag("learned_pos_emb", default=True) and not alibi
        return fields.optional("max_seq_len", default=2048) if learned else 0
    return fields.need("max_position_embeddings") if fields.text("position_embedding") == "learned" else 0


def _latent(fields: Fields) -> LatentAttention:
    return LatentAttention(
        q_rank=fields.optional("q_lora_rank"),
        kv_rank=fields.need("kv_lora_rank"),
        nope_head_dim=fields.need("qk_nope_head_dim"),
        rope_head_dim=fields.need("qk_rope_head_dim"),
        value_head_dim=fields.need("v_head_dim"),
    )


def _mixers(given: _Given, layers: int) -> tuple[str, ...]:
    """Token mixer of every layer; ``layer_types`` where given, else the family's pattern."""
    fields, family = given.fields, given.family
    if fields.has("layer_types"):
        kinds = [str(kind) for kind in fields.items("layer_types")]
        unknown = sorted(set(kinds) - set(_MIXERS))
        if unknown:
            fields.note("layer_types", f"rlperf does not know {', '.join(unknown)}", f"it knows {', '.join(_MIXERS)}")
        if len(kinds) != layers:
            fields.note("layer_types", f"has {len(kinds)} entries for {layers} layers")
            return ("full",)
        return tuple([_MIXERS.get(kind, "full") for kind in kinds])
    window, first = _window(given)
    other = "linear" if family.linear else "sliding" if window else "full"
    period = fields.optional("full_attention_interval", "sliding_window_pattern", default=family.alternate)
    full = {index for index in range(layers) if index < first or (period and index % period == period - 1)}
    return tuple(["full" if index in full else other for index in range(layers)])


def _window(given: _Given) -> tuple[int, int]:
    """Window of the sliding layers [tokens], 0 without, and the first layer that has one."""
    fields = given.fields
    if given.kind == "llama4":
        return fields.optional("attention_chunk_size"), 0
    if given.kind.startswith("qwen"):  # these carry a window that is switched off, or on from some layer
        on = fields.flag("use_sliding_window", default=False)
        return (fields.optional("sliding_window"), fields.optional("max_window_layers")) if on else (0, 0)
    return (fields.optional("sliding_window") if given.family.windowed else 0), 0


def _feed_forwards(given: _Given, layers: int) -> tuple[str, ...]:
    """Feed-forward kind of every layer."""
    fields = given.fields
    if not fields.optional(*_EXPERT_COUNT):
        if given.family.all_moe:
            fields.need(*_EXPERT_COUNT)
        only = "dense"
        return (only,)
    dense = set(range(min(fields.optional("first_k_dense_replace"), layers)))
    dense |= {index for index in fields.items("mlp_only_layers") if isinstance(index, int)}
    period = fields.optional("decoder_sparse_step", "interleave_moe_layer_step", default=1) or 1
    dense |= {index for index in range(layers) if (index + 1) % period}
    frequency = fields.data.get("moe_layer_freq")
    if isinstance(frequency, list):
        dense |= {index for index, flag in enumerate(frequency) if not flag}
    elif isinstance(frequency, int) and frequency > 1:
        dense |= {index for index in range(layers) if index % frequency}
    halves = ["dense" if index in dense else "moe" for index in range(layers)]
    return tuple(halves)


def _nemotron_layers(fields: Fields, layers: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Nemotron-H: every layer is one half; ``M`` Mamba-2, ``*`` attention, ``E`` experts, ``-`` dense."""
    words = fields.items("layers_block_type") if fields.has("layers_block_type") else []
    pattern = "".join(_NEMOTRON_WORDS.get(str(word), "?") for word in words) or fields.text("hybrid_override_pattern")
    if not pattern:
        fields.note("hybrid_override_pattern", "is missing (or layers_block_type)")
    unknown = sorted(set(pattern) - set(_NEMOTRON_LAYERS))
    if unknown:
        fields.note("hybrid_override_pattern", f"rlperf does not know {' '.join(unknown)}; it knows M * E -")
    if pattern and len(pattern) != layers:
        fields.note("hybrid_override_pattern", f"has {len(pattern)} entries for {layers} layers")
    kinds = [_NEMOTRON_LAYERS.get(letter, ("full", "none")) for letter in pattern] or [("full", "none")]
    return tuple(mixer for mixer, _ in kinds), tuple(half for _, half in kinds)


def _experts(given: _Given, gated: bool) -> Experts | None:
    fields, family = given.fields, given.family
    count, active = fields.need(*_EXPERT_COUNT), fields.need("num_experts_per_tok", "experts_per_token")
    width = fields.need("moe_intermediate_size", "intermediate_size")
    shared = fields.optional("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
    if not shared:
        shared = fields.optional("n_shared_experts") * width
    if given.kind == "llama4":
        shared = width
    if active > count:
        fields.note("num_experts_per_tok", f"is {active}, more than the {count} experts")
        return None
    return Experts(
        count=count,
        active=active,
        hidden=width,
        shared_hidden=shared,
        shared_gate=family.shared_gate and shared > 0,
        gated=gated,
        bias=family.expert_bias,
        latent_hidden=fields.optional("moe_latent_size"),
    )


def _state_space(fields: Fields) -> StateSpace:
    return StateSpace(
        heads=fields.need("mamba_num_heads"),
        head_dim=fields.need("mamba_head_dim"),
        state=fields.need("ssm_state_size"),
        groups=fields.need("n_groups"),
        conv_kernel=fields.optional("conv_kernel", default=4) or 4,
        chunk=fields.optional("chunk_size", default=128) or 128,
    )


def _linear_attention(fields: Fields) -> LinearAttention:
    return LinearAttention(
        key_heads=fields.need("linear_num_key_heads"),
        value_heads=fields.need("linear_num_value_heads"),
        key_head_dim=fields.need("linear_key_head_dim"),
        value_head_dim=fields.need("linear_value_head_dim"),
        conv_kernel=fields.optional("linear_conv_kernel_dim", default=4) or 4,
    )


def _prediction_layers(fields: Fields) -> int:
    if fields.has("num_mtp_modules") and not fields.flag("use_mtp", default=False):
        return 0
    return fields.optional("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")


def _checkpoint_dtype(given: _Given) -> str:
    for part in (given.fields, given.outer):
        if part.has("checkpoint_quantization"):
            return part.text("checkpoint_quantization")
        if part.has("quantization_config"):
            return part.child("quantization_config").text("quant_method", default="unknown")
    dtype = given.fields.text("dtype", "torch_dtype") or given.outer.text("dtype", "torch_dtype", default="bfloat16")
    return _DTYPES.get(dtype, dtype)


def _vision(given: _Given, text_hidden: int) -> VisionTower | None:
    """The tower of ``vision_config``, by the outer model_type."""
    if not given.outer.has("vision_config"):
        return None
    vision = given.outer.child("vision_config")
    kind = given.outer.text("model_type").removesuffix("_text")
    if kind not in TOWERS:  # plain relatives name the language part and nest the tower
        kind = vision.text("model_type") or ("qwen2_5_vl" if vision.has("fullatt_block_indexes") else kind)
    reader = TOWERS.get(kind)
    if reader is None:
        given.outer.note(
            "vision_config",
            f"the vision tower of {kind or 'this model_type'} is not modelled",
            f"rlperf models those of {', '.join(TOWERS)}",
        )
        return None
    return reader(vision, text_hidden)
