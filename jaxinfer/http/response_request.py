"""Request bodies of OpenAI's Responses API, and what they ask for as a chat completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from jaxinfer.http import known_fields, openai
from jaxinfer.http.known_fields import Label, Only, Refused, Rule
from jaxinfer.types import InvalidRequest

MAX_METADATA = 16
"""Most pairs of `metadata`, as OpenAI has it."""
ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text")

_NO_TOOLS = "tool calls are not supported on this route"
_NO_REASONING = "thought is not told from the answer on this route"

_PLAIN: dict[str, Any] = {"format": {"type": "text"}}
_SHARED = ("safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier", "moderation")
FIELDS: Mapping[str, Rule] = {
    **{name: known_fields.FIELDS[name] for name in _SHARED},
    "background": Only((False,), "a response runs while its client waits for it"),
    "conversation": Refused("previous_response_id goes on with a conversation"),
    "prompt": Refused("prompts are not stored; give instructions and input"),
    "include": Only(([], ["reasoning.encrypted_content"]), "there is nothing of that kind to include"),
    "reasoning": Only(({}, {"effort": None}, {"effort": None, "summary": None}), _NO_REASONING),
    "text": Only(({}, _PLAIN, {"verbosity": "medium"}, _PLAIN | {"verbosity": "medium"}), "output is not constrained"),
    "tools": Only(([],), _NO_TOOLS),
    "tool_choice": Only(("auto", "none"), _NO_TOOLS),
    "parallel_tool_calls": Label("there are no tools"),
    "max_tool_calls": Label("there are no tools"),
    "top_logprobs": Only((0,), "log-probabilities are not shown on this route"),
    "truncation": Only(("disabled",), "a conversation is not cut; start another, or leave out the oldest turns"),
    "context_management": Only(([],), "the context is not edited"),
    "request_id": Label("the reply has an id of its own; X-Request-Id is echoed"),
}
MESSAGE_FIELDS: Mapping[str, Rule] = {
    "id": Label("items of an earlier reply have one"),
    "status": Label("items of an earlier reply have one"),
    "phase": Label("items of an earlier reply have one"),
}
PART_FIELDS: Mapping[str, Rule] = {
    "annotations": Label("parts of an earlier reply have them"),
    "logprobs": Label("parts of an earlier reply have them"),
}


class InputMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    role: str
    content: str | list[msgspec.Raw]
    type: str = "message"


class InputPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    type: str
    text: str


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    include_obfuscation: bool | None = None


class ResponsesRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The body of POST /v1/responses; the fields from top_k on are our own."""

    input: str | list[msgspec.Raw]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    session_id: str | None = None

    def check(self) -> None:
        """Raises InvalidRequest for what the schema cannot say."""
        if not self.input:
            _refuse("input", "input is empty; give a text or at least one item")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            _refuse("max_output_tokens", f"max_output_tokens is {self.max_output_tokens}; it must be at least 1")
        if self.stream_options is not None:
            if not self.stream:
                _refuse("stream_options", "stream_options needs stream: true")
            if self.stream_options.include_obfuscation:
                _refuse("stream_options", "stream_options.include_obfuscation is true; events are not padded")
        if len(self.metadata or {}) > MAX_METADATA:
            _refuse("metadata", f"metadata has {len(self.metadata or {})} pairs; at most {MAX_METADATA} are kept")

    def messages(self) -> list[dict[str, Any]]:
        """The input as messages of a chat, without the instructions. Raises InvalidRequest."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return [_message(raw, f"input[{i}]") for i, raw in enumerate(self.input)]

    def to_chat(self, messages: Sequence[dict[str, Any]]) -> openai.ChatRequest:
        """The conversation of these messages as a chat completion. Raises InvalidRequest."""
        system = [] if not self.instructions else [openai.Message(role="system", content=self.instructions)]
        chat = openai.ChatRequest(
            messages=[*system, *(openai.Message(**message) for message in messages)],
            model=self.model,
            max_tokens=self.max_output_tokens,
            stream=self.stream,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            stop=self.stop,
            cache_salt=self.cache_salt,
            priority=self.priority,
            session_id=self.session_id,
        )
        chat.check()
        return chat


_decoder = msgspec.json.Decoder(ResponsesRequest)
_message_decoder = msgspec.json.Decoder(InputMessage)
_part_decoder = msgspec.json.Decoder(InputPart)
_fields_of = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def decode(body: bytes) -> ResponsesRequest:
    """The request that `body` holds, checked. Raises InvalidRequest that names the field at fault."""
    try:
        request = openai.parse(_decoder, body)
    except InvalidRequest as error:
        if error.code != "invalid_field":
            raise
        fields = _fields_of(body)
        if not known_fields.apply(fields, ResponsesRequest, FIELDS):
            raise
        request = openai.parse(_decoder, msgspec.json.encode(fields))
    request.check()
    return request


def _message(raw: msgspec.Raw, path: str) -> dict[str, Any]:
    fields, kind = _object(raw, path, "message")
    if kind != "message":
        _refuse(f"{path}.type", f"{path}.type is {kind!r}; only messages are supported")
    known_fields.apply(fields, InputMessage, MESSAGE_FIELDS, f"{path}.")
    message = openai.parse(_message_decoder, msgspec.json.encode(fields), path)
    if message.role not in ROLES:
        _refuse(f"{path}.role", f"{path}.role is {message.role!r}; supported: {', '.join(ROLES)}")
    content = message.content
    if not isinstance(content, str):
        content = "".join(_text(part, f"{path}.content[{i}]") for i, part in enumerate(content))
    return {"role": message.role, "content": content}


def _text(raw: msgspec.Raw, path: str) -> str:
    fields, kind = _object(raw, path, None)
    if kind not in (None, *TEXT_PARTS):
        _refuse(f"{path}.type", f"{path}.type is {kind!r}; only text is supported: {', '.join(TEXT_PARTS)}")
    known_fields.apply(fields, InputPart, PART_FIELDS, f"{path}.")
    return openai.parse(_part_decoder, msgspec.json.encode(fields), path).text


def _object(raw: msgspec.Raw, path: str, default: str | None) -> tuple[dict[str, msgspec.Raw], Any]:
    """The fields of an item, and its type."""
    try:
        fields = _fields_of(raw)
        kind = msgspec.json.decode(fields["type"]) if "type" in fields else default
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{path} is not an object: {error}", param=path, code="invalid_type") from None
    return fields, kind


def _refuse(param: str, message: str) -> NoReturn:
    raise InvalidRequest(message, param=param)
