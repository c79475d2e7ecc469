"""QK-norm, RoPE and the write to the KV cache in plain jax.numpy. Any backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Target
from pallas_kernels.linear.reference import rms_norm

if TYPE_CHECKING:
    from pallas_kernels.kv_write.api import HeadNorms


def run(
    qkv: jax.Array,
    rotary: tuple[jax.Array, jax.Array],
    pools: tuple[jax.Ref, jax.Ref],
    layer: jax.Array,
    places: tuple[jax.Array, jax.Array],
    *,
    norms: HeadNorms | None,
    target: Target,
) -> jax.Array:
    """The contract is `api.kv_write`; rounds after the norm and in the rotation as published models do."""
    del target
    q, k, v = heads(qkv, rotary, layer, norms)
    page, position = places
    for pool, new in zip(pools, (k, v), strict=True):
        # The whole pool as one value: an indexed write to a Ref would scatter element by element.
        pool[...] = pool[...].at[layer, page, position % pool.shape[2]].set(new.astype(pool.dtype))
    return q


def heads(
    qkv: jax.Array, rotary: tuple[jax.Array, jax.Array], layer: jax.Array, norms: HeadNorms | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [T, K * G, E], keys and values [T, K, E] of qkv [T, K, G + 2, E], normalised and rotated."""
    tokens, width = qkv.shape[0], qkv.shape[3]
    q, k, v = qkv[:, :, :-2].reshape(tokens, -1, width), qkv[:, :, -2], qkv[:, :, -1]
    if norms is not None:
        q = rms_norm(q, norms.q[layer], norms.eps, norms.offset)
        k = rms_norm(k, norms.k[layer], norms.eps, norms.offset)
    cos, sin = (a[:, None].astype(qkv.dtype) for a in rotary)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates channel pairs (i, i + E / 2) of x [T, N, E] by cos and sin [T, 1, E / 2]."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
