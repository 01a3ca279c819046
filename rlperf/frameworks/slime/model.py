"""Megatron's architecture flags, which slime wants beside the checkpoint."""

from __future__ import annotations

from rlperf.errors import SpecError
from rlperf.frameworks.fields import Setting
from rlperf.frameworks.run import Run
from rlperf.specs.architecture import Architecture
from rlperf.specs.profiles import architecture_reading, load_architecture

# Values of a config.json that `Architecture` does not carry, by family (each model's published config).
_ROTARY = {
    "qwen2": (1e-6, 1_000_000),
    "qwen3": (1e-6, 1_000_000),
    "qwen3_moe": (1e-6, 1_000_000),
    "llama": (1e-5, 500_000),
}


def model_flags(run: Run) -> list[Setting]:
    """Megatron's architecture flags, equal to the checkpoint's config; empty where slime's own script knows better."""
    try:
        arch = load_architecture(run.architecture)
        labelled = architecture_reading(run.architecture)
    except SpecError:
        return []
    rotary = _ROTARY.get(arch.family)
    plain = arch.latent is None and arch.linear_attention is None and arch.state_space is None and arch.vision is None
    if rotary is None or not plain or "sliding" in arch.mixers or labelled.changes:  # other positions, another base
        return []
    epsilon, base = rotary
    settings = [
        Setting("swiglu", arch.ffn_gated),
        Setting("num-layers", arch.layers),
        Setting("hidden-size", arch.hidden),
        Setting(
            "ffn-hidden-size", arch.ffn_hidden or (arch.experts.hidden * arch.experts.active if arch.experts else 0)
        ),
        Setting("num-attention-heads", arch.heads),
        Setting("group-query-attention", arch.kv_heads != arch.heads),
        Setting("num-query-groups", arch.kv_heads if arch.kv_heads != arch.heads else None),
        Setting("kv-channels", arch.head_dim),
        Setting("qk-layernorm", arch.qk_norm),
        Setting("add-qkv-bias", arch.qkv_bias),
        Setting("disable-bias-linear", True),
        Setting("normalization", "RMSNorm"),
        Setting("norm-epsilon", epsilon),
        Setting("use-rotary-position-embeddings", True),
        Setting("rotary-base", base),
        Setting("vocab-size", arch.vocab),
        Setting("untie-embeddings-and-output-weights", not arch.tied_embeddings),
    ]
    return [*settings, *_experts(arch, run)]


def _experts(arch: Architecture, run: Run) -> list[Setting]:
    if arch.experts is None:
        return []
    return [
        Setting("num-experts", arch.experts.count),
        Setting("moe-router-topk", arch.experts.active),
        Setting("moe-ffn-hidden-size", arch.experts.hidden),
        Setting("moe-router-score-function", "softmax"),
        *([] if run.trainer.expert_dispatch else [Setting("moe-token-dispatcher-type", "alltoall")]),
        Setting("moe-router-dtype", "fp32"),
        Setting("moe-grouped-gemm", True),
        Setting("moe-permute-fusion", True),
        Setting("moe-aux-loss-coeff", 0),
    ]
