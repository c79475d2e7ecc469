"""Qwen3 dense: no biases, RMSNorm on every query and key head, a head width of its own."""

from __future__ import annotations

from jaxinfer.models import llama, qwen2
from jaxinfer.models.decoder import DecoderConfig
from jaxinfer.models.hf_config import HfConfig


def decoder(config: HfConfig) -> DecoderConfig:
    """`head_dim` is required: hidden_size / num_attention_heads would be wrong for most published sizes."""
    config.only("attention_bias", False)
    return llama.sizes(config, head_width=config.size("head_dim"), qk_norm=True, windows=qwen2.windows(config))
