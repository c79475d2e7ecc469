"""Sums, gathers and scattered sums of what each device of a group has: the contracts that every route fills."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax

from pallas_kernels.collectives import reference
from pallas_kernels.dispatch import Route, Target, dispatch, gpu_route

PROGRAMS = 256
"""Most programs of a collective, each with a place of its own in an inbox."""
REGION = 4096
"""Words of such a place: what a program gets from another device. A word is 32 bits of numbers, and 32 bits that say
which collective they are of."""
SLOTS = 2
"""Collectives that may be on their way at once: who is one ahead does not write over what another still reads."""


class Peers(NamedTuple):
    """What a device needs to write into the memory of the others, all of which one process drives."""

    inboxes: jax.Array  # int32 [devices, 2]: address of each device's inbox, low and high half, in the mesh's order
    device: jax.Array  # int32 [1]: which of them this is
    counts: jax.Ref  # int32 [num_counts]: collectives of each kind of ring that each program took part in; whether one
    # waited in vain
    axes: tuple[tuple[str, int], ...]  # the mesh's, with their lengths


class Ring(NamedTuple):
    """The devices that a collective is over: `size` of them, `stride` apart in the mesh's order.

    Each kind of ring has places and counts of its own. Who has the words of the next collective of a ring knows that
    all of it have read those of this one, and of a device that is not in it knows nothing.
    """

    size: int
    stride: int
    number: int  # of this kind among those of the mesh
    before: int  # devices that the kinds before it are over, each of which has its places in an inbox


def rings(mesh: tuple[tuple[str, int], ...]) -> dict[tuple[str, ...], Ring]:
    """All that collectives may be over: axes that follow each other, but for those of one device."""
    along = [(name, size) for name, size in mesh if size > 1]
    found: dict[tuple[str, ...], Ring] = {}
    before = 0
    for first in range(len(along)):
        for last in range(first + 1, len(along) + 1):
            names, sizes = zip(*along[first:last], strict=True)
            stride = math.prod(size for _, size in along[last:])
            found[names] = Ring(math.prod(sizes), stride, len(found), before)
            before += math.prod(sizes)
    return found


def ring(axes: tuple[str, ...], mesh: tuple[tuple[str, int], ...], *, any_order: bool) -> Ring:
    """The devices along mesh axes, in the order of these or in any.

    NotImplementedError where they are not equally far apart, not in this order, or a single one.
    """
    sizes = dict(mesh)
    wanted = [name for name in axes if sizes[name] > 1]
    if any_order:
        wanted.sort(key=list(sizes).index)
    found = rings(mesh).get(tuple(wanted))
    if found is None:
        raise NotImplementedError(
            f"devices along {axes} of a mesh {sizes} are one alone, or not equally far apart in this order"
        )
    return found


def inbox_words(mesh: tuple[tuple[str, int], ...]) -> int:
    """Words of 64 bits that an inbox has, for collectives over any axes of a mesh."""
    return SLOTS * sum(ring.size for ring in rings(mesh).values()) * PROGRAMS * REGION


def num_counts(mesh: tuple[tuple[str, int], ...]) -> int:
    """Of a device: see `Peers.counts`. The last says whether one waited in vain."""
    return len(rings(mesh)) * PROGRAMS + 1


def _routes(op: str) -> tuple[Route, ...]:
    return gpu_route("triton", "pallas_kernels.collectives.triton", op), Route("reference", getattr(reference, op))


SUM, GATHER, SCATTER = _routes("all_reduce"), _routes("all_gather"), _routes("reduce_scatter")
"""Routes of each op. All collectives of a program follow each other: XLA sees that each changes `peers.counts`. Where
another device has not come after half a minute the result is NaN, and so is that of every collective after it."""


def all_reduce(
    x: jax.Array, axes: tuple[str, ...], *, residual: jax.Array | None = None, peers: Peers | None, target: Target
) -> jax.Array:
    """The sum of x [T, D] over the devices along mesh axes, plus `residual` [T, D], which all of them have.

    Every device gets the same numbers. peers None: none can be written to. Source: words with stamps, as in the LL
    protocol of NCCL (NVIDIA 2017).
    """
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual {residual.shape} does not fit x {x.shape}")
    return dispatch("all_reduce", SUM, x, axes, residual=residual, peers=peers, target=target)


def all_gather(x: jax.Array, axes: tuple[str, ...], *, axis: int = 0, peers: Peers | None, target: Target) -> jax.Array:
    """What the devices along mesh axes have of x [T, D], one behind the other along dimension `axis`, 0 or 1.

    peers None: none can be written to.
    """
    if axis not in (0, 1) or x.ndim != 2:
        raise ValueError(f"x {x.shape} is to be gathered along dimension {axis}; it takes 0 or 1 of [T, D]")
    return dispatch("all_gather", GATHER, x, axes, axis=axis, peers=peers, target=target)


def reduce_scatter(x: jax.Array, axes: tuple[str, ...], *, peers: Peers | None, target: Target) -> jax.Array:
    """Of the sum of x [T, D] over n devices along mesh axes, a device's own T / n rows: the first those of the first.

    peers None: none can be written to. ValueError where n does not divide T.
    """
    if x.ndim != 2 or x.shape[0] % jax.lax.axis_size(axes):
        raise ValueError(f"the rows of x {x.shape} cannot be shared out by {jax.lax.axis_size(axes)} devices")
    return dispatch("reduce_scatter", SCATTER, x, axes, peers=peers, target=target)
