"""What each expert computes, as a list that Triton kernels make on the device. GPUs from Ampere on."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.dispatch import Target
from pallas_kernels.moe.triton_routing import MAX_OWN, Chosen, best, choices, choose, multiply, normalise, of_choice
from pallas_kernels.triton_call import launch

if TYPE_CHECKING:
    from pallas_kernels.linear.api import Norm

CHUNK = 2048
"""Choices that one program of the sort sees."""
MAX_KEYS = 8192
"""Logits, of all tokens, that every program of the sort holds to make all choices anew."""


class Blocks(NamedTuple):
    """Choices in the order of this device's experts, cut into blocks of one expert each."""

    order: jax.Array  # [T * k] int32: the places of choices in [T, k]; others' choices leave the end unwritten
    expert: jax.Array  # [blocks] int32, of this device
    start: jax.Array  # [blocks] int32: where the block begins in `order`
    stop: jax.Array  # [blocks] int32
    count: jax.Array  # [1] int32: blocks that there are, of those that there is room for


def choose_and_sort(
    x: jax.Array,
    router: jax.Array,
    layer: jax.Array,
    *,
    norm: Norm,
    top_k: int,
    renormalise: bool,
    valid: jax.Array | None,
    first_expert: jax.Array,
    num_here: int,
    rows: int,
    counters: jax.Ref | None,
    target: Target,
) -> tuple[Chosen, Blocks]:
    """The choices of `choose`, by expert, each expert's in the order of [T, k], in blocks of up to `rows`.

    Every program reads all choices that it must count, which is quicker than to agree on them with others; of few
    tokens, every program makes all choices anew.
    """
    (tokens, _), num_experts, first = x.shape, router.shape[1], first_expert.reshape(1)
    pairs = tokens * top_k
    k_block, experts_block = triton.next_power_of_2(top_k), triton.next_power_of_2(num_experts)
    tokens_block = max(triton.next_power_of_2(tokens), 128 // k_block)  # a histogram is of 128 numbers at least
    room = min(pairs, num_here) + pairs // rows
    of_blocks = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((pairs,), (room,), (room,), (room,), (1,))]
    sizes = {"HERE": num_here, "BINS": triton.next_power_of_2(num_here), "BLOCK_ROWS": rows}
    if tokens_block * experts_block <= MAX_KEYS and tokens_block * k_block <= CHUNK and tokens <= MAX_OWN:
        logits = multiply(x, router, layer, norm, counters, target, own=True)
        constants = of_choice(x, router, logits, norm, top_k, renormalise, valid) | sizes
        scores = [logits.parts, logits.squares, logits.parts if valid is None else valid]
        expert, weight, h, *blocks = launch(
            _choose_and_sort,
            [*scores, x, norm.weight, layer.reshape(1), first],
            [*choices(tokens, top_k), jax.ShapeDtypeStruct(x.shape, x.dtype), *of_blocks],
            grid=(num_here,),
            constants=constants | {"BLOCK": tokens_block},
            target=target,
            num_warps=8 if tokens_block * experts_block > 2048 else 4,
        )
        return Chosen(expert, weight, h), Blocks(*blocks)
    how = {"norm": norm, "top_k": top_k, "renormalise": renormalise, "valid": valid, "counters": counters}
    chosen = choose(x, router, layer, target=target, **how)
    chunk = min(CHUNK, max(128, triton.next_power_of_2(pairs)))
    chunks = triton.cdiv(pairs, chunk)
    constants = {"PAIRS": pairs, "HERE": num_here, "BINS": sizes["BINS"], "CHUNK": chunk}
    counts = first
    if chunks > 1:
        outputs = [jax.ShapeDtypeStruct((chunks, sizes["BINS"]), jnp.int32)]
        inputs = [chosen.expert, first]
        (counts,) = launch(_count, inputs, outputs, grid=(chunks,), constants=constants, target=target)
    inputs, grid = [chosen.expert, first, counts], (num_here, chunks)
    constants |= {"CHUNKS": chunks, "BLOCK_ROWS": rows}
    return chosen, Blocks(*launch(_sort, inputs, of_blocks, grid=grid, constants=constants, target=target))


@triton.jit
def _choose_and_sort(
    parts_ptr,
    squares_ptr,
    valid_ptr,
    x_ptr,
    norm_ptr,
    layer_ptr,
    first_ptr,
    expert_ptr,
    weight_ptr,
    h_ptr,
    order_ptr,
    block_expert_ptr,
    block_start_ptr,
    block_stop_ptr,
    num_blocks_ptr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    MASKED: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    HERE: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One expert's choices of all tokens, and its blocks; every HERE-th token's choices and its x after the norm."""
    mine = tl.program_id(0)
    token = tl.arange(0, BLOCK)
    j = tl.arange(0, K_BLOCK)
    for before in range(0, ROWS, HERE):
        if before + mine < ROWS:
            normalise(x_ptr, norm_ptr, layer_ptr, h_ptr, before + mine, WIDTH, EPS, OFFSET, WIDTH_BLOCK)
    expert, weight = best(
        parts_ptr,
        squares_ptr,
        valid_ptr,
        token,
        j,
        ROWS,
        ROWS,
        PARTS,
        WIDTH,
        EPS,
        EXPERTS,
        TOP_K,
        RENORMALISE,
        MASKED,
        EXPERTS_BLOCK,
    )
    pair = token[:, None] * TOP_K + j[None, :]
    there = (token < ROWS)[:, None] & (j < TOP_K)[None, :]
    written = there & (token % HERE == mine)[:, None]
    tl.store(expert_ptr + pair, expert, mask=written)
    tl.store(weight_ptr + pair, weight, mask=written)
    expert -= tl.load(first_ptr)
    here = tl.reshape((there & (expert >= 0) & (expert < HERE)).to(tl.int32), [BLOCK * K_BLOCK]) == 1
    expert = tl.where(here, tl.reshape(expert, [BLOCK * K_BLOCK]), 0)
    total = tl.histogram(expert, BINS, mask=here)
    bins = tl.arange(0, BINS)
    start = tl.sum(tl.where(bins < mine, total, 0), 0)
    matches = here & (expert == mine)
    rank = tl.cumsum(matches.to(tl.int32), 0) - 1
    tl.store(order_ptr + start + rank, tl.reshape(pair, [BLOCK * K_BLOCK]), mask=matches)
    _write_blocks(
        block_expert_ptr, block_start_ptr, block_stop_ptr, num_blocks_ptr, mine, total, start, BINS, BLOCK_ROWS
    )


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
    BLOCK_ROWS: tl.constexpr,
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
        _write_blocks(
            block_expert_ptr, block_start_ptr, block_stop_ptr, num_blocks_ptr, mine, total, start, BINS, BLOCK_ROWS
        )


@triton.jit
def _write_blocks(
    block_expert_ptr,
    block_start_ptr,
    block_stop_ptr,
    num_blocks_ptr,
    mine,
    total,
    start,
    BINS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """The blocks of an expert, of which the choices begin at `start`; the first expert's program counts all blocks."""
    bins = tl.arange(0, BINS)
    blocks = (total + (BLOCK_ROWS - 1)) // BLOCK_ROWS
    stop = start + tl.sum(tl.where(bins == mine, total, 0), 0)
    first = tl.sum(tl.where(bins < mine, blocks, 0), 0)
    num = (stop - start + BLOCK_ROWS - 1) // BLOCK_ROWS
    for base in range(0, num, 32):
        block = base + tl.arange(0, 32)
        row = start + block * BLOCK_ROWS
        tl.store(block_expert_ptr + first + block, tl.zeros([32], tl.int32) + mine, mask=block < num)
        tl.store(block_start_ptr + first + block, row, mask=block < num)
        tl.store(block_stop_ptr + first + block, tl.minimum(row + BLOCK_ROWS, stop), mask=block < num)
    if mine == 0:
        tl.store(num_blocks_ptr, tl.sum(blocks, 0))
