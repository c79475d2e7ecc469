"""The gated delta rule in plain jax.numpy, token by token. Any backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Target
from pallas_kernels.linear.reference import of_layer

if TYPE_CHECKING:
    from pallas_kernels.delta_rule.api import DeltaPools, DeltaWeights, Plan, SlotRows

L2_EPS = 1e-6
TAPS = 4


class Tokens(NamedTuple):
    """What the recurrence reads of T tokens, float32."""

    q: jax.Array  # [T, Hk, 1, dk]
    k: jax.Array  # [T, Hk, 1, dk]
    v: jax.Array  # [T, Hk, r, dv]
    decay: jax.Array  # [T, Hk, r] factor of the state
    beta: jax.Array  # [T, Hk, r]


def run(
    x: jax.Array,
    weights: DeltaWeights,
    pools: DeltaPools,
    layer: jax.Array,
    rows: SlotRows,
    *,
    eps: float,
    max_query_len: int,
    plan: Plan,
    target: Target,
) -> jax.Array:
    """The contract is `api.delta_rule`."""
    del plan, target
    _, slots, heads, group, key_width, value_width = pools.state.shape
    slot = rows.slot  # N for padding: not the last place, where others are kept behind it
    offset = jnp.arange(x.shape[0], dtype=jnp.int32) - rows.query_start[rows.token_row]  # in the token's row
    real = (offset >= 0) & (offset < rows.query_len[rows.token_row])
    inputs, z, b, a = jnp.split(
        x.astype(jnp.float32),
        [2 * key_width + group * value_width, 2 * key_width + 2 * group * value_width, x.shape[2] - group],
        axis=-1,
    )
    # The whole pools as values: an indexed write to a Ref would scatter element by element.
    ring = of_layer(pools.conv[...], layer)[slot]  # [R, 4, Hk, C]
    mixed = _convolved(inputs, ring, of_layer(weights.conv, layer).astype(jnp.float32), rows, offset)
    q, k, v = jnp.split(mixed, [key_width, 2 * key_width], axis=-1)
    a_log, dt_bias = (of_layer(w, layer).astype(jnp.float32) for w in (weights.a_log, weights.dt_bias))
    tokens = Tokens(
        q=_unit(q)[:, :, None] * key_width**-0.5,
        k=_unit(k)[:, :, None],
        v=v.reshape(-1, heads, group, value_width),
        decay=jnp.exp(-jnp.exp(a_log) * jax.nn.softplus(a + dt_bias)),
        beta=jax.nn.sigmoid(b),
    )
    begins = (rows.context_len == 0)[:, None, None, None, None]
    state = jnp.where(begins, 0.0, of_layer(pools.state[...], layer)[slot])
    if max_query_len == 1:
        state, o = _advance(state, tokens)
    else:
        state, o = _in_order(state, tokens, rows.token_row, real)
    last = real & (offset >= rows.query_len[rows.token_row] - TAPS)
    where = jnp.where(last, slot[rows.token_row], slots)  # out of range: dropped
    pools.state[...] = pools.state[...].at[layer, slot].set(state)
    pools.conv[...] = pools.conv[...].at[layer, where, rows.token_position % TAPS].set(inputs, mode="drop")
    o = o * jax.lax.rsqrt(jnp.mean(o * o, axis=-1, keepdims=True) + eps)
    o = o * of_layer(weights.norm, layer).astype(jnp.float32) * jax.nn.silu(z.reshape(o.shape))
    return jnp.where(real[:, None, None, None], o, 0.0).astype(x.dtype)


def _convolved(inputs: jax.Array, ring: jax.Array, weight: jax.Array, rows: SlotRows, offset: jax.Array) -> jax.Array:
    """inputs [T, Hk, C] with those before them, through weight [Hk, C, 4] and SiLU. ring [R, 4, Hk, C]; offset [T]."""
    total = inputs * weight[:, :, -1]
    for back in range(1, TAPS):
        position = rows.token_position - back
        before = ring[rows.token_row, position % TAPS]
        here = jnp.roll(inputs, back, axis=0)
        known = jnp.where((offset >= back)[:, None, None], here, before)
        total += jnp.where((position >= 0)[:, None, None], known, 0.0) * weight[:, :, -1 - back]
    return jax.nn.silu(total)


def _unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_EPS)


def _advance(state: jax.Array, token: Tokens) -> tuple[jax.Array, jax.Array]:
    """States [..., dk, dv] after a token each, and what it reads there [..., dv]."""
    state = state * token.decay[..., None, None]
    remembered = jnp.sum(state * token.k[..., None], axis=-2)
    state = state + token.k[..., None] * (token.beta[..., None] * (token.v - remembered))[..., None, :]
    return state, jnp.sum(state * token.q[..., None], axis=-2)


def _in_order(states: jax.Array, tokens: Tokens, row: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array]:
    """States [R, Hk, r, dk, dv] of the rows after all tokens in turn, and what each token reads [T, Hk, r, dv]."""

    def body(states, at):
        token, row, real = at
        before = jax.lax.dynamic_index_in_dim(states, row, keepdims=False)
        after, o = _advance(before, token)
        after = jnp.where(real, after, before)
        return jax.lax.dynamic_update_index_in_dim(states, after, row, 0), o

    return jax.lax.scan(body, states, (tokens, row, real))
