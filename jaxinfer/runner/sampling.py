"""From logits to tokens: what the state holds of it, and the call of the op that does it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.runner.inputs import FLOATS, INTS
from jaxinfer.types import MAX_LOGPROBS
from pallas_kernels.dispatch import Target
from pallas_kernels.sample import api
from pallas_kernels.sample.api import History, Places

NO_TOKEN = -1
"""In the place of a token whose row has no logits to choose from: the best of them is NaN or minus infinity."""


class Logprobs(api.Logprobs):
    """Of the raw logits: natural log-probabilities. Zeros for rows that did not ask. num_top is `num_top(V)`."""

    def pack(self) -> jax.Array:
        """[R, 1 + 2 * num_top] int32, numbers by their bits, for one array of state to hold them all."""
        chosen, top = (jax.lax.bitcast_convert_type(a, jnp.int32) for a in (self.chosen[:, None], self.top))
        return jnp.concatenate([chosen, self.top_ids, top], axis=1)


def num_top(vocab_rows: int) -> int:
    """Alternatives per token: MAX_LOGPROBS, or the vocabulary if that is smaller."""
    return min(MAX_LOGPROBS, vocab_rows)


def unpack_logprobs(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """On the host: chosen [R], top_ids [R, num_top] and top [R, num_top] from what `Logprobs.pack` made."""
    ids, top = np.split(packed[:, 1:], 2, axis=1)
    return packed[:, 0].copy().view(np.float32), ids, top.copy().view(np.float32)


class SamplingRows(api.Parameters):
    """The sampling parameters of each row of the step."""

    @classmethod
    def from_fields(cls, fields: jax.Array) -> SamplingRows:
        """From [R, SAMPLING_FIELDS] as `inputs.sampling_fields` lays them out."""
        floats = jax.lax.bitcast_convert_type(fields[:, : len(FLOATS)], jnp.float32)
        ints = fields[:, len(FLOATS) : len(FLOATS) + len(INTS)]
        return cls(*floats.T, *ints.T, fields[:, len(FLOATS) + len(INTS) :])


def sample(
    logits: jax.Array,
    rows: SamplingRows,
    history: History,
    places: Places,
    *,
    target: Target,
) -> tuple[jax.Array, Logprobs]:
    """Tokens [R] and log-probabilities from the first R rows of logits; the contract is `api.sample`."""
    counters = None if target.platform == "cpu" else jax.new_ref(jnp.zeros(places.slot.shape, jnp.int32))
    how = {"num_top": num_top(logits.shape[-1]), "target": target, "counters": counters}
    tokens, logprobs = api.sample(logits, rows, history, places, **how)
    return tokens, Logprobs(*logprobs)


def likeliest(logits: jax.Array) -> jax.Array:
    """[R] int32: the likeliest token of each row, the lowest id among equals; NO_TOKEN where the best is no number."""
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # Of a row with a NaN that is the place of one, and a row of -inf alone has its best there. So one look-up a row
    # tells, and no second pass over the logits.
    logit = logits.at[jnp.arange(best.shape[0]), best].get(mode="promise_in_bounds")
    return jnp.where(jnp.isfinite(logit), best, NO_TOKEN)
