"""Prints how quickly the first GPU copies from and to pinned memory, as JSON, in GB/s (1e9 bytes).

    python scripts/pinned_bandwidth.py

The bare runtime through ctypes: cudaHostAlloc and cudaMemcpyAsync of 64 MiB. Run as a process of its own, it takes no
part in anyone's device memory but for these 64 MiB and a context.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import glob
import importlib.util
import json
import sys
import time
from collections.abc import Iterator

NUM_BYTES = 2**26
NUM_COPIES = 32
TO_DEVICE, TO_HOST = 1, 2  # cudaMemcpyKind


def main() -> int:
    found = load()
    if found is None:
        print("no libcudart is installed (NVIDIA's wheels have one: nvidia-cuda-runtime)", file=sys.stderr)
        return 1
    try:
        print(json.dumps(measure(found)))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def candidates() -> Iterator[str]:
    """Paths of the CUDA runtime: of NVIDIA's wheels, the newest first, then the system's."""
    spec = importlib.util.find_spec("nvidia")
    for place in (spec and spec.submodule_search_locations) or ():
        yield from sorted(glob.glob(f"{place}/**/libcudart.so*", recursive=True), reverse=True)
    if (name := ctypes.util.find_library("cudart")) is not None:
        yield name
    yield from sorted(glob.glob("/usr/local/cuda*/lib64/libcudart.so*"), reverse=True)


def load() -> ctypes.CDLL | None:
    """The first runtime that can be loaded."""
    for path in candidates():
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


def measure(cuda: ctypes.CDLL) -> dict[str, float]:
    """Best of three rounds each way. RuntimeError where a call fails."""
    cuda.cudaGetErrorString.restype = ctypes.c_char_p

    def call(name: str, *args: object) -> None:
        if status := getattr(cuda, name)(*args):
            raise RuntimeError(f"{name} failed: {cuda.cudaGetErrorString(status).decode()}")

    host, device, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    size = ctypes.c_size_t(NUM_BYTES)
    call("cudaHostAlloc", ctypes.byref(host), size, 0)
    call("cudaMalloc", ctypes.byref(device), size)
    call("cudaStreamCreate", ctypes.byref(stream))
    ctypes.memset(host, 1, NUM_BYTES)
    result = {}
    ways = {"to_device_gb_s": (device, host, TO_DEVICE), "to_host_gb_s": (host, device, TO_HOST)}
    for name, (to, source, kind) in ways.items():
        best_s = float("inf")
        for _ in range(4):  # the first warms up
            start_s = time.perf_counter()
            for _ in range(NUM_COPIES):
                call("cudaMemcpyAsync", to, source, size, kind, stream)
            call("cudaStreamSynchronize", stream)
            best_s = min(best_s, time.perf_counter() - start_s)
        result[name] = round(NUM_COPIES * NUM_BYTES / best_s / 1e9, 2)
    call("cudaFree", device)
    call("cudaFreeHost", host)
    return result


if __name__ == "__main__":
    sys.exit(main())
