"""Which kinds of halves the layers of a Hugging Face configuration have: read from its lists, patterns and periods.

Every layer becomes the kinds of its mixer (several run side by side) and of its feed-forward, each with what is other
than in the rest of the architecture; `named` turns these into names and variants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlperf.specs.architecture import KindNumbers, LatentAttention, Variant
from rlperf.specs.hf import names
from rlperf.specs.hf.blocks import block_configs, nemotron
from rlperf.specs.hf.families import Family
from rlperf.specs.hf.feed_forwards import feed_forwards, has_experts
from rlperf.specs.hf.fields import Fields
from rlperf.specs.hf.halves import FULL, NONE, Given, Mixer, ReadHalf

INDEXED = {word for word, kind in names.WORDS.items() if kind == "indexed"}
"""Words of layers in front of which an index chooses keys; a list that has one leaves the others without one."""
_MOST_LAYERS = 10_000
LATENT_KINDS = ("latent", "sliding_latent", "sparse", "sparse_reusing")


def count_layers(fields: Fields) -> int:
    """Layers, or entries of the list that has one for each."""
    if not fields.has(*names.LAYERS):
        for name in ("layers_block_type", "block_configs", "layer_types", "hybrid_override_pattern"):
            listed = fields.data.get(name)
            if isinstance(listed, list | str) and listed:
                return min(len(listed), _MOST_LAYERS)
    stated = fields.need(*names.LAYERS)
    if stated > _MOST_LAYERS:
        fields.note(next(name for name in names.LAYERS if fields.has(name)), f"no model has {stated:,} layers")
    return min(stated, _MOST_LAYERS)


def halves(given: Given) -> tuple[list[Mixer], list[ReadHalf]]:
    """Mixers and feed-forward of every layer ``[layers]``."""
    fields = given.fields
    if fields.has("block_configs"):
        return block_configs(given)
    if given.family.alone:
        return [(ReadHalf(given.family.alone),)] * given.layers, [NONE] * given.layers
    if given.family.single_halves:
        return nemotron(given)
    mixers = _words(given)
    crossed = {index for index in fields.items("cross_attention_layers") if isinstance(index, int)}
    if crossed:
        seen = ReadHalf("sliding", (("window", _image_tokens(given)),))
        mixers = [(seen,) if index in crossed else mixer for index, mixer in enumerate(mixers)]
    if given.family.parallel_mamba:
        mixers = [(*mixer, ReadHalf("mamba")) for mixer in mixers]
    mixers = [_refined_mixer(given, mixer, index) for index, mixer in enumerate(mixers)]
    return mixers, feed_forwards(given)


def _image_tokens(given: Given) -> int:
    """Tokens of an image, all tiles, that cross-attention layers read and keep for a request (Llama 3.2 Vision)."""
    vision = given.outer.child("vision_config") if given.outer.has("vision_config") else Fields({})
    side = vision.side("image_size", default=560) // (vision.side("patch_size", default=14) or 14)
    return (side * side + 1) * vision.optional("max_num_tiles", default=4)


def named(layers: Sequence[Mixer]) -> tuple[tuple[str, ...], tuple[Variant, ...]]:
    """Names of every layer's halves, and the variants behind those names that are no kinds.

    >>> wide = ReadHalf("sliding", (("heads", 96),))
    >>> names, variants = named([(FULL,), (wide,), (wide, FULL)])
    >>> names, variants[0].name
    (('full', 'sliding_2', 'sliding_2+full'), 'sliding_2')
    """
    found: dict[ReadHalf, str] = {}
    variants: list[Variant] = []
    for half in dict.fromkeys(part for layer in layers for part in layer):
        found[half] = half.kind
        if half.changes:
            found[half] = f"{half.kind}_{len(variants) + 2}"
            variants.append(Variant.model_validate({"name": found[half], "kind": half.kind, **dict(half.changes)}))
    return tuple("+".join(found[part] for part in layer) for layer in layers), tuple(variants)


def _words(given: Given) -> list[Mixer]:
    """Mixers by the list that names one for each layer, else by the family's pattern."""
    fields, layers = given.fields, given.layers
    if fields.has("linear_attn_config"):
        return _linear_config(given)
    if given.family.compressed or fields.has("compress_ratios", "compress_rates"):
        if not fields.has("compress_ratios", "compress_rates"):
            fields.note("compress_ratios", "is missing: how many tokens every layer gathers into a key")
        return [(_compressed(given, index),) for index in range(layers)]
    listed = fields.word_list(*names.LAYER_WORDS)
    if listed is None:
        return _pattern(given)
    name, words = listed
    kinds = {**names.WORDS, **names.NUMBERED.get(name, {}), **_recurrent(given), **given.family.words}
    unknown = sorted(set(words) - set(kinds))
    if unknown:
        fields.note(name, f"rlperf does not know {', '.join(unknown)}", f"it knows {', '.join(kinds)}")
    said = sorted(INDEXED & set(words))
    if said and not (fields.has("index_topk", "indexer_budget") or block_sparse(fields)):
        fields.note("index_topk", f"is missing: how many keys its layers of {said[0]} read")
    fields.has(*names.WINDOW)  # read where a layer is said to slide, and idle where none is
    if len(words) != layers:
        fields.note(name, f"has {len(words)} entries for {layers} layers")
        return [(FULL,)] * layers
    return [(ReadHalf(kinds.get(word, "full")),) for word in words]


def _recurrent(given: Given) -> dict[str, str]:
    """What ``linear_attention`` means here: the recurrent mixer of the family, or one told by a field of its own."""
    if given.fields.has("kda_lower_bound", "kda_safe_gate"):
        return {"linear_attention": "kda"}
    return {"linear_attention": given.family.other} if given.family.other else {}


def _pattern(given: Given) -> list[Mixer]:
    """Full attention in every layer of a period, a window or a recurrent mixer in the others."""
    fields, family, layers = given.fields, given.family, given.layers
    other = family.other or ("sliding" if _window(given)[0] else "full")
    if fields.has("attn_layer_indices", "full_attn_idxs"):
        name = "attn_layer_indices" if fields.has("attn_layer_indices") else "full_attn_idxs"
        full = set(fields.items(name))
    elif fields.has("attn_layer_period"):
        period, offset = fields.need("attn_layer_period"), fields.optional("attn_layer_offset")
        full = {index for index in range(layers) if index % period == offset % period}
    elif isinstance(fields.data.get("sliding_window_pattern"), str):
        letters = fields.text("sliding_window_pattern").upper()
        full = {index for index in range(layers) if letters[index % len(letters)] == "G"}
    else:
        first = _window(given)[1]
        period = fields.optional(*names.FULL_PERIOD, default=family.alternate)
        full = {index for index in range(layers) if index < first or (period and index % period == period - 1)}
        if period and fields.has("layer_group_size"):  # an incomplete last group is full attention
            full |= set(range(layers // period * period, layers))
    return [(FULL if index in full else ReadHalf(other),) for index in range(layers)]


def _window(given: Given) -> tuple[int, int]:
    """Window of the sliding layers [tokens], 0 without, and the first layer that has one."""
    fields = given.fields
    if given.kind == "llama4":
        return fields.optional("attention_chunk_size"), 0
    if given.family.switched_window:  # these carry a window that is switched off, or on from some layer
        on = fields.flag("use_sliding_window", default=False)
        return (fields.optional("sliding_window"), fields.optional("max_window_layers")) if on else (0, 0)
    on = fields.flag("use_sliding_window", default=True)
    if not on:
        fields.has("sliding_window")  # read, and idle
    window, positions = fields.optional("sliding_window") if on and given.family.windowed else 0, names.POSITIONS
    reaches_all = window >= fields.optional(*positions, default=window + 1)  # Phi-3 with 128K positions
    return (0 if reaches_all else window), 0


def dropped_window(given: Given) -> tuple[str, ...]:
    """A window that the file states and switches on, of a family whose attention has none in Transformers."""
    fields, family = given.fields, given.family
    read = family.windowed or family.switched_window or family.compressed or family.alone
    if read or given.kind == "llama4" or fields.has(*names.LAYER_WORDS):
        return ()
    window = fields.optional("sliding_window")
    idle = not window or window >= fields.optional(*names.POSITIONS, default=window + 1)
    if idle or not fields.flag("use_sliding_window", default=True):
        return ()
    return (f"sliding_window {window}: not read, attention of {given.kind} reads every token",)


def _refined_mixer(given: Given, mixer: Mixer, index: int) -> Mixer:
    return (NONE,) if given.skips(index, "mixer") else tuple(_refined(given, half, index) for half in mixer)


def _refined(given: Given, half: ReadHalf, index: int) -> ReadHalf:
    """A half as its configuration's further fields make it: latent, sparse, other heads, a borrowed cache."""
    kind = _refined_kind(given, half.kind, index)
    if kind in ("block_sparse", "compressed"):
        _say_unread(given, given.apart(index), "")
        return ReadHalf(kind, half.changes)
    latent = kind in LATENT_KINDS
    changes = {
        **dict(half.changes),
        **({} if latent else _other_heads(given, kind)),
        **_own_numbers(given, index, latent),
    }
    changes |= _borrowed(given, index) if kind not in ("sparse", "sparse_reusing") else {}
    return ReadHalf(kind, tuple(_differing(given.fields, changes, latent).items()))


def _differing(fields: Fields, changes: dict[str, Any], latent: bool) -> dict[str, Any]:
    """Those of a layer's numbers that are other than the file's; heads of latents are as wide as their ranks say."""
    stated = {
        "heads": names.HEADS,
        "kv_heads": names.KV_HEADS,
        "head_dim": () if latent else names.HEAD_DIM,
        "value_head_dim": ("v_head_dim",),
        "window": names.WINDOW,
    }
    given = {
        field: next((fields.data[name] for name in of if fields.data.get(name) is not None), None)
        for field, of in stated.items()
    }
    return {field: value for field, value in changes.items() if value != given.get(field)}


def _refined_kind(given: Given, kind: str, index: int) -> str:
    fields = given.fields
    latent = fields.flag("use_mla", default=given.family.latent or fields.has("kv_lora_rank"))
    said = INDEXED & set(map(str, fields.items("layer_types"))) or fields.has("index_topk_blocks")
    chosen = kind == "indexed" or (kind == "full" and not said)
    if latent and kind == "sliding":
        return "sliding_latent"
    if latent and kind in ("full", "indexed"):
        if not (chosen and fields.has("index_topk")):
            return "latent"
        return "sparse_reusing" if _reuses(fields, index) else "sparse"
    if chosen and (block_sparse(fields) or fields.has("index_topk", "indexer_budget")):
        frequency = _sparse_part(fields).data.get("sparse_attention_freq")
        on = not isinstance(frequency, list) or index >= len(frequency) or bool(frequency[index])
        return "block_sparse" if on else "full"
    return "full" if kind == "indexed" else kind


def _reuses(fields: Fields, index: int) -> bool:
    """Whether a layer takes the choice of an earlier one (GLM-5.2)."""
    types = fields.items("indexer_types")
    if types:
        return index < len(types) and types[index] == "shared"
    period, first = fields.optional("index_topk_freq", default=1) or 1, fields.optional("index_skip_topk_offset")
    return period > 1 and index >= first and (index - first) % period != period - 1


def _sparse_part(fields: Fields) -> Fields:
    return fields.child("sparse_attention_config") if fields.has("sparse_attention_config") else fields


def block_sparse(fields: Fields) -> Fields | None:
    """The fields of an index over blocks (MiniMax-M3), or none."""
    part = _sparse_part(fields)
    return part if part.has("sparse_topk_blocks", "index_topk_blocks") else None


def latent_ranks(fields: Fields, family: Family) -> LatentAttention:
    """Ranks and widths of latent attention; keys without a position have no rotary part."""
    rope = "qk_rope_head_dim"
    return LatentAttention(
        q_rank=fields.optional("q_lora_rank"),
        kv_rank=fields.need("kv_lora_rank"),
        nope_head_dim=fields.need("qk_nope_head_dim"),
        rope_head_dim=fields.optional(rope) if fields.has(rope) else fields.need(rope),
        value_head_dim=fields.need("v_head_dim"),
        gate_reads_queries=family.gate_reads_queries,
    )


def _own_numbers(given: Given, index: int, latent: bool) -> dict[str, Any]:
    """Heads, widths and ranks that the file states of this layer alone."""
    fields, own = given.fields, given.apart(index)
    found: dict[str, Any] = {}
    of_layer = {"heads": names.HEADS, "kv_heads": names.KV_HEADS, "window": names.WINDOW}
    if not latent:
        of_layer |= {"head_dim": names.HEAD_DIM, "value_head_dim": ("v_head_dim",)}
    for field, of in of_layer.items():
        if own.has(*of):
            found[field] = own.need(*of)
            continue
        for name in of:
            listed = fields.listed(f"{name}_per_layer")
            if isinstance(listed, list) and len(listed) == given.layers and isinstance(listed[index], int):
                found[field] = listed[index]
    if own.flag("attention_k_eq_v", default=False):
        found["values_are_keys"] = True
    if latent and own.has("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        ranks = latent_ranks(fields.beside({**fields.data, **own.data}), given.family)
        found |= {"latent": ranks, "head_dim": ranks.nope_head_dim + ranks.rope_head_dim}
    _say_unread(given, own, names.STRUCTURE)
    return found


def _say_unread(given: Given, own: Fields, wanted: str) -> None:
    """Note what a layer states of itself and its mixer has not asked for; feed-forwards ask for their numbers."""
    theirs = {*names.DENSE_WIDTH, *(names.OF_EXPERTS if has_experts(given) else ()), "skip"}
    left = [name for name in own.unread(wanted, names.HARMLESS) if name not in theirs]
    if left:
        given.fields.note("per_layer_config", f"rlperf does not read {', '.join(left)} of one layer")


def _other_heads(given: Given, kind: str) -> dict[str, Any]:
    """Heads of one kind of attention where others than the configuration's own (Gemma 4, MiMo-V2, Step 3.5)."""
    fields, found = given.fields, dict[str, Any]()

    def take(field: str, part: Fields, *of: str) -> None:
        if part.has(*of):
            found[field] = part.need(*of)

    if kind == "full":
        take("head_dim", fields, "global_head_dim")
        take("kv_heads", fields, "num_global_key_value_heads")
        if fields.flag("attention_k_eq_v", default=False):
            found["values_are_keys"] = True
    elif kind == "sliding":
        take("heads", fields, "swa_num_attention_heads", "num_sliding_attention_heads")
        take("kv_heads", fields, "swa_num_key_value_heads")
        take("head_dim", fields, "swa_head_dim")
        take("value_head_dim", fields, "swa_v_head_dim")
        if fields.flag("add_swa_attention_sink_bias", default=False):
            found["attention_sinks"] = True
        other = fields.child("attention_other_setting") if fields.has("attention_other_setting") else Fields({})
        take("heads", other, *names.HEADS)
        take("kv_heads", other, *names.KV_HEADS)
        take("head_dim", other, *names.HEAD_DIM)
        if "heads" not in found and given.family.sliding_heads:
            found["heads"] = given.family.sliding_heads
        if "kv_heads" not in found and given.family.sliding_kv_times > 1:
            found["kv_heads"] = given.family.sliding_kv_times * fields.need(*names.KV_HEADS)
    return found


def _borrowed(given: Given, index: int) -> dict[str, Any]:
    """Whether a layer reads keys and values of an earlier one (Gemma 3n and 4 E, Hunyuan-Large)."""
    fields = given.fields
    last = fields.optional("num_kv_shared_layers")
    share = fields.optional("cla_share_factor", default=1) if fields.flag("use_cla", default=False) else 1
    borrows = index >= given.layers - last or (share > 1 and index % share != 0)
    return {"borrows_cache": True} if borrows and given.layers > last else {}


def _linear_config(given: Given) -> list[Mixer]:
    """Kimi Linear: layers of both kinds by their number, counted from one."""
    part = given.fields.child("linear_attn_config")
    full, other = part.items("full_attn_layers"), part.items("kda_layers")
    missing = sorted(set(range(1, given.layers + 1)) - set(full) - set(other))
    if missing:
        part.note("full_attn_layers", f"and kda_layers leave out layers {', '.join(map(str, missing[:5]))}")
    return [(FULL if index + 1 in full else ReadHalf("kda"),) for index in range(given.layers)]


def _compressed(given: Given, index: int) -> ReadHalf:
    """DeepSeek-V4: attention over keys of ``ratio`` tokens each, a window of plain ones beside them."""
    fields = given.fields
    words, rates = fields.items("layer_types"), fields.data.get("compress_rates")
    ratio: Any = 0
    if fields.has("compress_ratios"):
        listed = fields.items("compress_ratios")
        ratio = listed[index] if index < len(listed) else 0
    elif isinstance(rates, dict) and index < len(words):
        ratio = rates.get(words[index], 0)
    if isinstance(ratio, bool) or not isinstance(ratio, int) or ratio < 0:
        fields.note("compress_ratios", f"{ratio!r} is not a whole number")
        ratio = 0
    # an index chooses among short gathers, of which there are many; long ones are read whole
    chooses = 0 < ratio <= 16
    sources = fields.items("kv_source_layer_ids")
    borrows = bool(sources) and ratio > 0 and index not in sources and index > min(sources)
    indices = fields.items("index_source_layer_ids")
    own_index = chooses and (not indices or index in indices)
    numbers = {
        "q_rank": fields.need("q_lora_rank"),
        "rope_head_dim": fields.optional("qk_rope_head_dim", default=64),
        "output_rank": fields.need("o_lora_rank"),
        "output_groups": fields.need("o_groups"),
        "ratio": ratio,
        "overlap": int(ratio == 4),
        "top": fields.need("index_topk") if chooses else 0,
        "index_heads": fields.need("index_n_heads") if own_index else 0,
        "index_head_dim": fields.need("index_head_dim") if own_index else 0,
        "borrows": int(borrows),
    }
    return ReadHalf("compressed", (("numbers", (KindNumbers.model_validate({"kind": "compressed", **numbers}),)),))
