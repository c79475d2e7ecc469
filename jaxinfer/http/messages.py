"""Anthropic's Messages API on the path of chat completions: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from jaxinfer.http import openai
from jaxinfer.http.errors import anthropic_problem
from jaxinfer.http.guard import Guard, Send
from jaxinfer.http.message_events import MessageWriter, error_events
from jaxinfer.http.message_request import decode
from jaxinfer.http.metrics import ServerMetrics
from jaxinfer.http.named_events import NamedEventStream
from jaxinfer.http.parts import parts_of
from jaxinfer.http.prompts import PromptMaker
from jaxinfer.http.streams import EventStream, Generation, run_choices
from jaxinfer.text.output import OutputDelta
from jaxinfer.types import EngineHandle, FinishReason, InvalidRequest


class MessagesEndpoint:
    """POST /v1/messages."""

    def __init__(self, prompts: PromptMaker, metrics: ServerMetrics):
        self._prompts = prompts
        self._metrics = metrics
        self.problem = anthropic_problem

    def event_stream(self, send: Send) -> NamedEventStream:
        return NamedEventStream(send, error_events)

    def decode(self, body: bytes) -> openai.ChatRequest:
        chat = decode(body)
        if chat.max_tokens is None:
            raise InvalidRequest("max_tokens is missing; it is the most tokens of the reply", param="max_tokens")
        return chat

    def has_text(self, request: openai.ChatRequest) -> bool:
        return request.has_text

    def is_constrained(self, request: openai.ChatRequest) -> bool:
        return request.is_constrained

    def prepare(self, request: openai.ChatRequest, arrival_s: float) -> MessageReply:
        message_id = f"msg_{uuid.uuid4().hex}"
        return MessageReply(self._prompts.generation(request, message_id, self._metrics, arrival_s))


class MessageReply:
    """A reply, and the sink of its one choice."""

    def __init__(self, generation: Generation):
        self.streams = generation.stream
        self._generation = generation
        self._choice = generation.choices[0]
        self._writer = MessageWriter(generation.head.id, generation.head.model)
        self._stream: EventStream | None = None
        self._has_begun = False

    async def stream(self, engine: EngineHandle, stream: EventStream, guard: Guard) -> None:
        del guard
        self._stream = stream
        await run_choices(engine, self._generation.choices, lambda: [self])
        await stream.end()

    async def whole(self, engine: EngineHandle, guard: Guard) -> bytes:
        del guard
        await run_choices(engine, self._generation.choices, lambda: [self])
        return msgspec.json.encode(self._writer.body(self._usage()))

    def emit(self, delta: OutputDelta | None) -> None:
        if delta is None:
            return  # until the first token nobody knows what was in the cache, which the first event tells
        events = b"" if self._has_begun else self._writer.start(self._usage())
        self._has_begun = True
        events += self._writer.parts(parts_of(self._choice, delta))
        if delta.finish_reason is not None:
            events += self._writer.end(FinishReason(delta.finish_reason), delta.stop_reason, self._usage())
        if self._stream is not None and events:
            self._stream.write(events)

    def _usage(self) -> dict[str, int]:
        """As Anthropic counts: input_tokens are those that were not in the cache."""
        output = self._choice.output
        cached = output.num_cached_tokens
        return {
            "input_tokens": self._generation.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": output.num_tokens,
        }


def count_tokens(body: bytes, prompts: PromptMaker) -> dict[str, Any]:
    """The answer of POST /v1/messages/count_tokens. Raises InvalidRequest, or HttpError for an unknown model."""
    chat = decode(body)
    prompts.model_name(chat.model)
    return {"input_tokens": len(prompts.chat_ids(chat))}
