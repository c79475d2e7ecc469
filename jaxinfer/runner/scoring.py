"""Log-probabilities of the tokens of a prompt: how likely each was, given those before it."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.runner import sampling
from jaxinfer.scheduler.plan import PrefillChunk, StepPlan
from jaxinfer.types import TokenLogprobs

BLOCK = 64
"""Rows whose logits are there at once: 39 MB for a vocabulary of 150,000."""
NO_TARGET = -1


def num_fields(vocab_rows: int) -> int:
    """int32 fields of a target's score: log-probability by its bits, rank, ids and log-probabilities of the top."""
    return 2 + 2 * sampling.num_top(vocab_rows)


def score(
    logits: Callable[[jax.Array], jax.Array], hidden: jax.Array, targets: jax.Array, vocab_size: int
) -> jax.Array:
    """[T, num_fields] int32 for hidden states [T, D] and what comes behind each, targets [T]; zeros for NO_TARGET.

    logits: of hidden states [R, D], float32 [R, V], of which ids from `vocab_size` on are padding.
    """
    num_tokens = targets.shape[0]
    padding = -num_tokens % BLOCK
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, BLOCK, hidden.shape[1])
    targets = jnp.pad(targets, (0, padding), constant_values=NO_TARGET).reshape(-1, BLOCK)
    rows = jax.eval_shape(logits, hidden[0])
    nothing = jnp.zeros((BLOCK, num_fields(rows.shape[1])), jnp.int32)

    def of_block(hidden: jax.Array, targets: jax.Array) -> jax.Array:
        found = logits(hidden)
        found = jnp.where(jnp.arange(found.shape[1]) < vocab_size, found, -jnp.inf)
        logprobs = jax.nn.log_softmax(found)
        chosen = jnp.take_along_axis(logprobs, jnp.maximum(targets, 0)[:, None], axis=1)
        rank = 1 + jnp.sum(logprobs > chosen, axis=1, keepdims=True, dtype=jnp.int32)
        top, ids = jax.lax.top_k(logprobs, sampling.num_top(found.shape[1]))
        chosen, top = (jax.lax.bitcast_convert_type(part, jnp.int32) for part in (chosen, top))
        packed = jnp.concatenate([chosen, rank, ids, top], axis=1)
        return jnp.where(targets[:, None] == NO_TARGET, 0, packed)

    def one(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jax.lax.cond(jnp.any(block[1] != NO_TARGET), of_block, lambda *_: nothing, *block)

    return jax.lax.map(one, (hidden, targets)).reshape(-1, nothing.shape[1])[:num_tokens]


def targets(plan: StepPlan, num_tokens: int) -> np.ndarray:
    """[num_tokens] int32: for each token of a step, laid out as `inputs.pack` does, what is known to come behind it."""
    found = np.full(num_tokens, NO_TARGET, np.int32)
    for start, chunk in _places(plan):
        following = [*chunk.token_ids[1:], NO_TARGET if chunk.next_token is None else chunk.next_token]
        found[start : start + len(following)] = following
    return found


def unpack(plan: StepPlan, packed: np.ndarray) -> dict[int, list[TokenLogprobs]]:
    """The scores of each scored chunk by its slot, from what `score` gave."""
    found: dict[int, list[TokenLogprobs]] = {}
    for start, chunk in _places(plan):
        rows = packed[start : start + len(chunk.token_ids)]
        ids, top = np.split(rows[:, 2:], 2, axis=1)
        parts = rows[:, 0].copy().view(np.float32), rows[:, 1], ids, top.copy().view(np.float32)
        scores = zip(*(part.tolist() for part in parts), strict=True)
        found[chunk.slot] = [
            TokenLogprobs(chosen, tuple(zip(ids, top, strict=True)), rank) for chosen, rank, ids, top in scores
        ]
    return found


def _places(plan: StepPlan) -> list[tuple[int, PrefillChunk]]:
    """The scored chunks, and which token of the step each begins with."""
    found, start = [], len(plan.decodes)
    for chunk in plan.prefills:
        if chunk.scored:
            found.append((start, chunk))
        start += len(chunk.token_ids)
    return found
