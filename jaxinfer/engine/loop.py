"""The engine's process: steps while there is work, and tells every front end of its own requests and of no other."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, NoReturn

from jaxinfer.engine.channel import (
    RESEND_S,
    Abort,
    Channel,
    Failed,
    GetStats,
    Ready,
    SessionCommand,
    SessionError,
    SessionReply,
    Stats,
    Step,
    Submit,
    ToEngine,
    decode_to_engine,
)
from jaxinfer.types import FinishReason, QueueFull, SessionInfo, TokenEvent

if TYPE_CHECKING:  # the front end's side of this package never loads JAX
    from jaxinfer.engine.engine import Engine

STEP_MARGIN_S = 10.0
"""What a step may take beyond twice step_timeout_s: it waits for that long once, and then makes the state anew."""
NUM_LOOKS = 20
"""How often the watchdog looks until it has seen one and the same step for too long."""
OWNER_POLL_S = 0.1
"""How soon the thread that listens to the owner while the engine is built sees that it is, and ends."""


class _FrontEnd:
    """What the engine keeps of a front end: its channel, its requests, and what the last step has for it."""

    def __init__(self, channel: Channel):
        self.channel = channel
        self.request_ids: dict[int, str] = {}  # of requests in progress, by their number on the channel
        self.numbers: list[int] = []
        self.tokens: list[int] = []
        self.events: list[tuple[int, TokenEvent]] = []

    def send_step(self) -> None:
        """Sends what `numbers`, `tokens` and `events` hold, and empties them."""
        if not (self.numbers or self.events):
            self.flush()
            return
        step = Step(self.numbers, self.tokens, self.events)
        self.numbers, self.tokens, self.events = [], [], []
        with contextlib.suppress(OSError):  # it is gone, and its channel will say so
            self.channel.put(step)

    def flush(self) -> bool:
        """Sends what was kept; whether nothing more waits."""
        try:
            return self.channel.flush()
        except OSError:
            return True


def engine_main(
    fds: str,
    build: Callable[[], Engine],
    refusals: tuple[type[Exception], ...] = (),
    *,
    step_timeout_s: float | None = None,
    lost: queue.SimpleQueue[str] | None = None,
    at_end: Callable[[], None] = lambda: None,
) -> None:
    """The engine's process: builds it, then steps while there is work, until its owner's channel closes.

    fds: sockets, separated by commas: to the owner, then to each front end; see EngineProcess.
    refusals: errors of `build` that the user can put right: their message is the whole reason, without a traceback.
    step_timeout_s: a call of `Engine.step` that takes more than twice this and STEP_MARGIN_S ends the process; None: it
    may take for ever.
    lost: why the process is to end, if something comes. at_end: called when the owner wants it to end.
    """
    # The owner decides when to stop, and its channel's end says so. A terminal and a service manager send their
    # signals to every process of a server: ended by one, the engine would cut short the streams that are to finish.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    owner, *channels = (Channel(socket.socket(fileno=int(fd))) for fd in fds.split(","))
    built = threading.Event()
    threading.Thread(target=_listen_to_owner, args=(owner, built), daemon=True).start()
    if lost is not None:
        threading.Thread(target=end_when_lost, args=(owner, lost), daemon=True).start()
    try:
        engine = build()
    except refusals as error:
        end_with(owner, str(error))
    except Exception as error:
        traceback.print_exc()
        end_with(owner, f"{type(error).__name__}: {error}")
    built.set()
    # What is there now stays: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    try:
        owner.put(Ready(engine.info))
        loop = _Loop(engine, owner, [_FrontEnd(channel) for channel in channels])
        if step_timeout_s is not None:
            max_step_s = 2 * step_timeout_s + STEP_MARGIN_S
            threading.Thread(target=_watch, args=(loop, owner, max_step_s), daemon=True).start()
        loop.run()
        at_end()
    except (BrokenPipeError, ConnectionResetError):
        pass
    except Exception as error:
        traceback.print_exc()
        end_with(owner, f"{type(error).__name__}: {error}")
    os._exit(0)  # at once: a step that still runs would abort the interpreter at its own end


def _listen_to_owner(owner: Channel, built: threading.Event) -> None:
    """Ends the process if its owner ends while the engine is built: nobody waits for it, and it holds the device."""
    readable = select.poll()
    readable.register(owner, select.POLLIN)
    while not built.is_set():
        if readable.poll(OWNER_POLL_S * 1e3):
            try:
                owner.receive()
            except EOFError:
                if not built.is_set():
                    os._exit(1)
                return  # the loop sees it, too


def end_when_lost(owner: Channel, lost: queue.SimpleQueue[str]) -> NoReturn:
    """Ends the process with the first reason that comes. A thread's: a step may wait for a process that is gone."""
    reason = lost.get()
    print(f"jaxinfer: {reason}", file=sys.stderr)
    end_with(owner, reason)


def end_with(owner: Channel, reason: str) -> NoReturn:
    """Tells the owner why this process ends, and ends it."""
    with contextlib.suppress(OSError):
        owner.put(Failed(reason))
    sys.stderr.flush()
    os._exit(1)  # at once, as in `engine_main`


def _watch(loop: _Loop, owner: Channel, max_step_s: float) -> None:
    """Ends the process when a step takes longer than `max_step_s`: a thread that hangs in a call cannot be interrupted.

    It counts its own looks, not the time: a process that was stopped for an hour has not hung for one. And it cannot
    look while a call that hangs keeps the interpreter's lock; calls of JAX do not.
    """
    seen, num_looks = 0, 0
    while num_looks <= NUM_LOOKS:
        time.sleep(max_step_s / NUM_LOOKS)
        last, seen = seen, loop.num_turns
        num_looks = num_looks + 1 if seen == last and seen % 2 else 1
    reason = f"a step of the engine did not return within {max_step_s:g} s"
    print(f"{reason}; this is what its threads do:", file=sys.stderr, flush=True)
    faulthandler.dump_traceback()
    end_with(owner, reason)


class _Loop:
    """Steps the engine for several front ends, and reads between two steps what they say.

    In the thread of the steps: from one that reads, a request takes 0.1 ms to an engine that has nothing else to do.
    """

    def __init__(self, engine: Engine, owner: Channel, front_ends: Sequence[_FrontEnd]):
        self._engine = engine
        self._front_ends = list(front_ends)
        self._by_fd = {front_end.channel.fileno(): front_end for front_end in front_ends}
        self._readable = select.poll()
        for fd in (owner.fileno(), *self._by_fd):
            self._readable.register(fd, select.POLLIN)
        self._owners: dict[str, tuple[_FrontEnd, int]] = {}  # by the id of each request in progress
        self.num_turns = 0  # counted at the beginning and at the end of every step: odd while one runs

    def run(self) -> None:
        """Returns when the engine is to end."""
        while True:
            ready = self._readable.poll(0)
            while ready or not self._engine.has_work:
                if not all(map(self._read, [fd for fd, _ in ready])):
                    return
                # All is asked to be sent each time: a list, because `all` alone would stop at the first that cannot.
                all_sent = all([front_end.flush() for front_end in self._front_ends])
                ready = self._readable.poll(0 if self._engine.has_work else None if all_sent else RESEND_S * 1e3)
            self.num_turns += 1
            events = self._engine.step()
            self.num_turns += 1
            self._deliver(events)

    def _read(self, fd: int) -> bool:
        """Does what has come on a channel; False if the engine is to end: the owner says nothing before its own end."""
        if (front_end := self._by_fd.get(fd)) is None:
            return False
        try:
            for data in front_end.channel.receive():
                message = decode_to_engine(data)
                if isinstance(message, Submit):
                    message.unpack()
                self._handle(front_end, message)
        except EOFError:
            self._readable.unregister(fd)
            del self._by_fd[fd]
            self._leave(front_end)
        return True

    def _handle(self, front_end: _FrontEnd, message: ToEngine) -> None:
        match message:
            case Submit():
                self._submit(front_end, message)
            case Abort(number):
                request_id = front_end.request_ids.get(number)
                if request_id is not None and (event := self._engine.abort(request_id)):
                    self._deliver([event])
                elif request_id is not None:
                    self._forget(request_id)
            case GetStats():
                with contextlib.suppress(OSError):
                    front_end.channel.put(Stats(self._engine.stats()))
            case SessionCommand():
                self._command(front_end, message)

    def _command(self, front_end: _FrontEnd, message: SessionCommand) -> None:
        """Replies, in this thread, once the engine is done, which may be in a later step.

        What was begun goes on to its end even if the front end leaves: a file that is half written serves nobody.
        """
        try:
            future = self._engine.session(message.action, message.session_id)
        except Exception as error:  # as if it came with the future: it concerns nobody else
            self._send_reply(front_end, SessionReply(message.number, error=SessionError.of(error)))
        else:
            future.add_done_callback(functools.partial(self._reply, front_end, message.number))

    def _reply(self, front_end: _FrontEnd, number: int, done: Future[SessionInfo]) -> None:
        error = done.exception()
        if error is None:
            self._send_reply(front_end, SessionReply(number, info=done.result()))
        else:
            self._send_reply(front_end, SessionReply(number, error=SessionError.of(error)))

    def _send_reply(self, front_end: _FrontEnd, reply: SessionReply) -> None:
        if front_end in self._front_ends:
            with contextlib.suppress(OSError):  # it is gone, and its channel will say so
                front_end.channel.put(reply)

    def _submit(self, front_end: _FrontEnd, message: Submit) -> None:
        request, number = message.request, message.number
        try:
            if request.request_id in self._owners:
                raise ValueError(f"a request with id {request.request_id!r} is unfinished; ids must differ")
            self._engine.submit(request)
        except (QueueFull, ValueError) as error:
            refused = isinstance(error, QueueFull)
            event = TokenEvent("", finish_reason=FinishReason.ERROR, error=str(error), refused=refused)
            front_end.events.append((number, event))
            return front_end.send_step()
        self._owners[request.request_id] = front_end, number
        front_end.request_ids[number] = request.request_id

    def _leave(self, front_end: _FrontEnd) -> None:
        """The front end is gone: all that it asked for ends, and nothing else does."""
        for request_id in list(front_end.request_ids.values()):
            self._engine.abort(request_id)
            self._forget(request_id)
        self._front_ends.remove(front_end)

    def _forget(self, request_id: str) -> None:
        front_end, number = self._owners.pop(request_id)
        del front_end.request_ids[number]

    def _deliver(self, events: Iterable[TokenEvent]) -> None:
        """One message for each front end that is concerned. 35 microseconds for 256 rows, and 10 for each message."""
        owners = self._owners
        for event in events:
            front_end, number = owners[event.request_id]
            plain = event.finish_reason is None and event.logprobs is None and not event.cached_tokens
            if plain and event.prompt_logprobs is None and len(event.token_ids) == 1:
                front_end.numbers.append(number)
                front_end.tokens.append(event.token_ids[0])
            else:
                front_end.events.append((number, event._replace(request_id="")))
                if event.finish_reason is not None:
                    self._forget(event.request_id)
        for front_end in self._front_ends:
            front_end.send_step()
