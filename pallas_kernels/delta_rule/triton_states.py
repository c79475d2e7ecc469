"""The gated delta rule of rows with several tokens: the states before their chunks, and what the tokens read."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _keep_inputs(x_ptr, ring_ptr, channel, query_len, context_len, STRIDE: tl.constexpr, RING: tl.constexpr):
    """Channels of a row's last four tokens, for the convolution of those to come. x_ptr: of its first token."""
    last = query_len - 4 + tl.arange(0, 4)
    mask = (last >= 0)[:, None]
    x = tl.load(x_ptr + last.to(tl.int64)[:, None] * STRIDE + channel[None, :], mask=mask, other=0.0)
    entry = (context_len + last + 4) % 4
    tl.store(ring_ptr + entry[:, None] * RING + channel[None, :], x.to(tl.float32), mask=mask)


@triton.jit
def states_of_chunks(
    x_ptr,
    k_ptr,
    w_ptr,
    u_ptr,
    decay_ptr,
    layer_ptr,
    slot_ptr,
    query_start_ptr,
    query_len_ptr,
    context_len_ptr,
    rows_ptr,
    first_ptr,
    num_rows_ptr,
    state_ptr,
    ring_ptr,
    before_ptr,
    written_ptr,
    SLOTS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,
):
    """BLOCK columns of a value head's state, of every ROWS_AT_ONCE-th row, chunk by chunk; what their tokens write."""
    CHANNELS: tl.constexpr = 2 * DK + GROUP * DV
    WIDTH: tl.constexpr = CHANNELS + GROUP * DV + 2 * GROUP
    SPLITS: tl.constexpr = DV // BLOCK
    RING: tl.constexpr = HEADS * CHANNELS
    value_head = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    head = value_head // GROUP
    g = value_head % GROUP
    layer = tl.load(layer_ptr).to(tl.int64)
    i = tl.arange(0, CHUNK)
    c = tl.arange(0, DK)
    e = split * BLOCK + tl.arange(0, BLOCK)
    inner = c[:, None] * DV + e[None, :]
    for n in range(tl.program_id(1), tl.load(num_rows_ptr), ROWS_AT_ONCE):
        row = tl.load(rows_ptr + n)
        first = tl.load(first_ptr + n)
        place = layer * SLOTS + tl.load(slot_ptr + row)
        query_len = tl.load(query_len_ptr + row)
        context_len = tl.load(context_len_ptr + row)
        start = tl.load(query_start_ptr + row).to(tl.int64)
        state = state_ptr + (place * (HEADS * GROUP) + value_head) * (DK * DV) + inner
        s = tl.load(state, mask=context_len > 0, other=0.0)
        for chunk in range(0, (query_len + CHUNK - 1) // CHUNK):
            count = query_len - chunk * CHUNK
            inside = i < count
            token = start + chunk * CHUNK + i
            at = token * (HEADS * GROUP) + value_head
            narrow = s.to(k_ptr.dtype.element_ty)
            before = before_ptr + ((first + chunk).to(tl.int64) * (HEADS * GROUP) + value_head) * (DK * DV)
            tl.store(before + inner, narrow)
            w = tl.load(w_ptr + at[:, None] * DK + c[None, :], mask=inside[:, None], other=0.0)
            u = tl.load(u_ptr + at[:, None] * DV + e[None, :], mask=inside[:, None], other=0.0)
            written = u.to(tl.float32) - tl.dot(w, narrow)
            tl.store(
                written_ptr + at[:, None] * DV + e[None, :],
                written.to(written_ptr.dtype.element_ty),
                mask=inside[:, None],
            )
            last = start + chunk * CHUNK + tl.minimum(count, CHUNK) - 1
            end = tl.load(decay_ptr + last * (HEADS * GROUP) + value_head)
            decay = tl.load(decay_ptr + at, mask=inside, other=0.0)
            faded = tl.where(inside, tl.exp(end - decay), 0.0)
            k_at = (token * HEADS + head)[:, None] * DK + c[None, :]
            k = tl.load(k_ptr + k_at, mask=inside[:, None], other=0.0)
            s = tl.dot(tl.trans(k), (written * faded[:, None]).to(k.dtype), s * tl.exp(end))
        tl.store(state, s)
        if split == 0:
            x = x_ptr + (start * HEADS + head) * WIDTH
            ring = ring_ptr + place * 4 * RING + head * CHANNELS
            value = 2 * DK + g * DV + tl.arange(0, DV)
            _keep_inputs(x, ring, value, query_len, context_len, HEADS * WIDTH, RING)
            if g == 0:
                _keep_inputs(x, ring, c, query_len, context_len, HEADS * WIDTH, RING)
                _keep_inputs(x, ring, DK + c, query_len, context_len, HEADS * WIDTH, RING)


@triton.jit
def outputs_of_tokens(
    x_ptr,
    q_ptr,
    k_ptr,
    written_ptr,
    decay_ptr,
    before_ptr,
    single_ptr,
    norm_ptr,
    layer_ptr,
    query_start_ptr,
    query_len_ptr,
    token_row_ptr,
    chunk_row_ptr,
    chunk_offset_ptr,
    chunk_count_ptr,
    out_ptr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    CHUNK: tl.constexpr,
    EPS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A value head of a chunk; or, past the chunks, of CHUNK tokens that follow each other, those of no chunk."""
    WIDTH: tl.constexpr = 2 * DK + 2 * GROUP * DV + 2 * GROUP
    value_head = tl.program_id(0)
    head = value_head // GROUP
    g = value_head % GROUP
    index = tl.program_id(1)
    i = tl.arange(0, CHUNK)
    e = tl.arange(0, DV)
    if index >= CHUNKS:
        token = (index - CHUNKS) * CHUNK + i
        row = tl.load(token_row_ptr + token, mask=token < TOKENS, other=0)
        start = tl.load(query_start_ptr + row)
        query_len = tl.load(query_len_ptr + row)
        inside = (token >= start) & (token < start + query_len)
        single = inside & (query_len == 1)
        theirs = (row.to(tl.int64) * (HEADS * GROUP) + value_head)[:, None] * DV + e[None, :]
        o = tl.load(single_ptr + theirs, mask=single[:, None], other=0.0)
        mine = (token.to(tl.int64) * (HEADS * GROUP) + value_head)[:, None] * DV + e[None, :]
        tl.store(out_ptr + mine, o, mask=((token < TOKENS) & (single | (inside == 0)))[:, None])
        return
    count = tl.load(chunk_count_ptr + index)
    if count == 0:
        return
    layer = tl.load(layer_ptr).to(tl.int64)
    row = tl.load(chunk_row_ptr + index)
    token = (tl.load(query_start_ptr + row) + tl.load(chunk_offset_ptr + index)).to(tl.int64) + i
    inside = i < count
    at = token * (HEADS * GROUP) + value_head
    before = before_ptr + (index.to(tl.int64) * (HEADS * GROUP) + value_head) * (DK * DV)
    o = tl.zeros([CHUNK, DV], tl.float32)
    products = tl.zeros([CHUNK, CHUNK], tl.float32)
    for first in range(0, DK, BLOCK):
        c = first + tl.arange(0, BLOCK)
        k_at = (token * HEADS + head)[:, None] * DK + c[None, :]
        q = tl.load(q_ptr + k_at, mask=inside[:, None], other=0.0)
        k = tl.load(k_ptr + k_at, mask=inside[:, None], other=0.0)
        s = tl.load(before + c[:, None] * DV + e[None, :])
        o = tl.dot(q, s, o)
        products = tl.dot(q, tl.trans(k), products)
    decay = tl.load(decay_ptr + at, mask=inside, other=0.0)
    seen = (i[:, None] >= i[None, :]) & inside[:, None]
    products *= tl.exp(tl.where(seen, decay[:, None] - decay[None, :], -1e30))
    written = tl.load(written_ptr + at[:, None] * DV + e[None, :], mask=inside[:, None], other=0.0)
    o = tl.dot(products.to(written.dtype), written, o * tl.exp(decay)[:, None])
    o *= tl.rsqrt(tl.sum(o * o, 1) / DV + EPS)[:, None]
    gate = x_ptr + (token * HEADS + head)[:, None] * WIDTH + 2 * DK + (GROUP + g) * DV + e[None, :]
    z = tl.load(gate, mask=inside[:, None], other=0.0).to(tl.float32)
    o *= tl.load(norm_ptr + layer * DV + e).to(tl.float32)[None, :] * z * tl.sigmoid(z)
    tl.store(out_ptr + at[:, None] * DV + e[None, :], o.to(out_ptr.dtype.element_ty), mask=inside[:, None])
