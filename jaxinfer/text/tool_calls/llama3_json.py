"""Calls as Llama 3.1 and later write them: `{"name": ..., "parameters": {...}}`, perhaps after `<|python_tag|>`.

Nothing else marks them, so an answer that is JSON with the name of a function is taken for a call of it.
"""

from __future__ import annotations

from jaxinfer.text.tool_calls.reading import (
    Ended,
    Malformed,
    Reader,
    Tools,
    after_space,
    call_of,
    json_object,
    new_call_id,
)


class Llama3Json:
    """A call begins the answer or follows the tag. Several are joined by semicolons."""

    name = "llama3_json"
    openings = ("<|python_tag|>",)
    first_char = "{"
    markers = ("<|python_tag|>",)

    def new_id(self) -> str:
        return new_call_id()

    def is_written_by(self, template_source: str) -> bool:
        return "<|python_tag|>" in template_source or '"parameters": dictionary of argument name' in template_source

    def read(self, opening: str, tools: Tools) -> Reader:
        del opening
        char = yield from after_space((yield))
        while True:
            call = call_of((yield from json_object(char)))
            if call.name not in tools:
                raise Malformed
            char = yield from after_space((yield call))
            if char == ";":
                char = yield from after_space((yield))
            if char == "":
                raise Ended
