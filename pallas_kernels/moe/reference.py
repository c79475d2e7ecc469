"""Layers of experts in plain jax.numpy. Any backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Target
from pallas_kernels.linear.reference import of_layer, product, rms_norm

if TYPE_CHECKING:
    from pallas_kernels.linear.api import Norm
    from pallas_kernels.moe.api import Experts


def route(
    x: jax.Array,
    router: jax.Array,
    layer: jax.Array,
    *,
    norm: Norm,
    top_k: int,
    renormalise: bool,
    valid: jax.Array | None,
    counters: jax.Ref | None,
    target: Target,
) -> tuple[jax.Array, jax.Array]:
    """The contract is `routing.route`."""
    del counters
    h = rms_norm(x, of_layer(norm.weight, layer), norm.eps, norm.offset)
    return choose(h, of_layer(router, layer), top_k=top_k, renormalise=renormalise, valid=valid, target=target)


def choose(
    h: jax.Array, router: jax.Array, *, top_k: int, renormalise: bool, valid: jax.Array | None, target: Target
) -> tuple[jax.Array, jax.Array]:
    """Experts and weights, [T, k] each, of rows h [T, D] by router [X, D]."""
    logits = product(h, router, jnp.dtype(jnp.float32), target)
    # By logits: what the softmax rounds to equal probabilities is still in order.
    _, expert = jax.lax.top_k(logits, top_k)
    weight = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), expert, axis=-1)
    if renormalise:
        weight = weight / weight.sum(-1, keepdims=True)
    if valid is not None:
        expert, weight = jnp.where(valid[:, None], expert, router.shape[0]), jnp.where(valid[:, None], weight, 0)
    return expert.astype(jnp.int32), weight


def run(
    x: jax.Array,
    experts: Experts,
    layer: jax.Array,
    *,
    norm: Norm,
    top_k: int,
    renormalise: bool,
    residual: jax.Array | None,
    first_expert: jax.Array,
    valid: jax.Array | None,
    counters: jax.Ref | None,
    target: Target,
) -> jax.Array:
    """The contract is `api.moe`. Reads an expert at a time: of every choice where they are few, else each for all rows.

    Which of the two depends on the number of rows; they differ by the order of the sum over a row's experts.
    """
    del counters
    tokens, num_experts = x.shape[0], experts.gate_up.shape[1]
    h = rms_norm(x, of_layer(norm.weight, layer), norm.eps, norm.offset)
    router = of_layer(experts.router, layer)
    expert, weight = choose(h, router, top_k=top_k, renormalise=renormalise, valid=valid, target=target)
    place = expert - first_expert  # of this device's experts
    here = (place >= 0) & (place < num_experts)

    def of_one(rows: jax.Array, index: jax.Array) -> jax.Array:
        """[N, D] float32 of rows [N, D] through one expert."""
        gate_up, down = (_of_expert(stacked, layer, index) for stacked in (experts.gate_up, experts.down))
        wide = jnp.dtype(jnp.float32)
        y = product(rows, gate_up, wide, target)
        return product((jax.nn.silu(y[:, 0]) * y[:, 1]).astype(x.dtype), down, wide, target)

    def add_choice(total: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
        token, choice = index // top_k, index % top_k
        row = jax.lax.dynamic_slice_in_dim(h, token, 1)
        y = of_one(row, jnp.clip(place[token, choice], 0, num_experts - 1))
        return total.at[token].add(jnp.where(here[token, choice], weight[token, choice] * y[0], 0)), None

    def add_expert(total: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
        chosen = place == index
        share = jnp.where(chosen, weight, 0).sum(-1, keepdims=True)
        return total + jnp.where(chosen.any(-1, keepdims=True), share * of_one(h, index), 0), None

    total = jnp.zeros(x.shape, jnp.float32)
    few = tokens * top_k < num_experts
    total, _ = jax.lax.scan(
        *(add_choice, total, jnp.arange(tokens * top_k)) if few else (add_expert, total, jnp.arange(num_experts))
    )
    if residual is not None:
        total = residual + total
    return total.astype(x.dtype)


def _of_expert(stacked: jax.Array, layer: jax.Array, index: jax.Array) -> jax.Array:
    """stacked[layer, index] by one slice, which a loop over experts reads in place."""
    rest = stacked.shape[2:]
    zeros = [jnp.zeros((), jnp.int32)] * len(rest)
    return jax.lax.dynamic_slice(stacked, (layer, index.astype(jnp.int32), *zeros), (1, 1, *rest)).reshape(rest)
