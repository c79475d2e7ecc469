"""A front end's side of the channel: an EngineHandle. Never loads JAX, which a front end has no use for."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import logging
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from jaxinfer.engine.channel import (
    Abort,
    Channel,
    GetStats,
    SessionCommand,
    SessionReply,
    Stats,
    Step,
    Submit,
    ToEngine,
    decode_from_engine,
)
from jaxinfer.types import (
    EngineDead,
    EngineInfo,
    EngineStats,
    EventReceiver,
    InvalidRequest,
    Request,
    SessionAction,
    SessionInfo,
    TokenEvent,
    check_session_id,
)

logger = logging.getLogger(__name__)

STATS_TIMEOUT_S = 10.0
"""A step may take this long before a question about the engine goes unanswered."""
SESSION_TIMEOUT_S = 300.0
"""How long a command for a session may take: a cache of 100 GB goes to a disk of 1 GB/s in 100 s."""
REASON_POLL_S = 0.01
"""How often it is asked why the channel has ended."""
REASON_TIMEOUT_S = 12.0
"""How long: an engine that is closed may take CLOSE_TIMEOUT_S of `process.py` before it is killed."""


@dataclasses.dataclass(slots=True)
class _Stream:
    request_id: str
    receiver: EventReceiver


class _Late(NamedTuple):
    """What is left of a step once its first tokens are pushed."""

    rows: list[tuple[int, int]]  # number of the stream, token
    events: list[tuple[int, TokenEvent]]


class EngineClient:
    """The engine, for one event loop. Made in any thread, then used from that loop alone.

    The loop itself reads the channel: a thread that did would wait up to 5 ms for the interpreter with every step.
    """

    def __init__(self, sock: socket.socket, info: EngineInfo, why_ended: Callable[[], str | None]):
        """why_ended: the reason why the engine stopped; None while it runs, or while nobody knows yet."""
        self.info = info
        self._channel = Channel(sock)
        self._why_ended = why_ended
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sends_rest = False  # whether the loop says when the engine takes more
        self._ended = False
        self._numbers = itertools.count()
        self._streams: dict[int, _Stream] = {}
        self._by_id: dict[str, int] = {}
        self._waiting: set[int] = set()  # streams that have had no event
        self._late: _Late | None = None
        self._asked: collections.deque[asyncio.Future[EngineStats]] = collections.deque()
        self._commands: dict[int, asyncio.Future[SessionInfo]] = {}  # for sessions, by number

    @property
    def failure(self) -> str | None:
        return self._why_ended()

    def submit(self, request: Request, receiver: EventReceiver) -> None:
        """Runs a request; see EngineHandle."""
        if request.request_id in self._by_id:
            raise InvalidRequest(
                f"a request with id {request.request_id!r} is unfinished; ids must differ", param="request_id"
            )
        number = next(self._numbers)
        self._send(Submit.of(number, request))
        self._streams[number] = _Stream(request.request_id, receiver)
        self._by_id[request.request_id] = number
        self._waiting.add(number)

    def cancel(self, request_id: str) -> None:
        """Ends a request without a further event. Does nothing if it has ended."""
        number = self._by_id.pop(request_id, None)
        if number is not None:
            del self._streams[number]
            self._waiting.discard(number)
            with contextlib.suppress(EngineDead):  # then it runs no more
                self._send(Abort(number))

    async def stats(self) -> EngineStats:
        """A snapshot of the engine. EngineDead if it has stopped; TimeoutError if a step takes too long."""
        self._send(GetStats())
        answer = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        return await asyncio.wait_for(answer, STATS_TIMEOUT_S)

    async def session(self, action: SessionAction, session_id: str) -> SessionInfo:
        """Does something with a session; see EngineHandle. TimeoutError after SESSION_TIMEOUT_S."""
        check_session_id(session_id)
        number = next(self._numbers)
        self._send(SessionCommand(number, action, session_id))
        reply = self._commands[number] = asyncio.get_running_loop().create_future()
        try:
            return await asyncio.wait_for(reply, SESSION_TIMEOUT_S)
        finally:
            self._commands.pop(number, None)  # a reply that comes later concerns nobody

    def close(self) -> None:
        """Ends the channel, and what still runs with EngineDead. From any thread."""
        if self._loop is None or self._loop.is_closed():
            self._channel.close()
        else:
            self._loop.call_soon_threadsafe(self._leave, 0.0)

    def _leave(self, reason_timeout_s: float) -> None:
        if not self._ended:
            assert self._loop is not None
            self._loop.remove_reader(self._channel.fileno())
            self._stop_sending()
            self._ended = True
            self._channel.close()
            self._end_streams(time.monotonic() + reason_timeout_s)

    def _send(self, message: ToEngine) -> None:
        if (reason := self.failure) is not None or self._ended:
            raise EngineDead(reason or "the engine's process ended")
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._channel.fileno(), self._read)
        try:
            sent = self._channel.put(message)
        except OSError as error:
            raise EngineDead(self.failure or f"the engine's process is gone: {error}") from error
        if not sent and not self._sends_rest:
            self._sends_rest = True
            self._loop.add_writer(self._channel.fileno(), self._send_rest)

    def _send_rest(self) -> None:
        try:
            sent = self._channel.flush()
        except OSError:  # `_read` learns of it too, and ends the streams
            sent = True
        if sent:
            self._stop_sending()

    def _stop_sending(self) -> None:
        if self._sends_rest and self._loop is not None:
            self._sends_rest = False
            self._loop.remove_writer(self._channel.fileno())

    def _read(self) -> None:
        try:
            for data in self._channel.receive():
                message = decode_from_engine(data)
                if isinstance(message, Step):
                    self._deliver(message)
                else:
                    self._answer(message)
        except EOFError:
            self._leave(REASON_TIMEOUT_S)

    def _deliver(self, step: Step) -> None:
        """Pushes what a step did. First tokens come first, and go out before the others are looked at.

        A row takes 13 microseconds with its write, and the last of 64 would have its first token a millisecond late.
        """
        self._deliver_late()
        rows, waiting = zip(step.numbers, step.tokens, strict=True), self._waiting
        if not waiting:
            self._push_tokens(rows)
            return self._push_events(step.events)
        late, any_first = _Late([], []), False
        for row in rows:
            if row[0] in waiting:
                waiting.remove(row[0])
                self._push_tokens((row,))
                any_first = True
            else:
                late.rows.append(row)
        for event in step.events:
            if event[0] in waiting:
                waiting.remove(event[0])
                self._push_events((event,))
                any_first = True
            else:
                late.events.append(event)
        self._late = late
        if any_first and self._loop is not None:
            self._loop.call_soon(self._deliver_late)  # once what was written is sent, and before more is read
        else:
            self._deliver_late()

    def _deliver_late(self) -> None:
        late, self._late = self._late, None
        if late is not None:
            self._push_tokens(late.rows)
            self._push_events(late.events)

    def _push_tokens(self, rows: Iterable[tuple[int, int]]) -> None:
        streams = self._streams
        for number, token in rows:
            if stream := streams.get(number):
                self._push(stream, TokenEvent(stream.request_id, (token,)))

    def _push_events(self, events: Sequence[tuple[int, TokenEvent]]) -> None:
        for number, event in events:
            if stream := self._streams.get(number):
                if event.finish_reason is not None:
                    del self._streams[number], self._by_id[stream.request_id]
                self._push(stream, event._replace(request_id=stream.request_id))

    def _push(self, stream: _Stream, event: TokenEvent) -> None:
        try:
            stream.receiver.push(event)
        except Exception as error:  # a fault in one stream must not end the others
            self.cancel(stream.request_id)
            stream.receiver.fail(error)

    def _answer(self, message: Stats | SessionReply) -> None:
        if isinstance(message, SessionReply):
            reply = self._commands.pop(message.number, None)
            if reply is not None and not reply.done():
                _settle(reply, message)
            return
        answer = self._asked.popleft()
        if not answer.done():
            answer.set_result(message.stats)

    def _end_streams(self, limit_s: float) -> None:
        """Ends all that waits, once it is known why: a process is gone a moment before its exit code is there."""
        assert self._loop is not None
        reason = self.failure
        if reason is None and time.monotonic() < limit_s:
            self._loop.call_later(REASON_POLL_S, self._end_streams, limit_s)
            return
        streams = list(self._streams.values())
        self._streams.clear()
        self._waiting.clear()
        self._by_id.clear()
        for stream in streams:
            stream.receiver.fail(EngineDead(reason or "the channel to the engine is closed"))
        answers = [*self._asked, *self._commands.values()]
        self._asked.clear()
        self._commands.clear()
        for answer in answers:
            if not answer.done():
                answer.set_exception(EngineDead(reason or "the channel to the engine is closed"))


def _settle(future: asyncio.Future[SessionInfo], reply: SessionReply) -> None:
    if reply.error is not None:
        future.set_exception(reply.error.exception())
    else:
        assert reply.info is not None
        future.set_result(reply.info)
