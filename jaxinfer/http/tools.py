"""Tools as clients of the OpenAI API describe them: definitions, what is chosen, and the calls that they send back."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import msgspec

from jaxinfer.types import InvalidRequest

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_decode = msgspec.json.decode


class Callable(NamedTuple):
    """The functions that the model may call."""

    schemas: Mapping[str, Mapping[str, Any]]  # of their parameters, by name
    required: bool = False  # whether it has to call one
    name: str | None = None  # the one that it has to call
    strict: bool = False  # whether a client asks that arguments fit their schemas, call or no call

    @property
    def constrain(self) -> bool:
        """Whether the output has to match a grammar."""
        return self.required or self.strict


def check_tools(tools: Sequence[Any] | None, tool_choice: Any, parallel_tool_calls: bool | None) -> Callable:
    """The functions that the model may call, and whether it has to: no schemas, if it may call none.

    As OpenAI has it, an empty list is refused, and so is a choice where there are no tools. Raises InvalidRequest
    with the place of what is wrong.
    """
    if tools is None:
        for name, value in (("tool_choice", tool_choice), ("parallel_tool_calls", parallel_tool_calls)):
            if value is not None:
                _refuse(name, f"{name} is {value!r}, but there are no tools; it is only allowed with tools")
        return Callable({})
    if not tools:
        _refuse("tools", "tools is an empty list; give at least one tool, or leave it out")
    schemas: dict[str, Mapping[str, Any]] = {}
    strict = False
    for i, tool in enumerate(tools):
        name, schema = _check_tool(tool, f"tools[{i}]")
        if name in schemas:
            _refuse(f"tools[{i}].function.name", f"tools[{i}].function.name is {name!r}, the name of an earlier tool")
        schemas[name] = schema
        strict |= bool(tool["function"].get("strict"))
    if tool_choice == "none":
        return Callable({})
    if tool_choice in (None, "auto"):
        return Callable(schemas, strict=strict)
    return Callable(schemas, required=True, name=_chosen(tool_choice, schemas))


def _chosen(choice: Any, schemas: Mapping[str, Any]) -> str | None:
    """The function that the model has to call; None: any."""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if choice != "required" and not isinstance(name, str):
        wanted = "'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}"
        _refuse("tool_choice", f"tool_choice is {choice!r}; it must be {wanted}")
    if name is not None and name not in schemas:
        _refuse("tool_choice", f"tool_choice names the function {name!r}; tools has {', '.join(schemas)}")
    return name


def _check_tool(tool: Any, path: str) -> tuple[str, Mapping[str, Any]]:
    """The name and the schema of the parameters of one tool."""
    kind = _mapping(tool, path).get("type")
    if kind != "function":
        _refuse(f"{path}.type", f"{path}.type is {kind!r}; only 'function' is supported")
    _known(tool, path, ("type", "function"))
    path = f"{path}.function"
    function = _mapping(tool.get("function"), path)
    _known(function, path, ("name", "description", "parameters", "strict"))
    name = _name(function, path)
    description, strict = function.get("description"), function.get("strict")
    if description is not None and not isinstance(description, str):
        _refuse(f"{path}.description", f"{path}.description is {description!r}; it must be a string")
    if not isinstance(strict, bool | None):
        _refuse(f"{path}.strict", f"{path}.strict is {strict!r}; it must be true or false")
    schema = function.get("parameters")
    return name, {} if schema is None else _check_schema(schema, f"{path}.parameters")


def _check_schema(schema: Any, path: str) -> Mapping[str, Any]:
    kind = _mapping(schema, path).get("type")
    if kind != "object":
        _refuse(f"{path}.type", f"{path}.type is {kind!r}; the parameters of a function are a schema of type 'object'")
    properties, required = schema.get("properties"), schema.get("required")
    if properties is not None:
        _mapping(properties, f"{path}.properties")
    if required is not None and not (isinstance(required, list) and all(isinstance(one, str) for one in required)):
        _refuse(f"{path}.required", f"{path}.required is {required!r}; it must be a list of names")
    return schema


def template_calls(calls: Sequence[Any], path: str) -> list[dict[str, Any]]:
    """The calls of an earlier reply as templates read them: with the arguments as an object."""
    return [_template_call(call, f"{path}[{i}]") for i, call in enumerate(calls)]


def _template_call(call: Any, path: str) -> dict[str, Any]:
    kind, id = _mapping(call, path).get("type", "function"), call.get("id")
    _known(call, path, ("id", "type", "function", "index"))  # index: of those who send back what was streamed
    if kind != "function":
        _refuse(f"{path}.type", f"{path}.type is {kind!r}; only 'function' is supported")
    if not isinstance(id, str) or not id:
        _refuse(f"{path}.id", f"{path}.id is {id!r}; it must be a string, which the answer to the call names")
    path = f"{path}.function"
    function = _mapping(call.get("function"), path)
    _known(function, path, ("name", "arguments"))
    arguments = _arguments(function.get("arguments"), f"{path}.arguments")
    return {"id": id, "type": "function", "function": {"name": _name(function, path), "arguments": arguments}}


def _arguments(arguments: Any, path: str) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = _decode(arguments) if arguments.strip() else {}
        except (msgspec.DecodeError, RecursionError) as error:
            _refuse(path, f"{path} is not valid JSON: {error}")
    return _mapping(arguments, path, "it must be an object, or a string that is the JSON of one")


def check_answers(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuses a message of a tool that answers no call of an earlier message. `messages` are as templates read them."""
    asked: set[str] = set()
    for i, message in enumerate(messages):
        asked.update(call["id"] for call in message.get("tool_calls", ()))
        if message["role"] == "tool" and (id := message["tool_call_id"]) not in asked:
            path = f"messages[{i}].tool_call_id"
            _refuse(path, f"{path} is {id!r}; no message before it has a tool call of that id")


def _name(function: Mapping[str, Any], path: str) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        _refuse(f"{path}.name", f"{path}.name is {name!r}; it must have 1 to 64 characters of a-z A-Z 0-9 _ -")
    return name


def _mapping(value: Any, path: str, wanted: str = "it must be an object") -> dict[str, Any]:
    if value is None:
        _refuse(path, f"{path} is missing; {wanted}")
    if not isinstance(value, dict):
        _refuse(path, f"{path} is {value!r}; {wanted}")
    return value


def _known(value: Mapping[str, Any], path: str, names: Sequence[str]) -> None:
    for name in value:
        if name not in names:
            _refuse(f"{path}.{name}", f"{path}.{name} is not a supported field; supported: {', '.join(names)}")


def _refuse(param: str, message: str) -> NoReturn:
    raise InvalidRequest(message, param=param)
