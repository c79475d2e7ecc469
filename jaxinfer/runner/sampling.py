"""From logits to tokens, on the device, in float32. A row's draw depends on its own seed and position alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from jaxinfer.runner.inputs import FLOATS, INTS
from jaxinfer.types import MAX_LOGPROBS


class Logprobs(NamedTuple):
    """Of the raw logits: natural log-probabilities. Zeros for rows that did not ask. k is `num_top(V)`."""

    chosen: jax.Array  # [R]
    top_ids: jax.Array  # [R, k]
    top: jax.Array  # [R, k]

    def pack(self) -> jax.Array:
        """[R, 1 + 2k] int32, numbers by their bits, for one array of state to hold them all."""
        chosen, top = (jax.lax.bitcast_convert_type(a, jnp.int32) for a in (self.chosen[:, None], self.top))
        return jnp.concatenate([chosen, self.top_ids, top], axis=1)


def num_top(vocab_rows: int) -> int:
    """Alternatives per token: MAX_LOGPROBS, or the vocabulary if that is smaller."""
    return min(MAX_LOGPROBS, vocab_rows)


def unpack_logprobs(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """On the host: chosen [R], top_ids [R, k] and top [R, k] from what `Logprobs.pack` made."""
    ids, top = np.split(packed[:, 1:], 2, axis=1)
    return packed[:, 0].copy().view(np.float32), ids, top.copy().view(np.float32)


class SamplingRows(NamedTuple):
    """The sampling parameters of each row of the step."""

    temperature: jax.Array  # [R] float32, as all down to presence_penalty
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    frequency_penalty: jax.Array
    presence_penalty: jax.Array
    top_k: jax.Array  # [R] int32, as all below; 0: all tokens
    seed_low: jax.Array
    seed_high: jax.Array
    has_penalties: jax.Array
    has_bias: jax.Array
    wants_logprobs: jax.Array
    no_stop_before: jax.Array  # stop ids are barred from positions below this
    stop_ids: jax.Array  # [R, MAX_STOP_IDS], -1 where unused

    @classmethod
    def from_fields(cls, fields: jax.Array) -> SamplingRows:
        """From [R, SAMPLING_FIELDS] as `inputs.sampling_fields` lays them out."""
        floats = jax.lax.bitcast_convert_type(fields[:, : len(FLOATS)], jnp.float32)
        ints = fields[:, len(FLOATS) : len(FLOATS) + len(INTS)]
        return cls(*floats.T, *ints.T, fields[:, len(FLOATS) + len(INTS) :])


class TokenHistory(NamedTuple):
    """Rows of the state that penalties and biases read, [R, V] each."""

    output_counts: jax.Array
    in_prompt: jax.Array
    logit_bias: jax.Array


def sample(
    logits: jax.Array,
    rows: SamplingRows,
    history: Callable[[], TokenHistory],
    position: jax.Array,
    active: jax.Array,
) -> tuple[jax.Array, Logprobs]:
    """Chooses a token for each row. logits [R, V] float32, -inf where the vocabulary is padded; position [R] of it.

    history: gathers what penalties and biases read, and is called where they are, so that other steps never pay.
    Rows that are not active get an arbitrary token, and do not make the others pay for what they ask.
    """
    adjusts = (rows.has_penalties > 0) | (rows.has_bias > 0) | (position < rows.no_stop_before)
    draws = rows.temperature > 0
    tokens = jax.lax.cond(
        jnp.any(active & (adjusts | draws)),
        lambda: _choose(_adjust(logits, rows, history(), position), rows, position, active),
        lambda: argmax(logits),
    )
    wants = active & (rows.wants_logprobs > 0)
    return tokens, jax.lax.cond(jnp.any(wants), lambda: logprobs(logits, tokens), lambda: _no_logprobs(logits))


def logprobs(logits: jax.Array, tokens: jax.Array) -> Logprobs:
    """Of the chosen tokens [R] and of the likeliest, from logits [R, V]."""
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    top, ids = jax.lax.top_k(logits, num_top(logits.shape[-1]))
    return Logprobs(chosen - normalizer, ids.astype(jnp.int32), top - normalizer[:, None])


def _no_logprobs(logits: jax.Array) -> Logprobs:
    shape = (logits.shape[0], num_top(logits.shape[-1]))
    return Logprobs(jnp.zeros(shape[:1]), jnp.zeros(shape, jnp.int32), jnp.zeros(shape))


def argmax(logits: jax.Array) -> jax.Array:
    """[R] the likeliest token of each row; the lowest id wins ties."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _adjust(logits: jax.Array, rows: SamplingRows, history: TokenHistory, position: jax.Array) -> jax.Array:
    """Bias, penalties and the bar on stop ids.

    Repetition penalty as in Keskar et al. 2019, over prompt and output; the others as in the OpenAI API, output only.
    """
    logits = logits + jnp.where(rows.has_bias[:, None] > 0, history.logit_bias, 0.0)
    counts = history.output_counts
    penalty = rows.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / penalty, logits * penalty)
    penalized = jnp.where((counts > 0) | history.in_prompt, repeated, logits)
    penalized -= rows.frequency_penalty[:, None] * counts + rows.presence_penalty[:, None] * (counts > 0)
    logits = jnp.where(rows.has_penalties[:, None] > 0, penalized, logits)
    barred = jnp.where((position < rows.no_stop_before)[:, None], rows.stop_ids, -1)
    barred = jnp.where(barred < 0, logits.shape[-1], barred)  # out of range: dropped
    return logits.at[jnp.arange(logits.shape[0])[:, None], barred].set(-jnp.inf, mode="drop")


def _choose(logits: jax.Array, rows: SamplingRows, position: jax.Array, active: jax.Array) -> jax.Array:
    """Exact argmax where the temperature is 0; elsewhere a draw from the filtered softmax, by the Gumbel-max trick."""
    greedy = rows.temperature <= 0
    # Below 1e-5 the quotients would overflow, and a draw is the argmax long before that.
    scaled = logits / jnp.where(greedy, 1.0, jnp.maximum(rows.temperature, 1e-5))[:, None]
    floor = scaled.max(-1) + jnp.log(rows.min_p)  # log 0 = -inf: no floor
    narrows = active & ~greedy & ((rows.top_k > 0) | (rows.top_p < 1))
    kept = jax.lax.cond(jnp.any(narrows), lambda: _top_k_top_p(scaled, rows), lambda: jnp.ones_like(scaled, bool))
    kept &= scaled >= floor[:, None]
    noisy = jnp.where(kept, scaled + _gumbel(rows, position, scaled.shape[-1]), -jnp.inf)
    return argmax(jnp.where(greedy[:, None], logits, noisy))


def _gumbel(rows: SamplingRows, position: jax.Array, vocab_rows: int) -> jax.Array:
    """[R, V] standard Gumbel noise: one Threefry block a token, its key the seed and its counter (position, token).

    The block's 64 bits make the uniform number, as the tail that wins draws is coarse in 23: of 150,000 equal tokens
    the greatest noise would be shared by two in one draw of fifty.
    Source: Salmon et al. 2011 (Threefry), Maddison et al. 2014 (Gumbel-max).
    """
    shape = (position.shape[0], vocab_rows)
    token = jax.lax.broadcasted_iota(jnp.uint32, shape, 1)
    key_and_row = (rows.seed_low, rows.seed_high, position)
    low, high, at = (jnp.broadcast_to(a.astype(jnp.uint32)[:, None], shape) for a in key_and_row)
    coarse, fine = threefry2x32_p.bind(low, high, at, token)
    uniform = (coarse >> 8).astype(jnp.float32) * 2.0**-24 + ((fine >> 8).astype(jnp.float32) + 0.5) * 2.0**-48
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, 1 - 2.0**-24)))


def _top_k_top_p(scaled: jax.Array, rows: SamplingRows) -> jax.Array:
    """[R, V] bool: the top_k likeliest tokens, and of these the smallest set that reaches top_p; lower ids win ties.

    Source: Fan et al. 2018 (top-k), Holtzman et al. 2020 (top-p, here of the distribution that top-k leaves).
    """
    ids = jax.lax.broadcasted_iota(jnp.int32, scaled.shape, 1)
    descending, order = jax.lax.sort((-scaled, ids), dimension=1, num_keys=1, is_stable=True)
    rank = jax.lax.broadcasted_iota(jnp.int32, scaled.shape, 1)
    limit = jnp.where(rows.top_k > 0, rows.top_k, scaled.shape[-1])[:, None]
    probabilities = jax.nn.softmax(jnp.where(rank < limit, -descending, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # A top_p of 1 keeps all: rounding in the sum must not cut the tail.
    reach = jnp.where(rows.top_p < 1, rows.top_p, 2.0)[:, None]
    count = jnp.sum((rank < limit) & (before < reach), axis=-1, keepdims=True)
    last = jnp.maximum(count - 1, 0)
    value, last_id = (jnp.take_along_axis(a, last, axis=1) for a in (-descending, order))
    return (scaled > value) | ((scaled == value) & (ids <= last_id))
