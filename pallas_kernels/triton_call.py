"""Calls Triton kernels from JAX: compiled to PTX that XLA launches itself, or through Triton's interpreter in tests.

XLA's own custom call for PTX makes a kernel one node of a captured graph, like the kernels that XLA generates. With
calls through jax-triton, 180 of them a step, a launch took 0.9 ms of host time on an H200, and the device evaluated the
condition of the loop over the layers, 3 us a layer.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pallas_kernels.dispatch import Target

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run in Triton's interpreter, on the CPU and outside of jit. Triton reads it when it is imported."""
CALL_TARGET = "__gpu$xla.gpu.ptx"
POINTEES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "int32": "i32",
    "uint32": "u32",
    "int8": "i8",
    "uint8": "u8",
    "bool": "i1",
}
"""Triton's names of the dtypes that a pointer may point to."""
SHARED_KIB = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227, 110: 227}
"""Shared memory that a program may have, by compute capability; 99 on every other GPU (CUDA programming guide)."""


def shared_bytes(target: Target) -> int:
    """Shared memory that a program may have."""
    return SHARED_KIB.get(target.compute_capability, 99) * 2**10


class Compiled(NamedTuple):
    """A kernel for one GPU and one set of dtypes and constants."""

    name: str
    ptx: str
    shared_bytes: int
    num_threads: int


def launch(
    kernel: Any,
    inputs: Sequence[jax.Array | jax.Ref],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    in_place: Sequence[jax.Ref] = (),
    grid: tuple[int, ...],
    constants: Mapping[str, Any],
    target: Target,
    num_warps: int = 4,
    num_stages: int = 3,
) -> tuple[jax.Array, ...]:
    """Runs `kernel` over `grid` and returns its outputs.

    Its parameters are pointers to the inputs, which it only reads, to what it changes in place, to the outputs, then
    `constants` by name. Outputs hold anything until the kernel writes them. Pointers are 16-byte aligned at least.
    """
    arrays = [value[...] if isinstance(value, jax.Ref) else value for value in [*inputs, *in_place]]
    if INTERPRETING:
        found = _interpret(kernel, arrays, len(in_place), outputs, grid, constants)
    else:
        dtypes = tuple(jnp.dtype(a.dtype).name for a in [*arrays, *outputs])
        compiled = _compile(kernel, dtypes, tuple(constants.items()), target.compute_capability, num_warps, num_stages)
        changed = [jax.ShapeDtypeStruct(ref.shape, ref.dtype) for ref in in_place]
        # XLA hands over operands, then results. Two pointers to scratch memory end the parameters of every kernel of
        # Triton: none here uses them, so whatever stands there will do.
        padding = [jax.ShapeDtypeStruct((16,), jnp.int8)] * (2 - len(in_place))
        found = jax.ffi.ffi_call(
            CALL_TARGET,
            [*outputs, *changed, *padding],
            input_output_aliases={len(inputs) + i: len(outputs) + i for i in range(len(in_place))},
            custom_call_api_version=2,
            legacy_backend_config=_backend_config(compiled, grid),
        )(*arrays)
    for ref, value in zip(in_place, found[len(outputs) :], strict=False):
        ref[...] = value
    return tuple(found[: len(outputs)])


@functools.cache
def _compile(
    kernel: Any,
    pointees: tuple[str, ...],
    constants: tuple[tuple[str, Any], ...],
    compute_capability: int,
    num_warps: int,
    num_stages: int,
) -> Compiled:
    """Compiles, or finds the result in Triton's cache of former processes."""
    fixed = dict(constants)
    pointers = [name for name in kernel.arg_names if name not in fixed]
    if len(pointers) != len(pointees):
        raise TypeError(f"{kernel.__name__} takes pointers {pointers}, and was given {len(pointees)} arrays")
    types = dict(zip(pointers, (f"*{POINTEES[name]}" for name in pointees), strict=True))
    index = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in kernel.arg_names},
        {index[name]: value for name, value in fixed.items()},
        {index[name]: [["tt.divisibility", 16]] for name in pointers},
    )
    options = {"num_warps": num_warps, "num_stages": num_stages}
    found = triton.compile(source, target=GPUTarget("cuda", compute_capability, 32), options=options)
    meta = found.metadata
    if meta.global_scratch_size or meta.profile_scratch_size:
        raise NotImplementedError(f"{kernel.__name__} needs scratch memory of Triton's own")
    limit = shared_bytes(Target("gpu", compute_capability))
    if meta.shared > limit:
        raise NotImplementedError(f"{kernel.__name__} needs {meta.shared} bytes of shared memory; there are {limit}")
    return Compiled(meta.name, found.asm["ptx"], meta.shared, 32 * num_warps)


def _backend_config(compiled: Compiled, grid: tuple[int, ...]) -> str:
    """What XLA's custom call for PTX reads: an MLIR attribute."""
    sizes = dict(zip(("grid_x", "grid_y", "grid_z"), (*grid, 1, 1), strict=False))
    sizes |= {"block_x": compiled.num_threads, "block_y": 1, "block_z": 1, "shared_mem_bytes": compiled.shared_bytes}
    text = {"name": compiled.name, "kernel_type": "ptx", "kernel_data": compiled.ptx}
    fields = [f"{key} = {json.dumps(value)}" for key, value in text.items()]
    return "{" + ", ".join([*fields, *(f"{key} = {value} : i32" for key, value in sizes.items())]) + "}"


def check_dtypes(*arrays: jax.Array | jax.Ref) -> None:
    """NotImplementedError unless all hold numbers of the same 16 bits. The interpreter knows float32 alone."""
    known = ("float32",) if INTERPRETING else ("bfloat16", "float16")
    found = {jnp.dtype(array.dtype).name for array in arrays}
    if len(found) > 1 or found.isdisjoint(known):
        raise NotImplementedError(f"dtypes {sorted(found)}; it takes one of {', '.join(known)}")


def _interpret(kernel, arrays, num_in_place, outputs, grid, constants) -> list[jax.Array]:
    values = [np.array(array) for array in arrays]
    # NaN, or the greatest integer: what a kernel does not write must not look like a result.
    results = [
        np.full(o.shape, np.nan if jnp.issubdtype(o.dtype, jnp.floating) else jnp.iinfo(o.dtype).max, o.dtype)
        for o in outputs
    ]
    kernel[grid](*map(_Tensor, [*values, *results]), **constants)
    return [jnp.asarray(a) for a in [*results, *values[len(values) - num_in_place :]]]


class _Dtype:
    """What Triton's interpreter wants of a torch.dtype: its name, and one object for each."""

    def __init__(self, name: str):
        self._name = name

    def __str__(self) -> str:
        return f"torch.{self._name}"

    __repr__ = __str__


_DTYPES = {name: _Dtype(name) for name in ("float32", "int32", "int64", "uint32", "int8", "uint8", "bool")}


class _Storage:
    def __init__(self, array: np.ndarray):
        self.array = array

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def cpu(self) -> _Storage:
        return self

    def copy_(self, other: _Storage) -> None:
        assert other.array is self.array, "the interpreter works on the array itself"


class _Tensor:
    """What Triton's interpreter wants of a torch.Tensor, around a NumPy array that it changes in place."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype, self.shape = array, _DTYPES[array.dtype.name], array.shape

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> _Storage:
        return _Storage(self.array)

    def new_empty(self, *_: Any, **__: Any) -> _Tensor:
        return _Tensor(self.array)

    def set_(self, *_: Any) -> _Tensor:
        return self

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.shape

    def stride(self, *_: Any) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def element_size(self) -> int:
        return self.array.itemsize
