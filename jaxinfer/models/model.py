"""What a model supplies: its parameters, declared once, and two pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import jax

from jaxinfer.params import Params, Specs
from pallas_kernels.collectives.api import Peers, all_gather, all_reduce, reduce_scatter
from pallas_kernels.delta_rule.api import DeltaWeights
from pallas_kernels.dispatch import Target
from pallas_kernels.kv_write.api import HeadNorms


class ModelError(ValueError):
    """A config that no model here implements; the message lists what is wrong and what is known."""


class Placement(NamedTuple):
    """Where a model's functions run: what for, and on which shard of it."""

    target: Target
    split: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    """Mesh axes that a logical axis is split over. What a product over such an axis gives is summed over these."""
    counters: jax.Ref | None = None  # int32 zeros for the kernels whose programs share results; zeros between kernels
    peers: Peers | None = None  # how kernels write to other devices; None: they cannot

    def over(self, logical: str) -> tuple[str, ...]:
        """Mesh axes that a logical axis is split over; none where every device has all of it."""
        return self.split.get(logical, ())

    def sum(self, x: jax.Array, axes: tuple[str, ...], residual: jax.Array | None = None) -> jax.Array:
        """x [T, D] summed over the devices along mesh axes, plus `residual` [T, D], which all of them have."""
        return all_reduce(x, axes, residual=residual, peers=self.peers, target=self.target)

    def gather(self, x: jax.Array, axes: tuple[str, ...], axis: int = 0) -> jax.Array:
        """What the devices along mesh axes have of x [T, D], one behind the other along dimension `axis`."""
        return all_gather(x, axes, axis=axis, peers=self.peers, target=self.target)

    def scatter(self, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """x [T, D] summed over the devices along mesh axes, of which each gets its part of the rows."""
        return reduce_scatter(x, axes, peers=self.peers, target=self.target)


class Attend(Protocol):
    """Attention of one layer over the sequences of the step, given by the runner.

    qkv [T, K, G + 2, E]: for each KV head its G query heads, then key and value, before `norms` and RoPE; rotary:
    cosines and sines of all tokens of the step, float32 [T', E / 2] each, of which a device may have T; layer, window:
    int32 scalar arrays. Returns [T, K * G, E].
    """

    def __call__(
        self,
        qkv: jax.Array,
        rotary: tuple[jax.Array, jax.Array],
        layer: jax.Array,
        *,
        norms: HeadNorms | None,
        scale: float,
        window: jax.Array | None,
    ) -> jax.Array: ...


class Recur(Protocol):
    """The gated delta rule of one layer over the sequences of the step, given by the runner.

    x [T, Hk, W]: what the layer's projection makes of each token, by key head; layer: int32 scalar array. Returns
    [T, Hk, G, V]: the outputs of each key head's value heads, normalised and gated.
    """

    def __call__(self, x: jax.Array, weights: DeltaWeights, layer: jax.Array, *, eps: float) -> jax.Array: ...


class Memory(NamedTuple):
    """What the layers of a step have of its sequences."""

    attend: Attend
    real: jax.Array  # [T] bool: tokens of this device that are not padding
    recur: Recur | None = None  # None: there is no recurrent state
    only: Callable[[jax.Array], Memory] | None = None
    """Given whether this device computes, the same memory, or one of padding alone. None: there is one stage."""


class CacheShape(NamedTuple):
    """What a token costs in the KV cache: two vectors of [num_kv_heads, head_width] in each of num_layers."""

    num_layers: int
    num_kv_heads: int
    head_width: int


class RecurrentShape(NamedTuple):
    """What a sequence costs whatever its length: a matrix per value head, and a few inputs, in each of num_layers."""

    num_layers: int
    num_key_heads: int  # Hk
    group: int  # value heads per key head
    key_width: int
    value_width: int

    @property
    def channels(self) -> int:
        """Of a key head's input: query, key and values."""
        return 2 * self.key_width + self.group * self.value_width


class Model(NamedTuple):
    """A model for one config. Functions see one device's shard."""

    architecture: str
    specs: Specs
    cache: CacheShape
    recurrent: RecurrentShape | None  # None: nothing but the KV cache
    num_heads: int  # H, of all shards together
    num_repeats: int  # of the run of layers that the model repeats: what stages share out
    parts: Mapping[str, tuple[str, ...]]  # names of the parameters of each part
    top_k: int  # experts that a token goes to; 0: there are none
    vocab_rows: int  # V, rows of the embedding table; ids from the tokenizer's size on are padding
    max_model_len: int  # positions that the model was made for, tokens
    forward: Callable[[Params, jax.Array, jax.Array, Memory, Placement], jax.Array]
    """(params, tokens [T], positions [T'], memory, place) -> hidden states [T, D] before the final norm. T' > T where a
    device has a part of the step's tokens: positions, and angles, are those of all, as the memory takes them."""
    logits: Callable[[Params, jax.Array, Placement], jax.Array]
    """(params, hidden states [R, D], place) -> logits [R, V] in float32."""
    ignored: Callable[[str], bool]
    """Whether a checkpoint may hold a tensor of this name that the model has no use for."""

    @property
    def lengths(self) -> Mapping[str, int]:
        """What must divide by the devices that a logical axis is split over, where that is not an array's length."""
        return {"kv_heads": self.num_heads, "layers": self.num_repeats}
