"""Architecture of a language model: widths, layers, experts, vision tower. It knows no device and no layout."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

Mixer = Literal["full", "sliding", "mamba", "linear", "none"]
"""Token mixer of a layer: full or sliding-window softmax attention, Mamba-2, gated linear attention, or none."""
FeedForward = Literal["dense", "moe", "none"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LatentAttention(_Frozen):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). ``q_rank`` 0: queries uncompressed."""

    q_rank: int = 0
    kv_rank: PositiveInt
    nope_head_dim: PositiveInt
    rope_head_dim: PositiveInt
    value_head_dim: PositiveInt


class Experts(_Frozen):
    """Mixture-of-experts feed-forward layers."""

    count: PositiveInt
    active: PositiveInt = Field(description="routed experts per token (top-k)")
    hidden: PositiveInt = Field(description="width of one expert")
    shared_hidden: int = Field(0, description="total width of the shared experts, 0 without")
    shared_gate: bool = False
    gated: bool = True
    bias: bool = Field(False, description="biases in the router and in every expert")
    latent_hidden: int = Field(
        0, description="width the routed experts work in after a shared down-projection; 0 = hidden"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Experts:
        if self.active > self.count:
            raise ValueError(f"active ({self.active}) is more than count ({self.count})")
        return self


class StateSpace(_Frozen):
    """Mamba-2 mixer (arXiv 2405.21060)."""

    heads: PositiveInt
    head_dim: PositiveInt
    state: PositiveInt
    groups: PositiveInt
    conv_kernel: PositiveInt = 4
    chunk: PositiveInt = 128


class LinearAttention(_Frozen):
    """Gated delta-rule linear attention (Qwen3-Next / Qwen3.5)."""

    key_heads: PositiveInt
    value_heads: PositiveInt
    key_head_dim: PositiveInt
    value_head_dim: PositiveInt
    conv_kernel: PositiveInt = 4


class VisionTower(_Frozen):
    """Vision transformer in front of the language model."""

    layers: PositiveInt
    hidden: PositiveInt
    heads: PositiveInt
    ffn_hidden: PositiveInt
    gated: bool = False
    patch_size: PositiveInt
    temporal_patch: PositiveInt = 1
    spatial_merge: PositiveInt = 1
    output_hidden: PositiveInt
    window: int = 0
    full_attention_layers: int | None = None
    parameters: PositiveInt = Field(description="parameters of the tower with its merger")


class Architecture(_Frozen):
    """A decoder-only transformer (or hybrid).

    Parameters
    ----------
    hidden : width of the residual stream [values per token]
    heads, kv_heads, head_dim : attention heads, key/value heads, width of one query/key head (MLA: no-rope + rope part)
    ffn_hidden : width of the dense feed-forward layers (0 without)
    mixers, feed_forwards : kind of each layer's two halves, ``[layers]``; one entry stands for all layers
    """

    name: str
    family: str = Field("", description="Hugging Face model_type")
    source: str
    hidden: PositiveInt
    layers: int = Field(ge=1, le=10_000)
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    ffn_hidden: int = 0
    ffn_gated: bool = True
    vocab: PositiveInt
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = Field(
        False,
        description="query and key norms span all heads: devices that share the heads add up squares (MiniMax M2)",
    )
    post_norms: bool = Field(False, description="a second norm behind each half of a layer (Gemma 2 and 3)")
    attention_sinks: bool = Field(False, description="one learned logit per head that joins the softmax (gpt-oss)")
    head_bias: bool = Field(False, description="bias in the output head (GPT-J)")
    attention_gate: bool = Field(False, description="queries carry an output gate of equal width (Qwen3.5)")
    learned_positions: int = Field(0, description="length of a learned position table, 0 with rotary positions")
    norm_weights: int = Field(1, description="values per channel in a norm: 1 RMSNorm, 2 LayerNorm with bias")
    max_positions: int | None = None
    mixers: tuple[Mixer, ...] = ("full",)
    feed_forwards: tuple[FeedForward, ...] = ("dense",)
    window: int = Field(0, description="window of the sliding layers [tokens]")
    latent: LatentAttention | None = None
    experts: Experts | None = None
    state_space: StateSpace | None = None
    linear_attention: LinearAttention | None = None
    vision: VisionTower | None = None
    prediction_layers: int = Field(0, description="multi-token prediction layers; not part of the totals")
    checkpoint_dtype: str = "bf16"
    published_parameters: int | None = Field(None, description="total as its publisher prints it, for checks")
    published_source: str = Field("", description="where published_parameters is printed, and what it counts")
    notes: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> Architecture:
        for field, kinds in (("mixers", self.mixers), ("feed_forwards", self.feed_forwards)):
            if len(kinds) not in (1, self.layers):
                raise ValueError(f"{field} has {len(kinds)} entries for {self.layers} layers; give 1 or {self.layers}")
        if "moe" in self.feed_forwards and self.experts is None:
            raise ValueError("a layer is a mixture of experts, but experts is missing")
        if "dense" in self.feed_forwards and self.ffn_hidden <= 0:
            raise ValueError("a layer has a dense feed-forward half, but ffn_hidden is missing")
        if "mamba" in self.mixers and self.state_space is None:
            raise ValueError("a layer is Mamba, but state_space is missing")
        if "linear" in self.mixers and self.linear_attention is None:
            raise ValueError("a layer is linear attention, but linear_attention is missing")
        if "sliding" in self.mixers and self.window <= 0:
            raise ValueError("a layer has sliding attention, but window is missing")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) is not a multiple of kv_heads ({self.kv_heads})")
        return self

    @cached_property
    def layer_mixers(self) -> tuple[Mixer, ...]:
        """Mixer of every layer, ``[layers]``."""
        return self.mixers if len(self.mixers) == self.layers else self.mixers * self.layers

    @cached_property
    def layer_feed_forwards(self) -> tuple[FeedForward, ...]:
        """Feed-forward kind of every layer, ``[layers]``."""
        return self.feed_forwards if len(self.feed_forwards) == self.layers else self.feed_forwards * self.layers

    def mixer_layers(self, *kinds: Mixer) -> int:
        """Number of layers whose mixer is one of ``kinds``."""
        return sum(mixer in kinds for mixer in self.layer_mixers)

    def feed_forward_layers(self, kind: FeedForward) -> int:
        """Number of layers whose feed-forward half is ``kind``."""
        return sum(half == kind for half in self.layer_feed_forwards)

    @property
    def attention_layers(self) -> int:
        """Layers with softmax attention (full or sliding)."""
        return self.mixer_layers("full", "sliding")

    # -- parameters ---------------------------------------------------------------------------------------------

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        if self.latent:
            return self.heads * (self.latent.nope_head_dim + self.latent.rope_head_dim)
        return self.heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Width of the attention output before its projection."""
        return self.heads * (self.latent.value_head_dim if self.latent else self.head_dim)

    @cached_property
    def attention_parameters(self) -> int:
        """Parameters of one softmax-attention mixer, biases and query/key norms included."""
        h = self.hidden
        if self.latent:
            mla = self.latent
            q = h * mla.q_rank + mla.q_rank + mla.q_rank * self.query_width if mla.q_rank else h * self.query_width
            kv = h * (mla.kv_rank + mla.rope_head_dim) + mla.kv_rank
            kv += mla.kv_rank * self.heads * (mla.nope_head_dim + mla.value_head_dim)
            return q + kv + self.value_width * h
        kv_width = self.kv_heads * self.head_dim
        query = self.query_width * (2 if self.attention_gate else 1)
        weights = h * (query + 2 * kv_width) + self.query_width * h
        bias = (query + 2 * kv_width) * self.qkv_bias + h * self.output_bias
        normed = self.heads + self.kv_heads if self.qk_norm_whole else 2
        return weights + bias + normed * self.head_dim * self.qk_norm + self.heads * self.attention_sinks

    @cached_property
    def state_space_parameters(self) -> int:
        """Parameters of one Mamba-2 mixer."""
        if self.state_space is None:
            return 0
        ssm = self.state_space
        inner = ssm.heads * ssm.head_dim
        convolved = inner + 2 * ssm.groups * ssm.state
        project = self.hidden * (inner + convolved + ssm.heads)
        return project + convolved * (ssm.conv_kernel + 1) + 3 * ssm.heads + inner + inner * self.hidden

    @cached_property
    def linear_attention_parameters(self) -> int:
        """Parameters of one gated-delta-rule mixer."""
        if self.linear_attention is None:
            return 0
        lin = self.linear_attention
        key, value = lin.key_heads * lin.key_head_dim, lin.value_heads * lin.value_head_dim
        project = self.hidden * (2 * key + 2 * value + 2 * lin.value_heads)
        return (
            project
            + (2 * key + value) * lin.conv_kernel
            + 2 * lin.value_heads
            + lin.value_head_dim
            + value * self.hidden
        )

    @cached_property
    def dense_ffn_parameters(self) -> int:
        """Parameters of one dense feed-forward layer."""
        matrices = 3 if self.ffn_gated else 2
        bias = (self.ffn_hidden * (matrices - 1) + self.hidden) * self.ffn_bias
        return matrices * self.hidden * self.ffn_hidden + bias

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters of one routed expert."""
        if self.experts is None:
            return 0
        moe = self.experts
        matrices = 3 if moe.gated else 2
        width = moe.latent_hidden or self.hidden
        return matrices * width * moe.hidden + (moe.hidden * (matrices - 1) + width) * moe.bias

    @cached_property
    def moe_common_parameters(self) -> int:
        """Parameters of one MoE layer that every token uses: router, shared experts, projections of latent experts."""
        if self.experts is None:
            return 0
        moe = self.experts
        router = self.hidden * moe.count + moe.count * moe.bias
        shared = (3 if moe.gated else 2) * self.hidden * moe.shared_hidden + self.hidden * moe.shared_gate
        return router + shared + 2 * self.hidden * moe.latent_hidden

    @cached_property
    def embedding_parameters(self) -> int:
        """Input embedding, and the output head where it is not tied."""
        table = self.vocab * self.hidden
        head = self.vocab * self.head_bias
        return table * (1 if self.tied_embeddings else 2) + self.learned_positions * self.hidden + head

    def _parameters(self, experts_per_layer: int) -> int:
        total = self.embedding_parameters + self.norm_weights * self.hidden
        per_mixer = {
            "full": self.attention_parameters,
            "sliding": self.attention_parameters,
            "mamba": self.state_space_parameters,
            "linear": self.linear_attention_parameters,
            "none": 0,
        }
        for mixer, half in zip(self.layer_mixers, self.layer_feed_forwards, strict=True):
            norms = ((mixer != "none") + (half != "none")) * (2 if self.post_norms else 1)
            total += per_mixer[mixer] + norms * self.norm_weights * self.hidden
            if half == "dense":
                total += self.dense_ffn_parameters
            elif half == "moe":
                total += self.moe_common_parameters + experts_per_layer * self.expert_parameters
        return total

    @cached_property
    def language_parameters(self) -> int:
        """Parameters without a vision tower."""
        return self._parameters(self.experts.count if self.experts else 0)

    @cached_property
    def parameters(self) -> int:
        """All parameters, vision tower included, multi-token prediction layers not."""
        return self.language_parameters + (self.vision.parameters if self.vision else 0)

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token passes through (top-k experts), vision tower left out."""
        return self._parameters(self.experts.active if self.experts else 0)

    @cached_property
    def routed_parameters(self) -> int:
        """Parameters in routed experts, all layers: what expert parallelism divides."""
        if self.experts is None:
            return 0
        return self.feed_forward_layers("moe") * self.experts.count * self.expert_parameters

    def kv_values_per_token(self, *, sliding: bool | None = None) -> int:
        """Cached values per token over all (or only the sliding / only the full) softmax layers.

        GQA caches 2 x kv_heads x head_dim values a layer; MLA caches the latent and the rotary key.
        """
        kinds: tuple[Mixer, ...] = ("full", "sliding") if sliding is None else ("sliding",) if sliding else ("full",)
        width = self.latent.kv_rank + self.latent.rope_head_dim if self.latent else 2 * self.kv_heads * self.head_dim
        return self.mixer_layers(*kinds) * width
