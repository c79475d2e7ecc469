"""What is put on a channel comes out at its other end, whatever its size."""

import socket
import threading
from array import array

import pytest

from jaxinfer.engine.channel import RECEIVE_BYTES, Channel, Failed, Submit, decode_to_engine, decode_to_owner, encode
from jaxinfer.types import Request


@pytest.fixture
def ends():
    channels = [Channel(sock) for sock in socket.socketpair()]
    yield channels
    for channel in channels:
        channel.close()


@pytest.mark.parametrize("kind", [list, tuple, lambda ids: array("I", ids), lambda ids: array("Q", ids)])
def test_a_prompt_comes_out_as_the_same_ids(kind):
    ids = [0, 7, 151_935, 2**32 - 1]
    sent = Request(request_id="r", prompt_ids=kind(ids), max_tokens=3, seed=2**64 - 1, logit_bias={5: 1.0})
    message = decode_to_engine(encode(Submit.of(9, sent)))
    assert isinstance(message, Submit)
    message.unpack()
    assert message.number == 9 and list(message.request.prompt_ids) == ids
    assert (message.request.seed, message.request.logit_bias) == (sent.seed, sent.logit_bias)


def test_messages_of_any_size_come_out_whole_and_in_order(ends):
    sender, receiver = ends
    sizes = [1, 3 * RECEIVE_BYTES, 0, RECEIVE_BYTES, 5, 20 * RECEIVE_BYTES, 2, RECEIVE_BYTES - 1]
    reasons = [str(i) + "x" * size for i, size in enumerate(sizes)]
    received = []

    def receive():
        while len(received) < len(reasons):
            received.extend(decode_to_owner(data).reason for data in receiver.receive())

    sent = [sender.put(Failed(reason)) for reason in reasons]
    assert sent[0] and not sent[-1]  # what the socket does not hold is kept: nobody has read yet
    reading = threading.Thread(target=receive)
    reading.start()
    while not sender.flush():
        pass
    reading.join()
    assert received == reasons


def test_what_has_come_of_a_long_message_is_not_copied_with_every_piece(ends):
    sender, receiver = ends
    sender.put(Failed("x" * (40 * RECEIVE_BYTES)))
    copied = []

    class Unread(bytearray):
        def __bytes__(self):
            copied.append(len(self))
            return bytes(memoryview(self))

    receiver._unread = Unread()
    while not (messages := receiver.receive()):
        sender.flush()
    assert len(copied) == 1 and len(messages[0]) > 40 * RECEIVE_BYTES
