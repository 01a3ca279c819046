"""Feed-forward kind of every layer of a Hugging Face configuration: dense, experts, and widths that differ."""

from __future__ import annotations

import re

from rlperf.specs import hf_names as names
from rlperf.specs.hf_halves import Given, ReadHalf


def feed_forwards(given: Given) -> list[ReadHalf]:
    """Feed-forward kind of every layer."""
    fields, layers = given.fields, given.layers
    if not fields.optional(*names.EXPERTS) or not fields.flag("is_moe", default=True):
        if given.family.all_moe:
            fields.need(*names.EXPERTS)
        return _dense_widths(given)
    if given.family.double_layers:
        return [ReadHalf("dense"), ReadHalf("moe")] * (layers // 2)
    words = fields.items("mlp_layer_types")
    if len(words) == layers:
        return [ReadHalf("dense" if word == "dense" else "moe") for word in words]
    if words:
        fields.note("mlp_layer_types", f"has {len(words)} entries for {layers} layers")
    dense = set(range(min(fields.optional(*names.DENSE_FIRST), layers)))
    dense |= {index for index in fields.items("mlp_only_layers") if isinstance(index, int)}
    period = fields.optional(*names.MOE_PERIOD, default=1) or 1
    dense |= {index for index in range(layers) if (index + 1) % period}
    if fields.has("expert_layer_period"):
        period, offset = fields.need("expert_layer_period"), fields.optional("expert_layer_offset")
        dense |= {index for index in range(layers) if index % period != offset % period}
    if fields.has("moe_layer_end_index"):
        dense |= set(range(fields.optional("moe_layer_end_index") + 1, layers))
    for name in ("moe_layer_freq", "is_moe_layer"):
        frequency = fields.listed(name)
        if isinstance(frequency, list):
            dense |= {index for index, flag in enumerate(frequency) if not flag}
        elif isinstance(frequency, int) and frequency > 1:
            dense |= {index for index in range(layers) if index % frequency}
    chosen = fields.listed("moe_layers_enum")
    if chosen:
        listed = [int(n) for n in re.findall(r"\d+", str(chosen))]
        dense |= set(range(layers)) - set(listed)
    return [ReadHalf("dense" if index in dense else "moe") for index in range(layers)]


def _dense_widths(given: Given) -> list[ReadHalf]:
    """Dense feed-forwards, wider where they are said to be: by a list, or in layers that borrow their cache."""
    fields, layers = given.fields, given.layers
    widths = fields.listed("intermediate_size")
    if isinstance(widths, list) and len(widths) == layers and all(isinstance(width, int) for width in widths):
        return [ReadHalf("dense", (("ffn_hidden", width),)) for width in widths]
    own = [given.apart(index).optional("intermediate_size") for index in range(layers)]
    if any(own):
        return [ReadHalf("dense", (("ffn_hidden", width),)) if width else ReadHalf("dense") for width in own]
    last = fields.optional("num_kv_shared_layers")
    if fields.flag("use_double_wide_mlp", default=False) and last:
        wide = ReadHalf("dense", (("ffn_hidden", 2 * fields.need("intermediate_size")),))
        return [wide if index >= layers - last else ReadHalf("dense") for index in range(layers)]
    return [ReadHalf("dense")] * layers
