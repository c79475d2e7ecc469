"""The engine in a process of its own, so that HTTP and text never hold up a step, and the channel to it."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NoReturn

import msgspec

from jaxinfer.engine.engine import Engine
from jaxinfer.types import (
    EngineDead,
    EngineInfo,
    EngineStats,
    FinishReason,
    InvalidRequest,
    QueueFull,
    Request,
    TokenEvent,
)

CLOSE_TIMEOUT_S = 10.0
"""The engine's process may take this long to end before it is killed."""
STATS_TIMEOUT_S = 10.0
"""A step may take this long before a question about the engine goes unanswered."""
RESEND_S = 0.02
"""How soon what an engine that stands still did not take is offered again."""


class Submit(msgspec.Struct, tag=True):
    request: Request


class Abort(msgspec.Struct, tag=True):
    request_id: str


class GetStats(msgspec.Struct, tag=True):
    pass


class Ready(msgspec.Struct, tag=True):
    info: EngineInfo


class Events(msgspec.Struct, tag=True):
    events: list[TokenEvent]


class Stats(msgspec.Struct, tag=True):
    stats: EngineStats


class Failed(msgspec.Struct, tag=True):
    reason: str


ToEngine = Submit | Abort | GetStats
FromEngine = Ready | Events | Stats | Failed
Connection = multiprocessing.connection.Connection
encode = msgspec.msgpack.encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def engine_main(fd: int, build: Callable[[], Engine], refusals: tuple[type[Exception], ...] = ()) -> None:
    """The engine's process: builds it, then steps while there is work, until the channel on socket `fd` closes.

    refusals: errors of `build` that the user can put right: their message is the whole reason, without a traceback.
    """
    # The front end decides when to stop, and the channel's end says so. A terminal and a service manager send their
    # signals to every process of a server: ended by one, the engine would cut short the streams that are to finish.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = Connection(fd)
    inbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
    built = threading.Event()
    threading.Thread(target=_receive, args=(connection, inbox, built), daemon=True).start()
    try:
        engine = build()
    except refusals as error:
        _end_with(connection, str(error))
    except Exception as error:
        traceback.print_exc()
        _end_with(connection, f"{type(error).__name__}: {error}")
    built.set()
    try:
        connection.send_bytes(encode(Ready(engine.info)))
        _step_loop(connection, inbox, engine)
    except (BrokenPipeError, ConnectionResetError):
        pass
    except Exception as error:
        traceback.print_exc()
        _end_with(connection, f"{type(error).__name__}: {error}")
    os._exit(0)  # at once: a step that still runs would abort the interpreter at its own end


def _receive(connection: Connection, inbox: queue.SimpleQueue[ToEngine | None], built: threading.Event) -> None:
    """Fills the inbox, with None at the end of the channel."""
    try:
        while True:
            inbox.put(decode_to_engine(connection.recv_bytes()))
    except (EOFError, OSError):
        if not built.is_set():
            os._exit(1)  # nobody waits for this engine, and building it would hold the device for minutes
        inbox.put(None)


def _end_with(connection: Connection, reason: str) -> NoReturn:
    with contextlib.suppress(OSError):
        connection.send_bytes(encode(Failed(reason)))
    sys.stderr.flush()
    os._exit(1)  # at once, as in `engine_main`


def _step_loop(connection: Connection, inbox: queue.SimpleQueue[ToEngine | None], engine: Engine) -> None:
    while True:
        while not (engine.has_work and inbox.empty()):
            message = inbox.get()
            if message is None:
                return
            if reply := _handle(engine, message):
                connection.send_bytes(encode(reply))
        if events := engine.step():
            connection.send_bytes(encode(Events(events)))


def _handle(engine: Engine, message: ToEngine) -> FromEngine | None:
    match message:
        case Submit(request):
            try:
                engine.submit(request)
            except (QueueFull, ValueError) as error:
                refused = isinstance(error, QueueFull)
                reason = FinishReason.ERROR
                return Events(
                    [TokenEvent(request_id=request.request_id, finish_reason=reason, error=str(error), refused=refused)]
                )
        case Abort(request_id):
            if event := engine.abort(request_id):
                return Events([event])
        case GetStats():
            return Stats(engine.stats())
    return None


class _Outbox:
    """The front end's way into the channel. Never waits: an engine that stands still must not stop the event loop."""

    def __init__(self, connection: Connection):
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._unsent = bytearray()

    def put(self, message: ToEngine) -> bool:
        """Sends what the channel takes at once, and keeps the rest; as `flush`."""
        data = encode(message)
        self._unsent += struct.pack("!i", len(data)) + data  # as Connection.recv_bytes reads it
        return self.flush()

    def flush(self) -> bool:
        """Sends what was kept; whether all is sent. OSError if the engine's process is gone."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Ends the channel in this direction, upon which the engine ends. What was kept is dropped."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self._socket.close()


class EngineProcess:
    """The front end's side: an EngineHandle. Made in any thread, then used from one event loop."""

    def __init__(self, command: Sequence[str]):
        """Starts `command` and waits until it is ready: a program that calls `engine_main` with its last argument.

        A program of its own, because multiprocessing would run the caller's script again. EngineDead if it fails.
        """
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            fd = theirs.fileno()
            self._process = subprocess.Popen([*command, str(fd)], pass_fds=[fd], stdin=subprocess.DEVNULL)
        self._outbox = _Outbox(self._connection)
        self._resend: asyncio.TimerHandle | None = None
        self._failure: str | None = None
        self._closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, asyncio.Queue[TokenEvent | None]] = {}
        self._asked: collections.deque[asyncio.Future[EngineStats]] = collections.deque()
        try:
            first = self._receive()
        except BaseException:  # an interrupt while it loads must not leave it behind
            self._process.kill()
            self._outbox.close()
            raise
        if not isinstance(first, Ready):
            self.close()
            raise EngineDead(self._failure or "the engine's process sent no readiness")
        self._info = first.info
        self._reader = threading.Thread(target=self._read, name="jaxinfer-engine-reader", daemon=True)
        self._reader.start()

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def failure(self) -> str | None:
        return self._failure

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    async def generate(self, request: Request) -> AsyncIterator[TokenEvent]:
        """Runs a request; see EngineHandle."""
        if request.request_id in self._streams:
            raise InvalidRequest(
                f"a request with id {request.request_id!r} is unfinished; ids must differ", param="request_id"
            )
        self._loop = asyncio.get_running_loop()
        stream = self._streams[request.request_id] = asyncio.Queue()
        finished = False
        try:
            self._send(Submit(request))
            while not finished:
                event = await stream.get()
                if event is None:
                    raise EngineDead(self._failure or "the engine stopped")
                if event.refused:
                    raise QueueFull(event.error)
                finished = event.finish_reason is not None
                yield event
        finally:
            del self._streams[request.request_id]
            if not finished and self._failure is None:
                self._send(Abort(request.request_id))

    async def stats(self) -> EngineStats:
        """A snapshot of the engine. EngineDead if it has stopped; TimeoutError if a step takes too long."""
        self._loop = asyncio.get_running_loop()
        answer = self._loop.create_future()
        self._asked.append(answer)
        self._send(GetStats())
        return await asyncio.wait_for(answer, STATS_TIMEOUT_S)

    def close(self) -> None:
        """Ends the engine's process. Requests still running raise EngineDead."""
        self._closing = True
        self._outbox.close()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, message: ToEngine) -> None:
        if self._failure is not None:
            raise EngineDead(self._failure)
        try:
            sent = self._outbox.put(message)
        except OSError as error:
            raise EngineDead(self._failure or f"the engine's process is gone: {error}") from error
        if not sent and self._resend is None and self._loop is not None:
            self._resend = self._loop.call_later(RESEND_S, self._send_rest)

    def _send_rest(self) -> None:
        self._resend = None
        with contextlib.suppress(OSError):  # the reader learns of it too, and ends the streams
            if not self._outbox.flush() and self._loop is not None:
                self._resend = self._loop.call_later(RESEND_S, self._send_rest)

    def _receive(self) -> FromEngine | None:
        """The next message; None, with `failure` set, when there will be no more."""
        try:
            message = decode_from_engine(self._connection.recv_bytes())
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_TIMEOUT_S)
            stopped = "the engine was shut down" if self._closing else "the engine's process ended"
            self._failure = self._failure or f"{stopped} (exit code {self._process.returncode})"
            return None
        if isinstance(message, Failed):
            self._failure = message.reason
            return None
        return message

    def _read(self) -> None:
        while message := self._receive():
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._deliver, message)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end_streams)

    def _deliver(self, message: FromEngine) -> None:
        match message:
            case Events(events):
                for event in events:
                    if stream := self._streams.get(event.request_id):
                        stream.put_nowait(event)
            case Stats(stats):
                answer = self._asked.popleft()
                if not answer.done():
                    answer.set_result(stats)

    def _end_streams(self) -> None:
        for stream in self._streams.values():
            stream.put_nowait(None)
        while self._asked:
            answer = self._asked.popleft()
            if not answer.done():
                answer.set_exception(EngineDead(self._failure or "the engine stopped"))
