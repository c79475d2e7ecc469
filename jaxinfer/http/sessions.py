"""The routes of sessions: what is done with them, and what is told of them.

A session is the conversation of the requests that give its id. Everything is done by the engine, so that it does not
matter which front end is asked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from jaxinfer.http.errors import ClientGone, HttpError, problem
from jaxinfer.http.guard import OpenRequests
from jaxinfer.types import (
    EngineDead,
    EngineHandle,
    InvalidRequest,
    SessionAction,
    SessionInfo,
    UnknownSession,
    check_session_id,
)

PATH = "/v1/sessions/{session_id:session_id}"
EMPTY_BODIES = (b"", b"{}")


class _AnyText(Convertor[str]):
    """So that an id with a slash or a line feed is refused as what it is, and not as an address that is not there."""

    regex = r"[\s\S]*"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("session_id", _AnyText())


def session_routes(engine: EngineHandle, open_requests: OpenRequests) -> list[Route]:
    """Save, load, manifest and delete."""

    def route(path: str, method: str, action: SessionAction) -> Route:
        return Route(path, _endpoint(engine, open_requests, action), methods=[method])

    return [
        route(f"{PATH}/save", "POST", SessionAction.SAVE),
        route(f"{PATH}/load", "POST", SessionAction.LOAD),
        route(f"{PATH}/manifest", "GET", SessionAction.MANIFEST),
        route(PATH, "DELETE", SessionAction.DELETE),
    ]


def _endpoint(
    engine: EngineHandle, open_requests: OpenRequests, action: SessionAction
) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def answer(request: HttpRequest) -> Response:
        try:
            session_id = request.path_params["session_id"]
            check_session_id(session_id)
            await _refuse_body(request)
            async with open_requests.guard(request.receive):
                info = await _act(engine, action, session_id)
        except (ClientGone, ClientDisconnect):
            return Response()  # which nobody reads; the engine goes on
        except Exception as error:
            what = problem(error)
            return Response(what.body, what.status, what.headers, media_type="application/json")
        return Response(msgspec.json.encode(_body(action, info)), media_type="application/json")

    return answer


async def _refuse_body(request: HttpRequest) -> None:
    """All is said by method and path: a body with more in it than an empty object asks for what is not done."""
    body = b""
    async for part in request.stream():
        body = (body + part).strip()
        if not any(empty.startswith(body) for empty in EMPTY_BODIES):
            raise InvalidRequest("the body must be empty: method and path say it all", code="invalid_field")
    if body not in EMPTY_BODIES:
        raise InvalidRequest("the body is not valid JSON; leave it empty", code="invalid_json")


async def _act(engine: EngineHandle, action: SessionAction, session_id: str) -> SessionInfo:
    try:
        if (reason := engine.failure) is not None:
            raise EngineDead(reason)
        return await engine.session(action, session_id)
    except EngineDead as error:
        raise HttpError(503, f"the engine stopped: {error}", code="engine_dead") from error
    except UnknownSession as error:
        raise HttpError(404, str(error), code="session_not_found", param="session_id") from error
    except TimeoutError as error:
        message = f"{action} of session {session_id!r} takes too long to wait for; it goes on, and manifest tells of it"
        raise HttpError(504, message, code="session_timeout") from error
    except RuntimeError as error:
        raise HttpError(500, str(error), code="session_failed") from error


def _body(action: SessionAction, info: SessionInfo) -> dict[str, Any]:
    if action is SessionAction.DELETE:
        return {"id": info.session_id, "object": "session", "deleted": True}
    return {"object": "session"} | dataclasses.asdict(info)
