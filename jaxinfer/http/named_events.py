"""Streams whose events have names, and which end with the last of them: Anthropic's, and OpenAI's responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from jaxinfer.http.errors import Problem
from jaxinfer.http.guard import Send
from jaxinfer.http.streams import EventStream

_encode = msgspec.json.encode


def named_event(name: str, fields: dict[str, Any]) -> bytes:
    """An event whose `type` is its name."""
    return b"event: " + name.encode() + b"\ndata: " + _encode({"type": name} | fields) + b"\n\n"


class NamedEventStream(EventStream):
    """tell_failure: the events with which a stream ends that has begun and fails."""

    def __init__(self, send: Send, tell_failure: Callable[[Problem], bytes]):
        super().__init__(send)
        self.tell_failure = tell_failure

    async def end(self, data: bytes = b"") -> None:
        """Sends the last events, after all that was kept."""
        while self._sending is not None:
            await self._sending
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def fail(self, problem: Problem) -> None:
        await self.end(self.tell_failure(problem))
