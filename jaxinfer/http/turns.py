"""Chat messages, from what other APIs give apart: thought, words, tool calls, and answers to these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxinfer.types import InvalidRequest


class Turns:
    """A conversation that grows item by item; its messages are as `openai.Message` has them.

    What the assistant gives in a row is one message: its thought, then its words, then its calls. Words between calls
    are joined to those before them, as in a reply of a chat. messages: the conversation so far, which is not changed.
    """

    def __init__(self, messages: Sequence[dict[str, Any]] = ()):
        self._messages = list(messages)
        self._num_given = len(self._messages)
        self._call_ids = {call["id"] for message in messages for call in message.get("tool_calls") or ()}

    def words(self, role: str, text: str) -> None:
        """What one of `openai.ROLES` says."""
        last = self._last_of_assistant() if role == "assistant" else None
        if last is not None and (last["content"] is None or "tool_calls" in last):
            last["content"] = (last["content"] or "") + text
        else:
            self._messages.append({"role": role, "content": text})

    def thought(self, text: str) -> None:
        """What the assistant thought before it answered."""
        last = self._last_of_assistant()
        if last is not None and last["content"] is None and "tool_calls" not in last:
            last["reasoning_content"] += text
        else:
            self._messages.append({"role": "assistant", "content": None, "reasoning_content": text})

    def call(self, id: str, name: str, arguments: str | dict[str, Any]) -> None:
        """A call of the assistant's. arguments: an object, or the JSON of one."""
        last = self._last_of_assistant()
        if last is None:
            last = {"role": "assistant", "content": None}
            self._messages.append(last)
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        last.setdefault("tool_calls", []).append(call)
        self._call_ids.add(id)

    def answer(self, id: str, text: str, path: str) -> None:
        """What a call has given. Raises InvalidRequest, at `path` of the body, where no call before has that id."""
        if id not in self._call_ids:
            raise InvalidRequest(f"{path} is {id!r}; no tool call before it has that id", param=path)
        self._messages.append({"role": "tool", "content": text, "tool_call_id": id})

    def messages(self) -> list[dict[str, Any]]:
        """All of them. One of nothing but a thought has empty words: templates want some."""
        return [
            message | {"content": ""} if message["content"] is None and "tool_calls" not in message else message
            for message in self._messages
        ]

    def _last_of_assistant(self) -> dict[str, Any] | None:
        """The assistant's message that is still growing."""
        if len(self._messages) == self._num_given or self._messages[-1]["role"] != "assistant":
            return None
        return self._messages[-1]
