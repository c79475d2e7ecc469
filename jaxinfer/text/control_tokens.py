"""Chat messages to token ids, such that no text of a message can pose as the model's control tokens.

The template's own control tokens become their ids. The same strings inside a message are plain text: a web page that a
tool returns can then not end a turn and begin another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.types import InvalidRequest

_BREAKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Noncharacters of Unicode, set aside for a program's own use: no text has them, and UTF-8 can hold them."""


class ControlTokens:
    """The control tokens of a tokenizer and a chat template.

    In a message of the user, the system or a tool these are its special tokens, those written with a bar as in
    `<|name|>`, and the added tokens that the template writes (`<tool_call>`, `<think>`). In one of the assistant they
    are the special ones and those with a bar: the others are what the model itself wrote, and templates look for
    them. A template that looks for such a string in a user's text does not find it there. Definitions of tools are
    taken as they are.
    """

    def __init__(self, tokenizer: Tokenizer, template_source: str):
        self._tokenizer = tokenizer
        texts = [text for text in tokenizer.added_texts if len(text) > 1 and not text.isspace()]
        turns = [text for text in texts if _is_special(tokenizer, text) or text.startswith(("<|", "<｜"))]
        written = [text for text in texts if text in template_source]
        self._in_answers = _first_chars(turns)
        self._elsewhere = _first_chars([*turns, *written])

    def guard(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], str]:
        """The messages with every control token in their text broken in two by the string that is returned.

        That string is empty where there is none to break.
        """
        guarded = [self._guard(message, _BREAKS[0]) for message in messages]
        if all(one == other for one, other in zip(guarded, messages, strict=True)):
            return guarded, ""
        shown = json.dumps(messages, ensure_ascii=False, default=str)
        mark = next((mark for mark in _BREAKS if mark not in shown), None)
        if mark is None:
            raise InvalidRequest(
                "messages hold all noncharacters from U+FDD0 to U+FDEF; they are no text", param="messages"
            )
        return [self._guard(message, mark) for message in messages], mark

    def encode(self, text: str, mark: str) -> list[int]:
        """Token ids of a rendered conversation, whose control tokens `mark` has broken. No token reaches over one."""
        pieces = text.split(mark) if mark else [text]
        return [id for piece in pieces for id in self._tokenizer.encode(piece, add_special_tokens=False)]

    def _guard(self, message: Mapping[str, Any], mark: str) -> dict[str, Any]:
        pattern = self._in_answers if message.get("role") == "assistant" else self._elsewhere
        return {key: value if key == "role" else _break(value, pattern, mark) for key, value in message.items()}


def _is_special(tokenizer: Tokenizer, text: str) -> bool:
    id = tokenizer.special_id(text)
    return id is not None and tokenizer.is_special(id)


def _first_chars(texts: Sequence[str]) -> re.Pattern[str] | None:
    """Finds the first character of each text, of those that overlap, too. None: there are no texts."""
    rests: dict[str, dict[str, list[str]]] = {}
    for text in dict.fromkeys(texts):
        rests.setdefault(text[0], {}).setdefault(text[1], []).append(re.escape(text[2:]))
    # By two characters, of which the first is searched for: a megabyte with many brackets takes 1 ms, and with all 818
    # tokens of DeepSeek-V3 in one list 400.
    parts = [
        re.escape(first)
        + "(?="
        + "|".join(f"{re.escape(then)}(?:{'|'.join(ends)})" for then, ends in rest.items())
        + ")"
        for first, rest in rests.items()
    ]
    return re.compile("|".join(parts)) if parts else None


def _break(value: Any, pattern: re.Pattern[str] | None, mark: str) -> Any:
    if isinstance(value, str):
        return value if pattern is None else pattern.sub(lambda found: found[0] + mark, value)
    if isinstance(value, Mapping):
        return {key: _break(one, pattern, mark) for key, one in value.items()}
    return [_break(one, pattern, mark) for one in value] if isinstance(value, list) else value
