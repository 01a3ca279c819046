"""What a configuration leaves out since the class of its ``model_type`` in Transformers has it: ``defaults.yaml``.

Files leave numbers out that equal the default of their class, parts of composite ones above all: the ``text_config`` of
gemma-3-4b states four numbers, that of llava-1.5-7b two. Without the default a model of experts would be read as a
dense one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rlperf.specs.hf import names
from rlperf.specs.reader import read_document

GROUPS: tuple[tuple[str, ...], ...] = (
    names.KV_HEADS,
    names.HEAD_DIM,
    names.EXPERTS,
    names.ACTIVE,
    names.OWN_EXPERT_WIDTH,
    (*names.SHARED_WIDTH, *names.SHARED_COUNT),
    (*names.DENSE_FIRST, *names.MOE_LISTS),
    ("attn_layer_period", "layers_block_type", "layer_types", "attn_layer_indices"),
    ("expert_layer_period",),
    *((name,) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")),
    *((name,) for name in ("index_n_heads", "index_head_dim", "index_topk", "o_groups", "o_lora_rank", "conv_L_cache")),
    *((name,) for name in ("hidden_size_per_layer_input", "altup_num_inputs", "laurel_rank", "hc_mult")),
    *(names.LINEAR_KEY_HEADS, names.LINEAR_VALUE_HEADS, names.LINEAR_KEY_DIM, names.LINEAR_VALUE_DIM),
    *(names.SSM_HEADS, names.SSM_HEAD_DIM, names.SSM_STATE, names.SSM_GROUPS, names.LATENT_EXPERTS),
)
"""Names of one number each, or of what takes its place: a file that states one of a group needs no default for it."""
OF_PARTS: tuple[tuple[str, ...], ...] = (
    *(names.LAYERS, names.HIDDEN, names.HEADS, ("intermediate_size_mlp",), names.FFN, names.VOCABULARY),
)
"""The same of numbers that a file of a language model alone always states, so that one without is a broken file."""


@cache
def _table() -> dict[str, dict[str, int]]:
    return dict(read_document(Path(__file__).with_name("defaults.yaml")).data)


def class_sizes(tower: str) -> dict[str, int]:
    """Sizes of the class of a tower alone, which its file may leave out (mistral-community/pixtral-12b)."""
    return _table()[tower] if tower == "pixtral" else {}


def left_out(
    kind: str, stated: Mapping[str, Any], *, part: bool, elsewhere: Collection[str] = frozenset()
) -> dict[str, int]:
    """Defaults of the class of ``kind`` for what ``stated`` leaves out; a null is stated, and says that there is none.

    Parameters
    ----------
    part : whether the file is of more than a language model, and this the part that is
    elsewhere : names that the file states outside of the part, or has to: no size is filled in that they give

    >>> left_out("qwen2_moe", {"num_experts_per_tok": 4, "shared_expert_intermediate_size": None}, part=False)
    {'num_key_value_heads': 16, 'moe_intermediate_size': 1408, 'num_experts': 60}
    """
    heads = next((stated[name] for name in names.HEADS if isinstance(stated.get(name), int)), 0)
    sizes = [group for group in OF_PARTS if part and not {*group} & {*elsewhere}]
    groups = {name: group for group in (*GROUPS, *sizes) for name in group}
    absent = _table().get(kind, {}).items()
    found = {key: value for key, value in absent if key in groups and not stated.keys() & set(groups[key])}
    # keys that do not divide the stated heads are those of other sizes than the file's: as many keys as heads
    return {key: value for key, value in found.items() if key not in names.KV_HEADS or not heads % value}
