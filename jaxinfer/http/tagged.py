"""Objects inside a body that tell by their field `type` what they are: items, content parts and blocks."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import msgspec

from jaxinfer.http import known_fields, openai
from jaxinfer.http.known_fields import Fields, Rule
from jaxinfer.types import InvalidRequest

_fields_of = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def open_object(raw: msgspec.Raw, path: str, what: str, default: str | None) -> tuple[Fields, Any]:
    """The fields of the object at `path`, and its type, or `default` where it tells none.

    what: it is to be, for the message. Raises InvalidRequest.
    """
    try:
        fields = _fields_of(raw)
        kind = msgspec.json.decode(fields["type"]) if "type" in fields else default
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{path} is not {what}: {error}", param=path, code="invalid_type") from None
    return fields, kind


def read[Kind: msgspec.Struct](kind: type[Kind], fields: Fields, rules: Mapping[str, Rule], path: str) -> Kind:
    """The object of these fields, after the rules for those that it does not have. Raises InvalidRequest."""
    known_fields.apply(fields, kind, rules, f"{path}.")
    return openai.parse(_decoder(kind), msgspec.json.encode(fields), path)


@functools.cache
def _decoder(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)
