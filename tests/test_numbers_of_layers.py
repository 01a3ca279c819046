"""Numbers of layers and towers under names that several families share, or that a file leaves out."""

from __future__ import annotations

import pytest

from rlperf.cost.parameters import parameters
from rlperf.errors import SpecError
from rlperf.specs.hf.config import from_hf
from tests.small_configs import LATENT, PLAIN, read

TOWER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
         "image_size": 56, "patch_size": 14}  # fmt: skip


def test_lightning_heads_are_as_wide_as_the_file_says() -> None:
    words = ["linear_attention", "full_attention"] * 2
    linear = read(
        LATENT, model_type="bailing_hybrid", layer_types=words, linear_num_heads=4, linear_head_dim=128
    ).linear_attention
    assert linear is not None and (linear.key_heads, linear.key_head_dim, linear.value_head_dim) == (4, 128, 128)


def test_heads_of_attention_are_not_a_hybrids_states() -> None:
    state = {"mamba_d_state": 16, "mamba_n_groups": 1, "attn_layer_indices": [1]}
    with pytest.raises(SpecError, match="mamba_head_dim: is missing"):
        read(PLAIN, model_type="bamba", mamba_n_heads=16, **state)
    alone = read(
        {"model_type": "mamba2", "hidden_size": 512, "num_hidden_layers": 2, "vocab_size": 1000},
        num_heads=16, head_dim=64, state_size=16, n_groups=1,
    ).state_space  # fmt: skip
    assert alone is not None and (alone.heads, alone.head_dim) == (16, 64)


def test_mamba_in_jamba_is_the_first() -> None:
    words = ["mamba", "attention"] * 2
    arch = read(PLAIN, model_type="jamba", layers_block_type=words, mamba_d_state=16, mamba_dt_rank=32)
    assert arch.layer_mixers == ("mamba1", "full") * 2


def test_internvl_joins_patches_as_its_transformers_form_does() -> None:
    towers = [
        from_hf(
            {"model_type": outer, "downsample_ratio": 0.5, part: PLAIN, "vision_config": {**TOWER, "model_type": own}},
            name="x",
            source="test",
        ).vision
        for outer, part, own in (
            ("internvl", "text_config", "internvl_vision"),
            ("internvl_chat", "llm_config", "intern_vit_6b"),
        )
    ]
    assert towers[0] == towers[1] is not None


def test_a_tower_may_state_what_it_joins_as_a_factor() -> None:
    data = {"model_type": "lfm2_vl", "downsample_factor": 4, "text_config": PLAIN, "vision_config": TOWER}
    vision = from_hf(data, name="x", source="test").vision
    assert vision is not None and vision.spatial_merge == 4


def test_bloom_states_its_width_as_n_embed() -> None:
    bloom = {"model_type": "bloom", "n_layer": 2, "n_head": 8, "vocab_size": 1000}
    assert parameters(read(bloom, n_embed=64)) == parameters(read(bloom, hidden_size=64))


def test_a_language_part_alone_sees_images_of_the_default_size() -> None:
    """Of four tiles of 40 x 40 patches and a class token each."""
    arch = read(PLAIN, model_type="mllama_text_model", cross_attention_layers=[1, 3])
    assert [arch.part(name)[1].window for name in arch.layer_mixers] == [0, 4 * 1601] * 2
    assert arch.assumed == ("not costed, or in part: cross-attention to images (costed as a window of their tokens)",)


def test_experts_of_images_are_as_wide_as_those_of_text_where_one_width_is_stated() -> None:
    text = {**PLAIN, "model_type": "ernie4_5_moe_vl", "moe_k": 2, "moe_num_experts": [4, 4]}
    both, narrow = (
        read(text, moe_intermediate_size=width, vision_config={"depth": 2, **TOWER}).vision for width in (64, [64, 32])
    )
    assert both is not None and narrow is not None
    assert both.parameters - narrow.parameters == 4 * 4 * 512 * 3 * (64 - 32)


def test_what_nobody_reads_of_one_layer_is_said() -> None:
    with pytest.raises(SpecError, match="per_layer_config: rlperf does not read moe_intermediate_size of one layer"):
        read(PLAIN, per_layer_config={"01": {"moe_intermediate_size": 2048, "rope_theta": 1e4}})
    index = {"index_topk": 256, "index_n_heads": 4, "index_head_dim": 32}
    with pytest.raises(SpecError, match="per_layer_config: rlperf does not read num_attention_heads of one layer"):
        read(PLAIN, **index, per_layer_config={"01": {"num_attention_heads": 4}})
    with pytest.raises(SpecError, match=r"per_layer_config\.01\.head_dim: 'wide' is not a whole number"):
        read(PLAIN, per_layer_config={"01": {"head_dim": "wide"}})


def test_a_list_of_feed_forwards_names_every_layer() -> None:
    with pytest.raises(SpecError, match="mlp_layer_types: has 3 entries for 4 layers"):
        read(PLAIN, model_type="mixtral", num_experts=4, num_experts_per_tok=2, mlp_layer_types=["sparse"] * 3)


def test_the_version_is_the_outermost_parts() -> None:
    """A language part two deep: since Transformers 5 the configuration around it says whether the head is tied."""

    def tied(version: str) -> bool:
        thinker = {"model_type": "qwen3_omni_moe_thinker", "text_config": {**PLAIN, "tie_word_embeddings": False}}
        data = {"model_type": "qwen3_omni_moe", "transformers_version": version}
        return from_hf(
            {**data, "thinker_config": {**thinker, "tie_word_embeddings": True}}, name="x", source="test"
        ).tied_embeddings

    assert (tied("4.57.1"), tied("5.0.0")) == (False, True)


def test_streams_and_keys_that_are_switched_off() -> None:
    assert read(PLAIN, altup_num_inputs=0) == read(PLAIN, altup_num_inputs=1)
    code = {"model_type": "gpt_bigcode", "n_embd": 64, "n_head": 8, "n_layer": 2, "n_positions": 32, "vocab_size": 100}
    assert (read(code).kv_heads, read(code, multi_query=False).kv_heads) == (1, 8)
