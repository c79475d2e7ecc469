"""Qwen3 dense: no biases, RMSNorm on every query and key head, a head width of its own."""

from __future__ import annotations

from typing import Any

from jaxinfer.models import llama, qwen2
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.hf_config import HfConfig


def decoder(config: HfConfig, **traits: Any) -> DecoderConfig:
    """`head_dim` is required: hidden_size / num_attention_heads would be wrong for most published sizes."""
    config.only("attention_bias", False)
    width, windows = config.size("head_dim"), qwen2.windows(config)
    return llama.sizes(config, head_width=width, qk_norm=True, windows=windows, **traits)
