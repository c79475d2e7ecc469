"""QK-norm, RoPE and the write to the KV cache in one: the contract that every route fills."""

from __future__ import annotations

from typing import NamedTuple

import jax

from pallas_kernels.dispatch import Route, Target, dispatch, gpu_route
from pallas_kernels.kv_write import reference


class HeadNorms(NamedTuple):
    """RMSNorm of every query and key head, of all layers."""

    q: jax.Array  # [L, E]
    k: jax.Array  # [L, E]
    eps: float
    offset: float = 0.0  # added to the weights


ROUTES = (gpu_route("triton", "pallas_kernels.kv_write.triton"), Route("reference", reference.run))


def kv_write(
    qkv: jax.Array,
    rotary: tuple[jax.Array, jax.Array],
    pools: tuple[jax.Ref, jax.Ref],
    layer: jax.Array,
    places: tuple[jax.Array, jax.Array],
    *,
    norms: HeadNorms | None,
    target: Target,
) -> jax.Array:
    """Writes the step's keys and values into layer `layer` of the pools and returns its queries, [T, K * G, E].

    qkv [T, K, G + 2, E]: for each KV head its G query heads, then key and value. Query and key heads are normalised
    where `norms` are given, then channel pairs (i, i + E / 2) are rotated by rotary = cosines and sines, float32
    [T, E / 2] each. pools = Refs of [L, P, S, K, E] each, changed in place; layer: int32 scalar array; places = page
    and position in the sequence of each token, int32 [T] each: position p goes to row p % S of its page.
    Source: Zhang and Sennrich 2019 (RMSNorm), Su et al. 2021 (RoPE), Kwon et al. 2023 (pages).
    """
    k_pool, v_pool = pools
    if qkv.ndim != 4 or qkv.shape[2] < 3:
        raise ValueError(f"qkv {qkv.shape} is not [T, K, G + 2, E]")
    if k_pool.shape != v_pool.shape or k_pool.shape[3:] != qkv.shape[1::2]:
        raise ValueError(f"pools {k_pool.shape} and {v_pool.shape} [L, P, S, K, E] do not fit qkv {qkv.shape}")
    if rotary[0].shape != (qkv.shape[0], qkv.shape[3] // 2):
        raise ValueError(f"rotary {rotary[0].shape} [T, E / 2] does not fit qkv {qkv.shape} [T, K, G + 2, E]")
    return dispatch("kv_write", ROUTES, qkv, rotary, pools, layer, places, norms=norms, target=target)
