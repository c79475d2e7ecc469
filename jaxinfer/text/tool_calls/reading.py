"""How a tool call is read: by a generator that is sent one character after the other.

A reader never looks ahead, so that it cannot matter how a text is cut. It yields a call with the character that
completes it, and otherwise None; the empty string tells it that the text has ended.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol


class ToolCall(NamedTuple):
    """A call that the model asks for."""

    name: str
    arguments: str
    """A JSON object, written anew: what a client parses is always valid."""


_OUTSIDE_STRINGS = frozenset('{}[]:,"+-.0123456789eEtrufalsn \t\r\n')
"""All that JSON has there: what is no JSON is known for that before its brackets are even."""

type Reader = Generator[ToolCall | None, str, None]
type Step[Result] = Generator[ToolCall | None, str, Result]
"""Part of a reader. Where it takes a character, that is the next one, already sent."""

type Tools = Mapping[str, Mapping[str, Any]]
"""The request's functions: the schemas of their parameters, by name."""


class Malformed(Exception):
    """This is no call. The character that was sent last is not part of it."""


class Ended(Exception):
    """The text has ended where nothing but closing tags was still to come."""


class ToolCallFormat(Protocol):
    """How one family of models writes calls."""

    @property
    def name(self) -> str: ...

    @property
    def openings(self) -> Sequence[str]:
        """What begins a call, wherever it stands. The reader is sent what follows."""
        ...

    @property
    def first_char(self) -> str:
        """What begins a call as the first character of an answer. The reader is sent it, too. Empty: nothing."""
        ...

    @property
    def markers(self) -> Sequence[str]:
        """All markup, which may be special tokens and is to be in the text nevertheless."""
        ...

    def new_id(self) -> str:
        """An id for a call."""
        ...

    def is_written_by(self, template_source: str) -> bool:
        """Whether a chat template shows calls in this format."""
        ...

    def read(self, opening: str, tools: Tools) -> Reader:
        """Reads the calls of one section. `opening` is the one found, or empty for `first_char`.

        Raises Malformed and Ended.
        """
        ...


def new_call_id() -> str:
    """An id as the OpenAI API has them."""
    return "call_" + secrets.token_hex(12)


def after_space(char: str) -> Step[str]:
    """The first character, from `char` on, that is not white space."""
    while char.isspace():
        char = yield
    return char


def literal(char: str, text: str) -> Step[None]:
    """Takes `text`, after white space."""
    char = yield from after_space(char)
    for i, wanted in enumerate(text):
        if i:
            char = yield
        if char != wanted:
            raise Malformed


def closing(char: str, text: str) -> Step[None]:
    """Takes `text`, after white space, as what closes a call. Raises Ended where the text ends instead."""
    yield from one_of(char, (text,))


def one_of(char: str, texts: Sequence[str]) -> Step[str]:
    """Takes one of several texts, of which none begins another, after white space. Raises Ended at the end."""
    char = yield from after_space(char)
    taken = char
    while True:
        if char == "":
            raise Ended
        texts = [text for text in texts if text.startswith(taken)]
        if not texts:
            raise Malformed
        if taken in texts:
            return taken
        char = yield
        taken += char


def until(char: str, text: str, *, one_line: bool = False) -> Step[str]:
    """Takes all up to `text`, and that too; gives what came before it."""
    taken: list[str] = []
    while True:
        if char == "" or (one_line and char == "\n" != text):
            raise Malformed
        taken.append(char)
        if char == text[-1] and "".join(taken[-len(text) :]) == text:
            return "".join(taken[: -len(text)])
        char = yield


def json_object(char: str) -> Step[str]:
    """Takes a JSON object that begins with `char`, up to the bracket that closes it; it is not yet parsed."""
    if char != "{":
        raise Malformed
    taken = [char]
    depth, in_string, escaped = 1, False, False
    while depth:
        char = yield
        if char == "":
            raise Malformed
        taken.append(char)
        if in_string:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                in_string = False
        elif char not in _OUTSIDE_STRINGS:
            raise Malformed
        elif char == '"':
            in_string = True
        elif char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
    return "".join(taken)


def call_of(text: str) -> ToolCall:
    """The call that a JSON object with a name and arguments (or parameters) asks for."""
    value = parse(text)
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        raise Malformed
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # some models write JSON inside JSON
        arguments = parse(arguments)
    return ToolCall(name, write({} if arguments is None else arguments))


def parse(text: str) -> Any:
    """The value of a JSON text, in which strings may hold line breaks as they are: models write them so."""
    try:
        return _decoder.decode(text)
    except (ValueError, RecursionError):
        raise Malformed from None


def write(arguments: Any) -> str:
    """The JSON text of a call's arguments, which are an object. Characters are written as they are."""
    if not isinstance(arguments, dict):
        raise Malformed
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can write
        return json.dumps(arguments, allow_nan=False)
    except (ValueError, RecursionError):  # a number that is infinite
        raise Malformed from None
    return text


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(strict=False, parse_constant=_refuse_constant)
