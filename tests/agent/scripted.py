"""A model without weights: it says what a test has written down, and remembers what it was asked."""

from __future__ import annotations

import copy

from jaxinfer.agent.model import ContextFull, Ending
from jaxinfer.text.message import Call, Thought, Words


def call(name, arguments="{}", number=0):
    """A tool call whose id tells which it is."""
    return Call(number, f"call_{name}_{number}", name, arguments)


class ScriptedModel:
    """Each reply is a list of parts, or one text; an exception is raised, a function called with the messages."""

    name = "scripted"
    openings = ("<tool_call>",)
    tools_refusal = None

    def __init__(self, *replies, max_chars=None):
        self._replies = list(replies)
        self._max_chars = max_chars  # of all messages; more do not fit into its context
        self.asked = []
        self.tools = []
        self.num_closed = 0

    def reply(self, messages, tools):
        if self._max_chars is not None and sum(len(m.get("content") or "") for m in messages) > self._max_chars:
            raise ContextFull(f"more than {self._max_chars} characters")
        self.asked.append(copy.deepcopy(messages))
        self.tools = tools
        return self._parts(self._replies.pop(0), sum(len(str(m)) for m in messages))

    def _parts(self, reply, num_chars):
        if callable(reply):
            reply = reply(self.asked[-1])
        if isinstance(reply, BaseException):
            raise reply
        parts = [Words(reply)] if isinstance(reply, str) else list(reply)
        try:
            for part in parts:
                if isinstance(part, BaseException):
                    raise part
                yield part
        finally:
            self.num_closed += 1
        if not any(isinstance(part, Ending) for part in parts):
            reason = "tool_calls" if any(isinstance(part, Call) for part in parts) else "stop"
            yield Ending(reason, num_chars, num_chars // 2, len(parts))

    def close(self):
        pass


__all__ = ["Call", "Ending", "ScriptedModel", "Thought", "Words", "call"]
