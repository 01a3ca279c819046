"""Numbers of layer kinds in Hugging Face configurations: states, heads of linear attention, indices."""

from __future__ import annotations

from collections.abc import Iterable

from rlperf.specs.architecture import KindNumbers, LinearAttention, StateSpace
from rlperf.specs.hf import names
from rlperf.specs.hf.fields import Fields
from rlperf.specs.hf.halves import Given
from rlperf.specs.hf.layers import block_sparse


def state_space(given: Given) -> StateSpace:
    """Mamba-2; the width of a head may be said to follow from the others.

    A model of Mamba-2 alone states its heads under the names that are attention's elsewhere.
    """
    fields, alone = given.fields, bool(given.family.alone)
    heads = fields.need(*names.SSM_HEADS, *(("num_heads",) if alone else ()))
    if fields.data.get("mamba_d_head") == "auto":
        width = fields.optional("mamba_expand", default=2) * fields.need(*names.HIDDEN) // heads
    else:
        width = fields.need(*names.SSM_HEAD_DIM, *(("head_dim",) if alone else ()))
    return StateSpace(
        heads=heads,
        head_dim=width,
        state=fields.need(*names.SSM_STATE),
        groups=fields.need(*names.SSM_GROUPS),
        conv_kernel=fields.optional(*names.SSM_CONV, default=4) or 4,
        chunk=fields.optional(*names.SSM_CHUNK, default=128) or 128,
    )


def linear_attention(given: Given, kinds: Iterable[str]) -> LinearAttention:
    """Heads of linear attention: its own fields, Kimi's nested ones, or those of softmax attention (lightning)."""
    fields, family = given.fields, given.family
    if "lightning" in kinds:
        heads = fields.optional("linear_num_heads") or fields.need(*names.HEADS)
        width = fields.optional("linear_head_dim", *names.HEAD_DIM) or fields.need(*names.HIDDEN) // fields.need(
            *names.HEADS
        )
        return LinearAttention(
            key_heads=heads, value_heads=heads, key_head_dim=width, value_head_dim=width, conv_kernel=1
        )
    if fields.has("linear_attn_config"):
        part = fields.child("linear_attn_config")
        heads, width = part.need("num_heads", "num_v_heads"), part.need("head_dim", "head_v_dim")
        return LinearAttention(
            key_heads=part.optional("num_k_heads", default=heads) or heads,
            value_heads=heads,
            key_head_dim=part.optional("head_k_dim", default=width) or width,
            value_head_dim=width,
            conv_kernel=part.optional("short_conv_kernel_size", default=4) or 4,
        )
    return LinearAttention(
        key_heads=fields.need(*names.LINEAR_KEY_HEADS),
        value_heads=fields.need(*names.LINEAR_VALUE_HEADS),
        key_head_dim=fields.need(*names.LINEAR_KEY_DIM),
        value_head_dim=fields.need(*names.LINEAR_VALUE_DIM),
        conv_kernel=fields.optional("linear_conv_kernel_dim", default=4) or 4,
        full_gates="kda" in kinds and family.full_gates,
    )


def further(given: Given, kinds: Iterable[str]) -> tuple[KindNumbers, ...]:
    """Numbers of the kinds that have no field in `rlperf.specs.architecture.Architecture`."""
    fields, found = given.fields, list[dict[str, int | str]]()
    present = set(kinds)
    if present & {"sparse", "sparse_reusing"}:
        found.append({"kind": "sparse", **_index(fields), "top": fields.need("index_topk")})
    if "block_sparse" in present:
        part = block_sparse(fields)
        if part is not None:
            found.append(
                {
                    "kind": "block_sparse",
                    "heads": part.need("sparse_num_index_heads", "index_n_heads"),
                    "head_dim": part.need("sparse_index_dim", "index_head_dim"),
                    "block": part.optional("sparse_block_size", "index_block_size", default=128) or 128,
                    "top": part.need("sparse_topk_blocks", "index_topk_blocks"),
                }
            )
        elif fields.has("indexer_budget"):  # an index over means of a few keys (Qwen4)
            ratio = fields.need("indexer_compress_ratio")
            found.append(
                {
                    "kind": "block_sparse",
                    "heads": fields.need("indexer_n_heads"),
                    "head_dim": fields.need("indexer_head_dim"),
                    "block": ratio,
                    "top": max(fields.need("indexer_budget") // ratio, 1),
                    "pool": ratio,
                }
            )
        else:  # an index over tokens in front of grouped attention
            found.append({"kind": "block_sparse", **_index(fields), "block": 1, "top": fields.need("index_topk")})
    if "mamba1" in present:
        width = fields.optional("mamba_expand", default=2) * fields.need(*names.HIDDEN)
        width = fields.need("intermediate_size") if given.family.alone else width
        found.append(
            {
                "kind": "mamba1",
                "width": width,
                "state": fields.optional(*names.SSM_STATE, default=16),
                "step_rank": fields.optional("mamba_dt_rank", "time_step_rank") or -(-fields.need(*names.HIDDEN) // 16),
                "conv_kernel": fields.optional(*names.SSM_CONV, default=4),
                "norms": int(not given.family.alone),
            }
        )
    if "short_conv" in present:
        width = fields.optional("conv_dim") or fields.need(*names.HIDDEN)
        found.append({"kind": "short_conv", "width": width, "conv_kernel": fields.need("conv_L_cache")})
    return tuple(KindNumbers.model_validate(one) for one in found)


def _index(fields: Fields) -> dict[str, int]:
    pooled = {"pool": fields.need("index_kpool")} if fields.has("index_kpool") else {}
    return {"heads": fields.need("index_n_heads"), "head_dim": fields.need("index_head_dim"), **pooled}
