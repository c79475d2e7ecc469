"""What the sampling kernels share: a row's parameters, its noise, and who of its programs is last."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

if TYPE_CHECKING:
    from pallas_kernels.sample.api import Parameters, Places

NO_ID = tl.constexpr(2**31 - 1)
"""Greater than any token."""
FIELDS = tl.constexpr(16)
"""int32 fields of a row, those of `pack` in its order."""
TEMPERATURE = tl.constexpr(0)
TOP_P = tl.constexpr(1)
MIN_P = tl.constexpr(2)
REPETITION = tl.constexpr(3)
FREQUENCY = tl.constexpr(4)
PRESENCE = tl.constexpr(5)
TOP_K = tl.constexpr(6)
SEED_LOW = tl.constexpr(7)
SEED_HIGH = tl.constexpr(8)
HAS_PENALTIES = tl.constexpr(9)
HAS_BIAS = tl.constexpr(10)
WANTS_LOGPROBS = tl.constexpr(11)
NO_STOP_BEFORE = tl.constexpr(12)
SLOT = tl.constexpr(13)
POSITION = tl.constexpr(14)
ACTIVE = tl.constexpr(15)
MIN_TEMPERATURE = tl.constexpr(1e-5)
"""As in the reference."""


def pack(rows: Parameters, places: Places) -> jax.Array:
    """[R, FIELDS] int32, floats by their bits: one array for the kernels to read."""
    floats = [jax.lax.bitcast_convert_type(field, jnp.int32) for field in rows[:6]]
    return jnp.stack([*floats, *rows[6:13], *(place.astype(jnp.int32) for place in places)], axis=1)


@triton.jit
def whole(rows_ptr, row, field: tl.constexpr):
    """An int32 field of a row."""
    return tl.load(rows_ptr + row * FIELDS + field)


@triton.jit
def real(rows_ptr, row, field: tl.constexpr):
    """A float32 field of a row."""
    return tl.load(rows_ptr + row * FIELDS + field).to(tl.float32, bitcast=True)


@triton.jit
def adjusts(rows_ptr, row):
    """Whether the row's logits are changed before it chooses."""
    barred = whole(rows_ptr, row, POSITION) < whole(rows_ptr, row, NO_STOP_BEFORE)
    return (whole(rows_ptr, row, HAS_PENALTIES) > 0) | (whole(rows_ptr, row, HAS_BIAS) > 0) | barred


@triton.jit
def searches(rows_ptr, row, V: tl.constexpr):
    """Whether the row has a top_k or top_p that may leave tokens out."""
    top_k = whole(rows_ptr, row, TOP_K)
    narrows = ((top_k > 0) & (top_k < V)) | (real(rows_ptr, row, TOP_P) < 1.0)
    return narrows & (real(rows_ptr, row, TEMPERATURE) > 0.0) & (whole(rows_ptr, row, ACTIVE) != 0)


@triton.jit
def filters(rows_ptr, row, V: tl.constexpr):
    """Whether the row draws from less than all tokens."""
    floor = (real(rows_ptr, row, MIN_P) > 0.0) & (real(rows_ptr, row, TEMPERATURE) > 0.0)
    return searches(rows_ptr, row, V) | (floor & (whole(rows_ptr, row, ACTIVE) != 0))


@triton.jit
def _mix(a, b, R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, R3: tl.constexpr):
    """Four rounds of Threefry."""
    a += b
    b = ((b << R0) | (b >> (32 - R0))) ^ a
    a += b
    b = ((b << R1) | (b >> (32 - R1))) ^ a
    a += b
    b = ((b << R2) | (b >> (32 - R2))) ^ a
    a += b
    b = ((b << R3) | (b >> (32 - R3))) ^ a
    return a, b


@triton.jit
def gumbel(rows_ptr, row, ids):
    """Standard Gumbel noise of tokens, bit by bit the reference's but for the logarithms. Source: `api.sample`."""
    k0 = whole(rows_ptr, row, SEED_LOW).to(tl.uint32, bitcast=True)
    k1 = whole(rows_ptr, row, SEED_HIGH).to(tl.uint32, bitcast=True)
    k2 = k0 ^ k1 ^ tl.full([], 0x1BD11BDA, tl.uint32)
    one = tl.full([], 1, tl.uint32)
    b = ids.to(tl.uint32) + k1
    a = tl.zeros_like(b) + (whole(rows_ptr, row, POSITION).to(tl.uint32, bitcast=True) + k0)
    a, b = _mix(a, b, 13, 15, 26, 6)
    a, b = a + k1, b + (k2 + one)
    a, b = _mix(a, b, 17, 29, 16, 24)
    a, b = a + k2, b + (k0 + one * 2)
    a, b = _mix(a, b, 13, 15, 26, 6)
    a, b = a + k0, b + (k1 + one * 3)
    a, b = _mix(a, b, 17, 29, 16, 24)
    a, b = a + k1, b + (k2 + one * 4)
    a, b = _mix(a, b, 13, 15, 26, 6)
    a, b = a + k2, b + (k0 + one * 5)
    coarse, fine = (a >> 8).to(tl.int32).to(tl.float32), (b >> 8).to(tl.int32).to(tl.float32)
    uniform = tl.minimum(coarse * 5.9604644775390625e-08 + (fine + 0.5) * 3.552713678800501e-15, 1 - 2.0**-24)
    # log1p(-u): the error of log(1 - u) is that of 1 - u, which the quotient takes out (Kahan; Goldberg 1991, th. 4).
    rest = 1.0 - uniform
    exponential = tl.where(rest == 1.0, uniform, -tl.log(rest) * (uniform / (1.0 - rest)))
    return -tl.log(exponential)


@triton.jit
def arrive(counters_ptr, row, num):
    """Whether this is the last of a row's `num` programs, after what all of them have stored; the counter is 0 again.

    What others stored must then be read past the L1 cache (".cg"), which does not see their multiprocessors' writes.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counters_ptr + row, 1, sem="acq_rel") == num - 1
    if last:
        tl.store(counters_ptr + row, 0)
    return last


@triton.jit
def greatest(values, ids):
    """The greatest value, and the lowest of its ids."""
    value = tl.max(values, 0)
    return value, tl.min(tl.where(values == value, ids, NO_ID), 0)


@triton.jit
def greatest_of_parts(values_ptr, ids_ptr, row, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The greatest of what the programs of a row left, [R, PARTS], and its id."""
    part = tl.arange(0, BLOCK)
    at = row * PARTS + part
    values = tl.load(values_ptr + at, mask=part < PARTS, other=-float("inf"), cache_modifier=".cg")
    ids = tl.load(ids_ptr + at, mask=part < PARTS, other=NO_ID, cache_modifier=".cg")
    return greatest(values, ids)
