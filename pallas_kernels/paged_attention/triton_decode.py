"""Attention of rows with one token each over their pages, split over the context, in one Triton kernel.

Every program takes a run of positions of one row and KV head. Where a row has several, each leaves its sum and its
maximum in a scratch array, and the last to arrive adds them up in a fixed order: no second kernel, and the same bits
whatever the order of arrival. Source: Dao et al. 2023 (Flash-Decoding), Milakov and Gimelshein 2018 (online softmax).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.dispatch import Target
from pallas_kernels.paged_attention.triton_softmax import add_sink, exponents
from pallas_kernels.triton_call import INTERPRETING, check_dtypes, launch

if TYPE_CHECKING:
    from pallas_kernels.kv_write.api import HeadNorms
    from pallas_kernels.paged_attention.api import PagedRows

BLOCK = 64
"""Positions of one round of a program."""
MIN_SPLIT = 256
"""Fewest positions that are worth a program of their own."""
PROGRAMS = 264
"""Where rows are few they are split until a launch has about this many: two for each of an H200's 132
multiprocessors."""
MAX_SPLITS = 128
LEAST_WIDTH = 1 if INTERPRETING else 16
"""Narrowest heads: what the tensor cores multiply at once."""
NUM_WARPS = 4
NUM_STAGES = 4
MERGE = 16
"""Parts that the last program of a row reads at a time."""


def num_splits(num_rows: int, num_kv_heads: int, table_positions: int) -> int:
    """Programs per row and KV head: enough to fill the card with few rows, never below MIN_SPLIT positions each."""
    wanted = PROGRAMS // (num_rows * num_kv_heads)
    return max(1, min(MAX_SPLITS, max(4, wanted), triton.cdiv(table_positions, MIN_SPLIT)))


def run_rows(
    q: jax.Ref,
    pools: tuple[jax.Array | jax.Ref, jax.Array | jax.Ref],
    layer: jax.Array,
    rows: PagedRows,
    *,
    scale: float,
    window: jax.Array | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    counters: jax.Ref | None,
    target: Target,
) -> None:
    """Replaces the queries of every row that has one token, q Ref [T, H, E], by its attention."""
    sizes = _sizes(pools[0].shape, q.shape[1] // pools[0].shape[3], rows, counters)
    constants = sizes.constants | _scoring(scale, window, soft_cap, sinks) | _fused(None, fused=False)
    unused = rows.context_len
    launch(
        _decode_attention,
        [
            *_inputs(layer, rows, window, sinks),
            *[unused] * 5,
            *pools,
        ],
        sizes.scratch,
        in_place=[sizes.counters, q],
        grid=sizes.grid,
        constants=constants,
        target=target,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )


def run(
    qkv: jax.Array,
    rotary: tuple[jax.Array, jax.Array],
    pools: tuple[jax.Ref, jax.Ref],
    layer: jax.Array,
    rows: PagedRows,
    *,
    norms: HeadNorms | None,
    scale: float,
    window: jax.Array | None,
    counters: jax.Ref | None,
    target: Target,
) -> jax.Array:
    """The contract is `decode.decode_attention`: the write of the new keys and values is part of the same kernel."""
    num_rows, num_kv_heads, heads, width = qkv.shape
    check_dtypes(qkv, *pools, *(norms[:2] if norms else ()))
    if not LEAST_WIDTH <= width <= 256 or width & (width - 1):
        raise NotImplementedError(f"heads are {width} wide; it takes powers of two from {LEAST_WIDTH} to 256")
    group = heads - 2
    sizes = _sizes(pools[0].shape, group, rows, counters)
    constants = sizes.constants | _scoring(scale, window, None, None)
    constants |= _fused(norms, fused=True)
    q_norm, k_norm = norms[:2] if norms else (qkv, qkv)
    return launch(
        _decode_attention,
        [*_inputs(layer, rows, window, None), qkv, *rotary, q_norm, k_norm],
        [jax.ShapeDtypeStruct((num_rows, num_kv_heads * group, width), qkv.dtype), *sizes.scratch],
        in_place=[*pools, sizes.counters],
        grid=sizes.grid,
        constants=constants,
        target=target,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )[0]


class Sizes(NamedTuple):
    """Of a launch."""

    grid: tuple[int, int, int]
    scratch: list[jax.ShapeDtypeStruct]  # for the parts of a row: their sums, their maxima and weights
    counters: jax.Ref
    constants: dict[str, Any]


def _sizes(pool: tuple[int, ...], group: int, rows: PagedRows, counters: jax.Ref | None) -> Sizes:
    _, pages, page_size, num_kv_heads, width = pool
    num_rows, table_width = rows.page_table.shape
    splits = num_splits(num_rows, num_kv_heads, table_width * page_size)
    if counters is None or counters.shape[0] < num_rows * num_kv_heads:
        counters, splits = jax.new_ref(jnp.zeros(1, jnp.int32)), 1
    partial_group = triton.next_power_of_2(group)
    parts = (num_rows, num_kv_heads, splits, partial_group) if splits > 1 else (1, 1, 1, 1)
    constants = {
        "PAGES": pages,
        "PAGE_SIZE": page_size,
        "TABLE_WIDTH": table_width,
        "KV_HEADS": num_kv_heads,
        "GROUP": group,
        "WIDTH": width,
        "SPLITS": splits,
        "MIN_SPLIT": MIN_SPLIT,
        "BLOCK": BLOCK,
        "GROUP_BLOCK": max(partial_group, 1 if INTERPRETING else 16),
        "PARTIAL_GROUP": partial_group,
        "SPLIT_BLOCK": triton.next_power_of_2(splits),
        "MERGE": min(MERGE, triton.next_power_of_2(splits)),
        "WIDTH_BLOCK": triton.next_power_of_2(width),
    }
    scratch = [jax.ShapeDtypeStruct((*parts, last), jnp.float32) for last in (width, 2)]
    return Sizes((num_rows, num_kv_heads, splits), scratch, counters, constants)


def _fused(norms: HeadNorms | None, *, fused: bool) -> dict[str, Any]:
    """Whether queries, keys and values come from a product, and how their heads are normalised."""
    eps, offset = (norms.eps, norms.offset) if norms else (0.0, 0.0)
    return {"FUSED": fused, "NORM": norms is not None, "EPS": eps, "OFFSET": offset}


def _scoring(
    scale: float, window: jax.Array | None, soft_cap: float | None, sinks: jax.Array | None
) -> dict[str, float | bool]:
    return {
        "SCALE": scale * math.log2(math.e),
        "SOFT_CAP": soft_cap or 0.0,
        "WINDOWED": window is not None,
        "SINKS": sinks is not None,
    }


def _inputs(layer: jax.Array, rows: PagedRows, window: jax.Array | None, sinks: jax.Array | None) -> list[jax.Array]:
    return [
        layer.reshape(1),
        rows.page_table,
        rows.query_start,
        rows.query_len,
        rows.context_len,
        layer.reshape(1) if window is None else window.reshape(1),
        rows.context_len if sinks is None else sinks,
    ]


@triton.jit
def _decode_attention(
    layer_ptr,
    table_ptr,
    query_start_ptr,
    query_len_ptr,
    context_len_ptr,
    window_ptr,
    sinks_ptr,
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    k_pool_ptr,
    v_pool_ptr,
    counters_ptr,
    q_ptr,
    partial_ptr,
    partial_stats_ptr,
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
    SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    PARTIAL_GROUP: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    MERGE: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    FUSED: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """FUSED: q_ptr is where results go, and queries, the new key and the new value come from qkv_ptr."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    if tl.load(query_len_ptr + row) != 1:
        return
    length = tl.load(context_len_ptr + row) + 1
    first = 0
    if WINDOWED:
        first = tl.maximum(0, length - tl.load(window_ptr)) // BLOCK * BLOCK
    positions = tl.cdiv(tl.cdiv(length - first, SPLITS), BLOCK) * BLOCK
    positions = tl.maximum(positions, MIN_SPLIT)
    used = tl.cdiv(length - first, positions)
    if split >= used:
        return
    start = first + split * positions
    stop = tl.minimum(start + positions, length)

    layer = tl.load(layer_ptr).to(tl.int64)
    token = tl.load(query_start_ptr + row).to(tl.int64)
    g = tl.arange(0, GROUP_BLOCK)
    e = tl.arange(0, WIDTH_BLOCK)
    in_head = (g < GROUP)[:, None] & (e < WIDTH)[None, :]
    q_place = (token * KV_HEADS + head) * GROUP * WIDTH + g[:, None] * WIDTH + e[None, :]
    kv_place = layer * PAGES * PAGE_SIZE * KV_HEADS * WIDTH + head * WIDTH
    k_base = k_pool_ptr + kv_place
    v_base = v_pool_ptr + kv_place
    table = table_ptr + row * TABLE_WIDTH
    if FUSED:
        of_head = qkv_ptr + (token * KV_HEADS + head) * (GROUP + 2) * WIDTH
        cos = tl.load(cos_ptr + token * (WIDTH // 2) + e % (WIDTH // 2))
        sin = tl.load(sin_ptr + token * (WIDTH // 2) + e % (WIDTH // 2))
        norm = q_norm_ptr + layer * WIDTH
        heads = of_head + g[:, None] * WIDTH
        q = _turn(heads, g < GROUP, norm, cos, sin, WIDTH, NORM, EPS, OFFSET).to(q_ptr.dtype.element_ty)
        if stop == length:
            page = tl.load(table + (length - 1) // PAGE_SIZE).to(tl.int64)
            new_place = ((page * PAGE_SIZE + (length - 1) % PAGE_SIZE) * (KV_HEADS * WIDTH)) + e[None, :]
            one_row = tl.arange(0, 1)
            key = of_head + GROUP * WIDTH + one_row[:, None]
            k_new = _turn(key, one_row == 0, k_norm_ptr + layer * WIDTH, cos, sin, WIDTH, NORM, EPS, OFFSET)
            tl.store(k_base + new_place, k_new.to(k_pool_ptr.dtype.element_ty))
            tl.store(v_base + new_place, tl.load(key + WIDTH + e[None, :]))
            # Other threads of this program read them next.
            tl.debug_barrier()
    else:
        q = tl.load(q_ptr + q_place, mask=in_head, other=0.0)

    best = tl.full([GROUP_BLOCK], -1e30, tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    acc = tl.zeros([GROUP_BLOCK, WIDTH_BLOCK], tl.float32)
    for block in range(start, stop, BLOCK):
        position = block + tl.arange(0, BLOCK)
        seen = position < stop
        if WINDOWED:
            read = seen & (length - 1 - position < tl.load(window_ptr))
        else:
            read = seen
        page = tl.load(table + position // PAGE_SIZE, mask=seen, other=0).to(tl.int64)
        place = ((page * PAGE_SIZE + position % PAGE_SIZE) * (KV_HEADS * WIDTH))[:, None] + e[None, :]
        in_context = read[:, None] & (e < WIDTH)[None, :]
        k = tl.load(k_base + place, mask=in_context, other=0.0)
        scores = exponents(tl.dot(q, k.T), SCALE, SOFT_CAP)
        scores = tl.where(read[None, :], scores, -1e30)
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - new_best[:, None])
        weights = tl.where(read[None, :], weights, 0.0)
        rescale = tl.exp2(best - new_best)
        total = total * rescale + tl.sum(weights, 1)
        v = tl.load(v_base + place, mask=in_context, other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None])
        best = new_best

    one = q_ptr.dtype.element_ty
    counter = counters_ptr + row * KV_HEADS + head
    if used == 1:
        if SINKS:
            sink = tl.load(sinks_ptr + head * GROUP + g, mask=g < GROUP, other=0.0)
            acc, total = add_sink(acc, best, total, sink)
        tl.store(q_ptr + q_place, (acc / total[:, None]).to(one), mask=in_head)
    else:
        slot = (row * KV_HEADS + head) * SPLITS + split
        in_partial = (g < PARTIAL_GROUP)[:, None] & (e < WIDTH)[None, :]
        tl.store(partial_ptr + slot * PARTIAL_GROUP * WIDTH + g[:, None] * WIDTH + e[None, :], acc, mask=in_partial)
        stats = partial_stats_ptr + slot * PARTIAL_GROUP * 2 + g * 2
        tl.store(stats, best, mask=g < PARTIAL_GROUP)
        tl.store(stats + 1, total, mask=g < PARTIAL_GROUP)
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel") == used - 1:
            tl.store(counter, 0)
            _combine(
                partial_ptr + (row * KV_HEADS + head) * SPLITS * PARTIAL_GROUP * WIDTH,
                partial_stats_ptr + (row * KV_HEADS + head) * SPLITS * PARTIAL_GROUP * 2,
                used,
                sinks_ptr + head * GROUP,
                q_ptr + (token * KV_HEADS + head) * GROUP * WIDTH,
                SINKS,
                GROUP,
                WIDTH,
                PARTIAL_GROUP,
                WIDTH_BLOCK,
                SPLIT_BLOCK,
                MERGE,
            )


@triton.jit
def _turn(
    head_ptr,
    real,
    norm_ptr,
    cos,
    sin,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Heads [N, WIDTH] in float32, normalised and with channel pairs (i, i + WIDTH / 2) rotated. head_ptr [N, 1]."""
    HALF: tl.constexpr = WIDTH // 2
    e = tl.arange(0, WIDTH)
    partner = (e + HALF) % WIDTH
    x = tl.load(head_ptr + e[None, :], mask=real[:, None], other=0.0).to(tl.float32)
    other = tl.load(head_ptr + partner[None, :], mask=real[:, None], other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + EPS)[:, None]
        x *= scale * (OFFSET + tl.load(norm_ptr + e).to(tl.float32))[None, :]
        other *= scale * (OFFSET + tl.load(norm_ptr + partner).to(tl.float32))[None, :]
    return x * cos[None, :] + tl.where(e < HALF, -sin, sin)[None, :] * other


@triton.jit
def _combine(
    partial_ptr,
    stats_ptr,
    used,
    sinks_ptr,
    out_ptr,
    SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTIAL_GROUP: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    MERGE: tl.constexpr,
):
    """Adds up what the programs of a row and KV head left, MERGE of them at a time, and stores the result.

    All is read past the L1 cache, which does not see what other multiprocessors wrote.
    """
    g = tl.arange(0, PARTIAL_GROUP)
    e = tl.arange(0, WIDTH_BLOCK)
    every = tl.arange(0, SPLIT_BLOCK)[:, None]
    all_stats = stats_ptr + every * PARTIAL_GROUP * 2 + g[None, :] * 2
    best = tl.max(tl.load(all_stats, mask=every < used, other=-1e30, cache_modifier=".cg"), 0)
    total = tl.zeros([MERGE, PARTIAL_GROUP], tl.float32)
    acc = tl.zeros([MERGE, PARTIAL_GROUP, WIDTH_BLOCK], tl.float32)
    for first in range(0, used, MERGE):
        i = first + tl.arange(0, MERGE)[:, None]
        stats = stats_ptr + i * PARTIAL_GROUP * 2 + g[None, :] * 2
        part_best = tl.load(stats, mask=i < used, other=-1e30, cache_modifier=".cg")
        part_total = tl.load(stats + 1, mask=i < used, other=0.0, cache_modifier=".cg")
        place = (i * PARTIAL_GROUP + g[None, :])[:, :, None] * WIDTH + e[None, None, :]
        inside = (i < used)[:, :, None] & (e < WIDTH)[None, None, :]
        part = tl.load(partial_ptr + place, mask=inside, other=0.0, cache_modifier=".cg")
        weight = tl.exp2(part_best - best[None, :])
        total += part_total * weight
        acc += part * weight[:, :, None]
    summed = tl.sum(acc, 0)
    total_sum = tl.sum(total, 0)
    if SINKS:
        sink = tl.load(sinks_ptr + g, mask=g < GROUP, other=0.0)
        summed, total_sum = add_sink(summed, best, total_sum, sink)
    place = g[:, None] * WIDTH + e[None, :]
    in_head = (g < GROUP)[:, None] & (e < WIDTH)[None, :]
    tl.store(out_ptr + place, (summed / total_sum[:, None]).to(out_ptr.dtype.element_ty), mask=in_head)
