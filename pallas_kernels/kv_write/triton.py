"""QK-norm, RoPE and the write to the KV cache in one Triton kernel, in float32 and rounded once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import triton
import triton.language as tl

from pallas_kernels.dispatch import Target
from pallas_kernels.triton_call import check_dtypes, launch

if TYPE_CHECKING:
    from pallas_kernels.kv_write.api import HeadNorms

BLOCK_TOKENS = 4
"""Tokens of one program where there are many; one each where there are few, to spread over the card."""
FEW_TOKENS = 64


def run(
    qkv: jax.Array,
    rotary: tuple[jax.Array, jax.Array],
    pools: tuple[jax.Ref, jax.Ref],
    layer: jax.Array,
    places: tuple[jax.Array, jax.Array],
    *,
    norms: HeadNorms | None,
    target: Target,
) -> jax.Array:
    """The contract is `api.kv_write`."""
    tokens, num_kv_heads, heads, width = qkv.shape
    check_dtypes(qkv, *pools, *(norms[:2] if norms else ()))
    block = 1 if tokens <= FEW_TOKENS or tokens % BLOCK_TOKENS else BLOCK_TOKENS
    group = heads - 2
    q_norm, k_norm = norms[:2] if norms else (qkv, qkv)
    constants = {
        "PAGES": pools[0].shape[1],
        "PAGE_SIZE": pools[0].shape[2],
        "KV_HEADS": num_kv_heads,
        "GROUP": group,
        "WIDTH": width,
        "NORM": norms is not None,
        "EPS": norms.eps if norms else 0.0,
        "OFFSET": norms.offset if norms else 0.0,
        "BLOCK": block,
        "GROUP_BLOCK": triton.next_power_of_2(group),
        "HALF_BLOCK": triton.next_power_of_2(width // 2),
    }
    (q,) = launch(
        _kv_write,
        [qkv, *rotary, layer.reshape(1), *places, q_norm, k_norm],
        [jax.ShapeDtypeStruct((tokens, num_kv_heads * group, width), qkv.dtype)],
        in_place=pools,
        grid=(tokens // block, num_kv_heads),
        constants=constants,
        target=target,
        num_warps=4 if block > 1 else 1,
    )
    return q


@triton.jit
def _kv_write(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    layer_ptr,
    page_ptr,
    position_ptr,
    q_norm_ptr,
    k_norm_ptr,
    k_pool_ptr,
    v_pool_ptr,
    q_ptr,
    PAGES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """One KV head of BLOCK tokens. Heads are held as two halves, [BLOCK, GROUP_BLOCK, HALF_BLOCK] and without heads."""
    HALF: tl.constexpr = WIDTH // 2
    head = tl.program_id(1)
    layer = tl.load(layer_ptr).to(tl.int64)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    half = tl.arange(0, HALF_BLOCK)
    g = tl.arange(0, GROUP_BLOCK)
    flat = (half < HALF)[None, :]
    heads = flat[:, None, :] & (g < GROUP)[None, :, None]
    cos = tl.load(cos_ptr + token[:, None] * HALF + half[None, :], mask=flat, other=0.0)
    sin = tl.load(sin_ptr + token[:, None] * HALF + half[None, :], mask=flat, other=0.0)
    base = qkv_ptr + ((token.to(tl.int64) * KV_HEADS + head) * (GROUP + 2) * WIDTH)

    of_head = base[:, None, None] + g[None, :, None] * WIDTH + half[None, None, :]
    first = tl.load(of_head, mask=heads, other=0.0).to(tl.float32)
    second = tl.load(of_head + HALF, mask=heads, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(first * first, 2) + tl.sum(second * second, 2)) / WIDTH + EPS)[:, :, None]
        weight = q_norm_ptr + layer * WIDTH + half
        first *= scale * (OFFSET + tl.load(weight, mask=half < HALF, other=0.0).to(tl.float32))[None, None, :]
        second *= scale * (OFFSET + tl.load(weight + HALF, mask=half < HALF, other=0.0).to(tl.float32))[None, None, :]
    c, s = cos[:, None, :], sin[:, None, :]
    out = q_ptr + ((token.to(tl.int64) * KV_HEADS + head) * GROUP * WIDTH)[:, None, None]
    out += g[None, :, None] * WIDTH + half[None, None, :]
    tl.store(out, (first * c - second * s).to(q_ptr.dtype.element_ty), mask=heads)
    tl.store(out + HALF, (second * c + first * s).to(q_ptr.dtype.element_ty), mask=heads)

    of_key = base[:, None] + GROUP * WIDTH + half[None, :]
    first = tl.load(of_key, mask=flat, other=0.0).to(tl.float32)
    second = tl.load(of_key + HALF, mask=flat, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / WIDTH + EPS)[:, None]
        weight = k_norm_ptr + layer * WIDTH + half
        first *= scale * (OFFSET + tl.load(weight, mask=half < HALF, other=0.0).to(tl.float32))[None, :]
        second *= scale * (OFFSET + tl.load(weight + HALF, mask=half < HALF, other=0.0).to(tl.float32))[None, :]
    page = tl.load(page_ptr + token).to(tl.int64)
    position = tl.load(position_ptr + token)
    at = ((layer * PAGES + page) * PAGE_SIZE + position % PAGE_SIZE) * KV_HEADS + head
    place = at[:, None] * WIDTH + half[None, :]
    tl.store(k_pool_ptr + place, (first * cos - second * sin).to(k_pool_ptr.dtype.element_ty), mask=flat)
    tl.store(k_pool_ptr + place + HALF, (second * cos + first * sin).to(k_pool_ptr.dtype.element_ty), mask=flat)
    tl.store(v_pool_ptr + place, tl.load(of_key + WIDTH, mask=flat, other=0.0), mask=flat)
    tl.store(v_pool_ptr + place + HALF, tl.load(of_key + WIDTH + HALF, mask=flat, other=0.0), mask=flat)
