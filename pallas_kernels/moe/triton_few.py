"""Experts of a few tokens, choice by choice: kernels that do nothing but stream the rows of what was chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.dispatch import Target
from pallas_kernels.triton_call import launch

if TYPE_CHECKING:
    from pallas_kernels.moe.api import Experts
    from pallas_kernels.moe.triton_routing import Chosen


class Tiling(NamedTuple):
    """How a product is cut into programs."""

    out: int  # rows of an expert's weight, per program; of the gate, and as many of what it lets through
    depth: int  # columns of these, per round
    unroll: int  # rounds whose loads are under way at the same time
    num_warps: int


class Tilings(NamedTuple):
    """Of the two products."""

    gate_up: Tiling
    down: Tiling


TILINGS = Tilings(gate_up=Tiling(4, 512, 4, 4), down=Tiling(8, 256, 6, 4))


def run(
    chosen: Chosen,
    experts: Experts,
    layer: jax.Array,
    first_expert: jax.Array,
    residual: jax.Array | None,
    *,
    tilings: Tilings,
    target: Target,
) -> jax.Array:
    """What `api.moe` returns, after the choice."""
    (tokens, top_k), (_, num_here, depth, width) = chosen.expert.shape, experts.down.shape
    places, constants = [layer.reshape(1), first_expert.reshape(1)], {"HERE": num_here, "TOP_K": top_k}
    gate_up, down = tilings
    (inner,) = launch(
        _gate_up,
        [chosen.h, experts.gate_up, chosen.expert, *places],
        [jax.ShapeDtypeStruct((tokens * top_k, width), jnp.float32)],
        grid=(tokens * top_k, triton.cdiv(width, gate_up.out)),
        constants=constants | {"N": width, "K": depth} | _blocks(gate_up),
        target=target,
        num_warps=gate_up.num_warps,
    )
    (out,) = launch(
        _down,
        [inner, experts.down, chosen.expert, chosen.weight, *places, chosen.h if residual is None else residual],
        [jax.ShapeDtypeStruct((tokens, depth), chosen.h.dtype)],
        grid=(tokens, triton.cdiv(depth, down.out)),
        constants=constants | {"N": depth, "K": width, "RESIDUAL": residual is not None} | _blocks(down),
        target=target,
        num_warps=down.num_warps,
    )
    return out


def _blocks(tiling: Tiling) -> dict[str, int]:
    return {"BLOCK_N": tiling.out, "BLOCK_K": tiling.depth, "UNROLL": tiling.unroll}


@triton.jit
def _gate_up(
    h_ptr,
    weight_ptr,
    expert_ptr,
    layer_ptr,
    first_ptr,
    out_ptr,
    HERE: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """BLOCK_N outputs of one choice. Choices of an expert that several tokens chose are side by side in the grid."""
    pair = tl.program_id(0)
    expert = tl.load(expert_ptr + pair) - tl.load(first_ptr)
    if (expert < 0) | (expert >= HERE):
        return
    layer = tl.load(layer_ptr).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    weights = weight_ptr + (layer * HERE + expert) * (2 * N * K) + n[:, None] * K + k[None, :]
    row = h_ptr + (pair // TOP_K) * K
    real = (n < N)[:, None]
    gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K, loop_unroll_factor=UNROLL):
        inside = k < K - start
        if K % BLOCK_K == 0 and N % BLOCK_N == 0:
            w_gate = tl.load(weights + start, eviction_policy="evict_first")
            w_up = tl.load(weights + N * K + start, eviction_policy="evict_first")
        else:
            w_gate = tl.load(weights + start, mask=real & inside[None, :], other=0.0)
            w_up = tl.load(weights + N * K + start, mask=real & inside[None, :], other=0.0)
        h = tl.load(row + start + k, mask=inside, other=0.0).to(tl.float32)[None, :]
        gate += w_gate.to(tl.float32) * h
        up += w_up.to(tl.float32) * h
    y = tl.sum(gate, axis=1)
    y = y * tl.sigmoid(y) * tl.sum(up, axis=1)
    tl.store(out_ptr + pair * N + n, y, mask=n < N)


@triton.jit
def _down(
    inner_ptr,
    weight_ptr,
    expert_ptr,
    share_ptr,
    layer_ptr,
    first_ptr,
    residual_ptr,
    out_ptr,
    HERE: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """BLOCK_N outputs of one token: the sum over its choices, in their order."""
    ROUNDS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    token = tl.program_id(0)
    layer = tl.load(layer_ptr).to(tl.int64)
    first = tl.load(first_ptr)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    real = (n < N)[:, None]
    rows = n[:, None] * K + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for i in tl.range(0, TOP_K * ROUNDS, loop_unroll_factor=UNROLL):
        pair = token * TOP_K + i // ROUNDS
        start = i % ROUNDS * BLOCK_K
        expert = tl.load(expert_ptr + pair) - first
        here = (expert >= 0) & (expert < HERE)
        inside = (k < K - start) & here
        weights = weight_ptr + (layer * HERE + tl.where(here, expert, 0)) * (N * K) + start
        w = tl.load(weights + rows, mask=real & inside[None, :], other=0.0, eviction_policy="evict_first")
        inner = tl.load(inner_ptr + pair * K + start + k, mask=inside, other=0.0)
        share = tl.load(share_ptr + pair)
        acc += w.to(tl.float32) * (inner * share)[None, :]
    y = tl.sum(acc, axis=1)
    if RESIDUAL:
        y += tl.load(residual_ptr + token * N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * N + n, y.to(out_ptr.dtype.element_ty), mask=n < N)
