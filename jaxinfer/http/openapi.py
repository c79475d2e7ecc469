"""The server's OpenAPI document: every route, with bodies as the structs that read them have them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from jaxinfer.http import known_fields, message_request, pooling, response_request
from jaxinfer.http.known_fields import Label, Only, Refused, Renamed, Rule
from jaxinfer.http.message_request import MessagesRequest
from jaxinfer.http.openai import ChatRequest, CompletionRequest
from jaxinfer.http.response_request import ResponsesRequest
from jaxinfer.http.tokens import DetokenizeRequest, TokenizeText

PATH = "/openapi.json"
REF = "#/components/schemas/{name}"

RULES: Mapping[type[msgspec.Struct], Mapping[str, Rule]] = {
    CompletionRequest: {**known_fields.FIELDS, **known_fields.COMPLETION_FIELDS},
    ChatRequest: {**known_fields.FIELDS, **known_fields.CHAT_FIELDS},
    ResponsesRequest: response_request.FIELDS,
    MessagesRequest: message_request.FIELDS,
    TokenizeText: {},
    DetokenizeRequest: {},
}
"""Every body, and the fields that are accepted besides those of its struct."""


class Operation(NamedTuple):
    """What one method does at one path."""

    summary: str
    reply: tuple[str, ...] | str | None = ()
    """The fields that a reply always has; or the media type of one that is no JSON; or None: it is always refused."""
    body: tuple[type[msgspec.Struct], ...] = ()
    """One of these."""
    streams: bool = False


_COMPLETION = ("id", "object", "created", "model", "choices", "usage")
_RESPONSE = ("id", "object", "created_at", "model", "status", "output", "usage", "error", "incomplete_details")
_MESSAGE = ("id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage")
_MODEL = ("id", "object", "created", "owned_by", "max_model_len")
_SESSION = ("object", "session_id", "model", "num_tokens", "saved")
_DELETED = ("id", "object", "deleted")
_FILE = ("id", "object", "bytes", "created_at", "filename", "purpose")
_BATCH = ("id", "object", "endpoint", "input_file_id", "status", "created_at")
_HEALTH = Operation("Whether the engine runs", ("status",))
_READY = Operation("Whether to send requests here", ("status",))
_TOKENIZE = Operation("A prompt's token ids", ("count", "max_model_len", "tokens"), (TokenizeText, ChatRequest))
_DETOKENIZE = Operation("The text of token ids", ("prompt",), (DetokenizeRequest,))
_POOL = Operation("What a model that pools would do, and this one does not", None)
_POOL_PATHS = [f"{prefix}/{name}" for name in pooling.WANTS for prefix in ("", "/v1", "/v2")]

OPERATIONS: Mapping[str, Mapping[str, Operation]] = {
    "/v1/completions": {"POST": Operation("Complete a text", _COMPLETION, (CompletionRequest,), streams=True)},
    "/v1/chat/completions": {"POST": Operation("Answer a conversation", _COMPLETION, (ChatRequest,), streams=True)},
    "/v1/responses": {"POST": Operation("Make a response", _RESPONSE, (ResponsesRequest,), streams=True)},
    "/v1/responses/{response_id}": {
        "GET": Operation("Show a stored response", _RESPONSE),
        "DELETE": Operation("Delete a stored response", _DELETED),
    },
    "/v1/responses/{response_id}/cancel": {"POST": Operation("Cancel a response that runs", _RESPONSE)},
    "/v1/messages": {"POST": Operation("Answer, as Anthropic has it", _MESSAGE, (MessagesRequest,), streams=True)},
    "/v1/messages/count_tokens": {
        "POST": Operation("Count a conversation's tokens", ("input_tokens",), (MessagesRequest,))
    },
    "/tokenizer_info": {
        "GET": Operation("The tokenizer's special tokens", ("bos_token", "eos_token", "chat_template"))
    },
    **dict.fromkeys(("/tokenize", "/v1/tokenize"), {"POST": _TOKENIZE}),
    **dict.fromkeys(("/detokenize", "/v1/detokenize"), {"POST": _DETOKENIZE}),
    **dict.fromkeys(_POOL_PATHS, {"POST": _POOL}),
    "/v1/models": {"GET": Operation("List the models", ("object", "data"))},
    "/v1/models/{name}": {"GET": Operation("Show a model", _MODEL)},
    "/v1/sessions/{session_id}": {"DELETE": Operation("Delete a session", _DELETED)},
    "/v1/sessions/{session_id}/save": {"POST": Operation("Write a session to disk", _SESSION)},
    "/v1/sessions/{session_id}/load": {"POST": Operation("Read a session into the cache", _SESSION)},
    "/v1/sessions/{session_id}/manifest": {"GET": Operation("Tell of a session", _SESSION)},
    "/v1/files": {"POST": Operation("Upload a file", _FILE), "GET": Operation("List the files", ("object", "data"))},
    "/v1/files/{id}": {"GET": Operation("Show a file", _FILE), "DELETE": Operation("Delete a file", _DELETED)},
    "/v1/files/{id}/content": {"GET": Operation("Download a file", "*/*")},
    "/v1/batches": {"POST": Operation("Start a batch", _BATCH), "GET": Operation("List them", ("object", "data"))},
    "/v1/batches/{id}": {"GET": Operation("Show a batch", _BATCH)},
    "/v1/batches/{id}/cancel": {"POST": Operation("Cancel a batch", _BATCH)},
    **dict.fromkeys(("/health", "/healthz", "/ping"), {"GET": _HEALTH}),
    **dict.fromkeys(("/ready", "/readyz"), {"GET": _READY}),
    "/version": {"GET": Operation("The server's version", ("version",))},
    "/metrics": {"GET": Operation("Metrics for Prometheus", "text/plain")},
    "/": {"GET": Operation("The page: a chat box and live numbers", "text/html")},
    "/static/{name}": {"GET": Operation("A file of the page", "*/*")},
    PATH: {"GET": Operation("This document", ("openapi", "info", "paths", "components"))},
}
"""By path, without the kinds of its parameters, and by method. A route that is not here cannot be documented."""

ERRORS: Mapping[str, Any] = {
    "Error": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": "string"},
                },
            }
        },
    },
    "AnthropicError": {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            },
        },
    },
}


def openapi_route(routes: Sequence[Route], version: str) -> Route:
    """The route of the document, which tells of these routes and of itself."""
    encoded = b""

    async def show(request: HttpRequest) -> Response:
        nonlocal encoded
        del request
        encoded = encoded or msgspec.json.encode(document([*routes, route], version))
        return Response(encoded, media_type="application/json")

    route = Route(PATH, show)
    return route


def document(routes: Sequence[Route], version: str) -> dict[str, Any]:
    """OpenAPI 3.1. Raises KeyError for a route that OPERATIONS does not tell of."""
    paths: dict[str, Any] = {}
    for route in routes:
        path = re.sub(r":\w+}", "}", route.path)
        methods = sorted((route.methods or {"POST"}) - {"HEAD"})
        paths.setdefault(path, {}).update({m.lower(): _operation(path, OPERATIONS[path][m]) for m in methods})
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxinfer", "version": version},
        "paths": paths,
        "components": {"schemas": {**_bodies(), **ERRORS}},
    }


def _operation(path: str, operation: Operation) -> dict[str, Any]:
    error = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    shown: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {"default": {"description": "A refusal or a failure", "content": _json(_ref(error))}},
    }
    if (content := _reply(operation)) is not None:
        shown["responses"]["200"] = {"description": "The reply", "content": content}
    if names := re.findall(r"{(\w+)}", path):
        shown["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
    if operation.body:
        refs = [_ref(kind.__name__) for kind in operation.body]
        schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
        shown["requestBody"] = {"required": True, "content": _json(schema)}
    return shown


def _reply(operation: Operation) -> dict[str, Any] | None:
    if operation.reply is None:
        return None
    if isinstance(operation.reply, str):
        return {operation.reply: {"schema": {"type": "string"}}}
    content = _json({"type": "object", "required": list(operation.reply)})
    return content | ({"text/event-stream": {}} if operation.streams else {})


def _bodies() -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components(list(RULES), ref_template=REF)
    for kind, rules in RULES.items():
        properties = schemas[kind.__name__]["properties"]
        for name, rule in rules.items():
            if name not in properties and not isinstance(rule, Refused):
                properties[name] = _accepted(rule, properties)
    return schemas


def _accepted(rule: Rule, properties: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a field that no struct has."""
    match rule:
        case Renamed(ours):
            return properties[ours] | {"description": f"the same as {ours}"} if ours in properties else {}
        case Only(values, reason):
            return {"enum": [*values, None], "description": reason}
        case Label(reason) | Refused(reason):
            return {"description": reason}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": REF.format(name=name)}


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
