"""Hugging Face configurations: what is read, what is refused and how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlperf
from rlperf.cost.parameters import active_parameters, language_parameters, parameters
from rlperf.errors import SpecError
from rlperf.specs.architecture import Architecture
from rlperf.specs.hf.config import from_hf
from rlperf.specs.hf.families import FAMILIES, REFUSED
from rlperf.specs.profiles import architecture_names, load_architecture

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 1000,
}
MLA = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "q_lora_rank": None}


def _read(data: dict[str, Any], **changes: Any) -> Architecture:
    return from_hf({**data, **changes}, name="x", source="test")


def test_absent_fields_take_the_defaults_of_their_class() -> None:
    data = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    arch = _read(data)
    assert (arch.kv_heads, arch.head_dim, arch.tied_embeddings, arch.qkv_bias) == (8, 8, False, False)
    assert _read(data, model_type="qwen2").qkv_bias
    assert not _read(data, model_type="qwen2").output_bias
    assert _read(data, attention_bias=True).output_bias
    assert _read(data, model_type="qwen3").qk_norm
    assert _read(data, model_type="gemma").tied_embeddings
    assert _read(data, head_dim=None).head_dim == 8


def test_a_size_that_is_no_number_is_said_once() -> None:
    with pytest.raises(SpecError) as caught:
        _read(LLAMA, hidden_size="64")
    assert [problem.message for problem in caught.value.problems] == ["hidden_size: '64' is not a whole number"]


@pytest.mark.parametrize(("name", "kind"), [("rope_scaling", "type"), ("rope_parameters", "rope_type")])
def test_positions_are_those_that_yarn_stretches_to(name: str, kind: str) -> None:
    """What Qwen3's card has people write into config.json for long contexts was refused above 40,960 tokens."""
    rope = {kind: "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert _read(LLAMA, max_position_embeddings=40960, **{name: rope}).max_positions == 131072
    assert _read(LLAMA, max_position_embeddings=163840, **{name: rope}).max_positions == 163840
    for other in ({**rope, kind: "llama3"}, {kind: "yarn", "factor": 4.0}, None, {"full_attention": rope}):
        assert _read(LLAMA, max_position_embeddings=40960, **{name: other}).max_positions == 40960
    with pytest.raises(SpecError, match=f"{name}.factor: 'four' is not a positive number"):
        _read(LLAMA, **{name: {**rope, "factor": "four"}})


@pytest.mark.parametrize("count", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_expert_counts_go_by_several_names(count: str) -> None:
    experts = _read(LLAMA, model_type="mixtral", num_experts_per_tok=2, **{count: 8}).experts
    assert experts is not None
    assert (experts.count, experts.active, experts.hidden) == (8, 2, 128)


def test_dense_layers_among_experts() -> None:
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    first = _read(LLAMA, model_type="deepseek_v3", first_k_dense_replace=1, n_shared_experts=2, **moe, **MLA)
    assert first.layer_feed_forwards == ("dense", "moe", "moe", "moe")
    assert first.experts is not None
    assert first.experts.shared_hidden == 64
    assert first.head_dim == 12
    sparse = _read(LLAMA, model_type="qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[3], **moe)
    assert sparse.layer_feed_forwards == ("dense", "moe", "dense", "dense")
    frequency = _read(LLAMA, model_type="glm4_moe", moe_layer_freq=[0, 1, 1, 0], **moe)
    assert frequency.layer_feed_forwards == ("dense", "moe", "moe", "dense")
    every = _read(LLAMA, model_type="deepseek_v2", moe_layer_freq=2, **moe, **MLA)
    assert every.layer_feed_forwards == ("moe", "dense", "moe", "dense")


def test_layer_patterns() -> None:
    assert _read(LLAMA, model_type="gemma2", sliding_window=8).layer_mixers == ("sliding", "full") * 2
    assert _read(LLAMA, model_type="mistral", sliding_window=8).layer_mixers == ("sliding",) * 4
    assert _read(LLAMA, model_type="mistral", sliding_window=None).layer_mixers == ("full",) * 4
    assert _read(LLAMA, model_type="qwen2", sliding_window=8, use_sliding_window=False).window == 0
    late = _read(LLAMA, model_type="qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=3)
    assert late.layer_mixers == ("full", "full", "full", "sliding")
    gemma3 = _read(LLAMA, model_type="gemma3_text", sliding_window=8, num_hidden_layers=7)
    assert gemma3.layer_mixers == ("sliding",) * 5 + ("full", "sliding")
    linear = {f"linear_{name}": 4 for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")}
    assert _read(LLAMA, model_type="qwen3_next", **linear).layer_mixers == ("linear",) * 3 + ("full",)
    typed = _read(LLAMA, model_type="qwen3_5_text", layer_types=["full_attention", "linear_attention"] * 2, **linear)
    assert typed.layer_mixers == ("full", "linear") * 2
    assert typed.attention_gate


def test_llama4_reads_its_text_part_and_interleaves_experts() -> None:
    text = {**LLAMA, "model_type": "llama4_text", "intermediate_size_mlp": 256, "interleave_moe_layer_step": 2}
    text |= {"num_local_experts": 4, "num_experts_per_tok": 1}
    arch = from_hf({"model_type": "llama4", "text_config": text}, name="x", source="test")
    assert arch.layer_feed_forwards == ("dense", "moe", "dense", "moe")
    assert arch.layer_mixers == ("sliding", "sliding", "sliding", "full")
    assert (arch.window, arch.ffn_hidden) == (8192, 256)
    assert arch.experts is not None
    assert arch.experts.shared_hidden == 128


def test_nemotron_h_pattern() -> None:
    mamba = {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2}
    moe = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    moe |= {"n_shared_experts": 1, "moe_shared_expert_intermediate_size": 48}
    data = {**LLAMA, "model_type": "nemotron_h", **mamba, **moe}
    arch = _read(data, hybrid_override_pattern="ME*-")
    assert arch.layer_mixers == ("mamba", "none", "full", "none")
    assert arch.layer_feed_forwards == ("none", "moe", "none", "dense")
    assert arch.experts is not None
    assert (arch.experts.shared_hidden, arch.experts.gated) == (48, False)
    assert arch == _read(data, layers_block_type=["mamba", "moe", "attention", "mlp"])
    with pytest.raises(SpecError, match="has 3 entries for 4 layers"):
        _read(data, hybrid_override_pattern="ME*")
    with pytest.raises(SpecError, match="rlperf does not know X"):
        _read(data, hybrid_override_pattern="MEX*")


def test_older_field_names() -> None:
    # GPT-2 small: 124,439,808 parameters
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    assert parameters(_read(gpt2)) == 124_439_808
    # MPT-7B: 6,649,286,656 parameters: ALiBi, so no table of positions, and no bias anywhere
    mpt = {"model_type": "mpt", "d_model": 4096, "n_layers": 32, "n_heads": 32, "expansion_ratio": 4}
    mpt |= {"max_seq_len": 2048, "no_bias": True, "vocab_size": 50432, "attn_config": {"alibi": True}}
    assert parameters(_read(mpt)) == 6_649_286_656
    falcon = {"model_type": "falcon", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}
    falcon |= {"vocab_size": 100}
    assert _read(falcon).kv_heads == 1
    assert _read(falcon, new_decoder_architecture=True, num_kv_heads=4).kv_heads == 4
    assert _read(falcon, multi_query=False).kv_heads == 8
    assert _read(falcon).ffn_hidden == 256


def test_qwen2_5_vl_flat_and_nested_agree() -> None:
    text = {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
    }
    vision = {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    }
    flat = _read({"model_type": "qwen2_5_vl", **text, "vision_config": vision})
    nested = {"model_type": "qwen2_5_vl", "text_config": {**text, "model_type": "qwen2_5_vl_text"}}
    assert flat == _read(nested, vision_config=vision)
    assert parameters(flat) == 8_292_166_656
    assert flat.vision is not None
    # by hand: patches, 32 blocks, norm and two layers of the merger
    block = 4 * 1280 * 1280 + 4 * 1280 + 3 * 1280 * 3420 + 2 * 3420 + 1280 + 2 * 1280
    merger = 1280 + 5120 * 5120 + 5120 + 5120 * 3584 + 3584
    assert flat.vision.parameters == 3 * 2 * 14 * 14 * 1280 + 32 * block + merger
    del vision["depth"]
    with pytest.raises(SpecError, match=r"vision_config\.depth: is missing"):
        _read(nested, vision_config=vision)


QWEN3_VL = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "out_hidden_size": 4096,
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
QWEN2_VL = {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "num_heads": 16, "patch_size": 14}
SIGLIP = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 896,
    "patch_size": 14,
    "vision_use_head": False,
}
LLAMA4_VISION = {
    "hidden_size": 1408,
    "intermediate_size": 5632,
    "num_hidden_layers": 34,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "pixel_shuffle_ratio": 0.5,
    "projector_input_dim": 4096,
    "projector_output_dim": 4096,
    "vision_output_dim": 4096,
}


@pytest.mark.parametrize(
    ("kind", "language", "vision", "total", "rel"),
    [
        # checkpoint totals of Qwen2-VL-7B and Qwen3-VL-8B; Gemma 3 report (arXiv 2503.19786), Table 1: 417M vision
        ("qwen2_vl", "Qwen2-7B", QWEN2_VL, 8_291_375_616, 1e-6),
        ("qwen3_vl", "Qwen3-8B", QWEN3_VL, 8_767_123_696, 1e-6),
        ("gemma3", None, SIGLIP, 417e6, 0.01),
        # Llama 4 Scout: 109B with its tower; the shipped text part is 107.77B
        ("llama4", "Llama-4-Scout", LLAMA4_VISION, 109e9, 0.005),
    ],
)
def test_towers_agree_with_published_totals(
    kind: str, language: str | None, vision: dict[str, Any], total: float, rel: float
) -> None:
    needed = {"intermediate_size_mlp": 8, "sliding_window": 8} if kind in ("llama4", "gemma3") else {}
    hidden = load_architecture(language).hidden if language else 2560
    arch = _read(LLAMA, model_type=kind, vision_config=vision, hidden_size=hidden, **needed)
    assert arch.vision is not None
    rest = language_parameters(load_architecture(language)) if language else 0
    assert rest + arch.vision.parameters == pytest.approx(total, rel=rel)


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_known_but_impossible_kinds_are_refused_by_name(kind: str) -> None:
    with pytest.raises(SpecError, match=f"{kind}.* cannot be modelled: ") as caught:
        _read(LLAMA, model_type=kind)
    assert REFUSED[kind] in str(caught.value)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "zzz", "ssm_mixing": "new"}, "nor what its ssm_mixing make"),
    ({"model_type": None}, "model_type: is missing"),
    ({"model_type": 3}, "model_type: 3 is not a text"),
    ({"hidden_size": None}, "hidden_size: is missing"),
    ({"hidden_size": -64}, "hidden_size: must be at least 1"),
    ({"hidden_size": "64"}, "hidden_size: '64' is not a whole number"),
    ({"hidden_size": 64.5}, "hidden_size: 64.5 is not a whole number"),
    ({"hidden_size": float("nan")}, "is not a whole number"),
    ({"hidden_size": 10**400}, "larger than any real one"),
    ({"hidden_size": 65}, "not a multiple of the heads"),
    ({"num_hidden_layers": 0}, "num_hidden_layers: must be at least 1"),
    ({"num_hidden_layers": True}, "True is not a whole number"),
    ({"num_key_value_heads": 3}, "not a multiple of kv_heads"),
    ({"attention_bias": "yes"}, "is not true or false"),
    ({"layer_types": ["full_attention"]}, "has 1 entries for 4 layers"),
    ({"layer_types": [["full"], 2, "x", "y"]}, "rlperf does not know"),
    ({"layer_types": 7}, "is not a list"),
    ({"layer_types": ["sliding_attention"] * 4}, "sliding_window: is missing"),
    ({"is_encoder_decoder": True}, "encoder-decoder"),
    ({"index_topk": 2048}, "index_n_heads: is missing"),
    ({"model_type": "minimax_m1"}, "num_experts: is missing"),
    ({"num_experts": 4, "num_experts_per_tok": 5}, "more than the 4 experts"),
    ({"num_experts": 4}, "num_experts_per_tok: is missing"),
    ({"model_type": "kimi_k2"}, "kv_lora_rank: is missing"),
    ({"model_type": "nemotron_h"}, "hybrid_override_pattern: is missing"),
    ({"text_config": 5}, "text_config: 5 is not an object"),
    ({"vision_config": {"model_type": "moonvit"}}, "vision_config.hidden_size: is missing"),
    ({"num_hidden_layers": 100_000_000}, "num_hidden_layers: no model has 100,000,000 layers"),
    ({"intermediate_size": None}, "intermediate_size: is missing"),
    ({"vision_config": []}, "is not an object"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_configurations_say_what_is_wrong(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        _read(LLAMA, **change)
    assert message in str(caught.value)


def test_every_missing_field_is_listed_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "hidden_size": 8, "intermediate_size": "x"}, indent=1))
    with pytest.raises(SpecError) as caught:
        load_architecture(path)
    text = [str(problem) for problem in caught.value.problems]
    assert len(text) == 4
    assert all(line.startswith(str(path)) for line in text)
    assert f"{path}:4: intermediate_size: 'x' is not a whole number" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"model_type": "llama", "hidd', "is not valid JSON"),
        ("", "is not valid JSON"),
        ("[1, 2]", "holds a list where an object is due"),
        ('{"name": 1, "version": "2"}', "source: is missing"),
        ('{"added_tokens": [], "version": "2"}', "neither a Hugging Face config.json"),
        ('{"name": "x", "source": "y", "hiden": 3}', "did you mean hidden?"),
    ],
)
def test_other_files_are_refused_in_one_message(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "thing.json"
    path.write_text(content)
    with pytest.raises(SpecError) as caught:
        load_architecture(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_loads_folders_caches_and_our_own_files(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--Org--Small-1B" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(LLAMA))
    assert load_architecture(snapshot).name == load_architecture(str(snapshot)).name == "Small-1B"
    plain = tmp_path / "mine"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(LLAMA))
    arch = load_architecture(plain)
    assert arch.name == "mine"
    own = tmp_path / "own.json"
    own.write_text(arch.model_dump_json())
    assert load_architecture(own) == arch
    (tmp_path / "architectures").mkdir()
    own.rename(tmp_path / "architectures" / "own.json")
    assert load_architecture("own", folder=tmp_path) == arch
    assert "own" in architecture_names(tmp_path)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    assert load_architecture(path).vocab == 1000
    path.write_text(json.dumps({**LLAMA, "vocab_size": 20000}))
    assert load_architecture(path).vocab == 20000


def test_names_are_found_loosely() -> None:
    assert load_architecture("QWEN2.5-7b").name == "Qwen2.5-7B"
    assert load_architecture("Qwen/Qwen2.5-7B-Instruct").name == "Qwen2.5-7B"
    with pytest.raises(SpecError, match=r"did you mean Qwen2\.5-"):
        load_architecture("Qwen2.5-8B")


def test_shipped_json_round_trips() -> None:
    for name in ("DeepSeek-V3", "Qwen3.5-397B-A17B", "Nemotron-3-Nano-30B-A3B", "gpt-oss-20b"):
        arch = load_architecture(name)
        assert Architecture.model_validate_json(arch.model_dump_json()) == arch


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 200) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
fields = st.sampled_from(
    sorted(
        {*LLAMA, *MLA, "layer_types", "sliding_window", "num_experts", "num_experts_per_tok", "moe_layer_freq"}
        | {"mlp_only_layers", "first_k_dense_replace", "head_dim", "text_config", "vision_config", "attn_config"}
        | {"hybrid_override_pattern", "quantization_config", "tie_word_embeddings", "torch_dtype", "no_bias"}
    )
)


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(sorted(FAMILIES)), junk=st.dictionaries(fields, json_values, max_size=5))
def test_junk_gives_an_architecture_or_a_spec_error(kind: str, junk: dict[str, Any]) -> None:
    try:
        arch = _read(LLAMA, **{"model_type": kind, **junk})
    except SpecError:
        return
    assert active_parameters(arch) <= parameters(arch)


def test_a_model_that_gives_scores_is_no_policy(tmp_path: Path) -> None:
    """A reward model's configuration was planned as a policy that generates; among scorers it is one."""
    file = tmp_path / "scorer" / "config.json"
    file.parent.mkdir()
    data = {"architectures": ["Qwen2ForSequenceClassification"], "model_type": "qwen2", "hidden_size": 896}
    sizes = {"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936}
    file.write_text(json.dumps({**data, **sizes, "intermediate_size": 4864}))
    with pytest.raises(SpecError, match=r"task math: scorer gives a sequence a score, and generates nothing"):
        rlperf.plan_job(model=str(file), gpus=8)
    scorer = {"name": "rm", "kind": "reward", "architecture": str(file)}
    plan = rlperf.plan_job(rlperf.short_job("Qwen3-0.6B", 8).stated() | {"scorers": [scorer]})
    assert plan.phases[0].predicted.scorers
