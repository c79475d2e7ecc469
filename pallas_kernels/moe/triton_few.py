"""Experts of a few tokens, choice by choice: kernels that do nothing but stream the rows of what was chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import triton
import triton.language as tl

from pallas_kernels.dispatch import Target
from pallas_kernels.triton_call import launch

if TYPE_CHECKING:
    from pallas_kernels.moe.api import Experts
    from pallas_kernels.moe.triton_routing import Chosen


class Tiling(NamedTuple):
    """How a product is cut into programs.

    Of a round, a thread should have at least 8 columns: these are a load of 16 bytes, and the vector that they are
    multiplied by lies in the same threads as they do. With fewer it goes through shared memory, every round.
    """

    out: int  # rows of an expert's weight, per program; of the gate, and as many of what it lets through
    depth: int  # columns of these, per round; of all choices together where a program sums over them
    unroll: int  # rounds whose loads are under way at the same time
    num_warps: int


class Tilings(NamedTuple):
    """Of the two products."""

    gate_up: Tiling
    down: Tiling


TILINGS = Tilings(gate_up=Tiling(2, 2048, 1, 4), down=Tiling(4, 2048, 3, 8))
"""For 4.3 TB/s an H200 needs 40 KB under way in each multiprocessor: here 1000 threads and more, of 5 loads each."""


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
        [jax.ShapeDtypeStruct((tokens * top_k, width), chosen.h.dtype)],
        grid=(tokens * top_k, triton.cdiv(width, gate_up.out)),
        constants=constants | {"N": width, "K": depth} | _blocks(gate_up, depth, 1),
        target=target,
        num_warps=gate_up.num_warps,
    )
    choices = triton.next_power_of_2(top_k)
    constants |= {"N": depth, "K": width, "CHOICES": choices, "RESIDUAL": residual is not None}
    constants["ALL_HERE"] = num_here == experts.router.shape[1]
    (out,) = launch(
        _down,
        [inner, experts.down, chosen.expert, chosen.weight, *places, chosen.h if residual is None else residual],
        [jax.ShapeDtypeStruct((tokens, depth), chosen.h.dtype)],
        grid=(tokens, triton.cdiv(depth, down.out)),
        constants=constants | _blocks(down, width, choices),
        target=target,
        num_warps=down.num_warps,
    )
    return out


def _blocks(tiling: Tiling, depth: int, choices: int) -> dict[str, int]:
    block = max(8, min(tiling.depth // choices, triton.next_power_of_2(depth)))
    return {"BLOCK_N": tiling.out, "BLOCK_K": block, "UNROLL": min(tiling.unroll, triton.cdiv(depth, block))}


@triton.jit
def columns(BLOCK_K: tl.constexpr):
    """0 to BLOCK_K - 1 as [BLOCK_K / 8, 8]: a thread loads 8 at once, and sums their products before any other."""
    return tl.arange(0, BLOCK_K // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]


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
    layer = tl.load(layer_ptr).to(tl.int64)
    if (expert < 0) | (expert >= HERE) | (layer < 0):  # never of the layer, which is asked for before the branch so
        return
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = columns(BLOCK_K)
    part = tl.arange(0, 2)
    rows = part[:, None] * (N * K) + n[None, :] * K
    weights = weight_ptr + (layer * HERE + expert) * (2 * N * K) + rows[:, :, None, None] + k[None, None, :, :]
    row = h_ptr + (pair // TOP_K) * K + k
    real = (n < N)[None, :, None, None]
    acc = tl.zeros([2, BLOCK_N, BLOCK_K // 8], tl.float32)
    for start in tl.range(0, K, BLOCK_K, loop_unroll_factor=UNROLL):
        inside = k < K - start
        if N % BLOCK_N == 0 and K % BLOCK_K == 0:
            w = tl.load(weights + start, eviction_policy="evict_first")
        else:
            w = tl.load(weights + start, mask=real & inside[None, None, :, :], other=0.0, eviction_policy="evict_first")
        h = tl.load(row + start, mask=inside, other=0.0)
        acc += tl.sum(w.to(tl.float32) * h.to(tl.float32)[None, None, :, :], axis=3)
    both = tl.sum(acc, axis=2)
    gate = tl.sum(tl.where(part[:, None] == 0, both, 0.0), axis=0)
    up = tl.sum(tl.where(part[:, None] == 1, both, 0.0), axis=0)
    y = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + pair * N + n, y.to(out_ptr.dtype.element_ty), mask=n < N)


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
    ALL_HERE: tl.constexpr,
    CHOICES: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """BLOCK_N outputs of one token, whose choices are side by side in a tile: no load waits for another."""
    token = tl.program_id(0)
    layer = tl.load(layer_ptr).to(tl.int64)
    j = tl.arange(0, CHOICES)
    pair = token * TOP_K + j
    expert = tl.load(expert_ptr + pair, mask=j < TOP_K, other=0) - tl.load(first_ptr)
    share = tl.load(share_ptr + pair, mask=j < TOP_K, other=0.0)
    here = (j < TOP_K) & (expert >= 0) & (expert < HERE)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = columns(BLOCK_K)
    of_expert = weight_ptr + (layer * HERE + tl.where(here, expert, 0)) * (N * K)
    weights = of_expert[None, :, None, None] + n[:, None, None, None] * K + k[None, None, :, :]
    inners = inner_ptr + pair[:, None, None] * K + k[None, :, :]
    real = (n < N)[:, None, None, None] & here[None, :, None, None]
    if RESIDUAL:
        residual = tl.load(residual_ptr + token * N + n, mask=n < N, other=0.0).to(tl.float32)
    acc = tl.zeros([BLOCK_N, CHOICES, BLOCK_K // 8], tl.float32)
    for start in tl.range(0, K, BLOCK_K, loop_unroll_factor=UNROLL):
        inside = k < K - start
        if ALL_HERE and CHOICES == TOP_K and N % BLOCK_N == 0 and K % BLOCK_K == 0:
            w = tl.load(weights + start, eviction_policy="evict_first")
        else:
            w = tl.load(weights + start, mask=real & inside[None, None, :, :], other=0.0, eviction_policy="evict_first")
        inner = tl.load(inners + start, mask=here[:, None, None] & inside[None, :, :], other=0.0)
        acc += tl.sum(w.to(tl.float32) * inner.to(tl.float32)[None, :, :, :], axis=3)
    y = tl.sum(tl.sum(acc, axis=2) * share[None, :], axis=1)
    if RESIDUAL:
        y += residual
    tl.store(out_ptr + token * N + n, y.to(out_ptr.dtype.element_ty), mask=n < N)
