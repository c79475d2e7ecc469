"""The pieces that models share, written for one device's shard. `tensor_axis` names the mesh axis; None: one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.models.model import Placement
from pallas_kernels.linear.api import Norm, linear


def add_product(
    residual: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    layer: jax.Array,
    place: Placement,
) -> jax.Array:
    """residual [T, D] + x [T, F] @ weight[layer].T + bias[layer], summed over the shards of F. weight [L, D, F]."""
    how = {"target": place.target, "counters": place.counters}
    if place.tensor_axis is None:
        return linear(x, weight, layer, bias=bias, residual=residual, **how)
    y = jax.lax.psum(linear(x, weight, layer, **how), place.tensor_axis)
    return residual + (y if bias is None else y + bias[layer])


def embed(tokens: jax.Array, table: jax.Array, tensor_axis: str | None) -> jax.Array:
    """Rows [T, D] of a table [V, D] whose vocabulary may be sharded."""
    if tensor_axis is None:
        return table[tokens]
    local = tokens - jax.lax.axis_index(tensor_axis) * table.shape[0]
    mine = (local >= 0) & (local < table.shape[0])
    rows = table[jnp.clip(local, 0, table.shape[0] - 1)]
    return jax.lax.psum(jnp.where(mine[:, None], rows, 0), tensor_axis)


def unembed(x: jax.Array, norm: Norm, table: jax.Array, place: Placement) -> jax.Array:
    """Logits [R, V] in float32 of x [R, D], normalised, against a table [V, D] whose vocabulary may be sharded."""
    first = jnp.zeros((), jnp.int32)
    logits = linear(
        x, table[None], first, norm=norm, out_dtype=jnp.float32, target=place.target, counters=place.counters
    )
    if place.tensor_axis is None:
        return logits
    return jax.lax.all_gather(logits, place.tensor_axis, axis=1, tiled=True)
