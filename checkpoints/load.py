"""From a checkpoint to sharded arrays on the devices: accounting for every tensor first, then streaming them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from checkpoints.source import CheckpointError, TensorSource
from jaxinfer.params import Params, ParamSpec, Specs

MAX_LISTED = 20
"""Names of each kind that an error lists; the rest are counted."""

Progress = Callable[[int, int], None]


def load(
    source: TensorSource,
    specs: Specs,
    dtype: jnp.dtype,
    shardings: Mapping[str, Sharding],
    *,
    ignore: Callable[[str], bool] = lambda _name: False,
    progress: Progress | None = None,
) -> Params:
    """Every parameter of `specs`, read from `source` onto the devices of its sharding (that of the stacked array).

    ignore: says which of the source's tensors may stay unread.
    progress: called after every tensor with the bytes placed so far and in all, in `dtype` and over all devices.

    At most one packed tensor of one layer is on the host at a time, and each device is sent its own part of it. Where
    devices belong to several processes, each reads the layers that its own devices have.
    Tensors that are missing, extra or misshapen raise one CheckpointError that lists them, before any is read.
    """
    dtype = jnp.dtype(dtype)
    check_complete(wanted_tensors(specs), source.shapes(), ignore)
    total = sum(spec.size for spec in specs.values()) * dtype.itemsize
    done = 0

    def advance(num_values: int) -> None:
        nonlocal done
        done += num_values * dtype.itemsize
        if progress is not None:
            progress(done, total)

    placer = _Placer(dtype)
    params = {}
    for name, spec in specs.items():
        if spec.layers is None:
            array = placer.whole(_packed(source, name, spec, None), shardings[name])
            advance(spec.size)
        else:
            array = placer.empty(spec.array_shape, shardings[name])
            held = held_layers(shardings[name], spec.array_shape)
            for index, layer in enumerate(spec.layers):
                read = functools.partial(_packed, source, name) if index in held else functools.partial(_unread, source)
                array = placer.set_layer(array, index, read(spec, layer), shardings[name])
                advance(math.prod(spec.shape))
        params[name] = jax.device_put(array, shardings[name])  # a new label for the same buffers
    return params


def check_complete(
    wanted: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    ignore: Callable[[str], bool] = lambda _name: False,
) -> None:
    """Raises one CheckpointError that lists every name that is missing, extra (and not ignored) or misshapen."""
    missing = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in wanted and not ignore(name)]
    misshapen = [
        f"{name} is {list(found[name])} where the model has {list(shape)}"
        for name, shape in wanted.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    kinds = {"missing": missing, "extra": extra, "misshapen": misshapen}
    if any(kinds.values()):
        raise CheckpointError(
            f"the checkpoint does not fit the model ({len(found)} tensors found, {len(wanted)} expected)\n"
            + "\n".join(_listing(kind, items) for kind, items in kinds.items() if items)
        )


def _listing(kind: str, items: Sequence[str]) -> str:
    rest = f", and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else ""
    return f"{len(items)} {kind}: {', '.join(items[:MAX_LISTED])}{rest}"


def wanted_tensors(specs: Specs) -> dict[str, tuple[int, ...]]:
    """Name and published shape of every checkpoint tensor that the parameters read."""
    wanted: dict[str, tuple[int, ...]] = {}
    for param, spec in specs.items():
        for name, shape in spec.checkpoint_tensors().items():
            if wanted.setdefault(name, shape) != shape:
                raise CheckpointError(f"{param!r} expects {name!r} as {shape}, another parameter as {wanted[name]}")
    return wanted


def held_layers(sharding: Sharding, shape: tuple[int, ...]) -> set[int]:
    """The layers of an array [L, ...] of which a device of this process has a part."""
    parts = sharding.addressable_devices_indices_map(shape).values()
    return {layer for part in parts if part is not None for layer in range(shape[0])[part[0]]}


def _unread(source: TensorSource, spec: ParamSpec, layer: int) -> np.ndarray:
    """In place of a layer that no device of this process has: zeros, of the dtype that the others read."""
    dtype = np.result_type(*(source.read(s.name.format(layer=layer)).dtype for s in spec.sources))
    return np.broadcast_to(np.zeros((), np.float32 if dtype == np.float64 else dtype), spec.shape)


def _packed(source: TensorSource, name: str, spec: ParamSpec, layer: int | None) -> np.ndarray:
    """One layer of a parameter in the layout of its spec, still in the dtype of the source."""
    packed = spec.pack([source.read(s.name.format(layer=layer)) for s in spec.sources])
    if packed.shape != spec.shape:
        raise CheckpointError(f"{name!r}: packing gave {list(packed.shape)} where the model has {list(spec.shape)}")
    # Without 64-bit types enabled JAX would narrow a double by itself, with a warning; the result is the same.
    return packed.astype(np.float32) if packed.dtype == np.float64 else packed


class _Placer:
    """Puts host arrays into sharded device arrays of one dtype, by programs compiled once per shape and sharding."""

    def __init__(self, dtype: jnp.dtype):
        self._dtype = dtype
        self._convert = functools.cache(_convert)
        self._empty = functools.cache(_empty)
        self._update = functools.cache(_update)

    def whole(self, array: np.ndarray, sharding: Sharding) -> jax.Array:
        sharding = _automatic(sharding)
        return self._convert(self._dtype, sharding)(_place(array, sharding)).block_until_ready()

    def empty(self, shape: tuple[int, ...], sharding: Sharding) -> jax.Array:
        return self._empty(shape, self._dtype, _automatic(sharding))()

    def set_layer(self, stacked: jax.Array, index: int, array: np.ndarray, sharding: Sharding) -> jax.Array:
        """Writes one layer [...] into [L, ...] in place, and waits, which frees the host's copy before the next."""
        sharding = _automatic(sharding)
        one = _place(array, _layer_sharding(sharding))
        return self._update(sharding)(stacked, one, index).block_until_ready()


def _place(array: np.ndarray, sharding: Sharding) -> jax.Array:
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _automatic(sharding: Sharding) -> Sharding:
    """The same placement on a mesh of automatic axes.

    On explicit axes an update has to be typed like the array it goes into, which one whole layer of an array that is
    split by layers cannot be. On automatic axes the partitioner places it, without communication.
    """
    if not isinstance(sharding, NamedSharding) or set(sharding.mesh.axis_types) <= {AxisType.Auto}:
        return sharding
    mesh = Mesh(np.asarray(sharding.mesh.devices), sharding.mesh.axis_names)
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def _layer_sharding(sharding: Sharding) -> Sharding:
    """The sharding of one layer [...] of an array [L, ...] that has the given sharding.

    A mesh axis that splits the layers leaves one layer whole on each of its members; the update keeps what is theirs.
    """
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]), memory_kind=sharding.memory_kind)


def _convert(dtype: jnp.dtype, sharding: Sharding) -> Callable[[jax.Array], jax.Array]:
    # A copy even where nothing changes: on a CPU the argument may be a view of the file, which may change or go.
    return jax.jit(lambda array: jnp.array(array, dtype, copy=True), out_shardings=sharding)


def _empty(shape: tuple[int, ...], dtype: jnp.dtype, sharding: Sharding) -> Callable[[], jax.Array]:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


def _update(sharding: Sharding) -> Callable[[jax.Array, jax.Array, int], jax.Array]:
    def update(stacked: jax.Array, one: jax.Array, index: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(stacked, one.astype(stacked.dtype), index, 0)

    return jax.jit(update, donate_argnums=0, out_shardings=sharding)
