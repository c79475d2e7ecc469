"""The router's choice in Triton kernels. GPUs from Ampere on.

Logits are a product as any other; what follows holds all logits of a row in registers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.dispatch import Target
from pallas_kernels.linear.api import linear
from pallas_kernels.linear.cublas import rms_norm
from pallas_kernels.triton_call import check_dtypes, launch

if TYPE_CHECKING:
    from pallas_kernels.linear.api import Norm

MAX_EXPERTS = 1024
"""Of all devices: a row's keys, of 64 bits, are the registers of one warp."""
MAX_OWN = 256
"""Tokens whose product with the router is a kernel of this file; above, the tiles that it reads are too many."""
OUT, DEPTH, PROGRAMS, MAX_SPLITS = 16, 256, 512, 8
"""Of the product with the router: experts of a program, columns per round; programs at most, where these have a part of
the columns each, and parts at most."""
INT64_MIN = tl.constexpr(-(2**63))


class Logits(NamedTuple):
    """What a choice is made from. S = 0: the logits themselves, [T, X] float32, which may be anything in rows that are
    not valid."""

    parts: jax.Array  # [S, T, X] float32: sums over the columns of a part, of x before it is divided by its norm
    squares: jax.Array  # [S, T] float32: sums of the squares of these columns of x
    num_parts: int  # S
    h: jax.Array | None  # [T, D]: x after its norm, where that was written down on the way


class Chosen(NamedTuple):
    """What a layer's experts need to know of its tokens."""

    expert: jax.Array  # [T, k] int32
    weight: jax.Array  # [T, k] float32
    h: jax.Array  # [T, D]: x after its norm; anything in rows that are not valid


def run(
    x: jax.Array,
    router: jax.Array,
    layer: jax.Array,
    *,
    norm: Norm,
    top_k: int,
    renormalise: bool,
    valid: jax.Array | None,
    counters: jax.Ref | None,
    target: Target,
) -> tuple[jax.Array, jax.Array]:
    """The contract is `routing.route`."""
    how = {"norm": norm, "top_k": top_k, "renormalise": renormalise, "counters": counters, "target": target}
    expert, weight, _ = choose(x, router, layer, valid=valid, **how)
    return expert, weight


def choose(
    x: jax.Array,
    router: jax.Array,
    layer: jax.Array,
    *,
    norm: Norm,
    top_k: int,
    renormalise: bool,
    valid: jax.Array | None,
    counters: jax.Ref | None,
    target: Target,
) -> Chosen:
    """As `routing.route`."""
    logits = _multiply(x, router, layer, norm, counters, target)
    (tokens, depth), few = x.shape, logits.h is None
    block = 1 if few or tokens % 4 else 4
    num_experts = router.shape[1]
    constants = {
        "ROWS": tokens,
        "PARTS": logits.num_parts,
        "EXPERTS": num_experts,
        "TOP_K": top_k,
        "RENORMALISE": renormalise,
        "MASKED": valid is not None,
        "WIDTH": depth,
        "EPS": norm.eps,
        "OFFSET": norm.offset,
        "EXPERTS_BLOCK": triton.next_power_of_2(num_experts),
        "K_BLOCK": triton.next_power_of_2(top_k),
        "WIDTH_BLOCK": triton.next_power_of_2(depth),
        "NORM": few,
        "BLOCK": block,
    }
    outputs = [jax.ShapeDtypeStruct((tokens, top_k), dtype) for dtype in (jnp.int32, jnp.float32)]
    outputs.append(jax.ShapeDtypeStruct(x.shape if few else (1, 1), x.dtype))
    scores = [logits.parts, logits.squares, logits.parts if valid is None else valid]
    inputs = [*scores, x, norm.weight, layer.reshape(1)]
    grid, warps = (tokens // block,), max(block, triton.next_power_of_2(triton.cdiv(depth, 2048)) if few else 1)
    expert, weight, normalised = launch(
        _choose, inputs, outputs, grid=grid, constants=constants, target=target, num_warps=warps
    )
    return Chosen(expert, weight, normalised if logits.h is None else logits.h)


def _multiply(
    x: jax.Array,
    router: jax.Array,
    layer: jax.Array,
    norm: Norm,
    counters: jax.Ref | None,
    target: Target,
) -> Logits:
    """The products of x after its norm with the router."""
    check_dtypes(x, router, norm.weight)
    (tokens, depth), num_experts = x.shape, router.shape[1]
    if num_experts > MAX_EXPERTS:
        raise NotImplementedError(f"{num_experts} experts; it takes {MAX_EXPERTS} at most")
    if tokens == 1:
        how = {"norm": norm, "out_dtype": jnp.float32, "counters": counters, "target": target}
        return _whole(linear(x, router, layer, **how), None)
    if tokens > MAX_OWN:
        h = rms_norm(x, norm, layer, target)
        return _whole(linear(h, router, layer, out_dtype=jnp.float32, counters=counters, target=target), h)
    tiles, rounds = (triton.cdiv(tokens, 16), triton.cdiv(num_experts, OUT)), triton.cdiv(depth, DEPTH)
    each = triton.cdiv(rounds, max(1, min(MAX_SPLITS, rounds, PROGRAMS // (tiles[0] * tiles[1]))))
    splits = triton.cdiv(rounds, each)
    parts, squares = launch(
        _router,
        [x, router, norm.weight, layer.reshape(1)],
        [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((splits, tokens, num_experts), (splits, tokens))],
        grid=(*tiles, splits),
        constants={
            "TOKENS": tokens,
            "EXPERTS": num_experts,
            "WIDTH": depth,
            "OFFSET": norm.offset,
            "BLOCK": 16,
            "OUT": OUT,
            "BLOCK_K": DEPTH,
            "ROUNDS": each,
        },
        target=target,
        num_stages=min(each, 5) + 1,
    )
    return Logits(parts, squares, splits, None)


def _whole(logits: jax.Array, h: jax.Array | None) -> Logits:
    return Logits(logits, logits, 0, h)


@triton.jit
def _router(
    x_ptr,
    router_ptr,
    norm_ptr,
    layer_ptr,
    parts_ptr,
    squares_ptr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Products of BLOCK tokens with OUT experts over ROUNDS times BLOCK_K columns, and squares of these."""
    layer = tl.load(layer_ptr).to(tl.int64)
    part = tl.program_id(2)
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * OUT + tl.arange(0, OUT)
    k = tl.arange(0, BLOCK_K)
    xs = x_ptr + m[:, None] * WIDTH + k[None, :]
    weights = router_ptr + layer * (EXPERTS * WIDTH) + n[:, None] * WIDTH + k[None, :]
    acc = tl.zeros([BLOCK, OUT], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for turn in range(ROUNDS):
        start = (part * ROUNDS + turn) * BLOCK_K
        inside = (k < WIDTH - start)[None, :]
        x = tl.load(xs + start, mask=(m < TOKENS)[:, None] & inside, other=0.0)
        w = tl.load(weights + start, mask=(n < EXPERTS)[:, None] & inside, other=0.0)
        norm = tl.load(norm_ptr + layer * WIDTH + start + k, mask=k < WIDTH - start, other=0.0)
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
        x = (wide * (norm.to(tl.float32) + OFFSET)[None, :]).to(x.dtype)
        acc = tl.dot(x, tl.trans(w), acc)
    rows = part * TOKENS + m
    tl.store(parts_ptr + rows[:, None] * EXPERTS + n[None, :], acc, mask=(m < TOKENS)[:, None] & (n < EXPERTS)[None, :])
    tl.store(squares_ptr + rows, squares, mask=(m < TOKENS) & (tl.program_id(1) == 0))


@triton.jit
def _best(
    parts_ptr,
    squares_ptr,
    valid_ptr,
    token,
    j,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    MASKED: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
):
    """Experts and weights of choices j of tokens: [N, J] each, of token [N] and j = 0 .. J - 1.

    A logit and its expert make one integer, in the order of the choice: all are different and none is lost, whatever
    the logits hold, so that no choice is an expert that is not there.
    """
    e = tl.arange(0, EXPERTS_BLOCK)
    there = (e < EXPERTS)[None, :]
    at = token[:, None] * EXPERTS + e[None, :]
    if PARTS:
        logits = tl.zeros([token.shape[0], EXPERTS_BLOCK], tl.float32)
        squares = tl.zeros([token.shape[0]], tl.float32)
        for part in tl.static_range(PARTS):
            logits += tl.load(parts_ptr + part * (ROWS * EXPERTS) + at, mask=there, other=0.0)
            squares += tl.load(squares_ptr + part * ROWS + token)
        logits = tl.where(there, logits * tl.rsqrt(squares / WIDTH + EPS)[:, None], -float("inf"))
    else:
        logits = tl.load(parts_ptr + at, mask=there, other=-float("inf"))
    bits = (logits + 0.0).to(tl.int32, bitcast=True)  # -0 + 0 = 0
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    keys = tl.where((e < EXPERTS)[None, :], ordered * 65536 + (65535 - e)[None, :], INT64_MIN)
    best = tl.zeros_like(token)[:, None].to(tl.int64) + tl.zeros_like(j)[None, :]
    for i in tl.static_range(TOP_K):
        key = tl.max(keys, 1)[:, None]
        keys = tl.where(keys == key, INT64_MIN, keys)
        best = tl.where(j[None, :] == i, key, best)
    expert = 65535 - (best & 65535).to(tl.int32)
    ordered = (best >> 16).to(tl.int32)
    value = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)
    greatest = tl.sum(tl.where(j[None, :] == 0, value, 0.0), 1)[:, None]
    weight = tl.where((j < TOP_K)[None, :], tl.exp(value - greatest), 0.0)
    if RENORMALISE:
        whole = tl.sum(weight, 1)
    else:
        whole = tl.sum(tl.exp(logits - greatest), 1)
    weight = weight / whole[:, None]
    if MASKED:
        valid = tl.load(valid_ptr + token)[:, None]
        expert = tl.where(valid, expert, EXPERTS)
        weight = tl.where(valid, weight, 0.0)
    return expert, weight


@triton.jit
def _normalise(
    x_ptr,
    norm_ptr,
    layer_ptr,
    h_ptr,
    token,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
):
    """Writes a row of x after its norm."""
    layer = tl.load(layer_ptr).to(tl.int64)
    at = tl.arange(0, WIDTH_BLOCK)
    row = token.to(tl.int64) * WIDTH + at
    x = tl.load(x_ptr + row, mask=at < WIDTH, other=0.0).to(tl.float32)
    norm = tl.load(norm_ptr + layer * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32) + OFFSET
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + EPS)
    tl.store(h_ptr + row, (x * scale * norm).to(h_ptr.dtype.element_ty), mask=at < WIDTH)


@triton.jit
def _choose(
    parts_ptr,
    squares_ptr,
    valid_ptr,
    x_ptr,
    norm_ptr,
    layer_ptr,
    expert_ptr,
    weight_ptr,
    h_ptr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    MASKED: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Choices of BLOCK tokens. NORM, of a single token: writes down x after its norm, too."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.arange(0, K_BLOCK)
    if NORM:
        _normalise(x_ptr, norm_ptr, layer_ptr, h_ptr, tl.program_id(0), WIDTH, EPS, OFFSET, WIDTH_BLOCK)
    expert, weight = _best(
        parts_ptr,
        squares_ptr,
        valid_ptr,
        token,
        j,
        ROWS,
        PARTS,
        WIDTH,
        EPS,
        EXPERTS,
        TOP_K,
        RENORMALISE,
        MASKED,
        EXPERTS_BLOCK,
    )
    at = token[:, None] * TOP_K + j[None, :]
    tl.store(expert_ptr + at, expert, mask=(j < TOP_K)[None, :])
    tl.store(weight_ptr + at, weight, mask=(j < TOP_K)[None, :])
