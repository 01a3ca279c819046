"""Architecture of a language model: widths, layers, experts, vision tower. It knows no device and no layout."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rlperf.errors import Problem, SpecError, did_you_mean
from rlperf.specs.frozen import Frozen
from rlperf.units import NonNegativeInt, PositiveInt

NEEDS = {
    "sliding": ("window",),
    "latent": ("latent",),
    "sliding_latent": ("latent", "window"),
    "mamba": ("state_space",),
    "linear": ("linear_attention",),
    "dense": ("ffn_hidden",),
    "moe": ("experts",),
    "sparse": ("latent",),
    "sparse_reusing": ("latent",),
    "kda": ("linear_attention",),
    "lightning": ("linear_attention",),
}
"""Fields that hold the numbers of a kind of layer; kinds without one have theirs in `Architecture.numbers`."""


class LatentAttention(Frozen):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). ``q_rank`` 0: queries uncompressed."""

    q_rank: NonNegativeInt = 0
    kv_rank: PositiveInt
    nope_head_dim: PositiveInt
    rope_head_dim: NonNegativeInt
    value_head_dim: PositiveInt
    gate_reads_queries: bool = Field(
        False, description="queries and output gate read the queries' latent twice, with and without its norm (A.X K2)"
    )


class Experts(Frozen):
    """Mixture-of-experts feed-forward layers."""

    count: PositiveInt
    active: PositiveInt = Field(description="routed experts per token (top-k)")
    hidden: PositiveInt = Field(description="width of one expert")
    shared_hidden: NonNegativeInt = Field(0, description="total width of the shared experts, 0 without")
    shared_gate: bool = False
    gated: bool = True
    bias: bool = Field(False, description="biases in the router and in every expert")
    latent_hidden: NonNegativeInt = Field(
        0, description="width the routed experts work in after a shared down-projection; 0 = hidden"
    )
    null_count: NonNegativeInt = Field(
        0, description="experts beside them that hand a token back: the router scores them, none multiplies (LongCat)"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Experts:
        if self.active > self.count:
            raise ValueError(f"active ({self.active}) is more than count ({self.count})")
        return self


class StateSpace(Frozen):
    """Mamba-2 mixer (arXiv 2405.21060)."""

    heads: PositiveInt
    head_dim: PositiveInt
    state: PositiveInt
    groups: PositiveInt
    conv_kernel: PositiveInt = 4
    chunk: PositiveInt = 128


class LinearAttention(Frozen):
    """Gated delta-rule linear attention (Qwen3-Next / Qwen3.5)."""

    key_heads: PositiveInt
    value_heads: PositiveInt
    key_head_dim: PositiveInt
    value_head_dim: PositiveInt
    conv_kernel: PositiveInt = 4
    full_gates: bool = Field(False, description="gates of Kimi Delta Attention of full rank, not of that of a head")


class KindNumbers(BaseModel):
    """Numbers of a kind of layer that has no field of its own here: ``kind``, and what the file of the kind reads.

    >>> KindNumbers(kind="retention", heads=8).numbers
    {'heads': 8.0}
    """

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)
    __pydantic_extra__: dict[str, float] = Field(init=False)
    kind: str

    @property
    def numbers(self) -> dict[str, float]:
        """Numbers by name."""
        return dict(self.__pydantic_extra__)


class StatedNumbers(dict[str, float]):
    """Numbers of one kind of layer; asking for one that the architecture does not state is the user's `SpecError`.

    >>> StatedNumbers("mine", "retention", {"widht": 8.0})["width"]
    Traceback (most recent call last):
    ...
    rlperf.errors.SpecError: mine: numbers of kind retention lack 'width' (did you mean width where it says widht?)
    """

    def __init__(self, architecture: str, kind: str, numbers: dict[str, float]) -> None:
        super().__init__(numbers)
        self._of = f"{architecture}: numbers of kind {kind}"

    def __missing__(self, name: str) -> float:
        near = next((given for given in self if did_you_mean(given, [name])), None)
        hint = f"did you mean {name} where it says {near}?" if near else f"it states {', '.join(self) or 'none'}"
        raise SpecError(Problem(f"{self._of} lack {name!r}", suggestion=hint))


class Variant(Frozen):
    """Layers of a kind whose numbers are others than the architecture's: a name for them, and what is other.

    ``mixers`` and ``feed_forwards`` name a variant as they name a kind. What is None is the architecture's.

    >>> Variant(name="sliding96", kind="sliding", heads=96).changes
    {'heads': 96}
    """

    name: str
    kind: str
    heads: PositiveInt | None = None
    kv_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    value_head_dim: PositiveInt | None = None
    window: PositiveInt | None = None
    ffn_hidden: PositiveInt | None = None
    attention_sinks: bool | None = None
    values_are_keys: bool | None = None
    borrows_cache: bool | None = None
    latent: LatentAttention | None = None
    experts: Experts | None = None
    numbers: tuple[KindNumbers, ...] | None = None

    @property
    def changes(self) -> dict[str, Any]:
        """What is other, by the architecture's field."""
        return {field: value for field, value in self if value is not None and field not in ("name", "kind")}


class VisionTower(Frozen):
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
    window: NonNegativeInt = 0
    full_attention_layers: NonNegativeInt | None = None
    parameters: int = Field(gt=0, le=10**12, description="parameters of the tower with its merger")


TRAINABLE = frozenset(("bf16", "fp16", "fp32", "fp8", "mxfp8", "mxfp4"))
"""Types of checkpoints that trainers load, the last three widened on the way (``dequantize`` of Transformers 5.24's
quantizers); every other ``quant_method`` is made for engines."""


class Architecture(Frozen):
    """A decoder-only transformer (or hybrid).

    Parameters
    ----------
    hidden : width of the residual stream [values per token]
    heads, kv_heads, head_dim : attention heads, key/value heads, width of one query/key head (MLA: no-rope + rope part)
    ffn_hidden : width of the dense feed-forward layers (0 without)
    mixers, feed_forwards : kind of each layer's two halves, ``[layers]``; one entry stands for all layers. The kinds
        are the table in `rlperf.cost.layers`: what one costs, keeps and holds is stated there. ``a+b``: kinds that
        run side by side on one input
    numbers : of kinds that have no field here
    variants : layers that differ from others of their kind
    """

    name: str
    family: str = Field("", description="Hugging Face model_type")
    source: str
    hidden: PositiveInt
    layers: int = Field(ge=1, le=10_000)
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    ffn_hidden: NonNegativeInt = 0
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
    attention_gate_heads: bool = Field(False, description="an output gate of one value a head (Step 3.5)")
    value_head_dim: NonNegativeInt = Field(0, description="width of a value head; 0: as head_dim (MiMo-V2)")
    query_rank: NonNegativeInt = Field(0, description="queries pass through a matrix of this rank first (Step-3)")
    values_are_keys: bool = Field(False, description="values are the keys before their norm: no matrix of their own")
    borrows_cache: bool = Field(False, description="keys and values are those of an earlier layer (Gemma 3n, 4 E)")
    learned_positions: NonNegativeInt = Field(0, description="length of a table of learned positions; 0: rotary")
    norm_weights: NonNegativeInt = Field(1, description="values per channel in a norm: 1 RMSNorm, 2 LayerNorm")
    max_positions: PositiveInt | None = None
    mixers: tuple[str, ...] = ("full",)
    feed_forwards: tuple[str, ...] = ("dense",)
    window: NonNegativeInt = Field(0, description="window of the sliding layers [tokens]")
    latent: LatentAttention | None = None
    experts: Experts | None = None
    state_space: StateSpace | None = None
    linear_attention: LinearAttention | None = None
    numbers: tuple[KindNumbers, ...] = ()
    variants: tuple[Variant, ...] = ()
    residual_streams: PositiveInt = Field(
        1, description="parallel residual streams, mixed before and behind every half (hyper-connections)"
    )
    residual_rank: NonNegativeInt = Field(
        0, description="rank of a product that mixes the streams into an input; 0: weights of the streams alone"
    )
    lookup_parameters: int = Field(
        0,
        ge=0,
        le=10**13,
        description="values of tables that tokens look up beside the embedding: per-layer inputs, n-gram memories",
    )
    vision: VisionTower | None = None
    audio_parameters: int = Field(
        0, ge=0, le=10**12, description="parameters of an audio tower; its seconds are left out"
    )
    prediction_layers: NonNegativeInt = Field(0, description="multi-token prediction layers; not part of the totals")
    classifies: bool = Field(
        False, description="its head gives a score and no logits: a reward model or a critic, and no policy"
    )
    checkpoint_dtype: str = "bf16"
    published_parameters: int | None = Field(None, description="total as its publisher prints it, for checks")
    published_source: str = Field("", description="where published_parameters is printed, and what it counts")
    notes: str = ""
    assumed: tuple[str, ...] = Field((), description="what its reader had to assume; intervals are wider for it")

    @model_validator(mode="after")
    def _consistent(self) -> Architecture:
        for field, kinds in (("mixers", self.mixers), ("feed_forwards", self.feed_forwards)):
            if len(kinds) not in (1, self.layers):
                raise ValueError(f"{field} has {len(kinds)} entries for {self.layers} layers; give 1 or {self.layers}")
        for name in dict.fromkeys((*self.mixers, *self.feed_forwards)):
            for kind, arch in map(self.part, name.split("+")):
                for needed in NEEDS.get(kind, ()):
                    if not getattr(arch, needed):
                        raise ValueError(f"a layer is of kind {kind}, but {needed} is missing")
                if arch.heads % arch.kv_heads:
                    raise ValueError(f"{name}: heads ({arch.heads}) is not a multiple of kv_heads ({arch.kv_heads})")
        if self.latent and set(self.mixers) == {"full"}:
            raise ValueError('latent is given, but no layer is of kind latent; say so: "mixers": ["latent"]')
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) is not a multiple of kv_heads ({self.kv_heads})")
        return self

    @property
    def head_outputs(self) -> int:
        """Outputs of its head: logits over the vocabulary, or one score."""
        return 1 if self.classifies else self.vocab

    @property
    def head_is_table(self) -> bool:
        """Whether its head is the table of tokens, which no score is read from."""
        return self.tied_embeddings and not self.classifies

    @property
    def critic(self) -> Architecture:
        """PPO's critic of this policy: its layers under a head of one value a token."""
        return self.model_copy(update={"classifies": True})

    @property
    def stored_note(self) -> str:
        """What is said of weights that are packed for engines; empty where they are not."""
        if self.checkpoint_dtype not in TRAINABLE:
            return (
                f"{self.name}: its weights are packed by {self.checkpoint_dtype}; read as 16 bits, in the precision "
                "that the job states: a trainer that does not unpack them refuses them, or trains adapters alone"
            )
        return ""

    @property
    def layer_mixers(self) -> tuple[str, ...]:
        """Mixer of every layer, ``[layers]``."""
        return self.mixers if len(self.mixers) == self.layers else self.mixers * self.layers

    @property
    def layer_feed_forwards(self) -> tuple[str, ...]:
        """Feed-forward kind of every layer, ``[layers]``."""
        return self.feed_forwards if len(self.feed_forwards) == self.layers else self.feed_forwards * self.layers

    def part(self, name: str) -> tuple[str, Architecture]:
        """Kind of the layers of a name, and the architecture that they are layers of: this one, or a variant's."""
        for one in self.variants:
            if one.name == name:
                return one.kind, self.model_copy(update=one.changes)
        return name, self

    def numbers_of(self, kind: str) -> StatedNumbers:
        """Numbers of a kind that has no field here, by name; raises `SpecError` where they, or one asked for, lack."""
        for one in self.numbers:
            if one.kind == kind:
                return StatedNumbers(self.name, kind, one.numbers)
        raise SpecError(f"{self.name}: a layer is of kind {kind}, but numbers has no entry of this kind")
