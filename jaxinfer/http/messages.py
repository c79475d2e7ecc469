"""Anthropic's Messages API on the path of chat completions: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, NoReturn

import msgspec

from jaxinfer.http import known_fields, openai
from jaxinfer.http.errors import anthropic_problem
from jaxinfer.http.guard import Guard, Send
from jaxinfer.http.known_fields import Label, Only, Refused, Rule
from jaxinfer.http.message_events import MessageWriter, error_events
from jaxinfer.http.metrics import ServerMetrics
from jaxinfer.http.named_events import NamedEventStream
from jaxinfer.http.parts import parts_of
from jaxinfer.http.prompts import PromptMaker
from jaxinfer.http.streams import EventStream, Generation, run_choices
from jaxinfer.text.output import OutputDelta
from jaxinfer.types import EngineHandle, FinishReason, InvalidRequest

_NO_TOOLS = "tool calls are not supported on this route"

FIELDS: Mapping[str, Rule] = {
    "metadata": Label("it names the end user to the provider"),
    "cache_control": Label("prompts that begin alike are found in the cache without it"),
    "service_tier": Only(("auto", "standard_only"), "there is one tier"),
    "thinking": Only(({"type": "disabled"},), "thought is not told from the answer on this route"),
    "tools": Only(([],), _NO_TOOLS),
    "tool_choice": Only(({"type": "none"},), _NO_TOOLS),
    "mcp_servers": Only(([],), _NO_TOOLS),
    "betas": Label("they are versions of the API; what they add is refused field by field"),
    "container": Refused("code is not run"),
    "context_management": Refused("the context is not edited"),
    "inference_geo": Refused("this server is where it is"),
    "output_config": Refused("output is not constrained"),
    "output_format": Refused("output is not constrained"),
}
BLOCK_FIELDS: Mapping[str, Rule] = {
    "cache_control": FIELDS["cache_control"],
    "citations": Only(([],), "sources are not cited"),
}


class TextBlock(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    type: str
    text: str


class MessageParam(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    role: str
    content: str | list[msgspec.Raw]


class MessagesRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The body of POST /v1/messages; the last three fields are our own."""

    messages: list[MessageParam]
    model: str | None = None
    max_tokens: int | None = None
    system: str | list[msgspec.Raw] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    session_id: str | None = None

    def to_chat(self) -> openai.ChatRequest:
        """The same as a chat completion. Raises InvalidRequest."""
        messages = [] if self.system is None else [openai.Message(role="system", content=_text(self.system, "system"))]
        for i, message in enumerate(self.messages):
            messages.append(_message(message, f"messages[{i}]"))
        if self.messages and self.messages[-1].role == "assistant":
            _refuse("messages", "the last message is the assistant's, which is not continued; end with the user's")
        chat = openai.ChatRequest(
            messages=_joined(messages),
            model=self.model,
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            stream=self.stream,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            cache_salt=self.cache_salt,
            priority=self.priority,
            session_id=self.session_id,
        )
        chat.check()
        return chat


_decoder = msgspec.json.Decoder(MessagesRequest)
_block_decoder = msgspec.json.Decoder(TextBlock)
_fields_of = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def decode(body: bytes) -> openai.ChatRequest:
    """What a body asks for, as a chat completion. Raises InvalidRequest that names the field at fault."""
    return _read(body).to_chat()


def _read(body: bytes) -> MessagesRequest:
    try:
        return openai.parse(_decoder, body)
    except InvalidRequest as error:
        if error.code != "invalid_field":
            raise
        fields = _fields_of(body)
        if not known_fields.apply(fields, MessagesRequest, FIELDS):
            raise
    return openai.parse(_decoder, msgspec.json.encode(fields))


def _message(message: MessageParam, path: str) -> openai.Message:
    if message.role not in ("user", "assistant"):
        _refuse(f"{path}.role", f"{path}.role is {message.role!r}; it must be user or assistant, and system is a field")
    return openai.Message(role=message.role, content=_text(message.content, f"{path}.content"))


def _joined(messages: list[openai.Message]) -> list[openai.Message]:
    """Turns of one role in a row are one turn, as Anthropic has it: templates want roles to alternate."""
    joined: list[openai.Message] = []
    for message in messages:
        if joined and joined[-1].role == message.role:
            text = f"{joined[-1].content}\n\n{message.content}"
            message = openai.Message(role=message.role, content=text)
            joined.pop()
        joined.append(message)
    return joined


def _text(content: str | list[msgspec.Raw], path: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(_block_text(block, f"{path}[{i}]") for i, block in enumerate(content))


def _block_text(raw: msgspec.Raw, path: str) -> str:
    try:
        fields = _fields_of(raw)
        kind = msgspec.json.decode(fields.get("type", b'"text"'))
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{path} is not a content block: {error}", param=path, code="invalid_type") from None
    if kind != "text":
        _refuse(f"{path}.type", f"{path}.type is {kind!r}; only text blocks are supported")
    known_fields.apply(fields, TextBlock, BLOCK_FIELDS, f"{path}.")
    return openai.parse(_block_decoder, msgspec.json.encode(fields), path).text


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
        await run_choices(engine, self._generation.choices, [self])
        await stream.end()

    async def whole(self, engine: EngineHandle, guard: Guard) -> bytes:
        del guard
        await run_choices(engine, self._generation.choices, [self])
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


def _refuse(param: str, message: str) -> NoReturn:
    raise InvalidRequest(message, param=param)
