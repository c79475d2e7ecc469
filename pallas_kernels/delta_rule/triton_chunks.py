"""The gated delta rule of rows with several tokens, a chunk at a time, in three Triton kernels.

Within a chunk, with G the running sum of log decays, A the strictly lower part of beta_i exp(G_i - G_j) k_i . k_j and
T = inverse(I + A): what tokens write is U - W S, U = T (beta v), W = T (beta exp(G) k), S the state before the chunk.
The first kernel computes U and W of every chunk at once, the second goes through the chunks of a row for their states,
the third reads all states at once.
Source: Yang et al. 2024 (Parallelizing Linear Transformers with the Delta Rule), section 3; with decays, Yang et al.
2024 (Gated Delta Networks), section 3.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.delta_rule.chunks import CHUNK, Chunks
from pallas_kernels.delta_rule.triton_decode import softplus
from pallas_kernels.delta_rule.triton_states import outputs_of_tokens, states_of_chunks
from pallas_kernels.dispatch import Target
from pallas_kernels.triton_call import INTERPRETING, SHARED_KIB, launch

if TYPE_CHECKING:
    from pallas_kernels.delta_rule.api import DeltaPools, DeltaWeights, SlotRows


class Tuning(NamedTuple):
    """How the three kernels are cut and compiled."""

    prepare_block: int = 64  # channels of values at a time
    prepare_warps: int = 4
    state_block: int = 32  # columns of a program's state
    state_warps: int = 4
    state_stages: int = 3
    output_block: int = 64  # channels of keys at a time
    output_warps: int = 8
    output_stages: int = 2
    precision: str = "bf16x3"  # of the products that invert the triangle


TUNING = Tuning()
ROWS_AT_ONCE = 8
"""Rows whose chunks are gone through side by side. One row's heads fill the card."""


class Prepared(NamedTuple):
    """Of the tokens in chunks."""

    q: jax.Array  # [T, Hk, dk]
    k: jax.Array  # [T, Hk, dk]
    w: jax.Array  # [T, Hk, r, dk]
    u: jax.Array  # [T, Hk, r, dv]
    decays: jax.Array  # [T, Hk, r] float32, logarithms, summed from the start of the chunk


def run_rows(
    x: jax.Array,
    weights: DeltaWeights,
    pools: DeltaPools,
    layer: jax.Array,
    rows: SlotRows,
    chunks: Chunks,
    single: jax.Array,
    *,
    eps: float,
    target: Target,
    tuning: Tuning = TUNING,
) -> jax.Array:
    """[T, Hk, r, dv]: of rows in `chunks`, what `single` [R, Hk, r, dv] holds of rows with one token, and zeros."""
    how = {"target": target, "tuning": tuning}
    prepared = prepare(x, weights, pools, layer, rows, chunks, **how)
    states, written = states_before(x, prepared, pools, layer, rows, chunks, **how)
    tokens, block = written.shape[0], min(tuning.output_block, prepared.k.shape[2])
    (out,) = launch(
        outputs_of_tokens,
        [
            *(x, prepared.q, prepared.k, written, prepared.decays, states, single, weights.norm, layer.reshape(1)),
            *(rows.query_start, rows.query_len, rows.token_row, chunks.row, chunks.offset, chunks.count),
        ],
        [jax.ShapeDtypeStruct(written.shape, written.dtype)],
        grid=(x.shape[1] * written.shape[2], chunks.row.shape[0] + -(-tokens // CHUNK)),
        constants={
            **_sizes(pools),
            "EPS": eps,
            "TOKENS": tokens,
            "CHUNKS": chunks.row.shape[0],
            "BLOCK": block,
        },
        target=target,
        num_warps=tuning.output_warps,
        num_stages=_stages(tuning.output_stages, block * (2 * CHUNK + written.shape[3]), target),
    )
    return out


def prepare(
    x: jax.Array,
    weights: DeltaWeights,
    pools: DeltaPools,
    layer: jax.Array,
    rows: SlotRows,
    chunks: Chunks,
    *,
    target: Target,
    tuning: Tuning = TUNING,
) -> Prepared:
    """What does not depend on the states."""
    _, slots, heads, group, key_width, value_width = pools.state.shape
    tokens = x.shape[0], heads
    return Prepared(
        *launch(
            _prepare_chunks,
            [
                *(x, weights.conv, weights.a_log, weights.dt_bias, pools.conv, layer.reshape(1)),
                *(rows.slot, rows.query_start, rows.context_len, chunks.row, chunks.offset, chunks.count),
            ],
            [
                jax.ShapeDtypeStruct((*tokens, key_width), x.dtype),
                jax.ShapeDtypeStruct((*tokens, key_width), x.dtype),
                jax.ShapeDtypeStruct((*tokens, group, key_width), x.dtype),
                jax.ShapeDtypeStruct((*tokens, group, value_width), x.dtype),
                jax.ShapeDtypeStruct((*tokens, group), jnp.float32),
            ],
            grid=(heads * group, chunks.row.shape[0]),
            constants={
                **_sizes(pools),
                "SLOTS": slots,
                "BLOCK": min(tuning.prepare_block, value_width),
                "PRECISION": "ieee" if INTERPRETING else tuning.precision,
            },
            target=target,
            num_warps=tuning.prepare_warps,
            num_stages=1,
        )
    )


def states_before(
    x: jax.Array,
    prepared: Prepared,
    pools: DeltaPools,
    layer: jax.Array,
    rows: SlotRows,
    chunks: Chunks,
    *,
    target: Target,
    tuning: Tuning = TUNING,
) -> tuple[jax.Array, jax.Array]:
    """The states before the chunks [N, Hk, r, dk, dv], and what tokens write [T, Hk, r, dv]. Changes the pools."""
    state = pools.state.shape[2:]
    block = min(tuning.state_block, state[-1])
    rows_at_once = min(ROWS_AT_ONCE, rows.slot.shape[0])
    before, written = launch(
        states_of_chunks,
        [
            *(x, prepared.k, prepared.w, prepared.u, prepared.decays, layer.reshape(1)),
            *(rows.slot, rows.query_start, rows.query_len, rows.context_len),
            *(chunks.rows, chunks.first, chunks.num_rows),
        ],
        [jax.ShapeDtypeStruct((*chunks.row.shape, *state), x.dtype), jax.ShapeDtypeStruct(prepared.u.shape, x.dtype)],
        in_place=pools,
        grid=(state[0] * state[1] * (state[-1] // block), rows_at_once),
        constants={**_sizes(pools), "SLOTS": pools.state.shape[1], "BLOCK": block, "ROWS_AT_ONCE": rows_at_once},
        target=target,
        num_warps=tuning.state_warps,
        num_stages=_stages(tuning.state_stages, CHUNK * (2 * state[-2] + block), target),
    )
    return before, written


def _stages(wanted: int, numbers: int, target: Target) -> int:
    """How many rounds of so many 16-bit numbers may be on their way at a time, `wanted` at most."""
    room = (SHARED_KIB.get(target.compute_capability, 99) - 16) * 2**10  # 16 KiB for what a round makes itself
    return max(1, min(wanted, room // (2 * numbers)))


def _sizes(pools: DeltaPools) -> dict[str, int]:
    return {**dict(zip(("HEADS", "GROUP", "DK", "DV"), pools.state.shape[2:], strict=True)), "CHUNK": CHUNK}


@triton.jit
def _convolved(
    x_ptr,
    ring_ptr,
    conv_ptr,
    channel,
    i,
    offset,
    count,
    context_len,
    STRIDE: tl.constexpr,
    RING: tl.constexpr,
):
    """[I, C]: channels of tokens i of a chunk after convolution and SiLU; zeros past `count`.

    x_ptr: of the chunk's first token; offset: of that in the row, whose first four may see entries of the ring.
    """
    total = tl.zeros([i.shape[0], channel.shape[0]], tl.float32)
    for back in tl.static_range(4):
        here = (i < count) & (i + offset >= back)
        before = tl.load(x_ptr + (i - back)[:, None] * STRIDE + channel[None, :], mask=here[:, None], other=0.0)
        total += before.to(tl.float32) * tl.load(conv_ptr + channel * 4 + 3 - back).to(tl.float32)[None, :]
    if offset == 0 and context_len > 0:
        for back in tl.static_range(1, 4):
            position = context_len + i - back
            there = (i < count) & (i < back) & (position >= 0)
            entry = ring_ptr + ((position + 4) % 4)[:, None] * RING + channel[None, :]
            weight = tl.load(conv_ptr + channel * 4 + 3 - back).to(tl.float32)
            total += tl.load(entry, mask=there[:, None], other=0.0) * weight[None, :]
    return total * tl.sigmoid(total)


@triton.jit
def _inverse(a, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """inverse(I + a), a [SIZE, SIZE] strictly lower, by blocks of 16: those of the diagonal row by row, then products.

    With D the inverse of the diagonal's blocks and M = D * the rest of a, inverse(I + a) = (I - M + M^2 - M^3) D for
    four blocks. Squaring (I - a) until nothing is left needs more products, and cancels where keys are alike.
    """
    BLOCKS: tl.constexpr = SIZE // 16
    tl.static_assert(BLOCKS == 4)
    block = tl.arange(0, SIZE) // 16
    same = block[:, None] == block[None, :]
    b = tl.arange(0, BLOCKS)
    on_diagonal = b[:, None, None, None] == b[None, None, :, None]
    # [BLOCKS, 16, 16]: minus the blocks, then their inverses less the identity, from the top row down.
    d = -tl.sum(tl.reshape(tl.where(same, a, 0.0), (BLOCKS, 16, BLOCKS, 16)), 2)
    r = tl.arange(0, 16)
    for n in range(2, 16):
        mine = (r == n)[None, :, None]
        row = tl.sum(tl.where(mine, d, 0.0), 1)
        done = tl.where((r < n)[None, :, None], d, 0.0)
        row += tl.sum(row[:, :, None] * done, 1)
        d = tl.where(mine, row[:, None, :], d)
    d += (r[:, None] == r[None, :])[None, :, :].to(tl.float32)
    spread = tl.where(on_diagonal, d[:, :, None, :], 0.0)
    d = tl.reshape(spread, (SIZE, SIZE))
    m = tl.dot(d, tl.where(same, 0.0, a), input_precision=PRECISION)
    found = tl.dot(tl.dot(m, m, input_precision=PRECISION), d, d, input_precision=PRECISION)
    return found - tl.dot(m, found, input_precision=PRECISION)


@triton.jit
def _prepare_chunks(
    x_ptr,
    conv_ptr,
    a_log_ptr,
    dt_bias_ptr,
    ring_ptr,
    layer_ptr,
    slot_ptr,
    query_start_ptr,
    context_len_ptr,
    chunk_row_ptr,
    chunk_offset_ptr,
    chunk_count_ptr,
    q_ptr,
    k_ptr,
    w_ptr,
    u_ptr,
    decay_ptr,
    SLOTS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A value head of a chunk: its W and U and its running sum of log decays; of the first, its key head's q and k."""
    CHANNELS: tl.constexpr = 2 * DK + GROUP * DV
    WIDTH: tl.constexpr = CHANNELS + GROUP * DV + 2 * GROUP
    STRIDE: tl.constexpr = HEADS * WIDTH
    RING: tl.constexpr = HEADS * CHANNELS
    head = tl.program_id(0) // GROUP
    g = tl.program_id(0) % GROUP
    chunk = tl.program_id(1)
    count = tl.load(chunk_count_ptr + chunk)
    if count == 0:
        return
    layer = tl.load(layer_ptr).to(tl.int64)
    row = tl.load(chunk_row_ptr + chunk)
    offset = tl.load(chunk_offset_ptr + chunk)
    token = (tl.load(query_start_ptr + row) + offset).to(tl.int64)
    context_len = tl.load(context_len_ptr + row)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    i = tl.arange(0, CHUNK)
    c = tl.arange(0, DK)
    inside = i < count
    x = x_ptr + (token * HEADS + head) * WIDTH
    ring = ring_ptr + (layer * SLOTS + slot) * 4 * RING + head * CHANNELS
    conv = conv_ptr + (layer * HEADS + head) * (CHANNELS * 4)
    at = (token + i) * HEADS + head

    wide = _convolved(x, ring, conv, DK + c, i, offset, count, context_len, STRIDE, RING)
    k = (wide * tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)[:, None]).to(k_ptr.dtype.element_ty)
    if g == 0:
        of_key = at[:, None] * DK + c[None, :]
        tl.store(k_ptr + of_key, k, mask=inside[:, None])
        q = _convolved(x, ring, conv, c, i, offset, count, context_len, STRIDE, RING)
        q *= tl.rsqrt(tl.sum(q * q, 1) + 1e-6)[:, None] * DK**-0.5
        tl.store(q_ptr + of_key, q.to(q_ptr.dtype.element_ty), mask=inside[:, None])

    of_gate = (layer * HEADS + head) * GROUP + g
    gates = x + i * STRIDE + CHANNELS + GROUP * DV + g
    beta = tl.where(inside, tl.sigmoid(tl.load(gates, mask=inside, other=0.0).to(tl.float32)), 0.0)
    a = tl.load(gates + GROUP, mask=inside, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log_ptr + of_gate).to(tl.float32))
    step = -rate * softplus(a + tl.load(dt_bias_ptr + of_gate).to(tl.float32))
    decay = tl.cumsum(tl.where(inside, step, 0.0), 0)
    tl.store(decay_ptr + at * GROUP + g, decay, mask=inside)
    faded = tl.exp(tl.where(i[:, None] > i[None, :], decay[:, None] - decay[None, :], -1e30))
    inverse = _inverse(tl.dot(k, tl.trans(k)) * faded * beta[:, None], CHUNK, PRECISION).to(k.dtype)

    at = at * GROUP + g
    seen = (k.to(tl.float32) * (beta * tl.exp(decay))[:, None]).to(k.dtype)
    w = tl.dot(inverse, seen).to(w_ptr.dtype.element_ty)
    tl.store(w_ptr + at[:, None] * DK + c[None, :], w, mask=inside[:, None])
    for first in range(0, DV, BLOCK):
        e = first + tl.arange(0, BLOCK)
        v = _convolved(x, ring, conv, 2 * DK + g * DV + e, i, offset, count, context_len, STRIDE, RING)
        u = tl.dot(inverse, (v * beta[:, None]).to(k.dtype)).to(u_ptr.dtype.element_ty)
        tl.store(u_ptr + at[:, None] * DV + e[None, :], u, mask=inside[:, None])
