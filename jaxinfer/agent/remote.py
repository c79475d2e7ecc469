"""A model behind a URL that speaks OpenAI's chat completions, as the loop asks it."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import re
import ssl
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from jaxinfer.agent.model import ContextFull, Ending, Message, ModelFailed, Part
from jaxinfer.text.message import Call, Thought, Words
from jaxinfer.text.tool_calls.formats import FORMATS
from jaxinfer.text.tool_calls.reading import new_call_id
from jaxinfer.types import InvalidRequest, SamplingParams

_CONTEXT_WORDS = re.compile(r"context.{0,40}(length|window|size)|maximum context|too many tokens|too long", re.I)
_SENT = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty")
"""Fields of SamplingParams that are sent where they are set; others are refused."""


class RemoteModel:
    """Streams replies from `url`, with or without its `/v1`. Connects directly, not through a proxy.

    model: the name to ask for; None: the first that the server lists. timeout_s: the longest silence of the server.
    """

    def __init__(
        self,
        url: str,
        sampling: SamplingParams | None = None,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout_s: float = 600.0,
    ):
        self._url = urllib.parse.urlsplit(url)
        if self._url.scheme not in ("http", "https") or not self._url.hostname:
            raise InvalidRequest(f"{url!r} is no URL of a server; write it as http://127.0.0.1:8000", param="url")
        path = self._url.path.rstrip("/")
        self._path = path if path.endswith("/v1") else f"{path}/v1"
        self._headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s
        self._body = _sampling_body(sampling or SamplingParams())
        self._name = model

    @property
    def name(self) -> str:
        """The name that is asked for. Raises ModelFailed where the server has to be asked and gives none."""
        if self._name is None:
            with self._request("GET", "/models") as answer:
                listed = _json(answer.read()).get("data")
            if not isinstance(listed, list) or not listed or not isinstance(listed[0].get("id"), str):
                raise ModelFailed(f"{self._url.geturl()} lists no model; name one with --model")
            self._name = listed[0]["id"]
        return self._name

    @property
    def openings(self) -> Sequence[str]:
        """Of all known formats: the server has one of them."""
        return tuple(dict.fromkeys(opening for known in FORMATS.values() for opening in known.openings))

    @property
    def tools_refusal(self) -> str | None:
        """Only the server knows."""
        return None

    def reply(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Iterator[Part]:
        """See AgentModel."""
        body = {
            "model": self.name,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"tools": list(tools)} if tools else {}),
            **self._body,
        }
        with self._request("POST", "/chat/completions", json.dumps(body)) as answer:
            yield from _parts(_events(answer))

    def close(self) -> None:
        """Every request has a connection of its own."""

    @contextlib.contextmanager
    def _request(self, method: str, path: str, body: str | None = None) -> Iterator[http.client.HTTPResponse]:
        """One request. Leaving early closes the connection, which cancels it at the server."""
        assert self._url.hostname is not None
        if self._url.scheme == "https":
            connection = http.client.HTTPSConnection(
                self._url.hostname, self._url.port, timeout=self._timeout_s, context=ssl.create_default_context()
            )
        else:
            connection = http.client.HTTPConnection(self._url.hostname, self._url.port, timeout=self._timeout_s)
        try:
            connection.request(method, self._path + path, body and body.encode(), self._headers)
            answer = connection.getresponse()
            with contextlib.closing(answer):
                if answer.status != 200:
                    self._refuse(answer.status, answer.read(1 << 20))
                yield answer
        except (OSError, http.client.HTTPException) as error:
            raise ModelFailed(f"{self._url.geturl()}: {error or type(error).__name__}") from error
        finally:
            connection.close()

    def _refuse(self, status: int, body: bytes) -> NoReturn:
        try:
            error = _json(body).get("error")
        except ModelFailed:
            error = None
        if isinstance(error, dict):
            message, code = error.get("message"), error.get("code")
        else:
            message, code = error, None
        if not message:
            shown = body[:200].decode(errors="replace")
            raise ModelFailed(f"{self._url.geturl()} answers {status}: {shown!r}")
        if status in (400, 413, 422) and (code == "context_length_exceeded" or _CONTEXT_WORDS.search(str(message))):
            raise ContextFull(str(message))
        if status in (400, 404, 422):
            raise InvalidRequest(f"the server refuses the request: {message}")
        raise ModelFailed(f"the server answers {status}: {message}")


def _sampling_body(sampling: SamplingParams) -> dict[str, Any]:
    """The body's fields for what is set."""
    changed = {
        field.name: value
        for field in dataclasses.fields(sampling)
        if (value := getattr(sampling, field.name)) != getattr(SamplingParams(), field.name)
    }
    for name in changed:
        if name not in _SENT:
            raise InvalidRequest(f"{name} is not sent to a URL; supported: {', '.join(_SENT)}", param=name)
    return changed


def _json(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ModelFailed(f"the server sends {data[:200].decode(errors='replace')!r}, which is no JSON object")
    return value


def _events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events of a stream, up to [DONE]. ModelFailed where it breaks off."""
    for line in answer:
        kind, _, data = line.partition(b":")
        if kind != b"data":
            continue
        if data.strip() == b"[DONE]":
            return
        event = _json(data)
        if error := event.get("error"):
            raise ModelFailed(f"the server failed: {error.get('message') if isinstance(error, dict) else error}")
        yield event
    raise ModelFailed("the server closed the connection in the middle of a reply")


def _parts(events: Iterator[dict[str, Any]]) -> Iterator[Part]:
    """Words and thoughts as they come; calls once they are whole, which only the end of the reply shows."""
    calls: dict[int, dict[str, str]] = {}
    finish, usage = None, {}
    for event in events:
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                yield Thought(thought)
            if delta.get("content"):
                yield Words(delta["content"])
            for piece in delta.get("tool_calls") or ():
                call = calls.setdefault(piece.get("index", len(calls)), {"id": "", "name": "", "arguments": ""})
                function = piece.get("function") or {}
                call["id"] = piece.get("id") or call["id"]
                call["name"] += function.get("name") or ""
                call["arguments"] += function.get("arguments") or ""
            finish = choice.get("finish_reason") or finish
    if finish is None:
        raise ModelFailed("the server ended a reply without a reason")
    for number, (_, call) in enumerate(sorted(calls.items())):
        yield Call(number, call["id"] or new_call_id(), call["name"], call["arguments"] or "{}")
    details = usage.get("prompt_tokens_details") or {}
    yield Ending(finish, usage.get("prompt_tokens"), details.get("cached_tokens"), usage.get("completion_tokens"))
