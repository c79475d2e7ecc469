"""Stop strings: where an output ends, found as its text arrives, however the text is cut."""

from __future__ import annotations

from collections.abc import Sequence


class _Pattern:
    """Follows one stop string through the text: `length` characters of it end where the text ends, at most."""

    __slots__ = ("length", "text", "_fallback")

    def __init__(self, text: str):
        self.text = text
        self.length = 0
        # For each prefix, the length of its longest proper prefix that is also its suffix. Only as far as the text ever
        # got: of a stop string of megabytes, followed for a hundred choices, that is nothing.
        self._fallback = [0, 0]

    def feed(self, char: str) -> bool:
        """Takes one character; whether the whole string ends with it. Constant time, amortised."""
        text, length = self.text, self.length
        if length == len(text):
            length = self._fallback[length]
        while length and text[length] != char:
            length = self._fallback[length]
        if text[length] == char:
            length += 1
            if length == len(self._fallback):
                self._extend()
        self.length = length
        return length == len(text)

    def _extend(self) -> None:
        """Adds the fallback of one prefix more. Constant time, amortised."""
        text, fallback = self.text, self._fallback
        char = text[len(fallback) - 1]
        border = fallback[-1]
        while border and text[border] != char:
            border = fallback[border]
        fallback.append(border + (text[border] == char))

    @property
    def unfinished(self) -> int:
        """Characters at the end of the text that a later match may still need."""
        return self._fallback[self.length] if self.length == len(self.text) else self.length


class StopMatcher:
    """Ends a text at the first of several strings and withholds only what may be part of one.

    The match that starts earliest wins, whatever the order of `stops`; of those that start together, the one that is
    complete first. A match may therefore wait while a string that starts before it can still come to its end. What
    follows the match is dropped; the match itself is shown only with `include`.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False):
        if not all(stops):
            raise ValueError("a stop string is empty")
        self._by_first: dict[str, list[_Pattern]] = {}
        for stop in dict.fromkeys(stops):
            self._by_first.setdefault(stop[0], []).append(_Pattern(stop))
        self._going: list[_Pattern] = []  # of which part ends where the text ends
        self._include = include
        self._held = ""  # the end of the text, not yet released
        self._released = 0  # characters before it
        self._end = 0  # characters taken
        self._found: tuple[int, int, str] | None = None  # start, end and string of the best match so far
        self.matched: str | None = None
        """The string that ended the text."""

    @property
    def matched_end(self) -> int | None:
        """How many characters had been taken when the match that ended the text was complete."""
        return self._found[1] if self.matched is not None and self._found else None

    @property
    def pending(self) -> bool:
        """A string is complete, and one that starts before it may still be."""
        return self._found is not None and self.matched is None

    def push(self, text: str, *, armed: bool = True) -> str:
        """Takes text and returns what is released. While not `armed`, a string that is complete ends nothing."""
        if self.matched is not None:
            return ""
        if not self._by_first:
            return text
        self._held += text
        for char in text:
            self._end += 1
            starting = [pattern for pattern in self._by_first.get(char, ()) if not pattern.length]
            for pattern in (followed := [*self._going, *starting]):
                if pattern.feed(char) and armed:
                    start = self._end - len(pattern.text)
                    if self._found is None or (start, self._end) < self._found[:2]:
                        self._found = (start, self._end, pattern.text)
            self._going = [pattern for pattern in followed if pattern.length]
            if self._found and not any(self._end - p.unfinished < self._found[0] for p in self._going):
                return self._finish()
        return self._release(self._end - max((pattern.unfinished for pattern in self._going), default=0))

    def flush(self) -> str:
        """The text has ended: releases what was withheld, up to a match that was complete."""
        if self.matched is not None:
            return ""
        if self._found:
            return self._finish()
        return self._release(self._end)

    def _release(self, position: int) -> str:
        released = self._held[: position - self._released]
        self._held = self._held[len(released) :]
        self._released = position
        return released

    def _finish(self) -> str:
        assert self._found
        start, end, self.matched = self._found
        return self._release(end if self._include else start)
