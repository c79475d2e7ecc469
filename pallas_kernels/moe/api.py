"""A layer of experts with the norm before it and the residual after it: what every route fills."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Route, Target, dispatch, gpu_route
from pallas_kernels.linear.api import Norm
from pallas_kernels.moe import reference
from pallas_kernels.moe.routing import Routed, check, route

__all__ = ["Experts", "Routed", "moe", "route"]


class Experts(NamedTuple):
    """Weights of all layers. X experts on this device, XG on all; I is their width."""

    router: jax.Array  # [L, XG, D]
    gate_up: jax.Array  # [L, X, 2, I, D]: the rows of the gate, then those of what it lets through
    down: jax.Array  # [L, X, D, I]


ROUTES = (gpu_route("triton", "pallas_kernels.moe.triton"), Route("reference", reference.run))


def moe(
    x: jax.Array,
    experts: Experts,
    layer: jax.Array,
    *,
    norm: Norm,
    top_k: int,
    renormalise: bool,
    target: Target,
    residual: jax.Array | None = None,
    first_expert: jax.Array | int = 0,
    valid: jax.Array | None = None,
    counters: jax.Ref | None = None,
) -> jax.Array:
    """residual + sum over the chosen experts e of weight_e * down_e(silu(gate_e h) * up_e h), h = norm(x): [T, D].

    x [T, D]; layer: int32 scalar array; choices and weights are those of `route`. Experts [first_expert,
    first_expert + X) are on this device, the others add nothing: the caller sums over devices. residual [T, D] in x's
    dtype, that of the result; sums are float32. Rows that are not `valid` ([T] bool; None: all are) read no expert and
    result in their residual, or 0. counters: int32 zeros, and zeros again afterwards, as in `linear`.
    Source: Shazeer et al. 2017 (experts), Shazeer 2020 (SwiGLU), Zhang and Sennrich 2019 (RMSNorm).
    """
    check(x, experts.router, norm, top_k, valid)
    num_layers, num_all, width = experts.router.shape
    parts, found = experts.gate_up.shape, experts.down.shape
    if len(parts) != 5 or parts[:1] + parts[2::2] != (num_layers, 2, width):
        raise ValueError(f"gate_up {parts} [L, X, 2, I, D] does not fit router {experts.router.shape} [L, XG, D]")
    if found != (num_layers, parts[1], width, parts[3]):
        raise ValueError(f"down {found} [L, X, D, I] does not fit gate_up {parts} [L, X, 2, I, D]")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual {residual.shape} does not fit x {x.shape} [T, D]")
    last = num_all - parts[1]
    if last < 0 or (isinstance(first_expert, int) and not 0 <= first_expert <= last):
        raise ValueError(f"experts {first_expert} to {first_expert} + {parts[1]} are not among the router's {num_all}")
    return dispatch(
        "moe",
        ROUTES,
        x,
        experts,
        jnp.asarray(layer, jnp.int32),
        norm=norm,
        top_k=top_k,
        renormalise=renormalise,
        residual=residual,
        first_expert=jnp.asarray(first_expert, jnp.int32),
        valid=valid,
        counters=counters,
        target=target,
    )
