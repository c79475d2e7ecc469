"""A layer's product with its neighbours, norm before it and gate or residual after it: what every route fills."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Route, Target, dispatch, gpu_route
from pallas_kernels.linear import reference


class Norm(NamedTuple):
    """RMSNorm of the input, of all layers."""

    weight: jax.Array  # [L, D]
    eps: float
    offset: float = 0.0  # added to the weight


ROUTES = (
    gpu_route("triton", "pallas_kernels.linear.triton"),
    gpu_route("cublas", "pallas_kernels.linear.cublas"),
    Route("reference", reference.run),
)


def linear(
    x: jax.Array,
    weight: jax.Array,
    layer: jax.Array,
    *,
    target: Target,
    norm: Norm | None = None,
    bias: jax.Array | None = None,
    gated: bool = False,
    residual: jax.Array | None = None,
    out_dtype: jnp.dtype | None = None,
    counters: jax.Ref | None = None,
) -> jax.Array:
    """residual + f(norm(x) @ weight[layer].T + bias[layer]), [M, N]; f is the identity, or SwiGLU where gated.

    x [M, D]; weight [L, N, D], or [L, 2, N, D] with the rows of the gate, then those of what it lets through, where
    gated: silu(gate) * up. bias [L, N] or [L, 2, N]; residual [M, N] in x's dtype; layer: int32 scalar array.
    norm: of x, in float32. The result is in x's dtype or out_dtype; sums are float32.
    counters: int32 zeros, and zeros again afterwards, by which programs that share a result agree who is last.
    Source: Zhang and Sennrich 2019 (RMSNorm), Shazeer 2020 (SwiGLU).
    """
    rows = (2,) if gated else ()
    if x.ndim != 2 or weight.ndim != 3 + len(rows) or weight.shape[-1] != x.shape[1] or weight.shape[1:-2] != rows:
        raise ValueError(f"x {x.shape} [M, D] does not fit weight {weight.shape}, gated: {gated}")
    if residual is not None and residual.shape != (x.shape[0], weight.shape[-2]):
        raise ValueError(f"residual {residual.shape} [M, N] does not fit x {x.shape} and weight {weight.shape}")
    return dispatch(
        "linear",
        ROUTES,
        x,
        weight,
        jnp.asarray(layer, jnp.int32),
        norm=norm,
        bias=bias,
        gated=gated,
        residual=residual,
        out_dtype=jnp.dtype(out_dtype or x.dtype),
        counters=counters,
        target=target,
    )
