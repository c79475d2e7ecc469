"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v, and optional sliding windows on the upper layers."""

from __future__ import annotations

from typing import Any

from jaxinfer.models import llama
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.hf_config import HfConfig

LAYER_TYPES = ("full_attention", "sliding_attention")


def windows(config: HfConfig) -> tuple[int | None, ...] | None:
    """Sliding windows by layer: only with `use_sliding_window`, and only from layer `max_window_layers` on."""
    if not config.flag("use_sliding_window"):
        return None
    num_layers, window = config.size("num_hidden_layers"), config.size("sliding_window")
    if kinds := config.get("layer_types"):
        if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= set(LAYER_TYPES):
            config.problem(f"layer_types is {kinds!r}; {num_layers} of {' or '.join(LAYER_TYPES)} are needed")
            return None
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = config.number("max_window_layers", 0)
    return tuple(window if layer >= first else None for layer in range(num_layers))


def decoder(config: HfConfig, **traits: Any) -> DecoderConfig:
    return llama.sizes(config, qkv_bias=True, windows=windows(config), **traits)
