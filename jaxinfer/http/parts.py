"""What a reply consists of, for APIs that show its parts apart: the writers of events and bodies take nothing else."""

from __future__ import annotations

from typing import NamedTuple

from jaxinfer.http.streams import Choice
from jaxinfer.text.output import OutputDelta


class Thought(NamedTuple):
    """A piece of what the model thinks before it answers."""

    text: str


class Words(NamedTuple):
    """A piece of the answer."""

    text: str


class Call(NamedTuple):
    """A tool call, whole."""

    number: int  # in the reply, from 0
    id: str
    name: str
    arguments: str  # a JSON object


Part = Thought | Words | Call


def parts_of(choice: Choice, delta: OutputDelta) -> list[Part]:
    """What a delta of this choice adds to the reply. All text is words: nothing else is told apart yet."""
    del choice
    return [Words(delta.text)] if delta.text else []
