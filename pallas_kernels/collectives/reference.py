"""XLA's own collectives. Any backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

from pallas_kernels.dispatch import Target

if TYPE_CHECKING:
    from pallas_kernels.collectives.api import Peers


def all_reduce(
    x: jax.Array, axes: tuple[str, ...], *, residual: jax.Array | None, peers: Peers | None, target: Target
) -> jax.Array:
    """The contract is `api.all_reduce`."""
    del peers, target
    y = jax.lax.psum(x, axes)
    return y if residual is None else residual + y


def all_gather(x: jax.Array, axes: tuple[str, ...], *, axis: int, peers: Peers | None, target: Target) -> jax.Array:
    """The contract is `api.all_gather`."""
    del peers, target
    return jax.lax.all_gather(x, axes, axis=axis, tiled=True)


def reduce_scatter(x: jax.Array, axes: tuple[str, ...], *, peers: Peers | None, target: Target) -> jax.Array:
    """The contract is `api.reduce_scatter`."""
    del peers, target
    return jax.lax.psum_scatter(x, axes, tiled=True)
