"""The gated delta rule in Triton kernels: one or two for rows with one token, three for longer rows. From Ampere on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

from pallas_kernels.delta_rule import triton_chunks, triton_decode
from pallas_kernels.delta_rule.chunks import Chunks, cut
from pallas_kernels.dispatch import Target
from pallas_kernels.triton_call import check_dtypes

if TYPE_CHECKING:
    from pallas_kernels.delta_rule.api import DeltaPools, DeltaWeights, Plan, SlotRows


def run(
    x: jax.Array,
    weights: DeltaWeights,
    pools: DeltaPools,
    layer: jax.Array,
    rows: SlotRows,
    *,
    eps: float,
    max_query_len: int,
    plan: Plan,
    target: Target,
) -> jax.Array:
    """The contract is `api.delta_rule`."""
    check(x, pools)
    single = triton_decode.run_rows(
        x, weights, pools, layer, rows, eps=eps, with_others=max_query_len == 1, target=target
    )
    if max_query_len == 1:
        return single
    chunks = plan.get("triton") or cut(rows)
    return triton_chunks.run_rows(x, weights, pools, layer, rows, chunks, single, eps=eps, target=target)


def plan(rows: SlotRows, *, max_query_len: int, target: Target) -> Chunks | None:
    """The chunks of rows with several tokens."""
    del target
    return None if max_query_len == 1 else cut(rows)


def check(x: jax.Array, pools: DeltaPools) -> None:
    """NotImplementedError, with the reason, for what the kernels do not take."""
    check_dtypes(x)
    for what, width in zip(("keys", "values"), pools.state.shape[4:], strict=True):
        if not 16 <= width <= 256 or width & (width - 1):
            raise NotImplementedError(f"{what} are {width} wide; it takes powers of two from 16 to 256")
