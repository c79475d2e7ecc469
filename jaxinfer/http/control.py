"""What the supervisor and a front-end process tell each other, over a socket that keeps messages whole."""

from __future__ import annotations

import socket
from typing import NamedTuple

import msgspec

from jaxinfer.config import ServerConfig
from jaxinfer.types import EngineInfo

MAX_MESSAGE_BYTES = 2**16
MAX_REASON_CHARS = 2000
"""Longer reasons are cut: a message must fit."""


class Setup(msgspec.Struct):
    """All that a front end needs to know when it starts, in a file in memory: a tokenizer has megabytes."""

    server: ServerConfig
    tokenizer_json: str | None
    tokenizer_config: dict[str, object]
    created_s: int
    grace_s: float


class EngineReady(msgspec.Struct, tag=True):
    """To the front end, before anything else: the engine takes requests from now on."""

    info: EngineInfo


class Connection(msgspec.Struct, tag=True):
    """To the front end, with a descriptor: a client to serve."""


class StopWish(msgspec.Struct, tag=True):
    """To the front end: as a signal would say it. The second one means: now."""


class EngineEnded(msgspec.Struct, tag=True):
    """To the front end, which sees the end of its channel but not why."""

    reason: str


class Started(msgspec.Struct, tag=True):
    """To the supervisor: connections can be taken."""


class Closed(msgspec.Struct, tag=True):
    """To the supervisor: how many connections have ended since the start."""

    total: int


Message = EngineReady | Connection | StopWish | EngineEnded | Started | Closed
_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder(Message).decode


class Received(NamedTuple):
    message: Message
    fd: int | None


class Control:
    """One end. Never waits."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self._socket = sock

    @staticmethod
    def make_pair() -> tuple[Control, socket.socket]:
        """An end to keep, and one to hand to another process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return Control(ours), theirs

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message, fd: int | None = None) -> bool:
        """Whether the other side will get it: not if it is gone, or reads nothing."""
        try:
            socket.send_fds(self._socket, [_encode(message)], [] if fd is None else [fd])
        except OSError:
            return False
        return True

    def receive(self) -> Received | None:
        """The next message; None if there is none yet. EOFError if the other side is gone."""
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, MAX_MESSAGE_BYTES, 1)
        except BlockingIOError:
            return None
        except OSError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        return Received(_decode(data), fds[0] if fds else None)

    def close(self) -> None:
        self._socket.close()
