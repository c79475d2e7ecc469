"""Linear layers by cuBLAS, which XLA calls for the product, with the norm as one kernel: for many rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.dispatch import Target
from pallas_kernels.linear import reference
from pallas_kernels.triton_call import check_dtypes, launch

if TYPE_CHECKING:
    from pallas_kernels.linear.api import Norm


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
    if norm is not None:
        x = rms_norm(x, norm, layer, target)
    return reference.run(
        x,
        weight,
        layer,
        norm=None,
        bias=bias,
        gated=gated,
        residual=residual,
        out_dtype=out_dtype,
        counters=counters,
        target=target,
    )


def rms_norm(x: jax.Array, norm: Norm, layer: jax.Array, target: Target) -> jax.Array:
    """RMSNorm of x [M, D] in float32, rounded once. One kernel, where XLA makes two."""
    check_dtypes(x, norm.weight)
    width = x.shape[1]
    (out,) = launch(
        _rms_norm,
        [x, norm.weight, layer.reshape(1)],
        [jax.ShapeDtypeStruct(x.shape, x.dtype)],
        grid=(x.shape[0],),
        constants={"WIDTH": width, "EPS": norm.eps, "OFFSET": norm.offset, "BLOCK": triton.next_power_of_2(width)},
        target=target,
        num_warps=8 if width > 2048 else 4,
    )
    return out


@triton.jit
def _rms_norm(
    x_ptr,
    weight_ptr,
    layer_ptr,
    out_ptr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    layer = tl.load(layer_ptr).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    x = tl.load(x_ptr + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + layer * WIDTH + at, mask=inside, other=0.0).to(tl.float32) + OFFSET
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + EPS)
    tl.store(out_ptr + row * WIDTH + at, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)
