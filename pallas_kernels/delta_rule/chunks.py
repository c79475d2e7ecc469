"""The tokens of a step's longer rows as chunks, computed on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from pallas_kernels.delta_rule.api import SlotRows

CHUNK = 64
"""Tokens of a chunk: its triangle of products costs as much as the products with the state."""


class Chunks(NamedTuple):
    """N chunks of rows with several tokens, row by row, all int32. Those past the last have count 0."""

    row: jax.Array  # [N]
    offset: jax.Array  # [N] of its first token in the row's tokens of the step
    count: jax.Array  # [N] tokens
    rows: jax.Array  # [R] rows with several tokens, then anything
    first: jax.Array  # [R] the first chunk of each of them, then anything
    num_rows: jax.Array  # [1] how many they are


def cut(rows: SlotRows) -> Chunks:
    """From the start of every row with several tokens: N = T // CHUNK + R, enough whatever the rows' lengths."""
    num_tokens, num_rows = rows.token_row.shape[0], rows.query_len.shape[0]
    query_len = jnp.where(rows.query_len > 1, rows.query_len, 0)
    per_row = (query_len + CHUNK - 1) // CHUNK
    ends, longer = jnp.cumsum(per_row), jnp.cumsum(query_len > 0)
    n = jnp.arange(num_tokens // CHUNK + num_rows, dtype=jnp.int32)
    row = _rank(ends, n)
    offset = (n - (ends - per_row)[row]) * CHUNK
    long_rows = _rank(longer, n[:num_rows])
    return Chunks(
        row=row,
        offset=offset,
        count=jnp.where(n < ends[-1], jnp.clip(query_len[row] - offset, 0, CHUNK), 0),
        rows=long_rows,
        first=(ends - per_row)[long_rows].astype(jnp.int32),
        num_rows=longer[-1:].astype(jnp.int32),
    )


def _rank(ends: jax.Array, n: jax.Array) -> jax.Array:
    """Whose each of n is, where the first have those up to their ends; the last has what is past all."""
    found = jnp.searchsorted(ends, n, side="right", method="compare_all")
    return jnp.minimum(found, ends.shape[0] - 1).astype(jnp.int32)
