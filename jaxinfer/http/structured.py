"""What a request body says of the form of its outputs: OpenAI's response_format, and the fields of vLLM."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn, Protocol

import msgspec

from jaxinfer.structured import StructuredOutputs
from jaxinfer.types import InvalidRequest

FORM_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
"""Fields of a body that each ask for a form."""
_SCHEMA_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class StructuredBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """vLLM's `structured_outputs`; the first five as in `StructuredOutputs`."""

    json: str | dict[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    disable_fallback: bool | None = None  # there is no other implementation that could step in
    disable_additional_properties: bool | None = None
    structural_tag: str | None = None


class HasForm(Protocol):
    """The fields of a request body that are read here."""

    @property
    def response_format(self) -> dict[str, Any] | None: ...
    @property
    def structured_outputs(self) -> StructuredBody | None: ...
    @property
    def guided_json(self) -> str | dict[str, Any] | None: ...
    @property
    def guided_regex(self) -> str | None: ...
    @property
    def guided_choice(self) -> list[str] | None: ...
    @property
    def guided_grammar(self) -> str | None: ...
    @property
    def guided_whitespace_pattern(self) -> str | None: ...


def form_of(body: HasForm) -> StructuredOutputs | None:
    """The form that is asked for; None: any. InvalidRequest where there are two, or for what cannot be met."""
    found = [
        form
        for form in (
            None if body.response_format is None else _response_format(body.response_format),
            None if body.structured_outputs is None else _structured_outputs(body.structured_outputs),
            *_guided(body),
        )
        if form is not None
    ]
    if len(found) > 1:
        names = [form.param for form in found]
        _refuse(names[1], f"{' and '.join(names)} are both given; an output has one form")
    return found[0] if found else None


def _guided(body: HasForm) -> list[StructuredOutputs]:
    space = body.guided_whitespace_pattern
    forms: list[StructuredOutputs] = []
    if body.guided_json is not None:
        forms.append(StructuredOutputs(json=body.guided_json, whitespace_pattern=space, param="guided_json"))
    elif space is not None:
        _refuse("guided_whitespace_pattern", "guided_whitespace_pattern needs guided_json")
    if body.guided_regex is not None:
        forms.append(StructuredOutputs(regex=body.guided_regex, param="guided_regex"))
    if body.guided_choice is not None:
        forms.append(StructuredOutputs(choice=body.guided_choice, param="guided_choice"))
    if body.guided_grammar is not None:
        forms.append(StructuredOutputs(grammar=body.guided_grammar, param="guided_grammar"))
    return forms


def _structured_outputs(body: StructuredBody) -> StructuredOutputs:
    for name in ("disable_additional_properties", "structural_tag"):
        if getattr(body, name):
            _refuse(f"structured_outputs.{name}", f"structured_outputs.{name} is not supported")
    return StructuredOutputs(
        json=body.json,
        json_object=bool(body.json_object),
        regex=body.regex,
        choice=body.choice,
        grammar=body.grammar,
        disable_any_whitespace=bool(body.disable_any_whitespace),
        whitespace_pattern=body.whitespace_pattern,
    )


def _response_format(given: Mapping[str, Any]) -> StructuredOutputs | None:
    kind, name = given.get("type"), "response_format"
    if kind not in ("text", "json_object", "json_schema"):
        _refuse(f"{name}.type", f"{name}.type is {kind!r}; supported: text, json_object, json_schema")
    _check_fields(given, {"type", "json_schema"} if kind == "json_schema" else {"type"}, name)
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True, param=name)
    described, name = given.get("json_schema"), f"{name}.json_schema"
    if not isinstance(described, Mapping):
        _refuse(name, f"{name} is {described!r:.60}; an object with name and schema is needed")
    _check_fields(described, {"name", "description", "schema", "strict"}, name)
    label, schema, strict = (described.get(key) for key in ("name", "schema", "strict"))
    if not (isinstance(label, str) and _SCHEMA_NAME.fullmatch(label)):
        _refuse(f"{name}.name", f"{name}.name is {label!r:.80}; 1 to 64 characters of A-Z a-z 0-9 _ - are needed")
    if not isinstance(schema, Mapping):
        _refuse(f"{name}.schema", f"{name}.schema is {schema!r:.60}; a JSON Schema is needed")
    if not isinstance(strict, bool | None):
        _refuse(f"{name}.strict", f"{name}.strict is {strict!r:.60}; true or false is needed (both enforce the schema)")
    return StructuredOutputs(json=schema, param=f"{name}.schema")


def _check_fields(given: Mapping[str, Any], known: set[str], path: str) -> None:
    for key in given:
        if key not in known:
            _refuse(f"{path}.{key}", f"{path}.{key} is not a supported field")


def _refuse(param: str, message: str) -> NoReturn:
    raise InvalidRequest(message, param=param)
