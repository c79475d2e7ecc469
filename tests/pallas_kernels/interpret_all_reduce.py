"""Sums over devices in Triton's interpreter, each device a process that shares its inbox with the others.

    TRITON_INTERPRET=1 JAX_PLATFORMS=cpu python interpret_all_reduce.py

Prints one JSON object: by case, by sum, what is wrong with it.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import sys
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import new_ref

from pallas_kernels.all_reduce import api, triton
from pallas_kernels.dispatch import Target

TARGET = Target("gpu", 90)
FEW_SPINS = 3


class Case(NamedTuple):
    """Sums one after the other, each of [rows, width], over the devices along mesh axes."""

    name: str
    mesh: tuple[tuple[str, int], ...]
    axes: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    first: int = 0  # number of the sums before
    absent: tuple[int, ...] = ()  # devices that never come


TWO = (("tensor", 2),)
CASES = (
    Case("two devices, sums of many sizes", TWO, ("tensor",), ((1, 64), (3, 512), (1, 7), (9, 512), (2, 300))),
    Case("two devices, more sums than numbers", TWO, ("tensor",), ((1, 64),) * 4, first=2**31 - 2),
    Case("four devices", (("tensor", 4),), ("tensor",), ((1, 64), (2, 300), (1, 64))),
    Case("pairs that are apart", (("expert", 2), ("tensor", 2)), ("expert",), ((1, 64), (2, 300))),
    Case("pairs of neighbours", (("expert", 2), ("tensor", 2)), ("tensor",), ((1, 64), (2, 300))),
    Case("both axes", (("expert", 2), ("tensor", 2)), ("tensor", "expert"), ((2, 300),)),
    Case("one device never comes", TWO, ("tensor",), ((1, 64), (1, 64)), absent=(1,)),
)


def numbers(case: Case, device: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """What a device has, and the residual, which all have."""
    shape = case.shapes[number]
    own, shared = (np.random.default_rng((number, who)) for who in (device + 1, 0))
    return own.standard_normal(shape, np.float32), shared.standard_normal(shape, np.float32)


def run_device(case: Case, device: int, addresses: np.ndarray, results: multiprocessing.SimpleQueue) -> None:
    """All sums of one device."""
    counts = np.full(api.PROGRAMS + 1, case.first, np.int32)
    counts[api.PROGRAMS] = 0
    peers = api.Peers(jnp.asarray(addresses), jnp.asarray([device], jnp.int32), new_ref(jnp.asarray(counts)), case.mesh)
    if case.absent:
        triton.SPINS = FEW_SPINS
    found = []
    for number in range(len(case.shapes)):
        x, residual = numbers(case, device, number)
        added = jnp.asarray(residual) if number % 2 else None
        y = api.all_reduce(jnp.asarray(x), case.axes, residual=added, peers=peers, target=TARGET)
        found.append(np.asarray(y))
    results.put((device, found))


def group(case: Case, device: int) -> list[int]:
    """The devices that a device's sums are over."""
    sizes = [size for _, size in case.mesh]
    split = [name in case.axes for name, _ in case.mesh]
    own = np.unravel_index(device, sizes)
    return [
        other
        for other in range(int(np.prod(sizes)))
        if all(a == b or along for a, b, along in zip(own, np.unravel_index(other, sizes), split, strict=True))
    ]


def check(case: Case) -> list[str]:
    """What is wrong with the sums of a case."""
    size = int(np.prod([n for _, n in case.mesh]))
    memory = [mmap.mmap(-1, 8 * api.inbox_words(size)) for _ in range(size)]  # at the same address in every child
    addresses = np.array([np.frombuffer(m, np.uint8).ctypes.data for m in memory], np.uint64)
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    table = addresses.view(np.int32).reshape(size, 2)
    present = [device for device in range(size) if device not in case.absent]
    children = [context.Process(target=run_device, args=(case, device, table, results)) for device in present]
    for child in children:
        child.start()
    found = dict(results.get() for _ in children)
    for child in children:
        child.join()
    wrong = []
    for device in present:
        for number, y in enumerate(found[device]):
            total = np.zeros(case.shapes[number], np.float32)
            for other in group(case, device):  # in the order in which the kernel adds
                total = total + numbers(case, other, number)[0]
            total = total + numbers(case, device, number)[1] if number % 2 else total
            right = np.isnan(y).all() if case.absent else np.array_equal(y, total)
            if not right:
                wrong.append(f"device {device}, sum {number}: off by {np.abs(y - total).max()}")
    return wrong


if __name__ == "__main__":
    print(json.dumps({case.name: check(case) for case in CASES if not sys.argv[1:] or case.name in sys.argv[1:]}))
