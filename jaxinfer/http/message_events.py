"""Replies of Anthropic's Messages API: their content blocks, whole and as events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from jaxinfer.http.errors import Problem
from jaxinfer.http.named_events import named_event
from jaxinfer.text.message import Call, Part, Thought, Words
from jaxinfer.types import FinishReason

_encode = msgspec.json.encode


class MessageWriter:
    """One reply: takes its parts, gives events, and keeps the blocks that they add up to.

    Where `parts` is called its events may be thrown away: a reply that is not streamed is its `body` at the end.
    """

    def __init__(self, message_id: str, model: str):
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._blocks: list[dict[str, Any]] = []
        self._is_open = False
        self._stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._has_calls = False

    def start(self, usage: dict[str, int]) -> bytes:
        """The first events."""
        return named_event("message_start", {"message": self.body(usage)}) + named_event("ping", {})

    def parts(self, parts: Sequence[Part]) -> bytes:
        """Events of what is new."""
        return b"".join(map(self._part, parts))

    def end(self, reason: FinishReason, stop: str | int | None, usage: dict[str, int]) -> bytes:
        """The last events. stop: what ended the output, where that was not the model itself."""
        events = self._close()
        if reason is FinishReason.LENGTH:
            self._stop["stop_reason"] = "max_tokens"
        elif isinstance(stop, str):
            self._stop |= {"stop_reason": "stop_sequence", "stop_sequence": stop}
        else:
            self._stop["stop_reason"] = "tool_use" if self._has_calls else "end_turn"
        events += named_event("message_delta", {"delta": dict(self._stop), "usage": usage})
        return events + named_event("message_stop", {})

    def body(self, usage: dict[str, int]) -> dict[str, Any]:
        """The message, as far as it has come."""
        return {**self._head, "content": [_shown(block) for block in self._blocks], **self._stop, "usage": usage}

    def _part(self, part: Part) -> bytes:
        match part:
            case Words(text):
                return self._text("text", "text", text)
            case Thought(text):
                return self._text("thinking", "thinking", text)
            case Call(_, id, name, arguments):
                self._has_calls = True
                events = self._open({"type": "tool_use", "id": id, "name": name, "input": {}})
                self._blocks[-1]["input"] = msgspec.Raw(arguments.encode())
                delta = {"type": "input_json_delta", "partial_json": arguments}
                return events + self._delta(delta) + self._close()

    def _text(self, kind: str, field: str, text: str) -> bytes:
        events = b""
        if not self._is_open or self._blocks[-1]["type"] != kind:
            start = {"type": kind, field: ""}
            events = self._open(start | {"signature": ""} if kind == "thinking" else start)
            self._blocks[-1][field] = []
        self._blocks[-1][field].append(text)
        return events + self._delta({"type": f"{kind}_delta", field: text})

    def _open(self, block: dict[str, Any]) -> bytes:
        events = self._close()
        self._is_open = True
        self._blocks.append(dict(block))
        return events + named_event("content_block_start", {"index": len(self._blocks) - 1, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return named_event("content_block_delta", {"index": len(self._blocks) - 1, "delta": delta})

    def _close(self) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        return named_event("content_block_stop", {"index": len(self._blocks) - 1})


def error_events(problem: Problem) -> bytes:
    """How a stream ends that has begun and fails."""
    return b"event: error\ndata: " + problem.body + b"\n\n"


def _shown(block: dict[str, Any]) -> dict[str, Any]:
    """A block whose text, collected in pieces, is one again."""
    return {name: "".join(value) if isinstance(value, list) else value for name, value in block.items()}
