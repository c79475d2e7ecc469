"""The pieces that models share, written for one device's shard. `tensor_axis` names the mesh axis; None: one device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

FLOAT32_SUMS = {
    "bfloat16": jax.lax.DotAlgorithmPreset.BF16_BF16_F32,
    "float16": jax.lax.DotAlgorithmPreset.F16_F16_F32,
}
"""How to multiply narrow numbers and sum the products in float32."""


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x [..., D] over the root of its mean square, times weight [D]. Normalised in float32, scaled in x's dtype.

    Source: Zhang and Sennrich 2019; rounding as in the published Llama and Qwen models.
    """
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight


def swiglu(x: jax.Array, gate_up: jax.Array, down: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """down(silu(gate x) * up x). x [T, D], gate_up [D, 2, F], down [F, D], bias of gate and up [2, F].

    The result of one shard of F: the sum over shards is the layer's output. Source: Shazeer 2020.
    """
    both = jnp.einsum("td,dcf->tcf", x, gate_up)
    if bias is not None:
        both = both + bias
    return jnp.dot(jax.nn.silu(both[:, 0]) * both[:, 1], down)


def psum(x: jax.Array, tensor_axis: str | None) -> jax.Array:
    """The sum of the shards' partial results."""
    return x if tensor_axis is None else jax.lax.psum(x, tensor_axis)


def embed(tokens: jax.Array, table: jax.Array, tensor_axis: str | None) -> jax.Array:
    """Rows [T, D] of a table [V, D] whose vocabulary may be sharded."""
    if tensor_axis is None:
        return table[tokens]
    local = tokens - jax.lax.axis_index(tensor_axis) * table.shape[0]
    mine = (local >= 0) & (local < table.shape[0])
    rows = table[jnp.clip(local, 0, table.shape[0] - 1)]
    return jax.lax.psum(jnp.where(mine[:, None], rows, 0), tensor_axis)


def unembed(x: jax.Array, table: jax.Array, tensor_axis: str | None) -> jax.Array:
    """Logits [R, V] in float32 of x [R, D] against a table [V, D] whose vocabulary may be sharded."""
    einsum = functools.partial(jnp.einsum, "rd,vd->rv", preferred_element_type=jnp.float32)
    # Named, the algorithm keeps XLA from converting the table to float32 for a single row: 1.5 GB for Qwen3-4B.
    named = functools.partial(einsum, precision=FLOAT32_SUMS.get(x.dtype.name))
    # XLA's CPU backend knows the algorithm of bfloat16, and refuses that of float16.
    logits = (
        jax.lax.platform_dependent(x, table, cpu=einsum, default=named) if x.dtype == jnp.float16 else named(x, table)
    )
    return logits if tensor_axis is None else jax.lax.all_gather(logits, tensor_axis, axis=1, tiled=True)
