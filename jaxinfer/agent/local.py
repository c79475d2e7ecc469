"""A model in this process, as the loop asks it."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from jaxinfer.agent.model import ContextFull, Ending, Message, Part
from jaxinfer.text import reasoning
from jaxinfer.text.chat_template import ChatTemplate
from jaxinfer.text.message import MessageFormat, MessageParser
from jaxinfer.text.output import OutputDelta, OutputStream
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.text.tool_calls import formats
from jaxinfer.types import EngineInfo, FinishReason, InvalidRequest, SamplingParams

_LEAST_ROOM = 256
"""Tokens that a reply must have room for, unless fewer are asked for or the context is very short."""


class LocalLLM(Protocol):
    """What is needed of `jaxinfer.LLM`."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def chat_template(self) -> ChatTemplate | None: ...

    @property
    def info(self) -> EngineInfo: ...

    def chat_prompt(self, messages: Sequence[Message], **template_options: Any) -> list[int]: ...

    def start(
        self, prompt: Sequence[int], sampling_params: SamplingParams, *, always_shown: Collection[int]
    ) -> tuple[OutputStream, Iterator[OutputDelta]]: ...


class LocalModel:
    """Reads replies as a server does, by the formats that the chat template shows.

    The parsers are named as those of `jaxinfer serve` are; `template_options` are variables of the chat template.
    Raises InvalidRequest for a model without a chat template.
    """

    def __init__(
        self,
        llm: LocalLLM,
        sampling: SamplingParams | None = None,
        *,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        **template_options: Any,
    ):
        if llm.tokenizer is None or llm.chat_template is None:
            raise InvalidRequest(f"{llm.info.model} has no chat template, which an agent needs", param="model")
        self._llm = llm
        self._tokenizer = llm.tokenizer
        self._template = llm.chat_template
        self._sampling = sampling or SamplingParams()
        if self._sampling.n != 1:
            raise InvalidRequest(f"n is {self._sampling.n}; an agent has one conversation", param="n")
        self._options = template_options
        self._reasoning = reasoning.choose(reasoning_parser, self._template.source)
        self._calls = formats.choose(tool_call_parser, self._template.source)
        self._last: list[int] = []  # prompt and reply that were computed last

    @property
    def name(self) -> str:
        """What the engine calls the model."""
        return self._llm.info.model

    @property
    def openings(self) -> Sequence[str]:
        """Of the format of this model's calls."""
        return () if self._calls is None else self._calls.openings

    @property
    def tools_refusal(self) -> str | None:
        """By the chat template: most small models have one without tools."""
        if not self._template.shows_tools:
            return f"the chat template of {self.name} does not show tools"
        if self._calls is None:
            return f"the chat template of {self.name} shows no known format of tool calls"
        return None

    def reply(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Iterator[Part]:
        """See AgentModel."""
        ids = self.prompt(messages, tools)
        room, wanted = self._llm.info.max_model_len - len(ids), self._least_room()
        if room < wanted:
            raise ContextFull(
                f"the conversation has {len(ids)} tokens and a reply needs {wanted}; the context of {self.name} is "
                f"{self._llm.info.max_model_len} tokens"
            )
        message_format = MessageFormat(self._reasoning, self._calls if tools else None)
        markers = message_format.marker_ids(self._tokenizer)
        # Of the prompt the parser reads the end alone: whether it opens the thought.
        tail = self._tokenizer.decode(ids[-16:], skip_special_tokens=False)
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        parser = MessageParser(message_format, tail, schemas, parallel=True)
        return self._parts(ids, parser, markers)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of the conversation as the chat template shows it.

        Where its text goes on from what was computed last, so do its tokens: a model may spell a word in other tokens
        than the tokenizer does, and the prefix cache goes by tokens.
        """
        shown = [_as_templates_read(message) for message in messages]
        ids = self._llm.chat_prompt(shown, tools=list(tools) or None, **self._options)
        return self._continued(ids)

    def close(self) -> None:
        """The LLM belongs to its maker."""

    def _least_room(self) -> int:
        asked = self._sampling.max_tokens or _LEAST_ROOM
        return max(1, min(asked, _LEAST_ROOM, self._llm.info.max_model_len // 4))

    def _parts(self, ids: list[int], parser: MessageParser, markers: Collection[int]) -> Iterator[Part]:
        output, deltas = self._llm.start(ids, self._sampling, always_shown=markers)
        computed = list(ids)
        finish = FinishReason.ABORT
        try:
            for delta in _whole_steps(deltas):
                computed += delta.token_ids
                yield from parser.push(delta.text)
                if delta.finish_reason is not None:
                    finish = delta.finish_reason
        finally:
            with _interrupts_held():
                deltas.close()  # pyright: ignore[reportAttributeAccessIssue]
            self._last = computed
        yield from parser.flush()
        reason = "tool_calls" if parser.has_calls and finish is FinishReason.STOP else str(finish)
        yield Ending(reason, len(ids), output.num_cached_tokens, output.num_tokens)

    def _continued(self, ids: list[int]) -> list[int]:
        last = self._last
        if not last or ids[: len(last)] == last:
            return ids
        decode = self._tokenizer.decode
        text, said = decode(ids, skip_special_tokens=False), decode(last, skip_special_tokens=False)
        if last[-1] in self._llm.info.eos_ids and not text.startswith(said):
            last = last[:-1]
            said = decode(last, skip_special_tokens=False)
        if not text.startswith(said):
            return ids
        # The token of the new prompt at which what was said ends: near as many as were computed.
        for distance in range(64):
            for at in (len(last) - distance, len(last) + distance):
                if 0 < at < len(ids) and decode(ids[:at], skip_special_tokens=False) == said:
                    return last + ids[at:]
        return ids


def _whole_steps(deltas: Iterator[OutputDelta]) -> Iterator[OutputDelta]:
    """The deltas, with interrupts between them: one in the middle of a step of the engine aborts the interpreter later.

    Seen on a CPU with jaxlib 0.11.2, in half of the sessions that were interrupted so: "terminate called without an
    active exception" when the process ends.
    """
    while True:
        with _interrupts_held():
            delta = next(deltas, None)
        if delta is None:
            return
        yield delta


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """An interrupt that comes meanwhile is handled at the end. Python handles signals in its main thread alone."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[tuple[int, types.FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])


def _as_templates_read(message: Message) -> dict[str, Any]:
    """The message with the arguments of its calls as objects."""
    shown = dict(message)
    if calls := shown.get("tool_calls"):
        shown["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
            for call in calls
        ]
    return shown
