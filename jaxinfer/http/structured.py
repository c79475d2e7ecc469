"""What a request body says of the form of its outputs, in the words of OpenAI's two APIs, of Anthropic's and vLLM's."""

from __future__ import annotations

import operator
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
_forms_of = operator.attrgetter(*FORM_FIELDS)
_NO_FORMS = (None,) * len(FORM_FIELDS)
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


def asks_for_form(body: HasForm) -> bool:
    """Whether any of FORM_FIELDS is there."""
    return _forms_of(body) != _NO_FORMS


def form_of(body: HasForm) -> StructuredOutputs | None:
    """The form that is asked for; None: any. InvalidRequest where there are two, or for what cannot be met."""
    if not asks_for_form(body) and body.guided_whitespace_pattern is None:
        return None
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
    if kind != "json_schema":
        return text_format(given, name)
    _check_fields(given, {"type", "json_schema"}, name)
    described, name = given.get("json_schema"), f"{name}.json_schema"
    if not isinstance(described, Mapping):
        _refuse(name, f"{name} is {described!r:.60}; an object with name and schema is needed")
    _check_fields(described, {"name", "description", "schema", "strict"}, name)
    return _named_schema(described, name)


def text_format(given: Mapping[str, Any], path: str) -> StructuredOutputs | None:
    """The form in the words of OpenAI's Responses API, whose schema has no object of its own; None: any.

    path: where in the body it stands. Raises InvalidRequest.
    """
    kind = given.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        _refuse(f"{path}.type", f"{path}.type is {kind!r}; supported: text, json_object, json_schema")
    if kind == "json_schema":
        _check_fields(given, {"type", "name", "description", "schema", "strict"}, path)
        return _named_schema(given, path)
    _check_fields(given, {"type"}, path)
    return None if kind == "text" else StructuredOutputs(json_object=True, param=path)


def message_format(given: Mapping[str, Any], path: str) -> StructuredOutputs:
    """The form in the words of Anthropic's Messages API. Raises InvalidRequest."""
    if (kind := given.get("type")) != "json_schema":
        _refuse(f"{path}.type", f"{path}.type is {kind!r}; supported: json_schema")
    _check_fields(given, {"type", "schema"}, path)
    return _schema(given, path)


def _named_schema(described: Mapping[str, Any], path: str) -> StructuredOutputs:
    label, strict = described.get("name"), described.get("strict")
    if not (isinstance(label, str) and _SCHEMA_NAME.fullmatch(label)):
        _refuse(f"{path}.name", f"{path}.name is {label!r:.80}; 1 to 64 characters of A-Z a-z 0-9 _ - are needed")
    form = _schema(described, path)
    if not isinstance(strict, bool | None):
        _refuse(f"{path}.strict", f"{path}.strict is {strict!r:.60}; true or false is needed (both enforce the schema)")
    return form


def _schema(described: Mapping[str, Any], path: str) -> StructuredOutputs:
    schema = described.get("schema")
    if not isinstance(schema, Mapping):
        _refuse(f"{path}.schema", f"{path}.schema is {schema!r:.60}; a JSON Schema is needed")
    return StructuredOutputs(json=schema, param=f"{path}.schema")


def _check_fields(given: Mapping[str, Any], known: set[str], path: str) -> None:
    for key in given:
        if key not in known:
            _refuse(f"{path}.{key}", f"{path}.{key} is not a supported field")


def _refuse(param: str, message: str) -> NoReturn:
    raise InvalidRequest(message, param=param)
