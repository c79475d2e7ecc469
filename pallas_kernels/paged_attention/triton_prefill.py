"""Attention of rows with several tokens over their pages, a block of queries and a KV head per program, in Triton.

Source: Dao 2023 (FlashAttention-2); the query heads of a KV head share its keys and values, as rows of one product.
"""

from __future__ import annotations

import math

import jax
import triton
import triton.language as tl

from pallas_kernels.dispatch import Target
from pallas_kernels.paged_attention.blocks import QueryBlocks
from pallas_kernels.paged_attention.triton_softmax import add_sink, exponents
from pallas_kernels.triton_call import launch

QUERY_ROWS = 128
"""Rows of a program's product: tokens times query heads of one KV head."""
BLOCK = {64: 128, 128: 64, 256: 32}
"""Positions of one round, by head width."""
NUM_WARPS = {64: 8, 128: 8, 256: 8}
NUM_STAGES = {64: 3, 128: 3, 256: 2}


def query_block(group: int) -> int:
    """Tokens of a block of queries, for `group` query heads per KV head."""
    return max(1, QUERY_ROWS // triton.next_power_of_2(group))


def run_rows(
    q: jax.Ref,
    pools: tuple[jax.Array | jax.Ref, jax.Array | jax.Ref],
    layer: jax.Array,
    page_table: jax.Array,
    blocks: QueryBlocks,
    *,
    scale: float,
    window: jax.Array | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    target: Target,
) -> None:
    """Replaces the queries of the tokens in `blocks`, q Ref [T, H, E], by their attention. page_table [R, W]."""
    _, num_heads, width = q.shape
    _, pages, page_size, num_kv_heads, _ = pools[0].shape
    group = num_heads // num_kv_heads
    group_block = triton.next_power_of_2(group)
    width_block = max(64, triton.next_power_of_2(width))
    constants = {
        "PAGES": pages,
        "PAGE_SIZE": page_size,
        "TABLE_WIDTH": page_table.shape[1],
        "KV_HEADS": num_kv_heads,
        "GROUP": group,
        "WIDTH": width,
        "SCALE": scale * math.log2(math.e),
        "SOFT_CAP": soft_cap or 0.0,
        "WINDOWED": window is not None,
        "SINKS": sinks is not None,
        "QUERY_BLOCK": query_block(group),
        "BLOCK": BLOCK[width_block],
        "GROUP_BLOCK": group_block,
        "WIDTH_BLOCK": width_block,
    }
    launch(
        _prefill_attention,
        [
            pools[0],
            pools[1],
            layer.reshape(1),
            page_table,
            blocks.row,
            blocks.token,
            blocks.position,
            blocks.count,
            layer.reshape(1) if window is None else window.reshape(1),
            layer.reshape(1) if sinks is None else sinks,
        ],
        [],
        in_place=[q],
        grid=(num_kv_heads, blocks.row.shape[0]),
        constants=constants,
        target=target,
        num_warps=NUM_WARPS[width_block],
        num_stages=NUM_STAGES[width_block],
    )


@triton.jit
def _prefill_attention(
    k_pool_ptr,
    v_pool_ptr,
    layer_ptr,
    table_ptr,
    block_row_ptr,
    block_token_ptr,
    block_position_ptr,
    block_count_ptr,
    window_ptr,
    sinks_ptr,
    q_ptr,
    PAGES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
):
    ROWS: tl.constexpr = QUERY_BLOCK * GROUP_BLOCK
    head = tl.program_id(0)
    # The last blocks of a prompt see most, and start first.
    index = tl.num_programs(1) - 1 - tl.program_id(1)
    count = tl.load(block_count_ptr + index)
    if count == 0:
        return
    layer = tl.load(layer_ptr).to(tl.int64)
    first_token = tl.load(block_token_ptr + index).to(tl.int64)
    first_position = tl.load(block_position_ptr + index)
    table = table_ptr + tl.load(block_row_ptr + index) * TABLE_WIDTH
    r = tl.arange(0, ROWS)
    i = r // GROUP_BLOCK
    g = r % GROUP_BLOCK
    e = tl.arange(0, WIDTH_BLOCK)
    real = ((i < count) & (g < GROUP))[:, None] & (e < WIDTH)[None, :]
    q_place = ((first_token + i) * (KV_HEADS * GROUP) + head * GROUP + g)[:, None] * WIDTH + e[None, :]
    q = tl.load(q_ptr + q_place, mask=real, other=0.0)
    query_position = first_position + i
    kv_place = layer * PAGES * PAGE_SIZE * KV_HEADS * WIDTH + head * WIDTH
    k_base = k_pool_ptr + kv_place
    v_base = v_pool_ptr + kv_place

    best = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH_BLOCK], tl.float32)
    stop = first_position + count
    start = 0
    # Up to here every query sees every position: no mask.
    whole = (first_position + 1) // BLOCK * BLOCK
    if WINDOWED:
        window = tl.load(window_ptr)
        start = tl.maximum(0, first_position - window + 1) // BLOCK * BLOCK
        whole = start
    for block in range(start, whole, BLOCK):
        position = block + tl.arange(0, BLOCK)
        page = tl.load(table + position // PAGE_SIZE).to(tl.int64)
        place = ((page * PAGE_SIZE + position % PAGE_SIZE) * (KV_HEADS * WIDTH))[:, None] + e[None, :]
        if WIDTH == WIDTH_BLOCK:
            k = tl.load(k_base + place)
            v = tl.load(v_base + place)
        else:
            k = tl.load(k_base + place, mask=(e < WIDTH)[None, :], other=0.0)
            v = tl.load(v_base + place, mask=(e < WIDTH)[None, :], other=0.0)
        scores = tl.dot(q, k.T)
        if SOFT_CAP > 0:
            scores = exponents(scores, SCALE, SOFT_CAP)
            new_best = tl.maximum(best, tl.max(scores, 1))
            weights = tl.exp2(scores - new_best[:, None])
        else:
            new_best = tl.maximum(best, tl.max(scores, 1) * SCALE)
            weights = tl.exp2(scores * SCALE - new_best[:, None])
        rescale = tl.exp2(best - new_best)
        total = total * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None])
        best = new_best
    for block in range(whole, stop, BLOCK):
        position = block + tl.arange(0, BLOCK)
        behind = query_position[:, None] - position[None, :]
        seen = behind >= 0
        if WINDOWED:
            seen = seen & (behind < window)
        read = position < stop
        page = tl.load(table + position // PAGE_SIZE, mask=read, other=0).to(tl.int64)
        place = ((page * PAGE_SIZE + position % PAGE_SIZE) * (KV_HEADS * WIDTH))[:, None] + e[None, :]
        k = tl.load(k_base + place, mask=read[:, None] & (e < WIDTH)[None, :], other=0.0)
        v = tl.load(v_base + place, mask=read[:, None] & (e < WIDTH)[None, :], other=0.0)
        scores = exponents(tl.dot(q, k.T), SCALE, SOFT_CAP)
        scores = tl.where(seen, scores, -1e30)
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.where(seen, tl.exp2(scores - new_best[:, None]), 0.0)
        rescale = tl.exp2(best - new_best)
        total = total * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None])
        best = new_best
    if SINKS:
        acc, total = add_sink(acc, best, total, tl.load(sinks_ptr + head * GROUP + g, mask=g < GROUP, other=0.0))
    out = acc / tl.maximum(total, 1e-30)[:, None]
    tl.store(q_ptr + q_place, out.to(q_ptr.dtype.element_ty), mask=real)
