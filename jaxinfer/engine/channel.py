"""The channel between the engine's process and a front end: what is said on it, and how it is cut into messages."""

from __future__ import annotations

import contextlib
import socket
import struct

import msgspec

from jaxinfer.types import EngineInfo, EngineStats, Request, TokenEvent

RECEIVE_BYTES = 2**18
"""Most that one call reads. A step of 256 rows has about 2 kB."""
RESEND_S = 0.02
"""How soon what the other side did not take is offered again."""
_LENGTH = struct.Struct("!I")


class Submit(msgspec.Struct, tag=True):
    """Runs a request, which `number` stands for on this channel from now on: shorter to send and to look up."""

    number: int
    request: Request


class Abort(msgspec.Struct, tag=True):
    number: int


class GetStats(msgspec.Struct, tag=True):
    pass


class Step(msgspec.Struct, tag=True):
    """What one step did for the requests of one front end.

    Nearly every row of a step is one more token and nothing else. Those travel as two lists of integers: 256 rows are
    encoded in 2 microseconds and decoded in 12, which as events takes 13 and 54.
    """

    numbers: list[int]
    tokens: list[int]
    """One for each of `numbers`."""
    events: list[tuple[int, TokenEvent]]
    """All that is more than one token, by number. The request's id is left out."""


class Stats(msgspec.Struct, tag=True):
    stats: EngineStats


class Ready(msgspec.Struct, tag=True):
    """To the process that started the engine, as is Failed: see EngineProcess."""

    info: EngineInfo


class Failed(msgspec.Struct, tag=True):
    reason: str


ToEngine = Submit | Abort | GetStats
FromEngine = Step | Stats
ToOwner = Ready | Failed
encode = msgspec.msgpack.encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
decode_to_owner = msgspec.msgpack.Decoder(ToOwner).decode


class Channel:
    """One end of the channel. Never waits: neither an engine nor a front end that stands still may stop the other.

    What the other side does not take is kept, and offered again at the next call. That is bounded by what the requests
    in progress can still produce. One thread may send while another receives.
    """

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self._socket = sock
        self._unsent = bytearray()
        self._unread = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def put(self, message: msgspec.Struct) -> bool:
        """Sends what the other side takes at once, and keeps the rest; as `flush`."""
        data = encode(message)
        self._unsent += _LENGTH.pack(len(data))
        self._unsent += data
        return self.flush()

    def flush(self) -> bool:
        """Sends what was kept; whether all is sent. OSError if the other side is gone."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return False
        return True

    def receive(self) -> list[bytes]:
        """The messages that have come. EOFError when there will be no more."""
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        self._unread += data
        messages: list[bytes] = []
        start, end = 0, len(self._unread)
        while end - start >= _LENGTH.size:
            stop = start + _LENGTH.size + _LENGTH.unpack_from(self._unread, start)[0]
            if stop > end:
                break
            messages.append(bytes(self._unread[start + _LENGTH.size : stop]))
            start = stop
        del self._unread[:start]
        return messages

    def end(self) -> None:
        """Ends the channel in this direction: the other side has EOFError. What was kept is dropped."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Ends the channel in both directions."""
        self._socket.close()
