"""A config that no model implements is refused, with every reason."""

import re

import numpy as np
import pytest

from checkpoints import load, safetensors
from checkpoints.source import CheckpointError
from jaxinfer.models import registry, rope
from jaxinfer.models.model import ModelError


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"architectures": ["GPT2LMHeadModel"]}, "not supported: GPT2LMHeadModel; known: LlamaForCausalLM, "),
        ("llama", {"architectures": None}, r"none named \(model_type 'llama'\)"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantization_config 'awq' is not implemented"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu' is implemented"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers is 0; a positive whole number is needed"),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ("llama", {"rope_scaling": {"rope_type": "longrope"}}, "RoPE type 'longrope' is not supported"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks 'original_max_position_embeddings'"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; only 1 is implemented"),
        (
            "qwen3_next",
            {"layer_types": ["linear_attention"] * 3 + ["sparse_attention"]},
            "4 of linear_attention or",
        ),
        ("qwen3_next", {"layer_types": ["linear_attention"] * 4}, "no layer is full_attention; a model without any KV"),
        (
            "qwen3_next",
            {"linear_num_value_heads": 3},
            "linear_num_value_heads 3 is no multiple of linear_num_key_heads",
        ),
        ("qwen3_next", {"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim is 3; only 4 is implemented"),
        ("qwen3_next", {"partial_rotary_factor": 2}, "partial_rotary_factor is 2; an even share of 32 channels"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but there are 8 experts"),
        ("qwen3_moe", {"mlp_only_layers": [3]}, r"mlp_only_layers is \[3\]; a list of layers below 3 is needed"),
        ("qwen3", {"head_dim": None}, "head_dim is None; a positive whole number is needed"),
        ("qwen3", {"attention_bias": True}, "attention_bias is True; only False is implemented"),
        ("llama", {"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'; a list of names is"),
        ("llama", {"quantization_config": "awq"}, "quantization_config 'awq' is not implemented"),
        ("llama", {"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'; a number is needed"),
        ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; true or false is needed"),
        ("llama", {"rope_theta": "1e4"}, "rope_theta is '1e4'; a number above 0"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 0}}, "RoPE's factor is 0; a number above 0"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": None}}, "lacks 'factor'"),
        ("llama", {"rope_parameters": [4]}, r"rope_parameters is \[4\]; one set of RoPE parameters"),
        ("qwen3", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "one set of RoPE parameters for all"),
        ("qwen2", {"layer_types": ["full_attention"]}, r"layer_types is \['full_attention'\]; \d of full_attention or"),
        ("qwen2", {"layer_types": ["chunked"] * 99}, "of full_attention or sliding_attention are needed"),
        ("qwen2", {"sliding_window": None}, "sliding_window is None; a positive whole number is needed"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_with_its_value(golden, family, changes, message):
    with pytest.raises(ModelError, match=message):
        registry.from_config({**golden(family).config, **changes})


def test_all_problems_of_a_config_are_named_at_once(golden):
    with pytest.raises(ModelError, match="vocab_size is 'x'.*; .*hidden_act is 'relu'|hidden_act.*; .*vocab_size"):
        registry.from_config({**golden("llama").config, "vocab_size": "x", "hidden_act": "relu"})


def test_linear_scaling_divides_every_frequency():
    plain = rope.from_config(16, 10000.0, {}, 256)
    scaled = rope.from_config(16, 10000.0, {"rope_type": "linear", "factor": 4.0}, 256)
    np.testing.assert_allclose(np.array(scaled.inverse_frequencies) * 4, plain.inverse_frequencies)
    assert scaled.magnitude == plain.magnitude == 1.0


def test_a_checkpoint_with_half_the_experts_missing_is_refused_with_their_names(golden):
    expected = golden("qwen3_moe")
    found = safetensors.open_folder(expected.folder).shapes()
    model = registry.from_config(expected.config, found.keys())
    kept = {name: shape for name, shape in found.items() if not re.search(r"experts\.[4-7]\.", name)}
    with pytest.raises(CheckpointError, match=r"24 missing: model\.layers\.0\.mlp\.experts\.4\.gate_proj\.weight, "):
        load.check_complete(load.wanted_tensors(model.specs), kept, model.ignored)
