"""Hugging Face ``config.json`` to `Architecture`.

Reads what `transformers` writes (composite configurations with ``text_config`` included) and its plain relatives. What
cannot be represented is refused by name with the reason; every missing or wrong field is listed, not only the first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from rlperf.errors import Problem, SpecError, did_you_mean, nearest
from rlperf.specs.architecture import Architecture, Experts
from rlperf.specs.hf.defaults import left_out
from rlperf.specs.hf.families import FAMILIES, REFUSED, Family, refusal
from rlperf.specs.hf.feed_forwards import experts
from rlperf.specs.hf.fields import Fields, Line
from rlperf.specs.hf.halves import Given, ReadHalf
from rlperf.specs.hf.layers import LATENT_KINDS, count_layers, dropped_window, halves, latent_ranks, named
from rlperf.specs.hf.names import (
    BIAS,
    DENSE_FIRST,
    DENSE_WIDTH,
    EXPERT_WIDTH,
    EXPERTS,
    FFN,
    GATE,
    HARMLESS,
    HEAD_DIM,
    HEAD_GATE,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    LISTABLE,
    PARTS,
    POSITIONS,
    PREDICTION,
    QK_NORM,
    RENAMED,
    ROPE,
    ROPE_KIND,
    SHARED_WIDTH,
    STREAMS,
    STRUCTURE,
    VOCABULARY,
    WINDOW,
)
from rlperf.specs.hf.numbers import further, linear_attention, state_space
from rlperf.specs.hf.towers import audio_parameters, tower

_MASKED = {"type_vocab_size": "bert", "attention_probs_dropout_prob": "bert-generation", "mask_token_id": "llada"}
"""Fields of masked models, segments of their input first, and whose layers an unknown model_type with one has."""
_GROUPED = {"full", "sliding", "block_sparse", "compressed"}
"""Mixers with key and value heads; latents have a key for every head, whatever a file says of them."""
_LIKE = "--like FAMILY, in a job file like: FAMILY, reads it"
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


_CLASSIFIES = re.compile(r"For(?:Sequence|Token)Classification$|Reward|ForScore$")
"""Classes whose head gives scores, in place of one over the vocabulary: ``Qwen2ForProcessRewardModel``, too."""


def looks_like_hf(data: Mapping[str, Any]) -> bool:
    """Whether a JSON object is meant as a Hugging Face configuration (and not as one of ours)."""
    return any(key in data for key in ("model_type", "text_config", *HIDDEN, *LAYERS))


def from_hf(
    data: Mapping[str, Any],
    *,
    name: str,
    source: str,
    file: str | None = None,
    line: Line | None = None,
    like: str | None = None,
) -> Architecture:
    """The architecture that a Hugging Face ``config.json`` describes.

    Parameters
    ----------
    data : the parsed JSON object
    name, source : name of the architecture and where the file is from
    file, line : file name and line finder for messages
    like : family whose conventions an unknown model_type is read by; without it, those that its fields state

    Raises
    ------
    SpecError : a model_type that rlperf cannot represent (with the reason), or every missing or wrong field

    >>> tiny = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    ...         "intermediate_size": 16, "vocab_size": 10}
    >>> from_hf(tiny, name="tiny", source="example").layer_mixers
    ('full', 'full')
    >>> from_hf({**tiny, "model_type": "new"}, name="tiny", source="example", like="llama").assumed
    ("model_type 'new' is read as llama, as asked",)
    """
    outer = Fields(data, file, line)
    given, assumed = _given(outer, like)
    try:
        values = _values(given)
        vision, seen = tower(given.outer, values["hidden"])
        assumed += seen
        assumed += _left_unread(given, like) if given.kind not in FAMILIES else dropped_window(given)
        assumed += (f"not costed, or in part: {given.family.left_out}",) if given.family.left_out else ()
        if outer.problems:
            raise SpecError(outer.problems)
        if vision is not None and given.family.modal_experts:
            seen_by = vision.parameters + _image_experts(given, values)
            vision = vision.model_copy(update={"parameters": seen_by})
        scores = any(_CLASSIFIES.search(str(each)) for each in outer.items("architectures"))
        named = {"name": name, "source": source, "family": given.kind, "classifies": scores}
        return Architecture(vision=vision, assumed=assumed, **named, **values)
    except ValidationError as error:
        messages = [str(item["msg"]).removeprefix("Value error, ") for item in error.errors(include_url=False)]
        raise SpecError([Problem(message, file) for message in messages]) from error


def _given(outer: Fields, like: str | None) -> tuple[Given, tuple[str, ...]]:
    """The language part, its family, and what had to be assumed of it; refuses what cannot be represented."""
    fields, around = outer, outer
    while (part := next((name for name in PARTS if fields.data.get(name) is not None), None)) is not None:
        fields, around = fields.child(part), fields
    known = like is not None or bool(_known(fields, around))
    kinds = [fields.text("model_type").removesuffix("_text"), around.text("model_type").removesuffix("_text")]
    for part_of, kind in zip((fields, around), kinds, strict=True):
        classes = [str(name) for name in part_of.items("architectures")]
        reason = refusal(kind, classes, outer.data)
        masked = next((REFUSED[of] for name, of in _MASKED.items() if not known and part_of.has(name)), None)
        if reason or masked:
            hint = None if reason else f"{_LIKE} as a decoder that it knows, with a wider interval"
            part_of.note("model_type", f"{kind or 'this architecture'} cannot be modelled: {reason or masked}", hint)
            raise SpecError(outer.problems)
    kind = _known(fields, around) or kinds[0] or kinds[1]
    if not kind:
        fields.note("model_type", "is missing", "the config.json that Transformers reads states it")
    family, assumed = FAMILIES.get(kind, Family(windowed=True)), tuple[str, ...]()
    if like is not None and like not in FAMILIES:
        hint = did_you_mean(like, FAMILIES) or f"it knows {', '.join(sorted(FAMILIES))}"
        raise SpecError(Problem(f"rlperf knows no family {like!r}", suggestion=hint))
    if kind and kind not in FAMILIES:
        family = FAMILIES[like] if like else family
        how = f"is read as {like}, as asked" if like else "is not known: it is read by its fields"
        near = None if like else nearest(kind, FAMILIES, alike=0.8)
        misspelt = near if near and not kind.startswith(near) else None  # minicpmv is a model of its own
        assumed = (f"model_type {kind!r} {how}" + (f" (did you mean {misspelt}?)" if misspelt else ""),)
    version = outer.text("transformers_version")
    fields.data = {RENAMED.get(key, key): value for key, value in fields.data.items()}
    asked = like if kind not in FAMILIES else None
    assumed += _fill_in(fields, (outer, around), asked or kind, asked=asked is not None)
    layers = _count(fields, family)
    by_layer = _uniform(fields, family, layers)
    return Given(fields, around, kind, family, layers, version, by_layer), assumed


def _fill_in(fields: Fields, around: tuple[Fields, ...], kind: str, *, asked: bool) -> tuple[str, ...]:
    """Fill in what the class of ``kind`` has where the file is silent; says which sizes of the model are the class's.

    A file of a language model alone that is read as asked states its layers and its width, if nothing else.
    """
    part = fields not in around
    stated = {name for one in around for name, value in one.data.items() if value is not None}
    found = left_out(kind, fields.data, part=part or asked, elsewhere=stated if part else {*LAYERS, *HIDDEN})
    fields.data = {**found, **fields.data}
    sizes = [f"{name} {found[name]}" for name in (*LAYERS, *HIDDEN, *HEADS) if name in found]
    return (f"{', '.join(sizes)}: not stated, taken from the class of {kind}",) if sizes else ()


def _known(*parts: Fields) -> str:
    """The family of the first part that has one, by its model_type or else by its class; empty: none is known."""
    kinds = (part.text("model_type").removesuffix("_text") for part in parts)
    return next((kind for kind in (*kinds, _by_class(*parts)) if kind in FAMILIES), "")


def _by_class(*parts: Fields) -> str:
    """The family that the class of the model is named after: ``DeepseekV4ForCausalLM`` is deepseek_v4.

    What follows says what the class is for; any other word makes it another model (``Phi3SmallForCausalLM``).
    """
    bare = {re.sub("[-_]", "", family).lower(): family for family in FAMILIES}
    for part in parts:
        for name in part.items("architectures"):
            written = str(name).lower()
            fits = [one for one in bare if re.fullmatch(rf"{one}(for\w+|model\w*|lmheadmodel|chatmodel)?", written)]
            if fits:
                return bare[max(fits, key=len)]
    return ""


def _count(fields: Fields, family: Family) -> int:
    return count_layers(fields) * (2 if family.double_layers else 1)


def _uniform(fields: Fields, family: Family, layers: int) -> dict[str, list[int]]:
    """Fill in the family's defaults; numbers that are listed by layer become one: all equal, or the largest.

    Returns those lists whose numbers differ.
    """
    nested = [fields.data[part] for part in family.nested if isinstance(fields.data.get(part), dict)]
    merged = dict(family.defaults)
    merged |= {key: value for part in nested for key, value in part.items() if key not in HIDDEN}
    merged |= {key: value for key, value in fields.data.items() if value is not None}
    differing: dict[str, list[int]] = {}
    for key in (*EXPERTS, *EXPERT_WIDTH, *DENSE_FIRST, "moe_layer_end_index") if family.modal_experts else ():
        value = merged.get(key)
        if isinstance(value, list) and len(value) == 2:
            merged[key], merged[f"{key}_of_images"] = value
    for key in LISTABLE:
        value = merged.get(key)
        if isinstance(value, list) and value and all(one == value[0] for one in value):
            merged[key] = value[0]
        elif isinstance(value, list) and len(value) == layers and all(type(one) is int for one in value):
            merged[key], differing[key] = max(value), value
    fields.data = merged
    return differing


def _left_unread(given: Given, like: str | None) -> tuple[str, ...]:
    """What an unknown model_type states beyond what was read: assumed away as asked, else refused by its name."""
    left = given.fields.unread(STRUCTURE, HARMLESS)
    if not left:
        return ()
    if like is not None:
        return (f"{', '.join(left)}: not read",)
    given.fields.note(
        "model_type",
        f"rlperf does not know {given.kind!r}, nor what its {', '.join(left)} make of its layers",
        f"{_LIKE} as one that it knows, with a wider interval",
    )
    return ()


WINDOWED = {"sliding", "sliding_latent", "compressed"}
"""Kinds that see a window."""


def _values(given: Given) -> dict[str, Any]:
    """Arguments of `Architecture` except its name, source and vision tower."""
    fields, family = given.fields, given.family
    _say_unknown(fields)
    hidden, heads = fields.need(*HIDDEN), fields.need(*HEADS, *(FFN if family.alone else ()))  # channels are heads
    mixers, feed_forwards = halves(given)
    mixes = {part.kind for layer in mixers for part in layer}
    kinds = mixes | {half.kind for half in feed_forwards}
    ranks = latent_ranks(fields, family) if kinds & set(LATENT_KINDS) else None
    mixer_names, mixer_variants = named(mixers)
    half_names, half_variants = named([(half,) for half in feed_forwards])
    bias = fields.flag(*BIAS, default=family.attention_bias)
    if given.kind == "mpt" and fields.has("no_bias", "d_model"):
        bias = not fields.flag("no_bias", default=True)
    ffn_bias = fields.flag("mlp_bias", default=family.ffn_bias) or (given.kind in ("mpt", "falcon") and bias)
    whole_gate = given.kind == "laguna" and fields.listed("gating") not in (None, True, "per-head")
    norm = family.norm_weights
    if given.kind == "mpt" and fields.has("no_bias", "d_model") and not bias:
        norm = 1
    return {
        "hidden": hidden,
        "layers": given.layers,
        "heads": heads,
        "kv_heads": _kv_heads(given, heads) if mixes & _GROUPED or not mixes & {*LATENT_KINDS} else heads,
        "head_dim": ranks.nope_head_dim + ranks.rope_head_dim if ranks else _head_dim(given, hidden, heads),
        "value_head_dim": 0 if ranks else fields.optional("v_head_dim"),
        "ffn_hidden": _dense_width(given, hidden) if "dense" in kinds else 0,
        "ffn_gated": given.gated,
        "vocab": fields.need(*VOCABULARY),
        "tied_embeddings": _tied(given),
        "qkv_bias": bias and family.biased != "none",
        "output_bias": bias and family.biased == "all",
        "ffn_bias": ffn_bias,
        "qk_norm": fields.flag(*QK_NORM, default=family.qk_norm),
        "qk_norm_whole": family.qk_norm_whole,
        "post_norms": family.post_norms,
        "attention_sinks": family.attention_sinks,
        "attention_gate": fields.flag(*GATE, default=family.attention_gate) or whole_gate,
        "attention_gate_heads": fields.flag(*HEAD_GATE, default=family.attention_gate_heads) and not whole_gate,
        "query_rank": fields.optional("share_q_dim"),
        "head_bias": family.head_bias,
        "learned_positions": _learned_positions(given),
        "norm_weights": norm,
        "max_positions": _positions(fields) or None,
        "mixers": _shorten(mixer_names),
        "feed_forwards": _shorten(half_names),
        "variants": (*mixer_variants, *half_variants),
        "window": fields.need(*WINDOW) if kinds & WINDOWED and not _stated_window(mixers) else 0,
        "latent": ranks,
        "experts": _experts(given, feed_forwards),
        "state_space": state_space(given) if "mamba" in kinds else None,
        "linear_attention": linear_attention(given, kinds) if kinds & {"linear", "kda", "lightning"} else None,
        "numbers": further(given, kinds),
        "residual_streams": fields.optional(*STREAMS, default=1) or 1,
        "residual_rank": fields.optional("hc_lowrank"),
        "lookup_parameters": _lookup_parameters(given, hidden),
        "audio_parameters": audio_parameters(given.outer, hidden),
        "prediction_layers": _prediction_layers(fields),
        "checkpoint_dtype": _checkpoint_dtype(given),
    }


def _positions(fields: Fields) -> int:
    """The longest sequence: as stated, or what YaRN stretches the original positions to where that is longer."""
    rope = next(
        (fields.beside(each, name) for name in ROPE if isinstance(each := fields.data.get(name), Mapping)), None
    )
    original = rope.optional("original_max_position_embeddings") if rope else 0
    stretched = original * rope.number("factor", default=1.0) if rope and rope.text(*ROPE_KIND) == "yarn" else 0
    return max(fields.optional(*POSITIONS), round(stretched))


def _experts(given: Given, feed_forwards: Iterable[ReadHalf]) -> Experts | None:
    """Those of the file, or of the first layer where every layer states its own."""
    routed = [dict(half.changes).get("experts") for half in feed_forwards if half.kind == "moe"]
    return (routed[0] if given.fields.has("block_configs") else experts(given)) if routed else None


def _say_unknown(fields: Fields) -> None:
    """Note what changes parameters of a known family and no kind here has."""
    if fields.flag("add_cross_attention", default=False):
        fields.note("add_cross_attention", f"cannot be modelled: {REFUSED['t5']}")
    if fields.text("model_type") == "doge" and fields.flag("is_moe", default=False):
        fields.note("is_moe", "cannot be modelled: its experts are single rows of two tables")
    width = fields.optional("word_embed_proj_dim")
    if width and width != fields.need(*HIDDEN):
        fields.note("word_embed_proj_dim", "an embedding narrower than the layers (OPT-350m) is not modelled")


def _tied(given: Given) -> bool:
    """Whether the output head is the embedding: its language part says so, since Transformers 5 what is around it."""
    parts = [given.fields, given.outer]
    if int((re.match(r"\d+", given.version) or ["0"])[0]) >= 5:
        parts.reverse()
    said = next((part for part in parts if part.has("tie_word_embeddings")), given.fields)
    return said.flag("tie_word_embeddings", default=given.family.tied)


def _shorten(kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    return kinds[:1] if len(set(kinds)) == 1 else kinds


def _stated_window(mixers: Iterable[Iterable[ReadHalf]]) -> bool:
    """Whether every sliding layer states a window of its own."""
    sliding = ("sliding", "sliding_latent")
    windows = [dict(part.changes).get("window") for layer in mixers for part in layer if part.kind in sliding]
    return bool(windows) and all(windows)


def _lookup_parameters(given: Given, hidden: int) -> int:
    """Tables beside the embedding, with the matrices that bring their values in: per-layer inputs, n-gram memories.

    And what Gemma 3n has beside its halves: projections of the embedding to further streams and back, low-rank paths.
    """
    fields = given.fields
    width, layers = fields.optional("hidden_size_per_layer_input"), given.layers
    each = fields.optional("vocab_size_per_layer_input", default=fields.optional("vocab_size"))
    # a table of all layers, its projection from the embedding, and a gate, a projection and a norm in every layer
    beside = layers * width * (each + hidden) + layers * (2 * hidden * width + hidden) + width if width else 0
    rows = [rows for rows in fields.items("engram_num_embeddings") if isinstance(rows, int)]
    streams = 2 * max(fields.optional("altup_num_inputs", default=1) - 1, 0) * hidden * hidden
    low_rank = layers * 2 * fields.optional("laurel_rank") * hidden
    hashed, wide = len(fields.items("ple_layer_ids")), fields.optional("ple_embed_dim", default=hidden)
    hashed *= wide * (fields.optional("ngram_vocab_size_base") + (fields.optional(*STREAMS, default=1) + 1) * hidden)
    ngrams = fields.optional("ngram_vocab_size_ratio") * fields.optional("vocab_size") * hidden  # LongCat-Flash-Lite
    return beside + streams + low_rank + hashed + ngrams + sum(rows) * fields.optional("engram_head_dim")


def _image_experts(given: Given, values: Mapping[str, Any]) -> int:
    """Parameters of experts that images alone reach, with their routers (ERNIE 4.5 VL): they count as seeing."""
    fields, hidden, moe = given.fields, values["hidden"], values["experts"]
    count = fields.optional(*(f"{name}_of_images" for name in EXPERTS), default=moe.count if moe else 0)
    width = fields.optional(*(f"{name}_of_images" for name in EXPERT_WIDTH), default=moe.hidden if moe else 0)
    layers = values["feed_forwards"].count("moe") if len(values["feed_forwards"]) > 1 else given.layers
    return int(layers * count * hidden * (3 * width + 1))


def _kv_heads(given: Given, heads: int) -> int:
    fields = given.fields
    if given.kind == "falcon" and not fields.has("num_key_value_heads"):
        if fields.flag("new_decoder_architecture", default=False):
            return fields.optional("num_kv_heads", default=heads) or heads
        return 1 if fields.flag("multi_query", default=True) else heads
    if given.kind == "gpt_bigcode":  # its class reads no other field
        return 1 if fields.flag("multi_query", default=True) else heads
    if given.kind == "mpt" and fields.has("attn_config"):
        return fields.child("attn_config").optional("kv_n_heads", default=heads) or heads
    if fields.has("block_configs") and not fields.has(*KV_HEADS):
        return heads  # every block states its own
    return fields.optional(*KV_HEADS, default=heads) or heads


def _head_dim(given: Given, hidden: int, heads: int) -> int:
    fields = given.fields
    if given.family.alone:
        return fields.optional(*HEAD_DIM, default=1) or 1
    if fields.has(*HEAD_DIM):
        return fields.need(*HEAD_DIM)
    if hidden % heads and hidden > 1 and fields.has(*HIDDEN) and fields.has(*HEADS):  # 1: of no number, said already
        fields.note("head_dim", f"is missing, and hidden_size ({hidden}) is not a multiple of the heads ({heads})")
    return max(hidden // heads, 1)


def _dense_width(given: Given, hidden: int) -> int:
    fields = given.fields
    if given.kind == "llama4":
        return fields.need("intermediate_size_mlp")
    if fields.has("block_configs"):
        return fields.optional("hidden_size", default=1)  # every layer states its own
    if fields.flag("block_auto_adjust_ff_dim", default=False):  # LFM2: two thirds, rounded up
        width = int(fields.number("block_ffn_dim_multiplier", default=1.0) * int(2 * fields.need(*FFN) / 3))
        step = fields.optional("block_multiple_of", default=256) or 256
        return -(-width // step) * step
    if given.family.ffn_times and not fields.has(*FFN):
        return fields.optional("n_inner") or given.family.ffn_times * hidden
    if given.kind == "mpt" and not fields.has("intermediate_size"):
        return round(fields.number("expansion_ratio", default=4.0) * hidden)
    widths = (*DENSE_WIDTH, *SHARED_WIDTH)  # where none is given, the name that most files use is said to be missing
    return fields.need(*(widths if fields.has(*widths) else FFN)) // (2 if given.family.ffn_pairs else 1)


def _learned_positions(given: Given) -> int:
    fields = given.fields
    if given.kind == "gpt2":
        return fields.optional("n_positions", "n_ctx", default=1024)
    if given.kind == "mpt" and not fields.has("position_embedding"):
        alibi = fields.has("attn_config") and fields.child("attn_config").flag("alibi", default=False)
        learned = fields.flag("learned_pos_emb", default=True) and not alibi
        return fields.optional("max_seq_len", default=2048) if learned else 0
    if given.family.learned_positions:
        return fields.need(*POSITIONS)
    return fields.need("max_position_embeddings") if fields.text("position_embedding") == "learned" else 0


def _prediction_layers(fields: Fields) -> int:
    if fields.has("num_mtp_modules") and not fields.flag("use_mtp", default=False):
        return 0
    return fields.optional(*PREDICTION)


def _checkpoint_dtype(given: Given) -> str:
    for part in (given.fields, given.outer):
        if part.has("checkpoint_quantization"):
            return part.text("checkpoint_quantization")
        for stated in ("quantization_config", "compression_config"):  # compressed-tensors' own name is the second
            if part.has(stated):
                return part.child(stated).text("quant_method", default="unknown")
    dtype = given.fields.text("dtype", "torch_dtype") or given.outer.text("dtype", "torch_dtype")
    return _DTYPES.get(dtype.removeprefix("torch."), "bf16")
