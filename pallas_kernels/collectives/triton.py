"""Collectives as one Triton kernel: every device writes its numbers to the others, and adds up or puts in a row what
they wrote to it.

Each 64-bit word that travels has 32 bits of numbers and 32 that say which collective they are of, so that a word that
has come says so itself: there is no barrier, no second message, and no memory fence, and the time is that of one write
over NVLink. It is a kernel like all others of a captured graph. XLA's own collectives are not: they split the graph,
and the devices meet on the host for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.collectives import api
from pallas_kernels.dispatch import Target
from pallas_kernels.triton_call import launch

if TYPE_CHECKING:
    from pallas_kernels.collectives.api import Peers

MOST_WORDS = 2**20
"""That a device sends to all others together. Above, rings that send each number twice take less time."""
LEAST_BLOCK, FEW_WARPS, MANY_WARPS = 256, 4, 8
"""Words of a program where there are few, and warps of one; of a program of more words, MANY_WARPS."""
MANY_PROGRAMS = 128
"""Programs that a collective is split over before each takes more than LEAST_BLOCK words."""
SPINS = 2**25
"""Looks at what has not come, of about a microsecond each, before a program gives up."""


def all_reduce(
    x: jax.Array, axes: tuple[str, ...], *, residual: jax.Array | None, peers: Peers | None, target: Target
) -> jax.Array:
    """The contract is `api.all_reduce`; adds in float32, in the devices' order, and rounds once."""
    if residual is not None and residual.dtype != x.dtype:
        raise NotImplementedError(f"x of {x.dtype} and a residual of {residual.dtype}")
    _check_sum(x)
    return _exchange(x, axes, x.shape, peers, target, residual=residual)


def all_gather(x: jax.Array, axes: tuple[str, ...], *, axis: int, peers: Peers | None, target: Target) -> jax.Array:
    """The contract is `api.all_gather`. Booleans travel as integers, of which each fills a word."""
    if x.dtype == jnp.bool_:
        return all_gather(x.astype(jnp.int32), axes, axis=axis, peers=peers, target=target) != 0
    size = jax.lax.axis_size(axes)
    shape = tuple(n * size if i == axis else n for i, n in enumerate(x.shape))
    run_bytes = x.nbytes if axis == 0 else x.nbytes // x.shape[0]
    return _exchange(x, axes, shape, peers, target, run_bytes=run_bytes)


def reduce_scatter(x: jax.Array, axes: tuple[str, ...], *, peers: Peers | None, target: Target) -> jax.Array:
    """The contract is `api.reduce_scatter`; adds as `all_reduce` does."""
    _check_sum(x)
    size = jax.lax.axis_size(axes)
    return _exchange(x, axes, (x.shape[0] // size, x.shape[1]), peers, target, scattered=True)


def _check_sum(x: jax.Array) -> None:
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"numbers of {x.dtype}; it adds bfloat16 or float32")


def _exchange(
    x: jax.Array,
    axes: tuple[str, ...],
    shape: tuple[int, ...],
    peers: Peers | None,
    target: Target,
    *,
    residual: jax.Array | None = None,
    run_bytes: int = 0,
    scattered: bool = False,
) -> jax.Array:
    """A result of `shape`: a sum, or what devices have, by runs of so many bytes."""
    if peers is None:
        raise NotImplementedError("devices cannot write into each other's memory")
    ring = api.ring(axes, peers.axes, any_order=not (run_bytes or scattered))
    sent_bytes = x.nbytes // ring.size if scattered else x.nbytes
    if sent_bytes % 4 or run_bytes % 4:
        raise NotImplementedError(f"{x.shape} numbers of {x.dtype} do not fill words of 32 bits")
    words = sent_bytes // 4
    if words * (ring.size - 1) > MOST_WORDS:
        raise NotImplementedError(f"{words} words to each of {ring.size - 1} devices are more than {MOST_WORDS}")
    block = LEAST_BLOCK
    while words > block * MANY_PROGRAMS and block < api.REGION:
        block *= 2
    constants = {
        "WORDS": words,
        "RUN": run_bytes // 4,
        "RANKS": ring.size,
        "STRIDE": ring.stride,
        "PLACES": api.SLOTS * ring.before,
        "COUNTS": ring.number * api.PROGRAMS,
        "IN_VAIN": api.num_counts(peers.axes) - 1,
        "PAIRS": x.dtype == jnp.bfloat16,
        "RESIDUAL": residual is not None,
        "GATHER": run_bytes > 0,
        "SCATTER": scattered,
        "BLOCK": block,
        "REGION": api.REGION,
        "PROGRAMS": api.PROGRAMS,
        "SPINS": SPINS,
    }
    (y,) = launch(
        _collective,
        [x, x if residual is None else residual, peers.inboxes, peers.device],
        [jax.ShapeDtypeStruct(shape, x.dtype)],
        in_place=[peers.counts],
        grid=(triton.cdiv(words, block),),
        constants=constants,
        target=target,
        num_warps=FEW_WARPS if block == LEAST_BLOCK else MANY_WARPS,
    )
    return y


@triton.jit
def _collective(
    x_ptr,
    residual_ptr,
    inboxes_ptr,
    device_ptr,
    counts_ptr,
    y_ptr,
    WORDS: tl.constexpr,
    RUN: tl.constexpr,
    RANKS: tl.constexpr,
    STRIDE: tl.constexpr,
    PLACES: tl.constexpr,
    COUNTS: tl.constexpr,
    IN_VAIN: tl.constexpr,
    PAIRS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    BLOCK: tl.constexpr,
    REGION: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SPINS: tl.constexpr,
):
    """BLOCK of the WORDS that each device sends to each. A program writes to its own places alone, however many words
    there are. GATHER: runs of RUN words of each device follow each other."""
    program = tl.program_id(0)
    number = tl.load(counts_ptr + COUNTS + program) + 1
    spins_left = tl.where(tl.load(counts_ptr + IN_VAIN) == 0, SPINS, 0)
    device = tl.load(device_ptr)
    rank = (device // STRIDE) % RANKS
    inside = tl.arange(0, BLOCK)
    word = program * BLOCK + inside
    real = word < WORDS
    x = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + word
    out = y_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    slot = PLACES + (number & 1) * RANKS
    mine = tl.load(x + (rank * WORDS if SCATTER else 0), mask=real, other=0)
    if RESIDUAL:  # before what has to be waited for
        kept = tl.load(residual_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + word, mask=real, other=0)
    inbox = _place(inboxes_ptr, device, slot * PROGRAMS + program, REGION)
    for turn in tl.static_range(1, RANKS):
        other = (rank + turn) % RANKS
        theirs = tl.load(x + other * WORDS, mask=real, other=0) if SCATTER else mine
        stamped = (number.to(tl.int64) << 32) | (theirs.to(tl.int64) & 0xFFFFFFFF)
        at = _place(inboxes_ptr, device + (other - rank) * STRIDE, (slot + rank) * PROGRAMS + program, REGION)
        tl.store(at + inside, stamped, mask=real)

    first = tl.zeros((BLOCK,), tl.float32)
    second = tl.zeros((BLOCK,), tl.float32)
    for of in tl.static_range(RANKS):
        at = inbox + of * (PROGRAMS * REGION)
        got = tl.load(at + inside, mask=real, other=0, volatile=True)
        here = ((got >> 32).to(tl.int32) == number) | (rank == of) | (word >= WORDS)
        while (tl.min(here.to(tl.int32), 0) == 0) & (spins_left > 0):
            got = tl.load(at + inside, mask=real, other=0, volatile=True)
            here = ((got >> 32).to(tl.int32) == number) | (rank == of) | (word >= WORDS)
            spins_left -= 1
        tl.store(counts_ptr + IN_VAIN, 1, mask=tl.min(here.to(tl.int32), 0) == 0)
        found = tl.where(rank == of, mine, (got & 0xFFFFFFFF).to(tl.int32))
        if GATHER:
            # All bits set: NaN, whatever the numbers are; the greatest of integers without a sign, and -1.
            to = (word // RUN * RANKS + of) * RUN + word % RUN
            tl.store(out + to, tl.where(here, found, -1), mask=real)
        else:
            low, high = _numbers(found, PAIRS)
            first += tl.where(here, low, float("nan"))
            second += tl.where(here, high, float("nan"))
    if not GATHER:
        if RESIDUAL:
            low, high = _numbers(kept, PAIRS)
            first += low
            second += high
        if PAIRS:
            low = first.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
            high = second.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16
            tl.store(out + word, low | high, mask=real)
        else:
            tl.store(out + word, first.to(tl.int32, bitcast=True), mask=real)
    tl.store(counts_ptr + COUNTS + program, number)


@triton.jit
def _place(inboxes_ptr, device, number, REGION: tl.constexpr):
    """Where the words of place `number` of a device's inbox begin."""
    low = tl.load(inboxes_ptr + 2 * device).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(inboxes_ptr + 2 * device + 1).to(tl.int64) << 32
    return (low | high).to(tl.pointer_type(tl.int64), bitcast=True) + number.to(tl.int64) * REGION


@triton.jit
def _numbers(words, PAIRS: tl.constexpr):
    """What words of 32 bits hold, in float32: two bfloat16 each, or one number, twice."""
    if PAIRS:
        return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
    whole = words.to(tl.float32, bitcast=True)
    return whole, whole
