"""A route that generates: reads the request, prepares it, and streams or sends what the engine makes of it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import MutableMapping
from typing import Any, Protocol

from jaxinfer.http import known_fields, openai
from jaxinfer.http.bodies import read_body, send_json, send_problem
from jaxinfer.http.errors import ClientGone, Problem, problem
from jaxinfer.http.guard import Guard, OpenRequests, Receive, Send
from jaxinfer.http.metrics import ServerMetrics
from jaxinfer.http.prompts import PromptMaker
from jaxinfer.http.streams import EventStream, Generation, stream_reply, whole_reply
from jaxinfer.types import EngineDead, EngineHandle

INLINE_BODY_BYTES = 8192
"""Text of bodies above this is rendered and tokenised in a thread: about the size that takes as long as a token."""
INLINE_PARSE_BYTES = 2**19
"""Bodies above this are parsed in a thread. One of 80,000 token ids takes 2 ms, and would hold the interpreter for as
long in a thread; the way there and back takes 0.3 ms in a loop with nothing else to do, and up to 5 in a busy one."""

Scope = MutableMapping[str, Any]


class Reply(Protocol):
    """A request that is ready to run."""

    @property
    def streams(self) -> bool: ...

    async def stream(self, engine: EngineHandle, stream: EventStream, guard: Guard) -> None:
        """Runs it and writes events; the last call ends the stream."""
        ...

    async def whole(self, engine: EngineHandle, guard: Guard) -> bytes:
        """Runs it; returns the body."""
        ...


class Endpoint[Body](Protocol):
    """How one address reads requests and shows replies and failures."""

    def decode(self, body: bytes) -> Body:
        """Raises InvalidRequest."""
        ...

    def has_text(self, request: Body) -> bool:
        """Whether to prepare it is work that grows with the body."""
        ...

    def is_constrained(self, request: Body) -> bool:
        """Whether a grammar is compiled to prepare it: milliseconds, whatever the size of the body."""
        ...

    def prepare(self, request: Body, arrival_s: float) -> Reply:
        """Renders and tokenises; may run in any thread. Raises InvalidRequest or HttpError."""
        ...

    def event_stream(self, send: Send) -> EventStream: ...

    def problem(self, error: BaseException) -> Problem: ...


class GenerateRoute:
    """An ASGI application of its own, so that nothing but the server stands between a token and its socket."""

    def __init__(self, engine: EngineHandle, open_requests: OpenRequests, endpoint: Endpoint[Any]):
        self._engine = engine
        self._open_requests = open_requests
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival_s = time.monotonic()
        stream = self._endpoint.event_stream(send)
        try:
            body = await read_body(scope, receive, arrival_s, self._open_requests.timeout_s)
            async with self._open_requests.guard(receive, arrival_s) as guard:
                await self._answer(body, arrival_s, stream, send, guard)
        except ClientGone:
            return
        except Exception as error:
            what = self._endpoint.problem(error)
            if stream.started:
                await stream.fail(what)
            else:
                await send_problem(send, what)

    async def _answer(self, body: bytes, arrival_s: float, stream: EventStream, send: Send, guard: Guard) -> None:
        endpoint = self._endpoint
        if (reason := self._engine.failure) is not None:
            raise EngineDead(reason)
        if len(body) > INLINE_PARSE_BYTES:
            request = await asyncio.to_thread(endpoint.decode, body)
        else:
            request = endpoint.decode(body)
        if (len(body) > INLINE_BODY_BYTES and endpoint.has_text(request)) or endpoint.is_constrained(request):
            reply = await asyncio.to_thread(endpoint.prepare, request, arrival_s)
        else:
            reply = endpoint.prepare(request, arrival_s)
        if reply.streams:
            await reply.stream(self._engine, stream, guard)
        else:
            await send_json(send, 200, await reply.whole(self._engine, guard))


class OpenAiReply:
    """Completions and chat completions."""

    def __init__(self, generation: Generation):
        self._generation = generation
        self.streams = generation.stream

    async def stream(self, engine: EngineHandle, stream: EventStream, guard: Guard) -> None:
        del guard
        await stream_reply(engine, self._generation, stream)

    async def whole(self, engine: EngineHandle, guard: Guard) -> bytes:
        del guard
        return await whole_reply(engine, self._generation)


class OpenAiEndpoint:
    """/v1/completions and /v1/chat/completions."""

    def __init__(
        self,
        prompts: PromptMaker,
        metrics: ServerMetrics,
        kind: type[openai.CompletionRequest] | type[openai.ChatRequest],
    ):
        self._prompts = prompts
        self._metrics = metrics
        self._kind = kind
        self.event_stream = EventStream
        self.problem = problem

    def decode(self, body: bytes) -> openai.CompletionRequest | openai.ChatRequest:
        return known_fields.decode(self._kind, body)

    def has_text(self, request: openai.CompletionRequest | openai.ChatRequest) -> bool:
        return request.has_text

    def is_constrained(self, request: openai.CompletionRequest | openai.ChatRequest) -> bool:
        return request.is_constrained

    def prepare(self, request: openai.CompletionRequest | openai.ChatRequest, arrival_s: float) -> OpenAiReply:
        reply_id = self._kind.id_prefix + os.urandom(16).hex()
        return OpenAiReply(self._prompts.generation(request, reply_id, self._metrics, arrival_s))
