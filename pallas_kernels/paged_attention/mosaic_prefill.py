"""Chunked-prefill attention on Hopper's tensor cores: TMA per page, wgmma, one memory and two compute warpgroups."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.mosaic_schedule import (
    COMPUTE_WARPGROUPS,
    WARPGROUP_ROWS,
    Settings,
    Tuning,
    Warpgroup,
    Work,
    attend_tiles,
)

if TYPE_CHECKING:
    from pallas_kernels.paged_attention.api import PagedRows

HEAD_WIDTHS = (64, 128)
PAGE_SIZES = (16, 32, 64, 128)
ROW_ALIGNMENT = 8
"""Rows of a swizzled tile in shared memory. TMA fills whole tiles, so blocks of queries start at multiples of this."""
COMPUTE_REGISTERS, MEMORY_REGISTERS = 216, 72
"""Per thread: 2 * 128 * 216 + 128 * 72 of the 65,536 of a multiprocessor. With 232 and 40 the memory warpgroup would
spill."""
FIELDS = 5
"""Numbers per block in a plan."""


def attend_rows(
    q: jax.Ref | tuple[jax.Array, jax.Ref],
    pools: tuple[jax.Array | jax.Ref, jax.Array | jax.Ref],
    layer: jax.Array,
    rows: PagedRows,
    *,
    scale: float,
    plan: jax.Array | None = None,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> None:
    """Replaces the queries of every row's tokens by their attention, and leaves those of all other tokens as they are.

    q [T, H, E], or queries and another Ref for the results; pools [L, P, S, K, E] in q's dtype, the step's own keys and
    values in them already; layer: int32, scalar or of one element. plan: what `make_plan` made of the step. interpret:
    an `InterpretGPUParams` runs the kernel on a CPU.
    Raises NotImplementedError, with the reason, for what the kernel does not take.
    Source: Dao et al. 2022 (FlashAttention), algorithm 1; two warpgroups in turn as in Shah et al. 2024
    (FlashAttention-3), section 3.1; pages as in Kwon et al. 2023 (PagedAttention).
    """
    # A Ref that is passed twice would be copied.
    q_out = q if isinstance(q, tuple) else (q,)
    q = q_out[0]
    num_heads, width = q.shape[1:]
    _, num_pages, page_size, num_kv_heads, _ = pools[0].shape
    tuning = _resolve(tuning, q.shape, pools[0])
    _check(q, pools[0], tuning, scale)
    if plan is None:
        plan = make_plan(q.shape, pools[0], rows, tuning=tuning)
    group, score_scale = num_heads // num_kv_heads, scale * math.log2(math.e)
    settings = Settings(num_pages, page_size, width, group, score_scale, q.dtype, tuning, bool(interpret))
    most = plan.shape[0] // FIELDS * (num_heads // tuning.heads_per_program)
    kernel = plgpu.kernel(
        functools.partial(_kernel, settings=settings),
        out_type=(),
        scratch_types=_scratch(settings),
        grid=(min(tuning.programs, most),),
        grid_names=("program",),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name="paged_prefill_attention",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    flat_pools = (pool[...].reshape(-1, num_kv_heads * width) for pool in pools)
    kernel(*flat_pools, plan, rows.page_table, jnp.asarray(layer, jnp.int32).reshape(1), *q_out)


def make_plan(
    shape: tuple[int, int, int],
    pool: jax.Array | jax.Ref,
    rows: PagedRows,
    *,
    single_too: bool = True,
    tuning: Tuning | None = None,
) -> jax.Array:
    """What a step's layers have in common, for queries of `shape` [T, H, E]. single_too: also rows of one token.

    XLA does not lift it out of a scan over layers, in each of which it is five small kernels.
    """
    return cut(rows, shape[0], _resolve(tuning, shape, pool).block_tokens, single_too=single_too)


def _resolve(tuning: Tuning | None, shape: tuple[int, int, int], pool: jax.Array | jax.Ref) -> Tuning:
    tuning = tuning or Tuning(stages=2 if shape[2] > 64 else 4)
    shareable = shape[1] // pool.shape[3] % COMPUTE_WARPGROUPS == 0
    return tuning._replace(share_tokens=tuning.share_tokens and shareable)


def _check(q: jax.Array | jax.Ref, pool: jax.Array | jax.Ref, tuning: Tuning, scale: float) -> None:
    if q.dtype not in (jnp.bfloat16, jnp.float16) or pool.dtype != q.dtype:
        raise NotImplementedError(f"queries {q.dtype} and pools {pool.dtype}: both bfloat16 or both float16 it must be")
    if q.shape[2] not in HEAD_WIDTHS:
        raise NotImplementedError(f"head width {q.shape[2]} is not one of {HEAD_WIDTHS}")
    if pool.shape[2] not in PAGE_SIZES or tuning.block_kv % pool.shape[2]:
        raise NotImplementedError(f"{pool.shape[2]} tokens per page: not one of {PAGE_SIZES} in {tuning.block_kv}")
    if q.shape[0] % ROW_ALIGNMENT:
        raise NotImplementedError(f"{q.shape[0]} tokens are no multiple of {ROW_ALIGNMENT}")
    if scale <= 0:
        raise NotImplementedError(f"scale {scale} is not positive")


def cut(rows: PagedRows, num_tokens: int, block_tokens: int, *, single_too: bool) -> jax.Array:
    """Cuts the rows into blocks of tokens; those that read the longest contexts come first.

    Blocks start at multiples of ROW_ALIGNMENT tokens, so a row's first block may begin with tokens of the row before,
    which it leaves alone. Returns [N * FIELDS + 1] int32, N static: per block its row, the token and the position (in
    the row's sequence) of its first place, and the range of places that hold tokens of the row; then the number of
    blocks.
    """
    num_rows = rows.query_len.shape[0]
    query_len = rows.query_len if single_too else jnp.where(rows.query_len > 1, rows.query_len, 0)
    lead = rows.query_start % ROW_ALIGNMENT
    per_row = jnp.where(query_len > 0, (lead + query_len + block_tokens - 1) // block_tokens, 0)
    ends = jnp.cumsum(per_row)
    n = jnp.arange((num_tokens + (ROW_ALIGNMENT - 1) * num_rows) // block_tokens + num_rows)
    row = jnp.minimum(jnp.searchsorted(ends, n, side="right", method="compare_all"), num_rows - 1)
    offset = (n - (ends - per_row)[row]) * block_tokens - lead[row]  # of the block's first place in the row's tokens
    low = jnp.clip(-offset, 0, block_tokens)
    high = jnp.minimum(query_len[row] - offset, block_tokens)
    position = rows.context_len[row] + offset
    # A sort would be kernels of its own; comparing all with all is one fusion.
    work = jnp.where(n < ends[-1], position + high, 0)
    ahead = (work[None, :] > work[:, None]) | ((work[None, :] == work[:, None]) & (n[None, :] < n[:, None]))
    place = jnp.sum(ahead, axis=1)
    fields = jnp.stack([row, rows.query_start[row] + offset, position, low, high], axis=1).astype(jnp.int32)
    fields = jnp.zeros_like(fields).at[place].set(fields, unique_indices=True)
    return jnp.append(fields.reshape(-1), ends[-1].astype(jnp.int32))


def _scratch(settings: Settings) -> dict[str, Any]:
    """Shared memory of a program: 192 KiB at E = 128 with two stages of 128 positions (227 KiB are there)."""
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    tuning, dtype = settings.tuning, settings.dtype
    pages, stages = tuning.block_kv // settings.page_size, tuning.stages
    tiles = (stages, tuning.block_kv, settings.width)
    queries = (COMPUTE_WARPGROUPS, WARPGROUP_ROWS, settings.width)
    scratch = {
        "q": plgpu.SMEM(queries, dtype, transforms=tiled),
        # Not in tiles of eight rows, unlike the others: a store may begin and end at any row.
        "out": plgpu.SMEM(queries, dtype),
        "k": plgpu.SMEM(tiles, dtype, transforms=tiled),
        "v": plgpu.SMEM(tiles, dtype, transforms=tiled),
        "q_loaded": plgpu.Barrier(num_barriers=COMPUTE_WARPGROUPS),
        "q_read": plgpu.Barrier(num_barriers=COMPUTE_WARPGROUPS),
        "k_loaded": plgpu.Barrier(num_arrivals=pages, num_barriers=stages),
        "v_loaded": plgpu.Barrier(num_arrivals=pages, num_barriers=stages),
        "last_v_loaded": plgpu.Barrier(num_arrivals=pages),
        "k_read": plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=stages),
        "v_read": plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=stages),
        "turn": plgpu.Barrier(num_barriers=COMPUTE_WARPGROUPS),
    }
    if settings.interpret:  # The interpreter has no wgmma whose left operand is in registers.
        scratch["p"] = plgpu.SMEM((*queries[:2], tuning.block_kv), dtype, transforms=tiled)
    return scratch


def _kernel(
    k_ref: jax.Ref,  # [L * P * S, K * E]
    v_ref: jax.Ref,  # the same
    plan_ref: jax.Ref,  # [N * FIELDS + 1]
    table_ref: jax.Ref,  # [R, W]
    layer_ref: jax.Ref,  # [1]
    *q_out_refs: jax.Ref,  # [T, H, E]: queries and results, or both in one
    settings: Settings,
    **shared: jax.Ref,
) -> None:
    q_ref, out_ref = q_out_refs[0], q_out_refs[-1]
    warpgroup, work = lax.axis_index("warpgroup"), functools.partial(_for_each_work, q_ref, plan_ref, settings, shared)

    @pl.when(warpgroup < COMPUTE_WARPGROUPS)
    def _():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        steps = work(lambda work: _compute(work, out_ref))
        plgpu.wait_smem_to_gmem(0)
        if settings.tuning.take_turns:  # The last turn is nobody's. The interpreter wants it taken.
            pl.when((warpgroup == 0) & (steps > 0))(lambda: plgpu.barrier_wait(shared["turn"].at[0]))

    @pl.when(warpgroup == COMPUTE_WARPGROUPS)
    def _():
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
        steps = work(lambda work: _load(work, q_ref, (k_ref, v_ref), table_ref, layer_ref))
        stages = settings.tuning.stages

        @pl.loop(jnp.maximum(steps - stages, 0), steps)
        def _(step):  # For the interpreter, too, which wants every arrival seen.
            plgpu.barrier_wait(shared["k_read"].at[lax.rem(step, stages)])
            plgpu.barrier_wait(shared["v_read"].at[lax.rem(step, stages)])

        for part in range(COMPUTE_WARPGROUPS):
            pl.when(steps > 0)(functools.partial(plgpu.barrier_wait, shared["q_read"].at[part]))


def _for_each_work(
    q_ref: jax.Ref, plan_ref: jax.Ref, settings: Settings, shared: dict[str, jax.Ref], do: Callable[[Work], None]
) -> jax.Array:
    """Does all work of this program; returns the number of its tiles.

    The blocks, each for all heads, are dealt to the programs like cards, to and fro: as the longest come first, no
    program gets the longer ones of every round.
    """
    tuning, program, programs = settings.tuning, lax.axis_index("program"), lax.axis_size("program")
    num_heads = q_ref.shape[1] // tuning.heads_per_program
    count = plan_ref[plan_ref.shape[0] - 1] * num_heads

    def turn(i, base):
        place = i * programs + jnp.where(lax.rem(i, 2) == 0, program, programs - 1 - program)
        real = place < count
        first_field = jnp.where(real, place // num_heads, 0) * FIELDS
        row, token, position, low, high = (plan_ref[first_field + field] for field in range(FIELDS))
        steps = (position + high + tuning.block_kv - 1) // tuning.block_kv
        work = Work(settings, shared, lax.rem(place, num_heads), row, token, position, low, high, steps, base)
        pl.when(real)(lambda: do(work))
        return base + jnp.where(real, steps, 0)

    return lax.fori_loop(0, (count + programs - 1) // programs, turn, jnp.int32(0))


def _load(work: Work, q_ref: jax.Ref, pools: tuple[jax.Ref, jax.Ref], table_ref: jax.Ref, layer_ref: jax.Ref) -> None:
    """The memory warpgroup: keeps `stages` tiles of keys and values on their way, a TMA copy per page."""
    settings, stages = work.settings, work.settings.tuning.stages
    page_size, pages = settings.page_size, settings.tuning.block_kv // settings.page_size
    head = work.heads * settings.tuning.heads_per_program // settings.group
    columns = pl.ds(head * settings.width, settings.width)
    layer_page = layer_ref[0] * settings.num_pages
    last_page = (work.end - 1) // page_size

    def read_table(step: jax.Array) -> list[jax.Array]:
        # Entries past the row's pages may be anything, so its last page stands in for them.
        return [table_ref[work.row, jnp.minimum(step * pages + i, last_page)] for i in range(pages)]

    def load_tile(name: str, step: jax.Array, ids: list[jax.Array], pool: jax.Ref, loaded: jax.Ref) -> None:
        pl.when(work.base + step >= stages)(lambda: plgpu.barrier_wait(work.at(f"{name}_read", step)))
        for i, page in enumerate(ids):
            start = pl.multiple_of((layer_page + page) * page_size, page_size)
            target = work.at(name, step).at[pl.ds(i * page_size, page_size)]
            plgpu.copy_gmem_to_smem(pool.at[pl.ds(start, page_size), columns], target, loaded)

    def load(step: jax.Array, ids: list[jax.Array], v_loaded: jax.Ref) -> None:
        load_tile("k", step, ids, pools[0], work.at("k_loaded", step))
        # The block before still needs its queries when the first slot for keys is free.
        pl.when(step == 0)(lambda: _load_queries(work, q_ref))
        load_tile("v", step, ids, pools[1], v_loaded)

    def load_and_read_on(step, ids):
        following = read_table(step + 1)  # A tile ahead, which hides how long that takes.
        load(step, ids, work.at("v_loaded", step))
        return following

    last = work.steps - 1
    ids = lax.fori_loop(0, last, load_and_read_on, read_table(jnp.int32(0)))
    load(last, ids, work.shared["last_v_loaded"])
    plgpu.barrier_wait(work.shared["last_v_loaded"])
    _zero_unseen(work.at("v", last), work.end - last * settings.tuning.block_kv)
    for _ in range(pages):  # As many arrivals as the copies of any other tile.
        plgpu.barrier_arrive(work.at("v_loaded", last))


def _load_queries(work: Work, q_ref: jax.Ref) -> None:
    for warpgroup in range(COMPUTE_WARPGROUPS):
        q_read, q_loaded = (work.shared[name].at[warpgroup] for name in ("q_read", "q_loaded"))
        pl.when(work.base > 0)(functools.partial(plgpu.barrier_wait, q_read))
        offset, head = work.part(warpgroup)
        token = pl.multiple_of(work.token + offset, ROW_ALIGNMENT)
        source = q_ref.at[pl.ds(token, WARPGROUP_ROWS), head]
        plgpu.copy_gmem_to_smem(source, work.shared["q"].at[warpgroup], q_loaded)


def _zero_unseen(v_smem: jax.Ref, count: jax.Array) -> None:
    """Zeros the values after the first `count` of the last tile: they may be NaN, and no weight of 0 silences that."""
    rows = columns = 64  # In parts, since the memory warpgroup has few registers.
    for row in range(0, v_smem.shape[0], rows):

        @pl.when(count < row + rows)
        def _(row=row):
            for column in range(0, v_smem.shape[1], columns):
                part = v_smem.at[pl.ds(row, rows), pl.ds(column, columns)]
                index = plgpu.broadcasted_iota(jnp.int32, (rows, columns), 0, layout=plgpu.Layout.WGMMA)
                values = plgpu.load(part, layout=plgpu.Layout.WGMMA)
                part[...] = jnp.where(index < count - row, values, jnp.zeros_like(values))

    plgpu.commit_smem()


def _compute(work: Work, out_ref: jax.Ref) -> None:
    """A compute warpgroup: 64 places of one query head against all tiles of keys and values."""
    warpgroup = lax.axis_index("warpgroup")
    offset, head = work.part(warpgroup)
    plgpu.barrier_wait(work.shared["q_loaded"].at[warpgroup])
    # Tiles that every token sees whole need no mask. The last always gets one.
    whole = (work.position + jnp.maximum(work.low, offset) + 1) // work.settings.tuning.block_kv
    state = attend_tiles(Warpgroup(work, warpgroup, work.position + offset), jnp.minimum(whole, work.steps - 1))
    share = lax.broadcast_in_dim(1 / state.total, state.acc.shape, [0])
    out_smem = work.shared["out"].at[warpgroup]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # What the block before stored from here.
    out_smem[...] = (state.acc * share).astype(work.settings.dtype)
    plgpu.commit_smem()
    first, last = (jnp.clip(place - offset, 0, WARPGROUP_ROWS) for place in (work.low, work.high))
    _store(out_smem, out_ref.at[:, head], work.token + offset, first, last)


def _store(out_smem: jax.Ref, out_ref: jax.Ref, token: jax.Array, first: jax.Array, last: jax.Array) -> None:
    """Stores places [first, last) of 64; the others belong to other rows. A partial block takes a copy per binary digit
    of its length, since the size of a TMA copy is static."""
    size = WARPGROUP_ROWS
    while size:

        @pl.when(((last - first) & size) != 0)
        def _(size=size):
            # The larger pieces of the range come first.
            start = first + ((last - first) & ~(2 * size - 1))
            plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(start, size)], out_ref.at[pl.ds(token + start, size)])

        size //= 2
