"""The engine in the caller's own process, stepped by whoever waits for it."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Iterable, Iterator

from jaxinfer.engine.engine import Engine
from jaxinfer.types import (
    EngineDead,
    EngineInfo,
    EngineStats,
    QueueFull,
    Request,
    SessionAction,
    SessionInfo,
    TokenEvent,
    check_session_id,
)


@dataclasses.dataclass(slots=True)
class _Run:
    """Requests that one caller waits for."""

    waiting: collections.deque[Request]  # not submitted yet
    pending: set[str] = dataclasses.field(default_factory=set)  # submitted, not finished
    events: collections.deque[TokenEvent] = dataclasses.field(default_factory=collections.deque)


class LocalEngine:
    """Runs requests for any number of threads. The thread that holds the lock steps for all of them."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._lock = threading.Lock()
        self._runs: dict[str, _Run] = {}  # by the id of each pending request
        self._closed = False

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    def stats(self) -> EngineStats:
        """A snapshot of the engine."""
        with self._lock:
            self._check_open()
            return self._engine.stats()

    def run(self, requests: Iterable[Request]) -> Iterator[TokenEvent]:
        """Events of all requests, as they come. Those that find the queue full are held back until there is room.

        Closing the iterator early cancels what still runs. EngineDead once the engine is closed.
        """
        run = _Run(collections.deque(requests))
        try:
            # Events are looked at last: another thread may deliver the final one after the loop below found none.
            while run.waiting or run.pending or run.events:
                with self._lock:
                    self._check_open()
                    self._submit(run)
                    if not run.events:
                        self._deliver(self._engine.step())
                while run.events:
                    yield run.events.popleft()
        finally:
            for request_id in list(run.pending):
                self.cancel(request_id)

    def session(self, action: SessionAction, session_id: str) -> SessionInfo:
        """Does something with a session, and waits for it; the requests of other threads run meanwhile.

        Raises what `Engine.session` does, and EngineDead once the engine is closed.
        """
        check_session_id(session_id)
        with self._lock:
            self._check_open()
            done = self._engine.session(action, session_id)
        while not done.done():
            with self._lock:
                if not done.done():  # another thread's step may have done it
                    self._check_open()
                    self._deliver(self._engine.step())
        return done.result()

    def cancel(self, request_id: str) -> None:
        """Ends a request without a further event. Does nothing if it has finished."""
        with self._lock:
            run = self._runs.pop(request_id, None)
            if run is not None:
                run.pending.discard(request_id)
                self._engine.abort(request_id)

    def close(self) -> None:
        """Ends what runs and gives up the device's memory. Once closed, does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for request_id in self._runs:
                self._engine.abort(request_id)
            self._runs.clear()
            try:
                while self._engine.has_work:
                    self._engine.step()  # a step that still runs when its device goes aborts the interpreter
            finally:
                self._engine.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead("the engine was closed")

    def _submit(self, run: _Run) -> None:
        while run.waiting:
            request = run.waiting[0]
            try:
                self._engine.submit(request)
            except QueueFull:
                return
            self._runs[request.request_id] = run
            run.pending.add(request.request_id)
            run.waiting.popleft()

    def _deliver(self, events: list[TokenEvent]) -> None:
        for event in events:
            run = self._runs[event.request_id]
            run.events.append(event)
            if event.finish_reason is not None:
                del self._runs[event.request_id]
                run.pending.discard(event.request_id)
