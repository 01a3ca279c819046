"""Vision towers of Hugging Face configurations: shape and number of parameters, computed from ``vision_config``.

Every count follows the module's weights as its ``transformers`` implementation names them: patch embedding, positions,
``layers`` blocks of attention and feed-forward, and the merger or projector that hands patches to the language model.
"""

from __future__ import annotations

from rlperf.specs.architecture import VisionTower
from rlperf.specs.hf.fields import Fields


def block_parameters(hidden: int, ffn_hidden: int, *, gated: bool, norm_weights: int) -> int:
    """Parameters of one vision block with biases everywhere.

    ``4 h^2 + 4 h`` (query, key, value, output) ``+ m h f + (m - 1) f + h`` (``m`` = 3 matrices if gated, else 2)
    ``+ 2 n h`` (two norms of ``n`` values per channel).

    >>> block_parameters(1280, 3420, gated=True, norm_weights=1)
    19702200
    """
    matrices = 3 if gated else 2
    attention = 4 * hidden * hidden + 4 * hidden
    feed_forward = matrices * hidden * ffn_hidden + (matrices - 1) * ffn_hidden + hidden
    return attention + feed_forward + 2 * norm_weights * hidden


def pooling_head(vision: Fields, block: int, *, default: bool) -> int:
    """SigLIP's head that pools patches (a probe, attention, a norm and a feed-forward), where ``vision_use_head``."""
    return (block - vision.need(*HIDDEN)) * vision.flag("vision_use_head", default=default)


def _merger(hidden: int, merge: int, output: int, norm: int) -> int:
    """Two linear layers with biases over ``merge^2`` joined patches, behind a norm of ``norm`` values."""
    joined = hidden * merge * merge
    return norm + joined * joined + joined + joined * output + output


def _qwen(
    vision: Fields,
    sizes: tuple[int, int, int],
    *,
    gated: bool = False,
    norm_weights: int = 2,
    beside: int = 0,
    window: int = 0,
    full_attention_layers: int | None = None,
) -> VisionTower:
    """Towers of the Qwen family: patches of several frames, blocks, and a merger of neighbouring patches.

    ``sizes`` : of a patch's state, of the feed-forward, and of what the language model takes
    ``beside`` : parameters of everything else
    """
    (hidden, ffn, output), merge = sizes, vision.optional("spatial_merge_size", default=2)
    patch, temporal = vision.need("patch_size"), vision.optional("temporal_patch_size", default=2)
    patches = vision.optional("in_channels", "in_chans", default=3) * temporal * patch**2 * hidden
    layers = vision.need("depth")
    blocks = layers * block_parameters(hidden, ffn, gated=gated, norm_weights=norm_weights)
    return VisionTower(
        layers=layers,
        hidden=hidden,
        heads=vision.need("num_heads"),
        ffn_hidden=ffn,
        gated=gated,
        patch_size=patch,
        temporal_patch=temporal,
        spatial_merge=merge,
        output_hidden=output,
        window=window,
        full_attention_layers=full_attention_layers,
        parameters=patches + blocks + _merger(hidden, merge, output, norm_weights * hidden) + beside,
    )


def qwen2_vl(vision: Fields, _text_hidden: int) -> VisionTower:
    hidden = vision.need("embed_dim")
    return _qwen(vision, (hidden, int(hidden * vision.number("mlp_ratio", default=4.0)), vision.need("hidden_size")))


def qwen2_5_vl(vision: Fields, _text_hidden: int) -> VisionTower:
    return _qwen(
        vision,
        (vision.need("hidden_size"), vision.need("intermediate_size"), vision.need("out_hidden_size")),
        gated=True,
        norm_weights=1,
        window=vision.optional("window_size", default=112),
        full_attention_layers=len(vision.items("fullatt_block_indexes")) or None,
    )


def qwen3_vl(vision: Fields, _text_hidden: int) -> VisionTower:
    hidden, output = vision.need("hidden_size"), vision.need("out_hidden_size")
    merge = vision.optional("spatial_merge_size", default=2)
    bias_and_positions = hidden + vision.need("num_position_embeddings") * hidden
    deep = len(vision.items("deepstack_visual_indexes")) * _merger(hidden, merge, output, 2 * hidden * merge * merge)
    return _qwen(vision, (hidden, vision.need("intermediate_size"), output), beside=bias_and_positions + deep)


def siglip(vision: Fields, text_hidden: int) -> VisionTower:
    hidden, ffn = vision.need("hidden_size"), vision.need("intermediate_size")
    layers, patch = vision.need("num_hidden_layers"), vision.need("patch_size")
    patches = 3 * patch**2 * hidden + hidden
    positions = (vision.need("image_size") // patch) ** 2 * hidden
    block = block_parameters(hidden, ffn, gated=False, norm_weights=2)
    blocks = layers * block + pooling_head(vision, block, default=True)
    projector = hidden * text_hidden + hidden
    return VisionTower(
        layers=layers,
        hidden=hidden,
        heads=vision.need("num_attention_heads"),
        ffn_hidden=ffn,
        patch_size=patch,
        output_hidden=text_hidden,
        spatial_merge=4,  # 64 x 64 patches are averaged to 16 x 16 = 256 tokens an image
        parameters=patches + positions + blocks + 2 * hidden + projector,
    )


def llama4(vision: Fields, text_hidden: int) -> VisionTower:
    hidden, ffn = vision.need("hidden_size"), vision.need("intermediate_size")
    layers, patch = vision.need("num_hidden_layers"), vision.need("patch_size")
    patches = 3 * patch**2 * hidden
    positions = ((vision.need("image_size") // patch) ** 2 + 1) * hidden + hidden  # with the class token
    blocks = layers * block_parameters(hidden, ffn, gated=False, norm_weights=2)
    inner, outer = vision.need("projector_input_dim"), vision.need("projector_output_dim")
    projector = ffn * inner + outer * outer + vision.need("vision_output_dim") * text_hidden
    return VisionTower(
        layers=layers,
        hidden=hidden,
        heads=vision.need("num_attention_heads"),
        ffn_hidden=ffn,
        patch_size=patch,
        spatial_merge=2,
        output_hidden=text_hidden,
        parameters=patches + positions + blocks + 4 * hidden + projector,
    )


LAYERS = ("num_hidden_layers", "depth", "vt_num_hidden_layers", "num_layers", "layers")
HIDDEN = ("hidden_size", "embed_dim", "vt_hidden_size", "width")
FFN_WIDTHS = ("intermediate_size", "vt_intermediate_size", "mlp_hidden_dim")
HEADS = ("num_attention_heads", "num_heads", "vt_num_attention_heads")


MERGES = ("spatial_merge_size", "pooling_kernel_size", "downsample_factor", "scale_factor", "hidden_stride")


def merging(vision: Fields, outer: Fields) -> int:
    """Patches along a side that become one token of the language model."""
    kernel = vision.data.get("merge_kernel_size")
    if isinstance(kernel, list) and kernel and isinstance(kernel[0], int):
        return kernel[0]
    for part in (vision, outer):
        if part.has(*MERGES):
            return part.optional(*MERGES, default=1) or 1
        nested = part.data.get("img_token_compression_config")
        if isinstance(nested, dict) and isinstance(nested.get("spatial_merge_size"), int):
            return int(nested["spatial_merge_size"])
        ratio = part.data.get("downsample_ratio")
        if isinstance(ratio, int | float) and ratio > 0:
            return round(1.0 / ratio if ratio < 1.0 else ratio)
    return 2


def plain(vision: Fields, outer: Fields, text_hidden: int, *, gated: bool = False, norms: int = 4) -> VisionTower:
    """A tower by its sizes alone: patches, blocks with biases, a merger of two layers.

    ``norms`` : values of all norms of a block per channel
    """
    hidden, layers, patch = (
        vision.need(*HIDDEN),
        vision.need(*LAYERS),
        vision.side("patch_size", default=14) or 14,
    )
    ffn = vision.optional(*FFN_WIDTHS) or int(hidden * vision.number("mlp_ratio", default=4.0))
    merge = merging(vision, outer)
    high = vision.optional("init_pos_emb_height", "pos_emb_height") or vision.side("image_size") // patch
    wide = vision.optional("init_pos_emb_width", "pos_emb_width") or high
    positions = 2 * vision.optional("position_embedding_size") * hidden or high * wide * hidden
    if vision.data.get("position_embedding_type") == "rope" or vision.has("rope_theta"):
        positions = 0
    blocks = layers * (block_parameters(hidden, ffn, gated=gated, norm_weights=0) + norms * hidden)
    return VisionTower(
        layers=layers,
        hidden=hidden,
        heads=vision.optional(*HEADS, default=16) or 16,
        ffn_hidden=ffn,
        gated=gated,
        patch_size=patch,
        temporal_patch=vision.optional("temporal_patch_size", default=1) or 1,
        spatial_merge=merge,
        output_hidden=text_hidden,
        parameters=3 * patch**2 * hidden + positions + blocks + _merger(hidden, merge, text_hidden, 2 * hidden),
    )


def minimax_m3(vision: Fields, outer: Fields, text_hidden: int) -> VisionTower:
    """Patches of several frames without a bias or a table of positions; two layers a patch and two for joined ones."""
    found = plain(vision, outer, text_hidden)
    hidden, merge = found.hidden, found.spatial_merge
    inner = outer.optional("projector_hidden_size", default=text_hidden)
    together = vision.child("img_token_compression_config") if vision.has("img_token_compression_config") else vision
    frames = together.optional("temporal_patch_size", default=2)
    patches = 3 * frames * found.patch_size**2 * hidden
    block = block_parameters(hidden, found.ffn_hidden, gated=False, norm_weights=2)
    projector = (hidden + 1) * inner + (inner + 1) * text_hidden
    joined = (text_hidden * merge * merge + 1) * inner + (inner + 1) * text_hidden
    total = patches + 2 * hidden + found.layers * block + projector + joined
    return found.model_copy(update={"parameters": total, "temporal_patch": frames})


def step(vision: Fields, outer: Fields, text_hidden: int) -> VisionTower:
    """Step 3.7: scaled blocks; two convolutions halve the sides and double the width; one matrix behind them."""
    found = plain(vision, outer, text_hidden, norms=6)
    hidden, side = found.hidden, vision.side("image_size", default=728) // found.patch_size
    blocks = found.layers * (block_parameters(hidden, found.ffn_hidden, gated=False, norm_weights=2) + 2 * hidden)
    halving = 9 * hidden * 2 * hidden + 2 * hidden + 9 * 2 * hidden * 4 * hidden + 4 * hidden
    projector = 4 * hidden * text_hidden + text_hidden * outer.flag("projector_bias", default=False)
    total = 3 * found.patch_size**2 * hidden + side * side * hidden + 2 * hidden + blocks + halving + projector
    return found.model_copy(update={"parameters": total, "spatial_merge": 4})


def gemma4(vision: Fields, outer: Fields, text_hidden: int) -> VisionTower:
    """Gated blocks with a norm on either side of both halves; pooled patches pass one matrix."""
    found = plain(vision, outer, text_hidden, gated=True)
    hidden, merge = found.hidden, found.spatial_merge
    less = _merger(hidden, merge, text_hidden, 2 * hidden) - hidden * text_hidden
    return found.model_copy(update={"parameters": found.parameters - less})


def pixtral(vision: Fields, outer: Fields, text_hidden: int) -> VisionTower:
    """Gated blocks without biases; a merger back to the tower's width, and a projector of two layers."""
    found = plain(vision, outer, text_hidden, gated=True, norms=2)
    hidden, ffn = found.hidden, found.ffn_hidden
    blocks = found.layers * (4 * hidden * hidden + 3 * hidden * ffn + 2 * hidden)
    merger = (hidden * found.spatial_merge) ** 2 + hidden * text_hidden + text_hidden * text_hidden
    total = 3 * found.patch_size**2 * hidden + 2 * hidden + blocks + merger
    return found.model_copy(update={"parameters": total})
