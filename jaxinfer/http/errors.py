"""Failures as HTTP sees them: the status, the headers and the one JSON shape that every error body has."""

from __future__ import annotations

import logging
from typing import NamedTuple

import msgspec

from jaxinfer.types import EngineDead, InvalidRequest, QueueFull

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1
"""What an overloaded server tells clients to wait."""


MAX_MESSAGE_CHARS = 2000
"""Longer messages are cut: they show what the client sent, which can be megabytes."""


class HttpError(Exception):
    """A refusal that has an HTTP status of its own, such as an unknown route or model."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None, headers: dict | None = None):
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = headers or {}


class RequestFailed(RuntimeError):
    """The engine failed this one request; others go on."""


class ShuttingDown(RuntimeError):
    """The server stopped before the request was done."""


class RequestTimeout(RuntimeError):
    """The request took longer than the server lets any take."""


class ClientGone(Exception):
    """The client closed its connection; nobody reads a reply any more."""


class Problem(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes  # JSON; OpenAI's is {"error": {message, type, param, code}}


ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""What Anthropic's clients know; other statuses below 500 are invalid_request_error, and the rest api_error."""


NO_THREADS = "thread_unsupported_request"
"""The code by which Anthropic's client learns that it has to send whole conversations, and does."""


def problem_at(path: str, error: BaseException) -> Problem:
    """What a client is told of `error` at an address, in the words of the API that it belongs to."""
    is_anthropic = path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/")
    return anthropic_problem(error) if is_anthropic else problem(error)


def anthropic_problem(error: BaseException) -> Problem:
    """The same failure in the form of Anthropic's API: {"type": "error", "error": {type, message}}."""
    what = problem(error)
    told = msgspec.json.decode(what.body)["error"]
    kind = ANTHROPIC_TYPES.get(what.status, "invalid_request_error" if what.status < 500 else "api_error")
    shown = {"type": kind, "message": told["message"]}
    if told["code"] == NO_THREADS:
        shown["details"] = {"error_code": NO_THREADS}
    return what._replace(body=msgspec.json.encode({"type": "error", "error": shown}))


def problem(error: BaseException) -> Problem:
    """What a client is told of `error`. An error that nothing here foresaw is logged, and told without its details."""
    retry = {"Retry-After": str(RETRY_AFTER_S)}
    match error:
        case HttpError():
            kind = "server_error" if error.status >= 500 else "invalid_request_error"
            return _problem(error.status, str(error), kind, error.param, error.code, error.headers)
        case InvalidRequest():
            return _problem(400, str(error), "invalid_request_error", error.param, error.code)
        case QueueFull():
            return _problem(
                503, str(error) or "the waiting queue is full", "overloaded_error", None, "queue_full", retry
            )
        case ShuttingDown():
            return _problem(503, str(error), "server_error", None, "shutting_down", retry)
        case RequestTimeout():
            return _problem(504, str(error), "server_error", None, "request_timeout")
        case EngineDead():
            return _problem(500, f"the engine stopped: {error}", "server_error", None, "engine_dead")
        case RequestFailed():
            return _problem(500, str(error), "server_error", None, "engine_error")
    logger.error("unforeseen error in a request", exc_info=error)
    return _problem(500, f"internal error ({type(error).__name__})", "server_error", None, "internal_error")


def _problem(
    status: int, message: str, kind: str, param: str | None, code: str, headers: dict[str, str] | None = None
) -> Problem:
    error = {"message": _cut(message), "type": kind, "param": param and _cut(param), "code": code}
    return Problem(status, headers or {}, msgspec.json.encode({"error": error}))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE_CHARS else text[:MAX_MESSAGE_CHARS] + "..."
