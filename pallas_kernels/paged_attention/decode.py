"""A decode step's attention whole: QK-norm, RoPE, the write to the cache, and attention, of one token per row."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.dispatch import Route, Target, dispatch, gpu_route
from pallas_kernels.kv_write.api import HeadNorms, kv_write
from pallas_kernels.paged_attention.api import PagedRows, paged_attention


def decode_attention(
    qkv: jax.Array,
    rotary: tuple[jax.Array, jax.Array],
    pools: tuple[jax.Ref, jax.Ref],
    layer: jax.Array,
    rows: PagedRows,
    *,
    norms: HeadNorms | None,
    scale: float,
    target: Target,
    window: jax.Array | None = None,
    counters: jax.Ref | None = None,
) -> jax.Array:
    """What `kv_write` and then `paged_attention` do where token t is row t. Returns [R, K * G, E].

    Arguments are as there: qkv [R, K, G + 2, E], rotary float32 [R, E / 2] each. Keys and values of rows of length 0
    may or may not be written, to page 0, and their results are anything.
    """
    if qkv.ndim != 4 or qkv.shape[0] != rows.query_len.shape[0]:
        raise ValueError(f"qkv {qkv.shape} [R, K, G + 2, E] does not fit {rows.query_len.shape[0]} rows")
    how = {"norms": norms, "scale": scale, "window": window, "counters": counters, "target": target}
    return dispatch("decode_attention", ROUTES, qkv, rotary, pools, layer, rows, **how)


def _in_two(
    qkv: jax.Array,
    rotary: tuple[jax.Array, jax.Array],
    pools: tuple[jax.Ref, jax.Ref],
    layer: jax.Array,
    rows: PagedRows,
    *,
    norms: HeadNorms | None,
    target: Target,
    **how: Any,
) -> jax.Array:
    q = kv_write(qkv, rotary, pools, layer, (rows.token_page, rows.token_position), norms=norms, target=target)
    return paged_attention(q, pools, layer, rows, max_query_len=1, target=target, **how)


ROUTES = (
    gpu_route("triton", "pallas_kernels.paged_attention.triton_decode"),
    Route("in two", _in_two),
)
