"""Log-probabilities of the chosen and of the likeliest tokens, without sorting the vocabulary."""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.sample.triton_rows import ACTIVE, NO_ID, WANTS_LOGPROBS, arrive, greatest, whole


@triton.jit
def logprobs(
    logits_ptr,
    rows_ptr,
    tokens_ptr,
    counters_ptr,
    sums_ptr,
    values_ptr,
    ids_ptr,
    chosen_ptr,
    top_ids_ptr,
    top_ptr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    TOP: tl.constexpr,
    MERGE_BLOCK: tl.constexpr,
):
    """A chunk of a row that asks: its TOP greatest logits and the sum of its exponentials. The last program merges.

    sums [R, 2, PARTS]: a chunk's greatest logit, and the sum of what the others' exponentials are to its.
    """
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if (whole(rows_ptr, row, WANTS_LOGPROBS) <= 0) | (whole(rows_ptr, row, ACTIVE) == 0):
        if part == 0:
            tl.store(chosen_ptr + row, 0.0)
            for i in range(TOP):
                tl.store(top_ids_ptr + row * TOP + i, 0)
                tl.store(top_ptr + row * TOP + i, 0.0)
        return
    ids = part * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * V + ids, mask=ids < V, other=-float("inf"))
    ids = tl.where(ids < V, ids, NO_ID)
    peak = tl.max(x, 0)
    tl.store(sums_ptr + row * (2 * PARTS) + part, peak)
    tl.store(sums_ptr + row * (2 * PARTS) + PARTS + part, tl.sum(tl.exp(x - tl.maximum(peak, -1e38)), 0))
    mine = (row * PARTS + part) * TOP
    for i in range(TOP):
        value, token = greatest(x, ids)
        tl.store(values_ptr + mine + i, value)
        tl.store(ids_ptr + mine + i, token)
        x = tl.where(ids == token, -float("inf"), x)
        ids = tl.where(ids == token, NO_ID, ids)
    if arrive(counters_ptr, row, PARTS):
        at = tl.arange(0, PARTS_BLOCK)
        sums = sums_ptr + row * (2 * PARTS) + at
        peaks = tl.load(sums, mask=at < PARTS, other=-float("inf"), cache_modifier=".cg")
        parts = tl.load(sums + PARTS, mask=at < PARTS, other=0.0, cache_modifier=".cg")
        peak = tl.maximum(tl.max(peaks, 0), -1e38)
        normalizer = peak + tl.log(tl.sum(parts * tl.exp(peaks - peak), 0))
        chosen = tl.load(logits_ptr + row * V + tl.load(tokens_ptr + row))
        tl.store(chosen_ptr + row, chosen - normalizer)
        at = tl.arange(0, MERGE_BLOCK)
        found = row * (PARTS * TOP) + at
        likely = tl.load(values_ptr + found, mask=at < PARTS * TOP, other=-float("inf"), cache_modifier=".cg")
        tokens = tl.load(ids_ptr + found, mask=at < PARTS * TOP, other=NO_ID, cache_modifier=".cg")
        for i in range(TOP):
            value, token = greatest(likely, tokens)
            tl.store(top_ptr + row * TOP + i, value - normalizer)
            tl.store(top_ids_ptr + row * TOP + i, token)
            likely = tl.where(tokens == token, -float("inf"), likely)
            tokens = tl.where(tokens == token, NO_ID, tokens)
