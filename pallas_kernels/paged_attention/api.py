"""Attention of a step's tokens over a paged KV cache: the contract that every route fills."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Route, Target, dispatch, gpu_route
from pallas_kernels.dispatch import plan as plan_routes
from pallas_kernels.paged_attention import reference


class PagedRows(NamedTuple):
    """Where the rows of a step lie. Rows that pad a bucket have length 0; tokens that pad it belong to no row.

    All int32. R rows, T tokens, W pages at most per row.
    """

    page_table: jax.Array  # [R, W] page of each run of S positions; entries past a row's length are never used
    query_start: jax.Array  # [R] index in T of the row's first token; tokens of a row are consecutive, rows in order
    query_len: jax.Array  # [R] tokens of the row in this step
    context_len: jax.Array  # [R] tokens of the row that are in the cache already
    token_row: jax.Array  # [T] row of each token (any row for padding)
    token_position: jax.Array  # [T] position of each token in its sequence (0 for padding)
    token_page: jax.Array  # [T] page that holds the token's key and value (page 0, which no row owns, for padding)


Plan = Mapping[str, Any]
"""By route, what it prepared."""

ROUTES = (
    gpu_route("mosaic_gpu", "pallas_kernels.paged_attention.mosaic_gpu"),
    gpu_route("triton", "pallas_kernels.paged_attention.triton"),
    Route("reference", reference.run),
)


def plan(
    rows: PagedRows, pools: tuple[jax.Ref, jax.Ref], *, num_heads: int, max_query_len: int, target: Target
) -> Plan:
    """What the layers of a step have in common; for outside of the loop over them."""
    return plan_routes(ROUTES, rows, pools, num_heads=num_heads, max_query_len=max_query_len, target=target)


def paged_attention(
    q: jax.Array,
    pools: tuple[jax.Ref, jax.Ref],
    layer: jax.Array,
    rows: PagedRows,
    *,
    scale: float,
    max_query_len: int,
    target: Target,
    window: jax.Array | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    counters: jax.Ref | None = None,
    plan: Plan | None = None,
) -> jax.Array:
    """Attends to all that each row has in layer `layer` of the pools, the step's own tokens among it.

    q [T, H, E], H a multiple of K: query head h reads key-value head h // (H // K); pools = Refs of [L, P, S, K, E]
    each, only read; layer: int32 scalar array. Token i of a row sees positions p with 0 <= position_i - p, and
    position_i - p < window when a window (an int32 scalar array) is given. Scores are (q . k) * scale; with a soft cap
    c they become c * tanh(score / c). The softmax is float32; sinks, float32 [H], are one more score of each head that
    takes weight and has no value. max_query_len: no row has more tokens than this in the step; 1 means that token t is
    row t. What the pages hold past a row's tokens may be anything.
    counters: int32 zeros, and zeros again afterwards, by which programs that share a row agree who is last; without
    them no row's context is split. plan: of these rows and pools, by `plan`; without it every call makes its own.
    Returns [T, H, E] in q's dtype; rows of padding tokens are finite and meaningless.
    Source: Vaswani et al. 2017, eq. 1; pages as in Kwon et al. 2023 (PagedAttention); Gemma Team 2024 (soft cap);
    Xiao et al. 2023 (sinks).
    """
    k_pool, v_pool = pools
    if k_pool.shape != v_pool.shape or q.ndim != 3 or q.shape[2] != k_pool.shape[4] or q.shape[1] % k_pool.shape[3]:
        raise ValueError(f"q {q.shape} [T, H, E] does not fit pools {k_pool.shape} and {v_pool.shape} [L, P, S, K, E]")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"sinks {sinks.shape} [H] do not fit q {q.shape} [T, H, E]")
    return dispatch(
        "paged_attention",
        ROUTES,
        q,
        pools,
        jnp.asarray(layer, jnp.int32),
        rows,
        scale=scale,
        max_query_len=max_query_len,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        counters=counters,
        plan=plan or {},
        target=target,
    )
