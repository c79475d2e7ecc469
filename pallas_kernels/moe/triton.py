"""Layers of experts in Triton kernels that read every expert once, however many tokens chose it. GPUs from Ampere on.

Few tokens go to their experts choice by choice: four kernels. More are sorted by expert first, and a program computes
a block of an expert's tokens: five kernels up to 16 tokens, eight for many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax

from pallas_kernels.dispatch import Target
from pallas_kernels.moe import triton_few, triton_grouped
from pallas_kernels.moe.triton_routing import choose
from pallas_kernels.moe.triton_sort import choose_and_sort
from pallas_kernels.triton_call import check_dtypes

if TYPE_CHECKING:
    from pallas_kernels.linear.api import Norm
    from pallas_kernels.moe.api import Experts

MAX_FEW = 4
"""Tokens that go choice by choice. Of four tokens with eight of 128 experts each, one choice in ten is another's."""


class Tilings(NamedTuple):
    """How a call is cut into programs."""

    few: triton_few.Tilings | None
    """None where tokens are sorted by expert."""
    grouped: triton_grouped.Tilings


def tile(tokens: int, top_k: int, num_experts: int, target: Target) -> Tilings:
    """The tilings of a call, of `num_experts` of all devices."""
    few = triton_few.TILINGS if tokens <= MAX_FEW else None
    return Tilings(few, triton_grouped.tile(tokens * top_k / num_experts, target))


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
    tilings: Tilings | None = None,
) -> jax.Array:
    """The contract is `api.moe`."""
    check_dtypes(x, *experts, norm.weight, *(() if residual is None else (residual,)))
    tokens, num_here = x.shape[0], experts.gate_up.shape[1]
    few, grouped = tilings or tile(tokens, top_k, experts.router.shape[1], target)
    how = {"norm": norm, "top_k": top_k, "renormalise": renormalise, "valid": valid, "counters": counters}
    if few is not None:
        chosen = choose(x, experts.router, layer, target=target, **how)
        return triton_few.run(chosen, experts, layer, first_expert, residual, tilings=few, target=target)
    how |= {"first_expert": first_expert, "num_here": num_here, "rows": grouped.gate_up.rows}
    chosen, blocks = choose_and_sort(x, experts.router, layer, target=target, **how)
    places = layer, first_expert
    tiled = {"counters": counters, "tilings": grouped, "target": target}
    return triton_grouped.run(chosen, blocks, experts, places, residual, **tiled)
