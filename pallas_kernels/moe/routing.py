"""Which experts a token goes to, and how much each counts: the contract that every route fills."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Route, Target, dispatch, gpu_route
from pallas_kernels.linear.api import Norm
from pallas_kernels.moe import reference


class Routed(NamedTuple):
    """The choice of each token, the greatest probability first."""

    expert: jax.Array  # [T, k] int32, of all devices' experts; their number for a token that is not valid
    weight: jax.Array  # [T, k] float32; 0 for a token that is not valid


ROUTES = (gpu_route("triton", "pallas_kernels.moe.triton_routing"), Route("reference", reference.route))


def route(
    x: jax.Array,
    router: jax.Array,
    layer: jax.Array,
    *,
    norm: Norm,
    top_k: int,
    renormalise: bool,
    target: Target,
    valid: jax.Array | None = None,
    counters: jax.Ref | None = None,
) -> Routed:
    """The top_k experts of each row of norm(x) [T, D] by the softmax of its product with router[layer], [X, D].

    Lowest index first among equals. Weights are their probabilities in float32, divided by their sum where
    `renormalise`. Rows that are not `valid` ([T] bool; None: all are) go nowhere. counters: as in `linear`.
    Source: Shazeer et al. 2017; Fedus et al. 2021 (softmax before the choice).
    """
    check(x, router, norm, top_k, valid)
    expert, weight = dispatch(
        "route",
        ROUTES,
        x,
        router,
        jnp.asarray(layer, jnp.int32),
        norm=norm,
        top_k=top_k,
        renormalise=renormalise,
        valid=valid,
        counters=counters,
        target=target,
    )
    return Routed(expert, weight)


def check(x: jax.Array, router: jax.Array, norm: Norm, top_k: int, valid: jax.Array | None) -> None:
    """ValueError, with the sizes, unless the arguments of `route` fit."""
    if x.ndim != 2 or router.ndim != 3 or router.shape[2] != x.shape[1]:
        raise ValueError(f"x {x.shape} [T, D] does not fit router {router.shape} [L, X, D]")
    if norm.weight.shape != (router.shape[0], x.shape[1]):
        raise ValueError(f"norm {norm.weight.shape} [L, D] does not fit router {router.shape} [L, X, D]")
    if not 1 <= top_k <= router.shape[1]:
        raise ValueError(f"top_k is {top_k}; there are {router.shape[1]} experts, of which 1 at least is chosen")
    if valid is not None and (valid.shape != x.shape[:1] or valid.dtype != bool):
        raise ValueError(f"valid {valid.dtype} {valid.shape} is not bool [T] of x {x.shape} [T, D]")
