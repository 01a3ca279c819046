"""Layer profiles made from architectures: FLOP of each layer at one rate. Only ratios matter to a speed-up.

Forward of a matrix: 2 FLOP per parameter and token; its backward for the input and for the weights as much each.
Attention scores and values: 2 tokens^2 heads (d_qk + d_v) FLOP, half of it where the mask is causal; their backward
is twice that and has no weights. Dimensions: the architectures' own config.json files.
Activations: 34 * tokens * hidden bytes per layer (arXiv 2205.05198, equation 1 without the attention
matrix, which fused kernels do not store), half of it kept for W. State: 18 bytes per parameter.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlperf.specs.pipeline_profile import LayerProfile

RATE_FLOP_PER_S = 400e12
TOKENS = 4096


@dataclass(frozen=True)
class Layer:
    """A kind of layer: parameters a token passes, parameters held, attention FLOP of the forward, width, tokens."""

    letter: str
    active: float
    held: float
    attention_flop: float
    hidden: int
    tokens: int = TOKENS


def attention(heads: int, qk: int, value: int, tokens: int = TOKENS, causal: bool = True) -> float:
    """FLOP of scores and weighted values of one sequence."""
    return 2.0 * tokens**2 * heads * (qk + value) * (0.5 if causal else 1.0)


def decoder(letter: str, hidden: int, inner: int, heads: int, kv: int, head: int) -> Layer:
    """Grouped-query attention and a gated MLP."""
    mix = hidden * head * (2 * heads + 2 * kv)
    mlp = 3 * hidden * inner
    return Layer(letter, mix + mlp, mix + mlp, attention(heads, head, head), hidden)


def ends(hidden: int, vocabulary: int, heads: int = 1) -> tuple[Layer, Layer]:
    """Embedding (a look-up) and head(s)."""
    size = float(hidden * vocabulary)
    return Layer("E", 0.0, size, 0.0, hidden), Layer("L", heads * size, size, 0.0, hidden)


def profile(name: str, layers: list[Layer]) -> LayerProfile:
    """Times and sizes of a list of layers."""
    matrix = [2.0 * x.active * x.tokens / RATE_FLOP_PER_S for x in layers]
    score = [x.attention_flop / RATE_FLOP_PER_S for x in layers]
    activation = [34.0 * x.tokens * x.hidden for x in layers]
    return LayerProfile.make(
        name,
        tuple(x.letter for x in layers),
        [a + s for a, s in zip(matrix, score, strict=True)],
        [a + 2.0 * s for a, s in zip(matrix, score, strict=True)],
        matrix,
        activation_bytes=activation,
        weight_input_bytes=[0.5 * a for a in activation],
        state_bytes=[18.0 * x.held for x in layers],
    )


def gemma2_9b() -> LayerProfile:
    """42 layers and 256,000 words: the head costs several layers."""
    first, last = ends(3584, 256_000)
    return profile("gemma2-9b", [first, *[decoder("T", 3584, 14336, 16, 8, 256)] * 42, last])


def gemma3_4b() -> LayerProfile:
    """34 narrow layers and 262,208 words."""
    first, last = ends(2560, 262_208)
    return profile("gemma3-4b", [first, *[decoder("T", 2560, 10240, 8, 4, 256)] * 34, last])


def deepseek_v3() -> LayerProfile:
    """3 dense and 58 expert layers, one multi-token-prediction layer with a second pass through the head.

    One of 64 expert-parallel ranks holds 4 routed experts; each token passes 8 routed and 1 shared expert.
    """
    hidden, heads = 7168, 128
    mix = hidden * 1536 + 1536 * heads * 192 + hidden * 576 + 512 * heads * 256 + heads * 128 * hidden
    score = attention(heads, 192, 128)
    expert = 3 * hidden * 2048
    dense = Layer("D", mix + 3 * hidden * 18432, mix + 3 * hidden * 18432, score, hidden)
    sparse = Layer("X", mix + 9 * expert, mix + 5 * expert, score, hidden)
    extra = Layer("N", sparse.active + 2 * hidden**2, sparse.held + 2 * hidden**2, score, hidden)
    first, last = ends(hidden, 129_280, heads=2)
    return profile("deepseek-v3", [first, *[dense] * 3, *[sparse] * 58, extra, last])


def jamba_mini() -> LayerProfile:
    """Blocks of 8: one attention to seven Mamba mixers; every other MLP has 16 experts, 2 per token."""
    hidden, inner = 4096, 14336
    mamba = hidden * 2 * 8192 + 8192 * hidden + 8192 * (256 + 32) + 256 * 8192
    mix = hidden * 128 * (2 * 32 + 2 * 8)
    mlp = 3 * hidden * inner
    layers = []
    for i in range(32):
        own, score = (mix, attention(32, 128, 128)) if i % 8 == 4 else (mamba, 0.0)
        active, held = (2 * mlp, 16 * mlp) if i % 2 else (mlp, mlp)
        layers.append(Layer("A" if i % 8 == 4 else "xm"[i % 2], own + active, own + held, score, hidden))
    first, last = ends(hidden, 65_536)
    return profile("jamba-mini", [first, *layers, last])


def qwen25_vl_7b() -> LayerProfile:
    """A vision tower of 32 blocks on 8,192 patches (2,048 merged visual tokens of 4,096) before 28 decoder layers.

    Blocks attend within windows of 64 patches, each eighth block to one image of 2,048 patches.
    """
    vision = 4 * 1280**2 + 3 * 1280 * 3420
    blocks = []
    for i in range(32):
        window = 2048 if i % 8 == 7 else 64
        score = 8192 // window * attention(16, 80, 80, window, causal=False)
        blocks.append(Layer("V", vision, vision, score, 1280, 8192))
    first, last = ends(3584, 152_064)
    text = decoder("T", 3584, 18944, 28, 4, 128)
    return profile("qwen2.5-vl-7b", [first, *blocks, *[text] * 28, last])


MADE = (gemma2_9b, gemma3_4b, deepseek_v3, jamba_mini, qwen25_vl_7b)
