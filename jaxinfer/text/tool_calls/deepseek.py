"""Calls as DeepSeek-V3, R1 and V3.1 write them, between tokens of their own.

V3 and R1 write the kind, the name and the arguments in a fenced block: `function<sep>name`, a line with three backticks
and `json`, the object, three backticks. V3.1 writes `name<sep>` and the object.
"""

from __future__ import annotations

from jaxinfer.text.tool_calls.reading import (
    Malformed,
    Reader,
    ToolCall,
    Tools,
    after_space,
    closing,
    json_object,
    literal,
    new_call_id,
    one_of,
    parse,
    until,
    write,
)

_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEP = "<｜tool▁sep｜>"


class DeepSeekV3:
    """A section of calls. Each is complete with its JSON: what closes it may be missing at the end."""

    name = "deepseek_v3"
    openings = (_CALLS_BEGIN,)
    first_char = ""
    markers = (_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_END, _SEP)

    def new_id(self) -> str:
        return new_call_id()

    def is_written_by(self, template_source: str) -> bool:
        return _CALLS_BEGIN in template_source

    def read(self, opening: str, tools: Tools) -> Reader:
        del opening, tools
        char = yield
        while (yield from one_of(char, (_CALL_BEGIN, _CALLS_END))) == _CALL_BEGIN:
            name = yield from until((yield), _SEP)
            char = yield from after_space((yield))
            fenced = char != "{"
            if fenced:
                name = yield from until(char, "\n")
                yield from literal((yield), "```json")
                char = yield from after_space((yield))
            text = yield from json_object(char)
            if not (name := name.strip()):
                raise Malformed
            char = yield ToolCall(name, write(parse(text)))
            if fenced:
                yield from closing(char, "```")
                char = yield
            yield from closing(char, _CALL_END)
            char = yield
