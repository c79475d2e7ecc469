"""Llama 3.x, SmolLM2 and every other `LlamaForCausalLM`."""

from __future__ import annotations

from typing import Any

from jaxinfer.models.config import DENSE, DecoderConfig, Layer
from jaxinfer.models.hf_config import HfConfig


def sizes(
    config: HfConfig,
    *,
    head_width: int | None = None,
    partial_rotary: bool = False,
    layers: tuple[Layer, ...] | None = None,
    **traits: Any,
) -> DecoderConfig:
    """What every decoder reads alike; `traits` are the fields that set the family members apart.

    partial_rotary: whether the family may rotate only some channels of a head. layers: None for dense attention layers.
    """
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", heads)
    width = head_width or config.size("head_dim", hidden // heads)
    positions = config.size("max_position_embeddings")
    if heads % kv_heads:
        config.problem(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    config.only("hidden_act", "silu")
    has_dense = layers is None or any(layer.mlp == DENSE for layer in layers)
    return DecoderConfig(
        num_layers=config.size("num_hidden_layers"),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_width=width,
        mlp_width=config.size("intermediate_size") if has_dense else 0,
        vocab_rows=config.size("vocab_size"),
        max_model_len=positions,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=config.rope(width, positions, partial=partial_rotary),
        tied_head=config.flag("tie_word_embeddings"),
        layers=layers,
        **traits,
    )


def decoder(config: HfConfig) -> DecoderConfig:
    """`attention_bias` is on all four projections, `mlp_bias` on all three."""
    bias = config.flag("attention_bias")
    return sizes(config, qkv_bias=bias, out_bias=bias, mlp_bias=config.flag("mlp_bias"))
