"""Calls as Qwen3-Coder and Qwen3.5 write them: `<tool_call><function=name><parameter=key>value</parameter>...`.

Values are bare text, so the schema of the function's parameters says what they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.text.tool_calls.reading import (
    Malformed,
    Reader,
    ToolCall,
    Tools,
    closing,
    literal,
    new_call_id,
    one_of,
    parse,
    until,
    write,
)

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


class Qwen3Coder:
    """One call in each pair of tags; the outer ones may be missing."""

    name = "qwen3_coder"
    openings = (_CALL, _FUNCTION)
    first_char = ""
    markers = (_CALL, _CALL_END)

    def new_id(self) -> str:
        return new_call_id()

    def is_written_by(self, template_source: str) -> bool:
        return _FUNCTION in template_source and _PARAMETER in template_source

    def read(self, opening: str, tools: Tools) -> Reader:
        char = yield
        if opening == _CALL:
            yield from literal(char, _FUNCTION)
            char = yield
        name = (yield from until(char, ">", one_line=True)).strip()
        if not name:
            raise Malformed
        schema = tools.get(name, {}).get("properties") or {}
        arguments: dict[str, Any] = {}
        while (yield from one_of((yield), (_PARAMETER, _FUNCTION_END))) == _PARAMETER:
            key = (yield from until((yield), ">", one_line=True)).strip()
            text = yield from until((yield), _PARAMETER_END)
            arguments[key] = _value(text, schema.get(key))
        char = yield ToolCall(name, write(arguments))
        yield from closing(char, _CALL_END)


def _value(text: str, schema: object) -> Any:
    """What the text of a parameter is by its schema: JSON where that is no string, and text where it is no JSON."""
    text = text.removeprefix("\n").removesuffix("\n")
    if _is_string(schema):
        return text
    try:
        value = parse(text)
        write({"": value})
    except Malformed:
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)  # as Python writes them
    return value


def _is_string(schema: object) -> bool:
    """Whether a schema admits strings and no other values but null; without a type it says nothing."""
    if not isinstance(schema, Mapping):
        return True
    kinds = schema.get("type")
    if kinds is None:
        values = schema.get("enum")
        alternatives = next((schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)), None)
        if isinstance(alternatives, list):
            return all(_is_string(one) or one == {"type": "null"} for one in alternatives)
        return all(isinstance(value, str) for value in values) if isinstance(values, list) else False
    return set(kinds if isinstance(kinds, list) else [kinds]) <= {"string", "null"}
