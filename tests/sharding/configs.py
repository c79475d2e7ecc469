"""Configs of tiny models, with sizes that many meshes divide, and some that few do."""

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
_HYBRID = {
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
CONFIGS = {
    "llama": {**_SIZES, "architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True},
    "qwen2": {**_SIZES, "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True, "use_sliding_window": True,
              "sliding_window": 6, "max_window_layers": 2},
    "qwen3": {**_SIZES, "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 4},
    "qwen3_moe": {**_SIZES, **_EXPERTS, "architectures": ["Qwen3MoeForCausalLM"]},
    "qwen3_next": {**_SIZES, **_EXPERTS, **_HYBRID, "architectures": ["Qwen3NextForCausalLM"],
                   "shared_expert_intermediate_size": 16},
    "qwen3_5": {**_SIZES, **_HYBRID, "architectures": ["Qwen3_5ForCausalLM"]},
}  # fmt: skip
"""By name, as config.json."""
