"""The configurations of scripts/make_goldens.py: tiny, and spelled as the families are published."""

from __future__ import annotations

from typing import Any

EOS = 127

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "use_cache": True,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}
LLAMA = {**SIZES, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
QWEN2 = {**SIZES, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-6}
QWEN3 = {**SIZES, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-6}
QWEN3_MOE = {
    **QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 16,
    "hidden_size": 48,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "output_router_logits": False,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_sliding_window": False,
}
# Two gated delta rule heads of values to one of keys; of 32 channels of an attention head 8 rotate.
HYBRID = {
    **SIZES,
    "full_attention_interval": 4,
    "head_dim": 32,
    "hidden_size": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "rms_norm_eps": 1e-6,
}
EXPERTS = {
    "moe_intermediate_size": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 24,
}
QWEN3_5_TEXT = {
    **{key: value for key, value in HYBRID.items() if key != "bos_token_id"},
    "attention_bias": False,
    "attn_output_gate": True,
    "dtype": "float32",
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
}
QWEN3_5_MOE_TEXT = {
    **QWEN3_5_TEXT,
    **EXPERTS,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "model_type": "qwen3_5_moe_text",
    "num_hidden_layers": 4,
    "tie_word_embeddings": False,
}


def composite(architecture: str, text: dict[str, Any]) -> dict[str, Any]:
    """A configuration of Qwen3.5 as published: text and images, though only the text is asked for here."""
    kind = text["model_type"].removesuffix("_text")
    vision = {
        "deepstack_visual_indexes": [],
        "depth": 1,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 8,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 8,
        "model_type": kind,
        "num_heads": 2,
        "num_position_embeddings": 4,
        "out_hidden_size": text["hidden_size"],
        "patch_size": 2,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    return {
        "architectures": [architecture],
        "image_token_id": 124,
        "model_type": kind,
        "text_config": text,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "video_token_id": 125,
        "vision_config": vision,
        "vision_end_token_id": 123,
        "vision_start_token_id": 122,
    }


FAMILIES: dict[str, dict[str, Any]] = {
    # Llama 3.1: frequencies scaled by wavelength, several ids that end the text.
    "llama": {
        **LLAMA,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "attention_bias": False,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "eos_token_id": [EOS, EOS - 1],
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_type": "llama3",
        },
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    },
    # SmolLM2: an odd number of heads per key-value head, no lm_head tensor.
    "llama_tied": {
        **LLAMA,
        "num_hidden_layers": 3,
        "intermediate_size": 80,
        "num_attention_heads": 6,
        "hidden_size": 48,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    },
    "llama_bias": {
        **LLAMA,
        "num_hidden_layers": 2,
        "intermediate_size": 80,
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "dtype": "float32",
    },
    # Qwen2.5 with its window switched on: layer 0 sees everything, layers 1 and 2 the last 8 tokens.
    "qwen2": {
        **QWEN2,
        "num_hidden_layers": 3,
        "intermediate_size": 48,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    },
    # Qwen2.5 as its model card extends it: yarn by hand, and a window that is named but not used.
    "qwen2_yarn": {
        **QWEN2,
        "num_hidden_layers": 2,
        "intermediate_size": 80,
        "use_sliding_window": False,
        "sliding_window": 8,
        "max_window_layers": 1,
        "rope_theta": 1000000.0,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 64, "type": "yarn"},
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    },
    # Qwen3: 4 heads of 32 are wider than the hidden size.
    "qwen3": {
        **QWEN3,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "head_dim": 32,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": False,
        "dtype": "float32",
    },
    "qwen3_tied": {
        **QWEN3,
        "num_hidden_layers": 3,
        "intermediate_size": 64,
        "head_dim": 16,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 3,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    },
    # A dense layer between two sparse ones.
    "qwen3_moe": {
        **QWEN3_MOE,
        "max_window_layers": 3,
        "mlp_only_layers": [1],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
    },
    "qwen3_moe_all": {
        **QWEN3_MOE,
        "max_window_layers": 2,
        "mlp_only_layers": [],
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 2,
    },
    "mixtral": {
        **SIZES,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    },
    # Qwen1.5-MoE: the chosen experts' weights do not sum to one, and one expert behind a gate sees every token.
    "qwen2_moe": {
        **QWEN2,
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "decoder_sparse_step": 1,
        "hidden_size": 48,
        "intermediate_size": 80,
        "max_window_layers": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": False,
        "num_attention_heads": 6,
        "num_experts": 6,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 2,
        "output_router_logits": False,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 48,
        "sliding_window": 32,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_sliding_window": False,
    },
    "qwen3_next": {
        **HYBRID,
        **EXPERTS,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "decoder_sparse_step": 1,
        "intermediate_size": 80,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "num_hidden_layers": 4,
        "partial_rotary_factor": 0.25,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_sliding_window": False,
    },
    # The small dense ones: tied, and with two layers of attention that each have a cache of their own.
    "qwen3_5": composite(
        "Qwen3_5ForConditionalGeneration",
        {
            **QWEN3_5_TEXT,
            "intermediate_size": 48,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
            "model_type": "qwen3_5_text",
            "num_hidden_layers": 8,
            "tie_word_embeddings": True,
        },
    ),
    # The same weights twice: fused per layer, as published in bfloat16, and per expert, as transformers saves them.
    "qwen3_5_moe_fused": composite("Qwen3_5MoeForConditionalGeneration", QWEN3_5_MOE_TEXT),
    "qwen3_5_moe": {"architectures": ["Qwen3_5MoeForCausalLM"], **QWEN3_5_MOE_TEXT},
}
