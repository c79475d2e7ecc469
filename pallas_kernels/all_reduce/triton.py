"""The sum as one Triton kernel: every device writes its numbers to all others, and adds up what they wrote to it.

Each 64-bit word that travels has 32 bits of numbers and 32 that say which sum they are of, so that a word that has come
says so itself: there is no barrier, no second message, and no memory fence, and the time is that of one write over
NVLink. It is a kernel like all others of a captured graph. XLA's own sums are not: they split the graph, and the
devices meet on the host for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.all_reduce import api
from pallas_kernels.dispatch import Target
from pallas_kernels.triton_call import launch

if TYPE_CHECKING:
    from pallas_kernels.all_reduce.api import Peers

MOST_WORDS = 2**20
"""That a device sends to all others together. Above, rings that send each number twice take less time."""
LEAST_BLOCK = 256
MANY_PROGRAMS = 128
"""Programs that a sum is split over before each takes more than LEAST_BLOCK words."""
SPINS = 2**25
"""Looks at what has not come, of about a microsecond each, before a program gives up."""


def run(
    x: jax.Array, axes: tuple[str, ...], *, residual: jax.Array | None, peers: Peers | None, target: Target
) -> jax.Array:
    """The contract is `api.all_reduce`; adds in float32, in the devices' order, and rounds once."""
    if peers is None:
        raise NotImplementedError("devices cannot write into each other's memory")
    if x.dtype not in (jnp.bfloat16, jnp.float32) or (residual is not None and residual.dtype != x.dtype):
        raise NotImplementedError(f"numbers of {x.dtype}; it takes bfloat16 or float32")
    ring = api.ring(axes, peers.axes)
    if x.nbytes % 4:
        raise NotImplementedError(f"{x.size} numbers do not fill words of 32 bits")
    words = x.nbytes // 4
    if words * (ring.size - 1) > MOST_WORDS:
        raise NotImplementedError(f"{words} words to each of {ring.size - 1} devices are more than {MOST_WORDS}")
    block = LEAST_BLOCK
    while words > block * MANY_PROGRAMS and block < api.REGION:
        block *= 2
    constants = {
        "WORDS": words,
        "RANKS": ring.size,
        "STRIDE": ring.stride,
        "PAIRS": x.dtype == jnp.bfloat16,
        "RESIDUAL": residual is not None,
        "BLOCK": block,
        "REGION": api.REGION,
        "PROGRAMS": api.PROGRAMS,
        "SPINS": SPINS,
    }
    (y,) = launch(
        _all_reduce,
        [x, x if residual is None else residual, peers.inboxes, peers.device],
        [jax.ShapeDtypeStruct(x.shape, x.dtype)],
        in_place=[peers.sums],
        grid=(triton.cdiv(words, block),),
        constants=constants,
        target=target,
        num_warps=4 if block < 1024 else 8,
    )
    return y


@triton.jit
def _all_reduce(
    x_ptr,
    residual_ptr,
    inboxes_ptr,
    device_ptr,
    sums_ptr,
    y_ptr,
    WORDS: tl.constexpr,
    RANKS: tl.constexpr,
    STRIDE: tl.constexpr,
    PAIRS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    REGION: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SPINS: tl.constexpr,
):
    """BLOCK words of the sum. A program writes to its own places alone, whatever the sum's size is."""
    program = tl.program_id(0)
    number = tl.load(sums_ptr + program) + 1
    spins_left = tl.where(tl.load(sums_ptr + PROGRAMS) == 0, SPINS, 0)
    device = tl.load(device_ptr)
    rank = (device // STRIDE) % RANKS
    inside = tl.arange(0, BLOCK)
    word = program * BLOCK + inside
    real = word < WORDS
    mine = tl.load(x_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + word, mask=real, other=0)
    stamped = (number.to(tl.int64) << 32) | (mine.to(tl.int64) & 0xFFFFFFFF)
    slot = (number & 1) * RANKS
    for turn in tl.static_range(1, RANKS):
        other = device + ((rank + turn) % RANKS - rank) * STRIDE
        at = _place(inboxes_ptr, other, (slot + rank) * PROGRAMS + program, REGION)
        tl.store(at + inside, stamped, mask=real)

    first = tl.zeros((BLOCK,), tl.float32)
    second = tl.zeros((BLOCK,), tl.float32)
    for of in tl.static_range(RANKS):
        at = _place(inboxes_ptr, device, (slot + of) * PROGRAMS + program, REGION)
        got = tl.load(at + inside, mask=real, other=0, volatile=True)
        here = ((got >> 32).to(tl.int32) == number) | (rank == of) | (word >= WORDS)
        while (tl.min(here.to(tl.int32), 0) == 0) & (spins_left > 0):
            got = tl.load(at + inside, mask=real, other=0, volatile=True)
            here = ((got >> 32).to(tl.int32) == number) | (rank == of) | (word >= WORDS)
            spins_left -= 1
        theirs = tl.where(rank == of, mine, (got & 0xFFFFFFFF).to(tl.int32))
        low, high = _numbers(theirs, PAIRS)
        first += tl.where(here, low, float("nan"))
        second += tl.where(here, high, float("nan"))
        tl.store(sums_ptr + PROGRAMS, 1, mask=tl.min(here.to(tl.int32), 0) == 0)
    if RESIDUAL:
        kept = tl.load(residual_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + word, mask=real, other=0)
        low, high = _numbers(kept, PAIRS)
        first += low
        second += high
    out = y_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + word
    if PAIRS:
        low = first.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        high = second.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16
        tl.store(out, low | high, mask=real)
    else:
        tl.store(out, first.to(tl.int32, bitcast=True), mask=real)
    tl.store(sums_ptr + program, number)


@triton.jit
def _place(inboxes_ptr, device, number, REGION: tl.constexpr):
    """Where the words of place `number` of a device's inbox begin."""
    low = tl.load(inboxes_ptr + 2 * device).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(inboxes_ptr + 2 * device + 1).to(tl.int64) << 32
    address = tl.multiple_of(low | high, 16)
    return address.to(tl.pointer_type(tl.int64), bitcast=True) + number.to(tl.int64) * REGION


@triton.jit
def _numbers(words, PAIRS: tl.constexpr):
    """What words of 32 bits hold, in float32: two bfloat16 each, or one number, twice."""
    if PAIRS:
        return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
    whole = words.to(tl.float32, bitcast=True)
    return whole, whole
