"""Collectives in Triton's interpreter, each device a process that shares its inbox with the others.

    TRITON_INTERPRET=1 JAX_PLATFORMS=cpu python interpret_collectives.py

Prints one JSON object: by case what is wrong with its results.
"""

from __future__ import annotations

import functools
import itertools
import json
import mmap
import multiprocessing
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import new_ref
from triton.runtime.interpreter import InterpreterBuilder

from pallas_kernels.collectives import api, triton
from pallas_kernels.dispatch import Target
from tests.pallas_kernels.collective_cases import CASES, Case

TARGET = Target("gpu", 90)
FEW_SPINS, SOME_SPINS = 3, 2**17
LATE_S, NUM_LATE = 2.0, 2


def numbers(case: Case, device: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """What a device has, and the residual, which all have."""
    own, shared = (np.random.default_rng((number, who)) for who in (device + 1, 0))
    shape = case.calls[number][1:]
    return own.standard_normal(shape, np.float32), shared.standard_normal(shape, np.float32)


def run_device(case: Case, device: int, addresses: np.ndarray, results: multiprocessing.SimpleQueue) -> None:
    """All collectives of one device."""
    counts = np.full(api.num_counts(case.mesh), case.first, np.int32)
    counts[-1] = 0
    ref = new_ref(jnp.asarray(counts))
    how = {"peers": api.Peers(jnp.asarray(addresses), jnp.asarray([device], jnp.int32), ref, case.mesh)}
    how["target"] = TARGET
    triton.SPINS = FEW_SPINS if case.absent else SOME_SPINS
    if device == case.slow:
        InterpreterBuilder.create_masked_load = looks_late(InterpreterBuilder.create_masked_load)
    if device == case.late:
        time.sleep(LATE_S)
    found = []
    for number, (op, *_) in enumerate(case.calls):
        axes, size = axes_of(case, number), len(group(case, device, number))
        x, residual = map(jnp.asarray, numbers(case, device, number))
        with mock.patch.object(jax.lax, "axis_size", lambda _, size=size: size):
            if op == "scatter":
                y = api.reduce_scatter(x, axes, **how)
            elif op == "mask":
                y = api.all_gather(x > 0, axes, **how)
            elif op in ("gather", "columns"):
                y = api.all_gather(x, axes, axis=int(op == "columns"), **how)
            else:
                y = api.all_reduce(x, axes, residual=residual if op == "add" else None, **how)
        found.append(np.asarray(y))
    results.put((device, found))


def looks_late(load: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter's load, late the first times that it looks at what another device may write."""

    looks = itertools.count()

    def late(*args: Any) -> Any:
        if args[-1] and next(looks) < NUM_LATE:  # it is volatile
            time.sleep(LATE_S)
        return load(*args)

    return late


def expected(case: Case, device: int, number: int) -> np.ndarray:
    """The result of a collective, added up in the order in which the kernel does."""
    op, members = case.calls[number][0], group(case, device, number)
    of_all = [numbers(case, member, number)[0] for member in members]
    if op == "mask":
        return np.concatenate(of_all) > 0
    if op in ("gather", "columns"):
        return np.concatenate(of_all, axis=int(op == "columns"))
    total = functools.reduce(np.add, of_all)
    if op == "scatter":
        return np.split(total, len(members))[members.index(device)]
    return total + numbers(case, device, number)[1] if op == "add" else total


def axes_of(case: Case, number: int) -> tuple[str, ...]:
    """Of a collective."""
    return case.axes[number % len(case.axes)]


def group(case: Case, device: int, number: int) -> list[int]:
    """The devices that one of a device's collectives is over."""
    sizes = [size for _, size in case.mesh]
    split = [name in axes_of(case, number) for name, _ in case.mesh]
    own = np.unravel_index(device, sizes)
    return [
        other
        for other in range(int(np.prod(sizes)))
        if all(a == b or along for a, b, along in zip(own, np.unravel_index(other, sizes), split, strict=True))
    ]


def check(case: Case) -> list[str]:
    """What is wrong with the results of a case."""
    size = int(np.prod([n for _, n in case.mesh]))
    memory = [mmap.mmap(-1, 8 * api.inbox_words(case.mesh)) for _ in range(size)]  # at the same address in every child
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
            right = expected(case, device, number)
            if y.shape != right.shape:
                wrong.append(f"device {device}, call {number}: {y.shape} instead of {right.shape}")
            elif case.absent and case.calls[number][0] != "gather":
                wrong += [] if np.isnan(y).all() else [f"device {device}, call {number} made numbers of nothing"]
            elif case.absent:
                members = group(case, device, number)
                theirs = [np.isnan(part).all() for part in np.split(y, len(members))]
                wrong += [] if theirs == [who in case.absent for who in members] else [f"{number}: {theirs}"]
            elif not np.array_equal(y, right):
                wrong.append(f"device {device}, call {number}: off by {np.abs(y - right).max()}")
    return wrong


if __name__ == "__main__":
    print(json.dumps({case.name: check(case) for case in CASES if not sys.argv[1:] or case.name in sys.argv[1:]}))
