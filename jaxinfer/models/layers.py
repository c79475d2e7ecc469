"""The pieces that models share, written for one device's shard. Where one is split, they sum."""

from __future__ import annotations

from collections.abc import Sequence

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
    over: str,
) -> jax.Array:
    """residual [T, D] + x [T, F] @ weight[layer].T + bias[layer], summed over the shards of F. weight [L, D, F].

    over: logical axis of F.
    """
    how = {"target": place.target, "counters": place.counters}
    axes = place.over(over)
    if not axes:
        return linear(x, weight, layer, bias=bias, residual=residual, **how)
    y = linear(x, weight, layer, **how)
    if bias is None:
        return place.sum(y, axes, residual)
    return residual + (place.sum(y, axes) + bias[layer])


def add_parts(residual: jax.Array, parts: Sequence[tuple[jax.Array, tuple[str, ...]]], place: Placement) -> jax.Array:
    """residual [T, D] + the results of these parts, each [T, D] and split over mesh axes of its own, by one sum.

    Over an axis of another part, devices have the same result, of which one counts.
    """
    axes = tuple(dict.fromkeys(axis for _, own in parts for axis in own))
    total = jnp.zeros_like(residual)
    for y, own in parts:
        others = tuple(axis for axis in axes if axis not in own)
        total += jnp.where(jax.lax.axis_index(others) == 0, y, 0) if others else y
    return place.sum(total, axes, residual) if axes else residual + total


def embed(tokens: jax.Array, table: jax.Array, place: Placement) -> jax.Array:
    """Rows [T, D] of a table [V, D] whose vocabulary may be sharded."""
    axes = place.over("vocab")
    if not axes:
        return table[tokens]
    local = tokens - jax.lax.axis_index(axes) * table.shape[0]
    mine = (local >= 0) & (local < table.shape[0])
    rows = table[jnp.clip(local, 0, table.shape[0] - 1)]
    return place.sum(jnp.where(mine[:, None], rows, 0), axes)


def unembed(x: jax.Array, norm: Norm, table: jax.Array, place: Placement) -> jax.Array:
    """Logits [R, V] in float32 of x [R, D], normalised, against a table [V, D] whose vocabulary may be sharded."""
    first = jnp.zeros((), jnp.int32)
    logits = linear(
        x, table[None], first, norm=norm, out_dtype=jnp.float32, target=place.target, counters=place.counters
    )
    axes = place.over("vocab")
    return place.gather(logits, axes, axis=1) if axes else logits
