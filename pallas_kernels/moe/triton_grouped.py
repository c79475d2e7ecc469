"""Experts of tokens that are sorted by expert: a product per block of an expert's tokens, then the sum of a token's."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.dispatch import Target
from pallas_kernels.triton_call import launch, shared_bytes

if TYPE_CHECKING:
    from pallas_kernels.moe.api import Experts
    from pallas_kernels.moe.triton_routing import Chosen
    from pallas_kernels.moe.triton_sort import Blocks

MAX_FLOAT32 = 256
"""Tokens whose experts' results are kept in float32 until they are summed: 64 KB a token of eight times 2,048."""


MAX_TOGETHER = 16
"""Tokens whose sums are made by the last programs of the last product, rather than by a kernel of their own."""


class Tiling(NamedTuple):
    """How a product is cut into programs."""

    rows: int  # of tokens, per program; the same for both products
    out: int  # rows of an expert's weight
    depth: int  # columns of the weight, per round
    num_warps: int
    num_stages: int


class Tilings(NamedTuple):
    """Of the two products."""

    gate_up: Tiling
    down: Tiling


def tile(rows_per_expert: float, target: Target) -> Tilings:
    """By the mean number of choices of an expert.

    Few: the weights take all the time, tiles are small and many are under way. Many: the tensor cores do.
    """
    if rows_per_expert <= 24:
        rows = 16 if rows_per_expert <= 8 else 32
        gate_up, down = Tiling(rows, 64, 64, 4, 4), Tiling(rows, 64, 64, 4, 5)
    elif rows_per_expert <= 96:
        gate_up, down = Tiling(64, 64, 64, 4, 4), Tiling(64, 128, 64, 4, 4)
    else:
        gate_up, down = Tiling(128, 128, 64, 8, 3), Tiling(128, 128, 64, 8, 4)
    return Tilings(_fit(gate_up, 2, target), _fit(down, 1, target))


def _fit(tiling: Tiling, parts: int, target: Target) -> Tiling:
    """With as many stages as there is shared memory for; `parts` of the weight are read at a time."""
    stage_bytes = 2 * (tiling.rows + parts * tiling.out) * tiling.depth
    return tiling._replace(num_stages=min(tiling.num_stages, shared_bytes(target) // stage_bytes))


def run(
    chosen: Chosen,
    blocks: Blocks,
    experts: Experts,
    places: tuple[jax.Array, jax.Array],
    residual: jax.Array | None,
    *,
    counters: jax.Ref | None,
    tilings: Tilings,
    target: Target,
) -> jax.Array:
    """What `api.moe` returns, after the choice; places: the layer and this device's first expert."""
    (tokens, top_k), (_, num_here, depth, width) = chosen.expert.shape, experts.down.shape
    layer, first_expert = (place.reshape(1) for place in places)
    pairs, dtype = tokens * top_k, chosen.h.dtype
    y_dtype = jnp.float32 if tokens <= MAX_FLOAT32 else dtype
    tiles = triton.cdiv(depth, tilings.down.out)
    together = tokens <= MAX_TOGETHER and counters is not None and counters.shape[0] >= tiles
    to_sum = [chosen.expert, chosen.weight, first_expert, chosen.h if residual is None else residual]
    summing = {"HERE": num_here, "TOP_K": top_k, "RESIDUAL": residual is not None}
    out = jax.ShapeDtypeStruct((tokens, depth), dtype)

    def product(x: jax.Array, weight: jax.Array, y: jax.ShapeDtypeStruct, tiling: Tiling, **kind: bool):
        sizes = {"N": y.shape[1], "K": x.shape[1], "TOKENS": tokens if kind["SUM"] else 0}
        how = {"ROWS": tiling.rows, "BLOCK_N": tiling.out, "BLOCK_K": tiling.depth}
        return launch(
            _product,
            [x, weight, layer, *blocks, *to_sum],
            [y, out if kind["SUM"] else jax.ShapeDtypeStruct((1, 1), dtype)],
            in_place=[jax.new_ref(jnp.zeros(1, jnp.int32)) if counters is None else counters],
            grid=(blocks.expert.shape[0] * triton.cdiv(y.shape[1], tiling.out),),
            constants=summing | sizes | kind | how,
            target=target,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )

    inner = jax.ShapeDtypeStruct((pairs, width), dtype)
    inner, _ = product(chosen.h, experts.gate_up, inner, tilings.gate_up, GATED=True, SUM=False)
    y = jax.ShapeDtypeStruct((pairs, depth), y_dtype)
    y, found = product(inner, experts.down, y, tilings.down, GATED=False, SUM=together)
    if together:
        return found
    block = min(triton.next_power_of_2(depth), 256 if tokens <= MAX_FLOAT32 else 2048)
    (found,) = launch(
        _sum,
        [y, *to_sum],
        [out],
        grid=(tokens, triton.cdiv(depth, block)),
        constants=summing | {"N": depth, "BLOCK_N": block},
        target=target,
        num_warps=4 if block > 256 else 1,
    )
    return found


@triton.jit
def _product(
    x_ptr,
    weight_ptr,
    layer_ptr,
    order_ptr,
    block_expert_ptr,
    block_start_ptr,
    block_stop_ptr,
    num_blocks_ptr,
    expert_ptr,
    share_ptr,
    first_ptr,
    residual_ptr,
    counters_ptr,
    y_ptr,
    out_ptr,
    HERE: tl.constexpr,
    TOP_K: tl.constexpr,
    RESIDUAL: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    GATED: tl.constexpr,
    SUM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_N outputs of a block of one expert's rows.

    GATED: from tokens to sorted choices; else from sorted choices to their places in [T, k]. Of few rows the weight is
    the side that fills the tensor cores. Programs that read the same rows follow one another, and so do an expert's.
    SUM: the last program to arrive of those with the same outputs sums each token's choices, as _sum does.
    """
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    TURNED: tl.constexpr = ROWS < 64
    PARTS: tl.constexpr = 2 if GATED else 1
    block = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    num_blocks = tl.load(num_blocks_ptr)
    if block >= (tl.maximum(num_blocks, 1) if SUM else num_blocks):
        return
    layer = tl.load(layer_ptr).to(tl.int64)
    there = block < num_blocks  # with sums to make, the first block is computed though it be of no rows
    expert = tl.load(block_expert_ptr + block, mask=there, other=0)
    m = tl.load(block_start_ptr + block, mask=there, other=0) + tl.arange(0, ROWS)
    real = m < tl.load(block_stop_ptr + block, mask=there, other=0)
    pair = tl.load(order_ptr + m, mask=real, other=0)
    source = pair // TOP_K if GATED else m
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    xs = x_ptr + source.to(tl.int64)[:, None] * K + k[None, :]
    weights = weight_ptr + (layer * HERE + expert) * (PARTS * N * K) + n[:, None] * K + k[None, :]
    if TURNED:
        acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
        up = tl.zeros([BLOCK_N, ROWS], tl.float32)
    else:
        acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
        up = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            x = tl.load(xs + start, mask=real[:, None], other=0.0)
        else:
            x = tl.load(xs + start, mask=real[:, None] & (k < K - start)[None, :], other=0.0)
        if K % BLOCK_K == 0 and N % BLOCK_N == 0:
            w = tl.load(weights + start)
            if GATED:
                w_up = tl.load(weights + N * K + start)
        else:
            inside = (n < N)[:, None] & (k < K - start)[None, :]
            w = tl.load(weights + start, mask=inside, other=0.0)
            if GATED:
                w_up = tl.load(weights + N * K + start, mask=inside, other=0.0)
        if TURNED:
            acc = tl.dot(w, tl.trans(x), acc)
            if GATED:
                up = tl.dot(w_up, tl.trans(x), up)
        else:
            acc = tl.dot(x, tl.trans(w), acc)
            if GATED:
                up = tl.dot(x, tl.trans(w_up), up)
    if GATED:
        acc = acc * tl.sigmoid(acc) * up
    to = (m if GATED else pair).to(tl.int64) * N
    y = acc.to(y_ptr.dtype.element_ty)
    if TURNED:
        tl.store(y_ptr + to[None, :] + n[:, None], y, mask=real[None, :] & (n < N)[:, None])
    else:
        tl.store(y_ptr + to[:, None] + n[None, :], y, mask=real[:, None] & (n < N)[None, :])
    if SUM:
        tl.debug_barrier()
        arrived = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel")
        if arrived == tl.maximum(num_blocks, 1) - 1:
            tl.store(counters_ptr + tile, 0)
            first = tl.load(first_ptr)
            for start in range(0, TOKENS, 4):
                token = (start + tl.arange(0, 4)).to(tl.int64)
                _sum_choices(
                    y_ptr,
                    expert_ptr,
                    share_ptr,
                    first,
                    residual_ptr,
                    out_ptr,
                    token,
                    n,
                    HERE,
                    TOP_K,
                    RESIDUAL,
                    N,
                    TOKENS,
                )


@triton.jit
def _sum(
    y_ptr,
    expert_ptr,
    share_ptr,
    first_ptr,
    residual_ptr,
    out_ptr,
    HERE: tl.constexpr,
    TOP_K: tl.constexpr,
    RESIDUAL: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """BLOCK_N outputs of one token."""
    token = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.load(first_ptr)
    _sum_choices(
        y_ptr, expert_ptr, share_ptr, first, residual_ptr, out_ptr, token, n, HERE, TOP_K, RESIDUAL, N, 2**31 - 1
    )


@triton.jit
def _sum_choices(
    y_ptr,
    expert_ptr,
    share_ptr,
    first,
    residual_ptr,
    out_ptr,
    token,
    n,
    HERE: tl.constexpr,
    TOP_K: tl.constexpr,
    RESIDUAL: tl.constexpr,
    N: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Outputs n of tokens: the sum over a token's choices, in their order. Others' were not written."""
    inside = (token < TOKENS)[:, None] & (n < N)[None, :]
    total = tl.zeros_like(token).to(tl.float32)[:, None] + tl.zeros_like(n).to(tl.float32)[None, :]
    for i in tl.static_range(TOP_K):
        pair = token * TOP_K + i
        expert = tl.load(expert_ptr + pair, mask=token < TOKENS, other=-1) - first
        here = (token < TOKENS) & (expert >= 0) & (expert < HERE)
        share = tl.load(share_ptr + pair, mask=here, other=0.0)
        # Past the L1 cache, which does not see what other multiprocessors wrote.
        y_at = y_ptr + pair[:, None] * N + n[None, :]
        y = tl.load(y_at, mask=inside & here[:, None], other=0.0, cache_modifier=".cg")
        total += y.to(tl.float32) * share[:, None]
    at = token[:, None] * N + n[None, :]
    if RESIDUAL:
        total += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)
