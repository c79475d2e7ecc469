"""ParamSpec: what a weight is, said once. Shardings, loading, random weights and bytes all derive from it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Source(NamedTuple):
    """A tensor of the checkpoint. `name` may hold "{layer}"; `shape` is as published (linear weights are (out, in))."""

    name: str
    shape: tuple[int, ...]


def only(tensors: Sequence[np.ndarray]) -> np.ndarray:
    """The layout of a parameter that is one checkpoint tensor as it stands."""
    (tensor,) = tensors
    return tensor


class Whole(NamedTuple):
    """A parameter as it is where no two devices share a part of it: of one layer, and what makes `[L, *shape]` of the
    spec from such an array [L, *shape] by copying and moving elements."""

    shape: tuple[int, ...]
    spread: Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """One parameter of a model.

    shape: of one layer (or of the whole parameter when `layers` is None), in the layout that the step reads.
    axes: the logical axis of each dimension of `shape`, None where it is never sharded.
    sources: the checkpoint tensors it is made of.
    pack: makes `shape` from the source tensors, in their order. It only moves elements.
    layers: the checkpoint's layer numbers, stacked in front as [L, *shape]; None for a parameter outside the layers.
    init: how random weights are drawn: "normal" (standard deviation 0.02), "ones" or "zeros".
    whole: how random weights are drawn and stored, if that is not `shape`.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    sources: tuple[Source, ...]
    pack: Callable[[Sequence[np.ndarray]], np.ndarray] = only
    layers: Sequence[int] | None = None
    init: str = "normal"
    whole: Whole | None = None

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"shape {self.shape} and axes {self.axes} differ in length")

    @property
    def array_shape(self) -> tuple[int, ...]:
        return self.shape if self.layers is None else (len(self.layers), *self.shape)

    @property
    def array_axes(self) -> tuple[str | None, ...]:
        return self.axes if self.layers is None else ("layers", *self.axes)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Of the array as it is drawn and stored."""
        shape = self.shape if self.whole is None else self.whole.shape
        return shape if self.layers is None else (len(self.layers), *shape)

    def spread(self, array: jax.Array) -> jax.Array:
        """The array that the step reads, of one as it is drawn and stored."""
        return array if self.whole is None else self.whole.spread(array)

    @property
    def size(self) -> int:
        return math.prod(self.array_shape)

    def checkpoint_tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and published shape of every checkpoint tensor that this parameter reads."""
        layers = [None] if self.layers is None else self.layers
        return {s.name.format(layer=layer): s.shape for layer in layers for s in self.sources}


def norm_spec(
    name: str,
    size: int,
    layers: Sequence[int] | None = None,
    *,
    offset: float = 0.0,
    pack: Callable[[Sequence[np.ndarray]], np.ndarray] = only,
) -> ParamSpec:
    """A norm's weight [size], of the tensor `name`. offset: what the model adds; random ones sum to 1."""
    source, init = Source(name, (size,)), "zeros" if offset else "ones"
    return ParamSpec(shape=(size,), axes=(None,), sources=(source,), layers=layers, init=init, pack=pack)


Specs = Mapping[str, ParamSpec]
Params = dict[str, jax.Array]


def num_bytes(specs: Specs, dtype: jnp.dtype) -> int:
    """Bytes of all parameters in `dtype`, over all devices together."""
    return sum(spec.size for spec in specs.values()) * jnp.dtype(dtype).itemsize


def abstract_params(
    specs: Specs, dtype: jnp.dtype, shardings: Mapping[str, jax.sharding.Sharding]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of all parameters, with no memory behind them."""
    return {
        name: jax.ShapeDtypeStruct(spec.array_shape, dtype, sharding=shardings[name]) for name, spec in specs.items()
    }


def shard_bytes(arrays: Any) -> int:
    """Bytes that a tree of sharded arrays, or of their abstract values, takes on each device."""
    leaves = jax.tree.leaves(arrays)
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * jnp.dtype(a.dtype).itemsize for a in leaves)


def random_params(specs: Specs, dtype: jnp.dtype, shardings: Mapping[str, jax.sharding.Sharding], seed: int) -> Params:
    """Random weights made on the devices that hold them; the same for the same seed on any mesh."""

    def draw(key: jax.Array, spec: ParamSpec) -> jax.Array:
        if spec.init == "normal":
            return spec.spread((jax.random.normal(key, spec.whole_shape, jnp.float32) * 0.02).astype(dtype))
        return jnp.full(spec.array_shape, {"ones": 1, "zeros": 0}[spec.init], dtype)

    params = {}
    for index, (name, spec) in enumerate(specs.items()):
        key = jax.random.fold_in(jax.random.key(seed), index)
        params[name] = jax.jit(draw, static_argnums=1, out_shardings=shardings[name])(key, spec)
    return params
