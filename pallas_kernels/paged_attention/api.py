"""Attention of a step's tokens over a paged KV cache: the contract that every route fills."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Route, dispatch
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
    token_page: jax.Array  # [T] page that the token's key and value go to (page 0, which no row owns, for padding)


def paged_attention(
    q: jax.Array,
    new_kv: tuple[jax.Array, jax.Array],
    pools: tuple[jax.Ref, jax.Ref],
    layer: jax.Array,
    rows: PagedRows,
    *,
    scale: float,
    max_query_len: int,
    window: jax.Array | None = None,
) -> jax.Array:
    """Writes the step's keys and values into layer `layer` of the pools, then attends to all that each row has there.

    q [T, H, E]; new_kv = keys and values, [T, K, E] each, H a multiple of K (query head h reads head h // (H // K));
    pools = Refs of [L, P, S, K, E] each, changed in place; layer: int32 scalar array.
    Token i of a row sees positions p with 0 <= position_i - p, and position_i - p < window when a window (an int32
    scalar array) is given. Scores are (q . k) * scale, the softmax is float32. max_query_len: no row has more tokens
    than this in the step; 1 means that token t is row t. What the pages hold past a row's tokens may be anything.
    Returns [T, H, E] in q's dtype; rows of padding tokens are finite and meaningless.
    Source: Vaswani et al. 2017, eq. 1; pages as in Kwon et al. 2023 (PagedAttention).
    """
    keys, values = new_kv
    k_pool, v_pool = pools
    if q.ndim != 3 or q.shape[1] % keys.shape[1] or keys.shape != values.shape or keys.shape[::2] != q.shape[::2]:
        raise ValueError(f"q {q.shape} [T, H, E] does not fit keys {keys.shape} and values {values.shape} [T, K, E]")
    if k_pool.shape != v_pool.shape or k_pool.shape[3:] != keys.shape[1:]:
        raise ValueError(f"pools {k_pool.shape} and {v_pool.shape} [L, P, S, K, E] do not fit keys {keys.shape}")
    routes = (Route("reference", reference.run),)
    return dispatch(
        "paged_attention",
        routes,
        q,
        new_kv,
        pools,
        jnp.asarray(layer, jnp.int32),
        rows,
        scale=scale,
        max_query_len=max_query_len,
        window=window,
    )
