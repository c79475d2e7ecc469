"""Linear layers in plain jax.numpy. Any backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Target

if TYPE_CHECKING:
    from pallas_kernels.linear.api import Norm

FLOAT32_SUMS = {
    "bfloat16": jax.lax.DotAlgorithmPreset.BF16_BF16_F32,
    "float16": jax.lax.DotAlgorithmPreset.F16_F16_F32,
}
"""How to multiply narrow numbers and sum the products in float32."""


def run(
    x: jax.Array,
    weight: jax.Array,
    layer: jax.Array,
    *,
    norm: Norm | None,
    bias: jax.Array | None,
    gated: bool,
    residual: jax.Array | None,
    out_dtype: jnp.dtype,
    counters: jax.Ref | None,
    target: Target,
) -> jax.Array:
    """The contract is `api.linear`."""
    del counters
    if norm is not None:
        x = rms_norm(x, of_layer(norm.weight, layer), norm.eps, norm.offset)
    y = product(x, of_layer(weight, layer), out_dtype, target)
    if bias is not None:
        y = y + of_layer(bias, layer)
    if gated:
        y = jax.nn.silu(y[:, 0]) * y[:, 1]
    return y if residual is None else residual + y


def of_layer(stacked: jax.Array, layer: jax.Array) -> jax.Array:
    """stacked[layer], in the form that XLA folds into whatever reads it where `layer` counts a loop."""
    return jax.lax.dynamic_index_in_dim(stacked, layer, keepdims=False, allow_negative_indices=False)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, offset: float = 0.0) -> jax.Array:
    """x [..., D] over the root of its mean square, times offset + weight [D]. Normalised in float32.

    Scaled in x's dtype, or with an offset in float32.
    Source: Zhang and Sennrich 2019; rounding as in the published Llama and Qwen models.
    """
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if offset:
        return (wide * (offset + weight.astype(jnp.float32))).astype(x.dtype)
    return wide.astype(x.dtype) * weight


def product(x: jax.Array, weight: jax.Array, out_dtype: jnp.dtype, target: Target) -> jax.Array:
    """x [M, D] times the transpose of weight [..., N, D]: [M, ..., N]."""
    # As one matrix: with more dimensions XLA's CPU backend turns the whole weight around in every step.
    flat = weight.reshape(-1, weight.shape[-1])
    if out_dtype == x.dtype:
        y = jnp.einsum("md,nd->mn", x, flat)
    else:
        # Named, the algorithm keeps XLA from converting the weight to float32 for a single row: 1.5 GB for the head of
        # Qwen3-4B. XLA's CPU backend knows that of bfloat16, and refuses that of float16.
        refused = target.platform == "cpu" and x.dtype == jnp.float16
        algorithm = None if refused else FLOAT32_SUMS.get(x.dtype.name)
        y = jnp.einsum("md,nd->mn", x, flat, preferred_element_type=out_dtype, precision=algorithm)
    return y.reshape(x.shape[0], *weight.shape[:-1])
