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
    queries = q[blocks.token].reshape(*blocks.token.shape, num_kv_heads, -1, width)  # [N, Q, K, G, E]
    queries = queries.swapaxes(1, 2).swapaxes(2, 3)  # [N, K, G, Q, E]

    def chunk(i, state):
        best, total, acc = state  # [N, K, G, Q], the same, [N, K, G, Q, E]
        ids = jax.lax.dynamic_slice_in_dim(table, i * pages, pages, axis=1)
        k, v = (p[layer, ids].reshape(ids.shape[0], pages * page_size, num_kv_heads, width) for p in pools)
        key_position = i * pages * page_size + jnp.arange(pages * page_size)
        behind = blocks.position[:, :, None] - key_position  # [N, Q, C]
        seen = behind >= 0
        if scorer.window is not None:
            seen &= behind < scorer.window
        # What lies past a row's tokens may be anything, NaN too, and no weight of 0 would silence that.
        v = jnp.where((behind.max(1) >= 0)[:, :, None, None], v, 0)
        scores = jnp.einsum("nkgqe,ncke->nkgqc", queries, k, preferred_element_type=jnp.float32) * scorer.scale
        if scorer.soft_cap is not None:
            scores = scorer.soft_cap * jnp.tanh(scores / scorer.soft_cap)
        scores = jnp.where(seen[:, None, None], scores, MASKED)
        new_best = jnp.maximum(best, scores.max(-1))
        weights = jnp.where(seen[:, None, None], jnp.exp(scores - new_best[..., None]), 0.0)
        rescale = jnp.exp(best - new_best)
        weighted = jnp.einsum("nkgqc,nckw->nkgqw", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return new_best, total * rescale + weights.sum(-1), acc * rescale[..., None] + weighted

    shape = queries.shape[:-1]
    state = (jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros(queries.shape, jnp.float32))
    if num_chunks == 1:
        state = chunk(0, state)
    else:
        reach = jnp.max(blocks.position) // (pages * page_size) + 1
        state = jax.lax.fori_loop(0, reach, chunk, state)
    best, total, acc = state
    if scorer.sinks is not None:
        sink = scorer.sinks.reshape(num_kv_heads, -1, 1)  # [K, G, 1]
        new_best = jnp.maximum(best, sink)
        total = total * jnp.exp(best - new_best) + jnp.exp(sink - new_best)
        acc = acc * jnp.exp(best - new_best)[..., None]
    out = acc / jnp.maximum(total, 1e-30)[..., None]  # [N, K, G, Q, E]
    return out.swapaxes(2, 3).swapaxes(1, 2).reshape(*blocks.token.shape, -1, width)
