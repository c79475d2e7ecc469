"""Paged attention on Hopper: rows with several tokens by Mosaic GPU's kernel, rows with one token by Triton's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

from pallas_kernels.dispatch import HOPPER, Target
from pallas_kernels.paged_attention import mosaic_prefill, triton_decode

if TYPE_CHECKING:
    from pallas_kernels.paged_attention.api import PagedRows, Plan

LEAST_TOKENS = 64
"""Tokens of a step that are worth this kernel: it takes a second to lower for each size of a step."""


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
    _check(target, max_query_len, q.shape[0])
    for name, value in {"window": window, "soft cap": soft_cap, "sinks": sinks}.items():
        if value is not None:
            raise NotImplementedError(f"it has no {name}")
    ref = jax.new_ref(q)
    blocks = plan.get("mosaic_gpu")
    if blocks is None:
        blocks = mosaic_prefill.make_plan(q.shape, pools[0], rows, single_too=False)
    mosaic_prefill.attend_rows(ref, pools, layer, rows, scale=scale, plan=blocks)
    how = {"window": None, "soft_cap": None, "sinks": None, "target": target}
    triton_decode.run_rows(ref, pools, layer, rows, scale=scale, counters=counters, **how)
    return jax.freeze(ref)


def plan(
    rows: PagedRows, pools: tuple[jax.Ref, jax.Ref], *, num_heads: int, max_query_len: int, target: Target
) -> jax.Array:
    """The blocks of queries of rows with several tokens."""
    shape = (rows.token_row.shape[0], num_heads, pools[0].shape[4])
    _check(target, max_query_len, shape[0])
    return mosaic_prefill.make_plan(shape, pools[0], rows, single_too=False)


def _check(target: Target, max_query_len: int, num_tokens: int) -> None:
    if target.compute_capability != HOPPER:
        raise NotImplementedError(f"the target is {target}; it needs compute capability {HOPPER}")
    if max_query_len == 1:
        raise NotImplementedError("every row has one token")
    if num_tokens < LEAST_TOKENS:
        raise NotImplementedError(f"{num_tokens} tokens; it takes {LEAST_TOKENS} at least")
