"""The routes: what is answered at which address, and every failure as JSON."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import time
import uuid
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from jaxinfer.config import ServerConfig
from jaxinfer.http import openai
from jaxinfer.http.batches import Batches
from jaxinfer.http.errors import ClientGone, HttpError, Problem, problem
from jaxinfer.http.guard import OpenRequests, Receive, Send
from jaxinfer.http.metrics import CONTENT_TYPE, Counters, ServerMetrics
from jaxinfer.http.prompts import PromptMaker
from jaxinfer.http.sessions import session_routes
from jaxinfer.http.streams import EventStream, Generation, stream_reply, whole_reply
from jaxinfer.text.chat_template import ChatTemplate
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.types import EngineDead, EngineHandle

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 * 2**20
INLINE_BODY_BYTES = 8192
"""Text of bodies above this is rendered and tokenised in a thread: about the size that takes as long as a token."""
INLINE_PARSE_BYTES = 2**19
"""Bodies above this are parsed in a thread. One of 80,000 token ids takes 2 ms, and would hold the interpreter for as
long in a thread; the way there and back takes 0.3 ms in a loop with nothing else to do, and up to 5 in a busy one."""

Scope = MutableMapping[str, Any]


class App(Starlette):
    """The server of one engine: the routes, and what they share."""

    def __init__(self, frontend: Frontend, routes: Sequence[Route]):
        handlers: dict[Any, Any] = {HTTPException: _refused_by_router, HttpError: _failed, Exception: _failed}
        super().__init__(routes=routes, exception_handlers=handlers)
        self.router.redirect_slashes = False
        self.frontend = frontend
        self.batches: Batches | None = None
        self._generate = {route.path: route.endpoint for route in routes if isinstance(route.endpoint, GenerateRoute)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Past Starlette's two wrappers around `send`, which every token would go through.
        generate = self._generate.get(scope.get("path", ""))
        if generate is not None and scope["method"] == "POST":
            await generate(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def create_app(
    engine: EngineHandle,
    tokenizer: Tokenizer | None,
    chat_template: ChatTemplate | None,
    config: ServerConfig,
    *,
    counters: Counters | None = None,
    created_s: int | None = None,
) -> App:
    """The server of one engine. Without a tokenizer it takes and counts token ids only, and has no chat.

    counters, created_s: what several front ends of one server share: see `Counters`, and the time that /v1/models
    reports, in seconds since the epoch. None: it is the only one.
    """
    prompts = PromptMaker(engine, tokenizer, chat_template, config)
    caches = engine.info.prefix_caching
    metrics = ServerMetrics(prompts.model_names[0], counters or Counters(), prefix_caching=caches)
    frontend = Frontend(engine, prompts, metrics, int(time.time()) if created_s is None else created_s)
    batches = None if config.batch_dir is None else Batches(Path(config.batch_dir), engine, prompts)
    app = App(
        frontend,
        [
            Route("/v1/completions", GenerateRoute(frontend, openai.CompletionRequest), methods=["POST"]),
            Route("/v1/chat/completions", GenerateRoute(frontend, openai.ChatRequest), methods=["POST"]),
            Route("/v1/models", frontend.list_models),
            Route("/v1/models/{name:path}", frontend.show_model),
            *session_routes(engine, frontend.open_requests),
            *([] if batches is None else batches.routes()),
            Route("/health", frontend.health),
            Route("/ping", frontend.health),
            Route("/version", frontend.version),
            Route("/metrics", frontend.show_metrics),
        ],
    )
    app.batches = batches
    return app


class Frontend:
    """What the routes share."""

    def __init__(self, engine: EngineHandle, prompts: PromptMaker, metrics: ServerMetrics, created_s: int):
        self.engine = engine
        self.prompts = prompts
        self.metrics = metrics
        self.open_requests = OpenRequests()
        self._created_s = created_s
        self._version = _installed_version()

    async def list_models(self, request: HttpRequest) -> Response:
        del request
        return _json({"object": "list", "data": [self._model(name) for name in self.prompts.model_names]})

    async def show_model(self, request: HttpRequest) -> Response:
        return _json(self._model(self.prompts.model_name(request.path_params["name"])))

    def _model(self, name: str) -> dict[str, Any]:
        info = self.engine.info
        return {
            "id": name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "jaxinfer",
            "root": info.model,
            "parent": None,
            "max_model_len": info.max_model_len,
        }

    async def health(self, request: HttpRequest) -> Response:
        del request
        if (reason := self.engine.failure) is not None:
            raise HttpError(503, f"the engine stopped: {reason}", code="engine_dead")
        return _json({"status": "ok"})

    async def version(self, request: HttpRequest) -> Response:
        del request
        return _json({"version": self._version})

    async def show_metrics(self, request: HttpRequest) -> Response:
        del request
        try:
            self.metrics.engine = await self.engine.stats()
        except (EngineDead, TimeoutError) as error:
            logger.warning("the engine's metrics are those of the last scrape: it gave no answer (%r)", error)
        return Response(self.metrics.render(), headers={"Content-Type": CONTENT_TYPE})


class GenerateRoute:
    """An ASGI application of its own, so that nothing but the server stands between a token and its socket."""

    def __init__(self, frontend: Frontend, kind: type[openai.CompletionRequest] | type[openai.ChatRequest]):
        self._frontend = frontend
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival_s = time.monotonic()
        stream = EventStream(send)
        try:
            body = await _read_body(scope, receive)
            async with self._frontend.open_requests.guard(receive):
                await self._answer(body, arrival_s, stream, send)
        except ClientGone:
            return
        except Exception as error:
            if stream.started:
                await stream.fail(problem(error))
            else:
                await _send_problem(send, problem(error))

    async def _answer(self, body: bytes, arrival_s: float, stream: EventStream, send: Send) -> None:
        engine = self._frontend.engine
        if (reason := engine.failure) is not None:
            raise EngineDead(reason)
        if len(body) > INLINE_PARSE_BYTES:
            request = await asyncio.to_thread(openai.decode, self._kind, body)
        else:
            request = openai.decode(self._kind, body)
        if request.has_text and len(body) > INLINE_BODY_BYTES:
            generation = await asyncio.to_thread(self._prepare, request, arrival_s)
        else:
            generation = self._prepare(request, arrival_s)
        if generation.stream:
            await stream_reply(engine, generation, stream)
        else:
            await _send_json(send, 200, await whole_reply(engine, generation))

    def _prepare(self, request: openai.CompletionRequest | openai.ChatRequest, arrival_s: float) -> Generation:
        reply_id = self._kind.id_prefix + uuid.uuid4().hex
        return self._frontend.prompts.generation(request, reply_id, self._frontend.metrics, arrival_s)


def _installed_version() -> str:
    try:
        return importlib.metadata.version("jaxinfer")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # run from a source tree


async def _read_body(scope: Scope, receive: Receive) -> bytes:
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"application/json").split(b";")[0].strip().lower()
    if kind != b"application/json":
        shown = kind.decode("latin-1")
        raise HttpError(415, f"Content-Type is {shown!r}; it must be application/json", code="unsupported_media_type")
    parts, num_bytes = [], int(headers.get(b"content-length", b"0"))
    more = num_bytes <= MAX_BODY_BYTES
    num_read = 0
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        num_read += len(parts[-1])
        more = message.get("more_body", False) and num_read <= MAX_BODY_BYTES
    if (num_bytes := max(num_bytes, num_read)) > MAX_BODY_BYTES:
        message = f"the body has {num_bytes} bytes or more; at most {MAX_BODY_BYTES} are read"
        raise HttpError(413, message, code="request_too_large")
    return b"".join(parts)


async def _send_json(send: Send, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    head += [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def _send_problem(send: Send, what: Problem) -> None:
    await _send_json(send, what.status, what.body, what.headers)


def _json(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


async def _refused_by_router(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    message, code = {
        404: (f"there is no route {path}", "route_not_found"),
        405: (f"{request.method} is not allowed on {path}", "method_not_allowed"),
    }.get(error.status_code, (error.detail, "http_error"))
    return await _failed(request, HttpError(error.status_code, message, code=code, headers=dict(error.headers or {})))


async def _failed(request: HttpRequest, error: Exception) -> Response:
    del request
    what = problem(error)
    return Response(what.body, what.status, what.headers, media_type="application/json")
