"""Sessions as files: JSON lines to go on from, and Markdown to read."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from jaxinfer.agent.history import Entry, History, Turn, is_question

FORMAT = "jaxinfer-agent-session"
VERSION = 1
_ROLES = ("user", "assistant", "tool")
_TITLES = {"assistant": "Assistant", "tool": "Tool"}


class SessionFileError(ValueError):
    """A file is no session; the message says where."""


class Session(NamedTuple):
    """What a file holds."""

    model: str
    system: str | None
    history: History


def save(path: str | Path, session: Session) -> None:
    """Writes a session: a first line that says what it is, then a line per message with what its turn took.

    The file is there whole or not at all, and only its owner may read it: it can hold whatever tools have read.
    """
    head = {"format": FORMAT, "version": VERSION, "model": session.model, "system": session.system}
    lines = [head]
    for message, turn in session.history.entries:
        lines.append({"message": message} | ({} if turn is None else {"turn": dataclasses.asdict(turn)}))
    _write(Path(path), "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def load(path: str | Path) -> Session:
    """Reads a session. SessionFileError with the line that is none of one."""
    with open(path, encoding="utf-8") as file:
        lines = file.read().removesuffix("\n").split("\n")  # splitlines would also split inside a text
    head = _object(path, 1, lines[0])
    if (head.get("format"), head.get("version")) != (FORMAT, VERSION):
        raise SessionFileError(f"{path} is no session of version {VERSION}: it begins with {lines[:1]!r:.80}")
    entries = [_entry(path, number, line) for number, line in enumerate(lines[1:], 2)]
    return Session(str(head.get("model")), head.get("system"), History(entries))


def export(path: str | Path, session: Session) -> None:
    """Writes a session as Markdown."""
    parts = [f"# Conversation with {session.model}\n"]
    if session.system:
        parts.append(f"**System**\n\n{session.system}\n")
    for message, _ in session.history.entries:
        role = "User" if is_question(message) else _TITLES.get(message["role"], "Note")

        named = f"{role} `{message['name']}`" if message.get("name") else role
        text = message.get("content") or ""
        parts.append(f"**{named}**\n")
        if text:
            parts.append(_fenced(text) if message["role"] == "tool" else f"{text}\n")
        for call in message.get("tool_calls", ()):
            function = call["function"]
            parts.append(f"Calls `{function['name']}`:\n\n{_fenced(function['arguments'])}")
    _write(Path(path), "\n".join(parts))


def _fenced(text: str) -> str:
    """A block of code, with a fence that the text itself does not have."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}\n{text}\n{fence}\n"


def _entry(path: str | Path, number: int, line: str) -> Entry:
    value = _object(path, number, line)
    message, turn = value.get("message"), value.get("turn")
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise SessionFileError(f"{path}, line {number}: no message of {', '.join(_ROLES)}: {line[:80]!r}")
    if not isinstance(message.get("content", ""), str) or (message["role"] != "assistant" and "content" not in message):
        raise SessionFileError(f"{path}, line {number}: its content is no text: {line[:80]!r}")
    try:
        return Entry(message, None if turn is None else Turn(**turn))
    except TypeError as error:
        raise SessionFileError(f"{path}, line {number}: {error}") from None


def _object(path: str | Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise SessionFileError(f"{path}, line {number}: {line[:80]!r} is no JSON object")
    return value


def _write(path: Path, text: str) -> None:
    """By way of a new file beside it, whose mode is 0600."""
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(fd, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
