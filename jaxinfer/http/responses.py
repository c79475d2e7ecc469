"""OpenAI's Responses API on the path of chat completions: /v1/responses, and what is kept of the replies."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from jaxinfer.http import response_request
from jaxinfer.http.bodies import json_response
from jaxinfer.http.errors import ClientGone, HttpError, problem
from jaxinfer.http.guard import Guard, Send
from jaxinfer.http.metrics import ServerMetrics
from jaxinfer.http.named_events import NamedEventStream
from jaxinfer.http.parts import parts_of
from jaxinfer.http.prompts import PromptMaker
from jaxinfer.http.response_events import ResponseWriter, usage_fields
from jaxinfer.http.response_items import shown_tools
from jaxinfer.http.response_request import ResponsesRequest
from jaxinfer.http.response_store import ResponseStore, Stored
from jaxinfer.http.streams import EventStream, Generation, run_choices
from jaxinfer.http.turns import Turns
from jaxinfer.text.message import Thought
from jaxinfer.text.output import OutputDelta
from jaxinfer.types import EngineHandle, FinishReason, InvalidRequest

PATH = "/v1/responses"
CANCEL_POLL_S = 0.25
"""How often a response that runs looks whether it is to be cancelled, for which any front end may be asked."""
CANCEL_TIMEOUT_S = 5.0


class ResponseCancelled(HttpError):
    """The client has cancelled the response by its id."""

    def __init__(self) -> None:
        super().__init__(409, "the response was cancelled", code="response_cancelled")


class ResponsesEndpoint:
    """POST /v1/responses."""

    def __init__(self, prompts: PromptMaker, metrics: ServerMetrics, store: ResponseStore):
        self._prompts = prompts
        self._metrics = metrics
        self._store = store
        self.problem = problem

    def event_stream(self, send: Send) -> NamedEventStream:
        return NamedEventStream(send, lambda _: b"")

    def decode(self, body: bytes) -> ResponsesRequest:
        return response_request.decode(body)

    def has_text(self, request: ResponsesRequest) -> bool:
        del request
        return True

    def is_constrained(self, request: ResponsesRequest) -> bool:
        return bool(request.tools) or request.text is not None

    def prepare(self, request: ResponsesRequest, arrival_s: float) -> ResponseReply:
        response_id = f"resp_{uuid.uuid4().hex}"
        messages = request.messages(self._earlier(request.previous_response_id))
        generation = self._prompts.generation(request.to_chat(messages), response_id, self._metrics, arrival_s)
        keeps = request.store is not False
        return ResponseReply(generation, _fields(request, generation), messages, self._store if keeps else None)

    def _earlier(self, response_id: str | None) -> list[dict[str, Any]]:
        """The conversation up to a response, its own items included."""
        if response_id is None:
            return []
        if (stored := self._store.get(response_id)) is None:
            raise InvalidRequest(
                f"there is no response {response_id!r}: it was not stored, or is deleted, or is too long ago",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        if stored.status not in ("completed", "incomplete"):
            raise InvalidRequest(
                f"response {response_id!r} is {stored.status}; only one that has ended can be gone on with",
                param="previous_response_id",
            )
        return stored.messages


class ResponseReply:
    """A reply, and the sink of its one choice.

    messages: the conversation before it. store: where it is kept; None: it is not.
    """

    def __init__(
        self,
        generation: Generation,
        fields: dict[str, Any],
        messages: list[dict[str, Any]],
        store: ResponseStore | None,
    ):
        self.streams = generation.stream
        self._generation = generation
        self._choice = generation.choices[0]
        self._writer = ResponseWriter(fields)
        self._messages = messages
        self._store = store
        self._stream: EventStream | None = None
        self._has_begun = False
        self._last_events = b""
        self._reasoning_tokens = 0

    async def stream(self, engine: EngineHandle, stream: EventStream, guard: Guard) -> None:
        assert isinstance(stream, NamedEventStream)
        self._stream = stream
        stream.tell_failure = lambda _: self._last_events
        await self._run(engine, guard)
        await stream.end()

    async def whole(self, engine: EngineHandle, guard: Guard) -> bytes:
        await self._run(engine, guard)
        return self._body()

    async def _run(self, engine: EngineHandle, guard: Guard) -> None:
        if self._store is not None:
            self._store.put(self._id, Stored("in_progress", self._body(), []))
        watch = asyncio.create_task(self._watch(guard))
        try:
            await run_choices(engine, self._generation.choices, lambda: [self])
        except BaseException as error:
            self._fail(guard.cause or error)
            raise
        finally:
            watch.cancel()

    def emit(self, delta: OutputDelta | None) -> None:
        if delta is None:
            return
        events = b"" if self._has_begun else self._writer.start()
        self._has_begun = True
        parts = parts_of(self._choice, delta)
        if any(isinstance(part, Thought) for part in parts):
            self._reasoning_tokens = self._choice.output.num_tokens
        events += self._writer.parts(parts)
        if delta.finish_reason is not None:
            events += self._writer.end(FinishReason(delta.finish_reason), self._usage())
            turns = Turns(self._messages)
            self._writer.add_to(turns)
            self._keep(turns.messages())
        if self._stream is not None and events:
            self._stream.write(events)

    async def _watch(self, guard: Guard) -> None:
        """Ends the reply if somebody, who may have asked another front end, cancels it."""
        while self._store is not None:
            await asyncio.sleep(CANCEL_POLL_S)
            if self._store.is_to_be_cancelled(self._id):
                guard.interrupt(ResponseCancelled())
                return

    def _fail(self, cause: BaseException) -> None:
        """Keeps what there is, if the client knows of the response, and has the stream end with it."""
        if not self._has_begun:
            if self._store is not None:
                self._store.delete(self._id)
            return
        is_cancelled = isinstance(cause, ResponseCancelled | ClientGone)
        self._last_events = self._writer.cancel() if is_cancelled else self._writer.fail(problem(cause))
        self._keep([])

    def _keep(self, messages: list[dict[str, Any]]) -> None:
        if self._store is not None:
            self._store.replace(self._id, Stored(self._writer.status, self._body(), messages))

    @property
    def _id(self) -> str:
        return self._generation.head.id

    def _body(self) -> bytes:
        ended = self._writer.status in ("completed", "incomplete")
        return msgspec.json.encode(self._writer.body(self._usage() if ended else None))

    def _usage(self) -> dict[str, Any]:
        output = self._choice.output
        return usage_fields(
            self._generation.prompt_tokens, output.num_cached_tokens, output.num_tokens, self._reasoning_tokens
        )


def _fields(request: ResponsesRequest, generation: Generation) -> dict[str, Any]:
    """What a response says of the request: as it was, or as it was resolved."""
    sequence = generation.choices[0].request
    return {
        "id": generation.head.id,
        "object": "response",
        "created_at": generation.head.created,
        "completed_at": None,
        "model": generation.head.model,
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "store": request.store is not False,
        "temperature": None if sequence is None else sequence.temperature,
        "text": {"format": request.text_format},
        "tool_choice": request.tool_choice or "auto",
        "tools": shown_tools(request.tools),
        "top_p": None if sequence is None else sequence.top_p,
        "truncation": "disabled",
        "user": request.user,
    }


def response_routes(store: ResponseStore) -> list[Route]:
    """What is done with a response by its id: shown, deleted, cancelled."""

    def find(request: HttpRequest) -> tuple[str, Stored]:
        response_id = request.path_params["response_id"]
        if (stored := store.get(response_id)) is None:
            message = f"there is no response {response_id!r}: it was not stored, or is deleted, or is too long ago"
            raise HttpError(404, message, code="response_not_found", param="response_id")
        return response_id, stored

    async def show(request: HttpRequest) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise InvalidRequest("a stored response is not streamed again; leave stream out", param="stream")
        return Response(find(request)[1].body, media_type="application/json")

    async def delete(request: HttpRequest) -> Response:
        response_id, _ = find(request)
        store.delete(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(request: HttpRequest) -> Response:
        response_id, stored = find(request)
        if stored.status != "in_progress":
            raise InvalidRequest(f"response {response_id!r} is {stored.status}; there is nothing to cancel")
        store.wish_to_cancel(response_id)
        end_s = time.monotonic() + CANCEL_TIMEOUT_S
        while stored.status == "in_progress" and time.monotonic() < end_s:
            await asyncio.sleep(CANCEL_POLL_S / 4)
            stored = find(request)[1]
        return Response(stored.body, media_type="application/json")

    async def show_or_delete(request: HttpRequest) -> Response:
        return await (delete if request.method == "DELETE" else show)(request)

    return [
        Route(PATH + "/{response_id}", show_or_delete, methods=["GET", "DELETE"]),
        Route(PATH + "/{response_id}/cancel", cancel, methods=["POST"]),
    ]
