"""Inboxes of devices: where they are, and what states of them begin with."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxinfer.runner import peers
from pallas_kernels.collectives import api


@pytest.fixture
def mesh(monkeypatch):
    if jax.device_count() < 4:
        pytest.skip("4 devices are needed")
    monkeypatch.setattr(api, "REGION", 16)  # inboxes of kilobytes
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("expert", "tensor"))


def test_every_device_knows_its_number_and_where_all_inboxes_are(mesh):
    inboxes = peers.Inboxes(mesh)
    state = inboxes.new_state()
    shards = {shard.device: shard.data for shard in inboxes._inboxes.addressable_shards}
    wanted = [shards[device].unsafe_buffer_pointer() for device in mesh.devices.flat]
    for shard in state.inboxes.addressable_shards:
        low, high = np.asarray(shard.data).view(np.uint32).astype(np.uint64).T
        assert list(high << np.uint64(32) | low) == wanted
    numbers = {shard.device: int(shard.data[0]) for shard in state.device.addressable_shards}
    assert [numbers[device] for device in mesh.devices.flat] == [0, 1, 2, 3]


def test_a_state_has_the_shapes_and_shardings_that_programs_are_compiled_for(mesh):
    state, abstract = peers.Inboxes(mesh).new_state(), peers.abstract(mesh)
    for array, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
        assert (array.shape, array.dtype) == (wanted.shape, wanted.dtype)
        assert array.sharding.is_equivalent_to(wanted.sharding, array.ndim)


def test_states_count_from_numbers_that_are_far_apart_and_none_has_given_up(mesh):
    inboxes = peers.Inboxes(mesh)
    firsts = []
    for _ in range(20):
        counts = np.asarray(inboxes.new_state().counts).reshape(4, -1)
        assert (counts[:, -1] == 0).all() and len(set(counts[:, :-1].ravel())) == 1
        firsts.append(int(counts.view(np.uint32)[0, 0]))
    apart = [abs(a - b) for i, a in enumerate(firsts) for b in firsts[:i]]
    assert min(min(d, 2**32 - d) for d in apart) > 2**27  # hours of collectives


def test_an_inbox_has_room_for_every_place_of_every_device(mesh):
    devices = 2 + 4 + 2  # along each axis, and both
    assert peers.inbox_bytes(mesh) == 8 * api.SLOTS * devices * api.PROGRAMS * api.REGION


class Gpu:
    """What `reachable` asks of a device."""

    platform = "gpu"

    def __init__(self, number):
        self.local_hardware_id = number


@pytest.fixture
def gpus(monkeypatch):
    """A mesh of three GPUs of this process, whose driver lets all pairs write but those in `apart`."""
    devices, apart = [Gpu(number) for number in range(3)], set()
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    monkeypatch.setattr(peers, "_can_access", lambda gpu, other: (gpu, other) not in apart)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_ALLOCATOR", raising=False)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    return SimpleNamespace(mesh=SimpleNamespace(devices=np.array(devices, object)), apart=apart)


def test_gpus_that_all_have_access_write_to_each_other(gpus):
    assert peers.reachable(gpus.mesh)
    gpus.apart.add((2, 0))
    assert not peers.reachable(gpus.mesh)


def test_gpus_of_another_process_are_not_written_to(gpus, monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: list(gpus.mesh.devices[:2]))
    assert not peers.reachable(gpus.mesh)


@pytest.mark.parametrize("allocator", ["cuda_async", "vmm", "address"])
def test_memory_that_was_not_taken_by_cuda_malloc_is_not_written_to(gpus, monkeypatch, allocator):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", allocator)
    assert not peers.reachable(gpus.mesh)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "BFC")
    assert peers.reachable(gpus.mesh)


def test_a_flag_that_has_xla_take_another_allocator_is_seen(gpus, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_command_buffer_update_mode=SKIP_PROFILED")
    assert not peers.reachable(gpus.mesh)


def test_devices_of_a_cpu_and_single_ones_do_not_write_to_each_other(mesh):
    assert not peers.reachable(mesh)
    assert not peers.reachable(Mesh(np.array(jax.devices()[:1]), ("tensor",)))
