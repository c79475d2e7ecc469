"""A gated delta rule over the tokens of a step, states in slots: the contract that every route fills."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.delta_rule import reference
from pallas_kernels.dispatch import Route, Target, dispatch, gpu_route
from pallas_kernels.dispatch import plan as plan_routes

TAPS = 4
"""Inputs that the convolution sees: a token's own and the three before it."""


class DeltaWeights(NamedTuple):
    """Of all layers that have this mixer. Hk key heads of dk, r value heads of dv to each."""

    conv: jax.Array  # [L, Hk, 2 * dk + r * dv, 4] depthwise causal convolution; the last tap is the newest token's
    a_log: jax.Array  # [L, Hk, r]
    dt_bias: jax.Array  # [L, Hk, r]
    norm: jax.Array  # [L, dv] of the output


class DeltaPools(NamedTuple):
    """What is kept of the sequences, by slot. Slot N, the last, takes what padding writes."""

    state: jax.Ref  # [L, N + 1, Hk, r, dk, dv] float32
    conv: jax.Ref  # [L, N + 1, 4, Hk, 2 * dk + r * dv] float32: inputs of the convolution, position p's in entry p % 4


class SlotRows(NamedTuple):
    """Where the rows of a step lie. Rows that pad a bucket have length 0; tokens that pad it belong to no row.

    All int32. R rows, T tokens.
    """

    slot: jax.Array  # [R] no two rows of a step have the same; N for padding
    query_start: jax.Array  # [R] index in T of the row's first token; tokens of a row are consecutive
    query_len: jax.Array  # [R] tokens of the row in this step
    context_len: jax.Array  # [R] tokens of the sequence before it; 0: it begins, whatever the pools hold for the slot
    token_row: jax.Array  # [T] row of each token (any row for padding)
    token_position: jax.Array  # [T] position of each token in its sequence


Plan = Mapping[str, Any]
"""By route, what it prepared."""

ROUTES = (gpu_route("triton", "pallas_kernels.delta_rule.triton"), Route("reference", reference.run))


def plan(rows: SlotRows, *, max_query_len: int, target: Target) -> Plan:
    """What the layers of a step have in common; for outside of the loop over them."""
    return plan_routes(ROUTES, rows, max_query_len=max_query_len, target=target)


def delta_rule(
    x: jax.Array,
    weights: DeltaWeights,
    pools: DeltaPools,
    layer: jax.Array,
    rows: SlotRows,
    *,
    eps: float,
    max_query_len: int,
    target: Target,
    plan: Plan | None = None,
) -> jax.Array:
    """Takes each row's state in layer `layer` of the pools, in place, past the row's tokens, and reads it at each.

    x [T, Hk, 2 * dk + 2 * r * dv + 2 * r]: of each key head query [dk], key [dk], values [r * dv], gates z [r * dv],
    b [r] and a [r]. Query, key and values are convolved with those of the three tokens before, 0 before a sequence, and
    go through SiLU; query and key are divided by sqrt(sum of squares + 1e-6), the query by sqrt(dk) too. With q and k
    of key head j, S [dk, dv] the state of its value head h, w its weights: S *= exp(-exp(w.a_log) * softplus(a +
    w.dt_bias)); S += k (sigmoid(b) * (v - S^T k))^T; o = S^T q; the result is
    w.norm * o / sqrt(mean(o ** 2) + eps) * silu(z). All in float32.
    layer: int32 scalar array, of weights and pools alike. max_query_len: no row has more tokens than this in the step;
    1 means that token t is row t. plan: of these rows, by `plan`; without it every call makes its own.
    Slots of no row keep what they hold, bit for bit. Returns [T, Hk, r, dv] in x's dtype; padding is finite there.
    Source: Yang et al. 2024 (Gated Delta Networks), eq. 10; projections and gates as in the published Qwen3-Next.
    """
    _check(x, weights, pools, rows, max_query_len)
    return dispatch(
        "delta_rule",
        ROUTES,
        x,
        weights,
        pools,
        jnp.asarray(layer, jnp.int32),
        rows,
        eps=eps,
        max_query_len=max_query_len,
        plan=plan or {},
        target=target,
    )


def _check(x: jax.Array, weights: DeltaWeights, pools: DeltaPools, rows: SlotRows, max_query_len: int) -> None:
    """ValueError, with the sizes, where they do not fit each other."""
    if len(pools.state.shape) != 6:
        raise ValueError(f"states {pools.state.shape} are not [L, N + 1, Hk, r, dk, dv]")
    layers, slots, heads, group, key_width, value_width = pools.state.shape
    channels = 2 * key_width + group * value_width
    if pools.conv.shape != (layers, slots, TAPS, heads, channels):
        wanted = "[L, N + 1, 4, Hk, 2 * dk + r * dv]"
        raise ValueError(f"inputs {pools.conv.shape} {wanted} do not fit states {pools.state.shape}")
    if pools.state.dtype != jnp.float32 or pools.conv.dtype != jnp.float32:
        raise ValueError(f"pools of {pools.state.dtype} and {pools.conv.dtype}; both must be float32")
    if x.ndim != 3 or x.shape[1:] != (heads, channels + group * value_width + 2 * group):
        wanted = "[T, Hk, 2 * dk + 2 * r * dv + 2 * r]"
        raise ValueError(f"x {x.shape} {wanted} does not fit states {pools.state.shape} [L, N + 1, Hk, r, dk, dv]")
    sizes = {
        "conv": (layers, heads, channels, TAPS),
        "a_log": (layers, heads, group),
        "dt_bias": (layers, heads, group),
        "norm": (layers, value_width),
    }
    for name, size in sizes.items():
        if (found := getattr(weights, name).shape) != size:
            raise ValueError(f"{name} {found} does not fit states {pools.state.shape}; it must be {size}")
    lens = {name: getattr(rows, name).shape for name in ("slot", "query_start", "query_len", "context_len")}
    if len(set(lens.values())) > 1 or rows.slot.ndim != 1:
        raise ValueError(f"rows {lens} must be one [R]")
    if not rows.token_row.shape == rows.token_position.shape == x.shape[:1]:
        found = f"{rows.token_row.shape} and {rows.token_position.shape}"
        raise ValueError(f"tokens of rows {found} [T] do not fit x {x.shape}")
    if max_query_len < 1:
        raise ValueError(f"max_query_len {max_query_len}; it must be 1 at least")
    if max_query_len == 1 and rows.slot.shape != x.shape[:1]:
        raise ValueError(
            f"max_query_len 1 is for a token to each row; x {x.shape} has not one for {rows.slot.shape[0]}"
        )
