"""Bodies: read from a request within bounds, and sent as JSON."""

from __future__ import annotations

import asyncio
import time
from collections.abc import MutableMapping
from typing import Any

import msgspec
from starlette.responses import Response

from jaxinfer.http.errors import ClientGone, HttpError, Problem
from jaxinfer.http.guard import Receive, Send

MAX_BODY_BYTES = 16 * 2**20

Scope = MutableMapping[str, Any]


async def read_body(
    scope: Scope, receive: Receive, arrival_s: float | None = None, timeout_s: float | None = None
) -> bytes:
    """The body of a request that says, or does not deny, that it is JSON.

    timeout_s: after `arrival_s` of the monotonic clock; None: it may take any time. Raises HttpError (408, 413, 415)
    or ClientGone.
    """
    if timeout_s is None or arrival_s is None:
        return await _read(scope, receive)
    try:
        async with asyncio.timeout(arrival_s + timeout_s - time.monotonic()):
            return await _read(scope, receive)
    except TimeoutError:
        message = f"the body did not come within {timeout_s:g} s, the limit of this server"
        raise HttpError(408, message, code="request_timeout", headers={"Connection": "close"}) from None


async def _read(scope: Scope, receive: Receive) -> bytes:
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


async def send_json(send: Send, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    """Sends a whole reply."""
    head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    head += [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def send_problem(send: Send, what: Problem) -> None:
    await send_json(send, what.status, what.body, what.headers)


def json_response(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
