"""A chat model's text as the parts of a message: its thought, its words and the calls it asks for."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jaxinfer.text import reasoning
from jaxinfer.text.reasoning import ReasoningFormat, ReasoningSplitter
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.text.tool_calls.parser import ToolCallParser
from jaxinfer.text.tool_calls.reading import ToolCallFormat, Tools


class Thought(NamedTuple):
    """A piece of the thought."""

    text: str


class Words(NamedTuple):
    """A piece of the answer."""

    text: str


class Call(NamedTuple):
    """A tool call, whole."""

    number: int
    """In the message, from 0."""
    id: str
    name: str
    arguments: str
    """A JSON object."""


type Part = Thought | Words | Call


@dataclasses.dataclass(frozen=True, slots=True)
class MessageFormat:
    """How a model marks the parts of its messages. Where one is None, that part is not told from the words."""

    reasoning: ReasoningFormat | None
    tool_calls: ToolCallFormat | None

    def marker_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """The special tokens among the markers: they have to be in the text, or nothing could be found in it."""
        markers = (
            *(reasoning.MARKERS if self.reasoning else ()),
            *(self.tool_calls.markers if self.tool_calls else ()),
        )
        ids = (tokenizer.special_id(marker) for marker in markers)
        return frozenset(id for id in ids if id is not None and tokenizer.is_special(id))


class MessageParser:
    """One message, from its text as it arrives. The parts joined do not depend on how the text is cut.

    tools: of the request; calls are looked for only where there are some. prompt: which may open the thought.
    parallel: whether calls after the first are given; otherwise they are dropped. is_named: whether the client named
    the function, so that a call is no news to it.
    """

    def __init__(
        self, message_format: MessageFormat, prompt: str, tools: Tools, *, parallel: bool, is_named: bool = False
    ):
        self._format = message_format
        self._splitter = ReasoningSplitter(message_format.reasoning, prompt) if message_format.reasoning else None
        self._parser = ToolCallParser(message_format.tool_calls, tools) if message_format.tool_calls and tools else None
        self._parallel = parallel
        self.is_named = is_named
        self._num_calls = 0

    @property
    def has_calls(self) -> bool:
        """Whether any call has been given."""
        return self._num_calls > 0

    def push(self, text: str) -> list[Part]:
        """Takes text and gives the parts that it settles, in the order of the text."""
        if self._splitter is None:
            return self._read("", text)
        return self._read(*self._splitter.push(text))

    def flush(self) -> list[Part]:
        """The text has ended: gives what was withheld."""
        parts = [] if self._splitter is None else self._read(*self._splitter.flush())
        if self._parser is not None:
            parts += self._parts(self._parser.flush())
        return parts

    def _read(self, thought: str, answer: str) -> list[Part]:
        parts: list[Part] = [Thought(thought)] if thought else []
        if answer:
            parts += self._parts([answer] if self._parser is None else self._parser.push(answer))
        return parts

    def _parts(self, found: list) -> list[Part]:
        parts: list[Part] = []
        for item in found:
            if isinstance(item, str):
                parts.append(Words(item))
            elif self._parallel or not self._num_calls:
                assert self._format.tool_calls is not None
                parts.append(Call(self._num_calls, self._format.tool_calls.new_id(), item.name, item.arguments))
                self._num_calls += 1
        return parts
