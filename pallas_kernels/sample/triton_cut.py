"""Where top_k, top_p and min_p cut a row: by bisection, without sorting it. One program for each row.

A row of 150,000 logits is 600 KB: too much for a multiprocessor, so that every round of the bisection reads it from the
L2 cache, until what is left fits in CAPACITY; that is set aside, and the remaining rounds read only that.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.sample.triton_rows import (
    MIN_P,
    MIN_TEMPERATURE,
    NO_ID,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    adjusts,
    filters,
    real,
    searches,
    whole,
)

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The least finite float32."""
FIRST_STEP = tl.constexpr(4.0)
"""Below the greatest logit, where the search begins; doubled until it is below the cut."""
UNROLL = tl.constexpr(4)
"""Blocks of a row whose loads are under way at once: 64 KB, as much as a multiprocessor takes from L2 meanwhile."""
VALUE_ROUNDS = tl.constexpr(24)
"""Rounds after which the bisection halves bit patterns, of which there are 2^32, rather than values."""


@triton.jit
def cut(
    logits_ptr,
    adjusted_ptr,
    rows_ptr,
    top_ptr,
    held_ptr,
    held_ids_ptr,
    limit_ptr,
    limit_id_ptr,
    V: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Of a row that filters: the limit and its id. A token is kept above the limit, or at it up to that id."""
    row = tl.program_id(0).to(tl.int64)
    if not filters(rows_ptr, row, V):
        return
    top = tl.load(top_ptr + row)
    temperature = tl.maximum(real(rows_ptr, row, TEMPERATURE), MIN_TEMPERATURE)
    limit = tl.full([], -float("inf"), tl.float32)
    limit_id = tl.full([], -1, tl.int32)
    if searches(rows_ptr, row, V):
        if adjusts(rows_ptr, row):
            row_ptr = adjusted_ptr + row * V
        else:
            row_ptr = logits_ptr + row * V
        held_ptr += row * CAPACITY
        held_ids_ptr += row * CAPACITY
        scale = 1.4426950408889634 / temperature
        held = tl.full([], 0, tl.int32)
        top_k = whole(rows_ptr, row, TOP_K)
        top_p = real(rows_ptr, row, TOP_P)
        if (top_k > 0) & (top_k < V):
            need = top_k.to(tl.float32)
            limit, limit_id, held = _search(
                row_ptr, held_ptr, held_ids_ptr, held, top, scale, need, limit, limit_id, False, V, CAPACITY
            )
        if top_p < 1.0:
            limit, limit_id, held = _search(
                row_ptr, held_ptr, held_ids_ptr, held, top, scale, top_p, limit, limit_id, True, V, CAPACITY
            )
    floor = top + temperature * tl.log(real(rows_ptr, row, MIN_P))  # log 0 = -inf: no floor
    limit_id = tl.where(floor > limit, NO_ID, limit_id)
    tl.store(limit_ptr + row, tl.maximum(floor, limit))
    tl.store(limit_id_ptr + row, limit_id)


@triton.jit
def _search(
    row_ptr,
    held_ptr,
    held_ids_ptr,
    held,
    top,
    scale,
    need,
    limit,
    limit_id,
    BY_MASS: tl.constexpr,
    V: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Where the tokens that `limit` keeps, greatest first, reach `need`: the new limit and its id.

    need: a share of their weight, BY_MASS, or a number of tokens. held: whether all that `limit` keeps and that may
    matter is set aside; returned likewise.
    """
    count, total = _measure(
        row_ptr, held_ptr, held_ids_ptr, held, LOWEST, top, scale, limit, limit_id, BY_MASS, V, CAPACITY
    )
    if BY_MASS:
        need *= total
    if total > need:
        found, at_least, above, mass_above, held, partly = _bisect(
            row_ptr, held_ptr, held_ids_ptr, held, top, scale, need, count, limit, limit_id, BY_MASS, V, CAPACITY
        )
        wanted = need - mass_above
        if BY_MASS:
            wanted = tl.ceil(wanted / tl.exp2((found - top) * scale))
        ties = at_least - above
        wanted = tl.maximum(tl.minimum(wanted, ties.to(tl.float32)), 1.0).to(tl.int32)
        found_id = tl.full([], NO_ID, tl.int32)
        if wanted < ties:
            found_id = _id_of_tie(row_ptr, held_ptr, held_ids_ptr, held, found, wanted, limit, limit_id, V, CAPACITY)
        limit_id = tl.where(found == limit, tl.minimum(found_id, limit_id), found_id)
        limit = found
        held = held & (partly == 0)
    return limit, limit_id, held


@triton.jit
def _bisect(
    row_ptr,
    held_ptr,
    held_ids_ptr,
    held,
    top,
    scale,
    need,
    count,
    limit,
    limit_id,
    BY_MASS: tl.constexpr,
    V: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """The greatest logit such that the kept tokens from it on reach `need`, of `count` kept tokens, which do.

    Also the number of kept tokens at least it, and above it; the need that those above it fill; whether logits are set
    aside; and whether some above these are not. Invariant: the tokens at least `low` reach the need, those at least
    `high` do not.
    """
    lowest = _order(tl.full([], LOWEST, tl.float32))
    low, low_count = tl.maximum(lowest, _order(limit)), count
    high, high_count = _order(top) + 1, tl.full([], 0, tl.int32)
    high_mass = tl.full([], 0.0, tl.float32)
    # Of what lies above the logits set aside.
    base_count, base_mass = high_count, high_mass
    step = tl.full([], FIRST_STEP, tl.float32)
    rounds = tl.full([], 0, tl.int32)
    while high - low > 1:
        if (held == 0) & (low_count - high_count <= CAPACITY):
            bound = tl.full([], float("inf"), tl.float32)
            if low_count > CAPACITY:
                bound = _value(high)
                base_count, base_mass = high_count, high_mass
            _hold(row_ptr, held_ptr, held_ids_ptr, _value(low), bound, limit, limit_id, V, CAPACITY)
            held = tl.full([], 1, tl.int32)
        guess = tl.where(low > lowest, 0.5 * _value(low) + 0.5 * _value(high), top - step)
        middle = _order(guess)
        if (held != 0) | (rounds >= VALUE_ROUNDS) | (middle <= low) | (middle >= high):
            middle = low + ((high - low) >> 1)
        count, mass = _measure(
            row_ptr, held_ptr, held_ids_ptr, held, _value(middle), top, scale, limit, limit_id, BY_MASS, V, CAPACITY
        )
        if base_mass + mass >= need:
            low, low_count = middle, base_count + count
        else:
            high, high_count, high_mass = middle, base_count + count, base_mass + mass
        step *= 2.0
        rounds += 1
    return _value(low), low_count, high_count, high_mass, held, (base_count > 0).to(tl.int32)


@triton.jit
def _order(value):
    """float32 -> int64 in the same order, neighbours one apart."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(order):
    """The float32 of an order."""
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _kept(x, ids, limit, limit_id):
    return (x > limit) | ((x == limit) & (ids <= limit_id))


@triton.jit
def _over(x, ids, least, top, scale, limit, limit_id, counts, masses, BY_MASS: tl.constexpr):
    over = (x >= least) & _kept(x, ids, limit, limit_id)
    counts += over.to(tl.int32)
    if BY_MASS:
        masses += tl.where(over, tl.exp2((x - top) * scale), 0.0)
    return counts, masses


@triton.jit
def _measure(
    row_ptr,
    held_ptr,
    held_ids_ptr,
    held,
    least,
    top,
    scale,
    limit,
    limit_id,
    BY_MASS: tl.constexpr,
    V: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Of the kept tokens whose logit is at least `least`: their number, int32, and the same or their weight, float32.

    Counts those set aside where there are any, else the row's. The weight of the likeliest token is 1. The order of
    the sum is fixed, whatever the other rows are.
    """
    lane = tl.arange(0, CAPACITY)
    counts = tl.zeros([CAPACITY], tl.int32)
    masses = tl.zeros([CAPACITY], tl.float32)
    if held != 0:
        x, ids = tl.load(held_ptr + lane), tl.load(held_ids_ptr + lane)
        counts, masses = _over(x, ids, least, top, scale, limit, limit_id, counts, masses, BY_MASS)
    else:
        for start in tl.range(0, V, CAPACITY, loop_unroll_factor=UNROLL):
            ids = start + lane
            x = tl.load(row_ptr + ids, mask=ids < V, other=-float("inf"))
            counts, masses = _over(x, ids, least, top, scale, limit, limit_id, counts, masses, BY_MASS)
    count = tl.sum(counts, 0)
    mass = count.to(tl.float32)
    if BY_MASS:
        mass = tl.sum(masses, 0)
    return count, mass


@triton.jit
def _hold(
    row_ptr,
    held_ptr,
    held_ids_ptr,
    least,
    bound,
    limit,
    limit_id,
    V: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Sets aside the kept tokens of a row from `least` up to below `bound`, in the order of their ids, then -inf."""
    tl.debug_barrier()  # after all threads have read what was set aside before
    lane = tl.arange(0, CAPACITY)
    num = tl.full([], 0, tl.int32)
    for start in range(0, V, CAPACITY):
        ids = start + lane
        x = tl.load(row_ptr + ids, mask=ids < V, other=-float("inf"))
        chosen = (x >= least) & (x < bound) & _kept(x, ids, limit, limit_id)
        count = tl.sum(chosen.to(tl.int32), 0)
        if count > 0:
            place = num + tl.cumsum(chosen.to(tl.int32), 0) - 1
            fits = chosen & (place < CAPACITY)
            tl.store(held_ptr + place, x, mask=fits)
            tl.store(held_ids_ptr + place, ids, mask=fits)
        num += count
    tl.store(held_ptr + lane, tl.full([CAPACITY], -float("inf"), tl.float32), mask=lane >= num)
    tl.store(held_ids_ptr + lane, lane * 0, mask=lane >= num)
    tl.debug_barrier()  # before any thread reads what others wrote


@triton.jit
def _id_of_tie(
    row_ptr,
    held_ptr,
    held_ids_ptr,
    held,
    value,
    wanted,
    limit,
    limit_id,
    V: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """The id of the kept token that is number `wanted`, from 1, of those whose logit is `value`."""
    lane = tl.arange(0, CAPACITY)
    seen = tl.full([], 0, tl.int32)
    found = tl.full([], NO_ID, tl.int32)
    if held != 0:
        x, ids = tl.load(held_ptr + lane), tl.load(held_ids_ptr + lane)
        tie = (x == value) & _kept(x, ids, limit, limit_id)
        found = tl.min(tl.where(tie & (tl.cumsum(tie.to(tl.int32), 0) == wanted), ids, NO_ID), 0)
    else:
        for start in range(0, V, CAPACITY):
            ids = start + lane
            x = tl.load(row_ptr + ids, mask=ids < V, other=-float("inf"))
            tie = (x == value) & _kept(x, ids, limit, limit_id)
            count = tl.sum(tie.to(tl.int32), 0)
            if (seen < wanted) & (wanted <= seen + count):
                rank = seen + tl.cumsum(tie.to(tl.int32), 0)
                found = tl.min(tl.where(tie & (rank == wanted), ids, NO_ID), 0)
            seen += count
    return found
