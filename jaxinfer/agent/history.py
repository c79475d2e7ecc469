"""The conversation of an agent: its messages with what their turns took, and how it is kept within the context."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxinfer.agent.tools import ToolResult, is_object
from jaxinfer.text.message import Call

KEPT_CHARS = 200
"""Of a tool's output that is shortened."""
INTERRUPTED = "[interrupted]"
STOPPED = "[stopped: the turns of this question are used up]"
UNREADABLE = "[tool call not read]"
"""Begins the message that shows a malformed call back: it is the user's for the template, and no question."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Turn:
    """One reply of the model, and the tools that it called. Counts are None where the model does not say."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Of the prompt, those that were not computed again."""
    completion_tokens: int | None = None
    finish_reason: str | None = None
    first_token_s: float | None = None
    """From asking to the first part of the reply."""
    reply_s: float = 0.0
    tool_s: float = 0.0
    num_calls: int = 0


class Entry(NamedTuple):
    """One message; what it took if it is a reply."""

    message: dict[str, Any]
    turn: Turn | None = None


class History:
    """Messages in order. A question begins an exchange, which goes on up to the next one."""

    def __init__(self, entries: Sequence[Entry] = ()):
        self.entries = list(entries)

    def messages(self, system: str | None) -> list[dict[str, Any]]:
        """What the model is shown."""
        first = [{"role": "system", "content": system}] if system else []
        return first + [entry.message for entry in self.entries]

    def ask(self, question: str) -> None:
        """Begins an exchange."""
        self.entries.append(Entry({"role": "user", "content": question}))

    def reply(self, thought: str, words: str, calls: Sequence[Call], turn: Turn | None) -> None:
        """A reply, with those of its calls that are shown to the model again."""
        message: dict[str, Any] = {"role": "assistant"}
        if words or not calls:
            message["content"] = words
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        self.entries.append(Entry(message, turn))

    def answer(self, call: Call, result: ToolResult) -> None:
        """What a call gave."""
        content = result.text
        self.entries.append(Entry({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}))

    def show_unreadable(self, reason: str) -> None:
        """Tells the model that it wrote a call that is none."""
        self.entries.append(Entry({"role": "user", "content": f"{UNREADABLE} {reason}"}))

    def make_room(self) -> str | None:
        """One step towards a shorter conversation; says what it did, or None where nothing is left to do.

        The oldest output of a tool that is not short yet is cut to its first 200 characters, the newest one last;
        when all are short, the oldest exchange goes. The exchange that is going on stays.
        """
        for i, (message, _) in enumerate(self.entries):
            if message["role"] == "tool" and len(message["content"]) > 2 * KEPT_CHARS:
                text = message["content"]
                cut = f"{text[:KEPT_CHARS]}\n[shortened: the first {KEPT_CHARS} of {len(text)} characters are kept]"
                self.entries[i] = Entry(message | {"content": cut})
                return f"shortened an output of {message['name']} from {len(text)} to {KEPT_CHARS} characters"
        starts = [i for i, (message, _) in enumerate(self.entries) if is_question(message)]
        if len(starts) < 2:
            return None
        asked = self.entries[starts[0]].message["content"]
        del self.entries[starts[0] : starts[1]]
        return f"forgot the exchange that began with {asked[:60]!r}"


def is_question(message: dict[str, Any]) -> bool:
    """Whether the user said it."""
    return message["role"] == "user" and not message["content"].startswith(UNREADABLE)


def as_shown(calls: Sequence[Call]) -> list[Call]:
    """The calls as they may be shown again: arguments that are no JSON object would spoil every later prompt."""
    return [call if is_object(call.arguments) else call._replace(arguments="{}") for call in calls]
