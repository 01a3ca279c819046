"""Which reader a vision tower has, those of plain vision transformers with a projector, and towers that hear."""

from __future__ import annotations

import re
from collections.abc import Callable

from rlperf.specs.architecture import VisionTower
from rlperf.specs.hf.defaults import class_sizes
from rlperf.specs.hf.fields import Fields
from rlperf.specs.hf.vision import (
    FFN_WIDTHS,
    HEADS,
    HIDDEN,
    LAYERS,
    block_parameters,
    gemma4,
    llama4,
    merging,
    minimax_m3,
    pixtral,
    plain,
    pooling_head,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_vl,
    siglip,
    step,
)

_PARTS = ("vision_config", "vit_config", "visual_config")
Projector = Callable[[Fields, int, int, int], int]
"""Parameters of a projector: the configuration around the tower, its width, patches joined along a side, output."""


def _two_layers(outer: Fields, hidden: int, merge: int, output: int) -> int:
    """LLaVA: two layers with biases from what layers of the tower see of a patch to the language model's width."""
    return hidden * _layers_seen(outer) * output + output + output * output + output


def _layers_seen(outer: Fields) -> int:
    """Layers of the tower that a projector reads side by side: as many as are listed, or the one that is named."""
    listed = (outer.listed(name) for name in ("vision_feature_layers", "vision_feature_layer"))
    return max((len(each) for each in listed if isinstance(each, list)), default=1)


def _joined(outer: Fields, hidden: int, merge: int, output: int) -> int:
    """InternVL: a norm of joined patches and two layers with biases, the first to the language model's width."""
    wide = hidden * merge * merge
    inner = outer.optional("projector_hidden_size", default=output) or output
    return 2 * wide + wide * inner + inner + inner * output + output


def _one_layer(outer: Fields, hidden: int, merge: int, output: int) -> int:
    """PaliGemma: one layer with biases, to the width that the file states for it."""
    output = outer.optional("projection_dim", default=output)
    return hidden * output + output


def _scaled(outer: Fields, hidden: int, merge: int, output: int) -> int:
    """Idefics 3 and SmolVLM: one matrix from joined patches."""
    return hidden * merge * merge * output


def _several(outer: Fields, hidden: int, merge: int, output: int) -> int:
    """VipLLaVA: a norm of what several layers of the tower see, and two layers with biases."""
    wide = hidden * _layers_seen(outer)
    return 2 * wide + (wide + 1) * output + (output + 1) * output


def _split(outer: Fields, hidden: int, merge: int, output: int) -> int:
    """Command A Vision: joined patches to a wide layer whose halves gate each other, and back."""
    inner = outer.need("alignment_intermediate_size")
    return hidden * merge * merge * inner + inner + inner // 2 * output + output


def _pooled(outer: Fields, hidden: int, merge: int, output: int) -> int:
    """Molmo 2: patches of two layers of the tower are pooled by attention; a gated feed-forward behind it."""
    adapter = outer.child("adapter_config")
    inner, output = adapter.need("intermediate_size"), adapter.optional("text_hidden_size", default=output)
    attention = 3 * (2 * hidden * hidden + hidden) + hidden * hidden + hidden
    return attention + 2 * hidden * inner + inner * output


def _in_words(outer: Fields, hidden: int, merge: int, output: int) -> int:
    """Ovis: joined patches become shares of a visual vocabulary, whose rows are mixed by these shares."""
    vision = next((outer.child(part) for part in _PARTS if outer.has(part)), outer)
    words = vision.optional("vocab_size") or outer.need("visual_vocab_size")
    shares = max(words - vision.optional("num_visual_indicator_tokens", default=4), 0)
    return hidden * merge * merge * shares + 2 * shares + words * output


def _merged_twice(outer: Fields, hidden: int, merge: int, output: int) -> int:
    """MiniCPM-V 4.6: attention and a wide pair join patches in the midst of the tower; patches are joined behind it.

    The tower states one joining alone, so that seconds of the blocks in front of the first come out too low.
    """
    wide = hidden * merge * merge
    midst = 4 * hidden * hidden + 6 * hidden + 2 * wide + wide * 4 * wide + 4 * wide + 4 * wide * hidden + hidden
    return midst + 2 * wide + wide * wide + wide + wide * output + output


_HEADED = ("siglip_vision_model", "siglip2_vision_model")
"""Towers whose class pools patches where ``vision_use_head`` does not say otherwise."""


def _vit(vision: Fields, outer: Fields, text_hidden: int, projector: Projector) -> VisionTower:
    """A vision transformer as CLIP and SigLIP have it: patches, a table of positions, blocks with biases, norms."""
    hidden = vision.need(*HIDDEN)
    ffn = vision.optional(*FFN_WIDTHS) or int(hidden * vision.number("mlp_ratio", default=4.0))
    layers, patch = vision.need(*LAYERS), vision.side("patch_size", default=14) or 14
    classed = int("clip" in vision.text("model_type") or "intern" in vision.text("model_type"))
    positions = vision.optional("num_position_embeddings", "num_patches")
    positions = positions or ((vision.side("max_img_size") or vision.side("image_size")) // patch) ** 2 + classed
    around = 2 * hidden * (1 if not classed else 2) + classed * hidden
    block = block_parameters(hidden, ffn, gated=False, norm_weights=2)
    head = pooling_head(vision, block, default=vision.text("model_type") in _HEADED)
    merge = merging(vision, outer)
    return VisionTower(
        layers=layers,
        hidden=hidden,
        heads=vision.optional(*HEADS, default=16) or 16,
        ffn_hidden=ffn,
        patch_size=patch,
        spatial_merge=merge if projector not in (_two_layers, _one_layer) else 1,
        output_hidden=text_hidden,
        parameters=3 * patch**2 * hidden + hidden + positions * hidden + layers * block + around + head
        + projector(outer, hidden, merge, text_hidden),
    )  # fmt: skip


def _pixtral_alone(vision: Fields, outer: Fields, text_hidden: int) -> VisionTower:
    """Pixtral's blocks with LLaVA's projector: no patches are joined, and its two layers have biases."""
    found = pixtral(vision, outer, text_hidden)
    hidden = found.hidden
    joining = (hidden * found.spatial_merge) ** 2 + hidden + hidden * text_hidden + text_hidden * text_hidden
    total = found.parameters - joining + _two_layers(outer, hidden, 1, text_hidden)
    return found.model_copy(update={"spatial_merge": 1, "parameters": total})


def _aimv2(vision: Fields, outer: Fields, text_hidden: int) -> VisionTower:
    """Ovis 2: gated blocks without biases, one value per channel in their norms."""
    found = _vit(vision, outer, text_hidden, _in_words)
    hidden, ffn = found.hidden, found.ffn_hidden
    biased = block_parameters(hidden, ffn, gated=False, norm_weights=2)
    total = found.parameters + found.layers * (4 * hidden**2 + 3 * hidden * ffn + 2 * hidden - biased)
    return found.model_copy(update={"parameters": total, "gated": True})


def _of(projector: Projector) -> Callable[[Fields, Fields, int], VisionTower]:
    return lambda vision, outer, text_hidden: _vit(vision, outer, text_hidden, projector)


def _glm(vision: Fields, outer: Fields, text_hidden: int) -> VisionTower:
    """GLM-4.1V and later: gated blocks, patches joined by a convolution, a gated feed-forward behind it.

    In GLM-OCR and GLM-5 blocks have biases and norms of queries and keys; there is no table of positions.
    """
    hidden, output = vision.need("hidden_size"), vision.need("out_hidden_size")
    layers, patch, merge = (
        vision.need("depth"),
        vision.need("patch_size"),
        vision.optional("spatial_merge_size", default=2),
    )
    kinds = f"{outer.text('model_type')} {vision.text('model_type')}"
    stated, later = vision.need("intermediate_size"), "glm_ocr" in kinds or "glm5_next" in kinds
    behind = vision.optional("projection_intermediate_size") or 3 * output
    ffn, wide = (stated, behind) if later else (output, stated)
    heads = vision.need("num_heads")
    biases = 3 * hidden * vision.flag("attention_bias", default=later)
    biases += (hidden + 2 * ffn + hidden + 2 * (hidden // heads)) * later
    block = 4 * hidden * hidden + 3 * hidden * ffn + 2 * hidden + biases
    positions = 0 if later else (vision.need("image_size") // patch) ** 2 * hidden + hidden
    patches = 3 * vision.optional("temporal_patch_size", default=2) * patch**2 * hidden + hidden
    joined = hidden * merge * merge * output + output
    merged = output * output + 2 * output + 3 * output * wide
    return VisionTower(
        layers=layers,
        hidden=hidden,
        heads=heads,
        ffn_hidden=ffn,
        gated=True,
        patch_size=patch,
        temporal_patch=vision.optional("temporal_patch_size", default=2),
        spatial_merge=merge,
        output_hidden=output,
        parameters=patches + positions + layers * block + hidden + joined + merged,
    )


def _grouped(vision: Fields, outer: Fields, text_hidden: int) -> VisionTower:
    """EXAONE 4.5: as Qwen2.5-VL, with fewer keys and values than queries."""
    found = qwen2_5_vl(vision, text_hidden)
    fewer = found.heads - vision.optional("num_key_value_heads", default=found.heads)
    width = found.hidden // found.heads
    less = found.layers * 2 * fewer * width * (found.hidden + 1)
    return found.model_copy(update={"parameters": found.parameters - less})


def _tiled(vision: Fields, outer: Fields, text_hidden: int) -> VisionTower:
    """Llama 3.2 Vision: blocks over one tile and blocks over all; positions of tiles for every shape of an image."""
    hidden, ffn, patch = vision.need("hidden_size"), vision.need("intermediate_size"), vision.need("patch_size")
    layers = vision.need("num_hidden_layers") + vision.optional("num_global_layers", default=8)
    seen = (vision.side("image_size", default=560) // patch) ** 2 + 1
    tiles, shapes = vision.optional("max_num_tiles", default=4), len(vision.items("supported_aspect_ratios")) + 1
    positions = seen * hidden + shapes * tiles * hidden * (seen + 2)
    block = 4 * hidden * hidden + 2 * hidden * ffn + ffn + hidden + 4 * hidden
    output = vision.optional("vision_output_dim", default=6 * hidden)
    return VisionTower(
        layers=layers,
        hidden=hidden,
        heads=vision.optional("attention_heads", default=16) or 16,
        ffn_hidden=ffn,
        patch_size=patch,
        output_hidden=text_hidden,
        parameters=3 * patch**2 * hidden + positions + 5 * hidden + layers * block + (output + 1) * text_hidden,
    )


def _alone(reader: Callable[[Fields, int], VisionTower]) -> Callable[[Fields, Fields, int], VisionTower]:
    return lambda vision, outer, text_hidden: reader(vision, text_hidden)


TOWERS: dict[str, Callable[[Fields, Fields, int], VisionTower]] = {
    "qwen2_vl": _alone(qwen2_vl),
    "qwen2_5_vl": _alone(qwen2_5_vl),
    "qwen3_vl": _alone(qwen3_vl),
    "qwen3_vl_moe": _alone(qwen3_vl),
    "qwen3_5": _alone(qwen3_vl),
    "qwen3_5_moe": _alone(qwen3_vl),
    "qwen3_omni_moe": _alone(qwen3_vl),
    "qwen3_omni_moe_thinker": _alone(qwen3_vl),
    "qwen2_5_omni_thinker": _alone(qwen2_5_vl),
    "exaone4_5": _grouped,
    "gemma3": _alone(siglip),
    "shieldgemma2": _alone(siglip),
    "llama4": _alone(llama4),
    "glm4v": _glm,
    "glm4v_moe": _glm,
    "glm_ocr": _glm,
    "glm5_next": _glm,
    "kimi_k25": plain,
    "kimi_vl": plain,
    "moonvit": plain,
    "minimax_m3_vl": minimax_m3,
    "step3p7": step,
    "step3p5_vision": step,
    "gemma4": gemma4,
    "gemma4_vision": gemma4,
    "mistral3": pixtral,
    "pixtral": pixtral,
    "internvl": _of(_joined),
    "qianfan_ocr": _of(_joined),
    "lfm2_vl": _of(_joined),
    "internvl_chat": _of(_joined),
    "intern_vit_6b": _of(_joined),
    "llava": _of(_two_layers),
    "llava pixtral": _pixtral_alone,
    "llava_next": _of(_two_layers),
    "llava_next_video": _of(_two_layers),
    "llava_onevision": _of(_two_layers),
    "vipllava": _of(_several),
    "idefics3 idefics3_vision": _of(_scaled),
    "idefics3 idefics3": _of(_scaled),
    "smolvlm": _of(_scaled),
    "deepseek_vl": _of(_two_layers),
    "mllama": _tiled,
    "molmo2": _of(_pooled),
    "minicpmv4_6": _of(_merged_twice),
    "minicpmv4_7": _of(_merged_twice),
    "minicpm_ocr": _of(_merged_twice),
    "nemotron_h_omni": _of(_joined),
    "cosmos3_edge": _of(_joined),
    "paligemma": _of(_one_layer),
    "cohere2_vision": _of(_split),
    "ovis2": _aimv2,
    "ovis2_5": _of(_in_words),
}
"""Reader of ``vision_config`` by both ``model_type``s, by that of the whole configuration, or by the tower's own."""


_SENSES = r"vision|visual|image|img|vit_|speech|embd_layer"
"""What names of parts have that are for seeing or hearing."""


def tower(outer: Fields, text_hidden: int) -> tuple[VisionTower | None, tuple[str, ...]]:
    """The tower of ``vision_config``, by the outer model_type or its own, and what had to be assumed of it.

    One of a kind that nobody has read is taken by its sizes; without sizes it is left out.
    """
    part = next((name for name in _PARTS if isinstance(outer.data.get(name), dict)), _PARTS[0])
    if not outer.has(part):
        others = sorted(key for key in outer.data if re.search(_SENSES, key) and isinstance(outer.data[key], dict))
        return None, ((f"{', '.join(others)}: not read, text alone without their parameters",) if others else ())
    vision = outer.child(part)
    kinds = [part.text("model_type").removesuffix("_text") for part in (outer, vision)]
    kinds.append(kinds[1].removesuffix("_vision"))
    if vision.has("fullatt_block_indexes"):
        kinds.append("qwen2_5_vl")
    vision.data = {**class_sizes(kinds[1]), **vision.data}
    known = next((kind for kind in (" ".join(kinds[:2]), *kinds) if kind in TOWERS), "")
    if known:
        return TOWERS[known](vision, outer, text_hidden), ()
    name = next((kind for kind in reversed(kinds[:2]) if kind), "this model_type")
    if vision.has(*HIDDEN) and vision.has(*LAYERS):
        return plain(vision, outer, text_hidden), (f"the vision tower of {name} is taken by its sizes",)
    return None, (f"the vision tower of {name} states no sizes: text alone, without its parameters",)


def audio_parameters(outer: Fields, text_hidden: int) -> int:
    """Parameters of an audio tower by its sizes: attention and feed-forwards of its layers, and a projector.

    A conformer's layer has two feed-forwards and a convolution with a gate around its attention.
    """
    if not outer.has("audio_config"):
        return 0
    audio = outer.child("audio_config")
    layers = audio.optional("encoder_layers", "num_hidden_layers", "conf_num_hidden_layers", "num_blocks")
    hidden = audio.optional("d_model", "hidden_size")
    ffn = audio.optional("encoder_ffn_dim", "intermediate_size") or 4 * hidden
    conformer = any("conf" in key or "conv_kernel" in key for key in audio.data)
    if audio.has("conv_glu_type"):  # Phi-4: both feed-forwards and the convolution have gates, two layers lead out
        gated = 8 * hidden * hidden + 6 * hidden * ffn
        return layers * gated + hidden * text_hidden + text_hidden * text_hidden
    each = 4 * hidden * hidden + (2 if conformer else 1) * 2 * hidden * ffn + 3 * hidden * hidden * conformer
    return layers * each + hidden * text_hidden
