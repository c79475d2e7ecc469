"""What the host sends to programs through buffers that it writes to again and again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.runner import pinned

SIZE = 48
TURNS = 5 * pinned.NUM_BUFFERS


@pytest.fixture(scope="module")
def device():
    """An array's shape on one device."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("x",)), PartitionSpec())
    return jax.ShapeDtypeStruct((SIZE,), jnp.int32, sharding=sharding)


@pytest.fixture(scope="module")
def program(device):
    """(kept, buffer) -> kept with the buffer's numbers, the buffer."""
    host = pinned.on_host(device)

    def run(kept, buffer):
        return jax.lax.dynamic_update_slice_in_dim(kept, jax.device_put(buffer, device.sharding), 0, 0), buffer

    lowered = jax.jit(run, donate_argnums=(0, 1), out_shardings=(device.sharding, host.sharding)).lower(device, host)
    return lowered.compile()


@pytest.fixture
def kept(device):
    return jnp.zeros(device.shape, device.dtype, device=device.sharding)


def numbers():
    return np.random.default_rng().integers(-(2**31), 2**31, (TURNS, SIZE)).astype(np.int32)


def test_every_call_gets_its_own_numbers_though_none_is_waited_for(program, device, kept):
    send, found, sent = pinned.Sender(program, pinned.on_host(device)), [], numbers()
    for data in sent:
        scratch = data.copy()
        kept = send(kept, scratch)
        found.append(jnp.where(True, kept, 0))
        scratch[:] = 0  # theirs to write to once the call returns
    np.testing.assert_array_equal(np.stack(found), sent)


def test_buffers_stay_where_they_are(program, device, kept):
    send, places = pinned.Sender(program, pinned.on_host(device)), []
    for data in numbers():
        kept = send(kept, data)
        places.append([buffer.unsafe_buffer_pointer() for buffer in send._buffers])
    later = places[pinned.NUM_BUFFERS :]  # what NumPy made is no CPU's to keep
    assert later == [later[0]] * len(later)
    assert len(set(later[0])) == pinned.NUM_BUFFERS


@pytest.mark.parametrize("takes_buffer", [False, True], ids=["before it takes the buffer", "after it took the buffer"])
def test_a_call_that_fails_leaves_those_after_it_whole(program, device, kept, takes_buffer):
    failing = [False]

    def sometimes(kept, buffer):
        if failing[0]:
            if takes_buffer:
                buffer.delete()
            raise RuntimeError("lost")
        return program(kept, buffer)

    send, sent = pinned.Sender(sometimes, pinned.on_host(device)), numbers()
    for turn, data in enumerate(sent):
        failing[0] = turn % 3 == 0
        if failing[0]:
            with pytest.raises(RuntimeError, match="lost"):
                send(kept, data)
        else:
            kept = send(kept, data)
            np.testing.assert_array_equal(np.asarray(kept), data)


def test_no_call_waits_for_one_before_it_and_buffers_that_are_free_are_taken_again(device):
    class Running:
        def __init__(self, buffer):
            self.buffer, self.ended = buffer, False

        def is_deleted(self):
            return False

        def is_ready(self):
            return self.ended

        def block_until_ready(self):
            assert self.ended
            return self.buffer

    calls, sent = [], numbers()

    def program(kept, buffer):
        calls.append(Running(buffer))
        return kept, calls[-1]

    send = pinned.Sender(program, pinned.on_host(device))
    for data in sent:
        send(0, data)
    for call, data in zip(calls, sent, strict=True):
        np.testing.assert_array_equal(np.asarray(call.buffer), data)
        call.ended = True
    for data in sent:
        send(0, data)
    assert [call.buffer for call in calls[TURNS:]] == [call.buffer for call in calls[:TURNS]]


def test_numbers_of_another_shape_are_refused(program, device, kept):
    send = pinned.Sender(program, pinned.on_host(device))
    with pytest.raises(ValueError, match="broadcast"):
        send(kept, np.zeros(SIZE + 1, np.int32))


@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
def test_only_a_single_device_has_it():
    assert pinned.has_pinned(Mesh(np.array(jax.devices()[:1]), ("x",)))
    assert not pinned.has_pinned(Mesh(np.array(jax.devices()[:2]), ("x",)))
