"""Calls as Hermes, Qwen2.5 and Qwen3 write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from jaxinfer.text.tool_calls.reading import Reader, Tools, after_space, call_of, closing, json_object, new_call_id


class Hermes:
    """A call is complete with its JSON: the closing tag may be missing."""

    name = "hermes"
    openings = ("<tool_call>",)
    first_char = ""
    markers = ("<tool_call>", "</tool_call>")

    def new_id(self) -> str:
        return new_call_id()

    def is_written_by(self, template_source: str) -> bool:
        return "<tool_call>" in template_source

    def read(self, opening: str, tools: Tools) -> Reader:
        del opening, tools
        char = yield from after_space((yield))
        text = yield from json_object(char)
        yield from closing((yield call_of(text)), "</tool_call>")
