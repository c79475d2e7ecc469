"""Qwen3-Next and Qwen3.5: a gated delta rule in most layers, gated attention in the others, dense or sparse."""

from __future__ import annotations

from typing import Any

from jaxinfer.models import llama, qwen3_moe
from jaxinfer.models.config import ATTENTION, DELTA, DENSE, SPARSE, DecoderConfig, DeltaConfig, Layer
from jaxinfer.models.hf_config import HfConfig
from pallas_kernels.delta_rule.api import TAPS

MIXERS = {"linear_attention": DELTA, "full_attention": ATTENTION}
TEXT_PREFIX = "model.language_model."
"""Of the decoder's tensors in checkpoints that hold an image encoder, too."""


def mixers(config: HfConfig) -> list[str]:
    """What each layer mixes tokens by: `layer_types`, or attention in every `full_attention_interval`-th layer."""
    num_layers = config.size("num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds is None:
        every = config.size("full_attention_interval", 4)
        return [ATTENTION if (i + 1) % every == 0 else DELTA for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(map(str, kinds)) <= set(MIXERS):
        config.problem(f"layer_types is {kinds!r}; {num_layers} of {' or '.join(MIXERS)} are needed")
        return [ATTENTION] * num_layers
    return [MIXERS[kind] for kind in kinds]


def hybrid(config: HfConfig, mlps: list[str], *, by_head: bool, **traits: Any) -> DecoderConfig:
    """What Qwen3-Next and Qwen3.5 share. Published configs give every size."""
    found = mixers(config)
    if ATTENTION not in found:
        config.problem("no layer is full_attention; a model without any KV cache is not implemented")
    config.only("attention_bias", False)
    config.only("linear_conv_kernel_dim", TAPS)
    key_heads, value_heads = config.size("linear_num_key_heads"), config.size("linear_num_value_heads")
    if value_heads % key_heads:
        config.problem(f"linear_num_value_heads {value_heads} is no multiple of linear_num_key_heads {key_heads}")
    delta = DeltaConfig(
        num_key_heads=key_heads,
        group=max(value_heads // key_heads, 1),
        key_width=config.size("linear_key_head_dim"),
        value_width=config.size("linear_value_head_dim"),
        by_head=by_head,
    )
    return llama.sizes(
        config,
        head_width=config.size("head_dim"),
        partial_rotary=True,
        qk_norm=True,
        output_gate=True,
        norm_offset=1.0,
        delta=delta if DELTA in found else None,
        layers=tuple(map(Layer, found, mlps)),
        **traits,
    )


def decoder(config: HfConfig) -> DecoderConfig:
    """Qwen3-Next: sparse, with a shared expert."""
    shared = config.size("shared_expert_intermediate_size")
    moe = qwen3_moe.experts(config, renormalise=config.flag("norm_topk_prob"), shared_width=shared)
    return hybrid(config, qwen3_moe.mlps(config), by_head=True, moe=moe)


def _prefix(config: HfConfig) -> str:
    return TEXT_PREFIX if any(name.startswith(TEXT_PREFIX) for name in config.tensors) else "model."


def qwen3_5(config: HfConfig) -> DecoderConfig:
    """Qwen3.5 dense. The checkpoint's names say where in it the decoder is."""
    return hybrid(config, [DENSE] * config.size("num_hidden_layers"), by_head=False, prefix=_prefix(config))


def qwen3_5_moe(config: HfConfig) -> DecoderConfig:
    """Qwen3.5 sparse. The checkpoint's names say also whether a layer's experts are one tensor."""
    fused = any(name.endswith("mlp.experts.gate_up_proj") for name in config.tensors)
    shared = config.size("shared_expert_intermediate_size")
    moe = qwen3_moe.experts(config, renormalise=True, shared_width=shared, fused=fused)
    mlps = [SPARSE] * config.size("num_hidden_layers")
    return hybrid(config, mlps, by_head=False, moe=moe, prefix=_prefix(config))
