"""Feed-forward kind of every layer of a Hugging Face configuration: dense, experts, and numbers that differ."""

from __future__ import annotations

import re
from dataclasses import replace

from rlperf.specs.architecture import Experts
from rlperf.specs.hf import names
from rlperf.specs.hf.halves import NONE, Given, ReadHalf


def feed_forwards(given: Given) -> list[ReadHalf]:
    """Feed-forward of every layer: its kind, and the numbers in which it differs."""
    return [_refined(given, kind, index) for index, kind in enumerate(_kinds(given))]


def _kinds(given: Given) -> list[str]:
    fields, layers = given.fields, given.layers
    if not has_experts(given):
        return ["dense"] * layers
    if given.family.double_layers:
        return ["dense", "moe"] * (layers // 2)
    words = fields.items("mlp_layer_types")
    if len(words) == layers:
        return ["dense" if word == "dense" else "moe" for word in words]
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
    if fields.has("moe_layers"):  # Llama 4: goes before its period
        dense = set(range(layers)) - {index for index in fields.items("moe_layers") if isinstance(index, int)}
    return ["dense" if index in dense else "moe" for index in range(layers)]


def has_experts(given: Given) -> bool:
    """Whether some layer has experts; one alone that nothing runs beside is a dense feed-forward (Jamba)."""
    fields = given.fields
    count = fields.optional(*names.EXPERTS) if fields.flag("is_moe", "use_moe", default=True) else 0
    if not count and given.family.all_moe:
        fields.need(*names.EXPERTS)
    alone = not fields.has(*names.OWN_EXPERT_WIDTH, *names.SHARED_COUNT, *names.SHARED_WIDTH)
    return count > 1 or (count == 1 and not alone)


def _refined(given: Given, kind: str, index: int) -> ReadHalf:
    """A feed-forward with what its layer states of it: by layer, in lists, or by what borrows its cache."""
    fields, own = given.fields, given.apart(index)
    if given.skips(index, "mlp"):
        return NONE
    if kind == "moe" and own.has(*names.EXPERTS) and own.optional(*names.EXPERTS) == 0:
        kind = "dense"
    if kind == "moe" and not own.data:
        return ReadHalf("moe")
    if kind == "moe":
        mine = experts(replace(given, fields=fields.beside({**fields.data, **own.data})))
        return ReadHalf("moe") if mine is None or mine == experts(given) else ReadHalf("moe", (("experts", mine),))
    width = own.optional(*names.DENSE_WIDTH)
    if not width and own.has(*names.DENSE_WIDTH):
        return NONE
    last = fields.optional("num_kv_shared_layers")
    if not width and fields.flag("use_double_wide_mlp", default=False) and index >= given.layers - last:
        width = 2 * fields.need("intermediate_size")
    same = width in (0, next((fields.data[name] for name in names.DENSE_WIDTH if fields.has(name)), 0))
    return ReadHalf("dense") if same else ReadHalf("dense", (("ffn_hidden", width),))


def experts(given: Given) -> Experts | None:
    """Routed and shared experts; those that hand a token back (LongCat) take their share of the choices."""
    fields, family = given.fields, given.family
    count, active = fields.need(*names.EXPERTS), fields.need(*names.ACTIVE)
    width = fields.need(*names.EXPERT_WIDTH)
    shared = fields.optional(*names.SHARED_WIDTH)
    if fields.has("shared_experts_intermediate_size"):  # of one: dots3.note
        shared *= fields.optional(*names.SHARED_COUNT, default=1)
    if not shared:
        shared = fields.optional(*names.SHARED_COUNT) * width
    if given.kind == "llama4":
        shared = width
    if (
        family.dense_beside
        or family.double_layers
        or fields.flag("enable_moe_block", default=False)
        or fields.flag("residual_moe", default=False)
    ):  # a dense feed-forward runs beside the experts, as one shared expert
        shared = fields.need(*names.DENSE_WIDTH)
    if fields.flag("parallel_attn_mlp_res", default=False):  # Arctic's is as wide as the residual stream
        shared = fields.need(*names.HIDDEN)
    null = fields.optional(*names.NULL_EXPERTS)
    if active > count + null:
        fields.note("num_experts_per_tok", f"is {active}, more than the {count} experts")
        return None
    return Experts(
        count=count,
        active=max(round(active * count / (count + null)), 1) if null else active,
        hidden=width,
        shared_hidden=shared,
        shared_gate=family.shared_gate and shared > 0,
        gated=given.gated,
        bias=family.expert_bias,
        latent_hidden=fields.optional(*names.LATENT_EXPERTS),
        null_count=null,
    )
