"""Request bodies of OpenAI's Responses API, and what they ask for as a chat completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from jaxinfer.http import known_fields, openai
from jaxinfer.http.formed import formed
from jaxinfer.http.known_fields import Label, Only, Refused, Rule
from jaxinfer.http.response_items import add_items, read_choice, read_tools
from jaxinfer.http.structured import text_format
from jaxinfer.http.turns import Turns
from jaxinfer.types import InvalidRequest

MAX_METADATA = 16
"""Most pairs of `metadata`, as OpenAI has it."""

_NO_EFFORT = "how much the model thinks is not set here, and thought is shown whole"

_SHARED = ("safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier", "moderation")
FIELDS: Mapping[str, Rule] = {
    **{name: known_fields.FIELDS[name] for name in _SHARED},
    "background": Only((False,), "a response runs while its client waits for it"),
    "conversation": Refused("previous_response_id goes on with a conversation"),
    "prompt": Refused("prompts are not stored; give instructions and input"),
    "include": Only(([], ["reasoning.encrypted_content"]), "there is nothing of that kind to include"),
    "reasoning": Only(({}, {"effort": None}, {"effort": None, "summary": None}), _NO_EFFORT),
    "max_tool_calls": Label("it counts tools that the server runs, and there are none"),
    "top_logprobs": Only((0,), "log-probabilities are not shown on this route"),
    "truncation": Only(("disabled",), "a conversation is not cut; start another, or leave out the oldest turns"),
    "context_management": Only(([],), "the context is not edited"),
    "request_id": Label("the reply has an id of its own; X-Request-Id is echoed"),
}


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    include_obfuscation: bool | None = None


class Text(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """How the words of a response are to be."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The body of POST /v1/responses; the fields from top_k on are our own."""

    input: str | list[msgspec.Raw]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    text: Text | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
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
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            shown = f"text.verbosity is {self.text.verbosity!r}"
            _refuse("text.verbosity", f"{shown}; the model has no such setting, so that only 'medium' is accepted")
        if len(self.metadata or {}) > MAX_METADATA:
            _refuse("metadata", f"metadata has {len(self.metadata or {})} pairs; at most {MAX_METADATA} are kept")

    @property
    def text_format(self) -> dict[str, Any]:
        """`text.format`, or what it is where there is none."""
        return {"type": "text"} if self.text is None or self.text.format is None else self.text.format

    def messages(self, earlier: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        """The earlier messages of a chat and those of the input, without the instructions. Raises InvalidRequest."""
        turns = Turns(earlier)
        if isinstance(self.input, str):
            turns.words("user", self.input)
        else:
            add_items(turns, self.input)
        return turns.messages()

    def to_chat(self, messages: Sequence[dict[str, Any]]) -> openai.ChatRequest:
        """The conversation of these messages as a chat completion. Raises InvalidRequest."""
        system = [] if not self.instructions else [openai.Message(role="system", content=self.instructions)]
        tools, choice = read_tools(self.tools), read_choice(self.tool_choice)
        needs_no_tools = choice in ("auto", "none")  # which clients also send where there are none
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
            tools=tools,
            tool_choice=None if tools is None and needs_no_tools else choice,
            parallel_tool_calls=None if tools is None else self.parallel_tool_calls,
        )
        chat.check()
        return formed(chat, text_format(self.text_format, "text.format"))


_decoder = msgspec.json.Decoder(ResponsesRequest)


def decode(body: bytes) -> ResponsesRequest:
    """The request that `body` holds, checked. Raises InvalidRequest that names the field at fault."""
    request = known_fields.parse(_decoder, ResponsesRequest, body, FIELDS)
    request.check()
    return request


def _refuse(param: str, message: str) -> NoReturn:
    raise InvalidRequest(message, param=param)
