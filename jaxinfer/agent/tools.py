"""What a model may call: Python functions, the sandbox's commands and whatever else runs on a JSON object."""

from __future__ import annotations

import copy
import inspect
import json
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from jaxinfer.agent.sandbox import Sandbox, SandboxUnavailable
from jaxinfer.agent.supervise import MAX_OUTPUT_CHARS, Outcome

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_PARAMETER_LINE = re.compile(r"\s*(?::param\s+)?(\w+)\s*(?:\([^)]*\))?:\s+(\S.*)")


class ToolError(Exception):
    """A call that failed in a way that the model can mend; it is told the message as it is."""


class Tool(NamedTuple):
    """Something to call by name."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments, which are an object."""
    run: Callable[[dict[str, Any]], str]
    """Raises ToolError; any other exception is told to the model, too."""

    def definition(self) -> dict[str, Any]:
        """As the OpenAI API and chat templates have it."""
        described = {"description": self.description} if self.description else {}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.parameters}}


class ToolResult(NamedTuple):
    """What a model is told of a call."""

    text: str
    failed: bool


class Toolbox:
    """The tools of one agent. ValueError for two of the same name, or a name that the API does not allow."""

    def __init__(self, tools: Iterable[Tool | Callable[..., Any]] = ()):
        self._tools: dict[str, Tool] = {}
        for tool in (one if isinstance(one, Tool) else from_function(one) for one in tools):
            if not _NAME.fullmatch(tool.name):
                raise ValueError(f"a tool is named {tool.name!r}; a name has 1 to 64 characters of a-z A-Z 0-9 _ -")
            if tool.name in self._tools:
                raise ValueError(f"two tools are named {tool.name!r}; give each a name of its own")
            self._tools[tool.name] = tool

    def __len__(self) -> int:
        return len(self._tools)

    def __iter__(self):
        return iter(self._tools.values())

    def definitions(self) -> list[dict[str, Any]]:
        """Of all tools, in the order given."""
        return [tool.definition() for tool in self]

    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The schemas of the arguments, by name."""
        return {tool.name: tool.parameters for tool in self}

    def call(self, name: str, arguments: str) -> ToolResult:
        """Runs a call, whose arguments are JSON text. What goes wrong is a text for the model, never an exception."""
        tool = self._tools.get(name)
        if tool is None:
            known = ", ".join(self._tools) or "none"
            return ToolResult(f"error: there is no tool {name!r}; the tools are: {known}", failed=True)
        try:
            values = json.loads(arguments or "{}", strict=False)
        except (ValueError, RecursionError) as error:
            return ToolResult(f"error: the arguments of {name} are not valid JSON: {error}", failed=True)
        if not isinstance(values, dict):
            return ToolResult(f"error: the arguments of {name} must be a JSON object", failed=True)
        try:
            return ToolResult(_cut(tool.run(values)), failed=False)
        except ToolError as error:
            return ToolResult(_cut(str(error)), failed=True)
        except Exception as error:
            return ToolResult(_cut(f"error: {name} raised {type(error).__name__}: {error}"), failed=True)


def from_function(function: Callable[..., Any]) -> Tool:
    """A tool from a function with type hints and a docstring.

    The schema is derived from the hints (whatever msgspec converts from JSON: numbers, strings, lists, enums,
    dataclasses, ...), the description is the docstring, and lines such as `city: where to look` in it describe the
    parameters. Arguments are checked and converted before the call. What it returns is told as it is if it is text,
    and as JSON otherwise. TypeError for parameters without a hint, or that have no name in a call.
    """
    name = getattr(function, "__name__", type(function).__name__)
    doc = inspect.getdoc(function)
    if not doc:
        raise TypeError(f"the tool {name!r} has no docstring; a model learns from it what the tool does")
    hints = typing.get_type_hints(function, include_extras=True)
    lines = filter(None, map(_PARAMETER_LINE.fullmatch, doc.splitlines()))
    described: dict[str, str] = {found[1]: found[2] for found in lines}
    fields = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"the tool {name!r} has the parameter {parameter}; only named ones can be called")
        if parameter.name not in hints:
            raise TypeError(f"the parameter {parameter.name!r} of the tool {name!r} has no type hint")
        hint = hints[parameter.name]
        if parameter.name in described:
            hint = typing.Annotated[hint, msgspec.Meta(description=described[parameter.name])]
        default = () if parameter.default is parameter.empty else (_default(parameter.default),)
        fields.append((parameter.name, hint, *default))
    arguments = msgspec.defstruct(f"{name}_arguments", fields, forbid_unknown_fields=True, kw_only=True)
    parameters = _schema(arguments, name)

    def run(values: dict[str, Any]) -> str:
        try:
            converted = msgspec.convert(values, arguments)
        except msgspec.ValidationError as error:
            raise ToolError(f"error: the arguments of {name} do not fit: {error}") from None
        result = function(**{field: getattr(converted, field) for field, *_ in fields})
        return result if isinstance(result, str) else msgspec.json.encode(result).decode()

    return Tool(name, doc, parameters, run)


def is_object(arguments: str) -> bool:
    """Whether a call's arguments are the JSON text of an object."""
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


def _default(value: Any) -> Any:
    """A default as msgspec takes it: a fresh copy where it can be changed."""
    return (
        msgspec.field(default_factory=lambda: copy.deepcopy(value)) if isinstance(value, list | dict | set) else value
    )


def _schema(arguments: type, name: str) -> dict[str, Any]:
    try:
        (root,), components = msgspec.json.schema_components([arguments], ref_template="#/$defs/{name}")
    except TypeError as error:
        raise TypeError(f"the tool {name!r} has a parameter that JSON cannot give: {error}") from error
    own = components.pop(str(root["$ref"]).rpartition("/")[2])
    schema = {"type": "object", "properties": own["properties"], "required": own["required"]}
    return schema | ({"$defs": components} if components else {})


def sandbox_tools(sandbox: Sandbox) -> list[Tool]:
    """`shell` and `python`, which run in a sandbox. SandboxUnavailable, with the reason, where they cannot."""
    if sandbox.refusal is not None:
        raise SandboxUnavailable(f"the tools shell and python are off: {sandbox.refusal}")
    limits = sandbox.limits
    where = (
        f"It runs without a sandbox in {sandbox.workspace}, for at most {limits.time_s:g} s"
        if sandbox.bare
        else f"It runs in a sandbox without network, for at most {limits.time_s:g} s and "
        f"{limits.memory_bytes >> 20} MiB; files in the current folder are kept"
    )

    def run(command: Callable[[str], Outcome], text: str) -> str:
        try:
            outcome = command(text)
        except (ValueError, SandboxUnavailable) as error:
            raise ToolError(f"error: {error}") from None
        told = sandbox.explain(outcome)
        if outcome.status or outcome.ended_by:
            raise ToolError(told)
        return told

    def shell(command: str) -> str:
        """Run a shell command and return what it prints."""
        return run(sandbox.shell, command)

    def python(code: str) -> str:
        """Run a Python program and return what it prints; print the results that you want to see."""
        return run(sandbox.python, code)

    tools = [from_function(function) for function in (shell, python)]
    return [tool._replace(description=f"{tool.description} {where}.") for tool in tools]


def _cut(text: str) -> str:
    """A result of at most 8,000 characters, with half surrogates replaced: a tokenizer takes no others."""
    text = text.encode("utf-8", "replace").decode()
    if len(text) <= MAX_OUTPUT_CHARS + 400:  # what the sandbox adds to its own 8,000
        return text
    return f"{text[:MAX_OUTPUT_CHARS]}\n[output cut: the first {MAX_OUTPUT_CHARS} of {len(text)} characters are shown]"
