"""Logical axes to mesh axes: how each parameter and each pool is laid over the devices."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.params import Specs

TENSOR = "tensor"
"""Mesh axis over which heads, MLP and vocabulary are split."""

_SPLIT: Mapping[str, str] = {"kv_heads": TENSOR, "delta_heads": TENSOR, "mlp": TENSOR, "vocab": TENSOR}
TENSOR_PARALLEL: Mapping[str, str] = {**_SPLIT, "expert_mlp": TENSOR}
"""Megatron's split (Shoeybi et al. 2019): whole heads and slices of the MLP, of experts, too; two sums per layer."""
EXPERT_PARALLEL: Mapping[str, str] = {**_SPLIT, "experts": TENSOR}
"""The same but for the experts, of which every device has some, whole."""


class ShardingError(ValueError):
    """A size that cannot be split so; the message names the sizes that would work."""


def make_mesh(tensor_parallel_size: int) -> Mesh:
    """A mesh of the first devices. ShardingError if there are not enough."""
    devices = jax.devices()
    if tensor_parallel_size > len(devices):
        raise ShardingError(f"tensor_parallel_size is {tensor_parallel_size}, but there are {len(devices)} devices")
    return Mesh(np.asarray(devices[:tensor_parallel_size]), (TENSOR,))


def platform(mesh: Mesh) -> str:
    """What the devices are: "cpu" or "gpu"."""
    return "cpu" if mesh.devices.flat[0].platform == "cpu" else "gpu"


def partition(axes: tuple[str | None, ...], rules: Mapping[str, str]) -> PartitionSpec:
    """Mesh axis of each dimension, from its logical axis. ShardingError if two dimensions would share one."""
    mesh_axes = [rules.get(axis) if axis else None for axis in axes]
    used = [axis for axis in mesh_axes if axis]
    if len(used) != len(set(used)):
        raise ShardingError(f"logical axes {axes} map one mesh axis twice: {mesh_axes}")
    return PartitionSpec(*mesh_axes)


def partitions(specs: Specs, rules: Mapping[str, str] = TENSOR_PARALLEL) -> dict[str, PartitionSpec]:
    """The partition of every parameter."""
    return {name: partition(spec.array_axes, rules) for name, spec in specs.items()}


def shardings(specs: Specs, mesh: Mesh, rules: Mapping[str, str] = TENSOR_PARALLEL) -> dict[str, NamedSharding]:
    """The sharding of every parameter. ShardingError if a size does not divide, with the sizes that would work."""
    check_divisible(specs, mesh, rules)
    return {name: NamedSharding(mesh, spec) for name, spec in partitions(specs, rules).items()}


def check_divisible(specs: Specs, mesh: Mesh, rules: Mapping[str, str]) -> None:
    """ShardingError unless every sharded dimension divides by the size of its mesh axis."""
    for mesh_axis, size in mesh.shape.items():
        split = {
            (axis, length)
            for spec in specs.values()
            for axis, length in zip(spec.axes, spec.shape, strict=True)
            if axis and rules.get(axis) == mesh_axis
        }
        if any(length % size for _, length in split):
            works = [n for n in range(1, 65) if not any(length % n for _, length in split)]
            sizes = ", ".join(f"{axis} {length}" for axis, length in sorted(split))
            raise ShardingError(
                f"a {mesh_axis} axis of {size} devices does not divide {sizes}; sizes that would: "
                + ", ".join(map(str, works))
            )
