"""What each expert computes, as a list that Triton kernels make on the device. GPUs from Ampere on."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.dispatch import Target
from pallas_kernels.moe.triton_routing import Chosen, choose
from pallas_kernels.triton_call import launch

if TYPE_CHECKING:
    from pallas_kernels.linear.api import Norm

CHUNK = 2048
"""Choices that one program of the sort sees."""


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

    Every program reads all choices that it must count, which is quicker than to agree on them with others.
    """
    pairs, first, bins = x.shape[0] * top_k, first_expert.reshape(1), triton.next_power_of_2(num_here)
    room = min(pairs, num_here) + pairs // rows
    of_blocks = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((pairs,), (room,), (room,), (room,), (1,))]
    how = {"norm": norm, "top_k": top_k, "renormalise": renormalise, "valid": valid, "counters": counters}
    chosen = choose(x, router, layer, target=target, **how)
    chunk = min(CHUNK, max(128, triton.next_power_of_2(pairs)))
    chunks = triton.cdiv(pairs, chunk)
    constants = {"PAIRS": pairs, "HERE": num_here, "BINS": bins, "CHUNK": chunk}
    counts = first
    if chunks > 1:
        outputs = [jax.ShapeDtypeStruct((chunks, bins), jnp.int32)]
        inputs = [chosen.expert, first]
        (counts,) = launch(_count, inputs, outputs, grid=(chunks,), constants=constants, target=target)
    inputs, grid = [chosen.expert, first, counts], (num_here, chunks)
    constants |= {"CHUNKS": chunks, "ROWS": rows}
    return chosen, Blocks(*launch(_sort, inputs, of_blocks, grid=grid, constants=constants, target=target))


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
        _write_blocks(block_expert_ptr, block_start_ptr, block_stop_ptr, num_blocks_ptr, mine, total, start, BINS, ROWS)


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
    ROWS: tl.constexpr,
):
    """The blocks of an expert, of which the choices begin at `start`; the first expert's program counts all blocks."""
    bins = tl.arange(0, BINS)
    blocks = (total + (ROWS - 1)) // ROWS
    stop = start + tl.sum(tl.where(bins == mine, total, 0), 0)
    first = tl.sum(tl.where(bins < mine, blocks, 0), 0)
    num = (stop - start + ROWS - 1) // ROWS
    for base in range(0, num, 32):
        block = base + tl.arange(0, 32)
        row = start + block * ROWS
        tl.store(block_expert_ptr + first + block, tl.zeros([32], tl.int32) + mine, mask=block < num)
        tl.store(block_start_ptr + first + block, row, mask=block < num)
        tl.store(block_stop_ptr + first + block, tl.minimum(row + ROWS, stop), mask=block < num)
    if mine == 0:
        tl.store(num_blocks_ptr, tl.sum(blocks, 0))
