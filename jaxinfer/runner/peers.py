"""Memory of each device that the others write to, for collectives: see `pallas_kernels.collectives`."""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import os

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.sharding import rules
from pallas_kernels.collectives import api

GENERATION = 0x9E3779B1
"""Between the first numbers of two states, modulo 2**32: words of the one are never taken for the other's."""

ALLOCATORS = ("default", "bfc", "platform")
"""Of XLA (XLA_PYTHON_CLIENT_ALLOCATOR): those that take memory by cudaMalloc, which other GPUs may write to once they
have access. Memory of the others would need to be shared piece by piece, and a write to it ends the process."""
VMM_FLAG = "xla_gpu_command_buffer_update_mode=SKIP"
"""In XLA_FLAGS it has XLA choose another allocator."""

log = logging.getLogger(__name__)


@flax.struct.dataclass
class PeerState:
    """What a step needs to write to others: part of the state. D devices, in the mesh's order."""

    inboxes: jax.Array  # [D, 2] int32: address of each device's inbox, low and high half; on every device
    device: jax.Array  # [D] int32: number of each device, on that
    counts: jax.Array  # [D * num_counts] int32: of each device, on that: see `api.Peers`

    def open(self, mesh: rules.AnyMesh) -> api.Peers:
        """What kernels take, inside the shard_map of the mesh: `counts` as a Ref."""
        return api.Peers(self.inboxes, self.device, jax.new_ref(self.counts), _axes(mesh))

    def close(self, peers: api.Peers) -> PeerState:
        """After the kernels that had `peers`."""
        return self.replace(counts=jax.freeze(peers.counts))


def abstract(mesh: rules.AnyMesh) -> PeerState:
    """Shapes, dtypes and shardings."""
    size, own = mesh.size, NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    num_counts = api.num_counts(_axes(mesh))
    return PeerState(
        inboxes=jax.ShapeDtypeStruct((size, 2), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec())),
        device=jax.ShapeDtypeStruct((size,), jnp.int32, sharding=own),
        counts=jax.ShapeDtypeStruct((size * num_counts,), jnp.int32, sharding=own),
    )


def inbox_bytes(mesh: rules.AnyMesh) -> int:
    """Of each device."""
    return 8 * api.inbox_words(_axes(mesh))


def _axes(mesh: rules.AnyMesh) -> tuple[tuple[str, int], ...]:
    return tuple(mesh.shape.items())


class Inboxes:
    """The inboxes of all devices, which stay where they are as long as this lives."""

    def __init__(self, mesh: Mesh):
        self._mesh, self._num_states = mesh, 0
        shapes = abstract(mesh)
        words = inbox_bytes(mesh) // 4
        self._inboxes = jax.block_until_ready(
            jnp.zeros((mesh.size, words), jnp.int32, device=NamedSharding(mesh, PartitionSpec(mesh.axis_names)))
        )
        addresses = np.zeros(mesh.size, np.uint64)
        for shard in self._inboxes.addressable_shards:
            addresses[shard.index[0].start or 0] = shard.data.unsafe_buffer_pointer()
        self._addresses = addresses.view(np.int32).reshape(shapes.inboxes.shape)  # little-endian: the low half first

    def new_state(self) -> PeerState:
        """Of an engine whose earlier states, if there were any, may have left words in the inboxes."""
        first = np.uint32(self._num_states * GENERATION % 2**32).view(np.int32)
        self._num_states += 1
        shapes = abstract(self._mesh)
        counts = np.full((self._mesh.size, api.num_counts(_axes(self._mesh))), first, np.int32)
        counts[:, -1] = 0
        return PeerState(
            inboxes=jax.device_put(self._addresses, shapes.inboxes.sharding),
            device=jax.device_put(np.arange(self._mesh.size, dtype=np.int32), shapes.device.sharding),
            counts=jax.device_put(counts.reshape(-1), shapes.counts.sharding),
        )


def reachable(mesh: Mesh) -> bool:
    """Whether each device of a mesh of several can write into the memory of each other: GPUs of this process alone."""
    devices = list(mesh.devices.flat)
    if len(devices) == 1 or devices[0].platform != "gpu" or not set(devices) <= set(jax.local_devices()):
        return False
    allocator = os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", ALLOCATORS[0]).lower()
    if allocator not in ALLOCATORS or VMM_FLAG in os.environ.get("XLA_FLAGS", ""):
        log.warning("collectives go through NCCL: of XLA's allocators, GPUs write into memory of %s alone", ALLOCATORS)
        return False
    numbers = [device.local_hardware_id for device in devices]
    apart = [pair for pair in itertools.permutations(numbers, 2) if not _can_access(*pair)]
    if apart:
        log.warning("collectives go through NCCL: GPU %d cannot write into the memory of GPU %d", *apart[0])
    return not apart


@functools.cache
def _can_access(gpu: int, other: int) -> bool:
    """What CUDA's driver says. XLA lets GPUs access each other where it is so."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    found = ctypes.c_int()
    return driver.cuDeviceCanAccessPeer(ctypes.byref(found), gpu, other) == 0 and found.value == 1
