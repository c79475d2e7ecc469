"""The router's choice in Triton kernels, and the list of what each expert computes. GPUs from Ampere on.

Logits are a product as any other; what follows holds all logits of a row in registers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.dispatch import Target
from pallas_kernels.linear import triton as few_rows
from pallas_kernels.linear.api import linear
from pallas_kernels.linear.cublas import rms_norm
from pallas_kernels.triton_call import check_dtypes, launch

if TYPE_CHECKING:
    from pallas_kernels.linear.api import Norm

MAX_EXPERTS = 1024
"""Of all devices: a row's keys, of 64 bits, are the registers of one warp."""
CHUNK = 2048
"""Choices that one program of the sort sees."""
INT64_MIN = tl.constexpr(-(2**63))


class Chosen(NamedTuple):
    """What a layer's experts need to know of its tokens."""

    expert: jax.Array  # [T, k] int32
    weight: jax.Array  # [T, k] float32
    h: jax.Array  # [T, D]: x after its norm; anything in rows that are not valid


class Blocks(NamedTuple):
    """Choices in the order of this device's experts, cut into blocks of one expert each."""

    order: jax.Array  # [T * k] int32: the places of choices in [T, k]; others' choices leave the end unwritten
    expert: jax.Array  # [blocks] int32, of this device
    start: jax.Array  # [blocks] int32: where the block begins in `order`
    stop: jax.Array  # [blocks] int32
    count: jax.Array  # [1] int32: blocks that there are, of those that there is room for


def run(
    x: jax.Array,
    router: jax.Array,
    layer: jax.Array,
    *,
    norm: Norm,
    top_k: int,
    renormalise: bool,
    valid: jax.Array | None,
    counters: jax.Ref | None,
    target: Target,
) -> tuple[jax.Array, jax.Array]:
    """The contract is `routing.route`."""
    how = {"norm": norm, "top_k": top_k, "renormalise": renormalise, "counters": counters, "target": target}
    expert, weight, _ = choose(x, router, layer, valid=valid, **how)
    return expert, weight


def choose(
    x: jax.Array,
    router: jax.Array,
    layer: jax.Array,
    *,
    norm: Norm,
    top_k: int,
    renormalise: bool,
    valid: jax.Array | None,
    counters: jax.Ref | None,
    target: Target,
) -> Chosen:
    """As `routing.route`. For few rows the product does the norm, and the choice writes down what it came to."""
    check_dtypes(x, router, norm.weight)
    (tokens, depth), num_experts = x.shape, router.shape[1]
    if num_experts > MAX_EXPERTS:
        raise NotImplementedError(f"{num_experts} experts; it takes {MAX_EXPERTS} at most")
    few = tokens <= few_rows.MAX_ROWS
    h = x if few else rms_norm(x, norm, layer, target)
    before = {"norm": norm if few else None, "out_dtype": jnp.float32, "counters": counters, "target": target}
    logits = linear(h, router, layer, **before)
    block = 1 if few or tokens % 4 else 4
    constants = {
        "EXPERTS": num_experts,
        "TOP_K": top_k,
        "RENORMALISE": renormalise,
        "MASKED": valid is not None,
        "NORM": few,
        "WIDTH": depth,
        "EPS": norm.eps,
        "OFFSET": norm.offset,
        "BLOCK": block,
        "EXPERTS_BLOCK": triton.next_power_of_2(num_experts),
        "K_BLOCK": triton.next_power_of_2(top_k),
        "WIDTH_BLOCK": triton.next_power_of_2(depth),
    }
    outputs = [
        jax.ShapeDtypeStruct((tokens, top_k), jnp.int32),
        jax.ShapeDtypeStruct((tokens, top_k), jnp.float32),
        jax.ShapeDtypeStruct(x.shape if few else (1, 1), x.dtype),
    ]
    inputs = [logits, logits if valid is None else valid, x, norm.weight, layer.reshape(1)]
    grid, warps = (tokens // block,), max(block, 2 if few and depth > 1024 else 1)
    expert, weight, normalised = launch(
        _choose, inputs, outputs, grid=grid, constants=constants, target=target, num_warps=warps
    )
    return Chosen(expert, weight, normalised if few else h)


def sort(expert: jax.Array, first_expert: jax.Array, *, num_here: int, rows: int, target: Target) -> Blocks:
    """The choices [T, k] by expert, each expert's in the order of [T, k], in blocks of up to `rows`.

    Every program reads all choices that it must count, which is quicker than to agree on them with others.
    """
    pairs = expert.size
    chunk = min(CHUNK, max(128, triton.next_power_of_2(pairs)))
    chunks = triton.cdiv(pairs, chunk)
    constants = {"PAIRS": pairs, "HERE": num_here, "BINS": triton.next_power_of_2(num_here), "CHUNK": chunk}
    inputs, how = [expert, first_expert.reshape(1)], {"target": target, "num_warps": 4}
    counts = first_expert.reshape(1)
    if chunks > 1:
        outputs = [jax.ShapeDtypeStruct((chunks, constants["BINS"]), jnp.int32)]
        (counts,) = launch(_count, inputs, outputs, grid=(chunks,), constants=constants, **how)
    room = min(pairs, num_here) + pairs // rows
    shapes = ((pairs,), (room,), (room,), (room,), (1,))
    outputs = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    constants |= {"CHUNKS": chunks, "ROWS": rows}
    return Blocks(*launch(_sort, [*inputs, counts], outputs, grid=(num_here, chunks), constants=constants, **how))


@triton.jit
def _choose(
    logits_ptr,
    valid_ptr,
    x_ptr,
    norm_ptr,
    layer_ptr,
    expert_ptr,
    weight_ptr,
    h_ptr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    MASKED: tl.constexpr,
    NORM: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
):
    """Choices of BLOCK tokens. NORM, of a single token: writes down x after its norm, too.

    A logit and its expert make one integer, in the order of the choice: all are different and none is lost, whatever
    the logits hold, so that no choice is an expert that is not there.
    """
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.arange(0, EXPERTS_BLOCK)
    j = tl.arange(0, K_BLOCK)
    logits = tl.load(
        logits_ptr + token[:, None] * EXPERTS + e[None, :], mask=(e < EXPERTS)[None, :], other=-float("inf")
    )
    if NORM:
        layer = tl.load(layer_ptr).to(tl.int64)
        row = tl.program_id(0).to(tl.int64) * WIDTH
        at = tl.arange(0, WIDTH_BLOCK)
        x = tl.load(x_ptr + row + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        norm = tl.load(norm_ptr + layer * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32) + OFFSET
        scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + EPS)
        tl.store(h_ptr + row + at, (x * scale * norm).to(h_ptr.dtype.element_ty), mask=at < WIDTH)
    bits = (logits + 0.0).to(tl.int32, bitcast=True)  # -0 + 0 = 0
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    keys = tl.where((e < EXPERTS)[None, :], ordered * 65536 + (65535 - e)[None, :], INT64_MIN)
    best = tl.zeros([BLOCK, K_BLOCK], tl.int64)
    for i in tl.static_range(TOP_K):
        key = tl.max(keys, 1)[:, None]
        keys = tl.where(keys == key, INT64_MIN, keys)
        best = tl.where(j[None, :] == i, key, best)
    expert = 65535 - (best & 65535).to(tl.int32)
    ordered = (best >> 16).to(tl.int32)
    value = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)
    greatest = tl.sum(tl.where(j[None, :] == 0, value, 0.0), 1)[:, None]
    weight = tl.where((j < TOP_K)[None, :], tl.exp(value - greatest), 0.0)
    if RENORMALISE:
        whole = tl.sum(weight, 1)
    else:
        whole = tl.sum(tl.exp(logits - greatest), 1)
    weight = weight / whole[:, None]
    if MASKED:
        valid = tl.load(valid_ptr + token)[:, None]
        expert = tl.where(valid, expert, EXPERTS)
        weight = tl.where(valid, weight, 0.0)
    at = token[:, None] * TOP_K + j[None, :]
    tl.store(expert_ptr + at, expert, mask=(j < TOP_K)[None, :])
    tl.store(weight_ptr + at, weight, mask=(j < TOP_K)[None, :])


@triton.jit
def _here(expert_ptr, first_ptr, chunk, PAIRS: tl.constexpr, HERE: tl.constexpr, CHUNK: tl.constexpr):
    """Places of a chunk of choices, their experts counted from this device's first, and which of them are here."""
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(expert_ptr + pair, mask=pair < PAIRS, other=0) - tl.load(first_ptr)
    here = (pair < PAIRS) & (expert >= 0) & (expert < HERE)
    return pair, tl.where(here, expert, 0), here


@triton.jit
def _count(
    expert_ptr,
    first_ptr,
    counts_ptr,
    PAIRS: tl.constexpr,
    HERE: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Choices of each expert in one chunk."""
    chunk = tl.program_id(0)
    _, expert, here = _here(expert_ptr, first_ptr, chunk, PAIRS, HERE, CHUNK)
    tl.store(counts_ptr + chunk * BINS + tl.arange(0, BINS), tl.histogram(expert, BINS, mask=here))


@triton.jit
def _sort(
    expert_ptr,
    first_ptr,
    counts_ptr,
    order_ptr,
    block_expert_ptr,
    block_start_ptr,
    block_stop_ptr,
    num_blocks_ptr,
    PAIRS: tl.constexpr,
    HERE: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One expert's choices in one chunk; the program of the first chunk writes the expert's blocks, too."""
    mine = tl.program_id(0)
    chunk = tl.program_id(1)
    bins = tl.arange(0, BINS)
    pair, expert, here = _here(expert_ptr, first_ptr, chunk, PAIRS, HERE, CHUNK)
    earlier = tl.zeros([BINS], tl.int32)  # in the chunks before this
    if CHUNKS == 1:
        total = tl.histogram(expert, BINS, mask=here)
    else:
        total = tl.zeros([BINS], tl.int32)
        for i in tl.range(0, CHUNKS, loop_unroll_factor=8):
            counts = tl.load(counts_ptr + i * BINS + bins)
            total += counts
            earlier += tl.where(i < chunk, counts, 0)
    start = tl.sum(tl.where(bins < mine, total, 0), 0)
    matches = here & (expert == mine)
    rank = tl.cumsum(matches.to(tl.int32), 0) - 1 + tl.sum(tl.where(bins == mine, earlier, 0), 0)
    tl.store(order_ptr + start + rank, pair, mask=matches)
    if chunk == 0:
        blocks = (total + (ROWS - 1)) // ROWS
        stop = start + tl.sum(tl.where(bins == mine, total, 0), 0)
        first = tl.sum(tl.where(bins < mine, blocks, 0), 0)
        num = (stop - start + ROWS - 1) // ROWS
        for base in range(0, num, 32):
            b = base + tl.arange(0, 32)
            row = start + b * ROWS
            tl.store(block_expert_ptr + first + b, tl.zeros([32], tl.int32) + mine, mask=b < num)
            tl.store(block_start_ptr + first + b, row, mask=b < num)
            tl.store(block_stop_ptr + first + b, tl.minimum(row + ROWS, stop), mask=b < num)
        if mine == 0:
            tl.store(num_blocks_ptr, tl.sum(blocks, 0))
