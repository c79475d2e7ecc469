"""The sum of what each device of a group has: the contract that every route fills."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax

from pallas_kernels.all_reduce import reference
from pallas_kernels.dispatch import Route, Target, dispatch, gpu_route

PROGRAMS = 256
"""Most programs of a sum, each with a place of its own in an inbox."""
REGION = 4096
"""Words of such a place: what a program sums. A word is 32 bits of numbers, and 32 bits that say which sum it is of."""
SLOTS = 2
"""Sums that may be on their way at once: who is one ahead does not write over what another still reads."""


class Peers(NamedTuple):
    """What a device needs to write into the memory of the others, all of which one process drives."""

    inboxes: jax.Array  # int32 [devices, 2]: address of each device's inbox, low and high half, in the mesh's order
    device: jax.Array  # int32 [1]: which of them this is
    sums: jax.Ref  # int32 [PROGRAMS + 1]: sums that each program has made, and whether one has waited in vain
    axes: tuple[tuple[str, int], ...]  # the mesh's, with their lengths


class Ring(NamedTuple):
    """The devices that a sum is over: `size` of them, `stride` apart in the mesh's order."""

    size: int
    stride: int


def ring(axes: tuple[str, ...], mesh: tuple[tuple[str, int], ...]) -> Ring:
    """The devices along mesh axes. NotImplementedError where they are not equally far apart."""
    along = [(name in axes, size) for name, size in mesh if size > 1]
    first = next((i for i, (inside, _) in enumerate(along) if inside), len(along))
    last = max((i for i, (inside, _) in enumerate(along) if inside), default=first - 1)
    if not all(inside for inside, _ in along[first : last + 1]):
        raise NotImplementedError(f"of a mesh {dict(mesh)}, devices along {axes} are not equally far apart")
    sizes = [size for _, size in along]
    return Ring(math.prod(sizes[first : last + 1]), math.prod(sizes[last + 1 :]))


def inbox_words(num_devices: int) -> int:
    """Words of 64 bits that an inbox has, for sums over up to `num_devices`."""
    return SLOTS * num_devices * PROGRAMS * REGION


ROUTES = (gpu_route("triton", "pallas_kernels.all_reduce.triton"), Route("reference", reference.run))


def all_reduce(
    x: jax.Array,
    axes: tuple[str, ...],
    *,
    residual: jax.Array | None = None,
    peers: Peers | None,
    target: Target,
) -> jax.Array:
    """The sum of x [T, D] over the devices along mesh axes, plus `residual` [T, D], which all of them have.

    Every device gets the same numbers. Sums of a program follow each other: XLA sees all of them change `peers.sums`.
    Where another device has not come after half a minute, the result is NaN, and so is that of every sum after it.
    peers None: none can be written to. Source: words with stamps, as in the LL protocol of NCCL (NVIDIA 2017).
    """
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual {residual.shape} does not fit x {x.shape}")
    return dispatch("all_reduce", ROUTES, x, axes, residual=residual, peers=peers, target=target)
