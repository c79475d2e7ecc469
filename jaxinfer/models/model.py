"""What a model supplies: its parameters, declared once, and two pure functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax

from jaxinfer.params import Params, Specs


class ModelError(ValueError):
    """A config that no model here implements; the message lists what is wrong and what is known."""


class Attend(Protocol):
    """Attention of one layer over the sequences of the step, given by the runner.

    q [T, H, E], k and v [T, K, E]; layer: int32 scalar array; window: int32 scalar array or None. Returns [T, H, E].
    """

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array, *, scale: float, window: jax.Array | None
    ) -> jax.Array: ...


class CacheShape(NamedTuple):
    """What a token costs in the KV cache: two vectors of [num_kv_heads, head_width] in each of num_layers."""

    num_layers: int
    num_kv_heads: int
    head_width: int


class Model(NamedTuple):
    """A model for one config. Functions see one device's shard; `tensor_axis` names the mesh axis that shards share."""

    architecture: str
    specs: Specs
    cache: CacheShape
    vocab_rows: int  # V, rows of the embedding table; ids from the tokenizer's size on are padding
    max_model_len: int  # positions that the model was made for, tokens
    forward: Callable[[Params, jax.Array, jax.Array, Attend, str | None], jax.Array]
    """(params, tokens [T], positions [T], attend, tensor_axis) -> hidden states [T, D] before the final norm."""
    logits: Callable[[Params, jax.Array, str | None], jax.Array]
    """(params, hidden states [R, D], tensor_axis) -> logits [R, V] in float32."""
    ignored: Callable[[str], bool]
    """Whether a checkpoint may hold a tensor of this name that the model has no use for."""
