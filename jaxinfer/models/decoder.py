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
from jaxinfer.models.model import Attend, CacheShape, Model
from jaxinfer.params import Params, ParamSpec, Source, Specs

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
        vocab_rows=config.vocab_rows,
        max_model_len=config.max_model_len,
        forward=functools.partial(_forward, config),
        logits=functools.partial(_logits, config),
        ignored=functools.partial(_ignored, config),
    )


def _specs(c: DecoderConfig) -> Specs:
    """Query, key and value rows lie together per KV head, [K, G + 2, E], so that a shard of K is a whole attention."""
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
            shape=(c.hidden, c.num_kv_heads, group + 2, width),
            axes=(None, "kv_heads", None, None),
            sources=qkv("weight", (c.hidden,)),
            pack=lambda tensors: np.moveaxis(by_kv_head(tensors), -1, 0),
        ),
        "out": stacked(
            shape=(c.num_kv_heads, group, width, c.hidden),
            axes=("kv_heads", None, None, None),
            sources=(Source(attention + "o_proj.weight", (c.hidden, q_rows)),),
            pack=lambda tensors: tensors[0].T.reshape(c.num_kv_heads, group, width, c.hidden),
        ),
        "mlp_norm": norm("model.layers.{layer}.post_attention_layernorm.weight", c.hidden),
        "gate_up": stacked(
            shape=(c.hidden, 2, c.mlp_width),
            axes=(None, None, "mlp"),
            sources=gate_up("weight", (c.hidden,)),
            pack=lambda tensors: np.stack([t.T for t in tensors], axis=1),
        ),
        "down": stacked(
            shape=(c.mlp_width, c.hidden),
            axes=("mlp", None),
            sources=(Source(mlp + "down_proj.weight", (c.hidden, c.mlp_width)),),
            pack=lambda tensors: tensors[0].T,
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
    c: DecoderConfig, params: Params, tokens: jax.Array, positions: jax.Array, attend: Attend, tensor_axis: str | None
) -> jax.Array:
    x = layers.embed(tokens, params["embed"], tensor_axis)
    cos, sin = rope.angles(c.rope, positions, x.dtype)
    outside = {"embed", "final_norm", "head"}
    per_layer = {name: value for name, value in params.items() if name not in outside}
    indices = jnp.arange(c.num_layers, dtype=jnp.int32)
    windows = None if c.windows is None else jnp.asarray([w or NO_WINDOW for w in c.windows], jnp.int32)

    def block(x: jax.Array, scanned) -> tuple[jax.Array, None]:
        p, layer, window = scanned
        h = layers.rms_norm(x, p["attention_norm"], c.norm_eps)
        qkv = jnp.einsum("td,dkge->tkge", h, p["qkv"])
        if c.qkv_bias:
            qkv = qkv + p["qkv_bias"]
        q, k, v = jnp.split(qkv, (c.group, c.group + 1), axis=2)  # [T, K, G | 1 | 1, E]
        q, k, v = (a.reshape(a.shape[0], -1, c.head_width) for a in (q, k, v))
        if c.qk_norm:
            q = layers.rms_norm(q, p["q_norm"], c.norm_eps)
            k = layers.rms_norm(k, p["k_norm"], c.norm_eps)
        q, k = rope.rotate(q, cos, sin), rope.rotate(k, cos, sin)
        a = attend(q, k, v, layer, scale=c.head_width**-0.5, window=window)
        out = layers.psum(jnp.dot(a.reshape(a.shape[0], -1), p["out"].reshape(-1, c.hidden)), tensor_axis)
        x = x + (out + p["out_bias"] if c.out_bias else out)
        h = layers.rms_norm(x, p["mlp_norm"], c.norm_eps)
        down = layers.psum(layers.swiglu(h, p["gate_up"], p["down"], p.get("gate_up_bias")), tensor_axis)
        return x + (down + p["down_bias"] if c.mlp_bias else down), None

    x, _ = jax.lax.scan(block, x, (per_layer, indices, windows))
    return x


def _logits(c: DecoderConfig, params: Params, x: jax.Array, tensor_axis: str | None) -> jax.Array:
    x = layers.rms_norm(x, params["final_norm"], c.norm_eps)
    return layers.unembed(x, params["embed" if c.tied_head else "head"], tensor_axis)
