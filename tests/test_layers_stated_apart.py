"""Layers that a configuration states apart, by number or by word, and the kinds that came with them."""

from __future__ import annotations

from typing import Any

import pytest

from rlperf.cost.batching import Microbatches
from rlperf.cost.engine_memory import kv_bytes_per_request, kv_bytes_per_token
from rlperf.cost.inference import decode_breakdown
from rlperf.cost.layers import stack_of
from rlperf.cost.parameters import parameters
from rlperf.cost.replica import Replica
from rlperf.cost.trainer_device import TrainerDevice, work_of
from rlperf.errors import SpecError
from rlperf.layout import Layout
from rlperf.specs.architecture import Architecture
from rlperf.specs.engine_calibration import load_engine_calibration
from rlperf.specs.hardware import load_hardware
from rlperf.specs.hf.config import from_hf
from rlperf.specs.profiles import load_architecture
from rlperf.specs.trainer_calibration import load_trainer
from tests.small_configs import LATENT, PLAIN, read

H100, VLLM, ONE = load_hardware("h100_sxm", "dgx_h100"), load_engine_calibration("vllm"), Layout.of()


def _on_one(arch: Architecture) -> Replica:
    return Replica.of(arch, H100, VLLM, ONE)


def _training_s(arch: Architecture) -> float:
    """Forward seconds of the mixer in a training step over four sequences."""
    work = work_of(ONE, Microbatches.of(8192.0, 8192.0 * 2048.0, 2048.0, 4.0))
    seconds = stack_of(arch).halves[0].layer.training_s(TrainerDevice(H100, load_trainer("megatron"), ONE, work))
    assert seconds is not None
    return float(seconds.forward)


def test_numbers_of_one_layer_are_that_layers_alone() -> None:
    arch = read(PLAIN, per_layer_config={"01": {"head_dim": 128, "num_key_value_heads": 2}, "3": {"v_head_dim": 32}})
    kinds = [arch.part(name)[1] for name in arch.layer_mixers]
    assert [(one.head_dim, one.kv_heads, one.value_head_dim) for one in kinds] == [
        (64, 4, 0), (128, 2, 0), (64, 4, 0), (64, 4, 32),
    ]  # fmt: skip
    # twice as wide queries and output, keys and values of as many values; values and output of half the width
    assert parameters(arch) - parameters(read(PLAIN)) == 512 * 2 * (1024 - 512) - 512 * (512 + 256) // 2
    wide = read(PLAIN, per_layer_config={"02": {"intermediate_size": 2048}})
    assert parameters(wide) - parameters(read(PLAIN)) == 3 * 512 * 1024
    heads = read(PLAIN, num_attention_heads_per_layer=[8, 16, 8, 8])
    assert parameters(heads) - parameters(read(PLAIN)) == 2 * 512 * 512
    assert read(PLAIN, num_attention_heads_per_layer=[8] * 4) == read(PLAIN)


def test_a_list_that_names_indexed_layers_leaves_the_others_without_an_index() -> None:
    index = {"index_topk": 256, "index_n_heads": 4, "index_head_dim": 32}
    words = ["indexed_attention", "full_attention", "indexed_attention", "full_attention"]
    assert read(LATENT, layer_types=words, **index).layer_mixers == ("sparse", "latent") * 2
    assert read(PLAIN, layer_types=words, **index).layer_mixers == ("block_sparse", "full") * 2
    assert read(LATENT, **index).layer_mixers == ("sparse",) * 4
    with pytest.raises(SpecError, match=r"index_topk: is missing: how many keys its layers of indexed_attention read"):
        read(LATENT, layer_types=words)


def test_linear_attention_is_the_recurrent_mixer_of_the_family() -> None:
    words = ["linear_attention", "full_attention"] * 2
    linear = {"linear_num_heads": 4, "linear_head_dim": 64, "num_experts": 0}
    kimi = read(LATENT, model_type="kimi_linear", layer_types=words, **linear)
    assert kimi.layer_mixers == ("kda", "latent") * 2
    ling = read(LATENT, model_type="bailing_hybrid", layer_types=words, **linear)
    assert ling.layer_mixers == ("lightning", "latent") * 2
    whole = read(LATENT, model_type="bailing_hybrid", layer_types=words, kda_lower_bound=-5.0, **linear)
    assert whole.layer_mixers == kimi.layer_mixers
    # gates of rank 64 (down once, up to keys and to values) against two whole matrices, in two layers
    assert parameters(whole) - parameters(kimi) == 2 * (2 * 512 * 256 - 2 * 512 * 64 - 2 * 64 * 256)


def test_latents_in_a_window_stop_growing() -> None:
    sliding = read(LATENT, layer_types=["sliding_attention"] * 4, sliding_window=1024)
    latent = read(LATENT)
    assert sliding.layer_mixers == ("sliding_latent",) * 4
    assert parameters(sliding) == parameters(latent)
    each = float(kv_bytes_per_token(_on_one(latent)))
    assert each == 4 * (128 + 32) * 2.0
    assert float(kv_bytes_per_token(_on_one(sliding))) == 0.0
    assert float(kv_bytes_per_request(_on_one(sliding))) == 1024 * each

    def seconds(arch: Architecture, kv: float) -> float:
        lines = {row.name: row.seconds for row in decode_breakdown(Replica.of(arch, H100, VLLM, ONE), 8, 8 * kv)}
        return float(lines["latent attention"])

    assert seconds(sliding, 1024.0) == seconds(latent, 1024.0)
    assert seconds(sliding, 65536.0) == seconds(latent, 1024.0) < seconds(latent, 65536.0)


def test_tokens_that_share_an_index_key() -> None:
    index = {"index_topk": 256, "index_n_heads": 4, "index_head_dim": 32}
    plain, pooled = read(LATENT, **index), read(LATENT, **index, index_kpool=16)
    assert parameters(pooled) - parameters(plain) == 4 * (512 * 32 + 16 * 32)
    key = 32 * (1.0 + 4.0 / 128.0)
    less = float(kv_bytes_per_token(_on_one(plain))) - float(kv_bytes_per_token(_on_one(pooled)))
    assert less == pytest.approx(4 * key * 15 / 16)
    # an index with sixteen times the heads, one of whose keys is sixteen tokens', multiplies as much in training, too
    wide = read(LATENT, **{**index, "index_n_heads": 64}, index_kpool=16)
    assert _training_s(wide) == pytest.approx(_training_s(plain), rel=1e-12)
    assert _training_s(pooled) < _training_s(plain)


def test_blocks_that_are_chosen_by_the_mean_of_their_keys() -> None:
    index = {"indexer_n_heads": 4, "indexer_head_dim": 64, "indexer_budget": 256, "indexer_compress_ratio": 16}
    arch = read(PLAIN, **index)
    assert arch.layer_mixers == ("block_sparse",) * 4
    assert arch.numbers_of("block_sparse") == {"heads": 4, "head_dim": 64, "block": 16, "top": 16, "pool": 16}
    assert parameters(arch) - parameters(read(PLAIN)) == 4 * (512 * (4 + 1) * 64 + 2 * 64)
    more = float(kv_bytes_per_token(_on_one(arch)) - kv_bytes_per_token(_on_one(read(PLAIN))))
    assert more == pytest.approx(4 * 64 * 2.0 / 16)


def test_streams_mixed_by_a_product_of_low_rank() -> None:
    plain, ranked = read(PLAIN, hc_count=4), read(PLAIN, hc_count=4, hc_lowrank=32)
    assert (plain.residual_streams, ranked.residual_rank) == (4, 32)
    assert parameters(ranked) - parameters(plain) == 2 * 4 * 2 * 32 * 4 * 512


def test_cross_attention_keeps_the_tokens_of_an_image() -> None:
    """Of four tiles of 2 x 2 patches and a class token each; no cache grows with the text."""
    vision = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "image_size": 28, "patch_size": 14}
    text = {**PLAIN, "model_type": "mllama_text_model", "cross_attention_layers": [1, 3]}
    arch = from_hf({"model_type": "mllama", "text_config": text, "vision_config": vision}, name="x", source="test")
    kinds = [arch.part(name) for name in arch.layer_mixers]
    assert [(kind, one.window) for kind, one in kinds] == [("full", 0), ("sliding", 20)] * 2
    assert arch.assumed == ("not costed, or in part: cross-attention to images (costed as a window of their tokens)",)
    assert float(kv_bytes_per_request(_on_one(arch))) == 2 * 20 * 2 * 4 * 64 * 2.0


def test_gates_of_latent_attention_are_counted() -> None:
    plain = parameters(read(LATENT))
    assert parameters(read(LATENT, attn_output_gate=True)) - plain == 4 * 512 * 8 * 64
    assert parameters(read(LATENT, use_head_wise_attn_gate=True)) - plain == 4 * 512 * 8


def test_who_says_whether_the_head_is_tied() -> None:
    """Of a nested language part its own word until Transformers 5, whose modules ask the outer configuration."""

    def tied(version: str) -> bool:
        outer = {"model_type": "mistral3", "tie_word_embeddings": True, "transformers_version": version}
        return from_hf(
            {**outer, "text_config": {**PLAIN, "tie_word_embeddings": False}}, name="x", source="t"
        ).tied_embeddings

    assert [tied(version) for version in ("4.57.1", "5.0.0", "5.23.0", "unknown", "")] == [
        False,
        True,
        True,
        False,
        False,
    ]


def test_what_a_family_leaves_out_is_said() -> None:
    arch = read(PLAIN, model_type="inkling", layer_types=["hybrid", "hybrid_sliding"] * 2, sliding_window=64)
    assert arch.layer_mixers == ("full", "sliding") * 2
    assert arch.assumed == (
        "not costed, or in part: short convolutions around halves, keys and values, and logits of relative positions",
    )


@pytest.mark.parametrize("kind", ["camembert", "electra", "something_new"])
def test_a_masked_model_is_told_by_its_segments(kind: str) -> None:
    with pytest.raises(SpecError, match=r"it is an encoder without generation.*--like FAMILY"):
        read(PLAIN, model_type=kind, type_vocab_size=2)


def test_a_name_that_two_models_have_is_read_by_its_class() -> None:
    bert = {"attention_probs_dropout_prob": 0.1}
    with pytest.raises(SpecError, match="its layers are BERT's"):
        read(PLAIN, model_type="git", **bert)
    grok = {
        "model_type": "git",
        "architectures": ["Grok1ForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    arch = read(PLAIN, **grok, moe_intermediate_size=256, residual_moe=True)
    assert (arch.family, arch.post_norms, arch.assumed) == ("grok1", True, ())
    assert arch.experts is not None and arch.experts.shared_hidden == 1024


def test_idle_windows_of_unknown_families_do_no_harm() -> None:
    arch = read(PLAIN, model_type="new", layer_types=["full_attention"] * 4, sliding_window=64)
    assert arch.layer_mixers == ("full",) * 4
    assert stack_of(arch).halves[0].count == 4


@pytest.mark.parametrize("kind", ["Phi3SmallForCausalLM", "LlamaMoEForCausalLM", "Gemma5ForCausalLM", "OptimusModel"])
def test_a_longer_class_is_no_known_family(kind: str) -> None:
    arch = read(PLAIN, model_type="new", architectures=[kind])
    assert (arch.family, arch.assumed) == ("new", ("model_type 'new' is not known: it is read by its fields",))
    like = from_hf({**PLAIN, "model_type": "new", "architectures": [kind]}, name="x", source="test", like="qwen3")
    assert like.qk_norm and like.assumed == ("model_type 'new' is read as qwen3, as asked",)


@pytest.mark.parametrize(
    ("written", "family"),
    [("LlamaForCausalLM", "llama"), ("Qwen3Model", "qwen3"), ("GPT2LMHeadModel", "gpt2"),
     ("PanguProMoEForCausalLM", "PanguProMoE"), ("Qwen3VLForConditionalGeneration", "qwen3_vl")],
)  # fmt: skip
def test_a_class_is_named_after_its_family(written: str, family: str) -> None:
    assert read(PLAIN, model_type="new", architectures=[written]).family == family


@pytest.mark.parametrize("field", [{"type_vocab_size": 2}, {"attention_probs_dropout_prob": 0.0}])
def test_a_known_decoder_may_carry_fields_of_masked_models(field: dict[str, Any]) -> None:
    assert read(PLAIN, **field).layer_mixers == ("full",) * 4
    like = from_hf({**PLAIN, "model_type": "new", **field}, name="x", source="test", like="llama")
    assert like.layer_mixers == ("full",) * 4


def test_own_heads_that_are_the_files_are_not_those_of_the_kind() -> None:
    """A sliding layer has 16 heads, but the second one says that it has the 8 of the others."""
    for sixteen in ({"swa_num_attention_heads": 16}, {"attention_other_setting": {"num_attention_heads": 16}}):
        window = {"layer_types": ["sliding_attention"] * 4, "sliding_window": 64, **sixteen}
        own = {"01": {"num_attention_heads": 8}}
        arch = read(PLAIN, **window, per_layer_config=own)
        assert [arch.part(name)[1].heads for name in arch.layer_mixers] == [16, 8, 16, 16]
    ninety = {"model_type": "step3p5", "layer_types": ["sliding_attention"] * 4, "sliding_window": 64}
    step = read(PLAIN, **ninety, per_layer_config={"01": {"num_attention_heads": 8}})
    assert [step.part(name)[1].heads for name in step.layer_mixers] == [96, 8, 96, 96]
    said = read(PLAIN, **ninety, num_sliding_attention_heads=64)
    assert [said.part(name)[1].heads for name in said.layer_mixers] == [64] * 4


def test_heads_of_latents_are_as_wide_as_their_own_ranks() -> None:
    """96 + 32 of no and of rotary position: as wide as the file's idle ``head_dim``, wider than its ranks' 96."""
    arch = read(LATENT, head_dim=128, per_layer_config={"1": {"qk_nope_head_dim": 96}, "2": {"head_dim": 128}})
    assert [arch.part(name)[1].head_dim for name in arch.layer_mixers] == [96, 128, 96, 96]


def test_latents_in_a_window_need_one() -> None:
    data = read(LATENT, layer_types=["sliding_attention"] * 4, sliding_window=64).model_dump()
    with pytest.raises(ValueError, match="a layer is of kind sliding_latent, but window is missing"):
        Architecture.model_validate({**data, "window": 0})
    own = {str(index): {"sliding_window": 64} for index in range(4)}
    each = read(LATENT, layer_types=["sliding_attention"] * 4, per_layer_config=own)
    assert [each.part(name)[1].window for name in each.layer_mixers] == [64] * 4


MIXED = {**PLAIN, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


def _expert_values(arch: Architecture) -> list[tuple[int, int, int]]:
    """Count, chosen and width of every layer's experts; of a dense layer 0, 0 and its width."""
    kinds = [arch.part(name) for name in arch.layer_feed_forwards]
    shapes = [(one.experts.count, one.experts.active, one.experts.hidden) for _, one in kinds if one.experts]
    dense = [(0, 0, one.ffn_hidden) for _, one in kinds]
    return [shape if kind == "moe" else wide for (kind, _), shape, wide in zip(kinds, shapes, dense, strict=True)]


def test_experts_of_one_layer_are_that_layers_alone() -> None:
    """By number of the layer, or in lists with an entry for each."""
    plain, one = (8, 2, 128), 3 * 512 * 128  # parameters of an expert
    apart = {"1": {"num_experts": 6, "num_experts_per_tok": 1}, "2": {"moe_intermediate_size": 64}}
    arch = read(MIXED, per_layer_config=apart)
    assert _expert_values(arch) == [plain, (6, 1, 128), (8, 2, 64), plain]
    assert parameters(read(MIXED)) - parameters(arch) == 2 * (one + 512) + 8 * one // 2
    lists = read(
        MIXED, num_experts=[8, 6, 8, 8], num_experts_per_tok=[2, 1, 2, 2], moe_intermediate_size=[128, 128, 64, 128]
    )
    assert _expert_values(lists) == _expert_values(arch)
    assert parameters(lists) == parameters(arch)
    assert read(MIXED, num_experts=[8] * 4) == read(MIXED)
    assert read(MIXED, use_moe=False).layer_feed_forwards == ("dense",) * 4
    # a layer without experts is as wide as the file says of dense ones
    assert _expert_values(read(MIXED, num_experts=[0, 8, 8, 8]))[0] == (0, 0, 1024)


def test_dense_layers_among_experts_are_as_wide_as_they_say() -> None:
    arch = read(MIXED, mlp_only_layers=[0, 3], intermediate_size=[512, 9, 9, 2048])
    assert _expert_values(arch) == [(0, 0, 512), (8, 2, 128), (8, 2, 128), (0, 0, 2048)]
    # a width of 0 is no feed-forward
    without = read(PLAIN, intermediate_size=[0, 4096, 4096, 4096])
    assert without.layer_feed_forwards == ("none", "dense", "dense", "dense")
    assert parameters(read(PLAIN, intermediate_size=4096)) - parameters(without) >= 3 * 512 * 4096
    with pytest.raises(SpecError, match="intermediate_size: must be at least 1"):
        read(PLAIN, intermediate_size=[0] * 4)
    # where experts go by the name of dense feed-forwards, each layer's are as wide as the list says
    mixtral = {**PLAIN, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    assert [width for _, _, width in _expert_values(read(mixtral, intermediate_size=[512, 1024, 512, 512]))] == [
        512, 1024, 512, 512,
    ]  # fmt: skip


def test_a_layer_may_skip_a_half() -> None:
    arch = read(PLAIN, per_layer_config={"1": {"skip": ["attention"]}, "3": {"skip": ["mlp"]}})
    assert arch.layer_mixers == ("full", "none", "full", "full")
    assert arch.layer_feed_forwards == ("dense", "dense", "dense", "none")
    with pytest.raises(SpecError, match=r"skip: rlperf does not know router"):
        read(PLAIN, per_layer_config={"1": {"skip": ["router"]}})


def test_llama4_may_list_its_layers_with_experts() -> None:
    llama4 = {
        **PLAIN, "model_type": "llama4_text", "intermediate_size_mlp": 2048, "num_local_experts": 4,
        "num_experts_per_tok": 1, "interleave_moe_layer_step": 1,
    }  # fmt: skip
    assert read(llama4).layer_feed_forwards == ("moe",) * 4
    assert read(llama4, moe_layers=[1, 3]).layer_feed_forwards == ("dense", "moe") * 2


def test_blocks_state_experts_of_their_own() -> None:
    """Puzzle (arXiv 2411.19146): every block its experts."""
    blocks = [
        {"attention": {"num_key_value_heads": 4}, "ffn": {"moe": {
            "num_local_experts": count, "num_experts_per_tok": 2, "expert_intermediate_dim": 128}}}
        for count in (8, 6, 8, 4)
    ]  # fmt: skip
    arch = read({**PLAIN, "model_type": "nemotron-nas"}, block_configs=blocks)
    assert [count for count, _, _ in _expert_values(arch)] == [8, 6, 8, 4]


def test_one_expert_alone_is_a_dense_feed_forward() -> None:
    jamba = read(
        PLAIN, model_type="jamba", num_experts=1, num_experts_per_tok=1, attn_layer_period=2, attn_layer_offset=1
    )
    assert jamba.layer_feed_forwards == ("dense",) * 4
    assert jamba.layer_mixers == ("mamba1", "full") * 2


def test_the_gate_of_laguna_may_be_whole() -> None:
    laguna = {**PLAIN, "model_type": "laguna", "num_experts": 0}
    per_head, whole = read(laguna), read(laguna, gating=False)
    assert (per_head.attention_gate_heads, per_head.attention_gate) == (True, False)
    assert parameters(whole) - parameters(per_head) == 4 * 512 * (8 * 64 - 8)


def test_latents_have_a_key_for_every_head() -> None:
    assert read(LATENT, num_key_value_heads=3).kv_heads == 8


def test_what_no_kind_has_of_a_known_family_is_refused_by_its_field() -> None:
    with pytest.raises(SpecError, match="word_embed_proj_dim: an embedding narrower"):
        read(PLAIN, model_type="opt", word_embed_proj_dim=256, max_position_embeddings=64)
    with pytest.raises(SpecError, match="add_cross_attention: cannot be modelled"):
        read(PLAIN, add_cross_attention=True)


def test_a_language_part_may_leave_out_all_its_sizes() -> None:
    """llava-1.5-7b: 7,063,427,072 parameters in its checkpoint, of a text_config that states two numbers."""
    llava: dict[str, Any] = {
        "model_type": "llava",
        "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
        "vision_config": {
            "model_type": "clip_vision_model", "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096,
            "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14,
        },
    }  # fmt: skip
    arch = from_hf(llava, name="llava", source="test")
    assert (arch.hidden, arch.layers, arch.heads, arch.ffn_hidden) == (4096, 32, 32, 11008)
    assert parameters(arch) == pytest.approx(7_063_427_072, rel=0.005)
    with pytest.raises(SpecError, match="hidden_size: is missing"):  # a file of a language model alone is a broken one
        from_hf({"model_type": "llama", "vocab_size": 32064}, name="llama", source="test")


def test_sizes_that_stand_beside_the_language_part_are_not_those_of_the_class() -> None:
    flat = {**PLAIN, "model_type": "qwen2_5_vl", "text_config": {}}
    with pytest.raises(SpecError) as refused:
        read(flat)
    missing = {problem.message.split(":")[0] for problem in refused.value.problems}
    assert {f"text_config.{name}" for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")} <= missing
    # a name that is misspelt leaves the class's size, which is said
    part = {"hiden_size" if name == "hidden_size" else name: size for name, size in PLAIN.items()}
    arch = read({"model_type": "llava", "text_config": part})
    assert arch.assumed == ("hidden_size 4096: not stated, taken from the class of llama",)
    assert read({"model_type": "llava", "text_config": PLAIN}).assumed == ()


def test_a_file_read_as_asked_gets_the_numbers_of_that_family() -> None:
    gemma = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    arch = from_hf({"model_type": "newgemma", **gemma}, name="x", source="test", like="gemma3")
    assert parameters(arch) == pytest.approx(3.88e9, rel=0.001)
    assert arch.assumed == (
        "model_type 'newgemma' is read as gemma3, as asked",
        "num_attention_heads 8: not stated, taken from the class of gemma3",
    )
    experts = from_hf({**PLAIN, "model_type": "new"}, name="x", source="test", like="qwen3_moe").experts
    assert experts is not None and (experts.count, experts.active, experts.hidden) == (128, 8, 768)
    with pytest.raises(SpecError, match="num_hidden_layers: is missing"):
        from_hf({"model_type": "new", "hidden_size": 512}, name="x", source="test", like="llama")


def test_a_null_is_no_default() -> None:
    mistral = {key: value for key, value in PLAIN.items() if key != "num_key_value_heads"}
    assert read(mistral, model_type="mistral").kv_heads == 8
    assert read(mistral, model_type="mistral", num_attention_heads=16, num_key_value_heads=None).kv_heads == 16
    # keys that do not divide the heads are those of other sizes than the file's
    assert read(mistral, model_type="mistral", num_attention_heads=12).kv_heads == 12


def test_parts_that_nobody_reads_are_said() -> None:
    ovis = read(
        PLAIN, vit_config={"model_type": "siglip2", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
    )
    assert ovis.vision is not None and ovis.assumed == ("the vision tower of siglip2 is taken by its sizes",)
    other = read(PLAIN, speech_encoder={"layers": 2}, image_processor="fast")
    assert other.vision is None
    assert other.assumed == ("speech_encoder: not read, text alone without their parameters",)


def test_a_window_that_is_switched_off_is_idle_in_an_unknown_family() -> None:
    arch = read(PLAIN, model_type="new_one", sliding_window=4096, use_sliding_window=False)
    assert arch.layer_mixers == ("full",) * 4


def test_a_window_of_a_known_family_is_read_or_said_not_to_be() -> None:
    assert read(PLAIN, model_type="starcoder2", sliding_window=256).layer_mixers == ("sliding",) * 4
    stated: dict[str, Any] = {"sliding_window": 256, "max_position_embeddings": 4096}
    arch = read(PLAIN, **stated)
    assert arch.layer_mixers == ("full",) * 4
    assert arch.assumed == ("sliding_window 256: not read, attention of llama reads every token",)
    for idle in (
        {"use_sliding_window": False},
        {"sliding_window": None},
        {"max_position_embeddings": 256},
        {"layer_types": ["full_attention"] * 4},
        {"model_type": "qwen3"},
    ):
        assert read(PLAIN, **{**stated, **idle}).assumed == ()


def _phi3(sizes: tuple[int, ...], window: int, positions: int) -> dict[str, Any]:
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    said = {"sliding_window": window, "max_position_embeddings": positions, "vocab_size": 32064}
    return {"model_type": "phi3", **dict(zip(keys, sizes, strict=True)), **said}


@pytest.mark.parametrize(
    ("name", "config", "kind"),
    [
        ("microsoft/Phi-3-mini-4k-instruct", _phi3((3072, 32, 32, 32, 8192), 2047, 4096), "sliding"),
        ("microsoft/Phi-3-mini-128k-instruct", _phi3((3072, 32, 32, 32, 8192), 262144, 131072), "full"),
        ("microsoft/Phi-3-medium-4k-instruct", _phi3((5120, 40, 40, 10, 17920), 2047, 4096), "sliding"),
        ("microsoft/Phi-3-medium-128k-instruct", _phi3((5120, 40, 40, 10, 17920), 131072, 131072), "full"),
    ],
)
def test_phi3_by_name_and_by_configuration_is_one_model(name: str, config: dict[str, Any], kind: str) -> None:
    named, stated = load_architecture(name), read(config)
    own = {"name": "", "source": "", "published_parameters": None, "published_source": None}
    assert named.model_copy(update=own) == stated.model_copy(update=own)
    assert set(stated.layer_mixers) == {kind}


def test_the_tower_of_pixtral_behind_the_projector_of_llava() -> None:
    """mistral-community/pixtral-12b: 12.68B in its checkpoint (recalled); Apriel-1.5 has eight more layers."""
    tower = {"model_type": "pixtral", "hidden_size": 1024, "image_size": 1024, "intermediate_size": 4096,
             "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 16}  # fmt: skip
    text = {"model_type": "mistral", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 131072,
            "max_position_embeddings": 131072}  # fmt: skip
    llava = {"model_type": "llava", "text_config": text, "vision_config": tower}
    assert parameters(read(llava)) == pytest.approx(12.68e9, rel=0.001)
    apriel = read({**llava, "text_config": {**text, "num_hidden_layers": 48}})
    assert apriel.vision is not None and apriel.vision.gated
    assert (apriel.vision.patch_size, apriel.vision.spatial_merge) == (16, 1)
    block = 4 * 1024**2 + 3 * 1024 * 4096 + 2 * 1024
    projector = 1024 * 5120 + 5120 + 5120**2 + 5120
    assert apriel.vision.parameters == 3 * 16**2 * 1024 + 1024 + 24 * block + projector
    named = load_architecture("ServiceNow-AI/Apriel-1.5-15b-Thinker")
    assert (named.vision, parameters(named)) == (apriel.vision, parameters(apriel))


def test_blocks_that_are_chosen_under_both_of_their_names() -> None:
    """MiniMax-M3 as published, and as Transformers writes it: 61,775,127,808 parameters with eight layers there."""
    chosen = {"heads": 4.0, "head_dim": 32.0, "block": 64.0, "top": 8.0}
    published = read(
        PLAIN,
        sparse_attention_config={
            "sparse_num_index_heads": 4, "sparse_index_dim": 32, "sparse_block_size": 64, "sparse_topk_blocks": 8,
            "sparse_attention_freq": [0, 1, 1, 1],
        },
    )  # fmt: skip
    written = read(
        PLAIN, layer_types=["full_attention", *["minimax_m3_sparse"] * 3], index_n_heads=4, index_head_dim=32,
        index_block_size=64, index_topk_blocks=8,
    )  # fmt: skip
    assert written.layer_mixers == published.layer_mixers == ("full", "block_sparse", "block_sparse", "block_sparse")
    off = {"index_n_heads": 4, "index_head_dim": 32, "index_block_size": 64, "index_topk_blocks": 8}
    assert read(PLAIN, layer_types=["full_attention"] * 4, **off).layer_mixers == ("full",) * 4
    assert written.numbers_of("block_sparse") == published.numbers_of("block_sparse") == chosen


def test_dense_layers_in_front_of_coheres_experts_have_a_width_of_their_own() -> None:
    arch = read(
        MIXED, model_type="cohere2_moe", mlp_layer_types=["dense", *["sparse"] * 3], sliding_window=64,
        prefix_dense_intermediate_size=2048,
    )  # fmt: skip
    assert (arch.ffn_hidden, arch.layer_feed_forwards) == (2048, ("dense", "moe", "moe", "moe"))
