"""Replies of OpenAI's Responses API: their output items, whole and as events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxinfer.http.errors import Problem
from jaxinfer.http.named_events import named_event
from jaxinfer.http.turns import Turns
from jaxinfer.text.message import Call, Part, Thought, Words
from jaxinfer.types import FinishReason

_encode = msgspec.json.encode
_decode = msgspec.json.decode

KINDS = {Words: ("output_text", "message", "msg"), Thought: ("reasoning_text", "reasoning", "rs")}
"""Of a part that is text: the type of its content part, that of its item, and how the item's id begins."""


class ResponseWriter:
    """One reply: takes its parts, gives events, and keeps the items that they add up to.

    Where `parts` is called its events may be thrown away: a reply that is not streamed is its `body` at the end.
    fields: what the reply says besides output, status and usage.
    """

    def __init__(self, fields: dict[str, Any]):
        self._fields = fields
        self._status: dict[str, Any] = {"status": "in_progress", "error": None, "incomplete_details": None}
        self._items: list[dict[str, Any]] = []
        self._open: type[Words] | type[Thought] | None = None  # the kind of the last item while it goes on
        self._texts: list[str] = []  # of that item, in pieces
        self._next_number = 0

    @property
    def status(self) -> str:
        return self._status["status"]

    def add_to(self, turns: Turns) -> None:
        """Adds the items to a conversation."""
        for item in self._items:
            if item["type"] == "function_call":
                turns.call(item["call_id"], item["name"], item["arguments"])
                continue
            text = "".join(part["text"] for part in item["content"])
            if item["type"] == "message":
                turns.words("assistant", text)
            else:
                turns.thought(text)

    def start(self) -> bytes:
        """The first events."""
        response = {"response": self.body(None)}
        return self._event("response.created", response) + self._event("response.in_progress", response)

    def parts(self, parts: Sequence[Part]) -> bytes:
        """Events of what is new."""
        return b"".join(map(self._part, parts))

    def end(self, reason: FinishReason, usage: dict[str, Any]) -> bytes:
        """The last events."""
        is_whole = reason is not FinishReason.LENGTH
        events = self._close("completed" if is_whole else "incomplete")
        self._status["status"] = "completed" if is_whole else "incomplete"
        if not is_whole:
            self._status["incomplete_details"] = {"reason": "max_output_tokens"}
        self._fields["completed_at"] = int(time.time()) if is_whole else None
        return events + self._event(f"response.{self.status}", {"response": self.body(usage)})

    def fail(self, problem: Problem) -> bytes:
        """The last events of a reply that has begun and fails."""
        error = _decode(problem.body)["error"]
        events = self._close("incomplete")
        self._status |= {"status": "failed", "error": {"code": error["code"], "message": error["message"]}}
        return events + self._event("response.failed", {"response": self.body(None)})

    def cancel(self) -> bytes:
        """The last events of a reply that the client has cancelled."""
        events = self._close("incomplete")
        self._status["status"] = "cancelled"
        return events + self._event("response.incomplete", {"response": self.body(None)})

    def body(self, usage: dict[str, Any] | None) -> dict[str, Any]:
        """The response, as far as it has come."""
        return {**self._fields, **self._status, "output": list(self._items), "usage": usage}

    def _part(self, part: Part) -> bytes:
        if isinstance(part, Call):
            return self._call(part)
        events = b"" if self._open is type(part) else self._close("completed") + self._begin(type(part))
        self._texts.append(part.text)
        kind = KINDS[type(part)][0]
        fields = {**self._place(), "delta": part.text, **_logprobs(kind)}
        return events + self._event(f"response.{kind}.delta", fields)

    def _begin(self, part: type[Words] | type[Thought]) -> bytes:
        kind, item_type, prefix = KINDS[part]
        item: dict[str, Any] = {"id": _make_id(prefix), "type": item_type, "status": "in_progress", "content": []}
        item |= {"role": "assistant"} if item_type == "message" else {"summary": []}
        self._items.append(item)
        self._open, self._texts = part, []
        events = self._event("response.output_item.added", {"output_index": len(self._items) - 1, "item": item})
        item["content"] = [_content(kind, "")]
        return events + self._event("response.content_part.added", {**self._place(), "part": item["content"][0]})

    def _close(self, status: str) -> bytes:
        """Ends the item that is open, if one is."""
        if self._open is None:
            return b""
        kind, text, item = KINDS[self._open][0], "".join(self._texts), self._items[-1]
        self._open = None
        item |= {"status": status, "content": [_content(kind, text)]}
        return (
            self._event(f"response.{kind}.done", {**self._place(), "text": text, **_logprobs(kind)})
            + self._event("response.content_part.done", {**self._place(), "part": item["content"][0]})
            + self._event("response.output_item.done", {"output_index": len(self._items) - 1, "item": item})
        )

    def _call(self, call: Call) -> bytes:
        events = self._close("completed")
        item = {"id": _make_id("fc"), "type": "function_call", "status": "in_progress"}
        item |= {"call_id": call.id, "name": call.name, "arguments": ""}
        self._items.append(item)
        index = {"output_index": len(self._items) - 1}
        place = {"item_id": item["id"], **index}
        events += self._event("response.output_item.added", {**index, "item": item})
        events += self._event("response.function_call_arguments.delta", {**place, "delta": call.arguments})
        item |= {"status": "completed", "arguments": call.arguments}
        done = {**place, "name": call.name, "arguments": call.arguments}
        events += self._event("response.function_call_arguments.done", done)
        return events + self._event("response.output_item.done", {**index, "item": item})

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        number, self._next_number = self._next_number, self._next_number + 1
        return named_event(name, {"sequence_number": number} | fields)


def usage_fields(
    prompt_tokens: int, cached_tokens: int, output_tokens: int, reasoning_tokens: int = 0
) -> dict[str, Any]:
    """reasoning_tokens: those of the output up to the last that showed more of the thought."""
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": prompt_tokens + output_tokens,
    }


def _content(kind: str, text: str) -> dict[str, Any]:
    part = {"type": kind, "text": text}
    return part | {"annotations": []} | _logprobs(kind) if kind == "output_text" else part


def _logprobs(kind: str) -> dict[str, Any]:
    """Clients require the list of the words' log-probabilities, which is not filled here."""
    return {"logprobs": []} if kind == "output_text" else {}


def _make_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
