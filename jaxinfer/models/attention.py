"""The attention block: norm, queries, keys and values, attention over the cache, and the way back to the residual."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models import layers
from jaxinfer.models.config import ATTENTION, DecoderConfig
from jaxinfer.models.model import Attend, Placement
from jaxinfer.params import Params, ParamSpec, Source, Specs, Whole, norm_spec
from pallas_kernels.kv_write.api import HeadNorms
from pallas_kernels.linear.api import Norm, linear

NO_WINDOW = 2**30
"""Window of a full-attention layer in a model whose other layers slide: longer than any context."""


def specs(c: DecoderConfig) -> Specs:
    """Weights are (out, in) as published: kernels read the row of an output in one run.

    Query, key and value rows lie together per KV head, [K, G + 2, E], so that a shard of K is a whole attention; with
    an output gate that of each query follows, [K, G + 2 + G, E].
    """
    group, width, kv_heads, copies = c.group, c.head_width, c.pool_heads, c.kv_copies
    numbers = c.layers_with(ATTENTION)
    stacked = functools.partial(ParamSpec, layers=numbers)
    part = c.prefix + "layers.{layer}.self_attn."
    q_rows, kv_rows = c.num_heads * width * (2 if c.output_gate else 1), c.num_kv_heads * width
    rows, order = group + 2 + (group if c.output_gate else 0), channel_order(c)

    def qkv(suffix: str, rest: tuple[int, ...]) -> tuple[Source, ...]:
        rows = (("q", q_rows), ("k", kv_rows), ("v", kv_rows))
        return tuple(Source(f"{part}{n}_proj.{suffix}", (r, *rest)) for n, r in rows)

    def by_kv_head(tensors: Sequence[np.ndarray]) -> np.ndarray:
        """[K, G + 2, E, ...] of published q, k and v."""
        rest = tensors[0].shape[1:]
        # A head's gate follows its query.
        q, *gate = np.moveaxis(tensors[0].reshape(kv_heads, group, -1, width, *rest), 2, 0)
        k, v = (t.reshape(c.num_kv_heads, 1, width, *rest).repeat(copies, axis=0) for t in tensors[1:])
        return np.concatenate([q[:, :, order], k[:, :, order], v, *gate], axis=1)

    out_weight = Source(part + "o_proj.weight", (c.hidden, c.num_heads * width))
    found: dict[str, ParamSpec] = {
        "attention_norm": norm_spec(
            c.prefix + "layers.{layer}.input_layernorm.weight", c.hidden, numbers, offset=c.norm_offset
        ),
        "qkv": stacked(
            shape=(kv_heads, rows, width, c.hidden),
            axes=("kv_heads", None, None, None),
            sources=qkv("weight", (c.hidden,)),
            pack=by_kv_head,
            whole=_whole(c, 0, width, c.hidden, shared=2, gates=c.output_gate),
        ),
        "out": stacked(
            shape=(c.hidden, kv_heads, group, width),
            axes=(None, "kv_heads", None, None),
            sources=(out_weight,),
            pack=lambda tensors: tensors[0].reshape(c.hidden, kv_heads, group, width),
            whole=_whole(c, 1, width),
        ),
    }
    if c.qkv_bias:
        found["qkv_bias"] = stacked(
            shape=(kv_heads, rows, width),
            axes=("kv_heads", None, None),
            sources=qkv("bias", ()),
            pack=by_kv_head,
            whole=_whole(c, 0, width, shared=2, gates=c.output_gate),
            init="zeros",
        )
    if c.out_bias:
        found["out_bias"] = stacked(
            shape=(c.hidden,), axes=(None,), sources=(Source(part + "o_proj.bias", (c.hidden,)),), init="zeros"
        )
    if c.qk_norm:
        for name in ("q_norm", "k_norm"):
            found[name] = norm_spec(
                f"{part}{name}.weight", width, numbers, offset=c.norm_offset, pack=lambda tensors: tensors[0][order]
            )
    return found


def _whole(c: DecoderConfig, axis: int, *rest: int, gates: bool = False, shared: int = 0) -> Whole | None:
    """Of a parameter of one layer in which K is dimension `axis`, before [G + shared, *rest], or
    [G + shared + G, *rest] with gates, where devices share KV heads: a head's queries and gates are shared out, the
    rows between copied."""
    if c.kv_copies == 1:
        return None
    group = c.num_heads // c.num_kv_heads
    ends = (group, group + shared)
    shape = (c.hidden,) * axis + (c.num_kv_heads, ends[1] + (group if gates else 0), *rest)

    def spread(array: jax.Array) -> jax.Array:
        """[L, *shape] with K times the copies."""
        at = 1 + axis
        before, after = array.shape[:at], array.shape[at + 2 :]
        queries, between, gates = jnp.split(array, ends, axis=at + 1)
        queries, gates = (
            t.reshape(*before, c.pool_heads, t.shape[at + 1] // c.kv_copies, *after) for t in (queries, gates)
        )
        return jnp.concatenate([queries, jnp.repeat(between, c.kv_copies, axis=at), gates], axis=at + 1)

    return Whole(shape, spread)


def channel_order(c: DecoderConfig) -> np.ndarray:
    """Where each channel of a query or key head comes from, [E].

    Kernels rotate channel i with channel i + E / 2. Where the published model rotates only the first R channels, i
    with i + R / 2, they are spread so that their partners are in the other half; dot products do not notice.
    """
    turned, half = len(c.rope.inverse_frequencies), c.head_width // 2
    channels = np.arange(c.head_width)
    first, second, rest = channels[:turned], channels[turned : 2 * turned], channels[2 * turned :]
    return np.concatenate([first, rest[: half - turned], second, rest[half - turned :]])


def block(
    c: DecoderConfig, params: Params, attend: Attend, rotary: tuple[jax.Array, jax.Array], place: Placement
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A function of x [T, D] and the number of an attention layer among its like: x plus its attention."""
    num_layers, num_kv_heads = params["qkv"].shape[:2]
    qkv_weight = params["qkv"].reshape(num_layers, -1, c.hidden)
    out_weight = params["out"].reshape(num_layers, c.hidden, -1)
    qkv_bias = params["qkv_bias"].reshape(num_layers, -1) if c.qkv_bias else None
    heads = HeadNorms(params["q_norm"], params["k_norm"], c.norm_eps, c.norm_offset) if c.qk_norm else None
    windows = None if c.windows is None else jnp.asarray([w or NO_WINDOW for w in c.windows], jnp.int32)
    if windows is not None and (axes := place.over("layers")):
        windows = jax.lax.dynamic_slice(windows, (jax.lax.axis_index(axes) * num_layers,), (num_layers,))
    norm = Norm(params["attention_norm"], c.norm_eps, c.norm_offset)
    how = {"target": place.target, "counters": place.counters}

    def run(x: jax.Array, layer: jax.Array) -> jax.Array:
        qkv = linear(x, qkv_weight, layer, norm=norm, bias=qkv_bias, **how)
        qkv = qkv.reshape(x.shape[0], num_kv_heads, -1, c.head_width)
        qkv, gate = qkv[:, :, : c.group + 2], qkv[:, :, c.group + 2 :]
        window = None if windows is None else windows[layer]
        a = attend(qkv, rotary, layer, norms=heads, scale=c.head_width**-0.5, window=window)
        a = a.reshape(x.shape[0], -1)
        if c.output_gate:
            a = (a * jax.nn.sigmoid(gate.reshape(a.shape).astype(jnp.float32))).astype(a.dtype)
        return layers.add_product(x, a, out_weight, params.get("out_bias"), layer, place, "kv_heads")

    return run
