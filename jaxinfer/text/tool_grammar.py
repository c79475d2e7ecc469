"""Grammars of tool calls: what an output must be where a client wants a call for certain."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from jaxinfer.structured import StructuredOutputs
from jaxinfer.text.grammar import json_options
from jaxinfer.types import InvalidRequest

MAX_CALLS = 32
"""Calls in one output where several are allowed: a model that finds no end would go on to the end of its context."""
ANY_TEXT = r"(.|\n)*"
FORMATS = ("hermes",)
"""Formats of `tool_calls` whose grammar is known."""


def tool_calls(
    schemas: Mapping[str, Mapping[str, Any]],
    *,
    name: str | None = None,
    required: bool = True,
    parallel: bool = True,
    format: str = "hermes",
    special: Collection[str] = (),
) -> StructuredOutputs:
    """The form of an output that is one tool call, or some where `parallel`, with arguments that fit their schemas.

    schemas: of the parameters of each function, by its name; name: the only one that may be called, None for any.
    Unless `required`, there may be text before, between and behind calls, or text alone: what begins as a call is one.
    special: of the format's markers those that are special tokens of the tokenizer: there, their text is not the token.
    Checked like any other form, by `grammar.check`: it names a keyword that cannot be enforced. Raises InvalidRequest
    for an unknown name or a format without a grammar.
    """
    if name is not None and name not in schemas:
        raise InvalidRequest(
            f"tool_choice names the function {name!r}; tools has {', '.join(schemas)}", param="tool_choice"
        )
    if format not in FORMATS:
        raise InvalidRequest(
            f"a tool call cannot be enforced in the format {format!r} of this model; it can be in {', '.join(FORMATS)}",
            param="tool_choice",
        )
    wanted = schemas if name is None else {name: schemas[name]}
    rules = [f"call_{i}: {_hermes_call(*one)}" for i, one in enumerate(wanted.items())]
    opening, closing = (
        marker if marker in special else json.dumps(marker) for marker in ("<tool_call>", "</tool_call>")
    )
    body = f'"\\n" ({" | ".join(f"call_{i}" for i in range(len(rules)))}) "\\n" {closing}'
    if required:
        more = f' ("\\n" call){{0,{MAX_CALLS - 1}}}' if parallel else ""
        head = [f"start: call{more}", f"call: {opening} {body}"]
    else:
        # A lazy lexeme ends where it first can, and from there on nothing but a call is left.
        begin = f"text {opening}" if opening in special else f"open\nopen[lazy]: /{ANY_TEXT}<tool_call>/"
        head = ["start: call* text" if parallel else "start: call | text", f"text: /{ANY_TEXT}/"]
        head += [f"call: begin {body}", f"begin: {begin}"]
    lark = [*head, *rules]
    return StructuredOutputs(grammar="\n".join(lark), param="tools")


def _hermes_call(name: str, schema: Mapping[str, Any]) -> str:
    """The JSON of a call. The arguments are a grammar of their own, so that references in their schema hold."""
    head = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
    return f'{head} %json {json.dumps(arguments_schema(schema) | {"x-guidance": json_options()})} "}}"'


def arguments_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Of an object, whatever it leaves open; of an empty one for a function without parameters, as OpenAI has it."""
    if not schema:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **schema}
