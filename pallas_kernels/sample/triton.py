"""Sampling in four Triton kernels that sort nothing and end at once for rows that do not need them. From Ampere on.

Passes over a row's logits: one for the likeliest token or a draw from all; with top_k or top_p, those of the bisection
(`triton_cut`) and one to draw from what is kept; one for log-probabilities.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.dispatch import Target
from pallas_kernels.sample.triton_cut import cut
from pallas_kernels.sample.triton_logprobs import logprobs
from pallas_kernels.sample.triton_rows import (
    ACTIVE,
    FREQUENCY,
    HAS_BIAS,
    HAS_PENALTIES,
    MIN_TEMPERATURE,
    NO_STOP_BEFORE,
    POSITION,
    PRESENCE,
    REPETITION,
    SLOT,
    TEMPERATURE,
    adjusts,
    arrive,
    filters,
    greatest,
    greatest_of_parts,
    gumbel,
    pack,
    real,
    whole,
)
from pallas_kernels.triton_call import launch

if TYPE_CHECKING:
    from pallas_kernels.sample.api import History, Parameters, Places

CHUNK = 4096
"""Tokens of one program: a row of 150,000 is 38 of them, a step of four rows fills the card."""
BLOCK = 2048
"""Tokens of one round of a program."""
CAPACITY = 4096
"""Logits that a bisection sets aside, and those of a row that it reads at a time."""


def run(
    logits: jax.Array,
    rows: Parameters,
    history: History,
    places: Places,
    *,
    num_top: int,
    counters: jax.Ref | None,
    target: Target,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The contract is `api.sample`."""
    if logits.dtype != jnp.float32:
        raise NotImplementedError(f"logits are {logits.dtype}; it takes float32")
    num_rows, vocab = places.slot.shape[0], logits.shape[1]
    if counters is None or counters.shape[0] < num_rows:
        counters = jax.new_ref(jnp.zeros(num_rows, jnp.int32))
    packed = pack(rows, places)
    parts = triton.cdiv(vocab, CHUNK)
    chunks = {"V": vocab, "CHUNK": CHUNK, "PARTS": parts, "PARTS_BLOCK": triton.next_power_of_2(parts)}
    grid = (parts, num_rows)

    def array(dtype: jnp.dtype, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_rows, *shape), dtype)

    adjusted, _, _, top, first = launch(
        _scan,
        [logits, packed, rows.stop_ids, *history],
        [array(jnp.float32, vocab), *_parts(array, parts), array(jnp.float32), array(jnp.int32)],
        in_place=[counters],
        grid=grid,
        constants=chunks | {"BLOCK": BLOCK, "STOPS": rows.stop_ids.shape[1]},
        target=target,
        num_warps=8,
    )
    _, _, limit, limit_id = launch(
        cut,
        [logits, adjusted, packed, top],
        [array(jnp.float32, CAPACITY), array(jnp.int32, CAPACITY), array(jnp.float32), array(jnp.int32)],
        grid=(num_rows,),
        constants={"V": vocab, "CAPACITY": CAPACITY},
        target=target,
        num_warps=16,
    )
    _, _, tokens = launch(
        _draw,
        [logits, adjusted, packed, first, limit, limit_id],
        [*_parts(array, parts), array(jnp.int32)],
        in_place=[counters],
        grid=grid,
        constants=chunks | {"BLOCK": BLOCK},
        target=target,
        num_warps=8,
    )
    *_, chosen, top_ids, top_values = launch(
        logprobs,
        [logits, packed, tokens],
        [
            array(jnp.float32, 2, parts),
            array(jnp.float32, parts, num_top),
            array(jnp.int32, parts, num_top),
            array(jnp.float32),
            array(jnp.int32, num_top),
            array(jnp.float32, num_top),
        ],
        in_place=[counters],
        grid=grid,
        constants=chunks | {"TOP": num_top, "MERGE_BLOCK": triton.next_power_of_2(parts * num_top)},
        target=target,
        num_warps=8,
    )
    return tokens, (chosen, top_ids, top_values)


def _parts(array, parts: int) -> list[jax.ShapeDtypeStruct]:
    """What each program of a row leaves: its greatest value, and the id."""
    return [array(jnp.float32, parts), array(jnp.int32, parts)]


@triton.jit
def _scan(
    logits_ptr,
    rows_ptr,
    stops_ptr,
    counts_ptr,
    in_prompt_ptr,
    bias_ptr,
    counters_ptr,
    adjusted_ptr,
    values_ptr,
    ids_ptr,
    top_ptr,
    tokens_ptr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    STOPS: tl.constexpr,
):
    """Adjusts a chunk of a row where it asks for that, and finds its greatest logit; with noise if it draws from all.

    `top` is the greatest logit of rows that filter.
    """
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if whole(rows_ptr, row, ACTIVE) == 0:
        if part == 0:
            tl.store(tokens_ptr + row, 0)
        return
    changes = adjusts(rows_ptr, row)
    temperature = real(rows_ptr, row, TEMPERATURE)
    noisy = (temperature > 0.0) & (filters(rows_ptr, row, V) == 0)
    inverse = 1.0 / tl.maximum(temperature, MIN_TEMPERATURE)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    best_id = part * CHUNK + tl.arange(0, BLOCK)
    for start in range(0, CHUNK, BLOCK):
        ids = part * CHUNK + start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * V + ids, mask=ids < V, other=-float("inf"))
        if changes:
            x = _adjust(x, ids, row, rows_ptr, stops_ptr, counts_ptr, in_prompt_ptr, bias_ptr, V, STOPS)
            tl.store(adjusted_ptr + row * V + ids, x, mask=ids < V)
        if noisy:
            x = x * inverse + gumbel(rows_ptr, row, ids)
        better = x > best
        best = tl.where(better, x, best)
        best_id = tl.where(better, ids, best_id)
    value, token = greatest(best, best_id)
    tl.store(values_ptr + row * PARTS + part, value)
    tl.store(ids_ptr + row * PARTS + part, token)
    if arrive(counters_ptr, row, PARTS):
        value, token = greatest_of_parts(values_ptr, ids_ptr, row, PARTS, PARTS_BLOCK)
        tl.store(top_ptr + row, value)
        tl.store(tokens_ptr + row, token)


@triton.jit
def _adjust(
    x,
    ids,
    row,
    rows_ptr,
    stops_ptr,
    counts_ptr,
    in_prompt_ptr,
    bias_ptr,
    V: tl.constexpr,
    STOPS: tl.constexpr,
):
    """Bias, penalties and the bar on stop ids. Source: `api.sample`."""
    slot = whole(rows_ptr, row, SLOT).to(tl.int64)
    if whole(rows_ptr, row, HAS_BIAS) > 0:
        x += tl.load(bias_ptr + slot * V + ids, mask=ids < V, other=0.0)
    if whole(rows_ptr, row, HAS_PENALTIES) > 0:
        count = tl.load(counts_ptr + slot * V + ids, mask=ids < V, other=0)
        seen = tl.load(in_prompt_ptr + slot * V + ids, mask=ids < V, other=0) != 0
        penalty = tl.zeros_like(x) + real(rows_ptr, row, REPETITION)
        repeated = tl.where(x > 0, tl.div_rn(x, penalty), x * penalty)
        x = tl.where((count > 0) | seen, repeated, x)
        presence = tl.where(count > 0, real(rows_ptr, row, PRESENCE), 0.0)
        x -= real(rows_ptr, row, FREQUENCY) * count.to(tl.float32) + presence
    if whole(rows_ptr, row, POSITION) < whole(rows_ptr, row, NO_STOP_BEFORE):
        for i in range(STOPS):
            x = tl.where(ids == tl.load(stops_ptr + row * STOPS + i), -float("inf"), x)
    return x


@triton.jit
def _draw(
    logits_ptr,
    adjusted_ptr,
    rows_ptr,
    first_ptr,
    limit_ptr,
    limit_id_ptr,
    counters_ptr,
    values_ptr,
    ids_ptr,
    tokens_ptr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of a chunk of a row that filters, the kept token with the greatest sum of logit and noise."""
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if filters(rows_ptr, row, V) == 0:
        if part == 0:
            tl.store(tokens_ptr + row, tl.load(first_ptr + row))
        return
    inverse = 1.0 / tl.maximum(real(rows_ptr, row, TEMPERATURE), MIN_TEMPERATURE)
    limit = tl.load(limit_ptr + row)
    limit_id = tl.load(limit_id_ptr + row)
    if adjusts(rows_ptr, row):
        row_ptr = adjusted_ptr + row * V
    else:
        row_ptr = logits_ptr + row * V
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    best_id = part * CHUNK + tl.arange(0, BLOCK)
    for start in range(0, CHUNK, BLOCK):
        ids = part * CHUNK + start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + ids, mask=ids < V, other=-float("inf"))
        kept = (x > limit) | ((x == limit) & (ids <= limit_id))
        if tl.max(kept.to(tl.int32), 0) > 0:  # else there is no need of the noise, which takes longest
            x = tl.where(kept, x * inverse + gumbel(rows_ptr, row, ids), -float("inf"))
            better = x > best
            best = tl.where(better, x, best)
            best_id = tl.where(better, ids, best_id)
    value, token = greatest(best, best_id)
    tl.store(values_ptr + row * PARTS + part, value)
    tl.store(ids_ptr + row * PARTS + part, token)
    if arrive(counters_ptr, row, PARTS):
        value, token = greatest_of_parts(values_ptr, ids_ptr, row, PARTS, PARTS_BLOCK)
        tl.store(tokens_ptr + row, token)
