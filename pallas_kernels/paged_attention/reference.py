"""Paged attention in plain jax.numpy: gathers pages, softmax in float32, online over chunks of keys. Any backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Target

if TYPE_CHECKING:
    from pallas_kernels.paged_attention.api import PagedRows, Plan

MAX_QUERY_BLOCK = 64
"""Most tokens of one row that share a gather of its pages."""
KEY_CHUNK = {"cpu": 256, "gpu": 1024}
"""Positions gathered at a time. A context of at most this many takes one pass with no loop, which a GPU can capture."""
MASKED = -1e30
"""Score of a position that a token may not see: finite, so that a row of padding gives no NaN."""


class Blocks(NamedTuple):
    """The step's tokens as blocks of one row each. N blocks, Q tokens per block."""

    row: jax.Array  # [N]
    token: jax.Array  # [N, Q] index in T
    position: jax.Array  # [N, Q] position in the sequence; -1 for padding: sees nothing
    of_token: tuple[jax.Array, jax.Array]  # [T] each: block and index in the block


class Scorer(NamedTuple):
    """How scores are made, as in `api.paged_attention`."""

    scale: float
    window: jax.Array | None
    soft_cap: float | None
    sinks: jax.Array | None


def run(
    q: jax.Array,
    pools: tuple[jax.Ref, jax.Ref],
    layer: jax.Array,
    rows: PagedRows,
    *,
    scale: float,
    max_query_len: int,
    window: jax.Array | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    counters: jax.Ref | None,
    plan: Plan,
    target: Target,
) -> jax.Array:
    """The contract is `api.paged_attention`."""
    del counters, plan
    if max_query_len == 1:
        blocks = _decode_blocks(rows)
    else:
        # There are T // block + R blocks, real or not: with blocks of the average row both terms are alike.
        average = rows.token_row.shape[0] // rows.query_len.shape[0]
        blocks = _blocks(rows, min(MAX_QUERY_BLOCK, max_query_len, max(1, average)))
    values = pools[0][...], pools[1][...]
    pages = max(1, KEY_CHUNK[target.platform] // values[0].shape[2])
    scorer = Scorer(scale, window, soft_cap, sinks)
    return _attend(q, values, layer, rows.page_table[blocks.row], blocks, scorer, pages)[blocks.of_token].astype(
        q.dtype
    )


def _decode_blocks(rows: PagedRows) -> Blocks:
    tokens = jnp.arange(rows.query_len.shape[0])
    position = jnp.where(rows.query_len > 0, rows.context_len, -1)
    return Blocks(tokens, tokens[:, None], position[:, None], (tokens, jnp.zeros_like(tokens)))


def _blocks(rows: PagedRows, block: int) -> Blocks:
    """Cuts every row into blocks; there are T // block + R of them at most, whatever the rows' lengths."""
    num_tokens, num_rows = rows.token_row.shape[0], rows.query_len.shape[0]
    per_row = (rows.query_len + block - 1) // block
    ends = jnp.cumsum(per_row)
    first = ends - per_row
    n = jnp.arange(num_tokens // block + num_rows)
    row = jnp.minimum(jnp.searchsorted(ends, n, side="right", method="compare_all"), num_rows - 1)
    index = (n - first[row])[:, None] * block + jnp.arange(block)  # of the token in its row
    real = (n < ends[-1])[:, None] & (index < rows.query_len[row][:, None])
    token = jnp.clip(rows.query_start[row][:, None] + index, 0, num_tokens - 1)
    position = jnp.where(real, rows.context_len[row][:, None] + index, -1)
    in_row = jnp.arange(num_tokens) - rows.query_start[rows.token_row]
    of_token = (jnp.clip(first[rows.token_row] + in_row // block, 0, n.shape[0] - 1), in_row % block)
    return Blocks(row, token, position, of_token)


def _attend(
    q: jax.Array,
    pools: tuple[jax.Array, jax.Array],
    layer: jax.Array,
    table: jax.Array,
    blocks: Blocks,
    scorer: Scorer,
    pages: int,
) -> jax.Array:
    """Returns [N, Q, H, E] float32. table [N, W]; pages: gathered at a time."""
    page_size, num_kv_heads, width = pools[0].shape[2:]
    num_chunks = -(-table.shape[1] // pages)
    table = jnp.pad(table, ((0, 0), (0, num_chunks * pages - table.shape[1])))
    queries = by_kv_head(q[blocks.token], num_kv_heads)
    span = pages * page_size

    def chunk(i, state):
        ids = jax.lax.dynamic_slice_in_dim(table, i * pages, pages, axis=1)
        keys, values = (p[layer, ids].reshape(ids.shape[0], span, num_kv_heads, width) for p in pools)
        return fold(state, queries, keys, values, i * span + jnp.arange(span), blocks.position, scorer)

    state = nothing_seen(queries)
    if num_chunks == 1:
        state = chunk(0, state)
    else:
        reach = jnp.max(blocks.position) // span + 1
        state = jax.lax.fori_loop(0, reach, chunk, state)
    return attended(state, scorer)


class Seen(NamedTuple):
    """What queries [N, K, G, Q, E] have made of the keys that they saw so far, in float32."""

    best: jax.Array  # [N, K, G, Q] the highest score
    total: jax.Array  # [N, K, G, Q] sum of the weights, relative to it
    acc: jax.Array  # [N, K, G, Q, E] weighted sum of the values


def by_kv_head(q: jax.Array, num_kv_heads: int) -> jax.Array:
    """[N, K, G, Q, E] of q [N, Q, H, E]."""
    queries = q.reshape(*q.shape[:2], num_kv_heads, -1, q.shape[-1])
    return queries.swapaxes(1, 2).swapaxes(2, 3)


def nothing_seen(queries: jax.Array) -> Seen:
    """The state of queries [N, K, G, Q, E] before the first key."""
    shape = queries.shape[:-1]
    return Seen(jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros(queries.shape, jnp.float32))


def fold(
    seen: Seen,
    queries: jax.Array,
    k: jax.Array,
    v: jax.Array,
    key_position: jax.Array,
    position: jax.Array,
    scorer: Scorer,
) -> Seen:
    """Adds keys and values [N, C, K, E] at positions [C] to what queries [N, K, G, Q, E] at positions [N, Q] saw.

    Keys behind every query of the block, and their values, may be anything. Parts of a context may come in any order.
    Source: Milakov and Gimelshein 2018 (online softmax).
    """
    behind = position[:, :, None] - key_position  # [N, Q, C]
    sees = behind >= 0
    if scorer.window is not None:
        sees &= behind < scorer.window
    # What lies past a row's tokens may be anything, NaN too, and no weight of 0 would silence that.
    v = jnp.where((behind.max(1) >= 0)[:, :, None, None], v, 0)
    scores = jnp.einsum("nkgqe,ncke->nkgqc", queries, k, preferred_element_type=jnp.float32) * scorer.scale
    if scorer.soft_cap is not None:
        scores = scorer.soft_cap * jnp.tanh(scores / scorer.soft_cap)
    scores = jnp.where(sees[:, None, None], scores, MASKED)
    best = jnp.maximum(seen.best, scores.max(-1))
    weights = jnp.where(sees[:, None, None], jnp.exp(scores - best[..., None]), 0.0)
    rescale = jnp.exp(seen.best - best)
    weighted = jnp.einsum("nkgqc,nckw->nkgqw", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return Seen(best, seen.total * rescale + weights.sum(-1), seen.acc * rescale[..., None] + weighted)


def attended(seen: Seen, scorer: Scorer) -> jax.Array:
    """The outputs [N, Q, H, E] float32 of queries that have seen all their keys."""
    best, total, acc = seen
    num_kv_heads, width = acc.shape[1], acc.shape[-1]
    if scorer.sinks is not None:
        sink = scorer.sinks.reshape(num_kv_heads, -1, 1)  # [K, G, 1]
        new_best = jnp.maximum(best, sink)
        total = total * jnp.exp(best - new_best) + jnp.exp(sink - new_best)
        acc = acc * jnp.exp(best - new_best)[..., None]
    out = acc / jnp.maximum(total, 1e-30)[..., None]  # [N, K, G, Q, E]
    out = out.swapaxes(2, 3).swapaxes(1, 2)
    return out.reshape(*out.shape[:2], -1, width)
