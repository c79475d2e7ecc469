"""Meshes: the named axes that devices are arranged along."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh

TENSOR, EXPERT, PIPELINE, SEQUENCE, DATA = "tensor", "expert", "pipeline", "sequence", "data"
AXES: Mapping[str, str] = {
    TENSOR: "heads, MLP, width of experts and vocabulary",
    EXPERT: "whole experts",
    PIPELINE: "stages of layers",
    SEQUENCE: "tokens of prompts",
    DATA: "sequences, with their part of the cache",
}
"""Axes that the presets know, and what they split."""


class ShardingError(ValueError):
    """A mesh, or a size, that cannot be split so; the message names what would work."""


def parse(text: str) -> dict[str, int]:
    """Axis sizes of "tensor=2,expert=4", the last axis being that of neighbouring devices. ShardingError if it is not
    such a text."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if not name or not size.isdecimal() or name in sizes:
            raise ShardingError(
                f"mesh is {text!r}; axes and their sizes are needed, each once, as in tensor=2,expert=4"
            )
        sizes[name] = int(size)
    return sizes


def check_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """The same sizes. ShardingError for those that are no number from 1 on."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ShardingError(f"mesh axis {name} is {size!r}; a number of devices from 1 on is needed")
    return dict(sizes)


def make_mesh(sizes: Mapping[str, int]) -> Mesh:
    """A mesh of the first devices. ShardingError for sizes that cannot be, and if there are not enough devices."""
    sizes = check_sizes(sizes)
    needed, devices = math.prod(sizes.values()), jax.devices()
    if needed > len(devices):
        axes = ",".join(f"{name}={size}" for name, size in sizes.items())
        raise ShardingError(f"mesh {axes} has {needed} devices, but there are {len(devices)}")
    return Mesh(np.asarray(devices[:needed]).reshape(tuple(sizes.values())), tuple(sizes))


def choose_mesh(mesh: str | Mapping[str, int] | Mesh) -> Mesh:
    """The mesh that a user asks for, by its axes' sizes or as it is. ShardingError as `make_mesh`."""
    if isinstance(mesh, Mesh):
        return mesh
    return make_mesh(parse(mesh) if isinstance(mesh, str) else mesh)
