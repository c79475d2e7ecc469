"""Ends the work for a request when its client leaves or the server stops."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from types import TracebackType
from typing import Any, Self

from jaxinfer.http.errors import ClientGone, ShuttingDown

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class OpenRequests:
    """The requests in progress, for a server that stops."""

    def __init__(self) -> None:
        self._guards: set[Guard] = set()

    def __len__(self) -> int:
        return len(self._guards)

    def guard(self, receive: Receive) -> Guard:
        return Guard(receive, self._guards)

    def end(self, reason: str) -> None:
        """Every request in progress ends with an error that gives `reason`."""
        for guard in list(self._guards):
            guard.interrupt(ShuttingDown(reason))


class Guard:
    """An async context that ends early, with ClientGone or ShuttingDown, by cancelling the task that entered it.

    Enter it once the body is read: from then on all that the client can still say is that it has gone.
    """

    def __init__(self, receive: Receive, open_guards: set[Guard]):
        self._receive = receive
        self._open_guards = open_guards
        self._cause: Exception | None = None

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watch = asyncio.create_task(self._wait_for_disconnect())
        self._open_guards.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, trace
        self._open_guards.discard(self)
        self._watch.cancel()
        if self._cause is not None:
            self._task.uncancel()
            if error is not None:
                raise self._cause from None

    def interrupt(self, cause: Exception) -> None:
        """Ends the context with `cause`, unless it ends already."""
        if self._cause is None:
            self._cause = cause
            self._task.cancel()

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.interrupt(ClientGone())
