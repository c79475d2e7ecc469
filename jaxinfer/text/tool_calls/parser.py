"""Finds the calls in an answer as it arrives."""

from __future__ import annotations

from jaxinfer.text.markers import unfinished
from jaxinfer.text.tool_calls.reading import Ended, Malformed, Reader, ToolCall, ToolCallFormat, Tools


class ToolCallParser:
    """One answer. What it gives, texts next to each other joined, does not depend on how the text is cut.

    A call is given whole, as soon as it is complete: only then is it certain that it is one, and a text that turns
    out to be none is given as it was written, markup included. White space around calls is dropped. Withheld are an
    unfinished call, what may be the beginning of one, and white space that one may follow.
    """

    def __init__(self, tool_format: ToolCallFormat, tools: Tools):
        self._format = tool_format
        self._tools = tools
        self._held = ""  # outside of calls
        self._reader: Reader | None = None
        self._raw: list[str] = []  # of the section that is being read, since its last call, with white space before it
        self._num_read = 0  # calls of that section
        self._at_start = True  # nothing but white space has come
        self._after_call = False  # white space is dropped

    def push(self, text: str) -> list[str | ToolCall]:
        """Takes text and gives what it settles."""
        found: list[str | ToolCall] = []
        while text:
            text = self._search(text, found) if self._reader is None else self._read(text, found)
        return found

    def flush(self) -> list[str | ToolCall]:
        """The text has ended: gives what was withheld."""
        found: list[str | ToolCall] = []
        if self._reader is not None:
            try:
                call = self._reader.send("")
            except StopIteration:
                pass
            except Ended:
                if self._num_read == 0:
                    self._show("".join(self._raw), found)
            except Malformed:
                # What stands after a call is an answer of its own; a call that was cut short is shown as it is.
                raw = "".join(self._raw)
                self._show(raw.lstrip() if self._num_read else raw, found)
            else:
                assert call is None, "a reader takes the end of the text for the end of a call"
            self._reader = None
        elif not (self._after_call and self._held.isspace()):
            self._show(self._held, found)
        self._held = ""
        return found

    def _search(self, text: str, found: list[str | ToolCall]) -> str:
        """Looks for the beginning of a call; what follows it is returned."""
        text = self._held + text
        self._held = ""
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        if self._at_start and self._format.first_char:
            start = text.lstrip()
            if start.startswith(self._format.first_char):
                self._open("", text[: len(text) - len(start)])
                return start
        places = [(at, opening) for opening in self._format.openings if (at := text.find(opening)) >= 0]
        if places:
            at, opening = min(places)
            before = text[:at].rstrip()
            self._show(before, found)
            end = at + len(opening)
            self._open(opening, text[len(before) : end])
            return text[end:]
        shown = text[: len(text) - unfinished(text, self._format.openings)].rstrip()
        self._held = text[len(shown) :]
        self._show(shown, found)
        return ""

    def _open(self, opening: str, raw: str) -> None:
        self._reader = self._format.read(opening, self._tools)
        next(self._reader)
        self._raw = [raw]
        self._num_read = 0
        self._at_start = False

    def _read(self, text: str, found: list[str | ToolCall]) -> str:
        """Goes on with a section of calls; what follows its end is returned."""
        assert self._reader is not None
        for i, char in enumerate(text):
            try:
                call = self._reader.send(char)
            except StopIteration:
                if not self._num_read:  # a section of no calls
                    self._show("".join(self._raw) + char, found)
                self._close()
                return text[i + 1 :]
            except Malformed:
                return self._give_up(found) + text[i:]
            self._raw.append(char)
            if call is not None:
                found.append(call)
                self._num_read += 1
                self._raw.clear()
        return ""

    def _close(self) -> None:
        self._reader = None
        self._after_call = self._num_read > 0
        self._raw.clear()

    def _give_up(self, found: list[str | ToolCall]) -> str:
        """What was read since the last call is none; returns the part of it that is to be looked at again."""
        raw = "".join(self._raw)
        again = raw
        if not self._num_read:
            again = raw[len(raw) - unfinished(raw[1:], self._format.openings) :]
            self._show(raw[: len(raw) - len(again)], found)
        self._close()
        return again

    def _show(self, text: str, found: list[str | ToolCall]) -> None:
        if text:
            found.append(text)
            self._at_start = False
