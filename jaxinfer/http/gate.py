"""What every request passes before its route, and every reply after: its id, web pages' rights, the key, the log."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from jaxinfer.config import ServerConfig
from jaxinfer.http import playground
from jaxinfer.http.bodies import send_problem
from jaxinfer.http.errors import HttpError, problem_at
from jaxinfer.http.guard import Message, Receive, Send

access_logger = logging.getLogger("jaxinfer.access")

OPEN_PATHS = frozenset({"/health", "/healthz", "/ping", "/ready", "/readyz", "/metrics"}) | playground.PATHS
"""Asked by load balancers and dashboards, which have no key, and by a browser before its user has given it one."""
MAX_LOGGED_BYTES = 2048
"""Of a request's body, where prompts are logged."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
"""What a client may call its request: it comes back in a header and stands in the log."""

Scope = MutableMapping[str, Any]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Observer = Callable[[str, str, int, float], None]
"""Is told of every request that has ended: method, path, status (0: the client left before) and seconds."""


class Gate:
    """An ASGI application around another. Nothing of it but a plain call stands between a token and its socket."""

    def __init__(self, application: Application, config: ServerConfig, observer: Observer):
        self._application = application
        self._observer = observer
        self._key_digests = [_digest(key) for key in config.api_keys]
        self._logs = config.access_log != "off"
        self._logs_bodies = config.access_log == "prompts"
        self._cors = None
        if config.allowed_origins:
            self._cors = CORSMiddleware(
                application,
                allow_origins=config.allowed_origins,
                allow_methods=config.allowed_methods,
                allow_headers=config.allowed_headers,
                allow_credentials=config.allow_credentials,
                expose_headers=("X-Request-Id", "Retry-After"),
            )
        if self._logs:
            _log_to_standard_error()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start_s = time.monotonic()
        headers = Headers(raw=scope["headers"])
        request_id = _request_id(scope["headers"])
        reply = _Reply(send, [(b"x-request-id", request_id.encode()), *self._cors_headers(scope, headers)])
        body = _BodyLog(receive) if self._logs_bodies else None
        try:
            await self._pass(scope, body or receive, reply, headers)
        finally:
            duration_s = time.monotonic() - start_s
            self._observer(scope["method"], scope["path"], reply.status, duration_s)
            if self._logs:
                _log(scope, reply.status, duration_s, request_id, body)

    async def _pass(self, scope: Scope, receive: Receive, send: _Reply, headers: Headers) -> None:
        path = scope["path"]
        try:
            if self._cors is not None and _is_preflight(scope, headers):
                # Before the key is asked for: a browser sends none with this question.
                return await _preflight(self._cors, headers)(scope, receive, send)
            if self._key_digests and path not in OPEN_PATHS:
                self._check_key(headers)
        except HttpError as error:
            return await send_problem(send, problem_at(path, error))
        await self._application(scope, receive, send)

    def _check_key(self, headers: Headers) -> None:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        shown = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = _digest(shown)
        # All are compared, and by digests of one length, so that the time says nothing of how much was right.
        matches = [hmac.compare_digest(digest, known) for known in self._key_digests]
        if not any(matches):
            what = "the API key is wrong" if shown else "an API key is missing"
            raise HttpError(
                401,
                f"{what}; send one as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _cors_headers(self, scope: Scope, headers: Headers) -> list[tuple[bytes, bytes]]:
        """What a web page's browser is told with the reply itself."""
        cors = self._cors
        if cors is None or _is_preflight(scope, headers):
            return []
        origin = headers.get("origin")
        if origin is None or not cors.is_allowed_origin(origin):
            return [(b"vary", b"Origin")]
        told = MutableHeaders(cors.simple_headers)
        if not cors.allow_all_origins:
            cors.allow_explicit_origin(told, origin)
        return told.raw


class _Reply:
    """`send`, which adds headers to the start of the reply and remembers its status."""

    __slots__ = ("_headers", "_send", "status")

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]):
        self._send = send
        self._headers = headers
        self.status = 0

    def __call__(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self._headers]
        return self._send(message)


class _BodyLog:
    """`receive`, which remembers the beginning of the body."""

    def __init__(self, receive: Receive):
        self._receive = receive
        self.beginning = b""

    async def __call__(self) -> Message:
        message = await self._receive()
        if (room := MAX_LOGGED_BYTES - len(self.beginning)) > 0:
            self.beginning += message.get("body", b"")[:room]
        return message


def _request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's own, where it is one; otherwise one made here."""
    for name, value in headers:
        if name == b"x-request-id":
            given = value.decode("latin-1")
            return given if _REQUEST_ID.fullmatch(given) else os.urandom(16).hex()
    return os.urandom(16).hex()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _is_preflight(scope: Scope, headers: Headers) -> bool:
    return scope["method"] == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers


def _preflight(cors: CORSMiddleware, headers: Headers) -> Response:
    """The answer to a browser that asks what a page may do. Raises HttpError for what it may not."""
    answer = cors.preflight_response(headers)
    if answer.status_code == 200:
        own = ("content-type", "content-length")
        return Response(status_code=204, headers={k: v for k, v in answer.headers.items() if k not in own})
    raise HttpError(
        400, bytes(answer.body).decode(), code="cors_disallowed", headers={"Vary": answer.headers.get("vary", "Origin")}
    )


def _log(scope: Scope, status: int, duration_s: float, request_id: str, body: _BodyLog | None) -> None:
    """One line; of what a client chose, only what cannot be taken for another line."""
    client = scope.get("client") or ("-", 0)
    line = f"{client[0]}:{client[1]} {scope['method']} {scope['path']!r} {status or '-'} {duration_s:.3f}s {request_id}"
    if body is not None and body.beginning:
        line += f" {body.beginning.decode(errors='replace')!r}"
    access_logger.info("%s", line)


def _log_to_standard_error() -> None:
    """Unless the program has its own way of logging."""
    access_logger.setLevel(logging.INFO)
    if not access_logger.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        access_logger.addHandler(handler)
