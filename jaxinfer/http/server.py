"""The routes: what is answered at which address, and every failure as JSON."""

from __future__ import annotations

import importlib.metadata
import logging
import time
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from jaxinfer.config import ServerConfig
from jaxinfer.http import openai
from jaxinfer.http.batches import Batches
from jaxinfer.http.bodies import json_response
from jaxinfer.http.counters import Counters
from jaxinfer.http.errors import ClientGone, HttpError, problem_at
from jaxinfer.http.gate import Gate
from jaxinfer.http.generate import Endpoint, GenerateRoute, OpenAiEndpoint
from jaxinfer.http.guard import OpenRequests, Receive, Send
from jaxinfer.http.http_metrics import HttpMetrics
from jaxinfer.http.messages import MessagesEndpoint
from jaxinfer.http.metrics import CONTENT_TYPE, ServerMetrics
from jaxinfer.http.openapi import openapi_route
from jaxinfer.http.playground import playground_routes
from jaxinfer.http.pooling import pooling_routes
from jaxinfer.http.prompts import PromptMaker
from jaxinfer.http.response_store import ResponseStore
from jaxinfer.http.responses import ResponsesEndpoint, response_routes
from jaxinfer.http.sessions import session_routes
from jaxinfer.http.tokens import token_routes
from jaxinfer.text.chat_template import ChatTemplate
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.types import EngineDead, EngineHandle, InvalidRequest

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]


class App(Starlette):
    """The server of one engine: the routes, and what they share."""

    def __init__(self, frontend: Frontend, routes: Sequence[Route], config: ServerConfig, http_metrics: HttpMetrics):
        handlers: dict[Any, Any] = {
            HTTPException: _refused_by_router,
            HttpError: _failed,
            InvalidRequest: _failed,
            ClientGone: _unread,
            Exception: _failed,
        }
        super().__init__(routes=routes, exception_handlers=handlers)
        self.router.redirect_slashes = False
        self.frontend = frontend
        self.batches: Batches | None = None
        self.config = config
        self._gate = Gate(self._route, config, http_metrics.count)
        self._generate = {route.path: route.endpoint for route in routes if isinstance(route.endpoint, GenerateRoute)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._gate(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
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
    responses: ResponseStore | None = None,
) -> App:
    """The server of one engine. Without a tokenizer it takes and counts token ids only, and has no chat.

    counters, created_s, responses: what several front ends of one server share: see `Counters`, the time that
    /v1/models reports, in seconds since the epoch, and what /v1/responses keeps. None: it is the only one.
    """
    responses = ResponseStore() if responses is None else responses
    prompts = PromptMaker(engine, tokenizer, chat_template, config)
    counters = counters or Counters()
    metrics = ServerMetrics(prompts.model_names[0], counters, engine.info)
    http_metrics = HttpMetrics(prompts.model_names[0], counters)
    metrics.add(http_metrics)
    open_requests = OpenRequests(config.request_timeout_s)
    frontend = Frontend(engine, prompts, metrics, open_requests, int(time.time()) if created_s is None else created_s)

    def generates(path: str, endpoint: Endpoint[Any]) -> Route:
        return Route(path, GenerateRoute(engine, open_requests, endpoint), methods=["POST"])

    batches = None if config.batch_dir is None else Batches(Path(config.batch_dir), engine, prompts)
    routes = [
        generates("/v1/completions", OpenAiEndpoint(prompts, metrics, openai.CompletionRequest)),
        generates("/v1/chat/completions", OpenAiEndpoint(prompts, metrics, openai.ChatRequest)),
        generates("/v1/responses", ResponsesEndpoint(prompts, metrics, responses)),
        *response_routes(responses),
        generates("/v1/messages", MessagesEndpoint(prompts, metrics)),
        *token_routes(prompts, engine.info),
        *pooling_routes(prompts.model_names[0]),
        Route("/v1/models", frontend.list_models),
        Route("/v1/models/{name:path}", frontend.show_model),
        *session_routes(engine, frontend.open_requests),
        *([] if batches is None else batches.routes()),
        *(Route(path, frontend.health) for path in ("/health", "/healthz", "/ping")),
        *(Route(path, frontend.ready) for path in ("/ready", "/readyz")),
        Route("/version", frontend.version),
        Route("/metrics", frontend.show_metrics),
        *playground_routes(asks_for_key=bool(config.api_keys)),
    ]
    routes.append(openapi_route(routes, installed_version()))
    app = App(frontend, routes, config, http_metrics)
    app.batches = batches
    return app


class Frontend:
    """What the routes share."""

    def __init__(
        self,
        engine: EngineHandle,
        prompts: PromptMaker,
        metrics: ServerMetrics,
        open_requests: OpenRequests,
        created_s: int,
    ):
        self.engine = engine
        self.prompts = prompts
        self.metrics = metrics
        self.open_requests = open_requests
        self._is_draining = False
        self._created_s = created_s
        self._version = installed_version()

    async def list_models(self, request: HttpRequest) -> Response:
        del request
        return json_response({"object": "list", "data": [self._model(name) for name in self.prompts.model_names]})

    async def show_model(self, request: HttpRequest) -> Response:
        return json_response(self._model(self.prompts.model_name(request.path_params["name"])))

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
        return json_response({"status": "ok"})

    async def ready(self, request: HttpRequest) -> Response:
        """Whether to send requests here: healthy, and not about to stop."""
        if self._is_draining:
            raise HttpError(503, "the server is shutting down", code="shutting_down")
        return await self.health(request)

    def drain(self) -> None:
        """From now on the server is not ready: it only ends what it has begun."""
        self._is_draining = True

    async def version(self, request: HttpRequest) -> Response:
        del request
        return json_response({"version": self._version})

    async def show_metrics(self, request: HttpRequest) -> Response:
        del request
        try:
            self.metrics.engine = await self.engine.stats()
        except (EngineDead, TimeoutError) as error:
            logger.warning("the engine's metrics are those of the last scrape: it gave no answer (%r)", error)
        return Response(self.metrics.render(), headers={"Content-Type": CONTENT_TYPE})


def installed_version() -> str:
    """Of this package."""
    try:
        return importlib.metadata.version("jaxinfer")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # run from a source tree


async def _refused_by_router(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    message, code = {
        404: (f"there is no route {path}", "route_not_found"),
        405: (f"{request.method} is not allowed on {path}", "method_not_allowed"),
    }.get(error.status_code, (error.detail, "http_error"))
    return await _failed(request, HttpError(error.status_code, message, code=code, headers=dict(error.headers or {})))


async def _unread(request: HttpRequest, error: Exception) -> Response:
    del request, error
    return Response()  # the client has gone


async def _failed(request: HttpRequest, error: Exception) -> Response:
    what = problem_at(request.url.path, error)
    return Response(what.body, what.status, what.headers, media_type="application/json")
