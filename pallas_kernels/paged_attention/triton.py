"""Paged attention by two Triton kernels: for rows with one token, and for rows with several. GPUs from Ampere on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

from pallas_kernels.dispatch import Target
from pallas_kernels.paged_attention import triton_decode, triton_prefill
from pallas_kernels.paged_attention.blocks import QueryBlocks, cut
from pallas_kernels.triton_call import check_dtypes

if TYPE_CHECKING:
    from pallas_kernels.paged_attention.api import PagedRows, Plan


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
    check(q, pools)
    blocks = plan.get("triton") or _blocks(rows, pools, q.shape[1], max_query_len)
    ref = jax.new_ref(q)
    how = {"scale": scale, "window": window, "soft_cap": soft_cap, "sinks": sinks, "target": target}
    triton_decode.run_rows(ref, pools, layer, rows, counters=counters, **how)
    if max_query_len > 1:
        triton_prefill.run_rows(ref, pools, layer, rows.page_table, blocks, **how)
    return jax.freeze(ref)


def plan(
    rows: PagedRows, pools: tuple[jax.Ref, jax.Ref], *, num_heads: int, max_query_len: int, target: Target
) -> QueryBlocks | None:
    """The blocks of queries of rows with several tokens."""
    del target
    return _blocks(rows, pools, num_heads, max_query_len)


def _blocks(rows: PagedRows, pools: tuple[jax.Ref, jax.Ref], num_heads: int, max_query_len: int) -> QueryBlocks | None:
    if max_query_len == 1:
        return None
    return cut(rows, triton_prefill.query_block(num_heads // pools[0].shape[3]), single_too=False)


def check(q: jax.Array, pools: tuple[jax.Ref, jax.Ref]) -> None:
    """NotImplementedError, with the reason, for what the kernels do not take."""
    check_dtypes(q, *pools)
    if not triton_decode.LEAST_WIDTH <= q.shape[2] <= 256:
        raise NotImplementedError(f"heads are {q.shape[2]} wide; it takes {triton_decode.LEAST_WIDTH} to 256")
