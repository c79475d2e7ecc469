"""Sampling in plain jax.numpy, with a sort of the vocabulary where a row needs one. Any backend.

Its conditionals keep a step on a CPU from paying for what no row asks. On a GPU each would stop the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p

from pallas_kernels.dispatch import Target

if TYPE_CHECKING:
    from pallas_kernels.sample.api import History, Parameters, Places

MIN_TEMPERATURE = 1e-5
"""Below this the quotients could overflow, and a draw is the argmax long before that."""


def run(
    logits: jax.Array,
    rows: Parameters,
    history: History,
    places: Places,
    *,
    num_top: int,
    counters: jax.Ref | None,
    target: Target,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The contract is `api.sample`."""
    del counters, target
    logits = logits[: places.slot.shape[0]]
    position, active = places.position, places.active
    adjusts = (rows.has_penalties > 0) | (rows.has_bias > 0) | (position < rows.no_stop_before)
    draws = rows.temperature > 0
    tokens = jax.lax.cond(
        jnp.any(active & (adjusts | draws)),
        lambda: _choose(_adjust(logits, rows, history, places), rows, position, active),
        lambda: argmax(logits),
    )
    wants = active & (rows.wants_logprobs > 0)
    shape = (logits.shape[0], num_top)
    return tokens, jax.lax.cond(
        jnp.any(wants),
        lambda: logprobs(logits, tokens, wants, num_top),
        lambda: (jnp.zeros(shape[:1]), jnp.zeros(shape, jnp.int32), jnp.zeros(shape)),
    )


def argmax(logits: jax.Array) -> jax.Array:
    """[R] the likeliest token of each row; the lowest id wins ties."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def logprobs(logits: jax.Array, tokens: jax.Array, wants: jax.Array, num_top: int) -> tuple[jax.Array, ...]:
    """`api.Logprobs` of the chosen tokens [R], from logits [R, V]; zeros where wants [R] is False."""
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    top, ids = jax.lax.top_k(logits, num_top)
    chosen, top = jnp.where(wants, chosen - normalizer, 0), jnp.where(wants[:, None], top - normalizer[:, None], 0)
    return chosen, jnp.where(wants[:, None], ids, 0).astype(jnp.int32), top


def _adjust(logits: jax.Array, rows: Parameters, history: History, places: Places) -> jax.Array:
    """Bias, penalties and the bar on stop ids."""
    counts, in_prompt, bias = (array[places.slot] for array in history)
    logits = logits + jnp.where(rows.has_bias[:, None] > 0, bias, 0.0)
    penalty = rows.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / penalty, logits * penalty)
    penalized = jnp.where((counts > 0) | in_prompt, repeated, logits)
    penalized -= rows.frequency_penalty[:, None] * counts + rows.presence_penalty[:, None] * (counts > 0)
    logits = jnp.where(rows.has_penalties[:, None] > 0, penalized, logits)
    barred = jnp.where((places.position < rows.no_stop_before)[:, None], rows.stop_ids, -1)
    barred = jnp.where(barred < 0, logits.shape[-1], barred)  # out of range: dropped
    return logits.at[jnp.arange(logits.shape[0])[:, None], barred].set(-jnp.inf, mode="drop")


def _choose(logits: jax.Array, rows: Parameters, position: jax.Array, active: jax.Array) -> jax.Array:
    """Exact argmax where the temperature is 0; elsewhere a draw from the filtered softmax, by the Gumbel-max trick."""
    greedy = rows.temperature <= 0
    temperature = jnp.maximum(rows.temperature, MIN_TEMPERATURE)
    scaled = logits * (1 / temperature)[:, None]
    floor = logits.max(-1) + temperature * jnp.log(rows.min_p)  # log 0 = -inf: no floor
    narrows = active & ~greedy & ((rows.top_k > 0) | (rows.top_p < 1))
    kept = jax.lax.cond(
        jnp.any(narrows), lambda: _top_k_top_p(logits, temperature, rows), lambda: jnp.ones_like(logits, bool)
    )
    kept &= logits >= floor[:, None]
    noisy = jnp.where(kept, scaled + _gumbel(rows, position, scaled.shape[-1]), -jnp.inf)
    return argmax(jnp.where(greedy[:, None], logits, noisy))


def _gumbel(rows: Parameters, position: jax.Array, vocab: int) -> jax.Array:
    """[R, V] standard Gumbel noise: one Threefry block a token, its key the seed and its counter (position, token).

    The block's 64 bits make the uniform number, as the tail that wins draws is coarse in 23: of 150,000 equal tokens
    the greatest noise would be shared by two in one draw of fifty.
    """
    shape = (position.shape[0], vocab)
    token = jax.lax.broadcasted_iota(jnp.uint32, shape, 1)
    key_and_row = (rows.seed_low, rows.seed_high, position)
    low, high, at = (jnp.broadcast_to(a.astype(jnp.uint32)[:, None], shape) for a in key_and_row)
    coarse, fine = threefry2x32_p.bind(low, high, at, token)
    uniform = (coarse >> 8).astype(jnp.float32) * 2.0**-24 + ((fine >> 8).astype(jnp.float32) + 0.5) * 2.0**-48
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, 1 - 2.0**-24)))


def _top_k_top_p(logits: jax.Array, temperature: jax.Array, rows: Parameters) -> jax.Array:
    """[R, V] bool: the top_k likeliest tokens, and of these the smallest set that reaches top_p; lower ids win ties."""
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    descending, order = jax.lax.sort((-logits, ids), dimension=1, num_keys=1, is_stable=True)
    rank = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    limit = jnp.where(rows.top_k > 0, rows.top_k, logits.shape[-1])[:, None]
    over = (descending[:, :1] - descending) * (1 / temperature)[:, None]  # the likeliest's: 0
    probabilities = jax.nn.softmax(jnp.where(rank < limit, over, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # A top_p of 1 keeps all: rounding in the sum must not cut the tail.
    reach = jnp.where(rows.top_p < 1, rows.top_p, 2.0)[:, None]
    count = jnp.sum((rank < limit) & (before < reach), axis=-1, keepdims=True)
    last = jnp.maximum(count - 1, 0)
    value, last_id = (jnp.take_along_axis(a, last, axis=1) for a in (-descending, order))
    return (logits > value) | ((logits == value) & (ids <= last_id))
