"""Names under which Hugging Face configurations state one number: data, first the one that most files use."""

from __future__ import annotations

LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
HIDDEN = ("hidden_size", "d_model", "n_embd", "n_embed", "model_dim")
HEADS = ("num_attention_heads", "n_heads", "n_head", "num_heads", "attention_heads")
KV_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "num_attention_groups",
    "multi_query_group_num",
    "n_kv_heads",
    "kv_n_heads",
)
HEAD_DIM = ("head_dim", "kv_channels", "head_size", "attention_head_dim")
FFN = ("intermediate_size", "ffn_hidden_size", "ffn_dim", "block_ff_dim", "d_ff")
VOCABULARY = ("vocab_size", "padded_vocab_size")
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")
ROPE, ROPE_KIND = ("rope_parameters", "rope_scaling"), ("rope_type", "type")
BIAS = ("attention_bias", "qkv_bias", "use_qkv_bias", "add_qkv_bias", "use_bias", "bias")
QK_NORM = ("qk_norm", "use_qk_norm", "use_qk_layernorm", "qk_layernorm", "enable_qk_norm")
GATE = ("attn_output_gate", "attention_output_gate", "elementwise_attn_output_gate")
HEAD_GATE = ("use_head_wise_attn_gate", "headwise_attn_output_gate")
STREAMS = ("hc_mult", "hc_count", "altup_num_inputs")
PREDICTION = (
    "num_nextn_predict_layers",
    "num_mtp_modules",
    "mtp_num_hidden_layers",
    "mtp_num_layers",
    "num_mtp_layers",
)

EXPERTS = (
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts", "n_experts",
    "num_routed_experts", "moe_num_primary_experts",
)  # fmt: skip
ACTIVE = (
    "num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k",
    "top_k_experts", "num_selected_experts", "moe_router_topk", "num_active_experts", "top_k",
    "moe_num_active_primary_experts",
)  # fmt: skip
EXPERT_WIDTH = (
    "moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size", "expert_intermediate_size",
    "expert_hidden_dim", "intermediate_size", "ffn_hidden_size",
)  # fmt: skip
OWN_EXPERT_WIDTH = EXPERT_WIDTH[:-2]
"""Those that no dense feed-forward goes by."""
SHARED_WIDTH = (
    "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size",
    "share_expert_dim", "shared_experts_intermediate_size",
)  # fmt: skip
SHARED_COUNT = (
    "n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts", "n_shared_expert",
)  # fmt: skip
NULL_EXPERTS = ("zero_expert_num", "num_zero_experts", "n_null_experts")
DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers", "n_dense_layers", "moe_layer_start_index")
DENSE_WIDTH = ("prefix_dense_intermediate_size", "dense_intermediate_size", "intermediate_size_mlp", *FFN)
MOE_LISTS = ("mlp_layer_types", "mlp_only_layers", "moe_layer_freq", "is_moe_layer", "moe_layers_enum", "moe_layers")
MOE_PERIOD = (
    "decoder_sparse_step", "interleave_moe_layer_step", "moe_every_n_layers", "moe_layer_interval",
    "moe_layer_frequency",
)  # fmt: skip

OF_EXPERTS = (*EXPERTS, *ACTIVE, *OWN_EXPERT_WIDTH, *SHARED_WIDTH, *SHARED_COUNT)
LISTABLE = (*OF_EXPERTS, *DENSE_WIDTH, *HEADS, *KV_HEADS)
"""Numbers that files list with an entry for each layer."""

FULL_PERIOD = (
    "full_attention_interval", "sliding_window_pattern", "global_attn_every_n_layers", "layer_group_size",
)  # fmt: skip
WINDOW = ("sliding_window", "sliding_window_size", "attention_chunk_size", "window_size")
LAYER_WORDS = (
    "layer_types",
    "layers_block_type",
    "attn_type_list",
    "hybrid_layer_pattern",
    "block_types",
    "attention_layers",
    "sliding_window_layout",
)

LINEAR_KEY_HEADS = ("linear_num_key_heads", "linear_num_heads")
LINEAR_VALUE_HEADS = ("linear_num_value_heads", "linear_num_heads")
LINEAR_KEY_DIM = ("linear_key_head_dim", "linear_head_dim")
LINEAR_VALUE_DIM = ("linear_value_head_dim", "linear_head_dim")
LATENT_EXPERTS = ("moe_latent_size", "moe_hidden_size")

SSM_HEADS = ("mamba_num_heads", "mamba_n_heads", "n_mamba_heads")
SSM_HEAD_DIM = ("mamba_head_dim", "mamba_d_head", "mamba_headdim")
SSM_STATE = ("ssm_state_size", "mamba_d_state", "state_size")
SSM_GROUPS = ("n_groups", "mamba_n_groups", "mamba_ngroups")
SSM_CONV = ("conv_kernel", "mamba_d_conv")
SSM_CHUNK = ("chunk_size", "mamba_chunk_size")

RENAMED = {
    "attention_q_lora_dim": "q_lora_rank",
    "attention_kv_lora_dim": "kv_lora_rank",
    "attention_qk_dim": "qk_nope_head_dim",
    "attention_qk_rope_dim": "qk_rope_head_dim",
    "attention_v_dim": "v_head_dim",
}
"""Latents under openPangu's names, and under everybody else's."""

PARTS = ("text_config", "llm_config", "language_config", "thinker_config", "language_model")
"""Where composite configurations keep the language part."""

WORDS: dict[str, str] = {
    "full_attention": "full",
    "attention": "full",
    "full": "full",
    "global": "full",
    "global_attention": "full",
    "deepseek_sparse_attention": "full",  # an index beside it is read from its own fields
    "minimax_sparse_attention": "full",
    "sparse_attention": "full",
    "indexed_attention": "indexed",
    "qwen_sparse_attention": "indexed",
    "minimax_m3_sparse": "indexed",
    "sliding_attention": "sliding",
    "sliding_window": "sliding",
    "sliding_window_attention": "sliding",
    "local_attention": "sliding",
    "local": "sliding",
    "swa": "sliding",
    "chunked_attention": "sliding",
    "reference_sliding_attention": "sliding",
    "linear_attention": "linear",
    "gated_deltanet": "linear",
    "kda": "kda",
    "kimi_delta_attention": "kda",
    "lightning_attention": "lightning",
    "mamba": "mamba",
    "mamba2": "mamba",
    "conv": "short_conv",
    "short_conv": "short_conv",
}
"""Words of layer lists, and the kind of mixer that each stands for."""

NUMBERED: dict[str, dict[str, str]] = {
    "attn_type_list": {"0": "lightning", "1": "full"},
    "hybrid_layer_pattern": {"0": "full", "1": "sliding"},
    "sliding_window_layout": {"0": "full", "1": "sliding"},
}
"""What numbers of layer lists stand for, by the list."""

STRUCTURE = (
    r"mamba|ssm|rwkv|retention|delta|linear_|lightning|conv|compress|sparse|index|moe|expert|mixer|hyper|hc_|engram"
    r"|altup|laurel|recurr|memory|layer_type|block_|pattern|lora_rank|latent|kv_shared|cla|share|per_layer|attn_type"
    r"|sliding|window|cross_|state|loop|ut_steps|recurs|repeat|diffus"
)
"""Fields with such a part change what layers are; of an unknown model_type each must be understood."""
HARMLESS = (
    r"router|aux|loss|norm|group|scal|bias|(?<!f)act|dtype|jitter|capacity|dropout|init|(?<!t)eps|cache|rope|method|func"
    r"|ep_size|limit|coef|theta|impl|kernel_type|temperature|token|return|output|gradient|quant|class|flash|freq_base"
    r"|interleave|use_sliding_window|max_window_layers|load_balanc|noaux|version|fp32|bf16|a_log|_dt_|eigval|no_rope"
)
"""Fields with such a part do not, whatever else they are called."""
