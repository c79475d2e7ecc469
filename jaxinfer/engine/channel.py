"""The channel between the engine's process and a front end: what is said on it, and how it is cut into messages."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import struct
from array import array
from typing import Literal, Self

import msgspec

from jaxinfer.types import (
    EngineInfo,
    EngineStats,
    InvalidRequest,
    Request,
    SessionAction,
    SessionInfo,
    TokenEvent,
    UnknownSession,
)

RECEIVE_BYTES = 2**18
"""Most that one call reads. A step of 256 rows has about 2 kB, a prompt 4 bytes for each token."""
SEND_BUFFER_BYTES = 2**20
"""What the system is asked to take before it is read; it may have a lower limit."""
RESEND_S = 0.02
"""How soon the engine offers again what a front end did not take."""
_LENGTH = struct.Struct("!I")


class Submit(msgspec.Struct, tag=True):
    """Runs a request, which `number` stands for on this channel from now on: shorter to send and to look up.

    Its prompt travels as 32-bit integers in the order of the machine that both ends run on. As numbers of msgpack
    32,768 ids take 0.2 ms to write and 0.9 ms to read; so, 0.01 ms each.
    """

    number: int
    request: Request  # without its prompt while it travels: see `_left_out`
    prompt: bytes

    @classmethod
    def of(cls, number: int, request: Request) -> Self:
        ids = request.prompt_ids
        if not isinstance(ids, array) or ids.typecode != "I":
            ids = array("I", ids)
            request = dataclasses.replace(request, prompt_ids=ids)
        return cls(number, request, ids.tobytes())

    def unpack(self) -> None:
        """Gives the request its prompt, as an array("I"). Not a copy of it, which takes 30 us: nobody else has it."""
        object.__setattr__(self.request, "prompt_ids", array("I", self.prompt))
        self.prompt = b""


class Abort(msgspec.Struct, tag=True):
    number: int


class GetStats(msgspec.Struct, tag=True):
    pass


class SessionCommand(msgspec.Struct, tag=True):
    """Does something with a session; `number` is that of the reply, which may be many steps later."""

    number: int
    action: SessionAction
    session_id: str


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


class SessionError(msgspec.Struct):
    """Why a command failed, so that whoever gave it has the exception that the engine raised."""

    kind: Literal["invalid_request", "unknown_session", "failed"]
    message: str
    param: str | None = None
    code: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Self:
        match error:
            case InvalidRequest():
                return cls("invalid_request", str(error), error.param, error.code)
            case UnknownSession():
                return cls("unknown_session", str(error))
            case RuntimeError():
                return cls("failed", str(error))
        return cls("failed", f"{type(error).__name__}: {error}")

    def exception(self) -> Exception:
        """InvalidRequest, UnknownSession, or RuntimeError for all else."""
        match self.kind:
            case "invalid_request":
                return InvalidRequest(self.message, param=self.param, code=self.code)
            case "unknown_session":
                return UnknownSession(self.message)
        return RuntimeError(self.message)


class SessionReply(msgspec.Struct, tag=True):
    """To the front end that gave the command of this number: one of the two."""

    number: int
    info: SessionInfo | None = None
    error: SessionError | None = None


class Ready(msgspec.Struct, tag=True):
    """To the process that started the engine, as is Failed: see EngineProcess."""

    info: EngineInfo


class Following(msgspec.Struct, tag=True):
    """The same of a process without requests of its own: see `follower.py`."""


class Failed(msgspec.Struct, tag=True):
    reason: str


ToEngine = Submit | Abort | GetStats | SessionCommand
FromEngine = Step | Stats | SessionReply
ToOwner = Ready | Following | Failed


def _left_out(value: object) -> tuple[()]:
    """What stands for an array, which has its place elsewhere in the message."""
    if isinstance(value, array):
        return ()
    raise NotImplementedError(f"{type(value).__name__} is no part of a message")


encode = msgspec.msgpack.Encoder(enc_hook=_left_out).encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
decode_to_owner = msgspec.msgpack.Decoder(ToOwner).decode


def _has_message(unread: bytearray) -> bool:
    """Whether the first message is there as a whole."""
    return len(unread) >= _LENGTH.size and len(unread) >= _LENGTH.size + _LENGTH.unpack_from(unread)[0]


class Channel:
    """One end of the channel. Never waits: neither an engine nor a front end that stands still may stop the other.

    What the other side does not take is kept, and offered again at the next call. That is bounded by what the requests
    in progress can still produce. One thread may send while another receives.
    """

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._socket = sock
        self._unsent = bytearray()
        self._unread = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def put(self, message: msgspec.Struct) -> bool:
        """Sends what the other side takes at once, and keeps the rest; as `flush`."""
        data = encode(message)
        length = _LENGTH.pack(len(data))
        if self._unsent:  # what came first goes first
            self._unsent += length + data
            return self.flush()
        try:
            num_sent = self._socket.sendmsg((length, data))
        except BlockingIOError:
            num_sent = 0
        if num_sent == len(length) + len(data):
            return True
        self._unsent += (length + data)[num_sent:]
        return self.flush()

    def flush(self) -> bool:
        """Sends what was kept; whether all is sent. OSError if the other side is gone."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return False
        return True

    def receive(self, most: int | None = None) -> list[bytes]:
        """The messages that have come. EOFError when there will be no more, or where one has more bytes than `most`."""
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        if self._unread:
            self._unread += data  # a piece of a long message, mostly: all of it is copied once it is whole
            data = bytes(self._unread) if _has_message(self._unread) else b""
        messages: list[bytes] = []
        start, end = 0, len(data)
        while end - start >= _LENGTH.size:
            stop = start + _LENGTH.size + _LENGTH.unpack_from(data, start)[0]
            if stop > end:
                break
            messages.append(data[start + _LENGTH.size : stop])
            start = stop
        if data:
            self._unread[:] = data[start:]
        if most is not None and len(self._unread) > most:
            raise EOFError
        return messages

    def end(self) -> None:
        """Ends the channel in this direction: the other side has EOFError. What was kept is dropped."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Ends the channel in both directions."""
        self._socket.close()
