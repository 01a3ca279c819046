"""Small Hugging Face configurations that tests of single fields add to."""

from __future__ import annotations

from typing import Any

from rlperf.specs.architecture import Architecture
from rlperf.specs.hf.config import from_hf

PLAIN: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 1024, "vocab_size": 1000,
}  # fmt: skip
LATENT = {
    **PLAIN, "model_type": "deepseek_v3", "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
    "v_head_dim": 64, "q_lora_rank": 96,
}  # fmt: skip


def read(data: dict[str, Any], **changes: Any) -> Architecture:
    """The architecture of a configuration with some fields changed."""
    return from_hf({**data, **changes}, name="x", source="test")
