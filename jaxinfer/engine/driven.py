"""The engine in this process, for one event loop, which steps it whenever there is something to do."""

from __future__ import annotations

import asyncio

from jaxinfer.engine.engine import Engine
from jaxinfer.types import (
    EngineDead,
    EngineInfo,
    EngineStats,
    EventReceiver,
    Request,
    SessionAction,
    SessionInfo,
)


class DrivenEngine:
    """An EngineHandle. Nothing runs but while `drive` does."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._receivers: dict[str, EventReceiver] = {}
        self._wake = asyncio.Event()
        self._failure: str | None = None

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def failure(self) -> str | None:
        return self._failure

    def submit(self, request: Request, receiver: EventReceiver) -> None:
        """See EngineHandle."""
        if self._failure is not None:
            raise EngineDead(self._failure)
        self._engine.submit(request)
        self._receivers[request.request_id] = receiver
        self._wake.set()

    def cancel(self, request_id: str) -> None:
        """See EngineHandle."""
        if self._receivers.pop(request_id, None) is not None:
            self._engine.abort(request_id)

    async def stats(self) -> EngineStats:
        return self._engine.stats()

    async def session(self, action: SessionAction, session_id: str) -> SessionInfo:
        """See EngineHandle."""
        done = self._engine.session(action, session_id)
        self._wake.set()
        return await asyncio.wrap_future(done)

    async def drive(self) -> None:
        """Steps until it is cancelled; between two steps the loop does all that is ready.

        An error that the engine cannot recover from ends every request with EngineDead.
        """
        while True:
            if not self._engine.has_work:
                self._wake.clear()
                await self._wake.wait()
            try:
                events = self._engine.step()
            except Exception as error:
                self._fail(f"{type(error).__name__}: {error}")
                return
            for event in events:
                receiver = self._receivers.get(event.request_id)
                if receiver is None:  # it was cancelled by the receiver of an earlier event
                    continue
                if event.finish_reason is not None:
                    del self._receivers[event.request_id]
                receiver.push(event)
            await asyncio.sleep(0)

    def close(self) -> None:
        """Ends what runs and gives up the device's memory."""
        for request_id in self._receivers:
            self._engine.abort(request_id)
        self._receivers.clear()
        try:
            while self._failure is None and self._engine.has_work:
                self._engine.step()  # a step that still runs when its device goes aborts the interpreter
        finally:
            self._engine.close()

    def _fail(self, reason: str) -> None:
        self._failure = reason
        receivers, self._receivers = self._receivers, {}
        for receiver in receivers.values():
            receiver.fail(EngineDead(reason))
