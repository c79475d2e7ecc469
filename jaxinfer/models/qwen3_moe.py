"""Qwen3-MoE, and the two sparse families that came before it: Qwen2-MoE (Qwen1.5-MoE) and Mixtral."""

from __future__ import annotations

from typing import Any

from jaxinfer.models import llama, qwen2, qwen3
from jaxinfer.models.config import ATTENTION, DENSE, SPARSE, DecoderConfig, Layer, MoeConfig
from jaxinfer.models.hf_config import HfConfig


def num_experts(config: HfConfig) -> int:
    """Under any of the names that published configs and transformers give it."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return config.size(next((name for name in names if config.get(name) is not None), names[0]))


def experts(config: HfConfig, *, renormalise: bool, width_key: str = "moe_intermediate_size", **more: Any) -> MoeConfig:
    """The experts of a config; a problem if more are to be chosen than there are."""
    count, top_k = num_experts(config), config.size("num_experts_per_tok")
    if top_k > count:
        config.problem(f"num_experts_per_tok is {top_k}, but there are {count} experts")
    return MoeConfig(num_experts=count, top_k=top_k, width=config.size(width_key), renormalise=renormalise, **more)


def mlps(config: HfConfig) -> list[str]:
    """Which MLP each layer has, by `mlp_only_layers` and `decoder_sparse_step`."""
    num_layers, step = config.size("num_hidden_layers"), config.size("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(isinstance(i, int) and 0 <= i < num_layers for i in dense):
        config.problem(f"mlp_only_layers is {dense!r}; a list of layers below {num_layers} is needed")
        dense = []
    return [DENSE if i in dense or (i + 1) % step else SPARSE for i in range(num_layers)]


def attention_layers(kinds: list[str]) -> tuple[Layer, ...]:
    """Layers of attention and an MLP of each of these kinds."""
    return tuple(Layer(ATTENTION, kind) for kind in kinds)


def decoder(config: HfConfig) -> DecoderConfig:
    """`norm_topk_prob` is true in published configs, and false where it is absent."""
    moe = experts(config, renormalise=config.flag("norm_topk_prob"))
    return qwen3.decoder(config, moe=moe, layers=attention_layers(mlps(config)))


def qwen2_moe(config: HfConfig) -> DecoderConfig:
    """Qwen2's attention, and an expert that every token has in common."""
    shared = config.size("shared_expert_intermediate_size")
    moe = experts(config, renormalise=config.flag("norm_topk_prob"), shared_width=shared)
    return qwen2.decoder(config, moe=moe, layers=attention_layers(mlps(config)))


def mixtral(config: HfConfig) -> DecoderConfig:
    """Llama's attention; every layer sparse; the weights of the chosen experts always sum to 1."""
    window, num_layers = config.get("sliding_window"), config.size("num_hidden_layers")
    windows = None if window is None else (config.size("sliding_window"),) * num_layers
    parts = ("w1", "w3", "w2")
    moe = experts(config, renormalise=True, width_key="intermediate_size", block="block_sparse_moe", parts=parts)
    return llama.sizes(config, windows=windows, moe=moe, layers=attention_layers([SPARSE] * num_layers))
