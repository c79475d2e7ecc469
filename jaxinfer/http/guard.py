"""Ends the work for a request when its client leaves or the server stops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from types import TracebackType
from typing import Any, Self

from jaxinfer.http.errors import ClientGone, RequestTimeout, ShuttingDown

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class OpenRequests:
    """The requests in progress, for a server that stops."""

    def __init__(self, timeout_s: float | None = None) -> None:
        """timeout_s: what a request with an arrival time may take, from then on. None: any time."""
        self.timeout_s = timeout_s
        self._guards: set[Guard] = set()

    def __len__(self) -> int:
        return len(self._guards)

    def guard(self, receive: Receive, arrival_s: float | None = None) -> Guard:
        """arrival_s: when the request came, by the monotonic clock. None: it has no time limit."""
        limited = arrival_s is not None and self.timeout_s is not None
        return Guard(receive, self._guards, arrival_s if limited else None, self.timeout_s or 0.0)

    def end(self, reason: str) -> None:
        """Every request in progress ends with an error that gives `reason`."""
        for guard in list(self._guards):
            guard.interrupt(ShuttingDown(reason))


class Guard:
    """An async context that ends early, by cancelling the task that entered it: with ClientGone, ShuttingDown,
    RequestTimeout, or whatever it is interrupted with.

    Enter it once the body is read: from then on all that the client can still say is that it has gone.
    """

    def __init__(self, receive: Receive, open_guards: set[Guard], arrival_s: float | None, timeout_s: float):
        self._receive = receive
        self._open_guards = open_guards
        self._arrival_s = arrival_s
        self._timeout_s = timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._cause: Exception | None = None

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watch = asyncio.create_task(self._wait_for_disconnect())
        self._open_guards.add(self)
        if self._arrival_s is not None:
            cause = RequestTimeout(f"the request took longer than {self._timeout_s:g} s, the limit of this server")
            left_s = self._arrival_s + self._timeout_s - time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(max(left_s, 0.0), self.interrupt, cause)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, trace
        self._open_guards.discard(self)
        self._watch.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._cause is not None:
            self._task.uncancel()
            if error is not None:
                raise self._cause from None

    @property
    def cause(self) -> Exception | None:
        """What the context was interrupted with; None: nothing."""
        return self._cause

    def interrupt(self, cause: Exception) -> None:
        """Ends the context with `cause`, unless it ends already."""
        if self._cause is None:
            self._cause = cause
            self._task.cancel()

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.interrupt(ClientGone())
