"""Linear layers for few rows in Triton kernels that do nothing but stream the weights. GPUs from Ampere on.

A step of few rows takes as long as its weights take to read, plus what passes between one kernel's last read and the
next one's first, 5 us on an H200. So norm, bias, gate and residual are part of the product. (Asking for the beginning
of the next weights as a kernel ends, for them to travel to the L2 cache, made nothing quicker.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.dispatch import Target
from pallas_kernels.triton_call import check_dtypes, launch

if TYPE_CHECKING:
    from pallas_kernels.linear.api import Norm

MAX_ROWS = 16
"""With 32, all four products of a layer of Qwen3-4B were slower than cuBLAS's on an H200, its norm kernels included."""


LONG_ROWS, FEW_OUTPUTS = 4096, 1024
"""Columns from which a row is long, and outputs up to which a product has too few rows to fill the card by eights."""


class Tiling(NamedTuple):
    """How a product is cut into programs."""

    rows: int  # of the weight, per program
    depth: int  # columns of the weight, per round
    splits: int  # programs that share the columns of a row
    num_warps: int
    num_stages: int


def tile_one(num_rows: int, depth: int, *, gated: bool) -> Tiling:
    """For a single row of x: products are summed by lanes of a warp, each with its own rows of the weight.

    A thread takes 8 columns, 16 bytes: with fewer, x goes through shared memory in every round. Measured alone on an
    H200, of Qwen3-4B's and Qwen3-30B-A3B's products: two rows of a gate in 64 threads 26.6 us where four in 128 take
    28.2; long rows by fours in 128 threads 14.3 where eights take 15.6, and 2.6 for 3.2 of a router's few; others by
    eights in 64 threads 7.6 where 128 take 9.1.
    """
    if gated:
        return Tiling(rows=2, depth=512, splits=1, num_warps=2, num_stages=1)
    if depth >= LONG_ROWS or num_rows <= FEW_OUTPUTS:
        return Tiling(rows=4, depth=1024, splits=1, num_warps=4, num_stages=1)
    return Tiling(rows=8, depth=512, splits=1, num_warps=2, num_stages=1)


def tile_few(num_rows: int, depth: int, *, gated: bool) -> Tiling:
    """For a few rows of x: tensor cores, with as many splits as fill the card where the weight has few rows."""
    block = 64
    splits = 1
    while not gated and num_rows // block * splits < 132 and depth % (splits * 2 * 64) == 0 and splits < 4:
        splits *= 2
    return Tiling(rows=block, depth=64, splits=splits, num_warps=4, num_stages=5 if gated else 6)


def run(
    x: jax.Array,
    weight: jax.Array,
    layer: jax.Array,
    *,
    norm: Norm | None,
    bias: jax.Array | None,
    gated: bool,
    residual: jax.Array | None,
    out_dtype: jnp.dtype,
    counters: jax.Ref | None,
    target: Target,
) -> jax.Array:
    """The contract is `api.linear`."""
    rows, depth = x.shape
    num_out = weight.shape[-2]
    check_dtypes(x, weight, *(() if norm is None else norm[:1]))
    if rows > MAX_ROWS:
        raise NotImplementedError(f"{rows} rows; it takes {MAX_ROWS} at most")
    tiling = (tile_one if rows == 1 else tile_few)(num_out, depth, gated=gated)
    if counters is None or counters.shape[0] < num_out // tiling.rows:
        counters, tiling = jax.new_ref(jnp.zeros(1, jnp.int32)), tiling._replace(splits=1)
    if num_out % tiling.rows or depth % (tiling.splits * 16):
        multiples = f"{tiling.rows} and of {tiling.splits * 16}"
        raise NotImplementedError(f"a weight of {num_out} x {depth}; they must be multiples of {multiples}")
    tiles = num_out // tiling.rows
    constants = {
        "N": num_out,
        "K": depth,
        "EPS": 0.0 if norm is None else norm.eps,
        "OFFSET": 0.0 if norm is None else norm.offset,
        "NORM": norm is not None,
        "BIAS": bias is not None,
        "GATED": gated,
        "RESIDUAL": residual is not None,
        "BLOCK_N": tiling.rows,
        "BLOCK_K": tiling.depth,
    }
    inputs = [
        x,
        weight,
        layer.reshape(1),
        x if norm is None else norm.weight,
        x if bias is None else bias,
        x if residual is None else residual,
    ]
    out = jax.ShapeDtypeStruct((rows, num_out), out_dtype)
    how = {"target": target, "num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
    if rows == 1:
        return launch(_one_row, inputs, [out], grid=(tiles,), constants=constants, **how)[0]
    block_m = max(16, triton.next_power_of_2(rows))
    constants |= {"BLOCK_M": block_m, "SPLITS": tiling.splits}
    partial = tiles * tiling.splits * ((2 if gated else 1) * tiling.rows + 1) * block_m if tiling.splits > 1 else 1
    scratch = jax.ShapeDtypeStruct((partial,), jnp.float32)
    inputs.append(jnp.full(1, rows, jnp.int32))
    grid = (tiles, tiling.splits)
    return launch(_few_rows, inputs, [scratch, out], in_place=[counters], grid=grid, constants=constants, **how)[1]


@triton.jit
def _one_row(
    x_ptr,
    weight_ptr,
    layer_ptr,
    norm_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_N outputs of one row of x."""
    layer = tl.load(layer_ptr).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    weight_ptr += layer * ((2 if GATED else 1) * N * K)
    weights = weight_ptr + n.to(tl.int64)[:, None] * K + k[None, :]  # a head has 2**31 numbers and more
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K, loop_unroll_factor=5):
        inside = k < K - start
        if K % BLOCK_K == 0:
            w = tl.load(weights + start, eviction_policy="evict_first")
            if GATED:
                w_up = tl.load(weights + N * K + start, eviction_policy="evict_first")
        else:
            w = tl.load(weights + start, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            if GATED:
                w_up = tl.load(weights + N * K + start, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + start + k, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(norm_ptr + layer * K + start + k, mask=inside, other=0.0).to(tl.float32) + OFFSET
        acc += w.to(tl.float32) * x[None, :]
        if GATED:
            up += w_up.to(tl.float32) * x[None, :]
    y = tl.sum(acc, axis=1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / K + EPS)
        y *= scale
    if BIAS:
        y += tl.load(bias_ptr + layer * ((2 if GATED else 1) * N) + n).to(tl.float32)
    if GATED:
        u = tl.sum(up, axis=1)
        if NORM:
            u *= scale
        if BIAS:
            u += tl.load(bias_ptr + layer * (2 * N) + N + n).to(tl.float32)
        y = y * tl.sigmoid(y) * u
    if RESIDUAL:
        y += tl.load(residual_ptr + n).to(tl.float32)
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty))


@triton.jit
def _few_rows(
    x_ptr,
    weight_ptr,
    layer_ptr,
    norm_ptr,
    bias_ptr,
    residual_ptr,
    num_rows_ptr,
    counters_ptr,
    partial_ptr,
    out_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """BLOCK_N outputs of all rows of x, as [BLOCK_N, BLOCK_M]: the weight is the side that fills the tensor cores.

    With splits, each leaves its sums in `partial`, and the last to arrive adds them up in a fixed order.
    """
    PARTS: tl.constexpr = 2 if GATED else 1
    DEPTH: tl.constexpr = K // SPLITS
    tile = tl.program_id(0)
    split = tl.program_id(1)
    layer = tl.load(layer_ptr).to(tl.int64)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    first = split * DEPTH
    weights = weight_ptr + layer * (PARTS * N * K) + n.to(tl.int64)[:, None] * K + first + k[None, :]
    xs = x_ptr + m[None, :] * K + first + k[:, None]
    in_step = (m < tl.load(num_rows_ptr))[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, DEPTH, BLOCK_K):
        if DEPTH % BLOCK_K == 0:
            w = tl.load(weights + start)
            x = tl.load(xs + start, mask=in_step, other=0.0)
            if GATED:
                w_up = tl.load(weights + N * K + start)
        else:
            inside = k < DEPTH - start
            w = tl.load(weights + start, mask=inside[None, :], other=0.0)
            x = tl.load(xs + start, mask=in_step & inside[:, None], other=0.0)
            if GATED:
                w_up = tl.load(weights + N * K + start, mask=inside[None, :], other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, axis=0)
            norm = tl.load(norm_ptr + layer * K + first + start + k, mask=k < DEPTH - start, other=0.0)
            x = (wide * (norm.to(tl.float32) + OFFSET)[:, None]).to(x.dtype)
        acc = tl.dot(w, x, acc)
        if GATED:
            up = tl.dot(w_up, x, up)
    last = tile >= 0
    if SPLITS > 1:
        ROW: tl.constexpr = (PARTS * BLOCK_N + 1) * BLOCK_M
        inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        mine = partial_ptr + (tile * SPLITS + split) * ROW
        tl.store(mine + inner, acc)
        if GATED:
            tl.store(mine + BLOCK_N * BLOCK_M + inner, up)
        if NORM:
            tl.store(mine + PARTS * BLOCK_N * BLOCK_M + m, squares)
        tl.debug_barrier()
        arrived = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel")
        last = arrived == SPLITS - 1
        if last:
            tl.store(counters_ptr + tile, 0)
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            squares = tl.zeros([BLOCK_M], tl.float32)
            for i in tl.static_range(SPLITS):
                # Past the L1 cache, which does not see what other multiprocessors wrote.
                theirs = partial_ptr + (tile * SPLITS + i) * ROW
                acc += tl.load(theirs + inner, cache_modifier=".cg")
                if GATED:
                    up += tl.load(theirs + BLOCK_N * BLOCK_M + inner, cache_modifier=".cg")
                if NORM:
                    squares += tl.load(theirs + PARTS * BLOCK_N * BLOCK_M + m, cache_modifier=".cg")
    if last:
        if NORM:
            scale = tl.rsqrt(squares / K + EPS)[None, :]
            acc *= scale
            up *= scale
        if BIAS:
            acc += tl.load(bias_ptr + layer * (PARTS * N) + n).to(tl.float32)[:, None]
        if GATED:
            if BIAS:
                up += tl.load(bias_ptr + layer * (PARTS * N) + N + n).to(tl.float32)[:, None]
            acc = acc * tl.sigmoid(acc) * up
        at = m[None, :] * N + n[:, None]
        if RESIDUAL:
            acc += tl.load(residual_ptr + at, mask=in_step, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=in_step)
