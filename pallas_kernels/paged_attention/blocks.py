"""The tokens of a step as blocks of queries of one row each, computed on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from pallas_kernels.paged_attention.api import PagedRows


class QueryBlocks(NamedTuple):
    """N blocks, all int32 [N]. Those past the last have count 0."""

    row: jax.Array
    token: jax.Array  # index in T of the first
    position: jax.Array  # of the first, in its sequence
    count: jax.Array  # tokens


def cut(rows: PagedRows, block: int, *, single_too: bool = True) -> QueryBlocks:
    """Cuts every row into blocks of at most `block` tokens: N = T // block + R, enough whatever the rows' lengths.

    single_too: also rows of one token.
    """
    num_tokens, num_rows = rows.token_row.shape[0], rows.query_len.shape[0]
    query_len = rows.query_len if single_too else jnp.where(rows.query_len > 1, rows.query_len, 0)
    per_row = (query_len + block - 1) // block
    ends = jnp.cumsum(per_row)
    n = jnp.arange(num_tokens // block + num_rows, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, n, side="right", method="compare_all"), num_rows - 1).astype(jnp.int32)
    first = (n - (ends - per_row)[row]) * block  # token of the row
    count = jnp.clip(query_len[row] - first, 0, block)
    return QueryBlocks(
        row=row,
        token=rows.query_start[row] + first,
        position=rows.context_len[row] + first,
        count=jnp.where(n < ends[-1], count, 0),
    )
