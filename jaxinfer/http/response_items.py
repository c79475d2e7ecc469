"""Input items of OpenAI's Responses API: each adds to the conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from jaxinfer.http import tagged, tools
from jaxinfer.http.known_fields import Fields, Label, Only, Refused, Rule
from jaxinfer.http.turns import Turns
from jaxinfer.types import InvalidRequest

ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text")

_EARLIER = Label("items of an earlier reply have one")
ITEM_FIELDS: Mapping[str, Rule] = {"id": _EARLIER, "status": _EARLIER, "phase": _EARLIER}
CALL_FIELDS: Mapping[str, Rule] = ITEM_FIELDS | {
    "namespace": Refused("functions are in no namespace"),
    "caller": Only(({"type": "direct"},), "only the model calls functions"),
}
REASONING_FIELDS: Mapping[str, Rule] = ITEM_FIELDS | {
    "summary": Only(([],), "a summary is not the thought, which is in content"),
    "encrypted_content": Refused("it is another server's, and cannot be read here"),
}
PART_FIELDS: Mapping[str, Rule] = {
    "annotations": Label("parts of an earlier reply have them"),
    "logprobs": Label("parts of an earlier reply have them"),
}
TOOL_FIELDS: Mapping[str, Rule] = {
    "defer_loading": Only((False,), "the model is shown all functions"),
    "allowed_callers": Only((["direct"],), "only the model calls functions"),
    "output_schema": Refused("what a function gives is not checked"),
}


class _Item(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    pass


class InputMessage(_Item, kw_only=True, frozen=True):
    role: str
    content: str | list[msgspec.Raw]
    type: str = "message"


class InputPart(_Item, kw_only=True, frozen=True):
    type: str
    text: str


class FunctionCall(_Item, kw_only=True, frozen=True):
    type: str
    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(_Item, kw_only=True, frozen=True):
    type: str
    call_id: str
    output: str | list[msgspec.Raw]


class Reasoning(_Item, kw_only=True, frozen=True):
    type: str
    content: list[msgspec.Raw] | None = None


class FunctionTool(_Item, kw_only=True, frozen=True):
    type: str
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


def add_items(turns: Turns, items: Sequence[msgspec.Raw]) -> None:
    """Adds input items to the conversation. Raises InvalidRequest with the place of what is wrong."""
    for i, raw in enumerate(items):
        path = f"input[{i}]"
        fields, kind = tagged.open_object(raw, path, "an object", "message")
        if not isinstance(kind, str) or kind not in _ADD:
            _refuse(f"{path}.type", f"{path}.type is {kind!r}; supported: {', '.join(_ADD)}")
        _ADD[kind](turns, fields, path)


def read_tools(raws: Sequence[msgspec.Raw] | None) -> list[dict[str, Any]] | None:
    """The functions as a chat's tools; None where there are none. Raises InvalidRequest."""
    return tools.chat_tools([msgspec.structs.asdict(tool) for tool in _functions(raws)], "parameters")


def shown_tools(raws: Sequence[msgspec.Raw] | None) -> list[dict[str, Any]]:
    """The functions as a response shows them."""
    return [msgspec.structs.asdict(tool) | {"strict": bool(tool.strict)} for tool in _functions(raws)]


def _functions(raws: Sequence[msgspec.Raw] | None) -> list[FunctionTool]:
    functions = []
    for i, raw in enumerate(raws or ()):
        path = f"tools[{i}]"
        fields, kind = tagged.open_object(raw, path, "an object", None)
        if kind != "function":
            _refuse(f"{path}.type", f"{path}.type is {kind!r}; only 'function' is supported")
        functions.append(tagged.read(FunctionTool, fields, TOOL_FIELDS, path))
    return functions


def read_choice(choice: Any) -> Any:
    """A choice of tools as a chat has it; what is no choice is left as it is, to be refused there."""
    if isinstance(choice, dict) and choice.get("type") == "function" and choice.keys() == {"type", "name"}:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _add_message(turns: Turns, fields: Fields, path: str) -> None:
    message = tagged.read(InputMessage, fields, ITEM_FIELDS, path)
    if message.role not in ROLES:
        _refuse(f"{path}.role", f"{path}.role is {message.role!r}; supported: {', '.join(ROLES)}")
    turns.words(message.role, _text(message.content, f"{path}.content", TEXT_PARTS))


def _add_call(turns: Turns, fields: Fields, path: str) -> None:
    call = tagged.read(FunctionCall, fields, CALL_FIELDS, path)
    if not call.call_id:
        _refuse(f"{path}.call_id", f"{path}.call_id is empty; it is what the output of the call names")
    tools.check_name({"name": call.name}, path)
    tools.read_arguments(call.arguments, f"{path}.arguments")
    turns.call(call.call_id, call.name, call.arguments)


def _add_output(turns: Turns, fields: Fields, path: str) -> None:
    output = tagged.read(FunctionCallOutput, fields, CALL_FIELDS, path)
    turns.answer(output.call_id, _text(output.output, f"{path}.output", TEXT_PARTS), f"{path}.call_id")


def _add_reasoning(turns: Turns, fields: Fields, path: str) -> None:
    item = tagged.read(Reasoning, fields, REASONING_FIELDS, path)
    if thought := _text(item.content or [], f"{path}.content", ("reasoning_text",)):
        turns.thought(thought)


_ADD: Mapping[str, Callable[[Turns, Fields, str], None]] = {
    "message": _add_message,
    "function_call": _add_call,
    "function_call_output": _add_output,
    "reasoning": _add_reasoning,
}


def _text(content: str | list[msgspec.Raw], path: str, kinds: Sequence[str]) -> str:
    if isinstance(content, str):
        return content
    return "".join(_part_text(part, f"{path}[{i}]", kinds) for i, part in enumerate(content))


def _part_text(raw: msgspec.Raw, path: str, kinds: Sequence[str]) -> str:
    fields, kind = tagged.open_object(raw, path, "an object", None)
    if kind is not None and kind not in kinds:
        _refuse(f"{path}.type", f"{path}.type is {kind!r}; only text is supported: {', '.join(kinds)}")
    return tagged.read(InputPart, fields, PART_FIELDS, path).text


def _refuse(param: str, message: str) -> NoReturn:
    raise InvalidRequest(message, param=param)
