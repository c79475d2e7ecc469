"""Calls as Mistral's models write them: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`.

Models of 2025 and later write `[TOOL_CALLS]name[ARGS]{...}`, once for each call, some without `[ARGS]`.
"""

from __future__ import annotations

import secrets

from jaxinfer.text.tool_calls.reading import (
    Ended,
    Malformed,
    Reader,
    ToolCall,
    Tools,
    after_space,
    call_of,
    json_object,
    parse,
    until,
    write,
)

_CALLS, _ARGS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class Mistral:
    """A list of calls, or one call by name."""

    name = "mistral"
    openings = (_CALLS,)
    first_char = ""
    markers = (_CALLS, _ARGS, _CALL_ID)

    def new_id(self) -> str:
        """Nine letters and digits: the templates of most of these models refuse a conversation with any other id."""
        return secrets.token_hex(5)[:9]

    def is_written_by(self, template_source: str) -> bool:
        return _CALLS in template_source

    def read(self, opening: str, tools: Tools) -> Reader:
        del opening, tools
        char = yield from after_space((yield))
        if char != "[":
            head = yield from until(char, "{", one_line=True)
            name = head.removesuffix(_ARGS).partition(_CALL_ID)[0].strip()
            if not name:
                raise Malformed
            text = yield from json_object("{")
            char = yield ToolCall(name, write(parse(text)))
            raise Malformed if char else Ended
        while True:
            char = yield from after_space((yield))
            text = yield from json_object(char)
            char = yield from after_space((yield call_of(text)))
            if char == "]":
                return
            if char != ",":
                raise Malformed if char else Ended
