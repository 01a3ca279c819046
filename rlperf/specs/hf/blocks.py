"""Configurations that state every layer apart: Nemotron-H's pattern of halves, Nemotron-NAS' blocks."""

from __future__ import annotations

from rlperf.specs.architecture import Experts
from rlperf.specs.hf import names
from rlperf.specs.hf.fields import Fields
from rlperf.specs.hf.halves import FULL, NONE, Given, Mixer, ReadHalf

_NEMOTRON: dict[str, tuple[ReadHalf, ReadHalf]] = {
    "M": (ReadHalf("mamba"), NONE),
    "*": (FULL, NONE),
    "E": (NONE, ReadHalf("moe")),
    "-": (NONE, ReadHalf("dense")),
}
_NEMOTRON_WORDS = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "moe": "E",
    "mlp": "-",
}


def nemotron(given: Given) -> tuple[list[Mixer], list[ReadHalf]]:
    """Nemotron-H: every layer is one half; ``M`` Mamba-2, ``*`` attention, ``E`` experts, ``-`` dense."""
    fields, layers = given.fields, given.layers
    words = fields.items("layers_block_type") if fields.has("layers_block_type") else []
    pattern = "".join(_NEMOTRON_WORDS.get(str(word), "?") for word in words) or fields.text("hybrid_override_pattern")
    if not pattern:
        fields.note("hybrid_override_pattern", "is missing (or layers_block_type)")
    unknown = sorted(set(pattern) - set(_NEMOTRON))
    if unknown:
        fields.note("hybrid_override_pattern", f"rlperf does not know {' '.join(unknown)}; it knows M * E -")
    if pattern and len(pattern) != layers:
        fields.note("hybrid_override_pattern", f"has {len(pattern)} entries for {layers} layers")
    kinds = [_NEMOTRON.get(letter, (FULL, NONE)) for letter in pattern] or [(FULL, NONE)]
    return [(mixer,) for mixer, _ in kinds], [half for _, half in kinds]


def block_configs(given: Given) -> tuple[list[Mixer], list[ReadHalf]]:
    """Nemotron-NAS (DeciLM): every layer states its attention and its feed-forward, or that it has none."""
    fields = given.fields
    heads, hidden = fields.need(*names.HEADS), fields.need(*names.HIDDEN)
    mixers: list[Mixer] = []
    feed_forwards: list[ReadHalf] = []
    blocks = fields.items("block_configs")
    fields.has(*names.WINDOW)  # blocks that slide state their own
    if len(blocks) != given.layers:
        fields.note("block_configs", f"has {len(blocks)} entries for {given.layers} layers")
    for index, block in enumerate(blocks):
        part = fields.beside(block if isinstance(block, dict) else {}, "block_configs", str(index))
        attention, ffn = part.child("attention"), part.child("ffn")
        mixers.append((_block_attention(attention, heads),))
        feed_forwards.append(_block_feed_forward(given, ffn, hidden))
    return mixers or [(FULL,)], feed_forwards or [ReadHalf("dense")]


def _block_attention(part: Fields, heads: int) -> ReadHalf:
    if part.flag("no_op", default=False):
        return NONE
    if part.flag("replace_with_linear", default=False):
        return ReadHalf("square")
    for name in ("sparsify", "num_sink_tokens", "unshifted_sink"):
        if part.data.get(name):
            part.note(name, "attention of this block is not modelled")
    groups = part.optional("n_heads_in_group", default=1) or 1
    keys = part.optional("num_key_value_heads") or max(heads // groups, 1)
    if part.has("window_length"):
        return ReadHalf("sliding", (("kv_heads", keys), ("window", part.need("window_length"))))
    return ReadHalf("full", (("kv_heads", keys),))


def _block_feed_forward(given: Given, part: Fields, hidden: int) -> ReadHalf:
    if part.flag("no_op", default=False):
        return NONE
    if part.flag("replace_with_linear", default=False):
        return ReadHalf("square")
    if part.has("moe"):
        moe = part.child("moe")
        mine = Experts(
            count=moe.need("num_local_experts"),
            active=moe.need("num_experts_per_tok"),
            hidden=moe.need("expert_intermediate_dim"),
            shared_hidden=moe.optional("shared_expert_intermediate_dim"),
            gated=given.gated,
            bias=given.family.expert_bias,
        )
        return ReadHalf("moe", (("experts", mine),))
    if part.has("intermediate_size"):
        return ReadHalf("dense", (("ffn_hidden", part.need("intermediate_size")),))
    width = int(2 * part.number("ffn_mult", default=4.0) * hidden / 3)
    return ReadHalf("dense", (("ffn_hidden", -(-width // 256) * 256),))  # as the model's own code rounds it
