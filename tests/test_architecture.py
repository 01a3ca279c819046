"""Parameter counts against hand calculation and against what publishers print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rlperf.cost.engine_memory import kv_bytes_per_request, kv_bytes_per_token
from rlperf.cost.layers import KINDS, Layer, stack_of
from rlperf.cost.parameters import active_parameters, language_parameters, parameters, routed_parameters
from rlperf.cost.replica import Replica
from rlperf.errors import SpecError
from rlperf.layout import Layout
from rlperf.specs.architecture import Architecture, Experts, LatentAttention, LinearAttention, StateSpace
from rlperf.specs.engine_calibration import load_engine_calibration
from rlperf.specs.hardware import load_hardware
from rlperf.specs.profiles import architecture_names, load_architecture


def _tiny(**changes: Any) -> Architecture:
    base: dict[str, Any] = {
        "name": "tiny",
        "source": "hand",
        "hidden": 8,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 3,
        "ffn_hidden": 10,
        "vocab": 100,
    }
    return Architecture(**{**base, **changes})


def _layer(arch: Architecture, kind: str) -> Layer:
    return KINDS[kind](arch)


def _cached(arch: Architecture) -> tuple[float, float]:
    """Cached values of two bytes on one device: per token, and of a request whatever its length."""
    hw, engine = load_hardware("h100_sxm", "dgx_h100"), load_engine_calibration("vllm")
    replica = Replica.of(arch, hw, engine, Layout.of())
    return float(kv_bytes_per_token(replica)) / 2.0, float(kv_bytes_per_request(replica)) / 2.0


def test_gqa_by_hand() -> None:
    arch = _tiny(qkv_bias=True, qk_norm=True)
    # q: 8 x 12 + 12; k, v: 8 x 6 + 6 each; output 12 x 8; query and key norm 3 each
    attention = (96 + 12) + 2 * (48 + 6) + 96 + 6
    ffn = 3 * 8 * 10
    assert _layer(arch, "full").parameters == attention == 318
    assert parameters(arch) == 2 * (attention + ffn + 2 * 8) + 8 + 2 * 100 * 8 == 2756
    assert active_parameters(arch) == parameters(arch)
    assert _cached(arch) == (2 * 2 * 2 * 3, 0)


def test_layer_norm_biases_tied_and_learned_positions_by_hand() -> None:
    arch = _tiny(
        ffn_gated=False, ffn_bias=True, norm_weights=2, tied_embeddings=True, learned_positions=16, output_bias=True
    )
    attention = 96 + 2 * 48 + 96 + 8
    ffn = 2 * 8 * 10 + 10 + 8
    assert parameters(arch) == 2 * (attention + ffn + 2 * 16) + 16 + 100 * 8 + 16 * 8


def test_moe_by_hand() -> None:
    experts = Experts(count=6, active=2, hidden=5, shared_hidden=7, shared_gate=True)
    arch = _tiny(feed_forwards=("dense", "moe"), experts=experts)
    attention = 96 + 2 * 48 + 96
    expert, common = 3 * 8 * 5, 8 * 6 + 3 * 8 * 7 + 8
    rest = 2 * (attention + 16) + 8 + 1600 + 240 + common
    assert parameters(arch) == rest + 6 * expert
    assert active_parameters(arch) == rest + 2 * expert
    assert routed_parameters(arch) == 6 * expert


def test_latent_experts_with_biases_by_hand() -> None:
    biased = _tiny(feed_forwards=("moe",), experts=Experts(count=3, active=1, hidden=5, gated=False, bias=True))
    assert _layer(biased, "moe").routing.parameters == 2 * 8 * 5 + 5 + 8
    assert _layer(biased, "moe").parameters == 8 * 3 + 3
    latent = _tiny(feed_forwards=("moe",), experts=Experts(count=3, active=1, hidden=5, gated=False, latent_hidden=4))
    assert _layer(latent, "moe").routing.parameters == 2 * 4 * 5
    assert _layer(latent, "moe").parameters == 8 * 3 + 2 * 8 * 4


@pytest.mark.parametrize(("q_rank", "query"), [(0, 8 * 4 * 8), (6, 8 * 6 + 6 + 6 * 4 * 8)])
def test_mla_by_hand(q_rank: int, query: int) -> None:
    latent = LatentAttention(q_rank=q_rank, kv_rank=7, nope_head_dim=5, rope_head_dim=3, value_head_dim=4)
    arch = _tiny(kv_heads=4, head_dim=8, mixers=("latent",), latent=latent)
    # down 8 x (7 + 3) with a norm of 7, up 7 x 4 x (5 + 4), output 4 x 4 x 8
    assert _layer(arch, "latent").parameters == query + 80 + 7 + 252 + 128
    assert _cached(arch) == (2 * (7 + 3), 0)


def test_hybrid_mixers_by_hand() -> None:
    mamba = StateSpace(heads=2, head_dim=4, state=3, groups=1)
    arch = _tiny(mixers=("mamba", "full"), feed_forwards=("none", "none"), state_space=mamba, ffn_hidden=0)
    # in 8 x (8 gate + 8 + 2 x 3 + 2), convolution 14 x (4 + bias), A, D, dt 2 each, norm 8, out 8 x 8
    assert _layer(arch, "mamba").parameters == 8 * 24 + 14 * 5 + 6 + 8 + 64
    linear = LinearAttention(key_heads=1, value_heads=2, key_head_dim=3, value_head_dim=4)
    arch = _tiny(mixers=("linear",), linear_attention=linear)
    # in 8 x (2 x 3 keys, queries + 8 values + 8 gate + 2 x 2), convolution 14 x 4, A and dt, norm 4, out 8 x 8
    assert _layer(arch, "linear").parameters == 8 * 26 + 14 * 4 + 4 + 4 + 64
    # no cache, but an fp32 state of 2 x 3 x 4 in both layers, and three tokens that the convolution reads again
    assert _cached(arch) == (0, 2 * (24 * 2 + 14 * 3))
    falcon = _cached(load_architecture("falcon-mamba-7b"))[1]
    assert falcon == 64 * 8192 * (16 * 2 + 3)  # of Mamba-1 they are a tenth of the state


def test_sliding_layers_are_told_apart() -> None:
    arch = _tiny(mixers=("sliding", "full"), window=4)
    # one layer grows with the request, the other stops at the window
    assert _cached(arch) == (12, 12 * 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixers": ("full",) * 3}, "3 entries for 2 layers"),
        ({"feed_forwards": ("moe",)}, "experts is missing"),
        ({"mixers": ("mamba",)}, "state_space is missing"),
        ({"mixers": ("linear",)}, "linear_attention is missing"),
        ({"mixers": ("sliding",)}, "window is missing"),
        ({"mixers": ("latent",)}, "latent is missing"),
        (
            {"latent": {"kv_rank": 7, "nope_head_dim": 5, "rope_head_dim": 3, "value_head_dim": 4}},
            "no layer is of kind",
        ),
        ({"kv_heads": 3}, "not a multiple of kv_heads"),
        ({"ffn_hidden": 0}, "ffn_hidden is missing"),
        ({"layers": 0}, "greater than or equal to 1"),
        ({"layers": 10**9}, "less than or equal to 10000"),
        ({"colour": "red"}, "Extra inputs"),
        ({"experts": {"count": 2, "active": 3, "hidden": 4}}, "more than count"),
    ],
)
def test_refuses_what_does_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        _tiny(**changes)


@given(
    layers=st.integers(1, 6),
    heads=st.sampled_from([1, 2, 4]),
    count=st.integers(1, 8),
    dense=st.integers(0, 6),
)
def test_active_never_exceeds_total_and_layers_add_up(layers: int, heads: int, count: int, dense: int) -> None:
    halves = ["dense" if index < dense else "moe" for index in range(layers)]
    experts = Experts(count=count, active=max(count // 2, 1), hidden=3)
    arch = _tiny(layers=layers, heads=heads, kv_heads=heads, feed_forwards=tuple(halves), experts=experts)
    assert active_parameters(arch) <= parameters(arch)
    assert routed_parameters(arch) <= parameters(arch)
    assert stack_of(arch).routes.tolist() == [half == "moe" for half in halves]
    idle = halves.count("moe") * (count - experts.active) * 3 * 8 * 3
    assert parameters(arch) - active_parameters(arch) == idle


PUBLISHED = [name for name in architecture_names() if load_architecture(name).published_parameters]


def test_enough_architectures_are_checked_against_their_publisher() -> None:
    assert len(PUBLISHED) >= 0.6 * len(architecture_names()) >= 0.6 * 60
    assert {"DeepSeek-V3", "Mixtral-8x7B", "Qwen3-30B-A3B", "gpt-oss-120b", "Qwen2.5-VL-7B"} <= set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_total_is_within_half_a_percent_of_the_published_number(name: str) -> None:
    arch = load_architecture(name)
    assert arch.published_source
    assert parameters(arch) == pytest.approx(arch.published_parameters, rel=0.005)


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("Qwen2.5-7B", 7_615_616_512),
        ("Qwen3-30B-A3B", 30_532_122_624),
        ("Llama-3.1-405B", 405_853_388_800),
        ("Mixtral-8x7B", 46_702_792_704),
        ("gpt-oss-20b", 20_914_757_184),
        ("Qwen2.5-VL-7B", 8_292_166_656),
        ("Nemotron-3-Nano-30B-A3B", 31_577_937_344),
    ],
)
def test_total_equals_the_checkpoint(name: str, total: int) -> None:
    assert parameters(load_architecture(name)) == total


def test_published_active_parameters() -> None:
    # DeepSeek-V3 (arXiv 2412.19437): 37B activated; gpt-oss model card: 5.13B, without one of the two tables
    assert active_parameters(load_architecture("DeepSeek-V3")) == pytest.approx(37e9, rel=0.02)
    oss = load_architecture("gpt-oss-120b")
    assert active_parameters(oss) - oss.vocab * oss.hidden == pytest.approx(5.13e9, rel=0.005)


@pytest.mark.parametrize(
    ("name", "tables"),
    [
        # rows of 256 values: for each of 262,144 tokens in every layer; n-gram memories of so many rows
        ("gemma-3n-E4B", 35 * 262144 * 256),
        ("gemma-4-E4B", 42 * 262144 * 256),
        ("DeepSeek-V4.1-Flash", (384_006_168 + 384_016_682) * 256),
    ],
)
def test_a_token_reads_a_row_of_a_table_and_not_the_table(name: str, tables: int) -> None:
    arch = load_architecture(name)
    assert tables <= arch.lookup_parameters <= 1.05 * tables  # and the matrices that bring the rows in
    bare = arch.model_copy(update={"lookup_parameters": 0})
    assert active_parameters(arch) == active_parameters(bare) <= parameters(bare)
    assert parameters(arch) - parameters(bare) == arch.lookup_parameters


def test_effective_parameters_of_gemma_4() -> None:
    """2.3B and 4.5B by its model card, which counts no per-layer table (recalled, not re-read)."""
    assert active_parameters(load_architecture("gemma-4-E2B")) == pytest.approx(2.3e9, rel=0.03)
    assert active_parameters(load_architecture("gemma-4-E4B")) == pytest.approx(4.5e9, rel=0.03)


def test_a_source_that_is_no_published_file_says_so() -> None:
    arch = load_architecture("DeepSeek-V4.1-Flash")
    assert "not a copy of the published config.json" in arch.source
    assert arch.published_parameters is None


def test_every_shipped_architecture_names_its_source() -> None:
    for name in architecture_names():
        arch = load_architecture(name)
        assert arch.source
        assert arch.name == name


def _measured(measured_data: Path) -> dict[str, Architecture | None]:
    """Architectures beside the measured tables by name, None for those that are refused."""
    found: dict[str, Architecture | None] = {}
    for path in sorted((measured_data / "architectures").glob("*.json")):
        try:
            found[path.stem] = load_architecture(path)
        except SpecError:
            found[path.stem] = None
    return found


@pytest.mark.data
def test_every_measured_architecture_is_read_or_refused_on_purpose(measured_data: Path) -> None:
    found = _measured(measured_data)
    # one that leaves out what its layers gather, one whose layer pattern is not published there
    refused = {"DeepSeek-V4-Flash", "Nemotron-3-Ultra-550B-A55B"}
    assert {name for name, arch in found.items() if arch is None} == refused


@pytest.mark.data
def test_what_is_shipped_and_measured_has_one_shape(measured_data: Path) -> None:
    """What `validate` reads beside a table and what plans read are one architecture, except for what was corrected."""
    corrected = {
        "GPT-J-6B": {"qkv_bias", "output_bias", "head_bias"},
        "Qwen3.5-35B-A3B": {"prediction_layers"},
        "Qwen3.5-397B-A17B": {"prediction_layers"},
    }
    for name, arch in _measured(measured_data).items():
        if arch is not None and name in architecture_names():
            shipped = load_architecture(name)
            fields = {field for field in type(arch).model_fields if getattr(arch, field) != getattr(shipped, field)}
            words = {"source", "notes", "family", "published_parameters", "published_source"}
            assert fields - words == corrected.get(name, set()), name


PAPERS = {
    "gpt-1008B": 1008e9, "gpt-145.6B": 145.6e9, "gpt-174.6B": 174.6e9, "gpt-18.4B": 18.4e9, "gpt-310.1B": 310.1e9,
    "gpt-39.1B": 39.1e9, "gpt-529.6B": 529.6e9, "gpt-7.5B": 7.5e9, "gpt-76.1B": 76.1e9,  # arXiv 2104.04473, tables 1, 2
    "gpt-290.8B": 290.8e9,  # NVIDIA/Megatron-LM images/cases_jan2021.png
    "gpt-175B": 175e9, "gpt-22B": 22e9, "gpt-530B": 530e9,  # arXiv 2205.05198, table 3
    "gpt-175B-megascale": 175e9, "gpt-530B-megascale": 530e9,  # arXiv 2402.15627, table 1
    "gpt-175B-mlperf": 175e9,  # MLPerf training GPT-3 benchmark
    "gpt-7.1B-h100": 7.1e9, "gpt-70B-h100": 70e9, "gpt-119B-h100": 119e9, "gpt-177B-h100": 177e9,
    "gpt-314B-h100": 314e9, "gpt-462B-h100": 462e9,  # NVIDIA/Megatron-LM README, table of H100 runs
    "mpt-125m": 125e6,  # llm-foundry benchmark table
}  # fmt: skip
"""Totals as publications print them, of architectures that stand beside the measurements only."""


@pytest.mark.data
def test_sizes_of_papers_are_what_the_papers_print(measured_data: Path) -> None:
    found = _measured(measured_data)
    for name, total in PAPERS.items():
        arch = found[name]
        assert arch is not None
        assert name not in architecture_names(), "it exists only as rows of a measurement"
        assert parameters(arch) == pytest.approx(total, rel=0.005), name


@pytest.mark.data
def test_totals_agree_with_independent_estimates(measured_data: Path) -> None:
    checked = 0
    for name, arch in _measured(measured_data).items():
        path = measured_data / "architectures" / f"{name}.json"
        estimate = json.loads(path.read_text()).get("n_params_estimate")
        if estimate and arch is not None:
            arch = load_architecture(name if name in architecture_names() else path)
            # The estimates leave out norms, biases and learned positions: they count in small models only.
            small = arch.layers * (arch.hidden * 13 + 4 * arch.ffn_hidden) + (arch.learned_positions + 4) * arch.hidden
            # And the index of sparse attention.
            small += sum(m.values * count for m, _, count in stack_of(arch).matrices if m.name == "index")
            assert 0 <= language_parameters(arch) - estimate <= small + 0.0005 * estimate, name
            checked += 1
    assert checked >= 100
