"""The dense decoder: grouped-query attention and a SwiGLU MLP around residual RMSNorms.

Llama, SmolLM2, Qwen2 and Qwen3 are this with or without biases, QK-norm and sliding windows.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models import layers, rope
from jaxinfer.models.model import Attend, CacheShape, Model, Placement
from jaxinfer.params import Params, ParamSpec, Source, Specs
from pallas_kernels.kv_write.api import HeadNorms
from pallas_kernels.linear.api import Norm, linear

NO_WINDOW = 2**30
"""Window of a full-attention layer in a model whose other layers slide: longer than any context."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes by the axis letters of the shape comments, and what sets the family members apart."""

    num_layers: int  # L
    hidden: int  # D
    num_heads: int  # H
    num_kv_heads: int  # K
    head_width: int  # E
    mlp_width: int  # F
    vocab_rows: int  # V
    max_model_len: int  # tokens
    norm_eps: float
    rope: rope.Rope
    tied_head: bool  # the head is the embedding table
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm of every query and key head, before RoPE
    windows: tuple[int | None, ...] | None = None  # tokens that each layer sees, itself included; None: all

    @property
    def group(self) -> int:
        """Query heads per KV head, G."""
        return self.num_heads // self.num_kv_heads


def build(architecture: str, config: DecoderConfig) -> Model:
    """The model of a config."""
    return Model(
        architecture=architecture,
        specs=_specs(config),
        cache=CacheShape(config.num_layers, config.num_kv_heads, config.head_width),
        num_heads=config.num_heads,
        vocab_rows=config.vocab_rows,
        max_model_len=config.max_model_len,
        forward=functools.partial(_forward, config),
        logits=functools.partial(_logits, config),
        ignored=functools.partial(_ignored, config),
    )


def _specs(c: DecoderConfig) -> Specs:
    """Weights are (out, in) as published: kernels read the row of an output in one run.

    Query, key and value rows lie together per KV head, [K, G + 2, E], so that a shard of K is a whole attention.
    """
    group, width = c.group, c.head_width
    stacked = functools.partial(ParamSpec, layers=range(c.num_layers))
    attention, mlp = "model.layers.{layer}.self_attn.", "model.layers.{layer}.mlp."
    q_rows, kv_rows = c.num_heads * width, c.num_kv_heads * width

    def by_kv_head(tensors):
        """[K, G + 2, E, ...] of published q [H * E, ...], k and v [K * E, ...]."""
        rest = tensors[0].shape[1:]
        parts = (t.reshape(c.num_kv_heads, -1, width, *rest) for t in tensors)
        return np.concatenate(list(parts), axis=1)

    def qkv(suffix: str, rest: tuple[int, ...]) -> tuple[Source, ...]:
        rows = (("q", q_rows), ("k", kv_rows), ("v", kv_rows))
        return tuple(Source(f"{attention}{n}_proj.{suffix}", (r, *rest)) for n, r in rows)

    def gate_up(suffix: str, rest: tuple[int, ...]) -> tuple[Source, ...]:
        return tuple(Source(f"{mlp}{n}_proj.{suffix}", (c.mlp_width, *rest)) for n in ("gate", "up"))

    def norm(name: str, size: int) -> ParamSpec:
        return stacked(shape=(size,), axes=(None,), sources=(Source(name, (size,)),), init="ones")

    def bias(shape, axes, sources, pack=None) -> ParamSpec:
        extra = {} if pack is None else {"pack": pack}
        return stacked(shape=shape, axes=axes, sources=sources, init="zeros", **extra)

    specs = {
        "embed": ParamSpec(
            shape=(c.vocab_rows, c.hidden),
            axes=("vocab", None),
            sources=(Source("model.embed_tokens.weight", (c.vocab_rows, c.hidden)),),
        ),
        "final_norm": ParamSpec(
            shape=(c.hidden,), axes=(None,), sources=(Source("model.norm.weight", (c.hidden,)),), init="ones"
        ),
        "attention_norm": norm("model.layers.{layer}.input_layernorm.weight", c.hidden),
        "qkv": stacked(
            shape=(c.num_kv_heads, group + 2, width, c.hidden),
            axes=("kv_heads", None, None, None),
            sources=qkv("weight", (c.hidden,)),
            pack=by_kv_head,
        ),
        "out": stacked(
            shape=(c.hidden, c.num_kv_heads, group, width),
            axes=(None, "kv_heads", None, None),
            sources=(Source(attention + "o_proj.weight", (c.hidden, q_rows)),),
            pack=lambda tensors: tensors[0].reshape(c.hidden, c.num_kv_heads, group, width),
        ),
        "mlp_norm": norm("model.layers.{layer}.post_attention_layernorm.weight", c.hidden),
        "gate_up": stacked(
            shape=(2, c.mlp_width, c.hidden),
            axes=(None, "mlp", None),
            sources=gate_up("weight", (c.hidden,)),
            pack=np.stack,
        ),
        "down": stacked(
            shape=(c.hidden, c.mlp_width),
            axes=(None, "mlp"),
            sources=(Source(mlp + "down_proj.weight", (c.hidden, c.mlp_width)),),
        ),
    }
    if not c.tied_head:
        specs["head"] = ParamSpec(
            shape=(c.vocab_rows, c.hidden),
            axes=("vocab", None),
            sources=(Source("lm_head.weight", (c.vocab_rows, c.hidden)),),
        )
    if c.qkv_bias:
        shape = (c.num_kv_heads, group + 2, width)
        specs["qkv_bias"] = bias(shape, ("kv_heads", None, None), qkv("bias", ()), by_kv_head)
    if c.out_bias:
        specs["out_bias"] = bias((c.hidden,), (None,), (Source(attention + "o_proj.bias", (c.hidden,)),))
    if c.mlp_bias:
        specs["gate_up_bias"] = bias((2, c.mlp_width), (None, "mlp"), gate_up("bias", ()), np.stack)
        specs["down_bias"] = bias((c.hidden,), (None,), (Source(mlp + "down_proj.bias", (c.hidden,)),))
    if c.qk_norm:
        specs["q_norm"] = norm(attention + "q_norm.weight", width)
        specs["k_norm"] = norm(attention + "k_norm.weight", width)
    return specs


def _ignored(c: DecoderConfig, name: str) -> bool:
    """RoPE tables that old checkpoints carry, and a head that is stored although it is tied."""
    return name.endswith("rotary_emb.inv_freq") or (c.tied_head and name == "lm_head.weight")


def _forward(
    c: DecoderConfig, params: Params, tokens: jax.Array, positions: jax.Array, attend: Attend, place: Placement
) -> jax.Array:
    num_kv_heads = params["qkv"].shape[1]
    qkv_weight = params["qkv"].reshape(c.num_layers, -1, c.hidden)
    out_weight = params["out"].reshape(c.num_layers, c.hidden, -1)
    qkv_bias = params["qkv_bias"].reshape(c.num_layers, -1) if c.qkv_bias else None
    norms = HeadNorms(params["q_norm"], params["k_norm"], c.norm_eps) if c.qk_norm else None
    windows = None if c.windows is None else jnp.asarray([w or NO_WINDOW for w in c.windows], jnp.int32)
    how = {"target": place.target, "counters": place.counters}
    rotary = rope.angles(c.rope, positions)

    def block(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        layer, x = state
        norm = Norm(params["attention_norm"], c.norm_eps)
        qkv = linear(x, qkv_weight, layer, norm=norm, bias=qkv_bias, **how)
        qkv = qkv.reshape(-1, num_kv_heads, c.group + 2, c.head_width)
        window = None if windows is None else windows[layer]
        a = attend(qkv, rotary, layer, norms=norms, scale=c.head_width**-0.5, window=window)
        a = a.reshape(a.shape[0], -1)
        x = layers.add_product(x, a, out_weight, params.get("out_bias"), layer, place)
        norm = Norm(params["mlp_norm"], c.norm_eps)
        gate_up, bias = params["gate_up"], params.get("gate_up_bias")
        h = linear(x, gate_up, layer, norm=norm, bias=bias, gated=True, **how)
        x = layers.add_product(x, h, params["down"], params.get("down_bias"), layer, place)
        return layer + 1, x

    # Not a scan: XLA folds a layer's slice into the product that reads it only where the loop's own counter picks it.
    state = jnp.zeros((), jnp.int32), layers.embed(tokens, params["embed"], place.tensor_axis)
    return jax.lax.while_loop(lambda state: state[0] < c.num_layers, block, state)[1]


def _logits(c: DecoderConfig, params: Params, x: jax.Array, place: Placement) -> jax.Array:
    table = params["embed" if c.tied_head else "head"]
    return layers.unembed(x, Norm(params["final_norm"][None], c.norm_eps), table, place)
