"""The gated delta rule of rows with one token: a program holds the state of a value head of a row, or columns of it.

All that a program reads is on its way before it uses any: what it asks for behind a barrier or a store of its own waits
for memory once more, a microsecond each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.dispatch import Target
from pallas_kernels.triton_call import launch

if TYPE_CHECKING:
    from pallas_kernels.delta_rule.api import DeltaPools, DeltaWeights, SlotRows


class Tiling(NamedTuple):
    """How states are cut into programs."""

    block: int  # columns of a state that a program holds; with fewer than all, a second kernel norms the heads
    num_warps: int


FEW_PROGRAMS = 132
"""Up to here each multiprocessor of an H200 has a whole head at most."""


def tile(key_width: int, value_width: int, num_programs: int) -> Tiling:
    """For states [key_width, value_width] of `num_programs` heads of rows.

    Of 32 heads of 128 x 128 in a row, H200, with the second kernel: 1 row takes 5.9 us in quarters, 6.5 in halves, 8.6
    whole; 8 rows take 14.9 in halves, 17.2 whole; 64 rows take 90 us in halves, 98 in quarters and 98 to 118 whole.
    """
    numbers = 128 * 32 if num_programs <= FEW_PROGRAMS else 128 * 64
    block = min(value_width, max(16, numbers // key_width))
    return Tiling(block, max(1, min(4, key_width * block // 1024)))


def run_rows(
    x: jax.Array,
    weights: DeltaWeights,
    pools: DeltaPools,
    layer: jax.Array,
    rows: SlotRows,
    *,
    eps: float,
    with_others: bool,
    target: Target,
    tiling: Tiling | None = None,
) -> jax.Array:
    """[R, Hk, r, dv]: of each row with one token. Others hold zeros if `with_others`, else anything."""
    _, slots, heads, group, key_width, value_width = pools.state.shape
    num_rows = rows.slot.shape[0]
    tiling = tiling or tile(key_width, value_width, num_rows * heads * group)
    splits = value_width // tiling.block
    constants = {
        "HEADS": heads,
        "GROUP": group,
        "DK": key_width,
        "DV": value_width,
        "EPS": eps,
        "WITH_OTHERS": with_others,
    }
    out = jax.ShapeDtypeStruct((num_rows, heads, group, value_width), x.dtype)
    given = out if splits == 1 else jax.ShapeDtypeStruct(out.shape, jnp.float32)
    (found,) = launch(
        _one_token,
        [
            x,
            weights.conv,
            weights.a_log,
            weights.dt_bias,
            weights.norm,
            layer.reshape(1),
            rows.slot,
            rows.query_start,
            rows.query_len,
            rows.context_len,
        ],
        [given],
        in_place=pools,
        grid=(heads * group * splits, num_rows),
        constants=constants | {"SLOTS": slots, "BLOCK": tiling.block},
        target=target,
        num_warps=tiling.num_warps,
    )
    if splits == 1:
        return found
    inputs = [found, x, weights.norm, layer.reshape(1), rows.query_start, rows.query_len]
    grid = (heads * group, num_rows)
    return launch(_norm_heads, inputs, [out], grid=grid, constants=constants, target=target, num_warps=1)[0]


@triton.jit
def softplus(x):
    """log(1 + exp(x))."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _inputs(x_ptr, ring_ptr, conv_ptr, channel, position, RING: tl.constexpr):
    """Channels of the token at `position` as they are, and after convolution and SiLU."""
    now = tl.load(x_ptr + channel).to(tl.float32)
    taps = conv_ptr + channel * 4 + 3
    back = ring_ptr + channel
    a = tl.load(back + (position + 3) % 4 * RING, mask=position >= 1, other=0.0)
    b = tl.load(back + (position + 2) % 4 * RING, mask=position >= 2, other=0.0)
    c = tl.load(back + (position + 1) % 4 * RING, mask=position >= 3, other=0.0)
    total = now * tl.load(taps).to(tl.float32) + a * tl.load(taps - 1).to(tl.float32)
    total += b * tl.load(taps - 2).to(tl.float32) + c * tl.load(taps - 3).to(tl.float32)
    return now, total * tl.sigmoid(total)


@triton.jit
def _gated_norm(o, weight, z, WIDTH: tl.constexpr, EPS: tl.constexpr):
    """Of a head [WIDTH]."""
    return o * tl.rsqrt(tl.sum(o * o, 0) / WIDTH + EPS) * weight * z * tl.sigmoid(z)


@triton.jit
def _one_token(
    x_ptr,
    conv_ptr,
    a_log_ptr,
    dt_bias_ptr,
    norm_ptr,
    layer_ptr,
    slot_ptr,
    query_start_ptr,
    query_len_ptr,
    context_len_ptr,
    state_ptr,
    ring_ptr,
    out_ptr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    EPS: tl.constexpr,
    WITH_OTHERS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK columns of a state. With fewer than all, o is left as it is before the norm."""
    CHANNELS: tl.constexpr = 2 * DK + GROUP * DV
    WIDTH: tl.constexpr = CHANNELS + GROUP * DV + 2 * GROUP
    RING: tl.constexpr = HEADS * CHANNELS
    SPLITS: tl.constexpr = DV // BLOCK
    of_head = tl.program_id(0) // SPLITS
    head = of_head // GROUP
    g = of_head % GROUP
    row = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, DK)
    e = tl.program_id(0) % SPLITS * BLOCK + tl.arange(0, BLOCK)
    out = out_ptr + (row * (HEADS * GROUP) + of_head) * DV + e
    layer = tl.load(layer_ptr).to(tl.int64)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    token = tl.load(query_start_ptr + row).to(tl.int64)
    position = tl.load(context_len_ptr + row)
    if tl.load(query_len_ptr + row) == 1:
        place = layer * SLOTS + slot
        state = state_ptr + (place * (HEADS * GROUP) + of_head) * (DK * DV) + i[:, None] * DV + e[None, :]
        s = tl.load(state, mask=position > 0, other=0.0)
        tl.debug_barrier()  # past which no load goes: else the assembler asks for the state once it has all others
        x = x_ptr + (token * HEADS + head) * WIDTH
        ring = ring_ptr + place * 4 * RING + head * CHANNELS
        conv = conv_ptr + (layer * HEADS + head) * (CHANNELS * 4)
        values = 2 * DK + g * DV + e
        of_gate = layer * (HEADS * GROUP) + of_head
        a_log = tl.load(a_log_ptr + of_gate).to(tl.float32)
        dt_bias = tl.load(dt_bias_ptr + of_gate).to(tl.float32)
        b = tl.load(x + CHANNELS + GROUP * DV + g).to(tl.float32)
        a = tl.load(x + CHANNELS + GROUP * DV + GROUP + g).to(tl.float32)
        if SPLITS == 1:
            z = tl.load(x + GROUP * DV + values).to(tl.float32)
            weight = tl.load(norm_ptr + layer * DV + e).to(tl.float32)
        # As one tile: each thread would load its own parts of two vectors that are shorter than a program has threads.
        part = tl.arange(0, 2)[:, None]
        keys = part * DK + i[None, :]
        keys_now, qk = _inputs(x, ring, conv, keys, position, RING)
        v_now, v = _inputs(x, ring, conv, values, position, RING)
        qk *= tl.rsqrt(tl.sum(qk * qk, 1) + 1e-6)[:, None]
        q = tl.sum(tl.where(part == 0, qk, 0.0), 0) * DK**-0.5
        k = tl.sum(tl.where(part == 1, qk, 0.0), 0)
        decay = tl.exp(-tl.exp(a_log) * softplus(a + dt_bias))
        # What the new state gives to q, before it is there.
        o = tl.sum(s * q[:, None], 0) * decay
        u = tl.sigmoid(b) * (v - tl.sum(s * k[:, None], 0) * decay)
        o += tl.sum(q * k, 0) * u
        tl.store(state, s * decay + k[:, None] * u[None, :])
        entry = ring + position % 4 * RING  # that no program reads
        if tl.program_id(0) % (GROUP * SPLITS) == 0:
            tl.store(entry + keys, keys_now)
        tl.store(entry + values, v_now)
        if SPLITS == 1:
            o = _gated_norm(o, weight, z, DV, EPS)
        tl.store(out, o.to(out_ptr.dtype.element_ty))
    else:
        if WITH_OTHERS and SPLITS == 1:
            tl.store(out, tl.zeros([BLOCK], out_ptr.dtype.element_ty))


@triton.jit
def _norm_heads(
    o_ptr,
    x_ptr,
    norm_ptr,
    layer_ptr,
    query_start_ptr,
    query_len_ptr,
    out_ptr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    EPS: tl.constexpr,
    WITH_OTHERS: tl.constexpr,
):
    """Norm, weight and gate of a head that several programs computed."""
    GATES: tl.constexpr = 2 * DK + GROUP * DV
    of_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    e = tl.arange(0, DV)
    at = (row * (HEADS * GROUP) + of_head) * DV + e
    o = tl.load(o_ptr + at)
    layer = tl.load(layer_ptr).to(tl.int64)
    token = tl.load(query_start_ptr + row).to(tl.int64)
    if tl.load(query_len_ptr + row) == 1:
        x = x_ptr + (token * HEADS + of_head // GROUP) * (GATES + GROUP * DV + 2 * GROUP)
        z = tl.load(x + GATES + of_head % GROUP * DV + e).to(tl.float32)
        weight = tl.load(norm_ptr + layer * DV + e).to(tl.float32)
        tl.store(out_ptr + at, _gated_norm(o, weight, z, DV, EPS).to(out_ptr.dtype.element_ty))
    else:
        if WITH_OTHERS:
            tl.store(out_ptr + at, tl.zeros([DV], out_ptr.dtype.element_ty))
