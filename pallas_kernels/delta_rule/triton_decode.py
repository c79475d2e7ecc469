"""The gated delta rule of rows with one token: a value head of a row per program, its state read and written once."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import triton
import triton.language as tl

from pallas_kernels.dispatch import Target
from pallas_kernels.triton_call import launch

if TYPE_CHECKING:
    from pallas_kernels.delta_rule.api import DeltaPools, DeltaWeights, SlotRows


class Tiling(NamedTuple):
    """How a program goes through its state."""

    block: int  # columns of the state at a time; the next are on their way meanwhile
    num_warps: int


FEW_PROGRAMS = 132
"""Up to here a multiprocessor of an H200 has one program at most, which must hurry alone."""


def tile(key_width: int, value_width: int, num_programs: int) -> Tiling:
    """For states [key_width, value_width] of `num_programs` heads of rows."""
    numbers = 128 * 128 if num_programs <= FEW_PROGRAMS else 128 * 32
    block = min(value_width, max(16, numbers // key_width))
    return Tiling(block, 8 if key_width * block > 128 * 64 else 4)


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
    constants = {
        "SLOTS": slots,
        "HEADS": heads,
        "GROUP": group,
        "DK": key_width,
        "DV": value_width,
        "EPS": eps,
        "WITH_OTHERS": with_others,
        "BLOCK": tiling.block,
    }
    (out,) = launch(
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
        [jax.ShapeDtypeStruct((num_rows, heads, group, value_width), x.dtype)],
        in_place=pools,
        grid=(heads * group, num_rows),
        constants=constants,
        target=target,
        num_warps=tiling.num_warps,
    )
    return out


@triton.jit
def softplus(x):
    """log(1 + exp(x))."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _convolved(x_ptr, ring_ptr, conv_ptr, channel, position, RING: tl.constexpr):
    """Channels of the token at `position` after convolution and SiLU, and as they were before."""
    now = tl.load(x_ptr + channel).to(tl.float32)
    total = now * tl.load(conv_ptr + channel * 4 + 3).to(tl.float32)
    for back in tl.static_range(1, 4):
        before = tl.load(ring_ptr + (position - back + 4) % 4 * RING + channel, mask=position >= back, other=0.0)
        total += before * tl.load(conv_ptr + channel * 4 + 3 - back).to(tl.float32)
    return total * tl.sigmoid(total), now


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
    SLOTS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    EPS: tl.constexpr,
    WITH_OTHERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    CHANNELS: tl.constexpr = 2 * DK + GROUP * DV
    WIDTH: tl.constexpr = CHANNELS + GROUP * DV + 2 * GROUP
    RING: tl.constexpr = HEADS * CHANNELS
    BLOCKS: tl.constexpr = DV // BLOCK
    head = tl.program_id(0) // GROUP
    g = tl.program_id(0) % GROUP
    row = tl.program_id(1).to(tl.int64)
    blocks = tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    out = out_ptr + ((row * HEADS + head) * GROUP + g) * DV + blocks
    layer = tl.load(layer_ptr).to(tl.int64)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    token = tl.load(query_start_ptr + row).to(tl.int64)
    position = tl.load(context_len_ptr + row)
    if tl.load(query_len_ptr + row) == 1:
        i = tl.arange(0, DK)
        e = tl.arange(0, BLOCK)
        place = layer * SLOTS + slot
        state = state_ptr + ((place * HEADS + head) * GROUP + g) * (DK * DV) + i[:, None] * DV + e[None, :]
        s = tl.load(state, mask=position > 0, other=0.0)
        x = x_ptr + (token * HEADS + head) * WIDTH
        ring = ring_ptr + place * 4 * RING + head * CHANNELS
        conv = conv_ptr + (layer * HEADS + head) * (CHANNELS * 4)
        entry = ring + position % 4 * RING
        q, q_now = _convolved(x, ring, conv, i, position, RING)
        k, k_now = _convolved(x, ring, conv, DK + i, position, RING)
        if g == 0:
            tl.store(entry + i, q_now)
            tl.store(entry + DK + i, k_now)
        q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * DK**-0.5
        k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        met = tl.sum(q * k, 0)
        of_gate = (layer * HEADS + head) * GROUP + g
        beta = tl.sigmoid(tl.load(x + CHANNELS + GROUP * DV + g).to(tl.float32))
        a = tl.load(x + CHANNELS + GROUP * DV + GROUP + g).to(tl.float32)
        rate = tl.exp(tl.load(a_log_ptr + of_gate).to(tl.float32))
        decay = tl.exp(-rate * softplus(a + tl.load(dt_bias_ptr + of_gate).to(tl.float32)))
        outs = tl.zeros([BLOCKS, BLOCK], tl.float32)
        for n in tl.static_range(BLOCKS):
            if n + 1 < BLOCKS:
                ahead = tl.load(state + (n + 1) * BLOCK, mask=position > 0, other=0.0)
            channel = 2 * DK + g * DV + n * BLOCK + e
            v, v_now = _convolved(x, ring, conv, channel, position, RING)
            tl.store(entry + channel, v_now)
            s *= decay
            # What the new state gives to q, before it is there.
            o = tl.sum(s * q[:, None], 0)
            u = beta * (v - tl.sum(s * k[:, None], 0))
            o += met * u
            tl.store(state + n * BLOCK, s + k[:, None] * u[None, :])
            outs = tl.where(tl.arange(0, BLOCKS)[:, None] == n, o[None, :], outs)
            if n + 1 < BLOCKS:
                s = ahead
        scale = tl.rsqrt(tl.sum(tl.sum(outs * outs, 1), 0) / DV + EPS)
        z = tl.load(x + CHANNELS + g * DV + blocks).to(tl.float32)
        outs *= scale * tl.load(norm_ptr + layer * DV + blocks).to(tl.float32) * z * tl.sigmoid(z)
        tl.store(out, outs.to(out_ptr.dtype.element_ty))
    else:
        if WITH_OTHERS:
            tl.store(out, tl.zeros([BLOCKS, BLOCK], out_ptr.dtype.element_ty))
