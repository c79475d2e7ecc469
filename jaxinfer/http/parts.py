"""What a delta adds to a reply, for APIs that show its parts apart."""

from __future__ import annotations

from jaxinfer.http.replies import read_message
from jaxinfer.http.streams import Choice
from jaxinfer.text.message import Part, Words
from jaxinfer.text.output import OutputDelta


def parts_of(choice: Choice, delta: OutputDelta) -> list[Part]:
    """The parts that are new. Where nothing marks thought or calls, all text is words."""
    if choice.message is not None:
        return read_message(choice.message, delta)[0]
    return [Words(delta.text)] if delta.text else []
