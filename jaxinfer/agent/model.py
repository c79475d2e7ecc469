"""What the loop asks of a model, whether it runs in this process or behind a URL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from jaxinfer.text.message import Call, Thought, Words

type Message = Mapping[str, Any]
"""As the OpenAI API has it: role, content, tool_calls with their arguments as JSON text, reasoning_content."""


class Ending(NamedTuple):
    """How a reply ended, and what it took. A count is None where the model does not say."""

    finish_reason: str
    """`stop`, `tool_calls` or `length`."""
    prompt_tokens: int | None
    cached_tokens: int | None
    """Of the prompt, those whose keys and values were there already."""
    completion_tokens: int | None


type Part = Thought | Words | Call | Ending


class ContextFull(Exception):
    """The conversation leaves no room for a reply; a shorter one may be asked again."""


class ModelFailed(RuntimeError):
    """The model gave no reply: it cannot be reached, refuses the key, or failed. The message says which."""


class AgentModel(Protocol):
    """A chat model that is asked again and again about one growing conversation."""

    @property
    def name(self) -> str: ...

    @property
    def openings(self) -> Sequence[str]:
        """What begins a tool call. In the words of a reply it shows that a call could not be read."""
        ...

    @property
    def tools_refusal(self) -> str | None:
        """Why the model can be shown no tools; None where it can, or where only asking would tell."""
        ...

    def reply(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Iterator[Part]:
        """The parts of one reply as they come, the last of them its Ending. Closing the iterator cancels it.

        tools: definitions of functions. Raises InvalidRequest, ContextFull and ModelFailed.
        """
        ...

    def close(self) -> None:
        """Gives up what was opened for it."""
        ...
