"""Splits a model's text into its thought and its answer, as the text arrives."""

from __future__ import annotations

import enum
from typing import NamedTuple

from jaxinfer.text.markers import unfinished

OPEN, CLOSE = "<think>", "</think>"
MARKERS = (OPEN, CLOSE)


class ReasoningFormat(NamedTuple):
    """How a model shows its thought."""

    name: str
    begins_inside: bool
    """Whether the output begins with the thought although nothing has opened it."""


FORMATS = {
    known.name: known
    for known in (ReasoningFormat("qwen3", begins_inside=False), ReasoningFormat("deepseek_r1", begins_inside=True))
}


def choose(name: str, template_source: str) -> ReasoningFormat | None:
    """The format of that name; with `auto`, qwen3 where the chat template has a tag of a thought.

    None: the output is the answer, all of it. That is so with the name `none`.
    """
    if name == "auto":
        return FORMATS["qwen3"] if any(marker in template_source for marker in MARKERS) else None
    return None if name == "none" else FORMATS[name]


def begins_inside(reasoning_format: ReasoningFormat, prompt: str) -> bool | None:
    """Whether an output begins within a thought. None: thinking is switched off, for this prompt."""
    end = prompt.rstrip()
    if end.endswith(CLOSE):
        return None
    return end.endswith(OPEN) or reasoning_format.begins_inside


class Split(NamedTuple):
    """What is new of both."""

    reasoning: str
    answer: str


class _Place(enum.Enum):
    START = enum.auto()  # a tag may still open the thought
    THOUGHT_START = enum.auto()  # white space may still come before it
    THOUGHT = enum.auto()
    ANSWER_START = enum.auto()  # white space may still come before it
    ANSWER = enum.auto()


class ReasoningSplitter:
    """One output. What it gives, joined, does not depend on how the text is cut.

    A thought is what stands between `<think>` and the first `</think>` after it, without the white space around it
    and around the tags. The opening tag may be the end of the prompt: templates of models that always think write it.
    A prompt that ends with `</think>` has switched thinking off, and its output is the answer, unless the model opens
    a thought all the same. A thought that never ends is a thought. Withheld is only what may be part of a tag, and
    white space that may turn out to stand before one.
    """

    def __init__(self, reasoning_format: ReasoningFormat, prompt: str):
        self._inside = bool(begins_inside(reasoning_format, prompt))
        self._place = _Place.START
        self._held = ""

    def push(self, text: str) -> Split:
        """Takes text and gives what it settles."""
        if self._place is _Place.ANSWER:
            return Split("", text)
        self._held += text
        if self._place is _Place.START:
            self._open()
        reasoning = self._think() if self._place in (_Place.THOUGHT_START, _Place.THOUGHT) else ""
        answer = self._answer() if self._place in (_Place.ANSWER_START, _Place.ANSWER) else ""
        return Split(reasoning, answer)

    def flush(self) -> Split:
        """The text has ended: gives what was withheld."""
        held, self._held = self._held, ""
        if self._place is _Place.START:
            return Split(held.lstrip(), "") if self._inside else Split("", held)
        # White space at the start of an answer that has nothing else is no answer.
        return Split(held, "") if self._place is _Place.THOUGHT else Split("", "")

    def _open(self) -> None:
        start = self._held.lstrip()
        if start.startswith(OPEN):
            self._place = _Place.THOUGHT_START
            self._held = start[len(OPEN) :]
        elif not OPEN.startswith(start):
            self._place = _Place.THOUGHT_START if self._inside else _Place.ANSWER

    def _think(self) -> str:
        if self._place is _Place.THOUGHT_START:
            self._held = self._held.lstrip()
            if not self._held:
                return ""
            self._place = _Place.THOUGHT
        thought, close, rest = self._held.partition(CLOSE)
        if close:
            self._place = _Place.ANSWER_START
            self._held = rest
            return thought.rstrip()
        released = thought[: len(thought) - unfinished(thought, (CLOSE,))].rstrip()
        self._held = self._held[len(released) :]
        return released

    def _answer(self) -> str:
        if self._place is _Place.ANSWER_START:
            self._held = self._held.lstrip()
            if not self._held:
                return ""
            self._place = _Place.ANSWER
        answer, self._held = self._held, ""
        return answer
